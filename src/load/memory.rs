//! What a model takes of the CPU's memory.

use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::machine::Machine;
use super::spec::Spec;
use crate::Result;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::DenseBits;
use crate::experts::Epilogue;
use crate::experts::cpu::CpuExperts;
use crate::kernel::Activations;
use crate::model::ModelConfig;

/// Bytes of everything that grows with the tokens of a forward pass, of the logits, and of the workers' scratch memory.
pub(super) fn activation_bytes(spec: &Spec<'_>, machine: &Machine) -> Result<u64> {
    let Spec { model, config, .. } = *spec;
    let (tokens, rows) = (spec.cpu_tokens(), config.max_sequences);
    let (threads, kernel) = (machine.team.threads(), machine.kernel);
    // Dense layers' inputs in the form of the weights: one memory that grows to the largest.
    let prepared = |precision, k: usize, rows: usize| match k.checked_mul(rows) {
        Some(numbers) if numbers < 1 << 56 => Activations::bytes(kernel, precision, k, rows) as u128,
        _ => u128::from(u64::MAX), // a config that lies
    };
    let matrices = model.layers.iter().flat_map(|layer| layer.matrices(model.hidden_size));
    let dense = |k| config.dense.precision(k).unwrap_or(Precision::Bf16);
    let inputs = matrices.map(|(_, k)| prepared(dense(k), k, tokens)).max().unwrap_or(0);
    let head = prepared(dense(model.hidden_size), model.hidden_size, rows);

    // f32 elements of a token, as `Model::new` allocates them.
    let attention: usize = model.attentions().into_iter().map(|attention| attention.activation_len()).sum();
    let mut widths: Vec<usize> = model.layers.iter().filter_map(|layer| layer.ffn.mlp_width()).collect();
    widths.sort_unstable();
    widths.dedup();
    let routing = model.moe().map_or(0, |moe| moe.num_experts + 2 * moe.router.top_k);
    let ropes = model.ropes().iter().map(|rope| rope.dim).sum::<usize>();
    let token = 2 * model.hidden_size + ropes + attention + 3 * widths.iter().sum::<usize>() + routing;
    let logits = 2 * (model.hidden_size + model.vocab_size);
    // Of one worker: a tile of queries, its scores, what they weight, and two segments' sums.
    const TILE: usize = 64;
    let (key_dim, value_dim) = model
        .layers
        .iter()
        .map(|layer| layer.attention.kv_dims())
        .fold((0, 0), |a, (_, key, values)| (a.0.max(key), a.1.max(values.dim())));
    let scratch = prepared(Precision::Bf16, key_dim, TILE)
        + prepared(Precision::Bf16, BLOCK_SIZE, TILE)
        + wide(&[4, TILE, 2 * BLOCK_SIZE + 3 * value_dim.next_multiple_of(TILE_ROWS)]);
    let experts = match (spec.expert_layout()?, model.moe()) {
        (Some(layout), Some(moe)) if tokens.saturating_mul(model.hidden_size.max(moe.intermediate_size)) < 1 << 48 => {
            CpuExperts::bytes(&layout, kernel, threads, tokens, moe.router.top_k) as u128
        }
        (Some(_), Some(_)) => u128::from(u64::MAX),
        _ => 0,
    };
    Ok(saturated(
        inputs.max(head) + wide(&[4, tokens, token]) + wide(&[4, rows, logits]) + threads as u128 * scratch + experts,
    ))
}

/// Bytes of all weights but the routed experts.
pub(super) fn resident_bytes(model: &ModelConfig, dense: DenseBits) -> u64 {
    // Whole tiles, as `MatrixLayout` has them.
    let packed = |n: usize, k: usize, precision| {
        let tile_bytes = MatrixLayout { n, k, precision }.tile_bytes();
        wide(&[n.div_ceil(TILE_ROWS), tile_bytes])
    };
    let linear = |(n, k): (usize, usize)| packed(n, k, dense.precision(k).unwrap_or(Precision::Bf16));
    let h = model.hidden_size;
    let layers = model.layers.iter().map(|layer| {
        let (heads, matrices) = layer.attention.head_matrices();
        let head: u128 = matrices.into_iter().map(|(n, k)| packed(n, k, Precision::Bf16)).sum();
        let heads = heads as u128 * head + 4 * layer.attention.f32_weights(h) as u128;
        let router = layer.ffn.moe().map_or(0, |moe| wide(&[4, h, moe.num_experts]));
        layer.matrices(h).into_iter().map(linear).sum::<u128>() + heads + router
    });
    saturated(
        layers.sum::<u128>()
            + u128::from(Epilogue::bytes(model))
            + wide(&[2, h, model.vocab_size])
            + linear((model.vocab_size, h)),
    )
}

/// A config that lies makes products that u64 does not hold.
fn wide(dims: &[usize]) -> u128 {
    dims.iter().map(|&n| n as u128).product()
}

fn saturated(bytes: u128) -> u64 {
    bytes.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::config::{EngineConfig, ExpertBits};
    use crate::forward::weights::Weights;
    use crate::load::{Description, Kept, ModelFolder, machine};
    use crate::machine::topology::Topology;
    use crate::model::families;

    fn one_core() -> Machine {
        machine(&EngineConfig { threads: Some(1), ..EngineConfig::default() }, &Topology::read()).unwrap()
    }

    #[test]
    fn resident_weights_take_what_was_reckoned() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let folders = std::fs::read_dir(fixtures).unwrap().filter_map(|entry| {
            let dir = entry.unwrap().path();
            ModelFolder::open(&dir.display().to_string(), Description::read(&dir).ok()?).ok()
        });
        let folders: Vec<_> = folders.collect();
        assert!(folders.len() >= 15, "those that stand in tests/fixtures");
        for ModelFolder { name, model, checkpoint, .. } in folders {
            for dense in [DenseBits::Bf16, DenseBits::Int8, DenseBits::Int4] {
                let Machine { team, kernel, .. } = one_core();
                let backend = Cpu::new(team, kernel);
                let Ok(weights) = Weights::load(&backend, &checkpoint, &model, dense, &|_, _| Ok(())) else {
                    assert_ne!(dense, DenseBits::Bf16); // rows that have no groups
                    continue;
                };
                // What a token does not read, or only some of: not counted there.
                let h = model.hidden_size;
                let routers: usize = model.moe_layers().map(|(_, moe)| 4 * h * moe.num_experts).sum();
                let rules: usize = model.layers.iter().map(|layer| 4 * layer.attention.f32_weights(h)).sum();
                let rest = routers + rules + 2 * h * model.vocab_size + Epilogue::bytes(&model) as usize;
                let read = weights.bytes_per_token(&backend) + rest;
                assert_eq!(resident_bytes(&model, dense), read as u64, "{name} {dense}");
            }
        }
    }

    #[test]
    fn a_batch_costs_what_its_pairs_take() {
        let model = families::shapes::shape("qwen3-30b-a3b", None).unwrap();
        let of = |experts, tokens| {
            let config = EngineConfig { experts, max_batch_tokens: Some(tokens), ..EngineConfig::default() };
            activation_bytes(&Spec::new(&model, &config, Kept::NOTHING).unwrap(), &one_core()).unwrap()
        };
        // Of each of 8 pairs of a token: its input and its intermediate row as codes, and the latter as f32.
        let more = of(ExpertBits::Int4, 4096) - of(ExpertBits::Int4, 512);
        assert!(more > 3584 * 8 * (2048 + 768 + 4 * 768), "{more}");
        // In BF16 4 bytes or more of each.
        let bf16 = of(ExpertBits::Bf16, 4096) - of(ExpertBits::Bf16, 512);
        assert!(bf16 > 3584 * 8 * (4 * (2048 + 768) + 4 * 768), "{bf16}");
    }
}
