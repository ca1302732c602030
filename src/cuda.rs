//! The CUDA driver, as far as the engine needs it: one device, its memory, two streams, kernels, graphs.
//!
//! ```text
//! kernels       the kernels of `kernels/*.cu`, as their files declare them, and launches
//! memory        buffers on the device, pinned and registered ones on the host
//! stream        streams and events
//! graph         recorded launches
//! hop           numbers on their way from one device to the next
//! beside        sums over several devices beside what else these compute
//! rank          several devices that sum what each has computed
//! cublas_lt     products of many rows
//! bandwidth     what memory and the link carry
//! profile       how long each op took
//! ```
//!
//! The driver is loaded when a device is opened; a machine without one is an ordinary `Err`. Launches and copies do not
//! return errors one by one: the first that fails is kept, and told by [`Cuda::check`], which everything that waits
//! calls.
//!
//! Imports no other room. Read [`Cuda`] first.
#![allow(unsafe_code)]

mod bandwidth;
mod beside;
pub(crate) mod cublas_lt;
mod graph;
mod hop;
pub(crate) mod kernels;
mod memory;
mod profile;
mod rank;
mod stream;

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use crate::{Error, Result};

pub use graph::Graph;
pub use hop::Hop;
pub use kernels::Kernels;
pub(crate) use kernels::launch;
pub use memory::{Address, DeviceBuffer, PinnedBuffer, Registered, Runs, SharedMemory, TensorMap};
pub use rank::Rank;
pub(crate) use rank::{ALONE, MAX_RANKS};
use stream::Aside;
pub use stream::{CudaEvent, CudaStream};

/// The least driver that the kernels need, as `cuDriverGetVersion` counts: CUDA 13.0, driver 580.
const DRIVER: i32 = 13000;

/// What there is to know of a device before it is used.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// As the driver calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Dynamic shared memory that a block may ask for, in bytes.
    pub shared_bytes: usize,
    /// Memory of the device, in bytes.
    pub total_bytes: u64,
    /// Free memory, in bytes.
    pub free_bytes: u64,
}

impl DeviceInfo {
    /// Name and compute capability: GPUs that share a model are alike in both.
    pub fn kind(&self) -> (&str, (i32, i32)) {
        (&self.name, self.capability)
    }

    /// Why no kernel runs on it, if so.
    pub fn lacks(&self) -> Option<String> {
        let (major, minor) = self.capability;
        (major < 8).then(|| format!("has compute capability {major}.{minor} and 8.0 is needed"))
    }

    /// Whether it is kernels/emulator: right, and slow.
    pub fn is_emulated(&self) -> bool {
        self.name == "emulated GPU"
    }

    /// Whether kernels multiply by warpgroups: `HAS_WGMMA` in kernels/device.cuh.
    pub fn has_wgmma(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// An open device.
pub struct Cuda {
    context: sys::CUcontext,
    /// What it is.
    pub info: DeviceInfo,
    /// Where ops run.
    pub compute: CudaStream,
    /// Where what they will need is copied.
    pub copy: CudaStream,
    pieces: Aside,
    /// All kernels.
    pub kernels: Kernels,
    allocated: AtomicU64,
    pinned: AtomicU64,
    recording: AtomicBool,
    rehearsing: AtomicBool,
    independent: AtomicBool,
    marks: Mutex<Option<profile::Marks>>,
    /// Nothing is done, only counted: there need be no device.
    planned: bool,
    failed: Mutex<Option<String>>,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver synchronizes.
unsafe impl Sync for Cuda {}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Whether a driver is there that can run the kernels. Errors: `Error::Device` with what is missing.
pub fn probe() -> Result<()> {
    static PROBED: std::sync::OnceLock<std::result::Result<(), String>> = std::sync::OnceLock::new();
    let probed = PROBED.get_or_init(|| {
        // cudarc panics where there is no library, so it is looked for first.
        // SAFETY: the driver's own initializers run.
        let library = ["libcuda.so", "libcuda.so.1"]
            .into_iter()
            .find_map(|name: &str| unsafe { libloading::Library::new(name).ok() });
        let Some(library) = library else {
            return Err("no NVIDIA driver is installed (libcuda.so.1 is not found)".into());
        };
        let mut version = 0;
        type Version = unsafe extern "C" fn(*mut i32) -> i32;
        // SAFETY: the type is the function's.
        let known = unsafe { library.get::<Version>(b"cuDriverGetVersion").map(|f| f(&mut version) == 0) };
        // The library stays: cudarc opens the same one.
        std::mem::forget(library);
        if !matches!(known, Ok(true)) || version < DRIVER {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the NVIDIA driver is for CUDA {major}.{minor}: install driver 580 or newer"));
        }
        // SAFETY: takes no pointers.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(format!("the NVIDIA driver does not start: {}", name_of(error))),
        }
    });
    probed.clone().map_err(Error::Device)
}

/// Devices of this machine, none if there is no driver.
pub fn devices() -> Vec<DeviceInfo> {
    if probe().is_err() {
        return Vec::new();
    }
    let mut count = 0;
    // SAFETY: writes one number.
    let _ = unsafe { sys::cuDeviceGetCount(&mut count) };
    (0..count).filter_map(|i| info(i).ok()).collect()
}

/// Bytes of a device's memory that cross its bus in a second, as it is built; `None`: the driver does not say.
pub(crate) fn bus_bandwidth(number: usize) -> Option<f64> {
    use sys::CUdevice_attribute::{CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE};
    let device = device_at(number as i32).ok()?;
    let [kilohertz, bits] =
        [CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH].map(|which| {
            let mut value = 0;
            // SAFETY: writes one number.
            let known = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
            if known == CUresult::CUDA_SUCCESS { f64::from(value) } else { 0.0 }
        });
    // Twice in each cycle.
    Some(2.0 * 1e3 * kilohertz * bits / 8.0).filter(|&rate| rate > 1e9)
}

/// Whether a device can read and write another's memory, and the other way.
pub(crate) fn can_access(a: usize, b: usize) -> bool {
    let (mut to, mut back) = (0, 0);
    let (Ok(a), Ok(b)) = (device_at(a as i32), device_at(b as i32)) else { return false };
    // SAFETY: each writes one number.
    let known = unsafe { (sys::cuDeviceCanAccessPeer(&mut to, a, b), sys::cuDeviceCanAccessPeer(&mut back, b, a)) };
    known == (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS) && to != 0 && back != 0
}

fn name_of(error: CUresult) -> String {
    let mut name: *const c_char = ptr::null();
    // SAFETY: the driver writes a pointer to a string of its own.
    unsafe {
        match sys::cuGetErrorName(error, &mut name) {
            CUresult::CUDA_SUCCESS if !name.is_null() => CStr::from_ptr(name).to_string_lossy().into_owned(),
            _ => format!("{error:?}"),
        }
    }
}

fn succeed(what: &str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(Error::Device(format!("{what} failed: {}", name_of(error)))),
    }
}

fn device_at(ordinal: i32) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: writes one number.
    succeed("opening the device", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    Ok(device)
}

fn info(ordinal: i32) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute::*;
    let device = device_at(ordinal)?;
    let mut name = [0 as c_char; 256];
    // SAFETY: the array is as long as said, and the driver ends the string in it.
    let name = unsafe {
        succeed("reading the device's name", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    };
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes one number.
        succeed("reading the device's properties", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok::<i32, Error>(value)
    };
    let mut total = 0;
    // SAFETY: writes one number.
    succeed("reading the device's memory", unsafe { sys::cuDeviceTotalMem_v2(&mut total, device) })?;
    Ok(DeviceInfo {
        name,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        total_bytes: total as u64,
        free_bytes: total as u64,
    })
}

impl Cuda {
    /// Opens device `ordinal` and loads the kernels onto it.
    ///
    /// Errors: `Error::Device` without a driver, without such a device, or in a build without kernels.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        probe().map_err(|why| Error::Device(format!("--device cuda:{ordinal}: {why}; use --device cpu")))?;
        let count = devices().len();
        if ordinal >= count {
            let have = if count == 0 {
                "there is no GPU".into()
            } else {
                format!("this machine has cuda:0 to cuda:{}", count - 1)
            };
            return Err(Error::Device(format!("--device cuda:{ordinal}: {have}; use --device cpu")));
        }
        let mut info = info(ordinal as i32)?;
        if let Some(lack) = info.lacks() {
            return Err(Error::Device(format!("{} {lack}: use --device cpu", info.name)));
        }
        let device = device_at(ordinal as i32)?;
        let mut context = ptr::null_mut();
        // SAFETY: writes one pointer; the primary context lives until the process ends.
        unsafe {
            succeed("opening the device", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            succeed("opening the device", sys::cuCtxSetCurrent(context))?;
            let (mut free, mut total) = (0, 0);
            succeed("reading the device's memory", sys::cuMemGetInfo_v2(&mut free, &mut total))?;
            info.free_bytes = free as u64;
        }
        let kernels = Kernels::load(&info)?;
        Ok(Arc::new(Self {
            context,
            compute: CudaStream::new()?,
            copy: CudaStream::branch()?,
            pieces: Aside::new()?,
            kernels,
            info,
            allocated: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            recording: AtomicBool::new(false),
            rehearsing: AtomicBool::new(false),
            independent: AtomicBool::new(false),
            marks: Mutex::default(),
            planned: false,
            failed: Mutex::new(None),
        }))
    }

    /// Gives a device up that nothing is left on, with what the driver took there.
    pub(crate) fn close(self: Arc<Self>, ordinal: usize) {
        let own = self.enter_thread().is_ok().then(|| Arc::into_inner(self)).flatten();
        if let (Some(own), Ok(device)) = (own, device_at(ordinal as i32)) {
            drop(own);
            // SAFETY: what `open` retained; other engines of the process have retained it for themselves.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
        }
    }

    /// A device that counts what would be taken and does nothing: what runs on it is a plan.
    pub fn plan(info: DeviceInfo) -> Arc<Self> {
        Arc::new(Self {
            context: ptr::null_mut(),
            compute: CudaStream::none(),
            copy: CudaStream::none(),
            pieces: Aside::none(),
            kernels: Kernels::none(),
            info,
            allocated: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            recording: AtomicBool::new(false),
            rehearsing: AtomicBool::new(false),
            independent: AtomicBool::new(false),
            marks: Mutex::default(),
            planned: true,
            failed: Mutex::new(None),
        })
    }

    /// Bytes of pinned RAM that a plan has counted.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Relaxed)
    }

    /// Whether nothing is done, only counted.
    pub fn is_plan(&self) -> bool {
        self.planned
    }

    /// Makes the device the calling thread's.
    pub fn enter_thread(&self) -> Result<()> {
        // SAFETY: the context is retained.
        succeed("opening the device", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Device memory that this process has taken through [`DeviceBuffer`]s, in bytes.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Relaxed)
    }

    /// Free device memory, in bytes.
    pub fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
            CUresult::CUDA_SUCCESS => free as u64,
            _ => 0,
        }
    }

    /// Keeps the first failure of what returns no `Result`.
    fn note(&self, what: &str, result: CUresult) {
        if result != CUresult::CUDA_SUCCESS {
            self.fail(|| format!("{what} failed: {}", name_of(result)));
        }
    }

    /// Keeps a failure, if it is the first: [`check`](Cuda::check) tells it.
    pub(crate) fn fail(&self, text: impl FnOnce() -> String) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(text);
    }

    /// The first failure since the device was opened: after it, nothing on the device can be trusted.
    pub fn check(&self) -> Result<()> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(text) => Err(Error::Device(text.clone())),
        }
    }

    /// Whether ops are being recorded instead of run.
    pub fn is_recording(&self) -> bool {
        self.recording.load(Relaxed)
    }

    /// Runs a pass whose like will be recorded: what it decides must be what a recording decides, or its results would
    /// be others.
    pub(crate) fn rehearse<T>(&self, pass: impl FnOnce() -> T) -> T {
        self.rehearsing.store(true, Relaxed);
        let done = pass();
        self.rehearsing.store(false, Relaxed);
        done
    }

    /// Whether ops are being recorded, or will be.
    pub(crate) fn is_rehearsing(&self) -> bool {
        self.is_recording() || self.rehearsing.load(Relaxed)
    }

    /// Promises that the next kernel and the last one may run at the same time: neither writes what the other one reads
    /// or writes, and the last one waits before it lets the next one begin.
    pub(crate) fn promise_independent(&self) {
        self.independent.store(true, Relaxed);
    }

    /// Whether that was promised of the kernel that is launched now.
    pub(crate) fn take_independent(&self) -> bool {
        self.independent.swap(false, Relaxed)
    }

    /// Errors: an op on the device failed. Does not wait.
    pub fn poll(&self) -> Result<()> {
        match self.compute.query() {
            CUresult::CUDA_ERROR_NOT_READY => {}
            result => self.note("an op on the device", result),
        }
        self.check()
    }

    /// Whether ops of the compute stream are under way. Does not wait.
    pub(crate) fn is_busy(&self) -> bool {
        self.compute.query() == CUresult::CUDA_ERROR_NOT_READY
    }

    /// Waits for all ops. Errors: the first of them that failed.
    pub fn synchronize(&self) -> Result<()> {
        let streams = if self.planned { &[][..] } else { &[&self.copy, &self.compute][..] };
        for stream in streams {
            self.note("an op on the device", stream.synchronize());
        }
        self.check()
    }
}
