//! An engine with its text side, which `chat`, `generate` and the server use.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::Value;

use crate::config::EngineConfig;
use crate::engine::generation_config::GenerationConfig;
use crate::engine::{self, Constraint, EngineHandle, Request, SamplingParams};
use crate::load::{self, Description, LoadProgress, ModelFolder};
use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::text::content::{Markers, PromptText};
use crate::text::grammar::{Grammar, Grammars};
use crate::text::history::History;
use crate::text::reply::Syntax;
use crate::text::stream::TextStream;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result, hub};

/// A running model with its tokenizer, chat template and default sampling. Cheap to clone.
#[derive(Clone)]
pub struct TextModel {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    markers: Option<Arc<Markers>>,
    syntax: Arc<Syntax>,
    history: Arc<OnceLock<History>>, // known when a conversation first needs it
    grammars: Arc<OnceLock<Result<Grammars>>>,
    long_text: Arc<Mutex<()>>,
    sampling: SamplingParams,
}

impl TextModel {
    /// Finds or downloads `model`, reads its text side, and starts its engine. `report` gets the progress.
    pub fn open(model: &str, config: &EngineConfig, report: &(dyn Fn(LoadProgress<'_>) + Sync)) -> Result<Self> {
        let description = Description::read(&hub::resolve(model, &load::cache_dir(config)?)?)?;
        // A missing tokenizer is found before minutes of conversion, not after.
        let mut text = TextSide::of(&description)?;
        if config.trust_content {
            text.trust_content();
        }
        let mut folder = ModelFolder::open(model, description)?;
        if folder.model.lacks_kinds() {
            folder.model.set_kinds(text.tokenizer.alike()?)?;
        }
        Ok(Self::new(engine::start(&folder, config, report)?, text))
    }

    /// Joins a running engine with the text side of its checkpoint.
    pub fn new(engine: EngineHandle, text: TextSide) -> Self {
        let source = text.template.as_ref().map_or("", ChatTemplate::source);
        let syntax = Syntax::of(source);
        if !syntax.calls_tools() && names_variable(source, "tools") {
            tracing::warn!(
                "the model's chat template gives it tools, but how it writes calls is not known: calls come as text, \
                 and 'tool_choice' cannot demand them"
            );
        }
        Self {
            engine,
            syntax: Arc::new(syntax),
            tokenizer: Arc::new(text.tokenizer),
            template: text.template.map(Arc::new),
            markers: text.markers.map(Arc::new),
            history: Arc::default(),
            grammars: Arc::default(),
            long_text: Arc::default(),
            sampling: text.sampling,
        }
    }

    /// The engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// The checkpoint's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Held while a long text is tokenized, which takes more than a hundred times its size.
    pub(crate) fn long_text(&self) -> &Mutex<()> {
        &self.long_text
    }

    /// The default sampling parameters of the model's authors; greedy if they give none.
    pub fn sampling(&self) -> &SamplingParams {
        &self.sampling
    }

    /// Token ids of the prompt that the model's chat template makes of `messages`.
    ///
    /// Errors: `Error::Invalid` without a template, or when it refuses the conversation.
    pub fn chat_prompt(&self, messages: &[Value], options: &RenderOptions) -> Result<Vec<u32>> {
        self.encode(&self.render(messages, options)?)
    }

    /// Brings past turns of `messages`, as clients send them, into the form that the chat template reads.
    ///
    /// Errors: as [`ChatTemplate::render`], but for a refusal.
    pub fn adapt_history(&self, messages: &mut [Value]) -> Result<()> {
        if !messages.iter().any(|message| message["role"] == "assistant") {
            return Ok(());
        }
        let history = match self.history.get() {
            Some(history) => *history,
            None => {
                let probed = History::of(self.template()?)?;
                *self.history.get_or_init(|| probed)
            }
        };
        history.adapt(messages);
        Ok(())
    }

    /// The text of that prompt, with the places that the messages wrote.
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<PromptText> {
        match &self.markers {
            Some(markers) => markers.render(self.template()?, messages, options),
            None => self.template()?.render(messages, options).map(PromptText::from),
        }
    }

    /// Appends the beginning of the answer to a prompt.
    pub fn push_answer(&self, prompt: &mut PromptText, text: &str) {
        match &self.markers {
            Some(markers) => markers.push_answer(prompt, text),
            None => prompt.push(text),
        }
    }

    /// Token ids of a prompt. Special tokens spelled out in messages are plain text, unless content is trusted.
    pub fn encode(&self, prompt: &PromptText) -> Result<Vec<u32>> {
        match &self.markers {
            Some(markers) => markers.encode(&self.tokenizer, prompt),
            None => self.tokenizer.encode(prompt.as_str(), false),
        }
    }

    /// The model's chat template. Errors: `Error::Invalid` when the model has none.
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_deref().ok_or_else(|| {
            Error::Invalid(format!(
                "{} has no chat template: complete plain text with `generate` or /v1/completions, or put a \
                 chat_template.jinja next to its config.json",
                self.engine.info().model
            ))
        })
    }

    /// Whether its chat template uses a variable of this name.
    pub fn has_template_variable(&self, name: &str) -> bool {
        names_variable(self.template.as_deref().map_or("", ChatTemplate::source), name)
    }

    /// How its replies mark reasoning and calls of tools.
    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }

    /// A constraint that holds an answer to `grammar`. The first one takes a while because it sorts the vocabulary.
    ///
    /// Errors: `Error::Invalid` when the grammar is malformed or too large.
    pub fn compile(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>> {
        match self.grammars.get_or_init(|| Grammars::new(&self.tokenizer)) {
            Ok(grammars) => grammars.compile(grammar),
            Err(error) => Err(Error::Model(error.to_string())),
        }
    }

    /// Continues a prompt; dropping the stream cancels it.
    ///
    /// Errors: `Error::Invalid` for a token outside the vocabulary, a sampling parameter out of range, an empty stop
    /// string, or a prompt that does not fit.
    pub fn complete(&self, request: Request, stops: Vec<String>) -> Result<TextStream> {
        self.tokenizer.check_ids(&request.prompt)?;
        check_sampling(&request.sampling)?;
        let prompt_tokens = request.prompt.len();
        TextStream::new(self.engine.submit(request)?, self.tokenizer.clone(), stops, prompt_tokens)
    }
}

/// Whether a template's source has a variable of this name.
fn names_variable(source: &str, name: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    source
        .match_indices(name)
        .any(|(at, _)| !source[..at].ends_with(word) && !source[at + name.len()..].starts_with(word))
}

/// The text side of a checkpoint: tokenizer, chat template, default sampling parameters.
pub struct TextSide {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    markers: Option<Markers>,
    sampling: SamplingParams,
}

impl TextSide {
    /// As [`of`](TextSide::of), of a folder that nothing else is read of.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::of(&Description::read(dir)?)
    }

    /// Reads it from a model's folder.
    pub fn of(description: &Description) -> Result<Self> {
        // The template first: it refuses files that are too large to be read, and the tokenizer reads some of them too.
        let model_type = description.config["model_type"].as_str().unwrap_or_default();
        let template = ChatTemplate::of(&description.dir, model_type)?;
        let tokenizer = Tokenizer::of(description)?;
        let markers = template.as_ref().map(|template| Markers::of(&tokenizer, template.source())).transpose()?;
        Ok(Self { tokenizer, template, markers, sampling: GenerationConfig::of(description).sampling })
    }

    /// Treats special tokens spelled out in messages as the template's own.
    pub fn trust_content(&mut self) {
        self.markers = None;
    }
}

/// Checks sampling parameters. Errors: `Error::Invalid` names the parameter and its range.
pub fn check_sampling(sampling: &SamplingParams) -> Result<()> {
    let rules = [
        ("temperature", sampling.temperature, 0.0..=100.0, "from 0 (greedy) to 100"),
        ("top_p", sampling.top_p, f32::MIN_POSITIVE..=1.0, "above 0 and at most 1"),
        ("min_p", sampling.min_p, 0.0..=1.0, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, f32::MIN_POSITIVE..=100.0, "above 0 and at most 100"),
    ];
    for (name, value, range, words) in rules {
        if !range.contains(&value) {
            return Err(Error::Invalid(format!("{name} is {value}: it must be {words}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_out_of_range_is_named() {
        assert!(check_sampling(&SamplingParams::default()).is_ok());
        for (params, name) in [
            (SamplingParams { temperature: f32::NAN, ..Default::default() }, "temperature"),
            (SamplingParams { temperature: -1.0, ..Default::default() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..Default::default() }, "top_p"),
            (SamplingParams { min_p: 1.5, ..Default::default() }, "min_p"),
            (SamplingParams { repetition_penalty: f32::INFINITY, ..Default::default() }, "repetition_penalty"),
        ] {
            assert!(check_sampling(&params).unwrap_err().to_string().starts_with(name));
        }
    }
}
