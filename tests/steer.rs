//! Steering and capture: against HF transformers with hooks, and beside other requests in one engine, whose bits must
//! not change.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::engine::{again, greedy, prompt, read, seeded};
use common::{cache_dir, demo_dir, fixture_dir, folder, worst_row};
use moebius::backend::Routing;
use moebius::backend::batch::BLOCK_SIZE;
use moebius::config::{DenseBits, EngineConfig, ExpertBits, KvBits};
use moebius::engine::capture::{Wanted, capture};
use moebius::engine::{
    self, CaptureWanted, EngineHandle, Event, Events, FinishReason, HookPoint, Layers, Positions, Request,
    RequestStats, Steer,
};
use moebius::load::{self, Loaded};
use moebius::{Error, Result};
use safetensors::SafeTensors;

/// Two engines on two cores only disturb each other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> EngineConfig {
    EngineConfig {
        cache_dir: Some(cache_dir()),
        threads: Some(2),
        max_context: Some(1024),
        max_batch_tokens: Some(192),
        ..Default::default()
    }
}

fn started(dir: &std::path::Path, config: &EngineConfig, change: impl FnOnce(&mut Loaded)) -> EngineHandle {
    let mut loaded = load::load(&folder("test", dir), config, &|_| {}).unwrap();
    change(&mut loaded);
    engine::start_loaded("test", loaded, config, Vec::new(), Instant::now()).unwrap()
}

fn start(model: &str) -> EngineHandle {
    started(&demo_dir(model), &config(), |_| {})
}

/// A vector of the model's width, of the size of what is in its residual stream.
fn vector(engine: &EngineHandle, seed: u32) -> Arc<[f32]> {
    (0..engine.info().hidden_size as u32).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn from_to(start: usize, end: usize) -> Positions {
    Positions::Some(vec![Range { start, end }])
}

fn steer(engine: &EngineHandle, layer: usize, seed: u32, coefficient: f32, positions: Positions) -> Steer {
    Steer { layer, vector: vector(engine, seed), coefficient, positions }
}

fn steered(request: Request, steer: Vec<Steer>) -> Request {
    Request { steer, ..request }
}

fn everything(request: Request) -> Request {
    let capture = CaptureWanted { layers: Layers::All, positions: Positions::All, logits: true, router: true };
    Request { capture: Some(capture), ..request }
}

/// Tokens, and by kind: positions and rows, in the order in which they came.
type Received = (Vec<u32>, BTreeMap<HookPoint, (Vec<usize>, Vec<f32>)>, Result<(FinishReason, RequestStats)>);

fn received(mut events: Events) -> Received {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (mut tokens, mut rows) = (Vec::new(), BTreeMap::<_, (Vec<usize>, Vec<f32>)>::new());
    runtime.block_on(async {
        loop {
            let event =
                tokio::time::timeout(Duration::from_secs(60), events.recv()).await.expect("an event within a minute");
            match event.expect("a last event") {
                Event::Token(token) => tokens.push(token.id),
                Event::Captured(captured) => {
                    let (positions, all) = rows.entry(captured.what).or_default();
                    positions.extend(captured.position..captured.position + captured.count);
                    all.extend(pairs(captured.rows, &captured.experts));
                }
                Event::Done(reason, stats) => return (tokens, rows, Ok((reason, stats))),
                Event::Failed(error) => return (tokens, rows, Err(error)),
            }
        }
    })
}

/// Rows as they are; of a router each weight and its expert.
fn pairs(rows: Vec<f32>, experts: &[i32]) -> Vec<f32> {
    match experts.is_empty() {
        true => rows,
        false => rows.into_iter().zip(experts).flat_map(|(weight, &expert)| [weight, expert as f32]).collect(),
    }
}

fn ask(engine: &EngineHandle, request: Request) -> Received {
    let received = received(engine.submit(request).unwrap());
    assert!(received.2.is_ok(), "{:?}", received.2);
    received
}

fn answer(engine: &EngineHandle, request: Request) -> Vec<u32> {
    ask(engine, request).0
}

/// What `tests/fixtures/steer.py` wrote: several vectors, layers and positions at once.
#[test]
fn as_hooks_of_transformers() {
    let _alone = alone();
    let exact = EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, kv: KvBits::Bf16x2, ..config() };
    for name in ["qwen3_moe", "deepseek_v2_lite"] {
        let engine = started(&fixture_dir(name), &exact, |_| {});
        let hidden = engine.info().hidden_size;
        let file = std::fs::read(fixture_dir(name).join("reference_steered.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let ints = |name: &str| -> Vec<usize> {
            file.tensor(name)
                .unwrap()
                .data()
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as usize)
                .collect()
        };
        let floats = |name: &str| -> Vec<f32> {
            file.tensor(name)
                .unwrap()
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        };
        let tokens: Vec<u32> = ints("input_ids").iter().map(|&t| t as u32).collect();
        let vectors: Vec<Arc<[f32]>> = floats("vectors").chunks(hidden).map(Arc::from).collect();
        let places = ints("steers");
        let steers = places.chunks(4).zip(floats("coefficients")).map(|(at, coefficient)| Steer {
            layer: at[0],
            vector: vectors[at[1]].clone(),
            coefficient,
            positions: from_to(at[2], at[3]),
        });
        let (n, request) = (tokens.len(), everything(steered(greedy(tokens, 0), steers.collect())));
        let (said, rows, _) = ask(&engine, request);
        assert!(said.is_empty());
        let logits = floats("logits");
        let vocab = engine.info().vocab_size;
        let kept = logits.len() / vocab;
        let last = |what: HookPoint, cols: usize| {
            let (positions, rows) = &rows[&what];
            assert_eq!(*positions, (0..n).collect::<Vec<_>>());
            rows[(n - kept) * cols..].to_vec()
        };
        // As far as tests/oracle.rs allows without steering.
        let error = worst_row(&last(HookPoint::Logits, vocab), &logits, vocab);
        assert!(error < 1e-4, "{name}: logits off by {error}");
        for (layer, want) in floats("hidden_states").chunks(kept * hidden).enumerate() {
            let error = worst_row(&last(HookPoint::Hidden(layer), hidden), want, hidden);
            assert!(error < 1e-4, "{name}: hidden state after layer {layer} off by {error}");
        }
    }
}

/// What the engine emits in parts, beside others, while it answers, has the bits of one pass over prompt and answer;
/// plain text is unchanged by being captured.
#[test]
fn captured_beside_others_as_in_one_pass() {
    let _alone = alone();
    for model in ["moe-gqa", "moe-mla"] {
        let mut loaded = load::load(&folder("test", &demo_dir(model)), &config(), &|_| {}).unwrap();
        let wanted = Wanted { logits: true, hidden: Some(Layers::All), router: true };
        let engine = start(model);
        for round in 0..2 {
            let requests: Vec<_> = [1, 300, 64, 5, 129].iter().map(|&n| greedy(prompt(n, n as u32), 20)).collect();
            let events: Vec<_> = requests
                .iter()
                .map(|request| {
                    (engine.submit(again(request)).unwrap(), engine.submit(everything(again(request))).unwrap())
                })
                .collect();
            for (request, (plain, captured)) in requests.iter().zip(events) {
                let (tokens, rows, end) = received(captured);
                assert_eq!(end.unwrap().1.cached_tokens, 0, "what is captured is computed, in round {round} too");
                assert_eq!(tokens, read(plain).0);
                // The last token is never read.
                let text = [&request.prompt[..], &tokens[..tokens.len() - 1]].concat();
                let whole = capture(&mut loaded, &text, &wanted, 192).unwrap();
                let positions: Vec<_> = (0..text.len()).collect();
                assert_eq!(rows.len(), engine.info().layers + 1 + whole.router.len());
                for (what, (at, rows)) in rows {
                    let routed;
                    let want = match what {
                        HookPoint::Hidden(layer) => &whole.hidden[&layer],
                        HookPoint::Logits => &whole.logits,
                        HookPoint::Router(layer) => {
                            let Routing { ids, weights, .. } = &whole.router[&layer];
                            routed = pairs(weights.clone(), ids);
                            &routed
                        }
                    };
                    assert_eq!(at, positions);
                    assert!(rows == *want, "{model} {what:?} of a prompt of {}", request.prompt.len());
                }
            }
        }
    }
}

#[test]
fn captured_are_the_positions_and_layers_that_were_asked_for() {
    let _alone = alone();
    let engine = start("moe-gqa");
    let all = ask(&engine, everything(greedy(prompt(100, 1), 8)));
    let sizes = engine.info().row_sizes();
    let routers = all.1.keys().filter(|what| matches!(what, HookPoint::Router(_))).count();
    let top_k = sizes.choices / routers;
    let width = |what| match what {
        HookPoint::Hidden(_) => sizes.stream_width,
        HookPoint::Logits => sizes.vocab_size,
        HookPoint::Router(_) => 2 * top_k,
    };
    for (positions, want) in [
        (Positions::Prompt, (0..100).collect::<Vec<_>>()),
        (Positions::Generated, (100..107).collect()),
        (Positions::Some(vec![3..5, 63..66, 98..1000]), [3, 4, 63, 64, 65].into_iter().chain(98..107).collect()),
        (from_to(500, 501), vec![]),
    ] {
        let wanted = CaptureWanted { layers: Layers::Some(vec![1]), positions, logits: true, router: true };
        let (_, rows, end) = ask(&engine, Request { capture: Some(wanted.clone()), ..greedy(prompt(100, 1), 8) });
        // What lies before the first of them may come from the cache.
        assert!(end.unwrap().1.cached_tokens <= want.first().copied().unwrap_or(1000));
        assert_eq!(rows.len(), if want.is_empty() { 0 } else { 2 + routers });
        for (what, (at, rows)) in rows {
            assert_eq!(at, want, "{wanted:?}");
            let whole = &all.1[&what].1;
            assert!(
                rows.chunks(width(what)).zip(&at).all(|(row, &p)| row == &whole[p * width(what)..][..width(what)]),
                "{wanted:?} {what:?}"
            );
        }
    }
}

/// Steered requests of several kinds and plain ones share batches; each has the text and rows of running alone, and
/// after them nothing is left.
#[test]
fn steering_stays_with_its_request() {
    let _alone = alone();
    for model in ["moe-gqa", "moe-mla"] {
        let engine = start(model);
        let last = engine.info().layers - 1;
        let mixed = || {
            let steer = |layer, seed, coefficient, positions| steer(&engine, layer, seed, coefficient, positions);
            vec![
                everything(greedy(prompt(150, 1), 20)),
                everything(steered(greedy(prompt(150, 1), 20), vec![steer(0, 1, 2.0, Positions::All)])),
                everything(steered(greedy(prompt(150, 1), 20), vec![steer(last, 1, 2.0, Positions::Generated)])),
                everything(steered(
                    seeded(prompt(70, 2), 20, 5),
                    vec![steer(1, 2, -3.0, Positions::Prompt), steer(1, 3, 1.0, Positions::All)],
                )),
                everything(seeded(prompt(70, 2), 20, 5)),
            ]
        };
        let apart: Vec<_> = mixed().into_iter().map(|request| ask(&engine, request)).collect();
        let events: Vec<_> = mixed().into_iter().map(|request| engine.submit(request).unwrap()).collect();
        for (i, (events, apart)) in events.into_iter().zip(&apart).enumerate() {
            let together = received(events);
            assert_eq!(together.0, apart.0, "{model}: tokens of request {i}");
            assert!(together.1 == apart.1, "{model}: rows of request {i}");
        }
        let rows = |i: usize, what: HookPoint| &apart[i].1[&what].1;
        for i in [1, 2] {
            assert_ne!(rows(0, HookPoint::Logits), rows(i, HookPoint::Logits), "steering does something");
        }
        assert_ne!(rows(3, HookPoint::Logits), rows(4, HookPoint::Logits));
        // Before the layer and position that is steered nothing changes, and there it changes by just that.
        let hidden = engine.info().hidden_size;
        assert_eq!(rows(0, HookPoint::Hidden(last))[..150 * hidden], rows(2, HookPoint::Hidden(last))[..150 * hidden]);
        let (plain, changed) = (rows(0, HookPoint::Hidden(0)), rows(1, HookPoint::Hidden(0)));
        let vector = vector(&engine, 1);
        assert!((0..150 * hidden).all(|i| changed[i] == plain[i] + 2.0 * vector[i % hidden]));
    }
}

/// Neither does a steered prompt take plain text's cache, nor plain text that of a steered prompt.
#[test]
fn the_prefix_cache_knows_steered_text() {
    let _alone = alone();
    let engine = start("moe-gqa");
    let fresh = start("moe-gqa");
    let steer = |positions| vec![steer(&engine, 0, 4, 3.0, positions)];
    let request = || greedy(prompt(300, 3), 16);
    let cached = |request: Request| {
        let (tokens, end) = read(engine.submit(request).unwrap());
        (tokens, end.unwrap().1.cached_tokens)
    };
    let first = cached(steered(request(), steer(Positions::All)));
    assert_eq!(first.1, 0);
    let plain = cached(request());
    assert_eq!(plain, (answer(&fresh, request()), 0), "not from the steered prompt");
    assert_ne!(plain.0, first.0);
    assert_eq!(cached(request()).1, 256);
    assert_eq!(cached(steered(request(), steer(Positions::All))), first, "not from the plain prompt");
    // Where only what comes later is steered, the beginning is plain text.
    let later =
        |engine: &EngineHandle, from: usize| answer(engine, steered(request(), steer(from_to(from, usize::MAX))));
    let want = later(&fresh, 130);
    assert_eq!(cached(steered(request(), steer(from_to(130, usize::MAX)))), (want, 128));
    assert_eq!(cached(steered(request(), steer(Positions::Generated))).1, 256);
    assert_eq!(cached(request()), (plain.0, 256), "and is offered as such");
}

/// Sequences that give way are computed again; what was emitted is not emitted again.
#[test]
fn preempted_requests_tell_each_row_once() {
    let _alone = alone();
    for model in ["moe-gqa", "moe-mla"] {
        let short = EngineConfig { max_context: Some(384), ..config() };
        let engine = started(&demo_dir(model), &short, |loaded| loaded.kv_blocks = 384 / BLOCK_SIZE);
        let requests = || {
            (0..4u32).map(|i| {
                everything(steered(
                    seeded(prompt(90, i), 150, i.into()),
                    vec![steer(&engine, 1, i, 1.0, Positions::All)],
                ))
            })
        };
        let apart: Vec<_> = requests().map(|request| ask(&engine, request)).collect();
        let events: Vec<_> = requests().map(|request| engine.submit(request).unwrap()).collect();
        for (events, apart) in events.into_iter().zip(&apart) {
            let together = received(events);
            assert_eq!(together.0, apart.0);
            assert!(together.1 == apart.1);
            assert_eq!(together.1[&HookPoint::Logits].0, (0..239).collect::<Vec<_>>());
        }
        let preempted = engine.metrics().preemptions_total.load(std::sync::atomic::Ordering::Relaxed);
        assert!(preempted > 0, "the pool was large enough for all");
    }
}

const RECURRENT: &[&str] =
    &["qwen3_next", "nemotron_h", "granitemoehybrid", "kimi_linear", "bailing_hybrid", "glm5_next", "deepseek_v4"];

/// Rows are rows where layers keep recurrent state or entries, and where there are several streams.
#[test]
fn recurrent_models() {
    let _alone = alone();
    for &model in RECURRENT {
        let short = EngineConfig { max_context: Some(512), experts: ExpertBits::Bf16, ..config() };
        let engine = started(&fixture_dir(model), &short, |_| {});
        let tokens = |seed: u32| -> Vec<u32> { (0..200).map(|i| 7 + (i * 37 + seed * 101) % 490).collect() };
        let requests = || {
            let plain = everything(greedy(tokens(1), 10));
            let changed = everything(steered(greedy(tokens(1), 10), vec![steer(&engine, 0, 1, 1.0, from_to(70, 72))]));
            [plain, changed]
        };
        let apart = requests().map(|request| ask(&engine, request));
        let together = requests().map(|request| engine.submit(request).unwrap()).map(received);
        for (together, apart) in together.iter().zip(&apart) {
            assert!(together.0 == apart.0 && together.1 == apart.1, "{model}");
        }
        let vocab = engine.info().vocab_size;
        let logits = |i: usize| &apart[i].1[&HookPoint::Logits].1;
        assert_eq!(logits(0)[..70 * vocab], logits(1)[..70 * vocab], "{model}");
        assert_ne!(logits(0)[70 * vocab..], logits(1)[70 * vocab..], "{model}");
    }
}

/// The most that may be added stays finite, and what it leaves in freed blocks is nothing to others.
#[test]
fn the_largest_addition_harms_nobody() {
    let _alone = alone();
    for model in ["moe-gqa", "moe-mla"] {
        let engine = started(&demo_dir(model), &config(), |loaded| loaded.kv_blocks = 1024 / BLOCK_SIZE);
        let wall: Arc<[f32]> = vec![-1.0; engine.info().hidden_size].into();
        let most = Steer { layer: 0, vector: wall, coefficient: 1e6, positions: Positions::All };
        let (_, rows, _) = ask(&engine, everything(steered(greedy(prompt(700, 1), 5), vec![most; 256])));
        assert!(rows.values().all(|(_, rows)| rows.iter().all(|x| x.is_finite())));
        assert_eq!(answer(&engine, greedy(prompt(500, 2), 10)), answer(&start(model), greedy(prompt(500, 2), 10)));
    }
}

#[test]
fn a_cancelled_capture_leaves_nothing() {
    let _alone = alone();
    let engine = start("moe-gqa");
    let free = || engine.metrics().kv_blocks_used.load(std::sync::atomic::Ordering::Relaxed);
    for seed in 0..5 {
        let mut events = engine.submit(everything(greedy(prompt(600, seed), 400))).unwrap();
        assert!(matches!(events.blocking_recv(), Some(Event::Captured(_))));
    }
    let want = answer(&start("moe-gqa"), greedy(prompt(40, 1), 10));
    assert_eq!(answer(&engine, greedy(prompt(40, 1), 10)), want);
    let waited = Instant::now();
    while free() > 0 {
        assert!(waited.elapsed() < Duration::from_secs(20), "{} blocks are still used", free());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let _alone = alone();
    let engine = start("moe-gqa");
    let layers = engine.info().layers;
    let good = || steer(&engine, 0, 1, 1.0, Positions::All);
    let refused = |request: Request| match engine.submit(request) {
        Err(Error::Invalid(message)) => message,
        other => panic!("{other:?}"),
    };
    let with = |steer: Steer| steered(greedy(prompt(5, 1), 5), vec![steer]);
    assert!(refused(with(Steer { layer: layers, ..good() })).contains(&format!("layers 0 to {}", layers - 1)));
    assert!(refused(with(Steer { vector: vec![0.5; 3].into(), ..good() })).contains("3 numbers"));
    assert!(refused(with(Steer { coefficient: f32::NAN, ..good() })).contains("coefficient"));
    assert!(refused(steered(greedy(prompt(5, 1), 5), vec![good(); 257])).contains("at most 256"));
    let capture = |layers, positions| Request {
        capture: Some(CaptureWanted { layers, positions, logits: false, router: false }),
        ..greedy(prompt(5, 1), 5)
    };
    assert!(refused(capture(Layers::Some(vec![0, layers]), Positions::All)).contains("there is no layer"));
    assert!(refused(capture(Layers::NONE, Positions::All)).contains("nothing is to be captured"));
    assert!(refused(capture(Layers::All, Positions::Some(vec![4..6, 5..9]))).contains("ascending"));
}

/// Vectors take no more of the device than is meant for them, and are gone with their requests.
#[test]
fn vectors_of_all_requests_are_bounded() {
    let _alone = alone();
    let mut loaded = load::load(&folder("test", &demo_dir("moe-gqa")), &config(), &|_| {}).unwrap();
    let hidden = loaded.model.config().hidden_size;
    let many: Vec<Arc<[f32]>> = (0..(32 << 20) / (4 * hidden)).map(|_| vec![0.5; hidden].into()).collect();
    loaded.model.hold(&mut many.iter()).unwrap();
    loaded.model.hold(&mut many.iter()).unwrap();
    let more: [Arc<[f32]>; 1] = [vec![0.5; hidden].into()];
    assert!(matches!(loaded.model.hold(&mut more.iter()), Err(Error::Busy(_))));
    drop(many);
    loaded.model.hold(&mut more.iter()).unwrap();
}
