//! What fits into memory, decided before anything is loaded.

use std::sync::Arc;

use moebius_cache::Precision;
use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};

use super::machine::{Machine, RESERVE_BYTES};
use super::precision;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::{CPU_BATCH_TOKENS, DenseBits, Device, EngineConfig, ExpertBits, KvBits, PrefillOn};
use crate::experts::Between;
use crate::experts::cpu::CpuExperts;
use crate::forward::kv_cache;
use crate::kernel::Activations;
use crate::model::{Attention, ModelConfig};
use crate::{Error, Result};

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
    Gpu(Arc<crate::cuda::Cuda>, super::gpu::GpuPlan),
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
            let plan = super::gpu::GpuPlan::new(model, config, precision, &cuda.info)?;
            super::gpu::check_ram(&plan, model, config, precision, machine)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use moebius_cache::checkpoint::Checkpoint;

    use crate::backend::cpu::Cpu;
    use crate::forward::weights::Weights;
    use crate::load::machine;
    use crate::machine::topology::Topology;
    use crate::model::families;

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
