//! `moebius chat`: a conversation in the terminal, or questions from a pipe, one per line.

mod commands;
mod conversation;

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use crate::config::MessageChoices;
use crate::engine::{FinishReason, RequestStats};
use crate::hub::demo;
use crate::text::model::TextModel;
use crate::text::stream::Delta;
use crate::{Error, Result, log};
use rustyline::error::ReadlineError;

use super::args::{EngineArgs, SamplingArgs};
use super::stdout_error;
use super::terminal::{self, Status};
use commands::Outcome;
use conversation::ChatHistory;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    #[arg(default_value = demo::NAME)]
    model: String,
    /// System prompt: instructions for the whole conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum tokens of an answer [default: up to the end of the context].
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    content: MessageChoices,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let config = args.content.over(args.engine.to_config()?);
    args.sampling.check()?;
    let status = Status::new();
    let model = TextModel::open(&args.model, &config, &|p| status.loading(p))?;
    drop(status);
    model.template()?;

    let mut conversation = ChatHistory::new(args.system, args.sampling.over(model.sampling()), args.max_tokens);
    // A small runtime waits for the answer and for Ctrl-C.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::Resources(format!("cannot watch for Ctrl-C: {e}")))?;
    let screen = Screen::new();
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        let history = config.cache_dir.map(|dir| dir.join("chat_history"));
        converse(&model, &mut conversation, &runtime, &screen, history.as_deref())
    } else {
        answer_lines(&model, &mut conversation, &runtime, &screen)
    }
}

/// Answers every line of stdin. Only answers go to stdout.
fn answer_lines(
    model: &TextModel,
    conversation: &mut ChatHistory,
    runtime: &tokio::runtime::Runtime,
    screen: &Screen,
) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|source| Error::Io { path: "stdin".into(), source })?;
        if line.trim().is_empty() {
            continue;
        }
        match commands::run(line.trim(), conversation) {
            Outcome::Question => {}
            Outcome::Quit => break,
            Outcome::Print(text) => {
                log::print(&text);
                continue;
            }
        }
        let ending = answer(model, conversation, line, runtime, screen)?;
        screen.write("\n")?;
        if let Ending::Interrupted = ending {
            return Err(Error::Stopped("interrupted".into()));
        }
    }
    Ok(())
}

/// Converses in a terminal with line editing, history and commands.
fn converse(
    model: &TextModel,
    conversation: &mut ChatHistory,
    runtime: &tokio::runtime::Runtime,
    screen: &Screen,
    history: Option<&Path>,
) -> Result<()> {
    let mut editor = Editor::new(history)?;
    let info = model.engine().info();
    screen.note(&format!(
        "{} · {} · context {} · threads {} · {} · ready in {:.1} s",
        info.model,
        info.precisions(),
        info.max_context,
        info.threads,
        info.simd,
        info.ready_s
    ))?;
    screen.note("Ctrl-C stops an answer, Ctrl-D leaves, /help shows the commands.")?;
    let mut interrupted = false;
    loop {
        let line = match editor.read(screen) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) if !interrupted => {
                interrupted = true;
                screen.note("Ctrl-C again, or Ctrl-D, leaves.")?;
                continue;
            }
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => break,
            Err(e) => return Err(Error::Invalid(format!("cannot read from the terminal: {e}"))),
        };
        interrupted = false;
        if line.trim().is_empty() {
            continue;
        }
        match commands::run(line.trim(), conversation) {
            Outcome::Question => {}
            Outcome::Quit => break,
            Outcome::Print(text) => {
                screen.note(&text)?;
                continue;
            }
        }
        match answer(model, conversation, line, runtime, screen) {
            Ok(Ending::Complete(reason, stats)) => {
                let cut = if reason == FinishReason::Length { " · stopped at the token limit" } else { "" };
                screen.write("\n")?;
                screen.note(&(terminal::summary(&stats) + cut))?;
            }
            Ok(Ending::Interrupted) => {
                screen.write("\n")?;
                screen.note("stopped")?;
            }
            // A refused question leaves the conversation as it was.
            Err(e @ Error::Invalid(_)) => screen.note(&format!("error: {e}"))?,
            Err(e) => return Err(e),
        }
    }
    editor.save();
    Ok(())
}

enum Ending {
    Complete(FinishReason, RequestStats),
    Interrupted,
}

/// Asks `question` and prints the answer as it comes; both become part of the conversation.
fn answer(
    model: &TextModel,
    conversation: &mut ChatHistory,
    question: String,
    runtime: &tokio::runtime::Runtime,
    screen: &Screen,
) -> Result<Ending> {
    conversation.ask(question);
    let request = match conversation.request(model) {
        Ok((request, dropped)) => {
            if dropped > 0 {
                let turns = if dropped == 1 { "turn" } else { "turns" };
                screen.aside(&format!("(the context is full: the oldest {dropped} {turns} were dropped)"));
            }
            request
        }
        Err(e) => {
            conversation.take_back();
            return Err(e);
        }
    };
    let mut stream = model.complete(request, Vec::new()).inspect_err(|_| conversation.take_back())?;
    let mut text = String::new();
    let result = runtime.block_on(async {
        loop {
            let step = tokio::select! {
                step = stream.next() => step,
                _ = tokio::signal::ctrl_c() => return Ok(Ending::Interrupted),
            };
            match step.expect("the end comes before nothing")? {
                Delta::Text(piece) => {
                    // Some templates leave a newline before the first word.
                    let piece = if text.is_empty() { piece.trim_start() } else { &piece };
                    text += piece;
                    screen.write(&screen.shown(piece))?;
                }
                Delta::End(reason, stats) => return Ok(Ending::Complete(reason, stats)),
            }
        }
    });
    // An answer that Ctrl-C ended keeps what was printed.
    conversation.answered(text.trim_end().to_string());
    result
}

/// Standard output, as a terminal or a pipe.
struct Screen {
    terminal: bool,
    colours: bool,
}

impl Screen {
    fn new() -> Self {
        let stdout = std::io::stdout();
        Self { terminal: stdout.is_terminal(), colours: terminal::colours(&stdout) }
    }

    fn shown(&self, text: &str) -> String {
        if self.terminal { terminal::printable(text) } else { text.to_string() }
    }

    fn write(&self, text: &str) -> Result<()> {
        let mut stdout = std::io::stdout();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(stdout_error)
    }

    /// Prints a dim line that is not the model's on stdout.
    fn note(&self, text: &str) -> Result<()> {
        self.write(&format!("{}\n", terminal::dim(text, self.colours)))
    }

    /// Prints a dim line on stderr, where it does not mix with piped answers.
    fn aside(&self, text: &str) {
        log::print(&terminal::dim(text, self.colours));
    }
}

/// Line editing with a history file.
struct Editor {
    inner: rustyline::DefaultEditor,
    history: Option<PathBuf>,
}

impl Editor {
    fn new(history: Option<&Path>) -> Result<Self> {
        let config = rustyline::Config::builder()
            .auto_add_history(false)
            .max_history_size(2000)
            .expect("2000 is a size")
            .build();
        let mut inner = rustyline::DefaultEditor::with_config(config)
            .map_err(|e| Error::Invalid(format!("cannot use this terminal: {e}")))?;
        if let Some(path) = history
            && path.is_file()
        {
            // An unreadable history does not keep anyone from chatting.
            let _ = inner.load_history(path);
        }
        Ok(Self { inner, history: history.map(Path::to_path_buf) })
    }

    /// Reads one message; a backslash at the end of a line continues it on the next.
    fn read(&mut self, screen: &Screen) -> std::result::Result<String, ReadlineError> {
        let mut message = String::new();
        loop {
            let prompt = match (message.is_empty(), screen.colours) {
                (true, true) => "\x1b[1;36m>\x1b[0m ",
                (true, false) => "> ",
                (false, _) => "… ",
            };
            message += &self.inner.readline(prompt)?;
            if !message.ends_with('\\') {
                break;
            }
            message.pop();
            message.push('\n');
        }
        if !message.trim().is_empty() {
            self.inner.add_history_entry(message.as_str())?;
            self.save();
        }
        Ok(message)
    }

    fn save(&mut self) {
        // Opening a pipe of that name would block.
        if let Some(path) = self.history.as_ref().filter(|path| path.is_file() || !path.exists()) {
            // A history that cannot be saved, for example in a read-only directory, does not end the chat.
            let _ = self.inner.save_history(path);
        }
    }
}
