//! Activations in the form that packed weights are multiplied with.
//!
//! ```text
//! integer weights  codes  [ceil(k / 64)][stride][64] i8,  scales, sums [k / group][stride]
//! BF16, FP8        parts  [ceil(k / 32)][stride][split_words] f32, see `Kernel::split`
//! ```
//!
//! Where a kernel has several rows of codes to a row, these lie one after the other.
//!
//! Rows of one block of inputs lie one after the other, so any 16 rows in a row are an AMX tile as they lie. The stride
//! is odd: blocks of inputs, which follow each other in time, fall into different sets of the caches.
#![allow(unsafe_code)]

use std::ops::Range;

use moebius_cache::Precision;
use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::{Kernel, Tiles};
use crate::Result;
use crate::machine::heap::Heap;
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;

/// Inputs of one block of codes.
pub(super) const CODES: usize = 64;

/// Rows `[max_rows, k]` for weights of one precision, allocated once, at the boundaries of cache lines and in huge
/// pages.
#[derive(Default)]
pub struct Activations {
    k: usize,
    group: usize, // 0: split, not quantized
    words: usize, // of 32 split inputs
    rows: usize,
    code_rows: usize, // to a row, 1 or 2
    stride: usize,
    codes: Buffer<i8>,
    scales: Buffer<f32>,
    sums: Buffer<i32>,
    parts: Buffer<f32>,
}

impl Activations {
    /// Begins with `rows` rows whose contents are whatever was there before; grows when there was never so much.
    pub fn start(&mut self, kernel: &dyn Kernel, precision: Precision, k: usize, rows: usize) -> ActivationsMut<'_> {
        (self.group, self.words) = (group_of(precision), kernel.split_words());
        self.code_rows = code_rows_of(kernel, self.group);
        (self.k, self.rows, self.stride) = (k, rows, (rows * self.code_rows) | 1);
        let lens = lens(kernel, precision, k, rows);
        // To make a heap is to allocate, which a decode step must not.
        if !self.holds(lens) {
            self.grow(&Heap::default(), lens).expect("a program out of address space cannot go on");
        }
        self.shared()
    }

    /// Takes room for `rows` rows of `k` inputs, where there never was so much. Errors: `Error::Resources`.
    pub fn reserve(
        &mut self,
        heap: &Heap,
        kernel: &dyn Kernel,
        precision: Precision,
        k: usize,
        rows: usize,
    ) -> Result<()> {
        self.grow(heap, lens(kernel, precision, k, rows))
    }

    fn holds(&self, [codes, scales, sums, parts]: [usize; 4]) -> bool {
        self.codes.len() >= codes && self.scales.len() >= scales && self.sums.len() >= sums && self.parts.len() >= parts
    }

    fn grow(&mut self, heap: &Heap, [codes, scales, sums, parts]: [usize; 4]) -> Result<()> {
        heap.grow(&mut self.codes, &[codes])?;
        heap.grow(&mut self.scales, &[scales])?;
        heap.grow(&mut self.sums, &[sums])?;
        heap.grow(&mut self.parts, &[parts])
    }

    fn shared(&mut self) -> ActivationsMut<'_> {
        let Self { k, group, words, rows, code_rows, stride, .. } = *self;
        ActivationsMut {
            k,
            group,
            words,
            rows,
            code_rows,
            stride,
            codes: Shared::new(&mut self.codes),
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
            parts: Shared::new(&mut self.parts),
        }
    }

    /// Some rows, to multiply with.
    pub fn rows(&self, rows: Range<usize>) -> ActivationRows<'_> {
        assert!(rows.end <= self.rows && !rows.is_empty());
        let Self { k, group, words, code_rows, stride, .. } = *self;
        ActivationRows {
            k,
            group,
            words,
            code_rows,
            stride,
            first: rows.start,
            len: rows.len(),
            codes: &self.codes,
            scales: &self.scales,
            sums: &self.sums,
            parts: &self.parts,
        }
    }
}

/// Inputs that a worker prepares at a time: whole groups, and whole blocks, of every form.
const CHUNK: usize = 512;

/// How many chunks `rows` rows of `k` inputs have: more than there are rows, so that few rows are work for many
/// workers.
pub fn chunks(rows: usize, k: usize) -> usize {
    rows * k.div_ceil(CHUNK)
}

/// The row and the inputs of chunk `i`. Chunks that follow each other are the same inputs of different rows: these lie
/// together once they are prepared.
pub fn chunk(i: usize, rows: usize, k: usize) -> (usize, Range<usize>) {
    let from = i / rows * CHUNK;
    (i % rows, from..k.min(from + CHUNK))
}

/// Forms of activations that there are.
pub const FORMS: usize = 5;

/// The form that weights of this precision meet, by its number.
pub fn form(precision: Precision) -> usize {
    match group_of(precision) {
        0 => 0,
        group => (group / 16).ilog2() as usize + 1, // 16, 32, 64 or 128
    }
}

/// Inputs that are quantized together for weights of this precision; 0: they are split.
fn group_of(precision: Precision) -> usize {
    precision.group_size().filter(|_| precision.takes_integers()).unwrap_or(0)
}

/// Rows of codes to a row of activations in groups of `group`.
fn code_rows_of(kernel: &dyn Kernel, group: usize) -> usize {
    if group > 0 { kernel.code_rows() } else { 1 }
}

/// Numbers of `codes`, `scales`, `sums` and `parts`.
fn lens(kernel: &dyn Kernel, precision: Precision, k: usize, rows: usize) -> [usize; 4] {
    let rows = rows.saturating_mul(code_rows_of(kernel, group_of(precision)));
    // A config that lies has more blocks than a number holds.
    let blocks = |blocks: usize| blocks.saturating_mul(rows | 1);
    // A kernel may read whole tiles of rows, whose results it then forgets.
    let padded = |count: usize| blocks(count).saturating_add(TILE_ROWS);
    match group_of(precision) {
        group @ 1.. => [padded(k.div_ceil(CODES)).saturating_mul(CODES), padded(k / group), padded(k / group), 0],
        0 => [0, 0, 0, padded(k.div_ceil(BF16_INPUTS)).saturating_mul(kernel.split_words())],
    }
}

/// Activations while several workers fill in rows.
pub struct ActivationsMut<'a> {
    k: usize,
    group: usize,
    words: usize,
    rows: usize,
    code_rows: usize,
    stride: usize,
    codes: Shared<'a, i8>,
    scales: Shared<'a, f32>,
    sums: Shared<'a, i32>,
    parts: Shared<'a, f32>,
}

impl ActivationsMut<'_> {
    /// Writes `x` `[k]` to each of `rows`.
    ///
    /// # Safety
    /// No other thread uses these rows before it has synchronized with this one.
    pub unsafe fn put(&self, kernel: &dyn Kernel, rows: impl Iterator<Item = usize> + Clone, x: &[f32]) {
        assert_eq!(x.len(), self.k);
        // SAFETY: as promised by the caller.
        unsafe { self.put_inputs(kernel, rows, 0, x) }
    }

    /// Writes `x` to the inputs from `from` on of each of `rows`: whole groups, or blocks of 32.
    ///
    /// # Safety
    /// As of [`put`](Self::put), of these inputs.
    pub unsafe fn put_inputs(
        &self,
        kernel: &dyn Kernel,
        rows: impl Iterator<Item = usize> + Clone,
        from: usize,
        x: &[f32],
    ) {
        assert!(from + x.len() <= self.k && rows.clone().all(|row| row < self.rows));
        assert!(from.is_multiple_of(if self.group == 0 { BF16_INPUTS } else { self.group }));
        if self.group == 0 {
            // Several blocks at a time: a call for each would cost as much as its work.
            const BLOCKS: usize = 8;
            let mut words = [0.0; BLOCKS * 2 * BF16_INPUTS];
            for (i, x) in x.chunks(BLOCKS * BF16_INPUTS).enumerate() {
                let words = &mut words[..x.len().div_ceil(BF16_INPUTS) * self.words];
                kernel.split(x, words);
                for (block, words) in (from / BF16_INPUTS + i * BLOCKS..).zip(words.chunks_exact(self.words)) {
                    for row in rows.clone() {
                        let at = (block * self.stride + row) * self.words;
                        // SAFETY: these words belong to the row, and the row to the caller, as promised.
                        let to = unsafe { self.parts.slice_mut(at..at + self.words) };
                        // Of a known length, so that no call is made for 64 bytes.
                        for (to, from) in to.as_chunks_mut::<16>().0.iter_mut().zip(words.as_chunks::<16>().0) {
                            *to = *from;
                        }
                    }
                }
            }
            return;
        }
        // Several groups at a time: a call for each would cost as much as its work, and of a token's inputs one core
        // does this while the others wait.
        const INPUTS: usize = 512;
        let (mut codes, mut left) = ([0; INPUTS], [0.0; INPUTS]);
        let (mut scales, mut sums) = ([0.0; INPUTS / 16], [0; INPUTS / 16]);
        let of_half = |half: usize| rows.clone().map(move |row| row * self.code_rows + half);
        for (i, x) in x.chunks(INPUTS).enumerate() {
            let (first, groups) = ((from + i * INPUTS) / self.group, x.len() / self.group);
            let (codes, left) = (&mut codes[..x.len()], &mut left[..x.len()]);
            let (scales, sums) = (&mut scales[..groups], &mut sums[..groups]);
            kernel.quantize(x, self.group, codes, scales, sums);
            // SAFETY: as promised by the caller.
            unsafe { self.put_groups(first, of_half(0), codes, scales, sums) };
            if self.code_rows == 2 {
                kernel.remainder(x, codes, scales, left);
                kernel.quantize(left, self.group, codes, scales, sums);
                // SAFETY: as promised by the caller.
                unsafe { self.put_groups(first, of_half(1), codes, scales, sums) };
            }
        }
    }

    /// Writes groups from one on to each of these rows of codes.
    ///
    /// # Safety
    /// As of [`put`](Self::put).
    #[inline(always)]
    unsafe fn put_groups(
        &self,
        first: usize,
        rows: impl Iterator<Item = usize> + Clone,
        codes: &[i8],
        scales: &[f32],
        sums: &[i32],
    ) {
        for (i, codes) in codes.chunks_exact(self.group).enumerate() {
            // SAFETY: as promised by the caller.
            unsafe { self.put_codes(first + i, rows.clone(), codes, (scales[i], sums[i])) };
        }
    }

    /// Writes a group's codes to each of these rows of codes.
    ///
    /// # Safety
    /// As of [`put`](Self::put).
    #[inline(always)]
    unsafe fn put_codes(&self, g: usize, rows: impl Iterator<Item = usize>, codes: &[i8], (scale, sum): (f32, i32)) {
        for row in rows {
            // SAFETY: these numbers belong to the row, and the row to the caller, as promised.
            unsafe {
                for (i, codes) in codes.chunks(CODES).enumerate() {
                    let input = g * self.group + i * CODES;
                    let at = (input / CODES * self.stride + row) * CODES + input % CODES;
                    let to = self.codes.slice_mut(at..at + codes.len());
                    if let (Ok(to), Ok(from)) = (<&mut [i8; 16]>::try_from(&mut *to), <&[i8; 16]>::try_from(codes)) {
                        *to = *from;
                    }
                    for (to, from) in to.as_chunks_mut::<32>().0.iter_mut().zip(codes.as_chunks::<32>().0) {
                        *to = *from;
                    }
                }
                let at = g * self.stride + row;
                self.scales.slice_mut(at..at + 1)[0] = scale;
                self.sums.slice_mut(at..at + 1)[0] = sum;
            }
        }
    }

    /// Some rows, to multiply with.
    ///
    /// # Safety
    /// No thread writes these rows while the result lives. Kernels may read rows behind them, which may be written
    /// meanwhile: what they make of those is forgotten.
    pub unsafe fn rows(&self, rows: Range<usize>) -> ActivationRows<'_> {
        assert!(rows.end <= self.rows && !rows.is_empty());
        // SAFETY: only read, as promised.
        unsafe {
            ActivationRows {
                k: self.k,
                group: self.group,
                words: self.words,
                code_rows: self.code_rows,
                stride: self.stride,
                first: rows.start,
                len: rows.len(),
                codes: self.codes.slice(0..self.codes.len()),
                scales: self.scales.slice(0..self.scales.len()),
                sums: self.sums.slice(0..self.sums.len()),
                parts: self.parts.slice(0..self.parts.len()),
            }
        }
    }
}

/// Some rows of [`Activations`].
#[derive(Clone, Copy)]
pub struct ActivationRows<'a> {
    pub(super) k: usize,
    pub(super) group: usize,
    pub(super) words: usize,
    code_rows: usize, // to a row
    pub(super) stride: usize,
    first: usize,
    len: usize,
    codes: &'a [i8],
    scales: &'a [f32],
    sums: &'a [i32],
    parts: &'a [f32],
}

impl ActivationRows<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Rows `from..from + len` of these.
    pub(super) fn part(&self, from: usize, len: usize) -> Self {
        assert!(from + len <= self.len);
        Self { first: self.first + from, len, ..*self }
    }

    /// Whether they are quantized, not split.
    pub(super) fn are_codes(&self) -> bool {
        self.group > 0
    }

    /// Their rows of codes, each as a row.
    pub(super) fn code_rows(&self) -> Self {
        let Self { first, len, code_rows, .. } = *self;
        Self { first: first * code_rows, len: len * code_rows, code_rows: 1, ..*self }
    }

    /// Split inputs `from..from + k` of these, beginning at a block of 32.
    pub fn inputs(&self, from: usize, k: usize) -> Self {
        assert!(self.group == 0 && from.is_multiple_of(BF16_INPUTS) && from + k <= self.k);
        Self { k, parts: &self.parts[from / BF16_INPUTS * self.stride * self.words..], ..*self }
    }

    /// Where the codes of a row begin; its next 64 inputs lie `64 * stride` further on.
    #[inline]
    pub(super) fn codes(&self, row: usize) -> *const i8 {
        self.codes[(self.first + row) * CODES..].as_ptr()
    }

    /// Where the parts of a row begin; its next 32 inputs lie `words * stride` further on.
    #[inline]
    pub(super) fn parts(&self, row: usize) -> *const f32 {
        self.parts[(self.first + row) * self.words..].as_ptr()
    }

    /// [`codes`](Self::codes) of the first `T` rows. A loop, not `map`, so that it is inlined into functions with
    /// target features.
    #[inline]
    pub(super) fn codes_of<const T: usize>(&self) -> [*const i8; T] {
        let mut codes = [std::ptr::null(); T];
        for t in 0..T {
            codes[t] = self.codes(t);
        }
        codes
    }

    /// [`parts`](Self::parts) of the first `T` rows in a block of 32 inputs.
    #[inline]
    pub(super) fn parts_of<const T: usize>(&self, block: usize) -> [*const f32; T] {
        let mut parts = [std::ptr::null(); T];
        for t in 0..T {
            parts[t] = self.parts(t).wrapping_add(block * self.stride * self.words);
        }
        parts
    }

    /// Where the scales of a group begin, from a row on.
    pub(super) fn scales(&self, group: usize, row: usize) -> *const f32 {
        self.scales[group * self.stride + self.first + row..].as_ptr()
    }

    /// The scale of a group of a row.
    pub(super) fn scale(&self, group: usize, row: usize) -> f32 {
        self.scales[group * self.stride + self.first + row]
    }

    /// Where the sums of a group begin, from a row on.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn sums(&self, group: usize, row: usize) -> *const i32 {
        self.sums[group * self.stride + self.first + row..].as_ptr()
    }

    /// What the inputs of a group of a row add up to: what an offset of weights is multiplied with.
    #[inline]
    pub(super) fn total(&self, group: usize, row: usize) -> f32 {
        self.sum(group, row) as f32 * self.scale(group, row)
    }

    /// The sum of the codes of a group of a row.
    pub(super) fn sum(&self, group: usize, row: usize) -> i32 {
        self.sums[group * self.stride + self.first + row]
    }

    /// The door of [`Kernel::matmul`]: everything an implementation may rely on. Returns the number of tiles.
    ///
    /// Tiles are whole; `out` is `[len, tiles * 16]`; every code, scale, sum or part of rows `0..len` and of the 15
    /// after them can be read.
    pub(super) fn check(&self, kernel: &dyn Kernel, layout: &MatrixLayout, tiles: &Tiles<'_>, out: &[f32]) -> usize {
        let tiles = tiles.bytes;
        let count = tiles.len() / layout.tile_bytes();
        assert_eq!((self.k, self.group), (layout.k, group_of(layout.precision)), "activations for another matrix");
        assert_eq!((tiles.len(), out.len()), (count * layout.tile_bytes(), self.len * count * TILE_ROWS));
        if self.group > 0 {
            assert!([16, 32, 64, 128].contains(&self.group) && self.k.is_multiple_of(self.group));
            assert!(self.scales.len() >= self.k / self.group * self.stride + TILE_ROWS);
            assert!(self.sums.len() >= self.k / self.group * self.stride + TILE_ROWS);
            assert!(self.codes.len() >= (self.k.div_ceil(CODES) * self.stride + TILE_ROWS) * CODES);
        } else {
            assert_eq!(self.words, kernel.split_words(), "activations of another kernel");
            assert!(self.parts.len() >= (self.k.div_ceil(BF16_INPUTS) * self.stride + TILE_ROWS) * self.words);
        }
        assert!((self.first + self.len) * self.code_rows <= self.stride);
        count
    }
}
