//! Tokens to text as they come.

use super::Tokenizer;
use crate::Result;

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
mod tests {
    use super::super::tests::{fixture_dir, ids, reference};
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

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
