//! How fast a device's memory is written, and how fast the host fills it.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;

use super::{Cuda, DeviceBuffer, PinnedBuffer};
use crate::Result;

impl Cuda {
    /// Bytes a second that cross PCIe to the device from pinned memory: the best of three copies of `bytes`.
    pub fn pcie_bandwidth(self: &Arc<Self>, bytes: usize) -> Result<f64> {
        let pinned = PinnedBuffer::<u8>::new(self, bytes)?;
        let there = DeviceBuffer::<u8>::new(self, bytes)?;
        let mut best: f64 = 0.0;
        for _ in 0..3 {
            let started = Instant::now();
            self.upload(&self.copy, there.address(), &pinned);
            self.synchronize()?;
            best = best.max(bytes as f64 / started.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    /// Bytes a second that the device's memory takes: `bytes` filled several times in a row, so that launching them does not count.
    pub fn vram_bandwidth(self: &Arc<Self>, bytes: usize) -> Result<f64> {
        const FILLS: usize = 8;
        let buffer = DeviceBuffer::<u8>::zeros(self, bytes)?;
        self.synchronize()?;
        let started = Instant::now();
        for _ in 0..FILLS {
            // SAFETY: the buffer is as long.
            self.note("clearing memory", unsafe { sys::cuMemsetD8Async(buffer.address().to_u64(), 0, bytes, self.compute.0) });
        }
        self.synchronize()?;
        Ok((FILLS * bytes) as f64 / started.elapsed().as_secs_f64())
    }
}
