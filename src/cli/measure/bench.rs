//! How fast a model prefills and decodes on this machine, next to the limits of its memory, link and GPU.

mod limits;
mod report;
mod routing;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use moebius_cache::Precision;

use crate::backend::Rates;
use crate::backend::batch::Batch;
use crate::backend::cpu::op_times;
use crate::config::EngineConfig;
use crate::experts::Traffic;
use crate::forward::block_pool::{BlockPool, BlockTable};
use crate::forward::tap::{Layers, Take, Tap};
use crate::kernel::random::Random;
use crate::load::synthetic::{self, Synthetic};
use crate::load::{self, Budget, Description, Kept, LoadProgress, Loaded, ModelFolder, Spec, Stored};
use crate::machine::memory::{Pages, read_bandwidth};
use crate::machine::topology::{self, Topology};
use crate::model::ModelConfig;
use crate::model::families::shapes;
use crate::{Error, Result};

use limits::{PassWork, Speed};
pub use report::{BenchReport, Distinct, GpuReport, KernelTime, MachineReport, Measurement, PrecisionReport};
pub use routing::Routing;
use routing::{Choices, Pass, Sequence};

/// Bytes over which the read bandwidth is measured: more than the cache of any processor.
pub const BANDWIDTH_BYTES: usize = 2 << 30;

/// What to run.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Prompt lengths to prefill.
    pub prompt_tokens: Vec<usize>,
    /// Tokens to decode in each run.
    pub decode_tokens: usize,
    /// Tokens of context before them.
    pub context: usize,
    /// Sequences that decode together.
    pub batches: Vec<usize>,
    /// Runs of each row; the median counts.
    pub runs: usize,
    /// Whether to time each kernel of a GPU, or each family of ops of the CPU.
    pub ops: bool,
    /// Which experts tokens choose.
    pub routing: Routing,
}

/// Loads random weights of a named shape: so many layers, and experts stored so.
///
/// Errors: unknown shape, or it does not fit into memory.
pub fn load_shape(
    name: &str,
    (layers, stored): (Option<usize>, Option<Precision>),
    config: &EngineConfig,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let model = shapes::shape(name, layers)?;
    let machine = load::machine(config, &Topology::read())?;
    let spec = Spec::new(&model, config, Kept::of_shape(stored))?;
    let budget = Budget::new(&spec, &machine)?;
    let experts = spec.precision.clone().map(|p| synthetic::experts(&model, p)).transpose()?;
    load::assemble(&spec, Stored { resident: &Synthetic::of(&model), experts }, budget, machine, report)
}

impl Workload {
    /// Sequences of the widest batch.
    fn sequences(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1).max(1)
    }

    /// Tokens of the longest prompt.
    fn longest(&self) -> usize {
        self.prompt_tokens.iter().copied().max().unwrap_or(1)
    }

    /// Refuses a workload that does not fit what was loaded.
    fn check(&self, loaded: &Loaded) -> Result<()> {
        let (sequences, limit) = (self.sequences(), loaded.max_batch_tokens);
        if sequences > limit {
            return Err(Error::Invalid(format!(
                "{sequences} sequences do not fit a pass of {limit} tokens: raise --max-batch-tokens"
            )));
        }
        let (needed, context) =
            (self.longest().max(self.decode_tokens.saturating_add(self.context)), loaded.max_context);
        if needed > context {
            let remedy = match context < loaded.model.config().max_context {
                true => "raise --max-context",
                false => "lower --prompt-tokens, --decode-tokens or --context",
            };
            return Err(Error::Invalid(format!("{needed} tokens do not fit the context of {context}: {remedy}")));
        }
        Ok(())
    }
}

/// Loads a model or shape and measures it.
pub fn run(
    model: &str,
    source: BenchModel<'_>,
    config: &EngineConfig,
    workload: &Workload,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<BenchReport> {
    let started = Instant::now();
    let topology = Topology::read(); // before this thread is pinned to one core
    // No prefix comes twice, so nothing is kept for one.
    let max_sequences = workload.sequences().max(config.max_sequences);
    let config = EngineConfig { max_sequences, prefix_cache: false, ..config.clone() };
    let mut loaded = match source {
        BenchModel::Directory(dir) => load::load(&ModelFolder::open(model, Description::read(dir)?)?, &config, report)?,
        BenchModel::Shape { layers, stored } => load_shape(model, (layers, stored), &config, report)?,
    };
    let (ready_s, peak_ram_gib) = (started.elapsed().as_secs_f64(), gib(topology::peak_bytes()));
    workload.check(&loaded)?;
    // As the engine's thread does; not pinned is slower, not wrong.
    let _ = loaded.team.pin_caller();
    let bytes = BANDWIDTH_BYTES.min((topology::available_bytes() / 4) as usize);
    loaded.team.fit(1);
    let bandwidth = read_bandwidth(&loaded.team, bytes, Pages::Huge, 5)?;
    let rates = loaded.model.rates()?;
    let choices = Choices::new(&workload.routing, loaded.model.config())?;
    let speed = speed(bandwidth, rates.as_ref(), loaded.model.ranks());
    let mut bench = Bench::new(&mut loaded, speed, rates.is_some(), workload.ops, choices);
    let rows = bench.rows(workload)?;
    let distinct_experts = bench.distinct(workload.longest())?;
    let dense = bench.dense;
    Ok(BenchReport {
        machine: machine(&topology, &loaded, bandwidth, rates),
        is_release: !cfg!(debug_assertions),
        model: model.to_string(),
        layers: loaded.model.config().layers.len(),
        precision: PrecisionReport {
            experts: loaded.precision.as_ref().map_or("none".into(), |p| p.to_string()),
            dense: loaded.dense.clone(),
            kv: config.kv.to_string(),
            activations: config.activations.to_string(),
        },
        ready_s,
        peak_ram_gib,
        routing: workload.routing.to_string(),
        bytes_per_token: dense + experts_per_token_bytes(loaded.model.config(), &loaded),
        distinct_experts,
        rows,
    })
}

fn machine(topology: &Topology, loaded: &Loaded, read_gb_per_s: f64, rates: Option<Rates>) -> MachineReport {
    MachineReport {
        cpu: topology.cpu_model.clone(),
        cores: topology.cores.len(),
        threads: loaded.team.crews().few,
        prefill_threads: loaded.team.crews().many,
        simd: loaded.kernel.simd().to_string(),
        memory_gib: gib(topology.total_bytes),
        read_gb_per_s,
        gpu: rates.map(|r| GpuReport {
            name: r.device,
            memory_gb_per_s: r.memory / 1e9,
            link_gb_per_s: r.link / 1e9,
            tflops: r.products / 1e12,
            taken_gib: gib(r.taken),
            resident_experts: loaded.model.resident_experts(),
        }),
    }
}

/// Where the model comes from.
#[derive(Clone, Copy, Debug)]
pub enum BenchModel<'a> {
    /// A checkpoint.
    Directory(&'a Path),
    /// Random weights, of the first `layers` layers only if given.
    Shape {
        /// Layers to keep.
        layers: Option<usize>,
        /// What the experts are stored in; of a checkpoint in BF16 if not given.
        stored: Option<Precision>,
    },
}

struct Bench<'a> {
    loaded: &'a mut Loaded,
    speed: Speed,
    on_device: bool,
    dense: u64, // bytes that a pass reads in addition to experts, of all ranks
    random: Random,
    ops: bool,
    choices: Option<Choices>,
}

/// Of the machine's RAM, and `ranks` devices with these rates each.
fn speed(read_gb_per_s: f64, rates: Option<&Rates>, ranks: usize) -> Speed {
    let of = |rate: fn(&Rates) -> f64| rates.map_or(f64::INFINITY, |rates| ranks as f64 * rate(rates));
    Speed { ram: read_gb_per_s * 1e9, link: of(|r| r.link), vram: of(|r| r.memory), products: of(|r| r.products) }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

impl<'a> Bench<'a> {
    fn new(loaded: &'a mut Loaded, speed: Speed, on_device: bool, ops: bool, choices: Option<Choices>) -> Self {
        let dense = loaded.model.ranks() as u64 * loaded.model.resident_bytes_per_token();
        Self { loaded, speed, on_device, dense, random: Random(42), ops, choices }
    }

    /// As many sequences of choices; none if the router chooses.
    fn sequences(&self, n: usize) -> Vec<Sequence> {
        self.choices.iter().flat_map(|choices| (0..n).map(|i| choices.sequence(i))).collect()
    }

    /// The choices of passes of `tokens` tokens of each sequence; empty if the router chooses.
    fn chosen(&mut self, sequences: &mut [Sequence], tokens: impl Iterator<Item = usize>) -> Vec<Pass> {
        let Self { choices, random, .. } = self;
        tokens.map(|n| choices.as_ref().map_or(Pass::default(), |of| of.pass(sequences, n, random))).collect()
    }

    /// Gives the next pass of `tokens` tokens these experts, unless the router chooses.
    fn choose(&mut self, Pass { chosen, foreseen }: &Pass, tokens: usize) -> Result<()> {
        match chosen.is_empty() {
            true => Ok(()),
            false => self.loaded.model.choose(chosen, foreseen, tokens),
        }
    }

    fn rows(&mut self, workload: &Workload) -> Result<Vec<Measurement>> {
        let mut rows = Vec::new();
        for &tokens in &workload.prompt_tokens {
            rows.push(self.prefill(tokens, workload.runs)?);
        }
        if workload.decode_tokens > 0 {
            for &batch in &workload.batches {
                rows.push(self.decode(workload, batch)?);
            }
        }
        Ok(rows)
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let vocab = self.loaded.model.config().vocab_size as u64;
        (0..n).map(|_| (self.random.bits() % vocab) as u32).collect()
    }

    /// Seconds to prefill `tokens` of the sequence in `slot`, in chunks; `choices`: what its next tokens choose.
    fn read(
        &mut self,
        tokens: &[u32],
        (blocks, slot): (&[u32], usize),
        choices: &mut [Sequence],
        mut tap: Option<&mut Tap>,
    ) -> Result<f64> {
        let parts = tokens.chunks(self.loaded.max_batch_tokens).map(<[u32]>::len);
        let chosen = self.chosen(choices, parts);
        let started = Instant::now();
        let mut batch = Batch::default();
        for (i, chunk) in tokens.chunks(self.loaded.max_batch_tokens).enumerate() {
            batch.clear();
            batch.push(chunk, i * self.loaded.max_batch_tokens, blocks).slot = slot;
            self.choose(&chosen[i], chunk.len())?;
            self.loaded.model.forward(&batch, tap.as_deref_mut())?;
        }
        self.loaded.model.logits(&[batch.len() - 1])?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn prefill(&mut self, tokens: usize, runs: usize) -> Result<Measurement> {
        let mut blocks = BlockTable::default();
        BlockPool::new(self.loaded.kv_blocks).grow(&mut blocks, tokens);
        let (mut seconds, mut moved) = (Vec::new(), Traffic::default());
        let mut choices = self.sequences(1);
        for run in 0..=runs {
            let prompt = self.tokens(tokens);
            let before = self.loaded.model.traffic();
            let s = self.read(&prompt, (&blocks, 0), &mut choices, None)?;
            moved = self.loaded.model.traffic().since(before);
            // The first run checks checksums and touches memory for the first time.
            if run > 0 {
                seconds.push(s);
            }
        }
        let pass = tokens.min(self.loaded.max_batch_tokens);
        let passes = tokens.div_ceil(pass);
        let work = self.work(moved, passes, pass, self.products(tokens));
        let mut row = self.row("prefill", tokens, 1, tokens, median(&mut seconds), work);
        if self.ops {
            let (prompt, mut batch) = (self.tokens(pass), Batch::default());
            batch.push(&prompt, 0, &blocks);
            for chosen in self.chosen(&mut choices, [pass].into_iter()) {
                self.choose(&chosen, pass)?;
            }
            row.ops = self.profile(&batch)?;
        }
        Ok(row)
    }

    fn decode(&mut self, workload: &Workload, sequences: usize) -> Result<Measurement> {
        let Workload { decode_tokens: tokens, context, runs, .. } = *workload;
        let mut pool = BlockPool::new(self.loaded.kv_blocks);
        let mut tables: Vec<BlockTable> = std::iter::repeat_with(BlockTable::default).take(sequences).collect();
        for table in &mut tables {
            if !pool.grow(table, context + tokens) {
                return Err(Error::Resources(format!(
                    "memory does not hold {sequences} sequences: lower --batch or --max-context"
                )));
            }
        }
        let mut choices = self.sequences(sequences);
        for (slot, table) in tables.iter().enumerate() {
            let prompt = self.tokens(context);
            let own = slot.min(choices.len())..(slot + 1).min(choices.len());
            self.read(&prompt, (table, slot), &mut choices[own], None)?;
        }
        let rows: Vec<usize> = (0..sequences).collect();
        let (temperatures, mut lists) = (vec![1.0; sequences], Vec::new());
        let (mut seconds, mut moved) = (Vec::new(), Traffic::default());
        let mut batch = Batch::default();
        for run in 0..=runs {
            let ids = self.tokens(tokens * sequences);
            let chosen = self.chosen(&mut choices, std::iter::repeat_n(1, tokens));
            let (started, before) = (Instant::now(), self.loaded.model.traffic());
            for (i, ids) in ids.chunks(sequences).enumerate() {
                batch.clear();
                for (slot, (id, table)) in ids.iter().zip(&tables).enumerate() {
                    batch.push(&[*id], context + i, table).slot = slot;
                }
                self.choose(&chosen[i], sequences)?;
                self.loaded.model.forward(&batch, None)?;
                // As the engine samples.
                self.loaded.model.shortlists(&rows, &temperatures, &mut lists)?;
            }
            moved = self.loaded.model.traffic().since(before);
            if run > 0 {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        let work = self.work(moved, tokens, sequences, 0.0);
        let mut row = self.row("decode", tokens, sequences, tokens * sequences, median(&mut seconds), work);
        let Traffic { ram, link, vram, choices, foreseen, .. } = moved;
        (row.vram_hits, row.foreseen) = (choices.hit_rate(), foreseen.hit_rate());
        row.foresight_gain = self.loaded.model.foresight_gain(sequences);
        row.expert_bytes = [ram, link, vram].map(|bytes| bytes / tokens as u64);
        if self.ops {
            row.ops = self.profile(&batch)?;
        }
        Ok(row)
    }

    /// Operations that reading `tokens` tokens of one sequence takes, the output head aside.
    fn products(&self, tokens: usize) -> f64 {
        limits::products(self.loaded.model.config(), self.loaded.model.ranks(), tokens)
    }

    /// What `passes` passes over `tokens` tokens each move and compute.
    fn work(&self, moved: Traffic, passes: usize, tokens: usize, products: f64) -> PassWork {
        let model = self.loaded.model.config();
        let resident = model.moe().map_or(0.0, |moe| {
            let share = self.loaded.model.resident_experts() as f64 / moe.num_experts as f64;
            let all = model.moe_layers().count() as f64 * expert_bytes(model, self.loaded) as f64;
            all * share * limits::distinct(moe.num_experts, moe.router.top_k, tokens)
        });
        let resident = if moved.vram > 0 { moved.vram as f64 } else { passes as f64 * resident };
        PassWork::new(moved, passes as f64 * self.dense as f64, resident, products, self.on_device)
    }

    fn profile(&mut self, batch: &Batch) -> Result<Vec<KernelTime>> {
        let mut times = self.loaded.model.profile(batch)?;
        if self.on_device {
            // The CPU's side of a step as it is: recorded anew, and without marks.
            let Loaded { model, team, .. } = &mut *self.loaded;
            for pass in 0..3 {
                team.timing(pass == 2);
                model.forward(batch, None)?;
                model.logits(&[batch.len() - 1])?;
            }
            times.extend(op_times(team, "no experts on the CPU"));
            team.timing(false);
        }
        Ok(times.into_iter().map(|t| KernelTime { name: t.name, launches: t.launches, us: 1e6 * t.seconds }).collect())
    }

    fn row(
        &self,
        phase: &'static str,
        tokens: usize,
        batch: usize,
        total: usize,
        seconds: f64,
        work: PassWork,
    ) -> Measurement {
        // Stages work one after the other on a chunk, and at the same time on several, but for the CPU that all share.
        let stages = self.loaded.model.stages();
        let chunks = if phase == "prefill" { tokens.div_ceil(self.loaded.max_batch_tokens) } else { 1 };
        let (least, limited_by) =
            work.on_devices((chunks + stages - 1) as f64 / (chunks * stages) as f64).at_least(&self.speed);
        let resident = self.loaded.model.resident_experts();
        Measurement {
            phase,
            tokens,
            batch,
            experts: match resident {
                0 => "ram",
                n if Some(n) == self.loaded.model.config().moe().map(|moe| moe.num_experts) => "vram",
                _ => "ram and vram",
            },
            device: if self.on_device { "cuda" } else { "cpu" },
            tok_per_s: total as f64 / seconds,
            limit_tok_per_s: total as f64 / least,
            limited_by,
            share_of_limit: least / seconds,
            ram_gb_per_s: work.ram / 1e9 / seconds,
            vram_hits: None,
            foreseen: None,
            foresight_gain: None,
            expert_bytes: [0; 3],
            ops: Vec::new(),
        }
    }

    /// How many experts each layer of one prefill uses. A bench that routes all tokens to a few experts would measure
    /// the CPU's cache.
    fn distinct(&mut self, tokens: usize) -> Result<Option<Distinct>> {
        let Some(of) = self.loaded.model.config().moe().map(|m| m.num_experts) else { return Ok(None) };
        let mut blocks = BlockTable::default();
        BlockPool::new(self.loaded.kv_blocks).grow(&mut blocks, tokens);
        let take = Take { layers: Layers::NONE, router: true, rows: 0..tokens };
        let (prompt, mut tap) = (self.tokens(tokens), Tap { takes: vec![take], ..Tap::default() });
        let mut choices = self.sequences(1);
        self.read(&prompt, (&blocks, 0), &mut choices, Some(&mut tap))?;
        let used = tap.routed.values().map(|routing| routing.ids.iter().collect::<BTreeSet<_>>().len());
        Ok(Some(Distinct { least: used.clone().min().unwrap_or(0), most: used.max().unwrap_or(0), of, tokens }))
    }
}

/// Bytes of one routed expert, in the mean of all layers.
fn expert_bytes(model: &ModelConfig, loaded: &Loaded) -> usize {
    let (Some(moe), Some(precision)) = (model.moe(), &loaded.precision) else { return 0 };
    let layout =
        |i| moe.expert_kind().layout(moe.expert_width(model.hidden_size), moe.intermediate_size, precision.layer(i));
    let layers = model.moe_layers().count();
    (0..layers).map(|i| layout(i).expect("experts of this layout are loaded").bytes()).sum::<usize>() / layers
}

/// Bytes of routed experts that one token reads.
fn experts_per_token_bytes(model: &ModelConfig, loaded: &Loaded) -> u64 {
    let choices: usize = model.moe_layers().map(|(_, moe)| moe.router.top_k).sum();
    (choices * expert_bytes(model, loaded)) as u64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
