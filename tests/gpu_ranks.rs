//! Several GPUs: their sums against plain ones, and models on two and four of them against one.
//!
//! Runs on GPUs, or on kernels/emulator where there are none.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::gpu::{device, gpus, need_gpu};
use common::{cache_dir, demo_dir, fixture_dir, folder, greedy};
use moebius::config::{Device, EngineConfig, ExpertBits, PrefillOn};
use moebius::cuda::{Cuda, DeviceBuffer, Rank};
use moebius::engine::capture::{Wanted, capture};
use moebius::kernel::random::Random;
use moebius::load::{self, Loaded};

fn ranks(of: usize) -> (Vec<Arc<Cuda>>, Vec<Rank>) {
    let devices: Vec<_> = (0..of).map(|i| Cuda::open(i).unwrap()).collect();
    let ranks = Rank::of_devices(&devices).unwrap();
    (devices, ranks)
}

/// The sums of these numbers of each rank, over all ranks, on each; enqueued by a thread for each.
fn sums(devices: &[Arc<Cuda>], ranks: &[Rank], all: &[Vec<Vec<f32>>]) -> Vec<Vec<Vec<f32>>> {
    let on = |cuda: &Arc<Cuda>, rank: &Rank, own: &[Vec<f32>]| {
        cuda.enter_thread().unwrap();
        let buffers: Vec<_> = own.iter().map(|own| DeviceBuffer::from_slice(cuda, own).unwrap()).collect();
        buffers.iter().for_each(|x| rank.all_reduce(x.address(), x.len()));
        let read = |x: &DeviceBuffer<f32>| {
            let mut out = vec![0.0; x.len()];
            x.read(&mut out).unwrap();
            out
        };
        buffers.iter().map(read).collect()
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            devices.iter().zip(ranks).zip(all).map(|((cuda, rank), own)| scope.spawn(|| on(cuda, rank, own))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn sums_are_those_of_all_ranks_in_their_order() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    for of in 2..=gpus().min(4) {
        let (devices, ranks) = ranks(of);
        let mut random = Random(of as u64);
        // Few and many in turn, so that a block's memory is used again by launches of other sizes.
        let mut length = |_| 4 * (1 + random.bits() as usize % if random.bits() % 3 == 0 { 24_000 } else { 1500 });
        let lengths: Vec<usize> = (0..24).map(&mut length).chain([4, 65_536, 65_540, 4]).collect();
        let mut number = |scale: u32| (random.bits() as i32 as f32) * (scale as f32).exp2() / 2f32.powi(31);
        let all: Vec<Vec<Vec<f32>>> = (0..of)
            .map(|_| lengths.iter().map(|&len| (0..len).map(|i| number(i as u32 % 16)).collect()).collect())
            .collect();
        let got = sums(&devices, &ranks, &all);
        for (k, &len) in lengths.iter().enumerate() {
            for i in 0..len {
                let want = (1..of).fold(all[0][k][i], |sum, r| sum + all[r][k][i]);
                for (r, got) in got.iter().enumerate() {
                    assert_eq!(got[k][i].to_bits(), want.to_bits(), "rank {r} of {of}, sum {k} of {len}, number {i}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_fails_lets_the_others_go_on() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    let (devices, ranks) = ranks(2);
    for numbers in [1024, 100_000] {
        devices[0].enter_thread().unwrap();
        let x = DeviceBuffer::from_slice(&devices[0], &vec![1.0; numbers]).unwrap();
        // The other rank never sums.
        ranks[0].all_reduce(x.address(), numbers);
        let since = Instant::now();
        let failing = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                ranks[1].give_up();
            });
            devices[0].synchronize()
        });
        failing.unwrap();
        assert!(since.elapsed() < Duration::from_secs(5));
    }
}

fn config(devices: &[usize]) -> EngineConfig {
    EngineConfig {
        device: Device::Cuda(devices.to_vec()),
        cache_dir: Some(cache_dir()),
        experts: ExpertBits::Int4,
        group_size: Some(32),
        threads: Some(2),
        max_context: Some(256),
        ..Default::default()
    }
}

fn demo(model: &str, config: &EngineConfig) -> Loaded {
    load::load(&folder(model, &demo_dir(model)), config, &|_| {}).unwrap()
}

fn logits(loaded: &mut Loaded, tokens: &[u32]) -> Vec<f32> {
    capture(loaded, tokens, &Wanted { logits: true, ..Default::default() }, 32).unwrap().logits
}

#[test]
fn models_on_several_gpus_say_what_they_say_on_one() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % 1000).collect();
    // Two KV heads on four GPUs are on two each.
    for (model, resident) in [("moe-gqa", None), ("moe-mla", Some(2))] {
        // Wherever it is faster would be elsewhere in another run.
        let on = |devices: &[usize]| {
            demo(model, &EngineConfig { resident_experts: resident, prefill: PrefillOn::Cpu, ..config(devices) })
        };
        let mut one = on(&[0]);
        let (want, answer) = (logits(&mut one, &tokens), greedy(&mut one, &tokens, 12));
        drop(one);
        for devices in [&[0, 1][..], &[0, 1, 2, 3]] {
            if devices.len() > gpus() {
                continue;
            }
            let (mut first, mut again) = (on(devices), on(devices));
            let got = logits(&mut first, &tokens);
            let rms = |x: &[f32]| (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
            let off = rms(&got.iter().zip(&want).map(|(a, b)| a - b).collect::<Vec<_>>());
            assert!(off < 0.02 * rms(&want), "{model} on {devices:?}: off by {off} of {}", rms(&want));
            assert_eq!(greedy(&mut first, &tokens, 12), answer, "{model} on {devices:?}");
            let same = logits(&mut again, &tokens).iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{model} on {devices:?}: other bits in another run");
            assert_eq!(greedy(&mut again, &tokens, 12), answer, "{model} on {devices:?}");
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused_by_name() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    let refusal = |name: &str, devices: &[usize]| {
        let config = EngineConfig { group_size: None, experts: ExpertBits::Bf16, ..config(devices) };
        load::load(&folder(name, &fixture_dir(name)), &config, &|_| {}).map(drop).unwrap_err().to_string()
    };
    for (name, devices, words) in [
        ("gpt_oss_mxfp4", &[0, 1][..], "experts with biases"),
        ("gemma4", &[0, 1], "more than one norm or stream"),
        ("lfm2_moe", &[0, 1], "layers of such attention"),
        ("qwen3_moe", &[0, 1, 2], "layers of such attention"),
        ("qwen3_moe", &[0, 0], "named twice"),
    ] {
        let text = refusal(name, devices);
        assert!(text.contains(words), "{name}: {text}");
    }
    assert!(device().is_some());
}
