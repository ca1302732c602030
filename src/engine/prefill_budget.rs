//! How many tokens of prefill may join a step, so that decode keeps its rate.

use std::time::Duration;

/// Tokens of prefill in a step at least, however long they take: below, a prompt would hardly ever end.
const LEAST: usize = 32;

/// Tokens of prefill in a step, by how long steps with as many took while running.
#[derive(Debug)]
pub(super) struct PrefillBudget {
    limit: f64,                      // seconds between two tokens of decode
    seconds: [Option<f64>; BUCKETS], // of a step with about `LEAST << i` tokens of prefill
}

const BUCKETS: usize = 14;

impl PrefillBudget {
    /// Steps in which sequences decode shall not take longer than `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit: limit.as_secs_f64(), seconds: [None; BUCKETS] }
    }

    /// Tokens of prefill that the next step may have.
    ///
    /// An untried size is tried if twice the time of half that size keeps the limit.
    pub(super) fn tokens(&self) -> usize {
        LEAST << self.bucket()
    }

    fn bucket(&self) -> usize {
        let mut bucket = 0;
        while bucket + 1 < BUCKETS {
            let Some(expected) = self.seconds[bucket + 1].or_else(|| self.expected(bucket)) else { break };
            if expected > self.limit {
                break;
            }
            bucket += 1;
        }
        bucket
    }

    /// How long twice the tokens of `bucket` should take: at most twice as long, and less where even half of them took
    /// nearly as long, because all experts have to cross to a GPU once for any number of tokens, say.
    fn expected(&self, bucket: usize) -> Option<f64> {
        let seconds = self.seconds[bucket]?;
        let half = bucket.checked_sub(1).and_then(|half| self.seconds[half]).unwrap_or(0.0);
        Some(seconds + (2.0 * (seconds - half)).clamp(0.0, seconds))
    }

    /// Takes note of a step.
    pub(super) fn record(&mut self, tokens: usize, took: Duration) {
        let bucket = (tokens.next_power_of_two() / LEAST).max(1).ilog2() as usize;
        // A step with far fewer tokens than its bucket stands for would make it look fast.
        if bucket >= BUCKETS || 4 * tokens < 3 * (LEAST << bucket) {
            return;
        }
        // What was slow once is tried again by and by: the machine may have had other things to do.
        let next = self.bucket() + 1;
        if let Some(Some(slow)) = self.seconds.get_mut(next) {
            *slow *= 0.998;
        }
        let took = took.as_secs_f64();
        // Slower is believed at once, faster by and by.
        self.seconds[bucket] =
            Some(self.seconds[bucket].map_or(took, |old| if took > old { took } else { old + 0.25 * (took - old) }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of some hundred steps on a machine that takes `seconds` for a number of tokens.
    fn sizes(seconds: impl Fn(usize) -> f64, budget: &mut PrefillBudget) -> Vec<usize> {
        (0..1500)
            .map(|_| {
                let tokens = budget.tokens();
                budget.record(tokens, Duration::from_secs_f64(seconds(tokens)));
                tokens
            })
            .collect()
    }

    #[test]
    fn parts_grow_to_the_limit_and_no_further() {
        let mut budget = PrefillBudget::new(Duration::from_millis(500));
        let all = sizes(|n| 0.02 + n as f64 / 1000.0, &mut budget);
        assert_eq!((all[0], all[4]), (32, 256));
        assert!(all[4..].iter().all(|&n| n == 256 || n == 128), "{all:?}");
        assert!(all.iter().filter(|&&n| n == 256).count() > 1400, "{all:?}");
    }

    #[test]
    fn steps_whose_time_does_not_grow_are_filled() {
        let mut budget = PrefillBudget::new(Duration::from_millis(500));
        assert_eq!(*sizes(|_| 0.2, &mut budget).last().unwrap(), LEAST << (BUCKETS - 1));
        // Also when they take more than half of the limit, if smaller ones nearly do.
        let mut budget = PrefillBudget::new(Duration::from_millis(520));
        assert_eq!(*sizes(|n| (n as f64 / 1000.0).min(0.3), &mut budget).last().unwrap(), LEAST << (BUCKETS - 1));
    }

    #[test]
    fn a_slow_machine_still_reads_prompts() {
        let mut budget = PrefillBudget::new(Duration::from_millis(500));
        assert!(sizes(|n| n as f64, &mut budget).iter().all(|&n| n == LEAST));
    }

    #[test]
    fn a_slow_moment_passes() {
        let mut budget = PrefillBudget::new(Duration::from_millis(500));
        sizes(|n| n as f64 / 1000.0, &mut budget);
        sizes(|n| n as f64 / 100.0, &mut budget);
        assert_eq!(budget.tokens(), 32);
        assert_eq!(*sizes(|n| n as f64 / 1000.0, &mut budget).last().unwrap(), 256);
    }
}
