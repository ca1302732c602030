//! `Compress`: entries that stand for several positions each, and attention over them and a window of positions.

use super::load::Load;
use super::recur::Recur;
use super::select::Select;
use crate::Result;
use crate::config::KvBits;
use crate::model::{Compressed, Compressor};

/// What makes entries, as [`Compressor`] says.
pub struct CompressRule<'a, B: Load> {
    /// Its shape.
    pub compressor: Compressor,
    /// `[ratio, width]`, zeros of one without a bias.
    pub bias: &'a B::Norm,
    /// `[dim]`
    pub norm: &'a B::Norm,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Angle per position of each rotated pair; the pairs are neighbours, at an entry's end. `None`: something reads
    /// the entry before it is [rotated](Compress::rope_entries).
    pub inv_freq: Option<&'a B::Norm>,
    /// Where in a slot's numbers its open entries stand, and how many numbers a slot has.
    pub state: (usize, usize),
}

/// What tokens attend to.
pub struct Seen<'a, B: Compress> {
    /// Positions of the window.
    pub window: usize,
    /// The layer's entries, if it has some.
    pub entries: Option<&'a B::Entries>,
    /// Which of them, where these are not all.
    pub chosen: Option<&'a B::Chosen>,
    /// Activations.
    pub scratch: &'a B::EntriesScratch,
    /// Multiplies the scores.
    pub scale: f32,
    /// A score per head that takes part in the softmax and has no value, `[num_heads]`.
    pub sinks: &'a B::Norm,
}

/// Entries, and attention over them. `T` is the number of tokens in the batch. Positions of a sequence are in the slot
/// of its span, as of [`Recur::delta_net`].
pub trait Compress: Select + Recur {
    /// Entries of one layer: those that end in a block of positions lie in the block of the same number.
    type Entries: Send;
    /// Activations of [`Compress::attend_entries`].
    type EntriesScratch: Send;

    /// Storage for the entries that end in `blocks` blocks.
    fn entries(&self, blocks: usize, compressor: Compressor, bits: KvBits) -> Result<Self::Entries>;
    /// Bytes of a block.
    fn entries_block_bytes(&self, entries: &Self::Entries) -> usize;
    /// Copies a block to `out`, as [`Attend::kv_to_host`](super::Attend::kv_to_host) does.
    fn entries_to_host(&self, entries: &Self::Entries, block: usize, out: &mut [u8]);
    /// The same, back to any block.
    fn entries_to_device(&self, entries: &mut Self::Entries, block: usize, from: &[u8]);
    /// Activations for [`Compress::attend_entries`] on at most `max_tokens` tokens.
    fn entries_scratch(&self, config: &Compressed, max_tokens: usize) -> Result<Self::EntriesScratch>;
    /// Takes the tokens' values and gates, `[T, 2 * width]`, into open entries; position 0 begins anew. A token that
    /// ends an entry has it in its row of `out`, `[T, dim]`; other rows are undefined.
    fn compress(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        rule: &CompressRule<'_, Self>,
        x: &Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// Rotates the last numbers of rows of tokens that end an entry of `ratio` positions, to the first of these, by the
    /// angles per position `inv_freq`; the pairs are neighbours.
    fn rope_entries(&self, batch: &Self::Batch, ratio: usize, inv_freq: &Self::Norm, rows: &mut Self::Tensor);
    /// Stores the rows of tokens that end an entry.
    fn entries_write(&self, entries: &mut Self::Entries, batch: &Self::Batch, rows: &Self::Tensor);
    /// The same as index keys, of entries of so many positions.
    fn index_entries(&self, index: &mut Self::Index, batch: &Self::Batch, ratio: usize, rows: &Self::Tensor);
    /// Attention of `q`, `[T, heads * dim]`, over the window's rows of `kv`, `[T, dim]`, and of those before them,
    /// which the slots of `state` keep, and over entries: keys and values both. Leaves in the slots what comes next;
    /// `out` is `[T, heads * dim]`.
    fn attend_entries(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        seen: &Seen<'_, Self>,
        queries: (&Self::Tensor, &Self::Tensor),
        out: &mut Self::Tensor,
    );
}
