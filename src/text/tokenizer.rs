//! Text to token ids and back, with an incremental decoder whose pieces join to the whole text.

mod alike;
mod bytes;
mod cut;
mod guard;
mod incremental;
mod mark;

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::engine::generation_config::GenerationConfig;
use crate::load::Description;
use crate::load::folder::read_json;
use crate::{Error, Result};
use bytes::TokenBytes;
use guard::{Growth, Stages, guarded};
pub use incremental::Incremental;
pub(crate) use mark::{inserted, removed, unused_character};

/// A checkpoint's tokenizer and the tokens that end its answers.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos_ids: Vec<u32>,
    vocab_size: usize,
    bytes: TokenBytes,
    growth: Growth,
    path: PathBuf,
}

/// Maximum bytes of a file; the largest vocabularies take a tenth.
const MAX_FILE_BYTES: u64 = 512 << 20;

impl Tokenizer {
    /// As [`of`](Tokenizer::of), of a folder that nothing else is read of.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::of(&Description::read(dir)?)
    }

    /// Reads `tokenizer.json` and the end tokens that the checkpoint's other files name.
    pub fn of(description: &Description) -> Result<Self> {
        let dir = &description.dir;
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(Error::Model(format!(
                "{} has no tokenizer.json: copy it from the model's page, or convert the tokenizer with \
                 `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
                dir.display()
            )));
        }
        let (mut inner, growth) = read(&path)?;
        // Some files keep settings of training. A prompt must be whole and unpadded.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| unusable(&path, &e.to_string()))?;

        let mut eos_ids = GenerationConfig::of(description).eos_ids;
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let eos = special_token(&config["eos_token"]).and_then(|token| inner.token_to_id(token));
        eos_ids.extend(eos.filter(|id| !eos_ids.contains(id)));

        let config = &description.config;
        let vocab_size = config["vocab_size"].as_u64().or(config["text_config"]["vocab_size"].as_u64());
        let vocab_size = vocab_size.map_or_else(|| inner.get_vocab_size(true), |n| n as usize);
        let bytes = TokenBytes::of(&inner);
        Ok(Self { inner, eos_ids, vocab_size, bytes, growth, path })
    }

    /// Tokens that end an answer.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Rows of the model's embedding. Every valid token id is smaller.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Token ids of `text`. `add_special` adds the tokens that the tokenizer puts around a prompt, such as BOS.
    ///
    /// Special tokens spelled out in the text become their ids either way, as chat templates need.
    ///
    /// Errors: `Error::Invalid` for a text that is too long for the tokenizer, or refused by it; `Error::Model` when
    /// its file makes it panic.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_with(text, || self.inner.encode_fast(text, add_special))
    }

    /// Token ids of `text` in which no added token crosses one of `cuts`, which are ascending byte offsets. Other ids
    /// are as without cuts.
    ///
    /// Adds nothing around the text. Errors: as [`Tokenizer::encode`].
    pub(crate) fn encode_cut(&self, text: &str, cuts: &[usize]) -> Result<Vec<u32>> {
        match cuts {
            [] => self.encode(text, false),
            _ => self.encode_with(text, || cut::encode(&self.inner, text, cuts)),
        }
    }

    fn encode_with(
        &self,
        text: &str,
        encode: impl FnOnce() -> tokenizers::Result<tokenizers::Encoding>,
    ) -> Result<Vec<u32>> {
        if !self.growth.allows(text.len()) {
            return Err(Error::Invalid(format!(
                "this text of {} bytes is too long for the model's tokenizer, which may lengthen it several times: \
                 shorten it",
                text.len()
            )));
        }
        let encoding = guarded(encode).ok_or_else(|| unusable(&self.path, "it fails on this text"))?;
        Ok(encoding.map_err(|e| Error::Invalid(format!("cannot tokenize the text: {e}")))?.get_ids().to_vec())
    }

    /// Text of `ids`. Unknown ids give no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let text = guarded(|| self.inner.decode(ids, skip_special))
            .ok_or_else(|| unusable(&self.path, "it fails on these tokens"))?;
        text.map_err(|e| Error::Model(format!("cannot decode tokens: {e}")))
    }

    /// Whether `id` shows in text: unknown ids never do, and special tokens only if they are spelled out.
    pub(crate) fn writes(&self, id: u32, special: bool) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| special || !self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The bytes that a token adds to an answer, with special tokens spelled out. Empty for unknown ids.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// The id of a special or added token by its text.
    pub fn added_token(&self, text: &str) -> Option<u32> {
        let added = self.inner.get_added_vocabulary();
        added.get_vocab().get(text).copied()
    }

    /// Special and added tokens: their texts, and whether they are special.
    pub fn added_tokens(&self) -> Vec<(String, bool)> {
        self.inner.get_added_tokens_decoder().into_values().map(|token| (token.content, token.special)).collect()
    }

    /// Special tokens, which are not part of an answer's text unless spelled out.
    pub fn special_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self
            .inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, _)| id)
            .collect();
        ids.sort_unstable();
        ids
    }

    /// Refuses ids without an embedding.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(id) => {
                Err(Error::Invalid(format!("token id {id} is outside the vocabulary of {} tokens", self.vocab_size)))
            }
            None => Ok(()),
        }
    }
}

/// Reads an untrusted file, and bounds how much it may lengthen a text.
fn read(path: &Path) -> Result<(tokenizers::Tokenizer, Growth)> {
    let mut file = moebius_cache::file::open(path).map_err(Error::io(path))?;
    let length = file.metadata().map_err(Error::io(path))?.len();
    if length > MAX_FILE_BYTES {
        return Err(unusable(path, &format!("it has {} MiB", length >> 20)));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(Error::io(path))?;
    let not_one = |e: &dyn std::fmt::Display| unusable(path, &e.to_string());
    let stages: Stages = serde_json::from_slice(&bytes).map_err(|e| not_one(&e))?;
    // The normalizer already runs on the added tokens while the file is read, so it is checked before.
    let read = || {
        let growth = Growth::of(&stages).map_err(|e| not_one(&e))?;
        let inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| not_one(&e))?;
        Ok((inner, growth))
    };
    guarded(read).unwrap_or_else(|| Err(unusable(path, "a part of it is broken")))
}

fn unusable(path: &Path, why: &str) -> Error {
    let why = why.lines().next().unwrap_or_default();
    Error::Model(format!(
        "{}: not a usable tokenizer: {why}: download the file again from the model's own page",
        path.display()
    ))
}

/// A special token as `tokenizer_config.json` writes it: a string, or an object with `content`.
pub(crate) fn special_token(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

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

    /// The tests' tokenizer with some parts of its file replaced.
    fn load_with(parts: Value) -> Result<Tokenizer> {
        let mut file = read_json(&fixture_dir().join("tokenizer.json")).unwrap().unwrap();
        file.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path())
    }

    #[test]
    fn hostile_files_are_one_sentence() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let many = replace(json!({"String": "e"}), &"e".repeat(1000));
        for parts in [
            json!({"normalizer": replace(json!({"String": ""}), "x")}),
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
            json!({"normalizer": {"type": "Sequence", "normalizers": [many, many, many, many]}}),
            json!({"decoder": {"type": "Sequence", "decoders": [many, many, many, many]}}),
            json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(".repeat(100_000)},
                "behavior": "Isolated", "invert": false}}),
            json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((a{900}){900}){900}"},
                "behavior": "Isolated", "invert": false}}),
            json!({"model": {"type": "BPE", "vocab": {"é": 0, "a": 1}, "merges": [["a", "é"]],
                "continuing_subword_prefix": "x"}}),
        ] {
            let said = parts.to_string().chars().take(100).collect::<String>();
            let error = load_with(parts).err().expect(&said).to_string();
            assert!(
                error.contains("tokenizer.json: not a usable tokenizer")
                    && error.contains("own page")
                    && !error.contains('\n'),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_that_fails_on_a_text_or_token_is_one_sentence() {
        // An expression that matches nothing makes the library's replacing run over the text's end.
        let nothing = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y"});
        let tokenizer = load_with(json!({"normalizer": nothing})).unwrap();
        assert!(tokenizer.encode("", true).unwrap().is_empty());
        let error = tokenizer.encode("a", true).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: not a usable tokenizer: it fails on this text"), "{error}");
        // Backtracking is bounded: the rest of such a text is one word.
        let split =
            json!({"type": "Split", "pattern": {"Regex": "(?:a(?=a)|a)+b"}, "behavior": "Isolated", "invert": false});
        let ids = load_with(json!({"pre_tokenizer": split})).unwrap().encode(&"a".repeat(5000), true).unwrap();
        assert_eq!(ids.len(), 5000);
        // A text that would become a thousand times as much.
        let many = json!({"type": "Replace", "pattern": {"String": "e"}, "content": "e".repeat(1000)});
        let error =
            load_with(json!({"normalizer": many})).unwrap().encode(&"e".repeat(1 << 20), true).unwrap_err().to_string();
        assert!(error.contains("too long for the model's tokenizer"), "{error}");
    }

    /// Words without end, which no pre-tokenizer cuts, and cuts at each character.
    #[test]
    fn every_byte_of_a_text_costs_about_the_same() {
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        for unit in ["1", "a", " ", "\n", "!", "e\u{301}", " 1", "<|end|>"] {
            let seconds = |bytes: usize| {
                let text = unit.repeat(bytes / unit.len());
                let begun = std::time::Instant::now();
                tokenizer.encode(&text, false).unwrap();
                begun.elapsed().as_secs_f64()
            };
            let ratio = (0..3).map(|_| seconds(256_000) / seconds(16_000)).fold(f64::INFINITY, f64::min);
            assert!(ratio < 80.0, "{unit:?}: sixteen times the text takes {ratio:.0} times as long");
        }
    }
}
