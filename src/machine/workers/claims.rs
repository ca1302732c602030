//! Work that workers take in runs, so that cores of unequal speed finish together.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::{GROUP, Line};

/// How work is cut into runs: a part of it first, in as many equal runs as there are workers, for long sequential
/// reads; then the same part of the rest, and so on, so that cores of unequal speed finish together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Runs of each worker; those of the last level are all the rest.
    pub levels: u32,
    /// Each level leaves a 2^-halvings of what it found.
    pub halvings: u32,
}

impl Cut {
    /// The last runs are a 32nd of a worker's share.
    pub const DEFAULT: Cut = Cut { levels: 6, halvings: 1 };

    /// The same without levels of runs below one, where each worker's share is `share`: to claim nothing takes as long
    /// as to claim something.
    fn of_share(self, share: usize) -> Cut {
        let halvings = share.next_power_of_two().ilog2();
        Cut { levels: self.levels.min(1 + halvings.div_ceil(self.halvings.max(1))), ..self }
    }

    /// Where run `run` of `0..total` begins, where `workers` share it.
    fn start(self, run: usize, workers: usize, total: usize) -> usize {
        let (level, i) = ((run / workers) as u32, run % workers);
        let left = total >> (self.halvings * level.min(self.levels - 1));
        match level + 1 {
            next if next > self.levels => total,
            next if next == self.levels => total - left + left * i / workers,
            _ => total - left + (left - (left >> self.halvings)) * i / workers,
        }
    }
}

/// Groups of workers at most; those of larger teams are larger.
const GROUPS: usize = 16;

/// Work that workers take in runs, see [`Cut`]. Each group of neighbours has its part of the work and a counter of its
/// own, because a counter that all write is passed from core to core; who finds its group's part taken helps the next.
#[derive(Default)]
pub struct Claims([Line<AtomicUsize>; GROUPS]);

/// Where one worker claims.
#[derive(Clone, Copy, Debug)]
pub struct Claimant {
    own: usize,   // its number
    taken: usize, // groups whose part is taken, its own first
    first: First,
}

/// Whose the runs of the first level are. All claimants of one work say the same, and all are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    /// Of whoever comes.
    Anybodys,
    /// A worker has one of its own, which it has not taken yet.
    Own,
    /// It has no more.
    Others,
}

impl Claimant {
    /// The worker of a number.
    pub fn new(own: usize) -> Self {
        Self { own, taken: 0, first: First::Anybodys }
    }

    /// The same, whose first run is known: each of the workers that share the work has one.
    pub fn with_own_run(own: usize) -> Self {
        Self { first: First::Own, ..Self::new(own) }
    }

    /// A helper of those.
    pub fn without_own_run(own: usize) -> Self {
        Self { first: First::Others, ..Self::new(own) }
    }
}

impl Claims {
    /// Nothing is taken any more.
    pub fn reset(&mut self) {
        self.0.iter_mut().for_each(|counter| *counter.0.get_mut() = 0);
    }

    /// The next run of `0..total`, possibly empty, where `workers` share it; `None`: all is taken.
    pub fn next(&self, claimant: &mut Claimant, cut: Cut, workers: usize, total: usize) -> Option<Range<usize>> {
        let (cut, groups) = (cut.of_share(total.div_ceil(workers)), workers.div_ceil(GROUP).min(GROUPS));
        let own = ((claimant.own % workers + 1) * groups - 1) / workers;
        while claimant.taken < groups {
            let group = (own + claimant.taken) % groups;
            let (from, to) = (workers * group / groups, workers * (group + 1) / groups);
            let (first, last) = (total * from / workers, total * to / workers);
            let start = |run| first + cut.start(run, to - from, last - first);
            if claimant.first == First::Own {
                claimant.first = First::Others;
                let run = claimant.own % workers - from;
                return Some(start(run)..start(run + 1));
            }
            let own_runs = if claimant.first == First::Anybodys { 0 } else { to - from };
            let (counter, runs) = (&self.0[group].0, (to - from) * cut.levels as usize - own_runs);
            // Looked at first: a counter that is only read stays in every core's cache.
            if counter.load(Relaxed) < runs {
                let run = counter.fetch_add(1, Relaxed);
                if run < runs {
                    return Some(start(run + own_runs)..start(run + own_runs + 1));
                }
            }
            claimant.taken += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_cover_everything_once_in_runs_that_shrink() {
        for (workers, total) in [(1, 1), (1, 1000), (2, 7), (3, 100), (8, 128), (8, 100_000), (5, 0)] {
            let (claims, mut claimant) = (Claims::default(), Claimant::new(0));
            let runs: Vec<_> =
                std::iter::from_fn(|| claims.next(&mut claimant, Cut::DEFAULT, workers, total)).collect();
            assert_eq!((runs[0].start, runs[runs.len() - 1].end), (0, total));
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
            let longest = |runs: &[Range<usize>]| runs.iter().map(|run| run.len()).max().unwrap_or(0);
            assert!(
                longest(&runs[runs.len() - workers..]) <= longest(&runs[..workers]).div_ceil(8).max(1),
                "{workers}, {total}"
            );
        }
    }

    #[test]
    fn own_runs_are_the_first_ones_and_nothing_is_left() {
        for (workers, total) in [(1, 9), (2, 7), (9, 5), (16, 100_000), (17, 1000), (200, 77_777)] {
            let claims = Claims::default();
            // Of one node of several, numbers begin anywhere; the last one comes late.
            let mut claimants: Vec<Claimant> = (3..3 + workers).map(Claimant::with_own_run).collect();
            let mut take = |i: usize| claims.next(&mut claimants[i], Cut::DEFAULT, workers, total);
            let mut runs: Vec<Range<usize>> = Vec::new();
            for i in 0..workers - 1 {
                runs.extend(take(i));
            }
            let mut helper = Claimant::without_own_run(5);
            runs.extend(std::iter::from_fn(|| claims.next(&mut helper, Cut::DEFAULT, workers, total)));
            runs.extend(take(workers - 1));
            assert!((0..workers).all(|i| take(i).is_none()));
            runs.sort_by_key(|run| (run.start, run.end));
            assert_eq!((runs[0].start, runs[runs.len() - 1].end), (0, total));
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start), "{workers}, {total}");
        }
    }

    #[test]
    fn groups_take_their_own_part_first_and_then_the_others() {
        for (workers, total) in [(9, 5), (16, 100_000), (17, 1000), (64, 128), (200, 77_777)] {
            let claims = Claims::default();
            let mut claimants: Vec<Claimant> = (0..workers).map(Claimant::new).collect();
            let mut take = |i: usize| claims.next(&mut claimants[i], Cut::DEFAULT, workers, total);
            // Everybody once: the first runs are each worker's own.
            let mut runs: Vec<Range<usize>> = (0..workers).filter_map(&mut take).collect();
            assert_eq!(runs.len(), workers);
            assert!(runs.windows(2).all(|pair| pair[0].start <= pair[1].start), "{workers}, {total}");
            // One worker does all the rest.
            runs.extend(std::iter::from_fn(|| take(workers / 2)));
            runs.sort_by_key(|run| (run.start, run.end));
            assert_eq!((runs[0].start, runs[runs.len() - 1].end), (0, total));
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start), "{workers}, {total}");
            assert!((0..workers).all(|i| take(i).is_none()));
        }
    }
}
