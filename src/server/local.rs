//! What the endpoints understand, for callers in the same process: the Python package asks as a client would, without
//! HTTP.

use super::ask::Options;
use super::conversation::{Conversation, read_format};
use super::fields::Fields;
use crate::Result;
use crate::engine::{Constraint, Request};
use crate::text::model::TextModel;
use crate::text::reply::Parser;
use crate::text::stream::TextStream;

/// A conversation that is being answered.
pub struct Chat {
    /// The answer.
    pub text: TextStream,
    /// What tells its parts apart; `None`: it is all content.
    pub parser: Option<Parser>,
    /// The conversation, as the model reads it.
    pub prompt: Vec<u32>,
}

/// Asks for the answer to a conversation. `fields` is a JSON object with those fields of `/v1/chat/completions` that
/// are about it: messages, tools, the form of the answer. `request` says the rest; its prompt and constraint are made
/// here.
///
/// Errors: `Error::Invalid` naming the field.
pub fn chat(model: &TextModel, fields: &str, stops: Vec<String>, request: Request) -> Result<Chat> {
    let mut fields = Fields::parse(fields.as_bytes())?;
    let conversation = Conversation::read(model, &mut fields)?;
    fields.finish()?;
    let options = Options {
        max_tokens: request.max_tokens,
        sampling: request.sampling.clone(),
        ignore_eos: request.ignore_eos,
        stops: Vec::new(),
        n: 1,
        logprobs: request.logprobs,
        steer: Vec::new(),
    };
    let mut ask = conversation.ask(model, options)?;
    let (asked, parser) = ask.choices.pop().expect("one was asked for");
    let prompt = asked.prompt.clone();
    let request = Request { prompt: asked.prompt, constraint: asked.constraint, ..request };
    let mut text = model.complete(request, stops)?;
    if ask.special_tokens {
        text.spell_special_tokens();
    }
    Ok(Chat { text, parser, prompt })
}

/// The form of an answer, from a JSON object with those fields that endpoints have for it: `response_format`,
/// `structured_outputs`.
///
/// Errors: `Error::Invalid` naming the field.
pub fn constraint(model: &TextModel, fields: &str) -> Result<Option<Box<dyn Constraint>>> {
    let mut fields = Fields::parse(fields.as_bytes())?;
    let format = read_format(&mut fields)?;
    fields.finish()?;
    format.map(|(_, grammar)| model.compile(&grammar)).transpose()
}
