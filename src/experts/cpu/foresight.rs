//! Experts that will probably be needed next, on their way into the caches while memory has nothing else to do.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use super::pieces::{Active, LayerWork, Pieces};
use super::{Buffers, CpuExperts};
use crate::Result;
use crate::experts::{Choices, FORESEEN_TOKENS};
use crate::kernel::fetch;
use crate::machine::heap::Heap;
use crate::machine::workers::GROUP;

/// Bytes between two looks at whether the wait is over.
const STEP_BYTES: usize = 512;

/// What is foreseen of the next layer, and what that was worth so far.
///
/// A line in another core's cache is hardly nearer than one in memory. So what a worker brings is what it will read
/// first: its own run of `gate` and `up`, then that of `down`. Where a run is depends on the order of the experts, so
/// those that were foreseen keep their places.
pub(super) struct Foresight {
    layer: usize,
    places: Vec<Active>, // its experts in the order of `gate`; empty: nothing is foreseen
    named: Vec<Active>,  // the same, best first, with as many pairs
    is_asked: bool,      // for what is foreseen
    on: bool,            // what is foreseen is asked for
    trials: [Trial; FORESEEN_TOKENS],
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
            trials: [Trial::default(); FORESEEN_TOKENS],
            asked_bytes: 0,
            chosen: Choices::default(),
        })
    }

    /// Names the experts of `layer`, best first. The first half of what a group of workers shares is in their own runs:
    /// there the best ones have their places.
    fn name(&mut self, layer: usize, guess: impl Iterator<Item = i32>, experts: usize, groups: usize) {
        let Self { layer: of, places, named, .. } = self;
        (*of, self.is_asked) = (layer, false);
        places.clear();
        named.clear();
        for expert in guess.filter_map(|id| usize::try_from(id).ok()).filter(|expert| *expert < experts) {
            match named.iter_mut().find(|named| named.expert == expert) {
                Some(named) => named.pairs.1 += 1,
                None => named.push(Active { expert, pairs: (0, 1), cost: 0 }),
            }
        }
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

/// Steps with and without foresight that are compared.
const STEPS: usize = 16;
/// Steps in which the better way is kept.
const KEPT: usize = 1024;

/// Whether foresight makes steps of one number of tokens faster: both ways in turn for some steps, then the better one
/// for many.
#[derive(Clone, Copy, Default)]
struct Trial {
    step: usize,
    seconds: [[f32; STEPS]; 2], // without, and with
    gain: Option<f32>,          // of the last trial: the share by which speed grows
}

impl Trial {
    fn is_on(&self) -> bool {
        match self.step < 2 * STEPS {
            true => self.step % 2 == 1,
            false => self.gain.is_some_and(|gain| gain > 0.0),
        }
    }

    fn took(&mut self, seconds: f32) {
        if self.step < 2 * STEPS {
            self.seconds[self.step % 2][self.step / 2] = seconds;
        }
        self.step = (self.step + 1) % (2 * STEPS + KEPT);
        if self.step == 2 * STEPS {
            let median = |mut all: [f32; STEPS]| *all.select_nth_unstable_by(STEPS / 2, f32::total_cmp).1;
            let [without, with] = self.seconds.map(median);
            self.gain = Some(without / with - 1.0);
        }
    }
}

impl CpuExperts {
    /// A recorded step of `tokens` tokens begins, with foresight where that makes such steps faster.
    pub(in crate::experts) fn begin_step(&mut self, tokens: usize) -> Instant {
        let Foresight { on, trials, .. } = &mut self.buffers.foresight;
        *on = trials.get(tokens.wrapping_sub(1)).is_some_and(Trial::is_on);
        Instant::now()
    }

    /// It has ended.
    pub(in crate::experts) fn end_step(&mut self, tokens: usize, begun: Instant) {
        if let Some(trial) = self.buffers.foresight.trials.get_mut(tokens.wrapping_sub(1)) {
            trial.took(begun.elapsed().as_secs_f32());
        }
    }

    /// By what share foresight raises the speed of steps of `tokens` tokens; `None`: that is not known.
    pub(in crate::experts) fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.buffers.foresight.trials.get(tokens.wrapping_sub(1))?.gain
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
            let pieces = [0, 1].into_iter().flat_map(|phase| Pieces::new(&work, phase, own).of_own_run(worker));
            let steps = pieces.flat_map(|piece| piece.bytes.chunks(STEP_BYTES));
            let asked_by_it = steps.take_while(|_| !is_over()).map(|bytes| {
                fetch(bytes.as_ptr(), bytes.len().div_ceil(64));
                bytes.len() as u64
            });
            asked.fetch_add(asked_by_it.sum(), Relaxed);
        });
        self.buffers.foresight.asked_bytes += asked.into_inner();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_way_is_kept_until_the_next_trial() {
        let mut trial = Trial::default();
        for (with, without) in [(0.8, 1.0), (1.1, 1.0), (0.9, 1.0)] {
            for step in 0..2 * STEPS {
                assert_eq!(trial.is_on(), step % 2 == 1);
                // One step in a while takes long.
                let seconds = if trial.is_on() { with } else { without };
                trial.took(if step % 7 == 0 { 5.0 } else { seconds });
            }
            let gain = trial.gain.unwrap();
            assert!((gain - (without / with - 1.0)).abs() < 1e-6, "{gain}");
            for _ in 0..KEPT {
                assert_eq!(trial.is_on(), with < without);
                trial.took(9.0);
            }
        }
    }
}
