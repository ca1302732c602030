//! `moebius generate`: continues one prompt.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;

use crate::config::MessageChoices;
use crate::engine::{FinishReason, Request, RequestStats};
use crate::text::chat_template::RenderOptions;
use crate::text::model::TextModel;
use crate::text::stream::Delta;
use crate::{Error, Result, log};
use serde_json::json;

use super::args::{EngineArgs, SamplingArgs, read_text, read_tokens};
use super::terminal::{self, AnswerRates, Status};
use super::{print_line, stdout_error};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    model: String,
    /// Text to continue; `-`, or no text when stdin is a pipe, reads stdin.
    #[arg(conflicts_with_all = ["file", "tokens_file"])]
    prompt: Option<String>,
    /// Read the prompt from a text file, without its last newline.
    #[arg(long, value_name = "F", conflicts_with = "tokens_file")]
    file: Option<PathBuf>,
    /// Read the prompt from a JSON array of token ids.
    #[arg(long, value_name = "F.json", conflicts_with = "chat")]
    tokens_file: Option<PathBuf>,
    /// Maximum tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
    /// Continue after an end token.
    #[arg(long)]
    ignore_eos: bool,
    /// Stop before this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Format the prompt as a user's message with the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Print one JSON object with tokens, text, finish_reason and timings.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    content: MessageChoices,
    #[command(flatten)]
    engine: EngineArgs,
}

enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

pub(crate) fn run(args: Args) -> Result<()> {
    let config = args.content.clone().over(args.engine.to_config()?);
    args.sampling.check()?;
    let prompt = read_prompt(&args)?;
    let status = Status::new();
    let model = TextModel::open(&args.model, &config, &|p| status.loading(p))?;
    drop(status);

    let prompt = match prompt {
        PromptInput::Tokens(tokens) => tokens,
        PromptInput::Text(text) if args.chat => {
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            model.chat_prompt(&[json!({"role": "user", "content": text})], &options)?
        }
        PromptInput::Text(text) => model.tokenizer().encode(&text, true)?,
    };
    let request = Request {
        prompt,
        max_tokens: Some(args.max_tokens),
        sampling: args.sampling.over(model.sampling()),
        ignore_eos: args.ignore_eos,
        ..Request::default()
    };
    let mut answer = model.complete(request, args.stop)?;

    let mut stdout = std::io::stdout();
    let sanitize = stdout.is_terminal();
    let mut text = String::new();
    let (reason, stats) = loop {
        match answer.next_blocking().expect("the end comes before nothing")? {
            Delta::End(reason, stats) => break (reason, stats),
            Delta::Text(piece) if args.json => text += &piece,
            Delta::Text(piece) => {
                let piece = if sanitize { terminal::printable(&piece) } else { piece };
                stdout.write_all(piece.as_bytes()).and_then(|()| stdout.flush()).map_err(stdout_error)?;
            }
        }
    };
    if args.json {
        let object = json!({
            "tokens": answer.tokens(),
            "text": text,
            "finish_reason": finish_reason(reason),
            "timings": timings(&stats, model.engine().info().ready_s),
        });
        return print_line(&object.to_string());
    }
    print_line("")?;
    if std::io::stderr().is_terminal() {
        log::print(&terminal::dim(&terminal::summary(&stats), terminal::colours(&std::io::stderr())));
    }
    Ok(())
}

fn read_prompt(args: &Args) -> Result<PromptInput> {
    if let Some(path) = &args.tokens_file {
        return read_tokens(path).map(PromptInput::Tokens);
    }
    if let Some(path) = &args.file {
        return read_text(path).map(|text| PromptInput::Text(without_last_newline(text)));
    }
    match args.prompt.as_deref() {
        Some("-") => {}
        Some(text) => return Ok(PromptInput::Text(text.into())),
        None if std::io::stdin().is_terminal() => {
            return Err(Error::Invalid(
                "no prompt given: pass it as an argument, with --file, with --tokens-file, or through a pipe".into(),
            ));
        }
        None => {}
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).map_err(|source| Error::Io { path: "stdin".into(), source })?;
    let text = String::from_utf8(bytes).map_err(|_| Error::Invalid("stdin is not UTF-8 text".into()))?;
    Ok(PromptInput::Text(without_last_newline(text)))
}

/// Editors and `echo` end a file with a newline that is not meant as part of the prompt.
fn without_last_newline(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
    }
    text
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn timings(stats: &RequestStats, ready_s: f64) -> serde_json::Value {
    let rates = AnswerRates::of(stats);
    json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "ready_s": ready_s,
        "prefill_s": stats.prefill.as_secs_f64(),
        "decode_s": stats.decode.as_secs_f64(),
        "prefill_tok_per_s": rates.prefill_tok_per_s,
        "decode_tok_per_s": rates.decode_tok_per_s,
        "decode_gb_per_s": rates.decode_gb_per_s,
    })
}
