//! Grouped queries: several query heads share one key/value head.

use super::{Facts, Matrix};
use crate::model::Rope;

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// RMS norm of queries and keys before RoPE.
    pub qk_norm: QkNorm,
    /// Biases on the projections.
    pub bias: Bias,
    /// A token sees itself and the `window - 1` before it; `None`: all before it.
    pub window: Option<usize>,
    /// Every head has a learned score that takes part in its softmax and brings no value.
    pub sinks: bool,
    /// The heads' outputs are multiplied with the sigmoid of a projection that `q_proj` has behind each head's query.
    pub output_gate: bool,
    /// Multiplies the scores.
    pub scale: f32,
}

/// RMS norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head.
    PerHead,
    /// Of all heads together.
    FullWidth,
}

/// Which projections of attention have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// None.
    None,
    /// Queries, keys and values.
    Qkv,
    /// Those and the output.
    All,
}

impl Facts for Gqa {
    fn kv_dims(&self) -> (usize, usize, usize) {
        (self.num_kv_heads, self.head_dim, self.head_dim)
    }

    fn rope(&self) -> Option<&Rope> {
        Some(&self.rope)
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.num_heads, self.num_kv_heads, self.head_dim, usize::from(self.output_gate)]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let gate = self.output_gate.then_some((q, hidden));
        [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)].into_iter().chain(gate).collect()
    }

    fn activation_len(&self) -> usize {
        let gate = if self.output_gate { self.num_heads } else { 0 };
        self.head_dim * (2 * (self.num_heads + self.num_kv_heads) + gate)
    }

    fn products_per_pair(&self) -> usize {
        2 * self.num_heads * self.head_dim
    }

    fn gpu_lacks(&self) -> Option<String> {
        (self.head_dim > 256 || !self.head_dim.is_multiple_of(8))
            .then(|| format!("the GPU has no attention for heads of {} elements", self.head_dim))
    }
}
