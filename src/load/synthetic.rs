//! Random weights of a real model's dimensions, for benches without a download.
//!
//! Plain random weights fool a bench: a small mean adds up from layer to layer until all hidden states look alike and
//! every token goes to the same few experts, which then stay in the processor's cache. Here every weight has mean zero,
//! and what layers add stays small beside the embeddings, so tokens stay different and routing spreads.

use half::{bf16, f16};
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::pack::{CodeType, MatrixLayout, Precisions, Row, Scales, TILE_ROWS};
use moebius_cache::quantize::{Scratch, quantize_tile};
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
            _ if name.contains("embed") => 1.0,
            _ if ["o_proj", "out_proj", "down_proj", "wo_b", "w2"].iter().any(|last| name.contains(last)) => {
                BRANCH / (cols as f32).sqrt()
            }
            _ => 1.0 / (cols as f32).sqrt(),
        };
        let seed = xxhash_rust::xxh3::xxh3_64(name.as_bytes());
        let mut data = vec![bf16::ZERO; rows * cols];
        data.par_chunks_mut(1 << 16).enumerate().for_each(|(i, part)| fill_bf16(part, rms, seed ^ i as u64));
        Ok(HostTensor::Bf16 { data: data.into(), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>> {
        let value = match name {
            _ if name.contains("linear_attn.norm") => 1.0,
            _ if name.contains("norm") => self.norm,
            _ if name.contains("conv1d") => 0.5,
            _ => 0.0,
        };
        Ok(vec![value; len].into())
    }
}

/// Packed experts of `model`, generated in their packed form.
///
/// Errors: `moebius_cache::Error` when they do not fit into memory or the precision does not fit the dimensions.
pub fn experts(model: &ModelConfig, precision: impl Into<Precisions>) -> Result<ExpertCache> {
    let precision = precision.into();
    let moe = model.moe().expect("a shape with experts");
    let layers: Vec<usize> = model.moe_layers().map(|(layer, _)| layer).collect();
    let (hidden, intermediate) = (moe.expert_width(model.hidden_size), moe.intermediate_size);
    let contents = Contents {
        model: &model.architecture,
        hidden,
        intermediate,
        num_experts: moe.num_experts,
        kind: moe.expert_kind(),
        precision: precision.clone(),
        layers: &layers,
    };
    let layouts = (0..layers.len()).map(|i| moe.expert_kind().layout(hidden, intermediate, precision.layer(i)));
    let layouts: Vec<_> = layouts.collect::<moebius_cache::Result<_>>()?;
    // A product of two normals through SiLU has a root mean square of about 0.4.
    let (up_rms, down_rms) = (1.0 / (hidden as f32).sqrt(), 2.5 * BRANCH / (intermediate as f32).sqrt());
    Ok(ExpertCache::anonymous(&contents, |layer, expert, bytes| {
        let mut random = Random((layer as u64) << 32 | expert as u64);
        let layout = layouts[layer];
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
    let (Some(row), Some(group_size)) = (layout.precision.row(), layout.precision.group_size()) else {
        return fill_bf16(bytemuck::cast_slice_mut(tile), rms, random.bits());
    };
    let Row { codes, scales, .. } = row;
    if let (CodeType::Grid(grid), Scales::Odd { halvings, .. }) = (codes, scales) {
        // Any bits are weights, of as many signs of a kind.
        tile.chunks_mut(8).for_each(|bytes| bytes.copy_from_slice(&random.bits().to_le_bytes()[..bytes.len()]));
        // The mean square of odd numbers up to 2 c + 1.
        let counts = (4.0 * (f32::from(row.largest_count()) + 1.0).powi(2) - 1.0) / 3.0;
        let d = rms / (grid.mean_square() * counts).sqrt() * f32::from(1u8 << halvings);
        let d = f16::from_f32(d).to_le_bytes();
        for group in 0..layout.k / group_size {
            let (_, head) = scales.at(group, group_size);
            tile[head..head + scales.head_bytes()].as_chunks_mut::<2>().0.fill(d);
        }
        return;
    }
    let of_integers = scales == Scales::Plain && !codes.are_floats();
    if !of_integers || codes == CodeType::Iq4 || !codes.bits().is_power_of_two() {
        // Bits of codes lie in several places, or have no mean of zero: as a checkpoint's weights.
        let mut weights = vec![bf16::ZERO; TILE_ROWS * layout.k];
        fill_bf16(&mut weights, rms, random.bits());
        let weights: Vec<f32> = weights.into_iter().map(bf16::to_f32).collect();
        return quantize_tile(layout, &weights, &mut Scratch::default(), tile);
    }
    let symmetric = symmetric(codes);
    let (scales, lines) = tile.split_at_mut(layout.scale_bytes());
    let scale = (layout.precision.scales().to_bits(rms / code_rms(codes, &symmetric)) as u16).to_le_bytes();
    scales[..layout.k / group_size * TILE_ROWS * 2].chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&scale));
    for word in lines.chunks_exact_mut(8) {
        let bytes = random.bits().to_le_bytes().map(|byte| symmetric[usize::from(byte)]);
        word.copy_from_slice(&bytes);
    }
}

/// The codes in a byte, from the lowest bits on.
fn codes_in(codes: CodeType, byte: u8) -> impl Iterator<Item = (u8, i8)> {
    let mask = 0xff >> (8 - codes.bits());
    (0..8).step_by(codes.bits()).map(move |at| (mask << at, codes.code(byte >> at & mask)))
}

/// What each random byte becomes, so that codes have mean zero: the lowest code of integers has no opposite.
fn symmetric(codes: CodeType) -> [u8; 256] {
    let [low, high] = codes.range();
    let zero = (0..8).step_by(codes.bits()).fold(0, |byte, at| byte | codes.stored(0) << at);
    let alone = |code: i8| code == low && i32::from(low) != -i32::from(high);
    std::array::from_fn(|byte| {
        codes_in(codes, byte as u8)
            .filter(|(_, code)| alone(*code))
            .fold(byte as u8, |byte, (mask, _)| byte & !mask | zero & mask)
    })
}

/// The root mean square of the codes in these bytes.
fn code_rms(codes: CodeType, bytes: &[u8; 256]) -> f32 {
    let squares = bytes.iter().flat_map(|&byte| codes_in(codes, byte)).map(|(_, code)| f32::from(code).powi(2));
    (squares.sum::<f32>() / (256 * 8 / codes.bits()) as f32).sqrt()
}

/// Uniform numbers with mean zero.
fn fill_bf16(out: &mut [bf16], rms: f32, seed: u64) {
    let mut random = Random(seed);
    let step = rms * 3f32.sqrt() / 32768.0;
    for part in out.chunks_mut(4) {
        let bits = random.bits();
        for (i, w) in part.iter_mut().enumerate() {
            let number = (((bits >> (16 * i)) as u16) as f32 - 32767.5) * step;
            // Rounded without the branches of `from_f32`, which took most of the time of a plan.
            *w = bf16::from_bits(((number.to_bits() + 0x8000) >> 16) as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use moebius_cache::Precision;
    use moebius_cache::pack::unpack_matrix;

    use super::*;

    #[test]
    fn weights_of_every_precision_have_mean_zero_and_the_size_that_was_asked_for() {
        for precision in Precision::all() {
            let layout = MatrixLayout::new(TILE_ROWS, 4096, precision).unwrap();
            let mut tile = vec![0; layout.bytes()];
            fill_tile(&layout, &mut tile, 0.02, &mut Random(7));
            let weights = unpack_matrix(&layout, &tile);
            let mean = |of: &dyn Fn(f32) -> f32| weights.iter().map(|w| of(*w)).sum::<f32>() / weights.len() as f32;
            let rms = mean(&|w| w * w).sqrt();
            // Rounded to -1, 0, 1 or 2.
            let off = if precision == Precision::Tq2_0 { 0.003 } else { 0.0004 };
            assert!(mean(&|w| w).abs() < off, "{precision}: mean {}", mean(&|w| w));
            // Codes of few bits, rounded to, spread.
            let near = match precision {
                Precision::Q2K | Precision::Tq2_0 => 0.1,
                Precision::Q3K => 0.03,
                _ => 0.02,
            };
            assert!((rms / 0.02 - 1.0).abs() < near, "{precision}: {rms}");
        }
    }
}
