//! Encodes a text in which some added tokens are plain text.
//!
//! The library has no option for that. So each cut is marked with a character that the text does not have. The library
//! then finds the added tokens, and the marks are removed before it splits words: the result is that of a search that
//! missed these tokens.

use tokenizers::{Encoding, Model, NormalizedString, Normalizer, OffsetType, PreTokenizer, Result, Token};

use super::mark::{inserted, unused_character};

/// See [`super::Tokenizer::encode_cut`].
pub(super) fn encode(tokenizer: &tokenizers::Tokenizer, text: &str, cuts: &[usize]) -> Result<Encoding> {
    let mark = unused_character([text]).ok_or("the text contains every private-use character: leave one out")?;
    let normalizer = tokenizer.get_normalizer();
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(normalizer, &inserted(text, cuts, mark));
    let spelled = spelled(normalizer, mark)?;
    pieces.normalize(|piece| without(piece, mark, &spelled))?;
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    let is_special =
        |token: &Token| added.get(&token.id).is_some_and(|added| added.special) && token.value.chars().nth(1).is_some();
    pieces.tokenize(|piece| plain(tokenizer.get_model(), piece.get(), &is_special))?;
    let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
    tokenizer.post_process(encoding, None, false)
}

/// The mark after a normalizer that respells characters, for example as bytes.
fn spelled(normalizer: Option<&tokenizers::NormalizerWrapper>, mark: char) -> Result<String> {
    let mut alone = NormalizedString::from(mark.to_string());
    normalizer.map_or(Ok(()), |normalizer| normalizer.normalize(&mut alone))?;
    Ok(alone.get().to_string())
}

fn without(piece: &mut NormalizedString, mark: char, spelled: &str) -> Result<()> {
    if spelled.contains(mark) {
        piece.filter(|c| c != mark);
        return Ok(());
    }
    piece.replace(spelled, "")
}

/// Tokens of a word. Some vocabularies have their special tokens among the words; these are cut after their first
/// character.
fn plain(model: &tokenizers::ModelWrapper, text: &str, is_special: &impl Fn(&Token) -> bool) -> Result<Vec<Token>> {
    let tokens = model.tokenize(text)?;
    if !tokens.iter().any(is_special) {
        return Ok(tokens);
    }
    let starts = tokens.iter().filter(|token| is_special(token)).map(|token| token.offsets.0);
    let mut parts = Vec::new();
    let mut rest = 0;
    for start in starts {
        let end = start + text[start..].chars().next().map_or(0, char::len_utf8);
        parts.push(&text[rest..end]);
        rest = end;
    }
    parts.push(&text[rest..]);
    Ok(parts.into_iter().map(|part| model.tokenize(part)).collect::<Result<Vec<_>>>()?.concat())
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use serde_json::{Value, json};

    /// Characters as tokens, in a tokenizer of these parts; `<s>` and `<t>` are added, the latter looked for in
    /// normalized text.
    fn load(mut file: Value) -> Tokenizer {
        let words = ["<unk>", "<", ">", "s", "t", "a", "b", " ", "▁", "▁a", "ab", "Ġ", "Ċ"];
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), json!(id))).collect();
        let token = |id: usize, text: &str, special: bool| {
            json!({"id": id, "content": text, "special": special,
            "normalized": !special, "single_word": false, "lstrip": false, "rstrip": false})
        };
        file["added_tokens"] = json!([token(words.len(), "<s>", true), token(words.len() + 1, "<t>", false)]);
        if file["model"].is_null() {
            file["model"] =
                json!({"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": [["▁", "a"], ["a", "b"]]});
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap()
    }

    fn words(tokenizer: &Tokenizer, text: &str, cuts: &[usize]) -> Vec<String> {
        let ids = tokenizer.encode_cut(text, cuts).unwrap();
        ids.into_iter().map(|id| tokenizer.inner.id_to_token(id).unwrap()).collect()
    }

    #[test]
    fn cut_tokens_are_words_and_others_are_not() {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let llama = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
        for (file, text, cuts, want) in [
            (json!({}), "ab<s>ab<s>a", &[3][..], &["ab", "<", "s", ">", "ab", "<s>", "a"][..]),
            (json!({}), "<t><t>", &[4], &["<t>", "<", "t", ">"]),
            // Each stretch between tokens has its space in front, and a token that is cut begins none.
            (json!({"normalizer": llama}), "a<s>a<s>a", &[2], &["▁a", "<", "s", ">", "a", "<s>", "▁a"]),
            (json!({"pre_tokenizer": metaspace("first")}), "a<s>a<s>a", &[2], &["▁a", "<", "s", ">", "a", "<s>", "a"]),
            (
                json!({"pre_tokenizer": metaspace("always")}),
                "a<s>a<s>a",
                &[2],
                &["▁a", "<", "s", ">", "a", "<s>", "▁a"],
            ),
            // Words go on over the place where the mark was.
            (json!({}), "abab", &[1], &["ab", "ab"]),
            // A normalizer that spells bytes spells the mark too.
            (json!({"normalizer": {"type": "ByteLevel"}}), "a <s>\n<s>", &[3], &["a", "Ġ", "<", "s", ">", "Ċ", "<s>"]),
        ] {
            let tokenizer = load(file.clone());
            assert_eq!(words(&tokenizer, text, cuts), want, "{file} {text}");
            assert_eq!(tokenizer.encode_cut(text, &[]).unwrap(), tokenizer.encode(text, false).unwrap());
        }
    }

    #[test]
    fn a_special_token_among_the_words_is_cut_too() {
        let vocab = json!([
            ["<unk>", 0.0],
            ["<", -9.0],
            ["s", -9.0],
            [">", -9.0],
            ["a", -9.0],
            ["b", -9.0],
            [" ", -9.0],
            ["ab", -9.0],
            ["s>", -9.0],
            ["▁", -9.0],
            ["x", -9.0],
            ["y", -9.0],
            ["z", -9.0],
            ["<s>", 0.0],
            ["<t>", 0.0]
        ]);
        let tokenizer = load(json!({"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}}));
        assert_eq!(words(&tokenizer, "ab<s><s>a<s>", &[3, 6]), ["ab", "<", "s>", "<", "s>", "a", "<s>"]);
    }
}
