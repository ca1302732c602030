//! `Dense`: ops on rows, from token ids to logits.

use std::ops::Range;

use super::load::Load;
use super::tensor::Shortlist;
use crate::Result;
use crate::model::{Activation, GateActivation};

/// Embedding, norms, products, gates, logits. `T` is the number of tokens in the batch.
pub trait Dense: Load {
    /// What finds the largest logits of rows.
    type Shortlister: Send;

    /// `out[t] = embedding[tokens[t]]`, `width` numbers, f32, as often as a row of `out` holds them.
    fn embed(&self, embedding: &Self::Embedding, batch: &Self::Batch, width: usize, out: &mut Self::Tensor);
    /// `out[t] = norm(x[t])`.
    fn rms_norm(&self, x: &Self::Tensor, w: &Self::Norm, eps: f32, out: &mut Self::Tensor);
    /// `out[t] = norm(x[t] - mean(x[t]))`.
    fn layer_norm(&self, x: &Self::Tensor, w: &Self::Norm, eps: f32, out: &mut Self::Tensor);
    /// RMS norm, in place, of every run of `w.len()` numbers in the columns `cols` of each row.
    fn rms_norm_heads(&self, x: &mut Self::Tensor, w: &Self::Norm, eps: f32, cols: Range<usize>);
    /// `out[t] = W x[t] + b`.
    fn linear(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor) {
        self.linears(x, [(w, out)]);
    }
    /// Several products of one `x`, their weights in one precision.
    fn linears<const N: usize>(&self, x: &Self::Tensor, jobs: [(&Self::Linear, &mut Self::Tensor); N]);
    /// `out[t] += W x[t] + b`.
    fn linear_add(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor);
    /// `out[t, g] = W_g x[t, g]` of equal parts of the columns.
    fn linear_groups(&self, w: &Self::Groups, x: &Self::Tensor, out: &mut Self::Tensor);
    /// `out[t] = activation(gate[t], up[t])`; one without a gate reads `up` alone.
    fn activate(&self, activation: Activation, gate: &Self::Tensor, up: &Self::Tensor, out: &mut Self::Tensor);
    /// `x[t, i] *= activation(gate[t, i / n])`: each number of `gate` is for `n = x.cols / gate.cols` of `x`.
    fn gate(&self, gate: &Self::Tensor, activation: GateActivation, x: &mut Self::Tensor);
    /// `x[t] *= sigmoid(w . h[t])`, `w` `[hidden]`.
    fn gate_rows(&self, w: &Self::Norm, h: &Self::Tensor, x: &mut Self::Tensor);
    /// `x *= factor`.
    fn scale(&self, x: &mut Self::Tensor, factor: f32);
    /// `x = cap * tanh(x / cap)`, f32.
    fn softcap(&self, x: &mut Self::Tensor, cap: f32);
    /// `x = 0`, f32.
    fn clear(&self, x: &mut Self::Tensor);
    /// `out = x`, from f32 to the precision in which products take it.
    fn rounded(&self, x: &Self::Tensor, out: &mut Self::Tensor);
    /// `x[t] = (x[t] + norm(y[t])) * scale`, both f32.
    fn norm_add(&self, y: &Self::Tensor, norm: (&Self::Norm, f32), scale: f32, x: &mut Self::Tensor);
    /// `out[at + i] = x[rows[i] - first]`, both f32.
    fn gather(&self, x: &Self::Tensor, rows: &[usize], first: usize, out: &mut Self::Tensor, at: usize);

    /// Allocates what [`shortlist`](Dense::shortlist) needs for at most `max_rows` rows of `cols` numbers.
    fn shortlister(&self, max_rows: usize, cols: usize) -> Result<Self::Shortlister>;
    /// The largest of each row of `logits`, f32, and the weight of the whole row at its inverse temperature.
    fn shortlist(
        &self,
        shortlister: &mut Self::Shortlister,
        logits: &Self::Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()>;

    // Several of the ops above in a row: the default is what they mean, a device may fuse them.

    /// Products of `norm(x)`. `h` has room for the norm, and a device may leave it unwritten.
    fn norm_linears<const N: usize>(
        &self,
        x: &Self::Tensor,
        (norm, eps): (&Self::Norm, f32),
        h: &mut Self::Tensor,
        jobs: [(&Self::Linear, &mut Self::Tensor); N],
    ) {
        self.rms_norm(x, norm, eps, h);
        self.linears(h, jobs);
    }
    /// `out = activation(gate x, up x)`. `buffers` have room for the products, and a device may leave them unwritten.
    fn gated_linears(
        &self,
        x: &Self::Tensor,
        (gate, up): (&Self::Linear, &Self::Linear),
        activation: Activation,
        buffers: (&mut Self::Tensor, &mut Self::Tensor),
        out: &mut Self::Tensor,
    ) {
        self.linears(x, [(gate, &mut *buffers.0), (up, &mut *buffers.1)]);
        self.activate(activation, buffers.0, buffers.1, out);
    }
}
