//! What a model is measured by: bytes, rates, and the times of its ops.

use super::Model;
use super::choices::Choices;
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::{Backend, OpTime, Rates};
use crate::experts::Traffic;

/// What a model reads, and how long its ops take.
pub trait Measure {
    /// Devices that have a share of it each.
    fn ranks(&self) -> usize {
        1
    }

    /// Devices that have some of its layers each.
    fn stages(&self) -> usize {
        1
    }

    /// Bytes of resident weights that a decode step of one token reads, of a rank.
    fn resident_bytes_per_token(&self) -> u64;

    /// Expert weights that were moved since the start.
    fn traffic(&self) -> Traffic;

    /// Experts of each layer that live on the device.
    fn resident_experts(&self) -> usize;

    /// By what share guesses of experts raise the speed of decode steps of `tokens` tokens; `None`: that is not known.
    fn foresight_gain(&self, tokens: usize) -> Option<f32>;

    /// Measures the device; `None`: it is the CPU. Errors: `Error::Resources` if the device has no memory left for it;
    /// `Error::Device`.
    fn rates(&self) -> Result<Option<Rates>>;

    /// Gives the tokens of the passes from now on these experts, `[MoE layers, tokens, top_k]`, of which a layer before
    /// `guesses` are foreseen: every pass has as many tokens. Must be called before the first pass, or never. Errors:
    /// `Error::Resources`.
    fn choose(&mut self, ids: &[i32], guesses: &[i32], tokens: usize) -> Result<()>;

    /// Reads the batch, and logits of its last row, twice; times of the second pass's ops, none on the CPU.
    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>>;
}

impl<B: Backend> Measure for Model<B> {
    fn resident_bytes_per_token(&self) -> u64 {
        self.weights.bytes_per_token(&self.backend) as u64
    }

    fn traffic(&self) -> Traffic {
        self.experts.as_ref().map(|experts| experts.traffic()).unwrap_or_default()
    }

    fn resident_experts(&self) -> usize {
        self.experts.as_ref().map_or(0, |experts| experts.resident())
    }

    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.experts.as_ref().and_then(|experts| experts.foresight_gain(tokens))
    }

    fn rates(&self) -> Result<Option<Rates>> {
        self.backend.rates()
    }

    fn choose(&mut self, ids: &[i32], guesses: &[i32], tokens: usize) -> Result<()> {
        let Self { backend, config, parts, choices, .. } = self;
        let choices = match choices {
            Some(choices) => choices,
            None => choices.insert(Choices::new(backend, config, parts.max_tokens())?),
        };
        choices.set(backend, ids, guesses, tokens);
        Ok(())
    }

    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        self.backend.profiling(true)?;
        let times = self.profiled(batch);
        self.backend.profiling(false)?;
        times
    }
}

impl<B: Backend> Model<B> {
    /// Times of a pass's ops and of its last row's logits, while the backend times them.
    pub(super) fn profiled(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        let mut pass = || {
            self.forward(batch, None)?;
            self.compute_logits(&[batch.len() - 1]);
            self.head.whole_rows(&self.backend)?;
            self.backend.take_profile()
        };
        // The first pass loads whatever it needs, the second may be recorded.
        pass().and_then(|_| pass())
    }
}
