//! Loading onto a GPU: what goes where is decided before anything is loaded, by running the same constructors on a device that only counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use memmap2::MmapMut;
use moebius_cache::Precision;
use moebius_cache::format::ExpertCache;
use moebius_cache::pack::ExpertLayout;

use super::{LoadProgress, Loaded, Machine, RESERVE_BYTES, expert_bytes, place, watch_memory};
use crate::backend::Routing;
use crate::backend::cuda::{self as gpu, CudaBackend};
use crate::batch::BLOCK_SIZE;
use crate::config::{DenseBits, EngineConfig, ExpertsMemory, KvBits, PrefillOn};
use crate::cuda::{Cuda, DeviceInfo, PinnedBuffer};
use crate::experts::gpu::{GpuExperts, Prefill, Sizes, Speeds};
use crate::experts::{CpuExperts, ExpertExecutor};
use crate::forward::{Limits, Model};
use crate::kv_cache::KvCache;
use crate::memory::{Pages, read_bandwidth};
use crate::model::{Attention, ModelConfig};
use crate::tensor::HostTensor;
use crate::topology;
use crate::weights::{TensorSource, Weights};
use crate::workers::Team;
use crate::{Error, Result};

/// Tokens that go through an op at a time: the most that pays, then less where VRAM is short.
const CHUNKS: [usize; 6] = [8192, 4096, 2048, 1024, 512, 256];

/// Tokens of a batch that the CPU may be given experts of.
const CPU_TOKENS: usize = 512;

/// VRAM that the driver and the kernels themselves take.
pub const CONTEXT_BYTES: u64 = 600 << 20;

/// What goes where on a GPU.
#[derive(Clone, Debug)]
pub struct GpuPlan {
    /// The device.
    pub device: DeviceInfo,
    /// VRAM that may be taken, driver included.
    pub vram: u64,
    /// Dense weights in VRAM, in bytes.
    pub weights: u64,
    /// Activations and work space.
    pub buffers: u64,
    /// KV cache.
    pub kv: u64,
    /// Experts that stay in VRAM.
    pub resident: u64,
    /// Experts that pass through it.
    pub ring: u64,
    /// Experts in RAM.
    pub ram: u64,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Tokens of a pass and of its parts.
    pub limits: Limits,
    /// Of the experts; `None`: a dense model.
    pub sizes: Option<Sizes>,
}

impl GpuPlan {
    /// VRAM that will be taken, driver included.
    pub fn total(&self) -> u64 {
        CONTEXT_BYTES + self.weights + self.buffers + self.kv + self.resident + self.ring
    }

    /// Decides. Errors: `Error::Resources` with the flag that helps where it does not fit; `Error::Invalid` for flags that exclude each other.
    pub fn new(model: &ModelConfig, config: &EngineConfig, precision: Option<Precision>, device: &DeviceInfo) -> Result<Self> {
        check(model, config)?;
        let vram = config.vram.unwrap_or(device.free_bytes).min(device.total_bytes);
        let budget = vram.saturating_sub(CONTEXT_BYTES);
        let pass = config.max_batch_tokens.unwrap_or(CHUNKS[0]);
        let chunks = CHUNKS.into_iter().filter(|&chunk| chunk < pass).chain([pass.min(CHUNKS[0])]).max();
        let mut sizes: Vec<usize> = CHUNKS.into_iter().filter(|&chunk| chunk < pass).chain(chunks).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        let mut least = 0;
        for chunk in sizes {
            let pass = if config.max_batch_tokens.is_some() { pass } else { chunk };
            match Self::with_chunk(model, config, precision, device, vram, budget, pass, chunk)? {
                Ok(plan) => return Ok(plan),
                Err(needed) => least = needed,
            }
        }
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        Err(Error::Resources(format!(
            "the model needs {:.1} GiB of VRAM with its experts in RAM, and {:.1} may be taken: use --dense int8, a smaller --max-context, or --device cpu",
            gib(least + CONTEXT_BYTES),
            gib(vram)
        )))
    }

    /// The plan for parts of `chunk` tokens, or what it would need at least.
    #[allow(clippy::too_many_arguments)] // one decision, cut out of its loop
    fn with_chunk(
        model: &ModelConfig,
        config: &EngineConfig,
        precision: Option<Precision>,
        device: &DeviceInfo,
        vram: u64,
        budget: u64,
        pass: usize,
        chunk: usize,
    ) -> Result<std::result::Result<Self, u64>> {
        let limits = Limits { tokens: pass, chunk_tokens: chunk, logit_rows: config.max_sequences };
        let wanted = config.max_context.unwrap_or(model.max_context).min(model.max_context);
        let none = Counted::of(model, config, limits, wanted, 0)?;
        let block = Counted::of(model, config, limits, wanted, 1)?.kv - none.kv;
        let fixed = none.weights + none.buffers;
        let Some((layers, moe)) = model.moe().map(|moe| (model.moe_layers().count(), moe)) else {
            return Ok(Self::settle(model, config, device, vram, budget, limits, &none, block, None, 0));
        };
        let precision = precision.expect("experts have a precision");
        let layout = ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision)?;
        let (experts, stride) = (moe.num_experts, layout.bytes().next_multiple_of(64) as u64);
        let cpu_tokens = if config.prefill == PrefillOn::Cpu { chunk } else { chunk.min(CPU_TOKENS) };
        let none_resident = Sizes { tokens: chunk, cpu_tokens, top_k: moe.router.top_k, resident: 0, ring: 0 };
        let work = GpuExperts::device_bytes(&layout, layers, experts, &none_resident);
        // The context first, as asked for, or a quarter of what is left; then the experts.
        let mut plan = match Self::settle(model, config, device, vram, budget, limits, &none, block, Some(none_resident), work) {
            Ok(plan) => plan,
            Err(needed) => return Ok(Err(needed)),
        };
        let left = budget - fixed - work - plan.kv;
        let all = layers as u64 * experts as u64 * stride;
        let (resident, ring) = match config.resident_experts {
            Some(n) if n > experts => return Err(Error::Invalid(format!("--resident-experts {n}: a layer has {experts} experts"))),
            Some(n) if layers as u64 * n as u64 * stride > left => {
                let fit = left / (layers as u64 * stride);
                return Err(Error::Resources(format!("--resident-experts {n} do not fit the VRAM: {fit} do")));
            }
            Some(n) => (n, (left - layers as u64 * n as u64 * stride) / stride),
            None if all <= left => (experts, 0),
            None => {
                let ring = (2 * experts as u64).min(left / 2 / stride);
                (((left - ring * stride) / (layers as u64 * stride)) as usize, ring)
            }
        };
        let ring = match resident == experts || config.prefill == PrefillOn::Cpu {
            true => 0,
            false => (ring as usize).min(2 * (experts - resident)) / 2 * 2,
        };
        // Prompts larger than the CPU takes need the ring.
        if resident < experts && ring == 0 && cpu_tokens < chunk {
            return Ok(Err(fixed + work + plan.kv + 2 * stride));
        }
        plan.resident = layers as u64 * resident as u64 * stride;
        plan.ring = ring as u64 * stride;
        plan.ram = if resident == experts { 0 } else { expert_bytes(model, Some(precision))? };
        plan.sizes = Some(Sizes { resident, ring, ..none_resident });
        Ok(Ok(plan))
    }

    /// Context and KV cache beside `work` bytes of the experts' work space.
    #[allow(clippy::too_many_arguments)] // one decision, cut out of its loop
    fn settle(
        model: &ModelConfig,
        config: &EngineConfig,
        device: &DeviceInfo,
        vram: u64,
        budget: u64,
        limits: Limits,
        none: &Counted,
        block: u64,
        sizes: Option<Sizes>,
        work: u64,
    ) -> std::result::Result<Self, u64> {
        let fixed = none.weights + none.buffers + work;
        let block_of = |tokens: usize| tokens.div_ceil(BLOCK_SIZE);
        let least = block_of(config.max_context.unwrap_or(model.max_context.min(2048)));
        if fixed + least as u64 * block > budget || (limits.chunk_tokens > CHUNKS[5] && none.buffers + work > budget / 2) {
            return Err(fixed + least as u64 * block);
        }
        let quarter = ((budget - fixed) / 4 / block.max(1)) as usize;
        let context = match config.max_context {
            Some(n) => n,
            None => model.max_context.min(quarter.max(least) * BLOCK_SIZE),
        };
        let one = block_of(context);
        let kv_blocks = quarter.clamp(one, one * config.max_sequences);
        Ok(Self {
            device: device.clone(),
            vram,
            weights: none.weights,
            buffers: none.buffers + work,
            kv: kv_blocks as u64 * block,
            resident: 0,
            ring: 0,
            ram: 0,
            max_context: context,
            kv_blocks,
            limits,
            sizes,
        })
    }
}

/// What the GPU side cannot do, said before anything is loaded.
fn check(model: &ModelConfig, config: &EngineConfig) -> Result<()> {
    if config.max_sequences == 0 || config.max_batch_tokens == Some(0) {
        return Err(Error::Invalid("an engine needs at least one sequence and one token in a batch".into()));
    }
    if config.kv == KvBits::Bf16x2 {
        return Err(Error::Invalid("--kv bf16x2 is for the CPU: use --kv bf16 or fp8, or --device cpu".into()));
    }
    match config.max_context {
        Some(n @ 0..=1) => return Err(Error::Invalid(format!("--max-context {n} leaves no room for a prompt and its answer"))),
        Some(n) if n > model.max_context => {
            let limit = model.max_context;
            return Err(Error::Invalid(format!("--max-context {n} is beyond the {limit} positions this model was made for")));
        }
        _ => {}
    }
    let refuse = |what: String| Err(Error::Model(format!("{what}: use --device cpu")));
    for layer in &model.layers {
        match &layer.attention {
            Attention::Gqa(a) if a.head_dim > 256 || !a.head_dim.is_multiple_of(8) => {
                return refuse(format!("the GPU has no attention for heads of {} numbers", a.head_dim));
            }
            Attention::Mla(a)
                if a.kv_lora_rank > 512
                    || a.cache_dim() > 576
                    || a.qk_head_dim() > 256
                    || [a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim].iter().any(|n| !n.is_multiple_of(8)) =>
            {
                return refuse(format!("the GPU has no latent attention of rank {}", a.kv_lora_rank));
            }
            _ => {}
        }
    }
    if let Some(moe) = model.moe() {
        if moe.num_experts > 512 || moe.router.top_k > 32 || moe.router.groups.is_some_and(|g| g.count > 32) {
            return refuse(format!("the GPU chooses among at most 512 experts, 32 at a time, and a layer has {}", moe.num_experts));
        }
        if !moe.intermediate_size.is_multiple_of(8) || !model.hidden_size.is_multiple_of(8) {
            return refuse(format!("the GPU needs experts whose width is a multiple of 8, and it is {}", moe.intermediate_size));
        }
    }
    Ok(())
}

/// What constructors took on a device that only counts.
struct Counted {
    weights: u64,
    buffers: u64,
    kv: u64,
}

impl Counted {
    fn of(model: &ModelConfig, config: &EngineConfig, limits: Limits, context: usize, kv_blocks: usize) -> Result<Self> {
        let cuda = Cuda::plan(DeviceInfo {
            name: "a plan".into(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes: 0,
            total_bytes: 0,
            free_bytes: 0,
        });
        let backend = CudaBackend::new(cuda.clone(), gpu_limits(config, context))?;
        let own = cuda.allocated();
        let weights = Weights::load(&backend, &Shapes::new(model)?, model, config.dense, &|_, _| Ok(()))?;
        let weights_bytes = cuda.allocated() - own;
        let kv = KvCache::new(&backend, model, kv_blocks, config.kv)?;
        let kv_bytes = cuda.allocated() - own - weights_bytes;
        let model = Model::new(backend, model.clone(), weights, None, kv, limits)?;
        let all = cuda.allocated();
        drop(model);
        Ok(Self { weights: weights_bytes, buffers: all - weights_bytes - kv_bytes, kv: kv_bytes })
    }
}

fn gpu_limits(config: &EngineConfig, context: usize) -> gpu::Limits {
    gpu::Limits { context, table: config.max_sequences * context.div_ceil(BLOCK_SIZE) }
}

/// Weights of the right shapes without contents: pages of zeros that nobody reads.
struct Shapes(MmapMut);

impl Shapes {
    fn new(model: &ModelConfig) -> Result<Self> {
        let head = |a: &Attention| match a {
            Attention::Gqa(a) => (a.num_heads + a.num_kv_heads) * a.head_dim,
            Attention::Mla(a) => a.num_heads * (a.qk_head_dim() + a.v_head_dim + a.kv_lora_rank),
        };
        let widest = model.layers.iter().map(|l| head(&l.attention).max(crate::forward::mlp_width(l).unwrap_or(0))).max().unwrap_or(0);
        let rows = model.vocab_size.max(widest).max(model.moe().map_or(0, |moe| moe.num_experts));
        let bytes = rows.saturating_mul(model.hidden_size.max(widest)).saturating_mul(2);
        MmapMut::map_anon(bytes.max(1)).map(Self).map_err(|e| Error::Resources(format!("no address space for a plan: {e}")))
    }
}

impl TensorSource for Shapes {
    fn matrix(&self, _: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let zeros: &[bf16] = bytemuck::cast_slice(&self.0);
        match zeros.get(..rows * cols) {
            Some(data) => Ok(HostTensor::Bf16 { data: data.into(), cols }),
            None => Ok(HostTensor::Bf16 { data: vec![bf16::ZERO; rows * cols].into(), cols }),
        }
    }

    fn vector(&self, _: &str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }
}

/// Puts a model together on a device.
pub(super) fn assemble(
    model: ModelConfig,
    source: &dyn TensorSource,
    experts: Option<ExpertCache>,
    config: &EngineConfig,
    (cuda, plan): (Arc<Cuda>, GpuPlan),
    Machine { team, kernel, .. }: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let backend = CudaBackend::new(cuda.clone(), gpu_limits(config, plan.max_context))?;
    let weights = Weights::load(&backend, source, &model, config.dense, &|done, layers| {
        report(LoadProgress::Weights(done, layers));
        watch_memory()
    })?;
    let precision = experts.as_ref().map(|cache| cache.header().precision);
    let mut speeds = None;
    let executor: Option<Box<dyn ExpertExecutor<CudaBackend>>> = match (experts, plan.sizes, precision) {
        (Some(cache), Some(sizes), Some(precision)) => {
            let all = sizes.resident == cache.num_experts();
            // Experts that all go to VRAM are read once.
            let place_config = match all {
                true => EngineConfig { experts_memory: ExpertsMemory::Map, lock: false, ..config.clone() },
                false => config.clone(),
            };
            let memory = Arc::new(place(cache, &place_config, &team, report)?);
            let mut cpu = CpuExperts::new(memory, team.clone(), kernel, sizes.cpu_tokens, sizes.top_k);
            let measured =
                if all { Speeds { cpu_bytes: 1.0, cpu_products: 1.0, pcie_bytes: 1.0 } } else { measure(&cuda, &team, &mut cpu, &sizes)? };
            speeds = (!all).then_some(measured);
            // Between two layers' experts the device has its turn.
            team.spin_for(DEVICE_TURN);
            let forced = match config.prefill {
                PrefillOn::Auto => None,
                PrefillOn::Cpu => Some(Prefill::Cpu),
                PrefillOn::Gpu => Some(Prefill::Gpu),
            };
            Some(Box::new(GpuExperts::new(cuda.clone(), cpu, precision, sizes, measured, forced)?))
        }
        _ => None,
    };
    let kv = KvCache::new(&backend, &model, plan.kv_blocks, config.kv)?;
    let device = describe(&plan, &model, speeds);
    report(LoadProgress::Experts(&device));
    let model = Box::new(Model::new(backend, model, weights, executor, kv, plan.limits)?);
    cuda.synchronize()?;
    Ok(Loaded {
        model,
        kv_blocks: plan.kv_blocks,
        max_context: plan.max_context,
        max_batch_tokens: plan.limits.tokens,
        device: Some(device),
        precision,
        team,
        kernel,
    })
}

/// What was decided, in one line.
fn describe(plan: &GpuPlan, model: &ModelConfig, speeds: Option<Speeds>) -> String {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let mut line = format!(
        "{}: {:.1} GiB of VRAM (weights {:.1}, KV {:.1} for a context of {}, buffers {:.1}",
        plan.device.name,
        gib(plan.total()),
        gib(plan.weights),
        gib(plan.kv),
        plan.max_context,
        gib(plan.buffers),
    );
    if let (Some(sizes), Some(moe)) = (plan.sizes, model.moe()) {
        line += &format!(
            ", experts {:.1}, passing {:.1}); {} of {} experts of a layer resident",
            gib(plan.resident),
            gib(plan.ring),
            sizes.resident,
            moe.num_experts
        );
        if let Some(speeds) = speeds {
            line += &format!(", the others in RAM: CPU {:.0} GB/s, PCIe {:.0} GB/s", speeds.cpu_bytes / 1e9, speeds.pcie_bytes / 1e9);
        }
    } else {
        line += ")";
    }
    line
}

/// Longer than the device takes from one layer's experts to the next one's, in decode.
const DEVICE_TURN: Duration = Duration::from_micros(400);

/// Bytes over which speeds are measured.
const SAMPLE_BYTES: usize = 128 << 20;

/// Measures what decides where experts run.
fn measure(cuda: &Arc<Cuda>, team: &Team, cpu: &mut CpuExperts, sizes: &Sizes) -> Result<Speeds> {
    let sample = SAMPLE_BYTES.min((topology::available_bytes() / 16) as usize).min(cpu.memory().bytes() as usize).next_multiple_of(4096);
    let pinned = PinnedBuffer::<u8>::new(cuda, sample)?;
    let there = crate::cuda::DeviceBuffer::<u8>::new(cuda, sample)?;
    let mut pcie: f64 = 0.0;
    for _ in 0..3 {
        let started = Instant::now();
        cuda.upload(&cuda.copy, there.address(), &pinned);
        cuda.synchronize()?;
        pcie = pcie.max(sample as f64 / started.elapsed().as_secs_f64());
    }
    // The kernels come to three quarters of what plain reading gets.
    let cpu_bytes = 0.75e9 * read_bandwidth(team, sample, Pages::Huge, 3)?;

    let layout = cpu.memory().cache().layout();
    let (experts, tokens) = (cpu.memory().cache().num_experts(), sizes.cpu_tokens.min(128));
    let ids = (0..tokens * sizes.top_k).map(|i| (i % experts) as i32).collect();
    let routing = Routing { top_k: sizes.top_k, ids, weights: vec![0.0; tokens * sizes.top_k] };
    let (x, mut out) = (vec![0.5; tokens * layout.gate.k], vec![0.0; tokens * layout.down.n]);
    let mut seconds = f64::INFINITY;
    for _ in 0..2 {
        let started = Instant::now();
        cpu.submit_rows(0, &x, &routing)?;
        cpu.finish_rows(&mut out)?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    let products = (3 * layout.gate.n * layout.gate.k * tokens * sizes.top_k) as f64;
    Ok(Speeds { cpu_bytes, cpu_products: products / seconds, pcie_bytes: pcie })
}

/// Refuses experts in RAM that are more than there is. Errors: `Error::Resources`.
pub(super) fn check_ram(plan: &GpuPlan, config: &EngineConfig, machine: &Machine) -> Result<()> {
    let available = machine.available_bytes.saturating_sub(RESERVE_BYTES);
    if plan.ram <= available {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let advice = if config.dense == DenseBits::Bf16 {
        "use --experts int4, or --dense int8 to keep more experts in VRAM"
    } else {
        "use --experts int4"
    };
    Err(Error::Resources(format!("the experts need {:.1} GiB of memory and {:.1} are free: {advice}", gib(plan.ram), gib(available))))
}
