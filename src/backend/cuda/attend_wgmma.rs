//! Attention of prompts with Hopper's own instructions, where they have a kernel for it.

use half::bf16;

use super::attend::Kv;
use super::attend_latent::{LatentOp, Segment};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::Softmax;
use crate::cuda::kernels::Argument;
use crate::cuda::{Address, DeviceBuffer, TensorMap, launch};

/// Queries of a block, positions of a step.
const QUERIES: usize = 128;

/// A block's threads.
const THREADS: u32 = 384;

/// Shared memory for heads of so many runs of 64 numbers of keys and values: queries, two steps, what swizzles and
/// barriers take.
const fn shared(key_runs: usize, value_runs: usize) -> usize {
    1024 + (key_runs + 2 * (key_runs + value_runs)) * QUERIES * 128 + 128
}

/// Of kernels/attention_wgmma.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionWgmma {
    q: TensorMap,
    keys: TensorMap,
    values: TensorMap,
    out: Address<bf16>,
    tiles: Address<i32>,
    seq_first: Address<i32>,
    positions: Address<i32>,
    seq_blocks: Address<i32>,
    block_table: Address<u32>,
    heads: i32,
    kv_heads: i32,
    value_dim: i32,
    scale: f32,
    sinks: Address<f32>,
}

/// Of kernels/attention_wgmma.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct LatentWgmma {
    q: TensorMap,
    expanded: TensorMap,
    rotated: TensorMap,
    out: Address<bf16>,
    max: Address<f32>,
    sum: Address<f32>,
    acc: Address<f32>,
    positions: Address<i32>,
    row_first: i32,
    row_end: i32,
    from: i32,
    to: i32,
    first: i32,
    last: i32,
    heads: i32,
    scale: f32,
}

// SAFETY: the struct of the same name in the kernel's file has the same fields.
#[allow(unsafe_code)]
unsafe impl Argument for AttentionWgmma {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Argument for LatentWgmma {}

impl CudaBackend {
    /// Heads of `x` as tensor copies find them.
    fn heads_map(&self, x: &Tensor, heads: usize, dim: usize) -> TensorMap {
        self.cuda.tensor_map(x.bf16(), [dim, x.rows, heads], [heads * dim, dim])
    }

    /// Attention of the rows that are read in tiles, if there is a kernel for such heads.
    pub(super) fn attend_wgmma(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        heads: usize,
        softmax: &Softmax<'_, Self>,
        q: &Tensor,
        out: &mut Tensor,
    ) -> bool {
        let (dim, wide) = (kv.key_dim, kv.key_dim > 64);
        // A window leaves little to do, and these kernels begin at position 0.
        if !self.cuda.info.has_wgmma() || kv.fp8 || dim != kv.value_dim || dim > 128 || softmax.window.is_some() {
            return false;
        }
        let pages = |of: Address<u8>| {
            self.cuda.tensor_map(of.cast(), [dim, 64, kv.keys.len() / (2 * 64 * dim)], [dim, 64 * dim])
        };
        let argument = AttentionWgmma {
            q: self.heads_map(q, heads, dim),
            keys: pages(kv.keys.address()),
            values: pages(kv.values()),
            out: out.bf16(),
            tiles: batch.tile_table(0),
            seq_first: batch.seq_first(),
            positions: batch.positions(),
            seq_blocks: batch.seq_blocks(),
            block_table: batch.block_table(),
            heads: heads as i32,
            kv_heads: kv.heads as i32,
            value_dim: dim as i32,
            scale: softmax.scale,
            sinks: softmax.sinks.map_or(Address::NULL, DeviceBuffer::address),
        };
        let (name, shared) = if wide {
            ("attend_prefill_wgmma_128_128", shared(2, 2))
        } else {
            ("attend_prefill_wgmma_64_64", shared(1, 1))
        };
        launch!(self.cuda, &self.cuda.compute, name, [heads, batch.tiles[0], 1], THREADS, shared; argument);
        true
    }

    /// A segment of expanded latents, if there is a kernel for such heads.
    pub(super) fn attend_expanded_wgmma(&self, op: &LatentOp<'_>, part: &Segment) -> bool {
        let &LatentOp { batch, up, scratch, q, out, .. } = op;
        let Segment { rows, positions: segment, end, .. } = part;
        let config = &up.config;
        let heads = config.num_heads;
        if !self.cuda.info.has_wgmma()
            || (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) != (128, 64, 128)
        {
            return false;
        }
        let positions = segment.len();
        let argument = LatentWgmma {
            q: self.heads_map(q, heads, 192),
            expanded: self.cuda.tensor_map(scratch.expanded.address(), [256, positions, heads], [heads * 256, 256]),
            rotated: self.cuda.tensor_map(scratch.rotated.address(), [64, positions, 1], [64, 64]),
            out: out.bf16(),
            max: scratch.max.address(),
            sum: scratch.sum.address(),
            acc: scratch.acc.address(),
            positions: batch.positions(),
            row_first: rows.start as i32,
            row_end: rows.end as i32,
            from: segment.start as i32,
            to: segment.end as i32,
            first: i32::from(segment.start == 0),
            last: i32::from(segment.end == *end),
            heads: heads as i32,
            scale: config.scale,
        };
        let grid = [heads, rows.len().div_ceil(QUERIES), 1];
        launch!(self.cuda, &self.cuda.compute, "attend_latent_prefill_wgmma", grid, THREADS, shared(3, 2); argument);
        true
    }
}
