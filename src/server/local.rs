//! The chat endpoint for callers in this process: the Python package asks as a client would, without HTTP.

use super::ask::RequestOptions;
use super::conversation::Conversation;
use super::fields::RequestFields;
use super::format::read_format;
use crate::Result;
use crate::engine::{Constraint, Request};
use crate::text::model::TextModel;
use crate::text::reply::Parser;
use crate::text::stream::TextStream;

/// A running answer to a conversation.
pub struct Chat {
    /// The answer.
    pub text: TextStream,
    /// The parser of its parts. `None`: all of it is content.
    pub parser: Option<Parser>,
    /// Token ids of the conversation.
    pub prompt: Vec<u32>,
}

/// Answers a conversation. `fields` is a JSON object with the fields of `/v1/chat/completions` for messages, tools and
/// the format of the answer. `request` has the other options; this function fills in its prompt and constraint.
///
/// Errors: `Error::Invalid` naming the field.
pub fn chat(model: &TextModel, fields: &str, stops: Vec<String>, request: Request) -> Result<Chat> {
    let mut fields = RequestFields::parse(fields.as_bytes())?;
    let conversation = Conversation::read(model, &mut fields)?;
    fields.finish()?;
    let options = RequestOptions {
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

/// The format of an answer, from a JSON object with `response_format` or `structured_outputs`.
///
/// Errors: `Error::Invalid` naming the field.
pub fn constraint(model: &TextModel, fields: &str) -> Result<Option<Box<dyn Constraint>>> {
    let mut fields = RequestFields::parse(fields.as_bytes())?;
    let format = read_format(&mut fields)?;
    fields.finish()?;
    format.map(|(_, grammar)| model.compile(&grammar)).transpose()
}
