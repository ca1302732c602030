//! Work that workers take in runs, so that cores of unequal speed finish together.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
}

/// Work that workers take in runs, see [`Cut`].
#[derive(Default)]
#[repr(align(128))]
pub struct Claims(AtomicUsize);

impl Claims {
    /// Nothing is taken any more.
    pub fn reset(&mut self) {
        *self.0.get_mut() = 0;
    }

    /// The next run of `0..total`, possibly empty, where `workers` share it; `None`: all is taken.
    pub fn next(&self, cut: Cut, workers: usize, total: usize) -> Option<Range<usize>> {
        let run = self.0.fetch_add(1, Relaxed);
        let start = |run: usize| {
            let (level, i) = ((run / workers) as u32, run % workers);
            let left = total >> (cut.halvings * level.min(cut.levels - 1));
            match level + 1 {
                next if next > cut.levels => total,
                next if next == cut.levels => total - left + left * i / workers,
                _ => total - left + (left - (left >> cut.halvings)) * i / workers,
            }
        };
        (run < workers * cut.levels as usize).then(|| start(run)..start(run + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_cover_everything_once_in_runs_that_shrink() {
        for (workers, total) in [(1, 1), (1, 1000), (2, 7), (3, 100), (16, 128), (16, 100_000), (5, 0)] {
            let claims = Claims::default();
            let runs: Vec<_> = std::iter::from_fn(|| claims.next(Cut::DEFAULT, workers, total)).collect();
            assert_eq!((runs[0].start, runs[runs.len() - 1].end), (0, total));
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
            let longest = |runs: &[Range<usize>]| runs.iter().map(|run| run.len()).max().unwrap_or(0);
            assert!(
                longest(&runs[runs.len() - workers..]) <= longest(&runs[..workers]).div_ceil(8).max(1),
                "{workers}, {total}"
            );
        }
    }
}
