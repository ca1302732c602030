//! What each part of a checkpoint is stored as, what it becomes in memory, and what that costs in exactness.

use std::collections::BTreeMap;

use moebius_cache::Precision;
use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::convert::rounding;

use super::spec::Spec;
use crate::config::Device;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Matrices of one role in one format.
#[derive(Clone, Debug, PartialEq)]
pub struct Component {
    /// Its name without the layer: `self_attn.q_proj`, `experts.gate_proj`.
    pub role: String,
    /// How it is stored.
    pub format: String,
    /// Layers that have it so.
    pub layers: usize,
    /// What it becomes; `None`: f32, as it is.
    pub precision: Option<Precision>,
    /// Whether its integers stay as they are, and at most their scales are rounded.
    pub keeps_codes: bool,
    /// What packing adds, as a share of the weights: root mean squares, measured on some of the rows of one of them.
    pub rounding: f64,
}

impl Component {
    /// Whether it is routed experts.
    pub fn is_experts(&self) -> bool {
        self.role.starts_with("experts.")
    }
}

impl std::fmt::Display for Component {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let precision = self.precision.map_or("f32".to_string(), |precision| precision.to_string());
        let layers = if self.layers == 1 { String::new() } else { format!(" ({} layers)", self.layers) };
        write!(f, "{}{layers}: {} -> {precision}, ", self.role, self.format)?;
        match self.rounding {
            0.0 => write!(f, "exact"),
            share if self.keeps_codes => write!(f, "codes as they are, scales rounded: {:.2}%", 100.0 * share),
            share => write!(f, "rounding adds {:.2}%", 100.0 * share),
        }
    }
}

/// Every role and format among the matrices that the model of `spec` uses.
///
/// Errors: a tensor of an unknown type, or holding NaN.
pub fn components(checkpoint: &Checkpoint, spec: &Spec<'_>) -> Result<Vec<Component>> {
    let Spec { model, config, precision: ref experts, .. } = *spec;
    let stored = spec.stored_weights()?;
    let mut found: BTreeMap<(String, String), Component> = BTreeMap::new();
    for (name, shape) in checkpoint.matrices() {
        let Some(role) = role(&name, model) else { continue };
        // A stacked tensor says the shape of a matrix only up to its order: experts have theirs from the model.
        let shape = match (role.strip_prefix("experts."), model.moe()) {
            (Some(part), Some(moe)) if part == model.names.expert_projections[2] => {
                [moe.expert_width(model.hidden_size), moe.intermediate_size]
            }
            (Some(_), Some(moe)) => [moe.intermediate_size, moe.expert_width(model.hidden_size)],
            _ => shape,
        };
        let source = checkpoint.source(&name, shape)?;
        let key = (role.clone(), source.format().to_string());
        if let Some(component) = found.get_mut(&key) {
            component.layers += 1;
            continue;
        }
        let mut component =
            Component { role, format: key.1.clone(), layers: 1, precision: None, keeps_codes: false, rounding: 0.0 };
        let is_router = component.role == in_block(model.names.router, model);
        if !is_router {
            let sensitive = component.role == "lm_head" || makes_keys_or_values(&name, &component.role, model);
            let bits = match () {
                _ if sensitive => config.dense.of_sensitive(),
                _ if is_out(&component.role, model) => config.dense.of_out(),
                _ if last_part(&component.role) == model.names.mlp_projections[2] => config.dense.of_down(),
                _ => config.dense,
            };
            let dense = || match (stored.contains_key(&name), &config.device) {
                (true, _) => source.held_by(),
                (false, Device::Cuda(_)) => bits.precision_on_gpu(shape[1]),
                (false, _) => bits.precision(shape[1]),
            };
            let is_down = |part: &str| part == model.names.expert_projections[2];
            let precision = match (component.role.strip_prefix("experts."), experts) {
                (Some(part), Some(precision)) => {
                    let layer = precision.layer(moe_layer(&name, model));
                    if is_down(part) { layer.down } else { layer.gate }
                }
                _ if component.role == model.names.embedding => Precision::Bf16,
                _ => dense().unwrap_or(Precision::Bf16),
            };
            component.rounding = rounding(&source, precision).map_err(Error::from)?;
            component.keeps_codes = source.fits(precision);
            component.precision = Some(precision);
        }
        found.insert(key, component);
    }
    Ok(found.into_values().collect())
}

/// The layer that a matrix is in.
fn layer_of(name: &str) -> Option<usize> {
    name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.')?.0.parse().ok())
}

/// The index of that layer among those with experts.
fn moe_layer(name: &str, model: &ModelConfig) -> usize {
    model.moe_layers().position(|(of, _)| Some(of) == layer_of(name)).unwrap_or(0)
}

/// The last part of a role.
fn last_part(role: &str) -> &str {
    role.rsplit_once('.').map_or(role, |(_, part)| part)
}

fn makes_keys_or_values(name: &str, role: &str, model: &ModelConfig) -> bool {
    let layer = layer_of(name).and_then(|layer| model.layers.get(layer));
    layer.is_some_and(|layer| layer.attention.keys_and_values().contains(&last_part(role)))
}

/// Whether it is attention's last projection.
fn is_out(role: &str, model: &ModelConfig) -> bool {
    [model.names.o, "o_proj", "out_proj", "wo_b"].contains(&last_part(role))
}

/// What a matrix is in the model, without layer and expert; `None`: it is not in it.
fn role(name: &str, model: &ModelConfig) -> Option<String> {
    let name = name.strip_suffix(".weight")?;
    if name == model.names.head {
        return Some("lm_head".into());
    }
    let name = name.strip_prefix(model.names.body)?;
    let Some(rest) = name.strip_prefix("layers.") else {
        return (name == model.names.embedding).then(|| name.to_string());
    };
    let (layer, part) = rest.split_once('.')?;
    // Kept in f32; a matrix only where GGUF leaves out its dimension of one.
    if part.ends_with("conv1d") || part.ends_with(".norm") {
        return None;
    }
    // Looked up where it is.
    if part.starts_with("ple.ple_embedding.") {
        return None;
    }
    let part = part.replace(".experts.0.", ".experts.");
    (layer.parse::<usize>().ok()? < model.layers.len()).then(|| in_block(&part, model).to_string())
}

/// A part of a layer without the name of the block that has the experts.
fn in_block<'a>(part: &'a str, model: &ModelConfig) -> &'a str {
    let block = model.names.experts.strip_suffix("experts").unwrap_or_default();
    part.strip_prefix(block).unwrap_or(part)
}
