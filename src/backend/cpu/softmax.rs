//! The softmax of causal attention over paged KV: tiles of query rows against one KV block at a time, and a running
//! maximum.
//!
//! ```text
//! for each tile of queries (tokens of one sequence x heads of one KV head), spread over the workers:
//!   for each segment of 1,024 positions:
//!     m = -inf, l = 0, acc = 0
//!     for each 256 positions of it, four KV blocks, up to the last visible one:
//!       s = keys . q * scale, -inf where the key is later than the query
//!       m' = max(m, max s);  acc, l *= exp(m - m');  l += sum exp(s - m');  acc += values . exp(s - m')
//!     merge (m, l, acc) into those of the segments before
//!   out = acc / l
//! ```
//!
//! Blocks and segments start at fixed positions, so a row's arithmetic is the same in any chunk and any batch, whether
//! one worker does all segments or, when there are few queries and much context, each does some. A window leaves out
//! what is before it: what a row skips or masks changes none of its bits.
//!
//! A token that attends to a list of positions walks the list as others walk a sequence, its entries gathered in blocks
//! of 64. A list of all positions would give the same bits.

use std::ops::Range;

use moebius_cache::Precision;
use moebius_cache::pack::TILE_ROWS;

use super::Scratch;
use super::kv::Kv;
use super::select::{Chosen, Listed, listed};
use crate::Result;
use crate::backend::batch::{BLOCK_SIZE, Batch, Span};
use crate::backend::tensor::Tensor;
use crate::kernel::{Kernel, Start};
use crate::machine::heap::Heap;
use crate::machine::workers::Shared;
use crate::model::Window;

/// Query rows (tokens x heads) of one tile.
pub(super) const TILE: usize = 64;

/// Positions whose softmax is summed up on its own.
pub(super) const SEGMENT: usize = 1024;

/// Positions whose scores are there at once: a running softmax is brought up to date so often.
const STEP: usize = 256;

/// Tiles of values whose sums stay in L1 while the blocks of a step pass.
const VALUE_TILES: usize = 8;

/// One op, as all workers see it.
pub(super) struct SoftmaxOp<'a> {
    pub(super) kernel: &'a dyn Kernel,
    pub(super) kv: &'a Kv,
    pub(super) batch: &'a Batch,
    pub(super) num_heads: usize,
    pub(super) scale: f32,
    pub(super) window: Option<Window>,
    pub(super) sinks: Option<&'a [f32]>, // [num_heads]
    pub(super) q: &'a Tensor,
    pub(super) cut: TileCut<'a>,
}

/// The tokens of one op.
#[derive(Clone, Copy)]
pub(super) enum Tokens<'a> {
    /// Those at positions before this one: each attends to all that it sees.
    Before(usize),
    /// Some of those that attend to lists.
    Listed {
        chosen: &'a Chosen,
        gathered: &'a Kv, // [tokens, KV heads] runs of blocks
        first: usize,     // among all of the batch that have lists
        count: usize,
    },
}

impl Tokens<'_> {
    /// Its rows of a span, of those that have no lists.
    fn rows(&self, span: &Span) -> Range<usize> {
        match *self {
            Tokens::Before(end) => {
                span.rows.start..span.rows.start + end.saturating_sub(span.start).min(span.rows.len())
            }
            Tokens::Listed { .. } => span.rows.start..span.rows.start,
        }
    }

    /// Tokens of a batch.
    pub(super) fn count(&self, batch: &Batch) -> usize {
        match *self {
            Tokens::Before(_) => batch.spans.iter().map(|span| self.rows(span).len()).sum(),
            Tokens::Listed { count, .. } => count,
        }
    }

    /// Segments of the one that attends to the most.
    pub(super) fn segments(&self, batch: &Batch) -> usize {
        match self {
            Tokens::Before(_) => {
                let ends = batch.spans.iter().map(|span| span.start + self.rows(span).len());
                ends.map(|end| end.div_ceil(SEGMENT)).max().unwrap_or(0)
            }
            Tokens::Listed { chosen, .. } => chosen.most().div_ceil(SEGMENT),
        }
    }
}

/// The positions of a tile's only token.
#[derive(Clone, Copy)]
struct List<'a> {
    positions: &'a [u32],
    gathered: &'a Kv,
    first_block: usize, // there
}

/// Position of the first of entries `[64 i, 64 i + 64)` of a list that are a block of the sequence, or its beginning:
/// they need not be gathered.
pub(super) fn whole_block(list: &[u32], i: usize) -> Option<usize> {
    let part = &list[i * BLOCK_SIZE..list.len().min((i + 1) * BLOCK_SIZE)];
    let (first, last) = (part[0] as usize, part[part.len() - 1] as usize);
    (first.is_multiple_of(BLOCK_SIZE) && last - first == part.len() - 1).then_some(first)
}

/// One tile of queries.
pub(super) struct QueryTile<'a> {
    span: &'a Span,
    first_row: usize, // in the batch
    tokens: usize,
    kv_head: usize,
    first_head: usize,
    heads: usize,
    list: Option<List<'a>>,
}

impl QueryTile<'_> {
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.heads
    }

    /// Position of its first token, or the last entry of its list.
    fn position(&self) -> usize {
        match self.list {
            None => self.span.start + self.first_row - self.span.rows.start,
            Some(list) => list.positions.len() - 1,
        }
    }
}

/// How one op is cut into tiles; the same numbers for every span.
pub(super) struct TileCut<'a> {
    of: Tokens<'a>,
    kv_heads: usize,
    group: usize, // query heads of one KV head
    heads: usize, // of one tile; divides nothing in particular
    tokens: usize,
}

impl<'a> TileCut<'a> {
    pub(super) fn new(of: Tokens<'a>, kv_heads: usize, group: usize, heads: usize) -> Self {
        Self { of, kv_heads, group, heads, tokens: (TILE / heads).max(1) }
    }

    /// Tiles of a token, or of several together.
    fn tiles_of_token(&self) -> usize {
        self.kv_heads * self.group.div_ceil(self.heads)
    }

    fn tiles_of(&self, span: &Span) -> usize {
        self.of.rows(span).len().div_ceil(self.tokens) * self.tiles_of_token()
    }

    /// Tiles of a batch.
    pub(super) fn tiles(&self, batch: &Batch) -> usize {
        match self.of {
            Tokens::Before(_) => batch.spans.iter().map(|span| self.tiles_of(span)).sum(),
            Tokens::Listed { count, .. } => count * self.tiles_of_token(),
        }
    }

    /// QueryTile `i` of the tokens `rows` of a span.
    fn tile(&self, span: &'a Span, rows: Range<usize>, i: usize) -> QueryTile<'a> {
        let parts = self.group.div_ceil(self.heads);
        let (kv_head, part) = (i / parts, i % parts);
        let first = part * self.heads;
        QueryTile {
            span,
            first_row: rows.start,
            tokens: rows.len(),
            kv_head,
            first_head: kv_head * self.group + first,
            heads: self.heads.min(self.group - first),
            list: None,
        }
    }

    /// QueryTile `i` of all; of a span later (longer) tokens first.
    pub(super) fn find(&self, batch: &'a Batch, mut i: usize) -> QueryTile<'a> {
        if let Tokens::Listed { chosen, gathered, first, .. } = self.of {
            let (token, i) = (i / self.tiles_of_token(), i % self.tiles_of_token());
            let mut all = batch.spans.iter().flat_map(|span| listed(span, chosen.most()));
            let Listed { span, row, .. } = all.nth(first + token).expect("as many as were counted");
            let tile = self.tile(span, row..row + 1, i);
            let run = token * self.kv_heads + tile.kv_head;
            let list = List {
                positions: chosen.list(row, tile.kv_head, self.kv_heads),
                gathered,
                first_block: run * chosen.most().div_ceil(BLOCK_SIZE),
            };
            return QueryTile { list: Some(list), ..tile };
        }
        for span in &batch.spans {
            let tiles = self.tiles_of(span);
            if i < tiles {
                let (rows, each) = (self.of.rows(span), self.tiles_of_token());
                let end = rows.end - i / each * self.tokens;
                return self.tile(span, end.saturating_sub(self.tokens).max(rows.start)..end, i % each);
            }
            i -= tiles;
        }
        panic!("fewer tiles than were counted");
    }
}

/// The softmax of some positions for the rows of a tile, not yet divided.
pub(super) struct Sums<'s> {
    acc: &'s mut [f32], // [parts][rows][part of value_dim]
    max: &'s mut [f32], // [rows]
    sum: &'s mut [f32], // [rows]
}

impl<'s> Sums<'s> {
    /// Numbers that `new` takes: whole cache lines.
    pub(super) fn len(rows: usize, width: usize) -> usize {
        (rows * (width + 2)).next_multiple_of(16)
    }

    pub(super) fn new(memory: &'s mut [f32], rows: usize, width: usize) -> Self {
        let (acc, memory) = memory.split_at_mut(rows * width);
        let (max, memory) = memory.split_at_mut(rows);
        Self { acc, max, sum: &mut memory[..rows] }
    }

    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Where the parts of a row are in `acc`.
    fn row(&self, r: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        const PART: usize = VALUE_TILES * TILE_ROWS;
        let (rows, width) = (self.max.len(), self.acc.len() / self.max.len());
        (0..width).step_by(PART).map(move |first| {
            let part = PART.min(width - first);
            let at = first * rows + r * part;
            at..at + part
        })
    }

    /// Takes in the sums of later positions.
    pub(super) fn merge(&mut self, kernel: &dyn Kernel, later: &Sums<'_>) {
        for r in 0..self.max.len() {
            if later.max[r] == f32::NEG_INFINITY {
                continue; // no position seen
            }
            let max = self.max[r].max(later.max[r]);
            let (mine, theirs) = (exp(kernel, self.max[r] - max), exp(kernel, later.max[r] - max));
            for part in self.row(r) {
                let acc = &mut self.acc[part.clone()];
                kernel.scale(acc, mine);
                kernel.add_scaled(&later.acc[part], theirs, acc);
            }
            (self.max[r], self.sum[r]) = (max, self.sum[r] * mine + later.sum[r] * theirs);
        }
    }
}

/// Takes what a worker needs for tiles of queries over `kv`.
pub(super) fn reserve(scratch: &mut Scratch, heap: &Heap, kernel: &dyn Kernel, kv: &Kv) -> Result<()> {
    let Scratch { values, activations, row, scores, probabilities, tiles } = scratch;
    kv.reserve(heap, tiles, VALUE_TILES)?;
    values.reserve(heap, &[2, Sums::len(TILE, kv.value_width())])?;
    activations.reserve(heap, kernel, Precision::Bf16, kv.keys.layout.k, TILE)?;
    row.reserve(heap, &[kv.keys.layout.k.max(kv.values.layout.n)])?;
    scores.reserve(heap, &[TILE, STEP])?;
    probabilities.reserve(heap, kernel, Precision::Bf16, STEP, TILE)
}

impl SoftmaxOp<'_> {
    /// Where block `i` of what a tile walks is: storage, block and head.
    fn block<'b>(&'b self, tile: &'b QueryTile<'_>, i: usize) -> (&'b Kv, usize, usize) {
        let of_sequence = |position| (self.kv, self.batch.slot(tile.span, position) / BLOCK_SIZE, tile.kv_head);
        match tile.list {
            None => of_sequence(i * BLOCK_SIZE),
            Some(list) => match whole_block(list.positions, i) {
                Some(first) => of_sequence(first),
                None => (list.gathered, list.first_block + i, 0),
            },
        }
    }

    /// The first position that a token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| window.first_seen(position))
    }

    /// Segments that a tile's tokens see something of.
    pub(super) fn segments(&self, tile: &QueryTile<'_>) -> Range<usize> {
        self.first_seen(tile.position()) / SEGMENT..(tile.position() + tile.tokens).div_ceil(SEGMENT)
    }

    /// A whole tile, one segment after the other.
    pub(super) fn all(&self, tile: &QueryTile<'_>, scratch: &mut Scratch, output: &Shared<'_, f32>) {
        self.prepare(tile, scratch);
        let (rows, width) = (tile.rows(), self.kv.value_width());
        let len = Sums::len(rows, width);
        let mut memory = std::mem::take(&mut scratch.values);
        let (first, later) = memory.take(2 * len).split_at_mut(len);
        let (mut sums, mut later) = (Sums::new(first, rows, width), Sums::new(later, rows, width));
        let segments = self.segments(tile);
        self.segment(tile, segments.start, scratch, &mut sums);
        for segment in segments.skip(1) {
            self.segment(tile, segment, scratch, &mut later);
            sums.merge(self.kernel, &later);
        }
        self.write(tile, &sums, output);
        scratch.values = memory;
    }

    /// Brings the tile's queries, scaled, into the form that keys are multiplied with.
    pub(super) fn prepare(&self, tile: &QueryTile<'_>, scratch: &mut Scratch) {
        let dim = self.kv.keys.layout.k;
        let Scratch { activations, row, .. } = scratch;
        let row = row.take(dim);
        let queries = activations.start(self.kernel, Precision::Bf16, dim, tile.rows());
        for r in 0..tile.rows() {
            let (t, h) = (tile.first_row + r / tile.heads, tile.first_head + r % tile.heads);
            for (to, q) in row.iter_mut().zip(&self.q.row(t)[h * dim..][..dim]) {
                *to = q * self.scale;
            }
            // SAFETY: the scratch memory is this worker's own.
            #[allow(unsafe_code)]
            unsafe {
                queries.put(self.kernel, r..r + 1, row);
            }
        }
    }

    /// The sums of one segment for a tile whose queries are prepared.
    pub(super) fn segment(&self, tile: &QueryTile<'_>, segment: usize, scratch: &mut Scratch, sums: &mut Sums<'_>) {
        let (kernel, kv, rows) = (self.kernel, self.kv, tile.rows());
        let Scratch { activations, probabilities, scores, tiles: room, .. } = scratch;
        let scores = scores.take(rows * STEP);
        sums.clear();
        let visible = tile.position() + tile.tokens; // by the tile's last token
        let end = visible.min((segment + 1) * SEGMENT);
        let begin = (segment * SEGMENT).max(self.first_seen(tile.position()) / STEP * STEP);
        for start in (begin..end).step_by(STEP) {
            let blocks = (end - start).min(STEP).div_ceil(BLOCK_SIZE);
            for (i, scores) in scores.chunks_exact_mut(rows * BLOCK_SIZE).take(blocks).enumerate() {
                let (from, block, head) = self.block(tile, start / BLOCK_SIZE + i);
                for part in 0..kv.parts {
                    let sums = if part == 0 { Start::Zero } else { Start::Out };
                    kernel.matmul(
                        &kv.keys.layout,
                        &from.keys(kernel, (block, head, part), room).into(),
                        &activations.rows(0..rows),
                        sums,
                        scores,
                    );
                }
            }
            let to = probabilities.start(kernel, Precision::Bf16, blocks * BLOCK_SIZE, rows);
            for r in 0..rows {
                let mut row = [0.0; STEP];
                let row = &mut row[..blocks * BLOCK_SIZE];
                for (to, scores) in
                    row.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut().zip(scores.chunks_exact(rows * BLOCK_SIZE))
                {
                    *to = scores.as_chunks::<BLOCK_SIZE>().0[r];
                }
                let position = tile.position() + r / tile.heads;
                let seen = (position + 1).saturating_sub(start).min(row.len());
                row[seen..].fill(f32::NEG_INFINITY);
                row[..self.first_seen(position).saturating_sub(start).min(seen)].fill(f32::NEG_INFINITY);
                let max = largest(row, sums.max[r]);
                if max == f32::NEG_INFINITY {
                    row.fill(0.0);
                } else {
                    let correction = if sums.max[r] == max { 1.0 } else { exp(kernel, sums.max[r] - max) };
                    sums.sum[r] = sums.sum[r] * correction + kernel.exp_sub(row, max);
                    sums.max[r] = max;
                    if correction != 1.0 {
                        sums.row(r).for_each(|part| kernel.scale(&mut sums.acc[part], correction));
                    }
                }
                // SAFETY: the scratch memory is this worker's own.
                #[allow(unsafe_code)]
                unsafe {
                    to.put(kernel, r..r + 1, row);
                }
            }
            for (v, acc) in sums.acc.chunks_mut(rows * VALUE_TILES * TILE_ROWS).enumerate() {
                for i in 0..blocks {
                    let p = probabilities.rows(0..rows).inputs(i * BLOCK_SIZE, BLOCK_SIZE);
                    let (from, block, head) = self.block(tile, start / BLOCK_SIZE + i);
                    for part in 0..kv.parts {
                        let tiles = v * VALUE_TILES..kv.values.layout.tiles().min((v + 1) * VALUE_TILES);
                        let values = from.values(kernel, (block, head, part), tiles, room);
                        kernel.matmul(&kv.values.layout, &values.into(), &p, Start::Out, acc);
                    }
                }
            }
        }
    }

    /// Divides by the sum, and by what the head's sink adds to it, and puts each row in its place.
    pub(super) fn write(&self, tile: &QueryTile<'_>, sums: &Sums<'_>, output: &Shared<'_, f32>) {
        let dim = self.kv.values.layout.n;
        for r in 0..tile.rows() {
            let (t, h) = (tile.first_row + r / tile.heads, tile.first_head + r % tile.heads);
            let at = (t * self.num_heads + h) * dim;
            // SAFETY: a (token, head) belongs to exactly one tile, and a tile to one worker.
            #[allow(unsafe_code)]
            let mut out = unsafe { output.slice_mut(at..at + dim) }.iter_mut();
            let (mut scale, mut sum) = (1.0, sums.sum[r]);
            if let Some(sink) = self.sinks.map(|sinks| sinks[h]) {
                let max = sums.max[r].max(sink);
                scale = exp(self.kernel, sums.max[r] - max);
                sum = sum * scale + exp(self.kernel, sink - max);
            }
            for part in sums.row(r) {
                // The last part may have more numbers than there are values.
                for (acc, out) in sums.acc[part].iter().zip(&mut out) {
                    *out = acc * scale / sum;
                }
            }
        }
    }
}

/// The largest of `x` and `least`, in lanes: one running maximum would wait for itself.
fn largest(x: &[f32], least: f32) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [least; 16];
    for part in x.as_chunks::<16>().0 {
        for (lane, x) in lanes.iter_mut().zip(part) {
            *lane = larger(*lane, *x);
        }
    }
    lanes.into_iter().fold(least, larger)
}

/// exp of one number, with the kernel's polynomial.
pub(super) fn exp(kernel: &dyn Kernel, x: f32) -> f32 {
    let mut one = [x];
    kernel.exp_sub(&mut one, 0.0);
    one[0]
}
