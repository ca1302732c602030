//! `Recur`: layers whose memory of a sequence is a state of fixed size.

use super::load::Load;
use super::memory::Memory;
use crate::Result;
use crate::model::{DeltaNet, Kda, Mamba2, StateShape};

/// What gated DeltaNet reads of the batch's tokens.
pub struct DeltaInputs<'a, B: Memory> {
    /// `[T, hidden]`: its gates are made of it.
    pub h: &'a B::Tensor,
    /// `[T, conv_dim]`
    pub qkv: &'a B::Tensor,
    /// `[T, value_dim]`
    pub z: &'a B::Tensor,
}

/// What Kimi delta attention reads of the batch's tokens.
pub struct KdaInputs<'a, B: Memory> {
    /// `[T, conv_dim]`, after the convolution.
    pub qkv: &'a B::Tensor,
    /// What decays are made of, `[T, inner_dim]`.
    pub decay: &'a B::Tensor,
    /// `[T, num_heads]`, f32.
    pub beta: &'a B::Tensor,
    /// Of the output, `[T, inner_dim]`.
    pub gate: &'a B::Tensor,
}

/// Kimi delta attention after its convolution.
pub struct KdaRule<'a, B: Load> {
    /// Its shape.
    pub config: &'a Kda,
    /// `exp(A_log)`, `[num_heads]`.
    pub rates: &'a B::Norm,
    /// `[inner_dim]`
    pub dt_bias: &'a B::Norm,
    /// `[head_dim]`
    pub norm: &'a B::Norm,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// What Mamba-2 reads of the batch's tokens.
pub struct Mamba2Inputs<'a, B: Memory> {
    /// `[T, conv_dim]`, after the convolution.
    pub xbc: &'a B::Tensor,
    /// `[T, inner_dim]`
    pub z: &'a B::Tensor,
    /// `[T, num_heads]`, f32.
    pub dt: &'a B::Tensor,
}

/// Mamba-2 after its convolution.
pub struct Mamba2Rule<'a, B: Load> {
    /// Its shape.
    pub config: &'a Mamba2,
    /// `exp(A_log)`, `[num_heads]`.
    pub rates: &'a B::Norm,
    /// `[num_heads]`
    pub dt_bias: &'a B::Norm,
    /// `D`, `[num_heads]`.
    pub skip: &'a B::Norm,
    /// `[inner_dim]`
    pub norm: &'a B::Norm,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Recurrent state and what moves it on. `T` is the number of tokens in the batch.
pub trait Recur: Load {
    /// Recurrent state of one layer, in slots of a sequence each.
    type State: Send;
    /// Activations of gated DeltaNet.
    type DeltaScratch: Send;
    /// Activations of Kimi delta attention.
    type KdaScratch: Send;

    /// Recurrent state of `slots` sequences.
    fn state(&self, slots: usize, shape: StateShape) -> Result<Self::State>;
    /// Copies the state in slot `from` to slot `to`: a sequence that goes on from either goes on alike. Never part of a
    /// recorded pass.
    fn copy_state(&self, state: &mut Self::State, from: usize, to: usize);
    /// Numbers of a slot.
    fn state_len(&self, state: &Self::State) -> usize;
    /// Copies the state in `slot` to `out`, a part of [`Memory::host`]'s memory, which is not to be read before ops
    /// that follow have ended. Never part of a recorded pass.
    fn save_state(&self, state: &Self::State, slot: usize, out: &mut [f32]);
    /// The same, back to any slot. `from` must not change before ops that follow have ended.
    fn restore_state(&self, state: &mut Self::State, slot: usize, from: &[f32]);
    /// Activations for [`Recur::delta_net`] on at most `max_tokens` tokens.
    fn delta_scratch(&self, config: &DeltaNet, max_tokens: usize) -> Result<Self::DeltaScratch>;
    /// Gated DeltaNet between its projections; `out` is `[T, value_dim]`. Each sequence goes on from the state in its
    /// span's slot, from zeros at position 0, and leaves there what comes next. A batch has at most one span of a
    /// sequence.
    fn delta_net(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        w: &Self::DeltaNet,
        scratch: &mut Self::DeltaScratch,
        inputs: DeltaInputs<'_, Self>,
        out: &mut Self::Tensor,
    );
    /// `out[t] = silu(sum over taps of tap * x + bias)`, the last tap of `[conv_width, channels]` for the token itself.
    /// Each sequence goes on from the inputs in its span's slot, from zeros at position 0, and leaves there the last
    /// ones.
    fn convolve(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        w: (&Self::Norm, Option<&Self::Norm>),
        x: &Self::Tensor,
        out: &mut Self::Tensor,
    );
    /// Activations for [`Recur::kda`] on at most `max_tokens` tokens.
    fn kda_scratch(&self, config: &Kda, max_tokens: usize) -> Result<Self::KdaScratch>;
    /// Kimi delta attention after its convolution; `out` is `[T, inner_dim]`. Sequences and their states as of
    /// [`Recur::delta_net`].
    fn kda(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        rule: &KdaRule<'_, Self>,
        scratch: &mut Self::KdaScratch,
        inputs: KdaInputs<'_, Self>,
        out: &mut Self::Tensor,
    );
    /// Mamba-2 after its convolution; `out` is `[T, inner_dim]`. Sequences and their states as of
    /// [`Recur::delta_net`].
    fn mamba2(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        rule: &Mamba2Rule<'_, Self>,
        inputs: Mamba2Inputs<'_, Self>,
        out: &mut Self::Tensor,
    );
    /// `out[t] = c[t] * sum over taps of tap * (b * x)`, the last tap of `[conv_width, channels]` for the token itself;
    /// `bcx` is `[T, b, c and x]`, `out` `[T, channels]`. Each sequence goes on from the inputs `b * x` in its span's
    /// slot, from zeros at position 0, and leaves there the last ones.
    fn short_conv(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        taps: &Self::Norm,
        bcx: &Self::Tensor,
        out: &mut Self::Tensor,
    );
}
