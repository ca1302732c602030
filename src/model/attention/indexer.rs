//! Which of the earlier positions a query attends to: a second, small attention that only chooses.

use super::Matrix;
use crate::model::Share;

/// The positions that a layer's queries attend to, where these are not all.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// Who chooses them.
    pub by: ChosenBy,
    /// How they are chosen.
    pub indexer: Indexer,
}

/// Who chooses for a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// The layer's own indexer.
    Own,
    /// The last layer before it whose indexer does.
    Earlier,
}

/// Scores units of positions with products of small queries and keys, and takes the best; of equals the lower.
#[derive(Clone, Debug, PartialEq)]
pub struct Indexer {
    /// Query heads; there is one key for all.
    pub num_heads: usize,
    /// Width of a query or key.
    pub head_dim: usize,
    /// As [`Rope::interleaved`](crate::model::Rope); the rotated numbers come first (of entries last), and their angles
    /// are those of the attention.
    pub interleaved: bool,
    /// Neighbouring positions that are chosen together, from a multiple of their number on.
    pub unit: usize,
    /// Units that a query takes.
    pub top_k: usize,
    /// What makes a unit's score.
    pub score: Score,
    /// Blocks of units that indexers of later layers are limited to.
    pub candidates: Option<Candidates>,
}

/// Blocks of units that are chosen before units are, by their largest score; the last one always. Only of units of one
/// position. Source: mlx-vlm, deepseek_v41.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// Who chooses them, by all scores.
    pub by: ChosenBy,
    /// Blocks that are chosen.
    pub blocks: usize,
    /// Units of each.
    pub size: usize,
}

/// The score of a unit of positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Score {
    /// `sum_h weight_h relu(q_h . k)`, the weights a product with the hidden state; keys have a LayerNorm, and queries
    /// come from the query latent of this width. A unit is one position. Source: HF modeling_deepseek_v32.
    Weighted {
        /// Width of the query latent.
        latent: usize,
    },
    /// The largest `q . k` of the unit's keys. Each head chooses for a KV head of its own, and the unit that a query
    /// stands in is always among those that it takes. Source: HF modeling_minimax_m3_vl.
    Largest,
    /// `sum_h relu(q_h . k)`, the key being the mean of the unit's, normed and rotated after it. Only whole units are
    /// scored; what a query sees beyond them it always takes. Source: HF modeling_qwen4_exp.
    Pooled,
    /// As `Weighted`, the key being a sum of the unit's, weighted in each number by the softmax of a gate and a bias of
    /// the place in the unit; nothing rotates. Units as of `Pooled`. Source: HF modeling_glm5_next.
    Gated {
        /// Width of the query latent.
        latent: usize,
    },
    /// As `Weighted`, with a key for each entry of attention. What is chosen are units, by their number; only whole
    /// ones are scored, and taken. Source: HF modeling_deepseek_v4.
    Entries {
        /// Width of the query latent.
        latent: usize,
        /// What keys are made of.
        keys: EntryKeys,
    },
}

/// What the index keys of entries are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKeys {
    /// Of the unit's positions, as entries are, by a compressor of their own.
    OfPositions,
    /// The normed product with the entry before it is rotated; then rotated alike. Source: mlx-vlm, deepseek_v41.
    OfEntries,
}

impl Indexer {
    /// Epsilon of a LayerNorm of keys, whatever `rms_norm_eps` says. Source: HF modeling_deepseek_v32.
    pub const LAYER_NORM_EPS: f32 = 1e-6;

    /// Sets of positions that a query has: its KV heads share them evenly.
    pub fn sets(&self) -> usize {
        match self.score {
            Score::Weighted { .. } | Score::Pooled | Score::Gated { .. } | Score::Entries { .. } => 1,
            Score::Largest => self.num_heads,
        }
    }

    /// Positions that a query attends to at most. Where it sees no more, it attends to all.
    pub fn most(&self) -> usize {
        match self.score {
            Score::Weighted { .. } | Score::Largest => self.top_k * self.unit,
            Score::Pooled | Score::Gated { .. } | Score::Entries { .. } => self.top_k * self.unit + self.unit - 1,
        }
    }

    /// Numbers of a list of what a query attends to, at most.
    pub fn listed(&self) -> usize {
        if matches!(self.score, Score::Entries { .. }) { self.top_k } else { self.most() }
    }

    /// What the sizes of its activations and of its scratch depend on.
    pub(super) fn widths(&self) -> [usize; 4] {
        let blocks = self.candidates.filter(|of| of.by == ChosenBy::Own).map_or(0, |of| of.blocks);
        [self.num_heads, self.head_dim, self.listed(), blocks]
    }

    /// Its projections in a model of this width.
    pub(super) fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let queries = self.num_heads * self.head_dim;
        match self.score {
            Score::Weighted { latent } => {
                vec![(queries, latent), (self.head_dim, hidden), (self.num_heads, hidden)]
            }
            Score::Gated { latent } => {
                let key = (self.head_dim, hidden);
                vec![(queries, latent), key, key, (self.num_heads, hidden)]
            }
            // Overlapping: values and gates for two entries.
            Score::Entries { latent, keys: EntryKeys::OfPositions } => {
                vec![(queries, latent), (4 * self.head_dim, hidden), (self.num_heads, hidden)]
            }
            Score::Entries { latent, keys: EntryKeys::OfEntries } => {
                vec![(queries, latent), (self.num_heads, hidden)]
            }
            Score::Largest | Score::Pooled => vec![(queries, hidden), (self.head_dim, hidden)],
        }
    }

    /// Products of a token and one that is scored.
    pub(super) fn products_per_pair(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// What the GPU's kernels lack for it, if anything.
    pub(super) fn gpu_lacks(&self) -> Option<String> {
        let fits = self.num_heads <= 64 && self.head_dim <= 128 && self.head_dim.is_multiple_of(8);
        (!fits).then(|| {
            let (heads, dim) = (self.num_heads, self.head_dim);
            format!("the GPU has no indexer of {heads} heads with {dim} elements")
        })
    }

    /// Whether keys are of several positions each.
    pub fn pools(&self) -> bool {
        matches!(self.score, Score::Pooled | Score::Gated { .. } | Score::Entries { .. })
    }

    /// Keys that are scored of so many positions, a multiple of the unit.
    pub fn keys_of(&self, positions: usize) -> usize {
        match self.score {
            Score::Weighted { .. } | Score::Largest => positions,
            Score::Pooled | Score::Gated { .. } | Score::Entries { .. } => positions / self.unit,
        }
    }
}

impl Selection {
    /// What a rank's heads choose by: all of it, or the heads that choose for them. `None`: those cannot be divided.
    pub fn divided(&self, share: Share) -> Option<Self> {
        let heads = self.indexer.num_heads;
        let num_heads = match self.indexer.score {
            Score::Largest if heads.is_multiple_of(share.of) || share.of.is_multiple_of(heads) => {
                share.run(heads).len()
            }
            Score::Largest => return None,
            Score::Weighted { .. } | Score::Pooled | Score::Gated { .. } | Score::Entries { .. } => heads,
        };
        Some(Self { indexer: Indexer { num_heads, ..self.indexer.clone() }, ..self.clone() })
    }

    /// The layer's own indexer, if it has one.
    pub fn own(&self) -> Option<&Indexer> {
        (self.by == ChosenBy::Own).then_some(&self.indexer)
    }
}
