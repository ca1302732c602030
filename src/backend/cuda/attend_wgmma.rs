//! Attention of prompts with Hopper's own instructions, where they have a kernel for it.

use super::attend::{Kv, holding};
use super::attend_latent::{LatentOp, Segment};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::Softmax;
use crate::cuda::kernels::attention_wgmma::{PAGE, QUERIES};
use crate::cuda::kernels::{self, AttentionWgmma, Kernel, LatentWgmma};
use crate::cuda::{Address, DeviceBuffer, TensorMap, launch};

/// Smallest heads first.
const PREFILL: [Kernel<(AttentionWgmma,)>; 4] = [
    kernels::attend_prefill_wgmma_64_64,
    kernels::attend_prefill_wgmma_128_128,
    kernels::attend_prefill_wgmma_192_128,
    kernels::attend_prefill_wgmma_256_256,
];

const EXPANDED: [Kernel<(LatentWgmma,)>; 2] =
    [kernels::attend_latent_prefill_wgmma_192_128, kernels::attend_latent_prefill_wgmma_256_256];

/// Rotated numbers of a key that tensor copies bring, a box.
const ROTATED: usize = 64;

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
        // A window leaves little to do, and these kernels begin at position 0.
        let served = !kv.int8 && softmax.window.is_none() && self.cuda.info.has_wgmma();
        let Some(kernel) = holding(&PREFILL, kv.key_dim, kv.value_dim).filter(|_| served) else { return false };
        let pages = |of: Address<u8>, dim: usize| {
            let pages = kv.keys.len() / (2 * PAGE * kv.key_dim);
            self.cuda.tensor_map(of.cast(), [dim, PAGE, pages], [dim, PAGE * dim])
        };
        let argument = AttentionWgmma {
            q: self.heads_map(q, heads, kv.key_dim),
            keys: pages(kv.keys.address(), kv.key_dim),
            values: pages(kv.values(), kv.value_dim),
            out: out.bf16(),
            tiles: batch.tile_table(0),
            seq_first: batch.seq_first(),
            positions: batch.positions(),
            seq_blocks: batch.seq_blocks(),
            block_table: batch.block_table(),
            heads: heads as i32,
            kv_heads: kv.heads as i32,
            value_dim: kv.value_dim as i32,
            scale: softmax.scale,
            sinks: softmax.sinks.map_or(Address::NULL, DeviceBuffer::address),
        };
        launch!(self.cuda, &self.cuda.compute, kernel, [heads, batch.tiles[0], 1]; argument);
        true
    }

    /// A segment of expanded latents, if there is a kernel for such heads.
    pub(super) fn attend_expanded_wgmma(&self, op: &LatentOp<'_>, part: &Segment) -> bool {
        let &LatentOp { batch, up, scratch, q, out, .. } = op;
        let Segment { rows, positions: segment, end, .. } = part;
        let config = &up.config;
        let heads = config.num_heads;
        // Boxes of an expanded row are of its key or of its value, so both must be of full boxes.
        let dims = [config.qk_nope_head_dim + ROTATED, config.v_head_dim];
        let kernel = EXPANDED.iter().find(|kernel| kernel.tile[..2] == dims);
        let Some(&kernel) = kernel.filter(|_| config.qk_rope_head_dim == ROTATED && self.cuda.info.has_wgmma()) else {
            return false;
        };
        let (positions, wide) = (segment.len(), config.qk_nope_head_dim + config.v_head_dim);
        let argument = LatentWgmma {
            q: self.heads_map(q, heads, config.qk_nope_head_dim + ROTATED),
            expanded: self.cuda.tensor_map(scratch.expanded.address(), [wide, positions, heads], [heads * wide, wide]),
            rotated: self.cuda.tensor_map(scratch.rotated.address(), [ROTATED, positions, 1], [ROTATED, ROTATED]),
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
        launch!(self.cuda, &self.cuda.compute, kernel, grid; argument);
        true
    }
}
