//! Text of requests to token ids. A tokenizer takes more than a hundred bytes for each byte of a text, so a long one is
//! looked at in pieces first.

use std::sync::PoisonError;

use super::error::ApiError;
use crate::load::LEAST_BYTES;
use crate::machine::topology;
use crate::text::content::PromptText;
use crate::text::model::TextModel;
use crate::text::tokenizer::Tokenizer;

type Result<T> = std::result::Result<T, ApiError>;

/// Bytes that a tokenizer takes for one of a text: what it was, where it came from, and that again for each of its
/// words.
const ENCODING: u64 = 140;

/// Texts above this are tokenized one at a time.
pub(super) const ENCODED_AT_ONCE: u64 = 256 << 10;

/// Bytes of a text that are tokenized by themselves to see how many tokens it has.
const PIECE_BYTES: usize = 16 << 10;

/// Bytes of a token of ordinary text at most: a text that is shorter than so many for each token of the context may
/// well fit.
const TOKEN_BYTES: usize = 8;

/// Bytes of a text that `/tokenize` takes, if the context is not larger.
const TOKENIZED_BYTES: usize = 1 << 20;

/// Memory that tokenizing a text of so many bytes takes.
pub(super) fn encoding_bytes(text: u64) -> u64 {
    ENCODING * text
}

/// Token ids of a prompt, which the field `param` gave.
///
/// Errors: it cannot fit the context, which is told before all of it is tokenized, or the memory.
pub(super) fn encode_prompt(model: &TextModel, param: &str, text: &str, add_special: bool) -> Result<Vec<u32>> {
    check_context(model, param, text)?;
    encode(model, text, || model.tokenizer().encode(text, add_special))
}

/// Token ids of a conversation, which the field `param` gave. Errors: as [`encode_prompt`].
pub(super) fn encode_conversation(model: &TextModel, param: &str, prompt: &PromptText) -> Result<Vec<u32>> {
    check_context(model, param, prompt.as_str())?;
    encode(model, prompt.as_str(), || model.encode(prompt))
}

/// Refuses what cannot fit the context.
fn check_context(model: &TextModel, param: &str, text: &str) -> Result<()> {
    let limit = model.engine().info().max_context;
    if text.len() > PIECE_BYTES.max(TOKEN_BYTES * limit)
        && let Some(least) = more_tokens_than(limit, model.tokenizer(), text)?
    {
        let message = format!(
            "This model's context holds {limit} tokens, answer included; the prompt has more than {least} tokens"
        );
        return Err(ApiError::context_length(message, param));
    }
    Ok(())
}

/// Token ids of a text that nobody has to answer.
///
/// Errors: it is too long for one request, or for the memory.
pub(super) fn encode_text(model: &TextModel, param: &str, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let most = TOKENIZED_BYTES.max(TOKEN_BYTES * model.engine().info().max_context);
    if text.len() > most {
        let message =
            format!("'{param}' has {} bytes and {most} are tokenized at a time: send it in parts", text.len());
        return Err(ApiError::bad_field(param, message));
    }
    encode(model, text, || model.tokenizer().encode(text, add_special))
}

fn encode(model: &TextModel, text: &str, tokenize: impl FnOnce() -> crate::Result<Vec<u32>>) -> Result<Vec<u32>> {
    let long = text.len() as u64 > ENCODED_AT_ONCE;
    // What takes half a GiB for a moment is done by one after the other, so that what is free now is free for this one.
    let _turn = long.then(|| model.long_text().lock().unwrap_or_else(PoisonError::into_inner));
    if long {
        let needed = encoding_bytes(text.len() as u64);
        let free = topology::available_bytes().saturating_sub(LEAST_BYTES) / 2;
        if needed > free {
            let message = format!(
                "Tokenizing {} KiB of text takes {} MiB of memory and {} are free for it: send less text, or try \
                 again later",
                text.len() >> 10,
                needed >> 20,
                free >> 20
            );
            return Err(ApiError::unavailable(&message, Some(30)));
        }
    }
    Ok(tokenize()?)
}

/// A number of tokens above `limit` that a text has at least, if it has; tokenizes no more of it than tells.
///
/// A cut changes the tokens beside it, a few of the thousands of a piece; an eighth of them all is far more than that.
fn more_tokens_than(limit: usize, tokenizer: &Tokenizer, text: &str) -> Result<Option<usize>> {
    let (mut rest, mut tokens) = (text, 0);
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        tokens += tokenizer.encode(piece, false)?.len();
        rest = after;
        if tokens - tokens / 8 > limit {
            return Ok(Some(tokens - tokens / 8));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::fixture_dir;

    #[test]
    fn what_cannot_fit_is_told_from_a_part_and_what_may_is_not_refused() {
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        for word in ["the sea ", "é", "a", "\u{1F600}", "  \n", "12345", "日本"] {
            let text = word.repeat(400_000 / word.len());
            let tokens = tokenizer.encode(&text, false).unwrap().len();
            assert_eq!(more_tokens_than(tokens, &tokenizer, &text).unwrap(), None, "{word:?}");
            let least = more_tokens_than(tokens / 2, &tokenizer, &text).unwrap().unwrap();
            assert!(least > tokens / 2 && least <= tokens, "{word:?}: {least} of {tokens}");
        }
    }
}
