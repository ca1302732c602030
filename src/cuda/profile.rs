//! Where the time of a pass goes: a mark in front of every kernel.
#![allow(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::driver::sys;

use super::{Cuda, CudaEvent, CudaStream};
use crate::Result;

impl Cuda {
    /// Marks every kernel of the compute stream from now on, or no more. Marked kernels do not overlap.
    pub(crate) fn profiling(&self, on: bool) {
        *self.marks() = on.then(Vec::new);
    }

    fn marks(&self) -> std::sync::MutexGuard<'_, Option<Vec<(&'static str, CudaEvent)>>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mark(&self, stream: &CudaStream, name: &'static str) {
        if stream.0 != self.compute.0 {
            return;
        }
        let mut marks = self.marks();
        let Some(marks) = &mut *marks else { return };
        let Ok(event) = CudaEvent::timed() else { return };
        // A recorded pass sets the mark whenever it runs.
        let flags = u32::from(self.recording.load(Relaxed)); // CU_EVENT_RECORD_EXTERNAL
        // SAFETY: both live; the event lives on in the list.
        self.note("marking a kernel", unsafe { sys::cuEventRecordWithFlags(event.0, stream.0, flags) });
        marks.push((name, event));
    }

    /// Launches and seconds of each kind of kernel since the last call, in the order of their first launches. Waits for
    /// the device.
    pub(crate) fn take_profile(&self) -> Result<Vec<(&'static str, usize, f64)>> {
        self.mark(&self.compute, "end");
        self.synchronize()?;
        let marks = self.marks().as_mut().map(std::mem::take).unwrap_or_default();
        let mut times: Vec<(&'static str, usize, f64)> = Vec::new();
        for pair in marks.windows(2) {
            let (name, seconds) = (pair[0].0, pair[1].1.since(&pair[0].1));
            match times.iter_mut().find(|(known, ..)| *known == name) {
                Some((_, launches, all)) => (*launches, *all) = (*launches + 1, *all + seconds),
                None => times.push((name, 1, seconds)),
            }
        }
        Ok(times)
    }
}
