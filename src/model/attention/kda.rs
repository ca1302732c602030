//! Kimi delta attention: a state of fixed size instead of keys and values, whose rows decay each for itself.

use super::{Attention, Facts, Matrix, StateShape};
use crate::model::Share;

/// Kimi delta attention: the delta rule with a decay for each number of a key. Source: arXiv 2510.26692, and HF
/// modeling_kimi_linear.
///
/// ```text
/// q, k, v = silu(convolution over the last conv_width inputs);   q = q / |q| / sqrt(head_dim);   k = k / |k|
/// S = diag(exp(decay(f))) S;   S += k (sigmoid(b) (v - S^T k))^T;   out = norm(S^T q) * sigmoid(g)
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Kda {
    /// Heads.
    pub num_heads: usize,
    /// Width of a query, key or value head.
    pub head_dim: usize,
    /// Inputs that a number of q, k or v is made of, its own included.
    pub conv_width: usize,
    /// What makes decays of `f`.
    pub decay: KdaDecay,
    /// Width between the two projections that make `f`, and the two that make `g`; `None`: there is one of each.
    pub gate_rank: Option<usize>,
}

/// The logarithm of a decay, of a number of `f`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KdaDecay {
    /// `-exp(A_log) softplus(f + dt_bias)`.
    Softplus,
    /// `lower sigmoid(exp(A_log) (f + dt_bias))`.
    Bounded {
        /// The lowest logarithm.
        lower: f32,
    },
}

impl Kda {
    /// A rank's heads.
    pub fn heads(&self, share: Share) -> Self {
        Self { num_heads: share.run(self.num_heads).len(), ..self.clone() }
    }

    /// Numbers of queries, keys or values of a token.
    pub fn inner_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Queries, keys and values of a token: what the convolution runs over.
    pub fn conv_dim(&self) -> usize {
        3 * self.inner_dim()
    }
}

impl Facts for Kda {
    fn divided(&self, share: Share) -> Option<Attention> {
        self.num_heads.is_multiple_of(share.of).then(|| Attention::Kda(self.heads(share)))
    }

    fn state(&self) -> Option<StateShape> {
        Some(StateShape {
            past_inputs: self.conv_width - 1,
            channels: self.conv_dim(),
            numbers: self.inner_dim() * self.head_dim,
        })
    }

    fn widths(&self) -> [usize; 10] {
        [self.num_heads, self.head_dim, self.conv_width, self.gate_rank.unwrap_or(0), 0, 0, 0, 0, 0, 0]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let inner = self.inner_dim();
        let gate = match self.gate_rank {
            Some(rank) => vec![(rank, hidden), (inner, rank)],
            None => vec![(inner, hidden)],
        };
        let others = vec![(self.conv_dim(), hidden), (self.num_heads, hidden), (hidden, inner)];
        [others, gate.clone(), gate].concat()
    }

    fn inner_products(&self) -> f64 {
        4.0 * self.inner_dim() as f64 * self.head_dim as f64
    }

    fn gpu_lacks(&self) -> Option<String> {
        let fits = self.head_dim <= 128 && self.head_dim.is_multiple_of(8) && self.conv_width <= 8;
        (!fits).then(|| {
            format!(
                "the GPU has Kimi delta attention for heads of up to 128 elements that are multiples of 8, and for \
                 convolutions of up to 8, not for {} and {}",
                self.head_dim, self.conv_width
            )
        })
    }
}
