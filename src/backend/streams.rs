//! `Streams`: several residual streams, mixed into one input and given one result; and what n-grams add to them.

use super::recur::Recur;
use crate::Result;
use crate::model::Connections;

/// What makes a connection of the streams.
pub struct ConnectWeights<'a, B: Recur> {
    /// `[rows, streams * hidden]`
    pub of_streams: &'a B::Norm,
    /// `[rows]`
    pub base: &'a B::Norm,
    /// `[3]`
    pub scale: &'a B::Norm,
}

/// Whose `pre` says what is read of connected streams.
pub enum ReadBy<'a, B: Recur> {
    /// The connection's own.
    Own,
    /// Those of these shares, `[T, rows]`.
    Shares(&'a B::Tensor),
    /// Nobody's: the first stream is read.
    First,
}

/// What gates of n-grams are made with.
pub struct NgramNorms<'a, B: Recur> {
    /// Of the keys, `[streams * hidden]`.
    pub key: &'a B::Norm,
    /// Of the residual streams, `[streams * hidden]`.
    pub query: &'a B::Norm,
    /// Epsilon of both.
    pub eps: f32,
}

/// What n-grams add, before its convolution.
pub struct NgramInputs<'a, B: Recur> {
    /// `[T, streams * hidden]`
    pub gated: &'a B::Tensor,
    /// Its norm, `[T, streams * hidden]`.
    pub normed: &'a B::Tensor,
    /// `[conv_width, streams * hidden]`, the last one for the token itself.
    pub taps: &'a B::Norm,
    /// Positions from tap to tap.
    pub dilation: usize,
}

/// Residual streams, beside each other in a row: `x` is `[T, streams * hidden]`, f32.
pub trait Streams: Recur {
    /// Copies f32 numbers to the rows of `to`, the input of a product, from `first` on, `[rows, cols]`. Never part of a
    /// recorded pass.
    fn write_rows(&self, to: &mut Self::Tensor, first: usize, numbers: &[f32]) -> Result<()>;
    /// `out[t] = norm(x[t])`, of every run of `width` numbers by itself; `w` is `[cols]`.
    fn norm_streams(&self, x: &Self::Tensor, w: &Self::Norm, eps: f32, width: usize, out: &mut Self::Tensor);
    /// What is made of the first numbers of each row of `gates`, f32: `low = silu(gates / streams)`; and of the next:
    /// `inject = 2 sigmoid(gates / streams)`, `[T, streams]`, f32.
    fn mixer_gates(&self, gates: &Self::Tensor, low: &mut Self::Tensor, inject: &mut Self::Tensor);
    /// `out[t] = 1 / streams * sum over s of sigmoid(gate[t, s]) * normed[t, s]`, `[T, hidden]`.
    fn mix_streams(&self, gate: &Self::Tensor, normed: &Self::Tensor, out: &mut Self::Tensor);
    /// `x[t, s] += inject[t, s] * y[t]`, all f32; `y` `[T, hidden]`.
    fn inject(&self, y: &Self::Tensor, inject: &Self::Tensor, x: &mut Self::Tensor);
    /// `out[t] = sum over s of pre_s * x[t, s]`, `[T, hidden]`, `pre` as `by` says; `shares` become `post` and `C`,
    /// behind as many numbers of `pre` as there are streams, `[T, rows]`, as [`Connections`] say; all f32. Weights that
    /// make nothing but `pre` have `shares` of `[T, streams]`. The number is the norm's epsilon.
    fn collapse_streams(
        &self,
        x: &Self::Tensor,
        w: &ConnectWeights<'_, Self>,
        of: (Connections, f32),
        by: ReadBy<'_, Self>,
        shares: &mut Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// `out[t] = sum over s of pre_s * x[t, s]`, `[T, hidden]`, by the `shares` of a connection, `[T, rows]`; all f32.
    fn sum_streams(&self, x: &Self::Tensor, of: Connections, shares: &Self::Tensor, out: &mut Self::Tensor);
    /// `x[t, k] = post_k * y[t] + sum over j of C_jk x[t, j]`, all f32; `y` `[T, hidden]`.
    fn connect_streams(&self, y: &Self::Tensor, shares: &Self::Tensor, x: &mut Self::Tensor);
    /// `out[t] = 1 / streams * sum over s of x[t, s]`, f32; `out` `[T, hidden]`.
    fn mean_streams(&self, x: &Self::Tensor, out: &mut Self::Tensor);
    /// `key[t, s] = sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value[t]`, with `g = norm(key[t, s]) . norm(x[t, s]) /
    /// sqrt(hidden)`; `key` `[T, streams * hidden]`, `value` `[T, hidden]`.
    fn gate_ngrams(&self, norms: &NgramNorms<'_, Self>, x: &Self::Tensor, value: &Self::Tensor, key: &mut Self::Tensor);
    /// `x[t] += u[t]`, `u` `[T, streams * hidden]`.
    fn add_ngrams(&self, u: &Self::Tensor, x: &mut Self::Tensor);
    /// `x[t] += gated[t] + silu(sum over taps of tap * normed)`, and keeps what the sequences' next tokens need of
    /// `normed` in the slots of `state`; position 0 begins from zeros.
    fn convolve_ngrams(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        inputs: &NgramInputs<'_, Self>,
        x: &mut Self::Tensor,
    );
}
