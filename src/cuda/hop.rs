//! Numbers on their way from one device to the next: through each other's memory, or through RAM where they have no way
//! to it, or get there what was not written.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::{Address, Cuda, CudaEvent, DeviceBuffer, PinnedBuffer, succeed};
use crate::Result;

/// A way from one device to another.
pub struct Hop {
    from: Arc<Cuda>,
    to: Arc<Cuda>,
    left: CudaEvent,                    // on `from`: what is to be copied is there
    taken: CudaEvent,                   // on `to`: it has been copied
    through: Option<PinnedBuffer<f32>>, // RAM; `None`: a device's memory is copied to the other's
}

impl Hop {
    /// A way for `numbers` numbers at a time, through RAM if that is said, or if there is no other. Errors:
    /// `Error::Resources`.
    pub fn new(from: &Arc<Cuda>, to: &Arc<Cuda>, numbers: usize, through_ram: bool) -> Result<Self> {
        let direct = !through_ram && is_right(from, to);
        from.enter_thread()?;
        let through = if direct { None } else { Some(PinnedBuffer::new(from, numbers)?) };
        let left = CudaEvent::new(from)?;
        to.enter_thread()?;
        let taken = CudaEvent::new(to)?;
        Ok(Self { from: from.clone(), to: to.clone(), left, taken, through })
    }

    /// Whether numbers go through RAM.
    pub fn is_through_ram(&self) -> bool {
        self.through.is_some()
    }

    /// Copies `(from, to, numbers)`, behind all that is in the compute stream of the one device, and before what will
    /// be in that of the other, which the calling thread is on afterwards. What the first one computes next overwrites
    /// nothing that is still to be copied. Errors: `Error::Device`.
    pub fn bring(&mut self, all: &[(Address<f32>, Address<f32>, usize)]) -> Result<()> {
        let Self { from, to, left, taken, through } = self;
        from.enter_thread()?;
        if let Some(ram) = through {
            let mut rest = &mut ram[..];
            for &(x, _, numbers) in all {
                let (own, others) = std::mem::take(&mut rest).split_at_mut(numbers);
                from.download(&from.compute, x, own);
                rest = others;
            }
        }
        from.record(left, &from.compute);
        to.enter_thread()?;
        to.wait(&to.compute, left);
        match through {
            None => all.iter().for_each(|&(x, y, numbers)| to.copy_within(&to.compute, y, x, 4 * numbers)),
            Some(ram) => {
                let mut rest = &ram[..];
                for &(_, y, numbers) in all {
                    let (own, others) = rest.split_at(numbers);
                    to.upload(&to.compute, y, own);
                    rest = others;
                }
            }
        }
        to.record(taken, &to.compute);
        from.enter_thread()?;
        from.wait(&from.compute, taken);
        to.enter_thread()
    }
}

/// Lets the calling thread's device use another one's memory. Errors: it cannot, as `Error::Device`.
pub(super) fn enable_access(to: &Cuda, what: &str) -> Result<()> {
    // SAFETY: the context lives as long as the process.
    match unsafe { sys::cuCtxEnablePeerAccess(to.context, 0) } {
        CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        error => succeed(what, error),
    }
}

/// Whether what one device has comes to the other as it is, in a small and in a large copy.
fn is_right(from: &Arc<Cuda>, to: &Arc<Cuda>) -> bool {
    let copied = |numbers: usize, scale: f32| {
        let sent: Vec<f32> = (0..numbers).map(|i| scale * (i % 4093) as f32).collect();
        from.enter_thread()?;
        let x = DeviceBuffer::from_slice(from, &sent)?;
        from.synchronize()?;
        to.enter_thread()?;
        enable_access(from, "access to another GPU's memory")?;
        let (y, mut got) = (DeviceBuffer::<f32>::zeros(to, numbers)?, vec![0.0; numbers]);
        to.copy_within(&to.compute, y.address(), x.address(), 4 * numbers);
        y.read(&mut got)?;
        Ok::<_, crate::Error>(got == sent)
    };
    let large = if from.info.is_emulated() { 5000 } else { 1 << 22 };
    matches!((copied(64, 1.0), copied(large, -3.0), copied(large, 0.5)), (Ok(true), Ok(true), Ok(true)))
}
