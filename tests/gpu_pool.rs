//! VRAM as a cache of experts, and experts over the link: whatever VRAM holds, whatever comes and goes, and whoever
//! reads what is in RAM, answers stay what they are.
//!
//! Runs on a GPU, or on kernels/emulator where there is none.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::gpu::{device, gpus, need_gpu};
use common::{Fixture, Run};
use moebius::backend::batch::Batch;
use moebius::config::{DecodeOn, DenseBits, Device, EngineConfig, ExpertBits};
use moebius::experts::Traffic;
use moebius::forward::block_pool::BlockPool;
use moebius::load::{self, Loaded};

const LAYERS: usize = 3;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

fn open(
    fixture: &Fixture,
    cache: &std::path::Path,
    (resident, decode): (usize, DecodeOn),
    devices: &[usize],
) -> Loaded {
    let config = EngineConfig {
        cache_dir: Some(cache.into()),
        max_context: Some(2048),
        threads: Some(2),
        experts: ExpertBits::Bf16,
        dense: DenseBits::Bf16,
        resident_experts: Some(resident),
        decode,
        device: Device::Cuda(devices.to_vec()),
        ..Default::default()
    };
    load::load(&common::folder("test", &fixture.dir), &config, &|_| {}).unwrap()
}

/// Runs a batch at a step, whose topic chooses its tokens' experts: a router would take another one of two that are
/// nearly as good, for a rounding's sake.
fn forward(loaded: &mut Loaded, batch: &Batch, step: usize) {
    let tokens = batch.len();
    let ids: Vec<i32> = (0..LAYERS * tokens * TOP_K)
        .map(|i| {
            let (layer, row, choice) = (i / TOP_K / tokens, i / TOP_K % tokens, i % TOP_K);
            let first = 3 * (step / 50) + 2 * layer + 3 * row;
            ((first + choice * (1 + step % 2)) % EXPERTS) as i32
        })
        .collect();
    loaded.model.choose(&ids, &ids, tokens).unwrap();
    loaded.model.forward(batch, None).unwrap();
}

/// Logits of `steps` steps of a sequence: first alone, then beside others that come, go, and read prompts in between.
fn logits(loaded: &mut Loaded, steps: usize) -> Vec<Vec<f32>> {
    let mut pool = BlockPool::new(loaded.kv_blocks);
    let mut run = Run::new(&mut pool, steps);
    let mut others: Vec<Run> = (0..4).map(|_| Run::new(&mut pool, 128)).collect();
    let (mut batch, mut all, mut beside) = (Batch::default(), Vec::new(), 0);
    for step in 0..steps {
        if step > steps / 2 && step % 40 == 7 {
            // Those that ran are cancelled, others begin.
            beside = step / 40 % 5;
            for (i, other) in others[..beside].iter_mut().enumerate() {
                other.position = 0;
                batch.clear();
                other.push(&mut batch, &(0..20).map(|t| t * (i as u32 + 3) % 500).collect::<Vec<u32>>());
                forward(loaded, &batch, step);
            }
        }
        // Topics of three tokens.
        let token = (11 * (step / 50) + 7 * (step % 3)) as u32 % 500;
        batch.clear();
        let row = run.push(&mut batch, &[token]);
        for (i, other) in others[..beside].iter_mut().enumerate() {
            other.push(&mut batch, &[(token + 31 * i as u32) % 500]);
        }
        forward(loaded, &batch, step);
        all.push(loaded.model.logits(&[row]).unwrap().to_vec());
    }
    all
}

/// What an expert is computed by changes the rounding of its sums, to bf16 on the device and not at all on the CPU.
#[test]
fn a_thousand_steps_are_the_same_with_any_pool() {
    need_gpu!();
    let (fixture, cache) = (Fixture::open("qwen3_moe"), tempfile::tempdir().unwrap());
    let steps = if device() == Some("a GPU") { 1000 } else { 120 };
    let mut on_cpu = open(&fixture, cache.path(), (0, DecodeOn::Cpu), &[0]);
    let want = logits(&mut on_cpu, steps);
    let alone = on_cpu.model.traffic();
    drop(on_cpu);
    let rms = |v: &[f32]| (v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32).sqrt();
    for (resident, devices) in [(0, &[0][..]), (1, &[0]), (2, &[0]), (4, &[0]), (EXPERTS, &[0]), (4, &[0, 1])] {
        if devices.len() > gpus() {
            continue;
        }
        let mut loaded = open(&fixture, cache.path(), (resident, DecodeOn::Auto), devices);
        let got = logits(&mut loaded, steps);
        let off = got.iter().zip(&want).map(|(got, want)| {
            let off: Vec<f32> = got.iter().zip(want).map(|(g, w)| g - w).collect();
            rms(&off) / rms(want)
        });
        let worst = off.fold(0.0, f32::max);
        assert!(worst < 0.03, "{resident} of 8 experts: a step is off by {worst}");
        let Traffic { ram, link, vram, choices, foreseen, .. } = loaded.model.traffic();
        match resident {
            EXPERTS => assert_eq!((ram, choices.misses), (0, 0)),
            // What the CPU reads less comes over the link, beside what prompts bring in both.
            0 => assert!(ram < alone.ram && link > alone.link, "{ram} < {} and {link} > {}", alone.ram, alone.link),
            _ => assert!(ram > 0 && link > 0 && vram > 0 && choices.hits > 0, "experts of all places are used"),
        }
        // A guess that comes too late is of the step before, as on the emulator it often is.
        let least = if device() == Some("a GPU") { foreseen.misses } else { 0 };
        assert!(resident == EXPERTS || foreseen.hits > least, "{foreseen:?}");
        // Topics that last find their experts: a list would hold its share.
        let hits = choices.hit_rate().unwrap_or(1.0);
        eprintln!("{resident} of 8 experts on {devices:?}: {hits} of the choices are in VRAM, {link} bytes came");
        assert!(resident != 4 || hits > 0.52, "{resident} of 8 experts: {hits} of the choices are in VRAM");
    }
}
