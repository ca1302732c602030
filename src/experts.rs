//! The routed experts: `submit` a layer's tokens, `finish` their sum into the residual stream. A recorded pass has a
//! third verb: `replayed` computes the CPU's part of all of its layers.
//!
//! ```text
//! epilogue      biases, and the activation between an expert's products
//! memory        the bytes of every expert: mapped, copied, a slice per NUMA node
//! cpu           all experts on the CPU
//! cost          what experts in RAM cost on the CPU and over PCIe
//! residency     which expert is in VRAM, which in RAM
//! popularity    how often each is chosen
//! pool          VRAM as a cache: which experts come into it
//! service       experts alone, for other engines
//! mailbox       how a device hands tokens to the CPU's experts
//! gpu           each expert where it is cheapest: VRAM, the link, the CPU
//! stream_port   the service in the order of another engine's CUDA stream
//! ```
//!
//! Imports machine, kernel, cuda, model and backend. Read `cpu` first.

pub mod cost;
pub mod cpu;
pub mod epilogue;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
mod mailbox;
pub mod memory;
pub mod pool;
pub mod popularity;
pub mod residency;
pub mod service;
#[cfg(feature = "cuda")]
pub mod stream_port;

pub use cpu::{CpuExperts, Tuning};
pub use epilogue::Epilogue;
pub use memory::{ExpertMemory, ExpertShape};
pub use service::{ExpertService, RowType, ServedLayer};

use crate::Result;
use crate::backend::Backend;

/// Tokens of a batch up to which experts of the next layer are foreseen; more choose most of them.
pub const FORESEEN_TOKENS: usize = 8;

/// Of `n` experts in RAM that a layer of a decode step wants, those that a GPU reads over its link, where it takes so
/// many `eighths`: as kernels/handoff.cu says.
fn by_link(n: usize, eighths: u32) -> usize {
    (n * eighths as usize + 2) / 8
}

/// The routed experts of a model, beside the backend that runs the rest.
pub trait ExpertExecutor<B: Backend>: Send {
    /// Takes one MoE layer (counted among MoE layers) of `x` [tokens, hidden]. A GPU starts its share
    /// here; the CPU sorts and copies its rows here, and multiplies in `finish`.
    fn submit(&mut self, layer: usize, x: &B::Tensor, routing: &B::Routing) -> Result<()>;

    /// Ends it: `out[t] += sum_e weight[t, e] * down_e(silu(gate_e x_t) * up_e x_t)`; `out` [tokens, hidden].
    fn finish(&mut self, out: &mut B::Tensor) -> Result<()>;

    /// The same on one of several ranks: its part is added to `out`, or stands `over` it. Returns whether `out` is the
    /// sum over all ranks now; it may be under way, as [`Rank::linear_of_rank`](crate::backend::Rank::linear_of_rank)
    /// says.
    fn finish_of_rank(&mut self, backend: &B, out: &mut B::Tensor, over: bool) -> Result<bool> {
        if over {
            backend.clear(out);
        }
        self.finish(out).map(|()| false)
    }

    /// Whether it could use a guess of what the layer after the submitted one will be given: its memory idles until
    /// then.
    fn foresees(&self) -> bool {
        false
    }

    /// That guess, of at most [`FORESEEN_TOKENS`] tokens. Nothing but time depends on it.
    fn foresee(&mut self, guess: &B::Routing) {
        let _ = guess;
    }

    /// By what share such guesses raise the speed of steps of `tokens` tokens; `None`: that is not known.
    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        let _ = tokens;
        None
    }

    /// Computes the CPU's part of a recorded pass of `tokens` tokens that was launched again, for all of its layers.
    fn replayed(&mut self, tokens: usize) -> Result<()> {
        let _ = tokens;
        Ok(())
    }

    /// Called before every pass: time for what must not happen during one.
    fn between_passes(&mut self) -> Result<()> {
        Ok(())
    }

    /// Expert weights that were moved since the start.
    fn traffic(&self) -> Traffic;

    /// Experts of each layer that live on the device.
    fn resident(&self) -> usize {
        0
    }

    /// Whether experts may cross a link to the device in prompts.
    fn crosses(&self) -> bool {
        false
    }
}

/// Choices in decode, each expert of a layer and step once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    /// Of experts that were in VRAM, or foreseen.
    pub hits: u64,
    /// Of others.
    pub misses: u64,
}

impl Choices {
    /// The share of hits; `None`: nothing was chosen.
    pub fn hit_rate(self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    /// Those since `before`.
    pub fn since(self, before: Self) -> Self {
        Self { hits: self.hits - before.hits, misses: self.misses - before.misses }
    }
}

impl std::ops::Add for Choices {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { hits: self.hits + other.hits, misses: self.misses + other.misses }
    }
}

/// Bytes of expert weights that were moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From RAM to the CPU.
    pub ram: u64,
    /// From RAM to a device.
    pub link: u64,
    /// From a device's memory to its processors, in decode, where some experts are in RAM.
    pub vram: u64,
    /// Choices of the same.
    pub choices: Choices,
    /// Asked for ahead, because a guess named them: into the CPU's caches.
    pub ahead: u64,
    /// Choices of the CPU's experts that a guess named or not.
    pub foreseen: Choices,
}

impl Traffic {
    /// Bytes read from RAM, by whomever.
    pub fn total(self) -> u64 {
        self.ram + self.link
    }

    /// What was moved since `before`.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            ram: self.ram - before.ram,
            link: self.link - before.link,
            vram: self.vram - before.vram,
            choices: self.choices.since(before.choices),
            ahead: self.ahead - before.ahead,
            foreseen: self.foreseen.since(before.foreseen),
        }
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            ram: a.ram + b.ram,
            link: a.link + b.link,
            vram: a.vram + b.vram,
            choices: a.choices + b.choices,
            ahead: a.ahead + b.ahead,
            foreseen: a.foreseen + b.foreseen,
        })
    }
}
