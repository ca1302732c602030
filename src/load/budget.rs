//! What fits into memory, decided before anything is loaded.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::gpu::{GpuPlan, Gpus, Place, StagePlan, StagesPlan, plan_stages};
use super::machine::{Machine, RESERVE_BYTES, gib};
use super::memory::{Counted, snapshots};
use super::remedy;
use super::spec::Spec;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::{Device, EngineConfig, PrefillOn};
use crate::forward::kv_cache;
use crate::{Error, Result};

/// What goes where.
#[derive(Clone, Debug)]
pub enum Budget {
    /// On the CPU alone.
    Cpu(CpuPlan),
    /// On GPUs: each with its share, or one, and those that hold experts for it.
    #[cfg(feature = "cuda")]
    Gpu(Vec<Arc<crate::cuda::Cuda>>, Box<GpuPlan>),
    /// On GPUs that have some of the layers each.
    #[cfg(feature = "cuda")]
    Stages(StagesPlan),
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
    /// Snapshots of recurrent state.
    pub state_cache: u64,
    /// KV cache.
    pub kv: u64,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// How many snapshots.
    pub snapshots: usize,
}

impl Budget {
    /// Decides. Errors: `Error::Resources` when weights, activations or the chosen context do not fit into the
    /// machine's available bytes.
    pub fn new(spec: &Spec<'_>, machine: &Machine) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(gpus) = Gpus::open(spec, machine)? {
            if !gpus.stages.is_empty() {
                let stages = stages_plan(spec, &gpus.stages, machine)?;
                return Ok(Self::Stages(StagesPlan { devices: gpus.devices, stages, choice: gpus.choice }));
            }
            let config = gpus.config(spec.config);
            let plan = gpu_plan(&gpus.spec(spec, &config), &gpus.least(), machine)?;
            let choice = gpus.choice(&plan);
            let beside = plan.holders.iter().map(|holder| gpus.beside[holder.number].cuda.clone());
            let devices = gpus.devices.into_iter().chain(beside).collect();
            return Ok(Self::Gpu(devices, Box::new(GpuPlan { choice, ..plan })));
        }
        #[cfg(not(feature = "cuda"))]
        if let device @ Device::Cuda(_) = &spec.config.device {
            return Err(Error::Device(format!("--device {device}: this build has no GPU side; use --device cpu")));
        }
        CpuPlan::new(spec, machine).map(Self::Cpu)
    }
}

/// What goes where on a GPU. Errors: as [`GpuPlan::new`]; they say so where the CPU alone would do.
#[cfg(feature = "cuda")]
pub(super) fn gpu_plan(spec: &Spec<'_>, device: &crate::cuda::DeviceInfo, machine: &Machine) -> Result<GpuPlan> {
    GpuPlan::new(spec, device, machine).map_err(|error| or_the_cpu(error, spec, machine))
}

/// What goes where on GPUs that have some of the layers each. Errors: as [`plan_stages`], in the same way.
#[cfg(feature = "cuda")]
pub(super) fn stages_plan(spec: &Spec<'_>, places: &[Place], machine: &Machine) -> Result<Vec<StagePlan>> {
    plan_stages(spec, places, machine).map_err(|error| or_the_cpu(error, spec, machine))
}

#[cfg(feature = "cuda")]
fn or_the_cpu(error: Error, spec: &Spec<'_>, machine: &Machine) -> Error {
    let cpu = EngineConfig { device: Device::Cpu, ..spec.config.clone() };
    match (error, CpuPlan::attempt(&spec.with(&cpu), machine)) {
        (Error::Resources(text), Ok(Ok(_))) => Error::Resources(format!("{text}, or use --device cpu")),
        (error, _) => error,
    }
}

/// Bytes that a model needs, and that there are.
struct Short {
    needed: u64,
    available: u64,
}

impl CpuPlan {
    /// As [`Budget::new`], of the CPU alone.
    pub(super) fn new(spec: &Spec<'_>, machine: &Machine) -> Result<Self> {
        Self::attempt(spec, machine)?.map_err(|Short { needed, available }| {
            let fits = |spec: &Spec<'_>| matches!(Self::attempt(spec, machine), Ok(Ok(_)));
            let remedy = match remedy::flags(spec, &fits) {
                Some(flags) => format!("use {flags}"),
                None => "no flag makes it fit, so use a machine with more memory, or a smaller model".into(),
            };
            let limit = moebius_cache::limits::address_space_bytes().filter(|&limit| limit == machine.available_bytes);
            Error::Resources(format!(
                "the model needs {:.1} GiB of memory and {:.1} are free: {remedy}{}",
                gib(needed),
                gib(available),
                limit.map_or("", |_| ", or raise `ulimit -v`")
            ))
        })
    }

    /// The same, with what is short in place of what to do about it.
    fn attempt(spec: &Spec<'_>, machine: &Machine) -> Result<std::result::Result<Self, Short>> {
        let Spec { model, config, .. } = *spec;
        check_no_gpu(config)?;
        spec.check_context()?;
        let available = machine.available_bytes.saturating_sub(RESERVE_BYTES);
        let Counted { weights: dense, buffers, states, kv_token, snapshot } =
            Counted::of(spec, &machine.team, machine.kernel)?;
        let experts = spec.expert_bytes()?;
        let weights = dense.saturating_add(experts);
        let needed = weights.saturating_add(buffers).saturating_add(states);
        let per_token = kv_token.max(1);
        // One block at least, of half of what is left where the context is not chosen.
        let shares = if config.max_context.is_some() { 1 } else { 2 };
        let needed_with_kv = needed.saturating_add(per_token.saturating_mul(shares * BLOCK_SIZE as u64));
        if needed_with_kv > available {
            return Ok(Err(Short { needed: needed_with_kv, available }));
        }
        let free = available - needed;
        // The context first, if it is chosen.
        let chosen = per_token.saturating_mul(config.max_context.unwrap_or(BLOCK_SIZE) as u64);
        let snapshots = snapshots(config, snapshot, free.saturating_sub(chosen))?;
        let state_cache = snapshots as u64 * snapshot;
        let free = free - state_cache;
        let max_context = match config.max_context {
            Some(n) => {
                kv_cache::check_fits(n, per_token, free)?;
                n
            }
            // Half of what is free, so that the machine stays usable.
            None => model.max_context.min((free / 2 / per_token) as usize),
        };
        let one = max_context.div_ceil(BLOCK_SIZE);
        let all = (free / 2 / per_token) as usize / BLOCK_SIZE;
        let kv_blocks = all.clamp(one, one.saturating_mul(config.max_sequences));
        let kv = (kv_blocks.saturating_mul(BLOCK_SIZE) as u64).saturating_mul(per_token);
        Ok(Ok(Self { weights: dense, experts, buffers, states, state_cache, kv, max_context, kv_blocks, snapshots }))
    }
}

/// Flags that only a GPU obeys. Errors: `Error::Invalid`.
fn check_no_gpu(config: &EngineConfig) -> Result<()> {
    let refuse = |flag: &str, instead: &str| {
        Err(Error::Invalid(format!("{flag} is for a GPU, and this runs on the CPU: {instead}")))
    };
    match config {
        EngineConfig { kv_host: Some(1..), .. } => refuse("--kv-host", "leave it out, the KV cache is in RAM already"),
        EngineConfig { vram, .. } if !vram.is_empty() => refuse("--vram", "leave it out"),
        EngineConfig { resident_experts: Some(1..), .. } => refuse("--resident-experts", "leave it out"),
        EngineConfig { prefill: PrefillOn::Gpu, .. } => refuse("--prefill gpu", "leave it out"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DenseBits, ExpertBits};
    use crate::load::{Kept, machine};
    use crate::machine::topology::Topology;
    use crate::model::families;

    #[test]
    fn what_does_not_fit_names_the_flag_that_helps() {
        let model = families::shapes::shape("deepseek-v2-lite", None).unwrap();
        let refusal = |experts, dense, gib: f64| {
            let config = EngineConfig { device: Device::Cpu, experts, dense, ..EngineConfig::default() };
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

    /// What a refusal offers: flags, as a user would give them.
    fn offered(text: &str) -> Vec<Vec<String>> {
        let advice = text.rsplit_once(": ").map_or(text, |(_, advice)| advice).replace(", or ", " or ");
        let flags = |remedy: &str| -> Vec<String> {
            let words = remedy.split([' ', ',']).filter(|word| !["use", "raise", "to", ""].contains(word));
            words.map(String::from).collect()
        };
        let all = advice.split(" or ").flat_map(|some| some.split(", ")).map(flags);
        all.filter(|flags| flags.first().is_some_and(|flag| flag.starts_with("--"))).collect()
    }

    /// Checks that `flags` are refused, and that each remedy in the refusal makes it fit. Returns how many there were.
    fn check_remedies(shape: &str, flags: &str, fits: &dyn Fn(&Spec<'_>) -> Result<()>) -> usize {
        let model = families::shapes::shape(shape, None).unwrap();
        let run = |flags: &[String]| {
            let config = <EngineConfig as clap::Parser>::try_parse_from(flags).unwrap();
            fits(&Spec::new(&model, &config, Kept::NOTHING).unwrap())
        };
        let given: Vec<String> = flags.split_whitespace().map(String::from).collect();
        let text = run(&given).expect_err(flags).to_string();
        let offered = offered(&text);
        for remedy in &offered {
            // A flag takes the place of the same flag.
            let kept = given.chunks(2).filter(|pair| !remedy.contains(&pair[0]));
            let with = [kept.flatten().cloned().collect(), remedy.clone()].concat();
            run(&with).unwrap_or_else(|e| panic!("{flags}: {text}\n{with:?}: {e}"));
        }
        offered.len()
    }

    fn small(gib: f64) -> Machine {
        let one = machine(&EngineConfig { threads: Some(1), ..EngineConfig::default() }, &Topology::read()).unwrap();
        Machine { available_bytes: (gib * (1u64 << 30) as f64) as u64 + RESERVE_BYTES, ..one }
    }

    #[test]
    fn remedies_of_ram_were_tried() {
        for (gib, flags, least) in [
            (20.0, "--experts bf16", 1),
            (9.0, "--experts bf16", 1),
            (8.3, "--experts bf16 --max-context 100000", 1),
            (9.0, "--experts int4 --max-batch-tokens 65536", 1),
            (10.5, "--experts int4 --kv bf16x2 --max-context 163840", 1),
            (3.0, "--experts bf16", 0),
        ] {
            let machine = small(gib);
            let count = check_remedies("deepseek-v2-lite", &format!("--device cpu {flags}"), &|spec| {
                CpuPlan::new(spec, &machine).map(drop)
            });
            assert!(if least == 0 { count == 0 } else { count >= least }, "{gib} {flags}: {count}");
        }
    }

    #[cfg(feature = "cuda")]
    fn card(gib: u64) -> crate::cuda::DeviceInfo {
        crate::cuda::DeviceInfo {
            name: "a card".into(),
            capability: (9, 0),
            multiprocessors: 128,
            shared_bytes: 0,
            total_bytes: gib << 30,
            free_bytes: gib << 30,
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn remedies_of_vram_were_tried() {
        for (vram, ram, flags, any) in [
            (24, 64.0, "--vram 1GiB", true),
            (24, 64.0, "--vram 3.5GiB", true),
            (3, 64.0, "", true),
            (2, 64.0, "", true),
            (5, 64.0, "--max-context 163840 --max-batch-tokens 8192", true),
            (6, 12.0, "--experts bf16", true),
            (6, 4.0, "--experts int4", false),
        ] {
            let machine = small(ram);
            let count = check_remedies("deepseek-v2-lite", flags, &|spec| match spec.config.device {
                Device::Cpu => CpuPlan::new(spec, &machine).map(drop),
                _ => gpu_plan(spec, &card(vram), &machine).map(drop),
            });
            assert_eq!(count > 0, any, "{vram} {ram} {flags}: {count}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn as_many_residents_fit_as_are_said_to() {
        let (model, machine) = (families::shapes::shape("deepseek-v2-lite", None).unwrap(), small(64.0));
        let plan = |resident| {
            let config = EngineConfig { resident_experts: Some(resident), ..EngineConfig::default() };
            let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
            gpu_plan(&spec, &card(6), &machine).map(drop).map_err(|e| e.to_string())
        };
        let text = plan(64).unwrap_err();
        let most = text.split_once("give at most ").and_then(|(_, rest)| rest.split_once(", or auto")?.0.parse().ok());
        let most: usize = most.unwrap_or_else(|| panic!("{text}"));
        assert!(most > 0 && plan(most).is_ok() && plan(most + 1).is_err(), "{text}");
    }
}
