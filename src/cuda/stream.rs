//! Queues of work on the device, and marks in them.
#![allow(unsafe_code)]

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{Cuda, succeed};
use crate::Result;

/// Work on the device that runs in order.
pub struct Stream(pub(super) sys::CUstream);

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new() -> Result<Self> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one pointer.
        succeed("creating a stream", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self(stream))
    }

    pub(super) fn none() -> Self {
        Self(ptr::null_mut())
    }

    pub(super) fn query(&self) -> CUresult {
        // SAFETY: the stream lives.
        unsafe { sys::cuStreamQuery(self.0) }
    }

    pub(super) fn synchronize(&self) -> CUresult {
        // SAFETY: the stream lives.
        unsafe { sys::cuStreamSynchronize(self.0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: nobody uses it any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
        }
    }
}

/// A mark in a stream that another stream, or the host, can wait for.
pub struct Event(pub(super) sys::CUevent);

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    /// A mark without a time.
    pub fn new(cuda: &Cuda) -> Result<Self> {
        if cuda.is_plan() {
            return Ok(Self(ptr::null_mut()));
        }
        Self::with(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// A mark that knows when it was passed.
    pub fn timed() -> Result<Self> {
        Self::with(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(flags: sys::CUevent_flags) -> Result<Self> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one pointer.
        succeed("creating an event", unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(Self(event))
    }

    /// Seconds from `earlier` to this mark; both must have been passed.
    pub fn since(&self, earlier: &Event) -> f64 {
        let mut ms = 0.0;
        // SAFETY: both live.
        let _ = unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.0, self.0) };
        f64::from(ms) / 1e3
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the driver keeps it until its work is done.
            let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
        }
    }
}

impl Cuda {
    /// Marks where `stream` is now.
    pub fn record(&self, event: &Event, stream: &Stream) {
        // SAFETY: both live.
        self.note("marking a stream", unsafe { sys::cuEventRecord(event.0, stream.0) });
    }

    /// Lets `stream` go on when `event` has been passed.
    pub fn wait(&self, stream: &Stream, event: &Event) {
        self.mark(stream, "wait for a copy");
        // SAFETY: both live.
        self.note("waiting for a stream", unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) });
    }

    /// Waits on the host until `event` has been passed.
    pub fn wait_host(&self, event: &Event) -> Result<()> {
        // SAFETY: it lives.
        self.note("an op on the device", unsafe { sys::cuEventSynchronize(event.0) });
        self.check()
    }
}
