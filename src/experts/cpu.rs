//! Routed experts on the CPU, straight from the packed cache.
//!
//! ```text
//! submit:  sort (token, expert) pairs by expert; quantize x
//! finish:  one dispatch of the team
//!          for (expert, tile) of mine:   h[pair] = silu(gate tile . x) * (up tile . x)
//!          barrier; quantize my share of h; barrier
//!          for output tile of mine:      for expert ascending:  out[token] += weight * (down tile . h)
//! ```
//!
//! Work is claimed in small runs of tiles, so that cores of unequal speed finish together; with several NUMA nodes each worker
//! claims from its own node's slice while that lasts. Each output element is
//! summed by one worker in order of expert id: the bits depend neither on the number of threads nor on the batch.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};

use super::ExpertExecutor;
use super::memory::{ExpertMemory, turns};
use crate::Result;
use crate::backend::Routing;
use crate::backend::cpu::Cpu;
use crate::kernel::{Activations, ActivationsMut, Kernel};
use crate::tensor::Tensor;
use crate::workers::{Claims, Shared, Team, Worker};

/// Tokens that go through a tile before the next tile: their results fit on the stack, their weights stay in L2.
const TOKEN_BLOCK: usize = 64;

/// Tiles of `gate`, with as many of `up`, that go through the kernel together.
const GATE_TILES: usize = 2;

/// Tiles of `down` that go through the kernel together.
const DOWN_TILES: usize = 4;

/// A worker's room for the results of a run of tiles: gate and up as the kernel gives them, then each and their product.
const RESULTS: usize = 5 * TOKEN_BLOCK * GATE_TILES * TILE_ROWS;

/// Tokens whose arithmetic takes as long as reading the weights does: what a tile costs is this plus its tokens.
const READ_COST: usize = 8;

/// Place of an id that is no expert.
const NO_PAIR: u32 = u32::MAX;

/// Below this many values one thread quantizes faster than a team wakes.
const PARALLEL_VALUES: usize = 1 << 14;

/// One expert with tokens to work on.
#[derive(Clone, Copy)]
struct Active {
    expert: usize,
    pairs: (usize, usize), // its pairs, from and to
    cost: usize,           // of one tile of each expert before this one
}

impl Active {
    /// What one of its tiles costs.
    fn tile_cost(&self) -> usize {
        READ_COST + self.pairs.1 - self.pairs.0
    }
}

/// All routed experts of a model, computed where they lie.
pub struct CpuExperts {
    memory: Arc<ExpertMemory>,
    claims: Vec<[Claims; 2]>, // [nodes], of each phase
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    layout: ExpertLayout,
    max_tokens: usize,
    top_k: usize,
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
    results: Vec<f32>,      // [workers, RESULTS]
}

impl CpuExperts {
    /// Allocates for batches of up to `max_tokens` with `top_k` experts each; nothing is allocated later.
    pub fn new(memory: Arc<ExpertMemory>, team: Arc<Team>, kernel: &'static dyn Kernel, max_tokens: usize, top_k: usize) -> Self {
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
            results: vec![0.0; team.threads() * RESULTS],
            claims: (0..memory.nodes()).map(|_| Default::default()).collect(),
            memory,
            team,
            kernel,
            layout,
            max_tokens,
            top_k,
        }
    }

    /// Bytes that [`new`](CpuExperts::new) allocates for experts of `layout`.
    pub fn bytes(layout: &ExpertLayout, kernel: &dyn Kernel, threads: usize, max_tokens: usize, top_k: usize) -> usize {
        let pairs = max_tokens * top_k;
        let rows = |matrix: &MatrixLayout| Activations::bytes(kernel, matrix.precision, matrix.k, pairs);
        rows(&layout.gate) + rows(&layout.down) + 4 * (pairs * (layout.down.k + 3) + threads * RESULTS)
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

    /// Checks the checksums of all experts of `layer` that were never used before. Errors: `Error::Cache` for a damaged one.
    pub fn check_layer(&mut self, layer: usize) -> Result<()> {
        self.layer = layer;
        self.active.clear();
        self.active.extend((0..self.counts.len()).map(|expert| Active { expert, pairs: (0, 0), cost: 0 }));
        let checked = self.check();
        self.active.clear();
        checked
    }

    /// Where the experts are.
    pub fn memory(&self) -> &Arc<ExpertMemory> {
        &self.memory
    }

    /// Checks the checksums of the layer's active experts that were never used before, on the whole team.
    fn check(&mut self) -> Result<()> {
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

    /// Brings `x` into the form of the weights: once per token, then a copy for each of its experts, whose rows lie together.
    fn take(&mut self, x: &[f32], top_k: usize) {
        let k = self.layout.gate.k;
        let pairs = self.active.last().map_or(0, |a| a.pairs.1);
        let (pair_of, kernel) = (&self.pair_of, self.kernel);
        let rows = self.x.start(kernel, self.layout.gate.precision, k, if self.tokens == 1 { 1 } else { pairs });
        if self.tokens == 1 {
            // SAFETY: nobody else is here.
            return unsafe { rows.put(kernel, 0..1, x) };
        }
        let put = |tokens: Range<usize>| {
            for token in tokens {
                let pairs = pair_of[token * top_k..][..top_k].iter().filter(|pair| **pair != NO_PAIR).map(|pair| *pair as usize);
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

    fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

impl CpuExperts {
    /// [`submit`](ExpertExecutor::submit) with `x` as plain rows, `[tokens, hidden]`.
    pub fn submit_rows(&mut self, layer: usize, x: &[f32], routing: &Routing) -> Result<()> {
        let k = self.layout.gate.k;
        self.tokens = x.len() / k;
        assert_eq!(x.len(), self.tokens * k, "rows of {k}");
        assert!(self.tokens <= self.max_tokens && routing.top_k <= self.top_k, "a batch larger than was allocated for");
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
        let step = Step {
            kernel: self.kernel,
            layout: self.layout,
            memory: &self.memory,
            layer: self.layer,
            active: &self.active,
            pair_tokens: &self.pair_tokens[..pairs],
            pair_weights: &self.pair_weights[..pairs],
            tokens: self.tokens,
            x: &self.x,
            hidden: Shared::new(&mut self.hidden),
            hidden_q: self.hidden_q.start(self.kernel, self.layout.down.precision, self.layout.down.k, pairs),
            out: Shared::new(out),
            results: Shared::new(&mut self.results),
            claims: &self.claims,
        };
        self.team.run(&|worker| step.work(worker));
        self.bytes_read += self.active.len() as u64 * self.layout.bytes() as u64;
        self.active.clear();
        Ok(())
    }
}

/// One `finish`, as all workers see it.
struct Step<'a> {
    kernel: &'a dyn Kernel,
    layout: ExpertLayout,
    memory: &'a ExpertMemory,
    layer: usize,
    active: &'a [Active],
    pair_tokens: &'a [u32],
    pair_weights: &'a [f32],
    tokens: usize,
    x: &'a Activations,
    hidden: Shared<'a, f32>,
    hidden_q: ActivationsMut<'a>,
    out: Shared<'a, f32>,
    results: Shared<'a, f32>,
    claims: &'a [[Claims; 2]], // [nodes]
}

impl Step<'_> {
    fn work(&self, worker: &Worker<'_>) {
        // SAFETY: each worker has its own part.
        let results = unsafe { self.results.slice_mut(worker.index * RESULTS..(worker.index + 1) * RESULTS) };
        // A node's slice, and the cut of it that this worker is to do next.
        let nodes = self.memory.nodes();
        let workers = |node: usize| if nodes == 1 { worker.count } else { worker.count_on(node).max(1) };
        let claim = |node: usize, phase: usize, total: usize| self.claims[node][phase].next(workers(node), total);
        let own = worker.node % nodes;

        let last = self.active[self.active.len() - 1];
        for node in turns(own, nodes) {
            let slice = self.memory.gate_tiles_of(node);
            let tiles = slice.len();
            while let Some(run) = claim(node, 0, (last.cost + last.tile_cost()) * tiles) {
                for active in self.active {
                    // A tile belongs to the run in which its cost begins.
                    let first = |cost: usize| cost.saturating_sub(active.cost * tiles).div_ceil(active.tile_cost()).min(tiles);
                    for tile in (first(run.start)..first(run.end)).step_by(GATE_TILES) {
                        self.gate_up(active, slice.start + tile..slice.start + first(run.end).min(tile + GATE_TILES), results);
                    }
                }
            }
        }
        worker.barrier();
        let k = self.layout.down.k;
        for pair in worker.share(self.pair_tokens.len()) {
            // SAFETY: phase 1 is over: `hidden` is only read, and this worker alone converts this pair.
            unsafe { self.hidden_q.put(self.kernel, pair..pair + 1, self.hidden.slice(pair * k..(pair + 1) * k)) };
        }
        worker.barrier();
        for node in turns(own, nodes) {
            let slice = self.memory.down_tiles_of(node);
            while let Some(run) = claim(node, 1, slice.len()) {
                let (from, to) = (slice.start + run.start, slice.start + run.end);
                for active in self.active {
                    for first in (from..to).step_by(DOWN_TILES) {
                        self.down(active, first..to.min(first + DOWN_TILES), results);
                    }
                }
            }
        }
    }

    /// `hidden[pair][rows of the tiles]` for all pairs of an expert.
    fn gate_up(&self, active: &Active, tiles: Range<usize>, results: &mut [f32]) {
        let n = self.layout.gate.n;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = self.memory.gate_up_tiles(self.layer, active.expert, tiles);
        for pairs in blocks(active.pairs) {
            let len = pairs.len() * width;
            let (y, rest) = results.split_at_mut(2 * len);
            let (gate, rest) = rest.split_at_mut(len);
            let (up, rest) = rest.split_at_mut(len);
            let h = &mut rest[..len];
            let x = if self.tokens == 1 { self.x.rows(0..1) } else { self.x.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.gate, weights, &x, y);
            for (i, y) in y.as_chunks::<{ 2 * TILE_ROWS }>().0.iter().enumerate() {
                let [from_gate, from_up]: &[[f32; TILE_ROWS]; 2] = bytemuck::cast_ref(y);
                gate.as_chunks_mut::<TILE_ROWS>().0[i] = *from_gate;
                up.as_chunks_mut::<TILE_ROWS>().0[i] = *from_up;
            }
            self.kernel.silu_mul(gate, up, h);
            for (pair, h) in pairs.zip(h.chunks_exact(width)) {
                // SAFETY: in phase 1 these rows of `hidden` belong to whoever claimed the tiles.
                let to = unsafe { self.hidden.slice_mut(pair * n + rows.start..pair * n + rows.end) };
                to.copy_from_slice(&h[..rows.len()]);
            }
        }
    }

    /// `out[token][rows of the tiles] += weight * (down tiles . hidden[pair])` for all pairs of an expert.
    fn down(&self, active: &Active, tiles: Range<usize>, results: &mut [f32]) {
        let n = self.layout.down.n;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = self.memory.down_tiles(self.layer, active.expert, tiles);
        for pairs in blocks(active.pairs) {
            let y = &mut results[..pairs.len() * width];
            // SAFETY: after the second barrier nobody writes these rows.
            let h = unsafe { self.hidden_q.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.down, weights, &h, y);
            for (pair, y) in pairs.zip(y.chunks_exact(width)) {
                let token = self.pair_tokens[pair] as usize;
                // SAFETY: in phase 2 these columns of `out` belong to whoever claimed the tile.
                let out = unsafe { self.out.slice_mut(token * n + rows.start..token * n + rows.end) };
                self.kernel.add_scaled(&y[..rows.len()], self.pair_weights[pair], out);
            }
        }
    }
}

/// Cuts a range of pairs into blocks of at most [`TOKEN_BLOCK`].
fn blocks((start, end): (usize, usize)) -> impl Iterator<Item = Range<usize>> {
    (start..end).step_by(TOKEN_BLOCK).map(move |from| from..end.min(from + TOKEN_BLOCK))
}

#[cfg(test)]
mod tests;
