//! The kernels of `kernels/*.cu`: what their files declare of a launch, as kernels/contract.rs reads it, and launches.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CString, OsStr, c_void};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;

use cudarc::driver::sys;
use half::bf16;

use super::{Address, Cuda, CudaStream, DeviceInfo, TensorMap, succeed};
use crate::{Error, Result};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// Kernels, structs and constants by their names in `kernels/*.cu`.
#[allow(dead_code, non_upper_case_globals, clippy::type_complexity)] // generated
mod contract {
    use super::*;

    include!(concat!(env!("OUT_DIR"), "/contract.rs"));
}
pub(crate) use contract::*;

use self::contract::experts_gemv::WARP;

/// One kernel, as its file declares it; `A` are the types of its parameters, in order.
pub(crate) struct Kernel<A> {
    pub(crate) name: &'static str,
    threads: u32,             // of a block, at most
    shared_bytes: [usize; 2], // of dynamic shared memory, without and with `DeviceInfo::has_wgmma`
    /// What tells it from others of its family: its file says what the numbers are.
    pub(crate) tile: [usize; 3],
    arguments: PhantomData<fn(A)>,
}

impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kernel<A> {}

impl<A> Kernel<A> {
    const fn new(name: &'static str, threads: u32, shared_bytes: [usize; 2], tile: [usize; 3]) -> Self {
        Self { name, threads, shared_bytes, tile, arguments: PhantomData }
    }

    /// Warps of a block, at most.
    pub(crate) fn warps(&self) -> usize {
        self.threads as usize / WARP
    }

    /// With smaller blocks, which its file must allow.
    pub(crate) fn with_warps(self, warps: usize) -> Self {
        assert!((1..=self.warps()).contains(&warps), "{} has blocks of up to {} warps", self.name, self.warps());
        Self { threads: (warps * WARP) as u32, ..self }
    }

    /// Blocks that shared memory lets run on a multiprocessor at once, the system's 1 KiB of each counted.
    pub(crate) fn blocks_at_once(&self, info: &DeviceInfo) -> usize {
        (info.shared_bytes / (self.shared_bytes[usize::from(info.has_wgmma())] + 1024)).max(1)
    }
}

/// A kernel of any parameters.
#[cfg(test)]
pub(crate) struct Row {
    name: &'static str,
    threads: u32,
    parameters: &'static [usize], // their sizes
}

#[cfg(test)]
impl<A: Arguments> Kernel<A> {
    const fn row(&self) -> Row {
        Row { name: self.name, threads: self.threads, parameters: A::SIZES }
    }
}

/// A folder of modules that replace those of the build, for those who write kernels: no build stands between a change
/// and its speed.
const KERNEL_DIR: &str = "MOEBIUS_KERNEL_DIR";

/// The kernels of `name`.cu: `name`.cubin of `dir` where there is one, else those of the build.
fn image_of<'a>(name: &str, built: &'a [u8], dir: Option<&OsStr>) -> Result<Cow<'a, [u8]>> {
    let Some(path) = dir.map(|dir| Path::new(dir).join(format!("{name}.cubin"))).filter(|path| path.is_file()) else {
        return Ok(Cow::Borrowed(built));
    };
    let image = std::fs::read(&path).map_err(Error::io(&path))?;
    crate::log::print(&format!("{KERNEL_DIR}: the kernels of {} replace the built ones", path.display()));
    Ok(Cow::Owned(image))
}

/// Hundredths of a multiprocessor's memory that products of few tokens want as shared memory, not as L1: 132 KB on
/// Hopper. They follow one another within microseconds, and a multiprocessor must be empty to divide its memory anew.
/// Measured on an H200: benches/record/h200-16-cores/2026-11-28-decode.json.
const SHARED_OF_FEW_TOKENS: i32 = 58;

/// A kernel on a device.
#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

/// All kernels.
pub struct Kernels {
    modules: Vec<sys::CUmodule>,
    found: std::sync::Mutex<HashMap<&'static str, Function>>,
    shared_bytes: usize,
    is_hopper: bool,
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
            let image = image_of(name, image, std::env::var_os(KERNEL_DIR).as_deref())?;
            let mut module = ptr::null_mut();
            // SAFETY: the image is a whole fatbin or cubin; writes one pointer.
            succeed(&format!("loading the kernels of {name}.cu"), unsafe {
                sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
            })?;
            Ok(module)
        });
        Ok(Self {
            modules: modules.collect::<Result<_>>()?,
            found: Default::default(),
            shared_bytes: info.shared_bytes,
            is_hopper: info.has_wgmma(),
        })
    }

    pub(super) fn none() -> Self {
        Self { modules: Vec::new(), found: Default::default(), shared_bytes: 0, is_hopper: false }
    }

    /// Loads a kernel before its first launch, which then takes no memory.
    pub(crate) fn prepare<A>(&self, kernel: Kernel<A>) {
        self.get(kernel.name);
    }

    /// Loads all kernels of the current device. The driver may wait for all that runs there before it loads one, and a
    /// sum of several devices that waits for another one's, whose thread waits for the driver, would never end.
    pub(super) fn load_all(&self) -> Result<()> {
        for &module in &self.modules {
            let mut count = 0;
            // SAFETY: writes one number.
            succeed("counting kernels", unsafe { sys::cuModuleGetFunctionCount(&mut count, module) })?;
            let mut functions = vec![ptr::null_mut(); count as usize];
            // SAFETY: writes as many pointers.
            succeed("listing kernels", unsafe {
                sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module)
            })?;
            for function in functions {
                // SAFETY: the function is of a module that lives as long as the process.
                succeed("loading a kernel", unsafe { sys::cuFuncLoad(function) })?;
            }
        }
        Ok(())
    }

    /// The kernel called `name`. Panics if there is none: a bug.
    fn get(&self, name: &'static str) -> Function {
        let mut found = self.found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *found.entry(name).or_insert_with(|| self.find(name).unwrap_or_else(|| panic!("there is no kernel {name}")))
    }

    fn find(&self, kernel: &str) -> Option<Function> {
        let name = CString::new(kernel).ok()?;
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
                if self.is_hopper && kernel.contains("gemv") {
                    let part = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                    let _ = sys::cuFuncSetAttribute(function, part, SHARED_OF_FEW_TOKENS);
                }
            }
            Some(Function(function))
        })
    }
}

/// One thing that a kernel takes.
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

/// All that a kernel takes, in its order.
pub(crate) trait Arguments {
    /// Bytes of each.
    #[cfg(test)]
    const SIZES: &'static [usize];

    /// Calls `launch` with the address of each, as the driver wants them.
    fn each_address<T>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> T) -> T;
}

/// Implements [`Arguments`] for tuples: of the first of these types, of the first two, and so on.
macro_rules! arguments {
    ([$($type:ident $at:tt)*]) => {};
    ([$($type:ident $at:tt)*] $next:ident $last:tt $($rest:tt)*) => {
        impl<$($type: Argument,)* $next: Argument> Arguments for ($($type,)* $next,) {
            #[cfg(test)]
            const SIZES: &'static [usize] = &[$(size_of::<$type>(),)* size_of::<$next>()];

            fn each_address<T>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> T) -> T {
                launch(&mut [
                    $(ptr::from_ref(&self.$at).cast_mut().cast(),)* ptr::from_ref(&self.$last).cast_mut().cast()
                ])
            }
        }
        arguments!([$($type $at)* $next $last] $($rest)*);
    };
}
arguments!([] A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9 K 10 L 11 M 12 N 13 O 14 P 15 Q 16 R 17 S 18 U 19);

impl Cuda {
    /// Enqueues a kernel: see [`launch!`]. Grids of no blocks are skipped.
    ///
    /// # Safety
    /// Addresses are of what the kernel reads and writes.
    pub(crate) unsafe fn launch<A: Arguments>(
        &self,
        stream: &CudaStream,
        kernel: Kernel<A>,
        grid: [usize; 3],
        arguments: A,
    ) {
        if grid.contains(&0) || self.is_plan() {
            return;
        }
        self.take_independent();
        self.mark(stream, kernel.name);
        let Function(function) = self.kernels.get(kernel.name);
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
            blockDimX: kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.shared_bytes[usize::from(self.info.has_wgmma())] as u32,
            hStream: stream.0,
            attrs: &mut early,
            numAttrs: u32::from(stream.overlaps() && self.info.capability >= (9, 0)),
        };
        let result = arguments.each_address(|addresses| {
            // SAFETY: the arguments' number and types are the kernel's, their addresses are the caller's promise.
            unsafe { sys::cuLaunchKernelEx(&config, function, addresses.as_mut_ptr(), ptr::null_mut()) }
        });
        self.note(kernel.name, result);
    }
}

/// `launch!(cuda, stream, kernel, grid; arguments...)`
macro_rules! launch {
    ($cuda:expr, $stream:expr, $kernel:expr, $grid:expr; $($argument:expr),* $(,)?) => {
        // SAFETY: buffers are as large as the kernel's file asks.
        #[allow(unsafe_code)]
        unsafe {
            $cuda.launch($stream, $kernel, $grid, ($($argument,)*))
        }
    };
}
pub(crate) use launch;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::cuda::DeviceBuffer;

    /// The emulated GPU, if it was built: what a launch does wrong ends a real one for the whole process.
    fn emulator() -> Option<Arc<Cuda>> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/emulator/libcuda.so.1");
        // SAFETY: the library's own initializers run; it stays.
        unsafe { libloading::Library::new(path) }.map(std::mem::forget).ok()?;
        Cuda::open(0).ok().filter(|cuda| cuda.info.is_emulated())
    }

    /// A product of zeros, by a kernel that needs all of its shared memory.
    fn product(kernel: Kernel<LinearArguments>) -> Option<Result<()>> {
        const N: usize = 128;
        const K: usize = 1024;
        let cuda = emulator()?;
        let zeros = |bytes| DeviceBuffer::<u8>::zeros(&cuda, bytes).unwrap();
        let (weights, x, y) = (zeros(N * K), zeros(16 * K * 2), zeros(16 * N * 4));
        let [tokens, n, k, group, flags] = [16, N, K, 32, 0].map(|n: usize| n as i32);
        launch!(cuda, &cuda.compute, kernel, [1, 1, 1];
            weights.address(), x.address().cast(), y.address(), Address::NULL, tokens, n, k, group, k, n, flags);
        Some(cuda.synchronize())
    }

    #[test]
    fn a_folder_replaces_the_modules_that_it_has() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("gemv.cubin"), b"new").unwrap();
        let image = |name, dir| image_of(name, b"built", dir).unwrap().into_owned();
        assert_eq!(image("gemv", None), b"built");
        assert_eq!(image("gemv", Some(dir.path().as_os_str())), b"new");
        assert_eq!(image("router", Some(dir.path().as_os_str())), b"built");
    }

    #[test]
    fn shared_memory_ends_where_the_launch_said() {
        let kernel = packed_linear_int4_g32_t16;
        let Some(enough) = product(kernel) else { return };
        enough.unwrap();
        for missing in [16, 1024, kernel.shared_bytes[1]] {
            let fewer = Kernel { shared_bytes: kernel.shared_bytes.map(|bytes| bytes - missing), ..kernel };
            let error = product(fewer).unwrap().unwrap_err().to_string();
            assert!(error.contains("error 700"), "{missing} bytes are missing: {error}");
        }
    }

    #[test]
    fn a_kernel_has_its_own_number_of_threads() {
        let Some(wrong) = product(Kernel { threads: 256, ..packed_linear_int4_g32_t16 }) else { return };
        let error = wrong.unwrap_err().to_string();
        assert!(error.contains("packed_linear_int4_g32_t16 failed: error 1"), "{error}");
    }
    #[test]
    fn what_was_read_is_what_was_compiled() {
        let Some(cuda) = emulator() else { return };
        assert!(ALL.len() > 100);
        for Row { name, threads, parameters } in ALL {
            let Function(function) = cuda.kernels.get(name);
            let mut most = 0;
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
            // SAFETY: writes one number.
            succeed(name, unsafe { sys::cuFuncGetAttribute(&mut most, attribute, function) }).unwrap();
            assert_eq!(most, *threads as i32, "threads of {name}");
            let sizes: Vec<usize> = (0..).map_while(|i| parameter_bytes(function, i)).collect();
            assert_eq!(sizes, *parameters, "parameters of {name}");
        }
    }

    fn parameter_bytes(function: sys::CUfunction, i: usize) -> Option<usize> {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two numbers.
        let found = unsafe { sys::cuFuncGetParamInfo(function, i, &mut offset, &mut size) };
        (found == sys::CUresult::CUDA_SUCCESS).then_some(size)
    }
}
