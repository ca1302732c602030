//! From a checkpoint directory to a model ready to run: what fits, what precision, where the experts are.
//!
//! ```text
//! precision     what the experts become
//! synthetic     random weights of a known shape
//! place         where the experts' bytes lie
//! experts       routed experts alone, for other engines
//! components    what each part of a checkpoint is stored as and becomes
//! gpu           what goes where on a GPU
//! speed         how fast it will be
//! plan          all of this before anything is loaded
//! ```
//!
//! Imports machine, kernel, cuda, config, model, backend, experts and forward. Read [`assemble`] first.

pub mod components;
pub mod experts;
#[cfg(feature = "cuda")]
pub mod gpu;
pub(crate) mod place;
pub mod plan;
mod precision;
pub mod speed;
pub mod synthetic;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moebius_cache::Precision;
use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::convert::{self, ExpertSource, Job, LayerSource, Progress};
use moebius_cache::format::ExpertCache;
use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};

use crate::backend::batch::BLOCK_SIZE;
use crate::backend::cpu::Cpu;
use crate::backend::source::TensorSource;
use crate::config::{CPU_BATCH_TOKENS, DenseBits, Device, EngineConfig, ExpertBits, KvBits, Numa, PrefillOn};
use crate::experts::cpu::CpuExperts;
use crate::experts::{Between, ExpertExecutor};
use crate::forward::kv_cache::{self, KvCache};
use crate::forward::weights::Weights;
use crate::forward::{Forward, Limits, Model};
use crate::kernel::{self, Activations, Kernel, Simd};
use crate::machine::topology::{self, Topology};
use crate::machine::workers::Team;
use crate::model::families;
use crate::model::{Activation, Attention, ModelConfig};
use crate::{Error, Result};
use place::{SMALL_BYTES, place};
pub use precision::{for_checkpoint, for_folder, precision};
use speed::CpuRates;

/// Memory that is left to the rest of the machine, in bytes.
pub(crate) const RESERVE_BYTES: u64 = 512 << 20;

/// Available memory below which nothing more is taken, in bytes: loading stops, new requests are refused.
pub(crate) const LEAST_BYTES: u64 = RESERVE_BYTES / 2;

/// A model in memory, and what it may use.
pub struct Loaded {
    /// Ready to run.
    pub model: Box<dyn Forward>,
    /// Blocks of its KV cache.
    pub kv_blocks: usize,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Tokens of one forward pass.
    pub max_batch_tokens: usize,
    /// What it runs on, what takes how much VRAM and how fast it should be, in one line; `None`: the CPU alone.
    pub device: Option<String>,
    /// Of the routed experts; `None` for a dense model.
    pub precision: Option<Precision>,
    /// Runs the ops.
    pub team: Arc<Team>,
    /// Its instruction set.
    pub kernel: &'static dyn Kernel,
    /// RAM that can be taken, asked for at each new request.
    pub available_bytes: fn() -> u64,
}

/// What loading tells whoever waits.
#[derive(Clone, Copy, Debug)]
pub enum LoadProgress<'a> {
    /// Experts are being converted or the converter waits, with its own words.
    Convert(&'a Progress),
    /// Resident weights: layers done, of how many.
    Weights(usize, usize),
    /// Experts copied: layers done, of how many.
    Copy(usize, usize),
    /// What was decided, in one line: where the experts are that take a while to read or were copied, and what runs
    /// where how fast.
    Experts(&'a str),
}

/// The machine side of a configuration.
pub struct Machine {
    /// Workers.
    pub team: Arc<Team>,
    /// Their kernels.
    pub kernel: &'static dyn Kernel,
    /// RAM that can be taken, before anything is loaded.
    pub available_bytes: u64,
}

/// What `doctor` and `--simd amx` say where [`topology::cpu_has_amx`] and there are no kernels for it all the same.
pub(crate) const AMX_REFUSED: &str = "the CPU has AMX, but the system does not let programs use it: that takes Linux \
                                      5.16 or later, and a hypervisor and a container that allow it";

/// Workers and kernels. Errors: the instruction set asked for cannot run here; a CPU cannot be used; the system gives
/// no more threads.
pub fn machine(config: &EngineConfig, topology: &Topology) -> Result<Machine> {
    moebius_cache::threads::start()?;
    let kernel = match config.simd {
        None => kernel::best(),
        Some(simd) => kernel::get(simd).ok_or_else(|| {
            let have: Vec<_> = kernel::available().iter().map(|s| s.to_string()).collect();
            let why = match simd {
                Simd::Amx if topology::cpu_has_amx() => AMX_REFUSED,
                _ => "this CPU lacks it",
            };
            Error::Invalid(format!("--simd {simd} cannot run: {why}; use one of {}", have.join(", ")))
        })?,
    };
    let threads = config.threads.unwrap_or_else(|| topology.default_threads());
    let mut seats = topology.seats(threads);
    if config.numa != Numa::Auto {
        seats.iter_mut().for_each(|seat| seat.node = 0);
    }
    let team = Arc::new(Team::on_nodes(&seats)?);
    let limit = moebius_cache::limits::address_space_bytes().unwrap_or(u64::MAX);
    Ok(Machine { team, kernel, available_bytes: topology.available_bytes.min(limit) })
}

/// Where expert caches are kept.
pub fn cache_dir(config: &EngineConfig) -> Result<PathBuf> {
    if let Some(dir) = &config.cache_dir {
        return Ok(dir.clone());
    }
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    base.map(|b| b.join("moebius"))
        .ok_or_else(|| Error::Invalid("neither HOME nor XDG_CACHE_HOME is set: give --cache-dir".into()))
}

/// The conversion that a model in `precision` needs.
pub fn cache_job<'a>(name: &str, checkpoint: &'a Checkpoint, model: &ModelConfig, precision: Precision) -> Job<'a> {
    let moe = model.moe().expect("a model with a precision of experts has experts");
    let layers = model.moe_layers().map(|(layer, moe)| {
        let expert = |e: usize| {
            let tensor =
                |which| format!("{}layers.{layer}.{}.experts.{e}.{which}.weight", model.names.body, model.names.moe);
            let [gate, up, down] = model.names.experts.map(tensor);
            ExpertSource { gate, up, down }
        };
        LayerSource { layer, experts: (0..moe.num_experts).map(expert).collect() }
    });
    Job {
        checkpoint,
        model: name.to_string(),
        hidden: model.hidden_size,
        intermediate: moe.intermediate_size,
        num_experts: moe.num_experts,
        precision,
        weights_suffice: !moe.expert_bias && moe.activation == Activation::Silu,
        layers: layers.collect(),
    }
}

/// Loads the model in `dir`, converting its experts first if no cache of them is there.
///
/// Errors: everything that can be wrong with a checkpoint, and `Error::Resources` before loading when it cannot fit.
pub fn load(
    name: &str,
    dir: &Path,
    config: &EngineConfig,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let model = families::read(dir)?;
    let machine = machine(config, &Topology::read())?;
    let checkpoint = Checkpoint::open(dir)?;
    let config = &for_checkpoint(config, &model, &checkpoint);
    let precision = precision(&model, config)?;
    let budget = Budget::new(&model, config, precision, &machine)?;
    let experts = match precision {
        None => None,
        Some(precision) => {
            let job = cache_job(name, &checkpoint, &model, precision);
            Some(convert::ensure(&job, &cache_dir(config)?, &|p| report(LoadProgress::Convert(&p)))?)
        }
    };
    assemble(model, &checkpoint, experts, config, budget, machine, report)
}

/// Puts resident weights and experts together.
pub fn assemble(
    model: ModelConfig,
    source: &dyn TensorSource,
    experts: Option<ExpertCache>,
    config: &EngineConfig,
    budget: Budget,
    machine: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let (max_context, kv_blocks) = match budget {
        #[cfg(feature = "cuda")]
        Budget::Gpu(cuda, plan) => return gpu::assemble(model, source, experts, config, (cuda, plan), machine, report),
        Budget::Cpu { max_context, kv_blocks } => (max_context, kv_blocks),
    };
    let (team, kernel) = (machine.team.clone(), machine.kernel);
    let backend = Cpu::new(team.clone(), kernel);
    let weights = Weights::load(&backend, source, &model, config.dense, &|done, layers| {
        report(LoadProgress::Weights(done, layers));
        watch_memory()
    })?;
    let precision = experts.as_ref().map(|cache| cache.header().precision);
    let executor: Option<Box<dyn ExpertExecutor<Cpu>>> = match (experts, model.moe()) {
        (Some(cache), Some(moe)) => {
            let experts = CpuExperts::new(
                Arc::new(place(cache, config, &team, report)?),
                team.clone(),
                kernel,
                config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS),
                moe.router.top_k,
            );
            Some(Box::new(experts.with(Between::load(source, &model)?)))
        }
        _ => None,
    };
    let kv = KvCache::new(&backend, &model, kv_blocks, config.max_sequences, config.kv)?;
    let tokens = config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS);
    if expert_bytes(&model, precision)? >= SMALL_BYTES {
        let rates = CpuRates::measure(&model, config, precision, &machine, tokens)?;
        let expected = speed::on_cpu(&model, config, precision, &rates, tokens)?;
        let (threads, read) = (team.threads(), rates.read_bytes / 1e9);
        report(LoadProgress::Experts(&format!(
            "CPU: {threads} threads, {read:.0} GB/s; a context of {max_context}; expect {expected}"
        )));
    }
    let limits = Limits { tokens, chunk_tokens: tokens, logit_rows: config.max_sequences };
    let model = Box::new(Model::new(backend, model, weights, executor, kv, limits)?);
    let available_bytes = topology::available_bytes;
    Ok(Loaded {
        model,
        kv_blocks,
        max_context,
        max_batch_tokens: tokens,
        device: None,
        precision,
        team,
        kernel,
        available_bytes,
    })
}

/// What fits into memory, decided before anything is loaded.
#[derive(Clone, Debug)]
pub enum Budget {
    /// On the CPU alone.
    Cpu {
        /// Tokens a sequence may hold.
        max_context: usize,
        /// Blocks of the KV cache.
        kv_blocks: usize,
    },
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Gpu(Arc<crate::cuda::Cuda>, gpu::GpuPlan),
}

impl Budget {
    /// Errors: `Error::Resources` when weights, activations or the context asked for do not fit into the machine's
    /// available bytes.
    pub fn new(
        model: &ModelConfig,
        config: &EngineConfig,
        precision: Option<Precision>,
        machine: &Machine,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = open_gpu(config)? {
            let plan = gpu::GpuPlan::new(model, config, precision, &cuda.info)?;
            gpu::check_ram(&plan, model, config, precision, machine)?;
            return Ok(Self::Gpu(cuda, plan));
        }
        #[cfg(not(feature = "cuda"))]
        if let Device::Cuda(n) = config.device {
            return Err(Error::Device(format!("--device cuda:{n}: this build has no GPU side; use --device cpu")));
        }
        Self::on_cpu(model, config, precision, machine)
    }

    /// As [`Budget::new`], of the CPU alone.
    pub(crate) fn on_cpu(
        model: &ModelConfig,
        config: &EngineConfig,
        precision: Option<Precision>,
        machine: &Machine,
    ) -> Result<Self> {
        check_no_gpu(config)?;
        check_context(model, config)?;
        let available = machine.available_bytes.saturating_sub(RESERVE_BYTES);
        let weights = resident_bytes(model, config.dense).saturating_add(expert_bytes(model, precision)?);
        let activations = activation_bytes(model, config, precision, machine)?;
        let states = (model.state_bytes_per_sequence() as u64).saturating_mul(config.max_sequences as u64);
        let needed = weights.saturating_add(activations).saturating_add(states);
        if needed > available {
            let remedy = match activations > weights {
                true => "lower --max-batch-tokens",
                false => remedy(model, config, precision, available - activations.min(available)),
            };
            let limit = moebius_cache::limits::address_space_bytes().map_or("", |_| ", or raise `ulimit -v`");
            return Err(Error::Resources(format!(
                "the model needs {:.1} GiB of memory and {:.1} are free: {remedy}{limit}",
                gib(needed),
                gib(available)
            )));
        }
        let free = available - needed;
        let per_token = (model.kv_bytes_per_token(config.kv.parts()) as u64).max(1);
        let max_context = match config.max_context {
            Some(n) => {
                kv_cache::check_fits(model, n, config.kv, free)?;
                n
            }
            // Half of what is free, so that the machine stays usable.
            None => {
                kv_cache::check_fits(model, model.max_context.min(BLOCK_SIZE), config.kv, free / 2)?;
                model.max_context.min((free / 2 / per_token) as usize)
            }
        };
        let one = max_context.div_ceil(BLOCK_SIZE);
        let all = (free / 2 / per_token) as usize / BLOCK_SIZE;
        Ok(Self::Cpu { max_context, kv_blocks: all.clamp(one, one.saturating_mul(config.max_sequences)) })
    }
}

/// Limits that no model can be run with. Errors: `Error::Invalid`.
pub(crate) fn check_context(model: &ModelConfig, config: &EngineConfig) -> Result<()> {
    if config.max_sequences == 0 || config.max_batch_tokens == Some(0) {
        return Err(Error::Invalid("an engine needs at least one sequence and one token in a batch".into()));
    }
    let limit = model.max_context;
    match config.max_context {
        Some(n @ 0..=1) => Err(Error::Invalid(format!(
            "--max-context {n} leaves no room for a prompt and its answer: give at least 2"
        ))),
        Some(n) if n > limit => Err(Error::Invalid(format!(
            "--max-context {n} is beyond the {limit} positions this model was made for: give at most {limit}"
        ))),
        _ => Ok(()),
    }
}

/// Flags that only a GPU obeys. Errors: `Error::Invalid`.
fn check_no_gpu(config: &EngineConfig) -> Result<()> {
    let refuse = |flag: &str, instead: &str| {
        Err(Error::Invalid(format!("{flag} is for a GPU, and this runs on the CPU: {instead}")))
    };
    match config {
        EngineConfig { kv: KvBits::Fp8, .. } => refuse("--kv fp8", "use --kv bf16"),
        EngineConfig { vram: Some(_), .. } => refuse("--vram", "leave it out"),
        EngineConfig { resident_experts: Some(1..), .. } => refuse("--resident-experts", "leave it out"),
        EngineConfig { prefill: PrefillOn::Gpu, .. } => refuse("--prefill gpu", "leave it out"),
        _ => Ok(()),
    }
}

/// The GPU to run on, if any. Errors: `Error::Device` when one was asked for that cannot be used.
#[cfg(feature = "cuda")]
pub(crate) fn open_gpu(config: &EngineConfig) -> Result<Option<Arc<crate::cuda::Cuda>>> {
    match config.device {
        Device::Cpu => Ok(None),
        Device::Cuda(ordinal) => crate::cuda::Cuda::open(ordinal).map(Some),
        Device::Auto => Ok(crate::cuda::Cuda::open(0).ok()),
    }
}

/// The flags with which weights that are too large would fit into `available` bytes, if any; the least loss first.
fn remedy(model: &ModelConfig, config: &EngineConfig, as_asked: Option<Precision>, available: u64) -> &'static str {
    let int4 = precision(model, &EngineConfig { experts: ExpertBits::Int4, ..config.clone() }).unwrap_or(as_asked);
    let fits = |dense, precision| {
        expert_bytes(model, precision)
            .is_ok_and(|experts| resident_bytes(model, dense).saturating_add(experts) <= available)
    };
    let choices = [
        (config.dense, int4, "use --experts int4"),
        (DenseBits::Int8, as_asked, "use --dense int8"),
        (DenseBits::Int8, int4, "use --experts int4 --dense int8"),
        (DenseBits::Int4, as_asked, "use --dense int4"),
        (DenseBits::Int4, int4, "use --experts int4 --dense int4"),
    ];
    let found = choices.into_iter().find(|&(dense, precision, _)| fits(dense, precision));
    found
        .map_or("no precision makes it fit, so use a machine with more memory, or a smaller model", |(.., flags)| flags)
}

/// Bytes of everything that grows with the tokens of a forward pass, of the logits, and of the workers' scratch memory.
pub(crate) fn activation_bytes(
    model: &ModelConfig,
    config: &EngineConfig,
    precision: Option<Precision>,
    machine: &Machine,
) -> Result<u64> {
    let (tokens, rows, threads, kernel) = (
        config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS),
        config.max_sequences,
        machine.team.threads(),
        machine.kernel,
    );
    // Dense layers' inputs in the form of the weights: one memory that grows to the largest.
    let prepared = |precision, k: usize, rows: usize| match k.checked_mul(rows) {
        Some(numbers) if numbers < 1 << 56 => Activations::bytes(kernel, precision, k, rows) as u128,
        _ => u128::from(u64::MAX), // a config that lies
    };
    let matrices = model.layers.iter().flat_map(|layer| layer.matrices(model.hidden_size));
    let dense = |k| config.dense.precision(k).unwrap_or(Precision::Bf16);
    let inputs = matrices.map(|(_, k)| prepared(dense(k), k, tokens)).max().unwrap_or(0);
    let head = prepared(dense(model.hidden_size), model.hidden_size, rows);

    // f32 numbers of a token, as `Model::new` allocates them.
    let attention = model.attentions().into_iter().map(|attention| match attention {
        Attention::Gqa(a) => {
            a.head_dim * (2 * (a.num_heads + a.num_kv_heads) + if a.output_gate { a.num_heads } else { 0 })
        }
        Attention::DeltaNet(a) => a.conv_dim() + 2 * a.value_dim(),
        Attention::Mla(a) => {
            let head = a.qk_head_dim() + a.cache_dim() + a.kv_lora_rank + a.v_head_dim;
            2 * a.q_lora_rank.unwrap_or(0) + a.cache_dim() + a.num_heads * head
        }
    });
    let attention = attention.sum::<usize>();
    let mut widths: Vec<usize> = model.layers.iter().filter_map(|layer| layer.ffn.mlp_width()).collect();
    widths.sort_unstable();
    widths.dedup();
    let routing = model.moe().map_or(0, |moe| moe.num_experts + 2 * moe.router.top_k);
    let token = 2 * model.hidden_size + model.rope.dim + attention + 3 * widths.iter().sum::<usize>() + routing;
    let logits = 2 * (model.hidden_size + model.vocab_size);
    // Of one worker: a tile of queries, its scores, what they weight, and two segments' sums.
    const TILE: usize = 64;
    let (key_dim, value_dim) = model
        .layers
        .iter()
        .map(|layer| layer.attention.kv_dims())
        .fold((0, 0), |a, (_, key, value)| (a.0.max(key), a.1.max(value)));
    let scratch = prepared(Precision::Bf16, key_dim, TILE)
        + prepared(Precision::Bf16, BLOCK_SIZE, TILE)
        + wide(&[4, TILE, 2 * BLOCK_SIZE + 3 * value_dim.next_multiple_of(TILE_ROWS)]);
    let experts = match (precision, model.moe()) {
        (Some(precision), Some(moe))
            if tokens.saturating_mul(model.hidden_size.max(moe.intermediate_size)) < 1 << 48 =>
        {
            let layout = ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision)?;
            CpuExperts::bytes(&layout, kernel, threads, tokens, moe.router.top_k) as u128
        }
        (Some(_), Some(_)) => u128::from(u64::MAX),
        _ => 0,
    };
    Ok(saturated(
        inputs.max(head) + wide(&[4, tokens, token]) + wide(&[4, rows, logits]) + threads as u128 * scratch + experts,
    ))
}

/// Bytes of all weights but the routed experts.
pub(crate) fn resident_bytes(model: &ModelConfig, dense: DenseBits) -> u64 {
    // Whole tiles, as `MatrixLayout` has them.
    let packed = |n: usize, k: usize, precision| {
        let tile_bytes = MatrixLayout { n, k, precision }.tile_bytes();
        wide(&[n.div_ceil(TILE_ROWS), tile_bytes])
    };
    let linear = |(n, k): (usize, usize)| packed(n, k, dense.precision(k).unwrap_or(Precision::Bf16));
    let h = model.hidden_size;
    let layers = model.layers.iter().map(|layer| {
        let heads = match &layer.attention {
            Attention::Gqa(_) => 0,
            Attention::DeltaNet(a) => wide(&[4, a.conv_dim(), a.conv_width]) + wide(&[8, a.num_value_heads, h]),
            Attention::Mla(a) => {
                let head = packed(a.kv_lora_rank, a.qk_nope_head_dim, Precision::Bf16)
                    + packed(a.v_head_dim, a.kv_lora_rank, Precision::Bf16);
                a.num_heads as u128 * head
            }
        };
        let router = layer.ffn.moe().map_or(0, |moe| wide(&[4, h, moe.num_experts]));
        layer.matrices(h).into_iter().map(linear).sum::<u128>() + heads + router
    });
    saturated(
        layers.sum::<u128>()
            + u128::from(Between::bytes(model))
            + wide(&[2, h, model.vocab_size])
            + linear((model.vocab_size, h)),
    )
}

/// Bytes of all packed routed experts.
pub(crate) fn expert_bytes(model: &ModelConfig, precision: Option<Precision>) -> Result<u64> {
    let (Some(precision), Some(moe)) = (precision, model.moe()) else { return Ok(0) };
    let layout = ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision)?;
    Ok(saturated(wide(&[model.moe_layers().count(), moe.num_experts, layout.bytes()])))
}

/// For people.
pub(crate) fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// A config that lies makes products that u64 does not hold.
fn wide(dims: &[usize]) -> u128 {
    dims.iter().map(|&n| n as u128).product()
}

fn saturated(bytes: u128) -> u64 {
    bytes.try_into().unwrap_or(u64::MAX)
}

/// Stops loading before the machine runs out of memory. Errors: `Error::Resources`.
fn watch_memory() -> Result<()> {
    let available = topology::available_bytes();
    if available > LEAST_BYTES {
        return Ok(());
    }
    Err(Error::Resources(format!(
        "memory ran short while loading ({} MiB are left): close other programs, or use --dense int8 and --experts \
         int4",
        available >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_names_the_flag_that_helps() {
        let model = families::shapes::shape("deepseek-v2-lite", None).unwrap();
        let refusal = |experts, dense, gib: f64| {
            let config = EngineConfig { experts, dense, ..EngineConfig::default() };
            let precision = precision(&model, &config).unwrap();
            let machine = Machine { available_bytes: (gib * (1u64 << 30) as f64) as u64 + RESERVE_BYTES, ..one_core() };
            Budget::new(&model, &config, precision, &machine).map_err(|e| e.to_string())
        };
        let (bf16, dense) = (ExpertBits::Bf16, DenseBits::Bf16);
        assert!(refusal(bf16, dense, 64.0).is_ok());
        for (gib, advice) in [
            (20.0, ": use --experts int4"),
            (9.0, "use --experts int4 --dense int8"),
            (8.3, "use --experts int4 --dense int4"),
            (4.0, "more memory"),
        ] {
            let text = refusal(bf16, dense, gib).unwrap_err();
            assert!(text.contains("GiB") && text.contains(advice), "{gib}: {text}");
        }
        assert!(refusal(ExpertBits::Int4, dense, 9.0).unwrap_err().ends_with("use --dense int8"));
        assert!(refusal(ExpertBits::Int4, dense, 8.3).unwrap_err().ends_with("use --dense int4"));
    }

    fn one_core() -> Machine {
        machine(&EngineConfig { threads: Some(1), ..EngineConfig::default() }, &Topology::read()).unwrap()
    }

    #[test]
    fn resident_weights_take_what_was_reckoned() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for name in ["qwen3_moe", "qwen3_moe_dense_layer_sharded", "deepseek_v2_lite", "deepseek_v3"] {
            let dir = fixtures.join(name);
            let (model, checkpoint) = (families::read(&dir).unwrap(), Checkpoint::open(&dir).unwrap());
            for dense in [DenseBits::Bf16, DenseBits::Int8, DenseBits::Int4] {
                let Machine { team, kernel, .. } = one_core();
                let backend = Cpu::new(team, kernel);
                let Ok(weights) = Weights::load(&backend, &checkpoint, &model, dense, &|_, _| Ok(())) else {
                    assert_ne!(dense, DenseBits::Bf16); // rows that have no groups
                    continue;
                };
                let routers: usize = model.moe_layers().map(|(_, moe)| 4 * model.hidden_size * moe.num_experts).sum();
                let read = weights.bytes_per_token(&backend) + routers + 2 * model.hidden_size * model.vocab_size;
                assert_eq!(resident_bytes(&model, dense), read as u64, "{name} {dense}");
            }
        }
    }

    #[test]
    fn a_batch_costs_what_its_pairs_take() {
        let model = families::shapes::shape("qwen3-30b-a3b", None).unwrap();
        let of = |experts, tokens| {
            let config = EngineConfig { experts, max_batch_tokens: Some(tokens), ..EngineConfig::default() };
            let precision = precision(&model, &config).unwrap();
            activation_bytes(&model, &config, precision, &one_core()).unwrap()
        };
        // Of each of 8 pairs of a token: its input and its intermediate row as codes, and the latter as f32.
        let more = of(ExpertBits::Int4, 4096) - of(ExpertBits::Int4, 512);
        assert!(more > 3584 * 8 * (2048 + 768 + 4 * 768), "{more}");
        // In BF16 4 bytes or more of each.
        let bf16 = of(ExpertBits::Bf16, 4096) - of(ExpertBits::Bf16, 512);
        assert!(bf16 > 3584 * 8 * (4 * (2048 + 768) + 4 * 768), "{bf16}");
    }
}
