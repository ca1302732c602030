//! How far the experts of a layer are: `down` of one begins when its `h` is whole, whatever the others do.

use std::ops::Range;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Release},
};

use super::pieces::{Active, Piece};
use crate::machine::heap::Heap;
use crate::machine::workers::Line;

/// Numbers of `h` that are brought into their form together: whole groups of every precision, and cache lines.
const BLOCK: usize = 128;

/// Counts in one line.
const COUNTS: usize = size_of::<Line<AtomicU32>>() / size_of::<AtomicU32>();

/// What is done of each of a layer's experts.
pub(super) struct Progress {
    lines: usize,                          // of an expert's blocks
    tiles: Vec<Line<[AtomicU32; COUNTS]>>, // [experts, lines]: tiles that are done, of each block
    blocks: Vec<Line<AtomicU32>>,          // [experts]: blocks that are in their form
    width: usize,                          // of this layer's `h`
    of_tile: usize,                        // numbers of it that a tile gives
}

impl Progress {
    /// For layers of so many experts whose `h` has at most `width` numbers.
    pub(super) fn new(heap: &Heap, experts: usize, width: usize) -> Self {
        let lines = width.div_ceil(BLOCK).div_ceil(COUNTS);
        heap.count::<Line<AtomicU32>>(&[experts, lines + 1]);
        let experts = if heap.is_plan() { 0 } else { experts };
        Self {
            lines,
            tiles: (0..experts * lines).map(|_| Line::default()).collect(),
            blocks: (0..experts).map(|_| Line::default()).collect(),
            width,
            of_tile: 1,
        }
    }

    /// Begins a layer of so many experts, whose `h` has `width` numbers, `of_tile` from each tile.
    pub(super) fn begin(&mut self, experts: usize, width: usize, of_tile: usize) {
        assert!(width <= self.lines * COUNTS * BLOCK && BLOCK.is_multiple_of(of_tile));
        (self.width, self.of_tile) = (width, of_tile);
        let tiles = self.tiles[..experts * self.lines].iter_mut().flat_map(|line| &mut line.0);
        tiles.chain(self.blocks[..experts].iter_mut().map(|line| &mut line.0)).for_each(|count| *count.get_mut() = 0);
    }

    /// Tiles of a piece are done: what they wrote is visible to whoever completes a block, to whom `form` gives the
    /// numbers of `h` that it has.
    pub(super) fn add(&self, Piece { active, tiles, .. }: &Piece<'_>, form: impl Fn(&Active, Range<usize>)) {
        let of_block = BLOCK / self.of_tile;
        let last = self.width.div_ceil(self.of_tile);
        for block in tiles.start / of_block..tiles.end.div_ceil(of_block) {
            let all = block * of_block..last.min((block + 1) * of_block);
            let done = (tiles.end.min(all.end) - tiles.start.max(all.start)) as u32;
            let line = &self.tiles[active.number * self.lines + block / COUNTS].0;
            let before = line[block % COUNTS].fetch_add(done, AcqRel);
            if before + done == all.len() as u32 {
                form(active, block * BLOCK..self.width.min((block + 1) * BLOCK));
                self.blocks[active.number].0.fetch_add(1, Release);
            }
        }
    }

    /// Whether all of an expert's `h` is in its form, and visible.
    pub(super) fn is_whole(&self, active: &Active) -> bool {
        self.blocks[active.number].0.load(Acquire) as usize == self.width.div_ceil(BLOCK)
    }
}
