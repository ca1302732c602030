//! One key head whose keys are its values: a window of the last positions, and entries that stand for several each.

use super::{Attention, EntryKeys, Facts, Indexer, Matrix, Score, Selection, StateShape};
use crate::model::{Rope, Share};

/// DeepSeek-V4's attention. Source: HF modeling_deepseek_v4.
///
/// ```text
/// q   = rope(rms(wq_b rms_w(wq_a in)))      of each head; kv = rope(rms_w(wkv in)): a position's key and value
/// o   = softmax over the window's kv, the entries and a sink of (q . kv / sqrt(head_dim)), times kv, rotated back
/// out = wo_b (of each group of heads: wo_a o)
/// ```
///
/// V4.1 does not norm queries for each head, and its layers share entries. Keys and values of positions are a part of
/// the state: nothing but entries is cached.
#[derive(Clone, Debug, PartialEq)]
pub struct Compressed {
    /// Query heads.
    pub num_heads: usize,
    /// Width of a query, and of the key that is its value.
    pub head_dim: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Queries have an RMS norm for each head.
    pub norms_queries: bool,
    /// Rotary embedding of the last numbers of queries, keys and entries.
    pub rope: Rope,
    /// Positions that a token sees, itself included.
    pub window: usize,
    /// Groups of heads, each with a projection of its own, to as many numbers as `o_lora_rank` says.
    pub groups: usize,
    /// Numbers of a group's output.
    pub o_lora_rank: usize,
    /// What makes entries of positions; `None`: the layer has only its window.
    pub compressor: Option<Compressor>,
    /// The entries, and their index keys, are those of the last layer before it that makes some.
    pub borrows: bool,
    /// Entries that queries attend to; `None`: all that they see.
    pub selection: Option<Selection>,
}

/// Makes an entry of each `ratio` positions: in every number a sum of theirs, weighted by the softmax of a gate and a
/// bias of the place; then an RMS norm, and a rotation to the first position.
///
/// ```text
/// entry_i = rope(rms_w(sum_j softmax_j(gate_j + bias_j) value_j))     over positions [i ratio, (i + 1) ratio)
/// ```
///
/// Where entries overlap, positions have two values and gates: the first for the entry after theirs. An entry of one
/// position is its value. An entry is seen from the last of its positions on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressor {
    /// Numbers of an entry.
    pub dim: usize,
    /// Positions of an entry.
    pub ratio: usize,
    /// Whether an entry is also made of the positions before its own.
    pub overlaps: bool,
    /// Whether gates have a bias of the place.
    pub bias: bool,
}

impl Compressor {
    /// Entries that are not whole at a time.
    pub fn open(&self) -> usize {
        if self.overlaps { 2 } else { 1 }
    }

    /// Values of a position, and as many gates.
    pub fn width(&self) -> usize {
        self.open() * self.dim
    }

    /// Whether positions are weighted.
    pub fn gates(&self) -> bool {
        self.ratio > 1
    }

    /// Numbers of the open entries: of each number of an entry the largest gate, the sum of shares and that of values.
    pub fn state(&self) -> usize {
        self.open() * 3 * self.dim
    }

    /// Entries that end before `position`.
    pub fn ended(&self, position: usize) -> usize {
        position / self.ratio
    }

    /// Whether an entry ends at `position`.
    pub fn ends_at(&self, position: usize) -> bool {
        (position + 1).is_multiple_of(self.ratio)
    }
}

impl Compressed {
    /// First rotated number of a head.
    pub fn rope_at(&self) -> usize {
        self.head_dim - self.rope.dim
    }

    /// What the layer makes entries with.
    pub fn own_compressor(&self) -> Option<Compressor> {
        self.compressor.filter(|_| !self.borrows)
    }

    /// What makes the indexer's keys of positions, where they are not made of entries.
    pub fn key_compressor(&self) -> Option<Compressor> {
        let of_positions = Score::Entries { latent: self.q_lora_rank, keys: EntryKeys::OfPositions };
        let own = self.selection.as_ref().and_then(Selection::own).filter(|own| own.score == of_positions)?;
        Some(Compressor { dim: own.head_dim, ..self.compressor? })
    }

    /// Numbers of the keys that the layer makes of its entries, if it does.
    pub fn keys_of_entries(&self) -> Option<usize> {
        let of_entries = Score::Entries { latent: self.q_lora_rank, keys: EntryKeys::OfEntries };
        let own = self.selection.as_ref().and_then(Selection::own).filter(|own| own.score == of_entries)?;
        (!self.borrows).then_some(own.head_dim)
    }
}

impl Facts for Compressed {
    fn divided(&self, share: Share) -> Option<Attention> {
        let heads = |share: Share| {
            let groups = share.run(self.groups).len();
            Self { groups, num_heads: self.num_heads / self.groups * groups, ..self.clone() }
        };
        self.groups.is_multiple_of(share.of).then(|| Attention::Compressed(heads(share)))
    }

    fn entries(&self) -> Option<Compressor> {
        self.own_compressor()
    }

    fn borrows(&self) -> bool {
        self.borrows
    }

    fn rope(&self) -> Option<&Rope> {
        Some(&self.rope)
    }

    fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    fn state(&self) -> Option<StateShape> {
        let numbers = [self.own_compressor(), self.key_compressor()].iter().flatten().map(Compressor::state).sum();
        Some(StateShape { past_inputs: self.window, channels: self.head_dim, numbers })
    }

    fn widths(&self) -> [usize; 10] {
        let own = self.selection.as_ref().and_then(Selection::own);
        let [index, dim, _, blocks] = own.map_or([0; 4], Indexer::widths);
        let listed = self.selection.as_ref().map_or(0, |selection| selection.indexer.listed());
        let (made, low) = (self.own_compressor().map_or(0, |of| of.width()), self.groups * self.o_lora_rank);
        let ratio = self.compressor.map_or(0, |of| of.ratio);
        [self.num_heads, self.head_dim, self.q_lora_rank, low, made, index, dim, listed, blocks, ratio]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let heads = self.num_heads * self.head_dim;
        let own = [(self.q_lora_rank, hidden), (heads, self.q_lora_rank), (self.head_dim, hidden)];
        let out = [(self.groups * self.o_lora_rank, heads / self.groups), (hidden, self.groups * self.o_lora_rank)];
        let compressor = self.own_compressor().into_iter().map(|of| (2 * of.width(), hidden));
        let keys = self.keys_of_entries().into_iter().map(|dim| (dim, self.head_dim));
        let index = self.selection.as_ref().and_then(Selection::own).map_or(vec![], |own| own.matrices(hidden));
        own.into_iter().chain(out).chain(compressor).chain(keys).chain(index).collect()
    }

    fn keys_and_values(&self) -> &'static [&'static str] {
        &["wkv"]
    }

    fn products_per_pair(&self) -> usize {
        let index = self.selection.as_ref().and_then(Selection::own).map_or(0, Indexer::products_per_pair);
        self.compressor.map_or(0, |of| (2 * self.num_heads * self.head_dim + index) / of.ratio)
    }

    fn gpu_lacks(&self) -> Option<String> {
        if let Some(lacks) = self.selection.as_ref().and_then(|selection| selection.indexer.gpu_lacks()) {
            return Some(lacks);
        }
        let heads = self.num_heads * self.head_dim / self.groups;
        let widths = [self.head_dim, self.q_lora_rank, self.o_lora_rank, heads];
        let fits = self.head_dim <= 512 && widths.iter().all(|n| n.is_multiple_of(8));
        (!fits).then(|| {
            let (dim, latent, low) = (self.head_dim, self.q_lora_rank, self.o_lora_rank);
            format!(
                "the GPU attends to entries of up to 512 elements, in multiples of 8, not {dim}, {latent} and {low}"
            )
        })
    }
}
