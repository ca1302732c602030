//! Resident weights in host memory, packed in tiles as the kernels read them.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::codec::Source;
use moebius_cache::convert::Tiles;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};
use rayon::prelude::*;

use super::Cpu;
use super::dense::{RESULTS, TOKENS};
use super::recur::scratch_len;
use crate::backend::source::LinearWeight;
use crate::backend::tensor::HostTensor;
use crate::backend::{DeltaRule, Load, RouterTensors};
use crate::config::DenseBits;
use crate::kernel::form;
use crate::machine::heap::Heap;
use crate::machine::memory::Buffer;
use crate::model::{self, Mla};
use crate::{Error, Result};

/// Packed weights `[n, k]` of `y = W x + b`.
pub struct Linear {
    pub(super) layout: MatrixLayout,
    pub(super) tiles: Buffer<u8>,
    pub(super) bias: Option<Vec<f32>>,
}

impl Cpu {
    /// Room for `count` packed matrices that any worker may read: from all nodes' memory in turn, so that each step
    /// uses every node's bandwidth.
    fn tiles(&self, count: usize, layout: &MatrixLayout) -> Result<Buffer<u8>> {
        let (buffer, nodes) = (self.heap.buffer(&[count, layout.tiles(), layout.tile_bytes()])?, self.team.nodes());
        if nodes.len() > 1 {
            // Refused in some containers: pages then lie where they are first written.
            let _ = buffer.interleave(nodes);
        }
        Ok(buffer)
    }

    /// Weights `[n, k]` of no model, to time products with.
    pub(crate) fn sample(&self, n: usize, k: usize, precision: Precision) -> Result<Linear> {
        let layout = MatrixLayout::new(n, k, precision)?;
        let mut tiles = self.tiles(1, &layout)?;
        // Written: pages that are only read may all be one.
        self.team.each_share(&mut tiles, 1, |_, _, part| part.fill(0x11));
        Ok(Linear { layout, tiles, bias: None })
    }

    /// Packed weights of equal `heads`, from the rows of all.
    fn heads(&self, heads: usize, weight: LinearWeight<'_>, precision: Precision) -> Result<Heads> {
        let [n, k] = weight.shape();
        let layout = MatrixLayout::new(n / heads, k, precision)?;
        let mut tiles = self.tiles(heads, &layout)?;
        match weight {
            LinearWeight::Stored(held, sources) if held == precision && layout.n.is_multiple_of(TILE_ROWS) => {
                pack_stored(&layout, &sources, &mut tiles)?;
            }
            weight => {
                let weight = weight.plain()?;
                for (head, tiles) in tiles.chunks_exact_mut(layout.tiles() * layout.tile_bytes()).enumerate() {
                    pack(&layout, &weight, head * layout.n, tiles);
                }
            }
        }
        self.reserve(|scratch, heap| {
            scratch.values.reserve(heap, &[RESULTS])?;
            scratch.activations.reserve(heap, self.kernel, layout.precision, layout.k, TOKENS)
        })?;
        Ok(Heads { heads, layout, tiles })
    }
}

/// How a weight is stored. Errors: its rows cannot be cut into groups.
fn precision(bits: DenseBits, weight: &LinearWeight<'_>) -> Result<Precision> {
    if let (DenseBits::Auto, LinearWeight::Stored(held, _) | LinearWeight::StoredShape(held, _)) = (bits, weight) {
        return Ok(*held);
    }
    let [_, k] = weight.shape();
    let why = || format!("a weight with rows of {k} numbers cannot be stored in groups of 32: use --dense bf16");
    bits.precision(k).ok_or_else(|| Error::Invalid(why()))
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

/// Packs codes and scales of matrices, one below the other, as they are, on all cores. Errors: one is NaN or infinite.
fn pack_stored(layout: &MatrixLayout, sources: &[Source<'_>], mut tiles: &mut [u8]) -> Result<()> {
    for source in sources {
        let layout = MatrixLayout { n: source.shape()[0], ..*layout };
        let (own, rest) = tiles.split_at_mut(layout.bytes());
        own.par_chunks_mut(layout.tile_bytes())
            .enumerate()
            .try_for_each_init(Tiles::default, |packer, (i, tile)| packer.pack(&layout, source, i, tile))?;
        tiles = rest;
    }
    Ok(())
}

/// Packed weights `[heads, n, k]`, each head with tiles of its own.
pub struct Heads {
    pub(super) heads: usize,
    pub(super) layout: MatrixLayout, // of one head
    pub(super) tiles: Buffer<u8>,
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

/// A router; vectors are `[experts]`.
pub struct RouterWeights {
    pub(super) weight: Vec<f32>,                  // [experts, hidden]
    pub(super) bias: Option<Vec<f32>>,            // of the logits
    pub(super) correction_bias: Option<Vec<f32>>, // ranks experts without entering their weights
    pub(super) expert_scale: Option<Vec<f32>>,    // multiplies the experts' weights
    pub(super) by_token: Option<Vec<f32>>,        // [vocab, top_k], each token's experts
}

/// `[vocab, hidden]` bf16.
pub struct Embedding(pub(super) Buffer<bf16>);

/// Copies a weight, rounding f32 to bf16.
fn to_bf16(heap: &Heap, weight: &HostTensor<'_>) -> Result<Buffer<bf16>> {
    const CHUNK: usize = 1 << 18;
    let mut buffer = heap.buffer(&[weight.rows(), weight.cols()])?;
    match weight {
        HostTensor::Bf16 { data, .. } => {
            buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
        }
        HostTensor::F32 { data, .. } => {
            buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| {
                to.iter_mut().zip(from).for_each(|(t, f)| *t = bf16::from_f32(*f));
            });
        }
        HostTensor::Shape { .. } => {}
    }
    Ok(buffer)
}

impl Load for Cpu {
    type Linear = Linear;
    type Groups = Heads;
    type LatentUp = LatentUp;
    type DeltaNet = DeltaNet;
    type Norm = Vec<f32>;
    type Router = RouterWeights;
    type Embedding = Embedding;

    fn load_linear<'a>(
        &self,
        weight: impl Into<LinearWeight<'a>>,
        bias: Option<HostTensor<'_>>,
        bits: DenseBits,
    ) -> Result<Linear> {
        let weight = weight.into();
        let [n, k] = weight.shape();
        let precision = precision(bits, &weight)?;
        let layout = MatrixLayout::new(n, k, precision)?;
        let mut tiles = self.tiles(1, &layout)?;
        match weight {
            LinearWeight::Stored(held, sources) if held == precision => pack_stored(&layout, &sources, &mut tiles)?,
            weight => pack(&layout, &weight.plain()?, 0, &mut tiles),
        }
        if self.max_rows > 0 {
            let activations = &mut self.activations.borrow_mut()[form(layout.precision)];
            activations.reserve(&self.heap, self.kernel, layout.precision, k, self.max_rows)?;
        }
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[RESULTS]))?;
        Ok(Linear { layout, tiles, bias: bias.map(|bias| bias.keep(&self.heap)) })
    }

    fn load_groups<'a>(&self, groups: usize, weight: impl Into<LinearWeight<'a>>, bits: DenseBits) -> Result<Heads> {
        let weight = weight.into();
        let precision = precision(bits, &weight)?;
        self.heads(groups, weight, precision)
    }

    fn gives_tiled_heads(&self) -> bool {
        true
    }

    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<LatentUp> {
        let (heads, nope) = (config.num_heads, config.qk_nope_head_dim);
        Ok(LatentUp {
            config: config.clone(),
            key: self.heads(heads, kv_b.head_rows(heads, 0, nope).transpose_heads(heads).into(), Precision::Bf16)?,
            value: self.heads(heads, kv_b.head_rows(heads, nope, nope + config.v_head_dim).into(), Precision::Bf16)?,
        })
    }

    fn load_delta_net(&self, config: &model::DeltaNet, rule: DeltaRule<'_>) -> Result<DeltaNet> {
        let (heap, dim) = (&self.heap, config.key_head_dim as f32);
        let same = |value: f32| {
            let mut all = heap.zeros(&[config.key_head_dim])?;
            all.fill(value);
            Ok::<_, Error>(all)
        };
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[scratch_len(config)]))?;
        Ok(DeltaNet {
            config: config.clone(),
            taps: rule.taps().keep(heap),
            rates: rule.rates.keep(heap),
            gates: rule.gates.keep(heap),
            dt_bias: rule.dt_bias.keep(heap),
            norm: rule.norm.keep(heap),
            eps: rule.eps,
            of_query: same(1.0 / dim)?,
            of_key: same(1.0 / dim.sqrt())?,
        })
    }

    fn load_norm(&self, weight: HostTensor<'_>) -> Result<Vec<f32>> {
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[weight.rows(), weight.cols()]))?;
        Ok(weight.keep(&self.heap))
    }

    fn load_router(&self, router: RouterTensors<'_>) -> Result<RouterWeights> {
        let RouterTensors { weight, bias, correction_bias, expert_scale, by_token } = router;
        if self.max_rows > 0 {
            self.router_scratch.borrow_mut().reserve(&self.heap, &[self.max_rows, weight.rows()])?;
        }
        let keep = |weight: HostTensor<'_>| weight.keep(&self.heap);
        let all = [bias, correction_bias, expert_scale, by_token];
        let [bias, correction_bias, expert_scale, by_token] = all.map(|of| of.map(keep));
        Ok(RouterWeights { weight: keep(weight), bias, correction_bias, expert_scale, by_token })
    }

    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Embedding> {
        Ok(Embedding(to_bf16(&self.heap, &weight)?))
    }

    fn linear_bytes(&self, w: &Linear) -> usize {
        w.tiles.len()
    }

    fn groups_bytes(&self, w: &Heads) -> usize {
        w.tiles.len()
    }

    fn latent_up_bytes(&self, w: &LatentUp) -> usize {
        w.key.tiles.len() + w.value.tiles.len()
    }
}
