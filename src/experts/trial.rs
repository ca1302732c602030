//! Which of several ways makes steps fastest, found by trying.

/// Steps in which the best way is kept.
const KEPT: usize = 1024;

/// All ways in turn for `STEPS` steps each, then the best one for many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial<const WAYS: usize, const STEPS: usize> {
    step: usize,
    seconds: [[f32; STEPS]; WAYS],
    best: usize,
}

impl<const WAYS: usize, const STEPS: usize> Trial<WAYS, STEPS> {
    /// The way of the next step.
    pub(super) fn way(&self) -> usize {
        if self.step < WAYS * STEPS { self.step % WAYS } else { self.best }
    }

    /// That step took so long. Where a trial ends with it: the seconds of each way's median step.
    pub(super) fn took(&mut self, seconds: f32) -> Option<[f32; WAYS]> {
        if self.step < WAYS * STEPS {
            self.seconds[self.step % WAYS][self.step / WAYS] = seconds;
        }
        self.step = (self.step + 1) % (WAYS * STEPS + KEPT);
        (self.step == WAYS * STEPS).then(|| {
            let median = |mut all: [f32; STEPS]| *all.select_nth_unstable_by(STEPS / 2, f32::total_cmp).1;
            self.seconds.map(median)
        })
    }

    /// The best way, after a trial.
    pub(super) fn keep(&mut self, best: usize) {
        self.best = best;
    }
}

impl<const WAYS: usize, const STEPS: usize> Default for Trial<WAYS, STEPS> {
    fn default() -> Self {
        Self { step: 0, seconds: [[0.0; STEPS]; WAYS], best: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 16;

    #[test]
    fn the_best_way_is_kept_until_the_next_trial() {
        let mut trial = Trial::<3, STEPS>::default();
        for seconds in [[1.0, 0.8, 0.9], [1.0, 1.1, 0.9], [0.7, 1.0, 0.9]] {
            let mut ended = None;
            for step in 0..3 * STEPS {
                assert_eq!(trial.way(), step % 3);
                // One step in a while takes long.
                let took = if step % 7 == 0 { 5.0 } else { seconds[trial.way()] };
                ended = trial.took(took);
                assert_eq!(ended.is_some(), step + 1 == 3 * STEPS);
            }
            assert_eq!(ended, Some(seconds));
            let best = (0..3).min_by(|&a, &b| seconds[a].total_cmp(&seconds[b])).unwrap();
            trial.keep(best);
            for _ in 0..KEPT {
                assert_eq!((trial.way(), trial.took(9.0)), (best, None));
            }
        }
        trial.took(1.0);
        assert_eq!(trial.way(), 1);
    }
}
