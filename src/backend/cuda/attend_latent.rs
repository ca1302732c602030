//! Latent attention's two ways: absorbed for single rows, where reading the cache is the cost, and expanded for tiles,
//! where arithmetic is.

use std::ops::Range;

use half::bf16;

use super::attend::{Kv, REFUSED, holding};
use super::batch::DECODE_ROWS;
use super::load::LatentUp;
use super::product::{Out, Product};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::Result;
use crate::backend::batch::BLOCK_SIZE;
use crate::cuda::kernels::attention_decode_mla::{MAX_SPLITS, UNIT};
use crate::cuda::kernels::kv_cache::GATHERED;
use crate::cuda::kernels::{self, Kernel};
use crate::cuda::{Address, DeviceBuffer, launch};
use crate::model::Mla;

/// Bytes that the keys and values of a segment of context may take, expanded from latents.
const EXPANDED_BYTES: usize = 256 << 20;

/// By cache, bf16 and INT8; few heads first.
const DECODE: [[Kernel<kernels::DecodeMlaArguments>; 2]; 2] = [
    [kernels::attend_latent_decode_16_bf16, kernels::attend_latent_decode_32_bf16],
    [kernels::attend_latent_decode_16_int8, kernels::attend_latent_decode_32_int8],
];

/// Smallest heads first.
const PREFILL: [Kernel<kernels::PrefillMlaArguments>; 3] = [
    kernels::attend_latent_prefill_64_64,
    kernels::attend_latent_prefill_192_128,
    kernels::attend_latent_prefill_256_256,
];

/// Activations of latent attention.
pub struct LatentScratch {
    query: DeviceBuffer<bf16>,               // [DECODE_ROWS, heads, rank]: in the latent's space
    mixed: DeviceBuffer<bf16>,               // [DECODE_ROWS, heads, rank]
    latents: DeviceBuffer<bf16>,             // [segment, rank]
    pub(super) rotated: DeviceBuffer<bf16>,  // [segment, rope]
    pub(super) expanded: DeviceBuffer<bf16>, // [segment, heads, nope + v]
    pub(super) segment: usize,               // positions that are expanded at a time
    pub(super) max: DeviceBuffer<f32>,       // [rows, heads]: the softmax between segments
    pub(super) sum: DeviceBuffer<f32>,       // [rows, heads]
    pub(super) acc: DeviceBuffer<f32>,       // [rows, heads, v]
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
            query: DeviceBuffer::zeros(cuda, decode * heads * rank)?,
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

/// One op, as both ways see it.
pub(super) struct LatentOp<'a> {
    pub(super) kv: &'a Kv,
    pub(super) batch: &'a CudaBatch,
    pub(super) up: &'a LatentUp,
    pub(super) scratch: &'a LatentScratch,
    pub(super) q: &'a Tensor,
    pub(super) out: &'a Tensor,
}

/// Rows of one sequence and a segment of the context that they see.
pub(super) struct Segment {
    pub(super) sequence: usize,
    pub(super) rows: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) end: usize, // of the rows' context
}

/// Rows that are read one by one, and the cache that they read.
pub(super) struct Single {
    pub(super) first: usize, // in the batch
    pub(super) count: usize,
    pub(super) context: usize, // positions that they see, at most
    pub(super) keys: Address<u8>,
    pub(super) values: Address<u8>,
    pub(super) rows: Address<i32>,
    pub(super) positions: Address<i32>,
    pub(super) token_seq: Address<i32>,
    pub(super) seq_blocks: Address<i32>,
    pub(super) block_table: Address<u32>,
    pub(super) table_stride: usize, // from one KV head's table to the next; 0: they have the same
    pub(super) early: bool,         // rows, positions and tables are the batch's: no kernel makes them
}

impl Single {
    /// The rows of a batch that are read so.
    pub(super) fn of(batch: &CudaBatch, kv: &Kv, context: usize) -> Self {
        Self {
            first: 0,
            count: batch.decode,
            context,
            keys: kv.keys.address(),
            values: kv.values(),
            rows: batch.decode_rows(),
            positions: batch.positions(),
            token_seq: batch.token_seq(),
            seq_blocks: batch.seq_blocks(),
            block_table: batch.block_table(),
            table_stride: 0,
            early: true,
        }
    }
}

/// One KV head, whose values are the first numbers of its keys.
pub(super) struct KeyValues {
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) scale: f32,
    pub(super) int8: bool,
}

/// Queries `[rows, heads, key_dim]` in two places.
pub(super) struct Queries {
    /// The first `most` numbers of each head, without gaps.
    pub(super) first: Address<bf16>,
    pub(super) most: usize,
    /// The others, whose heads are `rest_pitch` apart.
    pub(super) rest: Address<bf16>,
    pub(super) rest_pitch: usize,
}

impl CudaBackend {
    /// Attention of single rows over keys that are values; `out` is `[rows, heads, value_dim]`, `sinks` `[heads]` or
    /// null.
    pub(super) fn attend_key_values(
        &self,
        &KeyValues { heads, key_dim, value_dim, scale, int8 }: &KeyValues,
        single: &Single,
        sinks: Address<f32>,
        q: &Queries,
        out: Address<bf16>,
    ) {
        let rows = single.count;
        let [few, many] = DECODE[usize::from(int8)];
        let (kernel, blocks_at_once) = match heads > few.tile[0] {
            false => (few, 2 * self.cuda.info.multiprocessors),
            true => (many, self.cuda.info.multiprocessors),
        };
        let parts = heads.div_ceil(kernel.tile[0]);
        let splits = (blocks_at_once / (rows * parts)).clamp(1, single.context.div_ceil(UNIT).min(MAX_SPLITS));
        launch!(self.cuda, &self.cuda.compute, kernel, [splits, parts, rows];
            q.first, q.most as i32, q.rest, q.rest_pitch as i32, single.keys, out, self.attention.partial.address(),
            self.attention.states.address(), single.rows, single.positions, single.token_seq, single.seq_blocks,
            single.block_table, heads as i32, key_dim as i32, value_dim as i32, scale, sinks,
            i32::from(single.early));
        self.combine((rows, single.rows), splits, heads, value_dim, sinks, out);
    }

    /// Moves the first numbers of some rows' queries into the latent's space: to `scratch.query`, which must have room
    /// for so many rows.
    pub(super) fn absorb(&self, up: &LatentUp, scratch: &LatentScratch, q: &Tensor, rows: Range<usize>) {
        let &Mla { num_heads: heads, qk_nope_head_dim: nope, kv_lora_rank: rank, .. } = &up.config;
        let dim = up.config.qk_head_dim();
        self.product(&Product {
            x: q.bf16().add(rows.start * heads * dim),
            x_pitch: heads * dim,
            x_batch: dim,
            w: up.key_up.address(),
            w_batch: rank * nope,
            bias: Address::NULL,
            y: scratch.query.address().cast(),
            y_pitch: heads * rank,
            y_batch: rank,
            tokens: rows.len(),
            n: rank,
            k: nope,
            batch: heads,
            out: Out::Bf16,
        });
    }

    /// Single rows, in the latent's space, where [`absorb`](Self::absorb) has put their queries.
    pub(super) fn attend_absorbed(&self, op: &LatentOp<'_>, single: &Single) {
        let &LatentOp { kv, up, scratch, q, out, .. } = op;
        let &Mla { num_heads: heads, qk_nope_head_dim: nope, v_head_dim: v, kv_lora_rank: rank, .. } = &up.config;
        let dim = up.config.qk_head_dim();
        let shape =
            KeyValues { heads, key_dim: up.config.cache_dim(), value_dim: rank, scale: up.config.scale, int8: kv.int8 };
        let queries = Queries {
            first: scratch.query.address(),
            most: rank,
            rest: q.bf16().add(single.first * heads * dim + nope),
            rest_pitch: dim,
        };
        self.attend_key_values(&shape, single, Address::NULL, &queries, scratch.mixed.address());
        self.product(&Product {
            x: scratch.mixed.address(),
            x_pitch: heads * rank,
            x_batch: rank,
            w: up.kv_b.address().add(nope * rank),
            w_batch: (nope + v) * rank,
            bias: Address::NULL,
            y: out.bf16().add(single.first * heads * v).cast(),
            y_pitch: heads * v,
            y_batch: v,
            tokens: single.count,
            n: v,
            k: rank,
            batch: heads,
            out: Out::Bf16,
        });
    }

    /// Rows of one sequence over a segment of its context.
    pub(super) fn attend_expanded(&self, op: &LatentOp<'_>, part: &Segment) {
        let &LatentOp { kv, batch, up, scratch, q, out } = op;
        let Segment { sequence, rows, positions: segment, end } = part;
        let (config, sequence, end) = (&up.config, *sequence, *end);
        let (heads, nope, rope, v, rank) = (
            config.num_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        );
        let (stream, positions) = (&self.cuda.compute, segment.len());
        let gather = if kv.int8 { kernels::attend_latent_gather_int8 } else { kernels::attend_latent_gather_bf16 };
        launch!(self.cuda, stream, gather, [(positions * (rank + rope)).div_ceil(GATHERED), 1, 1];
            kv.keys.address(), scratch.latents.address(), scratch.rotated.address(), batch.seq_blocks(),
            batch.block_table(), sequence as i32, segment.start as i32, segment.end as i32, rank as i32, rope as i32);
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
        if self.attend_expanded_wgmma(op, part) {
            return;
        }
        let kernel = holding(&PREFILL, nope + rope, v).expect(REFUSED);
        launch!(self.cuda, stream, kernel, [heads, rows.len().div_ceil(kernel.tile[2]), 1];
            q.bf16(), scratch.expanded.address(), scratch.rotated.address(), out.bf16(), scratch.max.address(),
            scratch.sum.address(), scratch.acc.address(), batch.positions(), rows.start as i32, rows.end as i32,
            segment.start as i32, segment.end as i32, i32::from(segment.start == 0), i32::from(segment.end == end),
            heads as i32, nope as i32, rope as i32, v as i32, config.scale);
    }
}
