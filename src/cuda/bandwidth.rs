//! How fast a device's memory is read and written, and how fast the host fills it.

use std::sync::Arc;
use std::time::Instant;

use super::{Cuda, DeviceBuffer, Event, PinnedBuffer};
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

    /// Bytes a second that are read and written in the device's memory: the best of six copies of `bytes`.
    pub fn vram_bandwidth(self: &Arc<Self>, bytes: usize) -> Result<f64> {
        let half = bytes / 2;
        let buffer = DeviceBuffer::<u8>::zeros(self, 2 * half)?;
        let (begin, end) = (Event::timed()?, Event::timed()?);
        let mut best: f64 = 0.0;
        for _ in 0..6 {
            self.record(&begin, &self.compute);
            self.copy_within(&self.compute, buffer.address(), buffer.address().add(half), half);
            self.record(&end, &self.compute);
            self.wait_host(&end)?;
            best = best.max(2.0 * half as f64 / end.since(&begin).max(1e-9));
        }
        Ok(best)
    }
}
