//! Conversion from synthetic checkpoints: `cargo bench -p moebius-cache --bench convert -- [LAYERS [FOLDER [FORMAT]]]`.
//!
//! Experts of DeepSeek-V2-Lite's shape, 64 a layer, 1.1 GB of BF16 a layer, in every source format. Prints GB/s of
//! source and the peak of anonymous memory. The source is in the page cache if it fits there, so this measures the
//! work, not the disk it comes from.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use moebius_cache::checkpoint::GgmlType;
use moebius_cache::convert::{ExpertSource, Job, LayerSource, build};
use moebius_cache::{Checkpoint, Precision};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const HIDDEN: usize = 2048;
const EXPERTS: usize = 64;

/// How the checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Bf16,
    Fp8,
    CompressedTensors,
    Gptq,
    Awq,
    Mxfp4,
    Gguf(GgmlType),
}

impl Format {
    /// Blocks of 256 do not fill rows of 1408.
    fn intermediate(self) -> usize {
        match self {
            Format::Gguf(kind) if kind.block().0 == 256 => 1536,
            _ => 1408,
        }
    }

    fn precisions(self) -> Vec<Precision> {
        match self {
            Format::Bf16 => vec![Precision::int4(128), Precision::int4(32), Precision::int8(128), Precision::Bf16],
            _ => vec![],
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let layers = arguments.first().map_or(2, |n| n.parse().expect("a number of layers"));
    let parent = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    use Format::*;
    let gguf = GgmlType::ALL.map(Gguf);
    for format in [Bf16, Fp8, CompressedTensors, Gptq, Awq, Mxfp4].into_iter().chain(gguf) {
        if arguments.get(2).is_none_or(|wanted| format!("{format:?}").contains(wanted.as_str())) {
            measure(format, layers, &parent);
        }
    }
}

fn measure(format: Format, layers: usize, parent: &Path) {
    let dir = tempfile::tempdir_in(parent).expect("a temporary folder");
    let intermediate = format.intermediate();
    match format {
        Format::Gguf(kind) => write_gguf(dir.path(), layers, kind),
        _ => (0..layers).for_each(|layer| write_layer(dir.path(), layer, format)),
    }
    let checkpoint = Checkpoint::open(dir.path()).expect("the checkpoint just written");
    let mut job = Job {
        weights_suffice: true,
        calibration: None,
        checkpoint: &checkpoint,
        model: "synthetic".into(),
        hidden: HIDDEN,
        intermediate,
        num_experts: EXPERTS,
        kind: Default::default(),
        precision: Precision::Bf16.into(),
        layers: (0..layers).map(source).collect(),
    };
    let own = job.sources(&job.layers[0].experts[0]).expect("an expert")[0].kept_by();
    for precision in format.precisions().into_iter().chain(own) {
        job.precision = precision.into();
        let bytes: u64 = job.layers[0]
            .experts
            .iter()
            .flat_map(|expert| job.sources(expert).expect("an expert"))
            .map(|source| source.bytes())
            .sum();
        // Of MXFP4 gate and up share a tensor.
        let bytes = if format == Format::Mxfp4 { bytes * 3 / 5 } else { bytes };
        let (before, peak) = (anonymous_bytes(), AtomicUsize::new(0));
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let cache = build(&job, &dir.path().join("cache"), &|_| {
            peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - cpu;
        let cache = cache.expect("a cache");
        let gb = layers as f64 * bytes as f64 / 1e9;
        let weights = (layers * EXPERTS * 3 * HIDDEN * intermediate) as f64 / 1e9;
        println!(
            "{format:?} to {precision}: {gb:.2} GB in {seconds:.2} s: {:.2} GB/s of source on {} threads, {cpu:.2} s \
             of CPU ({:.2} GB/s, {:.2} G weights/s a core); anonymous memory grew by at most {:.1} MB, a layer has \
             {:.0} MB",
            gb / seconds,
            rayon::current_num_threads(),
            gb / cpu,
            weights / cpu,
            peak.into_inner().saturating_sub(before) as f64 / 1e6,
            gb * 1e3 / layers as f64,
        );
        std::fs::remove_file(cache.path()).expect("the cache just built");
    }
}

fn source(layer: usize) -> LayerSource {
    let name = |e: usize, part: &str| format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
    let expert = |e| ExpertSource { gate: name(e, "gate"), up: name(e, "up"), down: name(e, "down") };
    LayerSource { layer, experts: (0..EXPERTS).map(expert).collect() }
}

/// A few megabytes of noise, which all tensors share.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(4)).flat_map(|_| self.next().to_le_bytes()).take(count).collect()
    }

    /// Normal weights.
    fn bf16(&mut self, count: usize) -> Vec<u8> {
        let mut uniform = || (self.next() >> 8) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..count)
            .flat_map(|_| half::bf16::from_f32((uniform() + uniform() + uniform() + uniform()) * 0.02).to_le_bytes())
            .collect()
    }
}

/// One shard. Codes are noise; scales, which are a small part, are all the same.
fn write_layer(dir: &Path, layer: usize, format: Format) {
    let (mut noise, n, k) = (Noise(layer as u64 + 1), format.intermediate(), HIDDEN);
    let count = n * k;
    let repeat = |bytes: &[u8], count: usize| bytes.repeat(count);
    let (half, brain, single) =
        (half::f16::from_f32(0.01).to_le_bytes(), half::bf16::from_f32(0.01).to_le_bytes(), 0.01f32.to_le_bytes());
    // Name after the matrix's, type, shape of `[n, k]`, content.
    type Part = (&'static str, Dtype, fn(usize, usize) -> Vec<usize>, Vec<u8>);
    let (parts, config): (Vec<Part>, &str) = match format {
        Format::Bf16 => (vec![("weight", Dtype::BF16, |n, k| vec![n, k], noise.bf16(count))], "{}"),
        Format::Fp8 => {
            let codes = noise.bytes(count).iter().map(|b| if b & 0x7f == 0x7f { 0 } else { *b }).collect();
            let scales = (
                "weight_scale_inv",
                Dtype::F32,
                (|n, k| vec![n / 128, k / 128]) as fn(usize, usize) -> Vec<usize>,
                repeat(&single, count / 16384),
            );
            (
                vec![("weight", Dtype::F8_E4M3, |n, k| vec![n, k], codes), scales],
                r#"{"quantization_config":{"quant_method":"fp8"}}"#,
            )
        }
        Format::CompressedTensors => (
            vec![
                ("weight_packed", Dtype::I32, |n, k| vec![n, k / 8], noise.bytes(count / 2)),
                ("weight_scale", Dtype::BF16, |n, k| vec![n, k / 32], repeat(&brain, count / 32)),
            ],
            r#"{"quantization_config":{"quant_method":"compressed-tensors",
            "config_groups":{"g":{"weights":{"num_bits":4,"type":"int"}}}}}"#,
        ),
        Format::Gptq => (
            vec![
                ("qweight", Dtype::I32, |n, k| vec![k / 8, n], noise.bytes(count / 2)),
                ("qzeros", Dtype::I32, |n, k| vec![k / 128, n / 8], repeat(&[0x77], count / 256)),
                ("scales", Dtype::F16, |n, k| vec![k / 128, n], repeat(&half, count / 128)),
            ],
            r#"{"quantization_config":{"quant_method":"gptq","bits":4,"sym":true}}"#,
        ),
        Format::Awq => (
            vec![
                ("qweight", Dtype::I32, |n, k| vec![k, n / 8], noise.bytes(count / 2)),
                ("qzeros", Dtype::I32, |n, k| vec![k / 128, n / 8], noise.bytes(count / 256)),
                ("scales", Dtype::F16, |n, k| vec![k / 128, n], repeat(&half, count / 128)),
            ],
            r#"{"quantization_config":{"quant_method":"awq","bits":4}}"#,
        ),
        Format::Mxfp4 => (vec![], r#"{"quantization_config":{"quant_method":"mxfp4"}}"#),
        Format::Gguf(_) => unreachable!("written as one file"),
    };
    std::fs::write(dir.join("config.json"), config).expect("disk space");
    let mut tensors: Vec<(String, Dtype, Vec<usize>, &[u8])> = Vec::new();
    let stacked = if format == Format::Mxfp4 {
        (noise.bytes(EXPERTS * count), vec![120; EXPERTS * count / 16])
    } else {
        Default::default()
    };
    if format == Format::Mxfp4 {
        for (part, rows, inputs) in [("gate_up_proj", 2 * n, k), ("down_proj", k, n)] {
            let (name, weights) = (format!("model.layers.{layer}.mlp.experts.{part}"), EXPERTS * rows * inputs);
            tensors.push((
                format!("{name}_blocks"),
                Dtype::U8,
                vec![EXPERTS, rows, inputs / 32, 16],
                &stacked.0[..weights / 2],
            ));
            tensors.push((
                format!("{name}_scales"),
                Dtype::U8,
                vec![EXPERTS, rows, inputs / 32],
                &stacked.1[..weights / 32],
            ));
        }
    }
    for expert in source(layer).experts {
        for (name, [n, k]) in [(&expert.gate, [n, k]), (&expert.up, [n, k]), (&expert.down, [k, n])] {
            let stem = name.strip_suffix("weight").expect("a weight");
            tensors.extend(
                parts
                    .iter()
                    .map(|(part, dtype, shape, bytes)| (format!("{stem}{part}"), *dtype, shape(n, k), &bytes[..])),
            );
        }
    }
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("matching sizes"))
    });
    safetensors::serialize_to_file(views, None, &dir.join(format!("model-{layer}.safetensors"))).expect("disk space");
}

/// Where a block has its f16 scales.
fn halves(kind: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match kind {
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        MXFP4 | IQ1_M => &[],
        Q4_0 | Q5_0 | Q8_0 | IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS => &[0],
    }
}

/// All layers in one file; the tensors of all layers have the same content.
fn write_gguf(dir: &Path, layers: usize, kind: GgmlType) {
    let number = kind.number();
    let (elements, size) = kind.block();
    let (n, k) = (Format::Gguf(kind).intermediate(), HIDDEN);
    let mut content = Noise(7).bytes(EXPERTS * n * k / elements * size);
    for block in content.chunks_exact_mut(size) {
        halves(kind).iter().for_each(|&at| block[at..at + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes()));
        if kind == GgmlType::MXFP4 {
            block[0] = 120;
        }
        if kind == GgmlType::IQ1_M {
            // Its scale is in four places: 2^-9.
            (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | [0, 0, 0x80, 0x10][i]);
        }
    }
    let mut header =
        [&b"GGUF"[..], &3u32.to_le_bytes(), &(3 * layers as u64).to_le_bytes(), &0u64.to_le_bytes()].concat();
    let names = (0..layers).flat_map(|layer| {
        ["gate", "up", "down"].map(|part| (format!("blk.{layer}.ffn_{part}_exps.weight"), part == "down"))
    });
    for (i, (name, is_down)) in names.enumerate() {
        let [rows, inputs] = if is_down { [k, n] } else { [n, k] };
        header.extend((name.len() as u64).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(3u32.to_le_bytes());
        header.extend([inputs, rows, EXPERTS].iter().flat_map(|&dim| (dim as u64).to_le_bytes()));
        header.extend(number.to_le_bytes());
        header.extend(((i * content.len().next_multiple_of(32)) as u64).to_le_bytes());
    }
    content.resize(content.len().next_multiple_of(32), 0);
    header.resize(header.len().next_multiple_of(32), 0);
    let mut file = std::fs::File::create(dir.join("model.gguf")).expect("disk space");
    file.write_all(&header).expect("disk space");
    (0..3 * layers).for_each(|_| file.write_all(&content).expect("disk space"));
}

fn anonymous_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok()).unwrap_or(0) * 1024
}

/// User and system time of this process so far, in the ticks of 10 ms that Linux counts.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
    fields.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
