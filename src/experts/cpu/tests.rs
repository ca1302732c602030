//! The executor against plain f32 arithmetic on the dequantized weights, and against itself: batches, threads, kernels.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::pack::{MatrixLayout, Row, Scales, TILE_ROWS, Weights, pack_matrix, unpack_expert};
use moebius_cache::quantize::quantize_matrix;

use super::*;
use crate::kernel::{self, Simd};
use crate::machine::topology::{Seat, Topology};

const EXPERTS: usize = 7;
const LAYERS: usize = 2;
const TOP_K: usize = 3;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// From -1 to 1.
    fn uniform(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

fn store(hidden: usize, intermediate: usize, precision: Precision) -> Arc<ExpertCache> {
    let layers: Vec<usize> = (0..LAYERS).collect();
    let contents = Contents {
        model: "random",
        hidden,
        intermediate,
        num_experts: EXPERTS,
        kind: Default::default(),
        precision: precision.into(),
        layers: &layers,
    };
    let layout = ExpertLayout::new(hidden, intermediate, precision).unwrap();
    let cache = ExpertCache::anonymous(&contents, |layer, expert, bytes| {
        let mut random = Random((7 + layer * EXPERTS + expert) as u64);
        for i in 0..layout.gate.tiles() {
            for at in [layout.gate_tile(i), layout.up_tile(i)] {
                fill(&layout.gate, i, &mut bytes[at..][..layout.gate.tile_bytes()], &mut random);
            }
        }
        for i in 0..layout.down.tiles() {
            fill(&layout.down, i, &mut bytes[layout.down_tile(i)..][..layout.down.tile_bytes()], &mut random);
        }
    });
    Arc::new(cache.unwrap())
}

fn fill(layout: &MatrixLayout, tile: usize, bytes: &mut [u8], random: &mut Random) {
    let rows = (layout.n - tile * TILE_ROWS).min(TILE_ROWS);
    if layout.precision == Precision::Bf16 {
        let weights: Vec<bf16> = (0..rows * layout.k).map(|_| bf16::from_f32(random.uniform() * 0.1)).collect();
        pack_matrix(&MatrixLayout { n: rows, ..*layout }, Weights::Bf16(&weights), bytes);
        return;
    }
    if let Some(Row { scales: scales @ Scales::Odd { .. }, .. }) = layout.precision.row() {
        // Any bits are weights.
        bytes.fill_with(|| random.next() as u8);
        let largest = f32::from(layout.precision.codes().unwrap().range()[1]) * 4.0;
        for group in 0..layout.k / layout.precision.group_size().unwrap() {
            let (_, head) = scales.at(group, layout.precision.group_size().unwrap());
            for (row, d) in bytes[head..head + scales.head_bytes()].chunks_exact_mut(2).enumerate() {
                let value = if row < rows { 0.1 / largest * (1.5 + random.uniform()) } else { 0.0 };
                d.copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
        }
        return;
    }
    if layout.precision.row().is_some_and(|row| row.scales != Scales::Plain || row.codes.are_floats()) {
        let weights: Vec<f32> = (0..rows * layout.k).map(|_| random.uniform() * 0.1).collect();
        return quantize_matrix(&MatrixLayout { n: rows, ..*layout }, &weights, bytes);
    }
    let (scales, codes) = bytes.split_at_mut(layout.scale_bytes());
    let unit = layout.precision.codes().map_or(0.0, |codes| -0.1 / f32::from(codes.range()[0]));
    let groups = layout.k / layout.precision.group_size().unwrap();
    for (i, scale) in scales[..groups * 32].chunks_exact_mut(2).enumerate() {
        let scale_value = if i % TILE_ROWS < rows { unit * (1.5 + random.uniform()) } else { 0.0 };
        scale.copy_from_slice(&(layout.precision.scales().to_bits(scale_value) as u16).to_le_bytes());
    }
    codes.fill_with(|| random.next() as u8);
}

fn dims(precision: Precision) -> (usize, usize) {
    // Rows that do not fill their last tile, and widths that do not fill their last block, where the group size allows.
    match precision.unit() {
        1 => (76, 168),
        32 => (160, 352),
        256 => (512, 256),
        _ => (256, 128),
    }
}

fn inputs(tokens: usize, hidden: usize) -> (Vec<f32>, Routing) {
    let mut random = Random(99);
    let x = (0..tokens * hidden).map(|_| random.uniform()).collect();
    let mut ids: Vec<i32> = Vec::new();
    for _ in 0..tokens {
        let first = random.next() as i32 % EXPERTS as i32;
        ids.extend((0..TOP_K as i32).map(|j| (first + 2 * j) % EXPERTS as i32));
    }
    ids[1] = -1;
    ids[2] = EXPERTS as i32;
    let weights = ids.iter().map(|_| 0.5 + 0.4 * random.uniform()).collect();
    (x, Routing { top_k: TOP_K, ids, weights })
}

/// Whether worker 0 comes late to its columns of `down`, so that others help it.
static IS_LATE: AtomicBool = AtomicBool::new(false);

pub(super) fn come_late(worker: usize) {
    if worker == 0 && IS_LATE.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn executor(store: Arc<ExpertCache>, threads: usize, simd: Simd) -> CpuExperts {
    let team = Team::new(&Topology::read().worker_cpus(threads)).unwrap();
    let (memory, kernel) = (Arc::new(ExpertMemory::mapped(store)), kernel::get(simd).unwrap());
    CpuExperts::new(&Heap::default(), memory, Arc::new(team), kernel, 150 * TOP_K).unwrap()
}

/// With so many workers on each of some nodes, and a slice of the experts beside each.
fn on_nodes(store: &Arc<ExpertCache>, workers: &[usize]) -> CpuExperts {
    let cpus = Topology::read().worker_cpus(workers.iter().sum());
    let nodes = workers.iter().enumerate().flat_map(|(node, &count)| std::iter::repeat_n(node, count));
    let seats = cpus.into_iter().zip(nodes).enumerate();
    let seats: Vec<Seat> = seats.map(|(turn, (cpu, node))| Seat { cpu, node, turn }).collect();
    let team = Arc::new(Team::on_nodes(&seats).unwrap());
    let memory = ExpertMemory::copied(store.clone(), &team, &[], &|_, _| ()).unwrap();
    CpuExperts::new(&Heap::default(), Arc::new(memory), team, kernel::best(), 150 * TOP_K).unwrap()
}

fn run(executor: &mut CpuExperts, layer: usize, x: &[f32], routing: &Routing) -> Vec<u32> {
    let mut out: Vec<f32> = x.iter().map(|v| v * 0.25).collect();
    executor.submit_rows(layer, x, routing).unwrap();
    executor.finish_rows(&mut out).unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn agrees_with_f32_on_the_dequantized_weights() {
    for precision in Precision::all() {
        let (hidden, intermediate) = dims(precision);
        let store = store(hidden, intermediate, precision);
        let layout = store.layout(0);
        let (x, routing) = inputs(9, hidden);
        let experts: Vec<_> = (0..EXPERTS).map(|e| unpack_expert(&layout, store.expert(1, e))).collect();
        let mut expected: Vec<f32> = x.iter().map(|v| v * 0.25).collect();
        for (i, (&id, &weight)) in routing.ids.iter().zip(&routing.weights).enumerate() {
            if !(0..EXPERTS as i32).contains(&id) {
                continue;
            }
            let token = i / TOP_K;
            let [gate, up, down] = &experts[id as usize];
            let x = &x[token * hidden..][..hidden];
            let times = |w: &[f32], x: &[f32]| -> Vec<f32> {
                w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
            };
            let h: Vec<f32> =
                times(gate, x).iter().zip(times(up, x)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            for (out, y) in expected[token * hidden..][..hidden].iter_mut().zip(times(down, &h)) {
                *out += weight * y;
            }
        }
        let got: Vec<f32> = run(&mut executor(store, 2, kernel::best().simd()), 1, &x, &routing)
            .into_iter()
            .map(f32::from_bits)
            .collect();
        // Without the residual, which would hide an error.
        let part = |out: &[f32]| -> Vec<f64> { out.iter().zip(&x).map(|(o, x)| f64::from(o - x * 0.25)).collect() };
        let (a, b) = (part(&got), part(&expected));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cosine = dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt();
        let enough = if precision == Precision::Bf16 { 0.999_999 } else { 0.9995 };
        assert!(cosine > enough, "{precision}: cosine {cosine}");
        assert!((dot(&a, &a) / dot(&b, &b)).sqrt() > 0.99);
    }
}

#[test]
fn bits_depend_on_neither_kernel_nor_threads() {
    for precision in Precision::all() {
        let (hidden, intermediate) = dims(precision);
        let store = store(hidden, intermediate, precision);
        for tokens in [1, 3, 70] {
            let (x, routing) = inputs(tokens, hidden);
            let mut truth = executor(store.clone(), 1, Simd::Scalar);
            let expected = run(&mut truth, 0, &x, &routing);
            for simd in kernel::available() {
                // The scalar kernel is slow, and many tokens are what it is the truth of.
                let (teams, rounds) = match (simd, tokens) {
                    (Simd::Scalar, 70) => (&[][..], 0),
                    (Simd::Scalar, _) => (&[3][..], 1),
                    _ => (&[1, 2, 3, 5][..], 3),
                };
                for &threads in teams {
                    let mut executor = executor(store.clone(), threads, simd);
                    for _ in 0..rounds {
                        assert_eq!(
                            run(&mut executor, 0, &x, &routing),
                            expected,
                            "{precision}, {tokens} tokens, {simd}, {threads} threads"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_nodes() {
    for precision in Precision::all() {
        let (hidden, intermediate) = dims(precision);
        let store = store(hidden, intermediate, precision);
        for tokens in [1, 70] {
            let (x, routing) = inputs(tokens, hidden);
            let expected = run(&mut executor(store.clone(), 1, kernel::best().simd()), 1, &x, &routing);
            // As many slices as tiles and more among them: some nodes hold nothing.
            for workers in [&[1, 1][..], &[1, 3], &[2, 1, 1], &[1; 8]] {
                let mut executor = on_nodes(&store, workers);
                for _ in 0..3 {
                    assert_eq!(
                        run(&mut executor, 1, &x, &routing),
                        expected,
                        "{precision}, {tokens} tokens, {workers:?} workers"
                    );
                }
            }
        }
    }
}

#[test]
fn a_batch_equals_its_tokens_one_by_one() {
    for precision in Precision::all() {
        let (hidden, intermediate) = dims(precision);
        let mut executor = executor(store(hidden, intermediate, precision), 2, kernel::best().simd());
        let (x, routing) = inputs(150, hidden);
        let all = run(&mut executor, 0, &x, &routing);
        for _ in 0..20 {
            assert_eq!(run(&mut executor, 0, &x, &routing), all);
        }
        for token in 0..150 {
            let pairs = token * TOP_K..(token + 1) * TOP_K;
            let one = Routing {
                top_k: TOP_K,
                ids: routing.ids[pairs.clone()].to_vec(),
                weights: routing.weights[pairs].to_vec(),
            };
            let row = token * hidden..(token + 1) * hidden;
            assert_eq!(run(&mut executor, 0, &x[row.clone()], &one), all[row], "{precision}, token {token}");
        }
    }
}

#[test]
fn nothing_routed_adds_nothing() {
    let mut executor = executor(store(256, 128, Precision::int4(64)), 2, Simd::Scalar);
    let x = vec![1.0; 256];
    let none = Routing { top_k: 1, ids: vec![-1], weights: vec![1.0] };
    assert_eq!(run(&mut executor, 0, &x, &none), vec![0.25f32.to_bits(); 256]);
    assert_eq!(run(&mut executor, 0, &[], &Routing { top_k: 1, ..Routing::default() }), Vec::<u32>::new());
    assert_eq!(executor.traffic().total(), 0);
}

#[test]
fn what_is_foreseen_changes_no_bit() {
    let store = store(256, 128, Precision::int4(64));
    let (layer, (x, routing)) = (1, inputs(9, 256));
    for workers in [&[1][..], &[3], &[17], &[2, 3], &[1, 1, 1]] {
        let mut executor = on_nodes(&store, workers);
        let want = run(&mut executor, layer, &x, &routing);
        // Right and wrong ones, some twice; in time, or too late.
        for (guess, is_over) in [
            (vec![2, 2, 4], false),
            (vec![6, 5, 4, 3, 2, 1, 0], false),
            (vec![2, 4], true),
            (vec![-1, EXPERTS as i32], false),
        ] {
            let (asks, before) = (guess[0] >= 0 && !is_over, executor.traffic());
            executor.foresee(layer, guess.into_iter(), &|| is_over);
            assert_eq!(run(&mut executor, layer, &x, &routing), want, "{workers:?} workers");
            assert_eq!(executor.traffic().since(before).ahead > 0, asks);
        }
        let chosen = executor.traffic().foreseen;
        let (hits, all) = (2 + EXPERTS as u64 + 2, 3 * EXPERTS as u64);
        assert_eq!((chosen.hits, chosen.misses), (hits, all - hits));
        // What was foreseen of one layer says nothing of another.
        executor.foresee(0, [0].into_iter(), &|| false);
        assert_eq!(run(&mut executor, layer, &x, &routing), want);
        assert_eq!(executor.traffic().foreseen, chosen);
        // One token, and guesses of any kind.
        let mut random = Random(5);
        for _ in 0..200 {
            let first = random.next();
            let ids: Vec<i32> = (0..1 + first % 4).map(|i| ((first + 2 * i) % EXPERTS as u64) as i32).collect();
            let guess: Vec<i32> = (0..random.next() % 9).map(|_| random.next() as i32 % EXPERTS as i32).collect();
            let one = Routing { top_k: ids.len(), weights: vec![0.5; ids.len()], ids };
            let want = run(&mut executor, layer, &x[..256], &one);
            executor.foresee(layer, guess.into_iter(), &|| false);
            assert_eq!(run(&mut executor, layer, &x[..256], &one), want, "{workers:?} workers");
        }
        // Steps of many tokens do without.
        let before = executor.traffic();
        executor.begin_step(150, 0);
        executor.foresee(layer, [1].into_iter(), &|| false);
        assert_eq!(executor.traffic().since(before).ahead, 0);
    }
}

/// Biases that depend on name and place, as gpt-oss names them.
struct Biases;

impl crate::backend::source::TensorSource for Biases {
    fn matrix(&self, _: &str, _: usize, _: usize) -> Result<crate::backend::tensor::HostTensor<'_>> {
        unreachable!("experts have biases only")
    }

    fn vector(&self, name: &str, len: usize) -> Result<crate::backend::tensor::HostTensor<'_>> {
        let mut random = Random(name.bytes().map(u64::from).sum());
        Ok((0..len).map(|_| random.uniform()).collect::<Vec<_>>().into())
    }
}

#[test]
fn biases_and_the_clamp_are_those_of_f32_and_change_no_invariant() {
    let (hidden, width) = dims(Precision::Bf16);
    let config = serde_json::json!({"model_type": "gpt_oss", "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": LAYERS, "num_attention_heads": 1, "head_dim": 4, "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "vocab_size": 8, "max_position_embeddings": 8, "swiglu_limit": 0.5});
    let model = crate::model::families::parse(&config.to_string()).unwrap();
    let heap = Heap::default();
    let epilogue = || Epilogue::load(&heap, &Biases, &model).unwrap();
    epilogue();
    assert_eq!(heap.bytes(), (4 * LAYERS * EXPERTS * (2 * width + hidden)) as u64);
    let store = store(hidden, width, Precision::Bf16);
    let (x, routing) = inputs(9, hidden);
    let own = |part: &str, len: usize| {
        use crate::backend::source::TensorSource;
        Biases.vector(&format!("model.layers.1.mlp.experts.{part}_bias"), EXPERTS * len).unwrap().to_f32().into_owned()
    };
    let (both, down_bias) = (own("gate_up_proj", 2 * width), own("down_proj", hidden));
    let mut expected: Vec<f32> = x.iter().map(|v| v * 0.25).collect();
    for (i, (&id, &weight)) in routing.ids.iter().zip(&routing.weights).enumerate() {
        if !(0..EXPERTS as i32).contains(&id) {
            continue;
        }
        let (token, e) = (i / TOP_K, id as usize);
        let [gate, up, down] = unpack_expert(&store.layout(0), store.expert(1, e));
        let dot =
            |w: &[f32], x: &[f32], r: usize| w[r * x.len()..][..x.len()].iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        let x = &x[token * hidden..][..hidden];
        let h: Vec<f32> = (0..width)
            .map(|r| {
                let g = (dot(&gate, x, r) + both[e * 2 * width + 2 * r]).min(0.5);
                let u = (dot(&up, x, r) + both[e * 2 * width + 2 * r + 1]).clamp(-0.5, 0.5);
                (u + 1.0) * g / (1.0 + (-1.702 * g).exp())
            })
            .collect();
        for r in 0..hidden {
            expected[token * hidden + r] += weight * (dot(&down, &h, r) + down_bias[e * hidden + r]);
        }
    }
    let run = |threads, simd, x: &[f32], routing: &Routing| {
        run(&mut executor(store.clone(), threads, simd).with(epilogue()), 1, x, routing)
    };
    let truth = run(1, Simd::Scalar, &x, &routing);
    for (got, want) in truth.iter().map(|&bits| f32::from_bits(bits)).zip(&expected) {
        assert!((got - want).abs() < 2e-4 * (1.0 + want.abs()), "{got} instead of {want}");
    }
    for simd in kernel::available() {
        assert_eq!(run(3, simd, &x, &routing), truth, "{simd}");
    }
    let last = 8 * TOP_K..9 * TOP_K;
    let one =
        Routing { top_k: TOP_K, ids: routing.ids[last.clone()].to_vec(), weights: routing.weights[last].to_vec() };
    assert_eq!(run(2, kernel::best().simd(), &x[8 * hidden..], &one), truth[8 * hidden..], "alone");
}

#[test]
fn exactly_the_chosen_experts_are_wanted_and_before_they_are_read() {
    let (hidden, intermediate) = dims(Precision::Bf16);
    let store = store(hidden, intermediate, Precision::Bf16);
    let routing = |ids: [i32; TOP_K]| Routing { top_k: TOP_K, ids: ids.to_vec(), weights: vec![1.0; TOP_K] };
    let mut experts = executor(store.clone(), 2, Simd::Scalar);
    let memory = experts.memory().clone();
    let mut submit = |layer, ids| experts.submit_rows(layer, &vec![0.5; hidden], &routing(ids)).unwrap();
    submit(1, [5, -1, 2]);
    assert_eq!([memory.wanted(0), memory.wanted(1)], [vec![], vec![2, 5]]);
    submit(1, [2, 3, EXPERTS as i32]);
    assert_eq!([memory.wanted(0), memory.wanted(1)], [vec![], vec![2, 3, 5]]);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "before it is wanted")]
fn bytes_that_nobody_wanted_are_not_read() {
    let (hidden, intermediate) = dims(Precision::Bf16);
    let _ = ExpertMemory::mapped(store(hidden, intermediate, Precision::Bf16)).check_expert(0, 3);
}

#[test]
fn each_row_is_given_once_alone_and_by_the_team() {
    let experts = executor(store(76, 40, Precision::Bf16), 3, Simd::Scalar);
    let cols = 100;
    for rows in [1, 7, PARALLEL_VALUES / cols, PARALLEL_VALUES / cols + 1, 4 * PARALLEL_VALUES / cols] {
        let mut values = vec![0; rows * cols];
        experts.each_row(&mut values, cols, |t, row| row.iter_mut().for_each(|value| *value += t + 1));
        assert!(values.iter().enumerate().all(|(i, &value)| value == i / cols + 1), "{rows} rows");
    }
}

#[test]
fn who_is_late_is_helped_and_gets_the_same_bits() {
    let precision = Precision::Bf16;
    let (hidden, intermediate) = dims(precision);
    let store = store(hidden, intermediate, precision);
    // Pairs of the last two: less and more than are added up by columns.
    for tokens in [1, 5, 85, 87] {
        let (x, routing) = inputs(tokens.max(2), hidden);
        let run = |threads: usize| {
            let mut executor = executor(store.clone(), threads, Simd::Scalar);
            let mut out = vec![0.25; x.len()];
            executor.submit_rows(1, &x, &routing).unwrap();
            executor.finish_rows(&mut out).unwrap();
            out
        };
        let alone = run(1);
        IS_LATE.store(true, Relaxed);
        let together = [2, 3, 9].map(run);
        IS_LATE.store(false, Relaxed);
        assert!(together.iter().all(|out| *out == alone), "{tokens} tokens");
    }
}
