//! `down` of few tokens: whose columns of the output are whose.
//!
//! A worker adds up experts in its own columns, in order of id. Who has none left takes experts off the end of another
//! worker's and leaves the products to it, so that each element is summed by one worker, in the same order as ever.
//! What is taken is small at the end as at the beginning: some tiles of one expert, where a run of claimed tiles has
//! those of all experts.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use moebius_cache::pack::TILE_ROWS;

use crate::Result;
use crate::machine::heap::Heap;
use crate::machine::workers::{GROUP, Line, Shared};

/// Pairs of a token and an expert up to which products are left to others: they take room.
const MOST_PAIRS: usize = 256;

/// Tiles of columns that are taken together at most.
const MOST_TILES: usize = 8;

/// What the workers of one layer after the other take.
pub(super) struct Columns {
    hidden: usize,
    step: u32, // of the layer, among all
    slots: Vec<Line<AtomicU64>>,
    left: Vec<AtomicU32>, // [slots, experts]: the step of which a helper has left products
    products: Vec<f32>,   // [MOST_PAIRS, hidden]
}

/// The same, as all workers of a layer see it.
pub(super) struct Shares<'a> {
    hidden: usize,
    experts: usize, // of the layer
    step: u32,
    slots: &'a [Line<AtomicU64>],
    left: &'a [AtomicU32], // [slots, experts]
    products: Shared<'a, f32>,
}

impl Columns {
    /// For a team of `threads`, layers of so many experts and `hidden` columns, and up to `pairs` pairs. Errors:
    /// `Error::Resources`.
    pub(super) fn new(heap: &Heap, threads: usize, experts: usize, hidden: usize, pairs: usize) -> Result<Self> {
        let slots = Slots { hidden, workers: 1 }.each() + threads;
        heap.count::<Line<AtomicU64>>(&[slots]);
        heap.count::<AtomicU32>(&[slots, experts]);
        let slots = if heap.is_plan() { 0 } else { slots };
        Ok(Self {
            hidden,
            step: 0,
            slots: (0..slots).map(|_| Line::default()).collect(),
            left: (0..slots * experts).map(|_| AtomicU32::new(0)).collect(),
            products: heap.zeros(&[pairs.min(MOST_PAIRS), hidden])?,
        })
    }

    /// Begins a layer of so many experts and pairs; `None`: there are too many pairs.
    pub(super) fn begin(&mut self, experts: usize, pairs: usize) -> Option<Shares<'_>> {
        self.step = self.step.wrapping_add(1);
        if self.step == 0 {
            // What was written 2^32 layers ago, or never, would be of this one.
            self.slots.iter_mut().for_each(|slot| *slot.0.get_mut() = 0);
            self.left.iter_mut().for_each(|left| *left.get_mut() = 0);
            self.step = 1;
        }
        (pairs * self.hidden <= self.products.len()).then(|| Shares {
            hidden: self.hidden,
            experts,
            step: self.step,
            slots: &self.slots,
            left: &self.left,
            products: Shared::new(&mut self.products),
        })
    }
}

/// Columns that are taken together: those of worker 0, then of worker 1, ..
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) hidden: usize,
    pub(super) workers: usize,
}

impl Slots {
    /// Of each worker.
    fn each(self) -> usize {
        self.hidden.div_ceil(TILE_ROWS).div_ceil(self.workers).div_ceil(MOST_TILES)
    }

    /// Those of a worker.
    pub(super) fn own(self, worker: usize) -> Range<usize> {
        worker * self.each()..(worker + 1) * self.each()
    }

    /// Those of others, in the order in which a worker helps: first its own group's.
    pub(super) fn others(self, worker: usize) -> impl Iterator<Item = usize> {
        let (workers, first) = (self.workers, worker / GROUP * GROUP);
        let of_group = workers.min(first + GROUP) - first;
        let in_group = (1..of_group).map(move |i| first + (worker - first + i) % of_group);
        let beyond = (0..workers - of_group).map(move |i| (first + of_group + i) % workers);
        in_group.chain(beyond).flat_map(move |other| self.own(other).rev())
    }

    /// The tiles of a slot; of some there are none where workers are many.
    pub(super) fn tiles(self, slot: usize) -> Range<usize> {
        let (tiles, slots) = (self.hidden.div_ceil(TILE_ROWS), self.workers * self.each());
        tiles * slot / slots..tiles * (slot + 1) / slots
    }
}

/// Experts of a slot that nobody has taken yet, as a slot's word has them below the step.
fn untaken(word: u64) -> Range<usize> {
    (word >> 16 & 0xffff) as usize..(word & 0xffff) as usize
}

impl Shares<'_> {
    /// Takes of a slot's experts: `take` says what it leaves of those that nobody has taken. Returns these; `None`:
    /// there are none.
    fn take(&self, slot: usize, take: impl Fn(Range<usize>) -> Range<usize>) -> Option<Range<usize>> {
        let all = |word: u64| match (word >> 32) as u32 == self.step {
            true => untaken(word),
            false => 0..self.experts,
        };
        let taken = self.slots[slot].0.fetch_update(AcqRel, Acquire, |word| {
            let some = all(word);
            let rest = take(some.clone());
            (!some.is_empty()).then_some(u64::from(self.step) << 32 | (rest.start as u64) << 16 | rest.end as u64)
        });
        taken.ok().map(all)
    }

    /// The next expert for the one whose slot it is.
    pub(super) fn take_first(&self, slot: usize) -> Option<usize> {
        Some(self.take(slot, |all| all.start + 1..all.end)?.start)
    }

    /// An expert for a helper, who [leaves](Shares::leave) its products.
    pub(super) fn take_last(&self, slot: usize) -> Option<usize> {
        // Also asked where nothing is left.
        Some(self.take(slot, |all| all.start..all.end.wrapping_sub(1))?.end - 1)
    }

    /// Room for the products of a pair, a helper's, in the columns of some tiles.
    ///
    /// # Safety
    /// One thread alone may use those columns of the pair, until it leaves them.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn room(&self, pair: usize, rows: Range<usize>) -> &mut [f32] {
        // SAFETY: by the caller's promise.
        unsafe { self.products.slice_mut(pair * self.hidden + rows.start..pair * self.hidden + rows.end) }
    }

    /// The products of an expert are there.
    pub(super) fn leave(&self, slot: usize, expert: usize) {
        self.left[slot * self.experts + expert].store(self.step, Release);
    }

    /// Experts of a slot whose products helpers leave, for its owner, who has seen that all are taken.
    pub(super) fn of_helpers(&self, slot: usize) -> Range<usize> {
        // The word does not change again in this step.
        untaken(self.slots[slot].0.load(Relaxed)).end..self.experts
    }

    /// Whether the products of an expert are there, and visible.
    pub(super) fn has_left(&self, slot: usize, expert: usize) -> bool {
        self.left[slot * self.experts + expert].load(Acquire) == self.step
    }

    /// Products that a helper has left.
    ///
    /// # Safety
    /// They must be [there](Shares::has_left): of an expert's pair, in the columns of the slot.
    pub(super) unsafe fn products(&self, pair: usize, rows: Range<usize>) -> &[f32] {
        // SAFETY: whoever wrote them has left them.
        unsafe { self.products.slice(pair * self.hidden + rows.start..pair * self.hidden + rows.end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_cover_all_tiles_once_and_are_small() {
        for hidden in [16_usize, 72, 768, 2048, 2880, 7168] {
            let tiles = hidden.div_ceil(TILE_ROWS);
            let room = Columns::new(&Heap::default(), 200, 4, hidden, 1).unwrap().slots.len();
            for workers in [1, 2, 3, 24, 32, 64, 200] {
                let of_workers = Slots { hidden, workers };
                let slots: Vec<usize> = (0..workers).flat_map(|worker| of_workers.own(worker)).collect();
                assert!(slots.iter().copied().eq(0..slots.len()) && slots.len() <= room, "{hidden}, {workers}");
                let all: Vec<_> = slots.iter().map(|&slot| of_workers.tiles(slot)).collect();
                assert!(all.iter().all(|tiles| tiles.len() <= MOST_TILES));
                assert!(all.into_iter().flatten().eq(0..tiles), "{hidden}, {workers}");
            }
        }
    }

    #[test]
    fn others_are_all_but_ones_own() {
        for workers in [1, 2, 8, 9, 19, 32, 40] {
            let of_workers = Slots { hidden: 2048, workers };
            let each = of_workers.each();
            for worker in 0..workers {
                let mut slots: Vec<usize> = of_workers.others(worker).collect();
                let group = slots.iter().take_while(|&&slot| slot / each / GROUP == worker / GROUP);
                let beside = workers.min(worker / GROUP * GROUP + GROUP) - worker / GROUP * GROUP - 1;
                assert_eq!(group.count(), beside * each, "its group's come first");
                slots.extend(of_workers.own(worker));
                slots.sort_unstable();
                assert!(slots.into_iter().eq(0..workers * each), "{worker} of {workers}");
            }
        }
    }

    #[test]
    fn each_expert_is_taken_once_and_what_helpers_leave_is_the_end() {
        const EXPERTS: usize = 37;
        const SLOTS: usize = 4;
        let mut columns = Columns::new(&Heap::default(), SLOTS, EXPERTS, 64, 8).unwrap();
        assert!(columns.begin(EXPERTS, MOST_PAIRS + 1).is_none());
        for step in 0..200 {
            // Layers have more experts and less.
            let experts = EXPERTS - step % 3;
            let shares = &columns.begin(experts, 8).unwrap();
            let taken = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..3)
                    .map(|thread| {
                        scope.spawn(move || {
                            let mut taken = [const { Vec::new() }; SLOTS];
                            for (slot, taken) in taken.iter_mut().enumerate() {
                                let take = || match thread {
                                    0 => shares.take_first(slot),
                                    _ => shares.take_last(slot).inspect(|&expert| shares.leave(slot, expert)),
                                };
                                taken.extend(std::iter::from_fn(take));
                            }
                            taken
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            for slot in 0..SLOTS {
                let of_helpers = shares.of_helpers(slot);
                assert!(taken[0][slot].iter().copied().eq(0..of_helpers.start), "the owner's, in order");
                let mut others = [&taken[1][slot][..], &taken[2][slot]].concat();
                others.sort_unstable();
                assert!(others.into_iter().eq(of_helpers.clone()));
                assert!(of_helpers.into_iter().all(|expert| shares.has_left(slot, expert)));
            }
            let next = columns.begin(experts, 8).unwrap();
            assert!((0..SLOTS).all(|slot| (0..experts).all(|expert| !next.has_left(slot, expert))));
        }
    }

    #[test]
    fn steps_begin_anew_after_the_last() {
        let mut columns = Columns::new(&Heap::default(), 2, 3, 64, 8).unwrap();
        columns.step = u32::MAX - 1;
        for _ in 0..3 {
            let shares = columns.begin(3, 8).unwrap();
            assert!(!shares.has_left(1, 2));
            assert_eq!((shares.take_first(1), shares.take_last(1)), (Some(0), Some(2)));
            shares.leave(1, 2);
        }
        assert_eq!(columns.step, 2);
    }
}
