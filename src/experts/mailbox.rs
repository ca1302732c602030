//! Memory through which a device hands tokens to the CPU's experts and takes their sum, without a copy or a call.
//!
//! ```text
//! device   writes x, ids and weights, counts up, and publishes the count (kernels/handoff.cu, stream.cu)
//! host     computes y, then answers with that count
//! device   waits for the answer, reads y
//! ```

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer};

/// Words of a cache line.
pub(super) const LINE: usize = 16;

/// Room for one batch at a time.
pub(super) struct Mailbox {
    pub(super) x: PinnedBuffer<u8>,        // [tokens, hidden], of the device's numbers
    pub(super) ids: PinnedBuffer<i32>,     // [tokens, top_k]
    pub(super) weights: PinnedBuffer<f32>, // [tokens, top_k]
    pub(super) y: Mutex<PinnedBuffer<u8>>, // [tokens, hidden]: the sum
    pub(super) y_address: Address<u8>,
    pub(super) up: PinnedBuffer<u32>, // [counters, 16]: what was answered, a line each
    pub(super) count: DeviceBuffer<u32>, // [counters]: what is waited for
    pub(super) arrived: DeviceBuffer<u32>, // blocks that have written
}

/// What a mailbox has room for.
pub(super) struct Room {
    /// Bytes of `x`.
    pub(super) x: usize,
    /// Bytes of `y`.
    pub(super) y: usize,
    /// Experts of all tokens.
    pub(super) choices: usize,
    /// Counters: batches that take turns in it.
    pub(super) counters: usize,
}

// SAFETY: the host only passes the addresses of device buffers on; it never reads them.
#[allow(unsafe_code)]
unsafe impl Sync for Mailbox {}

impl Mailbox {
    pub(super) fn new(cuda: &Arc<Cuda>, room: &Room) -> Result<Self> {
        let y = PinnedBuffer::new(cuda, room.y)?;
        Ok(Self {
            x: PinnedBuffer::new(cuda, room.x)?,
            ids: PinnedBuffer::new(cuda, room.choices)?,
            weights: PinnedBuffer::new(cuda, room.choices)?,
            y_address: y.address(),
            y: Mutex::new(y),
            up: PinnedBuffer::new(cuda, room.counters * LINE)?,
            count: DeviceBuffer::zeros(cuda, room.counters)?,
            arrived: DeviceBuffer::zeros(cuda, 1)?,
        })
    }

    /// Answers `count`: the device that waits for it goes on.
    pub(super) fn answer(&self, counter: usize, count: u32) {
        self.up.atomic(counter * LINE).store(count, Ordering::Release);
    }
}

/// Blocks of a kernel that hands over `bytes`: enough to fill PCIe, few for few tokens.
pub(super) fn blocks(bytes: usize) -> usize {
    (bytes >> 15).clamp(1, 16)
}
