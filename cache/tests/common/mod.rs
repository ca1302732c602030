//! Small models made on the spot.
#![allow(dead_code, unreachable_pub)] // each test binary uses its own part

pub mod gguf_file;
pub mod written;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use moebius_cache::convert::{ConvertPhase, ExpertSource, Job, LayerSource, Progress, ensure};
use moebius_cache::{Checkpoint, ExpertCache, Precision, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Deterministic values in -1..1, roughly normal.
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() + uniform()) / 2.0).collect()
}

/// A model of `layers` layers with experts, each in a shard of its own; layer numbers start at 1.
#[derive(Clone, Copy)]
pub struct Model {
    pub layers: usize,
    pub experts: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub seed: u64,
}

pub const SMALL: Model = Model { layers: 4, experts: 6, hidden: 96, intermediate: 64, seed: 5 };
pub const INT4: Precision = Precision::int4(32);

impl Model {
    pub fn source(&self, layer: usize) -> LayerSource {
        let name = |e: usize, part: &str| format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
        let expert = |e| ExpertSource { gate: name(e, "gate"), up: name(e, "up"), down: name(e, "down") };
        LayerSource { layer, experts: (0..self.experts).map(expert).collect() }
    }

    pub fn job<'a>(&self, checkpoint: &'a Checkpoint, precision: Precision) -> Job<'a> {
        let layers = (1..=self.layers).map(|layer| self.source(layer)).collect();
        let &Model { experts: num_experts, hidden, intermediate, .. } = self;
        Job {
            checkpoint,
            model: "a/small model".into(),
            hidden,
            intermediate,
            num_experts,
            kind: Default::default(),
            precision: precision.into(),
            weights_suffice: true,
            layers,
            calibration: None,
        }
    }

    /// BF16 bytes of the weights of one tensor: `part` 0 is gate, 1 is up, 2 is down.
    pub fn weights(&self, layer: usize, expert: usize, part: usize) -> Vec<u8> {
        let seed = self.seed * 1_000_003 + ((layer * 1000 + expert) * 3 + part) as u64 * 7919;
        let weights = noise(self.hidden * self.intermediate, seed);
        weights.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect()
    }

    pub fn shard(&self, dir: &Path, layer: usize) -> PathBuf {
        dir.join(format!("model-{layer:05}.safetensors"))
    }

    pub fn write_layer(&self, dir: &Path, layer: usize, edit: impl Fn(&str, &mut Vec<u8>)) {
        let mut tensors = BTreeMap::new();
        for (e, source) in self.source(layer).experts.into_iter().enumerate() {
            let (wide, tall) = (vec![self.intermediate, self.hidden], vec![self.hidden, self.intermediate]);
            for (part, (name, shape)) in
                [(source.gate, wide.clone()), (source.up, wide), (source.down, tall)].into_iter().enumerate()
            {
                let mut bytes = self.weights(layer, e, part);
                edit(&name, &mut bytes);
                tensors.insert(name, (shape, bytes));
            }
        }
        let views = tensors
            .iter()
            .map(|(name, (shape, bytes))| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
        // A new file, not the old one written over: what has it mapped keeps its bytes.
        let temporary = dir.join("new");
        safetensors::serialize_to_file(views, None, &temporary).unwrap();
        std::fs::rename(temporary, self.shard(dir, layer)).unwrap();
    }

    pub fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir).unwrap();
        (1..=self.layers).for_each(|layer| self.write_layer(dir, layer, |_, _| ()));
    }

    /// `ensure` on a checkpoint opened anew, with the phases it went through.
    pub fn ensure(&self, dir: &Path, cache_dir: &Path) -> (Result<ExpertCache>, Vec<ConvertPhase>) {
        let phases = Mutex::new(Vec::new());
        let checkpoint = Checkpoint::open(dir).unwrap();
        let cache = ensure(&self.job(&checkpoint, INT4), cache_dir, &|progress: Progress| {
            let mut phases = phases.lock().unwrap();
            if phases.last() != Some(&progress.phase) {
                phases.push(progress.phase);
            }
        });
        (cache, phases.into_inner().unwrap())
    }
}

/// Names of the files in a folder, sorted.
pub fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
