//! Tokens to text as they come.

use super::Tokenizer;
use crate::Result;

/// Up to three replacement characters at the end of a text may be bytes of an incomplete character.
const MAX_HALF: usize = 3;

/// Tokens that a step decodes at most, and the last of them that stay where the others are let go. Three halves of
/// characters are nine bytes; a text cut within a character is right again after three more. So twelve tokens tell how
/// the text ends.
const MAX_IDS: usize = 24;
const KEPT_IDS: usize = 12;

/// Decodes tokens as they come. Every piece is final, and the pieces join to the text of the whole.
///
/// ```text
/// ids:  [ context ... read) ........ end
///         text of it is out    may still grow
/// ```
/// A token's text depends on its neighbours (sentencepiece strips a leading space, byte tokens join to characters), so
/// each step decodes from a context with visible text, and gives what goes beyond the text already out. Text that ends
/// in U+FFFD may be half a character, and up to three of them wait, until `finish` at the latest. A step costs the same
/// however long the text is.
///
/// The one text that is not the whole's: sentencepiece makes U+FFFD of every byte of a run that has a wrong one, and
/// here its characters before the wrong byte are out already.
#[derive(Debug, Default)]
pub struct Incremental {
    ids: Vec<u32>,
    read: usize,
    out: String, // text of ids[..read], and what was given of the tokens after it
    /// Spell special tokens out.
    pub special: bool,
}

impl Incremental {
    /// The text that `id` completes. Empty while a character is incomplete.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        // An id that the decoder does not see has no neighbours.
        if !tokenizer.writes(id, self.special) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let text = self.decode(tokenizer, 0)?;
        let stable = stable(&text);
        let Some(piece) = stable.strip_prefix(self.out.as_str()) else { return self.begin_anew(tokenizer) };
        self.out.push_str(piece);
        if !piece.is_empty() && stable.len() == text.len() {
            let tail = self.decode(tokenizer, self.read)?;
            if !tail.is_empty() {
                self.ids.drain(..self.read);
                self.out = tail;
            }
            self.read = self.ids.len();
        }
        let piece = piece.to_string();
        match self.ids.len() > MAX_IDS {
            true => Ok(piece + &self.forget(tokenizer, &text[stable.len()..])?),
            false => Ok(piece),
        }
    }

    /// The text held back, as it is.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = self.decode(tokenizer, 0)?;
        let piece = match text.strip_prefix(self.out.as_str()) {
            Some(piece) => piece.to_string(),
            None => self.decode(tokenizer, self.read)?,
        };
        self.out = text;
        self.read = self.ids.len();
        Ok(piece)
    }

    fn decode(&self, tokenizer: &Tokenizer, from: usize) -> Result<String> {
        tokenizer.decode(&self.ids[from..], !self.special)
    }

    /// The text that is out became another: its last bytes are part of a run that is no text, or not yet. Once that run
    /// cannot become text any more, it counts without them.
    fn begin_anew(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        if self.ids.len() - self.read <= MAX_HALF {
            return Ok(String::new());
        }
        self.ids.drain(..self.read);
        let text = self.decode(tokenizer, 0)?;
        self.out = stable(&text).to_string();
        self.read = if self.out.len() == text.len() { self.ids.len() } else { 0 };
        Ok(self.out.clone())
    }

    /// Lets all but the last tokens go. Gives of `held`, the end of the text, what those that stay cannot tell.
    fn forget(&mut self, tokenizer: &Tokenizer, held: &str) -> Result<String> {
        self.ids.drain(..self.ids.len() - KEPT_IDS);
        let kept = self.decode(tokenizer, 0)?;
        let (out, given) = match kept.strip_suffix(held) {
            Some(out) => (out, ""),
            None => (kept.as_str(), held),
        };
        self.read = KEPT_IDS - (held.len() - given.len()) / char::REPLACEMENT_CHARACTER.len_utf8();
        self.out = out.to_string();
        Ok(given.to_string())
    }
}

/// `text` without what may be half a character at its end.
fn stable(text: &str) -> &str {
    (0..MAX_HALF).fold(text, |text, _| text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(text))
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
            "added_tokens": [{"id": 263, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                    {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": []}
        });
        load(file)
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

    /// A byte-level tokenizer: a token for each byte, some for two that end one character and begin the next, and a
    /// special one.
    fn byte_level() -> Tokenizer {
        let alphabet = |byte: u32| match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => byte,
            _ => {
                0x100 + (0..byte).filter(|byte| !matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)).count() as u32
            }
        };
        let spelled =
            |bytes: &[u8]| bytes.iter().filter_map(|&byte| char::from_u32(alphabet(byte.into()))).collect::<String>();
        let mut tokens: Vec<String> = (0..=255).map(|byte| spelled(&[byte])).collect();
        tokens.extend([&b"\xA9\xC3"[..], b"\x9F\x98", b"\x80\xE2", b"\x98\x80\xF0", b" a"].map(spelled));
        let special = json!([{"id": tokens.len(), "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false,
            "normalized": false, "special": true}]);
        let vocab: serde_json::Map<_, _> =
            tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        load(json!({"version": "1.0", "added_tokens": special, "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}}))
    }

    fn load(file: serde_json::Value) -> Tokenizer {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap()
    }

    /// The text of `ids` as it comes; no step decodes more than a few tokens.
    fn bounded(tokenizer: &Tokenizer, ids: impl IntoIterator<Item = u32>) -> String {
        let mut incremental = Incremental::default();
        let mut text = String::new();
        for id in ids {
            text += &incremental.push(tokenizer, id).unwrap();
            assert!(incremental.ids.len() <= MAX_IDS && incremental.read <= incremental.ids.len(), "{incremental:?}");
        }
        text + &incremental.finish(tokenizer).unwrap()
    }

    #[test]
    fn no_answer_makes_a_step_longer() {
        let (bytes, pieces) = (byte_level(), sentencepiece());
        let many = |ids: &[u32]| ids.iter().copied().cycle().take(10_000).collect::<Vec<_>>();
        // Lone bytes, halves that never end, halves that end where the next begin, and tokens that are left away.
        for ids in [
            &[0x80][..],
            &[0xF0],
            &[0xF0, 0x9F, 0x98],
            &[0xF0, 0x9F],
            &[0xE2],
            &[256],
            &[257],
            &[258],
            &[259],
            &[261],
            &[99_999],
        ] {
            assert!(bounded(&bytes, many(ids)) == bytes.decode(&many(ids), true).unwrap(), "{ids:?}");
        }
        // sentencepiece: bytes, spaces, and a space alone, whose text depends on what stands before it.
        for ids in [&[0x80 + 1][..], &[0xF0 + 1], &[0xC3 + 1, 0xA9 + 1], &[257], &[257, 258], &[263], &[0x80 + 1, 258]]
        {
            assert!(bounded(&pieces, many(ids)) == pieces.decode(&many(ids), true).unwrap(), "{ids:?}");
        }
    }

    #[test]
    fn tokens_left_away_do_not_part_a_character() {
        let (tokenizer, special) = (byte_level(), 261);
        let mut ids = vec![0xF0];
        for byte in [0x9F, 0x98, 0x80] {
            ids.extend([special; 5000]);
            ids.push(byte);
        }
        assert_eq!(bounded(&tokenizer, ids), "😀");
    }

    #[test]
    fn a_wrong_byte_behind_characters_does_not_silence_the_rest() {
        let tokenizer = sentencepiece();
        let (streamed, whole) = stream(&tokenizer, &[0xC3 + 1, 0xA9 + 1, 0x80 + 1, 258, 259, 258, 259]);
        assert_eq!(streamed, ["", "é", "", "", "", "\u{FFFD}aba", "b"]);
        assert_eq!(whole, "é\u{FFFD}abab");
        assert_eq!(stream(&tokenizer, &[0xC3 + 1, 0xA9 + 1, 0x80 + 1]).1, "é\u{FFFD}");
    }

    proptest! {
        /// Byte-level BPE decodes by joining bytes, so even nonsense must stream to exactly the whole.
        #[test]
        fn any_tokens_stream_to_the_whole(ids in proptest::collection::vec(0u32..520, 0..400)) {
            let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
            prop_assert_eq!(bounded(&tokenizer, ids.iter().copied()), tokenizer.decode(&ids, true).unwrap());
        }

        #[test]
        fn any_bytes_stream_to_the_whole(
            ids in proptest::collection::vec(
                prop_oneof![Just(0x80u32), Just(0x98), Just(0x9F), Just(0xA9), Just(0xC3), Just(0xE2), Just(0xF0),
                    Just(0x41), 256u32..263, 0u32..256],
                0..300,
            ),
        ) {
            let tokenizer = byte_level();
            prop_assert_eq!(bounded(&tokenizer, ids.iter().copied()), tokenizer.decode(&ids, true).unwrap());
        }

        /// No bytes keep back what follows them for longer than a character has bytes.
        #[test]
        fn any_bytes_of_sentencepiece_come_to_an_end(bytes in proptest::collection::vec(prop_oneof![1u32..257,
            0x80u32..0x100], 0..100)) {
            let tokenizer = sentencepiece();
            let text = bounded(&tokenizer, bytes.into_iter().chain([258, 259, 258, 259]));
            prop_assert!(text.ends_with("abab"), "{:?}", text);
        }

        #[test]
        fn any_text_streams_through_byte_fallback(text in "[ab😀é ]{0,100}") {
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
