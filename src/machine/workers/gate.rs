//! A word that threads wait on: they spin for a while, then sleep.
#![allow(unsafe_code)]

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, SeqCst},
};
use std::time::{Duration, Instant};

/// How long a waiting thread spins before it also offers its core to others: longer than most gaps of a decode step on
/// the CPU.
const SPIN: Duration = Duration::from_micros(50);

/// How long it waits in all before it sleeps: longer than a GPU's turn between two layers, and than waking dozens of
/// threads, which takes a third of a millisecond. Whoever waits for less than that is asleep again before the last one
/// has come, and every dispatch from then on wakes them all.
pub(crate) const AWAKE: Duration = Duration::from_millis(1);

/// A word that threads wait on, with a count of those asleep: without sleepers, a change makes no system call.
pub(crate) struct Gate {
    value: AtomicU32,
    asleep: AtomicU32,
}

impl Gate {
    pub(crate) const fn new(value: u32) -> Self {
        Self { value: AtomicU32::new(value), asleep: AtomicU32::new(0) }
    }

    /// The value; what its writer wrote before is visible.
    pub(crate) fn get(&self) -> u32 {
        self.value.load(Acquire)
    }

    /// Returns when `ready(value)`.
    #[inline]
    pub(crate) fn wait(&self, ready: impl Fn(u32) -> bool) {
        if !ready(self.get()) {
            self.wait_long(ready);
        }
    }

    #[cold]
    fn wait_long(&self, ready: impl Fn(u32) -> bool) {
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                std::hint::spin_loop();
                if ready(self.get()) {
                    return;
                }
            }
            match start.elapsed() {
                waited if waited > AWAKE => break,
                waited if waited > SPIN => std::thread::yield_now(),
                _ => {}
            }
        }
        // Sequentially consistent here and in `set`: of the count and the value at least one is seen by the other side.
        self.asleep.fetch_add(1, SeqCst);
        loop {
            let value = self.value.load(SeqCst);
            if ready(value) {
                break;
            }
            // SAFETY: the word outlives the call; the kernel only compares it with `value`.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.value.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    value,
                    std::ptr::null::<libc::timespec>(),
                );
            }
        }
        self.asleep.fetch_sub(1, SeqCst);
    }

    /// Changes the value and wakes the sleepers.
    pub(super) fn set(&self, value: u32) {
        self.value.swap(value, SeqCst);
        self.wake();
    }

    /// Adds a number, as one of several writers, and wakes the sleepers.
    #[cfg(feature = "cuda")]
    pub(crate) fn add(&self, number: u32) {
        self.value.fetch_add(number, SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.asleep.load(SeqCst) > 0 {
            // SAFETY: the word outlives the call; waking touches no memory of ours.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.value.as_ptr(),
                    libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                    i32::MAX,
                );
            }
        }
    }

    /// Adds one, as its only writer, and wakes the sleepers.
    pub(super) fn step(&self) -> u32 {
        let next = self.value.load(Relaxed).wrapping_add(1);
        self.set(next);
        next
    }
}
