//! Attention on the device: paged keys and values, single rows with the context split among blocks, many rows in tiles.
//!
//! Latent attention is absorbed for single rows and expanded for tiles: the two ways are in a file of their own.

use std::sync::Arc;

use half::bf16;

use super::attend_latent::{LatentOp, LatentScratch, Segment};
use super::batch::{TILE_ROWS, blocks};
use super::load::LatentUp;
use super::{CudaBackend, CudaBatch, ROW_THREADS, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::{Attend, Heads, Rotary, Softmax};
use crate::config::KvBits;
use crate::cuda::{Address, Cuda, DeviceBuffer, launch};
use crate::model::Mla;
use crate::{Error, Result};

/// Query heads that one block of single-row attention serves.
pub(super) const HEADS: usize = 16;

/// What a window is that hides nothing, as kernels/attention.cuh has it.
const NO_WINDOW: usize = 1 << 30;

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
    pub(super) fn values(&self) -> Address<u8> {
        self.values.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }
}

/// What the parts of a split context leave.
pub(super) struct Workspace {
    pub(super) partial: DeviceBuffer<f32>,
    pub(super) states: DeviceBuffer<f32>,
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
                concat!("attend_decode_", $key, "_", $value, "_bf16"),
                concat!("attend_decode_", $key, "_", $value, "_e4m3"),
            ],
            prefill: [
                concat!("attend_prefill_", $key, "_", $value, "_bf16"),
                concat!("attend_prefill_", $key, "_", $value, "_e4m3"),
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
struct PrepareHeads {
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
unsafe impl crate::cuda::kernels::Argument for PrepareHeads {}

impl CudaBackend {
    /// Puts the parts of a split context together.
    pub(super) fn combine(
        &self,
        batch: &CudaBatch,
        splits: usize,
        heads: usize,
        value_dim: usize,
        sinks: Address<f32>,
        out: Address<bf16>,
    ) {
        if splits > 1 {
            launch!(self.cuda, &self.cuda.compute, "attend_combine", [batch.decode * heads, value_dim.div_ceil(64), 1], 128, 0;
                self.attention.partial.address(), self.attention.states.address(), out, batch.decode_rows(), splits as i32, heads as i32,
                value_dim as i32, sinks);
        }
    }
}

impl Attend for CudaBackend {
    type Kv = Kv;
    type LatentScratch = LatentScratch;

    fn kv(&self, blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Kv> {
        let fp8 = match bits {
            KvBits::Bf16 => false,
            KvBits::Fp8 => true,
            KvBits::Bf16x2 => {
                return Err(Error::Invalid("--kv bf16x2 is for the CPU: use --kv bf16 or fp8, or --device cpu".into()));
            }
        };
        let bytes = |dim: usize| blocks * heads * BLOCK_SIZE * dim * if fp8 { 1 } else { 2 };
        let values = if key_dim == value_dim { Some(DeviceBuffer::zeros(&self.cuda, bytes(value_dim))?) } else { None };
        Ok(Kv { keys: DeviceBuffer::zeros(&self.cuda, bytes(key_dim))?, values, heads, key_dim, value_dim, fp8 })
    }

    fn rope_angles(&self, inv_freq: &DeviceBuffer<f32>, factor: f32, batch: &CudaBatch, out: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, "rope_angles", [out.rows, 1, 1], 64, 0;
            batch.positions(), inv_freq.address(), factor, out.f32(), inv_freq.len() as i32);
    }

    fn rope(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>) {
        let &Rotary { angles, interleaved } = rotary;
        launch!(self.cuda, &self.cuda.compute, "rope", [x.rows, 1, 1], ROW_THREADS, 0;
            x.bf16(), angles.f32(), (x.cols / head_dim) as i32, head_dim as i32, at as i32, (angles.cols / 2) as i32, i32::from(interleaved));
    }

    fn kv_write(&self, kv: &mut Kv, batch: &CudaBatch, key: &Tensor, value: Option<&Tensor>) {
        let name = if kv.fp8 { "kv_write_e4m3" } else { "kv_write_bf16" };
        let value = value.map_or(Address::NULL, Tensor::bf16);
        launch!(self.cuda, &self.cuda.compute, name, [batch.rows(), 1, 1], 128, 0;
            key.bf16(), value, kv.keys.address(), kv.values(), batch.positions(), batch.token_seq(), batch.seq_blocks(), batch.block_table(),
            batch.rows() as i32, kv.heads as i32, kv.key_dim as i32, kv.value_dim as i32);
    }

    fn prepare_heads(
        &self,
        kv: &mut Kv,
        batch: &CudaBatch,
        rotary: &Rotary<'_, Self>,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Tensor>,
    ) {
        let &Rotary { angles, interleaved } = rotary;
        let name = if kv.fp8 { "prepare_heads_e4m3" } else { "prepare_heads_bf16" };
        let runs = q.heads + k.heads + if v.is_some() { k.heads } else { 0 };
        let argument = PrepareHeads {
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

    fn attend(&self, kv: &Kv, batch: &CudaBatch, softmax: &Softmax<'_, Self>, q: &Tensor, out: &mut Tensor) {
        let heads = q.cols / kv.key_dim;
        assert!(heads * kv.key_dim == q.cols && heads * kv.value_dim == out.cols && heads.is_multiple_of(kv.heads));
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

    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<LatentScratch> {
        LatentScratch::new(self, config, max_tokens, self.limits.context)
    }

    fn attend_latent(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        up: &LatentUp,
        scratch: &mut LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        let op = LatentOp { kv, batch, up, scratch, q, out };
        if batch.decode > 0 {
            self.attend_absorbed(&op);
        }
        for (sequence, rows, start) in &batch.long {
            let end = start + rows.len();
            for from in (0..end).step_by(scratch.segment) {
                let positions = from..end.min(from + scratch.segment);
                self.attend_expanded(&op, &Segment { sequence: *sequence, rows: rows.clone(), positions, end });
            }
        }
    }
}
