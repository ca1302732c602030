//! The turns of a chat, dropped from the oldest on when they do not fit the context.

use crate::engine::{Request, SamplingParams};
use crate::text::chat_template::RenderOptions;
use crate::text::model::TextModel;
use crate::{Error, Result};
use serde_json::{Value, json};

/// Context kept free for an answer, where the context is large enough.
const ROOM_FOR_ANSWER: usize = 512;

/// Questions, answers, and the parameters of the next answer.
pub(crate) struct ChatHistory {
    pub(crate) system: Option<String>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_tokens: Option<usize>,
    turns: Vec<Value>, // user, assistant, user, ...
}

impl ChatHistory {
    pub(crate) fn new(system: Option<String>, sampling: SamplingParams, max_tokens: Option<usize>) -> Self {
        Self { system, sampling, max_tokens, turns: Vec::new() }
    }

    pub(crate) fn ask(&mut self, question: String) {
        self.turns.push(json!({"role": "user", "content": question}));
    }

    pub(crate) fn answered(&mut self, answer: String) {
        self.turns.push(json!({"role": "assistant", "content": answer}));
    }

    /// Removes the last question.
    pub(crate) fn take_back(&mut self) {
        self.turns.pop();
    }

    pub(crate) fn clear(&mut self) {
        self.turns.clear();
    }

    /// The request for the next answer, and the number of old turns dropped to make it fit.
    pub(crate) fn request(&mut self, model: &TextModel) -> Result<(Request, usize)> {
        let context = model.engine().info().max_context;
        let limit = context.saturating_sub(ROOM_FOR_ANSWER.min(context / 4));
        let mut dropped = 0;
        let prompt = loop {
            let prompt = self.prompt(model, 2 * dropped)?;
            if prompt.len() <= limit {
                break prompt;
            }
            if 2 * dropped + 2 >= self.turns.len() {
                return Err(Error::Invalid(format!(
                    "this message alone has {} tokens, and the context holds {context} with the answer: shorten the \
                     message or raise --max-context",
                    prompt.len()
                )));
            }
            dropped += 1;
        };
        self.turns.drain(..2 * dropped);
        Ok((
            Request { prompt, max_tokens: self.max_tokens, sampling: self.sampling.clone(), ..Request::default() },
            dropped,
        ))
    }

    fn prompt(&self, model: &TextModel, skip: usize) -> Result<Vec<u32>> {
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        model.chat_prompt(&self.messages(skip), &options)
    }

    fn messages(&self, skip: usize) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.turns[skip..].iter().cloned()).collect()
    }

    /// The whole conversation as Markdown.
    pub(crate) fn transcript(&self) -> String {
        let part = |message: &Value| {
            let field = |name: &str| message[name].as_str().unwrap_or_default().to_string();
            format!("**{}**\n\n{}\n", field("role"), field("content"))
        };
        self.messages(0).iter().map(part).collect::<Vec<_>>().join("\n")
    }
}
