//! A model's layers on several GPUs, each of which has a run of them: what goes where, decided before anything is
//! loaded; and how fast it will be.

use std::ops::Range;
use std::sync::Arc;

use super::plan::{CONTEXT_BYTES, GpuPlan, KeptBytes, Most, Planner, Short, check};
use super::speed::{GpuRates, on_gpu};
use crate::backend::batch::BLOCK_SIZE;
use crate::config::EngineConfig;
use crate::cuda::{Cuda, DeviceInfo};
use crate::load::machine::{Machine, RESERVE_BYTES, gib};
use crate::load::memory::count;
use crate::load::remedy::{either, flags};
use crate::load::spec::Spec;
use crate::load::speed::Expected;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Seconds that a row takes from one GPU to the next.
const HOP_S: f64 = 30e-6;

/// A GPU that may have a stage.
#[derive(Clone, Debug)]
pub struct Place {
    /// In `--device`.
    pub number: usize,
    /// What it is.
    pub info: DeviceInfo,
    /// VRAM that may be taken, driver included.
    pub vram: u64,
}

/// What a GPU has of a model: some of its layers.
#[derive(Clone, Debug)]
pub struct StagePlan {
    /// The GPU, in `--device`.
    pub number: usize,
    /// These layers, as a model of their own.
    pub model: ModelConfig,
    /// The choices of the run, of which RAM for caches is shared out.
    pub config: EngineConfig,
    /// What goes where there.
    pub plan: GpuPlan,
}

impl StagePlan {
    /// Numbers of its layers.
    pub fn layers(&self) -> Range<usize> {
        self.model.number_of(0)..self.model.number_of(self.model.layers.len())
    }

    /// The run on its GPU.
    pub fn spec<'a>(&'a self, whole: &Spec<'a>) -> Spec<'a> {
        whole.stage(&self.model, &self.config)
    }

    /// Its layers and its GPU.
    pub fn describe(&self) -> String {
        let Range { start, end } = self.layers();
        format!("layers {start} to {} on cuda:{}", end - 1, self.number)
    }
}

/// A model's stages on their GPUs.
#[derive(Clone, Debug)]
pub struct StagesPlan {
    /// The GPUs, in the order of the stages.
    pub devices: Vec<Arc<Cuda>>,
    /// What each of them has.
    pub stages: Vec<StagePlan>,
    /// Why these GPUs, and in this way.
    pub choice: Option<String>,
}

/// What the GPUs of a model have in common.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// The same in pinned RAM.
    pub host_blocks: usize,
    /// Snapshots of recurrent state.
    pub snapshots: usize,
}

impl Common {
    /// Of GPUs with these plans, of which there is one at least.
    pub fn of<'a>(plans: impl Iterator<Item = &'a GpuPlan> + Clone) -> Self {
        // GPUs whose layers keep nothing of a kind have room for any number of it.
        let least = |of: &dyn Fn(&GpuPlan) -> usize| plans.clone().map(of).filter(|n| *n > 0).min().unwrap_or(0);
        Self {
            max_context: least(&|plan| plan.max_context),
            kv_blocks: least(&|plan| plan.kv_blocks),
            host_blocks: least(&|plan| plan.host_blocks),
            snapshots: least(&|plan| plan.snapshots),
        }
    }

    /// Tokens of all sequences together.
    pub fn kv_tokens(&self) -> usize {
        self.kv_blocks * BLOCK_SIZE
    }
}

/// Divides the layers among `places`, in their order. Errors: `Error::Resources` with the flags that help where they do
/// not fit; `Error::Invalid` for layers that cannot be divided so.
pub fn plan_stages(spec: &Spec<'_>, places: &[Place], machine: &Machine) -> Result<Vec<StagePlan>> {
    let short = match attempt_stages(spec, places, machine)? {
        Ok(stages) => return Ok(stages),
        Err(short) => short,
    };
    let fits = |spec: &Spec<'_>| matches!(attempt_stages(spec, places, machine), Ok(Ok(_)));
    let (lack, otherwise) = match short {
        Short::Vram(bytes) => {
            let all: u64 = places.iter().map(|place| place.vram).sum();
            let lack = format!(
                "one of {} GPUs, of which {:.1} GiB of VRAM may be taken together, lacks {:.1} GiB for its layers with \
                 all experts in RAM",
                places.len(),
                gib(all),
                gib(bytes)
            );
            (lack, "use more GPUs, or some with more VRAM")
        }
        Short::Ram { needed, available } => {
            let lack = format!("the experts need {:.1} GiB of memory and {:.1} are free", gib(needed), gib(available));
            (lack, "use a machine with more memory, or a smaller model")
        }
    };
    let remedies: Vec<String> = flags(spec, &fits).map(|flags| format!("use {flags}")).into_iter().collect();
    let advice = if remedies.is_empty() { otherwise.into() } else { either(&remedies) };
    Err(Error::Resources(format!("{lack}: {advice}")))
}

/// The same, with what is short in place of what to do about it; of VRAM, what is lacking.
pub fn attempt_stages(
    spec: &Spec<'_>,
    places: &[Place],
    machine: &Machine,
) -> Result<std::result::Result<Vec<StagePlan>, Short>> {
    check(&spec.on(1))?;
    let cuts = spec.model.cuts();
    if cuts.len() + 1 < places.len() {
        return Err(Error::Invalid(format!(
            "{} has {} runs of layers that need nothing of each other, so give at most as many GPUs",
            spec.model.architecture,
            cuts.len() + 1
        )));
    }
    let mut begins = begins(&sizes(spec)?, &cuts, places);
    let mut tried = Vec::new();
    loop {
        let rooms = places.iter().zip(runs(&begins, spec.model.layers.len()));
        let lacking = match divide(spec, rooms.collect(), machine)? {
            Division::Fits(stages) => return Ok(Ok(stages)),
            Division::Ram { needed, available } => return Ok(Err(Short::Ram { needed, available })),
            Division::Lacks(lacking) => lacking,
        };
        tried.push(begins.clone());
        // One that lacks VRAM gives a layer to the neighbour that has the most to spare.
        let (worst, most) = (0..lacking.len()).map(|i| (i, lacking[i])).max_by_key(|(_, lack)| *lack).unwrap_or((0, 0));
        let spare = |i: usize| lacking.get(i).map_or(i64::MAX, |lack| *lack);
        let (before, behind) = (worst.checked_sub(1).map_or(i64::MAX, spare), spare(worst + 1));
        let next = match before < behind {
            true => begins.get(worst - 1).and_then(|at| cuts.iter().find(|cut| *cut > at)).map(|at| (worst - 1, *at)),
            false => begins.get(worst).and_then(|at| cuts.iter().rfind(|cut| *cut < at)).map(|at| (worst, *at)),
        };
        if let Some((which, at)) = next {
            begins[which] = at;
        }
        let is_order = begins.windows(2).all(|pair| pair[0] < pair[1]);
        if next.is_none() || !is_order || tried.contains(&begins) {
            return Ok(Err(Short::Vram(most.max(0) as u64)));
        }
    }
}

/// What came of dividing layers in a certain way.
enum Division {
    Fits(Vec<StagePlan>),
    Lacks(Vec<i64>), // of each GPU, bytes that it has too few; below 0: to spare
    Ram { needed: u64, available: u64 },
}

/// Plans each stage without what may be kept in RAM; then again with what they have in common, and with that.
fn divide(spec: &Spec<'_>, rooms: Vec<(&Place, Range<usize>)>, machine: &Machine) -> Result<Division> {
    let stages: Vec<_> = rooms.iter().map(|(place, run)| ((*place).clone(), spec.model.stage(run.clone()))).collect();
    let available = machine.available_bytes.saturating_sub(RESERVE_BYTES);
    let (mut plans, mut lacking, mut needed) = (Vec::new(), Vec::new(), Vec::new());
    let alone = EngineConfig { kv_host: None, state_cache: Some(0), ..spec.config.clone() };
    for (place, model) in &stages {
        let spec = spec.stage(model, &alone);
        let planner = Planner { spec: spec.clone(), device: &place.info, vram: place.vram, most: None };
        let taken = needed.iter().sum::<u64>();
        match planner.attempt_beside(machine, available.saturating_sub(taken))? {
            Ok(plan) => {
                let used = CONTEXT_BYTES + plan.weights + plan.buffers + plan.kv;
                lacking.push(used as i64 - place.vram as i64);
                // As much as if residual streams went through RAM.
                let hop = 4 * (plan.limits.tokens * spec.model.streams().width()) as u64;
                needed.push(plan.ram + plan.host_bytes(&spec, machine)? + hop);
                plans.push(plan);
            }
            Err(Short::Vram(bytes)) => lacking.push((bytes + CONTEXT_BYTES) as i64 - place.vram as i64),
            Err(Short::Ram { needed, .. }) => return Ok(Division::Ram { needed: needed + taken, available }),
        }
    }
    if plans.len() < stages.len() {
        return Ok(Division::Lacks(lacking));
    }
    let most = Most::of(plans.iter());
    let kept = |(place, model): &(Place, ModelConfig)| {
        let planner = Planner { spec: spec.stage(model, &alone), device: &place.info, vram: place.vram, most: None };
        planner.kept_bytes(most.max_context)
    };
    let kept = stages.iter().map(kept).collect::<Result<Vec<_>>>()?;
    let mut spare = available.saturating_sub(needed.iter().sum());
    let configs = shared_out(spec.config, &kept, spare)?;
    let mut divided = Vec::new();
    for (((place, model), needed), config) in stages.into_iter().zip(needed).zip(configs) {
        let (spec, most) = (spec.stage(&model, &config), Some(most));
        let planner = Planner { spec: spec.clone(), device: &place.info, vram: place.vram, most };
        // With what they have in common a stage has more experts in VRAM, and no more in RAM.
        let plan = match planner.attempt_beside(machine, needed + spare)? {
            Ok(plan) => plan,
            Err(Short::Vram(bytes)) => {
                let lack = (bytes + CONTEXT_BYTES) as i64 - place.vram as i64;
                return Ok(Division::Lacks(
                    rooms.iter().map(|(of, _)| if of.number == place.number { lack } else { 0 }).collect(),
                ));
            }
            Err(Short::Ram { needed, .. }) => return Ok(Division::Ram { needed, available }),
        };
        spare = spare.saturating_sub(plan.kv_host + plan.state_cache);
        divided.push(StagePlan { number: place.number, model: model.clone(), config: config.clone(), plan });
    }
    Ok(Division::Fits(divided))
}

/// The choices of a run for each stage: what sequences may keep in RAM is shared out by what a block and a snapshot
/// take there, so that all stages have as many. Errors: so much is not `spare`, or holds none.
fn shared_out(config: &EngineConfig, kept: &[KeptBytes], spare: u64) -> Result<Vec<EngineConfig>> {
    let share = |flag, bytes: Option<u64>, what, of: fn(&KeptBytes) -> u64| {
        let all = kept.iter().map(of).sum::<u64>();
        if let (Some(bytes), true) = (bytes, all > 0 && config.prefix_cache) {
            count(flag, bytes, (what, all), spare)?;
        }
        let part = move |bytes: u64, own| (u128::from(bytes) * u128::from(of(own)) / u128::from(all.max(1))) as u64;
        Ok::<_, Error>(move |own| bytes.map(|bytes| part(bytes, own)))
    };
    let kv_host = share("--kv-host", config.kv_host, "a block of 64 tokens", |of| of.block)?;
    let state_cache = share("--state-cache", config.state_cache, "the state of a sequence", |of| of.snapshot)?;
    let of_stage = |own| EngineConfig { kv_host: kv_host(own), state_cache: state_cache(own), ..config.clone() };
    Ok(kept.iter().map(of_stage).collect())
}

/// Bytes of each layer, dense weights as BF16.
fn sizes(spec: &Spec<'_>) -> Result<Vec<f64>> {
    let (model, shape) = (spec.model, spec.expert_shape()?);
    let mut layouts = shape.iter().flat_map(|shape| shape.layouts.iter());
    let experts = shape.as_ref().map_or(0, |shape| shape.experts);
    let size = |layer: &crate::model::LayerConfig| {
        let dense: usize = layer.matrices(model.hidden_size).iter().map(|(n, k)| 2 * n * k).sum();
        let routed = layer.ffn.moe().and_then(|_| layouts.next()).map_or(0, |layout| experts * layout.bytes());
        (dense + routed) as f64
    };
    Ok(model.layers.iter().map(size).collect())
}

/// Where each stage but the first begins, so that layers take of each place in proportion to its VRAM.
fn begins(sizes: &[f64], cuts: &[usize], places: &[Place]) -> Vec<usize> {
    let room = |place: &Place| place.vram.saturating_sub(CONTEXT_BYTES) as f64;
    let (all, bytes): (f64, f64) = (places.iter().map(room).sum(), sizes.iter().sum());
    let (mut share, mut first) = (0.0, 0);
    let stages = places.len() - 1;
    let begin = |(i, place): (usize, &Place)| {
        share += room(place) / all.max(1.0);
        let before = |cut: usize| sizes[..cut].iter().sum::<f64>();
        // Each that follows has one cut left at least.
        let own = &cuts[first..cuts.len() - (stages - 1 - i)];
        let off = |cut: &usize| (before(*cut) - share * bytes).abs();
        let best = (0..own.len()).min_by(|a, b| off(&own[*a]).total_cmp(&off(&own[*b]))).unwrap_or(0);
        first += best + 1;
        own[best]
    };
    places[..stages].iter().enumerate().map(begin).collect()
}

/// The runs that begin there.
fn runs(begins: &[usize], layers: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = std::iter::once(0).chain(begins.iter().copied());
    let ends = begins.iter().copied().chain([layers]);
    starts.zip(ends).map(|(start, end)| start..end)
}

/// How fast the stages are, one after the other. `rates`: of each GPU.
pub fn on_stages(stages: &[StagePlan], spec: &Spec<'_>, rates: &[GpuRates]) -> Result<Expected> {
    let mut expected = Vec::new();
    for (stage, rates) in stages.iter().zip(rates) {
        expected.push(on_gpu(&stage.plan, &stage.spec(spec), rates)?);
    }
    let tokens = expected.iter().map(|of| of.prefill_tokens).min().unwrap_or(0);
    let decode: f64 = expected.iter().map(|of| 1.0 / of.decode_tok_per_s).sum();
    let prefill: f64 = expected.iter().map(|of| 1.0 / of.prefill_tok_per_s).sum();
    let hops = (stages.len() - 1) as f64 * HOP_S;
    Ok(Expected { decode_tok_per_s: 1.0 / (decode + hops), prefill_tok_per_s: 1.0 / prefill, prefill_tokens: tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Kept, machine};
    use crate::machine::topology::Topology;
    use crate::model::families::shapes;

    fn places(gib: &[u64]) -> Vec<Place> {
        let place = |(number, &gib): (usize, &u64)| {
            let (name, capability, bytes) = ("a card".into(), (8, 9), gib << 30);
            let (multiprocessors, shared_bytes) = (128, 0);
            let info =
                DeviceInfo { name, capability, multiprocessors, shared_bytes, total_bytes: bytes, free_bytes: bytes };
            Place { number, info, vram: bytes }
        };
        gib.iter().enumerate().map(place).collect()
    }

    #[test]
    fn what_is_kept_in_ram_is_as_many_of_it_on_each_gpu() {
        let config = EngineConfig { kv_host: Some(1000), state_cache: Some(99), ..EngineConfig::default() };
        let kept = [KeptBytes { block: 10, snapshot: 0 }, KeptBytes { block: 30, snapshot: 5 }];
        let shared = shared_out(&config, &kept, 2000).unwrap();
        let given: Vec<_> = shared.iter().map(|of| (of.kv_host, of.state_cache)).collect();
        assert_eq!(given, [(Some(250), Some(0)), (Some(750), Some(99))], "25 blocks each");
        let refused = |bytes, spare| {
            let config = EngineConfig { kv_host: Some(bytes), ..config.clone() };
            shared_out(&config, &kept, spare).unwrap_err().to_string()
        };
        assert!(refused(39, 2000).contains("give more") && refused(2001, 2000).contains("give at most that"));
    }

    /// Layers of each stage of a shape on GPUs of so many GiB, and experts of a layer that are resident there.
    fn divided(shape: &str, gib: &[u64]) -> Result<Vec<(Range<usize>, usize)>> {
        let (model, config) = (shapes::shape(shape, None).unwrap(), EngineConfig::default());
        let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
        let machine = Machine { available_bytes: 1 << 40, ..machine(&config, &Topology::read()).unwrap() };
        let stages = plan_stages(&spec, &places(gib), &machine)?;
        for (stage, gib) in stages.iter().zip(gib) {
            assert!(stage.plan.total() <= gib << 30, "{}", stage.describe());
        }
        let common: Vec<_> = stages.iter().map(|stage| (stage.plan.max_context, stage.plan.kv_blocks)).collect();
        assert!(common.windows(2).all(|pair| pair[0] == pair[1]), "{common:?}");
        let of = |stage: &StagePlan| (stage.layers(), stage.plan.sizes.map_or(0, |sizes| sizes.resident));
        Ok(stages.iter().map(of).collect())
    }

    #[test]
    fn layers_go_where_there_is_room_for_them() {
        let equal = divided("qwen3-30b-a3b", &[24, 24]).unwrap();
        assert_eq!(equal.iter().map(|(layers, _)| layers.len()).collect::<Vec<_>>(), [24, 24]);
        assert!(equal.iter().all(|(_, resident)| *resident == 128), "{equal:?}");
        let uneven = divided("qwen3-235b-a22b", &[48, 16]).unwrap();
        assert!(uneven[0].0.len() > 2 * uneven[1].0.len(), "{uneven:?}");
        assert!(uneven[0].1.abs_diff(uneven[1].1) < 24, "of each about as many of its experts are in VRAM: {uneven:?}");
        // Dense weights that fit no GPU alone.
        let four = divided("deepseek-v3", &[16; 4]).unwrap();
        assert_eq!((four[0].0.start, four[3].0.end, four.len()), (0, 61, 4));
        assert!(four.windows(2).all(|pair| pair[0].0.end == pair[1].0.start), "{four:?}");
    }

    #[test]
    fn what_fits_in_no_way_is_refused_with_what_helps() {
        let error = divided("deepseek-v3", &[4, 4]).unwrap_err().to_string();
        assert!(error.contains("GiB of VRAM") && error.contains("use "), "{error}");
    }
}
