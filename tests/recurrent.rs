//! Recurrent state is a sequence's own: whatever ran before or beside it, an answer is that of a fresh start.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use common::engine::{again, greedy, read, seeded};
use common::{cache_dir, fixture_dir, folder};
use moebius::backend::batch::BLOCK_SIZE;
use moebius::config::{EngineConfig, ExpertBits};
use moebius::engine::capture::{Wanted, capture};
use moebius::engine::{self, EngineHandle, Event, Request};
use moebius::load::{self, Loaded};

/// Two engines on two cores only disturb each other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> EngineConfig {
    EngineConfig {
        cache_dir: Some(cache_dir()),
        threads: Some(2),
        experts: ExpertBits::Bf16,
        max_context: Some(512),
        max_sequences: 3,
        ..Default::default()
    }
}

/// A delta rule's matrices, with a decay for a head or for each key; Mamba-2's; windows of keys; entries and pools of
/// keys that are not whole; the last tokens.
const MODELS: [&str; 8] = [
    "qwen3_next",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_linear",
    "bailing_hybrid",
    "glm5_next",
    "nemotron_h",
    "granitemoehybrid",
];

fn loaded(model: &str) -> Loaded {
    let loaded = load::load(&folder(model, &fixture_dir(model)), &config(), &|_| {}).unwrap();
    assert!(loaded.model.config().has_recurrent_state());
    loaded
}

fn start(model: &str, change: impl FnOnce(&mut Loaded)) -> EngineHandle {
    let mut loaded = loaded(model);
    change(&mut loaded);
    engine::start_loaded(model, loaded, &config(), Vec::new(), Instant::now()).unwrap()
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| 7 + (i * 37 + seed * 101) % 490).collect()
}

fn answer(engine: &EngineHandle, request: &Request) -> Vec<u32> {
    let (tokens, end) = read(engine.submit(again(request)).unwrap());
    end.unwrap();
    tokens
}

/// Each answered by an engine that has seen nothing else.
fn fresh(model: &str, requests: &[Request]) -> Vec<Vec<u32>> {
    requests.iter().map(|request| answer(&start(model, |_| {}), request)).collect()
}

#[test]
fn one_after_the_other() {
    let _alone = alone();
    let requests = [
        seeded(prompt(70, 1), 20, 1),
        seeded(prompt(30, 2), 20, 2),
        seeded(prompt(1, 3), 20, 3),
        seeded(prompt(70, 1), 20, 1),
    ];
    for model in MODELS {
        let want = fresh(model, &requests);
        assert_ne!(want[0], want[1]);
        let engine = start(model, |_| {});
        for _ in 0..2 {
            for (request, want) in requests.iter().zip(&want) {
                assert_eq!(&answer(&engine, request), want, "{model}");
            }
        }
    }
}

#[test]
fn after_a_cancelled_one() {
    let _alone = alone();
    let request = seeded(prompt(50, 4), 20, 4);
    for model in MODELS {
        let want = fresh(model, std::slice::from_ref(&request)).remove(0);
        let engine = start(model, |_| {});
        for i in 0..6 {
            let mut cancelled = engine.submit(greedy(prompt(90 + i, 5), 300)).unwrap();
            assert!(matches!(cancelled.blocking_recv(), Some(Event::Token(..))));
            drop(cancelled);
            assert_eq!(answer(&engine, &request), want, "{model}");
        }
    }
}

/// More than run at once: they join and leave as others end.
#[test]
fn beside_others() {
    let _alone = alone();
    let requests: Vec<_> =
        (0..8).map(|i| seeded(prompt([3, 120, 64, 40, 1, 65, 200, 9][i], i as u32), 25, i as u64)).collect();
    for model in MODELS {
        let want = fresh(model, &requests);
        let engine = start(model, |_| {});
        let together: Vec<_> = requests.iter().map(|request| engine.submit(again(request)).unwrap()).collect();
        for (i, (events, want)) in together.into_iter().zip(&want).enumerate() {
            assert_eq!(&read(events).0, want, "{model}, request {i}");
        }
    }
}

/// The pool holds one context: the younger are sent back, and computed again from nothing, in whichever slot is free
/// then.
#[test]
fn sent_back_and_read_again() {
    let _alone = alone();
    let requests: Vec<_> = (0..4).map(|i| seeded(prompt(100 + i, i as u32), 120, i as u64)).collect();
    for model in MODELS {
        let want = fresh(model, &requests);
        let engine = start(model, |loaded| loaded.kv_blocks = 512 / BLOCK_SIZE);
        let together: Vec<_> = requests.iter().map(|request| engine.submit(again(request)).unwrap()).collect();
        for (i, (events, want)) in together.into_iter().zip(&want).enumerate() {
            assert_eq!(&read(events).0, want, "{model}, request {i}");
        }
    }
}

/// Not the token that was drawn, the bits it was drawn from.
#[test]
fn the_same_logits_twice() {
    let _alone = alone();
    let wanted = Wanted { logits: true, ..Default::default() };
    let tokens = prompt(150, 6);
    for model in MODELS {
        let mut loaded = loaded(model);
        let first = capture(&mut loaded, &tokens, &wanted, 512).unwrap().logits;
        for chunk in [512, 64, 7, 1] {
            capture(&mut loaded, &prompt(33, chunk as u32), &wanted, 512).unwrap();
            assert!(
                capture(&mut loaded, &tokens, &wanted, chunk).unwrap().logits == first,
                "{model}, chunks of {chunk}"
            );
        }
    }
}
