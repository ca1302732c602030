//! A team of pinned threads that runs one closure on all of them: spins briefly for the next, then sleeps.
//!
//! ```text
//! gate      a word that threads wait on
//! claims    work that workers take in runs
//! shared    one slice of which each worker writes its own parts
//! times     where the time of dispatches goes
//! crews     how many workers take part
//! roster    which workers rest
//! ```
//!
//! A decode step dispatches some hundred times a second per layer, so waking must cost nothing while work is near and
//! nothing may burn while it is not. Nothing here allocates after [`Team::new`].
//!
//! ```text
//! dispatch  worker 0 writes `start`; the others spin on that one line
//! barrier   each worker writes its own line; the first of each eight gathers those of its group, worker 0 those of the
//!           firsts; it writes `barrier`, on which they spin, and each of them a line for its group
//! end       gathered in the same way
//! ```
//!
//! No line is written by two threads and few are read by more than a group, so a barrier costs some crossings of the
//! processor, not one per worker. A team waits for its slowest: workers whose core another program uses are sent to
//! rest (`roster`).
#![allow(unsafe_code)]

mod claims;
mod crews;
mod gate;
mod roster;
mod shared;
mod times;

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::machine::topology::Seat;
use crate::{Error, Result};

pub use claims::{Claimant, Claims, Cut};
pub use crews::{Crews, sizes_of};
pub(crate) use gate::{AWAKE, Gate};
pub(crate) use roster::SCHEDSTAT;
use roster::{Clock, Roster};
pub use shared::Shared;
pub use times::DispatchTimes;
use times::Times;

/// The rank of a worker that rests.
const RESTING: u32 = u32::MAX;

/// Workers whose arrival the first of them gathers, and who claim together.
pub const GROUP: usize = 8;

type Work = dyn Fn(&Worker<'_>) + Sync;

/// What the threads of a team share. Each word that a thread spins on has its own cache lines.
struct State {
    start: Line<Gate>,         // one step per dispatch
    barrier: Line<Gate>,       // one step per barrier passed
    passed: Box<[Line<Gate>]>, // [groups]: the value of `barrier`, for those of the group
    posts: Box<[Line<Post>]>,
    seats: Box<[AtomicU32]>,    // of each rank of the running dispatch
    active: AtomicU32,          // workers of it
    per_node: Box<[AtomicU32]>, // of them, on each node
    work: UnsafeCell<Option<*const Work>>,
    stop: AtomicBool,
    broken: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    timing: AtomicBool,
    times: Box<[Line<Times>]>,
    epoch: Instant,
}

/// What one worker tells the others; only `rank`, `resume` and the end of `resting` are written by worker 0.
struct Post {
    arrived: Gate,     // the value of `barrier` that lets it pass
    done: Gate,        // the dispatch that it finished
    resting: Gate,     // 1: it waits here until it is 0
    resume: AtomicU32, // the dispatch before the one it comes back for
    rank: AtomicU32,
    node: usize,
    wanted_ns: AtomicU64, // time that it ran or would have run
    denied_ns: AtomicU64, // of it, time that it would have run and something else did
}

/// What has cache lines of its own: threads that use others do not disturb it.
#[derive(Default)]
#[repr(align(128))]
pub struct Line<T>(pub T);

// SAFETY: `work` is written only by the dispatching thread while every worker waits at `start` or rests, and read only
// between the step of `start` and the worker's `done`, each a release that the other side acquires.
unsafe impl Sync for State {}
// SAFETY: as above; the pointer is dereferenced only while `run` keeps the closure alive.
unsafe impl Send for State {}

/// The panic of a worker whose team mate panicked: only ends it, the first panic is what `run` hands on.
struct BrokenBarrier;

impl State {
    /// Runs the dispatched closure as the worker of a seat.
    fn work(&self, seat: usize) {
        // SAFETY: between the step of `start` and this worker's `done` no thread writes `work`, and `run` keeps the
        // closure alive.
        let Some(work) = (unsafe { (*self.work.get()).map(|work| &*work) }) else { return };
        let post = &self.posts[seat].0;
        let index = post.rank.load(Relaxed) as usize;
        let worker = Worker { index, count: self.active.load(Relaxed) as usize, node: post.node, seat, state: self };
        let times = self.timing.load(Relaxed).then_some(&self.times[seat].0);
        if let Some(times) = times {
            times.waited.store(0, Relaxed);
            times.begun.store(self.now(), Relaxed);
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(&worker))) {
            if !payload.is::<BrokenBarrier>() {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
            self.broken.store(true, SeqCst);
            // Threads that wait must not wait for ever: worker 0 for this worker's arrival, all others for worker 0.
            match seat {
                0 => drop(self.barrier.0.step()),
                _ => {
                    let next = self.barrier.0.get().wrapping_add(1);
                    self.passed[index / GROUP].0.set(next);
                    post.arrived.set(next);
                }
            }
        }
        if let Some(times) = times {
            times.ended.store(self.now(), Relaxed);
        }
    }

    fn seat_of(&self, rank: usize) -> usize {
        self.seats[rank].load(Relaxed) as usize
    }

    /// Those whom a worker gathers: the rest of its group where it is the first of that, and as worker 0 the firsts.
    fn gathered(&self, rank: usize) -> impl Iterator<Item = &Post> {
        let count = self.active.load(Relaxed) as usize;
        let group = if rank.is_multiple_of(GROUP) { rank + 1..count.min(rank + GROUP) } else { 0..0 };
        let firsts = if rank == 0 { GROUP..count } else { 0..0 };
        group.chain(firsts.step_by(GROUP)).map(|rank| &self.posts[self.seat_of(rank)].0)
    }

    /// A worker's thread: one dispatch after the other until the team is dropped.
    fn serve(&self, seat: usize, mut step: u32, mut clock: Clock) {
        let post = &self.posts[seat].0;
        loop {
            self.start.0.wait(|start| start != step);
            step = self.start.0.get();
            if self.stop.load(SeqCst) {
                return;
            }
            if post.rank.load(Relaxed) == RESTING {
                post.resting.set(1);
                // Looked at after the word is set: the thread that stops the team clears it afterwards.
                if self.stop.load(SeqCst) {
                    return;
                }
                post.resting.wait(|resting| resting == 0);
                step = post.resume.load(Relaxed);
                continue;
            }
            self.work(seat);
            clock.tell(post);
            self.gathered(post.rank.load(Relaxed) as usize).for_each(|post| post.done.wait(|done| done == step));
            post.done.set(step);
        }
    }
}

/// One thread's place in a running team.
pub struct Worker<'a> {
    /// From 0 to `count - 1`; 0 is the thread that called [`Team::run`].
    pub index: usize,
    /// Workers of this dispatch: all of the team but those that rest.
    pub count: usize,
    /// Its NUMA node, as an index into [`Team::nodes`].
    pub node: usize,
    seat: usize,
    state: &'a State,
}

impl Worker<'_> {
    /// Waits until all workers are here; what they wrote before is then visible to all.
    pub fn barrier(&self) {
        self.timed(|| self.pass());
    }

    /// Waits until `is_true`, which other workers of this dispatch make so. Meanwhile it calls `meanwhile` until that
    /// returns false. Who waits for long sleeps in between, so as not to hold up a worker whose core was taken away.
    #[inline]
    pub fn wait_doing(&self, is_true: impl Fn() -> bool, mut meanwhile: impl FnMut() -> bool) {
        /// As long as work is likely to be near: some tens of microseconds, as at a barrier.
        const SPINS: u32 = 1 << 10;
        const NAP: Duration = Duration::from_micros(20);
        if is_true() {
            return;
        }
        self.timed(|| {
            let (mut is_idle, mut spins) = (false, 0);
            while !is_true() {
                self.unwind_if_broken();
                is_idle = is_idle || !meanwhile();
                if is_idle {
                    spins += 1;
                    std::hint::spin_loop();
                }
                if spins > SPINS {
                    std::thread::sleep(NAP);
                }
            }
        });
    }

    /// Counts the time of `wait`, where times are asked for.
    #[inline]
    fn timed(&self, wait: impl FnOnce()) {
        if !self.state.timing.load(Relaxed) {
            return wait();
        }
        let from = self.state.now();
        wait();
        self.state.times[self.seat].0.waited.fetch_add(self.state.now() - from, Relaxed);
    }

    #[inline]
    fn pass(&self) {
        let state = self.state;
        let step = state.barrier.0.get();
        let next = step.wrapping_add(1);
        // Read after `step`: a panic that this misses also changes the step.
        self.unwind_if_broken();
        // Also where a panic moved the steps on in between: whoever panics writes the lines that others wait for.
        let reached = |now: u32| now == next || state.broken.load(SeqCst);
        state.gathered(self.index).for_each(|post| post.arrived.wait(reached));
        if self.index == 0 {
            // Before the step: unwinding makes it.
            self.unwind_if_broken();
            return state.barrier.0.set(next);
        }
        state.posts[self.seat].0.arrived.set(next);
        let (group, place) = (self.index / GROUP, self.index % GROUP);
        if group > 0 && place > 0 {
            state.passed[group].0.wait(reached);
        } else {
            state.barrier.0.wait(|now| now != step);
        }
        if group > 0 && place == 0 {
            state.passed[group].0.set(next);
        }
        self.unwind_if_broken();
    }

    fn unwind_if_broken(&self) {
        if self.state.broken.load(SeqCst) {
            resume_unwind(Box::new(BrokenBarrier));
        }
    }

    /// This worker's even, contiguous share of `0..n`.
    pub fn share(&self, n: usize) -> Range<usize> {
        n * self.index / self.count..n * (self.index + 1) / self.count
    }

    /// Workers of this dispatch on a node of [`Team::nodes`].
    pub fn count_on(&self, node: usize) -> usize {
        self.state.per_node[node].load(Relaxed) as usize
    }
}

/// Pinned threads, and the caller as worker 0.
pub struct Team {
    state: Arc<State>,
    seats: Vec<Seat>,
    nodes: Vec<usize>,
    roster: Mutex<Roster>,                       // held while the team runs
    times: Mutex<(Instant, Vec<DispatchTimes>)>, // since when
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// One worker per entry of `cpus`, pinned to it, as if all were on one node. As [`Team::on_nodes`] otherwise.
    pub fn new(cpus: &[usize]) -> Result<Team> {
        let seats = cpus.iter().enumerate().map(|(turn, &cpu)| Seat { cpu, node: 0, turn });
        Self::on_nodes(&seats.collect::<Vec<_>>())
    }

    /// One worker per seat, pinned to it; worker 0 is the thread that calls [`run`](Team::run), see
    /// [`pin_caller`](Team::pin_caller).
    ///
    /// Seats of one node stand together; a CPU may be listed twice. Errors: there are no seats, or a CPU is not this
    /// process's to use.
    pub fn on_nodes(seats: &[Seat]) -> Result<Team> {
        if seats.is_empty() {
            return Err(Error::Invalid("a team needs at least one thread: raise --threads".into()));
        }
        let mut nodes: Vec<usize> = seats.iter().map(|seat| seat.node).collect();
        nodes.dedup();
        let post = |rank: usize, seat: &Seat| {
            Line(Post {
                arrived: Gate::new(0),
                done: Gate::new(0),
                resting: Gate::new(0),
                resume: AtomicU32::new(0),
                rank: AtomicU32::new(rank as u32),
                node: nodes.iter().position(|&node| node == seat.node).expect("every seat's node was just listed"),
                wanted_ns: AtomicU64::new(0),
                denied_ns: AtomicU64::new(0),
            })
        };
        let state = Arc::new(State {
            start: Line(Gate::new(0)),
            barrier: Line(Gate::new(0)),
            passed: seats.chunks(GROUP).map(|_| Line(Gate::new(0))).collect(),
            seats: seats.iter().map(|_| AtomicU32::new(0)).collect(),
            posts: seats.iter().enumerate().map(|(rank, seat)| post(rank, seat)).collect(),
            active: AtomicU32::new(0),
            per_node: nodes.iter().map(|_| AtomicU32::new(0)).collect(),
            work: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            panic: Mutex::new(None),
            timing: AtomicBool::new(false),
            times: seats.iter().map(|_| Line::default()).collect(),
            epoch: Instant::now(),
        });
        let roster = Mutex::new(Roster::new(seats));
        let times = Mutex::new((Instant::now(), Vec::new()));
        let mut team = Team { state, seats: seats.to_vec(), nodes, roster, times, threads: Vec::new() };
        team.state.rank();
        for (seat, &Seat { cpu, .. }) in seats.iter().enumerate().skip(1) {
            let state = team.state.clone();
            let (pinned, outcome) = std::sync::mpsc::sync_channel(1);
            let body = move || {
                // Read before the team knows of this thread, so no dispatch can be missed.
                let step = state.start.0.get();
                let clock = Clock::of_this_thread();
                let _ = pinned.send(pin(cpu));
                state.serve(seat, step, clock);
            };
            let thread = std::thread::Builder::new().name(format!("worker-{seat}")).spawn(body).map_err(|e| {
                Error::Resources(format!("cannot start worker thread {seat} of {}: {e}; lower --threads", seats.len()))
            })?;
            team.threads.push(thread);
            outcome.recv().map_err(|_| Error::Resources(format!("worker thread {seat} died at start")))??;
        }
        Ok(team)
    }

    /// Pins the calling thread to the team's first CPU. The thread that owns the team calls this once; before that, no
    /// worker rests.
    pub fn pin_caller(&self) -> Result<()> {
        pin(self.seats[0].cpu)?;
        self.roster.lock().unwrap_or_else(PoisonError::into_inner).own_caller(&self.state);
        Ok(())
    }

    /// Runs `work` with the calling thread on the team's first CPU, and puts it back where it may run after: for
    /// callers that only pass by. Where the system refuses, it stays where it is.
    pub fn with_caller<T>(&self, work: impl FnOnce() -> T) -> T {
        // SAFETY: an all-zero cpu_set_t is the empty set.
        let mut before: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is as large as said.
        let known = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut before) } == 0;
        let moved = known && pin(self.seats[0].cpu).is_ok();
        let done = work();
        if moved {
            // SAFETY: as above; these CPUs were this thread's a moment ago.
            let _ = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &before) };
        }
        done
    }

    /// Workers that take part in the next dispatch.
    pub fn working(&self) -> usize {
        self.state.active.load(Relaxed) as usize
    }

    /// Workers of the team, the caller included, also those that rest.
    pub fn threads(&self) -> usize {
        self.seats.len()
    }

    /// The numbers of the NUMA nodes it sits on.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Workers on each of [`nodes`](Team::nodes), also those that rest.
    pub fn threads_per_node(&self) -> Vec<usize> {
        self.nodes.iter().map(|&node| self.seats.iter().filter(|seat| seat.node == node).count()).collect()
    }

    /// Runs `work` on every worker at once and returns when all are done.
    ///
    /// A panic of any worker is handed on after all have stopped. Panics: called inside `work`, or from two threads.
    #[track_caller]
    pub fn run(&self, work: &(dyn Fn(&Worker<'_>) + Sync)) {
        let mut roster = match self.roster.try_lock() {
            Ok(roster) => roster,
            Err(TryLockError::Poisoned(roster)) => roster.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("Team::run called while the team is already running"),
        };
        let state = &*self.state;
        roster.look(state, &self.seats);
        // SAFETY: only the lifetime changes; the closure is forgotten below before `run` returns.
        let erased = unsafe { std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), *const Work>(work) };
        // SAFETY: all workers wait at `start` or rest: the previous run saw `done` of each.
        unsafe { *state.work.get() = Some(erased) };
        let from = state.timing.load(Relaxed).then(|| state.now());
        let step = state.start.0.step();
        state.work(0);
        state.gathered(0).for_each(|post| post.done.wait(|done| done == step));
        if let Some(from) = from {
            self.count_times(Location::caller(), from);
        }
        // SAFETY: as above, all workers wait again.
        unsafe { *state.work.get() = None };
        if !state.broken.load(SeqCst) {
            return;
        }
        // Past whatever value a panicking worker has put on its post.
        state.barrier.0.step();
        state.broken.store(false, SeqCst);
        drop(roster);
        let panic = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        for post in &self.state.posts {
            post.0.resting.set(0);
        }
        self.state.start.0.step();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Binds the calling thread to one CPU.
fn pin(cpu: usize) -> Result<()> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu < libc::CPU_SETSIZE as usize {
        // SAFETY: the CPU is inside the set, as just checked.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the set lives on this stack frame and its size is given.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(Error::Invalid(format!(
            "CPU {cpu} is not available to this process ({})",
            std::io::Error::last_os_error()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// `threads` workers on whatever CPUs there are.
    fn team(threads: usize) -> Team {
        Team::new(&crate::machine::topology::Topology::read().worker_cpus(threads)).unwrap()
    }

    #[test]
    fn runs_every_worker_once() {
        for threads in [1, 2, 3, 7, 20] {
            let team = team(threads);
            let seen: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..200 {
                team.run(&|worker| {
                    assert_eq!(worker.count, threads);
                    seen[worker.index].fetch_add(1, SeqCst);
                });
            }
            assert!(seen.iter().all(|n| n.load(SeqCst) == 200));
        }
    }

    #[test]
    fn barrier_orders_writes() {
        for threads in [2, 3, 6, 9, 18] {
            let team = team(threads);
            let mut data = vec![0usize; threads];
            for round in 1..50 {
                let view = Shared::new(&mut data);
                team.run(&|worker| {
                    for step in 0..10 {
                        let value = round * 100 + step;
                        // SAFETY: each worker writes its own element; barriers separate writing from reading.
                        unsafe { view.slice_mut(worker.index..worker.index + 1)[0] = value };
                        worker.barrier();
                        // SAFETY: no worker writes between the two barriers.
                        assert!(unsafe { view.slice(0..threads) }.iter().all(|&v| v == value));
                        worker.barrier();
                    }
                });
            }
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let team = team(3);
        for n in [0, 1, 2, 3, 10, 100] {
            let sum = AtomicUsize::new(0);
            team.run(&|worker| {
                sum.fetch_add(worker.share(n).len(), SeqCst);
            });
            assert_eq!(sum.load(SeqCst), n);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        for (threads, culprit) in [(3, 0), (3, 1), (3, 2), (19, 0), (19, 7), (19, 8), (19, 9), (19, 16), (19, 18)] {
            let team = team(threads);
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.run(&|worker| {
                    if worker.index == culprit {
                        panic!("worker {culprit} fails");
                    }
                    worker.barrier();
                });
            }));
            assert_eq!(*result.unwrap_err().downcast::<String>().unwrap(), format!("worker {culprit} fails"));
            let count = AtomicUsize::new(0);
            team.run(&|worker| {
                worker.barrier();
                count.fetch_add(1, SeqCst);
            });
            assert_eq!(count.load(SeqCst), threads);
        }
    }

    #[test]
    fn a_panic_ends_what_would_wait_for_ever() {
        for (threads, culprit) in [(3, 0), (3, 2), (19, 8), (19, 18)] {
            let team = team(threads);
            for round in 0..3 {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    team.run(&|worker| {
                        if worker.index == culprit {
                            panic!("round {round}");
                        }
                        let mut left = 100;
                        worker.wait_doing(
                            || false,
                            || {
                                left -= 1;
                                left > 0
                            },
                        );
                    });
                }));
                assert_eq!(*result.unwrap_err().downcast::<String>().unwrap(), format!("round {round}"));
                team.run(&|worker| worker.barrier());
            }
        }
    }

    #[test]
    fn a_nested_run_panics() {
        let team = team(2);
        let result = catch_unwind(AssertUnwindSafe(|| team.run(&|_| team.run(&|_| ()))));
        assert!(result.unwrap_err().downcast::<&str>().unwrap().contains("already running"));
        team.run(&|_| ());
    }

    #[test]
    fn refuses_cpus_it_cannot_have() {
        assert!(Team::new(&[]).is_err());
        assert!(Team::new(&[0, 1000]).err().unwrap().to_string().contains("CPU 1000"));
    }
}
