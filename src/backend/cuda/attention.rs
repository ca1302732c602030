//! Attention on the device: paged keys and values, single rows with the context split among blocks, many rows in tiles.
//!
//! Latent attention is absorbed for single rows, where reading the cache is the cost, and expanded for tiles, where
//! arithmetic is.

use std::sync::Arc;

use half::bf16;

use super::batch::{DECODE_ROWS, TILE_ROWS, blocks};
use super::linear::{self, Out, Product};
use super::{CudaBackend, CudaBatch, ROW_THREADS, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::tensor::HostTensor;
use crate::backend::{Heads, Softmax};
use crate::config::KvBits;
use crate::cuda::{Address, Cuda, DeviceBuffer, launch};
use crate::model::Mla;
use crate::{Error, Result};

/// Query heads that one block of single-row attention serves.
const HEADS: usize = 16;

/// What a window is that hides nothing, as kernels/attention.cuh has it.
const NO_WINDOW: usize = 1 << 30;

/// Bytes that the keys and values of a segment of context may take, expanded from latents.
const EXPANDED_BYTES: usize = 256 << 20;

/// Keys and values of one layer: `[blocks, heads, 64, dim]` each; latent attention's values are the beginning of its
/// keys.
pub struct Kv {
    pub(super) keys: DeviceBuffer<u8>,
    values: Option<DeviceBuffer<u8>>,
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) fp8: bool,
}

impl Kv {
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        blocks: usize,
        heads: usize,
        key_dim: usize,
        value_dim: usize,
        bits: KvBits,
    ) -> Result<Self> {
        let fp8 = match bits {
            KvBits::Bf16 => false,
            KvBits::Fp8 => true,
            KvBits::Bf16x2 => {
                return Err(Error::Invalid("--kv bf16x2 is for the CPU: use --kv bf16 or fp8, or --device cpu".into()));
            }
        };
        let bytes = |dim: usize| blocks * heads * BLOCK_SIZE * dim * if fp8 { 1 } else { 2 };
        let values = if key_dim == value_dim { Some(DeviceBuffer::zeros(cuda, bytes(value_dim))?) } else { None };
        Ok(Self { keys: DeviceBuffer::zeros(cuda, bytes(key_dim))?, values, heads, key_dim, value_dim, fp8 })
    }

    pub(super) fn values(&self) -> Address<u8> {
        self.values.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }
}

/// What the parts of a split context leave.
pub(super) struct Workspace {
    partial: DeviceBuffer<f32>,
    states: DeviceBuffer<f32>,
}

/// Blocks per multiprocessor of single-row attention.
const BLOCKS: usize = 2;

impl Workspace {
    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        // As many (row, head, split) as blocks run at a time, each of up to 512 values.
        let parts = BLOCKS * cuda.info.multiprocessors * HEADS;
        Ok(Self { partial: DeviceBuffer::new(cuda, parts * 512)?, states: DeviceBuffer::new(cuda, parts * 2)? })
    }
}

/// `kv_b_proj` as it is, and its key half transposed.
pub struct LatentUp {
    kv_b: DeviceBuffer<bf16>,   // [heads, nope + v, rank]
    key_up: DeviceBuffer<bf16>, // [heads, rank, nope]
}

impl LatentUp {
    pub(super) fn new(cuda: &Arc<Cuda>, config: &Mla, kv_b: HostTensor<'_>) -> Result<Self> {
        if cuda.is_plan() {
            let numbers = config.num_heads * config.kv_lora_rank;
            let (nope, v) = (config.qk_nope_head_dim, config.v_head_dim);
            return Ok(Self {
                kv_b: DeviceBuffer::new(cuda, numbers * (nope + v))?,
                key_up: DeviceBuffer::new(cuda, numbers * nope)?,
            });
        }
        let key_up = kv_b.head_rows(config.num_heads, 0, config.qk_nope_head_dim).transpose_heads(config.num_heads);
        Ok(Self { kv_b: linear::upload_bf16(cuda, &kv_b)?, key_up: linear::upload_bf16(cuda, &key_up)? })
    }

    /// Bytes that a decode step reads.
    pub(super) fn bytes(&self) -> usize {
        self.kv_b.bytes()
    }
}

/// Activations of latent attention.
pub struct LatentScratch {
    query: DeviceBuffer<bf16>,   // [DECODE_ROWS, heads, rank + rope]: in the latent's space
    mixed: DeviceBuffer<bf16>,   // [DECODE_ROWS, heads, rank]
    latents: DeviceBuffer<bf16>, // [segment, rank]
    pub(super) rotated: DeviceBuffer<bf16>, // [segment, rope]
    pub(super) expanded: DeviceBuffer<bf16>, // [segment, heads, nope + v]
    segment: usize,
    pub(super) max: DeviceBuffer<f32>, // [rows, heads]: the softmax between segments
    pub(super) sum: DeviceBuffer<f32>, // [rows, heads]
    pub(super) acc: DeviceBuffer<f32>, // [rows, heads, v]
}

impl LatentScratch {
    /// Positions of a segment, for contexts of up to `context`.
    fn segment(config: &Mla, context: usize) -> usize {
        let position = 2 * config.num_heads * (config.qk_nope_head_dim + config.v_head_dim);
        (EXPANDED_BYTES / position / BLOCK_SIZE * BLOCK_SIZE).clamp(BLOCK_SIZE, context.next_multiple_of(BLOCK_SIZE))
    }

    pub(super) fn new(backend: &CudaBackend, config: &Mla, max_tokens: usize, context: usize) -> Result<Self> {
        let cuda = &backend.cuda;
        let (heads, rank, rope) = (config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim);
        let segment = Self::segment(config, context);
        // A context of one segment leaves nothing in between.
        let rows = if context > segment { max_tokens } else { 0 };
        let decode = max_tokens.min(DECODE_ROWS);
        Ok(Self {
            query: DeviceBuffer::zeros(cuda, decode * heads * (rank + rope))?,
            mixed: DeviceBuffer::zeros(cuda, decode * heads * rank)?,
            latents: DeviceBuffer::zeros(cuda, segment * rank)?,
            rotated: DeviceBuffer::zeros(cuda, segment * rope)?,
            expanded: DeviceBuffer::zeros(cuda, segment * heads * (config.qk_nope_head_dim + config.v_head_dim))?,
            segment,
            max: DeviceBuffer::zeros(cuda, rows * heads)?,
            sum: DeviceBuffer::zeros(cuda, rows * heads)?,
            acc: DeviceBuffer::zeros(cuda, rows * heads * config.v_head_dim)?,
        })
    }
}

/// The kernels of one size: names for bf16 and FP8 caches, largest key and value.
struct Size {
    decode: [&'static str; 2],
    prefill: [&'static str; 2],
    key: usize,
    value: usize,
    stages: [usize; 2], // of decode
}

macro_rules! size {
    ($key:literal, $value:literal, $stages:expr) => {
        Size {
            decode: [
                concat!("attention_decode_", $key, "_", $value, "_bf16"),
                concat!("attention_decode_", $key, "_", $value, "_e4m3"),
            ],
            prefill: [
                concat!("attention_prefill_", $key, "_", $value, "_bf16"),
                concat!("attention_prefill_", $key, "_", $value, "_e4m3"),
            ],
            key: $key,
            value: $value,
            stages: $stages,
        }
    };
}

const SIZES: [Size; 5] = [
    size!(64, 64, [3, 4]),
    size!(96, 96, [2, 4]),
    size!(128, 128, [2, 4]),
    size!(192, 128, [2, 3]),
    size!(256, 256, [1, 2]),
];

impl Size {
    /// The smallest that holds both. Panics beyond 256: refused when loading.
    fn of(key: usize, value: usize) -> &'static Self {
        SIZES.iter().find(|s| key <= s.key && value <= s.value).expect("heads are at most 256 wide")
    }

    fn decode_shared(&self, fp8: bool) -> usize {
        let (k, v) = (self.key, self.value);
        let ends = 256 * (v + 8);
        let walk = self.stages[usize::from(fp8)] * 64 * ((k + v) * if fp8 { 1 } else { 2 } + 32);
        walk.max(ends) + 512
    }

    fn tile_rows(&self) -> usize {
        if self.key == 256 { TILE_ROWS[1] } else { TILE_ROWS[0] }
    }

    fn prefill_shared(&self, fp8: bool) -> usize {
        let (k, v, rows) = (self.key, self.value, self.tile_rows());
        match fp8 {
            false => 2 * (rows + 64) * (k + 8) + 128 * (v + 8),
            true => 2 * rows * (k + 8) + 128 * (k.max(v) + 8) + 64 * (k + v),
        }
    }
}

/// Of kernels/attention_heads.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct HeadsArgument {
    x: Address<bf16>,
    norm: Address<f32>,
    heads: i32,
    dim: i32,
    norm_width: i32,
    at: i32,
    eps: f32,
}

impl From<Heads<'_, CudaBackend>> for HeadsArgument {
    fn from(h: Heads<'_, CudaBackend>) -> Self {
        let (norm, norm_width, eps) =
            h.norm.map_or((Address::NULL, 0, 0.0), |(w, width, eps)| (w.address(), width, eps));
        Self {
            x: h.x.bf16(),
            norm,
            heads: h.heads as i32,
            dim: h.dim as i32,
            norm_width: norm_width as i32,
            at: h.rope_at as i32,
            eps,
        }
    }
}

/// Of kernels/attention_heads.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionHeads {
    q: HeadsArgument,
    k: HeadsArgument,
    v: Address<bf16>,
    angles: Address<f32>,
    keys: Address<u8>,
    values: Address<u8>,
    positions: Address<i32>,
    token_seq: Address<i32>,
    seq_blocks: Address<i32>,
    block_table: Address<u32>,
    v_dim: i32,
    half: i32,
    interleaved: i32,
}

// SAFETY: the struct of the same name in the kernel's file has the same fields.
#[allow(unsafe_code)]
unsafe impl crate::cuda::kernels::Argument for AttentionHeads {}

impl CudaBackend {
    #[allow(clippy::too_many_arguments)] // as `Backend::heads`
    pub(super) fn prepare_heads(
        &self,
        kv: &mut Kv,
        batch: &CudaBatch,
        angles: &Tensor,
        interleaved: bool,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Tensor>,
    ) {
        let name = if kv.fp8 { "attention_heads_e4m3" } else { "attention_heads_bf16" };
        let runs = q.heads + k.heads + if v.is_some() { k.heads } else { 0 };
        let argument = AttentionHeads {
            q: q.into(),
            k: k.into(),
            v: v.map_or(Address::NULL, Tensor::bf16),
            angles: angles.f32(),
            keys: kv.keys.address(),
            values: kv.values(),
            positions: batch.positions(),
            token_seq: batch.token_seq(),
            seq_blocks: batch.seq_blocks(),
            block_table: batch.block_table(),
            v_dim: kv.value_dim as i32,
            half: (angles.cols / 2) as i32,
            interleaved: i32::from(interleaved),
        };
        launch!(self.cuda, &self.cuda.compute, name, [batch.rows(), runs.div_ceil(8), 1], 256, 0; argument);
    }

    pub(super) fn store(&self, kv: &mut Kv, batch: &CudaBatch, key: &Tensor, value: Option<&Tensor>) {
        let name = if kv.fp8 { "kv_write_e4m3" } else { "kv_write_bf16" };
        let value = value.map_or(Address::NULL, Tensor::bf16);
        launch!(self.cuda, &self.cuda.compute, name, [batch.rows(), 1, 1], 128, 0;
            key.bf16(), value, kv.keys.address(), kv.values(), batch.positions(), batch.token_seq(), batch.seq_blocks(), batch.block_table(),
            batch.rows() as i32, kv.heads as i32, kv.key_dim as i32, kv.value_dim as i32);
    }

    pub(super) fn attend(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        heads: usize,
        softmax: &Softmax<'_, Self>,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        let size = Size::of(kv.key_dim, kv.value_dim);
        let sinks = softmax.sinks.map_or(Address::NULL, DeviceBuffer::address);
        let (scale, window) = (softmax.scale, softmax.window.unwrap_or(usize::MAX).min(NO_WINDOW));
        let (fp8, stream) = (usize::from(kv.fp8), &self.cuda.compute);
        let (heads_i, kv_heads, key_dim, value_dim) =
            (heads as i32, kv.heads as i32, kv.key_dim as i32, kv.value_dim as i32);
        if batch.decode > 0 {
            let parts = kv.heads * (heads / kv.heads).div_ceil(HEADS);
            // A window may begin and end within pages.
            let pages = blocks(self.limits.context).min(blocks(window) + 1);
            let splits = (BLOCKS * self.cuda.info.multiprocessors / (batch.decode * parts)).clamp(1, pages.min(128));
            launch!(self.cuda, stream, size.decode[fp8], [splits, parts, batch.decode], 128, size.decode_shared(kv.fp8);
                q.bf16(), kv.keys.address(), kv.values(), out.bf16(), self.attention.partial.address(), self.attention.states.address(),
                batch.decode_rows(), batch.positions(), batch.token_seq(), batch.seq_blocks(), batch.block_table(),
                heads_i, kv_heads, key_dim, value_dim, scale, window as i32, sinks);
            self.combine(batch, splits, heads, kv.value_dim, sinks, out.bf16());
        }
        if self.attend_wgmma(kv, batch, heads, softmax, q, out) {
            return;
        }
        let which = usize::from(size.key == 256);
        launch!(self.cuda, stream, size.prefill[fp8], [heads, batch.tiles[which], 1], 128, size.prefill_shared(kv.fp8);
            q.bf16(), kv.keys.address(), kv.values(), out.bf16(), batch.tile_table(which), batch.seq_first(), batch.positions(),
            batch.seq_blocks(), batch.block_table(), heads_i, kv_heads, key_dim, value_dim, scale, window as i32, sinks);
    }

    /// Puts the parts of a split context together.
    fn combine(
        &self,
        batch: &CudaBatch,
        splits: usize,
        heads: usize,
        value_dim: usize,
        sinks: Address<f32>,
        out: Address<bf16>,
    ) {
        if splits > 1 {
            launch!(self.cuda, &self.cuda.compute, "attention_combine", [batch.decode * heads, value_dim.div_ceil(64), 1], 128, 0;
                self.attention.partial.address(), self.attention.states.address(), out, batch.decode_rows(), splits as i32, heads as i32,
                value_dim as i32, sinks);
        }
    }

    #[allow(clippy::too_many_arguments)] // as `Backend::latent_attention`
    pub(super) fn attend_latents(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        config: &Mla,
        up: &LatentUp,
        scratch: &mut LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        if batch.decode > 0 {
            self.attend_absorbed(kv, batch, config, up, scratch, q, out);
        }
        for (sequence, rows, start) in &batch.long {
            let end = start + rows.len();
            for from in (0..end).step_by(scratch.segment) {
                self.attend_expanded(
                    kv,
                    batch,
                    config,
                    up,
                    scratch,
                    q,
                    out,
                    (*sequence, rows.clone()),
                    from..end.min(from + scratch.segment),
                    end,
                );
            }
        }
    }

    /// Single rows, in the latent's space.
    #[allow(clippy::too_many_arguments)] // as `Backend::latent_attention`
    fn attend_absorbed(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        config: &Mla,
        up: &LatentUp,
        scratch: &LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        let (heads, nope, rope, v, rank) = (
            config.num_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        );
        let (key_dim, rows, stream) = (rank + rope, batch.decode, &self.cuda.compute);
        let product = Product {
            x: q.bf16(),
            x_pitch: heads * (nope + rope),
            x_batch: nope + rope,
            w: up.key_up.address(),
            w_batch: rank * nope,
            bias: Address::NULL,
            y: scratch.query.address().cast(),
            y_pitch: heads * key_dim,
            y_batch: key_dim,
            tokens: rows,
            n: rank,
            k: nope,
            batch: heads,
            out: Out::Bf16,
        };
        self.product(&product);
        launch!(self.cuda, stream, "copy_heads", [rows, 1, 1], ROW_THREADS, 0;
            q.bf16(), scratch.query.address(), heads as i32, rope as i32, (nope + rope) as i32, nope as i32, key_dim as i32, rank as i32);

        let wide = heads > HEADS;
        let h = if wide { 32 } else { 16 };
        let name = match (wide, kv.fp8) {
            (false, false) => "attention_decode_mla_16_bf16",
            (true, false) => "attention_decode_mla_32_bf16",
            (false, true) => "attention_decode_mla_16_e4m3",
            (true, true) => "attention_decode_mla_32_e4m3",
        };
        let shared = if kv.fp8 { 56_832 } else { 74_752 } + 512 * h;
        let parts = heads.div_ceil(h);
        let blocks_at_once = self.cuda.info.multiprocessors * if wide { 1 } else { 2 };
        let splits = (blocks_at_once / (rows * parts)).clamp(1, self.limits.context.div_ceil(16).min(256));
        launch!(self.cuda, stream, name, [splits, parts, rows], 8 * h as u32, shared;
            scratch.query.address(), kv.keys.address(), scratch.mixed.address(), self.attention.partial.address(), self.attention.states.address(),
            batch.decode_rows(), batch.positions(), batch.token_seq(), batch.seq_blocks(), batch.block_table(),
            heads as i32, key_dim as i32, rank as i32, config.scale);
        self.combine(batch, splits, heads, rank, Address::NULL, scratch.mixed.address());

        self.product(&Product {
            x: scratch.mixed.address(),
            x_pitch: heads * rank,
            x_batch: rank,
            w: up.kv_b.address().add(nope * rank),
            w_batch: (nope + v) * rank,
            y: out.bf16().cast(),
            y_pitch: heads * v,
            y_batch: v,
            n: v,
            k: rank,
            ..product
        });
    }

    /// Rows of one sequence over a segment of its context that ends at `end`.
    #[allow(clippy::too_many_arguments)] // as `Backend::latent_attention`, and which part
    fn attend_expanded(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        config: &Mla,
        up: &LatentUp,
        scratch: &LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
        (sequence, rows): (usize, std::ops::Range<usize>),
        segment: std::ops::Range<usize>,
        end: usize,
    ) {
        let (heads, nope, rope, v, rank) = (
            config.num_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        );
        let (stream, positions) = (&self.cuda.compute, segment.len());
        let gather = if kv.fp8 { "gather_latents_e4m3" } else { "gather_latents_bf16" };
        launch!(self.cuda, stream, gather, [(positions * (rank + rope) / 8).div_ceil(256), 1, 1], 256, 0;
            kv.keys.address(), scratch.latents.address(), scratch.rotated.address(), batch.seq_blocks(), batch.block_table(), sequence as i32,
            segment.start as i32, segment.end as i32, rank as i32, rope as i32);
        self.product(&Product {
            x: scratch.latents.address(),
            x_pitch: rank,
            x_batch: 0,
            w: up.kv_b.address(),
            w_batch: 0,
            bias: Address::NULL,
            y: scratch.expanded.address().cast(),
            y_pitch: heads * (nope + v),
            y_batch: 0,
            tokens: positions,
            n: heads * (nope + v),
            k: rank,
            batch: 1,
            out: Out::Bf16,
        });
        if self.attend_expanded_wgmma(batch, config, scratch, q, out, &rows, &segment, end) {
            return;
        }
        let (name, key, value, tile) = match (nope + rope, v) {
            (..=64, ..=64) => ("attention_prefill_mla_64_64", 64, 64, 128),
            (..=192, ..=128) => ("attention_prefill_mla_192_128", 192, 128, 128),
            _ => ("attention_prefill_mla_256_256", 256, 256, 64),
        };
        let shared = 2 * (tile + 64) * (key + 8) + 128 * (value + 8);
        launch!(self.cuda, stream, name, [heads, rows.len().div_ceil(tile), 1], 128, shared;
            q.bf16(), scratch.expanded.address(), scratch.rotated.address(), out.bf16(), scratch.max.address(), scratch.sum.address(),
            scratch.acc.address(), batch.positions(), rows.start as i32, rows.end as i32, segment.start as i32, segment.end as i32,
            i32::from(segment.start == 0), i32::from(segment.end == end), heads as i32, nope as i32, rope as i32, v as i32, config.scale);
    }
}
