//! `Load`: resident weights, from host tensors into the form in which the device multiplies with them.

use super::memory::Memory;
use super::source::LinearWeight;
use super::tensor::HostTensor;
use crate::Result;
use crate::config::DenseBits;
use crate::model::{DeltaNet, Mla};

/// A router on its way to a device; vectors are `[experts]`.
pub struct RouterTensors<'a> {
    /// `[experts, hidden]`
    pub weight: HostTensor<'a>,
    /// Added to the logits.
    pub bias: Option<HostTensor<'a>>,
    /// Ranks experts without entering their weights.
    pub correction_bias: Option<HostTensor<'a>>,
    /// Multiplies the experts' weights.
    pub expert_scale: Option<HostTensor<'a>>,
    /// Each token's experts, `[vocab, top_k]`, where a table has them: whole numbers.
    pub by_token: Option<HostTensor<'a>>,
}

impl<'a> RouterTensors<'a> {
    /// A router that has nothing but its weight.
    pub fn of(weight: HostTensor<'a>) -> Self {
        Self { weight, bias: None, correction_bias: None, expert_scale: None, by_token: None }
    }
}

/// Weights of gated DeltaNet other than its projections, on their way to a device.
pub struct DeltaRule<'a> {
    /// `[conv_dim, conv_width]`, the last one for the token itself.
    pub conv: HostTensor<'a>,
    /// Rows that make `b`, then those that make `a`, of every value head: `[2 * num_value_heads, hidden]`.
    pub gates: HostTensor<'a>,
    /// `exp(A_log)`, `[num_value_heads]`.
    pub rates: HostTensor<'a>,
    /// `[num_value_heads]`
    pub dt_bias: HostTensor<'a>,
    /// `[value_head_dim]`
    pub norm: HostTensor<'a>,
    /// Epsilon of the norm.
    pub eps: f32,
}

impl DeltaRule<'_> {
    /// The convolution as kernels read it: `[conv_width, conv_dim]`.
    pub(crate) fn taps(&self) -> HostTensor<'static> {
        self.conv.transpose_heads(1)
    }
}

/// Brings weights of every kind to the device.
pub trait Load: Memory {
    /// Weights of `y = W x + b`.
    type Linear: Send;
    /// Weights of several products, each of a part of the columns.
    type Groups: Send;
    /// `kv_b_proj`, which makes keys and values of latents, and the configuration of latent attention.
    type LatentUp: Send;
    /// Weights of gated DeltaNet other than its projections, and its configuration.
    type DeltaNet: Send;
    /// Norm weights `[n]`, f32.
    type Norm: Send + Sync;
    /// A router, f32.
    type Router: Send;
    /// Embedding rows.
    type Embedding: Send;

    /// Takes over a weight `[n, k]` in the given precision. Errors: the precision does not fit the shape, or a number
    /// is NaN or infinite.
    fn load_linear<'a>(
        &self,
        weight: impl Into<LinearWeight<'a>>,
        bias: Option<HostTensor<'_>>,
        bits: DenseBits,
    ) -> Result<Self::Linear>;
    /// Takes over the rows of `groups` weights of one shape, one after the other, in the given precision. Errors: as
    /// [`Load::load_linear`].
    fn load_groups<'a>(
        &self,
        groups: usize,
        weight: impl Into<LinearWeight<'a>>,
        bits: DenseBits,
    ) -> Result<Self::Groups>;
    /// Takes over `kv_b_proj`, `[heads * (nope + v), rank]`, kept at 16 bits: of each head first the rows that make a
    /// key of a latent, then those that make a value.
    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<Self::LatentUp>;
    /// Whether gated DeltaNet can give value heads in the order of a file that has them tiled, which a configuration
    /// with `tiled` asks for, so that the columns of its last projection may stay where they are.
    fn gives_tiled_heads(&self) -> bool {
        false
    }
    /// Takes over the weights of gated DeltaNet other than its projections.
    fn load_delta_net(&self, config: &DeltaNet, rule: DeltaRule<'_>) -> Result<Self::DeltaNet>;
    /// Takes over norm weights, `[n]`.
    fn load_norm(&self, weight: HostTensor<'_>) -> Result<Self::Norm>;
    /// As [`Load::load_norm`], of `n` weights that are made, not read; none are where memory is only counted.
    fn load_made_norm(&self, n: usize, make: impl FnOnce() -> Vec<f32>) -> Result<Self::Norm> {
        self.load_norm(if self.is_plan() { HostTensor::Shape { rows: n, cols: 1 } } else { make().into() })
    }
    /// Takes over a router.
    fn load_router(&self, router: RouterTensors<'_>) -> Result<Self::Router>;
    /// Takes over embedding rows `[vocab, hidden]`.
    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Self::Embedding>;

    /// Weight bytes that applying `w` to one token reads.
    fn linear_bytes(&self, w: &Self::Linear) -> usize;
    /// As [`Load::linear_bytes`].
    fn groups_bytes(&self, w: &Self::Groups) -> usize;
    /// As [`Load::linear_bytes`].
    fn latent_up_bytes(&self, w: &Self::LatentUp) -> usize;
}
