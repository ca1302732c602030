//! What goes where on a GPU, decided before anything is loaded: the same constructors run on a device that only counts.

use std::sync::Arc;

use crate::backend::Rank as _;
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::cuda::{self as gpu, CudaBackend};
use crate::backend::source::Shapes;
use crate::config::{EngineConfig, KvBits, PrefillOn};
use crate::cuda::{Cuda, DeviceInfo, Rank};
use crate::experts::gpu::{GpuExperts, Sizes};
use crate::experts::{Epilogue, ExpertShape};
use crate::forward::kv_cache::{CacheSize, KvCache};
use crate::forward::weights::Weights;
use crate::forward::{Limits, Model};
use crate::load::machine::{Machine, RESERVE_BYTES, gib};
use crate::load::memory::{count, count_experts, snapshots};
use crate::load::spec::Spec;
use crate::machine::heap::Heap;
use crate::model::Share;
use crate::{Error, Result};

use super::refusal::refusal;

/// Tokens that go through an op at a time: the most that pays, then less where VRAM is short.
const CHUNKS: [usize; 6] = [8192, 4096, 2048, 1024, 512, 256];

/// The part of a holder's room that prompts' experts pass through, and the most of these: two halves, whose copies take
/// longer than to begin them.
const PASSING_SHARE: u64 = 4;
const MOST_PASSING: u64 = 64;

/// Tokens of a batch that the CPU may be given experts of.
const CPU_TOKENS: usize = 512;

/// VRAM that the driver and the kernels themselves take: 530 MiB, and about one for each recorded shape of decode
/// steps, of which there are 128.
pub const CONTEXT_BYTES: u64 = 680 << 20;

/// What of that stays free when the driver has told how much is: for kernels and recorded passes, which come later, and
/// for other programs' windows.
const LATER_BYTES: u64 = 384 << 20;

/// What goes where on a GPU.
#[derive(Clone, Debug)]
pub struct GpuPlan {
    /// The device.
    pub device: DeviceInfo,
    /// Why these GPUs, where there were others.
    pub choice: Option<String>,
    /// VRAM that may be taken, driver included.
    pub vram: u64,
    /// Dense weights in VRAM, in bytes.
    pub weights: u64,
    /// Activations and work space.
    pub buffers: u64,
    /// Pinned RAM beside the experts' own.
    pub pinned: u64,
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
    /// Blocks of the KV cache in pinned RAM.
    pub kv_host: u64,
    /// How many.
    pub host_blocks: usize,
    /// Snapshots of recurrent state, in pinned RAM.
    pub state_cache: u64,
    /// How many.
    pub snapshots: usize,
    /// Tokens of a pass and of its parts.
    pub limits: Limits,
    /// Of the experts; `None`: a dense model.
    pub sizes: Option<Sizes>,
    /// The GPUs that hold experts for this one.
    pub holders: Vec<HolderPlan>,
}

/// What goes onto a GPU that holds experts for another one.
#[derive(Clone, Debug)]
pub struct HolderPlan {
    /// Which one it is of those that could.
    pub number: usize,
    /// VRAM that may be taken, driver included.
    pub vram: u64,
    /// Experts of each layer.
    pub experts: usize,
    /// Bytes that these take.
    pub resident: u64,
    /// Experts of prompts that pass through it at a time.
    pub ring: usize,
    /// Bytes for these.
    pub passing: u64,
    /// Activations and work space.
    pub buffers: u64,
}

impl HolderPlan {
    /// VRAM that will be taken, driver included.
    pub fn total(&self) -> u64 {
        CONTEXT_BYTES + self.resident + self.passing + self.buffers
    }
}

impl GpuPlan {
    /// VRAM that will be taken, driver included.
    pub fn total(&self) -> u64 {
        CONTEXT_BYTES + self.weights + self.buffers + self.kv + self.resident + self.ring
    }

    /// RAM that will be taken beside the experts: what both sides see, and the CPU's work space.
    pub fn host_bytes(&self, spec: &Spec<'_>, machine: &Machine) -> Result<u64> {
        let (Some(sizes), Some(shape)) = (&self.sizes, spec.expert_shape()?) else { return Ok(self.pinned) };
        let (cuda, heap) = (Cuda::plan(self.device.clone()), Heap::plan());
        count_experts(spec, &heap, machine.kernel, machine.team.threads(), sizes.cpu_tokens)?;
        let epilogue = Epilogue::load(&heap, &Shapes::default(), spec.model)?;
        GpuExperts::count(&cuda, &heap, &shape, &epilogue, sizes)?;
        for holder in &self.holders {
            GpuExperts::count_holder(&cuda, &shape, &epilogue, (sizes, holder.experts, holder.ring))?;
        }
        Ok(spec.ranks() as u64 * (self.pinned + cuda.pinned()) + heap.bytes())
    }

    /// Decides. Errors: `Error::Resources` with the flags that help where it does not fit into VRAM or RAM;
    /// `Error::Invalid` for flags that exclude each other.
    pub fn new(spec: &Spec<'_>, device: &DeviceInfo, machine: &Machine) -> Result<Self> {
        Self::attempt(spec, device, machine)?.map_err(|short| refusal(spec, device, machine, short))
    }

    /// The same, with what is short in place of what to do about it.
    pub fn attempt(
        spec: &Spec<'_>,
        device: &DeviceInfo,
        machine: &Machine,
    ) -> Result<std::result::Result<Self, Short>> {
        check(spec)?;
        let bound = least_bound(spec.config);
        bound.map_or(Ok(()), |bound| check_vram(bound, device))?;
        let planner = Planner { spec: spec.clone(), device, vram: bound.unwrap_or(may_take(device)), most: None };
        planner.attempt_beside(machine, machine.available_bytes.saturating_sub(RESERVE_BYTES))
    }
}

/// What a model needs more of than there is.
#[derive(Debug)]
pub enum Short {
    /// So many bytes at least, without the driver's.
    Vram(u64),
    /// Of experts, and of what both sides see.
    Ram {
        /// Bytes in all.
        needed: u64,
        /// Bytes that can be taken.
        available: u64,
    },
}

/// Who decides what goes where.
pub(super) struct Planner<'a> {
    pub(super) spec: Spec<'a>,
    pub(super) device: &'a DeviceInfo,
    pub(super) vram: u64,          // that may be taken, driver included
    pub(super) most: Option<Most>, // `None`: as much as fits
}

/// What the stages of a model have in common: of each the least that one has room for.
#[derive(Clone, Copy)]
pub(super) struct Most {
    limits: Limits,
    pub(super) max_context: usize,
    kv_blocks: usize,
}

impl Most {
    /// Of some plans. Panics: there is none.
    pub(super) fn of<'a>(plans: impl Iterator<Item = &'a GpuPlan>) -> Self {
        let of =
            |plan: &GpuPlan| Self { limits: plan.limits, max_context: plan.max_context, kv_blocks: plan.kv_blocks };
        let less = |a: Self, b: Self| Self {
            limits: Limits {
                tokens: a.limits.tokens.min(b.limits.tokens),
                chunk_tokens: a.limits.chunk_tokens.min(b.limits.chunk_tokens),
                ..a.limits
            },
            max_context: a.max_context.min(b.max_context),
            kv_blocks: a.kv_blocks.min(b.kv_blocks),
        };
        plans.map(of).reduce(less).expect("there is a plan")
    }
}

/// What is kept of sequences in pinned RAM, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeptBytes {
    /// A block of the KV cache.
    pub(super) block: u64,
    /// A snapshot of a sequence's recurrent state.
    pub(super) snapshot: u64,
}

/// A plan for parts of some size, or the VRAM that it would need at least, without the driver's.
enum Attempt {
    Fits(Box<GpuPlan>),
    Needs(u64),
}

impl Planner<'_> {
    /// VRAM for weights, buffers, KV cache and experts.
    fn budget(&self) -> u64 {
        self.vram.saturating_sub(CONTEXT_BYTES)
    }

    /// The plan with the largest parts that fit; else what the smallest parts need.
    fn plan(&self) -> Result<Attempt> {
        if let Some(most) = self.most {
            return self.attempt(most.limits);
        }
        let config = self.spec.config;
        let pass = config.max_batch_tokens.unwrap_or(CHUNKS[0]);
        let halves_from = planned(&self.spec, &Cuda::plan(self.device.clone()), BLOCK_SIZE)?.halves_from();
        let of = |chunk: usize| {
            let tokens = if config.max_batch_tokens.is_some() { pass } else { chunk };
            let limits = Limits { tokens, chunk_tokens: chunk, logit_rows: config.max_sequences };
            // A pass that is not halved is one part. Experts in RAM would cross for each half.
            if halves_from.is_some_and(|least| chunk / 2 >= least)
                && let Attempt::Fits(plan) = self.attempt(Limits { chunk_tokens: chunk.div_ceil(2), ..limits })?
                && plan.ram == 0
            {
                return Ok(Attempt::Fits(plan));
            }
            self.attempt(limits)
        };
        let (largest, smallest) = (pass.min(CHUNKS[0]), pass.min(CHUNKS[CHUNKS.len() - 1]));
        if let fits @ Attempt::Fits(_) = of(largest)? {
            return Ok(fits);
        }
        // Where these do not fit, no others do.
        let least = of(smallest)?;
        if let Attempt::Fits(_) = least {
            for chunk in CHUNKS.into_iter().filter(|&chunk| smallest < chunk && chunk < largest) {
                if let fits @ Attempt::Fits(_) = of(chunk)? {
                    return Ok(fits);
                }
            }
        }
        Ok(least)
    }

    /// The plan, where so many bytes of RAM are `available`; or what is short.
    pub(super) fn attempt_beside(
        &self,
        machine: &Machine,
        available: u64,
    ) -> Result<std::result::Result<GpuPlan, Short>> {
        let spec = &self.spec;
        let plan = match self.plan()? {
            Attempt::Fits(plan) => *plan,
            Attempt::Needs(bytes) => return Ok(Err(Short::Vram(bytes))),
        };
        let needed = plan.ram.saturating_add(plan.host_bytes(spec, machine)?);
        if needed > available {
            return Ok(Err(Short::Ram { needed, available }));
        }
        let free = available - needed;
        let KeptBytes { block, snapshot } = self.kept_bytes(plan.max_context)?;
        let kv_host = spec.config.kv_host.filter(|_| spec.config.prefix_cache).unwrap_or(0);
        let host_blocks = match block {
            0 => 0, // of a stage whose layers all keep states instead
            block => count("--kv-host", kv_host, ("a block of 64 tokens", block), free)?,
        };
        let kv_host = host_blocks as u64 * block;
        let snapshots = snapshots(spec.config, snapshot, free - kv_host)?;
        Ok(Ok(GpuPlan { kv_host, host_blocks, snapshots, state_cache: snapshots as u64 * snapshot, ..plan }))
    }

    /// The VRAM that a plan would need at least, without the driver's; `None`: there is a plan, or never one.
    pub(super) fn lacks(&self) -> Option<u64> {
        match self.plan() {
            Ok(Attempt::Needs(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// The plan for passes of these limits.
    fn attempt(&self, limits: Limits) -> Result<Attempt> {
        let Spec { model, config, .. } = self.spec;
        let wanted = config.max_context.unwrap_or(model.max_context).min(model.max_context);
        let counted = Counted::of(self, limits, wanted, 0)?;
        let block = Counted::of(self, limits, wanted, 1)?.kv - counted.kv;
        let (Some(shape), Some(moe)) = (self.spec.expert_shape()?, model.moe()) else {
            return Ok(self.context(limits, &counted, block));
        };
        let cpu_tokens = match config.prefill {
            PrefillOn::Cpu => limits.chunk_tokens,
            _ => limits.chunk_tokens.min(CPU_TOKENS),
        };
        let (tokens, top_k, share) = (limits.chunk_tokens, moe.router.top_k, self.spec.largest_share());
        let sizes = Sizes { tokens, cpu_tokens, top_k, resident: 0, ring: 0, share, holders: 0, on_holders: 0 };
        let (cuda, heap) = (Cuda::plan(self.device.clone()), Heap::plan());
        let epilogue = Epilogue::load(&heap, &Shapes::default(), model)?;
        let work = GpuExperts::count(&cuda, &heap, &shape, &epilogue, &sizes)?;
        // The context first, as chosen, or a quarter of what is left; then the experts.
        match self.context(limits, &Counted { buffers: counted.buffers + work, ..counted }, block) {
            Attempt::Fits(plan) => self.experts(*plan, &shape.part(share)?.0, sizes),
            needs => Ok(needs),
        }
    }

    /// What may be kept in RAM beside a context of so many tokens.
    pub(super) fn kept_bytes(&self, context: usize) -> Result<KeptBytes> {
        Ok(KeptBytes {
            block: self.pinned_bytes(context, CacheSize { host_blocks: 1, ..CacheSize::default() })?,
            snapshot: self.pinned_bytes(context, CacheSize { snapshots: 1, ..CacheSize::default() })?,
        })
    }

    /// Pinned RAM of a cache of this size.
    fn pinned_bytes(&self, context: usize, size: CacheSize) -> Result<u64> {
        let cuda = Cuda::plan(self.device.clone());
        let backend = planned(&self.spec, &cuda, context)?;
        let own = cuda.pinned();
        KvCache::new(&backend, self.spec.model, size, self.spec.config.kv)?;
        Ok(cuda.pinned() - own)
    }

    /// Context and KV cache, of `block` bytes a block, beside what was counted.
    fn context(&self, limits: Limits, counted: &Counted, block: u64) -> Attempt {
        let Spec { model, config, .. } = self.spec;
        let budget = self.budget();
        let fixed = counted.weights + counted.buffers;
        let blocks_of = |tokens: usize| tokens.div_ceil(BLOCK_SIZE);
        let chosen = self.most.map(|most| most.max_context).or(config.max_context);
        let least = blocks_of(chosen.unwrap_or(model.max_context.min(2048)));
        let is_wide = limits.chunk_tokens > CHUNKS[CHUNKS.len() - 1] && counted.buffers > budget / 2;
        if fixed + least as u64 * block > budget || is_wide {
            return Attempt::Needs(fixed + least as u64 * block);
        }
        let quarter = ((budget - fixed) / 4 / block.max(1)) as usize;
        let max_context = chosen.unwrap_or(model.max_context.min(quarter.max(least) * BLOCK_SIZE));
        let one = blocks_of(max_context);
        let kv_blocks = match self.most {
            Some(most) => most.kv_blocks,
            None => quarter.clamp(one, one * config.max_sequences),
        };
        Attempt::Fits(Box::new(GpuPlan {
            device: self.device.clone(),
            choice: None,
            vram: self.vram,
            weights: counted.weights,
            buffers: counted.buffers,
            pinned: counted.pinned,
            kv: kv_blocks as u64 * block,
            resident: 0,
            ring: 0,
            ram: 0,
            max_context,
            kv_blocks,
            kv_host: 0,
            host_blocks: 0,
            snapshots: 0,
            state_cache: 0,
            limits,
            sizes: None,
            holders: Vec::new(),
        }))
    }

    /// As many experts as fit onto the GPUs beside this one, but for those that need not be there.
    fn holders(&self, shape: &ExpertShape, sizes: &Sizes, most: usize) -> Result<Vec<HolderPlan>> {
        if self.spec.beside().is_empty() {
            return Ok(Vec::new());
        }
        let cuda = Cuda::plan(self.device.clone());
        let epilogue = Epilogue::load(&Heap::plan(), &Shapes::default(), self.spec.model)?;
        let buffers = GpuExperts::count_holder(&cuda, shape, &epilogue, (sizes, 0, 0))?;
        let (each, stride, mut left) = (shape.bytes_of_one(), shape.most_bytes() as u64, most);
        let room = |vram: u64| vram.saturating_sub(CONTEXT_BYTES + buffers);
        let hold_all = self.spec.beside().iter().map(|&vram| room(vram) / each).sum::<u64>() >= most as u64;
        let passes = !hold_all && self.spec.config.prefill != PrefillOn::Cpu;
        let holder = |(number, &vram): (usize, &u64)| {
            let room = room(vram);
            let ring = if passes { (room / PASSING_SHARE / stride).min(MOST_PASSING) / 2 * 2 } else { 0 };
            let experts = ((room - ring * stride) / each).min(left as u64);
            left -= experts as usize;
            HolderPlan {
                number,
                vram,
                experts: experts as usize,
                resident: experts * each,
                ring: ring as usize,
                passing: ring * stride,
                buffers,
            }
        };
        let all = self.spec.beside().iter().enumerate().map(holder);
        Ok(all.filter(|holder| holder.experts > 0).collect())
    }

    /// `plan` with its experts: residents, those that pass through, and the others in RAM.
    fn experts(&self, plan: GpuPlan, shape: &ExpertShape, sizes: Sizes) -> Result<Attempt> {
        let config = self.spec.config;
        // Of residents and of the ring, which has room for any.
        let (each, experts, stride) = (shape.bytes_of_one(), shape.experts, shape.most_bytes() as u64);
        let taken = plan.weights + plan.buffers + plan.kv;
        let left = self.budget() - taken;
        let could_hold: usize = self.holders(shape, &sizes, experts)?.iter().map(|holder| holder.experts).sum();
        let (resident, ring) = match config.resident_experts {
            Some(n) if n > experts => {
                return Err(Error::Invalid(format!(
                    "--resident-experts {n}: a layer has {experts} experts, so give at most {experts}, or auto"
                )));
            }
            Some(n) if n as u64 * each > left => {
                return Ok(Attempt::Needs(taken + n as u64 * each));
            }
            Some(n) => (n, (left - n as u64 * each) / stride),
            // Those that no other GPU holds, and more where they fit.
            None if (experts - could_hold) as u64 * each <= left => (experts.min((left / each) as usize), 0),
            None => {
                let ring = (2 * (experts - could_hold) as u64).min(left / 2 / stride);
                (((left - ring * stride) / each) as usize, ring)
            }
        };
        let holders = self.holders(shape, &sizes, experts - resident)?;
        let on_holders = holders.iter().map(|holder| holder.experts).sum();
        let sizes = Sizes { resident, on_holders, holders: holders.len(), ..sizes };
        let in_ram = sizes.in_ram(experts);
        let ring = match in_ram == 0 || config.prefill == PrefillOn::Cpu {
            true => 0,
            false => (ring as usize).min(2 * in_ram) / 2 * 2,
        };
        // Prompts larger than the CPU takes need the ring.
        if in_ram > 0 && ring == 0 && sizes.cpu_tokens < sizes.tokens {
            return Ok(Attempt::Needs(taken + 2 * stride));
        }
        Ok(Attempt::Fits(Box::new(GpuPlan {
            resident: resident as u64 * each,
            ring: ring as u64 * stride,
            ram: if in_ram == 0 { 0 } else { self.spec.expert_bytes()? },
            sizes: Some(Sizes { ring, ..sizes }),
            holders,
            ..plan
        })))
    }
}

/// What the GPU side cannot do, said before anything is loaded.
pub(super) fn check(spec: &Spec<'_>) -> Result<()> {
    let model = spec.model;
    if spec.config.kv == KvBits::Bf16x2 {
        return Err(Error::Invalid("--kv bf16x2 is for the CPU: use --kv bf16 or int8, or --device cpu".into()));
    }
    spec.check_context()?;
    model.share(spec.largest_share())?;
    let mut lacking = model.layers.iter().filter_map(|layer| layer.attention.gpu_lacks());
    let of_streams = || model.connections()?.gpu_lacks();
    match lacking.next().or_else(of_streams).or_else(|| model.moe()?.gpu_lacks(model.hidden_size)) {
        Some(lack) => Err(Error::Model(format!("{lack}: use --device cpu"))),
        None => Ok(()),
    }
}

/// What all of the GPUs may take, if that is bounded: their shares are equal.
pub(super) fn least_bound(config: &EngineConfig) -> Option<u64> {
    config.vram.iter().copied().min()
}

/// VRAM that may be taken of a GPU that nothing bounds, driver included: what was free when it was opened, and what the
/// driver had taken by then.
pub(super) fn may_take(device: &DeviceInfo) -> u64 {
    device.total_bytes.min(device.free_bytes.saturating_add(CONTEXT_BYTES - LATER_BYTES))
}

/// Errors: `--vram` of a GPU is more than there is, or nothing at all.
pub(super) fn check_vram(bound: u64, device: &DeviceInfo) -> Result<()> {
    let (name, total, free) = (&device.name, device.total_bytes, may_take(device));
    match bound {
        n if n <= CONTEXT_BYTES => Err(Error::Invalid(format!(
            "--vram {}: the driver and the kernels alone take {:.1} GiB, so give a size such as 16GiB",
            size(n),
            gib(CONTEXT_BYTES)
        ))),
        n if n > total => Err(Error::Invalid(format!(
            "--vram {}: {name} has {:.1} GiB, so give less, or leave it out to use what is free",
            size(n),
            gib(total)
        ))),
        n if n > free => Err(Error::Resources(format!(
            "--vram {}: of {name} {:.1} GiB are free, so give at most that, or close what else uses the GPU",
            size(n),
            gib(free)
        ))),
        _ => Ok(()),
    }
}

/// A size that may be far too small to be told in GiB.
pub(super) fn size(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{bytes} bytes") } else { format!("{:.1} GiB", gib(bytes)) }
}

/// What constructors took on a device that only counts.
struct Counted {
    weights: u64,
    buffers: u64,
    kv: u64,
    pinned: u64, // in RAM
}

impl Counted {
    fn of(planner: &Planner<'_>, limits: Limits, context: usize, kv_blocks: usize) -> Result<Self> {
        let Spec { model, config, .. } = planner.spec;
        let cuda = Cuda::plan(planner.device.clone());
        let backend = planned(&planner.spec, &cuda, context)?;
        let own = cuda.allocated();
        let weights = Weights::load(&backend, &Shapes::default(), model, config.dense, &|_, _| Ok(()))?;
        let weights_bytes = cuda.allocated() - own;
        let size = CacheSize { blocks: kv_blocks, slots: config.max_sequences, ..CacheSize::default() };
        let kv = KvCache::new(&backend, model, size, config.kv)?;
        let kv_bytes = cuda.allocated() - own - weights_bytes;
        let model = Model::new(backend, model.clone(), weights, None, kv, limits)?;
        let all = cuda.allocated();
        drop(model);
        Ok(Self {
            weights: weights_bytes,
            buffers: all - weights_bytes - kv_bytes,
            kv: kv_bytes,
            pinned: cuda.pinned(),
        })
    }
}

/// A backend that only counts, of the share that takes the most.
fn planned(spec: &Spec<'_>, cuda: &Arc<Cuda>, context: usize) -> Result<CudaBackend> {
    let (backend, Share { rank, of }) =
        (CudaBackend::new(cuda.clone(), gpu_limits(spec.config, context))?, spec.largest_share());
    Ok(if of == 1 { backend } else { backend.with_rank(Rank::planned(cuda, rank, of)?) })
}

pub(super) fn gpu_limits(config: &EngineConfig, context: usize) -> gpu::Limits {
    gpu::Limits { context, table: config.max_sequences * context.div_ceil(BLOCK_SIZE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Kept, machine};
    use crate::machine::topology::Topology;
    use crate::model::families::shapes;

    fn card(total_bytes: u64, free_bytes: u64) -> DeviceInfo {
        let (name, capability) = ("a card".into(), (9, 0));
        DeviceInfo { name, capability, multiprocessors: 128, shared_bytes: 0, total_bytes, free_bytes }
    }

    #[test]
    fn the_driver_is_counted_once() {
        let open = 450 << 20; // what it has taken by then
        for others in [0, 3 << 30] {
            let total = 24 << 30;
            let card = card(total, total - others - open);
            // Weights, caches and experts get what nobody has, but for what the driver is still to take.
            let (ours, free) = (may_take(&card) - CONTEXT_BYTES, total - others - open);
            assert!(ours <= free - LATER_BYTES && ours + (400 << 20) > free, "{others}: {ours} of {free}");
        }
    }

    #[test]
    fn what_a_holder_pins_is_counted() {
        let model = shapes::shape("qwen3-30b-a3b", None).unwrap();
        let config = EngineConfig::default();
        let machine = machine(&config, &Topology::read()).unwrap();
        let machine = Machine { available_bytes: 64 << 30, ..machine };
        let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap().with_beside(vec![4 << 30]);
        let plan = GpuPlan::new(&spec, &card(8 << 30, 8 << 30), &machine).unwrap();
        let alone = GpuPlan { holders: Vec::new(), ..plan.clone() };
        let (with, without) = (plan.host_bytes(&spec, &machine).unwrap(), alone.host_bytes(&spec, &machine).unwrap());
        assert_eq!((plan.holders.len(), with - without), (1, 48 * 128 * 8), "a table of addresses");
    }
}
