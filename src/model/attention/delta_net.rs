//! Gated DeltaNet: a state of fixed size instead of keys and values.

use super::{Attention, Facts, Matrix, StateShape};
use crate::model::Share;

/// Gated DeltaNet: linear attention with a decaying state and the delta rule. Source: arXiv 2412.06464, and HF
/// modeling_qwen3_next.
///
/// ```text
/// q, k, v = silu(convolution over the last conv_width inputs);   q = q / |q| / sqrt(key_head_dim);   k = k / |k|
/// S = exp(-exp(A_log) softplus(a + dt_bias)) S;   S += k (sigmoid(b) (v - S^T k))^T;   out = norm(S^T q) * gate(z)
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Heads of queries and keys.
    pub num_key_heads: usize,
    /// Heads of values, each with a state; a multiple of `num_key_heads`, neighbours share a query and a key.
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_head_dim: usize,
    /// Width of a value head.
    pub value_head_dim: usize,
    /// Inputs that a number of q, k or v is made of, its own included.
    pub conv_width: usize,
    /// What becomes of `z`.
    pub gate: DeltaGate,
    /// The checkpoint has the first value head of each key head, then the second of each, and so on; they are put
    /// beside each other when loaded, but for the columns of a quantized last projection.
    pub tiled: bool,
}

/// What an output gate goes through before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaGate {
    /// `z * sigmoid(z)`.
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

impl DeltaNet {
    /// A rank's heads.
    pub fn heads(&self, share: Share) -> Self {
        let num_key_heads = share.run(self.num_key_heads).len();
        let num_value_heads = self.num_value_heads / self.num_key_heads * num_key_heads;
        Self { num_key_heads, num_value_heads, ..self.clone() }
    }

    /// Queries, keys and values of a token: what the convolution runs over.
    pub fn conv_dim(&self) -> usize {
        2 * self.num_key_heads * self.key_head_dim + self.value_dim()
    }

    /// Values of a token.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }
}

impl Facts for DeltaNet {
    fn divided(&self, share: Share) -> Option<Attention> {
        self.num_key_heads.is_multiple_of(share.of).then(|| Attention::DeltaNet(self.heads(share)))
    }

    fn state(&self) -> Option<StateShape> {
        Some(StateShape {
            past_inputs: self.conv_width - 1,
            channels: self.conv_dim(),
            numbers: self.value_dim() * self.key_head_dim,
        })
    }

    fn widths(&self) -> [usize; 10] {
        let [keys, values] = [self.num_key_heads, self.num_value_heads];
        [keys, values, self.key_head_dim, self.value_head_dim, self.conv_width, 0, 0, 0, 0, 0]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        vec![(self.conv_dim(), hidden), (self.value_dim(), hidden), (hidden, self.value_dim())]
    }

    fn inner_products(&self) -> f64 {
        4.0 * self.value_dim() as f64 * self.key_head_dim as f64
    }

    fn gpu_lacks(&self) -> Option<String> {
        let fits = self.key_head_dim <= 128
            && self.key_head_dim.is_multiple_of(8)
            && self.value_head_dim.is_multiple_of(8)
            && self.conv_width <= 8;
        (!fits).then(|| {
            format!(
                "the GPU has gated DeltaNet for keys of up to 128 elements, for keys and values of multiples of 8, and \
                 for convolutions of up to 8, not for {}, {} and {}",
                self.key_head_dim, self.value_head_dim, self.conv_width
            )
        })
    }
}
