//! Where the time of a pass goes: a mark in front of every kernel.
#![allow(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::driver::sys;

use super::{Cuda, CudaEvent, CudaStream};
use crate::{Error, Result};

/// Marks that a pass may set. They are made before it: the driver may wait for all kernels of the process before it
/// makes more, and a kernel may wait for a device whose thread waits for the driver.
const MARKS: usize = 1 << 14;

/// What a pass has set, and what it may still set.
pub(super) struct Marks {
    set: Vec<(&'static str, CudaEvent)>,
    spare: Vec<CudaEvent>,
}

impl Cuda {
    /// Marks every kernel of the compute stream from now on, or no more. Marked kernels do not overlap. No kernel may
    /// be running, nor one that waits for this device. Errors: `Error::Device`.
    pub(crate) fn profiling(&self, on: bool) -> Result<()> {
        let spare = || (0..MARKS).map(|_| CudaEvent::timed()).collect::<Result<_>>();
        *self.marks() = on.then(|| Ok::<_, Error>(Marks { set: Vec::new(), spare: spare()? })).transpose()?;
        Ok(())
    }

    /// Whether kernels are marked.
    pub(crate) fn is_profiling(&self) -> bool {
        self.marks().is_some()
    }

    fn marks(&self) -> std::sync::MutexGuard<'_, Option<Marks>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mark(&self, stream: &CudaStream, name: &'static str) {
        if stream.0 != self.compute.0 {
            return;
        }
        let mut marks = self.marks();
        let Some(Marks { set, spare }) = &mut *marks else { return };
        let Some(event) = spare.pop() else { return self.fail(|| format!("a profile has more than {MARKS} kernels")) };
        // A recorded pass sets the mark whenever it runs.
        let flags = u32::from(self.recording.load(Relaxed)); // CU_EVENT_RECORD_EXTERNAL
        // SAFETY: both live; the event lives on in the list.
        self.note("marking a kernel", unsafe { sys::cuEventRecordWithFlags(event.0, stream.0, flags) });
        set.push((name, event));
    }

    /// Launches and seconds of each kind of kernel since the last call, in the order of their first launches. Waits for
    /// the device.
    pub(crate) fn take_profile(&self) -> Result<Vec<(&'static str, usize, f64)>> {
        self.mark(&self.compute, "end");
        self.synchronize()?;
        let mut times: Vec<(&'static str, usize, f64)> = Vec::new();
        let mut marks = self.marks();
        let Some(Marks { set, spare }) = &mut *marks else { return Ok(times) };
        for pair in set.windows(2) {
            let (name, seconds) = (pair[0].0, pair[1].1.since(&pair[0].1));
            match times.iter_mut().find(|(known, ..)| *known == name) {
                Some((_, launches, all)) => (*launches, *all) = (*launches + 1, *all + seconds),
                None => times.push((name, 1, seconds)),
            }
        }
        spare.extend(set.drain(..).map(|(_, event)| event));
        Ok(times)
    }
}
