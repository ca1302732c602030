//! A model as it is to run: what it is, what the user chose, and which precision its routed experts get.

use std::collections::BTreeMap;
use std::ops::Range;

use moebius_cache::Precision;
use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::codec::{Quantization, Source, kept_by_all};
use moebius_cache::pack::{CodeType, ExpertKind, ExpertPrecision, GROUP_SIZES, Precisions, largest_group_size};

use super::cache::cache_job;
use crate::backend::cpu::Cpu;
use crate::backend::source::{Held, Shapes};
use crate::config::{CPU_BATCH_TOKENS, DenseBits, Device, EngineConfig, ExpertBits};
use crate::experts::ExpertShape;
use crate::forward::Limits;
use crate::forward::weights::Weights;
use crate::model::{ModelConfig, Share};
use crate::{Error, Result};

/// A model, the choices for a run of it, and what they make of its routed experts.
#[derive(Clone, Debug)]
pub struct Spec<'a> {
    /// What it is.
    pub model: &'a ModelConfig,
    /// What the user chose.
    pub config: &'a EngineConfig,
    /// Of the routed experts; `None`: a dense model.
    pub precision: Option<Precisions>,
    kept: Kept,
    ranks: usize,     // GPUs that each have a share of the model
    beside: Vec<u64>, // VRAM that others may take, which hold experts for the one that has everything else
}

/// What keeps a checkpoint as it is, exactly where that can be.
#[derive(Clone, Debug)]
pub struct Kept {
    experts: Option<Precisions>, // none: they are plain numbers
    dense: Held,
}

impl Kept {
    /// Of weights that no checkpoint holds.
    pub const NOTHING: Self = Self { experts: None, dense: Held::new() };

    /// Of a shape whose checkpoint would store the experts so, or in plain numbers.
    pub fn of_shape(stored: Option<Precision>) -> Self {
        Self { experts: stored.map(Precisions::from), ..Self::NOTHING }
    }

    /// What keeps `checkpoint`.
    ///
    /// The reader of a tensor says what is wrong with it, after everything that can be refused without reading any.
    pub fn of(model: &ModelConfig, checkpoint: &Checkpoint) -> Self {
        let dense = checkpoint.matrices().into_iter().filter(|(name, _)| !name.contains(".experts."));
        let held = |(name, shape): (String, [usize; 2])| {
            let held = checkpoint.source(&name, shape).ok()?.held_by()?;
            Some((name, held))
        };
        Self { experts: kept_experts(model, checkpoint), dense: dense.filter_map(held).collect() }
    }

    /// What will keep a checkpoint whose weights are not here yet, as its config says. Errors: its shapes fit into no
    /// machine.
    pub(super) fn announced(model: &ModelConfig, quantization: &Quantization) -> Result<Self> {
        let inputs = model.moe().map_or(vec![], |moe| vec![moe.expert_width(model.hidden_size), moe.intermediate_size]);
        let dense = dense_matrices(model)?.into_iter().filter_map(|(name, shape)| {
            let held = quantization.holds(&name, shape)?;
            Some((name, held))
        });
        Ok(Self { experts: quantization.kept_by(&inputs).map(Precisions::from), dense: dense.collect() })
    }
}

/// Names and shapes of the dense matrices that stay as they are stored where a precision holds that.
fn dense_matrices(model: &ModelConfig) -> Result<BTreeMap<String, [usize; 2]>> {
    let ((_, backend), shapes) = (Cpu::counting()?, Shapes::default());
    Weights::load(&backend, &shapes, model, DenseBits::Bf16, &|_, _| Ok(()))?;
    Ok(shapes.asked())
}

fn kept_experts(model: &ModelConfig, checkpoint: &Checkpoint) -> Option<Precisions> {
    model.moe()?;
    let job = cache_job("", checkpoint, model, Precision::Bf16);
    let (mut all, mut layers) = (Vec::new(), Vec::new());
    // Formats change from layer to layer and between gate, up and down, not from expert to expert.
    for expert in job.layers.iter().filter_map(|layer| layer.experts.first()) {
        let Ok(sources) = job.sources(expert) else { return None };
        // Plain numbers beside others are kept as those are that need the most.
        let kept = |of: &[Source<'_>]| of.iter().all(|source| source.kept_by().is_some()).then(|| kept_by_all(of));
        layers.push([kept(&sources[..2]).flatten(), kept(&sources[2..]).flatten()]);
        all.extend(sources);
    }
    let coarsest = kept_by_all(&all)?;
    let layers = layers.into_iter().map(|kept| kept.map(|kept| kept.unwrap_or(coarsest)));
    let layers: Vec<_> = layers.map(|[gate, down]| ExpertPrecision { gate, down }).collect();
    // Where sizes of groups alone differ, all have the smallest.
    match layers.iter().all(|layer| [layer.gate, layer.down].iter().all(|p| p.name() == coarsest.name())) {
        true => Some(coarsest.into()),
        false => Some(layers.into_iter().collect()),
    }
}

impl<'a> Spec<'a> {
    /// Decides the precision. Errors: no group size divides the experts' rows, or the chosen one does not.
    pub fn new(model: &'a ModelConfig, config: &'a EngineConfig, kept: Kept) -> Result<Self> {
        let ranks = match &config.device {
            Device::Cuda(numbers) => numbers.len().max(1),
            Device::Auto | Device::Cpu => 1,
        };
        Ok(Self { model, config, precision: precision(model, config, &kept.experts)?, kept, ranks, beside: Vec::new() })
    }

    /// The same model and experts with other choices for everything else.
    pub fn with<'b>(&self, config: &'b EngineConfig) -> Spec<'b>
    where
        'a: 'b,
    {
        Spec { config, ..self.clone() }
    }

    /// The same model with other choices for everything. Errors: as [`Spec::new`].
    pub(super) fn again<'b>(&self, config: &'b EngineConfig) -> Result<Spec<'b>>
    where
        'a: 'b,
    {
        Ok(Spec { ranks: self.ranks, beside: self.beside.clone(), ..Spec::new(self.model, config, self.kept.clone())? })
    }

    /// The routed experts; `None`: a dense model.
    pub(super) fn expert_shape(&self) -> Result<Option<ExpertShape>> {
        let (Some(precision), Some(moe)) = (&self.precision, self.model.moe()) else { return Ok(None) };
        let hidden = moe.expert_width(self.model.hidden_size);
        let layout = |i| moe.expert_kind().layout(hidden, moe.intermediate_size, precision.layer(i));
        let layouts = (0..self.model.moe_layers().count()).map(layout).collect::<moebius_cache::Result<_>>()?;
        Ok(Some(ExpertShape { layouts, experts: moe.num_experts }))
    }

    /// Shapes of the dense weights, and how they are stored.
    pub(super) fn shapes(&self) -> Shapes {
        Shapes::stored_as(self.kept.dense.clone())
    }

    /// The dense weights that stay as they are stored, and what holds them. Errors: shapes fit into no machine.
    pub(super) fn stored_weights(&self) -> Result<Held> {
        if self.config.dense != DenseBits::Auto || matches!(self.config.device, Device::Cuda(_)) {
            return Ok(Held::new());
        }
        let (mut held, asked) = (self.kept.dense.clone(), dense_matrices(self.model)?);
        held.retain(|name, _| asked.contains_key(name));
        Ok(held)
    }

    /// The same on a GPU, which decodes dense weights.
    pub(super) fn decoded(&self) -> Self {
        Self { kept: Kept { dense: Held::new(), ..self.kept.clone() }, ..self.clone() }
    }

    /// The precision of most dense weights, whose rows have `k` numbers for the most part.
    pub(super) fn dense_precision(&self, k: usize) -> Precision {
        let held = &self.kept.dense;
        let most = held.values().max_by_key(|one| held.values().filter(|other| other == one).count());
        match (self.config.dense, most) {
            (DenseBits::Auto, Some(most)) => *most,
            (bits, _) => bits.precision(k).unwrap_or(Precision::Bf16),
        }
    }

    /// What dense weights become on the CPU, in words.
    pub(super) fn dense_words(&self) -> String {
        let mut held: Vec<&str> = self.kept.dense.values().map(|precision| precision.name()).collect();
        held.sort_unstable();
        held.dedup();
        match (self.config.dense, &held[..]) {
            (DenseBits::Auto, []) => DenseBits::Bf16.to_string(),
            (DenseBits::Auto, _) => held.join(" and "),
            (bits, _) => bits.to_string(),
        }
    }

    /// GPUs that each have a share of the model.
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The same on so many of them.
    pub(super) fn on(&self, gpus: usize) -> Self {
        Self { ranks: gpus, ..self.clone() }
    }

    /// VRAM that each GPU may take that holds experts for the one that has everything else.
    pub(super) fn beside(&self) -> &[u64] {
        &self.beside
    }

    /// The same on one GPU, beside those that may take so much.
    pub(super) fn with_beside(&self, bytes: Vec<u64>) -> Self {
        Self { ranks: 1, beside: bytes, ..self.clone() }
    }

    /// What the GPU has that has the most.
    pub(super) fn largest_share(&self) -> Share {
        Share { rank: self.ranks() - 1, of: self.ranks() }
    }

    /// A [stage](ModelConfig::stage) of the model, on a GPU that has nothing else.
    pub(super) fn stage<'b>(&self, stage: &'b ModelConfig, config: &'b EngineConfig) -> Spec<'b>
    where
        'a: 'b,
    {
        let moe_layers = self.moe_layers_of(stage);
        let precision = self.precision.as_ref().map(|all| all.of_layers(moe_layers));
        Spec { model: stage, config, precision, kept: self.kept.clone(), ranks: 1, beside: Vec::new() }
    }

    /// Which of the model's MoE layers, counted among these, a stage has.
    pub(super) fn moe_layers_of(&self, stage: &ModelConfig) -> Range<usize> {
        let before = self.model.moe_layers().take_while(|(layer, _)| *layer < stage.number_of(0)).count();
        before..before + stage.moe_layers().count()
    }

    /// Bytes of all packed routed experts.
    pub(super) fn expert_bytes(&self) -> Result<u64> {
        let Some(shape) = self.expert_shape()? else { return Ok(0) };
        Ok((shape.experts as u64).saturating_mul(shape.bytes_of_one()))
    }

    /// Tokens of a pass on the CPU.
    pub(super) fn cpu_tokens(&self) -> usize {
        self.config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS)
    }

    /// Of a pass on the CPU, which takes a layer in one part.
    pub(super) fn cpu_limits(&self) -> Limits {
        let tokens = self.cpu_tokens();
        Limits { tokens, chunk_tokens: tokens, logit_rows: self.config.max_sequences }
    }

    /// Refuses limits that no device can run the model with. Errors: `Error::Invalid`.
    pub(super) fn check_context(&self) -> Result<()> {
        if self.config.max_sequences == 0 || self.config.max_batch_tokens == Some(0) {
            return Err(Error::Invalid("an engine needs at least one sequence and one token in a batch".into()));
        }
        let limit = self.model.max_context;
        match self.config.max_context {
            Some(n @ 0..=1) => Err(Error::Invalid(format!(
                "--max-context {n} leaves no room for a prompt and its answer: give at least 2"
            ))),
            Some(n) if n > limit => Err(Error::Invalid(format!(
                "--max-context {n} is beyond the {limit} positions this model was made for: give at most {limit}"
            ))),
            _ => Ok(()),
        }
    }
}

/// As chosen, or as kept.
fn precision(model: &ModelConfig, config: &EngineConfig, kept: &Option<Precisions>) -> Result<Option<Precisions>> {
    let Some(moe) = model.moe() else { return Ok(None) };
    if let (ExpertBits::Auto, None, Some(Precisions::Layers(_))) = (config.experts, config.group_size, kept) {
        return Ok(kept.clone());
    }
    let own = kept.iter().flat_map(Precisions::distinct).flat_map(|layer| [layer.gate, layer.down]);
    let kept = own.reduce(Precision::coarsest_of).map(|coarsest| match kept {
        Some(Precisions::One(precision)) => *precision,
        _ => coarsest,
    });
    let (hidden, width) = (moe.expert_width(model.hidden_size), moe.intermediate_size);
    let largest = largest_group_size(&[hidden, width]);
    let group_size = || match config.group_size {
        Some(g) if !GROUP_SIZES.contains(&g) => Err(Error::Invalid(format!("--group-size {g} is not 32, 64 or 128"))),
        Some(g) if hidden % g != 0 || width % g != 0 => Err(Error::Invalid(format!(
            "--group-size {g} does not divide this model's rows of {hidden} and {width} weights: {}",
            match largest {
                Some(fits) => format!("use --group-size {fits}"),
                None => "use --experts bf16".into(),
            }
        ))),
        Some(g) => Ok(g),
        None => kept
            .and_then(Precision::group_size)
            .map(|group| group.max(GROUP_SIZES[0]))
            .into_iter()
            .chain(largest)
            .min()
            .ok_or_else(|| {
                Error::Invalid(format!(
                    "rows of {hidden} and {width} weights cannot be cut into groups of 32: use --experts bf16"
                ))
            }),
    };
    if let ExpertBits::Within(hundredths) = config.experts {
        if kept.is_some() {
            return Err(Error::Invalid(format!(
                "--experts {}: the checkpoint is quantized, and its codes are kept: use --experts auto",
                config.experts
            )));
        }
        let (steps, layers) = (in_steps(Precision::iq4(group_size()?)), model.moe_layers().count());
        return within(f64::from(hundredths) / 100.0, &steps, moe.expert_kind(), layers).map(Some);
    }
    let chosen = config.experts.precision(kept);
    if (config.group_size, Some(chosen)) == (None, kept) && chosen.unit() != chosen.group_size().unwrap_or(1) {
        return Ok(Some(chosen.into())); // a super-block has its own groups
    }
    let precision = if chosen.codes().is_some() { chosen.in_groups(group_size()?) } else { chosen };
    Ok(Some(precision.with_scales(kept.unwrap_or(Precision::Bf16).scales()).into()))
}

/// From 4 bits of a table to INT8, where more bits pay most first: `down` loses as much as gate and up together on a
/// trained model, and to it groups of 32 and then a fifth bit bring the most for their size (docs/precision.md).
fn in_steps(plain: Precision) -> Vec<ExpertPrecision> {
    let [iq4, int5, int8] = [Precision::iq4(32), Precision::Q5_0, Precision::int8(32)];
    let steps = [(plain, plain), (plain, iq4), (plain, int5), (iq4, int5), (int5, int5), (int5, int8), (int8, int8)];
    steps.into_iter().map(|(gate, down)| ExpertPrecision { gate, down }).collect()
}

/// The last of `steps` that all layers have room for in `budget` bits for each weight, and the next one in as many
/// layers, spread evenly, as the rest suffices for. Errors: there is no room for the first.
fn within(budget: f64, steps: &[ExpertPrecision], kind: ExpertKind, layers: usize) -> Result<Precisions> {
    let bits = |of: Precision| {
        let (codes, group) = (of.codes().map_or(16, CodeType::bits), of.group_size().unwrap_or(usize::MAX));
        codes as f64 + (8 * of.scales().bytes()) as f64 / group as f64
    };
    let of = |step: &ExpertPrecision| match kind {
        ExpertKind::Gated => (2.0 * bits(step.gate) + bits(step.down)) / 3.0,
        ExpertKind::Ungated => (bits(step.gate) + bits(step.down)) / 2.0,
    };
    let Some(last) = steps.iter().rposition(|step| of(step) <= budget) else {
        return Err(Error::Invalid(format!(
            "--experts auto:{budget}bpw: {} alone takes {} bits for each weight: give at least as many",
            steps[0].gate,
            of(&steps[0])
        )));
    };
    let Some(next) = steps.get(last + 1) else { return Ok(steps[last].gate.into()) };
    let share = (budget - of(&steps[last])) / (of(next) - of(&steps[last]));
    let more = (share * layers as f64 + 1e-6) as usize; // of a whole number rounding may have left less
    let has_more = |i: usize| (i + 1) * more / layers > i * more / layers;
    Ok((0..layers).map(|i| if has_more(i) { *next } else { steps[last] }).collect())
}

#[cfg(test)]
mod tests {
    use moebius_cache::ScaleType;

    use super::*;
    use crate::load::Description;
    use crate::model::families;

    #[test]
    fn a_config_announces_what_its_checkpoint_holds() {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let mut seen: Vec<Precision> = Vec::new();
        for dir in std::fs::read_dir(fixtures).unwrap().map(|entry| entry.unwrap().path()) {
            let Ok(description) = Description::read(&dir) else { continue };
            let Ok(model) = description.model() else { continue };
            let quantization = Quantization::parse(&description.config).unwrap();
            let announced = Kept::announced(&model, &quantization).unwrap().dense;
            let Ok(checkpoint) = Checkpoint::open_as(&dir, quantization, &families::gguf_names()) else { continue };
            let mut held = Kept::of(&model, &checkpoint).dense;
            let asked = dense_matrices(&model).unwrap();
            held.retain(|name, _| asked.contains_key(name));
            seen.extend(held.values().next());
            // The type of scales is the tensors' own.
            let of_bf16 = |held: Held| -> Held {
                held.into_iter().map(|(name, precision)| (name, precision.with_scales(ScaleType::Bf16))).collect()
            };
            assert_eq!(of_bf16(announced), of_bf16(held), "{}", dir.display());
        }
        assert!(seen.len() > 3, "{seen:?}");
    }

    #[test]
    fn more_bits_go_where_they_pay_within_a_budget() {
        let [g32, g128, int5, int8] = [Precision::iq4(32), Precision::iq4(128), Precision::Q5_0, Precision::int8(32)];
        let steps = in_steps(g128);
        let of = |budget: f64| within(budget, &steps, ExpertKind::Gated, 8).unwrap();
        assert_eq!([of(4.125), of(16.0)], [g128.into(), int8.into()]);
        assert_eq!((0..8).filter(|&i| of(4.24).layer(i).down == g32).count(), 7);
        let half = of(4.5);
        let downs: Vec<Precision> = (0..8).map(|i| half.layer(i).down).collect();
        assert_eq!(downs, [g32, int5, int5, int5, g32, int5, int5, int5]);
        assert!((0..8).all(|i| half.layer(i).gate == g128));
        let error = within(4.1, &steps, ExpertKind::Gated, 8).unwrap_err().to_string();
        assert!(error.contains("auto:4.1bpw") && error.contains("4.125 bits"), "{error}");
        for steps in [in_steps(g32), in_steps(g128)] {
            for layers in [1, 7] {
                within(4.9, &steps, ExpertKind::Ungated, layers).unwrap();
            }
        }
    }
}
