//! `Record`: how a whole pass runs: replayed, steered, measured.

use std::ops::Range;
use std::sync::Arc;

use super::batch::Batch;
use super::load::Load;
use crate::Result;

/// What a pass does between its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooks {
    /// Nothing.
    None,
    /// Adds to the residual stream, on the device.
    Add,
    /// Brings rows to the host.
    Read,
}

/// What the launches of a decode step depend on: steps of one shape run as the same graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeShape {
    /// Sequences, one token each.
    pub sequences: usize,
    /// Whether something is added to the residual stream.
    pub steered: bool,
}

impl DecodeShape {
    /// The shape of a pass; `None`: part of a prompt is in it, or it needs the host between its layers.
    pub fn of(batch: &Batch, hooks: Hooks) -> Option<Self> {
        let decodes = batch.spans.len() == batch.len();
        (decodes && hooks != Hooks::Read).then_some(Self { sequences: batch.len(), steered: hooks == Hooks::Add })
    }
}

/// A multiple of a vector, added to rows of the residual stream.
#[derive(Debug)]
pub struct Addition<N: ?Sized> {
    /// After this layer.
    pub layer: usize,
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// `[hidden]`, or `[streams * hidden]`.
    pub vector: Arc<N>,
    /// Multiplies the vector.
    pub coefficient: f32,
}

impl<N: ?Sized> Clone for Addition<N> {
    fn clone(&self) -> Self {
        let Self { layer, rows, vector, coefficient } = self;
        Self { layer: *layer, rows: rows.clone(), vector: vector.clone(), coefficient: *coefficient }
    }
}

/// Measured rates of a device, per second.
#[derive(Clone, Debug)]
pub struct Rates {
    /// The device's name.
    pub device: String,
    /// Bytes that its memory reads and writes.
    pub memory: f64,
    /// Bytes from the host to its memory.
    pub link: f64,
    /// Operations of products of BF16 matrices, two to a weight and a token.
    pub products: f64,
    /// Bytes of its memory in use.
    pub taken: u64,
}

/// The time that kernels of one name took.
#[derive(Clone, Debug)]
pub struct OpTime {
    /// The kernel's name.
    pub name: &'static str,
    /// How often it ran.
    pub launches: usize,
    /// Sum over all launches, the gaps after them included.
    pub seconds: f64,
}

/// Recorded passes, what is added to the residual stream at addresses that they know, and times.
pub trait Record: Load {
    /// What a pass adds to the residual stream.
    type Additions: Send;

    /// Runs the pass over `batch` that `record` computes op by op; a device that has recorded one of the same
    /// [`DecodeShape`] before replays that. Returns whether the pass ran as a recording.
    fn replay(&self, batch: &Batch, hooks: Hooks, record: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        let _ = (batch, hooks);
        record().map(|()| false)
    }
    /// Whether [`replay`](Record::replay) would launch a recording of such a pass.
    fn is_recorded(&self, batch: &Batch, hooks: Hooks) -> bool {
        let _ = (batch, hooks);
        false
    }
    /// An empty list of additions for a model of `layers` layers.
    fn additions(&self, layers: usize) -> Result<Self::Additions>;
    /// Replaces the list on the device.
    fn set_additions(&self, to: &mut Self::Additions, additions: Vec<Addition<Self::Norm>>) -> Result<()>;
    /// `x[t] += coefficient * vector` for all additions after `layer`, in their order, f32; rounded after the product
    /// and after the sum. Row 0 of `x` is row `first` of the batch. A vector shorter than a row is added to every run
    /// of its length.
    fn add_vectors(&self, additions: &Self::Additions, layer: usize, first: usize, x: &mut Self::Tensor);
    /// Measures the device; `None`: it is the CPU.
    fn rates(&self) -> Result<Option<Rates>> {
        Ok(None)
    }
    /// Starts or stops to time every op, while none is under way on any rank. Recorded passes are dropped. Errors:
    /// `Error::Device`.
    fn profiling(&self, on: bool) -> Result<()> {
        let _ = on;
        Ok(())
    }
    /// Times of ops since the last call.
    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(Vec::new())
    }
    /// Must be called on the thread that runs the ops, before the first.
    fn enter_thread(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_steps_that_stay_on_the_device_have_a_shape() {
        let mut batch = Batch::default();
        batch.push(&[1], 7, &[0]);
        batch.push(&[2], 3, &[1]);
        let shape = |steered| Some(DecodeShape { sequences: 2, steered });
        assert_eq!(DecodeShape::of(&batch, Hooks::None), shape(false));
        assert_eq!(DecodeShape::of(&batch, Hooks::Add), shape(true));
        assert_eq!(DecodeShape::of(&batch, Hooks::Read), None);
        batch.push(&[3, 4], 0, &[2]);
        assert_eq!(DecodeShape::of(&batch, Hooks::None), None, "a part of a prompt");
    }
}
