//! DeepSeek-V4.1: V4's layers, which share entries and choices among them; connections that look ahead; and rows of
//! tables of n-grams before some layers.
//!
//! Sources: mlx-vlm and mlx-lm, deepseek_v41, which agree.

use super::fields::{Fields, missing, wrong};
use super::numpy::Generator;
use super::{deepseek_v4, glm5_next};
use crate::model::{
    Attention, Candidates, ChosenBy, Compressed, Compressor, EntryKeys, Ffn, Hash, Indexer, LastRead, LayerConfig,
    ModelConfig, Moe, Ngrams, Residual, Router, Selection,
};
use crate::{Error, Result};

/// Layers with n-grams, tokens of an n-gram, and its heads for each length, at most: what a token takes grows with
/// them.
const MAX_NGRAM: usize = 16;

/// Rows of one of a table's heads, at least: prime numbers are looked for from there on.
const MAX_HEAD_ROWS: usize = 1 << 24;

/// `deepseek_v41`: the config of the language model is nested, the names of its tensors are not.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    let image = f.optional_dim("image_token_id")?;
    let text = f.object("text_config")?.ok_or_else(|| missing("text_config"))?;
    let model = config(&text, image)?;
    Ok(ModelConfig {
        architecture: f.str("model_type")?.into(),
        tied_embeddings: model.tied_embeddings || f.bool_or("tie_word_embeddings", false)?,
        ..model
    })
}

fn config(f: &Fields<'_>, image: Option<usize>) -> Result<ModelConfig> {
    let attentions = attentions(f)?;
    let moe = deepseek_v4::moe(f)?;
    let temperature = f.positive_or("gate_temp", 1.0)? as f32;
    let moe = Moe { router: Router { temperature, ..moe.router }, ..moe };
    let connections = glm5_next::connections(f, LastRead::Ahead)?;
    let ngrams = ngrams(f, image)?;
    let attention = |layer: usize| Attention::Compressed(attentions[layer].clone());
    let layers = super::layers(f, attention, |_| Ok(Ffn::Moe(moe.clone())))?;
    let layers = layers.into_iter().enumerate().map(|(i, layer)| {
        let ngrams = ngrams.iter().find(|(of, _)| *of == i).map(|(_, ngrams)| ngrams.clone());
        LayerConfig { residual: Residual::Connected(connections), ngrams, ..layer }
    });
    Ok(ModelConfig { names: deepseek_v4::NAMES, ..super::model(f, layers.collect())? })
}

/// The attention of each layer: of those that have entries, some make them, and some of these choose among them.
fn attentions(f: &Fields<'_>) -> Result<Vec<Compressed>> {
    let ratios = deepseek_v4::ratios(f)?;
    let sources = |name: &str| {
        let layers = f.layers(name)?;
        let compress = |layer: &usize| ratios.get(*layer).is_some_and(|ratio| *ratio > 0);
        let wrong = || wrong(name, "a list of layers with a ratio above 0 in `compress_ratios`");
        if layers.iter().all(compress) { Ok(layers) } else { Err(wrong()) }
    };
    let (makers, choosers) = (sources("kv_source_layer_ids")?, sources("index_source_layer_ids")?);
    // A choice is always among the entries that were made last.
    if !makers.iter().all(|maker| choosers.contains(maker)) {
        return Err(wrong("index_source_layer_ids", "a list with all of `kv_source_layer_ids`"));
    }
    let windowed = Compressed { norms_queries: false, ..deepseek_v4::windowed(f)? };
    let rope = deepseek_v4::rope(f, windowed.rope.dim)?;
    let (mut made, mut indexer): (Option<Compressor>, Option<Indexer>) = (None, None);
    let of_layer = |(layer, &ratio): (usize, &usize)| -> Result<Compressed> {
        if ratio == 0 {
            return Ok(windowed.clone());
        }
        // Units are whole in the blocks of the cache.
        if 64 % ratio != 0 {
            return Err(wrong("compress_ratios", "a list of 0 and divisors of 64"));
        }
        let makes = makers.contains(&layer);
        if makes {
            made = Some(Compressor { dim: windowed.head_dim, ratio, overlaps: false, bias: false });
        }
        let chooses = choosers.contains(&layer);
        if chooses {
            let candidates = candidates(f, layer, ratio)?;
            let of_layer = deepseek_v4::indexer(f, &windowed, ratio, EntryKeys::OfEntries)?;
            indexer = Some(Indexer { candidates, ..of_layer });
        }
        let compressor = made.filter(|made| made.ratio == ratio).ok_or_else(|| {
            Error::Model(format!("layer {layer} reads entries of {ratio} positions, and none before it makes them"))
        })?;
        let by = if chooses { ChosenBy::Own } else { ChosenBy::Earlier };
        Ok(Compressed {
            rope: rope.clone(),
            compressor: Some(compressor),
            borrows: !makes,
            selection: indexer.clone().map(|indexer| Selection { by, indexer }),
            ..windowed.clone()
        })
    };
    ratios.iter().enumerate().map(of_layer).collect()
}

/// Blocks that one layer chooses, and that those after it choose among.
fn candidates(f: &Fields<'_>, layer: usize, ratio: usize) -> Result<Option<Candidates>> {
    const NAME: &str = "candidate_source_layer_id";
    let Some(source) = f.integer(NAME)?.and_then(|source| usize::try_from(source).ok()) else { return Ok(None) };
    let (blocks, size) = (f.dim("candidate_topk_blocks")?, f.dim("candidate_block_size")?);
    let top_k = f.dim("index_topk")?;
    // The last block may have one entry.
    if (blocks - 1) * size < top_k {
        return Err(wrong("candidate_topk_blocks", &format!("blocks of {size} with more than the {top_k} chosen")));
    }
    if layer >= source && ratio != 1 {
        return Err(wrong(NAME, "a layer from which on `compress_ratios` are 1"));
    }
    let by = if layer == source { ChosenBy::Own } else { ChosenBy::Earlier };
    Ok((layer >= source).then_some(Candidates { by, blocks, size }))
}

/// N-grams of layers.
fn ngrams(f: &Fields<'_>, image: Option<usize>) -> Result<Vec<(usize, Ngrams)>> {
    const LAYERS: &str = "engram_layer_ids";
    let layers = f.layers(LAYERS)?;
    let num_layers = f.num_layers()?;
    let valid = |i: usize| layers[i] < num_layers && !layers[..i].contains(&layers[i]);
    if layers.len() > MAX_NGRAM || !(0..layers.len()).all(valid) {
        return Err(wrong(LAYERS, &format!("a list of up to {MAX_NGRAM} different layers")));
    }
    if layers.is_empty() {
        return Ok(Vec::new());
    }
    let token = |name: &str, id: usize| id.try_into().map_err(|_| wrong(name, "a token"));
    let (max_tokens, heads) =
        (f.within("engram_max_ngram_size", 2..=MAX_NGRAM)?, f.within("engram_n_heads", 1..=MAX_NGRAM)?);
    let rows = (max_tokens - 1) * heads;
    let least = f.within("engram_vocab_size", 2..=MAX_HEAD_ROWS)?;
    let filler = token("engram_pad_token_id", f.count_or("engram_pad_token_id", 2)?)?;
    let kinds = f.dim("engram_compressed_vocab_size")?;
    let ngrams = Ngrams {
        max_tokens,
        heads,
        row_dim: f.dim("engram_head_dim")?,
        conv_width: None,
        // Where there are no images nothing ends an n-gram.
        end_token: image.map_or(Ok(u32::MAX), |image| token("image_token_id", image))?,
        filler,
        kinds: Some(kinds),
        alike: None,
        table_rows: 0,
        hash: None,
    };
    let mut used = Vec::new();
    let of_layer = |layer: usize| {
        let sizes = sizes([max_tokens - 1, heads], least, &mut used);
        let offsets = (0..rows).map(|i| sizes[..i].iter().sum()).collect();
        let hash = Hash { multipliers: multipliers(layer, max_tokens, kinds), sizes, offsets };
        let table_rows = hash.sizes.iter().sum::<i64>() as usize;
        (layer, Ngrams { table_rows, hash: Some(hash), ..ngrams.clone() })
    };
    Ok(layers.into_iter().map(of_layer).collect())
}

/// Rows of heads: for each length of n-grams the first primes from `least` on that no other head of any layer has.
fn sizes([lengths, heads]: [usize; 2], least: usize, used: &mut Vec<i64>) -> Vec<i64> {
    let is_prime = |n: i64| n > 1 && (2..).take_while(|d| d * d <= n).all(|d| n % d != 0);
    let first = used.len();
    for _ in 0..lengths {
        let mut n = least as i64 - 1;
        for _ in 0..heads {
            n = (n + 1..).find(|n| is_prime(*n) && !used.contains(n)).expect("there is always a larger prime");
            used.push(n);
        }
    }
    used[first..].to_vec()
}

/// Odd ones, with which no product of a token overflows.
fn multipliers(layer: usize, tokens: usize, kinds: usize) -> Vec<i64> {
    let mut random = Generator::new(10_007 * layer as u32);
    let end = i64::MAX as u64 / kinds as u64 / 2;
    (0..tokens).map(|_| random.below(end) as i64 * 2 + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of DeepSeek-V4.1-Flash, whose config says how many rows its tables have.
    #[test]
    fn tables_have_the_rows_of_the_release() {
        let mut used = Vec::new();
        let mut rows = || sizes([3, 8], 16_000_000, &mut used).iter().sum::<i64>();
        assert_eq!([rows(), rows()], [384_006_168, 384_016_682]);
        assert_eq!(multipliers(1, 4, 99_092), [76632096046245, 4839876093313, 35959672319349, 73987337458391]);
        assert_eq!(multipliers(14, 4, 99_092), [67716810739261, 51510806800915, 30921347202721, 82619226485591]);
    }
}
