//! Memory of the device, and memory of the host that the device can reach.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use bytemuck::Pod;
use cudarc::driver::sys;
use memmap2::{MmapOptions, MmapRaw};

use super::{Cuda, CudaStream, succeed};
use crate::{Error, Result};

/// Where something lies on the device, as kernels take it.
#[derive(Debug)]
#[repr(transparent)]
pub struct Address<T>(u64, PhantomData<T>);

impl<T> Clone for Address<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Address<T> {}

impl<T> Address<T> {
    /// Nowhere.
    pub const NULL: Self = Self(0, PhantomData);

    /// Whether it is nowhere.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }

    /// As a number.
    pub fn to_u64(self) -> u64 {
        self.0
    }

    /// The element `n` further on.
    #[allow(clippy::should_implement_trait)] // as of pointers
    pub fn add(self, n: usize) -> Self {
        Self(self.0 + (n * size_of::<T>()) as u64, PhantomData)
    }

    /// What another engine in this process says is there.
    pub fn of_another(address: u64) -> Self {
        Self(address, PhantomData)
    }

    /// The same place, of another type.
    pub fn cast<U>(self) -> Address<U> {
        Address(self.0, PhantomData)
    }
}

/// `len` numbers on the device, whatever they were.
pub struct DeviceBuffer<T> {
    cuda: Arc<Cuda>,
    address: Address<T>,
    len: usize,
    lent: bool, // another one's
}

// SAFETY: plain numbers at an address.
unsafe impl<T: Send> Send for DeviceBuffer<T> {}

impl<T: Pod> DeviceBuffer<T> {
    /// Takes memory. Errors: `Error::Resources` when the device has no more.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self> {
        let bytes = (len * size_of::<T>()).max(16);
        if cuda.is_plan() {
            cuda.allocated.fetch_add(bytes as u64, Relaxed);
            return Ok(Self { cuda: cuda.clone(), address: Address::NULL, len, lent: false });
        }
        let mut address = 0;
        // SAFETY: writes one number.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let mib = |bytes: u64| bytes >> 20;
            return Err(Error::Resources(format!(
                "the GPU has no {} MiB left ({} MiB are free): lower --max-context, --resident-experts or --vram, or \
                 close what else uses the GPU",
                mib(bytes as u64),
                mib(cuda.free_bytes())
            )));
        }
        succeed("taking device memory", result)?;
        cuda.allocated.fetch_add(bytes as u64, Relaxed);
        Ok(Self { cuda: cuda.clone(), address: Address(address, PhantomData), len, lent: false })
    }

    /// Zeros.
    pub fn zeros(cuda: &Arc<Cuda>, len: usize) -> Result<Self> {
        let buffer = Self::new(cuda, len)?;
        let bytes = len * size_of::<T>();
        if bytes > 0 && !cuda.is_plan() {
            // SAFETY: the buffer is as long.
            cuda.note("clearing memory", unsafe { sys::cuMemsetD8Async(buffer.address.0, 0, bytes, cuda.compute.0) });
        }
        Ok(buffer)
    }

    /// A copy of `data`; waits for it.
    pub fn from_slice(cuda: &Arc<Cuda>, data: &[T]) -> Result<Self> {
        let buffer = Self::new(cuda, data.len())?;
        if !cuda.is_plan() {
            cuda.upload(&cuda.compute, buffer.address, data);
            cuda.note("copying to the device", cuda.compute.synchronize());
        }
        cuda.check()?;
        Ok(buffer)
    }

    /// Some of its numbers, lent: as a buffer that must not outlive it.
    pub(crate) fn lend(&self, numbers: Range<usize>) -> Self {
        assert!(numbers.end <= self.len);
        Self { cuda: self.cuda.clone(), address: self.address.add(numbers.start), len: numbers.len(), lent: true }
    }

    /// Where it is.
    pub fn address(&self) -> Address<T> {
        self.address
    }

    /// Numbers in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Of no numbers.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes taken.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The first `out.len()` numbers; waits for all ops before. Errors: one of them failed.
    pub fn read(&self, out: &mut [T]) -> Result<()> {
        self.read_from(0, out)
    }

    /// The same from number `first` on.
    pub fn read_from(&self, first: usize, out: &mut [T]) -> Result<()> {
        assert!(first + out.len() <= self.len);
        self.cuda.download(&self.cuda.compute, self.address.add(first), out);
        self.cuda.note("an op on the device", self.cuda.compute.synchronize());
        self.cuda.check()
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.lent {
            return;
        }
        let bytes = (self.len * size_of::<T>()).max(16);
        self.cuda.allocated.fetch_sub(bytes as u64, Relaxed);
        if !self.cuda.is_plan() {
            // SAFETY: no copy of the address is left; the driver waits for kernels that still run.
            let _ = unsafe { sys::cuMemFree_v2(self.address.0) };
        }
    }
}

impl Cuda {
    /// Copies to the device, in the order of `stream`. Pageable memory may be reused when this returns; pinned memory
    /// when the copy is done.
    pub fn upload<T: Pod>(&self, stream: &CudaStream, to: Address<T>, from: &[T]) {
        if from.is_empty() || self.is_plan() {
            return;
        }
        let bytes = size_of_val(from);
        // SAFETY: the caller's address is of as many numbers.
        self.note("copying to the device", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast::<c_void>(), bytes, stream.0)
        });
    }

    /// Copies to the host, in the order of `stream`.
    pub fn download<T: Pod>(&self, stream: &CudaStream, from: Address<T>, to: &mut [T]) {
        if to.is_empty() || self.is_plan() {
            return;
        }
        let bytes = size_of_val(to);
        // SAFETY: the caller's address is of as many numbers.
        self.note("copying from the device", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast::<c_void>(), from.0, bytes, stream.0)
        });
    }
}

/// Runs of bytes at equal distances on the host, and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Runs<'a> {
    /// From the first run's first byte to the last one's last.
    pub from: &'a [u8],
    /// Bytes from one run to the next.
    pub from_pitch: usize,
    /// The same where they go.
    pub to_pitch: usize,
    /// Of a run.
    pub bytes: usize,
    /// How many.
    pub count: usize,
}

impl Cuda {
    /// As [`upload`](Cuda::upload), of runs of bytes.
    pub fn upload_runs(&self, stream: &CudaStream, to: Address<u8>, runs: Runs<'_>) {
        if runs.count == 0 || runs.bytes == 0 || self.is_plan() {
            return;
        }
        assert!(runs.from.len() >= (runs.count - 1) * runs.from_pitch + runs.bytes);
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: runs.from.as_ptr().cast(),
            srcDevice: 0,
            srcArray: ptr::null_mut(),
            srcPitch: runs.from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: to.0,
            dstArray: ptr::null_mut(),
            dstPitch: runs.to_pitch,
            WidthInBytes: runs.bytes,
            Height: runs.count,
        };
        // SAFETY: the bytes are there, as was seen above; the caller's address is of as many.
        self.note("copying to the device", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.0) });
    }
}

impl Cuda {
    /// Copies `bytes` bytes within the device's memory, in the order of `stream`.
    pub fn copy_within<T: Pod>(&self, stream: &CudaStream, to: Address<T>, from: Address<T>, bytes: usize) {
        if !self.is_plan() {
            // SAFETY: the caller's addresses are of as many bytes.
            self.note("copying on the device", unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, stream.0) });
        }
    }
}

/// Host memory that several processes map, cut into pieces in an order that all keep. It ends with the last of them.
pub struct SharedMemory {
    file: File,
    used: u64,   // bytes, of the pieces so far
    grows: bool, // of who made it: as long as its pieces
    path: PathBuf,
}

impl SharedMemory {
    /// Nothing yet. Errors: `Error::Resources`.
    pub fn new() -> Result<Self> {
        // SAFETY: the name ends with a zero.
        let number = unsafe { libc::memfd_create(c"moebius".as_ptr(), libc::MFD_CLOEXEC) };
        if number < 0 {
            let why = std::io::Error::last_os_error();
            return Err(Error::Resources(format!("memory that processes share could not be had: {why}")));
        }
        // SAFETY: a new descriptor, which nobody else closes.
        let file = unsafe { File::from_raw_fd(number) };
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        Ok(Self { file, used: 0, grows: true, path })
    }

    /// What another process has made. Errors: `Error::Resources`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path).map_err(|e| {
            Error::Resources(format!("{} of the first rank's process could not be opened: {e}", path.display()))
        })?;
        Ok(Self { file, used: 0, grows: false, path: path.into() })
    }

    /// By what others open it, while this lives.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves out a piece that others use.
    pub fn skip<T>(&mut self, len: usize) {
        self.used += Self::pages::<T>(len);
    }

    /// Bytes of a piece: whole pages, because each is pinned alone.
    fn pages<T>(len: usize) -> u64 {
        ((len * size_of::<T>()) as u64).next_multiple_of(4096).max(4096)
    }

    fn take<T>(&mut self, len: usize) -> std::io::Result<MmapRaw> {
        let (at, bytes) = (self.used, Self::pages::<T>(len));
        self.used += bytes;
        if self.grows {
            self.file.set_len(self.used)?;
        } else if self.file.metadata()?.len() < self.used {
            return Err(std::io::Error::other("it was made for other sizes"));
        }
        MmapOptions::new().offset(at).len(bytes as usize).map_raw(&self.file)
    }
}

/// Host memory that the device reads and writes directly. Zeros at first.
pub struct PinnedBuffer<T> {
    host: *mut T,
    len: usize,
    address: Address<T>,
    shared: Option<MmapRaw>, // with other processes
}

// SAFETY: plain numbers.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// Takes memory. Errors: `Error::Resources`.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self> {
        if cuda.is_plan() {
            cuda.pinned.fetch_add((len * size_of::<T>()) as u64, Relaxed);
            return Ok(Self { host: ptr::NonNull::dangling().as_ptr(), len: 0, address: Address::NULL, shared: None });
        }
        let bytes = (len * size_of::<T>()).max(64);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let (mut host, mut address) = (ptr::null_mut(), 0);
        // SAFETY: writes one pointer, then one number; the memory is as long as asked for.
        unsafe {
            succeed("pinning memory", sys::cuMemHostAlloc(&mut host, bytes, flags))
                .map_err(|e| Error::Resources(format!("{e}: raise `ulimit -l`, or close other programs")))?;
            ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            succeed("pinning memory", sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0))?;
        }
        Ok(Self { host: host.cast(), len, address: Address(address, PhantomData), shared: None })
    }

    /// The next piece of memory that processes share: what one of them has written there. Errors: `Error::Resources`.
    pub fn shared(memory: &mut SharedMemory, len: usize) -> Result<Self> {
        let map = memory
            .take::<T>(len)
            .map_err(|e| Error::Resources(format!("{} could not be mapped: {e}", memory.path.display())))?;
        let (host, mut address) = (map.as_mut_ptr(), 0);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the map is as long as it says, and is unmapped after it is given up in `drop`; writes one number.
        unsafe {
            succeed("pinning shared memory", sys::cuMemHostRegister_v2(host.cast(), map.len(), flags))?;
            let seen = sys::cuMemHostGetDevicePointer_v2(&mut address, host.cast(), 0);
            if seen != sys::CUresult::CUDA_SUCCESS {
                let _ = sys::cuMemHostUnregister(host.cast());
                succeed("pinning shared memory", seen)?;
            }
        }
        Ok(Self { host: host.cast(), len, address: Address(address, PhantomData), shared: Some(map) })
    }

    /// Where the device sees it.
    pub fn address(&self) -> Address<T> {
        self.address
    }
}

impl PinnedBuffer<u32> {
    /// One number that both sides change.
    pub fn atomic(&self, i: usize) -> &AtomicU32 {
        assert!(i < self.len);
        // SAFETY: in bounds, aligned, and only ever used as an atomic on this side.
        unsafe { AtomicU32::from_ptr(self.host.add(i)) }
    }
}

impl<T> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: allocated with this length, and cleared.
        unsafe { std::slice::from_raw_parts(self.host, self.len) }
    }
}

impl<T> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.address.to_u64() == 0 {
            return;
        }
        let host = self.host.cast();
        // SAFETY: registered, or allocated, by the driver.
        let _ =
            unsafe { if self.shared.is_some() { sys::cuMemHostUnregister(host) } else { sys::cuMemFreeHost(host) } };
    }
}

/// Memory of another owner, such as a mapped file, that the device copies from at full speed while this lives.
pub struct Registered {
    host: *mut c_void,
}

// SAFETY: only the address is kept.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Pins `bytes`, whole pages, where they lie, for all devices. They must stay mapped while this lives. Errors:
    /// `Error::Device`.
    pub fn new(bytes: &[u8], file: bool) -> Result<Self> {
        // A mapped file is pinned only with the read-only flag.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE
            | sys::CU_MEMHOSTREGISTER_DEVICEMAP
            | if file { sys::CU_MEMHOSTREGISTER_READ_ONLY } else { 0 };
        let host = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the range is mapped; it is only read.
        succeed("pinning the experts", unsafe { sys::cuMemHostRegister_v2(host, bytes.len(), flags) })?;
        Ok(Self { host })
    }

    /// Where kernels of the calling thread's device see it; `None`: only copies do.
    pub fn address(&self) -> Option<u64> {
        let mut address = 0;
        // SAFETY: writes one number.
        let seen = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.host, 0) };
        (seen == sys::CUresult::CUDA_SUCCESS).then_some(address)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in `new`.
        let _ = unsafe { sys::cuMemHostUnregister(self.host) };
    }
}

/// How a kernel's tensor copies find a box of numbers: what the driver makes of a tensor's address, dimensions and
/// pitches.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

// SAFETY: as kernels/device.cuh declares it.
unsafe impl super::kernels::Argument for TensorMap {}

impl Cuda {
    /// A map of bf16 numbers `[batch, rows, cols]`, `dims` and `pitches` (of rows and of the batch, in numbers)
    /// innermost first, copied in boxes of 64 by 64 whose rows are swizzled.
    pub(crate) fn tensor_map(&self, address: Address<half::bf16>, dims: [usize; 3], pitches: [usize; 2]) -> TensorMap {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        if self.is_plan() {
            return TensorMap(map.opaque);
        }
        let dims = dims.map(|n| n as u64);
        let strides = pitches.map(|n| 2 * n as u64);
        // SAFETY: all arrays are as long as the rank asks; the map is written.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address.0 as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                [64, 64, 1].as_ptr(),
                [1, 1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        self.note("describing a tensor", result);
        TensorMap(map.opaque)
    }
}
