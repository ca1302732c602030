//! Queues of work on the device, and marks in them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{Cuda, succeed};
use crate::Result;

/// Work on the device that runs in order.
pub struct CudaStream(pub(super) sys::CUstream, StreamOwner);

#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamOwner {
    Us,
    /// Us; its kernels wait for the end of those in front of them, as those of other streams do. They are short, or
    /// copy: a multiprocessor that has room takes them before blocks of a long product that wait for one.
    Branch,
    /// Another program, whose kernels do not expect others to begin before the one in front has ended.
    Another,
    /// Another program, where the kernel in front is ours.
    Behind,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new() -> Result<Self> {
        Self::of(StreamOwner::Us)
    }

    /// Work beside the compute stream.
    pub(super) fn branch() -> Result<Self> {
        Self::of(StreamOwner::Branch)
    }

    fn of(owner: StreamOwner) -> Result<Self> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers and one pointer.
        succeed("creating a stream", unsafe {
            match sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) {
                CUresult::CUDA_SUCCESS => {
                    let priority = if owner == StreamOwner::Branch { greatest } else { least };
                    sys::cuStreamCreateWithPriority(&mut stream, flags, priority)
                }
                error => error,
            }
        })?;
        Ok(Self(stream, owner))
    }

    pub(super) fn none() -> Self {
        Self(ptr::null_mut(), StreamOwner::Us)
    }

    /// One more, of the current thread's device.
    pub(crate) fn beside() -> Result<Self> {
        Self::new()
    }

    /// The stream that another engine in this process calls `handle`, 0 the default one. It must live as long as this.
    pub fn of_another(handle: usize) -> Self {
        Self(handle as sys::CUstream, StreamOwner::Another)
    }

    /// Another engine's stream, for a kernel behind one of ours.
    pub(crate) fn behind_ours(&self) -> Self {
        Self(self.0, StreamOwner::Behind)
    }

    /// Whether kernels may be launched on it before those in front of them have ended.
    pub(super) fn overlaps(&self) -> bool {
        matches!(self.1, StreamOwner::Us | StreamOwner::Behind)
    }

    /// The recording that what is enqueued becomes a part of, by its number; `None`: it runs. Errors: there is no such
    /// stream, or its recording has failed.
    pub fn recording(&self) -> Result<Option<u64>> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut id = 0;
        // SAFETY: writes two numbers; the others are not asked for.
        succeed("asking a stream", unsafe {
            let none = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
            sys::cuStreamGetCaptureInfo_v3(self.0, &mut status, &mut id, none.0, none.1, none.2, none.3)
        })?;
        Ok((status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some(id))
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

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !self.0.is_null() && matches!(self.1, StreamOwner::Us | StreamOwner::Branch) {
            // SAFETY: its one owner drops it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
        }
    }
}

/// A mark in a stream that another stream, or the host, can wait for.
pub struct CudaEvent(pub(super) sys::CUevent);

// SAFETY: as for streams.
unsafe impl Send for CudaEvent {}
// SAFETY: as for streams.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
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
    pub fn since(&self, earlier: &CudaEvent) -> f64 {
        let mut ms = 0.0;
        // SAFETY: both live.
        let _ = unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.0, self.0) };
        f64::from(ms) / 1e3
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the driver keeps it until its work is done.
            let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
        }
    }
}

/// A stream beside another one, for some of its work.
pub(super) struct Aside {
    stream: CudaStream,
    begun: CudaEvent,
    ended: CudaEvent,
}

impl Aside {
    pub(super) fn new() -> Result<Self> {
        let event = || CudaEvent::with(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Self { stream: CudaStream::branch()?, begun: event()?, ended: event()? })
    }

    pub(super) fn none() -> Self {
        let event = || CudaEvent(ptr::null_mut());
        Self { stream: CudaStream::none(), begun: event(), ended: event() }
    }
}

impl Cuda {
    /// Calls `work` with a stream beside `copy`: what it enqueues there and in `copy` runs side by side, behind what is
    /// in `copy` and before what will be.
    pub(crate) fn copy_side_by_side(&self, work: impl FnOnce(&CudaStream)) {
        if self.is_plan() {
            return;
        }
        let Aside { stream, begun, ended } = &self.pieces;
        self.record(begun, &self.copy);
        self.wait(stream, begun);
        work(stream);
        self.record(ended, stream);
        self.wait(&self.copy, ended);
    }

    /// Marks where `stream` is now.
    pub fn record(&self, event: &CudaEvent, stream: &CudaStream) {
        // SAFETY: both live.
        self.note("marking a stream", unsafe { sys::cuEventRecord(event.0, stream.0) });
    }

    /// Lets `stream` go on when `event` has been passed.
    pub fn wait(&self, stream: &CudaStream, event: &CudaEvent) {
        self.mark(stream, "wait for a copy");
        // SAFETY: both live.
        self.note("waiting for a stream", unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) });
    }

    /// Waits on the host until `event` has been passed.
    pub fn wait_host(&self, event: &CudaEvent) -> Result<()> {
        // SAFETY: it lives.
        self.note("an op on the device", unsafe { sys::cuEventSynchronize(event.0) });
        self.check()
    }

    /// Calls `function` on a thread of the driver's when `stream` comes there; it may not call the driver.
    ///
    /// # Safety
    /// `data` is what `function` takes, for as long as it may be called: of a recorded graph, for ever.
    pub(crate) unsafe fn call_host(
        &self,
        stream: &CudaStream,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) {
        // SAFETY: the caller's promise.
        self.note("calling the host", unsafe { sys::cuLaunchHostFunc(stream.0, Some(function), data) });
    }

    /// Runs `work` as a guest of another engine's thread: this device is the thread's meanwhile, and memory may be
    /// taken though a stream is being recorded. Errors: what `work` says, or the driver.
    pub(crate) fn as_guest<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut before = ptr::null_mut();
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: each writes one value.
        unsafe {
            succeed("asking for the device", sys::cuCtxGetCurrent(&mut before))?;
            self.enter_thread()?;
            succeed("beside a recording", sys::cuThreadExchangeStreamCaptureMode(&mut mode))?;
        }
        let done = work();
        // SAFETY: what was there is put back.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut mode);
            if !before.is_null() {
                let _ = sys::cuCtxSetCurrent(before);
            }
        }
        done
    }
}
