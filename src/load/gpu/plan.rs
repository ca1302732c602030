//! What goes where on a GPU, decided before anything is loaded: the same constructors run on a device that only counts.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::ExpertLayout;

use crate::backend::batch::BLOCK_SIZE;
use crate::backend::cuda::{self as gpu, CudaBackend};
use crate::backend::source::TensorSource;
use crate::backend::tensor::HostTensor;
use crate::config::{EngineConfig, KvBits, PrefillOn};
use crate::cuda::{Cuda, DeviceInfo};
use crate::experts::gpu::{GpuExperts, Sizes};
use crate::experts::{Between, CpuExperts};
use crate::forward::kv_cache::KvCache;
use crate::forward::weights::Weights;
use crate::forward::{Limits, Model};
use crate::load::Machine;
use crate::load::budget::{check_context, expert_bytes, gib};
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Tokens that go through an op at a time: the most that pays, then less where VRAM is short.
const CHUNKS: [usize; 6] = [8192, 4096, 2048, 1024, 512, 256];

/// Tokens of a batch that the CPU may be given experts of.
const CPU_TOKENS: usize = 512;

/// VRAM that the driver and the kernels themselves take: 530 MiB, and about one for each recorded form of pass, of
/// which there are 128.
pub const CONTEXT_BYTES: u64 = 680 << 20;

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

    /// RAM that will be taken beside the experts: what both sides see, and the CPU's work space.
    pub fn host_bytes(&self, model: &ModelConfig, precision: Option<Precision>, machine: &Machine) -> Result<u64> {
        let logits = (4 * self.limits.logit_rows * model.vocab_size) as u64;
        let (Some(sizes), Some(moe), Some(precision)) = (&self.sizes, model.moe(), precision) else {
            return Ok(logits);
        };
        let layout = ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision)?;
        let cpu =
            CpuExperts::bytes(&layout, machine.kernel, machine.team.threads(), sizes.cpu_tokens, sizes.top_k) as u64;
        Ok(logits + cpu + GpuExperts::host_bytes(&layout, model.moe_layers().count(), sizes))
    }

    /// Decides. Errors: `Error::Resources` with the flag that helps where it does not fit; `Error::Invalid` for flags
    /// that exclude each other.
    pub fn new(
        model: &ModelConfig,
        config: &EngineConfig,
        precision: Option<Precision>,
        device: &DeviceInfo,
    ) -> Result<Self> {
        check(model, config)?;
        check_vram(config, device)?;
        let vram = config.vram.unwrap_or(device.free_bytes);
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
        // What would fit with the least context of all is only too long.
        let shorter = EngineConfig { max_context: None, ..config.clone() };
        let fits = match config.max_context {
            Some(asked) => Self::new(model, &shorter, precision, device)
                .ok()
                .map(|plan| plan.max_context)
                .filter(|&fits| fits < asked),
            None => None,
        };
        let advice = match (fits, config.vram) {
            (Some(fits), _) => format!("use --max-context {fits}, --kv fp8 or --dense int8"),
            (None, Some(_)) => {
                "raise --vram, or use --dense int8, a smaller --max-batch-tokens, or --device cpu".into()
            }
            (None, None) => "use --dense int8, a smaller --max-batch-tokens, or --device cpu".into(),
        };
        Err(Error::Resources(format!(
            "the model needs {:.1} GiB of VRAM with its experts in RAM, and {:.1} may be taken: {advice}",
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
        let none = Counted::of(model, config, device, limits, wanted, 0)?;
        let block = Counted::of(model, config, device, limits, wanted, 1)?.kv - none.kv;
        let fixed = none.weights + none.buffers;
        let Some((layers, moe)) = model.moe().map(|moe| (model.moe_layers().count(), moe)) else {
            return Ok(Self::settle(model, config, device, vram, budget, limits, &none, block, None, 0));
        };
        let precision = precision.expect("experts have a precision");
        let layout = ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision)?;
        let (experts, stride) = (moe.num_experts, layout.bytes().next_multiple_of(64) as u64);
        let cpu_tokens = if config.prefill == PrefillOn::Cpu { chunk } else { chunk.min(CPU_TOKENS) };
        let none_resident = Sizes { tokens: chunk, cpu_tokens, top_k: moe.router.top_k, resident: 0, ring: 0 };
        let work = GpuExperts::device_bytes(&layout, layers, experts, &none_resident) + Between::bytes(model);
        // The context first, as asked for, or a quarter of what is left; then the experts.
        let mut plan =
            match Self::settle(model, config, device, vram, budget, limits, &none, block, Some(none_resident), work) {
                Ok(plan) => plan,
                Err(needed) => return Ok(Err(needed)),
            };
        let left = budget - fixed - work - plan.kv;
        let all = layers as u64 * experts as u64 * stride;
        let (resident, ring) = match config.resident_experts {
            Some(n) if n > experts => {
                return Err(Error::Invalid(format!(
                    "--resident-experts {n}: a layer has {experts} experts, so give at most {experts}, or auto"
                )));
            }
            Some(n) if layers as u64 * n as u64 * stride > left => {
                let fit = left / (layers as u64 * stride);
                return Err(Error::Resources(format!(
                    "--resident-experts {n} do not fit the VRAM: give at most {fit}, or auto"
                )));
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
        if fixed + least as u64 * block > budget
            || (limits.chunk_tokens > CHUNKS[5] && none.buffers + work > budget / 2)
        {
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
    if config.kv == KvBits::Bf16x2 {
        return Err(Error::Invalid("--kv bf16x2 is for the CPU: use --kv bf16 or fp8, or --device cpu".into()));
    }
    check_context(model, config)?;
    let mut lacking = model.layers.iter().filter_map(|layer| layer.attention.gpu_lacks());
    match lacking.next().or_else(|| model.moe()?.gpu_lacks(model.hidden_size)) {
        Some(lack) => Err(Error::Model(format!("{lack}: use --device cpu"))),
        None => Ok(()),
    }
}

/// Errors: `--vram` is more than there is, or nothing at all.
fn check_vram(config: &EngineConfig, device: &DeviceInfo) -> Result<()> {
    // What is free was read when the driver had taken its part.
    let (name, total) = (&device.name, device.total_bytes);
    let free = total.min(device.free_bytes + CONTEXT_BYTES);
    match config.vram {
        Some(n) if n <= CONTEXT_BYTES => Err(Error::Invalid(format!(
            "--vram {}: the driver and the kernels alone take {:.1} GiB, so give a size such as 16GiB",
            size(n),
            gib(CONTEXT_BYTES)
        ))),
        Some(n) if n > total => Err(Error::Invalid(format!(
            "--vram {}: {name} has {:.1} GiB, so give less, or leave it out to use what is free",
            size(n),
            gib(total)
        ))),
        Some(n) if n > free => Err(Error::Resources(format!(
            "--vram {}: of {name} {:.1} GiB are free, so give at most that, or close what else uses the GPU",
            size(n),
            gib(free)
        ))),
        _ => Ok(()),
    }
}

/// A size that may be far too small to be told in GiB.
fn size(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{bytes} bytes") } else { format!("{:.1} GiB", gib(bytes)) }
}

/// What constructors took on a device that only counts.
struct Counted {
    weights: u64,
    buffers: u64,
    kv: u64,
}

impl Counted {
    fn of(
        model: &ModelConfig,
        config: &EngineConfig,
        device: &DeviceInfo,
        limits: Limits,
        context: usize,
        kv_blocks: usize,
    ) -> Result<Self> {
        let cuda = Cuda::plan(device.clone());
        let backend = CudaBackend::new(cuda.clone(), gpu_limits(config, context))?;
        let own = cuda.allocated();
        let weights = Weights::load(&backend, &Shapes, model, config.dense, &|_, _| Ok(()))?;
        let weights_bytes = cuda.allocated() - own;
        let kv = KvCache::new(&backend, model, kv_blocks, config.max_sequences, config.kv)?;
        let kv_bytes = cuda.allocated() - own - weights_bytes;
        let model = Model::new(backend, model.clone(), weights, None, kv, limits)?;
        let all = cuda.allocated();
        drop(model);
        Ok(Self { weights: weights_bytes, buffers: all - weights_bytes - kv_bytes, kv: kv_bytes })
    }
}

pub(super) fn gpu_limits(config: &EngineConfig, context: usize) -> gpu::Limits {
    gpu::Limits { context, table: config.max_sequences * context.div_ceil(BLOCK_SIZE) }
}

/// Weights of the right shapes: zeros that nobody reads, so they take no memory.
struct Shapes;

impl TensorSource for Shapes {
    fn matrix(&self, _: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let zeros: Vec<bf16> = bytemuck::allocation::try_zeroed_vec(rows.saturating_mul(cols))
            .map_err(|()| Error::Resources("there is no address space to plan in: raise `ulimit -v`".into()))?;
        Ok(HostTensor::Bf16 { data: zeros.into(), cols })
    }

    fn vector(&self, _: &str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }
}
