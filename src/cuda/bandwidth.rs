//! How fast a device's memory is read and written, and how fast the host fills it.

use std::sync::Arc;

use super::{Cuda, CudaEvent, DeviceBuffer, PinnedBuffer};
use crate::Result;

impl Cuda {
    /// Bytes a second that cross PCIe to the device from pinned memory.
    pub fn pcie_bandwidth(self: &Arc<Self>, bytes: usize) -> Result<f64> {
        let pinned = PinnedBuffer::<u8>::new(self, bytes)?;
        let there = DeviceBuffer::<u8>::new(self, bytes)?;
        Ok(bytes as f64 / self.fastest(|| self.upload(&self.compute, there.address(), &pinned))?)
    }

    /// Bytes a second that are read and written in the device's memory, by copies from one half of `bytes` to the
    /// other.
    pub fn vram_bandwidth(self: &Arc<Self>, bytes: usize) -> Result<f64> {
        let half = bytes / 2;
        let buffer = DeviceBuffer::<u8>::zeros(self, 2 * half)?;
        let copy = || self.copy_within(&self.compute, buffer.address(), buffer.address().add(half), half);
        Ok(2.0 * half as f64 / self.fastest(copy)?)
    }

    /// Seconds that the compute stream takes for `run`, in the fastest of six runs.
    pub(crate) fn fastest(&self, run: impl Fn()) -> Result<f64> {
        let (begin, end) = (CudaEvent::timed()?, CudaEvent::timed()?);
        let mut best = f64::INFINITY;
        for _ in 0..6 {
            self.record(&begin, &self.compute);
            run();
            self.record(&end, &self.compute);
            self.wait_host(&end)?;
            best = best.min(end.since(&begin));
        }
        Ok(best.max(1e-9))
    }
}
