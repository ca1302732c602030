//! `Backend`: every device op of the forward pass, with its shapes. Activations stay on the device between ops.
//!
//! ```text
//! batch     a ragged batch of tokens
//! tensor    activations and weights on the host
//! source    resident weights by their Hugging Face names
//! cpu       the ops on a team of threads
//! cuda      the ops on a GPU
//! ```
//!
//! Each op is a function of single rows in a fixed order of arithmetic: a token's bits do not depend on what else is in
//! the batch.
//!
//! Imports machine, kernel, cuda, config and model. Read [`Backend`] first.

pub mod batch;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod source;
pub mod tensor;

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::{HostTensor, Shortlist};
use crate::config::{DenseBits, KvBits};
use crate::model::{DeltaNet, Mla, Router};

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

impl Routing {
    /// Puts the tokens of `more` behind its own.
    pub fn append(&mut self, more: &Self) {
        self.top_k = more.top_k;
        self.ids.extend_from_slice(&more.ids);
        self.weights.extend_from_slice(&more.weights);
    }
}

/// What a device was measured to do in a second.
#[derive(Clone, Debug)]
pub struct Rates {
    /// What it is called.
    pub device: String,
    /// Bytes that its memory reads and writes.
    pub memory: f64,
    /// Bytes that come to it from the host.
    pub link: f64,
    /// Operations of products of BF16 matrices, two to a weight and a token.
    pub products: f64,
    /// Bytes of its memory that are taken.
    pub taken: u64,
}

/// The time that kernels of one name took.
#[derive(Clone, Debug)]
pub struct OpTime {
    /// The kernel's.
    pub name: &'static str,
    /// How often it ran.
    pub launches: usize,
    /// All together, the gaps behind them included.
    pub seconds: f64,
}

/// Queries or keys on their way from a product to attention.
pub struct Heads<'a, B: Backend> {
    /// `[T, heads * dim]`
    pub x: &'a mut B::Tensor,
    /// How many.
    pub heads: usize,
    /// Numbers of a head.
    pub dim: usize,
    /// RMS norm of the first so many numbers of a head, and its epsilon; all of them, or there is one head.
    pub norm: Option<(&'a B::Norm, usize, f32)>,
    /// Where in a head the rotated numbers begin.
    pub rope_at: usize,
}

/// How scores become shares of the values that a head of grouped-query attention reads.
pub struct Softmax<'a, B: Backend> {
    /// Multiplies the scores.
    pub scale: f32,
    /// A token sees itself and the `window - 1` before it; `None`: all before it.
    pub window: Option<usize>,
    /// A score for each head, which takes part and brings no value.
    pub sinks: Option<&'a B::Norm>, // [num_heads]
}

/// What gated DeltaNet has beside its projections, on its way to a backend.
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
}

impl DeltaRule {
    /// The convolution as kernels read it: `[conv_width, conv_dim]`.
    pub(crate) fn taps(&self, config: &DeltaNet) -> Vec<f32> {
        let (width, channels) = (config.conv_width, config.conv_dim());
        (0..width).flat_map(|tap| (0..channels).map(move |c| self.conv[c * width + tap])).collect()
    }
}

/// A multiple of a vector, for rows of the residual stream.
pub struct Addition<N> {
    /// After this layer.
    pub layer: usize,
    /// Of the batch.
    pub rows: Range<usize>,
    /// `[hidden]`
    pub vector: Arc<N>,
    /// What it is multiplied with.
    pub coefficient: f32,
}

/// What passes have in common that run the same ops: one token for each of so many sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Tokens.
    pub tokens: usize,
    /// Whether something may be added to the residual stream.
    pub steered: bool,
}

/// A device that runs the model. `T` below is the number of tokens in the batch.
///
/// Ops may be asynchronous: what one fails at is told by the next call that returns a `Result`.
pub trait Backend: Sized + Send + 'static {
    /// What ops need to know of a batch.
    type Batch: Send;
    /// Activations `[rows, cols]`, allocated once at their largest.
    type Tensor: Send;
    /// Weights of `y = W x + b`.
    type Linear: Send;
    /// `kv_b_proj`: keys and values of latent attention out of latents.
    type LatentUp: Send;
    /// Activations of latent attention.
    type LatentScratch: Send;
    /// Gated DeltaNet between its projections.
    type DeltaNet: Send;
    /// Activations of gated DeltaNet.
    type DeltaScratch: Send;
    /// Norm weights `[n]`, f32.
    type Norm: Send + Sync;
    /// Router weights, f32, and its correction bias.
    type Router: Send;
    /// Embedding rows.
    type Embedding: Send;
    /// KV storage of one layer, in blocks of [`crate::backend::batch::BLOCK_SIZE`] positions.
    type Kv: Send;
    /// Recurrent state of one layer, in slots of a sequence each.
    type State: Send;
    /// Experts and weights of every token.
    type Routing: Send;
    /// What a pass adds to the residual stream.
    type Additions: Send;
    /// What finds the largest logits of rows.
    type Shortlister: Send;
    /// Numbers on the host that the device copies to fast.
    type Host: std::ops::DerefMut<Target = [f32]> + Send;

    /// Room for batches of at most `max_tokens` tokens.
    fn batch(&self, max_tokens: usize) -> Result<Self::Batch>;
    /// Brings a batch to the device.
    fn set_batch(&self, to: &mut Self::Batch, batch: &Batch);
    /// Allocates activations of at most `max_rows` rows, in the precision in which products take them.
    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Self::Tensor>;
    /// Allocates activations that are f32 on every device: residual stream, angles, logits.
    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Self::Tensor>;
    /// Allocates a routing of at most `max_tokens` tokens.
    fn routing(&self, max_tokens: usize, top_k: usize) -> Result<Self::Routing>;
    /// A list of additions after any of so many layers, empty.
    fn additions(&self, layers: usize) -> Result<Self::Additions>;
    /// Brings a list to the device, in place of the one before.
    fn set_additions(&self, to: &mut Self::Additions, additions: Vec<Addition<Self::Norm>>) -> Result<()>;
    /// Copies a routing to the host.
    fn read_routing(&self, routing: &Self::Routing, out: &mut Routing) -> Result<()>;
    /// Takes `rows` rows of `t` into use.
    fn set_rows(&self, t: &mut Self::Tensor, rows: usize);
    /// Whether [`shortlist`](Backend::shortlist) is there.
    const SHORTLISTS: bool = false;
    /// Allocates what [`shortlist`](Backend::shortlist) needs for at most `max_rows` rows of `cols` numbers.
    fn shortlister(&self, max_rows: usize, cols: usize) -> Result<Self::Shortlister>;
    /// The largest of each row of `logits`, f32, and what the row weighs at an inverse temperature.
    fn shortlist(
        &self,
        _: &mut Self::Shortlister,
        _logits: &Self::Tensor,
        _inverse_temperatures: &[f32],
        _out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        panic!("not where SHORTLISTS is false")
    }
    /// Allocates so many numbers on the host.
    fn host(&self, numbers: usize) -> Result<Self::Host>;
    /// Copies rows of `t`, f32, to the host: `out` is `[rows, cols]`.
    fn read_rows(&self, t: &Self::Tensor, rows: Range<usize>, out: &mut [f32]) -> Result<()>;
    /// Copies `t` to the host: `out` becomes `[rows, cols]`.
    fn read(&self, t: &Self::Tensor, out: &mut Vec<f32>) -> Result<()>;

    /// Takes over a weight `[n, k]` in the given precision. Errors: the precision does not fit the shape.
    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Self::Linear>;
    /// Takes over `kv_b_proj`, `[heads * (nope + v), rank]`, kept at 16 bits: of each head first the rows that make a
    /// key of a latent, then those that make a value.
    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<Self::LatentUp>;
    /// Takes over norm weights.
    fn load_norm(&self, weight: Vec<f32>) -> Result<Self::Norm>;
    /// Takes over router weights `[experts, hidden]`, the bias of the logits and the bias for choosing, `[experts]`
    /// each.
    fn load_router(
        &self,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        correction_bias: Option<Vec<f32>>,
    ) -> Result<Self::Router>;
    /// Takes over what gated DeltaNet has beside its projections.
    fn load_delta_net(&self, config: &DeltaNet, rule: DeltaRule) -> Result<Self::DeltaNet>;
    /// Recurrent state of `slots` sequences.
    fn state(&self, slots: usize, config: &DeltaNet) -> Result<Self::State>;
    /// Takes over embedding rows `[vocab, hidden]`.
    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Self::Embedding>;
    /// KV storage for keys of `key_dim` and values of `value_dim` numbers for each of `heads`.
    fn kv(&self, blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Self::Kv>;

    /// Weight bytes that applying `w` to one token reads.
    fn linear_bytes(&self, w: &Self::Linear) -> usize;
    /// As [`Backend::linear_bytes`].
    fn latent_up_bytes(&self, w: &Self::LatentUp) -> usize;

    /// Runs a pass that `record` computes op by op, or, where the device has recorded one of the same form before, that
    /// one again. Returns whether the pass ran as a recording.
    fn replay(&self, form: Form, record: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        let _ = form;
        record().map(|()| false)
    }
    /// Measures the device; `None`: it is the CPU.
    fn rates(&self) -> Result<Option<Rates>> {
        Ok(None)
    }
    /// Keeps the time of every op from now on, or no more. Recorded passes are forgotten.
    fn profiling(&self, on: bool) {
        let _ = on;
    }
    /// Times of ops since the last call.
    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(Vec::new())
    }
    /// Must be called on the thread that runs the ops, before the first.
    fn enter_thread(&self) -> Result<()> {
        Ok(())
    }

    /// `out[t] = embedding[tokens[t]]`, f32.
    fn embed(&self, embedding: &Self::Embedding, batch: &Self::Batch, out: &mut Self::Tensor);
    /// `out[t] = norm(x[t])`.
    fn rms_norm(&self, x: &Self::Tensor, w: &Self::Norm, eps: f32, out: &mut Self::Tensor);
    /// RMS norm, in place, of every run of `w.len()` numbers in the columns `cols` of each row.
    fn rms_norm_heads(&self, x: &mut Self::Tensor, w: &Self::Norm, eps: f32, cols: Range<usize>);
    /// `out[t] = W x[t] + b`.
    fn linear(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor) {
        self.linears(x, [(w, out)]);
    }
    /// Several at once of the same `x` and the same precision.
    fn linears<const N: usize>(&self, x: &Self::Tensor, jobs: [(&Self::Linear, &mut Self::Tensor); N]);
    /// `out[t] += W x[t] + b`.
    fn linear_add(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor);
    /// cos, then sin, of every token's angles times `factor`: `out` is `[T, 2 * inv_freq.len()]`, f32. Once per forward
    /// pass.
    fn rope_angles(&self, inv_freq: &Self::Norm, factor: f32, batch: &Self::Batch, out: &mut Self::Tensor);
    /// Rotates columns `[at, at + angles.cols)` of every `head_dim` columns of `x`.
    fn rope(&self, x: &mut Self::Tensor, head_dim: usize, at: usize, interleaved: bool, angles: &Self::Tensor);
    /// Stores keys and values of the batch's tokens in its sequences' blocks; without `value`, values are the first
    /// numbers of the keys. The tokens of a sequence come in the order of their positions.
    fn kv_write(&self, kv: &mut Self::Kv, batch: &Self::Batch, key: &Self::Tensor, value: Option<&Self::Tensor>);
    /// Causal attention of `q` `[T, num_heads * key_dim]` over the cached positions of each token's sequence, itself
    /// included; `out` is `[T, num_heads * value_dim]`.
    fn attention(
        &self,
        kv: &Self::Kv,
        batch: &Self::Batch,
        num_heads: usize,
        softmax: &Softmax<'_, Self>,
        q: &Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// Activations for [`Backend::delta_net`] on at most `max_tokens` tokens.
    fn delta_scratch(&self, config: &DeltaNet, max_tokens: usize) -> Result<Self::DeltaScratch>;
    /// Gated DeltaNet between its projections: `h` `[T, hidden]`, `qkv` `[T, conv_dim]`, `z` and `out` `[T,
    /// value_dim]`. Each sequence goes on from the state in its span's slot, from zeros at position 0, and leaves
    /// there what comes next. A batch has one span of a sequence.
    #[allow(clippy::too_many_arguments)] // what it is, what it has, what it reads, what it changes
    fn delta_net(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        config: (&DeltaNet, f32),
        w: &Self::DeltaNet,
        scratch: &mut Self::DeltaScratch,
        h: &Self::Tensor,
        qkv_z: (&Self::Tensor, &Self::Tensor),
        out: &mut Self::Tensor,
    );
    /// `x = x * sigmoid(gate)`.
    fn sigmoid_mul(&self, gate: &Self::Tensor, x: &mut Self::Tensor);
    /// `x[t] *= sigmoid(w . h[t])`, `w` `[hidden]`.
    fn gate_rows(&self, w: &Self::Norm, h: &Self::Tensor, x: &mut Self::Tensor);
    /// Activations for [`Backend::latent_attention`] on at most `max_tokens` tokens.
    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<Self::LatentScratch>;
    /// Latent attention of `q` `[T, heads * (nope + rope)]`, rotated, over the cached latents; `out` is `[T, heads *
    /// v]`.
    #[allow(clippy::too_many_arguments)] // what attention takes, and how latents become keys and values
    fn latent_attention(
        &self,
        kv: &Self::Kv,
        batch: &Self::Batch,
        config: &Mla,
        up: &Self::LatentUp,
        scratch: &mut Self::LatentScratch,
        q: &Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// `out[t] = silu(gate[t]) * up[t]`.
    fn silu_mul(&self, gate: &Self::Tensor, up: &Self::Tensor, out: &mut Self::Tensor);
    /// Chooses and weights experts for every token; scaling is in the weights.
    fn route(&self, w: &Self::Router, router: &Router, x: &Self::Tensor, out: &mut Self::Routing);
    /// `out[at + i] = x[rows[i] - first]`, both f32.
    fn gather(&self, x: &Self::Tensor, rows: &[usize], first: usize, out: &mut Self::Tensor, at: usize);

    /// `x[t] += coefficient * vector` for all additions after `layer`, in their order, f32; rounded after the product
    /// and after the sum. Row 0 of `x` is row `first` of the batch.
    fn add(&self, additions: &Self::Additions, layer: usize, first: usize, x: &mut Self::Tensor);

    // Several of the ops above in a row: what they mean. A device may do them at once.

    /// Products of `norm(x)`, for which `h` is there.
    fn norm_linears<const N: usize>(
        &self,
        x: &Self::Tensor,
        (norm, eps): (&Self::Norm, f32),
        h: &mut Self::Tensor,
        jobs: [(&Self::Linear, &mut Self::Tensor); N],
    ) {
        self.rms_norm(x, norm, eps, h);
        self.linears(h, jobs);
    }
    /// `h = norm(x)`, and its routing.
    fn norm_route(
        &self,
        x: &Self::Tensor,
        (norm, eps): (&Self::Norm, f32),
        h: &mut Self::Tensor,
        w: &Self::Router,
        router: &Router,
        out: &mut Self::Routing,
    ) {
        self.rms_norm(x, norm, eps, h);
        self.route(w, router, h, out);
    }
    /// `out = silu(gate x) * up x`, for which `buffers` are there.
    fn gated_linears(
        &self,
        x: &Self::Tensor,
        (gate, up): (&Self::Linear, &Self::Linear),
        buffers: (&mut Self::Tensor, &mut Self::Tensor),
        out: &mut Self::Tensor,
    ) {
        self.linears(x, [(gate, &mut *buffers.0), (up, &mut *buffers.1)]);
        self.silu_mul(buffers.0, buffers.1, out);
    }
    /// Norms and rotates queries and keys, and stores keys and values; `k` is not to be used any more.
    #[allow(clippy::too_many_arguments)] // queries, keys, values, and where to
    fn heads(
        &self,
        kv: &mut Self::Kv,
        batch: &Self::Batch,
        angles: &Self::Tensor,
        interleaved: bool,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Self::Tensor>,
    ) {
        for Heads { x, heads, dim, norm, rope_at } in [q, Heads { x: &mut *k.x, ..k }] {
            if let Some((norm, width, eps)) = norm {
                self.rms_norm_heads(x, norm, eps, 0..if width == dim { heads * dim } else { width });
            }
            self.rope(x, dim, rope_at, interleaved, angles);
        }
        self.kv_write(kv, batch, k.x, v);
    }
}
