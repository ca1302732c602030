//! Where caches of packed experts are kept, and the conversion that makes one.

use std::path::{Path, PathBuf};

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::convert::{Calibration, ExpertSource, Inputs, Job, LayerSource};
use moebius_cache::pack::Precisions;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::EngineConfig;
use crate::model::{Activation, ModelConfig};
use crate::{Error, Result};

/// Where expert caches are kept.
pub fn cache_dir(config: &EngineConfig) -> Result<PathBuf> {
    if let Some(dir) = &config.cache_dir {
        return Ok(dir.clone());
    }
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    base.map(|b| b.join("moebius"))
        .ok_or_else(|| Error::Invalid("neither HOME nor XDG_CACHE_HOME is set: give --cache-dir".into()))
}

/// The conversion that a model in `precision` needs.
pub fn cache_job<'a>(
    name: &str,
    checkpoint: &'a Checkpoint,
    model: &ModelConfig,
    precision: impl Into<Precisions>,
) -> Job<'a> {
    let moe = model.moe().expect("a model with a precision of experts has experts");
    let layers = model.moe_layers().map(|(layer, moe)| {
        let expert = |e: usize| {
            let [gate, up, down] = model.names.expert(layer, e);
            ExpertSource { gate, up, down }
        };
        LayerSource { layer, experts: (0..moe.num_experts).map(expert).collect() }
    });
    Job {
        checkpoint,
        model: name.to_string(),
        hidden: moe.expert_width(model.hidden_size),
        intermediate: moe.intermediate_size,
        num_experts: moe.num_experts,
        kind: moe.expert_kind(),
        precision: precision.into(),
        weights_suffice: !moe.expert_bias && moe.activation == Activation::Silu,
        layers: layers.collect(),
        calibration: None,
    }
}

/// What tells a calibration file from others: its name and content.
pub fn calibration_name(path: &Path) -> Result<String> {
    let bytes = moebius_cache::file::read(path).map_err(Error::io(path))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!("{name} ({:016x})", xxh3_64(&bytes)))
}

/// `job`, calibrated with the file of this [`calibration_name`], if there is one; `inputs` make a cache that is not
/// there.
pub fn calibrated<'a>(job: Job<'a>, name: Option<&'a str>, inputs: Option<&'a dyn Inputs>) -> Job<'a> {
    Job { calibration: name.map(|name| Calibration { name, inputs }), ..job }
}
