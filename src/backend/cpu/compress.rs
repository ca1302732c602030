//! Entries of several positions, and attention over them and a window, in f32.
//!
//! ```text
//! compress          channels, spread over the workers: tokens one by one, each into the open entries
//! attend_entries    (token, some heads), claimed by the workers:
//!   for each 64 of the window's rows, then of the entries, in the order of their positions:
//!     s = rows . q * scale;  m' = max(m, max s);  acc, l *= exp(m - m');  l += sum exp(s - m');  acc += p rows
//!   out = acc / (l + what the sink adds)
//! ```
//!
//! Tokens go one by one into entries, and rows come in a fixed order: bits do not depend on chunks. The window's rows
//! are f32; entries are rounded as keys and values are elsewhere.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;

use super::recur::State;
use super::select::Index;
use super::softmax::exp;
use super::{Cpu, lock};
use crate::backend::batch::{BLOCK_SIZE, Batch, Span};
use crate::backend::tensor::Tensor;
use crate::backend::{Compress, CompressRule, Seen};
use crate::config::KvBits;
use crate::kernel::{Kernel, Rows};
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;
use crate::model::{Compressed, Compressor};
use crate::{Error, Result};

/// Rows whose scores are there at once.
const STEP: usize = 64;

/// Entries of one layer.
pub struct Entries {
    data: Buffer<bf16>, // [blocks, entries of a block, parts, dim]
    of: Compressor,
    parts: usize,
}

impl Entries {
    /// The most entries that end in a block.
    fn of_block(of: Compressor) -> usize {
        BLOCK_SIZE.div_ceil(of.ratio)
    }

    fn block_len(&self) -> usize {
        Self::of_block(self.of) * self.parts * self.of.dim
    }

    /// Where entry `i` of a sequence lies.
    fn place(&self, batch: &Batch, span: &Span, i: usize) -> usize {
        let end = (i + 1) * self.of.ratio - 1;
        let first = self.of.ended(end / BLOCK_SIZE * BLOCK_SIZE); // that ends in the same block
        batch.slot(span, end) / BLOCK_SIZE * self.block_len() + (i - first) * self.parts * self.of.dim
    }

    /// Entry `i` of a sequence.
    fn read(&self, batch: &Batch, span: &Span, i: usize, to: &mut [f32]) {
        let at = self.place(batch, span, i);
        let (high, low) = self.data[at..at + self.parts * self.of.dim].split_at(self.of.dim);
        to.iter_mut().zip(high).for_each(|(to, x)| *to = x.to_f32());
        to.iter_mut().zip(low).for_each(|(to, x)| *to += x.to_f32());
    }
}

/// The rows of a batch that end entries, with their spans and positions.
fn ends(batch: &Batch, ratio: usize) -> impl Iterator<Item = (&Span, usize, usize)> {
    let of_span = move |span| ends_of(span, ratio).map(move |(t, position)| (span, t, position));
    batch.spans.iter().flat_map(of_span)
}

fn ends_of(span: &Span, ratio: usize) -> impl Iterator<Item = (usize, usize)> {
    span.rows.clone().zip(span.start..).filter(move |(_, position)| (position + 1).is_multiple_of(ratio))
}

/// Rotates the last numbers of a row to `position`.
fn turn(position: usize, inv_freq: &[f32], row: &mut [f32]) {
    let first = row.len() - 2 * inv_freq.len();
    for ([a, b], freq) in row[first..].as_chunks_mut::<2>().0.iter_mut().zip(inv_freq) {
        let (sin, cos) = (position as f32 * freq).sin_cos();
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// One number of an open entry.
struct Open<'a> {
    largest: &'a mut f32,
    shares: &'a mut f32,
    values: &'a mut f32,
}

impl Open<'_> {
    fn clear(&mut self) {
        (*self.largest, *self.shares, *self.values) = (f32::NEG_INFINITY, 0.0, 0.0);
    }

    fn take(&mut self, gate: f32, value: f32) {
        if gate > *self.largest {
            let before = (*self.largest - gate).exp(); // 0 of none
            (*self.shares, *self.values) = (*self.shares * before + 1.0, *self.values * before + value);
            *self.largest = gate;
        } else {
            let share = (gate - *self.largest).exp();
            (*self.shares, *self.values) = (*self.shares + share, *self.values + share * value);
        }
    }
}

/// One op of attention, as all workers see it.
struct Op<'a> {
    kernel: &'a dyn Kernel,
    batch: &'a Batch,
    seen: &'a Seen<'a, Cpu>,
    ring: &'a [f32], // [slots, window, dim], position p at p % window
    q: &'a Tensor,
    kv: &'a Tensor,
}

impl Op<'_> {
    /// Row `i` of what a token at `position` attends to: of the `window` first ones positions up to its own, then
    /// entries.
    fn row(&self, span: &Span, (t, position): (usize, usize), window: usize, i: usize, to: &mut [f32]) {
        let dim = to.len();
        match (i.checked_sub(window), self.seen.entries) {
            (None, _) => {
                let at = position + 1 + i - window;
                to.copy_from_slice(match at.checked_sub(span.start) {
                    Some(row) => self.kv.row(span.rows.start + row),
                    None => &self.ring[(span.slot * self.seen.window + at % self.seen.window) * dim..][..dim],
                });
            }
            (Some(i), Some(entries)) => {
                let entry = match self.seen.chosen.filter(|chosen| position + 1 > chosen.most()) {
                    Some(chosen) => chosen.list(t, 0, 1)[i] as usize,
                    None => i,
                };
                entries.read(self.batch, span, entry, to);
            }
            (Some(_), None) => panic!("a layer without entries has only its window"),
        }
    }

    /// Rows of the window, and all, that the token attends to.
    fn rows(&self, t: usize, position: usize) -> (usize, usize) {
        let window = self.seen.window.min(position + 1);
        let entries = self.seen.entries.map_or(0, |entries| match self.seen.chosen {
            Some(chosen) if position + 1 > chosen.most() => chosen.list(t, 0, 1).len(),
            _ => entries.of.ended(position + 1),
        });
        (window, window + entries)
    }

    /// Numbers of scratch memory that `heads` heads take.
    fn scratch_len(heads: usize, dim: usize) -> usize {
        STEP * dim + heads * (STEP + dim + 2)
    }

    /// Some heads of a token, from `first` on.
    fn heads(&self, span: &Span, t: usize, first: usize, out: &mut [f32], memory: &mut [f32]) {
        let Self { kernel, seen, .. } = *self;
        let dim = self.kv.cols();
        let heads = out.len() / dim;
        let (rows, memory) = memory.split_at_mut(STEP * dim);
        let (products, memory) = memory.split_at_mut(heads * STEP);
        let (acc, memory) = memory.split_at_mut(heads * dim);
        let (max, sum) = memory.split_at_mut(heads);
        let sum = &mut sum[..heads];
        acc.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        let position = span.start + t - span.rows.start;
        let (window, all) = self.rows(t, position);
        let q = Rows::new(&self.q.row(t)[first * dim..(first + heads) * dim], heads, dim);
        for start in (0..all).step_by(STEP) {
            let count = STEP.min(all - start);
            for (i, row) in rows.chunks_exact_mut(dim).take(count).enumerate() {
                self.row(span, (t, position), window, start + i, row);
            }
            let products = &mut products[..heads * count];
            kernel.dot_f32(Rows::new(&rows[..count * dim], count, dim), q, products);
            for (h, products) in products.chunks_exact(count).enumerate() {
                let mut shares = [f32::NEG_INFINITY; STEP];
                shares[..count].copy_from_slice(products);
                kernel.scale(&mut shares[..count], seen.scale);
                let largest = shares.iter().copied().fold(max[h], f32::max);
                let acc = &mut acc[h * dim..][..dim];
                let before = if max[h] == largest { 1.0 } else { exp(kernel, max[h] - largest) };
                sum[h] = sum[h] * before + kernel.exp_sub(&mut shares, largest);
                max[h] = largest;
                if before != 1.0 {
                    kernel.scale(acc, before);
                }
                for (share, row) in shares[..count].iter().zip(rows.chunks_exact(dim)) {
                    kernel.add_scaled(row, *share, acc);
                }
            }
        }
        for (h, (out, acc)) in out.chunks_exact_mut(dim).zip(acc.chunks_exact(dim)).enumerate() {
            let sink = seen.sinks[first + h];
            let largest = max[h].max(sink);
            let scale = exp(kernel, max[h] - largest);
            let all = sum[h] * scale + exp(kernel, sink - largest);
            out.iter_mut().zip(acc).for_each(|(out, acc)| *out = acc * scale / all);
        }
    }
}

impl Compress for Cpu {
    type Entries = Entries;
    type EntriesScratch = ();

    fn entries(&self, blocks: usize, of: Compressor, bits: KvBits) -> Result<Entries> {
        if bits == KvBits::Int8 {
            return Err(Error::Invalid("entries of several positions are BF16: use --kv bf16 or bf16x2".into()));
        }
        let parts = bits.parts();
        Ok(Entries { data: self.heap.buffer(&[blocks, Entries::of_block(of), parts, of.dim])?, of, parts })
    }

    fn entries_block_bytes(&self, entries: &Entries) -> usize {
        entries.block_len() * size_of::<bf16>()
    }

    fn entries_to_host(&self, entries: &Entries, block: usize, out: &mut [u8]) {
        let len = entries.block_len();
        out.copy_from_slice(bytemuck::cast_slice(&entries.data[block * len..][..len]));
    }

    fn entries_to_device(&self, entries: &mut Entries, block: usize, from: &[u8]) {
        let len = entries.block_len();
        bytemuck::cast_slice_mut(&mut entries.data[block * len..][..len]).copy_from_slice(from);
    }

    fn entries_scratch(&self, config: &Compressed, _: usize) -> Result<()> {
        let len = Op::scratch_len(config.num_heads, config.head_dim);
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[len]))
    }

    fn compress(&self, state: &mut State, batch: &Batch, rule: &CompressRule<'_, Self>, x: &Tensor, out: &mut Tensor) {
        let Compressor { dim, ratio, .. } = rule.compressor;
        let (open, width, (first, of_slot)) = (rule.compressor.open(), rule.compressor.width(), rule.state);
        assert!(x.cols() == 2 * width && out.cols() == dim && state.heads.len() == state.slots * of_slot);
        let (numbers, cols) = (Shared::new(&mut state.heads), out.cols());
        let rows = Shared::new(out.data_mut());
        self.team.run(&|worker| {
            let mine = worker.share(dim);
            for span in &batch.spans {
                let part = |entry: usize, which: usize| {
                    let at = span.slot * of_slot + first + (entry * 3 + which) * dim;
                    // SAFETY: a slot belongs to one sequence, and in it a channel to one worker.
                    #[allow(unsafe_code)]
                    unsafe {
                        numbers.slice_mut(at + mine.start..at + mine.end)
                    }
                };
                let each = |entry: usize| {
                    let parts = part(entry, 0).iter_mut().zip(part(entry, 1)).zip(part(entry, 2));
                    parts.map(|((largest, shares), values)| Open { largest, shares, values })
                };
                if span.start == 0 {
                    (0..open).for_each(|entry| each(entry).for_each(|mut open| open.clear()));
                }
                for (t, position) in span.rows.clone().zip(span.start..) {
                    let (values, gates) = x.row(t).split_at(width);
                    let bias = &rule.bias[position % ratio * width..][..width];
                    // The last of a position's values are for its own entry, those before for the next.
                    for entry in 0..open {
                        let at = (open - 1 - entry) * dim;
                        let here = at + mine.start..at + mine.end;
                        let of = values[here.clone()].iter().zip(&gates[here.clone()]).zip(&bias[here]);
                        each(entry)
                            .zip(of)
                            .for_each(|(mut open, ((value, gate), bias))| open.take(gate + bias, *value));
                    }
                    if !rule.compressor.ends_at(position) {
                        continue;
                    }
                    // SAFETY: a row's channel belongs to one worker.
                    #[allow(unsafe_code)]
                    let row = unsafe { rows.slice_mut(t * cols + mine.start..t * cols + mine.end) };
                    row.iter_mut().zip(each(0)).for_each(|(to, open)| *to = *open.values / *open.shares);
                    for which in 0..3 {
                        if open == 2 {
                            part(0, which).copy_from_slice(part(1, which));
                        }
                    }
                    each(open - 1).for_each(|mut open| open.clear());
                }
            }
        });
        let mut scratch = lock(&self.scratch[0]);
        let sum = scratch.values.take(dim);
        for (_, t, position) in ends(batch, ratio) {
            let row = out.row_mut(t);
            sum.copy_from_slice(row);
            self.kernel.rms_norm(sum, rule.norm, rule.eps, row);
            rule.inv_freq.iter().for_each(|inv_freq| turn(position + 1 - ratio, inv_freq, row));
        }
    }

    fn rope_entries(&self, batch: &Batch, ratio: usize, inv_freq: &Vec<f32>, rows: &mut Tensor) {
        for (_, t, position) in ends(batch, ratio) {
            turn(position + 1 - ratio, inv_freq, rows.row_mut(t));
        }
    }

    fn entries_write(&self, entries: &mut Entries, batch: &Batch, rows: &Tensor) {
        let of = entries.of;
        for (span, t, position) in ends(batch, of.ratio) {
            let at = entries.place(batch, span, of.ended(position));
            let (high, low) = entries.data[at..at + entries.parts * of.dim].split_at_mut(of.dim);
            for (i, x) in rows.row(t).iter().enumerate() {
                high[i] = bf16::from_f32(*x);
                if let Some(low) = low.get_mut(i) {
                    *low = bf16::from_f32(x - high[i].to_f32());
                }
            }
        }
    }

    fn index_entries(&self, index: &mut Index, batch: &Batch, ratio: usize, rows: &Tensor) {
        for (span, t, position) in ends(batch, ratio) {
            index.key_mut(batch.slot(span, position) / ratio).copy_from_slice(rows.row(t));
        }
    }

    fn attend_entries(
        &self,
        state: &mut State,
        batch: &Batch,
        seen: &Seen<'_, Self>,
        (q, kv): (&Tensor, &Tensor),
        out: &mut Tensor,
    ) {
        let (kernel, dim, window) = (self.kernel, kv.cols(), seen.window);
        let (num_heads, tokens) = (q.cols() / dim, q.rows());
        assert!(state.inputs.len() == state.slots * window * dim && out.cols() == q.cols());
        let op = Op { kernel, batch, seen, ring: &state.inputs, q, kv };
        // Few tokens: their heads are shared out as well.
        let parts = (2 * self.team.working()).div_ceil(tokens).min(num_heads);
        let heads = num_heads.div_ceil(parts);
        let (next, scratch) = (AtomicUsize::new(0), &self.scratch);
        let output = Shared::new(out.data_mut());
        self.team.run(&|worker| {
            let memory = &mut lock(&scratch[worker.index]).values;
            let memory = memory.take(Op::scratch_len(heads, dim));
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let (t, first) = (i / parts, i % parts * heads);
                if t >= tokens {
                    break;
                }
                let last = num_heads.min(first + heads);
                if first >= last {
                    continue;
                }
                let span = batch.spans.iter().find(|span| span.rows.contains(&t)).expect("a token is of a sequence");
                // SAFETY: some heads of a token belong to whoever claimed them.
                #[allow(unsafe_code)]
                let out = unsafe { output.slice_mut((t * num_heads + first) * dim..(t * num_heads + last) * dim) };
                op.heads(span, t, first, out, memory);
            }
        });
        for span in &batch.spans {
            let kept = span.rows.len().saturating_sub(window);
            for (t, position) in span.rows.clone().zip(span.start..).skip(kept) {
                let at = (span.slot * window + position % window) * dim;
                state.inputs[at..at + dim].copy_from_slice(kv.row(t));
            }
        }
    }
}
