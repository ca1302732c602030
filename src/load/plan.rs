//! What will go where, what context fits and how fast it will be, before anything is loaded: what `moebius plan`
//! prints.
//!
//! Decided by what loading decides with, so the plan is what loading does.

use serde::Serialize;

use super::budget::CpuPlan;
use super::machine::{Machine, gib, machine};
use super::spec::Spec;
use super::speed::{self, CpuRates, Expected};
use crate::Result;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::{DenseBits, EngineConfig};
use crate::experts::pool::expected_hits;
use crate::machine::topology::Topology;

/// The plan, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct Plan {
    /// As the user named it.
    pub model: String,
    /// Its layers.
    pub layers: usize,
    /// Layers of its draft head, which is not used.
    pub draft_layers: usize,
    /// The GPU, or `CPU`.
    pub device: String,
    /// Why these GPUs, where there were others.
    pub choice: Option<String>,
    /// Whether the GPU is not here, and its speeds are assumed.
    pub is_assumed: bool,
    /// Of the experts, as `int4-g128`.
    pub experts: String,
    /// Of everything else.
    pub dense: String,
    /// Of keys and values.
    pub kv: String,
    /// Everything that takes memory.
    pub parts: Vec<MemoryPart>,
    /// VRAM that may be taken, in bytes; 0 without a GPU.
    pub vram_limit_bytes: u64,
    /// What other GPUs hold of the experts.
    pub holders: Vec<HolderPart>,
    /// The layers on each of several GPUs, where these share them.
    pub stages: Vec<StagePart>,
    /// RAM that may be taken, in bytes.
    pub ram_limit_bytes: u64,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Tokens that the model was made for.
    pub model_context: usize,
    /// Tokens of all sequences together.
    pub kv_tokens: usize,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Of these in VRAM.
    pub resident_experts: usize,
    /// What the expectation was made of.
    pub speeds: Speeds,
    /// How fast it should be.
    pub expected: Expected,
    /// What would make it faster, a sentence each.
    pub advice: Vec<String>,
}

/// What `plan` and `doctor` say of a model with draft layers.
pub const UNUSED_DRAFTS: &str = "the model has a draft head (MTP), which is not used yet";

/// One thing that takes memory, in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPart {
    /// What it is.
    pub name: &'static str,
    /// On the device.
    pub vram_bytes: u64,
    /// In RAM.
    pub ram_bytes: u64,
    /// On disk.
    pub disk_bytes: u64,
}

/// What a GPU holds of the experts for the one that has everything else.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HolderPart {
    /// Experts of each layer.
    pub experts: usize,
    /// VRAM that will be taken, in bytes.
    pub vram_bytes: u64,
    /// VRAM that may be taken, in bytes.
    pub vram_limit_bytes: u64,
}

/// What a GPU has that has some of the layers.
#[derive(Clone, Debug, Serialize)]
pub struct StagePart {
    /// The layers and the GPU, in words.
    pub what: String,
    /// How many layers.
    pub layers: usize,
    /// Experts of each of them in its VRAM.
    pub resident_experts: usize,
    /// VRAM that will be taken, in bytes.
    pub vram_bytes: u64,
    /// VRAM that may be taken, in bytes.
    pub vram_limit_bytes: u64,
}

/// Bandwidths in GB/s (10^9 bytes), measured here or assumed.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speeds {
    /// Of the CPU's memory, all workers together.
    pub read_gb_per_s: f64,
    /// From RAM to VRAM.
    pub pcie_gb_per_s: Option<f64>,
    /// Of VRAM.
    pub vram_gb_per_s: Option<f64>,
}

impl Plan {
    /// VRAM that will be taken, in bytes.
    pub fn vram_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.vram_bytes).sum()
    }

    /// RAM that will be taken, in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.ram_bytes).sum()
    }
}

/// Decides and measures; takes a few seconds and nothing that stays. `ram`: bytes that may be taken, in place of what
/// is available here.
///
/// Errors: what loading would refuse, with the flag that helps.
pub fn plan(name: &str, spec: &Spec<'_>, ram: Option<u64>) -> Result<Plan> {
    let mut machine = machine(spec.config, &Topology::read())?;
    machine.available_bytes = ram.unwrap_or(machine.available_bytes);
    let estimator = Estimator { name, spec: spec.clone(), machine: &machine };
    #[cfg(feature = "cuda")]
    if let Some(device) = gpu::PlannedGpu::find(spec, &machine)? {
        if !device.places.is_empty() {
            return estimator.on_stages(&device);
        }
        let config = device.config(spec.config);
        return Estimator { spec: device.spec(spec, &config), ..estimator }.on_gpu(&device);
    }
    estimator.on_cpu()
}

struct Estimator<'a> {
    name: &'a str,
    spec: Spec<'a>,
    machine: &'a Machine,
}

impl Estimator<'_> {
    fn on_cpu(&self) -> Result<Plan> {
        let Self { spec, machine, .. } = self;
        let CpuPlan { weights, experts, buffers, states, state_cache, kv, max_context, kv_blocks, .. } =
            CpuPlan::new(spec, machine)?;
        let config = spec.config;
        let parts = [
            ("dense weights", weights, 0),
            ("experts", experts, 0),
            ("KV cache", kv, 0),
            ("recurrent state", states, 0),
            ("state cache", state_cache, 0),
            ("activations", buffers, 0),
            ("expert cache", 0, experts),
        ];
        let parts = parts.into_iter().filter(|part| part.0 != "recurrent state" || spec.model.has_recurrent_state());
        let tokens = spec.cpu_tokens();
        let rates = CpuRates::measure(spec, machine, tokens)?;
        let expected = |config: &EngineConfig| speed::on_cpu(&spec.with(config), &rates, tokens);
        let now = expected(config)?;
        let mut advice = Vec::new();
        if let DenseBits::Auto | DenseBits::Bf16 = config.dense {
            let then = expected(&EngineConfig { dense: DenseBits::Int8, ..config.clone() })?;
            advice.extend(gain("--dense int8", &now, &then));
        }
        advice.push(
            "a GPU would take everything but the experts, and read prompts: `--device cuda:0 --vram 24GiB` plans for \
             one that is not here"
                .into(),
        );
        Ok(Plan {
            device: "CPU".into(),
            is_assumed: false,
            parts: parts
                .map(|(name, ram_bytes, disk_bytes)| MemoryPart { name, vram_bytes: 0, ram_bytes, disk_bytes })
                .collect(),
            vram_limit_bytes: 0,
            max_context,
            kv_tokens: kv_blocks * BLOCK_SIZE,
            resident_experts: 0,
            speeds: Speeds { read_gb_per_s: rates.read_bytes / 1e9, pcie_gb_per_s: None, vram_gb_per_s: None },
            expected: now,
            advice,
            ..self.about()
        })
    }

    /// What does not depend on the device.
    fn about(&self) -> Plan {
        Plan {
            model: self.name.into(),
            layers: self.spec.model.layers.len(),
            draft_layers: self.spec.model.draft_layers,
            experts: self.spec.precision.as_ref().map_or("none".into(), |precision| precision.to_string()),
            dense: self.spec.dense_words(),
            kv: self.spec.config.kv.to_string(),
            ram_limit_bytes: self.machine.available_bytes,
            model_context: self.spec.model.max_context,
            num_experts: self.spec.model.moe().map_or(0, |moe| moe.num_experts),
            device: String::new(),
            choice: None,
            is_assumed: false,
            parts: Vec::new(),
            vram_limit_bytes: 0,
            holders: Vec::new(),
            stages: Vec::new(),
            max_context: 0,
            kv_tokens: 0,
            resident_experts: 0,
            speeds: Speeds { read_gb_per_s: 0.0, pcie_gb_per_s: None, vram_gb_per_s: None },
            expected: Expected { decode_tok_per_s: 0.0, prefill_tok_per_s: 0.0, prefill_tokens: 0 },
            advice: Vec::new(),
        }
    }
}

/// What a flag would bring, if that is more than a twentieth.
fn gain(flag: &str, now: &Expected, then: &Expected) -> Option<String> {
    let pays = then.decode_tok_per_s > 1.05 * now.decode_tok_per_s;
    pays.then(|| format!("with {flag}: {then}"))
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use crate::Error;
    use crate::config::{self, KvBits, PrefillOn};
    use crate::cuda::DeviceInfo;
    use crate::load::budget::{gpu_plan, stages_plan};
    use crate::load::gpu::{
        CONTEXT_BYTES, Common, GpuPlan, GpuRates, Gpus, HolderPlan, HolderRates, Place, Sharing, StagePlan, on_gpu,
        on_stages, products,
    };

    /// A card that is not here: 128 multiprocessors of compute capability 8.9, PCIe 4.0 with 16 lanes.
    const ASSUMED_VRAM_BYTES: f64 = 1000e9;
    const ASSUMED_PCIE_BYTES: f64 = 25e9;

    /// Bytes over which bandwidths are measured.
    const SAMPLE_BYTES: usize = 128 << 20;

    /// The GPU of a plan.
    pub(super) struct PlannedGpu {
        info: DeviceInfo,
        ranks: usize,                  // as many of them
        vram: Vec<u64>,                // what bounds them
        beside: Vec<u64>,              // what others may take, which can hold experts for the one
        speeds: Vec<HolderRates>,      // of these, or of all that have some of the layers
        pub(super) places: Vec<Place>, // GPUs that have some of the layers each; else empty
        gpus: Option<Gpus>,            // `None`: they are not here
        choice: Option<String>,        // why each has what it has, of those that are not here
        vram_bytes: f64,
        pcie_bytes: f64,
    }

    impl PlannedGpu {
        /// The one there is; one of `--vram` where there is none. Errors: the one asked for cannot be used, and there
        /// is no size to assume one of.
        pub(super) fn find(spec: &Spec<'_>, machine: &Machine) -> Result<Option<Self>> {
            let config = spec.config;
            let found = match Gpus::open(spec, machine) {
                Ok(found) => found,
                Err(error @ Error::Invalid(_)) => return Err(error),
                Err(_) if !config.vram.is_empty() => None,
                Err(error) => {
                    return Err(Error::Device(format!("{error}, or give --vram to plan for a GPU that is not here")));
                }
            };
            match found {
                Some(gpus) => Self::measure(gpus).map(Some),
                None if config.vram.is_empty() || config.device == config::Device::Cpu => Ok(None),
                None => Self::assumed(spec, machine).map(Some),
            }
        }

        /// The choices of a run on it.
        pub(super) fn config(&self, config: &EngineConfig) -> EngineConfig {
            EngineConfig { vram: self.vram.clone(), ..config.clone() }
        }

        /// The run on it, of choices that are its own.
        pub(super) fn spec<'a>(&self, spec: &Spec<'a>, config: &'a EngineConfig) -> Spec<'a> {
            match self.beside.is_empty() {
                true => spec.with(config).on(self.ranks),
                false => spec.with(config).with_beside(self.beside.clone()),
            }
        }

        fn measure(gpus: Gpus) -> Result<Self> {
            let measured = match gpus.stages.is_empty() {
                true => gpus.beside.iter().map(|of| &of.cuda).collect::<Vec<_>>(),
                false => gpus.devices.iter().collect(),
            };
            let speeds = measured.into_iter().map(HolderRates::measure).collect::<Result<_>>()?;
            let cuda = &gpus.devices[0];
            cuda.enter_thread()?;
            Ok(Self {
                info: gpus.least(),
                ranks: gpus.devices.len(),
                vram: gpus.vram.clone(),
                beside: gpus.beside.iter().map(|of| of.vram).collect(),
                speeds,
                vram_bytes: cuda.vram_bandwidth(SAMPLE_BYTES)?,
                pcie_bytes: cuda.pcie_bandwidth(SAMPLE_BYTES)?,
                places: gpus.stages.clone(),
                gpus: Some(gpus),
                choice: None,
            })
        }

        fn assumed(spec: &Spec<'_>, machine: &Machine) -> Result<Self> {
            let info = DeviceInfo {
                name: "a GPU that is not here".into(),
                capability: (8, 9),
                multiprocessors: 128,
                shared_bytes: 0,
                // Of any size: the plan is one for a GPU that has what it needs.
                total_bytes: 1 << 50,
                free_bytes: 1 << 50,
            };
            // Equal but for what may be taken.
            let mut vram = spec.config.vram.clone();
            let numbers = match &spec.config.device {
                config::Device::Cuda(numbers) => &numbers[..],
                _ => &[],
            };
            let place = |i: usize| Place {
                number: numbers.get(i).copied().unwrap_or(i),
                info: info.clone(),
                vram: vram.get(i).or(vram.first()).copied().unwrap_or(0),
            };
            let mut places: Vec<Place> = (0..spec.ranks()).map(place).collect();
            let mut beside = Vec::new();
            let (sharing, choice) = Sharing::of(spec, &places, machine, &|| Ok(()))?;
            match sharing {
                Sharing::Width => places.clear(),
                Sharing::Layers => {}
                Sharing::Experts { first } => {
                    vram = vec![places.remove(first).vram];
                    beside = places.drain(..).map(|place| place.vram).collect();
                }
            }
            let (vram_bytes, link_bytes) = (ASSUMED_VRAM_BYTES, ASSUMED_PCIE_BYTES);
            let each = HolderRates { vram_bytes, products: products(&info), link_bytes };
            Ok(Self {
                ranks: spec.ranks(),
                speeds: vec![each; beside.len() + places.len()],
                places,
                vram,
                beside,
                info,
                gpus: None,
                choice,
                vram_bytes,
                pcie_bytes: link_bytes,
            })
        }
    }

    impl HolderPart {
        fn of(plan: &HolderPlan) -> Self {
            Self { experts: plan.experts, vram_bytes: plan.total(), vram_limit_bytes: plan.vram }
        }
    }

    impl StagePart {
        fn of(stage: &StagePlan) -> Self {
            Self {
                what: stage.describe(),
                layers: stage.model.layers.len(),
                resident_experts: stage.plan.sizes.map_or(0, |sizes| sizes.resident),
                vram_bytes: stage.plan.total(),
                vram_limit_bytes: stage.plan.vram,
            }
        }
    }

    impl Estimator<'_> {
        /// On GPUs that have some of the layers each.
        pub(super) fn on_stages(&self, device: &PlannedGpu) -> Result<Plan> {
            let Self { spec, machine, .. } = self;
            let stages = stages_plan(spec, &device.places, machine)?;
            let common = Common::of(stages.iter().map(|stage| &stage.plan));
            let cpu = CpuRates::measure(spec, machine, 128)?;
            let rates = |of: &HolderRates| GpuRates::of(&cpu, 1, of.vram_bytes, of.link_bytes);
            let rates: Vec<GpuRates> = device.speeds.iter().map(rates).collect();
            let sum = |of: &dyn Fn(&StagePlan) -> u64| stages.iter().map(of).sum::<u64>();
            let mut host = 0;
            for stage in &stages {
                host += stage.plan.host_bytes(&stage.spec(spec), machine)?;
            }
            let passes = stages.iter().any(|stage| stage.plan.ring > 0);
            let part = |name, vram_bytes, ram_bytes, disk_bytes| MemoryPart { name, vram_bytes, ram_bytes, disk_bytes };
            Ok(Plan {
                device: format!("{} GPUs, some layers on each", stages.len()),
                choice: device.gpus.as_ref().map_or(&device.choice, |gpus| &gpus.choice).clone(),
                is_assumed: device.gpus.is_none(),
                parts: vec![
                    part("drivers and kernels", CONTEXT_BYTES * stages.len() as u64, 0, 0),
                    part("dense weights", sum(&|stage| stage.plan.weights), 0, 0),
                    part("KV cache", sum(&|stage| stage.plan.kv), sum(&|stage| stage.plan.kv_host), 0),
                    part("state cache", 0, sum(&|stage| stage.plan.state_cache), 0),
                    part("buffers", sum(&|stage| stage.plan.buffers), host, 0),
                    part("resident experts", sum(&|stage| stage.plan.resident), 0, 0),
                    part("passing experts", sum(&|stage| stage.plan.ring), 0, 0),
                    part(if passes { "experts, pinned" } else { "experts" }, 0, sum(&|stage| stage.plan.ram), 0),
                    part("expert cache", 0, 0, spec.expert_bytes()?),
                ],
                vram_limit_bytes: sum(&|stage| stage.plan.vram),
                stages: stages.iter().map(StagePart::of).collect(),
                max_context: common.max_context,
                kv_tokens: common.kv_tokens(),
                resident_experts: stages
                    .iter()
                    .filter_map(|stage| stage.plan.sizes)
                    .map(|of| of.resident)
                    .min()
                    .unwrap_or(0),
                speeds: Speeds {
                    read_gb_per_s: cpu.read_bytes / 1e9,
                    pcie_gb_per_s: Some(device.pcie_bytes / 1e9),
                    vram_gb_per_s: Some(device.vram_bytes / 1e9),
                },
                expected: on_stages(&stages, spec, &rates)?,
                dense: spec.decoded().dense_words(),
                ..self.about()
            })
        }

        pub(super) fn on_gpu(&self, device: &PlannedGpu) -> Result<Plan> {
            let Self { spec, machine, .. } = self;
            let plan = gpu_plan(spec, &device.info, machine)?;
            let cpu = CpuRates::measure(spec, machine, 128)?;
            let expected = |plan: &GpuPlan, spec: &Spec<'_>| {
                let beside = plan.holders.iter().map(|holder| device.speeds[holder.number]).collect();
                let rates = GpuRates::of(&cpu, spec.ranks(), device.vram_bytes, device.pcie_bytes);
                on_gpu(plan, spec, &GpuRates { beside, ..rates })
            };
            let now = expected(&plan, spec)?;
            let part = |name, vram_bytes, ram_bytes, disk_bytes| MemoryPart { name, vram_bytes, ram_bytes, disk_bytes };
            let parts = vec![
                part("driver and kernels", CONTEXT_BYTES, 0, 0),
                part("dense weights", plan.weights, 0, 0),
                part("KV cache", plan.kv, plan.kv_host, 0),
                part("state cache", 0, plan.state_cache, 0),
                part("buffers", plan.buffers, plan.host_bytes(spec, machine)?, 0),
                part("resident experts", plan.resident, 0, 0),
                part("passing experts", plan.ring, 0, 0),
                part(if plan.ring > 0 { "experts, pinned" } else { "experts" }, 0, plan.ram, 0),
                part("expert cache", 0, 0, spec.expert_bytes()?),
            ];
            Ok(Plan {
                device: match spec.ranks() {
                    1 => device.info.name.clone(),
                    n => format!("each of {n} x {}", device.info.name),
                },
                choice: device.gpus.as_ref().map_or(device.choice.clone(), |gpus| gpus.choice(&plan)),
                is_assumed: device.gpus.is_none(),
                parts,
                vram_limit_bytes: plan.vram,
                holders: plan.holders.iter().map(HolderPart::of).collect(),
                max_context: plan.max_context,
                kv_tokens: plan.kv_blocks * BLOCK_SIZE,
                resident_experts: plan.sizes.map_or(0, |sizes| sizes.resident),
                speeds: Speeds {
                    read_gb_per_s: cpu.read_bytes / 1e9,
                    pcie_gb_per_s: Some(device.pcie_bytes / 1e9),
                    vram_gb_per_s: Some(device.vram_bytes / 1e9),
                },
                expected: now,
                advice: self.advice_on_gpu(device, &plan, &now, &expected),
                dense: spec.decoded().dense_words(),
                ..self.about()
            })
        }

        fn advice_on_gpu(
            &self,
            device: &PlannedGpu,
            plan: &GpuPlan,
            now: &Expected,
            expected: &dyn Fn(&GpuPlan, &Spec<'_>) -> Result<Expected>,
        ) -> Vec<String> {
            let Spec { model, config, .. } = self.spec;
            let other = |config: &EngineConfig, info: &DeviceInfo| {
                let spec = self.spec.with(config);
                let plan = GpuPlan::attempt(&spec, info, self.machine).ok()?.ok()?;
                let then = expected(&plan, &spec).ok()?;
                Some((plan, then))
            };
            let mut advice = Vec::new();
            let num_experts = model.moe().map_or(0, |moe| moe.num_experts);
            if plan.sizes.is_some_and(|sizes| sizes.in_ram(num_experts) > 0) {
                let with = |vram: u64| {
                    let info = DeviceInfo { total_bytes: vram, free_bytes: vram, ..device.info.clone() };
                    let (plan, then) =
                        other(&EngineConfig { vram: vec![vram], resident_experts: None, ..config.clone() }, &info)?;
                    (plan.sizes?.resident == num_experts).then_some(then)
                };
                // The least that is enough, to half a GiB: more VRAM also goes to the context.
                let step = 1u64 << 29;
                let (mut least, mut enough) = (0, 4 * self.spec.expert_bytes().unwrap_or(0) / step + 8);
                while least + 1 < enough {
                    let middle = (least + enough) / 2;
                    match with(plan.vram + middle * step) {
                        Some(_) => enough = middle,
                        None => least = middle,
                    }
                }
                if let Some(then) = with(plan.vram + enough * step) {
                    advice.push(format!(
                        "with {:.1} GiB more VRAM all experts would be resident: {then}",
                        gib(enough * step)
                    ));
                }
            }
            let are_several = device.gpus.as_ref().is_some_and(|gpus| gpus.choice(plan).is_some());
            if self.spec.ranks() == 1 && device.beside.is_empty() && !are_several {
                let two = self.spec.on(2);
                let plan = GpuPlan::attempt(&two, &device.info, self.machine).ok().and_then(|plan| plan.ok());
                let then = plan.and_then(|plan| expected(&plan, &two).ok());
                let pays = |then: &Expected| {
                    then.decode_tok_per_s > 1.1 * now.decode_tok_per_s
                        || then.prefill_tok_per_s > 1.1 * now.prefill_tok_per_s
                };
                advice.extend(
                    then.filter(pays).map(|then| format!("with a second GPU like it, if NVLink joins them: {then}")),
                );
            }
            if let DenseBits::Auto | DenseBits::Bf16 = config.dense
                && let Some((_, then)) = other(&EngineConfig { dense: DenseBits::Int8, ..config.clone() }, &device.info)
            {
                advice.extend(gain("--dense int8", now, &then));
            }
            if config.kv == KvBits::Bf16
                && plan.max_context < config.max_context.unwrap_or(model.max_context)
                && let Some((int8, _)) = other(&EngineConfig { kv: KvBits::Int8, ..config.clone() }, &device.info)
            {
                advice.push(format!("with --kv int8: a context of {}", int8.max_context));
            }
            if config.prefill == PrefillOn::Cpu {
                advice.push("without --prefill cpu prompts would use the GPU where that is faster".into());
            }
            advice
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{}, {} layers, experts {}, dense {}, kv {}, on {}\n",
            self.model, self.layers, self.experts, self.dense, self.kv, self.device
        )?;
        writeln!(f, "{:20} {:>10} {:>10} {:>10}", "", "VRAM", "RAM", "disk")?;
        let cell = |bytes: u64| match bytes {
            0 => String::new(),
            _ if bytes < 1 << 30 => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
            _ => format!("{:.2} GiB", gib(bytes)),
        };
        let mut line = |name: &str, [vram, ram, disk]: [u64; 3]| {
            let row = format!("{name:20} {:>10} {:>10} {:>10}", cell(vram), cell(ram), cell(disk));
            writeln!(f, "{}", row.trim_end())
        };
        for part in self.parts.iter().filter(|part| part.vram_bytes + part.ram_bytes + part.disk_bytes > 0) {
            line(part.name, [part.vram_bytes, part.ram_bytes, part.disk_bytes])?;
        }
        line("together", [self.vram_bytes(), self.ram_bytes(), self.parts.iter().map(|part| part.disk_bytes).sum()])?;
        line("may be taken", [self.vram_limit_bytes, self.ram_limit_bytes, 0])?;

        write!(f, "\ncontext   {} of {} tokens", self.max_context, self.model_context)?;
        writeln!(f, ", {} in all sequences together", self.kv_tokens)?;
        if self.vram_limit_bytes > 0 && self.num_experts > 0 && self.stages.is_empty() {
            let (resident, all) = (self.resident_experts, self.num_experts);
            write!(f, "experts   {resident} of {all} of a layer resident")?;
            match resident {
                0 => writeln!(f)?,
                _ if resident == all => writeln!(f)?,
                _ => writeln!(f, ", about {:.0}% of a token's", 100.0 * expected_hits(resident as f64 / all as f64))?,
            }
        }
        for HolderPart { experts, vram_bytes, vram_limit_bytes } in &self.holders {
            let (taken, may) = (gib(*vram_bytes), gib(*vram_limit_bytes));
            writeln!(f, "          {experts} on another GPU, {taken:.2} of {may:.2} GiB of its VRAM")?;
        }
        for StagePart { what, resident_experts, vram_bytes, vram_limit_bytes, .. } in &self.stages {
            let experts = match self.num_experts {
                0 => String::new(),
                all => format!(", {resident_experts} of {all} experts of a layer resident"),
            };
            let (taken, may) = (gib(*vram_bytes), gib(*vram_limit_bytes));
            writeln!(f, "          {what}: {taken:.2} of {may:.2} GiB of its VRAM{experts}")?;
        }
        if let Some(choice) = &self.choice {
            writeln!(f, "GPUs      {}", choice.replace("; ", "\n          "))?;
        }
        if self.draft_layers > 0 {
            writeln!(f, "drafts    {UNUSED_DRAFTS}")?;
        }
        writeln!(f, "expected  {}", self.expected)?;
        write!(f, "from      {:.0} GB/s of RAM", self.speeds.read_gb_per_s)?;
        if let (Some(pcie), Some(vram)) = (self.speeds.pcie_gb_per_s, self.speeds.vram_gb_per_s) {
            let assumed = if self.is_assumed { " (assumed: this GPU is not here)" } else { "" };
            write!(f, ", {pcie:.0} GB/s of PCIe, {vram:.0} GB/s of VRAM{assumed}")?;
        }
        writeln!(f)?;
        self.advice.iter().try_for_each(|advice| writeln!(f, "faster    {advice}"))
    }
}
