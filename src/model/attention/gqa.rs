//! Grouped queries: several query heads share one key/value head.

use super::{Attention, Facts, Indexer, KvDims, Matrix, PositionScale, Selection, Values, Window};
use crate::model::{Rope, Share};

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Rotary embedding of queries and keys, if they are rotated.
    pub rope: Option<Rope>,
    /// RMS norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Values are what keys are before their norm and rotation.
    pub values_are_keys: bool,
    /// RMS norm of each value head, without weight.
    pub value_norm: bool,
    /// Multiplies the values.
    pub value_scale: f32,
    /// Biases on the projections.
    pub bias: Bias,
    /// The checkpoint has queries, keys and values in one projection, in as many equal parts: each part has its heads'
    /// queries, then their keys, then their values.
    pub fused_parts: Option<usize>,
    /// What a token sees of the positions before it; `None`: all.
    pub window: Option<Window>,
    /// Every head has a learned score that takes part in its softmax and brings no value.
    pub sinks: bool,
    /// What multiplies the heads' outputs.
    pub output_gate: Option<OutputGate>,
    /// Multiplies the scores.
    pub scale: f32,
    /// Multiplies queries besides.
    pub position_scale: Option<PositionScale>,
    /// Positions that queries attend to; `None`: all that they see.
    pub selection: Option<Selection>,
}

/// A learned gate of the heads' outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGate {
    /// The sigmoid of a projection, for each number of a head, whose rows `q_proj` has behind each head's query.
    InQuery,
    /// `g_proj`, a number for each head.
    Heads(GateActivation),
    /// `g_proj`, a number for each of a head's.
    Numbers(GateActivation),
}

/// What makes a factor of a gate's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateActivation {
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `ln(1 + exp(x))`
    Softplus,
}

/// RMS norm of queries and keys, before RoPE unless said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head.
    PerHead,
    /// Of all heads together.
    FullWidth,
    /// Of each head, without weight, after RoPE.
    AfterRope,
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

impl Gqa {
    /// Rows of the output gate's projection, and what makes factors of them.
    pub fn gate(&self) -> Option<(usize, GateActivation)> {
        let numbers = self.num_heads * self.value_dim;
        self.output_gate.map(|gate| match gate {
            OutputGate::InQuery => (numbers, GateActivation::Sigmoid),
            OutputGate::Heads(activation) => (self.num_heads, activation),
            OutputGate::Numbers(activation) => (numbers, activation),
        })
    }
}

impl Facts for Gqa {
    fn kv_dims(&self) -> KvDims {
        (self.num_kv_heads, self.head_dim, Values::Own(self.value_dim))
    }

    fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    fn widths(&self) -> [usize; 10] {
        let gate = self.gate().map_or(0, |(rows, _)| rows);
        let [heads, dim, listed, blocks] = self.selection.as_ref().map_or([0; 4], |s| s.indexer.widths());
        [self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim, gate, heads, dim, listed, blocks, 0]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let (q, k) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let v = (!self.values_are_keys).then_some((self.num_kv_heads * self.value_dim, hidden));
        let gate = self.gate().map(|(rows, _)| (rows, hidden));
        let o = (hidden, self.num_heads * self.value_dim);
        let index = self.selection.as_ref().and_then(Selection::own).map_or(vec![], |own| own.matrices(hidden));
        [(q, hidden), (k, hidden), o].into_iter().chain(v).chain(gate).chain(index).collect()
    }

    fn keys_and_values(&self) -> &'static [&'static str] {
        &["k_proj", "v_proj"]
    }

    fn products_per_pair(&self) -> usize {
        let index = self.selection.as_ref().and_then(Selection::own).map_or(0, Indexer::products_per_pair);
        self.num_heads * (self.head_dim + self.value_dim) + index
    }

    fn divided(&self, share: Share) -> Option<Attention> {
        let (heads, kv_heads, of) = (self.num_heads, self.num_kv_heads, share.of);
        let even = heads.is_multiple_of(of) && (kv_heads.is_multiple_of(of) || of.is_multiple_of(kv_heads));
        let selection = match &self.selection {
            Some(selection) => Some(selection.divided(share)?),
            None => None,
        };
        let num_kv_heads = share.run(kv_heads).len();
        let heads = Self { num_heads: heads / of, num_kv_heads, selection, ..self.clone() };
        (even && self.qk_norm != QkNorm::FullWidth).then_some(Attention::Gqa(heads))
    }

    fn gpu_lacks(&self) -> Option<String> {
        if let Some(lacks) = self.selection.as_ref().and_then(|selection| selection.indexer.gpu_lacks()) {
            return Some(lacks);
        }
        let (key, value) = (self.head_dim, self.value_dim);
        (key.max(value) > 512 || !key.is_multiple_of(8) || !value.is_multiple_of(8))
            .then(|| format!("the GPU has no attention for heads of {key} elements with values of {value}"))
    }
}
