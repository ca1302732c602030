//! What a bench found, as JSON and as a table.

use serde::Serialize;

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
    /// The most RAM that the process took until then, mapped files included.
    pub peak_ram_gib: f64,
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
    /// The GPU, if one takes part.
    pub gpu: Option<Gpu>,
}

/// The GPU, and what it was measured to do.
#[derive(Debug, Serialize)]
pub struct Gpu {
    /// As the driver calls it.
    pub name: String,
    /// Bytes of its memory, read and written, in a second.
    pub memory_gb_per_s: f64,
    /// From pinned memory of the host.
    pub link_gb_per_s: f64,
    /// Of a large product of BF16 matrices.
    pub tflops: f64,
    /// Its memory that is taken.
    pub taken_gib: f64,
    /// Experts of each layer that live on it.
    pub resident_experts: usize,
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
    /// Where the routed experts are: `ram`, `vram`, or both.
    pub experts: &'static str,
    /// Where everything else runs.
    pub device: &'static str,
    /// Median over the runs, all sequences together.
    pub tok_per_s: f64,
    /// What the busiest of the machine's parts would allow by itself.
    pub limit_tok_per_s: f64,
    /// Which part that is: `ram`, `link` (PCIe), `vram`, or `products`.
    pub limited_by: &'static str,
    /// Of the limit.
    pub share_of_limit: f64,
    /// Weights read from RAM per second, by the CPU or the GPU.
    pub ram_gb_per_s: f64,
    /// Time of each kind of kernel, where asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<Op>,
}

/// The time that the kernels of one name take in one pass that is marked, so that they do not overlap.
#[derive(Debug, Serialize)]
pub struct Op {
    /// The kernel's.
    pub name: &'static str,
    /// How often it runs.
    pub launches: usize,
    /// All launches together.
    pub us: f64,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { cpu, threads, simd, memory_gib, read_gb_per_s, gpu, .. } = &self.machine;
        writeln!(f, "{cpu}, {threads} threads, {simd}, {memory_gib:.0} GiB, reads {read_gb_per_s:.1} GB/s")?;
        if let Some(Gpu { name, memory_gb_per_s, link_gb_per_s, tflops, taken_gib, .. }) = gpu {
            writeln!(
                f,
                "{name}: {taken_gib:.1} GiB taken, memory {memory_gb_per_s:.0} GB/s, PCIe {link_gb_per_s:.1} GB/s, \
                 products {tflops:.0} TFLOP/s"
            )?;
        }
        let PrecisionReport { experts, dense, kv } = &self.precision;
        let bytes = self.bytes_per_token as f64;
        let read = if bytes < 1e8 { format!("{:.2} MB", bytes / 1e6) } else { format!("{:.2} GB", bytes / 1e9) };
        writeln!(
            f,
            "{}, {} layers, experts {experts}, dense {dense}, kv {kv}: a token reads {read}",
            self.model, self.layers
        )?;
        writeln!(f, "ready in {:.1} s, at most {:.1} GiB of RAM", self.ready_s, self.peak_ram_gib)?;
        if let Some(d) = &self.distinct_experts {
            writeln!(
                f,
                "a prompt of {} tokens uses {} to {} of {} experts per layer",
                d.tokens, d.least, d.most, d.of
            )?;
        }
        let head = ("phase", "tokens", "batch", "tok/s", "limit", "of it", "limited by", "RAM GB/s");
        let (phase, tokens, batch, speed, limit, share, by, ram) = head;
        writeln!(f, "\n{phase:8} {tokens:>7} {batch:>6} {speed:>10} {limit:>10} {share:>6}  {by:10} {ram:>8}")?;
        for r in &self.rows {
            let share = 100.0 * r.share_of_limit;
            let Row { phase, tokens, batch, tok_per_s, limit_tok_per_s, limited_by, ram_gb_per_s, .. } = r;
            writeln!(
                f,
                "{phase:8} {tokens:>7} {batch:>6} {tok_per_s:>10.1} {limit_tok_per_s:>10.1} {share:>5.0}%  \
                 {limited_by:10} {ram_gb_per_s:>8.1}"
            )?;
        }
        for r in self.rows.iter().filter(|r| !r.ops.is_empty()) {
            let all: f64 = r.ops.iter().map(|op| op.us).sum();
            writeln!(f, "\n{} of {} tokens, batch {}: {all:.0} us marked", r.phase, r.tokens, r.batch)?;
            for Op { name, launches, us } in &r.ops {
                writeln!(f, "{name:36} {launches:>6} {us:>10.1} us {:>5.1}%", 100.0 * us / all)?;
            }
        }
        Ok(())
    }
}
