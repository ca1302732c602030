//! The kernels of `kernels/*.cu`, by name.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::sys;

use super::{Address, Cuda, DeviceInfo, Stream, succeed};
use crate::{Error, Result};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// One kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(sys::CUfunction);

/// All kernels.
pub struct Kernels {
    modules: Vec<sys::CUmodule>,
    found: std::sync::Mutex<HashMap<&'static str, Kernel>>,
    shared_bytes: usize,
}

impl Kernels {
    pub(super) fn load(info: &DeviceInfo) -> Result<Self> {
        let modules = MODULES.iter().map(|(name, image)| {
            // The emulated device has its kernels built in.
            if image.is_empty() && !info.is_emulated() {
                return Err(Error::Device(
                    "this build has no GPU kernels: build it where nvcc is (scripts/cuda-toolchain fetches one), or \
                     use --device cpu"
                        .into(),
                ));
            }
            let mut module = ptr::null_mut();
            // SAFETY: the image is a whole fatbin; writes one pointer.
            succeed(&format!("loading the kernels of {name}.cu"), unsafe {
                sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
            })?;
            Ok(module)
        });
        Ok(Self {
            modules: modules.collect::<Result<_>>()?,
            found: Default::default(),
            shared_bytes: info.shared_bytes,
        })
    }

    pub(super) fn none() -> Self {
        Self { modules: Vec::new(), found: Default::default(), shared_bytes: 0 }
    }

    /// The kernel called `name`. Panics if there is none: a bug.
    pub fn get(&self, name: &'static str) -> Kernel {
        let mut found = self.found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *found.entry(name).or_insert_with(|| self.find(name).unwrap_or_else(|| panic!("there is no kernel {name}")))
    }

    fn find(&self, name: &str) -> Option<Kernel> {
        let name = CString::new(name).ok()?;
        self.modules.iter().find_map(|&module| {
            let mut function = ptr::null_mut();
            // SAFETY: writes one pointer; the module lives as long as the process.
            let found = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
            if found != sys::CUresult::CUDA_SUCCESS {
                return None;
            }
            // Blocks may ask for more shared memory than the 48 KB that need no asking.
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // What the kernel has of its own counts too.
            let mut own = 0;
            // SAFETY: the function lives.
            unsafe {
                let _ = sys::cuFuncGetAttribute(
                    &mut own,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                    function,
                );
                let _ = sys::cuFuncSetAttribute(function, most, self.shared_bytes as i32 - own);
            }
            Some(Kernel(function))
        })
    }
}

/// What a kernel takes.
///
/// # Safety
/// The type lies in memory as the kernel's parameter does.
pub(crate) unsafe trait Argument: Copy {}
// SAFETY: an address is 64 bits.
unsafe impl<T> Argument for Address<T> {}
// SAFETY: the same on both sides.
unsafe impl Argument for i32 {}
// SAFETY: the same on both sides.
unsafe impl Argument for u32 {}
// SAFETY: the same on both sides.
unsafe impl Argument for i64 {}
// SAFETY: the same on both sides.
unsafe impl Argument for f32 {}

/// The address of an argument, for the driver.
pub(crate) fn pointer<T: Argument>(argument: &T) -> *mut c_void {
    ptr::from_ref(argument).cast_mut().cast()
}

impl Cuda {
    /// Enqueues a kernel; [`launch!`] writes the arguments. Grids of no blocks are skipped.
    ///
    /// # Safety
    /// `arguments` are as many and of the types that the kernel declares, and its addresses are of what it reads and
    /// writes.
    pub(crate) unsafe fn launch_raw(
        &self,
        stream: &Stream,
        name: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared_bytes: usize,
        arguments: &mut [*mut c_void],
    ) {
        if grid.contains(&0) || self.is_plan() {
            return;
        }
        self.take_independent();
        self.mark(stream, name);
        let Kernel(function) = self.kernels.get(name);
        let [x, y, z] = grid.map(|n| n as u32);
        // Each may be on its way before the one in front of it has ended: all kernels wait where they begin.
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: stream.0,
            attrs: &mut early,
            numAttrs: u32::from(stream.is_ours() && self.info.capability >= (9, 0)),
        };
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), ptr::null_mut()) };
        self.note(name, result);
    }
}

/// `launch!(cuda, stream, "name", [grid], threads, shared bytes; arguments...)`
macro_rules! launch {
    ($cuda:expr, $stream:expr, $name:expr, $grid:expr, $threads:expr, $shared:expr; $($argument:expr),* $(,)?) => {
        // SAFETY: arguments are those of the kernel's declaration, and buffers are as large as its header asks.
        #[allow(unsafe_code)]
        unsafe {
            // One expression, so that the arguments live until the call is over.
            $cuda.launch_raw($stream, $name, $grid, $threads, $shared, &mut [$(crate::cuda::kernels::pointer(&$argument)),*])
        }
    };
}
pub(crate) use launch;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use half::bf16;

    use super::*;
    use crate::cuda::DeviceBuffer;

    /// The emulated GPU, if it was built: what a launch does wrong ends a real one for the whole process.
    fn emulator() -> Option<Arc<Cuda>> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/emulator/libcuda.so.1");
        // SAFETY: the library's own initializers run; it stays.
        unsafe { libloading::Library::new(path) }.map(std::mem::forget).ok()?;
        Cuda::open(0).ok().filter(|cuda| cuda.info.is_emulated())
    }

    /// A product of zeros by a kernel of 128 threads and 53,248 bytes, launched with others.
    fn product(threads: u32, shared_bytes: usize) -> Option<Result<()>> {
        const N: usize = 128;
        const K: usize = 1024;
        let cuda = emulator()?;
        let zeros = |bytes| DeviceBuffer::<u8>::zeros(&cuda, bytes).unwrap();
        let (weights, x, y) = (zeros(N * K), zeros(16 * K * 2), zeros(16 * N * 4));
        let (x, bias) = (x.address().cast::<bf16>(), Address::<f32>::NULL);
        let [tokens, n, k, group, flags] = [16, N, K, 32, 0].map(|n: usize| n as i32);
        launch!(cuda, &cuda.compute, "packed_linear_int4_g32_t16", [1, 1, 1], threads, shared_bytes;
            weights.address(), x, y.address(), bias, tokens, n, k, group, k, n, flags);
        Some(cuda.synchronize())
    }

    #[test]
    fn shared_memory_ends_where_the_launch_said() {
        let Some(enough) = product(128, 53_248) else { return };
        enough.unwrap();
        for bytes in [53_248 - 16, 53_248 - 1024, 1024, 0] {
            let error = product(128, bytes).unwrap().unwrap_err().to_string();
            assert!(error.contains("error 700"), "{bytes} bytes: {error}");
        }
    }

    #[test]
    fn a_kernel_has_its_own_number_of_threads() {
        let Some(wrong) = product(256, 53_248) else { return };
        let error = wrong.unwrap_err().to_string();
        assert!(error.contains("packed_linear_int4_g32_t16 failed: error 1"), "{error}");
    }
}
