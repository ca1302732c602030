//! Experts that are chosen most are on the GPU at the next start. What comes in decode is tested in gpu_pool.rs.
//!
//! Runs on a GPU, or on kernels/emulator where there is none.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::path::Path;

use common::gpu::{need_gpu, on_gpu};
use common::{Fixture, greedy};
use moebius::config::{DenseBits, EngineConfig, ExpertBits};
use moebius::engine::capture::{Wanted, capture};
use moebius::experts::popularity::Popularity;
use moebius::load::{self, Loaded};

const RESIDENT: usize = 3;

fn open(fixture: &Fixture, cache: &Path) -> Loaded {
    let config = EngineConfig {
        cache_dir: Some(cache.into()),
        max_context: Some(1024),
        threads: Some(2),
        experts: ExpertBits::Bf16,
        dense: DenseBits::Bf16,
        resident_experts: Some(RESIDENT),
        ..Default::default()
    };
    load::load(&common::folder("test", &fixture.dir), &on_gpu(config), &|_| {}).unwrap()
}

/// Root mean square of what logits are off by.
fn error(fixture: &Fixture, loaded: &mut Loaded) -> f32 {
    let tokens = fixture.tokens("mid.input_ids");
    let got = capture(loaded, &tokens, &Wanted { logits: true, ..Default::default() }, 512).unwrap().logits;
    let want = fixture.floats("mid.logits");
    (got.iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum::<f32>() / want.len() as f32).sqrt()
}

/// The share of the choices that VRAM holds while an answer is written.
fn hit_rate(fixture: &Fixture, loaded: &mut Loaded) -> f64 {
    let before = loaded.model.traffic();
    greedy(loaded, &fixture.tokens("short.input_ids"), 40);
    loaded.model.traffic().since(before).choices.hit_rate().expect("experts were chosen")
}

#[test]
fn the_most_chosen_become_residents() {
    need_gpu!();
    let (fixture, cache) = (Fixture::open("qwen3_moe"), tempfile::tempdir().unwrap());
    let mut loaded = open(&fixture, cache.path());
    let (layers, experts) = {
        let model = loaded.model.config();
        (model.moe_layers().count(), model.moe().unwrap().num_experts)
    };
    let fresh = error(&fixture, &mut loaded);
    // Long enough for the counts to come.
    greedy(&mut loaded, &fixture.tokens("short.input_ids"), 400);
    let moved = error(&fixture, &mut loaded);
    assert!(moved < 1.5 * fresh, "experts that moved give other results: {moved} instead of {fresh}");
    drop(loaded);

    let files: Vec<_> = std::fs::read_dir(cache.path()).unwrap().flat_map(|f| walk(&f.unwrap().path())).collect();
    let path = files.iter().find(|path| path.extension().is_some_and(|e| e == "use")).expect("counts are saved");
    let used = Popularity::load(path, layers, experts).expect("what was saved is read");
    assert!(
        (0..layers).any(|layer| used.order(layer)[..RESIDENT] != [0, 1, 2]),
        "a fixture that happens to prefer its first experts"
    );

    let mut loaded = open(&fixture, cache.path());
    let again = hit_rate(&fixture, &mut loaded);
    let by_chance = RESIDENT as f64 / experts as f64;
    assert!(again > by_chance, "at the next start VRAM holds {again} of the choices, {by_chance} of the experts");
    let error = error(&fixture, &mut loaded);
    assert!(error < 1.5 * fresh, "at the next start results are off by {error} instead of {fresh}");
}

fn walk(path: &Path) -> Vec<std::path::PathBuf> {
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flat_map(|e| walk(&e.unwrap().path())).collect(),
        Err(_) => vec![path.into()],
    }
}
