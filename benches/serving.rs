//! Many requests to one engine, on a real model's dimensions: tokens per second of 1 to 16 answers together, the pauses
//! of a running answer while a long prompt is read, what the next turn of a long conversation costs, and what steering
//! and capture cost, themselves and whoever is beside.
//!
//! `cargo bench --bench serving -- qwen3-30b-a3b [layers=N] [prompt=20000] [gap=500] [device=cpu|cuda:0] [dense=int4]`:
//! one JSON object.
#![allow(clippy::unwrap_used)] // a bench may panic

use std::sync::Arc;
use std::time::{Duration, Instant};

use moebius::cli::measure::bench::load_shape;
use moebius::config::{DenseBits, EngineConfig};
use moebius::engine::{
    CaptureWanted, EngineHandle, Event, Events, Layers, Positions, Request, RequestStats, Steer, start_loaded,
};
use serde_json::{Value, json};

fn prompt(tokens: usize, seed: u32) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) % 30_000).collect()
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { prompt, max_tokens: Some(max_tokens), ignore_eos: true, ..Request::default() }
}

fn ask(engine: &EngineHandle, prompt: Vec<u32>, max_tokens: usize) -> Events {
    engine.submit(request(prompt, max_tokens)).unwrap()
}

/// Waits for the next token: when it came, and the numbers up to it; `None` after the last.
fn next(events: &mut Events) -> Option<(Instant, RequestStats)> {
    loop {
        match events.blocking_recv().unwrap() {
            Event::Token(token) => return Some((Instant::now(), token.stats)),
            Event::Captured(_) => {}
            Event::Done(..) => return None,
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

/// Tokens per second of `streams` answers together, the first token of each left out; `change` makes something else of
/// request `i`.
fn throughput(engine: &EngineHandle, streams: usize, tokens: usize, change: impl Fn(usize, Request) -> Request) -> f64 {
    let request = |i| change(i, request(prompt(64, (streams * 100 + i) as u32), tokens));
    let mut all: Vec<Events> = (0..streams).map(|i| engine.submit(request(i)).unwrap()).collect();
    let begun = all.iter_mut().map(|events| next(events).unwrap().0).max().unwrap();
    let mut count = 0;
    for events in &mut all {
        while let Some((at, _)) = next(events) {
            count += usize::from(at > begun);
        }
    }
    count as f64 / begun.elapsed().as_secs_f64()
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let value = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('=').map(String::from));
    let number = |name: &str, default: usize| value(name).map_or(default, |n| n.parse().unwrap());
    let shape = args.iter().find(|arg| !arg.contains('=')).map_or("deepseek-v2-lite", String::as_str);
    let (long, gap) = (number("prompt", 20_000), number("gap", 500));
    let config = EngineConfig {
        max_gap: Duration::from_millis(gap as u64),
        max_context: Some(long + 4096),
        dense: if value("dense").as_deref() == Some("int4") { DenseBits::Int4 } else { DenseBits::Bf16 },
        device: value("device").map_or(Default::default(), |device| device.parse().unwrap()),
        resident_experts: value("resident").map(|n| n.parse().unwrap()),
        ..EngineConfig::default()
    };
    let started = Instant::now();
    let loaded = load_shape(shape, (value("layers").map(|n| n.parse().unwrap()), None), &config, &|_| {}).unwrap();
    let engine = start_loaded(shape, loaded, &config, Vec::new(), started).unwrap();

    let (tokens, plain) = (number("tokens", 48), |_, request| request);
    throughput(&engine, 1, 8, plain);
    let together: Vec<Value> =
        [1, 2, 4, 8, 16].map(|n| json!({"streams": n, "tokens_per_s": throughput(&engine, n, tokens, plain)})).into();

    // In the middle of the model. The first time of each form records it.
    let layer = engine.info().layers / 2;
    let vector: Arc<[f32]> = vec![0.01; engine.info().hidden_size].into();
    let steer = Steer { layer, vector, coefficient: 1.0, positions: Positions::All };
    let steered = |request| Request { steer: vec![steer.clone()], ..request };
    let layers = Layers::Some(vec![layer]);
    let capture = CaptureWanted { layers, positions: Positions::All, logits: false, router: false };
    let captured = |request| Request { capture: Some(capture.clone()), ..request };
    let tapped: Vec<Value> = [1, 4]
        .map(|n| {
            let rate = |change: &dyn Fn(usize, Request) -> Request| {
                throughput(&engine, n, 8, change);
                let mut rates: Vec<f64> = (0..3).map(|_| throughput(&engine, n, tokens, change)).collect();
                rates.sort_by(f64::total_cmp);
                rates[1]
            };
            let first = |change: &dyn Fn(Request) -> Request| {
                rate(&|i, request| if i == 0 { change(request) } else { request })
            };
            json!({"streams": n, "plain": rate(&plain), "one_steered": first(&steered), "all_steered": rate(&|_,
                request| steered(request)),
                "one_captured": first(&captured), "all_captured": rate(&|_, request| captured(request))})
        })
        .into();

    // An answer runs; then somebody sends a long prompt.
    let mut running = ask(&engine, prompt(64, 1), 4000);
    for _ in 0..16 {
        next(&mut running);
    }
    let text = prompt(long, 2);
    let mut reading = ask(&engine, text.clone(), 1);
    let reader = std::thread::spawn(move || next(&mut reading).unwrap().1);
    let mut gaps = Vec::new();
    let mut last = Instant::now();
    while !reader.is_finished() {
        let Some((at, _)) = next(&mut running) else { break };
        gaps.push((at - last).as_secs_f64() * 1e3);
        last = at;
    }
    let read = reader.join().unwrap();
    drop(running);
    gaps.sort_by(f64::total_cmp);
    let quantile = |q: f64| gaps[((gaps.len() - 1) as f64 * q) as usize];

    // The next turn: the same text and a little more. And the same alone, for the price of reading it with nobody else
    // there.
    let turn = |text: Vec<u32>| {
        let asked = Instant::now();
        let (at, stats) = next(&mut ask(&engine, text, 1)).unwrap();
        json!({"first_token_ms": (at - asked).as_secs_f64() * 1e3, "cached_tokens": stats.cached_tokens,
            "prompt_tokens": stats.prompt_tokens})
    };
    let next_turn = turn([text, prompt(50, 3)].concat());
    let alone = turn(prompt(long, 4));
    let report = json!({
        "bench": "serving", "shape": shape, "device": engine.info().device, "threads": engine.info().threads,
            "dense": engine.info().dense,
        "together": together, "steering_and_capture": tapped,
        "while_reading": {"prompt_tokens": long, "max_gap_ms": gap, "seconds": read.prefill.as_secs_f64(),
            "answer_tokens": gaps.len(),
            "gap_ms": {"p50": quantile(0.5), "p95": quantile(0.95), "p99": quantile(0.99), "max": quantile(1.0)}},
        "alone": alone, "next_turn": next_turn,
    });
    println!("{report}");
}
