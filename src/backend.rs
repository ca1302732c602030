//! `Backend`: every device op of the forward pass, with its shapes. Activations stay on the device between ops.
//!
//! Each op is a function of single rows in a fixed order of arithmetic: a token's bits do not depend on what else is in
//! the batch.

pub mod cpu;

use crate::Result;
use crate::batch::Batch;
use crate::config::{DenseBits, KvBits};
use crate::model::Router;
use crate::tensor::HostTensor;

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

/// A device that runs the model. `T` below is the number of tokens in the batch.
pub trait Backend {
    /// Activations `[rows, cols]`, allocated once at their largest.
    type Tensor;
    /// Weights of `y = W x + b`.
    type Linear;
    /// One small `[n, k]` matrix per attention head.
    type Heads;
    /// Norm weights `[n]`, f32.
    type Norm;
    /// Router weights, f32, and its correction bias.
    type Router;
    /// Embedding rows.
    type Embedding;
    /// KV storage of one layer, in blocks of [`crate::batch::BLOCK_SIZE`] positions.
    type Kv;

    /// Allocates activations of at most `max_rows` rows.
    fn tensor(&self, max_rows: usize, cols: usize) -> Self::Tensor;
    /// Takes `rows` rows of `t` into use.
    fn set_rows(&self, t: &mut Self::Tensor, rows: usize);
    /// Copies `t` to the host: `out` becomes `[rows, cols]`.
    fn read(&self, t: &Self::Tensor, out: &mut Vec<f32>);

    /// Takes over a weight `[n, k]` in the given precision. Errors: the precision does not fit the shape.
    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Self::Linear>;
    /// Takes over `[heads, n, k]`, kept at 16 bits.
    fn load_heads(&self, heads: usize, weight: HostTensor<'_>) -> Result<Self::Heads>;
    /// Takes over norm weights.
    fn load_norm(&self, weight: Vec<f32>) -> Self::Norm;
    /// Takes over router weights `[experts, hidden]` and the bias for choosing, `[experts]`.
    fn load_router(&self, weight: Vec<f32>, correction_bias: Option<Vec<f32>>) -> Self::Router;
    /// Takes over embedding rows `[vocab, hidden]`.
    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Self::Embedding>;
    /// KV storage for keys of `key_dim` and values of `value_dim` numbers for each of `heads`.
    fn kv(&self, blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Self::Kv>;

    /// Weight bytes that applying `w` to one token reads.
    fn linear_bytes(&self, w: &Self::Linear) -> usize;
    /// As [`Backend::linear_bytes`].
    fn heads_bytes(&self, w: &Self::Heads) -> usize;

    /// `out[t] = embedding[tokens[t]]`.
    fn embed(&self, embedding: &Self::Embedding, tokens: &[u32], out: &mut Self::Tensor);
    /// `out[t] = norm(x[t])`.
    fn rms_norm(&self, x: &Self::Tensor, w: &Self::Norm, eps: f32, out: &mut Self::Tensor);
    /// RMS norm, in place, of every run of `w.len()` numbers in the columns `cols` of each row.
    fn rms_norm_heads(&self, x: &mut Self::Tensor, w: &Self::Norm, eps: f32, cols: std::ops::Range<usize>);
    /// `out[t] = W x[t] + b`.
    fn linear(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor) {
        self.linears(x, [(w, out)]);
    }
    /// Several at once of the same `x` and the same precision.
    fn linears<const N: usize>(&self, x: &Self::Tensor, jobs: [(&Self::Linear, &mut Self::Tensor); N]);
    /// `out[t] += W x[t] + b`.
    fn linear_add(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor);
    /// `out[t, h, out_at..out_at + n] = W[h] x[t, h, x_at..x_at + k]`, heads being equal parts of a row.
    fn heads(&self, w: &Self::Heads, x: &Self::Tensor, x_at: usize, out: &mut Self::Tensor, out_at: usize);
    /// Copies columns `[x_at, x_at + width)` of each head of `x` to `out_at` of each head of `out`.
    fn copy_heads(&self, num_heads: usize, width: usize, x: &Self::Tensor, x_at: usize, out: &mut Self::Tensor, out_at: usize);
    /// cos, then sin, of every token's angles times `factor`: `out` is `[T, 2 * inv_freq.len()]`. Once per forward pass.
    fn rope_angles(&self, inv_freq: &[f32], factor: f32, positions: &[u32], out: &mut Self::Tensor);
    /// Rotates columns `[at, at + angles.cols)` of every `head_dim` columns of `x`.
    fn rope(&self, x: &mut Self::Tensor, head_dim: usize, at: usize, interleaved: bool, angles: &Self::Tensor);
    /// Stores keys and values of the batch's tokens in its sequences' blocks; without `value`, values are the first numbers of the keys.
    /// The tokens of a sequence come in the order of their positions.
    fn kv_write(&self, kv: &mut Self::Kv, batch: &Batch, key: &Self::Tensor, value: Option<&Self::Tensor>);
    /// Causal attention of `q` `[T, num_heads * key_dim]` over the cached positions of each token's sequence, itself
    /// included; `out` is `[T, num_heads * value_dim]`.
    fn attention(&self, kv: &Self::Kv, batch: &Batch, num_heads: usize, scale: f32, q: &Self::Tensor, out: &mut Self::Tensor);
    /// `out[t] = silu(gate[t]) * up[t]`.
    fn silu_mul(&self, gate: &Self::Tensor, up: &Self::Tensor, out: &mut Self::Tensor);
    /// Chooses and weights experts for every token; scaling is in the weights.
    fn route(&self, w: &Self::Router, router: &Router, x: &Self::Tensor, out: &mut Routing);
    /// `out[i] = x[rows[i]]`.
    fn gather(&self, x: &Self::Tensor, rows: &[usize], out: &mut Self::Tensor);
}
