//! How many of a team take part: memory is read as fast as it can be by a part of the cores, arithmetic wants all.
//!
//! The others sleep, each on a line of its own: no dispatch wakes them or waits for them.

use std::sync::PoisonError;

use super::Team;

/// Rows of a pass up to which reading weights takes longer than arithmetic with them.
const FEW_ROWS: usize = 8;

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

    /// Lets those take part in the next dispatches that a pass of `rows` rows wants.
    pub fn fit(&self, rows: usize) {
        let mut roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
        let Crews { few, many, .. } = roster.crews;
        roster.want(&self.state, if rows <= FEW_ROWS { few } else { many });
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
    fn every_second_cpu_comes_first() {
        let cpu = Topology::read().worker_cpus(1)[0];
        let seats: Vec<_> = (0..6).map(|i| crate::machine::topology::Seat { cpu: cpu + i, node: 0, turn: i }).collect();
        let mut roster = super::super::Roster::new(&seats);
        roster.set_crews(Crews { few: 3, many: 6, stride: 2 }, &seats);
        assert_eq!(roster.order, [0, 2, 4, 1, 3, 5]);
    }
}
