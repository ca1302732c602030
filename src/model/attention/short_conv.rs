//! Gated short convolution: a token sees itself and the few before it.

use super::{Attention, Facts, Matrix, StateShape};
use crate::model::Share;

/// Gated short convolution. Source: HF modeling_lfm2_moe.
///
/// ```text
/// b, c, x = in_proj h;   out = out_proj(c * convolution over the last conv_width of b * x)
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConv {
    /// Numbers of `b`, `c` and `x` each.
    pub channels: usize,
    /// Inputs that a number is made of, its own included.
    pub conv_width: usize,
}

impl ShortConv {
    /// Runs of channels that ranks share out.
    pub fn runs(&self) -> usize {
        self.channels / 8
    }
}

impl Facts for ShortConv {
    fn divided(&self, share: Share) -> Option<Attention> {
        let channels = 8 * share.run(self.runs()).len();
        let even = self.channels.is_multiple_of(8 * share.of);
        even.then(|| Attention::ShortConv(Self { channels, ..self.clone() }))
    }

    fn state(&self) -> Option<StateShape> {
        Some(StateShape { past_inputs: self.conv_width - 1, channels: self.channels, numbers: 0 })
    }

    fn widths(&self) -> [usize; 10] {
        [self.channels, self.conv_width, 0, 0, 0, 0, 0, 0, 0, 0]
    }

    fn matrices(&self, hidden: usize) -> Vec<Matrix> {
        vec![(3 * self.channels, hidden), (hidden, self.channels)]
    }

    fn gpu_lacks(&self) -> Option<String> {
        (self.conv_width > 8 || !self.channels.is_multiple_of(8))
            .then(|| format!("the GPU has short convolutions of up to 8 inputs, not {}", self.conv_width))
    }
}
