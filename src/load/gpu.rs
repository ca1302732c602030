//! Loading onto a GPU, as planned.
//!
//! ```text
//! plan     what goes where
//! refusal  what is said of a model that does not fit
//! speed    how fast it will be
//! stages   what goes where of a model whose layers are on several
//! ways     on which GPUs it would be fastest
//! devices  the GPUs of a run
//! ```

mod devices;
mod plan;
mod refusal;
mod speed;
mod stages;
mod ways;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Instant;

use moebius_cache::format::ExpertCache;

use super::crews;
use super::machine::{Machine, gib, watch_memory};
use super::place::place;
use super::spec::Spec;
use super::speed::Expected;
use super::{LoadProgress, Loaded, Stored};
use crate::Result;
use crate::backend::Routing;
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::cuda::CudaBackend;
use crate::backend::source::TensorSource;
use crate::config::{DecodeOn, EngineConfig, ExpertsMemory, PrefillOn};
use crate::cuda::{Cuda, Rank};
use crate::experts::cost::CostModel;
use crate::experts::gpu::{Forced, GpuExperts, Prefill, Sizes};
use crate::experts::{CpuExperts, Epilogue, ExpertExecutor, ExpertMemory};
use crate::forward::kv_cache::{CacheSize, KvCache};
use crate::forward::weights::Weights;
use crate::forward::{Forward, Model, Ranks, Stages};
use crate::kernel::Kernel;
use crate::machine::heap::Heap;
use crate::machine::memory::{Pages, read_bandwidth};
use crate::machine::topology;
use crate::machine::workers::Team;
use crate::model::{Moe, Share};
pub use devices::{Gpus, Sharing};
use plan::gpu_limits;
pub use plan::{CONTEXT_BYTES, GpuPlan, HolderPlan, Short};
pub use speed::{GpuRates, HolderRates, on_gpu, products};
pub use stages::{Common, Place, StagePlan, StagesPlan, attempt_stages, on_stages, plan_stages};

/// Puts a model together on a device, which others may hold experts for, or a share of it on each of several.
pub(super) fn assemble(
    spec: &Spec<'_>,
    Stored { resident, experts }: Stored<'_>,
    (mut devices, plan): (Vec<Arc<Cuda>>, GpuPlan),
    machine: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let Spec { model, config, .. } = *spec;
    let beside = devices.split_off(devices.len() - plan.holders.len());
    if model.moe().zip(plan.sizes).is_some_and(|(moe, sizes)| sizes.in_ram(moe.num_experts) > 0) {
        crews::choose(spec, &machine, spec.expert_bytes()?, report)?;
    }
    let Machine { team, kernel, heap, .. } = machine;
    let cuda = &devices[0];
    cuda.enter_thread()?;
    // While there is room for it.
    let vram_bytes = cuda.vram_bandwidth(SAMPLE_BYTES)?;
    let beside_rates = beside.iter().map(HolderRates::measure).collect::<Result<Vec<_>>>()?;
    cuda.enter_thread()?;
    let ranks: Vec<_> = match devices.len() {
        1 => vec![None],
        _ => Rank::of_devices(&devices)?.into_iter().map(Some).collect(),
    };
    let dense = |cuda: &Arc<Cuda>, rank: Option<Rank>| -> Result<_> {
        cuda.enter_thread()?;
        let backend = CudaBackend::new(cuda.clone(), gpu_limits(config, plan.max_context))?;
        let (is_first, backend) = match rank {
            None => (true, backend),
            Some(rank) => (rank.number() == 0, backend.with_rank(rank)),
        };
        let weights = Weights::load(&backend, resident, model, config.dense, &|done, layers| {
            if is_first {
                report(LoadProgress::Weights(done, layers));
            }
            watch_memory()
        })?;
        Ok((backend, weights))
    };
    // As many at a time as there is RAM for; they read the same files.
    let at_a_time = (topology::available_bytes() / LOADING_BYTES).clamp(1, devices.len() as u64) as usize;
    let (mut parts, mut ranks, dense) = (Vec::new(), ranks.into_iter(), &dense);
    for some in devices.chunks(at_a_time) {
        let loaded: Vec<_> = std::thread::scope(|scope| {
            let start = |(cuda, rank)| scope.spawn(move || dense(cuda, rank));
            let threads: Vec<_> = some.iter().zip(ranks.by_ref()).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        for part in loaded {
            parts.push(part?);
        }
    }
    if let Some(((first, _), others)) = parts.split_first_mut() {
        for (backend, _) in others {
            backend.cuda().enter_thread()?;
            backend.multiply_like(first)?;
        }
    }
    cuda.enter_thread()?;
    let mut speeds = None;
    let mut executors: Vec<Option<Box<dyn ExpertExecutor<CudaBackend>>>> = devices.iter().map(|_| None).collect();
    if let (Some(cache), Some(sizes)) = (experts, plan.sizes) {
        let parts = ExpertParts { spec, resident, team: &team, kernel, heap: &heap };
        let share = |rank| Share { rank, of: devices.len() };
        let sizes = Sizes { share: share(0), ..sizes };
        let (mut first, memory, measured) = parts.executor(cuda, cache, sizes, report)?;
        speeds = measured;
        for (rank, (cuda, executor)) in devices.iter().zip(&mut executors).enumerate().skip(1) {
            cuda.enter_thread()?;
            // The CPU's share is computed once; other ranks ask for nothing.
            let cpu = parts.cpu(&memory, sizes.top_k)?;
            *executor = Some(Box::new(GpuExperts::of_rank(cuda.clone(), &heap, cpu, share(rank), &mut first)?));
        }
        for ((on, holder), rates) in beside.iter().zip(&plan.holders).zip(&beside_rates) {
            first.hold(on.clone(), holder.experts, (holder.ring, rates.link_bytes))?;
        }
        executors[0] = Some(Box::new(first));
    }
    cuda.enter_thread()?;
    let backend = &parts[0].0;
    let rates = GpuRates { vram_bytes, speeds, beside: beside_rates };
    cuda.enter_thread()?;
    let expected = on_gpu(&plan, spec, &rates)?;
    let mut device = describe(&plan, spec, speeds, backend.library(), &expected);
    let mut room = Common::of([&plan].into_iter());
    device += &room.keep_host_blocks(cuda, plan.kv_host, &expected)?;
    let size = room.cache_size(config);
    report(LoadProgress::Experts(&device));
    let mut models = Vec::new();
    for (cuda, ((backend, weights), executor)) in devices.iter().zip(parts.into_iter().zip(executors)) {
        cuda.enter_thread()?;
        let kv = KvCache::new(&backend, model, size, config.kv)?;
        models.push(Model::new(backend, model.clone(), weights, executor, kv, plan.limits)?);
        cuda.synchronize()?;
    }
    devices[0].enter_thread()?;
    let first = models.remove(0);
    let model: Box<dyn Forward> = if models.is_empty() { Box::new(first) } else { Box::new(Ranks::new(first, models)) };
    Ok(loaded(spec, (model, device), (&room, plan.limits.tokens), (team, kernel)))
}

/// A model, on what it runs in words, what it has room for with passes of so many tokens, and who runs it.
fn loaded(
    spec: &Spec<'_>,
    (model, device): (Box<dyn Forward>, String),
    (room, max_batch_tokens): (&Common, usize),
    (team, kernel): (Arc<Team>, &'static dyn Kernel),
) -> Loaded {
    let &Common { max_context, kv_blocks, host_blocks, snapshots } = room;
    Loaded {
        model,
        kv_blocks,
        host_blocks,
        snapshots,
        max_context,
        max_batch_tokens,
        device: Some(device),
        precision: spec.precision.clone(),
        dense: spec.decoded().dense_words(),
        team,
        kernel,
        available_bytes: topology::available_bytes,
    }
}

/// What the routed experts are put together from, beside their bytes.
struct ExpertParts<'a> {
    spec: &'a Spec<'a>,
    resident: &'a dyn TensorSource,
    team: &'a Arc<Team>,
    kernel: &'static dyn Kernel,
    heap: &'a Heap,
}

impl ExpertParts<'_> {
    /// The experts' bytes, where they are to be read, and whether all of them go to VRAM.
    fn place(
        &self,
        cache: ExpertCache,
        sizes: &Sizes,
        report: &(dyn Fn(LoadProgress<'_>) + Sync),
    ) -> Result<(Arc<ExpertMemory>, bool)> {
        let (config, all) = (self.spec.config, sizes.in_ram(cache.num_experts()) == 0);
        // Experts that all go to VRAM are read once.
        let config = match all {
            true => EngineConfig { experts_memory: ExpertsMemory::Map, lock: false, ..config.clone() },
            false => config.clone(),
        };
        Ok((Arc::new(place(cache, &config, self.team, report)?), all))
    }

    /// Who computes them on a device, where their bytes are, and how fast those are that stay in RAM.
    fn executor(
        &self,
        cuda: &Arc<Cuda>,
        cache: ExpertCache,
        sizes: Sizes,
        report: &(dyn Fn(LoadProgress<'_>) + Sync),
    ) -> Result<(GpuExperts, Arc<ExpertMemory>, Option<CostModel>)> {
        let (memory, all) = self.place(cache, &sizes, report)?;
        let mut cpu = self.cpu(&memory, sizes.cpu_tokens * sizes.top_k)?;
        let speeds = if all { None } else { Some(measure(cuda, self.team, &mut cpu, &sizes)?) };
        cuda.enter_thread()?;
        let costs = speeds.unwrap_or(CostModel::NOTHING_IN_RAM);
        let executor = GpuExperts::new(cuda.clone(), self.heap, cpu, sizes, costs, forced(self.spec.config))?;
        Ok((executor, memory, speeds))
    }

    /// The CPU's side of them, for so many tokens' choices.
    fn cpu(&self, memory: &Arc<ExpertMemory>, pairs: usize) -> Result<CpuExperts> {
        let cpu = CpuExperts::new(self.heap, memory.clone(), self.team.clone(), self.kernel, pairs)?;
        Ok(cpu.with(Epilogue::load(self.heap, self.resident, self.spec.model)?))
    }
}

/// Where the user wants experts.
fn forced(config: &EngineConfig) -> Forced {
    let prefill = match config.prefill {
        PrefillOn::Auto => None,
        PrefillOn::Cpu => Some(Prefill::Cpu),
        PrefillOn::Gpu => Some(Prefill::Gpu),
    };
    Forced { prefill, decode_on_cpu: config.decode == DecodeOn::Cpu }
}

impl Common {
    /// Keeps blocks of the KV cache in `bytes` of RAM if they are worth it, and says so: what is slower to copy than to
    /// compute is better computed.
    fn keep_host_blocks(&mut self, cuda: &Arc<Cuda>, bytes: u64, expected: &Expected) -> Result<String> {
        if self.host_blocks == 0 {
            return Ok(String::new());
        }
        cuda.enter_thread()?;
        let link = bytes as f64 / self.host_blocks as f64 / cuda.pcie_bandwidth(SAMPLE_BYTES)?;
        if link < BLOCK_SIZE as f64 / expected.prefill_tok_per_s {
            return Ok(format!("; {} tokens more of KV cache in RAM", self.host_blocks * BLOCK_SIZE));
        }
        self.host_blocks = 0;
        Ok("; no KV cache in RAM (--kv-host): computing it again is faster than the link".into())
    }

    /// The cache of each GPU.
    fn cache_size(&self, config: &EngineConfig) -> CacheSize {
        let &Self { kv_blocks: blocks, snapshots, host_blocks, .. } = self;
        CacheSize { blocks, slots: config.max_sequences, snapshots, host_blocks }
    }
}

/// Puts a model together whose layers are on several GPUs, a run on each.
pub(super) fn assemble_stages(
    spec: &Spec<'_>,
    Stored { resident, experts }: Stored<'_>,
    StagesPlan { devices, stages, choice }: StagesPlan,
    machine: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let Spec { model, config, .. } = *spec;
    let in_ram = |stage: &StagePlan| {
        stage.model.moe().zip(stage.plan.sizes).is_some_and(|(moe, sizes)| sizes.in_ram(moe.num_experts) > 0)
    };
    if stages.iter().any(in_ram) {
        crews::choose(spec, &machine, spec.expert_bytes()?, report)?;
    }
    let Machine { team, kernel, heap, .. } = machine;
    let runs: Vec<_> = stages.iter().map(|stage| spec.moe_layers_of(&stage.model)).collect();
    let mut caches: Vec<Option<ExpertCache>> = match experts {
        Some(cache) => cache.split(&runs).into_iter().map(Some).collect(),
        None => stages.iter().map(|_| None).collect(),
    };
    let (mut parts, mut rates) = (Vec::new(), Vec::new());
    for ((stage, cuda), cache) in stages.iter().zip(&devices).zip(&mut caches) {
        cuda.enter_thread()?;
        // While there is room for it.
        let vram_bytes = cuda.vram_bandwidth(SAMPLE_BYTES)?;
        let backend = CudaBackend::new(cuda.clone(), gpu_limits(config, stage.plan.max_context))?;
        let first = stage.layers().start;
        let weights = Weights::load(&backend, resident, &stage.model, config.dense, &|done, _| {
            report(LoadProgress::Weights(first + done, model.layers.len()));
            watch_memory()
        })?;
        let (mut executor, mut speeds) = (None, None);
        if let (Some(cache), Some(sizes)) = (cache.take(), stage.plan.sizes) {
            let stage_spec = stage.spec(spec);
            let parts = ExpertParts { spec: &stage_spec, resident, team: &team, kernel, heap: &heap };
            let (own, _, measured) = parts.executor(cuda, cache, sizes, report)?;
            (executor, speeds) = (Some(Box::new(own) as Box<dyn ExpertExecutor<CudaBackend>>), measured);
        }
        rates.push(GpuRates { vram_bytes, beside: Vec::new(), speeds });
        parts.push((backend, weights, executor));
    }
    let mut room = Common::of(stages.iter().map(|stage| &stage.plan));
    let expected = on_stages(&stages, spec, &rates)?;
    let mut device = stages.iter().map(describe_stage).collect::<Vec<_>>().join("; ");
    if let Some(speeds) = rates.iter().find_map(|of| of.speeds) {
        device += &format!("; experts in RAM: CPU {:.0} GB/s", speeds.cpu_bytes / 1e9);
    }
    device += &format!("; expect {expected}");
    choice.iter().for_each(|choice| device += &format!("; {choice}"));
    let kv_host = stages.iter().map(|stage| stage.plan.kv_host).sum();
    device += &room.keep_host_blocks(&devices[0], kv_host, &expected)?;
    let size = room.cache_size(config);
    let limits = stages[0].plan.limits;
    let mut models = Vec::new();
    for ((stage, cuda), (backend, weights, executor)) in stages.iter().zip(&devices).zip(parts) {
        cuda.enter_thread()?;
        let kv = KvCache::new(&backend, &stage.model, size, config.kv)?;
        models.push(Model::new(backend, stage.model.clone(), weights, executor, kv, limits)?);
        cuda.synchronize()?;
    }
    let staged = Stages::new(model.clone(), models, limits.tokens)?;
    if staged.are_through_ram() {
        device += "; residual streams go through RAM: GPUs do not reach each other's memory, or a copy was wrong";
    }
    report(LoadProgress::Experts(&device));
    devices[0].enter_thread()?;
    Ok(loaded(spec, (Box::new(staged), device), (&room, limits.tokens), (team, kernel)))
}

/// What was decided of a stage, in a few words.
fn describe_stage(stage: &StagePlan) -> String {
    let (taken, resident) = taken(&stage.plan, stage.model.moe());
    let mut said = format!("{} ({}): {taken}", stage.describe(), stage.plan.device.name);
    resident.iter().for_each(|resident| said += &format!(", {resident}"));
    said
}

/// What a plan takes of VRAM, and how many experts are there, in a few words.
fn taken(plan: &GpuPlan, moe: Option<&Moe>) -> (String, Option<String>) {
    let mut taken = format!(
        "{:.1} GiB of VRAM (weights {:.1}, KV {:.1} for a context of {}, buffers {:.1}",
        gib(plan.total()),
        gib(plan.weights),
        gib(plan.kv),
        plan.max_context,
        gib(plan.buffers),
    );
    let resident = plan.sizes.zip(moe).map(|(sizes, moe)| {
        taken += &format!(", experts {:.1}, passing {:.1}", gib(plan.resident), gib(plan.ring));
        format!("{} of {} experts of a layer resident", sizes.resident, moe.num_experts)
    });
    (taken + ")", resident)
}

/// What was decided, in one line.
fn describe(
    plan: &GpuPlan,
    spec: &Spec<'_>,
    speeds: Option<CostModel>,
    library: Option<String>,
    expected: &Expected,
) -> String {
    let many = match spec.ranks() {
        1 => String::new(),
        n => format!("{n} x "),
    };
    let (taken, resident) = taken(plan, spec.model.moe());
    let mut line = format!("{many}{}: {taken}", plan.device.name);
    if let Some(resident) = resident {
        line += &format!("; {resident}");
        for holder in &plan.holders {
            let (taken, buffers) = (gib(holder.total()), gib(holder.buffers));
            line += &format!(", {} on another GPU ({taken:.1} GiB, buffers {buffers:.1})", holder.experts);
        }
        if let Some(speeds) = speeds {
            line += &format!(
                ", the others in RAM: CPU {:.0} GB/s, PCIe {:.0} GB/s",
                speeds.cpu_bytes / 1e9,
                speeds.pcie_bytes / 1e9
            );
        }
    }
    if let Some(library) = library {
        line += &format!("; products by {library}");
    }
    line += &format!("; expect {expected}");
    plan.choice.iter().for_each(|choice| line += &format!("; {choice}"));
    line
}

/// What a rank may take of RAM while its weights are loaded: some tensors, the largest in f32.
const LOADING_BYTES: u64 = 8 << 30;

/// Bytes over which speeds are measured.
const SAMPLE_BYTES: usize = 128 << 20;

/// Measures what decides where experts run.
fn measure(cuda: &Arc<Cuda>, team: &Team, cpu: &mut CpuExperts, sizes: &Sizes) -> Result<CostModel> {
    cuda.enter_thread()?;
    let sample = SAMPLE_BYTES
        .min((topology::available_bytes() / 16) as usize)
        .min(cpu.memory().bytes() as usize)
        .next_multiple_of(4096);
    let pcie_bytes = CostModel::links(sizes.share.of, cuda.pcie_bandwidth(sample)?);
    team.fit(1);
    let cpu_bytes = CostModel::CPU_SHARE * 1e9 * read_bandwidth(team, sample, Pages::Huge, 3)?;

    let layout = cpu.memory().cache().layout(0);
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
    let products = (layout.weights() * tokens * sizes.top_k) as f64;
    Ok(CostModel { cpu_bytes, cpu_products: products / seconds, pcie_bytes })
}
