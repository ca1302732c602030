//! AVX2, FMA and F16C: the 16 rows of a tile are two registers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use moebius_cache::pack::{self, BF16_INPUTS, Counts, Grid, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::tiles::{
    INTEGER_ROWS, Scales, To, bias, by_row, even_bits, grid, grid_at, half_bytes, half_lines, is_grid, is_table,
    largest, row, step, table, takes_long,
};
use super::unpacked::{Unpacked, add_avx2, each_part, four};
use super::{ActivationRows, Kernel, Rows, Simd, Start, Tiles, check_dot, shared};

/// Multiplies one tile with one or two tokens: codes with `$block`, what an instruction set brings of its own.
macro_rules! by_precision {
    ($precision:expr, $block:ident, $scales:expr, $lines:expr, $x:expr, $out:expr, $to:expr) => {
        match ($precision.row_number(), $x.len()) {
            (None, 2) => $crate::kernel::avx2::split_block::<2>($lines, $x, $out, $to),
            (None, _) => $crate::kernel::avx2::split_block::<1>($lines, $x, $out, $to),
            (Some($crate::kernel::tiles::INTEGER_ROWS..), 2) => {
                $crate::kernel::avx2::float_block::<2>($scales, $lines, $x, $out, $to)
            }
            (Some($crate::kernel::tiles::INTEGER_ROWS..), _) => {
                $crate::kernel::avx2::float_block::<1>($scales, $lines, $x, $out, $to)
            }
            (Some(row), 2) => $crate::kernel::tiles::by_row!(row, $block[2]($scales, $lines, $x, $out, $to)),
            (Some(row), _) => $crate::kernel::tiles::by_row!(row, $block[1]($scales, $lines, $x, $out, $to)),
        }
    };
}
pub(super) use by_precision;

/// Exists only where [`detect`] found the features: that is what every call below relies on.
struct Avx2;

/// Whether this CPU has AVX2, FMA and F16C.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

pub(super) fn detect() -> Option<&'static dyn Kernel> {
    is_here().then_some(&Avx2 as &dyn Kernel)
}

impl Kernel for Avx2 {
    fn simd(&self) -> Simd {
        Simd::Avx2
    }

    fn split_words(&self) -> usize {
        2 * BF16_INPUTS
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        let to = To { start, stride: count * TILE_ROWS, stream: tiles.stream(layout, x.len()) };
        // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
        unsafe {
            match layout.precision.row_number() {
                Some(row @ ..INTEGER_ROWS) if x.len() >= least_tokens(row, x.group) => {
                    by_row!(row, many_tokens[](layout, tiles.bytes, x, out, to))
                }
                _ => each_block(layout, tiles, x, out, to, |scales, lines, x, out, to| {
                    by_precision!(layout.precision, block, scales, lines, x, out, to)
                }),
            }
        }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { dot(w, x, out) }
    }

    shared::elementwise! { "avx2,fma"; fn split(&self, x: &[f32], out: &mut [f32]); }
    shared::elementwise!("avx2,fma");
}

/// Each tile with two tokens at a time, or the last one: `block(scales, lines, tokens, their results, ..)`.
pub(super) fn each_block(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
    block: impl Fn(Scales<'_>, &[u8], &ActivationRows<'_>, &mut [f32], To),
) {
    for (i, tile) in tiles.bytes.chunks_exact(layout.tile_bytes()).enumerate() {
        let (scales, lines) = Scales::split(layout, tile);
        for t in (0..x.len()).step_by(2) {
            block(scales, lines, &x.part(t, 2.min(x.len() - t)), &mut out[t * to.stride + i * TILE_ROWS..], to);
        }
    }
}

/// From so many tokens on [`many_tokens`] takes less time, also with VNNI. Of INT4 and 2 bits in large groups it never
/// does: an instruction or two unpack them, and as many write and read bytes.
pub(super) const fn least_tokens(number: usize, group: usize) -> usize {
    match () {
        _ if is_grid(number) => 3,
        _ if group > 32 && row(number).codes.bits() < 8 && !is_table(number) => usize::MAX,
        _ if takes_long(number) => 8,
        _ => 16,
    }
}

/// Tokens of a block: two sums each in 32 bits, in 16, and of floats.
const MOST_TOKENS: usize = 2;

/// Many tokens through some tiles, which are unpacked once for all.
///
/// # Safety
/// AVX2, FMA and F16C; what `ActivationRows::check` promises.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn many_tokens<const ROW: usize>(
    layout: &MatrixLayout,
    tiles: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let bias = const { if is_wide(ROW) { 0 } else { bias(ROW) } };
    each_part::<1>(
        (layout, tiles),
        x,
        (MOST_TOKENS, bias),
        out,
        to,
        // SAFETY: as promised to this function.
        |scales, lines, inputs, unpacked| unsafe { unpack_part::<ROW>(scales, lines, inputs, is_wide(ROW), unpacked) },
        |part, x, out, to| {
            // SAFETY: as promised to this function; the part is unpacked.
            unsafe {
                match (most_pairs(ROW), row(ROW).scales.have_offsets()) {
                    (0, false) => add_avx2::<MOST_TOKENS, false, 0>(part, x, out, to),
                    (1, false) => add_avx2::<MOST_TOKENS, false, 1>(part, x, out, to),
                    (2, false) => add_avx2::<MOST_TOKENS, false, 2>(part, x, out, to),
                    (_, false) => add_avx2::<MOST_TOKENS, false, 4>(part, x, out, to),
                    (4.., true) => add_avx2::<MOST_TOKENS, true, 4>(part, x, out, to),
                    (_, true) => unreachable!("no codes of so many bits have offsets"),
                }
            }
        },
    );
}

/// Brings some inputs of a tile into `unpacked`.
///
/// # Safety
/// AVX2 and F16C; the inputs are whole blocks of 32 of a tile, of a grid whole super-blocks; they have room.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn unpack_part<const ROW: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    inputs: Range<usize>,
    signed: bool,
    unpacked: &mut Unpacked,
) {
    // Integers are stored with their bias; others get it.
    let is_stored = !is_table(ROW) && !is_grid(ROW);
    let values = match signed {
        true => lookup(const { table(row(ROW).codes, 0) }),
        false => lookup(const { table(row(ROW).codes, bias(ROW)) }),
    };
    let mut weights = lines[row(ROW).codes.bytes(inputs.start)..].as_ptr();
    let codes = &mut unpacked.codes[..inputs.len() / 4];
    // SAFETY: as promised to this function; 16 numbers each.
    unsafe {
        for (i, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for upper in 0..2 {
                let mut w = match is_grid(ROW) {
                    true => grid_runs::<ROW>(lines.as_ptr(), inputs.start + 16 * i, upper, values),
                    false => runs::<ROW>(weights, i % 2, upper, values),
                };
                for j in 0..4 {
                    if is_stored && signed && bias(ROW) != 0 {
                        w[j] = _mm256_sub_epi8(w[j], _mm256_set1_epi8(bias(ROW) as i8));
                    }
                    _mm256_store_si256(codes[j].as_mut_ptr().cast::<__m256i>().add(upper), w[j]);
                }
            }
            weights = weights.wrapping_add(step(ROW, i % 2));
        }
        for (i, group) in (inputs.start / scales.group..inputs.end / scales.group).enumerate() {
            for upper in 0..2 {
                let [scale, offset] = scales8::<ROW>(scales, group, upper);
                _mm256_store_ps(unpacked.scales[i].as_mut_ptr().cast::<f32>().add(8 * upper), scale);
                if row(ROW).scales.have_offsets() {
                    _mm256_store_ps(unpacked.offsets[i].as_mut_ptr().cast::<f32>().add(8 * upper), offset);
                }
            }
        }
    }
}

/// What the sums of a block of tokens begin with.
///
/// # Safety
/// AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn sums<const T: usize>(to: To, out: &[f32]) -> [[__m256; 2]; T] {
    let mut acc = [[_mm256_setzero_ps(); 2]; T];
    if to.start == Start::Out {
        for t in 0..T {
            let out = out[t * to.stride..][..TILE_ROWS].as_ptr();
            // SAFETY: 16 floats, as just sliced.
            acc[t] = unsafe { [_mm256_loadu_ps(out), _mm256_loadu_ps(out.add(8))] };
        }
    }
    acc
}

/// Whether a pair of products of unsigned codes and signed bytes overflows 16 bits.
#[inline(always)] // and constants where they are used: a call in the loop costs more than the products
pub(super) const fn is_wide(number: usize) -> bool {
    most_pairs(number) == 0
}

/// So many such pairs are added in 16 bits.
#[inline(always)]
pub(super) const fn most_pairs(number: usize) -> usize {
    match 32767 / (2 * 127 * largest(number)) {
        8.. => 8,
        4.. => 4,
        2.. => 2,
        1 => 1,
        _ => 0,
    }
}

/// `T` tokens through one tile.
///
/// Products of an unsigned code and a signed byte, in pairs, are added in 16 bits as often as they fit. Codes of 8 bits
/// would saturate vpmaddubsw: |w| (at most 128) times x carrying w's sign stays below 2^15.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const ROW: usize, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let groups = x.k / x.group;
    let ones = _mm256_set1_epi16(1);
    let values = lookup(const { table(row(ROW).codes, if is_wide(ROW) { 0 } else { bias(ROW) }) });
    let codes = x.codes_of::<T>();
    let mut weights = lines.as_ptr();
    // The lines that prefetching from the first code on would step over.
    let first = weights.wrapping_sub(scales.bytes.len());
    to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for g in 0..groups {
        let ahead = to.stream.from(weights);
        let mut dot = [[_mm256_setzero_si256(); 2]; T];
        if const { !is_wide(ROW) && bias(ROW) != 0 } {
            for t in 0..T {
                dot[t] = [_mm256_set1_epi32(-bias(ROW) * x.sum(g, t)); 2];
            }
        }
        let mut pairs = [[_mm256_setzero_si256(); 2]; T];
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let half = k / 16 % 2;
            ahead.prefetch(weights, half_lines(ROW, half));
            let at = k / BLOCK * x.stride * BLOCK + k % BLOCK;
            for upper in 0..2 {
                // SAFETY: 16 inputs of 16 rows, inside the tile whose length was checked.
                let w = unsafe {
                    match is_grid(ROW) {
                        true => grid_runs::<ROW>(lines.as_ptr(), k, upper, values),
                        false => runs::<ROW>(weights, half, upper, values),
                    }
                };
                for j in 0..4 {
                    for t in 0..T {
                        // SAFETY: 4 codes of the 16 inputs from k on.
                        let a = unsafe { four(codes[t].add(at + 4 * j)) };
                        if const { is_wide(ROW) } {
                            let signed = const { is_table(ROW) };
                            let w = if signed { w[j] } else { _mm256_xor_si256(w[j], _mm256_set1_epi8(-128)) };
                            let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
                            dot[t][upper] = _mm256_add_epi32(dot[t][upper], _mm256_madd_epi16(products, ones));
                            continue;
                        }
                        pairs[t][upper] = _mm256_add_epi16(pairs[t][upper], _mm256_maddubs_epi16(w[j], a));
                        let most = const { most_pairs(ROW) };
                        if (j + 1) % most == 0 || j == 3 && (half == 1 || row(ROW).group_size == 16) {
                            let sum = _mm256_madd_epi16(pairs[t][upper], ones);
                            dot[t][upper] = _mm256_add_epi32(dot[t][upper], sum);
                            pairs[t][upper] = _mm256_setzero_si256();
                        }
                    }
                }
            }
            weights = weights.wrapping_add(step(ROW, half));
        }
        for upper in 0..2 {
            // SAFETY: the scales of group `g`, before `lines`.
            let [w_scale, w_offset] = unsafe { scales8::<ROW>(scales, g, upper) };
            for t in 0..T {
                let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x.scale(g, t)));
                acc[t][upper] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][upper]), scale, acc[t][upper]);
                if row(ROW).scales.have_offsets() {
                    acc[t][upper] = _mm256_fmadd_ps(w_offset, _mm256_set1_ps(x.total(g, t)), acc[t][upper]);
                }
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), acc[t][0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[t][1]);
        }
    }
}

/// The codes of 16 inputs, half `half` of a block whose lines begin at `lines`, as bytes: four runs of 4 inputs of the
/// lower or the upper 8 rows. What is stored, or looked up in `values`.
///
/// # Safety
/// The block's lines to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn runs<const ROW: usize>(
    lines: *const u8,
    half: usize,
    upper: usize,
    values: __m256i,
) -> [__m256i; 4] {
    // SAFETY: as promised by the caller.
    let line = |at: usize| unsafe { _mm256_loadu_si256(lines.add(at + 32 * upper).cast()) };
    let (low, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let mut w = match even_bits(ROW) {
        8 => [line(0), line(64), line(128), line(192)],
        4 | 6 => {
            let (a, b) = (line(0), line(64));
            [
                _mm256_and_si256(a, low),
                _mm256_and_si256(_mm256_srli_epi16(a, 4), low),
                _mm256_and_si256(b, low),
                _mm256_and_si256(_mm256_srli_epi16(b, 4), low),
            ]
        }
        _ => {
            let a = line(0);
            [
                _mm256_and_si256(a, pair),
                _mm256_and_si256(_mm256_srli_epi16(a, 2), pair),
                _mm256_and_si256(_mm256_srli_epi16(a, 4), pair),
                _mm256_and_si256(_mm256_srli_epi16(a, 6), pair),
            ]
        }
    };
    if even_bits(ROW) == 6 {
        let (bits, mask) = (line(128), _mm256_set1_epi8(0x30));
        w[0] = _mm256_or_si256(w[0], _mm256_and_si256(_mm256_slli_epi16(bits, 4), mask));
        w[1] = _mm256_or_si256(w[1], _mm256_and_si256(_mm256_slli_epi16(bits, 2), mask));
        w[2] = _mm256_or_si256(w[2], _mm256_and_si256(bits, mask));
        w[3] = _mm256_or_si256(w[3], _mm256_and_si256(_mm256_srli_epi16(bits, 2), mask));
    }
    if row(ROW).codes.bits() % 2 == 1 {
        // Bit `i` of a byte is that of run `i` of the block: of this half they come to the place of the highest.
        let bits = line((2 - half) * half_bytes(ROW));
        let bits = _mm256_srl_epi16(bits, _mm_cvtsi32_si128(4 * half as i32));
        let mask = _mm256_set1_epi8(1 << even_bits(ROW));
        let moved = match even_bits(ROW) {
            4 => [
                _mm256_slli_epi16(bits, 4),
                _mm256_slli_epi16(bits, 3),
                _mm256_slli_epi16(bits, 2),
                _mm256_slli_epi16(bits, 1),
            ],
            _ => [_mm256_slli_epi16(bits, 2), _mm256_slli_epi16(bits, 1), bits, _mm256_srli_epi16(bits, 1)],
        };
        for j in 0..4 {
            w[j] = _mm256_or_si256(w[j], _mm256_and_si256(moved[j], mask));
        }
    }
    if is_table(ROW) {
        for j in 0..4 {
            w[j] = _mm256_shuffle_epi8(values, w[j]);
        }
    }
    w
}

/// Scales and offsets of a group as f32, of the lower or the upper 8 rows.
///
/// # Safety
/// The group's scales to read; AVX2 and F16C.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scales8<const ROW: usize>(scales: Scales<'_>, group: usize, upper: usize) -> [__m256; 2] {
    let (at, head) = row(ROW).scales.at(group, row(ROW).group_size);
    // SAFETY: as promised by the caller.
    let numbers = |at: usize| unsafe { _mm_loadu_si128(scales.bytes.as_ptr().add(at + 16 * upper).cast()) };
    match row(ROW).scales {
        pack::Scales::Plain if scales.f16 => [_mm256_cvtph_ps(numbers(at)), _mm256_setzero_ps()],
        pack::Scales::Plain => {
            [_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers(at)), 16)), _mm256_setzero_ps()]
        }
        pack::Scales::Wide => unreachable!("integers have no such scales"),
        pack::Scales::Zeros => {
            // SAFETY: as promised by the caller.
            let zeros = unsafe { _mm_loadl_epi64(scales.bytes.as_ptr().add(at + 2 * TILE_ROWS + 8 * upper).cast()) };
            let zeros = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(zeros));
            let scale = match scales.f16 {
                true => _mm256_cvtph_ps(numbers(at)),
                false => _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers(at)), 16)),
            };
            [scale, _mm256_xor_ps(_mm256_mul_ps(scale, zeros), _mm256_set1_ps(-0.0))]
        }
        pack::Scales::Odd { halvings, .. } => {
            // SAFETY: as promised by the caller.
            let count = unsafe { odd_counts8::<ROW>(scales, group, upper) };
            let odd = _mm256_add_epi32(_mm256_add_epi32(count, count), _mm256_set1_epi32(1));
            let unit = _mm256_set1_ps(1.0 / f32::from(1u8 << halvings));
            let scale = _mm256_mul_ps(_mm256_cvtph_ps(numbers(head)), _mm256_cvtepi32_ps(odd));
            [_mm256_mul_ps(scale, unit), _mm256_setzero_ps()]
        }
        pack::Scales::E4m3 => {
            // SAFETY: as promised by the caller.
            let (bytes, number) = unsafe {
                let bytes = _mm_loadl_epi64(scales.bytes.as_ptr().add(at + 8 * upper).cast());
                (bytes, _mm256_loadu_ps(scales.bytes.as_ptr().add(32 * upper).cast()))
            };
            [_mm256_mul_ps(e4m3::<0>(_mm256_cvtepu8_epi32(bytes)), number), _mm256_setzero_ps()]
        }
        pack::Scales::WithOffset => [_mm256_cvtph_ps(numbers(at)), _mm256_cvtph_ps(numbers(at + 2 * TILE_ROWS))],
        pack::Scales::Counted { zero, offsets, .. } => {
            // SAFETY: as promised by the caller.
            let counts = unsafe { counts::<ROW>(scales.bytes.as_ptr().add(at)) };
            let of = |bytes: __m128i| if upper == 1 { _mm_unpackhi_epi64(bytes, bytes) } else { bytes };
            let count = _mm256_sub_epi32(_mm256_cvtepu8_epi32(of(counts[0])), _mm256_set1_epi32(i32::from(zero)));
            let scale = _mm256_mul_ps(_mm256_cvtph_ps(numbers(head)), _mm256_cvtepi32_ps(count));
            if !offsets {
                return [scale, _mm256_setzero_ps()];
            }
            let offset = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(of(counts[1])));
            let offset = _mm256_mul_ps(_mm256_cvtph_ps(numbers(head + 2 * TILE_ROWS)), offset);
            [scale, _mm256_xor_ps(offset, _mm256_set1_ps(-0.0))]
        }
    }
}

/// What the lower or the upper 8 rows of a group count, of scales that are odd.
///
/// # Safety
/// The group's scales and codes to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn odd_counts8<const ROW: usize>(scales: Scales<'_>, group: usize, upper: usize) -> __m256i {
    let pack::Scales::Odd { counts, .. } = row(ROW).scales else { unreachable!("other scales") };
    let (at, _) = row(ROW).scales.at(group, row(ROW).group_size);
    // SAFETY: as promised by the caller.
    unsafe {
        match counts {
            Counts::Zero => _mm256_setzero_si256(),
            Counts::Apart(4) => {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(scales.bytes.as_ptr().add(at).cast()));
                let own = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(4 * upper as i32));
                _mm256_and_si256(own, _mm256_set1_epi32(15))
            }
            Counts::Apart(_) => {
                // A bit of each row: to the place that it has in the row's count.
                let rows = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mut count = _mm256_setzero_si256();
                for bit in 0..3 {
                    let bits = _mm256_set1_epi32(i32::from(scales.bytes[at + 2 * bit + upper]));
                    let own = _mm256_and_si256(_mm256_srlv_epi32(bits, rows), _mm256_set1_epi32(1));
                    count = _mm256_or_si256(count, _mm256_sll_epi32(own, _mm_cvtsi32_si128(bit as i32)));
                }
                count
            }
            Counts::Within => {
                let (word, lowest) = grid(ROW).upper_at(group % 8);
                let first = scales.lines.as_ptr().add(grid_at(ROW, group).1);
                let line = _mm256_loadu_si256(first.add(64 * word + 32 * upper).cast());
                if !grid(ROW).has_ones() {
                    return _mm256_srli_epi32(line, 28);
                }
                let above = _mm256_srl_epi32(line, _mm_cvtsi32_si128(lowest as i32 + 12));
                _mm256_and_si256(above, _mm256_set1_epi32(7))
            }
        }
    }
}

/// The codes of the 16 inputs from `k` on whose words are in `lines`: four runs of 4 inputs of the lower or the upper 8
/// rows, `add` added.
///
/// # Safety
/// The words of the inputs' super-block to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn grid_runs<const ROW: usize>(
    lines: *const u8,
    k: usize,
    upper: usize,
    add: __m256i,
) -> [__m256i; 4] {
    let (grid, block, half) = (grid(ROW), k / 32, k / 16 % 2);
    let (at, first) = grid_at(ROW, block);
    // SAFETY: as promised by the caller.
    let line = |at: usize| unsafe { _mm256_loadu_si256(lines.add(at + 32 * upper).cast()) };
    let shifted = |x: __m256i, by: usize| _mm256_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
    let mut w = [_mm256_setzero_si256(); 4];
    if grid == Grid::Tq1_0 {
        let add = _mm256_sub_epi8(add, _mm256_set1_epi8(1));
        for (run, w) in w.iter_mut().enumerate() {
            let (word, digit) = Grid::digit_at(block % 8, 4 * half + run);
            // Times a power of three, without what is above a byte: the digit is in its highest part.
            let (bytes, low) = (line(first + 64 * word), _mm256_set1_epi16(255));
            let (power, three) = (_mm256_set1_epi16([1, 3, 9, 27, 81][digit]), _mm256_set1_epi16(3));
            let shifted = |bytes: __m256i| _mm256_and_si256(_mm256_mullo_epi16(bytes, power), low);
            let even = _mm256_mullo_epi16(shifted(_mm256_and_si256(bytes, low)), three);
            let odd = _mm256_mullo_epi16(shifted(_mm256_srli_epi16(bytes, 8)), three);
            let digits = _mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd));
            *w = _mm256_add_epi8(digits, add);
        }
        return w;
    }
    let signs = line(at + (grid.block_words() - !grid.has_ones() as usize) * 64);
    // Upper bits of indices, and from where on.
    let (above, above_at) = grid.upper_at(block % 8);
    let above = line(first + 64 * above);
    for pair in 0..2 {
        let eight = 2 * half + pair;
        // The signs of eight weights, in each byte of a dword.
        let negative = if grid.has_all_signs() {
            shifted(signs, 8 * eight)
        } else {
            let seven = _mm256_and_si256(shifted(signs, 7 * eight), _mm256_set1_epi32(127));
            // Four bits are even or odd: of each a bit of this number.
            let folded = _mm256_and_si256(_mm256_xor_si256(seven, _mm256_srli_epi32(seven, 4)), _mm256_set1_epi32(15));
            let odd = _mm256_srlv_epi32(_mm256_set1_epi32(0x6996), folded);
            _mm256_or_si256(seven, _mm256_slli_epi32(odd, 7)) // and more above the lowest byte
        };
        let lowest = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        let negative = _mm256_shuffle_epi8(negative, lowest);
        for four in 0..2 {
            let run = if grid.run() == 4 { 2 * eight + four } else { eight };
            let low = shifted(line(at + run / 4 * 64), 8 * (run % 4));
            let mut index = _mm256_and_si256(low, _mm256_set1_epi32(255));
            if grid.upper_bits() > 0 {
                let mask = _mm256_set1_epi32((1 << grid.upper_bits()) - 1);
                let bits = _mm256_and_si256(shifted(above, above_at + grid.upper_bits() * run), mask);
                index = _mm256_or_si256(index, _mm256_slli_epi32(bits, 8));
            }
            if grid.run() == 8 {
                index = _mm256_add_epi32(_mm256_add_epi32(index, index), _mm256_set1_epi32(four as i32));
            }
            // SAFETY: there are so many indices.
            let size = unsafe { _mm256_i32gather_epi32::<4>(grid.magnitudes().as_ptr().cast(), index) };
            if grid.has_ones() {
                // An eighth of a number beside: all bits where it is less.
                let less = _mm256_slli_epi32(shifted(above, above_at + grid.less_at(run)), 31);
                let beside = _mm256_or_si256(_mm256_srai_epi32(less, 31), _mm256_set1_epi8(1));
                w[2 * pair + four] = _mm256_add_epi8(_mm256_add_epi8(size, beside), add);
                continue;
            }
            let bits = _mm256_set1_epi32([0x0804_0201, 0x8040_2010_u32 as i32][four]);
            let mask = _mm256_cmpeq_epi8(_mm256_and_si256(negative, bits), bits);
            let signed = _mm256_sub_epi8(_mm256_xor_si256(size, mask), mask);
            w[2 * pair + four] = _mm256_add_epi8(signed, add);
        }
    }
    w
}

/// Numbers of E4M3, byte `J` of each dword, exactly.
///
/// Exponent and mantissa go to where f32 has them; a product with 2^120 mends the bias and normalizes subnormals.
#[inline]
#[target_feature(enable = "avx2")]
fn e4m3<const J: usize>(dwords: __m256i) -> __m256 {
    let (magnitude, sign) = match J {
        0 => (_mm256_slli_epi32(dwords, 20), _mm256_slli_epi32(dwords, 24)),
        1 => (_mm256_slli_epi32(dwords, 12), _mm256_slli_epi32(dwords, 16)),
        2 => (_mm256_slli_epi32(dwords, 4), _mm256_slli_epi32(dwords, 8)),
        _ => (_mm256_srli_epi32(dwords, 4), dwords),
    };
    let magnitude = _mm256_castsi256_ps(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x07f0_0000)));
    let sign = _mm256_castsi256_ps(_mm256_and_si256(sign, _mm256_set1_epi32(i32::MIN)));
    _mm256_or_ps(_mm256_mul_ps(magnitude, _mm256_set1_ps(f32::from_bits((127 + 120) << 23))), sign)
}

/// What 16 rows of a group count of their super-block's numbers, as bytes: of `d`, and of `dmin`.
///
/// # Safety
/// The group's record to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn counts<const ROW: usize>(record: *const u8) -> [__m128i; 2] {
    let pack::Scales::Counted { bits, offsets, .. } = row(ROW).scales else { return [_mm_setzero_si128(); 2] };
    let low = _mm_set1_epi8(15);
    // SAFETY: as promised by the caller.
    let all = || unsafe { _mm_loadu_si128(record.cast()) };
    // Halves of 8 bytes: rows 0 to 7, then 8 to 15.
    let halves = |at: usize| {
        // SAFETY: as promised by the caller.
        let bytes = unsafe { _mm_loadl_epi64(record.add(at).cast()) };
        _mm_unpacklo_epi64(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low))
    };
    match (bits, offsets) {
        (8, _) => [all(), _mm_setzero_si128()],
        (6, true) => {
            let bytes = all();
            let two = _mm_and_si128(_mm_srli_epi16(bytes, 6), _mm_set1_epi8(3));
            [_mm_and_si128(bytes, _mm_set1_epi8(63)), _mm_or_si128(two, _mm_slli_epi16(halves(TILE_ROWS), 2))]
        }
        (6, false) => {
            // SAFETY: as promised by the caller.
            let upper = _mm_set1_epi32(unsafe { record.add(8).cast::<i32>().read_unaligned() });
            let upper = _mm_and_si128(_mm_srlv_epi32(upper, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
            [_mm_or_si128(halves(0), _mm_slli_epi16(upper, 4)), _mm_setzero_si128()]
        }
        _ => {
            let bytes = all();
            [_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low)]
        }
    }
}

/// A table of 16 bytes for `vpshufb`, in both halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn lookup(table: [i8; 16]) -> __m256i {
    // SAFETY: 16 bytes of an array.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// `T` tokens through one BF16 tile; of a block of 32 inputs first the lower 8 rows, then the upper, so that all sums
/// are in registers.
///
/// # Safety
/// AVX2 and FMA; what `ActivationRows::check` promises.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn split_block<const T: usize>(lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    let odd_mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for (block, lines) in lines.chunks_exact(BF16_INPUTS / 2 * 64).enumerate() {
        to.stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), BF16_INPUTS / 2);
        let at = x.parts_of::<T>(block);
        for half in 0..2 {
            let mut sums = [[[_mm256_setzero_ps(); 2]; 2]; T]; // [token][high, low][even, odd]
            for pair in 0..BF16_INPUTS / 2 {
                // SAFETY: 32 bytes of a line.
                let w = unsafe { _mm256_loadu_si256(lines.as_ptr().add(64 * pair + 32 * half).cast()) };
                let (even, odd) =
                    (_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_and_si256(w, odd_mask)));
                for t in 0..T {
                    for part in 0..2 {
                        // SAFETY: a row has 64 numbers in each block.
                        let (x_even, x_odd) =
                            unsafe { (*at[t].add(32 * part + 2 * pair), *at[t].add(32 * part + 2 * pair + 1)) };
                        sums[t][part][0] = _mm256_fmadd_ps(_mm256_set1_ps(x_even), even, sums[t][part][0]);
                        sums[t][part][1] = _mm256_fmadd_ps(_mm256_set1_ps(x_odd), odd, sums[t][part][1]);
                    }
                }
            }
            for t in 0..T {
                for part in 0..2 {
                    acc[t][half] = _mm256_add_ps(acc[t][half], _mm256_add_ps(sums[t][part][0], sums[t][part][1]));
                }
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), acc[t][0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[t][1]);
        }
    }
}

/// `T` tokens through one tile of FP8, as [`split_block`], the sum of each group for itself.
///
/// # Safety
/// AVX2 and FMA; what `ActivationRows::check` promises.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn float_block<const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    // The lines that prefetching from the first code on would step over.
    let first = lines.as_ptr().wrapping_sub(scales.bytes.len());
    to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for (g, lines) in lines.chunks_exact(scales.group * TILE_ROWS).enumerate() {
        let mut group = [[_mm256_setzero_ps(); 2]; T];
        for (i, lines) in lines.chunks_exact(BF16_INPUTS * TILE_ROWS).enumerate() {
            to.stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), BF16_INPUTS / 4);
            let at = x.parts_of::<T>(g * scales.group / BF16_INPUTS + i);
            for half in 0..2 {
                let mut sums = [[[_mm256_setzero_ps(); 2]; 2]; T]; // [token][high, low][even, odd]
                for run in 0..BF16_INPUTS / 4 {
                    // SAFETY: 32 bytes of a line.
                    let w = unsafe { _mm256_loadu_si256(lines.as_ptr().add(64 * run + 32 * half).cast()) };
                    let w = [e4m3::<0>(w), e4m3::<1>(w), e4m3::<2>(w), e4m3::<3>(w)];
                    for j in 0..4 {
                        for t in 0..T {
                            for part in 0..2 {
                                // SAFETY: a row has 64 numbers in each block.
                                let x = _mm256_set1_ps(unsafe { *at[t].add(32 * part + 4 * run + j) });
                                sums[t][part][j % 2] = _mm256_fmadd_ps(x, w[j], sums[t][part][j % 2]);
                            }
                        }
                    }
                }
                for t in 0..T {
                    for part in 0..2 {
                        let sum = _mm256_add_ps(sums[t][part][0], sums[t][part][1]);
                        group[t][half] = _mm256_add_ps(group[t][half], sum);
                    }
                }
            }
        }
        for half in 0..2 {
            // SAFETY: the scales of group `g`, before `lines`.
            let scale = unsafe { float_scales8(scales, g, half) };
            for t in 0..T {
                acc[t][half] = _mm256_fmadd_ps(group[t][half], scale, acc[t][half]);
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), acc[t][0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[t][1]);
        }
    }
}

/// Scales of a group of FP8, of the lower or the upper 8 rows.
///
/// # Safety
/// The group's scales to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn float_scales8(scales: Scales<'_>, group: usize, upper: usize) -> __m256 {
    let bytes = scales.bytes.as_ptr();
    // SAFETY: as promised by the caller.
    unsafe {
        if scales.f32 {
            return _mm256_loadu_ps(bytes.add(group * 4 * TILE_ROWS + 32 * upper).cast());
        }
        let numbers = _mm_loadu_si128(bytes.add(group * 2 * TILE_ROWS + 16 * upper).cast());
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16))
    }
}

/// [`Kernel::dot_f32`]
///
/// # Safety
/// AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot(w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
    shared::dot_blocks(w.rows, x.rows, x.cols, [2, 2], |r, t, block| {
        // SAFETY: `dot_blocks` stays inside the rows and tokens it was given.
        unsafe {
            match block {
                [2, 2] => dot_block::<2, 2>(&w, &x, r, t, out),
                [2, _] => dot_block::<2, 1>(&w, &x, r, t, out),
                [_, 2] => dot_block::<1, 2>(&w, &x, r, t, out),
                _ => dot_block::<1, 1>(&w, &x, r, t, out),
            }
        }
    });
}

/// `R` rows times `T` tokens in registers, 16 lanes each.
#[target_feature(enable = "avx2,fma")]
unsafe fn dot_block<const R: usize, const T: usize>(
    w: &Rows<'_, f32>,
    x: &Rows<'_, f32>,
    r: usize,
    t: usize,
    out: &mut [f32],
) {
    let (mut ws, mut xs) = ([std::ptr::null::<f32>(); R], [std::ptr::null::<f32>(); T]);
    for i in 0..R {
        ws[i] = w.row(r + i).as_ptr();
    }
    for j in 0..T {
        xs[j] = x.row(t + j).as_ptr();
    }
    let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
    let whole = w.cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        // One token is bound by the arrival of its weights: ask for the next block of rows while this one is read.
        if T == 1 {
            for row in ws {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(R * w.stride + k).cast());
            }
        }
        for half in 0..2 {
            let k = k + 8 * half;
            let mut x8 = [_mm256_setzero_ps(); T];
            for j in 0..T {
                // SAFETY: k + 8 <= cols.
                x8[j] = unsafe { _mm256_loadu_ps(xs[j].add(k)) };
            }
            for i in 0..R {
                // SAFETY: k + 8 <= cols.
                let w8 = unsafe { _mm256_loadu_ps(ws[i].add(k)) };
                for j in 0..T {
                    acc[i][j][half] = _mm256_fmadd_ps(w8, x8[j], acc[i][j][half]);
                }
            }
        }
    }
    for j in 0..T {
        for i in 0..R {
            let [low, high] = acc[i][j];
            out[(t + j) * w.rows + r + i] = if whole == w.cols {
                tree(low, high)
            } else {
                let mut lanes = [0.0; 16];
                // SAFETY: 16 floats.
                unsafe {
                    _mm256_storeu_ps(lanes.as_mut_ptr(), low);
                    _mm256_storeu_ps(lanes.as_mut_ptr().add(8), high);
                }
                for (lane, (&w, &x)) in lanes.iter_mut().zip(w.row(r + i)[whole..].iter().zip(&x.row(t + j)[whole..])) {
                    *lane = w.mul_add(x, *lane);
                }
                shared::tree(lanes)
            };
        }
    }
}

/// [`shared::tree`]
#[inline]
#[target_feature(enable = "avx2")]
fn tree(low: __m256, high: __m256) -> f32 {
    let eight = _mm256_add_ps(low, high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
