//! What benches of the CPU's experts share: real models' shapes, stores of anything, random tokens.

use moebius::backend::Routing;
use moebius::model::{Router, Scoring};
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::{ExpertLayout, Precision};

/// One MoE layer.
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
}

impl Shape {
    /// A softmax over all experts, renormalized.
    pub(crate) fn router(&self) -> Router {
        Router { normalize: true, ..Router::new(self.top_k, Scoring::Softmax) }
    }
}

pub(crate) const SHAPES: [Shape; 3] = [
    Shape { name: "deepseek-v2-lite", hidden: 2048, intermediate: 1408, experts: 64, top_k: 6 },
    Shape { name: "qwen3-30b-a3b", hidden: 2048, intermediate: 768, experts: 128, top_k: 8 },
    Shape { name: "kimi-k2/6", hidden: 7168, intermediate: 2048, experts: 64, top_k: 8 },
];

/// More than any last-level cache by enough that little of a pass is still there on the next.
pub(crate) const STORE_BYTES: usize = 3 << 29;

/// Bytes as experts: every code and a small scale are valid, and arithmetic takes the same time on any numbers.
pub(crate) fn store(shape: &Shape, precision: Precision) -> moebius::Result<ExpertCache> {
    let layout = ExpertLayout::new(shape.hidden, shape.intermediate, precision)?;
    store_of(shape, precision, STORE_BYTES.div_ceil(shape.experts * layout.bytes()))
}

/// The same of so many layers.
pub(crate) fn store_of(shape: &Shape, precision: Precision, layers: usize) -> moebius::Result<ExpertCache> {
    let layers: Vec<usize> = (0..layers).collect();
    let Shape { name: model, hidden, intermediate, experts: num_experts, .. } = *shape;
    let contents = Contents {
        model,
        hidden,
        intermediate,
        num_experts,
        kind: Default::default(),
        precision: precision.into(),
        layers: &layers,
    };
    // 0x3c in both bytes of a bf16 is 0.0115.
    Ok(ExpertCache::anonymous(&contents, |_, _, bytes| bytes.fill(0x3c))?)
}

fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize
}

/// From -1 to 1.
pub(crate) fn uniform(state: &mut u64) -> f32 {
    random(state) as f32 / (1u64 << 30) as f32 - 1.0
}

/// `top_k` different experts for each token.
pub(crate) fn routing(tokens: usize, shape: &Shape, state: &mut u64) -> Routing {
    let mut ids = Vec::new();
    for token in 0..tokens {
        while ids.len() < (token + 1) * shape.top_k {
            let id = (random(state) % shape.experts) as i32;
            if !ids[token * shape.top_k..].contains(&id) {
                ids.push(id);
            }
        }
    }
    let weights = vec![1.0 / shape.top_k as f32; ids.len()];
    Routing { top_k: shape.top_k, ids, weights }
}
