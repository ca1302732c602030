//! Two verbs for the routed experts, whoever computes them: `submit` a layer's tokens, `finish` into the residual stream.

pub mod cpu;

pub use cpu::CpuExperts;

use moebius_cache::{ExpertCache, ExpertLayout};

use crate::Result;

/// Packed experts in memory: a mapped cache file, or random weights of a bench.
pub trait ExpertStore: Send + Sync {
    /// Of every expert.
    fn layout(&self) -> ExpertLayout;

    /// MoE layers.
    fn num_layers(&self) -> usize;

    /// Experts of a layer.
    fn num_experts(&self) -> usize;

    /// The bytes of one expert.
    fn expert(&self, layer: usize, expert: usize) -> &[u8];

    /// Whether those bytes are what was written; called once before an expert's first use.
    fn check_expert(&self, layer: usize, expert: usize) -> Result<()>;
}

impl ExpertStore for ExpertCache {
    fn layout(&self) -> ExpertLayout {
        self.layout()
    }

    fn num_layers(&self) -> usize {
        self.num_layers()
    }

    fn num_experts(&self) -> usize {
        self.num_experts()
    }

    fn expert(&self, layer: usize, expert: usize) -> &[u8] {
        self.expert(layer, expert)
    }

    fn check_expert(&self, layer: usize, expert: usize) -> Result<()> {
        Ok(self.check_expert(layer, expert)?)
    }
}

/// Which experts each token goes to, and with what weight.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Experts per token.
    pub top_k: usize,
    /// [tokens, top_k]; an id below 0 or beyond the layer's experts is skipped.
    pub ids: Vec<i32>,
    /// [tokens, top_k]
    pub weights: Vec<f32>,
}

/// The routed experts of a model; `T` is the tensor of the backend they stand beside.
pub trait ExpertExecutor<T>: Send {
    /// Starts one MoE layer (counted among MoE layers) on `x` [tokens, hidden].
    fn submit(&mut self, layer: usize, x: &T, routing: &Routing) -> Result<()>;

    /// Ends it: `out[t] += sum_e weight[t, e] * down_e(silu(gate_e x_t) * up_e x_t)`; `out` [tokens, hidden].
    fn finish(&mut self, out: &mut T) -> Result<()>;

    /// Bytes of expert weights read since the start.
    fn bytes_read(&self) -> u64;
}
