//! What the tests of whole models share.
#![allow(dead_code, unreachable_pub, unused_macros, unused_imports)] // each test binary uses its part

pub mod checkpoint;
pub mod engine;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod group;
pub mod served;
pub mod small;
pub mod tls;

use std::env::var_os;
use std::io::Write;
use std::path::{Path, PathBuf};

use moebius::backend::batch::{BLOCK_SIZE, Batch};
use moebius::config::EngineConfig;
use moebius::engine::sampler::argmax;
use moebius::forward::Forward;
use moebius::forward::block_pool::{BlockPool, BlockTable};
use moebius::load::{self, Description, Loaded, ModelFolder};
use moebius::model::ModelConfig;
use safetensors::SafeTensors;

/// A small checkpoint with what HF transformers computes from it.
pub struct Fixture {
    pub dir: PathBuf,
    reference: Vec<u8>,
}

/// The checkout, or what stands for it where tests run that were built elsewhere (`scripts/gpu-bundle`): Cargo's
/// variable says.
pub fn root() -> PathBuf {
    var_os("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into()).into()
}

pub fn fixture_dir(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

pub fn demo_dir(name: &str) -> PathBuf {
    root().join("demo").join(name)
}

/// Caches of this test run; Cargo's own folder for test data.
pub fn cache_dir() -> PathBuf {
    PathBuf::from(var_os("CARGO_TARGET_TMPDIR").unwrap_or(env!("CARGO_TARGET_TMPDIR").into())).join("cache")
}

/// Past the test runner, which keeps what a passing test prints.
pub fn say_skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

/// Opens a checkpoint's folder.
pub fn folder(name: &str, dir: &Path) -> ModelFolder {
    ModelFolder::open(name, Description::read(dir).unwrap()).unwrap()
}

/// What the model in a folder is.
pub fn model_in(dir: &Path) -> ModelConfig {
    Description::read(dir).unwrap().model().unwrap()
}

/// Loads a checkpoint with small limits.
pub fn load(dir: &Path, config: &EngineConfig) -> Loaded {
    load::load(&folder("test", dir), &limited(config, model_in(dir).max_context), &|_| {}).unwrap()
}

/// What packing as `--experts auto` does it adds to the experts of a checkpoint, where it adds most; 0: nothing.
pub fn experts_rounding(dir: &Path) -> f64 {
    let (folder, config) = (folder("test", dir), EngineConfig::default());
    let components = load::components::components(&folder.checkpoint, &folder.spec(&config).unwrap()).unwrap();
    components.iter().filter(|component| component.is_experts()).map(|component| component.rounding).fold(0.0, f64::max)
}

/// A demo model or one of [`small`], with the same limits.
pub fn load_model(name: &str, config: &EngineConfig) -> Loaded {
    small::model(name, &limited(config, usize::MAX))
}

fn limited(config: &EngineConfig, most: usize) -> EngineConfig {
    EngineConfig {
        cache_dir: Some(cache_dir()),
        max_context: Some(most.min(2048)),
        threads: config.threads.or(Some(2)),
        ..config.clone()
    }
}

impl Fixture {
    pub fn open(name: &str) -> Self {
        let dir = fixture_dir(name);
        let reference = std::fs::read(dir.join("reference.safetensors")).unwrap();
        Self { dir, reference }
    }

    pub fn load(&self, config: &EngineConfig) -> Loaded {
        load(&self.dir, config)
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.reference).unwrap().tensor(name).unwrap().data().to_vec()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn tokens(&self, name: &str) -> Vec<u32> {
        self.bytes(name).chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }
}

/// One sequence run by hand: its blocks and how far it is.
pub struct Run {
    pub blocks: BlockTable,
    pub position: usize,
    pub slot: usize,
}

impl Run {
    pub fn new(pool: &mut BlockPool, tokens: usize) -> Self {
        let mut blocks = BlockTable::default();
        assert!(pool.grow(&mut blocks, tokens));
        Self { blocks, position: 0, slot: 0 }
    }

    /// The same with its recurrent state, if the model has any, in this slot.
    pub fn in_slot(self, slot: usize) -> Self {
        Self { slot, ..self }
    }

    /// Adds `tokens` of this sequence to a batch; returns the row of the last one.
    pub fn push(&mut self, batch: &mut Batch, tokens: &[u32]) -> usize {
        batch.push(tokens, self.position, &self.blocks).slot = self.slot;
        self.position += tokens.len();
        batch.len() - 1
    }
}

/// Logits of `rows` after one pass over `batch`.
pub fn step(model: &mut dyn Forward, batch: &Batch, rows: &[usize]) -> Vec<Vec<f32>> {
    model.forward(batch, None).unwrap();
    let vocab = model.config().vocab_size;
    model.logits(rows).unwrap().chunks(vocab).map(<[f32]>::to_vec).collect()
}

/// The greedy continuation of a prompt, decoded token by token after one prefill.
pub fn greedy(loaded: &mut Loaded, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut pool = BlockPool::new(loaded.kv_blocks);
    let mut run = Run::new(&mut pool, prompt.len() + tokens);
    assert!(run.blocks.len() * BLOCK_SIZE >= prompt.len() + tokens);
    let (mut next, mut answer) = (prompt.to_vec(), Vec::new());
    let mut batch = Batch::default();
    for _ in 0..tokens {
        batch.clear();
        let row = run.push(&mut batch, &next);
        let logits = step(&mut *loaded.model, &batch, &[row]);
        next = vec![argmax(&logits[0]) as u32];
        answer.push(next[0]);
    }
    answer
}

/// Largest error of a number, relative to the largest of its row.
pub fn worst_row(got: &[f32], want: &[f32], cols: usize) -> f32 {
    assert_eq!(got.len(), want.len());
    let row = |(g, w): (&[f32], &[f32])| {
        let largest = w.iter().fold(0f32, |m, v| m.max(v.abs()));
        g.iter().zip(w).fold(0f32, |m, (g, w)| m.max((g - w).abs())) / largest
    };
    got.chunks(cols).zip(want.chunks(cols)).map(row).fold(0.0, f32::max)
}

/// Cosine of the angle between two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// RAM that this process holds.
pub fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
