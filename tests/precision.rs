//! Integer experts against f32 arithmetic on exactly the weights they stand for, and what that means for answers.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Fixture, cosine, demo_dir, greedy, load};
use moebius::backend::Routing;
use moebius::config::{DenseBits, EngineConfig, ExpertBits};
use moebius::engine::capture::{Layers, Wanted, capture};
use moebius::experts::{CpuExperts, ExpertMemory};
use moebius::machine::heap::Heap;
use moebius::machine::topology::Topology;
use moebius_cache::format::ExpertCache;
use moebius_cache::pack::unpack_expert;

/// `down(silu(gate x) * up x)` in f64.
fn naive_expert(weights: &[Vec<f32>; 3], x: &[f32]) -> Vec<f64> {
    let product = |w: &[f32], x: &[f64]| -> Vec<f64> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| *w as f64 * x).sum()).collect()
    };
    let x: Vec<f64> = x.iter().map(|&v| v as f64).collect();
    let (gate, up) = (product(&weights[0], &x), product(&weights[1], &x));
    let h: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    product(&weights[2], &h)
}

/// The cache file that loading this model has made.
fn cache_of(dir: &std::path::Path, config: &EngineConfig) -> ExpertCache {
    let folder = common::folder("test", dir);
    let precision = folder.spec(config).unwrap().precision.unwrap();
    let job = moebius::load::cache_job("test", &folder.checkpoint, &folder.model, precision);
    moebius_cache::convert::ensure(&job, &common::cache_dir(), &|_| {}).unwrap()
}

#[test]
fn experts_equal_f32_arithmetic_on_the_dequantized_weights() {
    let moebius::load::Machine { team, kernel, .. } =
        moebius::load::machine(&EngineConfig { threads: Some(2), ..Default::default() }, &Topology::read()).unwrap();
    for name in ["qwen3_moe", "deepseek_v3", "deepseek_v2_full"] {
        // Real hidden states, as the experts of layer 1 see the residual stream.
        let fixture = Fixture::open(name);
        let tokens = fixture.tokens("mid.input_ids");
        let mut loaded = fixture.load(&EngineConfig::default());
        let wanted = Wanted { hidden: Some(Layers::Some(vec![1])), router: true, ..Default::default() };
        let captured = capture(&mut loaded, &tokens, &wanted, 512).unwrap();
        let (x, routing): (_, &Routing) = (&captured.hidden[&1], &captured.router[&2]);
        for bits in [ExpertBits::Int4, ExpertBits::Int8, ExpertBits::Bf16] {
            let cache = cache_of(&fixture.dir, &EngineConfig { experts: bits, ..Default::default() });
            let (layout, layer) = (cache.layout(0), cache.layer_index(2).unwrap());
            let experts: Vec<_> =
                (0..cache.num_experts()).map(|e| unpack_expert(&layout, cache.expert(layer, e))).collect();
            let hidden = layout.gate.k;
            let mut executor = CpuExperts::new(
                &Heap::default(),
                std::sync::Arc::new(ExpertMemory::mapped(std::sync::Arc::new(cache))),
                team.clone(),
                kernel,
                tokens.len() * routing.top_k,
            )
            .unwrap();
            let mut out = vec![0.0; x.len()];
            executor.submit_rows(layer, x, routing).unwrap();
            executor.finish_rows(&mut out).unwrap();
            for t in 0..tokens.len() {
                let mut want = vec![0.0f64; hidden];
                for slot in t * routing.top_k..(t + 1) * routing.top_k {
                    let y = naive_expert(&experts[routing.ids[slot] as usize], &x[t * hidden..][..hidden]);
                    want.iter_mut().zip(y).for_each(|(w, y)| *w += routing.weights[slot] as f64 * y);
                }
                let want: Vec<f32> = want.iter().map(|&w| w as f32).collect();
                let cosine = cosine(&out[t * hidden..][..hidden], &want);
                assert!(cosine > 0.9995, "{name} {bits:?} token {t}: cosine {cosine}");
            }
        }
    }
}

/// Chat prompts of the demo models, as their template makes them: <bos> <user> text <end> <assistant>.
fn ask(loaded: &mut moebius::load::Loaded, tokenizer: &moebius::text::tokenizer::Tokenizer, question: &str) -> String {
    let text = format!("<|bos|><|user|>{question}<|end|><|assistant|>");
    let prompt = tokenizer.encode(&text, false).unwrap();
    let answer = greedy(loaded, &prompt, 64);
    let end =
        answer.iter().position(|t| tokenizer.decode(&[*t], false).unwrap() == "<|end|>").expect("the answer ends");
    tokenizer.decode(&answer[..end], true).unwrap()
}

#[test]
fn thirty_questions_get_the_same_right_answers_in_every_precision() {
    let questions: Vec<(&str, &str)> = include_str!("data/questions.tsv")
        .lines()
        .map(|line| line.split_once('\t').expect("question, tab, answer"))
        .collect();
    assert_eq!(questions.len(), 30);
    for model in ["moe-gqa", "moe-mla"] {
        let dir = demo_dir(model);
        let tokenizer = moebius::text::tokenizer::Tokenizer::load(&dir).unwrap();
        for (experts, group_size, dense) in [
            (ExpertBits::Bf16, None, DenseBits::Bf16),
            (ExpertBits::Int8, None, DenseBits::Bf16),
            (ExpertBits::Int4, None, DenseBits::Bf16),
            (ExpertBits::Int4, Some(32), DenseBits::Bf16),
            (ExpertBits::Int4, None, DenseBits::Int8),
            (ExpertBits::Int4, None, DenseBits::Int4),
        ] {
            let mut loaded = load(&dir, &EngineConfig { experts, group_size, dense, ..Default::default() });
            for (question, answer) in &questions {
                assert_eq!(
                    ask(&mut loaded, &tokenizer, question),
                    *answer,
                    "{model} {experts:?} {group_size:?} {dense:?}: {question}"
                );
            }
        }
    }
}
