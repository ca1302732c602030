//! What a plan counts is what loading takes on the CPU, byte for byte; and to count takes next to nothing.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

#[path = "common/allocations.rs"]
mod allocations;

use std::path::Path;
use std::sync::Arc;

use allocations::{live_bytes, taken_bytes};
use common::{cache_dir, fixture_dir, model_in};
use moebius::backend::batch::Batch;
use moebius::config::{DenseBits, Device, EngineConfig, ExpertBits, KvBits};
use moebius::kernel;
use moebius::load::{self, Budget, CpuPlan, Description, Kept, Machine, ModelFolder, Spec, Stored};
use moebius::machine::heap::Heap;
use moebius::machine::topology::Topology;
use moebius::machine::workers::Team;
use moebius::model::Ffn;

/// Names, tables and structs of a small model, which nobody counts.
const STRUCTS: usize = 64 << 10;

/// Tokens of a pass: one number for each of them is less than [`STRUCTS`], one row is more.
const TOKENS: usize = 2048;

fn config(dense: DenseBits, kv: KvBits) -> EngineConfig {
    EngineConfig {
        device: Device::Cpu,
        experts: ExpertBits::Bf16,
        dense,
        kv,
        threads: Some(2),
        max_batch_tokens: Some(TOKENS),
        max_context: Some(128),
        cache_dir: Some(cache_dir()),
        ..EngineConfig::default()
    }
}

fn counted(budget: &Budget) -> u64 {
    let Budget::Cpu(CpuPlan { weights, buffers, states, state_cache, kv, .. }) = budget else { panic!("on the CPU") };
    weights + buffers + states + state_cache + kv
}

/// Loads and runs a model; `false`: its rows have no groups.
fn check(folder: &ModelFolder, config: &EngineConfig) -> bool {
    let what = format!("{}, dense {}, kv {}", folder.name, config.dense, config.kv);
    let machine = load::machine(config, &Topology::read()).unwrap();
    let (heap, spec) = (machine.heap.clone(), folder.spec(config).unwrap());
    let Ok(budget) = Budget::new(&spec, &machine) else { return false };
    let counted = counted(&budget);
    let experts = spec.precision.clone().map(|precision| {
        let job = load::cache_job(&folder.name, &folder.checkpoint, &folder.model, precision);
        moebius_cache::convert::ensure(&job, &cache_dir(), &|_| {}).unwrap()
    });
    let before = live_bytes();
    let stored = Stored { resident: &folder.checkpoint, experts };
    let mut loaded = load::assemble(&spec, stored, budget, machine, &|_| ()).unwrap();
    assert_eq!(heap.bytes(), counted, "{what}: handed out, and counted before");
    let held = live_bytes() - before;
    let besides = held as i64 - heap.vec_bytes() as i64;
    assert!((0..STRUCTS as i64).contains(&besides), "{what}: {besides} bytes were taken besides {}", heap.vec_bytes());

    let mut batch = Batch::default();
    for sequence in 0..(TOKENS / 64).min(config.max_sequences) {
        batch.push(&[1; 64], 0, &[sequence as u32]).slot = sequence;
    }
    loaded.model.forward(&batch, None).unwrap();
    loaded.model.logits(&[0, 63]).unwrap();
    let grown = live_bytes() - before - held;
    assert!(grown < STRUCTS, "{what}: {grown} bytes were taken by a pass");
    true
}

#[test]
fn what_is_counted_is_what_is_taken() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let dirs = std::fs::read_dir(fixtures).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<ModelFolder> = dirs
        .filter_map(|dir| {
            let name = dir.file_name().unwrap().to_string_lossy().into_owned();
            ModelFolder::open(&name, Description::read(&dir).ok()?).ok()
        })
        .collect();
    assert!(folders.len() >= 15, "those that stand in tests/fixtures");
    for folder in &folders {
        assert!(check(folder, &config(DenseBits::Bf16, KvBits::Bf16)), "{}", folder.name);
        for kv in [KvBits::Bf16x2, KvBits::Int8] {
            check(folder, &config(DenseBits::Bf16, kv));
        }
        check(folder, &config(DenseBits::Int8, KvBits::Bf16));
        check(folder, &config(DenseBits::Int4, KvBits::Bf16));
    }
    counting_takes_next_to_nothing();
}

/// Beside no other test: all allocations of the process are counted.
fn counting_takes_next_to_nothing() {
    for name in ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss_mxfp4"] {
        let mut model = model_in(&fixture_dir(name));
        (model.hidden_size, model.vocab_size) = (1 << 24, 1 << 15);
        for layer in &mut model.layers {
            match &mut layer.ffn {
                Ffn::Dense(mlp) => mlp.intermediate_size = 1 << 16,
                Ffn::Moe(moe) => (moe.num_experts, moe.intermediate_size) = (1 << 14, 1 << 16),
                Ffn::None => {}
            }
        }
        let config = config(DenseBits::Bf16, KvBits::Bf16);
        let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
        let (team, kernel) = (Arc::new(Team::new(&[0]).unwrap()), kernel::best());
        let machine = Machine { team, kernel, heap: Heap::default(), available_bytes: u64::MAX };
        let before = taken_bytes();
        let budget = Budget::new(&spec, &machine).unwrap();
        let taken = taken_bytes() - before;
        assert!(counted(&budget) > 1 << 40 && taken < 1 << 20, "{name}: {taken} bytes to count {}", counted(&budget));
    }
}
