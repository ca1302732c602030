//! How fast a model runs on this box, and how fast it could: prefill and decode beside what memory allows.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::backend::Routing;
use crate::batch::Batch;
use crate::config::EngineConfig;
use crate::forward::Tap;
use crate::kv_cache::BlockPool;
use crate::load::{self, Budget, LoadProgress, Loaded};
use crate::memory::{Pages, read_bandwidth};
use crate::model::ModelConfig;
use crate::models::shapes;
use crate::random::Random;
use crate::synthetic::{self, Synthetic};
use crate::topology::{self, Topology};
use crate::{Error, Result};

/// Bytes over which the read bandwidth is measured: more than any processor's cache.
pub const BANDWIDTH_BYTES: usize = 2 << 30;

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Prompt lengths to prefill.
    pub prompt_tokens: Vec<usize>,
    /// Tokens to decode in each run.
    pub decode_tokens: usize,
    /// Sequences that decode together.
    pub batches: Vec<usize>,
    /// Runs of each row; the median counts.
    pub runs: usize,
}

/// One run of everything, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where it ran.
    pub machine: Machine,
    /// What ran.
    pub model: String,
    /// Layers that ran.
    pub layers: usize,
    /// In what precision.
    pub precision: PrecisionReport,
    /// Seconds from the start of loading until ready.
    pub ready_s: f64,
    /// Weight bytes that one decoded token reads.
    pub bytes_per_token: u64,
    /// Least and most distinct experts that one layer used in the longest prefill.
    pub distinct_experts: Option<Distinct>,
    /// Results.
    pub rows: Vec<Row>,
}

/// The box.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// As the processor calls itself.
    pub cpu: String,
    /// Physical cores this process may use.
    pub cores: usize,
    /// Worker threads.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub simd: String,
    /// RAM of the machine.
    pub memory_gib: f64,
    /// Measured with all workers, in huge pages where there are some.
    pub read_gb_per_s: f64,
}

/// Precisions that ran.
#[derive(Debug, Serialize)]
pub struct PrecisionReport {
    /// Of the routed experts.
    pub experts: String,
    /// Of the rest.
    pub dense: String,
    /// Of keys and values.
    pub kv: String,
}

/// Spread of the routing.
#[derive(Debug, Serialize)]
pub struct Distinct {
    /// Of the layer that used fewest.
    pub least: usize,
    /// Of the layer that used most.
    pub most: usize,
    /// Experts of a layer.
    pub of: usize,
    /// Tokens of the prefill.
    pub tokens: usize,
}

/// One measured number.
#[derive(Debug, Serialize)]
pub struct Row {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Tokens of the prompt, or decoded by each sequence.
    pub tokens: usize,
    /// Sequences together.
    pub batch: usize,
    /// Where the routed experts are.
    pub experts: &'static str,
    /// Where everything else runs.
    pub device: &'static str,
    /// Median over the runs, all sequences together.
    pub tok_per_s: f64,
    /// What reading the weights once at the measured bandwidth would allow.
    pub limit_tok_per_s: f64,
    /// Weight bytes read per second.
    pub gb_per_s: f64,
    /// Of the measured read bandwidth.
    pub share_of_bandwidth: f64,
}

/// Loads random weights of a named shape. Errors: unknown shape, or it does not fit into memory.
pub fn load_shape(name: &str, layers: Option<usize>, config: &EngineConfig, report: &(dyn Fn(LoadProgress<'_>) + Sync)) -> Result<Loaded> {
    let model = shapes::shape(name, layers)?;
    let machine = load::machine(config, &Topology::read())?;
    let precision = load::precision(&model, config)?;
    let budget = Budget::new(&model, config, precision, &machine)?;
    let experts = precision.map(|p| synthetic::experts(&model, p)).transpose()?;
    load::assemble(model, &Synthetic, experts, config, budget, machine, report)
}

/// Loads a model or shape and measures it.
pub fn run(
    model: &str,
    source: Source<'_>,
    config: &EngineConfig,
    plan: &Plan,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Report> {
    let started = Instant::now();
    let topology = Topology::read(); // before this thread is pinned to one core
    // Room for the longest prompt and all sequences of the widest batch.
    let sequences = plan.batches.iter().copied().max().unwrap_or(1).max(1);
    let longest = plan.prompt_tokens.iter().copied().max().unwrap_or(1);
    let config = EngineConfig { max_sequences: sequences.max(config.max_sequences), ..config.clone() };
    let mut loaded = match source {
        Source::Directory(dir) => load::load(model, dir, &config, report)?,
        Source::Shape { layers } => load_shape(model, layers, &config, report)?,
    };
    let ready_s = started.elapsed().as_secs_f64();
    if sequences > loaded.max_batch_tokens {
        let limit = loaded.max_batch_tokens;
        return Err(Error::Invalid(format!("{sequences} sequences do not fit a pass of {limit} tokens: raise --max-batch-tokens")));
    }
    let needed = longest.max(plan.decode_tokens.saturating_add(CONTEXT));
    if needed > loaded.max_context {
        let context = loaded.max_context;
        let advice =
            if context < loaded.model.config().max_context { "raise --max-context" } else { "lower --prompt-tokens or --decode-tokens" };
        return Err(Error::Invalid(format!("{needed} tokens do not fit the context of {context}: {advice}")));
    }
    // As the engine's thread does; not pinned is slower, not wrong.
    let _ = loaded.team.pin_caller();
    let bandwidth = read_bandwidth(&loaded.team, BANDWIDTH_BYTES.min((topology::available_bytes() / 4) as usize), Pages::Huge, 5)?;
    let resident = loaded.model.resident_bytes_per_token();

    let mut bench = Bench { loaded: &mut loaded, bandwidth, resident, random: Random(42) };
    let mut rows = Vec::new();
    for &tokens in &plan.prompt_tokens {
        rows.push(bench.prefill(tokens, plan.runs)?);
    }
    if plan.decode_tokens > 0 {
        for &batch in &plan.batches {
            rows.push(bench.decode(plan.decode_tokens, batch, plan.runs)?);
        }
    }
    let distinct_experts = bench.distinct(longest)?;
    let experts = experts_per_token_bytes(loaded.model.config(), &loaded);
    Ok(Report {
        machine: Machine {
            cpu: topology.cpu_model.clone(),
            cores: topology.cores.len(),
            threads: loaded.team.threads(),
            simd: loaded.kernel.simd().to_string(),
            memory_gib: topology.total_bytes as f64 / (1u64 << 30) as f64,
            read_gb_per_s: bandwidth,
        },
        model: model.to_string(),
        layers: loaded.model.config().layers.len(),
        precision: PrecisionReport {
            experts: loaded.precision.map_or("none".into(), |p| p.to_string()),
            dense: config.dense.to_string(),
            kv: config.kv.to_string(),
        },
        ready_s,
        bytes_per_token: resident + experts,
        distinct_experts,
        rows,
    })
}

/// Where the model comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A checkpoint.
    Directory(&'a Path),
    /// Random weights, of the first `layers` layers only if given.
    Shape {
        /// Layers to keep.
        layers: Option<usize>,
    },
}

/// Tokens of context before decoding is measured.
const CONTEXT: usize = 32;

struct Bench<'a> {
    loaded: &'a mut Loaded,

    bandwidth: f64, // GB/s
    resident: u64,  // bytes a decode step reads besides experts
    random: Random,
}

/// Distinct experts of each layer.
#[derive(Default)]
struct Spread(Vec<BTreeSet<i32>>);

impl Tap for Spread {
    fn wants_hidden(&self, _: usize) -> bool {
        false
    }

    fn hidden(&mut self, _: usize, _: &[f32]) {}

    fn routing(&mut self, layer: usize, routing: &Routing) {
        self.0.resize_with(self.0.len().max(layer + 1), BTreeSet::new);
        self.0[layer].extend(&routing.ids);
    }
}

impl Bench<'_> {
    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let vocab = self.loaded.model.config().vocab_size as u64;
        (0..n).map(|_| (self.random.bits() % vocab) as u32).collect()
    }

    /// One pass over `tokens` of one sequence after the other, in chunks; seconds.
    fn read(&mut self, tokens: &[u32], blocks: &[u32], mut tap: Option<&mut dyn Tap>) -> Result<f64> {
        let started = Instant::now();
        let mut batch = Batch::default();
        for (i, chunk) in tokens.chunks(self.loaded.max_batch_tokens).enumerate() {
            batch.clear();
            batch.push(chunk, i * self.loaded.max_batch_tokens, blocks);
            self.loaded.model.forward(&batch, tap.as_mut().map(|t| &mut **t as &mut dyn Tap))?;
        }
        self.loaded.model.logits(&[batch.len() - 1])?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn experts_read(&self) -> u64 {
        self.loaded.model.expert_bytes_read()
    }

    fn prefill(&mut self, tokens: usize, runs: usize) -> Result<Row> {
        let mut blocks = Vec::new();
        BlockPool::new(self.loaded.kv_blocks).grow(&mut blocks, tokens);
        let (mut seconds, mut bytes) = (Vec::new(), 0);
        for run in 0..=runs {
            let prompt = self.tokens(tokens);
            let before = self.experts_read();
            let s = self.read(&prompt, &blocks, None)?;
            let passes = tokens.div_ceil(self.loaded.max_batch_tokens) as u64;
            bytes = self.experts_read() - before + passes * self.resident;
            // The first run checks checksums and touches memory for the first time.
            if run > 0 {
                seconds.push(s);
            }
        }
        Ok(self.row("prefill", tokens, 1, tokens, median(&mut seconds), bytes))
    }

    fn decode(&mut self, tokens: usize, sequences: usize, runs: usize) -> Result<Row> {
        let mut pool = BlockPool::new(self.loaded.kv_blocks);
        let mut tables = vec![Vec::new(); sequences];
        for table in &mut tables {
            if !pool.grow(table, CONTEXT + tokens) {
                return Err(Error::Resources(format!("memory does not hold {sequences} sequences: lower --batch or --max-context")));
            }
        }
        for table in &tables {
            let prompt = self.tokens(CONTEXT);
            self.read(&prompt, table, None)?;
        }
        let rows: Vec<usize> = (0..sequences).collect();
        let (mut seconds, mut bytes) = (Vec::new(), 0);
        let mut batch = Batch::default();
        for run in 0..=runs {
            let ids = self.tokens(tokens * sequences);
            let (started, before) = (Instant::now(), self.experts_read());
            for (i, ids) in ids.chunks(sequences).enumerate() {
                batch.clear();
                for (id, table) in ids.iter().zip(&tables) {
                    batch.push(&[*id], CONTEXT + i, table);
                }
                self.loaded.model.forward(&batch, None)?;
                self.loaded.model.logits(&rows)?;
            }
            bytes = self.experts_read() - before + tokens as u64 * self.resident;
            if run > 0 {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        Ok(self.row("decode", tokens, sequences, tokens * sequences, median(&mut seconds), bytes))
    }

    fn row(&self, phase: &'static str, tokens: usize, batch: usize, total: usize, seconds: f64, bytes: u64) -> Row {
        let gb_per_s = bytes as f64 / 1e9 / seconds;
        Row {
            phase,
            tokens,
            batch,
            experts: "ram",
            device: "cpu",
            tok_per_s: total as f64 / seconds,
            limit_tok_per_s: total as f64 * self.bandwidth * 1e9 / bytes as f64,
            gb_per_s,
            share_of_bandwidth: gb_per_s / self.bandwidth,
        }
    }

    /// How many experts each layer of one prefill really uses: a bench that routes all tokens to a few measures its cache.
    fn distinct(&mut self, tokens: usize) -> Result<Option<Distinct>> {
        let Some(of) = self.loaded.model.config().moe().map(|m| m.num_experts) else { return Ok(None) };
        let mut blocks = Vec::new();
        BlockPool::new(self.loaded.kv_blocks).grow(&mut blocks, tokens);
        let (prompt, mut spread) = (self.tokens(tokens), Spread::default());
        self.read(&prompt, &blocks, Some(&mut spread))?;
        let used = spread.0.iter().map(BTreeSet::len).filter(|&n| n > 0);
        Ok(Some(Distinct { least: used.clone().min().unwrap_or(0), most: used.max().unwrap_or(0), of, tokens }))
    }
}

/// Bytes of routed experts that one token reads.
fn experts_per_token_bytes(model: &ModelConfig, loaded: &Loaded) -> u64 {
    let (Some(moe), Some(precision)) = (model.moe(), loaded.precision) else { return 0 };
    let layout = moebius_cache::pack::ExpertLayout::new(model.hidden_size, moe.intermediate_size, precision);
    let bytes = layout.expect("experts of this layout are loaded").bytes();
    (model.moe_layers().count() * moe.router.top_k * bytes) as u64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { cpu, threads, simd, memory_gib, read_gb_per_s, .. } = &self.machine;
        writeln!(f, "{cpu}, {threads} threads, {simd}, {memory_gib:.0} GiB, reads {read_gb_per_s:.1} GB/s")?;
        let PrecisionReport { experts, dense, kv } = &self.precision;
        let bytes = self.bytes_per_token as f64;
        let read = if bytes < 1e8 { format!("{:.2} MB", bytes / 1e6) } else { format!("{:.2} GB", bytes / 1e9) };
        writeln!(
            f,
            "{}, {} layers, experts {experts}, dense {dense}, kv {kv}: a token reads {read}; ready in {:.1} s",
            self.model, self.layers, self.ready_s
        )?;
        if let Some(d) = &self.distinct_experts {
            writeln!(f, "a prompt of {} tokens uses {} to {} of {} experts per layer", d.tokens, d.least, d.most, d.of)?;
        }
        writeln!(
            f,
            "\n{:8} {:>7} {:>6} {:>10} {:>14} {:>8} {:>10}",
            "phase", "tokens", "batch", "tok/s", "memory limit", "GB/s", "bandwidth"
        )?;
        for r in &self.rows {
            let share = 100.0 * r.share_of_bandwidth;
            writeln!(
                f,
                "{:8} {:>7} {:>6} {:>10.1} {:>14.1} {:>8.1} {share:>9.0}%",
                r.phase, r.tokens, r.batch, r.tok_per_s, r.limit_tok_per_s, r.gb_per_s
            )?;
        }
        Ok(())
    }
}
