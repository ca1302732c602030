//! What a worker claims of a layer: some tiles of an expert that go through the kernel together.

use std::ops::Range;

use bytemuck::Zeroable;

use super::columns::Slots;
use super::tuning::Tuning;
use crate::experts::ExpertMemory;
use crate::kernel::fetch;
use crate::machine::workers::{Claimant, Claims, Worker};

/// Tokens whose arithmetic takes as long as reading the weights does: what a tile costs is this plus its tokens.
const READ_COST: usize = 8;

/// One expert with tokens to work on.
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Active {
    pub(super) expert: usize,
    pub(super) number: usize,         // among those of the layer, in order of id
    pub(super) pairs: (usize, usize), // its pairs, from and to
    pub(super) cost: usize,           // of one tile of each expert before this one in its order
}

impl Active {
    /// What one of its tiles costs.
    fn tile_cost(&self) -> usize {
        READ_COST + self.pairs.1 - self.pairs.0
    }

    /// Sets the costs before each, in the order of `all`.
    pub(super) fn add_up(all: &mut [Self]) {
        let mut cost = 0;
        for active in all {
            active.cost = cost;
            cost += active.tile_cost();
        }
    }
}

/// A layer's work, and where it is claimed.
pub(super) struct LayerWork<'a> {
    pub(super) memory: &'a ExpertMemory,
    pub(super) layer: usize,
    pub(super) active: &'a [Active],      // in order of id, as `down` adds them up
    pub(super) in_gate: &'a [Active],     // the same in the order of `gate`
    pub(super) has_own_runs: bool,        // each worker's first run is known before
    pub(super) claims: &'a [[Claims; 2]], // [nodes], of each phase
    pub(super) tuning: Tuning,
}

impl<'a> LayerWork<'a> {
    /// Tiles of `down` of an expert, as many at a time as go through the kernel together.
    pub(super) fn down_pieces(&self, number: usize, tiles: Range<usize>) -> impl Iterator<Item = Piece<'a>> + use<'a> {
        let (active, memory, layer) = (&self.active[number], self.memory, self.layer);
        let each = self.tuning.down_tiles;
        tiles.clone().step_by(each).map(move |first| {
            let tiles = first..tiles.end.min(first + each);
            Piece { active, bytes: memory.down_tiles(layer, active.expert, tiles.clone()), tiles }
        })
    }

    /// The pieces of `down` that are a worker's own, in the order in which it does them.
    pub(super) fn own_down_pieces(&self, workers: usize, worker: usize) -> impl Iterator<Item = Piece<'a>> {
        let hidden = self.memory.cache().layout(self.layer).down.n;
        let slots = Slots { hidden, workers };
        slots.own(worker).flat_map(move |slot| {
            let tiles = slots.tiles(slot);
            (0..self.active.len()).flat_map(move |number| self.down_pieces(number, tiles.clone()))
        })
    }
}

/// What a worker does of one phase, claimed run by run. Each piece goes through the kernel as a whole.
#[derive(Clone)]
pub(super) struct Pieces<'s> {
    work: &'s LayerWork<'s>,
    phase: usize,               // 0: gate and up, 1: down
    own: usize,                 // the worker's node
    turn: usize,                // nodes whose tiles are all taken
    claimant: Option<Claimant>, // on the next one
    run: Range<usize>,
    expert: usize,      // index into the active ones: the next of this run
    left: Range<usize>, // tiles of the one before it
}

/// Some tiles of an expert that go through the kernel together.
#[derive(Clone)]
pub(super) struct Piece<'s> {
    pub(super) active: &'s Active,
    pub(super) tiles: Range<usize>,
    pub(super) bytes: &'s [u8],
}

impl<'s> Pieces<'s> {
    pub(super) fn new(work: &'s LayerWork<'s>, phase: usize, own: usize) -> Self {
        Self { work, phase, own, turn: 0, claimant: None, run: 0..0, expert: work.active.len(), left: 0..0 }
    }

    fn active(&self) -> &'s [Active] {
        if self.phase == 0 { self.work.in_gate } else { self.work.active }
    }

    /// The pieces of the worker's own run, where that is known: they need no claim.
    pub(super) fn of_own_run(mut self, worker: &Worker<'_>) -> impl Iterator<Item = Piece<'s>> + use<'s> {
        self.claim(worker);
        self.rest_of_run()
    }

    /// What is left of the run that was claimed last.
    pub(super) fn rest_of_run(mut self) -> impl Iterator<Item = Piece<'s>> + use<'s> {
        std::iter::from_fn(move || self.next_of_run())
    }

    /// The node whose slice the run is of, and the tiles of that.
    fn slice(&self) -> (usize, Range<usize>) {
        let memory = self.work.memory;
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
        let LayerWork { memory, layer, tuning, .. } = self.work;
        let active = self.active();
        while self.left.is_empty() {
            self.left = self.tiles_of(active.get(self.expert)?);
            self.expert += 1;
        }
        let most = if self.phase == 0 { tuning.gate_tiles } else { tuning.down_tiles };
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
    pub(super) fn next(&mut self, worker: &Worker<'_>) -> Option<Piece<'s>> {
        loop {
            if let Some(piece) = self.next_of_run() {
                return Some(piece);
            }
            if self.turn == self.work.memory.nodes() {
                return None;
            }
            self.claim(worker);
        }
    }

    /// Claims a run of the present node's slice, or goes on to the next one.
    fn claim(&mut self, worker: &Worker<'_>) {
        let LayerWork { memory, claims, tuning, has_own_runs, .. } = self.work;
        let (node, slice) = self.slice();
        let there = if memory.nodes() == 1 { worker.count } else { worker.count_on(node) };
        let active = self.active();
        let last = active[active.len() - 1];
        let (cut, total) = match self.phase {
            0 => (tuning.gate_cut, (last.cost + last.tile_cost()) * slice.len()),
            _ => (tuning.down_cut, slice.len()),
        };
        let claimant = self.claimant.get_or_insert_with(|| match (*has_own_runs && there > 0, self.turn) {
            (false, _) => Claimant::new(worker.index),
            (true, 0) => Claimant::with_own_run(worker.index),
            (true, _) => Claimant::without_own_run(worker.index),
        });
        match claims[node][self.phase].next(claimant, cut, there.max(1), total) {
            Some(run) => (self.run, self.expert) = (run, 0),
            None => (self.turn, self.claimant) = (self.turn + 1, None),
        }
    }
}

/// What a worker brings into L2 while it has to wait.
pub(super) struct Idle<'s, I> {
    pub(super) pieces: I,
    pub(super) at: &'s [u8],
    pub(super) left: usize, // bytes
}

impl<'s, I: Iterator<Item = Piece<'s>>> Idle<'s, I> {
    /// A few cache lines; `false`: that was all.
    pub(super) fn step(&mut self) -> bool {
        const LINES: usize = 8;
        while self.at.is_empty() && self.left > 0 {
            match self.pieces.next() {
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
