//! What the search for scales costs and gains: `cargo bench -p moebius-cache --bench quantize -- [CHECKPOINT DIR
//! [TENSOR NAME PART]]`.
//!
//! Speed is that of one thread, on noise. The gain is the squared error left, against the scale that maps the largest
//! magnitude to 7 (127 for INT8), over all two-dimensional tensors of a checkpoint with that part in their name
//! ("experts" if none is given).

use std::path::PathBuf;
use std::time::Instant;

use half::bf16;
use moebius_cache::codec::decode_f32;
use moebius_cache::quantize::quantize_rows;
use moebius_cache::{Checkpoint, Precision};

fn main() {
    let weights = noise(1 << 22);
    let precisions = |group_size| [Precision::int8(group_size), Precision::int4(group_size)];
    for precision in [32, 64, 128].map(precisions).as_flattened() {
        let group = precision.group_size().expect("an integer");
        let (mut codes, mut scales) = (vec![0; weights.len()], vec![0.0; weights.len() / group]);
        // The best of several runs: one thread's work has no other noise than its neighbours.
        let seconds = (0..9).map(|_| {
            let start = Instant::now();
            quantize_rows(*precision, &weights, &mut codes, &mut scales);
            start.elapsed().as_secs_f64()
        });
        let gbs = weights.len() as f64 * 2.0 / seconds.fold(f64::MAX, f64::min) / 1e9;
        println!(
            "{precision}: {gbs:.2} GB/s of BF16 on one thread, {:.3} of the error",
            gain(*precision, std::slice::from_ref(&weights))
        );
    }
    // Cargo passes `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let Some(dir) = arguments.first() else { return };
    let part = arguments.get(1).map_or("experts", String::as_str);
    for group_size in [32, 64, 128] {
        let tensors = tensors(&PathBuf::from(dir), part, group_size);
        for precision in precisions(group_size) {
            println!(
                "{dir}: {precision} leaves {:.3} of the error ({} tensors)",
                gain(precision, &tensors),
                tensors.len()
            );
        }
    }
}

fn tensors(dir: &std::path::Path, part: &str, group_size: usize) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let views = checkpoint.names().filter(|name| name.contains(part)).filter_map(|name| checkpoint.get(name));
    let views = views.filter(|view| view.shape.len() == 2 && view.shape[1].is_multiple_of(group_size));
    let decode = |view: moebius_cache::TensorView<'_>| {
        let mut out = vec![0.0; view.shape.iter().product()];
        decode_f32(&view, &mut out).expect("a float tensor");
        out
    };
    views.map(decode).collect()
}

/// Squared error of the search over that of the largest-value scale.
fn gain(precision: Precision, tensors: &[Vec<f32>]) -> f64 {
    let group = precision.group_size().expect("an integer");
    let top = if matches!(precision, Precision::Int4 { .. }) { 7.0 } else { 127.0 };
    let (mut searched, mut plain) = (0.0, 0.0);
    for weights in tensors {
        let (mut codes, mut scales) = (vec![0; weights.len()], vec![0.0; weights.len() / group]);
        quantize_rows(precision, weights, &mut codes, &mut scales);
        for (i, w) in weights.chunks(group).enumerate() {
            let square = |e: f32| (e as f64).powi(2);
            let scale = scales[i];
            searched += w.iter().zip(&codes[i * group..]).map(|(w, &q)| square(w - scale * q as f32)).sum::<f64>();
            let largest = w.iter().fold(0f32, |a, x| a.max(x.abs()));
            let scale = bf16::from_f32(largest / top).to_f32();
            if scale > 0.0 {
                plain += w.iter().map(|w| square(w - scale * (w / scale).round().clamp(-top - 1.0, top))).sum::<f64>();
            }
        }
    }
    searched / plain
}

/// Sums of four uniform values: near enough to normal.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() + uniform()) * 0.02).collect()
}
