//! Mamba-2: a state of fixed size that decays and is written to, whatever stands in it.

use super::{Attention, Facts, Matrix, StateShape};
use crate::model::Share;

/// Mamba-2, a selective state space. Source: arXiv 2405.21060, and HF modeling_nemotron_h.
///
/// ```text
/// z, xbc, dt = in_proj h;   x, b, c = silu(convolution over the last conv_width of xbc + bias)
/// d = softplus(dt + dt_bias);   S = exp(-exp(A_log) d) S + b (d x)^T;   y = S^T c + D x
/// out = norm(y * silu(z)), of each group by itself
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2 {
    /// Heads, each with a state.
    pub num_heads: usize,
    /// Numbers of `x` in a head.
    pub head_dim: usize,
    /// Numbers of `b` and of `c`.
    pub state_dim: usize,
    /// Groups of neighbouring heads that share `b` and `c`; divides `num_heads`.
    pub num_groups: usize,
    /// Inputs that a number of x, b or c is made of, its own included.
    pub conv_width: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// Multiplies the norm's weights, and so the result.
    pub output_scale: f32,
}

impl Mamba2 {
    /// A rank's groups, each with its heads.
    pub fn groups(&self, share: Share) -> Self {
        let num_groups = share.run(self.num_groups).len();
        Self { num_groups, num_heads: self.num_heads / self.num_groups * num_groups, ..self.clone() }
    }

    /// Numbers of `x` of a token.
    pub fn inner_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// `x`, `b` and `c` of a token: what the convolution runs over.
    pub fn conv_dim(&self) -> usize {
        self.inner_dim() + 2 * self.num_groups * self.state_dim
    }
}

impl Facts for Mamba2 {
    fn divided(&self, share: Share) -> Option<Attention> {
        // The norm of a group reads all of its heads.
        self.num_groups.is_multiple_of(share.of).then(|| Attention::Mamba2(self.groups(share)))
    }

    fn state(&self) -> Option<StateShape> {
        Some(StateShape {
            past_inputs: self.conv_width - 1,
            channels: self.conv_dim(),
            numbers: self.inner_dim() * self.state_dim,
        })
    }

    fn widths(&self) -> [usize; 10] {
        [self.num_heads, self.head_dim, self.state_dim, self.num_groups, self.conv_width, 0, 0, 0, 0, 0]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        let inner = self.inner_dim();
        vec![(inner, hidden), (self.conv_dim(), hidden), (self.num_heads, hidden), (hidden, inner)]
    }

    fn inner_products(&self) -> f64 {
        2.0 * self.inner_dim() as f64 * self.state_dim as f64
    }

    fn gpu_lacks(&self) -> Option<String> {
        let fits = self.state_dim <= 128
            && self.state_dim.is_multiple_of(8)
            && self.head_dim.is_multiple_of(8)
            && self.conv_width <= 8;
        (!fits).then(|| {
            format!(
                "the GPU has Mamba-2 for states of up to 128 numbers, for states and heads of multiples of 8, and for \
                 convolutions of up to 8, not for {}, {} and {}",
                self.state_dim, self.head_dim, self.conv_width
            )
        })
    }
}
