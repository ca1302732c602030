//! Where the time of dispatches goes, while somebody wants to know.
//!
//! ```text
//! hand-over   from worker 0's call until a worker begins
//! work        what it does itself
//! waiting     at barriers, and from its end until the last one's
//! ```
//!
//! Each is the mean over the workers of a dispatch, so the three add up to the time that the dispatch took.

use std::panic::Location;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use super::{State, Team};

/// Times of the dispatches of one name, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatchTimes {
    /// The file whose code dispatched them.
    pub name: &'static str,
    /// How many.
    pub dispatches: usize,
    /// Until the workers began.
    pub handover: f64,
    /// What they did.
    pub work: f64,
    /// What they waited for each other.
    pub waiting: f64,
}

/// What one worker tells of a dispatch, in nanoseconds since the team began.
#[derive(Default)]
pub(super) struct Times {
    pub(super) begun: AtomicU64,
    pub(super) waited: AtomicU64,
    pub(super) ended: AtomicU64,
}

impl State {
    pub(super) fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }
}

impl Team {
    /// Times dispatches from now on, or no more.
    pub fn timing(&self, on: bool) {
        self.take_times();
        self.state.timing.store(on, Relaxed);
    }

    /// Seconds since the last call, and what dispatches took of them, in the order of the first of each name.
    pub fn take_times(&self) -> (f64, Vec<DispatchTimes>) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, all) = std::mem::replace(&mut *times, (Instant::now(), Vec::new()));
        (since.elapsed().as_secs_f64(), all)
    }

    /// Counts a dispatch that began at `from`, all workers having ended.
    pub(super) fn count_times(&self, caller: &Location<'static>, from: u64) {
        let state = &*self.state;
        let (mut handover, mut work, mut waiting) = (0, 0, 0);
        let count = state.active.load(Relaxed) as usize;
        let now = state.now();
        for rank in 0..count {
            let times = &state.times[state.seat_of(rank)].0;
            let (begun, ended) = (times.begun.load(Relaxed), times.ended.load(Relaxed));
            let waited = times.waited.load(Relaxed);
            handover += begun.saturating_sub(from);
            work += (ended.saturating_sub(begun)).saturating_sub(waited);
            waiting += waited + now.saturating_sub(ended);
        }
        let seconds = |ns: u64| ns as f64 / 1e9 / count as f64;
        let name = name(caller.file());
        let (_, all) = &mut *self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|times| times.name == name).unwrap_or_else(|| {
            all.push(DispatchTimes { name, dispatches: 0, handover: 0.0, work: 0.0, waiting: 0.0 });
            all.len() - 1
        });
        let times = &mut all[at];
        times.dispatches += 1;
        times.handover += seconds(handover);
        times.work += seconds(work);
        times.waiting += seconds(waiting);
    }
}

/// What the code of a file is for, by its name: ops of a family are in one file.
fn name(file: &'static str) -> &'static str {
    let (room, file) = file.rsplit_once('/').unwrap_or(("", file));
    match room.ends_with("experts") {
        true => "experts",
        false => file.strip_suffix(".rs").unwrap_or(file),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::topology::Topology;

    #[test]
    fn the_parts_of_a_dispatch_add_up() {
        let team = Team::new(&Topology::read().worker_cpus(2)).unwrap();
        let work = || {
            team.run(&|worker| {
                if worker.index == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                worker.barrier();
            });
        };
        work();
        assert_eq!(team.take_times().1, []);
        team.timing(true);
        work();
        work();
        let (took, times) = team.take_times();
        let [DispatchTimes { name: "times", dispatches: 2, handover, work: worked, waiting }] = times[..] else {
            panic!("{times:?}")
        };
        let all = handover + worked + waiting;
        assert!(all <= took && all > 0.009 && worked > 0.004, "{times:?} of {took}");
        team.timing(false);
        work();
        assert_eq!(team.take_times().1, []);
    }

    #[test]
    fn ops_are_named_by_their_files() {
        assert_eq!(name("src/backend/cpu/attend.rs"), "attend");
        assert_eq!(name("src/experts/cpu.rs"), "experts");
    }
}
