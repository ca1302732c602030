//! Who of a team works: a worker whose core another program uses holds up all others, so it rests for a while.
//!
//! Each worker tells how long it wanted to run and did not, as the kernel counts it. Worker 0 looks at that between
//! dispatches. A worker that is denied more of its time than its absence would cost the team is left out, for
//! half a second at first, then for longer, up to four; at most half of the team rests. Where worker 0's own core is
//! taken, it moves to the core of another, which rests in its place. Seats that take no part (`crews`) are taken first:
//! one of them comes for each worker that rests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::crews::Tried;
use super::{Crews, Line, Post, RESTING, State, pin};
use crate::machine::topology::Seat;

/// How often worker 0 looks, and each worker reads its clock.
const LOOK: Duration = Duration::from_millis(5);
/// Time a worker must have wanted before its share of it says something: a few time slices of the kernel.
const WINDOW_NS: u64 = 15_000_000;
/// The first and the longest rest. A return to a core that is still taken costs one window.
const REST: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));

/// Nanoseconds run, nanoseconds waited for the core, slices: of the thread that reads it.
pub(crate) const SCHEDSTAT: &str = "/proc/thread-self/schedstat";

/// What the kernel counts of one thread.
pub(super) struct Clock {
    schedstat: Option<File>, // None: this kernel does not tell, and no worker ever rests
    next: Instant,
}

impl Clock {
    pub(super) fn of_this_thread() -> Self {
        Self { schedstat: File::open(SCHEDSTAT).ok(), next: Instant::now() }
    }

    /// Puts the clock on the thread's post, if it is time to.
    pub(super) fn tell(&mut self, post: &Post) {
        let Some(file) = &self.schedstat else { return };
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + LOOK;
        let mut text = [0; 64];
        let Ok(len) = file.read_at(&mut text, 0) else { return };
        let mut numbers =
            std::str::from_utf8(&text[..len]).unwrap_or_default().split_whitespace().map(str::parse::<u64>);
        if let (Some(Ok(ran)), Some(Ok(waited))) = (numbers.next(), numbers.next()) {
            post.denied_ns.store(waited, Relaxed);
            post.wanted_ns.store(ran + waited, Relaxed);
        }
    }
}

/// One seat, as worker 0 remembers it.
#[derive(Clone)]
struct SeatRecord {
    wanted_ns: u64, // when it was last judged
    denied_ns: u64,
    since: Instant, // when it last came back, or went to rest
    rest: Duration, // its next one
    resting: bool,
    takes_part: bool,
}

pub(super) struct Roster {
    next_look: Instant,
    clock: Option<Clock>, // of the thread that owns the team, once it is pinned
    records: Vec<SeatRecord>,
    caller_at: usize, // the seat whose core worker 0 is on
    pub(super) crews: Crews,
    pub(super) tried: Option<Tried>,
    pub(super) order: Vec<usize>, // in which seats are taken, the caller's first
    wanted: usize,                // workers of the next dispatch
    late: bool,                   // one that should take part has not noticed yet that it did not
}

impl Roster {
    pub(super) fn new(seats: &[Seat]) -> Self {
        let now = Instant::now();
        let record =
            SeatRecord { wanted_ns: 0, denied_ns: 0, since: now, rest: REST.0, resting: false, takes_part: true };
        let mut roster = Self {
            next_look: now,
            clock: None,
            records: vec![record; seats.len()],
            caller_at: 0,
            crews: Crews::all(seats.len()),
            tried: None,
            order: Vec::new(),
            wanted: seats.len(),
            late: false,
        };
        roster.set_crews(roster.crews, seats);
        roster
    }

    pub(super) fn set_crews(&mut self, crews: Crews, seats: &[Seat]) {
        let (all, stride) = (seats.len(), crews.stride.max(1));
        self.crews = Crews { few: crews.few.clamp(1, all), many: crews.many.clamp(1, all), stride };
        self.order = (0..all).collect();
        let place = |cpu: usize| (cpu % stride + stride - seats[0].cpu % stride) % stride;
        self.order.sort_by_key(|&seat| (seat != 0, place(seats[seat].cpu), seats[seat].turn));
        self.late = true;
    }

    /// As many workers take part from the next dispatch on.
    pub(super) fn want(&mut self, state: &State, workers: usize) {
        if workers != self.wanted || self.late {
            self.wanted = workers;
            self.assign(state);
        }
    }

    /// Decides who takes part. Called while all workers wait.
    fn assign(&mut self, state: &State) {
        let mut left = self.wanted;
        for &seat in &self.order {
            let record = &mut self.records[seat];
            record.takes_part = !record.resting && left > 0;
            left -= usize::from(record.takes_part);
        }
        self.late = false;
        let step = state.start.0.get();
        for (record, Line(post)) in self.records.iter_mut().zip(&state.posts).skip(1) {
            match (record.takes_part, post.rank.load(Relaxed) == RESTING) {
                (false, _) => post.rank.store(RESTING, Relaxed),
                (true, false) => {}
                (true, true) if post.resting.get() == 0 => self.late = true,
                (true, true) => {
                    (record.wanted_ns, record.denied_ns) = (post.wanted_ns.load(Relaxed), post.denied_ns.load(Relaxed));
                    post.rank.store(0, Relaxed);
                    post.resume.store(step, Relaxed);
                }
            }
        }
        state.rank();
        for Line(post) in &state.posts[1..] {
            if post.rank.load(Relaxed) != RESTING && post.resting.get() == 1 {
                post.resting.set(0);
            }
        }
    }

    /// The calling thread is worker 0 from now on, on the first seat. What was counted before, with a caller that got
    /// in the way of the others, is forgotten.
    pub(super) fn own_caller(&mut self, state: &State) {
        let mut clock = Clock::of_this_thread();
        clock.tell(&state.posts[0].0);
        self.clock = Some(clock);
        self.caller_at = 0;
        for (record, Line(post)) in self.records.iter_mut().zip(&state.posts) {
            (record.wanted_ns, record.denied_ns) = (post.wanted_ns.load(Relaxed), post.denied_ns.load(Relaxed));
        }
    }

    /// Between two dispatches: who comes back, and who rests.
    pub(super) fn look(&mut self, state: &State, seats: &[Seat]) {
        if self.late {
            self.assign(state);
        }
        // A caller that is not pinned may be what holds a worker up.
        let Some(clock) = &mut self.clock else { return };
        let now = Instant::now();
        if now < self.next_look || seats.len() == 1 {
            return;
        }
        self.next_look = now + LOOK;
        clock.tell(&state.posts[0].0);
        for seat in 1..seats.len() {
            let record = &self.records[seat];
            if record.resting && now >= record.since + record.rest {
                self.bring_back(state, seats, seat, now);
            }
        }
        for seat in 0..seats.len() {
            if self.is_held_up(state, seat, now) {
                self.relieve(state, seats, seat, now);
            }
        }
    }

    /// Whether a working seat was denied more than its absence would cost.
    fn is_held_up(&mut self, state: &State, seat: usize, now: Instant) -> bool {
        let (post, working) = (&state.posts[seat].0, state.active.load(Relaxed));
        let record = &mut self.records[seat];
        let (wanted, denied) = (post.wanted_ns.load(Relaxed), post.denied_ns.load(Relaxed));
        if !record.takes_part || wanted.saturating_sub(record.wanted_ns) < WINDOW_NS {
            return false;
        }
        let share = denied.saturating_sub(record.denied_ns) as f64 / (wanted - record.wanted_ns) as f64;
        (record.wanted_ns, record.denied_ns) = (wanted, denied);
        let held_up = share > (1.0 / f64::from(working)).clamp(0.05, 0.4);
        if !held_up && now > record.since + REST.0 {
            record.rest = REST.0;
        }
        held_up
    }

    /// Lets a seat rest; in place of worker 0, another whose core it takes over.
    fn relieve(&mut self, state: &State, seats: &[Seat], seat: usize, now: Instant) {
        if 2 * (self.resting() + 1) > seats.len() {
            // A resting worker's core may be free again by now.
            let longest = (1..seats.len())
                .filter(|&other| self.records[other].resting)
                .min_by_key(|&other| self.records[other].since);
            if let Some(other) = longest.filter(|&other| now > self.records[other].since + REST.0) {
                self.bring_back(state, seats, other, now);
            }
            return;
        }
        let mut rests = seat;
        if seat == 0 {
            let far = |other: usize| seats[other].node != seats[self.caller_at].node;
            let others = (1..seats.len()).rev().filter(|&other| !self.records[other].resting);
            let Some(other) = others.min_by_key(|&other| (self.records[other].takes_part, far(other))) else { return };
            if pin(seats[other].cpu).is_err() {
                return;
            }
            self.caller_at = other;
            rests = other;
        }
        let record = &mut self.records[rests];
        let again = now < record.since + 2 * REST.0;
        record.rest = if again { (2 * record.rest).min(REST.1) } else { REST.0 };
        (record.resting, record.since) = (true, now);
        self.assign(state);
    }

    fn bring_back(&mut self, state: &State, seats: &[Seat], seat: usize, now: Instant) {
        let post = &state.posts[seat].0;
        // One that has not even noticed that it should rest comes back later.
        if post.resting.get() == 0 || (self.caller_at == seat && pin(seats[0].cpu).is_err()) {
            return;
        }
        if self.caller_at == seat {
            self.caller_at = 0;
        }
        let record = &mut self.records[seat];
        (record.resting, record.since) = (false, now);
        self.assign(state);
    }

    /// Seats that rest.
    pub(super) fn resting(&self) -> usize {
        self.records.iter().filter(|record| record.resting).count()
    }
}

impl State {
    /// Numbers the working seats. Called while all of them wait.
    pub(super) fn rank(&self) {
        self.per_node.iter().for_each(|count| count.store(0, Relaxed));
        let mut working = 0;
        for (seat, Line(Post { rank, node, .. })) in self.posts.iter().enumerate() {
            if rank.load(Relaxed) != RESTING {
                rank.store(working, Relaxed);
                self.seats[working as usize].store(seat as u32, Relaxed);
                self.per_node[*node].fetch_add(1, Relaxed);
                working += 1;
            }
        }
        self.active.store(working, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::Team;
    use super::*;
    use crate::machine::topology::Topology;

    #[test]
    fn whoever_rests_is_left_out_and_comes_back() {
        let seats: Vec<Seat> = Topology::read()
            .worker_cpus(4)
            .iter()
            .enumerate()
            .map(|(i, &cpu)| Seat { cpu, node: i / 2, turn: i })
            .collect();
        let team = Team::on_nodes(&seats).unwrap();
        let run = |expected: &[usize]| {
            for _ in 0..50 {
                let ran: Vec<AtomicBool> = seats.iter().map(|_| AtomicBool::new(false)).collect();
                team.run(&|worker| {
                    assert_eq!(worker.count, expected.len());
                    assert_eq!(expected[worker.index], worker.seat);
                    assert_eq!(worker.count_on(0) + worker.count_on(1), worker.count);
                    ran[worker.seat].store(true, Relaxed);
                    worker.barrier();
                    assert!(expected.iter().all(|&seat| ran[seat].load(Relaxed)));
                    worker.barrier();
                });
                let seats: Vec<usize> = (0..4).filter(|&seat| ran[seat].load(Relaxed)).collect();
                assert_eq!(seats, expected);
            }
        };
        // The caller is not pinned, so only this test moves a worker.
        let change = |change: &dyn Fn(&mut Roster)| {
            change(&mut team.roster.lock().unwrap());
        };
        // However long a dispatch takes, nobody has rested for long enough to come back by being longest.
        let now = Instant::now();
        let rest = |seat| change(&|roster| roster.relieve(&team.state, &team.seats, seat, now));
        let back = |seat: usize| {
            while team.state.posts[seat].0.resting.get() == 0 {
                std::thread::yield_now();
            }
            change(&|roster| roster.bring_back(&team.state, &team.seats, seat, now));
        };
        for _ in 0..20 {
            rest(2);
            run(&[0, 1, 3]);
            rest(1);
            run(&[0, 3]);
            rest(3); // more than half: refused
            run(&[0, 3]);
            back(2);
            run(&[0, 2, 3]);
            back(1);
            run(&[0, 1, 2, 3]);
        }
        // Dropped while a worker rests, or is about to.
        rest(2);
        run(&[0, 1, 3]);
        rest(3);
    }

    #[test]
    fn rests_grow_while_they_do_not_help() {
        let team = Team::new(&Topology::read().worker_cpus(2)).unwrap();
        let mut roster = Roster::new(&team.seats);
        let mut now = Instant::now() + Duration::from_secs(10);
        for expected in [500, 1000, 2000, 4000, 4000] {
            roster.relieve(&team.state, &team.seats, 1, now);
            assert_eq!(roster.records[1].rest, Duration::from_millis(expected));
            now += roster.records[1].rest;
            (roster.records[1].resting, roster.records[1].since) = (false, now);
        }
        roster.relieve(&team.state, &team.seats, 1, now + Duration::from_secs(60));
        assert_eq!(roster.records[1].rest, REST.0);
    }

    #[test]
    fn a_core_that_somebody_else_uses_is_left() {
        let cpus = Topology::read().worker_cpus(2);
        if cpus[0] == cpus[1] || File::open(SCHEDSTAT).is_err() {
            eprintln!(
                "skipped: a_core_that_somebody_else_uses_is_left: this needs two CPUs and a kernel that counts waiting"
            );
            return;
        }
        // On worker 1's core, then on the caller's.
        for taken in [cpus[1], cpus[0]] {
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    pin(taken).unwrap();
                    while !stop.load(Relaxed) {
                        std::hint::spin_loop();
                    }
                });
                let team = Team::new(&cpus).unwrap();
                team.pin_caller().unwrap();
                let start = Instant::now();
                let mut left = false;
                while !left && start.elapsed() < Duration::from_secs(30) {
                    team.run(&|_| {
                        let from = Instant::now();
                        while from.elapsed() < Duration::from_micros(500) {}
                    });
                    // On a loaded machine the other core is left now and then as well: some time it is this one.
                    let roster = team.roster.lock().unwrap();
                    left = roster.resting() == 1 && cpus[roster.caller_at] != taken;
                }
                stop.store(true, Relaxed);
                assert!(left, "CPU {taken} was never left");
            });
        }
    }
}
