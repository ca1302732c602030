//! Conversion from a synthetic checkpoint: `cargo bench -p moebius-cache --bench convert -- [LAYERS [FOLDER]]`.
//!
//! Experts of DeepSeek-V2-Lite's shape, 64 a layer, 1.1 GB of BF16 a layer. Prints GB/s of source and the peak of anonymous memory.
//! The source is in the page cache if it fits there, so this measures the work, not the disk it comes from.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use moebius_cache::convert::{ExpertSource, Job, LayerSource, build};
use moebius_cache::{Checkpoint, Precision};

const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 1408;
const EXPERTS: usize = 64;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let layers = arguments.first().map_or(2, |n| n.parse().expect("a number of layers"));
    let parent = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(parent).expect("a temporary folder");
    (0..layers).for_each(|layer| write_layer(dir.path(), layer));

    let checkpoint = Checkpoint::open(dir.path()).expect("the checkpoint just written");
    for precision in
        [Precision::Int4 { group_size: 128 }, Precision::Int4 { group_size: 32 }, Precision::Int8 { group_size: 128 }, Precision::Bf16]
    {
        let job = Job {
            checkpoint: &checkpoint,
            model: "synthetic".into(),
            hidden: HIDDEN,
            intermediate: INTERMEDIATE,
            num_experts: EXPERTS,
            precision,
            layers: (0..layers).map(source).collect(),
        };
        let (before, peak) = (anonymous_bytes(), AtomicUsize::new(0));
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let cache = build(&job, &dir.path().join("cache"), &|_| {
            peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - cpu;
        let cache = cache.expect("a cache");
        let gb = (layers * EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2) as f64 / 1e9;
        println!(
            "{precision}: {gb:.2} GB in {seconds:.2} s: {:.2} GB/s of source on {} threads, {cpu:.2} s of CPU; anonymous memory grew by at most {:.1} MB, a layer has {:.0} MB",
            gb / seconds,
            rayon::current_num_threads(),
            peak.into_inner().saturating_sub(before) as f64 / 1e6,
            gb * 1e3 / layers as f64,
        );
        std::fs::remove_file(cache.path()).expect("the cache just built");
    }
}

fn source(layer: usize) -> LayerSource {
    let name = |e: usize, part: &str| format!("layers.{layer}.experts.{e}.{part}");
    let expert = |e| ExpertSource { gate: name(e, "gate"), up: name(e, "up"), down: name(e, "down") };
    LayerSource { layer, experts: (0..EXPERTS).map(expert).collect() }
}

/// One shard of normal weights; the tensors share a few megabytes of noise, each from another place in it.
fn write_layer(dir: &Path, layer: usize) {
    let mut state = layer as u64 + 1;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let count = HIDDEN * INTERMEDIATE;
    let noise: Vec<u8> = (0..count + 3 * EXPERTS * 32)
        .flat_map(|_| half::bf16::from_f32((uniform() + uniform() + uniform() + uniform()) * 0.02).to_le_bytes())
        .collect();
    let names: Vec<[String; 3]> = source(layer).experts.into_iter().map(|e| [e.gate, e.up, e.down]).collect();
    let views = names.as_flattened().iter().enumerate().map(|(i, name)| {
        let shape = if i % 3 == 2 { vec![HIDDEN, INTERMEDIATE] } else { vec![INTERMEDIATE, HIDDEN] };
        let bytes = &noise[i * 64..][..count * 2];
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape, bytes).expect("matching sizes"))
    });
    safetensors::serialize_to_file(views, None, &dir.join(format!("model-{layer}.safetensors"))).expect("disk space");
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
