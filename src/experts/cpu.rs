//! Routed experts on the CPU, straight from the packed cache.
//!
//! ```text
//! submit:  sort (token, expert) pairs by expert; quantize x
//! finish:  one dispatch of the team
//!          for (expert, tile) of mine:   h[pair] = activation(gate tile . x, up tile . x)
//!          barrier; quantize my share of h; barrier
//!          for output tile of mine:      for expert ascending:  out[token] += weight * (down tile . h)
//! ```
//!
//! ```text
//! tuning      what the speed depends on, and the bits do not
//! pieces      what a worker claims: an expert's tiles, as many as go through the kernel together
//! dispatch    `finish`, as all workers see it
//! ```
//!
//! Work is claimed in small runs of tiles, so that cores of unequal speed finish together; with several NUMA nodes each
//! worker claims from its own node's slice while that lasts. Each output element is
//! summed by one worker in order of expert id: the bits depend neither on the number of threads nor on the batch.
#![allow(unsafe_code)]

mod dispatch;
mod pieces;
mod tuning;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::pack::{ExpertLayout, MatrixLayout};

use super::epilogue::Epilogue;
use super::memory::ExpertMemory;
use super::{ExpertExecutor, Traffic};
use crate::Result;
use crate::backend::Routing;
use crate::backend::cpu::Cpu;
use crate::backend::tensor::Tensor;
use crate::kernel::{Activations, Kernel};
use crate::machine::workers::{Claims, Shared, Team};
use dispatch::Dispatch;
use pieces::{Active, LayerWork, READ_COST};
pub use tuning::Tuning;

/// Place of an id that is no expert.
const NO_PAIR: u32 = u32::MAX;

/// Below this many values one thread converts faster than a team wakes.
const PARALLEL_VALUES: usize = 1 << 14;

/// All routed experts of a model, computed where they lie.
pub struct CpuExperts {
    memory: Arc<ExpertMemory>,
    epilogue: Epilogue,
    claims: Vec<[Claims; 2]>, // [nodes], of each phase
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    layout: ExpertLayout,
    checked: Vec<bool>, // [layers, experts]: the checksum held
    bytes_read: u64,

    // The submitted layer.
    layer: usize,
    tokens: usize,
    active: Vec<Active>,
    counts: Vec<usize>,     // [experts]
    pair_tokens: Vec<u32>,  // [pairs], sorted by expert
    pair_weights: Vec<f32>, // [pairs]
    pair_of: Vec<u32>,      // [tokens, top_k], the pair that a place in the routing became
    x: Activations,         // [pairs, hidden]; of one token [1, hidden]
    hidden: Vec<f32>,       // [pairs, intermediate]
    hidden_q: Activations,  // [pairs, intermediate]
    results: Vec<f32>,      // [workers, tuning.results()]
    tuning: Tuning,
}

impl CpuExperts {
    /// Allocates for batches of up to `max_tokens` with `top_k` experts each, or as many pairs; nothing is allocated
    /// later.
    pub fn new(
        memory: Arc<ExpertMemory>,
        team: Arc<Team>,
        kernel: &'static dyn Kernel,
        max_tokens: usize,
        top_k: usize,
    ) -> Self {
        let store = memory.cache();
        let layout = store.layout();
        let (experts, pairs) = (store.num_experts(), max_tokens * top_k);
        Self {
            checked: vec![memory.is_copy(); store.num_layers() * experts],
            bytes_read: 0,
            layer: 0,
            tokens: 0,
            active: Vec::with_capacity(experts),
            counts: vec![0; experts],
            pair_tokens: vec![0; pairs],
            pair_weights: vec![0.0; pairs],
            pair_of: vec![0; pairs],
            x: Activations::new(kernel, layout.gate.precision, layout.gate.k, pairs),
            hidden: vec![0.0; pairs * layout.down.k],
            hidden_q: Activations::new(kernel, layout.down.precision, layout.down.k, pairs),
            results: vec![0.0; team.threads() * Tuning::default().results()],
            tuning: Tuning::default(),
            claims: (0..memory.nodes()).map(|_| Default::default()).collect(),
            memory,
            epilogue: Epilogue::default(),
            team,
            kernel,
            layout,
        }
    }

    /// With biases, and another activation than SiLU.
    pub fn with(self, epilogue: Epilogue) -> Self {
        Self { epilogue, ..self }
    }

    /// Biases and activation.
    #[cfg(feature = "cuda")]
    pub(super) fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    /// Goes on with another tuning.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.results.resize(self.team.threads() * tuning.results(), 0.0);
        self.tuning = tuning;
    }

    /// Bytes that [`new`](CpuExperts::new) allocates for experts of `layout`.
    pub fn bytes(layout: &ExpertLayout, kernel: &dyn Kernel, threads: usize, max_tokens: usize, top_k: usize) -> usize {
        let pairs = max_tokens * top_k;
        let rows = |matrix: &MatrixLayout| Activations::bytes(kernel, matrix.precision, matrix.k, pairs);
        rows(&layout.gate)
            + rows(&layout.down)
            + 4 * (pairs * (layout.down.k + 3) + threads * Tuning::default().results())
    }

    /// Counting sort of the routing's pairs by expert; within an expert by token.
    fn sort(&mut self, routing: &Routing) {
        let experts = self.counts.len();
        let expert_of = |id: i32| usize::try_from(id).ok().filter(|&e| e < experts);
        self.counts.fill(0);
        for expert in routing.ids.iter().filter_map(|&id| expert_of(id)) {
            self.counts[expert] += 1;
        }
        self.active.clear();
        let (mut start, mut cost) = (0, 0);
        for (expert, count) in self.counts.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            self.active.push(Active { expert, pairs: (start, start + *count), cost });
            cost += READ_COST + *count;
            // From here on the place of the expert's next pair.
            (start, *count) = (start + *count, start);
        }
        for (i, (&id, &weight)) in routing.ids.iter().zip(&routing.weights).enumerate() {
            let Some(expert) = expert_of(id) else {
                self.pair_of[i] = NO_PAIR;
                continue;
            };
            let pair = self.counts[expert];
            self.counts[expert] += 1;
            self.pair_tokens[pair] = (i / routing.top_k) as u32;
            self.pair_weights[pair] = weight;
            self.pair_of[i] = pair as u32;
        }
    }

    /// Checks the checksums of all experts of `layer` that were never used before. Errors: `Error::Cache` for a damaged
    /// one.
    pub fn check_layer(&mut self, layer: usize) -> Result<()> {
        self.layer = layer;
        self.active.clear();
        self.active.extend((0..self.counts.len()).map(|expert| Active { expert, pairs: (0, 0), cost: 0 }));
        let checked = self.check();
        self.active.clear();
        checked
    }

    /// `work(t, row t of rows)` for rows of `cols`, by the team where that pays.
    pub(super) fn each_row<T: Send + Sync>(&self, rows: &mut [T], cols: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        match rows.len() < PARALLEL_VALUES {
            true => rows.chunks_exact_mut(cols).enumerate().for_each(|(t, row)| work(t, row)),
            false => self.team.each_chunk(rows, cols, work),
        }
    }

    /// Where the experts are.
    pub fn memory(&self) -> &Arc<ExpertMemory> {
        &self.memory
    }

    /// Asks for the layer's active experts, and checks the checksums of those that were never used before, on the whole
    /// team.
    fn check(&mut self) -> Result<()> {
        self.memory.want(self.layer, self.active.iter().map(|active| active.expert));
        let base = self.layer * self.counts.len();
        if self.active.iter().all(|a| self.checked[base + a.expert]) {
            return Ok(());
        }
        let failed = Mutex::new(None);
        let next = AtomicUsize::new(0);
        self.team.run(&|_| {
            while let Some(active) = self.active.get(next.fetch_add(1, Relaxed)) {
                if self.checked[base + active.expert] {
                    continue;
                }
                if let Err(error) = self.memory.check_expert(self.layer, active.expert) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        for active in &self.active {
            self.checked[base + active.expert] = true;
        }
        Ok(())
    }

    /// Brings `x` into the form of the weights: once per token, then a copy for each of its experts, whose rows lie
    /// together.
    fn take(&mut self, x: &[f32], top_k: usize) {
        let k = self.layout.gate.k;
        let pairs = self.active.last().map_or(0, |a| a.pairs.1);
        let (pair_of, kernel) = (&self.pair_of, self.kernel);
        let rows = self.x.start(kernel, self.layout.gate.precision, k, if self.tokens == 1 { 1 } else { pairs });
        if self.tokens == 1 {
            // SAFETY: no other thread has started.
            return unsafe { rows.put(kernel, 0..1, x) };
        }
        let put = |tokens: Range<usize>| {
            for token in tokens {
                let pairs = pair_of[token * top_k..][..top_k]
                    .iter()
                    .filter(|pair| **pair != NO_PAIR)
                    .map(|pair| *pair as usize);
                // SAFETY: each token is in exactly one worker's range, and a pair has one token.
                unsafe { rows.put(kernel, pairs, &x[token * k..][..k]) };
            }
        };
        if self.tokens * k < PARALLEL_VALUES {
            put(0..self.tokens);
        } else {
            self.team.run(&|worker| put(worker.share(self.tokens)));
        }
    }
}

impl ExpertExecutor<Cpu> for CpuExperts {
    fn submit(&mut self, layer: usize, x: &Tensor, routing: &Routing) -> Result<()> {
        self.submit_rows(layer, x.data(), routing)
    }

    fn finish(&mut self, out: &mut Tensor) -> Result<()> {
        self.finish_rows(out.data_mut())
    }

    fn traffic(&self) -> Traffic {
        Traffic { ram: self.bytes_read, link: 0 }
    }
}

impl CpuExperts {
    /// [`submit`](ExpertExecutor::submit) with `x` as plain rows, `[tokens, hidden]`.
    pub fn submit_rows(&mut self, layer: usize, x: &[f32], routing: &Routing) -> Result<()> {
        let k = self.layout.gate.k;
        self.tokens = x.len() / k;
        assert_eq!(x.len(), self.tokens * k, "rows of {k}");
        assert!(routing.ids.len() <= self.pair_of.len(), "a batch larger than was allocated for");
        assert!(routing.ids.len() == self.tokens * routing.top_k && routing.weights.len() == routing.ids.len());
        assert!(layer < self.memory.cache().num_layers());
        self.layer = layer;
        self.sort(routing);
        if let Err(error) = self.check() {
            self.active.clear();
            return Err(error);
        }
        if !self.active.is_empty() {
            self.take(x, routing.top_k);
        }
        Ok(())
    }

    /// [`finish`](ExpertExecutor::finish) into plain rows, `[tokens, hidden]`.
    pub fn finish_rows(&mut self, out: &mut [f32]) -> Result<()> {
        assert_eq!(out.len(), self.tokens * self.layout.down.n);
        if self.active.is_empty() {
            return Ok(());
        }
        let pairs = self.active[self.active.len() - 1].pairs.1;
        self.claims.iter_mut().flatten().for_each(Claims::reset);
        let work = LayerWork {
            memory: &self.memory,
            layer: self.layer,
            active: &self.active,
            claims: &self.claims,
            tuning: self.tuning,
        };
        let dispatch = Dispatch {
            kernel: self.kernel,
            layout: self.layout,
            work,
            epilogue: &self.epilogue,
            pair_tokens: &self.pair_tokens[..pairs],
            pair_weights: &self.pair_weights[..pairs],
            tokens: self.tokens,
            x: &self.x,
            hidden: Shared::new(&mut self.hidden),
            hidden_q: self.hidden_q.start(self.kernel, self.layout.down.precision, self.layout.down.k, pairs),
            out: Shared::new(out),
            results: Shared::new(&mut self.results),
        };
        self.team.run(&|worker| dispatch.run(worker));
        self.bytes_read += self.active.len() as u64 * self.layout.bytes() as u64;
        self.active.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
