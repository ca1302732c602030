//! Which experts tokens choose in a bench: as random weights do, as real models do, or as one did.
//!
//! *Local* routing is what a layer's choices look like from token to token. Each expert has a score, and a token goes
//! to the largest:
//!
//! ```text
//! score = popularity + topic + recent + noise, all normal
//!   popularity   of the expert, for good
//!   topic        fades within 175 tokens
//!   recent       fades within 4
//! ```
//!
//! Their shares of the variance are fitted to the rates at which an LRU cache over all layers hits with real models
//! (Qwen3-30B: 37, 74, 89 and 96% with room for 6, 19, 38 and 64% of the experts; Qwen3.8-Flash-Next: 67, 83 and 92%
//! with 12.5, 25 and 50%), and to the 45 to 50% of its experts that a token shares with the one before it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use safetensors::SafeTensors;

use crate::kernel::random::Random;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Where the choices of experts come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The router. With random weights every expert is as likely as any other, whatever was chosen before.
    #[default]
    Uniform,
    /// A generator that repeats experts as real models do.
    Local,
    /// A file that `moebius capture --router` has written.
    File(PathBuf),
}

impl FromStr for Routing {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        Ok(match s {
            "uniform" => Self::Uniform,
            "local" => Self::Local,
            file => Self::File(file.into()),
        })
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Local => f.write_str("local"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Standard deviations of a score's parts, and tokens in which two of them fade.
const POPULARITY: f32 = 0.412;
const TOPIC: (f32, f32) = (0.482, 175.0);
const RECENT: (f32, f32) = (0.720, 3.85);
const NOISE: f32 = 0.280;

/// The share of a layer's experts that its router names from the residual stream of a layer before: 59 to 89% with a
/// small trained model.
const FORESEEN: u64 = 75;

/// The choices of a model's tokens.
pub(super) struct Choices {
    layers: usize,
    experts: usize,
    top_k: usize,
    source: Source,
}

enum Source {
    Local { popularity: Arc<[f32]> }, // [layers, experts]
    Recorded { ids: Arc<[i32]> },     // [tokens, layers, top_k]
}

/// The choices of a pass, `[layers, sequences, tokens, top_k]`, and what is foreseen of them: as much as with real
/// models. Empty: the router chooses.
#[derive(Default)]
pub(super) struct Pass {
    pub(super) chosen: Vec<i32>,
    pub(super) foreseen: Vec<i32>,
}

/// The tokens of one sequence, one after the other.
pub(super) enum Sequence {
    Local { popularity: Arc<[f32]>, topic: Vec<f32>, recent: Vec<f32>, random: Random },
    Recorded { ids: Arc<[i32]>, at: usize },
}

impl Choices {
    /// For a model; `None`: its router chooses. Errors: `Error::Invalid` for a file that does not fit the model.
    pub(super) fn new(routing: &Routing, model: &ModelConfig) -> Result<Option<Self>> {
        let (Some(moe), true) = (model.moe(), *routing != Routing::Uniform) else { return Ok(None) };
        let (layers, experts, top_k) = (model.moe_layers().count(), moe.num_experts, moe.router.top_k);
        let source = match routing {
            Routing::File(path) => Source::Recorded { ids: recorded(path, layers, experts, top_k)?.into() },
            _ => {
                let mut random = Random(7);
                Source::Local { popularity: (0..layers * experts).map(|_| POPULARITY * normal(&mut random)).collect() }
            }
        };
        Ok(Some(Self { layers, experts, top_k, source }))
    }

    /// A sequence of its own.
    pub(super) fn sequence(&self, number: usize) -> Sequence {
        match &self.source {
            Source::Local { popularity } => {
                let mut random = Random::at(11, (number as u64) << 40);
                let mut start = |deviation: f32| popularity.iter().map(|_| deviation * normal(&mut random)).collect();
                let (topic, recent) = (start(TOPIC.0), start(RECENT.0));
                Sequence::Local { popularity: popularity.clone(), topic, recent, random }
            }
            // Each begins elsewhere in the recording.
            Source::Recorded { ids } => {
                let token = self.layers * self.top_k;
                Sequence::Recorded { ids: ids.clone(), at: number * 997 * token % ids.len() }
            }
        }
    }

    /// What a sequence's next token chooses: `[layers, top_k]`.
    fn next(&self, sequence: &mut Sequence, out: &mut [i32]) {
        match sequence {
            Sequence::Recorded { ids, at } => {
                out.copy_from_slice(&ids[*at..][..out.len()]);
                *at = (*at + out.len()) % ids.len();
            }
            Sequence::Local { popularity, topic, recent, random } => {
                let fade = |(deviation, tokens): (f32, f32)| {
                    let keep = (-1.0 / tokens).exp();
                    (keep, deviation * (1.0 - keep * keep).sqrt())
                };
                let (of_topic, of_recent) = (fade(TOPIC), fade(RECENT));
                let mut scores: Vec<(f32, i32)> = Vec::with_capacity(self.experts);
                for (layer, out) in out.chunks_exact_mut(self.top_k).enumerate() {
                    scores.clear();
                    for expert in 0..self.experts {
                        let i = layer * self.experts + expert;
                        topic[i] = of_topic.0 * topic[i] + of_topic.1 * normal(random);
                        recent[i] = of_recent.0 * recent[i] + of_recent.1 * normal(random);
                        scores.push((popularity[i] + topic[i] + recent[i] + NOISE * normal(random), expert as i32));
                    }
                    scores.select_nth_unstable_by(self.top_k - 1, |a, b| b.0.total_cmp(&a.0));
                    out.iter_mut().zip(&scores).for_each(|(id, (_, expert))| *id = *expert);
                }
            }
        }
    }

    /// A pass of `tokens` tokens of each of some sequences.
    pub(super) fn pass(&self, sequences: &mut [Sequence], tokens: usize, random: &mut Random) -> Pass {
        let chosen = self.chosen(sequences, tokens);
        let guess = |&id: &i32| match random.bits() % 100 < FORESEEN {
            true => id,
            false => (random.bits() % self.experts as u64) as i32,
        };
        Pass { foreseen: chosen.iter().map(guess).collect(), chosen }
    }

    /// What such a pass chooses, `[layers, sequences, tokens, top_k]`.
    fn chosen(&self, sequences: &mut [Sequence], tokens: usize) -> Vec<i32> {
        let (rows, k) = (sequences.len() * tokens, self.top_k);
        let mut ids = vec![0; self.layers * rows * k];
        let mut token = vec![0; self.layers * k];
        for row in 0..rows {
            self.next(&mut sequences[row / tokens], &mut token);
            for (layer, chosen) in token.chunks_exact(k).enumerate() {
                ids[(layer * rows + row) * k..][..k].copy_from_slice(chosen);
            }
        }
        ids
    }
}

/// Nearly normal, of mean 0 and deviation 1: a sum of four 16-bit numbers.
fn normal(random: &mut Random) -> f32 {
    let bits = random.bits();
    let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
    (sum as f32 - 2.0 * 65535.0) * (3.0f32.sqrt() / 65536.0)
}

/// The choices in a file of `moebius capture`, `[tokens, layers, top_k]`.
fn recorded(path: &Path, layers: usize, experts: usize, top_k: usize) -> Result<Vec<i32>> {
    let wrong = |what: String| Error::Invalid(format!("--routing {}: {what}", path.display()));
    let bytes = std::fs::read(path)
        .map_err(|e| wrong(format!("cannot be read ({e}): give uniform, local, or a file of moebius capture")))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(format!("is no safetensors file ({e})")))?;
    let layer_of = |name: &str| name.strip_prefix("router.")?.strip_suffix(".ids")?.parse::<usize>().ok();
    let mut tensors: Vec<(usize, _)> =
        file.iter().filter_map(|(name, tensor)| Some((layer_of(name)?, tensor))).collect();
    tensors.sort_by_key(|(layer, _)| *layer);
    if tensors.len() < layers {
        let n = tensors.len();
        return Err(wrong(format!("has router.N.ids of {n} layers and the model has {layers} MoE layers")));
    }
    tensors.truncate(layers);
    let tokens = tensors[0].1.shape().first().copied().unwrap_or(0);
    let mut ids = vec![0; tokens * layers * top_k];
    for (i, (layer, tensor)) in tensors.iter().enumerate() {
        let is_whole = tensor.shape() == [tokens, top_k] && tensor.dtype() == safetensors::Dtype::I32 && tokens > 0;
        if !is_whole {
            return Err(wrong(format!("router.{layer}.ids is not i32 [tokens, {top_k}]")));
        }
        for (choice, bytes) in tensor.data().chunks_exact(4).enumerate() {
            let id = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            if !(0..experts as i32).contains(&id) {
                return Err(wrong(format!("router.{layer}.ids has expert {id} and a layer has {experts}")));
            }
            ids[(choice / top_k * layers + i) * top_k + choice % top_k] = id;
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const LAYERS: usize = 3;

    /// Choices of a sequence in all layers, by token.
    fn tokens(experts: usize, top_k: usize, n: usize) -> Vec<Vec<i32>> {
        let mut random = Random(3);
        let popularity = (0..LAYERS * experts).map(|_| POPULARITY * normal(&mut random)).collect();
        let choices = Choices { layers: LAYERS, experts, top_k, source: Source::Local { popularity } };
        let mut sequence = [choices.sequence(0)];
        (0..n).map(|_| choices.chosen(&mut sequence, 1)).collect()
    }

    /// The share of choices that an LRU cache of `share` of all experts holds, after some tokens.
    fn lru(tokens: &[Vec<i32>], experts: usize, top_k: usize, share: f64) -> f64 {
        let room = (share * (LAYERS * experts) as f64) as usize;
        let mut used: HashMap<(usize, i32), usize> = HashMap::new(); // when it was last
        let (mut hits, mut all) = (0, 0);
        for (at, (token, layer, expert)) in tokens
            .iter()
            .enumerate()
            .flat_map(|(t, ids)| ids.iter().enumerate().map(move |(i, &id)| (t, i / top_k, id)))
            .enumerate()
        {
            let is_hit = used.insert((layer, expert), at).is_some();
            if token >= tokens.len() / 3 {
                (hits, all) = (hits + usize::from(is_hit), all + 1u32);
            }
            if used.len() > room {
                let oldest = *used.iter().min_by_key(|(_, at)| **at).unwrap().0;
                used.remove(&oldest);
            }
        }
        hits as f64 / f64::from(all)
    }

    fn near(measured: f64, real: f64, points: f64) {
        assert!((100.0 * measured - real).abs() <= points, "{:.1}%, of real models {real}%", 100.0 * measured);
    }

    #[test]
    fn a_cache_hits_as_with_qwen3_30b() {
        let tokens = tokens(128, 8, 900);
        let shared = tokens.windows(2).map(|pair| {
            let same =
                pair[1].chunks(8).zip(pair[0].chunks(8)).map(|(a, b)| a.iter().filter(|e| b.contains(e)).count());
            same.sum::<usize>() as f64 / (8 * LAYERS) as f64
        });
        near(shared.sum::<f64>() / 899.0, 47.5, 5.0);
        for (share, real) in [(24.0 / 384.0, 37.0), (0.19, 74.0), (0.38, 89.0), (0.64, 96.0)] {
            near(lru(&tokens, 128, 8, share), real, 4.0);
        }
    }

    #[test]
    fn a_cache_hits_as_with_flash_next() {
        let tokens = tokens(512, 10, 900);
        for (share, real) in [(0.125, 67.0), (0.25, 83.0), (0.5, 92.0)] {
            near(lru(&tokens, 512, 10, share), real, 5.0);
        }
    }

    #[test]
    fn a_recording_comes_back_and_a_wrong_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routing.safetensors");
        let write = |layers: &[usize], ids: &[i32]| {
            let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let tensor = || {
                safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![ids.len() / 2, 2], &data).unwrap()
            };
            let tensors = layers.iter().map(|layer| (format!("router.{layer}.ids"), tensor()));
            std::fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        };
        write(&[1, 10, 2], &[0, 1, 2, 3, 4, 5]);
        assert_eq!(recorded(&path, 2, 8, 2).unwrap(), [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]);
        for (layers, experts, top_k) in [(4, 8, 2), (2, 5, 2), (2, 8, 3)] {
            assert!(recorded(&path, layers, experts, top_k).is_err(), "{layers} {experts} {top_k}");
        }
        assert!(recorded(&dir.path().join("none"), 1, 8, 2).is_err());
    }
}
