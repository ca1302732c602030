//! How many of a team take part: memory is read as fast as it can be by a part of the cores, arithmetic wants all.
//!
//! What was best when it was measured need not stay so: neighbours come and go. So passes of few rows, as decode has
//! them, try some workers more and some less from time to time.
//!
//! The others sleep, each on a line of its own: no dispatch wakes them or waits for them.

use std::sync::PoisonError;

use super::Team;
use crate::machine::trial::Climb;

/// Rows of a pass up to which reading weights takes longer than arithmetic with them.
const FEW_ROWS: usize = 8;

/// Parts of a team that are compared.
const PARTS: [(usize, usize); 6] = [(1, 8), (1, 4), (3, 8), (1, 2), (3, 4), (1, 1)];

/// Numbers of workers of a team of `all` that are compared, ascending; some may be equal.
pub fn sizes_of(all: usize) -> [usize; PARTS.len()] {
    PARTS.map(|(part, of)| (all * part).div_ceil(of))
}

/// The next smaller and the next larger one than `workers`.
fn neighbours(workers: usize, all: usize) -> [usize; 2] {
    let sizes = sizes_of(all).into_iter();
    let below = sizes.clone().rfind(|&size| size < workers);
    let above = sizes.clone().find(|&size| size > workers);
    [below, above].map(|size| size.unwrap_or(workers))
}

/// How many workers passes of one number of rows have: each as long as other trials of a step take to come round.
type Crew = Climb<3, 16, 8>;

/// The crews of passes of few rows while they are tried.
#[derive(Clone, Copy)]
pub(super) struct Tried([Crew; FEW_ROWS]); // of 1 row, 2, ..

/// How many workers take part in passes, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crews {
    /// Workers of a pass of few rows, as in decode.
    pub few: usize,
    /// Workers of a pass of many, as in prefill.
    pub many: usize,
    /// 2: every second CPU comes first, because neighbours are threads of one core; 1: as their turns say.
    pub stride: usize,
}

impl Crews {
    /// All of a team of `threads`, always.
    pub fn all(threads: usize) -> Self {
        Self { few: threads, many: threads, stride: 1 }
    }
}

impl Team {
    /// Who takes part from the next [`fit`](Team::fit) on.
    pub fn set_crews(&self, crews: Crews) {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner).set_crews(crews, &self.seats);
    }

    /// Who takes part.
    pub fn crews(&self) -> Crews {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner).crews
    }

    /// Lets passes of few rows try other crews from now on, as [`took`](Team::took) tells.
    pub fn try_crews(&self) {
        let mut roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
        roster.tried = Some(Tried([Crew::new(roster.crews.few); FEW_ROWS]));
    }

    /// Lets those take part in the next dispatches that a pass of `rows` rows wants.
    pub fn fit(&self, rows: usize) {
        let mut roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
        let Crews { few, many, .. } = roster.crews;
        let tried = roster.tried.as_ref().and_then(|Tried(crews)| crews.get(rows.wrapping_sub(1)));
        let workers = match tried {
            Some(crew) => crew.next(|workers| neighbours(workers, self.seats.len())),
            None if rows <= FEW_ROWS => few,
            None => many,
        };
        roster.want(&self.state, workers);
    }

    /// A pass of `rows` rows took so long with those that it [wanted](Team::fit).
    pub fn took(&self, rows: usize, seconds: f32) {
        let mut roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Tried(crews)) = &mut roster.tried
            && let Some(crew) = crews.get_mut(rows.wrapping_sub(1))
        {
            crew.took(seconds, |workers| neighbours(workers, self.seats.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;
    use crate::machine::topology::Topology;

    #[test]
    fn a_pass_of_few_rows_has_a_crew_of_its_own() {
        let cpus = Topology::read().worker_cpus(6);
        let team = Team::new(&cpus).unwrap();
        team.set_crews(Crews { few: 2, many: 5, stride: 1 });
        let run = || {
            let (ran, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
            team.run(&|worker| {
                worker.barrier();
                ran.fetch_add(1 << worker.seat, Relaxed);
                count.store(worker.count, Relaxed);
            });
            assert_eq!(ran.load(Relaxed).count_ones() as usize, count.load(Relaxed));
            ran.into_inner()
        };
        for _ in 0..20 {
            team.fit(1);
            assert_eq!(run(), 0b11);
            assert_eq!(team.working(), 2);
            // Whoever has not gone to sleep yet comes a dispatch later.
            team.fit(100);
            while run() != 0b11111 {}
            assert_eq!(team.working(), 5);
        }
    }

    #[test]
    fn numbers_of_workers_have_neighbours() {
        assert_eq!([16, 12, 2].map(|n| neighbours(n, 16)), [[12, 16], [8, 16], [2, 4]]);
        assert_eq!([1, 2, 4].map(|n| neighbours(n, 4)), [[1, 2], [1, 3], [3, 4]]);
        assert_eq!(neighbours(1, 1), [1, 1]);
    }

    #[test]
    fn passes_of_few_rows_try_crews() {
        let team = Team::new(&Topology::read().worker_cpus(4)).unwrap();
        team.set_crews(Crews { few: 2, many: 4, stride: 1 });
        let mut seen = Vec::new();
        let mut pass = |rows: usize| {
            team.fit(rows);
            // Who has not gone to sleep yet when it is wanted again comes a dispatch later.
            team.run(&|_| std::thread::sleep(std::time::Duration::from_micros(200)));
            seen.push(team.working());
            team.took(rows, 1.0);
        };
        (0..40).for_each(|_| pass(1));
        team.try_crews();
        (0..200).for_each(|_| pass(1));
        (0..20).for_each(|_| pass(9));
        assert!(seen[..40].iter().all(|&working| working == 2));
        assert!([1, 2, 3].iter().all(|n| seen[40..240].contains(n)) && !seen[40..240].contains(&4), "{seen:?}");
        assert!(seen[240..].contains(&4), "{seen:?}");
    }

    #[test]
    fn every_second_cpu_comes_first() {
        let cpu = Topology::read().worker_cpus(1)[0];
        let seats: Vec<_> = (0..6).map(|i| crate::machine::topology::Seat { cpu: cpu + i, node: 0, turn: i }).collect();
        let mut roster = super::super::Roster::new(&seats);
        roster.set_crews(Crews { few: 3, many: 6, stride: 2 }, &seats);
        assert_eq!(roster.order, [0, 2, 4, 1, 3, 5]);
    }
}
