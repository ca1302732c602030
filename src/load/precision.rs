//! Which precision the routed experts have: as asked, or as the checkpoint keeps them.

use std::path::Path;

use moebius_cache::Precision;
use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::codec::{Quantization, kept_by_all};
use moebius_cache::pack::{GROUP_SIZES, largest_group_size};

use super::cache::cache_job;
use crate::config::{EngineConfig, ExpertBits};
use crate::model::ModelConfig;
use crate::{Error, Result};

/// The precision of the routed experts. Errors: no group size divides, or the one asked for does not.
pub fn precision(model: &ModelConfig, config: &EngineConfig) -> Result<Option<Precision>> {
    let Some(moe) = model.moe() else { return Ok(None) };
    let (hidden, width) = (model.hidden_size, moe.intermediate_size);
    let largest = largest_group_size(&[hidden, width]);
    let group_size = || match config.group_size {
        Some(g) if !GROUP_SIZES.contains(&g) => Err(Error::Invalid(format!("--group-size {g} is not 32, 64 or 128"))),
        Some(g) if hidden % g != 0 || width % g != 0 => Err(Error::Invalid(format!(
            "--group-size {g} does not divide this model's rows of {hidden} and {width} weights: {}",
            match largest {
                Some(fits) => format!("use --group-size {fits}"),
                None => "use --experts bf16".into(),
            }
        ))),
        Some(g) => Ok(g),
        None => config.kept.and_then(Precision::group_size).into_iter().chain(largest).min().ok_or_else(|| {
            Error::Invalid(format!(
                "rows of {hidden} and {width} weights cannot be cut into groups of 32: use --experts bf16"
            ))
        }),
    };
    let int8 = || group_size().map(Precision::int8);
    let int4 = || group_size().map(Precision::int4);
    let precision = match (config.experts, config.kept) {
        (ExpertBits::Bf16, _) | (ExpertBits::Auto, Some(Precision::Bf16)) => Precision::Bf16,
        (ExpertBits::Auto, Some(Precision::Mxfp4)) if config.group_size.is_none_or(|group_size| group_size == 32) => {
            Precision::Mxfp4
        }
        (ExpertBits::Int8, _) | (ExpertBits::Auto, Some(Precision::Int8 { .. } | Precision::Mxfp4)) => int8()?,
        (ExpertBits::Int4, _) | (ExpertBits::Auto, Some(Precision::Int4 { .. }) | None) => int4()?,
    };
    Ok(Some(precision.with_scales(config.kept.unwrap_or(Precision::Bf16).scales())))
}

/// What `--experts auto`, and no `--group-size`, mean for the weights in `checkpoint`: what keeps them as they are.
///
/// What is wrong with a tensor is said by whoever reads it, after all that can be refused without reading any.
pub fn for_checkpoint(config: &EngineConfig, model: &ModelConfig, checkpoint: &Checkpoint) -> EngineConfig {
    if model.moe().is_none() {
        return config.clone();
    }
    let job = cache_job("", checkpoint, model, Precision::Bf16);
    let mut all = Vec::new();
    // Formats change from layer to layer and between gate, up and down, not from expert to expert.
    for expert in job.layers.iter().filter_map(|layer| layer.experts.first()) {
        let Ok(sources) = job.sources(expert) else { return config.clone() };
        all.extend(sources);
    }
    EngineConfig { kept: kept_by_all(&all), ..config.clone() }
}

/// The same from a `config.json` alone, whose weights need not be here.
pub fn for_folder(config: &EngineConfig, model: &ModelConfig, dir: &Path) -> Result<EngineConfig> {
    match Checkpoint::open(dir) {
        Ok(checkpoint) => Ok(for_checkpoint(config, model, &checkpoint)),
        Err(_) => {
            let inputs: Vec<usize> = model.moe().map_or(vec![], |moe| vec![model.hidden_size, moe.intermediate_size]);
            Ok(EngineConfig { kept: Quantization::of_folder(dir)?.kept_by(&inputs), ..config.clone() })
        }
    }
}
