//! `Attend`: attention over cached keys and values, or latents, and what queries and keys go through before it.

use super::dense::Dense;
use super::load::Load;
use super::memory::Memory;
use crate::Result;
use crate::config::KvBits;
use crate::model::{Indexer, KvDims, Mla, PositionScale, Window};

/// Numbers of a position that have one scale in a KV cache of INT8.
pub const KV_GROUP: usize = 64;

/// Queries or keys on their way from a product to attention.
pub struct Heads<'a, B: Load> {
    /// `[T, heads * dim]`
    pub x: &'a mut B::Tensor,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// RMS norm: weights, how many numbers of a head it covers from the first on, and epsilon. It covers `dim`, or
    /// there is one head.
    pub norm: Option<(&'a B::Norm, usize, f32)>,
    /// First rotated number of a head.
    pub rope_at: usize,
}

/// How heads are rotated by their tokens' positions.
pub struct Rotary<'a, B: Memory> {
    /// `[T, rotated numbers of a head]`: cos, then sin.
    pub angles: &'a B::Tensor,
    /// Pairs are neighbours; otherwise a number of the first half and one of the second.
    pub interleaved: bool,
}

/// How a head of grouped-query attention turns scores into weights of values.
pub struct Softmax<'a, B: Attend> {
    /// Multiplies the scores.
    pub scale: f32,
    /// What a token sees of the positions before it; `None`: all.
    pub window: Option<Window>,
    /// A score per head that takes part in the softmax and has no value.
    pub sinks: Option<&'a B::Norm>, // [num_heads]
    /// The positions that tokens see, where these are not all.
    pub choice: Option<&'a Choice<'a, B>>,
}

/// What tokens attend to, where that is not all that they see.
pub struct Choice<'a, B: Attend> {
    /// The positions.
    pub chosen: &'a B::Chosen,
    /// Room for their keys and values.
    pub gathered: &'a B::Gathered,
}

/// Queries of latent attention `[T, heads * (nope + rope)]`, and what they attend to, where that is not all.
pub type LatentQueries<'a, B> = (&'a <B as Memory>::Tensor, Option<&'a Choice<'a, B>>);

/// Rotary angles, the KV cache and softmax attention over it. `T` is the number of tokens in the batch.
pub trait Attend: Dense {
    /// KV storage of one layer, in blocks of [`BLOCK_SIZE`](crate::backend::batch::BLOCK_SIZE) positions.
    type Kv: Send;
    /// Activations of latent attention.
    type LatentScratch: Send;
    /// The positions that each token of a batch attends to.
    type Chosen: Send;
    /// Chosen keys and values on their way to attention, some tokens' at a time.
    type Gathered: Send;

    /// KV storage of one layer in `blocks` blocks.
    fn kv(&self, blocks: usize, dims: KvDims, bits: KvBits) -> Result<Self::Kv>;
    /// Bytes of a block.
    fn kv_block_bytes(&self, kv: &Self::Kv) -> usize;
    /// Copies a block to `out`, a part of [`Memory::host`]'s memory, which is not to be read before ops that follow
    /// have ended. Never part of a recorded pass.
    fn kv_to_host(&self, kv: &Self::Kv, block: usize, out: &mut [u8]);
    /// The same, back to any block. `from` must not change before ops that follow have ended.
    fn kv_to_device(&self, kv: &mut Self::Kv, block: usize, from: &[u8]);
    /// Room for what the tokens of a batch of at most `max_tokens` choose of caches like `kv`.
    fn gathered(&self, kv: &Self::Kv, indexer: &Indexer, max_tokens: usize) -> Result<Self::Gathered>;
    /// cos, then sin, of every token's angles times `factor`: `out` is `[T, 2 * inv_freq.len()]`, f32. Once per forward
    /// pass.
    fn rope_angles(&self, inv_freq: &Self::Norm, factor: f32, batch: &Self::Batch, out: &mut Self::Tensor);
    /// `x[t] *= ` what `scale` says of the position of token `t`.
    fn scale_by_position(&self, x: &mut Self::Tensor, batch: &Self::Batch, scale: &PositionScale);
    /// Rotates columns `[at, at + angles.cols)` of every `head_dim` columns of `x`.
    fn rope(&self, x: &mut Self::Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>);
    /// As [`Attend::rope`], by the same angles in the other direction.
    fn rope_back(&self, x: &mut Self::Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>);
    /// Stores keys and values of the batch's tokens in its sequences' blocks; `value` is none where values are the
    /// first numbers of the keys. The tokens of a sequence come in the order of their positions.
    fn kv_write(&self, kv: &mut Self::Kv, batch: &Self::Batch, key: &Self::Tensor, value: Option<&Self::Tensor>);
    /// Norms and, with `rotary`, rotates queries and keys, and stores keys and values: [`Dense::rms_norm_heads`],
    /// [`Attend::rope`] and [`Attend::kv_write`] in one. `k` is undefined afterwards.
    fn prepare_heads(
        &self,
        kv: &mut Self::Kv,
        batch: &Self::Batch,
        rotary: Option<&Rotary<'_, Self>>,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Self::Tensor>,
    );
    /// Causal attention of `q` `[T, num_heads * key_dim]` over the cached positions of each token's sequence, itself
    /// included; `out` is `[T, num_heads * value_dim]`.
    fn attend(
        &self,
        kv: &Self::Kv,
        batch: &Self::Batch,
        softmax: &Softmax<'_, Self>,
        q: &Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// Activations for [`Attend::attend_latent`] on at most `max_tokens` tokens.
    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<Self::LatentScratch>;
    /// Moves queries' `nope` numbers, which are not rotated, into the latents' space. [`Attend::prepare_heads`] of the
    /// same queries is the next op: a device may do both at once. The default leaves it to [`Attend::attend_latent`].
    fn absorb_latent(
        &self,
        _batch: &Self::Batch,
        _up: &Self::LatentUp,
        _scratch: &mut Self::LatentScratch,
        _queries: LatentQueries<'_, Self>,
    ) {
    }
    /// Latent attention of queries, rotated, over the cached latents; `out` is `[T, heads * v]`. Comes after
    /// [`Attend::absorb_latent`] of the same queries.
    fn attend_latent(
        &self,
        kv: &Self::Kv,
        batch: &Self::Batch,
        up: &Self::LatentUp,
        scratch: &mut Self::LatentScratch,
        queries: LatentQueries<'_, Self>,
        out: &mut Self::Tensor,
    );
}
