//! Tokens that count as one in DeepSeek-V4.1's n-grams: those whose texts differ in case, accents and spaces alone.
//!
//! Source: mlx-vlm, deepseek_v41, `build_compressed_token_map`.

use std::collections::HashMap;

use tokenizers::normalizers::{Lowercase, NFD, NFKC, StripAccents};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use super::Tokenizer;
use crate::{Error, Result};

impl Tokenizer {
    /// What each token counts as: kinds are numbered as they come.
    pub fn alike(&self) -> Result<Vec<u32>> {
        let mut kinds = HashMap::new();
        let of = |id: u32| {
            let text = self.decode(&[id], false)?;
            // A part of a character is what the vocabulary calls it.
            let key = match text.contains(char::REPLACEMENT_CHARACTER) {
                true => self.inner.id_to_token(id).unwrap_or(text),
                false => Some(plain(&text)?).filter(|plain| !plain.is_empty()).unwrap_or(text),
            };
            let next = kinds.len() as u32;
            Ok(*kinds.entry(key).or_insert(next))
        };
        (0..self.inner.get_vocab_size(true) as u32).map(of).collect()
    }
}

/// A text without case and accents, runs of spaces as one and none at its ends; of spaces alone one.
fn plain(text: &str) -> Result<String> {
    let mut text = NormalizedString::from(text);
    let steps: [NormalizerWrapper; 4] = [NFKC.into(), NFD.into(), StripAccents.into(), Lowercase.into()];
    for step in steps {
        step.normalize(&mut text).map_err(|e| Error::Model(format!("cannot compare tokens: {e}")))?;
    }
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\r' | '\n');
    let mut plain = String::new();
    for c in text.get().chars() {
        match is_space(c) {
            true if plain.ends_with(' ') => {}
            true => plain.push(' '),
            false => plain.push(c),
        }
    }
    Ok(if plain == " " { plain } else { plain.trim().into() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// As the tokenizers library's own steps have them, in Python.
    #[test]
    fn tokens_are_alike_as_in_the_fixture() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let want = std::fs::read(fixtures.join("deepseek_v41/engram_token_map.json")).unwrap();
        let want: Vec<u32> = serde_json::from_slice(&want).unwrap();
        assert_eq!(Tokenizer::load(&fixtures.join("_tokenizer")).unwrap().alike().unwrap(), want);
    }

    #[test]
    fn texts_that_differ_in_case_accents_and_spaces_are_one() {
        for text in ["\u{c9}t\u{e9}", " ete", "ETE\n", "\u{ff25}te"] {
            assert_eq!(plain(text).unwrap(), "ete");
        }
        assert_eq!(["\n\t", " ", "a \n b", ""].map(|text| plain(text).unwrap()), [" ", " ", "a b", ""]);
    }
}
