//! A GPU to test on: a real one, or kernels/emulator where there is none.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use half::bf16;
use moebius::backend::batch::{BLOCK_SIZE, Batch};
use moebius::backend::cpu::Cpu;
use moebius::backend::cuda::{self, CudaBackend};
use moebius::backend::tensor::HostTensor;
use moebius::backend::{Backend, Memory};
use moebius::config::{Device, EngineConfig, KvBits};
use moebius::cuda::Cuda;
use moebius::kernel::random::Random;
use moebius::machine::topology::Topology;
use moebius::machine::workers::Team;

/// What tests run on: a GPU, or the emulator.
pub fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<&'static str>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        // SAFETY: the driver's own initializers run; the library stays.
        #[allow(unsafe_code)]
        let open = |path: &Path| unsafe { libloading::Library::new(path).map(std::mem::forget).is_ok() };
        if open(Path::new("libcuda.so.1")) {
            return Some("a GPU");
        }
        let emulator = super::root().join("target/emulator/libcuda.so.1");
        open(&emulator).then_some("the emulator")
    })
}

/// How many GPUs there are to test on.
pub fn gpus() -> usize {
    device().map_or(0, |_| moebius::cuda::devices().len())
}

/// On the GPU.
pub fn on_gpu(config: EngineConfig) -> EngineConfig {
    EngineConfig { device: Device::Cuda(vec![0]), ..config }
}

/// Returns from a test, and says so past the test runner, where there is nothing to run it on; `real`: on the emulator
/// as well.
macro_rules! need_gpu {
    () => {
        common::gpu::need_gpu!(common::gpu::device().is_none(), "there is no GPU, and no emulator (`make emulator`)")
    };
    (real) => {
        common::gpu::need_gpu!(common::gpu::device() != Some("a GPU"), "it takes a real GPU")
    };
    ($lacks:expr, $why:literal) => {
        if $lacks {
            fn here() {}
            return common::say_skipped(std::any::type_name_of_val(&here).trim_end_matches("::here"), $why);
        }
        let _alone = common::gpu::alone();
    };
}
pub(crate) use need_gpu;

/// Tests run one after the other: to give memory back, a device waits for all that runs on it.
pub fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A GPU and, as its twin, the CPU.
pub struct Sides {
    pub gpu: CudaBackend,
    pub cpu: Cpu,
}

/// Positions of a sequence that [`Sides`] serve.
pub const CONTEXT: usize = 8192;

impl Sides {
    pub fn new() -> Self {
        let gpu = CudaBackend::new(Cuda::open(0).unwrap(), cuda::Limits { context: CONTEXT, table: 1024 }).unwrap();
        Self { gpu, cpu: Cpu::new(team(), moebius::kernel::best()) }
    }
}

pub fn team() -> Arc<Team> {
    Arc::new(Team::new(&Topology::read().worker_cpus(2)).unwrap())
}

/// What the GPU makes of an expression over a backend, and what the CPU does.
macro_rules! both {
    ($sides:expr, |$b:ident| $body:expr) => {{
        let got = {
            let $b = &$sides.gpu;
            $body
        };
        let want = {
            let $b = &$sides.cpu;
            $body
        };
        (got, want)
    }};
}
pub(crate) use both;

/// A backend whose tensors tests fill and read.
pub trait Filled: Backend {
    /// Activations of products, from numbers that bf16 holds.
    fn filled(&self, cols: usize, numbers: &[f32]) -> Self::Tensor;
    /// f32 activations.
    fn filled_f32(&self, cols: usize, numbers: &[f32]) -> Self::Tensor;

    fn numbers(&self, t: &Self::Tensor) -> Vec<f32> {
        let mut out = Vec::new();
        self.read(t, &mut out).unwrap();
        out
    }
    fn on_device(&self, batch: &Batch) -> Self::Batch {
        let mut to = self.batch(batch.len()).unwrap();
        self.set_batch(&mut to, batch);
        to
    }
}

impl Filled for Cpu {
    fn filled(&self, cols: usize, numbers: &[f32]) -> Self::Tensor {
        self.filled_f32(cols, numbers)
    }

    fn filled_f32(&self, cols: usize, numbers: &[f32]) -> Self::Tensor {
        let mut t = self.tensor_f32(numbers.len() / cols, cols).unwrap();
        t.data_mut().copy_from_slice(numbers);
        t
    }
}

impl Filled for CudaBackend {
    fn filled(&self, cols: usize, numbers: &[f32]) -> Self::Tensor {
        let t = self.tensor(numbers.len() / cols, cols).unwrap();
        let narrow: Vec<bf16> = numbers.iter().map(|&n| bf16::from_f32(n)).collect();
        self.cuda().upload(&self.cuda().compute, t.bf16(), &narrow);
        t
    }

    fn filled_f32(&self, cols: usize, numbers: &[f32]) -> Self::Tensor {
        let t = self.tensor_f32(numbers.len() / cols, cols).unwrap();
        self.cuda().upload(&self.cuda().compute, t.f32(), numbers);
        t
    }
}

/// `n` numbers from -1 to 1 that bf16 holds.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9));
    (0..n).map(|_| bf16::from_f32(random.uniform() as f32 * 2.0 - 1.0).to_f32()).collect()
}

pub fn host(cols: usize, numbers: &[f32]) -> HostTensor<'static> {
    HostTensor::Bf16 { data: numbers.iter().map(|&n| bf16::from_f32(n)).collect(), cols }
}

/// The last `tokens` tokens of sequences of `end` positions each, their blocks anywhere in a pool; and all of their
/// positions.
pub fn ragged(sequences: &[(usize, usize)]) -> (Batch, Batch, usize) {
    let count: usize = sequences.iter().map(|&(end, _)| end.div_ceil(BLOCK_SIZE)).sum();
    // Odd steps through a power of two reach every block once, far from their neighbours.
    let pool = count.next_power_of_two();
    let mut blocks = (0..pool).map(|i| ((i * 5 + 3) % pool) as u32);
    let (mut last, mut all) = (Batch::default(), Batch::default());
    for (s, &(end, tokens)) in sequences.iter().enumerate() {
        let table: Vec<u32> = blocks.by_ref().take(end.div_ceil(BLOCK_SIZE)).collect();
        let ids: Vec<u32> = (0..end).map(|i| ((i * 7 + s * 13) % 50) as u32).collect();
        last.push(&ids[end - tokens..], end - tokens, &table);
        all.push(&ids, 0, &table);
    }
    (last, all, pool)
}

/// How far the GPU may be from the reference, as parts of each number, of the root mean square of all, and for the
/// differences' root mean square, of that again. bf16 has 8 bits: rounding a number costs at most 2^-8 of it, and 0.42
/// of that in the mean.
#[derive(Clone, Copy, Debug)]
pub struct Within {
    pub each: f32,
    pub of_rms: f32,
    pub rms: f32,
}

/// One rounding to bf16 in units in which arithmetic below counts.
pub const ROUNDING: f32 = 1.0 / 256.0;

impl Within {
    /// The same arithmetic in f32, in another order.
    pub const F32: Self = Self { each: 1e-6, of_rms: 4e-6, rms: 2e-6 };
    /// The same, then rounded to bf16 once.
    pub const BF16: Self = Self { each: ROUNDING, of_rms: 4e-6, rms: 0.5 * ROUNDING };
}

/// Compares what the GPU computed with the reference.
pub fn check(what: &str, got: &[f32], want: &[f32], within: Within) {
    assert_eq!(got.len(), want.len(), "{what}");
    let rms = |v: &mut dyn Iterator<Item = f32>| {
        (v.map(|x| x as f64 * x as f64).sum::<f64>() / want.len() as f64).sqrt() as f32
    };
    let size = rms(&mut want.iter().copied());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let limit = within.each * want.abs() + within.of_rms * size;
        assert!((got - want).abs() <= limit, "{what}: number {i} is {got}, not {want} (rms {size}), beyond {limit}");
    }
    // Few numbers have no mean to speak of.
    let limit = within.rms * size * (1.0 + 1.0 / (want.len() as f32).sqrt());
    let off = rms(&mut got.iter().zip(want).map(|(g, w)| g - w));
    if std::env::var_os("SHOW").is_some() {
        eprintln!("{what}: off by {:.3} roundings rms, allowed {:.3}", off / size / ROUNDING, within.rms / ROUNDING);
    }
    assert!(off <= limit, "{what}: off by {off} in the mean, beyond {limit}, of {size}");
}
