//! `Forward`: a model behind a pointer, whatever device it runs on.

use std::sync::Arc;

use super::block_pool::BlockMove;
use super::tap::Tap;
use super::{Measure, Model};
use crate::Result;
use crate::backend::Backend;
use crate::backend::batch::Batch;
use crate::backend::tensor::Shortlist;
use crate::model::ModelConfig;

/// A model that reads batches, whatever it runs on.
pub trait Forward: Measure + Send {
    /// What it is.
    fn config(&self) -> &ModelConfig;

    /// Reads the batch: stores its keys and values, and leaves its hidden states for [`Forward::logits`]. `tap` must
    /// not be empty, and its vectors must be [held](Forward::hold).
    ///
    /// Errors: `Error::Cache` when an expert's bytes are not what was written, found at its first use; `Error::Device`.
    fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()>;

    /// Copies what the layers keep of the sequence in `slot` to a snapshot, in the order of passes.
    fn save_state(&mut self, slot: usize, snapshot: usize);

    /// The same copied back, to any slot: its sequence goes on where the other one stood.
    fn restore_state(&mut self, slot: usize, snapshot: usize);

    /// Copies a block of keys and values to the host, or back, in the order of passes.
    fn move_block(&mut self, moved: BlockMove);

    /// Brings vectors `[hidden]` to the device, to be added by a [`Tap`] for as long as the caller keeps them too.
    ///
    /// Errors: `Error::Busy` when those of all requests take too much; `Error::Resources` when the device has no memory
    /// for them.
    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()>;

    /// Logits `[rows, vocab]` of rows of the last batch, on the host; at most [`Forward::max_logit_rows`] rows at a
    /// time.
    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]>;

    /// The largest logits of rows of the last batch, and what a row weighs at an inverse temperature; as many rows as
    /// for [`Forward::logits`].
    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<()>;

    /// Whole rows, after [`Forward::shortlists`] of them.
    fn whole_rows(&mut self) -> Result<&mut [f32]>;

    /// Rows of logits that one call may ask for.
    fn max_logit_rows(&self) -> usize;

    /// Must be called on the thread that runs the model, before its first batch.
    fn enter_thread(&self) -> Result<()>;
}

impl<B: Backend> Forward for Model<B> {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()> {
        self.forward(batch, tap)
    }

    fn save_state(&mut self, slot: usize, snapshot: usize) {
        self.kv.save_state(&self.backend, slot, snapshot);
        self.weights.tables.save(slot, snapshot);
    }

    fn restore_state(&mut self, slot: usize, snapshot: usize) {
        self.kv.restore_state(&self.backend, slot, snapshot);
        self.weights.tables.restore(slot, snapshot);
    }

    fn move_block(&mut self, moved: BlockMove) {
        self.kv.move_block(&self.backend, moved);
    }

    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()> {
        self.steering.hold(&self.backend, vectors, self.backend.share().of)
    }

    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]> {
        self.compute_logits(rows);
        self.head.whole_rows(&self.backend)
    }

    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<()> {
        self.compute_logits(rows);
        self.head.shortlists(&self.backend, inverse_temperatures, out)
    }

    fn whole_rows(&mut self) -> Result<&mut [f32]> {
        self.head.whole_rows(&self.backend)
    }

    fn max_logit_rows(&self) -> usize {
        self.head.max_rows()
    }

    fn enter_thread(&self) -> Result<()> {
        self.backend.enter_thread()
    }
}
