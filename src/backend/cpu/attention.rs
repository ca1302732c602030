//! Causal attention over paged KV: tiles of query rows against one KV block at a time, with a running softmax.
//!
//! ```text
//! for each tile of queries (tokens of one sequence x heads of one KV head), spread over the workers:
//!   m = -inf, l = 0, acc = 0
//!   for each KV block up to the last visible one:
//!     s = q k^T * scale, -inf where the key is later than the query
//!     m' = max(m, max s);  acc, l *= exp(m - m');  l += sum exp(s - m');  acc += exp(s - m') v
//!   out = acc / l
//! ```
//!
//! Blocks start at fixed positions, so a row's arithmetic is the same in any chunk and any batch.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Cpu, Kv, lock};
use crate::batch::{BLOCK_SIZE, Batch, Span};
use crate::kernel::{Kernel, Rows};
use crate::tensor::Tensor;
use crate::workers::Shared;

/// Query rows (tokens x heads) of one tile.
const TILE: usize = 32;

/// One tile of queries.
struct Tile<'a> {
    span: &'a Span,
    first_row: usize, // in the batch
    tokens: usize,
    kv_head: usize,
    first_head: usize,
    heads: usize,
}

/// How one op is cut into tiles; the same numbers for every span.
struct Cut {
    kv_heads: usize,
    group: usize, // query heads of one KV head
    heads: usize, // of one tile; divides nothing in particular
    tokens: usize,
}

impl Cut {
    fn tiles_of(&self, span: &Span) -> usize {
        span.rows.len().div_ceil(self.tokens) * self.kv_heads * self.group.div_ceil(self.heads)
    }

    /// Tile `i` of a span, later (longer) tokens first.
    fn tile<'a>(&self, span: &'a Span, i: usize) -> Tile<'a> {
        let parts = self.group.div_ceil(self.heads);
        let (row_tile, rest) = (i / (self.kv_heads * parts), i % (self.kv_heads * parts));
        let (kv_head, part) = (rest / parts, rest % parts);
        let end = span.rows.end - row_tile * self.tokens;
        let first_row = end.saturating_sub(self.tokens).max(span.rows.start);
        let first = part * self.heads;
        Tile {
            span,
            first_row,
            tokens: end - first_row,
            kv_head,
            first_head: kv_head * self.group + first,
            heads: self.heads.min(self.group - first),
        }
    }
}

impl Cpu {
    pub(super) fn attend(&self, kv: &Kv, batch: &Batch, num_heads: usize, scale: f32, q: &Tensor, out: &mut Tensor) {
        let group = num_heads / kv.heads;
        let value_dim = out.cols() / num_heads;
        assert!(q.cols() == num_heads * kv.dim && num_heads % kv.heads == 0 && value_dim <= kv.dim);
        // Few rows: split heads finer, so that every worker has a tile.
        let per_worker = (batch.len() * num_heads).div_ceil(self.team.threads());
        let heads = group.min(TILE).min(per_worker).max(1);
        let cut = Cut { kv_heads: kv.heads, group, heads, tokens: (TILE / heads).max(1) };
        let total: usize = batch.spans.iter().map(|s| cut.tiles_of(s)).sum();

        let next = AtomicUsize::new(0);
        let cols = out.cols();
        let output = Shared::new(out.data_mut());
        let (kernel, scratch) = (self.kernel, &self.scratch);
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            let scratch = scratch.take(TILE * (kv.dim + value_dim + BLOCK_SIZE));
            loop {
                let mut i = next.fetch_add(1, Ordering::Relaxed);
                if i >= total {
                    break;
                }
                let span = batch.spans.iter().find(|s| {
                    let tiles = cut.tiles_of(s);
                    let here = i < tiles;
                    i -= if here { 0 } else { tiles };
                    here
                });
                let tile = cut.tile(span.expect("i is below the total"), i);
                let acc = attend_tile(kernel, kv, batch, &tile, scale, q, value_dim, scratch);
                for (r, row) in acc.chunks_exact(value_dim).enumerate() {
                    let (t, h) = (tile.first_row + r / tile.heads, tile.first_head + r % tile.heads);
                    let at = t * cols + h * value_dim;
                    // SAFETY: a (token, head) belongs to exactly one tile, and a tile to one worker.
                    #[allow(unsafe_code)]
                    let to = unsafe { output.slice_mut(at..at + value_dim) };
                    to.copy_from_slice(row);
                }
            }
        });
    }
}

/// Attention of one tile: `[tokens * heads, value_dim]`, in `scratch`.
#[allow(clippy::too_many_arguments)]
fn attend_tile<'s>(
    kernel: &dyn Kernel,
    kv: &Kv,
    batch: &Batch,
    tile: &Tile<'_>,
    scale: f32,
    q: &Tensor,
    value_dim: usize,
    scratch: &'s mut [f32],
) -> &'s [f32] {
    let (dim, rows) = (kv.dim, tile.tokens * tile.heads);
    let (query, scratch) = scratch.split_at_mut(TILE * dim);
    let (scores, acc) = scratch.split_at_mut(TILE * BLOCK_SIZE);
    let acc = &mut acc[..rows * value_dim];
    for (r, to) in query.chunks_exact_mut(dim).take(rows).enumerate() {
        let (t, h) = (tile.first_row + r / tile.heads, tile.first_head + r % tile.heads);
        for (a, b) in to.iter_mut().zip(&q.row(t)[h * dim..][..dim]) {
            *a = b * scale;
        }
    }
    acc.fill(0.0);
    let (mut max, mut sum) = ([f32::NEG_INFINITY; TILE], [0.0f32; TILE]);

    let first_position = tile.span.start + tile.first_row - tile.span.rows.start;
    let visible = first_position + tile.tokens; // by the tile's last token
    for start in (0..visible).step_by(BLOCK_SIZE) {
        let keys = BLOCK_SIZE.min(visible - start);
        let at = kv.at(batch.slot(tile.span, start), tile.kv_head);
        let scores = &mut scores[..rows * keys];
        kernel.dot_f32(Rows::new(&kv.key[at..][..keys * dim], keys, dim), Rows::new(&query[..rows * dim], rows, dim), scores);
        for (r, s) in scores.chunks_exact_mut(keys).enumerate() {
            let position = first_position + r / tile.heads;
            let seen = (position + 1).saturating_sub(start).min(keys);
            s[seen..].fill(f32::NEG_INFINITY);
            let new_max = s[..seen].iter().fold(max[r], |m, &v| m.max(v));
            let correction = if max[r] == new_max { 1.0 } else { kernel_exp(kernel, max[r] - new_max) };
            sum[r] = sum[r] * correction + kernel.exp_sub(s, new_max);
            max[r] = new_max;
            if correction != 1.0 {
                acc[r * value_dim..][..value_dim].iter_mut().for_each(|a| *a *= correction);
            }
        }
        let values = kv.value.as_ref().unwrap_or(&kv.key);
        kernel.axpy_f32(Rows::new(scores, rows, keys), Rows::strided(&values[at..], keys, value_dim, dim), acc);
    }
    for (r, row) in acc.chunks_exact_mut(value_dim).enumerate() {
        row.iter_mut().for_each(|a| *a /= sum[r]);
    }
    acc
}

/// exp of one number, with the kernel's polynomial.
fn kernel_exp(kernel: &dyn Kernel, x: f32) -> f32 {
    let mut one = [x];
    kernel.exp_sub(&mut one, 0.0);
    one[0]
}
