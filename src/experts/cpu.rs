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

use half::bf16;
use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};

use super::ExpertExecutor;
use super::memory::{ExpertMemory, turns};
use crate::Result;
use crate::backend::Routing;
use crate::kernel::{Kernel, QuantizedRows, Rows};
use crate::tensor::Tensor;
use crate::workers::{Shared, Team, Worker};

/// Tokens that go through a tile before the next tile: their results fit on the stack, their weights stay in L2.
const TOKEN_BLOCK: usize = 64;

/// Tokens whose arithmetic takes as long as reading the weights does: what a tile costs is this plus its tokens.
const READ_COST: usize = 8;

/// Claims per worker and phase: enough to even out what other processes take, few enough for long sequential reads.
const CLAIMS: usize = 6;

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

/// The next run of each phase in one node's slice.
#[derive(Default)]
#[repr(align(128))]
struct Claims([AtomicUsize; 2]);

/// Activation rows in the form the weights' precision asks for.
struct Activations {
    k: usize,
    group: usize,     // 0: kept as f32
    values: Vec<f32>, // [rows, k], f32 only
    codes: Vec<i8>,   // [rows, k]
    scales: Vec<f32>, // [rows, k / group]
    sums: Vec<i32>,   // [rows, k / group]
}

impl Activations {
    fn new(rows: usize, layout: &MatrixLayout) -> Self {
        let k = layout.k;
        let (group, quantized, plain) = match layout.precision.group_size() {
            Some(group) => (group, rows, 0),
            None => (0, 0, rows),
        };
        let groups = quantized * k.checked_div(group).unwrap_or(0);
        Self { k, group, values: vec![0.0; plain * k], codes: vec![0; quantized * k], scales: vec![0.0; groups], sums: vec![0; groups] }
    }

    fn rows(&self) -> QuantizedRows<'_> {
        QuantizedRows { k: self.k, group: self.group, codes: &self.codes, scales: &self.scales, sums: &self.sums }
    }

    fn shared(&mut self) -> SharedActivations<'_> {
        SharedActivations {
            k: self.k,
            group: self.group,
            values: Shared::new(&mut self.values),
            codes: Shared::new(&mut self.codes),
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
        }
    }
}

struct SharedActivations<'a> {
    k: usize,
    group: usize,
    values: Shared<'a, f32>,
    codes: Shared<'a, i8>,
    scales: Shared<'a, f32>,
    sums: Shared<'a, i32>,
}

impl SharedActivations<'_> {
    /// Quantizes one row.
    ///
    /// # Safety
    /// Nobody else uses this row until the next barrier.
    unsafe fn quantize(&self, kernel: &dyn Kernel, row: usize, x: &[f32]) {
        let groups = self.k / self.group;
        // SAFETY: the row's parts belong to the caller, as promised.
        let (codes, scales, sums) = unsafe {
            (
                self.codes.slice_mut(row * self.k..(row + 1) * self.k),
                self.scales.slice_mut(row * groups..(row + 1) * groups),
                self.sums.slice_mut(row * groups..(row + 1) * groups),
            )
        };
        kernel.quantize(x, self.group, codes, scales, sums);
    }

    /// All rows, to read.
    ///
    /// # Safety
    /// Nobody writes any row while the result lives.
    unsafe fn rows(&self) -> QuantizedRows<'_> {
        // SAFETY: only read, as promised.
        unsafe {
            QuantizedRows {
                k: self.k,
                group: self.group,
                codes: self.codes.slice(0..self.codes.len()),
                scales: self.scales.slice(0..self.scales.len()),
                sums: self.sums.slice(0..self.sums.len()),
            }
        }
    }
}

/// All routed experts of a model, computed where they lie.
pub struct CpuExperts {
    memory: Arc<ExpertMemory>,
    claims: Vec<Claims>, // [nodes]
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
    pair_numbers: Vec<u32>, // 0, 1, 2, ...: a range of pairs as a list of rows
    x: Activations,         // integer weights: [tokens, hidden]; BF16: [pairs, hidden]
    hidden: Vec<f32>,       // [pairs, intermediate]
    hidden_q: Activations,  // [pairs, intermediate]
}

impl CpuExperts {
    /// Allocates for batches of up to `max_tokens` with `top_k` experts each; nothing is allocated later.
    pub fn new(memory: Arc<ExpertMemory>, team: Arc<Team>, kernel: &'static dyn Kernel, max_tokens: usize, top_k: usize) -> Self {
        let store = memory.cache();
        let layout = store.layout();
        let (experts, pairs) = (store.num_experts(), max_tokens * top_k);
        let quantized = layout.gate.precision.group_size().is_some();
        Self {
            checked: vec![memory.is_copy(); store.num_layers() * experts],
            bytes_read: 0,
            layer: 0,
            tokens: 0,
            active: Vec::with_capacity(experts),
            counts: vec![0; experts],
            pair_tokens: vec![0; pairs],
            pair_weights: vec![0.0; pairs],
            pair_numbers: (0..pairs as u32).collect(),
            x: Activations::new(if quantized { max_tokens } else { pairs }, &layout.gate),
            hidden: vec![0.0; pairs * layout.down.k],
            hidden_q: Activations::new(if quantized { pairs } else { 0 }, &layout.down),
            claims: (0..memory.nodes()).map(|_| Claims::default()).collect(),
            memory,
            team,
            kernel,
            layout,
            max_tokens,
            top_k,
        }
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
            let Some(expert) = expert_of(id) else { continue };
            let pair = self.counts[expert];
            self.counts[expert] += 1;
            self.pair_tokens[pair] = (i / routing.top_k) as u32;
            self.pair_weights[pair] = weight;
        }
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

    /// Brings `x` into the form of the weights.
    fn take(&mut self, x: &[f32]) {
        let k = self.layout.gate.k;
        let (pair_tokens, kernel) = (&self.pair_tokens, self.kernel);
        let quantized = self.x.group > 0;
        let rows = if quantized { self.tokens } else { self.active.last().map_or(0, |a| a.pairs.1) };
        let shared = self.x.shared();
        let convert = |rows: Range<usize>| {
            for row in rows {
                if quantized {
                    // SAFETY: each row is in exactly one worker's range.
                    unsafe { shared.quantize(kernel, row, &x[row * k..][..k]) };
                } else {
                    // SAFETY: each row is in exactly one worker's range.
                    let to = unsafe { shared.values.slice_mut(row * k..(row + 1) * k) };
                    to.copy_from_slice(&x[pair_tokens[row] as usize * k..][..k]);
                }
            }
        };
        if rows * k < PARALLEL_VALUES {
            convert(0..rows);
        } else {
            self.team.run(&|worker| convert(worker.share(rows)));
        }
    }
}

impl ExpertExecutor<Tensor> for CpuExperts {
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
        self.take(x);
        Ok(())
    }

    /// [`finish`](ExpertExecutor::finish) into plain rows, `[tokens, hidden]`.
    pub fn finish_rows(&mut self, out: &mut [f32]) -> Result<()> {
        assert_eq!(out.len(), self.tokens * self.layout.down.n);
        if self.active.is_empty() {
            return Ok(());
        }
        let pairs = self.active[self.active.len() - 1].pairs.1;
        self.claims.iter().flat_map(|claims| &claims.0).for_each(|next| next.store(0, Relaxed));
        let step = Step {
            kernel: self.kernel,
            layout: self.layout,
            memory: &self.memory,
            layer: self.layer,
            active: &self.active,
            pair_tokens: &self.pair_tokens[..pairs],
            pair_weights: &self.pair_weights[..pairs],
            pair_numbers: &self.pair_numbers[..pairs],
            x: &self.x,
            hidden: Shared::new(&mut self.hidden),
            hidden_q: self.hidden_q.shared(),
            out: Shared::new(out),
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
    pair_numbers: &'a [u32],
    x: &'a Activations,
    hidden: Shared<'a, f32>,
    hidden_q: SharedActivations<'a>,
    out: Shared<'a, f32>,
    claims: &'a [Claims], // [nodes]
}

impl Step<'_> {
    fn work(&self, worker: &Worker<'_>) {
        // A node's slice, and the cut of it that this worker is to do next.
        let nodes = self.memory.nodes();
        let runs = |node: usize| CLAIMS * if nodes == 1 { worker.count } else { worker.count_on(node).max(1) };
        let claim = |node: usize, phase: usize| Some(self.claims[node].0[phase].fetch_add(1, Relaxed)).filter(|&run| run < runs(node));
        let own = worker.node % nodes;

        let last = self.active[self.active.len() - 1];
        for node in turns(own, nodes) {
            let slice = self.memory.gate_tiles_of(node);
            let (tiles, runs) = (slice.len(), runs(node));
            let total = (last.cost + last.tile_cost()) * tiles;
            while let Some(run) = claim(node, 0) {
                // A tile belongs to the run in which its cost begins.
                let (from, to) = (total * run / runs, total * (run + 1) / runs);
                for active in self.active {
                    let first = |cost: usize| cost.saturating_sub(active.cost * tiles).div_ceil(active.tile_cost()).min(tiles);
                    for tile in first(from)..first(to) {
                        self.gate_up(active, slice.start + tile);
                    }
                }
            }
        }
        worker.barrier();
        if self.hidden_q.group > 0 {
            let k = self.hidden_q.k;
            for pair in worker.share(self.pair_tokens.len()) {
                // SAFETY: phase 1 is over: `hidden` is only read, and this worker alone quantizes this pair.
                unsafe { self.hidden_q.quantize(self.kernel, pair, self.hidden.slice(pair * k..(pair + 1) * k)) };
            }
            worker.barrier();
        }
        for node in turns(own, nodes) {
            let slice = self.memory.down_tiles_of(node);
            let (tiles, runs) = (slice.len(), runs(node));
            while let Some(run) = claim(node, 1) {
                for active in self.active {
                    for tile in tiles * run / runs..tiles * (run + 1) / runs {
                        self.down(active, slice.start + tile);
                    }
                }
            }
        }
    }

    /// `hidden[pair][rows of the tile]` for all pairs of an expert.
    fn gate_up(&self, active: &Active, tile: usize) {
        let n = self.layout.gate.n;
        let rows = tile * TILE_ROWS..n.min((tile + 1) * TILE_ROWS);
        let weights = self.memory.gate_up_tiles(self.layer, active.expert, tile..tile + 1);
        let (gate_tile, up_tile) = weights.split_at(self.layout.gate.tile_bytes());
        let (mut gate, mut up, mut h) = ([0.0; TOKEN_BLOCK * TILE_ROWS], [0.0; TOKEN_BLOCK * TILE_ROWS], [0.0; TOKEN_BLOCK * TILE_ROWS]);
        for pairs in blocks(active.pairs) {
            let len = pairs.len() * TILE_ROWS;
            let (gate, up, h) = (&mut gate[..len], &mut up[..len], &mut h[..len]);
            for (tile, out) in [(gate_tile, &mut *gate), (up_tile, &mut *up)] {
                if self.x.group > 0 {
                    self.kernel.packed_tile(&self.layout.gate, tile, &self.x.rows(), &self.pair_tokens[pairs.clone()], out);
                } else {
                    let k = self.x.k;
                    self.plain_tile(tile, &self.x.values[pairs.start * k..pairs.end * k], k, out);
                }
            }
            self.kernel.silu_mul(gate, up, h);
            for (pair, h) in pairs.zip(h.chunks_exact(TILE_ROWS)) {
                // SAFETY: in phase 1 these rows of `hidden` belong to whoever claimed the tile.
                let to = unsafe { self.hidden.slice_mut(pair * n + rows.start..pair * n + rows.end) };
                to.copy_from_slice(&h[..rows.len()]);
            }
        }
    }

    /// `out[token][rows of the tile] += weight * (down tile . hidden[pair])` for all pairs of an expert.
    fn down(&self, active: &Active, tile: usize) {
        let n = self.layout.down.n;
        let rows = tile * TILE_ROWS..n.min((tile + 1) * TILE_ROWS);
        let weights = self.memory.down_tiles(self.layer, active.expert, tile..tile + 1);
        let mut y = [0.0; TOKEN_BLOCK * TILE_ROWS];
        for pairs in blocks(active.pairs) {
            let y = &mut y[..pairs.len() * TILE_ROWS];
            if self.hidden_q.group > 0 {
                // SAFETY: after the second barrier nobody writes the quantized rows.
                let h = unsafe { self.hidden_q.rows() };
                self.kernel.packed_tile(&self.layout.down, weights, &h, &self.pair_numbers[pairs.clone()], y);
            } else {
                let k = self.layout.down.k;
                // SAFETY: after the barrier nobody writes `hidden`.
                let h = unsafe { self.hidden.slice(pairs.start * k..pairs.end * k) };
                self.plain_tile(weights, h, k, y);
            }
            for (pair, y) in pairs.zip(y.chunks_exact(TILE_ROWS)) {
                let token = self.pair_tokens[pair] as usize;
                // SAFETY: in phase 2 these columns of `out` belong to whoever claimed the tile.
                let out = unsafe { self.out.slice_mut(token * n + rows.start..token * n + rows.end) };
                self.kernel.add_scaled(&y[..rows.len()], self.pair_weights[pair], out);
            }
        }
    }

    /// A BF16 tile times contiguous rows of `x`.
    fn plain_tile(&self, tile: &[u8], x: &[f32], k: usize, out: &mut [f32]) {
        let w: &[bf16] = bytemuck::cast_slice(tile);
        self.kernel.dot_bf16(Rows::new(w, TILE_ROWS, k), Rows::new(x, out.len() / TILE_ROWS, k), out);
    }
}

/// Cuts a range of pairs into blocks of at most [`TOKEN_BLOCK`].
fn blocks((start, end): (usize, usize)) -> impl Iterator<Item = Range<usize>> {
    (start..end).step_by(TOKEN_BLOCK).map(move |from| from..end.min(from + TOKEN_BLOCK))
}

#[cfg(test)]
mod tests;
