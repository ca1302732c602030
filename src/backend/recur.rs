//! `Recur`: layers whose memory of a sequence is a state of fixed size.

use super::load::Load;
use crate::Result;
use crate::model::DeltaNet;

/// Recurrent state and what moves it on. `T` is the number of tokens in the batch.
pub trait Recur: Load {
    /// Recurrent state of one layer, in slots of a sequence each.
    type State: Send;
    /// Activations of gated DeltaNet.
    type DeltaScratch: Send;

    /// Recurrent state of `slots` sequences.
    fn state(&self, slots: usize, config: &DeltaNet) -> Result<Self::State>;
    /// Activations for [`Recur::delta_net`] on at most `max_tokens` tokens.
    fn delta_scratch(&self, config: &DeltaNet, max_tokens: usize) -> Result<Self::DeltaScratch>;
    /// Gated DeltaNet between its projections: `h` `[T, hidden]`, `qkv` `[T, conv_dim]`, `z` and `out` `[T,
    /// value_dim]`. Each sequence goes on from the state in its span's slot, from zeros at position 0, and leaves
    /// there what comes next. A batch has one span of a sequence.
    #[allow(clippy::too_many_arguments)] // what it is, what it has, what it reads, what it changes
    fn delta_net(
        &self,
        state: &mut Self::State,
        batch: &Self::Batch,
        config: (&DeltaNet, f32),
        w: &Self::DeltaNet,
        scratch: &mut Self::DeltaScratch,
        h: &Self::Tensor,
        qkv_z: (&Self::Tensor, &Self::Tensor),
        out: &mut Self::Tensor,
    );
}
