//! cuBLASLt, where a CUDA toolkit or a Python package has brought it: BF16 products with f32 sums.
//!
//! Nothing is linked: the library is looked for when it is asked for, and the few functions that are called are
//! declared here. Only version 13 is taken, whose numbers these are, and which every driver that runs our kernels runs,
//! too.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use half::bf16;

use super::{Address, Cuda, DeviceBuffer};
use crate::{Error, Result};

/// As the loader knows it.
const LIBRARY: &str = "libcublasLt.so.13";

/// Its major version.
const MAJOR: usize = 13;

// Of cublasLt.h and library_types.h.
const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const TRANSPOSED: c_int = 1;
const DESC_TRANSPOSE_A: c_int = 3;
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_BATCH_STEP: c_int = 6;
const PREFER_WORKSPACE_BYTES: c_int = 1;
const PREFER_REDUCTIONS: c_int = 3;
const PREFER_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
/// Parts of k are added up in f32, in a fixed order.
const REDUCE_IN_F32: u32 = 2;

/// What rows and batch steps are aligned to, in bytes: 8 bf16 numbers.
const ALIGNMENT: u32 = 16;

/// Shapes whose plans are kept.
const MAX_PLANS: usize = 4096;

type CublasStatus = c_int;
type Opaque = *mut c_void;

/// `cublasLtMatmulAlgo_t`
#[derive(Clone, Copy)]
#[repr(C)]
struct Algo([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`
#[derive(Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algo: Algo,
    workspace_bytes: usize,
    state: CublasStatus,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident: $symbol:literal, fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Functions {
            version: usize,
            path: PathBuf,
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn load(path: &Path) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the library's own initializers run.
                let library = unsafe { libloading::Library::new(path)? };
                // SAFETY: the types are the functions'.
                let found = unsafe { Self { version: 0, path: path.into(), $($field: *library.get(concat!($symbol,
                    "\0").as_bytes())?,)* } };
                // The library stays: the driver keeps what it has registered.
                std::mem::forget(library);
                // SAFETY: takes nothing.
                Ok(Self { version: unsafe { (found.get_version)() }, ..found })
            }
        }
    };
}

functions! {
    get_version: "cublasLtGetVersion", fn() -> usize;
    create: "cublasLtCreate", fn(*mut Opaque) -> CublasStatus;
    destroy: "cublasLtDestroy", fn(Opaque) -> CublasStatus;
    desc_create: "cublasLtMatmulDescCreate", fn(*mut Opaque, c_int, c_int) -> CublasStatus;
    desc_set: "cublasLtMatmulDescSetAttribute", fn(Opaque, c_int, *const c_void, usize) -> CublasStatus;
    desc_destroy: "cublasLtMatmulDescDestroy", fn(Opaque) -> CublasStatus;
    layout_create: "cublasLtMatrixLayoutCreate", fn(*mut Opaque, c_int, u64, u64, i64) -> CublasStatus;
    layout_set: "cublasLtMatrixLayoutSetAttribute", fn(Opaque, c_int, *const c_void, usize) -> CublasStatus;
    layout_destroy: "cublasLtMatrixLayoutDestroy", fn(Opaque) -> CublasStatus;
    preference_create: "cublasLtMatmulPreferenceCreate", fn(*mut Opaque) -> CublasStatus;
    preference_set: "cublasLtMatmulPreferenceSetAttribute", fn(Opaque, c_int, *const c_void, usize) -> CublasStatus;
    preference_destroy: "cublasLtMatmulPreferenceDestroy", fn(Opaque) -> CublasStatus;
    heuristic: "cublasLtMatmulAlgoGetHeuristic", fn(Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int,
        *mut Heuristic, *mut c_int) -> CublasStatus;
    matmul: "cublasLtMatmul", fn(Opaque, Opaque, *const f32, u64, Opaque, u64, Opaque, *const f32, u64, Opaque, u64,
        Opaque, *const Algo, u64, usize, CUstream) -> CublasStatus;
}

/// The library, looked for once. Errors: where it was looked for, or which other version was found.
fn functions() -> std::result::Result<&'static Functions, &'static str> {
    static FOUND: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let folders = folders(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
        let files = folders.iter().map(|folder| folder.join(LIBRARY)).filter(|file| file.is_file());
        let loaded = [PathBuf::from(LIBRARY)].into_iter().chain(files).find_map(|path| Functions::load(&path).ok());
        match loaded {
            Some(functions) if functions.version / 10_000 == MAJOR => Ok(functions),
            Some(functions) => {
                Err(format!("{} is version {}, not {MAJOR}", functions.path.display(), functions.version))
            }
            None => {
                Err(format!("{LIBRARY} is not found: it comes with CUDA {MAJOR}, or with `pip install nvidia-cublas`"))
            }
        }
    });
    found.as_ref().map_err(String::as_str)
}

/// Where it is looked for when the loader does not find it: toolkits, then packages of the Python in use.
fn folders(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(&variable).map(PathBuf::from);
    let toolkits = homes.chain(["/usr/local/cuda".into()]).map(|home| home.join("lib64"));
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable).map(PathBuf::from);
    // A Python of a virtual environment is a link out of it, which is not to be followed.
    let path = variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|file| file.is_file());
    let python = python.and_then(|file| Some(file.parent()?.parent()?.to_path_buf()));
    let pythons = python.into_iter().flat_map(|prefix| [prefix.join("local"), prefix]);
    let packages = prefixes.chain(pythons).flat_map(|prefix| {
        let versions = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut versions: Vec<PathBuf> = versions
            .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
            .collect();
        versions.sort();
        versions
    });
    let packages = packages.flat_map(|python| ["site-packages", "dist-packages"].map(|folder| python.join(folder)));
    toolkits
        .chain(packages.flat_map(|folder| ["nvidia/cu13/lib", "nvidia/cublas/lib"].map(|inside| folder.join(inside))))
        .collect()
}

/// One product, or one for each of `batch`: `y[t, i] = sum_k x[t, k] w[i, k]`, added to what is in `y` if so asked.
/// Pitches and steps in numbers, all multiples of 8.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MatmulShape {
    pub(crate) tokens: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) x_pitch: usize,
    pub(crate) y_pitch: usize,
    pub(crate) batch: usize,
    pub(crate) x_batch: usize,
    pub(crate) w_batch: usize,
    pub(crate) y_batch: usize,
    /// Whether `y` is f32, or bf16.
    pub(crate) wide: bool,
}

/// The library, ready for use.
pub(crate) struct CublasLt {
    functions: &'static Functions,
    handle: Opaque,
    plans: RefCell<HashMap<MatmulShape, Option<MatmulPlan>>>,
}

// SAFETY: a handle and what is made with it may be used by any thread.
unsafe impl Send for CublasLt {}

/// How one shape is multiplied. The library has matrices by columns: what it is told is `y^T = w x^T`, w being
/// transposed already.
struct MatmulPlan {
    functions: &'static Functions,
    desc: Opaque,
    layouts: [Opaque; 3], // w, x, y
    algo: Algo,
}

impl CublasLt {
    /// Finds and opens it. Errors: `Error::Device` where it is not found or does not start.
    pub(crate) fn open() -> Result<Self> {
        let functions = functions().map_err(|why| Error::Device(why.into()))?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one pointer.
        match unsafe { (functions.create)(&mut handle) } {
            0 => Ok(Self { functions, handle, plans: RefCell::default() }),
            status => Err(Error::Device(format!("{} does not start: status {status}", functions.path.display()))),
        }
    }

    /// Its version and where it is.
    pub(crate) fn name(&self) -> String {
        let Functions { version, path, .. } = self.functions;
        format!("cuBLASLt {}.{}.{} ({})", version / 10_000, version / 100 % 100, version % 100, path.display())
    }

    /// Enqueues a product on the compute stream; `workspace` is its own until it has ended. Returns whether the library
    /// can: nothing was done if not.
    #[allow(clippy::too_many_arguments)] // a product, and where it happens
    pub(crate) fn multiply(
        &self,
        cuda: &Cuda,
        workspace: &DeviceBuffer<f32>,
        shape: &MatmulShape,
        x: Address<bf16>,
        w: Address<bf16>,
        y: Address<u8>,
        add: bool,
    ) -> bool {
        let mut plans = self.plans.borrow_mut();
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        let Some(plan) = plans.entry(*shape).or_insert_with(|| self.plan(shape, workspace.bytes())) else {
            return false;
        };
        // It is launched when all before it has ended, and kernels after it wait for it as for our own.
        cuda.take_independent();
        cuda.mark(&cuda.compute, "cublasLtMatmul");
        let (one, before) = (1.0, if add { 1.0 } else { 0.0 });
        let [w_layout, x_layout, y_layout] = plan.layouts;
        let (x, w, y) = (x.to_u64(), w.to_u64(), y.to_u64());
        // SAFETY: addresses are of matrices as the plan describes them, the workspace is as long as said, and all
        // descriptions live.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                plan.desc,
                &one,
                w,
                w_layout,
                x,
                x_layout,
                &before,
                y,
                y_layout,
                y,
                y_layout,
                &plan.algo,
                workspace.address().to_u64(),
                workspace.bytes(),
                cuda.compute.0,
            )
        };
        if status != 0 {
            cuda.fail(|| format!("cublasLtMatmul failed: status {status}"));
        }
        true
    }

    fn plan(&self, shape: &MatmulShape, workspace_bytes: usize) -> Option<MatmulPlan> {
        let f = self.functions;
        let &MatmulShape { tokens, n, k, x_pitch, y_pitch, batch, x_batch, w_batch, y_batch, wide } = shape;
        let mut plan =
            MatmulPlan { functions: f, desc: ptr::null_mut(), layouts: [ptr::null_mut(); 3], algo: Algo([0; 8]) };
        let y_type = if wide { TYPE_F32 } else { TYPE_BF16 };
        let matrices = [
            (TYPE_BF16, k, n, k, w_batch),
            (TYPE_BF16, k, tokens, x_pitch, x_batch),
            (y_type, n, tokens, y_pitch, y_batch),
        ];
        let mut preference = ptr::null_mut();
        let mut found = Heuristic { algo: plan.algo, workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        // SAFETY: each writes one pointer or reads as many bytes as it is told; what is used has been made.
        let done = unsafe {
            let mut done = (f.desc_create)(&mut plan.desc, COMPUTE_F32, TYPE_F32) == 0
                && f.set(f.desc_set, plan.desc, DESC_TRANSPOSE_A, &TRANSPOSED);
            for (layout, (of, rows, columns, pitch, step)) in plan.layouts.iter_mut().zip(matrices) {
                done = done && (f.layout_create)(layout, of, rows as u64, columns as u64, pitch as i64) == 0;
                if batch > 1 {
                    done = done && f.set(f.layout_set, *layout, LAYOUT_BATCH_COUNT, &(batch as i32));
                    done = done && f.set(f.layout_set, *layout, LAYOUT_BATCH_STEP, &(step as i64));
                }
            }
            done = done && (f.preference_create)(&mut preference) == 0;
            done = done && f.set(f.preference_set, preference, PREFER_WORKSPACE_BYTES, &workspace_bytes);
            done = done && f.set(f.preference_set, preference, PREFER_REDUCTIONS, &REDUCE_IN_F32);
            done =
                done && PREFER_ALIGNMENTS.iter().all(|&which| f.set(f.preference_set, preference, which, &ALIGNMENT));
            let [w, x, y] = plan.layouts;
            done =
                done && (f.heuristic)(self.handle, plan.desc, w, x, y, y, preference, 1, &mut found, &mut count) == 0;
            if !preference.is_null() {
                let _ = (f.preference_destroy)(preference);
            }
            done
        };
        plan.algo = found.algo;
        (done && count > 0 && found.state == 0).then_some(plan)
    }
}

impl Functions {
    /// Sets an attribute; returns whether it was taken.
    ///
    /// # Safety
    /// `set` is of what `object` is, and the attribute is a `T`.
    unsafe fn set<T>(
        &self,
        set: unsafe extern "C" fn(Opaque, c_int, *const c_void, usize) -> CublasStatus,
        object: Opaque,
        which: c_int,
        value: &T,
    ) -> bool {
        // SAFETY: the caller's promise; as many bytes are read as there are.
        unsafe { set(object, which, ptr::from_ref(value).cast(), size_of::<T>()) == 0 }
    }
}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        // SAFETY: made by `plan`, and owned by it alone; a launched product no longer needs them.
        unsafe {
            for &layout in self.layouts.iter().filter(|layout| !layout.is_null()) {
                let _ = (self.functions.layout_destroy)(layout);
            }
            if !self.desc.is_null() {
                let _ = (self.functions.desc_destroy)(self.desc);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        // SAFETY: made by `open`.
        let _ = unsafe { (self.functions.destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_looked_for_in_toolkits_and_then_in_packages() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for folder in ["venv/lib/python3.12", "usr/bin", "usr/lib/python3", "usr/lib/other"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::fs::write(at("usr/bin/python3"), "").unwrap();
        let values = [("CUDA_HOME", at("cuda")), ("VIRTUAL_ENV", at("venv")), ("PATH", at("usr/bin"))];
        let found = folders(|name| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()));
        let want = [
            at("cuda/lib64"),
            "/usr/local/cuda/lib64".into(),
            at("venv/lib/python3.12/site-packages/nvidia/cu13/lib"),
            at("venv/lib/python3.12/site-packages/nvidia/cublas/lib"),
            at("venv/lib/python3.12/dist-packages/nvidia/cu13/lib"),
            at("venv/lib/python3.12/dist-packages/nvidia/cublas/lib"),
            at("usr/lib/python3/site-packages/nvidia/cu13/lib"),
            at("usr/lib/python3/site-packages/nvidia/cublas/lib"),
            at("usr/lib/python3/dist-packages/nvidia/cu13/lib"),
            at("usr/lib/python3/dist-packages/nvidia/cublas/lib"),
        ];
        assert_eq!(found, want);
        assert_eq!(folders(|_| None), [PathBuf::from("/usr/local/cuda/lib64")]);
    }
}
