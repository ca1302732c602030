//! A model in stages, each with a run of its layers: bit for bit the model that has them all, on every kind of layer.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::{Run, small};
use moebius::backend::Addition;
use moebius::backend::batch::Batch;
use moebius::backend::cpu::Cpu;
use moebius::config::{EngineConfig, ExpertBits};
use moebius::experts::{CpuExperts, Epilogue, ExpertExecutor, ExpertMemory};
use moebius::forward::block_pool::BlockPool;
use moebius::forward::kv_cache::{CacheSize, KvCache};
use moebius::forward::tap::{Layers, Take, Tap};
use moebius::forward::weights::Weights;
use moebius::forward::{Forward, Limits, Model, Stages};
use moebius::load::{Loaded, synthetic};
use moebius::machine::heap::Heap;
use moebius::model::{ModelConfig, families};

const SLOTS: usize = 2;

fn config() -> EngineConfig {
    EngineConfig {
        threads: Some(2),
        max_context: Some(512),
        max_batch_tokens: Some(160),
        max_sequences: SLOTS,
        experts: ExpertBits::Int4,
        ..EngineConfig::default()
    }
}

fn model(name: &str) -> ModelConfig {
    families::parse(&small::config(name).to_string()).unwrap()
}

/// The model in stages that begin there, with what `loaded` runs on.
fn staged(loaded: &Loaded, begins: &[usize]) -> Stages<Cpu> {
    let (whole, config) = (loaded.model.config().clone(), config());
    let starts = [&[0], begins].concat();
    let ends = [begins, &[whole.layers.len()]].concat();
    let stages: Vec<ModelConfig> = starts.iter().zip(&ends).map(|(&start, &end)| whole.stage(start..end)).collect();
    let mut at = 0;
    let runs: Vec<Range<usize>> = stages
        .iter()
        .map(|stage| {
            let first = at;
            at += stage.moe_layers().count();
            first..at
        })
        .collect();
    let caches = synthetic::experts(&whole, loaded.precision.clone().unwrap()).unwrap().split(&runs);
    let limits = Limits { tokens: 160, chunk_tokens: 160, logit_rows: 4 };
    let of_stage = |(stage, cache): (ModelConfig, _)| {
        let (heap, team) = (Heap::default(), loaded.team.clone());
        let backend = Cpu::new(team.clone(), loaded.kernel).with(&heap, 160);
        let weights = Weights::load(&backend, &small::Random, &stage, config.dense, &|_, _| Ok(())).unwrap();
        let executor = stage.moe().map(|moe| {
            let memory = Arc::new(ExpertMemory::mapped(Arc::new(cache)));
            let cpu = CpuExperts::new(&heap, memory, team, loaded.kernel, 160 * moe.router.top_k).unwrap();
            let cpu = cpu.with(Epilogue::load(&heap, &small::Random, &stage).unwrap());
            Box::new(cpu) as Box<dyn ExpertExecutor<Cpu>>
        });
        let size = CacheSize { blocks: loaded.kv_blocks, slots: SLOTS, snapshots: 1, host_blocks: 0 };
        let kv = KvCache::new(&backend, &stage, size, config.kv).unwrap();
        Model::new(backend, stage, weights, executor, kv, limits).unwrap()
    };
    let models = stages.into_iter().zip(caches).map(of_stage).collect();
    Stages::new(whole, models, 160).unwrap()
}

/// All that a model says of a text.
#[derive(PartialEq)]
struct Said {
    logits: Vec<Vec<f32>>,
    taken: Vec<(usize, Vec<f32>)>, // by layer
    routed: usize,
}

/// Of a prompt in two chunks, a snapshot of it in another slot, and steps of decode with a vector added; the residual
/// stream and the experts of these steps.
fn said(model: &mut dyn Forward, vector: &Arc<[f32]>) -> Said {
    let layers = model.config().layers.len();
    let tokens: Vec<u32> = (0..200u32).map(|i| 7 + (i * 37) % 900).collect();
    let mut run = Run::new(&mut BlockPool::new(8), 210);
    let (mut batch, mut all) = (Batch::default(), Vec::new());
    let mut row = 0;
    for chunk in [&tokens[..130], &tokens[130..]] {
        batch.clear();
        row = run.push(&mut batch, chunk);
        model.forward(&batch, None).unwrap();
    }
    all.push(model.logits(&[row]).unwrap().to_vec());
    model.save_state(0, 0);
    model.restore_state(1, 0);
    run = run.in_slot(1);
    model.hold(&mut [vector].into_iter()).unwrap();
    let (mut taken, mut routed) = (Vec::new(), 0);
    for token in [5u32, 80, 9] {
        batch.clear();
        row = run.push(&mut batch, &[token]);
        let additions = [0, layers - 1]
            .map(|layer| Addition { layer, rows: 0..1, vector: vector.clone(), coefficient: 0.25 })
            .to_vec();
        let take = Take { layers: Layers::All, router: true, rows: 0..1 };
        let mut tap = Tap { additions, takes: vec![take], ..Tap::default() };
        model.forward(&batch, Some(&mut tap)).unwrap();
        all.push(model.logits(&[row]).unwrap().to_vec());
        taken.extend(tap.taken.iter().map(|((_, layer), rows)| (*layer, rows.clone())));
        routed += tap.routed.len();
    }
    Said { logits: all, taken, routed }
}

#[test]
fn stages_say_what_the_whole_model_says() {
    for name in small::MODELS {
        let mut loaded = small::of(model(name), &config());
        let whole = loaded.model.config().clone();
        let vector: Arc<[f32]> = (0..whole.hidden_size).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
        let want = said(&mut *loaded.model, &vector);
        assert!(want.taken.len() == 3 * whole.layers.len() && want.routed > 0, "{name}");
        let cuts = whole.cuts();
        let mut ways: Vec<Vec<usize>> = cuts.iter().map(|cut| vec![*cut]).collect();
        ways.extend((cuts.len() > 1).then(|| cuts.clone()));
        assert!(!ways.is_empty(), "{name} can be cut");
        for begins in ways {
            let got = said(&mut staged(&loaded, &begins), &vector);
            assert!(got == want, "{name} in stages that begin at {begins:?}");
        }
    }
}

#[test]
fn a_stage_needs_nothing_of_earlier_layers() {
    for (name, cuts) in [
        ("gpt-oss", vec![1, 2]),
        // Its last layer attends to what the second one's indexer chose.
        ("glm-5", vec![1]),
        // It borrows entries, and is limited to blocks of them that an earlier layer chose.
        ("deepseek-v4.1", vec![1, 3]),
    ] {
        let model = model(name);
        assert_eq!(model.cuts(), cuts, "{name} of {} layers", model.layers.len());
    }
    let model = model("gpt-oss");
    let stage = model.stage(1..3);
    assert_eq!((stage.layers.len(), stage.number_of(0), stage.all_layers()), (2, 1, 3));
    assert_eq!([stage.is_first_stage(), stage.is_last_stage()], [false, true]);
    assert_eq!(stage.moe_layers().map(|(layer, _)| layer).collect::<Vec<_>>(), [1, 2]);
    let inner = stage.stage(0..1);
    assert_eq!((inner.number_of(0), inner.all_layers(), inner.is_last_stage()), (1, 3, false));
}

#[test]
fn vectors_that_nobody_wants_any_longer_are_given_up_in_all_stages() {
    let loaded = small::of(model("gpt-oss"), &config());
    let mut staged = staged(&loaded, &[1, 2]);
    let width = loaded.model.config().hidden_size;
    // Of 32 MiB there is room for.
    for i in 0..80_000 * 128 / width {
        let vector: Arc<[f32]> = vec![i as f32; width].into();
        staged.hold(&mut [&vector].into_iter()).unwrap();
    }
}
