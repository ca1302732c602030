//! The tokenizer and chat template of a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.
//!
//! How text is cut before byte pairs are merged is known by a name only, `tokenizer.ggml.pre`: one table has what each
//! stands for, and a name that is not in it is refused, because a wrong cut gives other tokens without a word. Source:
//! the models' own tokenizer.json.

use serde_json::{Map, Value, json};

use crate::model::families::gguf::Metadata;
use crate::{Error, Result};

/// Kinds of tokens, `tokenizer.ggml.token_type`.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen2's, with marks among letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// How text is cut: names of it, expressions that cut one after the other, and whether a whole piece in the vocabulary
/// is one token at once.
struct PreTokenizer {
    names: &'static [&'static str],
    cuts: &'static [&'static str],
    whole: bool,
}

const CUTS: &[PreTokenizer] = &[
    PreTokenizer { names: &["gpt-2", "olmo", "dolma", "mpt"], cuts: &[GPT2], whole: false },
    PreTokenizer { names: &["qwen2", "deepseek-r1-qwen", "hunyuan", "megrez"], cuts: &[QWEN2], whole: false },
    PreTokenizer { names: &["qwen35"], cuts: &[QWEN35], whole: false },
    PreTokenizer { names: &["llama-bpe", "llama3", "llama-v3"], cuts: &[LLAMA3], whole: true },
    PreTokenizer { names: &["glm4", "chatglm-bpe"], cuts: &[LLAMA3], whole: true },
    PreTokenizer { names: &["gpt-4o", "minimax-m2", "llama4"], cuts: &[GPT4O], whole: false },
    PreTokenizer { names: &["cohere2moe", "tiny_aya"], cuts: &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O], whole: false },
    PreTokenizer { names: &["laguna"], cuts: &[r"[^\n]+|\n+", QWEN2], whole: false },
    PreTokenizer { names: &["tekken"], cuts: &[TEKKEN], whole: true },
    PreTokenizer { names: &["kimi-k2"], cuts: &[KIMI_K2], whole: false },
    PreTokenizer {
        names: &["deepseek-llm"],
        cuts: &[
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ],
        whole: false,
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
        whole: false,
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense"],
        cuts: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3],
        whole: false,
    },
];

/// Tokens that end an answer, of models whose metadata may not say so.
const ENDS: &[&str] = &["<turn|>"];

/// Ids of the tokens that end an answer.
pub(super) fn end_tokens(metadata: &Metadata) -> Vec<u64> {
    let keys = ["eos", "eot", "eom"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    let mut ids: Vec<u64> = keys.iter().filter_map(|key| metadata.get(key)?.as_u64()).collect();
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap_or_default();
    ids.extend((0..).zip(tokens).filter(|(_, token)| ENDS.contains(token)).map(|(id, _)| id));
    ids.dedup();
    ids
}

/// `tokenizer.json` and `tokenizer_config.json`. Errors: `Error::Model` naming what is missing or not supported.
pub(super) fn files(metadata: &Metadata) -> Result<Vec<(&'static str, String)>> {
    let tokens = metadata.strings("tokenizer.ggml.tokens")?;
    let kinds: Vec<u64> = match metadata.get("tokenizer.ggml.token_type").and_then(Value::as_array) {
        Some(kinds) => kinds.iter().map(|kind| kind.as_u64().unwrap_or(0)).collect(),
        None => vec![1; tokens.len()],
    };
    if kinds.len() != tokens.len() {
        return Err(Error::Model(format!(
            "it has {} tokens and {} kinds of tokens: convert the model again",
            tokens.len(),
            kinds.len()
        )));
    }
    let tokenizer = match metadata.get("tokenizer.ggml.model").and_then(Value::as_str) {
        Some("gpt2") => byte_pairs(metadata, &tokens)?,
        Some("llama" | "gemma4") => sentence_pieces(metadata, &tokens)?,
        other => {
            let name = other.unwrap_or("none");
            return Err(Error::Model(format!(
                "the tokenizer `{name}` of GGUF files is not supported; gpt2, llama and gemma4 are: use the model's \
                 safetensors checkpoint"
            )));
        }
    };
    let added: Vec<Value> = (tokens.iter().zip(&kinds).enumerate())
        .filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind))
        .map(|(id, (content, &kind))| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": kind == CONTROL})
        })
        .collect();
    let token = |name: &str| {
        let id = metadata.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_u64()?;
        Some((id, *tokens.get(usize::try_from(id).ok()?)?))
    };
    let mut file =
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "post_processor": null});
    let fields = file.as_object_mut().expect("it was just written as an object");
    fields.extend(tokenizer);
    let adds_bos = metadata.get("tokenizer.ggml.add_bos_token").and_then(Value::as_bool);
    if let (true, Some((id, bos))) =
        (adds_bos.unwrap_or(metadata.get("tokenizer.ggml.model") == Some(&"llama".into())), token("bos"))
    {
        let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
        let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
        fields["post_processor"] = json!({"type": "TemplateProcessing", "single": [special(bos), text("A", 0)],
            "pair": [special(bos), text("A", 0), special(bos), text("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}}});
    }
    let mut config = Map::new();
    for (name, key) in [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
    {
        if let Some((_, text)) = token(key) {
            config.insert(name.into(), text.into());
        }
    }
    if let Some(template) = metadata.get("tokenizer.chat_template") {
        config.insert("chat_template".into(), template.clone());
    }
    Ok(vec![("tokenizer.json", file.to_string()), ("tokenizer_config.json", Value::Object(config).to_string())])
}

fn vocabulary(tokens: &[&str]) -> Map<String, Value> {
    tokens.iter().enumerate().map(|(id, token)| (token.to_string(), id.into())).collect()
}

/// Byte-level BPE.
fn byte_pairs(metadata: &Metadata, tokens: &[&str]) -> Result<Map<String, Value>> {
    let pre = metadata.get("tokenizer.ggml.pre").and_then(Value::as_str).unwrap_or("default");
    let Some(cut) = CUTS.iter().find(|cut| cut.names.contains(&pre)) else {
        let known: Vec<&str> = CUTS.iter().flat_map(|cut| cut.names).copied().collect();
        return Err(Error::Model(format!(
            "the pre-tokenizer `{pre}` of GGUF files is not supported; {} are: use the model's safetensors checkpoint",
            known.join(", ")
        )));
    };
    let mut steps: Vec<Value> = cut
        .cuts
        .iter()
        .map(|cut| json!({"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": false}))
        .collect();
    steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}));
    let merges = merges(metadata)?;
    let parts = json!({
        // As the tokenizers have it that GGUF calls by this name.
        "normalizer": if pre == "qwen2" { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": cut.whole, "vocab": vocabulary(tokens), "merges": merges},
    });
    Ok(parts.as_object().cloned().expect("it was just written as an object"))
}

/// Pairs that merge, in order.
fn merges(metadata: &Metadata) -> Result<Vec<(&str, &str)>> {
    let pairs = metadata.strings("tokenizer.ggml.merges")?.into_iter();
    let pairs: Option<Vec<_>> = pairs.map(|pair| pair.split_once(' ')).collect();
    pairs.ok_or_else(|| Error::Model("it has a merge that is no pair: convert the model again".into()))
}

/// The same where pieces merge in the order of the scores of what they make.
fn merges_by_score<'a>(
    metadata: &Metadata,
    tokens: &[&'a str],
    vocab: &Map<String, Value>,
) -> Result<Vec<(&'a str, &'a str)>> {
    let scores: Option<Vec<f64>> =
        metadata.get("tokenizer.ggml.scores").and_then(|value| value.as_array()?.iter().map(Value::as_f64).collect());
    let Some(scores) = scores.filter(|scores| scores.len() == tokens.len()) else {
        return Err(Error::Model("its metadata lack a score of each token: convert the model again".into()));
    };
    let id = |piece: &str| vocab.get(piece).and_then(Value::as_u64);
    let mut merges = Vec::new();
    for (&token, &score) in tokens.iter().zip(&scores) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(a), Some(b)) = (id(left), id(right)) {
                merges.push((score, a, b, left, right));
            }
        }
    }
    merges.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
    Ok(merges.into_iter().map(|(.., left, right)| (left, right)).collect())
}

/// SentencePiece's BPE.
fn sentence_pieces(metadata: &Metadata, tokens: &[&str]) -> Result<Map<String, Value>> {
    let vocab = vocabulary(tokens);
    let merges = match metadata.get("tokenizer.ggml.model").and_then(Value::as_str) {
        Some("gemma4") => merges(metadata)?,
        _ => merges_by_score(metadata, tokens, &vocab)?,
    };
    let unknown = metadata.get("tokenizer.ggml.unknown_token_id").and_then(Value::as_u64).unwrap_or(0) as usize;
    let prefix = metadata.get("tokenizer.ggml.add_space_prefix").and_then(Value::as_bool).unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let mut back = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let normalizer = match prefix {
        true => {
            back.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]})
        }
        false => replace,
    };
    let parts = json!({
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {"type": "BPE", "dropout": null, "unk_token": tokens.get(unknown), "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges},
    });
    Ok(parts.as_object().cloned().expect("it was just written as an object"))
}
