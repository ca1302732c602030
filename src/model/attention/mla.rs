//! Latent attention: keys and values are linear in one cached latent.

use super::{Attention, Facts, Indexer, KvDims, Matrix, PositionScale, Selection, Values};
use crate::model::{Rope, Share};

/// Multi-head latent attention. Source: DeepSeek-V2 report, section 2.1.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Heads.
    pub num_heads: usize,
    /// Width of the query latent; `None`: queries come straight from the hidden state.
    pub q_lora_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Width of a head's part without position.
    pub qk_nope_head_dim: usize,
    /// Width of a head's rotated part; all heads share one such key.
    pub qk_rope_head_dim: usize,
    /// Rotary embedding of that part, if it is rotated.
    pub rope: Option<Rope>,
    /// Width of a head's value.
    pub v_head_dim: usize,
    /// Biases on `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`.
    pub bias: bool,
    /// The sigmoid of a projection, `g_proj`, multiplies each head's output.
    pub head_gate: bool,
    /// Multiplies the scores; YaRN's mscale squared is in it.
    pub scale: f32,
    /// Multiplies queries besides.
    pub position_scale: Option<PositionScale>,
    /// Epsilon of the `q_a` and `kv_a` norms.
    pub norm_eps: f32,
    /// Positions that queries attend to; `None`: all that they see.
    pub selection: Option<Selection>,
}

impl Mla {
    /// A rank's heads of the same latent.
    pub fn heads(&self, share: Share) -> Self {
        Self { num_heads: share.run(self.num_heads).len(), ..self.clone() }
    }

    /// Width of a query or key head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Width of one cached row: the latent, then the rotated key.
    pub fn cache_dim(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

impl Facts for Mla {
    fn kv_dims(&self) -> KvDims {
        (1, self.cache_dim(), Values::OfKeys(self.kv_lora_rank))
    }

    fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    fn widths(&self) -> [usize; 10] {
        let [index, dim, listed, blocks] = self.selection.as_ref().map_or([0; 4], |s| s.indexer.widths());
        let [query, latent] = [self.q_lora_rank.unwrap_or(0), self.kv_lora_rank];
        let [nope, rope] = [self.qk_nope_head_dim, self.qk_rope_head_dim];
        [query, latent, self.num_heads, nope, rope, self.v_head_dim, index, dim, listed, blocks]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let q = self.num_heads * self.qk_head_dim();
        let query = self.q_lora_rank.map_or(vec![(q, hidden)], |rank| vec![(rank, hidden), (q, rank)]);
        let index = self.selection.as_ref().and_then(Selection::own).map_or(vec![], |own| own.matrices(hidden));
        let gate = if self.head_gate { vec![(self.num_heads, hidden)] } else { vec![] };
        [query, vec![(self.cache_dim(), hidden), (hidden, self.num_heads * self.v_head_dim)], gate, index].concat()
    }

    fn inner_products(&self) -> f64 {
        self.kv_lora_rank as f64 * self.num_heads as f64 * (self.qk_nope_head_dim + self.v_head_dim) as f64
    }

    fn keys_and_values(&self) -> &'static [&'static str] {
        &["kv_a_proj_with_mqa"]
    }

    fn products_per_pair(&self) -> usize {
        let index = self.selection.as_ref().and_then(Selection::own).map_or(0, Indexer::products_per_pair);
        self.num_heads * (self.qk_head_dim() + self.v_head_dim) + index
    }

    fn divided(&self, share: Share) -> Option<Attention> {
        self.num_heads.is_multiple_of(share.of).then(|| Attention::Mla(self.heads(share)))
    }

    fn gpu_seconds(&self) -> f64 {
        31e-6
    }

    fn gpu_lacks(&self) -> Option<String> {
        if let Some(lacks) = self.selection.as_ref().and_then(|selection| selection.indexer.gpu_lacks()) {
            return Some(lacks);
        }
        let widths = [self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim];
        let fits = self.kv_lora_rank <= 512
            && self.cache_dim() <= 576
            && self.qk_head_dim() <= 256
            && widths.iter().all(|n| n.is_multiple_of(8));
        (!fits).then(|| {
            let (rank, head) = (self.kv_lora_rank, self.qk_head_dim());
            format!("the GPU has no latent attention of rank {rank} with heads of {head} elements")
        })
    }
}
