//! Which of several ways makes steps fastest, found by trying while the engine runs.
//!
//! Several trials may run at the same time, each with runs of its own length: so that none always changes its way when
//! another one does.

/// Steps in which the best way is kept: at first, and at most. Twice as many each time that the same one is best again.
const KEPT: (usize, usize) = (2048, 16384);

/// Turns after which a way that is clearly slower is tried no more, and by how much.
const EARLY: usize = 8;
const CLEARLY: f32 = 1.1;

/// One of the first two runs of a way is broken off after so many steps that take so many times as long as another
/// way's latest: somebody waits for these steps. Where both are too long, the way is tried no more. Runs of fewer steps
/// are never broken off.
const HOPELESS: (usize, f32) = (4, 2.0);

/// All ways in turn, for runs of `RUN` steps and up to `TURNS` turns, then the best one for many.
#[derive(Clone, Copy, Debug)]
pub struct Trial<const WAYS: usize, const RUN: usize, const TURNS: usize> {
    way: usize, // of the next step
    tried: [bool; WAYS],
    steps: usize, // of this run that are over
    long: usize,  // of them, those that look hopeless
    turns: usize, // that are over
    seconds: [[f32; TURNS]; WAYS],
    kept: usize,                  // steps for which the best way is still kept
    last: Option<(usize, usize)>, // the way that was best in the last trial, and for how many steps it was kept
}

impl<const WAYS: usize, const RUN: usize, const TURNS: usize> Trial<WAYS, RUN, TURNS> {
    /// The way of the next step.
    pub fn way(&self) -> usize {
        self.way
    }

    /// That step took so long. Where a trial ends with it: the seconds of each way's median run; then `keep` must say
    /// which is the best.
    pub fn took(&mut self, seconds: f32) -> Option<[f32; WAYS]> {
        if self.kept > 0 {
            self.kept -= 1;
            if self.kept == 0 {
                *self = Self { last: self.last, ..Self::default() };
            }
            return None;
        }
        self.seconds[self.way][self.turns] += seconds;
        self.steps += 1;
        if let Some(limit) = self.hopeless(seconds) {
            let runs = &mut self.seconds[self.way];
            runs[self.turns] = f32::INFINITY;
            if self.turns > 0 && runs[0] > limit {
                self.tried[self.way] = false;
                *runs = [f32::INFINITY; TURNS];
            }
        } else if self.steps < RUN {
            return None;
        }
        (self.steps, self.long) = (0, 0);
        if let Some(next) = (self.way + 1..WAYS).find(|&way| self.tried[way]) {
            self.way = next;
            return None;
        }
        self.turns += 1;
        if self.turns == EARLY {
            let medians = self.medians();
            let best = medians.into_iter().fold(f32::INFINITY, f32::min);
            self.tried = medians.map(|median| median <= CLEARLY * best);
        }
        self.way = self.tried.iter().position(|tried| *tried).expect("the best one is");
        let is_over = self.turns == TURNS || self.tried.iter().filter(|tried| **tried).count() == 1;
        is_over.then(|| self.medians())
    }

    /// Whether this run is, after a step that took so long: then, the most that a run may take.
    fn hopeless(&mut self, seconds: f32) -> Option<f32> {
        if self.turns > 1 {
            return None;
        }
        let latest = |way: usize| match way < self.way {
            true => Some(self.seconds[way][self.turns]),
            false => Some(self.seconds[way][self.turns.checked_sub(1)?]),
        };
        let others = (0..WAYS).filter(|&way| way != self.way && self.tried[way]).filter_map(latest);
        let limit = HOPELESS.1 * others.fold(f32::INFINITY, f32::min);
        self.long += usize::from(seconds > limit / RUN as f32);
        (self.long == HOPELESS.0).then_some(limit)
    }

    fn medians(&self) -> [f32; WAYS] {
        const { assert!(TURNS >= EARLY) }
        std::array::from_fn(|way| {
            let mut all = self.seconds[way];
            let all = &mut all[..if self.tried[way] { self.turns } else { EARLY }];
            *all.select_nth_unstable_by(all.len() / 2, f32::total_cmp).1
        })
    }

    /// The best way, after a trial.
    pub fn keep(&mut self, best: usize) {
        self.kept = match self.last {
            Some((last, kept)) if last == best => (2 * kept).min(KEPT.1),
            _ => KEPT.0,
        };
        (self.way, self.last) = (best, Some((best, self.kept)));
    }
}

impl<const WAYS: usize, const RUN: usize, const TURNS: usize> Default for Trial<WAYS, RUN, TURNS> {
    fn default() -> Self {
        let seconds = [[0.0; TURNS]; WAYS];
        Self { way: 0, tried: [true; WAYS], steps: 0, long: 0, turns: 0, seconds, kept: 0, last: None }
    }
}

/// Another number must take so much less time.
const GAIN: f32 = 0.98;

/// The number that makes steps fastest, found by trying its neighbours: `WAYS` with itself.
#[derive(Clone, Copy, Debug)]
pub struct Climb<const WAYS: usize, const RUN: usize, const TURNS: usize> {
    at: usize,
    trial: Trial<WAYS, RUN, TURNS>, // the number, then its neighbours
}

impl<const WAYS: usize, const RUN: usize, const TURNS: usize> Climb<WAYS, RUN, TURNS> {
    /// Begins at a number.
    pub fn new(at: usize) -> Self {
        Self { at, trial: Trial::default() }
    }

    /// The number of a way.
    fn number<const N: usize>(&self, way: usize, neighbours: impl Fn(usize) -> [usize; N]) -> usize {
        const { assert!(N + 1 == WAYS) }
        way.checked_sub(1).map_or(self.at, |neighbour| neighbours(self.at)[neighbour])
    }

    /// The number of the next step. A number that lacks a neighbour is its own.
    pub fn next<const N: usize>(&self, neighbours: impl Fn(usize) -> [usize; N]) -> usize {
        self.number(self.trial.way(), neighbours)
    }

    /// That step took so long.
    pub fn took<const N: usize>(&mut self, seconds: f32, neighbours: impl Fn(usize) -> [usize; N]) {
        const HERE: usize = 0;
        let Some(ways) = self.trial.took(seconds) else { return };
        let best = (0..WAYS).min_by(|&a, &b| ways[a].total_cmp(&ways[b])).expect("there is one");
        let number = self.number(best, neighbours);
        match number != self.at && ways[best] < GAIN * ways[HERE] {
            true => *self = Self::new(number),
            false => self.trial.keep(HERE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_climb_ends_where_steps_are_fastest() {
        let neighbours = |at: usize| [at.saturating_sub(1), (at + 1).min(8)];
        for (first, best) in [(2usize, 3usize), (0, 0), (8, 8), (1, 5), (7, 2)] {
            let mut climb = Climb::<3, 2, 32>::new(first);
            for _ in 0..5000 {
                climb.took(1.0 + climb.next(neighbours).abs_diff(best) as f32 / 20.0, neighbours);
            }
            assert_eq!(climb.at, best, "from {first}");
        }
        // Where others gain too little, it stays.
        let mut climb = Climb::<3, 2, 32>::new(3);
        for _ in 0..5000 {
            climb.took(1.0 - 0.001 * climb.next(neighbours) as f32, neighbours);
        }
        assert_eq!(climb.at, 3);
    }

    const TURNS: usize = 16;

    /// Runs a trial; the medians of its runs, and how many each way had.
    fn run<const RUN: usize>(trial: &mut Trial<3, RUN, TURNS>, seconds: [f32; 3]) -> ([f32; 3], [usize; 3]) {
        let mut taken = [0; 3];
        for step in 0.. {
            taken[trial.way()] += 1;
            // One run in a while takes long.
            let took = if step / RUN % 7 == 0 { 5.0 } else { seconds[trial.way()] };
            if let Some(medians) = trial.took(took) {
                return (medians.map(|median| median / RUN as f32), taken.map(|steps| steps / RUN));
            }
        }
        unreachable!()
    }

    fn the_best_way_is_kept<const RUN: usize>() {
        let mut trial = Trial::<3, RUN, TURNS>::default();
        for (seconds, taken, kept) in [
            ([1.0, 0.9375, 0.96875], [TURNS; 3], KEPT.0),
            ([1.0, 1.0625, 1.5], [TURNS, TURNS, EARLY], KEPT.0),
            ([1.25, 1.0, 1.5], [EARLY; 3], KEPT.0),
            ([1.25, 1.0, 1.5], [EARLY; 3], 2 * KEPT.0),
            ([1.25, 1.0, 1.5], [EARLY; 3], 4 * KEPT.0),
            ([1.25, 1.0, 1.5], [EARLY; 3], KEPT.1),
            ([1.25, 1.0, 1.5], [EARLY; 3], KEPT.1),
        ] {
            assert_eq!(run(&mut trial, seconds), (seconds, taken));
            let best = (0..3).min_by(|&a, &b| seconds[a].total_cmp(&seconds[b])).unwrap();
            trial.keep(best);
            for _ in 0..kept {
                assert_eq!((trial.way(), trial.took(9.0)), (best, None));
            }
            assert_eq!(trial.way(), 0);
        }
    }

    #[test]
    fn a_hopeless_way_ends_at_once() {
        let mut trial = Trial::<3, 12, TURNS>::default();
        let (mut steps, mut medians) = ([0; 3], None);
        while medians.is_none() {
            steps[trial.way()] += 1;
            medians = trial.took([9.0, 1.0, 5.0][trial.way()]);
        }
        // That the first way is one of them is known when another one has run.
        assert_eq!(steps, [12 + 4, 2 * 12, 4 + 4]);
        assert_eq!(medians, Some([f32::INFINITY, 12.0, f32::INFINITY]));
        // Nothing is hopeless because all steps take longer from one on.
        let mut trial = Trial::<3, 12, TURNS>::default();
        for step in 0..3 * 12 * 2 {
            let took = [1.3, 1.0, 1.1][trial.way()] * if step < 12 { 1.0 } else { 2.7 };
            assert_eq!(trial.took(took), None);
        }
        assert_eq!(trial.tried, [true; 3]);
        // One long step says nothing about a way.
        let mut trial = Trial::<3, 12, TURNS>::default();
        for step in 0..3 * 12 * EARLY - 1 {
            assert_eq!(trial.took(if step == 12 { 40.0 } else { 1.0 }), None);
        }
        assert_eq!(trial.tried, [true; 3]);
    }

    #[test]
    fn the_best_way_is_kept_until_the_next_trial() {
        the_best_way_is_kept::<1>();
        the_best_way_is_kept::<4>();
    }
}
