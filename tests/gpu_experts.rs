//! Routed experts beside a GPU: in VRAM, streamed, on the CPU and some of each, against the CPU's own and against f64
//! arithmetic on the same weights.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::cosine;
use common::gpu::{Filled, ROUNDING, Sides, Within, check, gpus, need_gpu, random, team};
use moebius::backend::cuda::{CudaBackend, CudaRouting};
use moebius::backend::source::Shapes;
use moebius::backend::{Load, Route, RouterTensors, Routing};
use moebius::cuda::Cuda;
use moebius::experts::cost::CostModel;
use moebius::experts::gpu::{Forced, GpuExperts, Sizes};
use moebius::experts::{CpuExperts, Epilogue, ExpertExecutor, ExpertMemory};
use moebius::model::{ModelConfig, Router, Scoring, Share, families};
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::pack::{ExpertKind, ExpertPrecision, Precisions, unpack_expert};
use moebius_cache::quantize::quantize_expert;
use moebius_cache::{Precision, ScaleType};

const EXPERTS: usize = 7;
const LAYERS: usize = 2;
const TOP_K: usize = 3;
const MAX_TOKENS: usize = 370;

/// Precisions, with widths that do not fill their last tile where groups allow it.
const FORMATS: &[(Precision, usize, usize)] = &[
    (Precision::int4(32), 160, 96),
    (Precision::int4(64), 192, 64),
    (Precision::int4(128), 256, 128),
    (Precision::Int4 { group_size: 32, scales: ScaleType::F16 }, 160, 96),
    (Precision::Int4 { group_size: 64, scales: ScaleType::F16 }, 192, 64),
    (Precision::Int8 { group_size: 32, scales: ScaleType::F16 }, 96, 160),
    (Precision::Mxfp4, 160, 96),
    (Precision::int8(32), 96, 160),
    (Precision::int8(64), 192, 64),
    (Precision::int8(128), 128, 256),
    (Precision::Bf16, 136, 72),
    (Precision::Q4K, 512, 256),
    (Precision::Q5K, 256, 512),
    (Precision::Q6K, 512, 256),
];

/// Those that are rows to the kernels, which differ in how they are read alone.
const ROWS: &[(Precision, usize, usize)] = &[
    (Precision::Q2K, 256, 256),
    (Precision::Q3K, 256, 256),
    (Precision::Iq4Xs, 256, 256),
    (Precision::Iq4Nl, 160, 96),
    (Precision::iq4(128), 256, 128),
    (Precision::Q4_1, 96, 160),
    (Precision::Q5_1, 160, 96),
    (Precision::Q5_0, 96, 160),
    (Precision::Nvfp4, 160, 96),
    (Precision::Iq2Xxs, 256, 256),
    (Precision::Iq2Xs, 256, 256),
    (Precision::Iq2S, 256, 256),
    (Precision::Iq3Xxs, 256, 256),
    (Precision::Iq3S, 256, 256),
    (Precision::Iq1S, 256, 256),
    (Precision::Iq1M, 256, 256),
    (Precision::Tq1_0, 256, 256),
    (Precision::Tq2_0, 256, 256),
    (Precision::uint4(32), 96, 160),
    (Precision::Uint4 { group_size: 128, scales: ScaleType::F16 }, 256, 128),
    (Precision::fp8(128), 128, 256),
    (Precision::Fp8 { group_size: 32, scales: ScaleType::F32 }, 160, 96),
];

/// Where experts are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Vram,
    Streamed,
    Cpu,
    /// Two in VRAM, of the others as many streamed as end together with the rest on the CPU.
    Everywhere,
    /// Three in VRAM, the others on the CPU.
    VramAndCpu,
}

const PLACES: &[Place] = &[Place::Vram, Place::Streamed, Place::Cpu, Place::Everywhere, Place::VramAndCpu];

/// The same, and layers and matrices with precisions of their own.
fn formats() -> Vec<(Precisions, usize, usize)> {
    let layer = |gate, down| ExpertPrecision { gate, down };
    let mixed = |layers: [ExpertPrecision; LAYERS]| layers.into_iter().collect::<Precisions>();
    let int8 = Precision::int8(64).with_scales(ScaleType::F16);
    let one = FORMATS.iter().map(|&(precision, hidden, intermediate)| (precision.into(), hidden, intermediate));
    let narrow = mixed([layer(Precision::Mxfp4, int8), layer(Precision::int4(64), Precision::Bf16)]);
    let wide = mixed([layer(Precision::Q4K, Precision::Q6K), layer(Precision::Q5K, int8)]);
    one.chain([(narrow, 192, 64), (wide, 256, 256)]).collect()
}

fn store(hidden: usize, intermediate: usize, precision: impl Into<Precisions>) -> Arc<ExpertCache> {
    store_of(ExpertKind::Gated, hidden, intermediate, precision)
}

fn store_of(
    kind: ExpertKind,
    hidden: usize,
    intermediate: usize,
    precision: impl Into<Precisions>,
) -> Arc<ExpertCache> {
    store_with(EXPERTS, kind, hidden, intermediate, precision)
}

fn store_with(
    num_experts: usize,
    kind: ExpertKind,
    hidden: usize,
    intermediate: usize,
    precision: impl Into<Precisions>,
) -> Arc<ExpertCache> {
    let (layers, precision): (Vec<usize>, Precisions) = ((0..LAYERS).collect(), precision.into());
    let layouts: Vec<_> =
        layers.iter().map(|&i| kind.layout(hidden, intermediate, precision.layer(i)).unwrap()).collect();
    let contents = Contents { model: "random", hidden, intermediate, num_experts, kind, precision, layers: &layers };
    let cache = ExpertCache::anonymous(&contents, |layer, expert, bytes| {
        let layout = layouts[layer];
        let weights = |part: u64, [n, k]: [usize; 2]| -> Vec<f32> {
            let unit = 3.0 / (k as f32).sqrt();
            let numbers = random(n * k, part + 10 * (layer * num_experts + expert) as u64);
            numbers.iter().map(|w| unit * w).collect()
        };
        bytes.copy_from_slice(&quantize_expert(
            &layout,
            &weights(1, [layout.gate.n, hidden]),
            &weights(2, [layout.gate.n, hidden]),
            &weights(3, [hidden, intermediate]),
        ));
    });
    Arc::new(cache.unwrap())
}

fn on_cpu(store: &Arc<ExpertCache>) -> CpuExperts {
    let (heap, memory) = (moebius::machine::heap::Heap::default(), Arc::new(ExpertMemory::mapped(store.clone())));
    let experts = CpuExperts::new(&heap, memory, team(), moebius::kernel::best(), MAX_TOKENS * TOP_K).unwrap();
    match store.layout(0).kind() {
        ExpertKind::Gated => experts,
        ExpertKind::Ungated => experts.with(Epilogue::load(&heap, &Shapes::default(), &without_gates()).unwrap()),
    }
}

/// Whose experts have no gate.
fn without_gates() -> ModelConfig {
    let text = std::fs::read_to_string(common::fixture_dir("nemotron_h").join("config.json")).unwrap();
    families::parse(&text).unwrap()
}

/// No other GPU has any.
const NONE_HELD: Sizes =
    Sizes { tokens: 0, cpu_tokens: 0, top_k: 0, resident: 0, ring: 0, share: Share::WHOLE, holders: 0, on_holders: 0 };

fn placed(b: &CudaBackend, store: &Arc<ExpertCache>, place: Place) -> GpuExperts {
    let (resident, ring) = match place {
        Place::Vram => (EXPERTS, 0),
        Place::Streamed => (0, 4),
        Place::Cpu => (0, 0),
        Place::Everywhere => (2, 4),
        Place::VramAndCpu => (3, 0),
    };
    share_of(
        b,
        store,
        place,
        Sizes { tokens: MAX_TOKENS, cpu_tokens: MAX_TOKENS, top_k: TOP_K, resident, ring, ..NONE_HELD },
    )
}

/// What a rank has of them.
fn share_of(b: &CudaBackend, store: &Arc<ExpertCache>, place: Place, sizes: Sizes) -> GpuExperts {
    let cpu_bytes = if place == Place::Streamed { 1.0 } else { 1e9 };
    let costs = CostModel { cpu_bytes, cpu_products: 1e18, pcie_bytes: 1e9 };
    let heap = moebius::machine::heap::Heap::default();
    GpuExperts::new(b.cuda().clone(), &heap, on_cpu(store), sizes, costs, Forced::default()).unwrap()
}

/// Random choices, ids that are no experts among them, and an expert that most tokens choose.
fn routing(tokens: usize, seed: u64) -> Routing {
    let mut ids = Vec::new();
    for (t, n) in random(tokens, seed).iter().enumerate() {
        let first = (n.abs() * 100.0) as i32 % EXPERTS as i32;
        let second = if first != 5 && t % 4 != 0 { 5 } else { (first + 2) % EXPERTS as i32 };
        ids.extend([first, second, (first + 1) % EXPERTS as i32]);
    }
    ids[1] = -1;
    ids[2] = EXPERTS as i32;
    let weights = random(tokens * TOP_K, seed + 1).iter().map(|w| 0.5 + 0.4 * w).collect();
    Routing { top_k: TOP_K, ids, weights }
}

/// The same on the device, whose own routing is overwritten.
fn on_device(b: &CudaBackend, routing: &Routing, hidden: usize) -> CudaRouting {
    let tokens = routing.ids.len() / TOP_K;
    let router = Router::new(TOP_K, Scoring::Softmax);
    let mut to = b.routing(tokens, TOP_K).unwrap();
    let weights = b.load_router(RouterTensors::of(vec![0.0; EXPERTS * hidden].into())).unwrap();
    b.route(&weights, &router, &b.filled(hidden, &vec![0.0; tokens * hidden]), &mut to);
    b.cuda().upload(&b.cuda().compute, to.ids(), &routing.ids);
    b.cuda().upload(&b.cuda().compute, to.weights(), &routing.weights);
    to
}

/// What experts add to `before`.
fn run(b: &CudaBackend, experts: &mut GpuExperts, layer: usize, x: &[f32], routing: &Routing, before: f32) -> Vec<f32> {
    let hidden = x.len() / (routing.ids.len() / TOP_K);
    let (x, routing, mut out) =
        (b.filled(hidden, x), on_device(b, routing, hidden), b.filled_f32(hidden, &vec![before; x.len()]));
    experts.submit(layer, &x, &routing).unwrap();
    experts.finish(&mut out).unwrap();
    b.numbers(&out)
}

fn run_on_cpu(experts: &mut CpuExperts, layer: usize, x: &[f32], routing: &Routing) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    experts.submit_rows(layer, x, routing).unwrap();
    experts.finish_rows(&mut out).unwrap();
    out
}

/// `sum_e weight * down(silu(gate x) * up x)` in f64 on the dequantized weights.
fn naive(store: &ExpertCache, layer: usize, x: &[f32], routing: &Routing) -> Vec<f32> {
    let layout = store.layout(layer);
    let experts: Vec<_> = (0..store.num_experts()).map(|e| unpack_expert(&layout, store.expert(layer, e))).collect();
    let product = |w: &[f32], x: &[f64]| -> Vec<f64> {
        w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| *w as f64 * x).sum()).collect()
    };
    let mut out = vec![0.0f64; x.len()];
    for (i, (&id, &weight)) in routing.ids.iter().zip(&routing.weights).enumerate() {
        let Some([gate, up, down]) = usize::try_from(id).ok().and_then(|id| experts.get(id)) else { continue };
        let at = i / TOP_K * layout.gate.k;
        let x: Vec<f64> = x[at..][..layout.gate.k].iter().map(|&x| x as f64).collect();
        let (gate, up) = (product(gate, &x), product(up, &x));
        let h: Vec<f64> = match layout.kind() {
            ExpertKind::Gated => gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect(),
            // Tiles of what are gate and up elsewhere take turns.
            ExpertKind::Ungated => {
                let tiles = gate.chunks(16).zip(up.chunks(16)).flat_map(|(first, second)| [first, second]);
                tiles.flatten().map(|u| u.max(0.0).powi(2)).collect()
            }
        };
        out[at..].iter_mut().zip(product(down, &h)).for_each(|(o, y)| *o += weight as f64 * y);
    }
    out.iter().map(|&o| o as f32).collect()
}

/// Rounded to bf16, 0.42 of a rounding in the mean each: scaled weights of gate, up and down, `h` and, before they are
/// added up, the experts' results; what moves a gate counts up to 1.5 times.
const ROUNDED: Within = Within { each: 0.0, of_rms: 12.0 * ROUNDING, rms: 1.25 * ROUNDING };

fn check_all(format: (Precisions, usize, usize), tokens: &[usize]) {
    let (precision, hidden, intermediate) = format;
    check_store(&store(hidden, intermediate, precision.clone()), &precision, tokens, PLACES);
}

fn check_store(store: &Arc<ExpertCache>, precision: &Precisions, tokens_of: &[usize], places: &[Place]) {
    let (b, hidden) = (&Sides::new().gpu, store.layout(0).gate.k);
    let mut reference = on_cpu(store);
    let mut executors = places.iter().map(|&place| (place, placed(b, store, place))).collect::<Vec<_>>();
    for (i, &tokens) in tokens_of.iter().enumerate() {
        let layer = i % LAYERS;
        let (x, routing) = (random(tokens * hidden, 60 + tokens as u64), routing(tokens, 70 + tokens as u64));
        let (cpu, exact) = (run_on_cpu(&mut reference, layer, &x, &routing), naive(store, layer, &x, &routing));
        let mut resident = Vec::new();
        for (place, experts) in &mut executors {
            let what = format!("{precision}, {tokens} tokens, layer {layer}, {place:?}");
            let got = run(b, experts, layer, &x, &routing, 0.0);
            // The first token has one expert at most, the others all of theirs.
            let rows = || got.chunks(hidden).zip(cpu.chunks(hidden)).enumerate();
            for (t, (got, want)) in rows().filter(|(_, (_, want))| want.iter().any(|&w| w != 0.0)) {
                let cosine = cosine(got, want);
                assert!(cosine >= 0.999, "{what}, token {t}: cosine {cosine} with the CPU's");
            }
            match place {
                // `h` of the CPU's integer experts has 8 bits: its own tests know how far it may be off.
                Place::Cpu => assert_eq!(got, cpu, "{what}"),
                Place::Vram | Place::Streamed => check(&what, &got, &exact, ROUNDED),
                Place::Everywhere | Place::VramAndCpu => {}
            }
            match place {
                Place::Vram => resident = got.clone(),
                // The same kernels on the same bytes, from somewhere else. Few tokens have kernels of their own where
                // nothing is streamed.
                Place::Streamed if tokens > 8 => assert_eq!(got, resident, "{what}"),
                _ => {}
            }
            if i + 1 == tokens_of.len() {
                assert_eq!(run(b, experts, layer, &x, &routing, 0.0), got, "{what}: again");
            }
        }
    }
}

#[test]
fn few_tokens() {
    need_gpu!();
    formats().into_iter().for_each(|format| check_all(format, &[1, 3, 8]));
}

#[test]
fn many_tokens() {
    need_gpu!();
    // Tiles of 8, 32, 64 and 128 tokens to an expert, and their ends; on Hopper pieces of 16, 32 or 48, 96 and 176,
    // and two.
    formats().into_iter().for_each(|format| check_all(format, &[9, 50, 130, 370]));
}

#[test]
fn pieces_of_rows() {
    need_gpu!();
    // On Hopper up to 8, 16, 24 and 32 tokens of an expert, whose scales are applied to sums; then larger pieces of
    // inputs that were dealt out, 48, 96 and 176.
    for &(precision, hidden, intermediate) in ROWS.iter().chain(&[(Precision::Mxfp4, 160, 96)]) {
        check_store(
            &store(hidden, intermediate, precision),
            &precision.into(),
            &[5, 30, 43, 80, 130, 260],
            &[Place::Vram],
        );
    }
    // More stages than a block has room for, more tiles than a piece has; several super-blocks.
    for precision in [Precision::Q4K, Precision::Q5K, Precision::Q6K] {
        check_store(&store(512, 768, precision), &precision.into(), &[30, 70], &[Place::Vram]);
    }
    let counted = [Precision::Q3K, Precision::Iq4Xs];
    let with_lines_behind = [Precision::Iq1S, Precision::Iq1M, Precision::Iq2S, Precision::Iq3S];
    for precision in counted.into_iter().chain(with_lines_behind) {
        check_store(&store(512, 256, precision), &precision.into(), &[30, 70, 130, 260], &[Place::Vram]);
    }
    for precision in [Precision::Nvfp4, Precision::Mxfp4, Precision::uint4(64), Precision::fp8(64)] {
        check_store(&store(576, 320, precision), &precision.into(), &[30, 70], &[Place::Vram]);
    }
}

#[test]
fn many_experts_of_uneven_popularity() {
    need_gpu!();
    // More pieces than an H200 has multiprocessors, experts with none, one and several of them, not whole warps of
    // experts.
    const MANY: usize = 300;
    let store = store_with(MANY, ExpertKind::Gated, 64, 32, Precision::Mxfp4);
    let b = &Sides::new().gpu;
    let sizes = Sizes { tokens: MAX_TOKENS, cpu_tokens: 1, top_k: TOP_K, resident: MANY, ..NONE_HELD };
    let mut experts = share_of(b, &store, Place::Vram, sizes);
    for (tokens, layer) in [(100, 0), (MAX_TOKENS, 1)] {
        let first = random(tokens, 80).into_iter().map(|n| ((n * n * n).abs() * MANY as f32) as i32);
        let ids: Vec<_> = first.flat_map(|id| [id, id + 1, (id + 150) % MANY as i32]).collect();
        let routing = Routing { top_k: TOP_K, weights: random(ids.len(), 81), ids };
        let x = random(tokens * 64, 82);
        let what = format!("{tokens} tokens of {MANY} experts");
        check(&what, &run(b, &mut experts, layer, &x, &routing, 0.0), &naive(&store, layer, &x, &routing), ROUNDED);
    }
}

#[test]
fn matrices_that_take_inputs_in_different_orders() {
    need_gpu!();
    // With 20 tokens of an expert only groups of 16 inputs have them dealt out: gate and up alone, then down alone.
    let layer = |gate, down| ExpertPrecision { gate, down };
    let (groups_of_16, of_32) = (Precision::Iq2Xs, Precision::Q4K);
    let layers: Precisions = [layer(groups_of_16, of_32), layer(of_32, groups_of_16)].into_iter().collect();
    check_store(&store(256, 256, layers.clone()), &layers, &[42, 42], &[Place::Vram, Place::Streamed]);
}

#[test]
fn every_row() {
    need_gpu!();
    for &(precision, hidden, intermediate) in ROWS {
        check_all((precision.into(), hidden, intermediate), &[2, 6, 70]);
    }
}

#[test]
fn few_tokens_of_long_rows() {
    need_gpu!();
    let check = |precision: Precision, hidden, intermediate, tokens: &[usize]| {
        check_store(&store(hidden, intermediate, precision), &precision.into(), tokens, &[Place::Vram]);
    };
    // A warp has three or four units of 64 inputs, the last one of short groups half beyond the row.
    for &(precision, hidden, intermediate) in FORMATS.iter().chain(ROWS) {
        let group = 1 << (hidden | intermediate).trailing_zeros();
        let more = if group < 128 { group } else { 0 };
        check(precision, 768 + more, 256, &[3]);
    }
    // More units than have room in shared memory at a time; in `down`, warps whose units are of several experts.
    // Groups of 128 are spans: of 35 and 11 of them rounds and tiles end anywhere in a warp's run.
    let long_rows = [
        (Precision::int4(32), 4128, 32),
        (Precision::Q5K, 2304, 256),
        (Precision::int4(128), 4480, 128),
        (Precision::int8(128), 1408, 128),
    ];
    for (precision, long, short) in long_rows {
        check(precision, long, short, &[1, 4]);
        check(precision, short, long, &[1, 4]);
    }
}

#[test]
fn experts_without_a_gate() {
    need_gpu!();
    for (precision, hidden, intermediate) in formats() {
        // Of whole pairs of tiles.
        if intermediate % 32 == 0 {
            let store = store_of(ExpertKind::Ungated, hidden, intermediate, precision.clone());
            check_store(&store, &precision, &[3, 5, 50, 300], PLACES);
        }
    }
}

#[test]
fn parts_of_the_width_add_up_to_all_of_it() {
    need_gpu!();
    let b = &Sides::new().gpu;
    // Parts of other widths: one and two units of three.
    for (precision, hidden, width) in [
        (Precision::Q4K, 256, 768),
        (Precision::Nvfp4, 96, 96),
        (Precision::Fp8 { group_size: 32, scales: ScaleType::F32 }, 96, 96),
    ] {
        let store = store(hidden, width, precision);
        let part = |rank| {
            let share = Share { rank, of: 2 };
            let sizes =
                Sizes { tokens: 64, cpu_tokens: 8, top_k: TOP_K, resident: EXPERTS, ring: 0, share, ..NONE_HELD };
            share_of(b, &store, Place::Vram, sizes)
        };
        let mut parts = [part(0), part(1)];
        for tokens in [3, 12, 60] {
            let (x, routing) = (random(tokens * hidden, 90), routing(tokens, 91));
            let [first, second] = parts.each_mut().map(|part| run(b, part, 1, &x, &routing, 0.0));
            let sum: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
            check(&format!("{precision}, {tokens} tokens"), &sum, &naive(&store, 1, &x, &routing), ROUNDED);
        }
    }
}

/// Two experts in VRAM, and so many of each layer on other GPUs; `streamed`: the others cross the link.
fn beside(b: &CudaBackend, store: &Arc<ExpertCache>, held: &[usize], streamed: bool) -> GpuExperts {
    let (place, ring) = if streamed { (Place::Streamed, 2) } else { (Place::Cpu, 0) };
    let sizes = Sizes {
        tokens: MAX_TOKENS,
        cpu_tokens: MAX_TOKENS,
        top_k: TOP_K,
        resident: 2,
        ring,
        holders: held.len(),
        on_holders: held.iter().sum(),
        ..NONE_HELD
    };
    let mut experts = share_of(b, store, place, sizes);
    for (i, n) in held.iter().enumerate() {
        experts.hold(Cuda::open(i + 1).unwrap(), *n, (ring, 1e12)).unwrap();
    }
    experts
}

#[test]
fn experts_that_other_gpus_hold() {
    need_gpu!(gpus() < 3, "it takes three GPUs");
    let b = &Sides::new().gpu;
    for &(precision, hidden, intermediate) in [&FORMATS[0], &FORMATS[10]] {
        let store = store(hidden, intermediate, precision);
        let mut reference = on_cpu(&store);
        for (held, streamed) in [(&[5][..], false), (&[2, 3], false), (&[3], false), (&[1, 2], true), (&[1], true)] {
            let (mut experts, mut again) = (beside(b, &store, held, streamed), beside(b, &store, held, streamed));
            for (i, tokens) in [1, 3, 12, 50, 2, 300].into_iter().enumerate() {
                let layer = i % LAYERS;
                let what = format!("{precision}, {held:?} held, {tokens} tokens");
                let (x, routing) = (random(tokens * hidden, 60 + i as u64), routing(tokens, 70 + i as u64));
                let got = run(b, &mut experts, layer, &x, &routing, 0.0);
                let want = run_on_cpu(&mut reference, layer, &x, &routing);
                let rows = got.chunks(hidden).zip(want.chunks(hidden)).enumerate();
                for (t, (got, want)) in rows.filter(|(_, (_, want))| want.iter().any(|&w| w != 0.0)) {
                    let cosine = cosine(got, want);
                    assert!(cosine >= 0.999, "{what}, token {t}: cosine {cosine} with the CPU's");
                }
                if held.iter().sum::<usize>() + 2 == EXPERTS {
                    check(&what, &got, &naive(&store, layer, &x, &routing), ROUNDED);
                }
                assert_eq!(run(b, &mut again, layer, &x, &routing, 0.0), got, "{what}: other bits in another run");
            }
            assert_eq!(experts.copied_beside() > 0, streamed, "{precision}, {held:?}: what crossed other links");
        }
    }
}

#[test]
fn a_holder_that_fails_ends_the_pass() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    if common::gpu::device() == Some("a GPU") {
        return eprintln!("skipped: a GPU that has failed is of no use to other tests");
    }
    let b = &Sides::new().gpu;
    let (precision, hidden, intermediate) = FORMATS[0];
    let store = store(hidden, intermediate, precision);
    let other = Cuda::open(1).unwrap();
    b.cuda().enter_thread().unwrap();
    let sizes = Sizes { holders: 1, on_holders: 5, resident: 2, tokens: 16, cpu_tokens: 16, top_k: TOP_K, ..NONE_HELD };
    let mut experts = share_of(b, &store, Place::Cpu, sizes);
    experts.hold(other.clone(), 5, (0, 0.0)).unwrap();
    let (x, routing) = (random(3 * hidden, 90), routing(3, 91));
    run(b, &mut experts, 0, &x, &routing, 0.0);
    let (tokens, routing) = (b.filled(hidden, &x), on_device(b, &routing, hidden));
    let mut out = b.filled_f32(hidden, &vec![0.0; x.len()]);
    // The other's stream, of a thread whose device it is not.
    other.upload(&other.compute, moebius::cuda::Address::<u8>::of_another(64), &[0]);
    let since = Instant::now();
    let error = loop {
        let ran = experts.submit(0, &tokens, &routing).and_then(|()| experts.finish(&mut out));
        match ran.and_then(|()| b.cuda().synchronize()) {
            Err(error) => break error.to_string(),
            Ok(()) => assert!(since.elapsed() < Duration::from_secs(5), "nobody has said that a holder failed"),
        }
    };
    assert!(error.contains("a GPU that holds experts has failed"), "{error}");
}

#[test]
fn what_was_there_stays() {
    need_gpu!();
    let b = &Sides::new().gpu;
    let (precision, hidden, intermediate) = FORMATS[0];
    let store = store(hidden, intermediate, precision);
    for &place in PLACES {
        let mut experts = placed(b, &store, place);
        for tokens in [2, 40] {
            let (x, routing) = (random(tokens * hidden, 80), routing(tokens, 81));
            let (from_zero, from_more) =
                (run(b, &mut experts, 0, &x, &routing, 0.0), run(b, &mut experts, 0, &x, &routing, 64.0));
            // 64 leaves 2^-18 of its 24 bits.
            let off = from_zero.iter().zip(&from_more).map(|(a, b)| (a + 64.0 - b).abs()).fold(0.0, f32::max);
            assert!(off <= 2f32.powi(-17), "{place:?}, {tokens} tokens: off by {off}");
            let nobody = Routing { ids: vec![-1; tokens * TOP_K], ..routing };
            assert_eq!(
                run(b, &mut experts, 0, &x, &nobody, 0.5),
                vec![0.5; x.len()],
                "{place:?}, {tokens} tokens: nothing is added"
            );
        }
    }
}

#[test]
fn only_chosen_experts_cross() {
    need_gpu!();
    let sides = Sides::new();
    let (precision, hidden, intermediate) = FORMATS[0];
    let store = store(hidden, intermediate, precision);
    let mut experts = placed(&sides.gpu, &store, Place::Streamed);
    let bytes = store.layout(0).bytes() as u64;
    // One of the three choices is an expert.
    run(&sides.gpu, &mut experts, 0, &random(hidden, 50), &routing(1, 51), 0.0);
    assert_eq!(experts.traffic().link, bytes, "one token");
    let before = experts.traffic();
    run(&sides.gpu, &mut experts, 0, &random(20 * hidden, 52), &routing(20, 53), 0.0);
    assert!(
        experts.traffic().since(before).link >= EXPERTS as u64 * bytes,
        "twenty tokens choose nearly all, which cross before the routing is known"
    );
}
