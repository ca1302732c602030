//! Text to token ids and back, with an incremental decoder whose pieces add up to the whole text.

use std::path::Path;

use crate::generation_config::{GenerationConfig, read_json};
use crate::{Error, Result};

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

/// What each token writes: token `id` has `text[ends[id - 1]..ends[id]]`.
struct TokenBytes {
    text: Vec<u8>,
    ends: Vec<u32>,
}

impl TokenBytes {
    /// Asks the tokenizer's decoder how it spells bytes: GPT-2's alphabet, `<0xNN>`, or `▁` for a space.
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let spelling = Spelling::of(&decoder);
        let vocab = tokenizer.get_vocab(true);
        let mut tokens: Vec<(u32, String)> = vocab.into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let added = tokenizer.get_added_tokens_decoder();
        let mut out = Self { text: Vec::new(), ends: Vec::new() };
        for (id, token) in tokens {
            // A hole in the ids writes nothing; an id far beyond all others is a broken file, not a reason to fill memory.
            if (id as usize) < out.ends.len() || id as usize > out.ends.len() + (1 << 22) {
                continue;
            }
            out.ends.resize(id as usize, out.text.len() as u32);
            match added.contains_key(&id) {
                true => out.text.extend_from_slice(token.as_bytes()),
                false => spelling.write(&token, &mut out.text),
            }
            out.ends.push(out.text.len() as u32);
        }
        out
    }

    fn get(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        &self.text[start as usize..end as usize]
    }
}

/// How a vocabulary spells bytes.
#[derive(Default)]
struct Spelling {
    alphabet: bool,      // GPT-2's: one character per byte
    byte_tokens: bool,   // `<0xNN>` is a byte
    spaces: Vec<String>, // what stands for a space
}

impl Spelling {
    fn of(decoder: &serde_json::Value) -> Self {
        let mut spelling = Self::default();
        spelling.read(decoder);
        spelling
    }

    fn read(&mut self, decoder: &serde_json::Value) {
        match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().into_iter().flatten().for_each(|inner| self.read(inner)),
            Some("ByteLevel") => self.alphabet = true,
            Some("ByteFallback") => self.byte_tokens = true,
            Some("Replace") if decoder["content"] == " " => self.spaces.extend(decoder["pattern"]["String"].as_str().map(String::from)),
            Some("Metaspace") => self.spaces.extend(decoder["replacement"].as_str().map(String::from)),
            _ => {}
        }
    }

    fn write(&self, token: &str, out: &mut Vec<u8>) {
        if self.alphabet {
            let start = out.len();
            for c in token.chars() {
                match alphabet_byte(c) {
                    Some(byte) => out.push(byte),
                    None => {
                        // As the decoder does: a token with a character outside the alphabet means itself.
                        out.truncate(start);
                        return out.extend_from_slice(token.as_bytes());
                    }
                }
            }
            return;
        }
        let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
        if let Some(byte) = byte.filter(|_| self.byte_tokens).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            return out.push(byte);
        }
        let text = self.spaces.iter().fold(token.to_string(), |text, space| text.replace(space, " "));
        out.extend_from_slice(text.as_bytes());
    }
}

/// The byte that a character of GPT-2's alphabet stands for: printable Latin-1 means itself, the other 68 bytes follow from U+0100 on.
fn alphabet_byte(c: char) -> Option<u8> {
    let itself = |c: u32| matches!(c, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match c as u32 {
        code if itself(code) => Some(code as u8),
        code @ 0x100..0x144 => (0..=0xFF).filter(|&byte| !itself(byte)).nth(code as usize - 0x100).map(|byte| byte as u8),
        _ => None,
    }
}

/// Decodes tokens as they come: every piece is final, and the pieces joined are the text of the whole.
///
/// ```text
/// ids:     .... [prefix ........ read) ........ end
///                text of this is out    may still grow
/// ```
/// A token's text depends on its neighbours (sentencepiece strips a leading space, byte tokens join to characters), so each
/// step decodes from `prefix`, a boundary with visible text behind it, and gives what goes beyond the text already out.
/// Text that ends in U+FFFD may be half a character and waits, until `finish` at the latest.
#[derive(Default)]
pub struct Incremental {
    ids: Vec<u32>,
    prefix: usize,
    read: usize,
    out: String, // text of ids[prefix..read], and what was given of the tokens after it
    /// Spell special tokens out.
    pub special: bool,
}

impl Incremental {
    /// The text that `id` completes; empty while a character is incomplete.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids[self.prefix..], !self.special)?;
        let stable = text.trim_end_matches('\u{FFFD}');
        let Some(piece) = stable.strip_prefix(self.out.as_str()).filter(|piece| !piece.is_empty()) else {
            return Ok(String::new());
        };
        let piece = piece.to_string();
        if stable.len() < text.len() {
            self.out.push_str(&piece);
            return Ok(piece);
        }
        let tail = tokenizer.decode(&self.ids[self.read..], !self.special)?;
        if tail.is_empty() {
            self.out = text;
        } else {
            self.prefix = self.read;
            self.out = tail;
        }
        self.read = self.ids.len();
        Ok(piece)
    }

    /// What was held back, as it stands.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = tokenizer.decode(&self.ids[self.prefix..], !self.special)?;
        let piece = text.strip_prefix(self.out.as_str()).unwrap_or_default().to_string();
        self.out = text;
        self.read = self.ids.len();
        Ok(piece)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
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

    /// A sentencepiece-like tokenizer: `▁` for spaces, one leading space stripped, bytes for what it does not know.
    fn sentencepiece() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        vocab.insert("<unk>".into(), json!(0));
        for byte in 0..256 {
            vocab.insert(format!("<0x{byte:02X}>"), json!(byte + 1));
        }
        for (i, piece) in ["▁", "a", "b", "▁a", "▁b", "ab"].iter().enumerate() {
            vocab.insert(piece.to_string(), json!(257 + i));
        }
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 263, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": []}
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap()
    }

    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
        let mut incremental = Incremental::default();
        let mut pieces: Vec<String> = ids.iter().map(|&id| incremental.push(tokenizer, id).unwrap()).collect();
        let streamed = pieces.clone();
        pieces.push(incremental.finish(tokenizer).unwrap());
        (streamed, pieces.concat())
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
    fn streamed_pieces_are_valid_and_add_up() {
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        for case in reference()["encode"].as_array().unwrap() {
            let (streamed, whole) = stream(&tokenizer, &ids(&case["ids"]));
            assert_eq!(whole, case["decoded_skip_special"].as_str().unwrap());
            assert!(streamed.iter().all(|piece| !piece.contains('\u{FFFD}')), "{streamed:?}");
        }
    }

    #[test]
    fn an_emoji_appears_with_its_last_byte() {
        let tokenizer = sentencepiece();
        let (streamed, whole) = stream(&tokenizer, &[257 + 3, 0xF0 + 1, 0x9F + 1, 0x98 + 1, 0x80 + 1, 257 + 3]);
        assert_eq!(streamed, ["a", "", "", "", "😀", " a"]);
        assert_eq!(whole, "a😀 a");
    }

    #[test]
    fn half_a_character_comes_out_at_the_end_only() {
        let tokenizer = sentencepiece();
        let (streamed, whole) = stream(&tokenizer, &[258, 0xF0 + 1, 0x9F + 1]);
        assert_eq!(streamed, ["a", "", ""]);
        assert_eq!(whole, "a\u{FFFD}\u{FFFD}");
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

    proptest! {
        /// Byte-level BPE decodes by joining bytes, so even nonsense must stream to exactly the whole.
        #[test]
        fn any_tokens_stream_to_the_whole(ids in proptest::collection::vec(0u32..520, 0..40)) {
            let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
            prop_assert_eq!(stream(&tokenizer, &ids).1, tokenizer.decode(&ids, true).unwrap());
        }

        #[test]
        fn any_text_streams_through_byte_fallback(text in "[ab😀é ]{0,12}") {
            let tokenizer = sentencepiece();
            let mut ids = Vec::new();
            let mut buffer = [0; 4];
            for c in text.chars() {
                match c {
                    ' ' => ids.push(257),
                    'a' => ids.push(258),
                    'b' => ids.extend([259, 263]),
                    other => ids.extend(other.encode_utf8(&mut buffer).bytes().map(|b| b as u32 + 1)),
                }
            }
            let (streamed, whole) = stream(&tokenizer, &ids);
            prop_assert_eq!(whole, tokenizer.decode(&ids, true).unwrap());
            let valid = streamed.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER));
            prop_assert!(valid, "{:?}", streamed);
        }
    }
}
