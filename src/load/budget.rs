//! What fits into memory, decided before anything is loaded.

use std::sync::Arc;

use super::machine::{Machine, RESERVE_BYTES, gib};
use super::memory::{activation_bytes, resident_bytes};
use super::spec::Spec;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::{DenseBits, Device, EngineConfig, KvBits, PrefillOn};
use crate::forward::kv_cache;
use crate::{Error, Result};

/// What goes where.
#[derive(Clone, Debug)]
pub enum Budget {
    /// On the CPU alone.
    Cpu(CpuPlan),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Gpu(Arc<crate::cuda::Cuda>, super::gpu::GpuPlan),
}

/// What a model takes of RAM, in bytes, and the context that fits beside it.
#[derive(Clone, Debug)]
pub struct CpuPlan {
    /// Everything but the routed experts.
    pub weights: u64,
    /// Routed experts.
    pub experts: u64,
    /// Activations and work space.
    pub buffers: u64,
    /// Recurrent state of all sequences.
    pub states: u64,
    /// KV cache.
    pub kv: u64,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
}

impl Budget {
    /// Decides. Errors: `Error::Resources` when weights, activations or the chosen context do not fit into the
    /// machine's available bytes.
    pub fn new(spec: &Spec<'_>, machine: &Machine) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = open_gpu(spec.config)? {
            let plan = super::gpu::GpuPlan::new(spec, &cuda.info)?;
            plan.check_ram(spec, machine)?;
            return Ok(Self::Gpu(cuda, plan));
        }
        #[cfg(not(feature = "cuda"))]
        if let device @ Device::Cuda(_) = &spec.config.device {
            return Err(Error::Device(format!("--device {device}: this build has no GPU side; use --device cpu")));
        }
        CpuPlan::new(spec, machine).map(Self::Cpu)
    }
}

impl CpuPlan {
    /// As [`Budget::new`], of the CPU alone.
    pub(super) fn new(spec: &Spec<'_>, machine: &Machine) -> Result<Self> {
        let Spec { model, config, .. } = *spec;
        check_no_gpu(config)?;
        spec.check_context()?;
        let available = machine.available_bytes.saturating_sub(RESERVE_BYTES);
        let (dense, experts) = (resident_bytes(model, config.dense), spec.expert_bytes()?);
        let weights = dense.saturating_add(experts);
        let buffers = activation_bytes(spec, machine)?;
        let states = (model.state_bytes_per_sequence() as u64).saturating_mul(config.max_sequences as u64);
        let needed = weights.saturating_add(buffers).saturating_add(states);
        if needed > available {
            let remedy = match buffers > weights {
                true => "lower --max-batch-tokens",
                false => remedy(spec, available - buffers.min(available)),
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
        let kv_blocks = all.clamp(one, one.saturating_mul(config.max_sequences));
        let kv = (kv_blocks.saturating_mul(BLOCK_SIZE) as u64).saturating_mul(per_token);
        Ok(Self { weights: dense, experts, buffers, states, kv, max_context, kv_blocks })
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

/// The GPU to run on, if any. Errors: `Error::Device` when the chosen one cannot be used; `Error::Invalid` for several.
#[cfg(feature = "cuda")]
pub(super) fn open_gpu(config: &EngineConfig) -> Result<Option<Arc<crate::cuda::Cuda>>> {
    match &config.device {
        Device::Cpu => Ok(None),
        Device::Auto => Ok(crate::cuda::Cuda::open(0).ok()),
        Device::Cuda(numbers) => match numbers[..] {
            [number] => crate::cuda::Cuda::open(number).map(Some),
            _ => Err(Error::Invalid(format!(
                "--device {}: several GPUs are not supported yet: give one, as in --device cuda:0",
                config.device
            ))),
        },
    }
}

/// The flags with which weights that are too large would fit into `available` bytes, if any; the least loss first.
fn remedy(spec: &Spec<'_>, available: u64) -> &'static str {
    let (chosen, int4) = (*spec, spec.with_int4());
    let fits = |dense, spec: &Spec<'_>| {
        spec.expert_bytes().is_ok_and(|experts| resident_bytes(spec.model, dense).saturating_add(experts) <= available)
    };
    let choices = [
        (spec.config.dense, int4, "use --experts int4"),
        (DenseBits::Int8, chosen, "use --dense int8"),
        (DenseBits::Int8, int4, "use --experts int4 --dense int8"),
        (DenseBits::Int4, chosen, "use --dense int4"),
        (DenseBits::Int4, int4, "use --experts int4 --dense int4"),
    ];
    let found = choices.into_iter().find(|(dense, spec, _)| fits(*dense, spec));
    found
        .map_or("no precision makes it fit, so use a machine with more memory, or a smaller model", |(.., flags)| flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ExpertBits;
    use crate::load::{Kept, machine};
    use crate::machine::topology::Topology;
    use crate::model::families;

    #[test]
    fn what_does_not_fit_names_the_flag_that_helps() {
        let model = families::shapes::shape("deepseek-v2-lite", None).unwrap();
        let refusal = |experts, dense, gib: f64| {
            let config = EngineConfig { experts, dense, ..EngineConfig::default() };
            let one =
                machine(&EngineConfig { threads: Some(1), ..EngineConfig::default() }, &Topology::read()).unwrap();
            let machine = Machine { available_bytes: (gib * (1u64 << 30) as f64) as u64 + RESERVE_BYTES, ..one };
            Budget::new(&Spec::new(&model, &config, Kept::NOTHING).unwrap(), &machine).map_err(|e| e.to_string())
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
}
