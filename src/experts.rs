//! Two verbs for the routed experts, whoever computes them: `submit` a layer's tokens, `finish` into the residual stream.

pub mod cpu;
pub mod memory;

pub use cpu::{CpuExperts, Pace};
pub use memory::ExpertMemory;

use crate::Result;
use crate::backend::Routing;

/// The routed experts of a model; `T` is the tensor of the backend they stand beside.
pub trait ExpertExecutor<T>: Send {
    /// Starts one MoE layer (counted among MoE layers) on `x` [tokens, hidden].
    fn submit(&mut self, layer: usize, x: &T, routing: &Routing) -> Result<()>;

    /// Ends it: `out[t] += sum_e weight[t, e] * down_e(silu(gate_e x_t) * up_e x_t)`; `out` [tokens, hidden].
    fn finish(&mut self, out: &mut T) -> Result<()>;

    /// Bytes of expert weights read since the start.
    fn bytes_read(&self) -> u64;
}
