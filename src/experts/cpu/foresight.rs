//! Experts that will probably be needed next, on their way into the caches while memory has nothing else to do.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::pieces::{Active, LayerWork, Pieces};
use super::{Buffers, CpuExperts};
use crate::Result;
use crate::experts::{Choices, FORESEEN_TOKENS, by_link};
use crate::kernel::fetch;
use crate::machine::heap::Heap;
use crate::machine::trial::Trial;
use crate::machine::workers::GROUP;

/// Bytes between two looks at whether the wait is over.
const STEP_BYTES: usize = 512;

/// What is foreseen of the next layer, and what that was worth so far.
///
/// A line in another core's cache is hardly nearer than one in memory. So what a worker brings is what it will read
/// first: its own run of `gate` and `up`, then of `down`, or of its columns there. Where a run is depends on the order
/// of the experts, so those that were foreseen keep their places.
pub(super) struct Foresight {
    layer: usize,
    places: Vec<Active>, // its experts in the order of `gate`; empty: nothing is foreseen
    named: Vec<Active>,  // the same, best first, with as many pairs
    is_asked: bool,      // for what is foreseen
    on: bool,            // what is foreseen is asked for
    eighths: u32,        // of the experts in RAM that a GPU reads over its link
    trials: [Trial<2, 1, 16>; FORESEEN_TOKENS], // without, and with
    gains: [Option<f32>; FORESEEN_TOKENS], // of the last trial: the share by which speed grows
    pub(super) asked_bytes: u64,
    pub(super) chosen: Choices, // named or not
}

impl Foresight {
    pub(super) fn new(heap: &Heap, experts: usize) -> Result<Self> {
        let (mut places, mut named) = (heap.zeros(&[experts])?, heap.zeros(&[experts])?);
        places.clear();
        named.clear();
        Ok(Self {
            layer: 0,
            places,
            named,
            is_asked: false,
            on: true,
            eighths: 0,
            trials: [Trial::default(); FORESEEN_TOKENS],
            gains: [None; FORESEEN_TOKENS],
            asked_bytes: 0,
            chosen: Choices::default(),
        })
    }

    /// Names the experts of `layer`, best first. The first half of what a group of workers shares is in their own runs:
    /// there the best ones have their places.
    fn name(&mut self, layer: usize, guess: impl Iterator<Item = i32>, experts: usize, groups: usize) {
        let Self { layer: of, places, named, eighths, .. } = self;
        (*of, self.is_asked) = (layer, false);
        places.clear();
        named.clear();
        for expert in guess.filter_map(|id| usize::try_from(id).ok()).filter(|expert| *expert < experts) {
            match named.iter_mut().find(|named| named.expert == expert) {
                Some(named) => named.pairs.1 += 1,
                None => named.push(Active { expert, number: 0, pairs: (0, 1), cost: 0 }),
            }
        }
        named.truncate(named.len() - by_link(named.len(), *eighths));
        places.extend_from_slice(named);
        let mut best_first = named.iter();
        let first_of = |group: usize| named.len() * group / groups;
        for place in 0..named.len() {
            for group in 0..groups {
                if first_of(group) + place < first_of(group + 1) {
                    places[first_of(group) + place] = *best_first.next().expect("as many as there are places");
                }
            }
        }
        Active::add_up(places);
    }

    /// Compares what was foreseen with the experts that `layer` was given, and whether these were asked for: then
    /// `in_gate` becomes their order.
    pub(super) fn compare(&mut self, layer: usize, active: &[Active], in_gate: &mut Vec<Active>) -> bool {
        if self.places.is_empty() || self.layer != layer {
            return false;
        }
        let is_chosen = |place: &Active| active.iter().find(|active| active.expert == place.expert);
        in_gate.clear();
        let is_named = |active: &&Active| self.named.iter().any(|named| named.expert == active.expert);
        let mut others = active.iter().filter(|active| !is_named(active));
        for place in &self.places {
            in_gate.extend(is_chosen(place).or_else(|| others.next()));
        }
        in_gate.extend(others);
        Active::add_up(in_gate);
        let hits = active.iter().filter(is_named).count();
        self.chosen.hits += hits as u64;
        self.chosen.misses += (active.len() - hits) as u64;
        self.places.clear();
        self.is_asked
    }
}

impl CpuExperts {
    /// A recorded step of `tokens` tokens begins, with foresight where that makes such steps faster. So many `eighths`
    /// of the experts in RAM are read by a GPU.
    pub(in crate::experts) fn begin_step(&mut self, tokens: usize, eighths: u32) {
        let foresight = &mut self.buffers.foresight;
        foresight.on = foresight.trials.get(tokens.wrapping_sub(1)).is_some_and(|trial| trial.way() == 1);
        foresight.eighths = eighths;
    }

    /// It has ended, after so many seconds.
    pub(in crate::experts) fn end_step(&mut self, tokens: usize, seconds: f32) {
        self.team.took(tokens, seconds);
        let Foresight { trials, gains, .. } = &mut self.buffers.foresight;
        let Some(trial) = trials.get_mut(tokens.wrapping_sub(1)) else { return };
        if let Some([without, with]) = trial.took(seconds) {
            gains[tokens - 1] = Some(without / with - 1.0);
            trial.keep(usize::from(with < without));
        }
    }

    /// By what share foresight raises the speed of steps of `tokens` tokens; `None`: that is not known.
    pub(in crate::experts) fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        *self.buffers.foresight.gains.get(tokens.wrapping_sub(1))?
    }

    /// Brings experts of `layer` that it will probably be given into the caches, best first, until `is_over`. Ids below
    /// 0 or beyond the layer's experts are skipped.
    pub(in crate::experts) fn foresee(
        &mut self,
        layer: usize,
        guess: impl Iterator<Item = i32>,
        is_over: &(dyn Fn() -> bool + Sync),
    ) {
        let groups = self.team.working().div_ceil(GROUP);
        let Buffers { foresight, counts, .. } = &mut self.buffers;
        foresight.name(layer, guess, counts.len(), groups);
        let Foresight { places, is_asked, on, .. } = foresight;
        if places.is_empty() || !*on || is_over() {
            return;
        }
        *is_asked = true;
        self.memory.want(layer, places.iter().map(|place| place.expert));
        let asked = AtomicU64::new(0);
        let work = LayerWork {
            memory: &self.memory,
            layer,
            active: places,
            in_gate: places,
            has_own_runs: true,
            claims: &self.claims,
            tuning: self.tuning,
        };
        self.team.run(&|worker| {
            let own = worker.node % work.memory.nodes();
            let own_run = |phase| Pieces::new(&work, phase, own).of_own_run(worker);
            // As much of its columns as a run would have.
            let columns = || work.own_down_pieces(worker.count, worker.index);
            let (by_columns, claimed) = match work.memory.nodes() {
                1 => (Some(columns().take(columns().count().div_ceil(2))), None),
                _ => (None, Some(own_run(1))),
            };
            let down = by_columns.into_iter().flatten().chain(claimed.into_iter().flatten());
            let steps = own_run(0).chain(down).flat_map(|piece| piece.bytes.chunks(STEP_BYTES));
            let asked_by_it = steps.take_while(|_| !is_over()).map(|bytes| {
                fetch(bytes.as_ptr(), bytes.len().div_ceil(64));
                bytes.len() as u64
            });
            asked.fetch_add(asked_by_it.sum(), Relaxed);
        });
        self.buffers.foresight.asked_bytes += asked.into_inner();
    }
}
