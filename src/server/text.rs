//! Text of requests to token ids. A tokenizer takes more than a hundred bytes per byte of text, so a long text is first
//! tokenized in pieces to see whether it fits.

use std::sync::PoisonError;

use super::error::ApiError;
use crate::load::LEAST_BYTES;
use crate::machine::topology;
use crate::text::content::PromptText;
use crate::text::model::TextModel;
use crate::text::tokenizer::Tokenizer;

type Result<T> = std::result::Result<T, ApiError>;

/// Bytes that a tokenizer takes per byte of text: the text, its offsets, and both again for each word.
const ENCODING: u64 = 140;

/// Longer texts are tokenized one at a time.
pub(super) const ENCODED_AT_ONCE: u64 = 256 << 10;

/// Bytes of a piece that is tokenized to count tokens.
const PIECE_BYTES: usize = 16 << 10;

/// Maximum bytes per token of ordinary text. A text with fewer bytes per token of the context may fit.
const TOKEN_BYTES: usize = 8;

/// Maximum bytes of a text for `/tokenize`, unless the context is larger.
const TOKENIZED_BYTES: usize = 1 << 20;

/// Memory to tokenize a text of `bytes` bytes.
pub(super) fn encoding_bytes(text: u64) -> u64 {
    ENCODING * text
}

/// Token ids of a prompt, which the field `param` gave.
///
/// Errors: the prompt does not fit the context, which is found before all of it is tokenized, or the memory.
pub(super) fn encode_prompt(model: &TextModel, param: &str, text: &str, add_special: bool) -> Result<Vec<u32>> {
    check_context(model, param, text)?;
    encode(model, text, || model.tokenizer().encode(text, add_special))
}

/// Token ids of a conversation, which the field `param` gave. Errors: as [`encode_prompt`].
pub(super) fn encode_conversation(model: &TextModel, param: &str, prompt: &PromptText) -> Result<Vec<u32>> {
    check_context(model, param, prompt.as_str())?;
    encode(model, prompt.as_str(), || model.encode(prompt))
}

/// Refuses a text that does not fit the context.
fn check_context(model: &TextModel, param: &str, text: &str) -> Result<()> {
    let limit = model.engine().info().max_context;
    if text.len() > PIECE_BYTES.max(TOKEN_BYTES * limit)
        && let Some(least) = more_tokens_than(limit, model.tokenizer(), text)?
    {
        let message = format!(
            "This model's context holds {limit} tokens including the answer, and the prompt has more than {least} \
             tokens"
        );
        return Err(ApiError::context_length(message, param));
    }
    Ok(())
}

/// Token ids of a text for `/tokenize`.
///
/// Errors: the text is too long for one request, or for the memory.
pub(super) fn encode_text(model: &TextModel, param: &str, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let most = TOKENIZED_BYTES.max(TOKEN_BYTES * model.engine().info().max_context);
    if text.len() > most {
        let message = format!("'{param}' has {} bytes, and the limit is {most}: send it in parts", text.len());
        return Err(ApiError::bad_field(param, message));
    }
    encode(model, text, || model.tokenizer().encode(text, add_special))
}

fn encode(model: &TextModel, text: &str, tokenize: impl FnOnce() -> crate::Result<Vec<u32>>) -> Result<Vec<u32>> {
    let long = text.len() as u64 > ENCODED_AT_ONCE;
    // Texts that take half a GiB for a moment go one after another, so that the free memory seen here stays free.
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

/// A lower bound of a text's tokens, if it is above `limit`. Tokenizes only as much as needed.
///
/// A cut changes only a few of the thousands of tokens of a piece; an eighth is a generous margin.
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
