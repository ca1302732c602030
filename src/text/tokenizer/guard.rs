//! Protects against a malicious `tokenizer.json`: panics become errors, and the growth of a text is bounded before it
//! happens.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Maximum bytes of a normalized text; each takes 17 bytes of memory.
const MAX_NORMALIZED_BYTES: f64 = (128 << 20) as f64;

/// Maximum growth of a text in the normalizer, and of a token in the decoder, in bytes per byte.
const MAX_TEXT_GROWTH: f64 = 65536.0;
const MAX_DECODED_GROWTH: f64 = 256.0;

/// Maximum repetitions of the text in a template of the post-processor.
const MAX_REPEATS: f64 = 16.0;

/// Maximum normalizers, pre-tokenizers and decoders in a sequence.
const MAX_STAGES: usize = 64;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` on an untrusted file. `None` when it panics, without a message on stderr.
pub(super) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                hook(panic);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    result.ok()
}

/// The parts of a file besides its vocabulary.
#[derive(Deserialize)]
pub(super) struct Stages {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
}

/// Maximum growth of a text before it is cut into tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth(f64);

impl Growth {
    /// Errors: the part that lengthens a text too much, as the rest of a sentence that begins with the file's name.
    pub(super) fn of(stages: &Stages) -> Result<Self, String> {
        let normalizer = known::<NormalizerWrapper>(&stages.normalizer)?;
        let pre_tokenizer = known::<PreTokenizerWrapper>(&stages.pre_tokenizer)?;
        let decoder = known::<DecoderWrapper>(&stages.decoder)?;
        let post_processor = known::<PostProcessorWrapper>(&stages.post_processor)?;
        let text = Self(factor(&normalizer) * factor(&pre_tokenizer));
        let longest_row = [&normalizer, &pre_tokenizer, &decoder, &post_processor].map(count).into_iter().max();
        if longest_row > Some(MAX_STAGES) {
            return Err(format!("it has more than {MAX_STAGES} stages in a row"));
        }
        for (what, growth, limit) in [
            ("normalizer with its pre_tokenizer", text.0, MAX_TEXT_GROWTH),
            ("decoder", factor(&decoder), MAX_DECODED_GROWTH),
            ("post_processor", factor(&post_processor), MAX_REPEATS),
        ] {
            if growth == f64::INFINITY {
                return Err(format!("its {what} replaces an empty text"));
            }
            if growth > limit {
                return Err(format!("its {what} may make more than {limit} times as much of a text"));
            }
        }
        let longest = stages.added_tokens.iter().map(|token| token.content.len()).max().unwrap_or(0);
        match text.allows(longest) {
            true => Ok(text),
            false => Err("its normalizer makes too much of an added token".into()),
        }
    }

    /// Whether a text of `bytes` stays within bounds.
    pub(super) fn allows(self, bytes: usize) -> bool {
        bytes as f64 * self.0 <= MAX_NORMALIZED_BYTES
    }
}

/// A stage as the library understands it: with its type, which files may leave out.
fn known<T: DeserializeOwned + Serialize>(value: &Value) -> Result<Value, String> {
    if value.is_null() {
        return Ok(Value::Null);
    }
    let stage: T = serde_json::from_value(value.clone()).map_err(|e| e.to_string())?;
    serde_json::to_value(stage).map_err(|e| e.to_string())
}

/// The stages of a sequence.
fn inner(stage: &Value) -> Option<&Vec<Value>> {
    ["normalizers", "pretokenizers", "decoders", "processors"].iter().find_map(|name| stage[name].as_array())
}

fn count(stage: &Value) -> usize {
    inner(stage).map_or(1, |stages| stages.iter().map(count).sum())
}

/// Maximum bytes per byte; for a post-processor, how often it repeats the text.
fn factor(stage: &Value) -> f64 {
    if let Some(stages) = inner(stage) {
        return stages.iter().map(factor).product();
    }
    let bytes = |name: &str| stage[name].as_str().map_or(0.0, |text| text.len() as f64);
    match stage["type"].as_str().unwrap_or_default() {
        "Replace" => match stage["pattern"]["String"].as_str() {
            // The library's replacement panics, or does not end, for an empty pattern.
            Some("") => f64::INFINITY,
            Some(pattern) => (bytes("content") / pattern.len() as f64).max(1.0),
            // An expression may match each byte, or the empty text before each.
            None => bytes("content") + 1.0,
        },
        // The text between two added tokens is normalized separately.
        "Prepend" => 1.0 + bytes("prepend"),
        "Precompiled" => longest_replacement(stage),
        // The largest growth of a character in Unicode's forms: U+0390 decomposed, U+FDFA spelled out.
        "NFC" | "NFD" => 3.0,
        "NFKC" | "NFKD" => 11.0,
        "Lowercase" => 1.5,
        "BertNormalizer" => 3.0 * 1.5 * 3.0,
        // A byte becomes a character of two, and there may be a space before it.
        "ByteLevel" => 4.0,
        "Metaspace" => 5.0,
        "WordPiece" | "CTC" | "BPEDecoder" => 2.0,
        "TemplateProcessing" => {
            let pieces = stage["single"].as_array().map_or(&[][..], Vec::as_slice);
            pieces.iter().filter(|piece| piece.get("Sequence").is_some()).count().max(1) as f64
        }
        _ => 1.0,
    }
}

/// Bytes of the longest replacement of a `Precompiled` normalizer.
///
/// Its base64 holds the size of a trie, the trie, and the zero-terminated texts.
fn longest_replacement(stage: &Value) -> f64 {
    use base64::Engine;
    let text = stage["precompiled_charsmap"].as_str().unwrap_or_default();
    let map = base64::prelude::BASE64_STANDARD.decode(text).unwrap_or_default();
    let texts = match map.split_first_chunk::<4>() {
        Some((size, rest)) => rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default(),
        None => &[],
    };
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn growth(stages: Value) -> Result<f64, String> {
        let stages = serde_json::from_value(stages).unwrap();
        guarded(|| Growth::of(&stages)).unwrap_or_else(|| Err("it panics".into())).map(|growth| growth.0)
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn a_panic_is_told_and_others_are_not_silenced() {
        assert_eq!(guarded(|| 1), Some(1));
        assert_eq!(guarded(|| -> u8 { panic!("of a file's author") }), None);
        assert!(!GUARDED.get());
        assert_eq!(guarded(|| guarded(|| -> u8 { panic!("within") }).is_none() && GUARDED.get()), Some(true));
    }

    #[test]
    fn what_models_have_is_within_bounds() {
        let split =
            json!({"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": false});
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
        let llama = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            replace(json!({"String": " "}), "▁")]});
        let pair = json!({"type": "Sequence", "pretokenizers": [split, byte_level]});
        for stages in [
            json!({}),
            json!({"normalizer": {"type": "NFC"}, "pre_tokenizer": pair, "decoder": byte_level,
                "post_processor": byte_level}),
            json!({"normalizer": llama, "decoder": {"type": "Sequence", "decoders": [replace(json!({"String": "▁"}),
                " "), {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}),
            json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"},
                replace(json!({"Regex": " {2,}"}), "▁")]}, "pre_tokenizer": metaspace,
                "decoder": metaspace}),
        ] {
            let growth = growth(stages.clone()).unwrap();
            assert!(Growth(growth).allows(600_000), "{stages}: {growth}");
        }
    }

    #[test]
    fn what_grows_beyond_bounds_is_refused() {
        let many = replace(json!({"String": "e"}), &"e".repeat(1000));
        let alike = |n: usize| json!({"type": "Sequence", "normalizers": vec![many.clone(); n]});
        let decoder = |stages: Value| json!({"decoder": {"type": "Sequence", "decoders": stages}});
        let untagged = json!({"pattern": {"String": "e"}, "content": "e".repeat(1_000_000)});
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let template =
            json!({"type": "TemplateProcessing", "single": vec![text; 17], "pair": [], "special_tokens": {}});
        for (stages, said) in [
            (json!({"normalizer": alike(4)}), "its normalizer with its pre_tokenizer may make"),
            (json!({"normalizer": alike(1), "added_tokens": [{"content": "e".repeat(200_000)}]}), "added token"),
            (json!({"normalizer": untagged}), "its normalizer with its pre_tokenizer may make"),
            (json!({"normalizer": replace(json!({"String": ""}), "x")}), "replaces an empty text"),
            (
                json!({"normalizer": {"type": "Prepend", "prepend": "x".repeat(100_000)}}),
                "its normalizer with its pre_tokenizer may make",
            ),
            (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}), "panics"),
            (
                json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": vec![byte_level; 30]}}),
                "its normalizer with its pre_tokenizer may make",
            ),
            (
                json!({"pre_tokenizer": {"type": "Sequence",
                    "pretokenizers": vec![json!({"type": "BertPreTokenizer"}); 65]}}),
                "more than 64 stages",
            ),
            (decoder(json!([many.clone()])), "its decoder may make"),
            (decoder(json!([replace(json!({"Regex": "x*"}), &"e".repeat(300))])), "its decoder may make"),
            (json!({"post_processor": template}), "its post_processor may make"),
        ] {
            let error = growth(stages).unwrap_err();
            assert!(error.contains(said), "{error}: {said}");
        }
        assert!(!Growth(growth(json!({"normalizer": alike(1)})).unwrap()).allows(200_000), "a thousand times as much");
    }
}
