//! Passes that are recorded once and launched as a whole.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::driver::sys;

use super::{Cuda, succeed};
use crate::Result;

/// A recorded sequence of ops.
pub struct Graph {
    cuda: Arc<Cuda>,
    exec: sys::CUgraphExec,
}

// SAFETY: one thread at a time owns it.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `body` enqueues on the compute stream, and on streams that wait for it and that it waits for.
    ///
    /// Errors: what `body` says, or the driver of something that cannot be recorded.
    pub fn record(cuda: &Arc<Cuda>, body: impl FnOnce() -> Result<()>) -> Result<Self> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        succeed("recording a pass", unsafe { sys::cuStreamBeginCapture_v2(cuda.compute.0, mode) })?;
        cuda.recording.store(true, Relaxed);
        let done = body();
        cuda.recording.store(false, Relaxed);
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: each writes one pointer; the graph is not used after.
        let made = unsafe {
            let ended = succeed("recording a pass", sys::cuStreamEndCapture(cuda.compute.0, &mut graph));
            let made =
                ended.and_then(|()| succeed("recording a pass", sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0)));
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            made
        };
        done?;
        cuda.check()?;
        made?;
        Ok(Self { cuda: cuda.clone(), exec })
    }

    /// Enqueues the recorded ops.
    pub fn launch(&self) {
        // SAFETY: both live.
        self.cuda.note("launching a recorded pass", unsafe { sys::cuGraphLaunch(self.exec, self.cuda.compute.0) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the driver waits for what still runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
