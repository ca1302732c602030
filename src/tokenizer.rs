//! Text to token ids and back, with an incremental decoder whose pieces add up to the whole text.

mod bytes;
mod incremental;

use std::path::Path;

use crate::generation_config::{GenerationConfig, read_json};
use crate::{Error, Result};
use bytes::TokenBytes;
pub use incremental::Incremental;

/// A checkpoint's tokenizer and the tokens that end its answers.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos_ids: Vec<u32>,
    vocab_size: usize,
    bytes: TokenBytes,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and the end tokens that the checkpoint's other files name.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(Error::Model(format!(
                "{} has no tokenizer.json: copy it from the model's page, or convert the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
                dir.display()
            )));
        }
        let bytes = moebius_cache::file::read(&path).map_err(Error::io(&path))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Error::Model(format!("{}: not a usable tokenizer: {e}", path.display())))?;
        // Settings of a training run that some files carry: a prompt must arrive whole and unpadded.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::Model(format!("{}: {e}", path.display())))?;

        let mut eos_ids = GenerationConfig::load(dir)?.eos_ids;
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let eos = special_token(&config["eos_token"]).and_then(|token| inner.token_to_id(token));
        eos_ids.extend(eos.filter(|id| !eos_ids.contains(id)));

        let config = read_json(&dir.join("config.json"))?.unwrap_or_default();
        let vocab_size = config["vocab_size"].as_u64().or(config["text_config"]["vocab_size"].as_u64());
        let vocab_size = vocab_size.map_or_else(|| inner.get_vocab_size(true), |n| n as usize);
        let bytes = TokenBytes::of(&inner);
        Ok(Self { inner, eos_ids, vocab_size, bytes })
    }

    /// Tokens that end an answer.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Rows of the model's embedding: every valid token id is smaller.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Token ids of `text`; `add_special` adds what the tokenizer puts around a prompt, such as BOS.
    ///
    /// Special tokens spelled out in the text become their ids either way, as chat templates need.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(|e| Error::Invalid(format!("cannot tokenize the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`; ids the tokenizer does not know give nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|e| Error::Model(format!("cannot decode tokens: {e}")))
    }

    /// Whether a text has `id` in it: unknown ids never are, and special tokens only where they are spelled out.
    pub(crate) fn writes(&self, id: u32, special: bool) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| special || !self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The bytes that a token adds to an answer, special tokens spelled out; nothing for ids the tokenizer does not know.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// The id of a special or added token by its text.
    pub fn added_token(&self, text: &str) -> Option<u32> {
        let added = self.inner.get_added_vocabulary();
        added.get_vocab().get(text).copied()
    }

    /// Special tokens: not part of an answer's text unless asked for.
    pub fn special_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> =
            self.inner.get_added_tokens_decoder().iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// Refuses ids that the model has no embedding for.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(id) => Err(Error::Invalid(format!("token id {id} is outside the vocabulary of {} tokens", self.vocab_size))),
            None => Ok(()),
        }
    }
}

/// A special token as `tokenizer_config.json` writes it: a string, or an object with `content`.
pub(crate) fn special_token(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::Value;

    pub(crate) fn fixture_dir() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/_tokenizer")
    }

    pub(crate) fn reference() -> Value {
        read_json(&fixture_dir().join("tokenizer_reference.json")).unwrap().unwrap()
    }

    pub(crate) fn ids(value: &Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn encodes_and_decodes_as_transformers_does() {
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        for case in reference()["encode"].as_array().unwrap() {
            let (text, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
            assert_eq!(tokenizer.encode(text, true).unwrap(), want, "{text:?}");
            assert_eq!(tokenizer.decode(&want, false).unwrap(), case["decoded"].as_str().unwrap());
            assert_eq!(tokenizer.decode(&want, true).unwrap(), case["decoded_skip_special"].as_str().unwrap());
        }
        assert_eq!(tokenizer.vocab_size(), 512);
        assert_eq!(tokenizer.eos_ids(), [506]);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_named() {
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        assert!(tokenizer.check_ids(&[0, 511]).is_ok());
        let error = tokenizer.check_ids(&[3, 512]).unwrap_err().to_string();
        assert!(error.contains("512"), "{error}");
        assert_eq!(tokenizer.decode(&[512, u32::MAX], true).unwrap(), "");
    }

    #[test]
    fn missing_and_broken_files_are_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("has no tokenizer.json"), "{error}");
        for bytes in [&b""[..], b"{}", b"\xff\xfe", b"[1,2", br#"{"version":"9.9","model":{"type":"Nope"}}"#] {
            std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
            let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
            assert!(error.contains("tokenizer.json") && !error.contains('\n'), "{error}");
        }
    }
}
