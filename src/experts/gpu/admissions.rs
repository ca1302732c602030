//! Experts on their way into VRAM beside a recorded step: a ring of runs of bytes, and the kernel that copies them
//! (kernels/pool.cu) in a branch of its own.
//!
//! ```text
//! host      Way      writes an expert's runs into the ring, and shows how many there are
//! device    Branch   fetch takes the count along, or admit_limit; admit copies up to it and counts what has come
//! ```
//!
//! One thread may send while another enqueues, and that may be of another rank, or of another process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::parts::Parts;
use super::residents::Slots;
use crate::Result;
use crate::cuda::kernels::RunsToCopy;
use crate::cuda::kernels::pool::RING_RUNS;
use crate::cuda::{Address, Cuda, CudaEvent, CudaStream, DeviceBuffer, PinnedBuffer, kernels, launch};
use crate::experts::mailbox::LINE;
use crate::experts::pool::Admission;

/// Blocks that copy. What they have asked for, 32 KB each, stands in front of what `fetch` asks for: with 16 blocks a
/// step took three times as long as with 2, and copies by another thread's copy engine cost more as well (H200).
pub(super) const ADMIT_BLOCKS: usize = 2;

/// Layers at the end of a step, at most a quarter of all, in which no copy begins: it would still run when the step
/// ends, which waits for it. An expert of 2.4 MB takes as long as two layers beside a busy CPU (H200, 16 cores).
const LAST_LAYERS: usize = 3;

/// Whether copies that begin in `layer` of `layers` end within the step.
pub(super) fn ends_within(layer: usize, layers: usize) -> bool {
    layer + LAST_LAYERS.min(layers / 4) < layers
}

/// Memory that both sides see.
pub(super) struct Road {
    pub(super) ring: PinnedBuffer<u64>,   // [RING_RUNS, 4]
    pub(super) counts: PinnedBuffer<u32>, // [2, 16]: runs that were written, and that have come; a line each
}

impl Road {
    /// Numbers of the ring.
    pub(super) const RING: usize = 4 * RING_RUNS;
    /// Numbers of the counts.
    pub(super) const COUNTS: usize = 2 * LINE;

    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        Ok(Self { ring: PinnedBuffer::new(cuda, Self::RING)?, counts: PinnedBuffer::new(cuda, Self::COUNTS)? })
    }
}

/// Memory of the device.
pub(super) struct Buffers {
    limits: DeviceBuffer<u32>, // [layers]: runs up to which a layer's admit copies
    head: DeviceBuffer<u32>,   // [2]: runs that were copied; blocks that are done
}

impl Buffers {
    pub(super) fn new(cuda: &Arc<Cuda>, layers: usize) -> Result<Self> {
        Ok(Self { limits: DeviceBuffer::zeros(cuda, layers)?, head: DeviceBuffer::zeros(cuda, 2)? })
    }
}

/// The host's side: experts on their way to one device.
pub(super) struct Way {
    parts: Arc<Parts>, // of every expert, which the device's kernels can copy
    slots: Slots,
    to: Address<u8>, // where the slots begin
    road: Road,
    runs: u32,           // that were written
    ends: VecDeque<u32>, // of each expert on its way: `runs` after its last one
}

impl Way {
    /// To slots that begin at `to`. `parts` [are for kernels](Parts::are_for_kernels) of that device.
    pub(super) fn new(parts: Arc<Parts>, slots: Slots, to: Address<u8>, road: Road) -> Self {
        Self { parts, slots, to, road, runs: 0, ends: VecDeque::new() }
    }

    /// Sends an expert, once it is [shown](Way::show).
    pub(super) fn send(&mut self, Admission { layer, expert, slot }: Admission) {
        let Self { parts, slots, to, road, runs: written, ends } = self;
        let to = to.add(slots.at(slot));
        parts.each(layer, expert as usize, |offset, runs| {
            let RunsToCopy { to, from, bytes, count, from_pitch, to_pitch } =
                parts.for_kernels(&runs, to.add(offset)).expect("all experts are pinned");
            let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            let at = 4 * (*written as usize % RING_RUNS);
            road.ring[at..at + 4].copy_from_slice(&[to, from, both(bytes, count), both(from_pitch, to_pitch)]);
            *written = written.wrapping_add(1);
        });
        ends.push_back(*written);
    }

    /// Shows the device all that was sent.
    pub(super) fn show(&self) {
        self.road.counts.atomic(0).store(self.runs, Ordering::Release);
    }

    /// Of the experts on their way, how many have come.
    pub(super) fn come(&self) -> usize {
        let done = self.road.counts.atomic(LINE).load(Ordering::Acquire);
        self.ends.iter().take_while(|&&end| done.wrapping_sub(end) as i32 >= 0).count()
    }

    /// Forgets the first `n` of those that have come.
    pub(super) fn take(&mut self, n: usize) {
        self.ends.drain(..n);
    }
}

/// The device's side: the branch that copies.
pub(super) struct Branch {
    ring: Address<u64>,
    counts: Address<u32>,
    buffers: Buffers,
    fetched: CudaEvent,  // when a layer's sum had come
    admitted: CudaEvent, // when the branch had ended
}

/// Where `fetch` finds the count of runs, and where it brings it; nowhere: no expert ever comes.
#[derive(Clone, Copy)]
pub(in crate::experts) struct Limit {
    pub(in crate::experts) sent: Address<u32>,
    pub(in crate::experts) limit: Address<u32>,
}

impl Limit {
    pub(in crate::experts) const NONE: Self = Self { sent: Address::NULL, limit: Address::NULL };
}

impl Branch {
    /// `road` must outlive it.
    pub(super) fn new(cuda: &Arc<Cuda>, road: &Road, buffers: Buffers) -> Result<Self> {
        let (ring, counts) = (road.ring.address(), road.counts.address());
        Ok(Self { ring, counts, buffers, fetched: CudaEvent::new(cuda)?, admitted: CudaEvent::new(cuda)? })
    }

    /// Enqueues what takes the count of runs along to a layer, where no `fetch` does.
    pub(super) fn take_limit(&self, cuda: &Cuda, layer: usize) {
        let Limit { sent, limit } = self.limit(layer);
        launch!(cuda, &cuda.compute, kernels::admit_limit, [1, 1, 1]; sent, limit);
    }

    /// What a layer's `fetch` is given.
    pub(super) fn limit(&self, layer: usize) -> Limit {
        Limit { sent: self.counts, limit: self.buffers.limits.address().add(layer) }
    }

    /// Enqueues the copies that were sent until the layer's sum had come, beside what follows in `stream`.
    pub(super) fn admit(&self, cuda: &Cuda, stream: &CudaStream, layer: usize) {
        cuda.record(&self.fetched, stream);
        cuda.wait(&cuda.copy, &self.fetched);
        let Self { ring, counts, buffers: Buffers { limits, head }, .. } = self;
        launch!(cuda, &cuda.copy, kernels::admit, [ADMIT_BLOCKS, 1, 1];
            ring.cast(), head.address(), limits.address().add(layer), head.address().add(1), counts.add(LINE));
        cuda.record(&self.admitted, &cuda.copy);
    }

    /// Lets `stream` wait for all copies of the step.
    pub(super) fn join(&self, cuda: &Cuda, stream: &CudaStream) {
        cuda.wait(stream, &self.admitted);
    }
}
