//! The results of a bench, as JSON and as a table.

use serde::Serialize;

/// One run, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// The machine.
    pub machine: MachineReport,
    /// Whether this is a release build: another one is slower.
    pub is_release: bool,
    /// Name of the model.
    pub model: String,
    /// Number of layers.
    pub layers: usize,
    /// Precision of the weights and the KV cache.
    pub precision: PrecisionReport,
    /// Seconds from the start of loading until ready.
    pub ready_s: f64,
    /// Peak RAM of the process until then, mapped files included.
    pub peak_ram_gib: f64,
    /// Which experts tokens choose: `uniform`, `local`, or the file they were read from.
    pub routing: String,
    /// Weight bytes that one decoded token reads.
    pub bytes_per_token: u64,
    /// Distinct experts that a layer used in the longest prefill.
    pub distinct_experts: Option<Distinct>,
    /// Results.
    pub rows: Vec<Measurement>,
}

/// The machine.
#[derive(Debug, Serialize)]
pub struct MachineReport {
    /// Model name of the processor.
    pub cpu: String,
    /// Physical cores this process may use.
    pub cores: usize,
    /// Worker threads of passes of few rows, as in decode.
    pub threads: usize,
    /// Worker threads of other passes.
    pub prefill_threads: usize,
    /// Instruction set of the kernels.
    pub simd: String,
    /// RAM of the machine.
    pub memory_gib: f64,
    /// Read bandwidth, measured with all workers, in huge pages if there are any.
    pub read_gb_per_s: f64,
    /// The GPU, if one is used.
    pub gpu: Option<GpuReport>,
}

/// The GPU and its measured rates.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    /// Name that the driver gives.
    pub name: String,
    /// Bandwidth of its memory, read and written.
    pub memory_gb_per_s: f64,
    /// Bandwidth from pinned host memory.
    pub link_gb_per_s: f64,
    /// Rate of a large product of BF16 matrices.
    pub tflops: f64,
    /// Its memory that is in use.
    pub taken_gib: f64,
    /// Experts of each layer in its memory.
    pub resident_experts: usize,
}

/// Precisions of the run.
#[derive(Debug, Serialize)]
pub struct PrecisionReport {
    /// Of the routed experts.
    pub experts: String,
    /// Of the rest.
    pub dense: String,
    /// Of the KV cache.
    pub kv: String,
    /// Bits of activations next to weights in integers on the CPU.
    pub activations: String,
}

/// Distinct experts per layer.
#[derive(Debug, Serialize)]
pub struct Distinct {
    /// In the layer that used the fewest.
    pub least: usize,
    /// In the layer that used the most.
    pub most: usize,
    /// Experts of a layer.
    pub of: usize,
    /// Tokens of the prefill.
    pub tokens: usize,
}

/// One measurement.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Tokens of the prompt, or decoded per sequence.
    pub tokens: usize,
    /// Sequences in the batch.
    pub batch: usize,
    /// Location of the routed experts: `ram`, `vram`, or both.
    pub experts: &'static str,
    /// Device of everything else.
    pub device: &'static str,
    /// Tokens of all sequences per second, median of the runs.
    pub tok_per_s: f64,
    /// Limit that the busiest part of the machine sets.
    pub limit_tok_per_s: f64,
    /// That part: `ram`, `link` (PCIe), `vram`, or `products`.
    pub limited_by: &'static str,
    /// Share of the limit that was reached.
    pub share_of_limit: f64,
    /// Weights read from RAM per second, by the CPU or the GPU.
    pub ram_gb_per_s: f64,
    /// Share of the chosen experts that were in VRAM, where some are and others are not; of decode.
    pub vram_hits: Option<f64>,
    /// Share of the CPU's experts that a guess had named a layer before, beside a GPU; of decode.
    pub foreseen: Option<f64>,
    /// By what share that raises the speed, where it was tried.
    pub foresight_gain: Option<f32>,
    /// Bytes of experts that a step of decode read from RAM by the CPU, over PCIe, and from VRAM.
    pub expert_bytes: [u64; 3],
    /// Time of each kernel, or of each family of ops on the CPU, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<KernelTime>,
}

/// Time of the kernels of one name in one pass. Timing keeps them from overlapping. On the CPU: the dispatches of one
/// family of ops, in the mean of the workers, and what these wait for.
#[derive(Debug, Serialize)]
pub struct KernelTime {
    /// Name of the kernel, or of the family of ops.
    pub name: &'static str,
    /// Number of launches.
    pub launches: usize,
    /// Microseconds of all launches.
    pub us: f64,
}

impl std::fmt::Display for BenchReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MachineReport { cpu, threads, prefill_threads, simd, memory_gib, read_gb_per_s, gpu, .. } = &self.machine;
        let prompts = if prefill_threads == threads { "" } else { &format!(" ({prefill_threads} for prompts)") };
        writeln!(f, "{cpu}, {threads} threads{prompts}, {simd}, {memory_gib:.0} GiB, reads {read_gb_per_s:.1} GB/s")?;
        if let Some(GpuReport { name, memory_gb_per_s, link_gb_per_s, tflops, taken_gib, .. }) = gpu {
            writeln!(
                f,
                "{name}: {taken_gib:.1} GiB taken, memory {memory_gb_per_s:.0} GB/s, PCIe {link_gb_per_s:.1} GB/s, \
                 products {tflops:.0} TFLOP/s"
            )?;
        }
        let PrecisionReport { experts, dense, kv, activations } = &self.precision;
        let bytes = self.bytes_per_token as f64;
        let read = if bytes < 1e8 { format!("{:.2} MB", bytes / 1e6) } else { format!("{:.2} GB", bytes / 1e9) };
        writeln!(
            f,
            "{}, {} layers, experts {experts}, dense {dense}, kv {kv}, activations {activations}: a token reads \
             {read}; routing {}",
            self.model, self.layers, self.routing
        )?;
        if !self.is_release {
            writeln!(f, "this build has debug assertions, which are slow: measure one of `cargo build --release`")?;
        }
        writeln!(f, "ready in {:.1} s, at most {:.1} GiB of RAM", self.ready_s, self.peak_ram_gib)?;
        if let Some(d) = &self.distinct_experts {
            writeln!(
                f,
                "a prompt of {} tokens uses {} to {} of {} experts per layer",
                d.tokens, d.least, d.most, d.of
            )?;
        }
        let head =
            ("phase", "tokens", "batch", "tok/s", "limit", "of it", "limited by", "RAM GB/s", "VRAM hits", "foreseen");
        let (phase, tokens, batch, speed, limit, share, by, ram, hits, foreseen) = head;
        writeln!(
            f,
            "\n{phase:8} {tokens:>7} {batch:>6} {speed:>10} {limit:>10} {share:>6}  {by:10} {ram:>8}  {hits}  \
             {foreseen}"
        )?;
        for r in &self.rows {
            let share = 100.0 * r.share_of_limit;
            let percent = |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.0}%", 100.0 * share));
            let hits = percent(r.vram_hits);
            let gain = r.foresight_gain.map_or(String::new(), |gain| format!(" ({:+.0}%)", 100.0 * gain));
            let foreseen = format!("{}{gain}", percent(r.foreseen));
            let Measurement { phase, tokens, batch, tok_per_s, limit_tok_per_s, limited_by, ram_gb_per_s, .. } = r;
            writeln!(
                f,
                "{phase:8} {tokens:>7} {batch:>6} {tok_per_s:>10.1} {limit_tok_per_s:>10.1} {share:>5.0}%  \
                 {limited_by:10} {ram_gb_per_s:>8.1}  {hits:>9}  {foreseen:>8}"
            )?;
        }
        for r in self.rows.iter().filter(|r| !r.ops.is_empty()) {
            let all: f64 = r.ops.iter().map(|op| op.us).sum();
            writeln!(f, "\n{} of {} tokens, batch {}: {all:.0} us", r.phase, r.tokens, r.batch)?;
            for KernelTime { name, launches, us } in &r.ops {
                writeln!(f, "{name:36} {launches:>6} {us:>10.1} us {:>5.1}%", 100.0 * us / all)?;
            }
        }
        Ok(())
    }
}
