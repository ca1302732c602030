//! What must hold whatever the numbers are, on every kind of attention: a token's bits depend on its own sequence
//! alone.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::{Run, demo_dir, folder, load_model, small, step};
use moebius::backend::batch::Batch;
use moebius::config::{ActivationBits, DenseBits, EngineConfig, ExpertBits, ExpertsMemory, KvBits, Numa};
use moebius::forward::block_pool::BlockPool;
use moebius::load::{LoadProgress, Loaded};

/// Grouped queries and latents, as the demo models have them, and every kind of layer that [`small`] has.
fn models() -> impl Iterator<Item = &'static str> {
    ["moe-gqa", "moe-mla"].into_iter().chain(small::MODELS.iter().copied())
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| 7 + (i * 37 + seed * 101) % 900).collect()
}

/// Each model in the precisions that take different ways through the kernels.
fn for_each_model(test: impl Fn(&str, &mut Loaded)) {
    for model in models() {
        for (experts, dense, activations) in [
            (ExpertBits::Int4, DenseBits::Bf16, ActivationBits::Eight),
            (ExpertBits::Int8, DenseBits::Int8, ActivationBits::Eight),
            (ExpertBits::Bf16, DenseBits::Bf16, ActivationBits::Eight),
            (ExpertBits::Int4, DenseBits::Int4, ActivationBits::Sixteen),
        ] {
            let config = EngineConfig { experts, dense, activations, ..Default::default() };
            let mut loaded = load_model(model, &config);
            test(&format!("{model} {experts:?} {dense:?} {activations}"), &mut loaded);
        }
    }
}

/// Logits of the last token of `tokens`, read at once from an empty cache.
fn whole(loaded: &mut Loaded, tokens: &[u32]) -> Vec<f32> {
    let mut batch = Batch::default();
    let row = Run::new(&mut BlockPool::new(loaded.kv_blocks), tokens.len()).push(&mut batch, tokens);
    step(&mut *loaded.model, &batch, &[row]).remove(0)
}

#[test]
fn a_batch_equals_single_runs() {
    for_each_model(|name, loaded| {
        let prompts: Vec<_> = [1, 70, 3, 64, 129, 17].iter().enumerate().map(|(i, &n)| prompt(n, i as u32)).collect();
        let alone: Vec<_> = prompts.iter().map(|p| whole(loaded, p)).collect();
        let mut pool = BlockPool::new(loaded.kv_blocks);
        let (mut batch, mut rows) = (Batch::default(), Vec::new());
        for (slot, p) in prompts.iter().enumerate() {
            rows.push(Run::new(&mut pool, p.len()).in_slot(slot).push(&mut batch, p));
        }
        assert_eq!(step(&mut *loaded.model, &batch, &rows), alone, "{name}");
    });
}

#[test]
fn chunks_equal_the_whole_prompt() {
    for_each_model(|name, loaded| {
        // Steps of one token past the end of a block; larger ones through several.
        for (length, chunk) in [(70, 1), (200, 7), (200, 64), (200, 100), (200, 199)] {
            let tokens = prompt(length, 5);
            let want = whole(loaded, &tokens);
            let mut run = Run::new(&mut BlockPool::new(loaded.kv_blocks), tokens.len());
            let (mut batch, mut logits) = (Batch::default(), Vec::new());
            for part in tokens.chunks(chunk) {
                batch.clear();
                let row = run.push(&mut batch, part);
                logits = step(&mut *loaded.model, &batch, &[row]).remove(0);
            }
            assert_eq!(logits, want, "{name}: chunks of {chunk}");
        }
    });
}

#[test]
fn decode_beside_others_equals_prefill_of_all() {
    for_each_model(|name, loaded| {
        let sequences = [prompt(90, 1), prompt(30, 2), prompt(66, 3)];
        let mut pool = BlockPool::new(loaded.kv_blocks);
        let mut runs: Vec<_> =
            (0..).zip(&sequences).map(|(slot, s)| Run::new(&mut pool, s.len()).in_slot(slot)).collect();
        let mut last = Vec::new();
        // Prompts without their last ten tokens, then ten steps of one token each; the third joins late.
        for i in 0..=10 {
            let (mut batch, mut rows) = (Batch::default(), Vec::new());
            for (s, run) in sequences.iter().zip(&mut runs) {
                let end = s.len() - 10 + i;
                if s.len() == 66 && i < 4 {
                    continue;
                }
                let from = run.position;
                rows.push(run.push(&mut batch, &s[from..end]));
            }
            last = step(&mut *loaded.model, &batch, &rows);
        }
        let want: Vec<_> = sequences.iter().map(|s| whole(loaded, s)).collect();
        assert_eq!(last, want, "{name}");
    });
}

#[test]
fn threads_do_not_change_bits() {
    let tokens = prompt(80, 9);
    for model in models() {
        let mut results = Vec::new();
        for threads in [1, 2, 3, 5] {
            let config = EngineConfig {
                threads: Some(threads),
                cache_dir: Some(common::cache_dir()),
                max_context: Some(512),
                ..Default::default()
            };
            let mut loaded = small::model(model, &config);
            results.push(whole(&mut loaded, &tokens));
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{model}");
    }
}

#[test]
fn instruction_sets_do_not_change_bits() {
    let tokens = prompt(80, 11);
    for model in models() {
        let logits =
            |simd| whole(&mut load_model(model, &EngineConfig { simd: Some(simd), ..Default::default() }), &tokens);
        let results: Vec<_> = moebius::kernel::available().into_iter().map(logits).collect();
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{model}");
    }
}

#[test]
fn where_the_experts_lie_does_not_change_bits() {
    let tokens = prompt(80, 12);
    for model in ["moe-gqa", "moe-mla"] {
        let mut results = Vec::new();
        for (experts_memory, numa, lock) in [
            (ExpertsMemory::Map, Numa::Auto, false),
            (ExpertsMemory::Copy, Numa::Auto, true),
            (ExpertsMemory::Copy, Numa::Off, false),
            (ExpertsMemory::Auto, Numa::Interleave, false),
        ] {
            let config =
                EngineConfig { experts_memory, numa, lock, cache_dir: Some(common::cache_dir()), ..Default::default() };
            let (copied, said) = (std::sync::atomic::AtomicUsize::new(0), std::sync::Mutex::new(String::new()));
            let report = |progress: LoadProgress<'_>| match progress {
                LoadProgress::Copy(done, layers) => {
                    assert!(done <= layers);
                    copied.store(done, std::sync::atomic::Ordering::Relaxed);
                }
                LoadProgress::Experts(line) => *said.lock().unwrap() = line.to_string(),
                _ => {}
            };
            let mut loaded = match moebius::load::load(&folder("test", &demo_dir(model)), &config, &report) {
                Ok(loaded) => loaded,
                Err(error) if lock => {
                    assert!(error.to_string().contains("ulimit -l"), "{error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            if experts_memory == ExpertsMemory::Copy {
                assert!(copied.into_inner() > 0 && said.lock().unwrap().contains("copied into"), "{said:?}");
            }
            results.push(whole(&mut loaded, &tokens));
        }
        assert!(results.len() > 2 && results.windows(2).all(|w| w[0] == w[1]), "{model}");
    }
}

#[test]
fn the_same_pass_twice_gives_the_same_bits() {
    for_each_model(|name, loaded| {
        let tokens = prompt(150, 4);
        let first = whole(loaded, &tokens);
        for _ in 0..5 {
            assert_eq!(whole(loaded, &tokens), first, "{name}");
        }
    });
}

/// Beyond a segment of 1,024 positions, few queries are shared out by segments and many by tiles: a last token read
/// alone, in a chunk and with all others, on any number of threads, in one part or two to a number.
#[test]
fn segments_of_a_long_context_do_not_change_bits() {
    let tokens = prompt(2060, 4);
    for model in ["moe-gqa", "moe-mla", "gpt-oss-wide", "glm-5-long", "minimax-m3-long", "qwen4-exp-long"] {
        for kv in [KvBits::Bf16, KvBits::Bf16x2, KvBits::Int8] {
            let mut results = Vec::new();
            for (threads, chunks) in [(1, [1000, 2059, 2060]), (5, [2, 2055, 2060]), (3, [1030, 2059, 2060])] {
                let config = EngineConfig {
                    threads: Some(threads),
                    cache_dir: Some(common::cache_dir()),
                    max_context: Some(2100),
                    max_batch_tokens: Some(2100),
                    kv,
                    ..Default::default()
                };
                let mut loaded = small::model(model, &config);
                results.push(whole(&mut loaded, &tokens));
                let mut run = Run::new(&mut BlockPool::new(loaded.kv_blocks), tokens.len());
                let (mut batch, mut from) = (Batch::default(), 0);
                for to in chunks {
                    batch.clear();
                    let row = run.push(&mut batch, &tokens[from..to]);
                    let logits = step(&mut *loaded.model, &batch, &[row]).remove(0);
                    from = to;
                    if to == tokens.len() {
                        results.push(logits);
                    }
                }
            }
            assert!(results.windows(2).all(|w| w[0] == w[1]), "{model} {kv}");
        }
    }
}

/// The small models choose, so that what is tested of them is tested of a choice: with room for all, other bits.
#[test]
fn what_is_left_out_matters() {
    let tokens = prompt(200, 6);
    for [some, all] in [["glm-5", "glm-5-long"], ["minimax-m3", "minimax-m3-long"], ["qwen4-exp", "qwen4-exp-long"]] {
        let [some, all] = [some, all].map(|model| whole(&mut load_model(model, &EngineConfig::default()), &tokens));
        assert!(some != all);
    }
}

/// A slot holds what the sequence before left there: a new one begins from nothing.
#[test]
fn a_slot_is_fresh_for_every_sequence() {
    let mut loaded = load_model("qwen3-next", &EngineConfig::default());
    let (first, second) = (prompt(70, 1), prompt(40, 2));
    let want = whole(&mut load_model("qwen3-next", &EngineConfig::default()), &second);
    for slot in [0, 7, 0] {
        let mut pool = BlockPool::new(loaded.kv_blocks);
        for (tokens, want) in [(&first, None), (&second, Some(&want)), (&second, Some(&want))] {
            let mut batch = Batch::default();
            let row = Run::new(&mut pool, tokens.len()).in_slot(slot).push(&mut batch, tokens);
            let got = step(&mut *loaded.model, &batch, &[row]).remove(0);
            assert!(want.is_none_or(|want| *want == got), "slot {slot}");
        }
    }
}

/// Two sequences in one slot would mix: a bug of whoever made the batch, caught where it would do harm.
#[test]
#[should_panic(expected = "a slot for each sequence")]
fn two_sequences_do_not_share_a_slot() {
    let mut loaded = load_model("qwen3-next", &EngineConfig { threads: Some(1), ..Default::default() });
    let (mut pool, mut batch) = (BlockPool::new(loaded.kv_blocks), Batch::default());
    for _ in 0..2 {
        Run::new(&mut pool, 5).push(&mut batch, &prompt(5, 1));
    }
    let _ = loaded.model.forward(&batch, None);
}
