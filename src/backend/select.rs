//! `Select`: an index of the cached positions, and the choice that each query makes among them.

use super::attend::{Attend, Rotary};
use super::load::Load;
use crate::Result;
use crate::model::Indexer;

/// Norm of index keys.
pub struct KeyNorm<'a, B: Load> {
    /// `[head_dim]`
    pub weight: &'a B::Norm,
    /// `[head_dim]`, of a LayerNorm; `None`: it is an RMS norm.
    pub bias: Option<&'a B::Norm>,
    /// Epsilon.
    pub eps: f32,
}

/// What weighs the index keys of a unit, where they are pooled with gates.
pub struct KeyPool<'a, B: Load> {
    /// `[T, head_dim]`
    pub gate: &'a B::Tensor,
    /// `[unit, head_dim]`
    pub bias: &'a B::Norm,
}

/// What queries are scored with.
pub struct IndexQueries<'a, B: Load> {
    /// `[T, num_heads * head_dim]`, rotated.
    pub q: &'a B::Tensor,
    /// `[T, num_heads]`, f32 on every device, where heads are weighted.
    pub weights: Option<&'a B::Tensor>,
}

/// Index keys, and what queries choose by them. `T` is the number of tokens in the batch.
pub trait Select: Attend {
    /// Index keys of one layer, in the same blocks as keys and values.
    type Index: Send;
    /// Scores on their way to a choice.
    type SelectScratch: Send;

    /// Storage for index keys.
    fn index(&self, blocks: usize, indexer: &Indexer) -> Result<Self::Index>;
    /// Bytes of a block.
    fn index_block_bytes(&self, index: &Self::Index) -> usize;
    /// Copies a block to `out`, as [`Attend::kv_to_host`] does.
    fn index_to_host(&self, index: &Self::Index, block: usize, out: &mut [u8]);
    /// The same, back to any block.
    fn index_to_device(&self, index: &mut Self::Index, block: usize, from: &[u8]);
    /// Room for the choice of `max_tokens` tokens.
    fn chosen(&self, indexer: &Indexer, max_tokens: usize) -> Result<Self::Chosen>;
    /// Scores for [`Select::select`] on at most `max_tokens` tokens.
    fn select_scratch(&self, indexer: &Indexer, max_tokens: usize) -> Result<Self::SelectScratch>;
    /// Norms, rotates from their first number on, and stores the index keys `[T, head_dim]` of the batch's tokens;
    /// where keys are pooled, those of the units that the tokens end.
    fn index_write(
        &self,
        index: &mut Self::Index,
        batch: &Self::Batch,
        indexer: &Indexer,
        through: (Option<&Rotary<'_, Self>>, &KeyNorm<'_, Self>, Option<KeyPool<'_, Self>>),
        keys: &Self::Tensor,
    );
    /// Scores what each token sees, and takes the best; of equals the lower positions.
    fn select(
        &self,
        index: &Self::Index,
        batch: &Self::Batch,
        indexer: &Indexer,
        queries: &IndexQueries<'_, Self>,
        scratch: &mut Self::SelectScratch,
        chosen: &mut Self::Chosen,
    );
}
