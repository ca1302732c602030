//! Routed experts on the CPU, straight from the packed cache.
//!
//! ```text
//! submit:  sort (token, expert) pairs by expert; quantize x
//! finish:  one dispatch of the team
//!          for (expert, tile) of mine:   h[pair] = activation(gate tile . x, up tile . x)
//!                                        of a block of h that is whole now: quantize it
//!          for output tile of mine:      for expert ascending, once its h is whole:
//!                                            out[token] += weight * (down tile . h)
//! ```
//!
//! ```text
//! tuning      what the speed depends on, and the bits do not
//! columns     who adds up which columns of the output, and helps
//! pieces      what a worker claims: an expert's tiles, as many as go through the kernel together
//! progress    whose `h` is whole
//! dispatch    `finish`, as all workers see it
//! foresight   experts that will probably be needed next
//! ```
//!
//! Work is claimed in small runs of tiles, so that cores of unequal speed finish together; with several NUMA nodes each
//! worker claims from its own node's slice while that lasts. `down` of few tokens belongs to workers, who help each
//! other. Each output element is summed by one worker in order of expert id: the bits depend neither on the number of
//! threads nor on the batch.
#![allow(unsafe_code)]

mod columns;
mod dispatch;
mod foresight;
mod pieces;
mod progress;
mod tuning;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::pack::{ExpertKind, ExpertLayout, MatrixLayout, TILE_ROWS};

use super::epilogue::Epilogue;
use super::memory::{ExpertMemory, ExpertShape};
use super::{ExpertExecutor, Traffic};
use crate::backend::Routing;
use crate::backend::cpu::Cpu;
use crate::backend::tensor::Tensor;
use crate::kernel::{Activations, Kernel, chunk, chunks};
use crate::machine::heap::Heap;
use crate::machine::workers::{Claims, Shared, Team};
use crate::{Error, Result};
use columns::Columns;
use dispatch::Dispatch;
use foresight::Foresight;
use pieces::{Active, LayerWork};
use progress::Progress;
pub use tuning::Tuning;

/// Place of an id that is no expert.
const NO_PAIR: u32 = u32::MAX;

/// Below this many values one thread converts faster than a dispatch takes.
const PARALLEL_VALUES: usize = 1 << 13;

/// All routed experts of a model, computed where they lie.
pub struct CpuExperts {
    memory: Arc<ExpertMemory>,
    epilogue: Epilogue,
    claims: Vec<[Claims; 2]>, // [nodes], of each phase
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    bytes_read: u64,
    layer: usize,  // that was submitted
    tokens: usize, // of it
    buffers: Buffers,
    was_foreseen: bool, // the submitted layer, and asked for
    tuning: Tuning,
}

/// All memory of an executor, taken once.
pub struct Buffers {
    checked: Vec<bool>,   // [layers, experts]: the checksum held
    news: Vec<usize>,     // those for which that was seen since `newly_checked`
    active: Vec<Active>,  // of the submitted layer
    in_gate: Vec<Active>, // the same in the order of `gate`, where some were foreseen
    progress: Progress,   // of the submitted layer
    columns: Columns,     // of it
    foresight: Foresight,
    counts: Vec<usize>,     // [experts]
    pair_tokens: Vec<u32>,  // [pairs], sorted by expert
    pair_weights: Vec<f32>, // [pairs]
    pair_of: Vec<u32>,      // [tokens, top_k], the pair that a place in the routing became
    x: Activations,         // [pairs, hidden]; of one token [1, hidden]
    hidden: Vec<f32>,       // [pairs, intermediate]
    hidden_q: Activations,  // [pairs, intermediate]
    results: Vec<f32>,      // [workers, tuning.results()]
}

impl Buffers {
    /// Takes them of `heap`, for batches of up to `pairs` pairs. Errors: `Error::Resources`.
    pub fn new(heap: &Heap, kernel: &dyn Kernel, shape: &ExpertShape, threads: usize, pairs: usize) -> Result<Self> {
        let (layers, experts) = (shape.layers(), shape.experts);
        let rows = |matrix: fn(&ExpertLayout) -> &MatrixLayout| {
            let mut rows = Activations::default();
            let mut seen = Vec::new();
            for matrix in shape.layouts.iter().map(matrix) {
                if !seen.contains(&matrix.precision) {
                    seen.push(matrix.precision);
                    rows.reserve(heap, kernel, matrix.precision, matrix.k, pairs)?;
                }
            }
            Ok::<_, Error>(rows)
        };
        let mut active = heap.zeros(&[experts])?;
        active.clear();
        let mut in_gate = heap.zeros(&[experts])?;
        in_gate.clear();
        let mut news = heap.zeros(&[layers, experts])?;
        news.clear();
        Ok(Self {
            in_gate,
            progress: Progress::new(heap, experts, shape.intermediate()),
            columns: Columns::new(heap, threads, experts, shape.hidden(), pairs)?,
            news,
            foresight: Foresight::new(heap, experts)?,
            checked: heap.zeros(&[layers, experts])?,
            active,
            counts: heap.zeros(&[experts])?,
            pair_tokens: heap.zeros(&[pairs])?,
            pair_weights: heap.zeros(&[pairs])?,
            pair_of: heap.zeros(&[pairs])?,
            x: rows(|layout| &layout.gate)?,
            hidden: heap.zeros(&[pairs, shape.intermediate()])?,
            hidden_q: rows(|layout| &layout.down)?,
            results: heap.zeros(&[threads, Tuning::default().results()])?,
        })
    }
}

impl CpuExperts {
    /// Allocates for batches of up to `pairs` pairs of a token and an expert; nothing is allocated later. Errors:
    /// `Error::Resources` when `heap` has no more.
    pub fn new(
        heap: &Heap,
        memory: Arc<ExpertMemory>,
        team: Arc<Team>,
        kernel: &'static dyn Kernel,
        pairs: usize,
    ) -> Result<Self> {
        let shape = memory.shape();
        let mut buffers = Buffers::new(heap, kernel, &shape, team.threads(), pairs)?;
        if memory.is_copy() {
            buffers.checked.fill(true);
            buffers.news.extend(0..buffers.checked.len());
        }
        Ok(Self {
            bytes_read: 0,
            layer: 0,
            tokens: 0,
            buffers,
            was_foreseen: false,
            tuning: Tuning::default(),
            claims: (0..memory.nodes()).map(|_| Default::default()).collect(),
            memory,
            epilogue: Epilogue::default(),
            team,
            kernel,
        })
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

    /// What the `down` of the experts of the last layer read, a row for each pair of a token and an expert, in order of
    /// experts, then of tokens; `[pairs, intermediate]`.
    pub fn intermediate_rows(&self) -> &[f32] {
        &self.buffers.hidden
    }

    /// Goes on with another tuning.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.buffers.results.resize(self.team.threads() * tuning.results(), 0.0);
        self.tuning = tuning;
    }

    /// Of the submitted layer's experts.
    fn layout(&self) -> ExpertLayout {
        self.memory.cache().layout(self.layer)
    }

    /// Counting sort of the routing's pairs by expert; within an expert by token.
    fn sort(&mut self, routing: &Routing) {
        let experts = self.buffers.counts.len();
        let expert_of = |id: i32| usize::try_from(id).ok().filter(|&e| e < experts);
        self.buffers.counts.fill(0);
        for expert in routing.ids.iter().filter_map(|&id| expert_of(id)) {
            self.buffers.counts[expert] += 1;
        }
        self.buffers.active.clear();
        let mut start = 0;
        for (expert, count) in self.buffers.counts.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            let (number, pairs) = (self.buffers.active.len(), (start, start + *count));
            self.buffers.active.push(Active { expert, number, pairs, cost: 0 });
            // From here on the place of the expert's next pair.
            (start, *count) = (start + *count, start);
        }
        Active::add_up(&mut self.buffers.active);
        for (i, (&id, &weight)) in routing.ids.iter().zip(&routing.weights).enumerate() {
            let Some(expert) = expert_of(id) else {
                self.buffers.pair_of[i] = NO_PAIR;
                continue;
            };
            let pair = self.buffers.counts[expert];
            self.buffers.counts[expert] += 1;
            self.buffers.pair_tokens[pair] = (i / routing.top_k) as u32;
            self.buffers.pair_weights[pair] = weight;
            self.buffers.pair_of[i] = pair as u32;
        }
    }

    /// Checks the checksums of all experts of `layer` that were never used before. Errors: `Error::Cache` for a damaged
    /// one.
    pub fn check_layer(&mut self, layer: usize) -> Result<()> {
        self.layer = layer;
        self.buffers.active.clear();
        let all =
            (0..self.buffers.counts.len()).map(|expert| Active { expert, number: expert, pairs: (0, 0), cost: 0 });
        self.buffers.active.extend(all);
        let checked = self.check();
        self.buffers.active.clear();
        checked
    }

    /// `work(t, row t of rows)` for rows of `cols`, by the team where that pays.
    #[track_caller]
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
        self.memory.want(self.layer, self.buffers.active.iter().map(|active| active.expert));
        let base = self.layer * self.buffers.counts.len();
        if self.buffers.active.iter().all(|a| self.buffers.checked[base + a.expert]) {
            return Ok(());
        }
        let failed = Mutex::new(None);
        let next = AtomicUsize::new(0);
        self.team.run(&|_| {
            while let Some(active) = self.buffers.active.get(next.fetch_add(1, Relaxed)) {
                if self.buffers.checked[base + active.expert] {
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
        let Buffers { active, checked, news, .. } = &mut self.buffers;
        for expert in active.iter().map(|active| base + active.expert) {
            if !std::mem::replace(&mut checked[expert], true) {
                news.push(expert);
            }
        }
        Ok(())
    }

    /// The experts, counted over all layers, whose bytes were found to be what they should be since the last call.
    #[cfg(feature = "cuda")]
    pub(super) fn newly_checked(&mut self) -> impl Iterator<Item = usize> {
        self.buffers.news.drain(..)
    }

    /// Brings `x` into the form of the weights: once per token, then a copy for each of its experts, whose rows lie
    /// together.
    fn take(&mut self, x: &[f32], top_k: usize) {
        let MatrixLayout { k, precision, .. } = self.layout().gate;
        let pairs = self.buffers.active.last().map_or(0, |a| a.pairs.1);
        let (pair_of, kernel) = (&self.buffers.pair_of, self.kernel);
        let rows = self.buffers.x.start(kernel, precision, k, if self.tokens == 1 { 1 } else { pairs });
        if self.tokens == 1 {
            // SAFETY: no other thread has started.
            return unsafe { rows.put(kernel, 0..1, x) };
        }
        let put = |mine: Range<usize>| {
            for i in mine {
                let (token, inputs) = chunk(i, self.tokens, k);
                let pairs = pair_of[token * top_k..][..top_k]
                    .iter()
                    .filter(|pair| **pair != NO_PAIR)
                    .map(|pair| *pair as usize);
                // SAFETY: each chunk of a token is in exactly one worker's range, and a pair has one token.
                unsafe { rows.put_inputs(kernel, pairs, inputs.start, &x[token * k..][inputs]) };
            }
        };
        let all = chunks(self.tokens, k);
        if self.tokens * k < PARALLEL_VALUES {
            put(0..all);
        } else {
            self.team.run(&|worker| put(worker.share(all)));
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
        let Foresight { asked_bytes: ahead, chosen: foreseen, .. } = self.buffers.foresight;
        Traffic { ram: self.bytes_read, ahead, foreseen, ..Traffic::default() }
    }
}

impl CpuExperts {
    /// [`submit`](ExpertExecutor::submit) with `x` as plain rows, `[tokens, hidden]`.
    pub fn submit_rows(&mut self, layer: usize, x: &[f32], routing: &Routing) -> Result<()> {
        let k = self.layout().gate.k;
        self.tokens = x.len() / k;
        assert_eq!(x.len(), self.tokens * k, "rows of {k}");
        assert!(routing.ids.len() <= self.buffers.pair_of.len(), "a batch larger than was allocated for");
        assert!(routing.ids.len() == self.tokens * routing.top_k && routing.weights.len() == routing.ids.len());
        assert!(layer < self.memory.cache().num_layers());
        self.team.fit(self.tokens);
        self.layer = layer;
        self.sort(routing);
        let Buffers { active, in_gate, foresight, .. } = &mut self.buffers;
        self.was_foreseen = foresight.compare(layer, active, in_gate);
        if let Err(error) = self.check() {
            self.buffers.active.clear();
            return Err(error);
        }
        if !self.buffers.active.is_empty() {
            self.take(x, routing.top_k);
        }
        Ok(())
    }

    /// [`finish`](ExpertExecutor::finish) into plain rows, `[tokens, hidden]`.
    pub fn finish_rows(&mut self, out: &mut [f32]) -> Result<()> {
        let layout = self.layout();
        assert_eq!(out.len(), self.tokens * layout.down.n);
        if self.buffers.active.is_empty() {
            return Ok(());
        }
        let pairs = self.buffers.active[self.buffers.active.len() - 1].pairs.1;
        self.claims.iter_mut().flatten().for_each(Claims::reset);
        let of_tile = if layout.kind() == ExpertKind::Ungated { 2 * TILE_ROWS } else { TILE_ROWS };
        self.buffers.progress.begin(self.buffers.active.len(), layout.down.k, of_tile);
        // Each node reads its own memory, and has a part of the columns: there they are claimed.
        let shares = match self.memory.nodes() {
            1 => self.buffers.columns.begin(self.buffers.active.len(), pairs),
            _ => None,
        };
        let work = LayerWork {
            memory: &self.memory,
            layer: self.layer,
            active: &self.buffers.active,
            in_gate: if self.was_foreseen { &self.buffers.in_gate } else { &self.buffers.active },
            has_own_runs: self.was_foreseen,
            claims: &self.claims,
            tuning: self.tuning,
        };
        let dispatch = Dispatch {
            kernel: self.kernel,
            layout,
            work,
            progress: &self.buffers.progress,
            shares,
            epilogue: &self.epilogue,
            pair_tokens: &self.buffers.pair_tokens[..pairs],
            pair_weights: &self.buffers.pair_weights[..pairs],
            tokens: self.tokens,
            x: &self.buffers.x,
            hidden: Shared::new(&mut self.buffers.hidden),
            hidden_q: self.buffers.hidden_q.start(self.kernel, layout.down.precision, layout.down.k, pairs),
            out: Shared::new(out),
            results: Shared::new(&mut self.buffers.results),
        };
        self.team.run(&|worker| dispatch.run(worker));
        self.bytes_read += self.buffers.active.len() as u64 * layout.bytes() as u64;
        self.buffers.active.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
