//! A team of pinned threads that runs one closure on all of them: spins briefly for the next, then sleeps.
//!
//! A decode step dispatches some hundred times a second per layer, so waking must cost nothing while work is near and
//! nothing may burn while it is not. Nothing here allocates after [`Team::new`].
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// How long a waiting thread spins before it sleeps: longer than the gaps inside a decode step, shorter than a
/// scheduler's time slice, so that a thread whose core was taken away does not hold the others' cores as well.
const SPIN: Duration = Duration::from_micros(50);

type Work = dyn Fn(&Worker<'_>) + Sync;

/// A word that threads wait on, with a count of those asleep so that nobody makes a system call for sleepers that are not there.
struct Gate {
    value: AtomicU32,
    asleep: AtomicU32,
}

impl Gate {
    const fn new(value: u32) -> Self {
        Self { value: AtomicU32::new(value), asleep: AtomicU32::new(0) }
    }

    /// Returns when the value is no longer `old`.
    fn wait_while(&self, old: u32) {
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                if self.value.load(SeqCst) != old {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                break;
            }
        }
        self.asleep.fetch_add(1, SeqCst);
        while self.value.load(SeqCst) == old {
            // SAFETY: the word outlives the call; the kernel only compares it with `old`.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.value.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    old,
                    std::ptr::null::<libc::timespec>(),
                );
            }
        }
        self.asleep.fetch_sub(1, SeqCst);
    }

    /// Adds to the value and wakes the sleepers. A sleeper counts itself before it looks at the value, so one of the two is seen.
    fn add(&self, n: u32) -> u32 {
        let old = self.value.fetch_add(n, SeqCst);
        if self.asleep.load(SeqCst) > 0 {
            // SAFETY: the word outlives the call; waking touches no memory of ours.
            unsafe {
                libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
            }
        }
        old.wrapping_add(n)
    }
}

/// What the threads of a team share. Each gate has its own cache lines.
struct State {
    count: u32,
    start: Line<Gate>,   // one step per dispatch
    done: Line<Gate>,    // workers finished, over all dispatches
    barrier: Line<Gate>, // one step per barrier passed
    arrived: Line<AtomicU32>,
    work: UnsafeCell<Option<*const Work>>,
    stop: AtomicBool,
    broken: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `work` is written only by the dispatching thread while every worker waits at `start`, and read only between
// the step of `start` and the worker's count on `done`; both are sequentially consistent.
unsafe impl Sync for State {}
// SAFETY: as above; the pointer is dereferenced only while `run` keeps the closure alive.
unsafe impl Send for State {}

/// The panic of a worker whose team mate panicked: only ends it, the first panic is what `run` hands on.
struct BrokenBarrier;

impl State {
    fn work(&self, index: usize) {
        // SAFETY: between the step of `start` and the count on `done` nobody writes `work`, and `run` keeps the closure alive.
        let Some(work) = (unsafe { (*self.work.get()).map(|work| &*work) }) else { return };
        let worker = Worker { index, count: self.count as usize, state: self };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(&worker))) {
            if !payload.is::<BrokenBarrier>() {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
            self.broken.store(true, SeqCst);
            self.barrier.0.add(1);
        }
    }
}

/// One thread's place in a running team.
pub struct Worker<'a> {
    /// From 0 to `count - 1`; 0 is the thread that called [`Team::run`].
    pub index: usize,
    /// Workers of the team.
    pub count: usize,
    state: &'a State,
}

impl Worker<'_> {
    /// Waits until all workers are here; what they wrote before is then visible to all.
    pub fn barrier(&self) {
        let state = self.state;
        let step = state.barrier.0.value.load(SeqCst);
        // Read after `step`: a panic that this misses also changes the step.
        if state.broken.load(SeqCst) {
            resume_unwind(Box::new(BrokenBarrier));
        }
        if state.arrived.0.fetch_add(1, SeqCst) + 1 == state.count {
            state.arrived.0.store(0, SeqCst);
            state.barrier.0.add(1);
        } else {
            state.barrier.0.wait_while(step);
        }
        if state.broken.load(SeqCst) {
            resume_unwind(Box::new(BrokenBarrier));
        }
    }

    /// This worker's even, contiguous share of `0..n`.
    pub fn share(&self, n: usize) -> Range<usize> {
        n * self.index / self.count..n * (self.index + 1) / self.count
    }
}

/// Pinned threads, and the caller as worker 0.
pub struct Team {
    state: Arc<State>,
    cpus: Vec<usize>,
    busy: AtomicBool,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// One worker per entry of `cpus`, pinned to it; worker 0 is whoever calls [`run`](Team::run), see [`pin_caller`](Team::pin_caller).
    ///
    /// A CPU may be listed twice. Errors: `cpus` is empty, or a CPU is not this process's to use.
    pub fn new(cpus: &[usize]) -> Result<Team> {
        if cpus.is_empty() {
            return Err(Error::Invalid("a team needs at least one thread: raise --threads".into()));
        }
        let state = Arc::new(State {
            count: cpus.len() as u32,
            start: Line(Gate::new(0)),
            done: Line(Gate::new(0)),
            barrier: Line(Gate::new(0)),
            arrived: Line(AtomicU32::new(0)),
            work: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut team = Team { state, cpus: cpus.to_vec(), busy: AtomicBool::new(false), threads: Vec::new() };
        for (index, &cpu) in cpus.iter().enumerate().skip(1) {
            let state = team.state.clone();
            let (pinned, outcome) = std::sync::mpsc::sync_channel(1);
            let body = move || {
                // A gate's value is read before the team knows of this thread, so no dispatch can be missed.
                let mut step = state.start.0.value.load(SeqCst);
                let _ = pinned.send(pin(cpu));
                loop {
                    state.start.0.wait_while(step);
                    step = step.wrapping_add(1);
                    if state.stop.load(SeqCst) {
                        return;
                    }
                    state.work(index);
                    state.done.0.add(1);
                }
            };
            let thread = std::thread::Builder::new()
                .name(format!("worker-{index}"))
                .spawn(body)
                .map_err(|e| Error::Resources(format!("cannot start worker thread {index} of {}: {e}; lower --threads", cpus.len())))?;
            team.threads.push(thread);
            outcome.recv().map_err(|_| Error::Resources(format!("worker thread {index} died at start")))??;
        }
        Ok(team)
    }

    /// Pins the calling thread to the team's first CPU. The thread that owns the team calls this once.
    pub fn pin_caller(&self) -> Result<()> {
        pin(self.cpus[0])
    }

    /// Workers of the team, the caller included.
    pub fn threads(&self) -> usize {
        self.cpus.len()
    }

    /// Runs `work` on every worker at once and returns when all are done.
    ///
    /// A panic of any worker is handed on after all have stopped. Panics: called inside `work`, or from two threads.
    pub fn run(&self, work: &(dyn Fn(&Worker<'_>) + Sync)) {
        assert!(!self.busy.swap(true, SeqCst), "Team::run called while the team is already running");
        let state = &*self.state;
        // SAFETY: only the lifetime changes; the closure is forgotten below before `run` returns.
        let erased = unsafe { std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), *const Work>(work) };
        // SAFETY: all workers wait at `start`: the previous run saw each of them count on `done`.
        unsafe { *state.work.get() = Some(erased) };
        let finished = state.done.0.value.load(SeqCst).wrapping_add(state.count - 1);
        state.start.0.add(1);
        state.work(0);
        loop {
            let done = state.done.0.value.load(SeqCst);
            if done == finished {
                break;
            }
            state.done.0.wait_while(done);
        }
        // SAFETY: as above, all workers wait at `start` again.
        unsafe { *state.work.get() = None };
        state.arrived.0.store(0, SeqCst);
        state.broken.store(false, SeqCst);
        let panic = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.busy.store(false, SeqCst);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        self.state.start.0.add(1);
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
        _ => Err(Error::Invalid(format!("CPU {cpu} is not available to this process ({})", std::io::Error::last_os_error()))),
    }
}

/// A slice whose disjoint parts are written by several workers.
pub struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through unsafe methods whose contract is that no part is used by two threads unless all only read.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Takes the slice for as long as the view lives.
    pub fn new(data: &'a mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), _borrow: PhantomData }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part to write. Panics: the range ends after the slice.
    ///
    /// # Safety
    /// Until the part is dropped or the next [`Worker::barrier`], nothing else may read or write any element of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds as just checked; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }

    /// A part to read. Panics: the range ends after the slice.
    ///
    /// # Safety
    /// While the part lives, nothing may write any element of it.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds as just checked; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// `threads` workers on whatever CPUs there are.
    fn team(threads: usize) -> Team {
        Team::new(&crate::topology::Topology::read().worker_cpus(threads)).unwrap()
    }

    #[test]
    fn runs_every_worker_once() {
        for threads in [1, 2, 3, 7] {
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
        for threads in [2, 3, 6] {
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
                        // SAFETY: nobody writes between the two barriers.
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
        let team = team(3);
        for culprit in [0, 1, 2] {
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
            assert_eq!(count.load(SeqCst), 3);
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
