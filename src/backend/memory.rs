//! `Memory`: batches and activations on the device, and their numbers back on the host.

use std::ops::{DerefMut, Range};

use super::batch::Batch;
use crate::Result;

/// Allocates, fills and reads what ops work on. `T` is the number of tokens in the batch.
///
/// Ops may be asynchronous: the error of one is returned by the next call that returns a `Result`.
pub trait Memory: Sized + Send + 'static {
    /// What ops need to know of a batch.
    type Batch: Send;
    /// Activations `[rows, cols]`, allocated once at their largest.
    type Tensor: Send;
    /// f32 on the host, in memory that the device copies to fast.
    type Host: DerefMut<Target = [f32]> + Send;

    /// Whether memory is only counted: nothing that is taken is there, and weights have shapes alone.
    fn is_plan(&self) -> bool;
    /// Room for batches of at most `max_tokens` tokens.
    fn batch(&self, max_tokens: usize) -> Result<Self::Batch>;
    /// Brings a batch to the device.
    fn set_batch(&self, to: &mut Self::Batch, batch: &Batch);
    /// Allocates activations of at most `max_rows` rows, in the precision in which products take them.
    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Self::Tensor>;
    /// Allocates activations that are f32 on every device: residual stream, angles, logits.
    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Self::Tensor>;
    /// Sets how many rows of `t` are in use.
    fn set_rows(&self, t: &mut Self::Tensor, rows: usize);
    /// Allocates `numbers` f32 on the host.
    fn host(&self, numbers: usize) -> Result<Self::Host>;
    /// Copies rows of `t`, f32, to the host: `out` is `[rows, cols]`.
    fn read_rows(&self, t: &Self::Tensor, rows: Range<usize>, out: &mut [f32]) -> Result<()>;
    /// Copies `t` to the host: `out` becomes `[rows, cols]`.
    fn read(&self, t: &Self::Tensor, out: &mut Vec<f32>) -> Result<()>;
}
