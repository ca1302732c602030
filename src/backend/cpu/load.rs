//! Resident weights in host memory, packed in tiles as the kernels read them.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};
use rayon::prelude::*;

use super::Cpu;
use crate::backend::tensor::HostTensor;
use crate::backend::{DeltaRule, Load, RouterTensors};
use crate::config::DenseBits;
use crate::machine::memory::Buffer;
use crate::model::{self, Mla};
use crate::{Error, Result};

/// Packed weights `[n, k]` of `y = W x + b`.
pub struct Linear {
    pub(super) layout: MatrixLayout,
    pub(super) tiles: Buffer<u8>,
    pub(super) bias: Option<Vec<f32>>,
}

/// Room for weights that any worker may read: from all nodes' memory in turn, so that each step uses every node's
/// bandwidth.
fn interleaved(bytes: usize, nodes: &[usize]) -> Result<Buffer<u8>> {
    let buffer = Buffer::zeros(bytes)?;
    if nodes.len() > 1 {
        // Refused in some containers: pages then lie where they are first written.
        let _ = buffer.interleave(nodes);
    }
    Ok(buffer)
}

/// A whole matrix, packed on all cores.
pub(crate) fn packed(layout: &MatrixLayout, weight: &HostTensor<'_>) -> Vec<u8> {
    let mut tiles = vec![0; layout.bytes()];
    pack(layout, weight, 0, &mut tiles);
    tiles
}

/// Packs the matrix that begins at row `first` of `weight` on all cores; of other forms than packed there is a tile at
/// a time.
fn pack(layout: &MatrixLayout, weight: &HostTensor<'_>, first: usize, tiles: &mut [u8]) {
    tiles.par_chunks_mut(layout.tile_bytes()).enumerate().for_each(|(i, tile)| {
        let (from, to) = (i * TILE_ROWS, layout.n.min((i + 1) * TILE_ROWS));
        let layout = MatrixLayout { n: to - from, ..*layout };
        moebius_cache::quantize::quantize_matrix(&layout, &weight.rows_to_f32(first + from..first + to), tile);
    });
}

/// Packed weights `[heads, n, k]`, each head with tiles of its own.
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) layout: MatrixLayout, // of one head
    pub(super) tiles: Buffer<u8>,
}

impl Heads {
    fn new(heads: usize, weight: HostTensor<'_>, nodes: &[usize]) -> Result<Self> {
        let layout = MatrixLayout::new(weight.rows() / heads, weight.cols(), Precision::Bf16)?;
        let mut tiles = interleaved(heads * layout.bytes(), nodes)?;
        for (head, tiles) in tiles.chunks_exact_mut(layout.bytes()).enumerate() {
            pack(&layout, &weight, head * layout.n, tiles);
        }
        Ok(Self { heads, layout, tiles })
    }
}

/// `kv_b_proj` split for absorption.
pub struct LatentUp {
    pub(super) config: Mla,
    pub(super) key: Heads,   // per head [kv_lora_rank, nope]: moves a query into the latent's space
    pub(super) value: Heads, // per head [v_head_dim, kv_lora_rank]: reads a value out of a latent
}

/// What a layer of gated DeltaNet has beside its projections.
pub struct DeltaNet {
    pub(super) config: model::DeltaNet,
    pub(super) taps: Vec<f32>,     // [conv_width, conv_dim]
    pub(super) gates: Vec<f32>,    // [b and a, value heads, hidden]
    pub(super) rates: Vec<f32>,    // [value heads], exp(A_log)
    pub(super) dt_bias: Vec<f32>,  // [value heads]
    pub(super) norm: Vec<f32>,     // [value_head_dim]
    pub(super) eps: f32,           // of the norm
    pub(super) of_query: Vec<f32>, // [key_head_dim], what makes an L2 norm, scaled, of an RMS norm
    pub(super) of_key: Vec<f32>,   // [key_head_dim]
}

/// `[vocab, hidden]` bf16.
pub struct Embedding(pub(super) Buffer<bf16>);

/// Copies a weight, rounding f32 to bf16.
fn to_bf16(weight: &HostTensor<'_>) -> Result<Buffer<bf16>> {
    const CHUNK: usize = 1 << 18;
    let mut buffer = Buffer::zeros(weight.rows() * weight.cols())?;
    match weight {
        HostTensor::Bf16 { data, .. } => {
            buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
        }
        HostTensor::F32 { data, .. } => {
            buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| {
                to.iter_mut().zip(from).for_each(|(t, f)| *t = bf16::from_f32(*f));
            });
        }
    }
    Ok(buffer)
}

impl Load for Cpu {
    type Linear = Linear;
    type LatentUp = LatentUp;
    type DeltaNet = DeltaNet;
    type Norm = Vec<f32>;
    type Router = RouterTensors;
    type Embedding = Embedding;

    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Linear> {
        let (n, k) = (weight.rows(), weight.cols());
        let why = || {
            Error::Invalid(format!(
                "a weight with rows of {k} numbers cannot be stored in groups of 32: use --dense bf16"
            ))
        };
        let layout = MatrixLayout::new(n, k, bits.precision(k).ok_or_else(why)?)?;
        let mut tiles = interleaved(layout.bytes(), self.team.nodes())?;
        pack(&layout, &weight, 0, &mut tiles);
        Ok(Linear { layout, tiles, bias })
    }

    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<LatentUp> {
        let (heads, nope) = (config.num_heads, config.qk_nope_head_dim);
        Ok(LatentUp {
            config: config.clone(),
            key: Heads::new(heads, kv_b.head_rows(heads, 0, nope).transpose_heads(heads), self.team.nodes())?,
            value: Heads::new(heads, kv_b.head_rows(heads, nope, nope + config.v_head_dim), self.team.nodes())?,
        })
    }

    fn load_delta_net(&self, config: &model::DeltaNet, rule: DeltaRule) -> Result<DeltaNet> {
        let dim = config.key_head_dim as f32;
        Ok(DeltaNet {
            config: config.clone(),
            taps: rule.taps(config),
            rates: rule.rates,
            gates: rule.gates,
            dt_bias: rule.dt_bias,
            norm: rule.norm,
            eps: rule.eps,
            of_query: vec![1.0 / dim; config.key_head_dim],
            of_key: vec![1.0 / dim.sqrt(); config.key_head_dim],
        })
    }

    fn load_norm(&self, weight: Vec<f32>) -> Result<Vec<f32>> {
        Ok(weight)
    }

    fn load_router(&self, router: RouterTensors) -> Result<RouterTensors> {
        Ok(router)
    }

    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Embedding> {
        Ok(Embedding(to_bf16(&weight)?))
    }

    fn linear_bytes(&self, w: &Linear) -> usize {
        w.tiles.len()
    }

    fn latent_up_bytes(&self, w: &LatentUp) -> usize {
        w.key.tiles.len() + w.value.tiles.len()
    }
}
