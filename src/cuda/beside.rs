//! Sums of many numbers over several devices beside what else these compute: copy engines bring what the others have,
//! and take the sums there, so multiprocessors only add.
//!
//! ```text
//! compute   ... a part's product, mark `begun` ...... another part's kernels ...... wait for `ended` of all ...
//! beside        wait for `begun` of all, copy this rank's part of the others' x, add, copy the sums to them, `ended`
//! ```
//!
//! A device waits for a mark of another only when that one's thread has set it: threads tell each other.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::kernels::all_reduce::ADDED;
use super::kernels::{self, launch};
use super::{Address, Cuda, CudaEvent, CudaStream};
use crate::Result;

/// Sums that may be under way.
const SLOTS: usize = 8;

/// Sums that a rank's thread may be ahead of another's: four layers, or two in two parts.
const AHEAD: usize = 8;

/// What a rank shows the others.
struct Shown {
    begun: [CudaEvent; SLOTS],
    ended: [CudaEvent; SLOTS],
    x: [AtomicU64; SLOTS],
    has_begun: AtomicUsize, // sums since the start
    has_ended: AtomicUsize,
    enqueued: AtomicUsize, // sums of any kind
}

/// A rank's sums beside.
pub(super) struct Beside {
    stream: CudaStream,
    number: usize,
    all: Arc<[Shown]>,
    count: AtomicUsize, // sums since the start
}

impl Beside {
    /// Of these devices, in their order.
    pub(super) fn of_devices(devices: &[Arc<Cuda>]) -> Result<Vec<Self>> {
        let shown = |cuda: &Arc<Cuda>| {
            cuda.enter_thread()?;
            let events = || -> Result<[CudaEvent; SLOTS]> {
                let events = (0..SLOTS).map(|_| CudaEvent::new(cuda)).collect::<Result<Vec<_>>>()?;
                Ok(events.try_into().unwrap_or_else(|_| unreachable!("as many as there are slots")))
            };
            Ok(Shown {
                begun: events()?,
                ended: events()?,
                x: Default::default(),
                has_begun: AtomicUsize::new(0),
                has_ended: AtomicUsize::new(0),
                enqueued: AtomicUsize::new(0),
            })
        };
        let all: Arc<[Shown]> = devices.iter().map(shown).collect::<Result<_>>()?;
        let of_device = |(number, cuda): (usize, &Arc<Cuda>)| {
            cuda.enter_thread()?;
            let stream = CudaStream::branch()?;
            Ok(Self { stream, number, all: all.clone(), count: AtomicUsize::new(0) })
        };
        devices.iter().enumerate().map(of_device).collect()
    }

    /// Enqueues `x = x_0 + x_1 + ...` of `numbers` numbers, a multiple of 4, and returns which sum it is:
    /// [`wait`](Beside::wait) lets the compute stream see it. `terms` has room for this rank's part of what the others
    /// have. `failed`: whether a rank has.
    pub(super) fn sum(
        &self,
        cuda: &Cuda,
        (x, numbers): (Address<f32>, usize),
        terms: Address<f32>,
        failed: &dyn Fn() -> bool,
    ) -> usize {
        let Self { stream, number, all, count } = self;
        let (sum, own) = (count.load(Relaxed), &all[*number]);
        let slot = sum % SLOTS;
        if let Some(oldest) = sum.checked_sub(SLOTS) {
            self.wait(cuda, oldest, failed); // its events become this one's
        }
        count.store(sum + 1, Relaxed);
        cuda.record(&own.begun[slot], &cuda.compute);
        own.x[slot].store(x.to_u64(), Relaxed);
        own.has_begun.store(sum + 1, Release);
        if !self.all_have(|shown| &shown.has_begun, sum, failed) {
            return sum;
        }
        all.iter().for_each(|shown| cuda.wait(stream, &shown.begun[slot]));
        let words = numbers / 4;
        let most = words.div_ceil(all.len());
        let first = words.min(number * most);
        let own_words = most.min(words - first);
        // Each rank begins with the next one, so that no two read or write the same one's memory at a time.
        let others = || (1..all.len()).map(|i| (number + i) % all.len());
        let place = |x: Address<f32>| x.add(4 * first);
        let of = |rank: usize| place(Address::of_another(all[rank].x[slot].load(Relaxed)));
        for rank in others() {
            let term = rank - usize::from(rank > *number);
            cuda.copy_within(stream, terms.add(4 * term * most), of(rank), 16 * own_words);
        }
        launch!(cuda, stream, kernels::add_terms, [own_words.div_ceil(ADDED), 1, 1];
            place(x), terms, most as i32, own_words as i32, *number as i32, all.len() as i32);
        for rank in others() {
            cuda.copy_within(stream, of(rank), place(x), 16 * own_words);
        }
        cuda.record(&own.ended[slot], stream);
        own.has_ended.store(sum + 1, Release);
        sum
    }

    /// Lets the compute stream wait for a sum.
    pub(super) fn wait(&self, cuda: &Cuda, sum: usize, failed: &dyn Fn() -> bool) {
        let has_waited = sum + SLOTS < self.count.load(Relaxed);
        if !has_waited && self.all_have(|shown| &shown.has_ended, sum, failed) {
            self.all.iter().for_each(|shown| cuda.wait(&cuda.compute, &shown.ended[sum % SLOTS]));
        }
    }

    /// Waits while this rank's thread is far ahead of another's, and counts the sum that it enqueues next. A stream
    /// that is full stops its thread within the driver, where it may hold up one whose kernels would empty the stream:
    /// the first rank's waits for the CPU in every layer, and others have all of a long pass enqueued by then.
    pub(super) fn keep_pace(&self, failed: &dyn Fn() -> bool) {
        let sum = self.all[self.number].enqueued.fetch_add(1, Release);
        if let Some(least) = sum.checked_sub(AHEAD) {
            self.all_have(|shown| &shown.enqueued, least, failed);
        }
    }

    /// Waits until all ranks' threads have come to `sum`; false: one has failed.
    fn all_have(&self, count: impl Fn(&Shown) -> &AtomicUsize, sum: usize, failed: &dyn Fn() -> bool) -> bool {
        while self.all.iter().any(|shown| count(shown).load(Acquire) <= sum) {
            if failed() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

/// Numbers of the others that a rank brings for a sum of `numbers` over so many.
pub(super) fn terms(numbers: usize, ranks: usize) -> usize {
    4 * (numbers / 4).div_ceil(ranks) * (ranks - 1)
}
