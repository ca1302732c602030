//! `Load`: resident weights, from host tensors into the form in which the device multiplies with them.

use super::memory::Memory;
use super::tensor::HostTensor;
use crate::Result;
use crate::config::DenseBits;
use crate::model::{DeltaNet, Mla};

/// A router on its way to a device; vectors are `[experts]`.
#[derive(Default)]
pub struct RouterTensors {
    /// `[experts, hidden]`
    pub weight: Vec<f32>,
    /// Added to the logits.
    pub bias: Option<Vec<f32>>,
    /// Ranks experts without entering their weights.
    pub correction_bias: Option<Vec<f32>>,
    /// Multiplies the experts' weights.
    pub expert_scale: Option<Vec<f32>>,
}

/// Weights of gated DeltaNet other than its projections, on their way to a device.
pub struct DeltaRule {
    /// `[conv_dim, conv_width]`, the last one for the token itself.
    pub conv: Vec<f32>,
    /// Rows that make `b`, then those that make `a`, of every value head: `[2 * num_value_heads, hidden]`.
    pub gates: Vec<f32>,
    /// `exp(A_log)`, `[num_value_heads]`.
    pub rates: Vec<f32>,
    /// `[num_value_heads]`
    pub dt_bias: Vec<f32>,
    /// `[value_head_dim]`
    pub norm: Vec<f32>,
    /// Epsilon of the norm.
    pub eps: f32,
}

impl DeltaRule {
    /// The convolution as kernels read it: `[conv_width, conv_dim]`.
    pub(crate) fn taps(&self, config: &DeltaNet) -> Vec<f32> {
        let (width, channels) = (config.conv_width, config.conv_dim());
        (0..width).flat_map(|tap| (0..channels).map(move |c| self.conv[c * width + tap])).collect()
    }
}

/// Brings weights of every kind to the device.
pub trait Load: Memory {
    /// Weights of `y = W x + b`.
    type Linear: Send;
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

    /// Takes over a weight `[n, k]` in the given precision. Errors: the precision does not fit the shape.
    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Self::Linear>;
    /// Takes over `kv_b_proj`, `[heads * (nope + v), rank]`, kept at 16 bits: of each head first the rows that make a
    /// key of a latent, then those that make a value.
    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<Self::LatentUp>;
    /// Takes over the weights of gated DeltaNet other than its projections.
    fn load_delta_net(&self, config: &DeltaNet, rule: DeltaRule) -> Result<Self::DeltaNet>;
    /// Takes over norm weights.
    fn load_norm(&self, weight: Vec<f32>) -> Result<Self::Norm>;
    /// Takes over a router.
    fn load_router(&self, router: RouterTensors) -> Result<Self::Router>;
    /// Takes over embedding rows `[vocab, hidden]`.
    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Self::Embedding>;

    /// Weight bytes that applying `w` to one token reads.
    fn linear_bytes(&self, w: &Self::Linear) -> usize;
    /// As [`Load::linear_bytes`].
    fn latent_up_bytes(&self, w: &Self::LatentUp) -> usize;
}
