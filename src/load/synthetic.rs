//! Random weights of a real model's dimensions, for benches without a download.
//!
//! Plain random weights fool a bench: a small mean adds up from layer to layer until all hidden states look alike and
//! every token goes to the same few experts, which then stay in the processor's cache. Here every weight has mean zero,
//! and what layers add stays small beside the embeddings, so tokens stay different and routing spreads.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};
use rayon::prelude::*;

use crate::Result;
use crate::backend::source::TensorSource;
use crate::backend::tensor::HostTensor;
use crate::kernel::random::Random;
use crate::model::ModelConfig;

/// What a layer adds to the residual stream, beside an embedding of 1 (root mean squares).
const BRANCH: f32 = 0.15;

/// Resident weights that come from nowhere.
pub struct Synthetic {
    norm: f32, // what a model stores of a norm that does nothing
}

impl Synthetic {
    /// Weights for `model`.
    pub fn of(model: &ModelConfig) -> Self {
        Self { norm: 1.0 - model.norm_offset }
    }
}

impl TensorSource for Synthetic {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let rms = match name {
            _ if name.contains("embed_tokens") => 1.0,
            _ if name.contains("o_proj") || name.contains("out_proj") || name.contains("down_proj") => {
                BRANCH / (cols as f32).sqrt()
            }
            _ => 1.0 / (cols as f32).sqrt(),
        };
        let seed = xxhash_rust::xxh3::xxh3_64(name.as_bytes());
        let mut data = vec![bf16::ZERO; rows * cols];
        data.par_chunks_mut(1 << 16).enumerate().for_each(|(i, part)| fill_bf16(part, rms, seed ^ i as u64));
        Ok(HostTensor::Bf16 { data: data.into(), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let value = match name {
            _ if name.contains("linear_attn.norm") => 1.0,
            _ if name.contains("norm") => self.norm,
            _ if name.contains("conv1d") => 0.5,
            _ => 0.0,
        };
        Ok(vec![value; len])
    }
}

/// Packed experts of `model`, generated in their packed form.
///
/// Errors: `moebius_cache::Error` when they do not fit into memory or the precision does not fit the dimensions.
pub fn experts(model: &ModelConfig, precision: Precision) -> Result<ExpertCache> {
    let moe = model.moe().expect("a shape with experts");
    let layers: Vec<usize> = model.moe_layers().map(|(layer, _)| layer).collect();
    let (hidden, intermediate) = (model.hidden_size, moe.intermediate_size);
    let contents = Contents {
        model: &model.architecture,
        hidden,
        intermediate,
        num_experts: moe.num_experts,
        precision,
        layers: &layers,
    };
    let layout = ExpertLayout::new(hidden, intermediate, precision)?;
    // A product of two normals through SiLU has a root mean square of about 0.4.
    let (up_rms, down_rms) = (1.0 / (hidden as f32).sqrt(), 2.5 * BRANCH / (intermediate as f32).sqrt());
    Ok(ExpertCache::anonymous(&contents, |layer, expert, bytes| {
        let mut random = Random((layer as u64) << 32 | expert as u64);
        let (gate_up, down) = bytes.split_at_mut(layout.down_tile(0));
        for tile in gate_up.chunks_exact_mut(layout.gate.tile_bytes()) {
            fill_tile(&layout.gate, tile, up_rms, &mut random);
        }
        for tile in down.chunks_exact_mut(layout.down.tile_bytes()) {
            fill_tile(&layout.down, tile, down_rms, &mut random);
        }
    })?)
}

fn fill_tile(layout: &MatrixLayout, tile: &mut [u8], rms: f32, random: &mut Random) {
    // Codes are uniform and symmetric: -7..7 have a root mean square of 4.32, -127..127 of 73.3, those of MXFP4 of
    // 5.85.
    let (zero, code_rms) = match layout.precision {
        Precision::Bf16 => return fill_bf16(bytemuck::cast_slice_mut(tile), rms, random.bits()),
        Precision::Int8 { .. } => (0x80, 73.3),
        Precision::Int4 { .. } => (0x88, 4.32),
        Precision::Mxfp4 => (0x00, 5.85),
    };
    let (scales, codes) = tile.split_at_mut(layout.scale_bytes());
    let groups = layout.k / layout.precision.group_size().expect("all but BF16 have groups");
    let scale = layout.precision.scales().to_bits(rms / code_rms).to_le_bytes();
    scales[..groups * TILE_ROWS * 2].chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&scale));
    for word in codes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.bits().to_le_bytes());
        for byte in word {
            // The lowest code of integers has no opposite: it becomes zero.
            if zero == 0x80 {
                *byte = if *byte == 0 { 0x80 } else { *byte };
            } else {
                *byte |= if *byte & 0x0f == 0 { zero & 0x0f } else { 0 };
                *byte |= if *byte & 0xf0 == 0 { zero & 0xf0 } else { 0 };
            }
        }
    }
}

/// Uniform numbers with mean zero.
fn fill_bf16(out: &mut [bf16], rms: f32, seed: u64) {
    let mut random = Random(seed);
    let step = rms * 3f32.sqrt() / 32768.0;
    for part in out.chunks_mut(4) {
        let bits = random.bits();
        for (i, w) in part.iter_mut().enumerate() {
            *w = bf16::from_f32((((bits >> (16 * i)) as u16) as f32 - 32767.5) * step);
        }
    }
}
