//! Arrays of any library through the DLPack protocol (<https://dmlc.github.io/dlpack>), without a copy.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use moebius::experts::RowType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64, // null: rows one after the other
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// The newest supported version.
const MAJOR: u32 = 1;
const READ_ONLY: u64 = 1;

enum Owner {
    Old(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the capsule was marked as used, so its structure is ours to give back, once.
        unsafe {
            match *self {
                Owner::Old(managed) => (*managed).deleter.map(|delete| delete(managed)),
                Owner::Versioned(managed) => (*managed).deleter.map(|delete| delete(managed)),
            }
        };
    }
}

/// The device of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DlDevice {
    Cpu,
    Cuda(i32),
}

/// The type of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float(RowType),
    Int(usize), // bytes
    Bool,
}

/// An array of another library, kept alive.
pub(crate) struct View {
    _owner: Owner,
    data: u64,
    read_only: bool,
    name: &'static str,
    pub(crate) device: DlDevice,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
}

// SAFETY: an address and numbers; deleters take the GIL if they need it.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// The array that `object` exports. `name` is for messages.
    ///
    /// Errors: TypeError when it is not an array, or has an unknown type or device; ValueError when it is not
    /// contiguous.
    pub(crate) fn of(object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Self> {
        let py = object.py();
        let no_array = |_| {
            PyTypeError::new_err(format!(
                "{name} is not an array: expected one with __dlpack__, such as numpy's and torch's"
            ))
        };
        let (device_type, device_id): (i32, i32) =
            object.call_method0("__dlpack_device__").map_err(no_array)?.extract()?;
        let device = match device_type {
            1 | 3 => DlDevice::Cpu, // pinned memory is the host's
            2 | 13 => DlDevice::Cuda(device_id),
            other => {
                return Err(PyTypeError::new_err(format!(
                    "{name} is on DLPack device type {other}: expected the CPU or CUDA"
                )));
            }
        };
        let kwargs = PyDict::new(py);
        if device != DlDevice::Cpu {
            // Nothing to wait for: all work happens on the caller's stream.
            kwargs.set_item("stream", -1)?;
        }
        kwargs.set_item("max_version", (MAJOR, 0))?;
        let capsule = match object.call_method("__dlpack__", (), Some(&kwargs)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                kwargs.del_item("max_version")?;
                object.call_method("__dlpack__", (), Some(&kwargs))
            }
            other => other,
        }
        .map_err(|error| PyTypeError::new_err(format!("{name} cannot be shared: {error}")))?;
        let (owner, read_only) = take(&capsule, name)?;
        // SAFETY: the structure lives as long as its owner.
        let tensor = unsafe {
            match owner {
                Owner::Old(managed) => &(*managed).tensor,
                Owner::Versioned(managed) => &(*managed).tensor,
            }
        };
        let kind = match (tensor.code, tensor.bits, tensor.lanes) {
            (2, 32, 1) => Kind::Float(RowType::F32),
            (2, 16, 1) => Kind::Float(RowType::F16),
            (4, 16, 1) => Kind::Float(RowType::Bf16),
            (0, bits @ (32 | 64), 1) => Kind::Int(usize::from(bits / 8)),
            (6 | 1, 8, 1) => Kind::Bool,
            (code, bits, _) => {
                return Err(PyTypeError::new_err(format!(
                    "{name} has numbers of DLPack type {code} and {bits} bits: expected float32, float16, bfloat16, \
                     int32, int64 or bool"
                )));
            }
        };
        let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
        let numbers = |at: *const i64| -> Vec<i64> {
            // SAFETY: both arrays have as many numbers as the tensor has dimensions.
            (0..ndim).map(|i| unsafe { *at.add(i) }).collect()
        };
        let shape: Vec<usize> = numbers(tensor.shape).iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        if !tensor.strides.is_null() && !shape.contains(&0) {
            let mut expected = 1;
            for (&n, stride) in shape.iter().zip(numbers(tensor.strides)).rev() {
                if n > 1 && stride != expected {
                    return Err(PyValueError::new_err(format!(
                        "{name} is not contiguous: give {name}.contiguous(), or a copy"
                    )));
                }
                expected *= n as i64;
            }
        }
        let data = (tensor.data as u64).wrapping_add(tensor.byte_offset);
        let view = Self { data, read_only, name, device, kind, shape, _owner: owner };
        if !view.data.is_multiple_of(view.number_bytes() as u64) {
            return Err(PyValueError::new_err(format!("{name} is not aligned to its elements: give a copy")));
        }
        Ok(view)
    }

    fn number_bytes(&self) -> usize {
        match self.kind {
            Kind::Float(rows) => rows.bytes(),
            Kind::Int(bytes) => bytes,
            Kind::Bool => 1,
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.data
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.number_bytes()
    }

    /// The elements, on the CPU.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        assert_eq!(self.device, DlDevice::Cpu);
        match self.bytes() {
            // Aligned for any type.
            0 => bytemuck::cast_slice::<u64, u8>(&[]),
            // SAFETY: the array is as long and contiguous, as checked, and lives with its owner. All bits are numbers,
            // so a caller that writes it meanwhile gets numbers too.
            bytes => unsafe { std::slice::from_raw_parts(self.data as *const u8, bytes) },
        }
    }

    /// The elements, writable. Errors: the array is read-only.
    pub(crate) fn as_bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        assert_eq!(self.device, DlDevice::Cpu);
        if self.read_only {
            return Err(PyValueError::new_err(format!("{} is read-only: give a writable array", self.name)));
        }
        Ok(match self.bytes() {
            0 => bytemuck::cast_slice_mut::<u64, u8>(&mut []),
            // SAFETY: as above, and it may be written.
            bytes => unsafe { std::slice::from_raw_parts_mut(self.data as *mut u8, bytes) },
        })
    }

    /// Integers as 32 bits. Those that do not fit become -1.
    pub(crate) fn ids(&self) -> PyResult<Vec<i32>> {
        match self.kind {
            Kind::Int(4) => Ok(bytemuck::cast_slice(self.as_bytes()).to_vec()),
            Kind::Int(8) => Ok(bytemuck::cast_slice::<u8, i64>(self.as_bytes())
                .iter()
                .map(|&id| i32::try_from(id).unwrap_or(-1))
                .collect()),
            _ => Err(self.wrong_type("int32 or int64")),
        }
    }

    /// Numbers as f32.
    pub(crate) fn floats(&self) -> PyResult<Vec<f32>> {
        let halves = || bytemuck::cast_slice::<u8, u16>(self.as_bytes()).iter();
        match self.kind {
            Kind::Float(RowType::F32) => Ok(bytemuck::cast_slice(self.as_bytes()).to_vec()),
            Kind::Float(RowType::F16) => Ok(halves().map(|&x| half::f16::from_bits(x).to_f32()).collect()),
            Kind::Float(RowType::Bf16) => Ok(halves().map(|&x| half::bf16::from_bits(x).to_f32()).collect()),
            _ => Err(self.wrong_type("float32, float16 or bfloat16")),
        }
    }

    /// A row of flags that may change while this lives.
    pub(crate) fn flag(&self, i: usize) -> bool {
        debug_assert!(self.kind == Kind::Bool && self.device == DlDevice::Cpu);
        if i >= self.shape[0] {
            return false;
        }
        // SAFETY: in bounds; a byte that others may write is read at once.
        unsafe { std::sync::atomic::AtomicU8::from_ptr((self.data as *mut u8).add(i)) }
            .load(std::sync::atomic::Ordering::Relaxed)
            != 0
    }

    pub(crate) fn wrong_type(&self, expected: &str) -> PyErr {
        PyTypeError::new_err(format!("{} has another element type: expected {expected}", self.name))
    }

    pub(crate) fn wrong_shape(&self, expected: &str) -> PyErr {
        PyValueError::new_err(format!("{} has shape {:?}: expected {expected}", self.name, self.shape))
    }
}

/// The structure in a capsule, and whether it is read-only. Marks the capsule as used.
fn take(capsule: &Bound<'_, PyAny>, name: &'static str) -> PyResult<(Owner, bool)> {
    let valid = |which: &CStr| {
        // SAFETY: the GIL is held, the object lives.
        unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), which.as_ptr()) != 0 }
    };
    let pointer = |which: &CStr, used: &'static CStr| {
        // SAFETY: the capsule is valid under this name; the new name is static.
        unsafe {
            let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), which.as_ptr());
            ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr());
            pointer
        }
    };
    if valid(c"dltensor_versioned") {
        let managed = pointer(c"dltensor_versioned", c"used_dltensor_versioned").cast::<ManagedVersioned>();
        let owner = Owner::Versioned(managed);
        // SAFETY: the producer made it; the first fields and the deleter are the same in all versions.
        let (major, flags) = unsafe { ((*managed).major, (*managed).flags) };
        if major > MAJOR {
            return Err(PyTypeError::new_err(format!("{name} uses DLPack {major}: version {MAJOR} is supported")));
        }
        return Ok((owner, flags & READ_ONLY != 0));
    }
    if valid(c"dltensor") {
        return Ok((Owner::Old(pointer(c"dltensor", c"used_dltensor").cast()), false));
    }
    Err(PyTypeError::new_err(format!("{name} has a __dlpack__ that does not return a DLPack capsule")))
}
