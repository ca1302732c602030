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
//! Work is claimed in small runs of tiles, so that cores of unequal speed finish together; with several NUMA nodes each
//! worker claims from its own node's slice while that lasts. Each output element is
//! summed by one worker in order of expert id: the bits depend neither on the number of threads nor on the batch.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};

use super::epilogue::Epilogue;
use super::memory::ExpertMemory;
use super::{ExpertExecutor, Traffic};
use crate::Result;
use crate::backend::Routing;
use crate::backend::cpu::Cpu;
use crate::backend::tensor::Tensor;
use crate::kernel::{Activations, ActivationsMut, Ahead, Kernel, Start, Tiles, fetch};
use crate::machine::workers::{Claims, Cut, Shared, Team, Worker};

/// Tokens that go through a tile before the next tile: their results fit on the stack, their weights stay in L2.
const TOKEN_BLOCK: usize = 64;

/// What the speed of a layer with few tokens depends on, and its bits do not; `cargo bench --bench sweep` compares
/// choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// How far ahead of their use weights are asked for.
    pub ahead: Ahead,
    /// The runs of tiles of `gate` and `up` that workers claim.
    pub gate_cut: Cut,
    /// The runs of tiles of `down`, in each of which all experts are added up.
    pub down_cut: Cut,
    /// Tiles of `gate`, with as many of `up`, that go through the kernel together.
    pub gate_tiles: usize,
    /// Tiles of `down` that go through the kernel together.
    pub down_tiles: usize,
    /// Whether a worker claims what it does next before it is done, so that prefetching goes on there.
    pub look_ahead: bool,
    /// Bytes of its first run of `down` that a worker brings into L2 while it waits for the others.
    pub idle_bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            ahead: Ahead::here(),
            gate_cut: Cut::DEFAULT,
            down_cut: Cut::DEFAULT,
            gate_tiles: 2,
            down_tiles: 4,
            look_ahead: true,
            idle_bytes: 128 << 10,
        }
    }
}

impl Pace {
    /// Numbers in a worker's room for the results of some tiles: gate and up as the kernel gives them, then each and
    /// their product.
    fn results(&self) -> usize {
        TOKEN_BLOCK * TILE_ROWS * (5 * self.gate_tiles).max(self.down_tiles)
    }
}

/// Tokens whose arithmetic takes as long as reading the weights does: what a tile costs is this plus its tokens.
const READ_COST: usize = 8;

/// Place of an id that is no expert.
const NO_PAIR: u32 = u32::MAX;

/// Below this many values one thread converts faster than a team wakes.
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
    results: Vec<f32>,      // [workers, pace.results()]
    pace: Pace,
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
            results: vec![0.0; team.threads() * Pace::default().results()],
            pace: Pace::default(),
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

    /// Goes on at another pace.
    pub fn set_pace(&mut self, pace: Pace) {
        self.results.resize(self.team.threads() * pace.results(), 0.0);
        self.pace = pace;
    }

    /// Bytes that [`new`](CpuExperts::new) allocates for experts of `layout`.
    pub fn bytes(layout: &ExpertLayout, kernel: &dyn Kernel, threads: usize, max_tokens: usize, top_k: usize) -> usize {
        let pairs = max_tokens * top_k;
        let rows = |matrix: &MatrixLayout| Activations::bytes(kernel, matrix.precision, matrix.k, pairs);
        rows(&layout.gate)
            + rows(&layout.down)
            + 4 * (pairs * (layout.down.k + 3) + threads * Pace::default().results())
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
            // SAFETY: nobody else is here.
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
        let step = Step {
            kernel: self.kernel,
            layout: self.layout,
            memory: &self.memory,
            epilogue: &self.epilogue,
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
            pace: self.pace,
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
    epilogue: &'a Epilogue,
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
    pace: Pace,
}

/// What a worker does of one phase, claimed run by run. Each piece goes through the kernel as a whole.
#[derive(Clone)]
struct Pieces<'s> {
    step: &'s Step<'s>,
    phase: usize, // 0: gate and up, 1: down
    own: usize,   // the worker's node
    turn: usize,  // nodes whose tiles are all taken
    run: Range<usize>,
    expert: usize,      // index into the active ones: the next of this run
    left: Range<usize>, // tiles of the one before it
}

/// Some tiles of an expert that go through the kernel together.
#[derive(Clone)]
struct Piece<'s> {
    active: &'s Active,
    tiles: Range<usize>,
    bytes: &'s [u8],
}

impl<'s> Pieces<'s> {
    fn new(step: &'s Step<'s>, phase: usize, own: usize) -> Self {
        Self { step, phase, own, turn: 0, run: 0..0, expert: step.active.len(), left: 0..0 }
    }

    /// The node whose slice the run is of, and the tiles of that.
    fn slice(&self) -> (usize, Range<usize>) {
        let memory = self.step.memory;
        let node = (self.own + self.turn) % memory.nodes();
        (node, if self.phase == 0 { memory.gate_tiles_of(node) } else { memory.down_tiles_of(node) })
    }

    /// The tiles of an expert that are in the run.
    fn tiles_of(&self, active: &Active) -> Range<usize> {
        let slice = self.slice().1;
        if self.phase == 1 {
            return slice.start + self.run.start..slice.start + self.run.end;
        }
        // A tile belongs to the run in which its cost begins.
        let tiles = slice.len();
        let first = |cost: usize| {
            slice.start + cost.saturating_sub(active.cost * tiles).div_ceil(active.tile_cost()).min(tiles)
        };
        first(self.run.start)..first(self.run.end)
    }

    /// The next piece of the run that was claimed last.
    fn next_of_run(&mut self) -> Option<Piece<'s>> {
        let Step { memory, layer, active, pace, .. } = self.step;
        while self.left.is_empty() {
            self.left = self.tiles_of(active.get(self.expert)?);
            self.expert += 1;
        }
        let most = if self.phase == 0 { pace.gate_tiles } else { pace.down_tiles };
        let tiles = self.left.start..self.left.end.min(self.left.start + most);
        self.left.start = tiles.end;
        let active = &active[self.expert - 1];
        let bytes = match self.phase {
            0 => memory.gate_up_tiles(*layer, active.expert, tiles.clone()),
            _ => memory.down_tiles(*layer, active.expert, tiles.clone()),
        };
        Some(Piece { active, tiles, bytes })
    }

    /// The next piece; claims a run, first of its own node's, where there is none left of the last one.
    fn next(&mut self, worker: &Worker<'_>) -> Option<Piece<'s>> {
        loop {
            if let Some(piece) = self.next_of_run() {
                return Some(piece);
            }
            let Step { memory, claims, active, pace, .. } = self.step;
            if self.turn == memory.nodes() {
                return None;
            }
            let (node, slice) = self.slice();
            let workers = if memory.nodes() == 1 { worker.count } else { worker.count_on(node).max(1) };
            let last = active[active.len() - 1];
            let (cut, total) = match self.phase {
                0 => (pace.gate_cut, (last.cost + last.tile_cost()) * slice.len()),
                _ => (pace.down_cut, slice.len()),
            };
            match claims[node][self.phase].next(cut, workers, total) {
                Some(run) => (self.run, self.expert) = (run, 0),
                None => self.turn += 1,
            }
        }
    }
}

/// What a worker brings into L2 while it has to wait.
struct Idle<'s> {
    pieces: Pieces<'s>, // only the run that is claimed
    at: &'s [u8],
    left: usize, // bytes
}

impl Idle<'_> {
    /// A few cache lines; `false`: that was all.
    fn step(&mut self) -> bool {
        const LINES: usize = 8;
        while self.at.is_empty() && self.left > 0 {
            match self.pieces.next_of_run() {
                Some(piece) => self.at = piece.bytes,
                None => self.left = 0,
            }
        }
        let bytes = (64 * LINES).min(self.at.len()).min(self.left);
        fetch(self.at.as_ptr(), bytes.div_ceil(64));
        (self.at, self.left) = (&self.at[bytes..], self.left - bytes);
        self.left > 0
    }
}

impl<'a> Step<'a> {
    fn work(&'a self, worker: &Worker<'_>) {
        let room = self.pace.results();
        // SAFETY: each worker has its own part.
        let results = unsafe { self.results.slice_mut(worker.index * room..(worker.index + 1) * room) };
        let own = worker.node % self.memory.nodes();
        let (mut gate, mut down) = (Pieces::new(self, 0, own), Pieces::new(self, 1, own));
        let Pace { look_ahead, idle_bytes, .. } = self.pace;
        let bytes = |piece: Option<&Piece<'a>>| piece.map_or(&[][..], |piece| piece.bytes);

        // What is read next is known, and on its way, before a piece is done; after the last one of gate it is the
        // first one of down.
        let (mut piece, mut first_down) = (gate.next(worker), None);
        while let Some(now) = piece {
            let mut next = None;
            if look_ahead {
                next = gate.next(worker);
                first_down = if next.is_none() { down.next(worker) } else { None };
            }
            self.gate_up(&now, bytes(next.as_ref().or(first_down.as_ref())), results);
            piece = if look_ahead { next } else { gate.next(worker) };
        }
        let first_down = first_down.or_else(|| down.next(worker));
        let mut idle = Idle { pieces: down.clone(), at: bytes(first_down.as_ref()), left: idle_bytes };
        worker.barrier_doing(|| idle.step());
        let k = self.layout.down.k;
        for pair in worker.share(self.pair_tokens.len()) {
            // SAFETY: phase 1 is over: `hidden` is only read, and this worker alone converts this pair.
            unsafe { self.hidden_q.put(self.kernel, pair..pair + 1, self.hidden.slice(pair * k..(pair + 1) * k)) };
        }
        worker.barrier_doing(|| idle.step());
        let mut piece = first_down;
        while let Some(now) = piece {
            let next = if look_ahead { down.next(worker) } else { None };
            self.down(&now, bytes(next.as_ref()), results);
            piece = if look_ahead { next } else { down.next(worker) };
        }
    }

    /// `hidden[pair][rows of the tiles]` for all pairs of an expert.
    fn gate_up(&self, Piece { active, tiles, bytes }: &Piece<'_>, next: &[u8], results: &mut [f32]) {
        let n = self.layout.gate.n;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = Tiles::before(bytes, next, self.pace.ahead);
        for pairs in blocks(active.pairs) {
            let len = pairs.len() * width;
            let (y, rest) = results.split_at_mut(2 * len);
            let (gate, rest) = rest.split_at_mut(len);
            let (up, rest) = rest.split_at_mut(len);
            let h = &mut rest[..len];
            let x = if self.tokens == 1 { self.x.rows(0..1) } else { self.x.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.gate, &weights, &x, Start::Zero, y);
            for (i, y) in y.as_chunks::<{ 2 * TILE_ROWS }>().0.iter().enumerate() {
                let [from_gate, from_up]: &[[f32; TILE_ROWS]; 2] = bytemuck::cast_ref(y);
                gate.as_chunks_mut::<TILE_ROWS>().0[i] = *from_gate;
                up.as_chunks_mut::<TILE_ROWS>().0[i] = *from_up;
            }
            self.epilogue.activate(self.kernel, (self.layer, active.expert), &rows, width, (gate, up, h));
            for (pair, h) in pairs.zip(h.chunks_exact(width)) {
                // SAFETY: in phase 1 these rows of `hidden` belong to whoever claimed the tiles.
                let to = unsafe { self.hidden.slice_mut(pair * n + rows.start..pair * n + rows.end) };
                to.copy_from_slice(&h[..rows.len()]);
            }
        }
    }

    /// `out[token][rows of the tiles] += weight * (down tiles . hidden[pair])` for all pairs of an expert.
    fn down(&self, Piece { active, tiles, bytes }: &Piece<'_>, next: &[u8], results: &mut [f32]) {
        let n = self.layout.down.n;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = Tiles::before(bytes, next, self.pace.ahead);
        for pairs in blocks(active.pairs) {
            let y = &mut results[..pairs.len() * width];
            // SAFETY: after the second barrier nobody writes these rows.
            let h = unsafe { self.hidden_q.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.down, &weights, &h, Start::Zero, y);
            self.epilogue.finish((self.layer, active.expert), &rows, width, y);
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
