//! AVX-512 with VNNI: 16 rows of a tile are the 16 lanes of one register.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use moebius_cache::pack::{self, BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::avx2::counts;
use super::avx512_grids::{add_places, are_places, by_place, grid_runs, looks_up, odd_counts16, unpack_places};
use super::shared::PREFETCH_TOKENS;
use super::tiles::{
    INTEGER_ROWS, Scales, To, bias, by_row, even_bits, half_bytes, half_lines, is_grid, is_table, row, step, table,
    takes_long,
};
use super::unpacked::{Unpacked, add_avx512, each_part};
use super::{ActivationRows, Kernel, Rows, Simd, Start, Tiles, check_dot, shared};

/// Exists only where [`detect`] found the features: that is what every call below relies on.
struct Avx512;

/// Whether this CPU has AVX-512 F, BW, VL and VNNI.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
}

pub(super) fn detect() -> Option<&'static dyn Kernel> {
    is_here().then_some(&Avx512 as &dyn Kernel)
}

impl Kernel for Avx512 {
    fn simd(&self) -> Simd {
        Simd::Avx512
    }

    fn split_words(&self) -> usize {
        2 * BF16_INPUTS
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
        unsafe { each_tile(layout, tiles, x, start, out, count) }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { dot(w, x, out) }
    }

    shared::elementwise! { "avx512f,avx512bw,avx512vl,avx2,fma"; fn split(&self, x: &[f32], out: &mut [f32]); }
    shared::elementwise!("avx512f,avx512bw,avx512vl,avx2,fma");
}

/// `count` tiles, one after the other.
///
/// # Safety
/// AVX-512 F, BW, VL and VNNI; what `ActivationRows::check` promises.
pub(super) unsafe fn each_tile(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    start: Start,
    out: &mut [f32],
    count: usize,
) {
    let to = To { start, stride: count * TILE_ROWS, stream: tiles.stream(layout, x.len()) };
    if let Some(row @ ..INTEGER_ROWS) = layout.precision.row_number()
        && x.len() >= least_tokens(row)
    {
        // SAFETY: as promised to this function.
        return unsafe { by_row!(row, many_tokens[](layout, tiles.bytes, x, out, to)) };
    }
    for (i, tile) in tiles.bytes.chunks_exact(layout.tile_bytes()).enumerate() {
        // SAFETY: as promised to this function.
        unsafe { one_tile(layout, tile, x, &mut out[i * TILE_ROWS..], to) };
    }
}

/// Tokens of a block of [`many_tokens`]: of two tiles two sums each, in 32 registers.
const MOST_TOKENS: usize = 6;

/// From so many tokens on [`many_tokens`] takes less time: earlier where unpacking takes long.
const fn least_tokens(number: usize) -> usize {
    if takes_long(number) { 9 } else { 17 }
}

/// Many tokens through some tiles, which are unpacked once for all.
///
/// # Safety
/// AVX-512 F, BW, VL and VNNI; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn many_tokens<const ROW: usize>(
    layout: &MatrixLayout,
    tiles: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    each_part::<2>(
        (layout, tiles),
        x,
        (MOST_TOKENS, bias(ROW)),
        out,
        to,
        // SAFETY: as promised to this function.
        |scales, lines, inputs, unpacked| unsafe { unpack_part::<ROW>(scales, lines, inputs, unpacked) },
        |part, x, out, to| {
            // SAFETY: as promised to this function; the part is unpacked.
            unsafe {
                match (part.tiles.len(), x.len(), row(ROW).scales.have_offsets()) {
                    (1, _, false) => add_avx512::<MOST_TOKENS, 1, false>(part, x, out, to),
                    (1, _, true) => add_avx512::<MOST_TOKENS, 1, true>(part, x, out, to),
                    (_, ..=4, false) => add_avx512::<4, 2, false>(part, x, out, to),
                    (_, ..=4, true) => add_avx512::<4, 2, true>(part, x, out, to),
                    (_, 5, false) => add_avx512::<5, 2, false>(part, x, out, to),
                    (_, 5, true) => add_avx512::<5, 2, true>(part, x, out, to),
                    (.., false) => add_avx512::<MOST_TOKENS, 2, false>(part, x, out, to),
                    (.., true) => add_avx512::<MOST_TOKENS, 2, true>(part, x, out, to),
                }
            }
        },
    );
}

/// Brings some inputs of a tile into `unpacked`.
///
/// # Safety
/// AVX-512 F, BW, VL; the inputs are whole blocks of 32 of a tile, of a grid whole super-blocks; they have room.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unpack_part<const ROW: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    inputs: Range<usize>,
    unpacked: &mut Unpacked,
) {
    let (bytes, codes) = (row(ROW).codes.bytes(inputs.start), &mut unpacked.codes[..inputs.len() / 4]);
    // SAFETY: as promised to this function; 16 numbers each.
    unsafe {
        if are_places(ROW) && looks_up() {
            unpack_by_registers(ROW, &lines[bytes..row(ROW).codes.bytes(inputs.end)], codes);
        } else {
            let values = lookup(const { table(row(ROW).codes, bias(ROW)) });
            let mut weights = lines[bytes..].as_ptr();
            for (i, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let w = match is_grid(ROW) {
                    true => grid_runs::<ROW>(lines.as_ptr(), inputs.start + 16 * i, values),
                    false => runs::<ROW>(weights, i % 2, values),
                };
                weights = weights.wrapping_add(step(ROW, i % 2));
                for j in 0..4 {
                    _mm512_store_si512(codes[j].as_mut_ptr().cast(), w[j]);
                }
            }
        }
        for (i, group) in (inputs.start / scales.group..inputs.end / scales.group).enumerate() {
            let [scale, offset] = scales16::<ROW>(scales, group);
            _mm512_store_ps(unpacked.scales[i].as_mut_ptr().cast(), scale);
            if row(ROW).scales.have_offsets() {
                _mm512_store_ps(unpacked.offsets[i].as_mut_ptr().cast(), offset);
            }
        }
    }
}

/// # Safety
/// As of [`unpack_places`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
unsafe fn unpack_by_registers(row: usize, lines: &[u8], to: &mut [MaybeUninit<[u8; 64]>]) {
    // SAFETY: as promised to this function.
    unsafe { by_place!(row, unpack_places(lines, to, false)) }
}

/// Tokens that share one pass over a tile of codes: two accumulators each, and the weights, in 32 registers. Half as
/// many of llama.cpp's types, which compiles in half the time.
const fn most_tokens(number: usize) -> usize {
    if number < 3 { 12 } else { 6 }
}
/// The same for a BF16 tile: four sums and an accumulator each.
const MAX_SPLIT_TOKENS: usize = 5;
/// The same for a tile of FP8: another accumulator each, and four weights.
const MAX_FLOAT_TOKENS: usize = 4;

/// What the sums of a block of tokens begin with.
///
/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sums<const T: usize>(to: To, out: &[f32]) -> [__m512; T] {
    let mut acc = [_mm512_setzero_ps(); T];
    if to.start == Start::Out {
        for t in 0..T {
            // SAFETY: 16 floats, as just sliced.
            acc[t] = unsafe { _mm512_loadu_ps(out[t * to.stride..][..TILE_ROWS].as_ptr()) };
        }
    }
    acc
}

/// One tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn one_tile(layout: &MatrixLayout, tile: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    let (scales, lines) = Scales::split(layout, tile);
    let most = match layout.precision.row_number() {
        None => MAX_SPLIT_TOKENS,
        Some(INTEGER_ROWS..) => MAX_FLOAT_TOKENS,
        Some(row) => most_tokens(row),
    };
    let mut t = 0;
    while t < x.len() {
        // Even blocks: 13 tokens are 7 and 6, not 12 and 1.
        let left = x.len() - t;
        let take = left.div_ceil(left.div_ceil(most));
        let (now, out) = (x.part(t, take), &mut out[t * to.stride..]);
        // SAFETY: as promised to this function.
        unsafe {
            match layout.precision.row_number() {
                None => split_tokens(lines, &now, out, to),
                Some(INTEGER_ROWS..) => float_tokens(scales, lines, &now, out, to),
                Some(row) if are_places(row) && looks_up() => places_tokens(row, scales, lines, &now, out, to),
                Some(row) => by_row!(row, tokens[](scales, lines, &now, out, to)),
            }
        }
        t += take;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tokens<const ROW: usize>(scales: Scales<'_>, lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    macro_rules! by_count {
        ($($n:literal $chains:literal),*) => {
            match x.len() {
                // SAFETY: as promised to this function; `x` has as many rows as the instance takes.
                $($n if const { $n <= most_tokens(ROW) } => unsafe {
                    block::<ROW, $n, $chains>(scales, lines, x, out, to)
                },)*
                n => unreachable!("{n} tokens in a block"),
            }
        };
    }
    // Few tokens need several accumulators each to cover the 5 cycles of vpdpbusd; i32 sums are exact in any order.
    by_count!(1 4, 2 4, 3 2, 4 2, 5 1, 6 1, 7 1, 8 1, 9 1, 10 1, 11 1, 12 1)
}

/// [`tokens`] of codes that are looked up in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,gfni")]
unsafe fn places_tokens(row: usize, scales: Scales<'_>, lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    // SAFETY: as promised to this function.
    unsafe { by_place!(row, place_tokens(scales, lines, x, out, to)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,gfni")]
unsafe fn place_tokens<const ROW: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    // SAFETY: as promised to this function; `x` has as many rows as the instance takes.
    unsafe {
        match x.len() {
            1 => places_block::<ROW, 1>(scales, lines, x, out, to),
            2 => places_block::<ROW, 2>(scales, lines, x, out, to),
            3 => places_block::<ROW, 3>(scales, lines, x, out, to),
            4 => places_block::<ROW, 4>(scales, lines, x, out, to),
            5 => places_block::<ROW, 5>(scales, lines, x, out, to),
            6 => places_block::<ROW, 6>(scales, lines, x, out, to),
            n => unreachable!("{n} tokens in a block"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split_tokens(lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    // SAFETY: as promised to this function; `x` has as many rows as the instance takes.
    unsafe {
        match x.len() {
            1 => split_block::<1>(lines, x, out, to),
            2 => split_block::<2>(lines, x, out, to),
            3 => split_block::<3>(lines, x, out, to),
            4 => split_block::<4>(lines, x, out, to),
            5 => split_block::<5>(lines, x, out, to),
            n => unreachable!("{n} tokens in a block"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn float_tokens(scales: Scales<'_>, lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    // SAFETY: as promised to this function; `x` has as many rows as the instance takes.
    unsafe {
        match x.len() {
            1 => float_block::<1>(scales, lines, x, out, to),
            2 => float_block::<2>(scales, lines, x, out, to),
            3 => float_block::<3>(scales, lines, x, out, to),
            4 => float_block::<4>(scales, lines, x, out, to),
            n => unreachable!("{n} tokens in a block"),
        }
    }
}

/// Numbers of E4M3, byte `J` of each dword, exactly.
///
/// Exponent and mantissa go to where f32 has them; a product with 2^120 mends the bias and normalizes subnormals.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn e4m3<const J: usize>(dwords: __m512i) -> __m512 {
    let (magnitude, sign) = match J {
        0 => (_mm512_slli_epi32(dwords, 20), _mm512_slli_epi32(dwords, 24)),
        1 => (_mm512_slli_epi32(dwords, 12), _mm512_slli_epi32(dwords, 16)),
        2 => (_mm512_slli_epi32(dwords, 4), _mm512_slli_epi32(dwords, 8)),
        _ => (_mm512_srli_epi32(dwords, 4), dwords),
    };
    let magnitude = _mm512_castsi512_ps(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x07f0_0000)));
    let size = _mm512_mul_ps(magnitude, _mm512_set1_ps(f32::from_bits((127 + 120) << 23)));
    // size | sign & the highest bit
    let bits = _mm512_ternarylogic_epi32(_mm512_castps_si512(size), sign, _mm512_set1_epi32(i32::MIN), 0xf8);
    _mm512_castsi512_ps(bits)
}

/// `T` tokens through one tile of FP8, as [`split_block`], the sum of each group for itself.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn float_block<const T: usize>(
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
        let mut group = [_mm512_setzero_ps(); T];
        for (i, lines) in lines.chunks_exact(BF16_INPUTS * TILE_ROWS).enumerate() {
            to.stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), BF16_INPUTS / 4);
            let at = x.parts_of::<T>(g * scales.group / BF16_INPUTS + i);
            let mut sums = [[[_mm512_setzero_ps(); 2]; 2]; T]; // [token][high, low][even, odd]
            for run in 0..BF16_INPUTS / 4 {
                // SAFETY: a line of 64 bytes.
                let w = unsafe { _mm512_loadu_si512(lines.as_ptr().add(64 * run).cast()) };
                let w = [e4m3::<0>(w), e4m3::<1>(w), e4m3::<2>(w), e4m3::<3>(w)];
                for j in 0..4 {
                    for t in 0..T {
                        for part in 0..2 {
                            // SAFETY: a row has 64 numbers in each block.
                            let x = _mm512_set1_ps(unsafe { *at[t].add(32 * part + 4 * run + j) });
                            sums[t][part][j % 2] = _mm512_fmadd_ps(x, w[j], sums[t][part][j % 2]);
                        }
                    }
                }
            }
            for t in 0..T {
                for part in 0..2 {
                    group[t] = _mm512_add_ps(group[t], _mm512_add_ps(sums[t][part][0], sums[t][part][1]));
                }
            }
        }
        // SAFETY: the scales of group `g`, before `lines`.
        let scale = unsafe { float_scales16(scales, g) };
        for t in 0..T {
            acc[t] = _mm512_fmadd_ps(group[t], scale, acc[t]);
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t]) };
    }
}

/// Scales of a group of FP8.
///
/// # Safety
/// The group's scales to read; AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn float_scales16(scales: Scales<'_>, group: usize) -> __m512 {
    let bytes = scales.bytes.as_ptr();
    // SAFETY: as promised by the caller.
    unsafe {
        if scales.f32 {
            return _mm512_loadu_ps(bytes.add(group * 4 * TILE_ROWS).cast());
        }
        let numbers = _mm256_loadu_si256(bytes.add(group * 2 * TILE_ROWS).cast());
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16))
    }
}

/// `T` tokens through one BF16 tile: each line is loaded and widened once for all of them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split_block<const T: usize>(lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    let odd_mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for (block, lines) in lines.chunks_exact(BF16_INPUTS / 2 * 64).enumerate() {
        let at = x.parts_of::<T>(block);
        if T <= PREFETCH_TOKENS {
            to.stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), BF16_INPUTS / 2);
        }
        let mut sums = [[[_mm512_setzero_ps(); 2]; 2]; T]; // [token][high, low][even, odd]
        for pair in 0..BF16_INPUTS / 2 {
            // SAFETY: a line of 64 bytes.
            let w = unsafe { _mm512_loadu_si512(lines.as_ptr().add(64 * pair).cast()) };
            let w = [_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_and_si512(w, odd_mask))];
            for t in 0..T {
                for part in 0..2 {
                    for odd in 0..2 {
                        // SAFETY: a row has 64 numbers in each block.
                        let x16 = _mm512_set1_ps(unsafe { *at[t].add(32 * part + 2 * pair + odd) });
                        sums[t][part][odd] = _mm512_fmadd_ps(x16, w[odd], sums[t][part][odd]);
                    }
                }
            }
        }
        for t in 0..T {
            for part in 0..2 {
                acc[t] = _mm512_add_ps(acc[t], _mm512_add_ps(sums[t][part][0], sums[t][part][1]));
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t]) };
    }
}

/// `T` tokens through one tile: per group, the line of weights is loaded and unpacked once for all of them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn block<const ROW: usize, const T: usize, const CHAINS: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let groups = x.k / x.group;
    let values = lookup(const { table(row(ROW).codes, bias(ROW)) });
    // Loops, not `array::from_fn`, around intrinsics: a library function has no target features to inline them into.
    let codes = x.codes_of::<T>();
    let mut weights = lines.as_ptr();
    if T <= PREFETCH_TOKENS {
        // The lines that prefetching from the first code on would step over.
        let first = weights.wrapping_sub(scales.bytes.len());
        to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    }
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for g in 0..groups {
        let ahead = to.stream.from(weights);
        // SAFETY: the scales of group `g`, before `lines`. First, so that they are there when the sums are.
        let [w_scale, w_offset] = unsafe { scales16::<ROW>(scales, g) };
        let mut dot = [[_mm512_setzero_si512(); CHAINS]; T];
        if bias(ROW) != 0 {
            for t in 0..T {
                dot[t][0] = _mm512_set1_epi32(-bias(ROW) * x.sum(g, t));
            }
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let (half, at) = (k / 16 % 2, k / BLOCK * x.stride * BLOCK + k % BLOCK);
            if T <= PREFETCH_TOKENS {
                ahead.prefetch(weights, half_lines(ROW, half));
            }
            // SAFETY: 16 inputs of 16 rows, inside the tile whose length was checked.
            let w = unsafe {
                match is_grid(ROW) {
                    true => grid_runs::<ROW>(lines.as_ptr(), k, values),
                    false => runs::<ROW>(weights, half, values),
                }
            };
            weights = weights.wrapping_add(step(ROW, half));
            for j in 0..4 {
                for t in 0..T {
                    // SAFETY: 4 codes of the 16 inputs from k on.
                    let four = unsafe { codes[t].add(at + 4 * j).cast::<i32>().read_unaligned() };
                    // Sums of groups as short as 16 are independent of each other soon enough.
                    let c = if row(ROW).group_size == 16 { 0 } else { j % CHAINS };
                    dot[t][c] = _mm512_dpbusd_epi32(dot[t][c], w[j], _mm512_set1_epi32(four));
                }
            }
        }
        for t in 0..T {
            let mut sum = dot[t][0];
            for c in 1..CHAINS {
                sum = _mm512_add_epi32(sum, dot[t][c]);
            }
            let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x.scale(g, t)));
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[t]);
            if row(ROW).scales.have_offsets() {
                acc[t] = _mm512_fmadd_ps(w_offset, _mm512_set1_ps(x.total(g, t)), acc[t]);
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t]) };
    }
}

/// [`block`] of codes that are looked up in registers.
///
/// # Safety
/// As of [`block`], VBMI and GFNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,gfni")]
unsafe fn places_block<const ROW: usize, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    // SAFETY: as promised to this function.
    unsafe { add_places::<ROW, T>(scales, lines, x, to.stream, &mut acc) };
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t]) };
    }
}

/// The codes of 16 inputs, half `half` of a block whose lines begin at `lines`, as bytes: four runs of 4 inputs of 16
/// rows. What is stored, or looked up in `values`.
///
/// # Safety
/// The block's lines to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn runs<const ROW: usize>(lines: *const u8, half: usize, values: __m512i) -> [__m512i; 4] {
    // SAFETY: as promised by the caller.
    let line = |at: usize| unsafe { _mm512_loadu_si512(lines.add(at).cast()) };
    let (low, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(3));
    let mut w = match even_bits(ROW) {
        8 => [line(0), line(64), line(128), line(192)],
        4 | 6 => {
            let (a, b) = (line(0), line(64));
            [
                _mm512_and_si512(a, low),
                _mm512_and_si512(_mm512_srli_epi16(a, 4), low),
                _mm512_and_si512(b, low),
                _mm512_and_si512(_mm512_srli_epi16(b, 4), low),
            ]
        }
        _ => {
            let a = line(0);
            [
                _mm512_and_si512(a, pair),
                _mm512_and_si512(_mm512_srli_epi16(a, 2), pair),
                _mm512_and_si512(_mm512_srli_epi16(a, 4), pair),
                _mm512_and_si512(_mm512_srli_epi16(a, 6), pair),
            ]
        }
    };
    if even_bits(ROW) == 6 {
        let (bits, mask) = (line(128), _mm512_set1_epi8(0x30));
        w[0] = _mm512_or_si512(w[0], _mm512_and_si512(_mm512_slli_epi16(bits, 4), mask));
        w[1] = _mm512_or_si512(w[1], _mm512_and_si512(_mm512_slli_epi16(bits, 2), mask));
        w[2] = _mm512_or_si512(w[2], _mm512_and_si512(bits, mask));
        w[3] = _mm512_or_si512(w[3], _mm512_and_si512(_mm512_srli_epi16(bits, 2), mask));
    }
    if row(ROW).codes.bits() % 2 == 1 {
        // Bit `i` of a byte is that of run `i` of the block: of this half they come to the place of the highest.
        let bits = line((2 - half) * half_bytes(ROW));
        let bits = _mm512_srl_epi16(bits, _mm_cvtsi32_si128(4 * half as i32));
        let mask = _mm512_set1_epi8(1 << even_bits(ROW));
        let moved = match even_bits(ROW) {
            4 => [
                _mm512_slli_epi16(bits, 4),
                _mm512_slli_epi16(bits, 3),
                _mm512_slli_epi16(bits, 2),
                _mm512_slli_epi16(bits, 1),
            ],
            _ => [_mm512_slli_epi16(bits, 2), _mm512_slli_epi16(bits, 1), bits, _mm512_srli_epi16(bits, 1)],
        };
        for j in 0..4 {
            w[j] = _mm512_or_si512(w[j], _mm512_and_si512(moved[j], mask));
        }
    }
    if is_table(ROW) {
        for j in 0..4 {
            w[j] = _mm512_shuffle_epi8(values, w[j]);
        }
    }
    w
}

/// Scales and offsets of a group's 16 rows as f32.
///
/// # Safety
/// The group's scales to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn scales16<const ROW: usize>(scales: Scales<'_>, group: usize) -> [__m512; 2] {
    let (at, head) = row(ROW).scales.at(group, row(ROW).group_size);
    // SAFETY: as promised by the caller.
    let numbers = |at: usize| unsafe { _mm256_loadu_si256(scales.bytes.as_ptr().add(at).cast()) };
    match row(ROW).scales {
        pack::Scales::Plain if scales.f16 => [_mm512_cvtph_ps(numbers(at)), _mm512_setzero_ps()],
        pack::Scales::Plain => {
            [_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers(at)), 16)), _mm512_setzero_ps()]
        }
        pack::Scales::Wide => unreachable!("integers have no such scales"),
        pack::Scales::Zeros => {
            // SAFETY: as promised by the caller.
            let zeros = unsafe { _mm_loadu_si128(scales.bytes.as_ptr().add(at + 2 * TILE_ROWS).cast()) };
            let zeros = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros));
            let scale = match scales.f16 {
                true => _mm512_cvtph_ps(numbers(at)),
                false => _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers(at)), 16)),
            };
            let sign = _mm512_set1_epi32(i32::MIN);
            let offset = _mm512_castps_si512(_mm512_mul_ps(scale, zeros));
            [scale, _mm512_castsi512_ps(_mm512_xor_si512(offset, sign))]
        }
        pack::Scales::Odd { halvings, .. } => {
            // SAFETY: as promised by the caller.
            let count = unsafe { odd_counts16::<ROW>(scales, group) };
            let odd = _mm512_add_epi32(_mm512_add_epi32(count, count), _mm512_set1_epi32(1));
            let unit = _mm512_set1_ps(1.0 / f32::from(1u8 << halvings));
            let scale = _mm512_mul_ps(_mm512_cvtph_ps(numbers(head)), _mm512_cvtepi32_ps(odd));
            [_mm512_mul_ps(scale, unit), _mm512_setzero_ps()]
        }
        pack::Scales::E4m3 => {
            // SAFETY: as promised by the caller.
            let (bytes, number) = unsafe {
                let bytes = _mm_loadu_si128(scales.bytes.as_ptr().add(at).cast());
                (bytes, _mm512_loadu_ps(scales.bytes.as_ptr().cast()))
            };
            [_mm512_mul_ps(e4m3::<0>(_mm512_cvtepu8_epi32(bytes)), number), _mm512_setzero_ps()]
        }
        pack::Scales::WithOffset => [_mm512_cvtph_ps(numbers(at)), _mm512_cvtph_ps(numbers(at + 2 * TILE_ROWS))],
        pack::Scales::Counted { zero, offsets, .. } => {
            // SAFETY: as promised by the caller.
            let counts = unsafe { counts::<ROW>(scales.bytes.as_ptr().add(at)) };
            let count = _mm512_sub_epi32(_mm512_cvtepu8_epi32(counts[0]), _mm512_set1_epi32(i32::from(zero)));
            let scale = _mm512_mul_ps(_mm512_cvtph_ps(numbers(head)), _mm512_cvtepi32_ps(count));
            if !offsets {
                return [scale, _mm512_setzero_ps()];
            }
            let offset = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(counts[1]));
            let offset = _mm512_mul_ps(_mm512_cvtph_ps(numbers(head + 2 * TILE_ROWS)), offset);
            let sign = _mm512_set1_epi32(i32::MIN);
            [scale, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(offset), sign))]
        }
    }
}

/// A table of 16 bytes for `vpshufb`, four times.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn lookup(table: [i8; 16]) -> __m512i {
    // SAFETY: 16 bytes of an array.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// [`Kernel::dot_f32`]
///
/// # Safety
/// AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn dot(w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
    shared::dot_blocks(w.rows, x.rows, x.cols, [4, 6], |r, t, block| {
        // SAFETY: `dot_blocks` stays inside the rows and tokens it was given.
        unsafe {
            match block {
                [4, 6] => dot_block::<4, 6>(&w, &x, r, t, out),
                [4, 3] => dot_block::<4, 3>(&w, &x, r, t, out),
                [4, _] => dot_block::<4, 1>(&w, &x, r, t, out),
                [_, 6] => dot_block::<1, 6>(&w, &x, r, t, out),
                [_, 3] => dot_block::<1, 3>(&w, &x, r, t, out),
                _ => dot_block::<1, 1>(&w, &x, r, t, out),
            }
        }
    });
}

/// `R` rows times `T` tokens in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
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
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let whole = w.cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        let mut x16 = [_mm512_setzero_ps(); T];
        for j in 0..T {
            // SAFETY: k + 16 <= cols.
            x16[j] = unsafe { _mm512_loadu_ps(xs[j].add(k)) };
        }
        for i in 0..R {
            // One token is bound by the arrival of its weights: ask for the next block of rows while this one is read.
            if T == 1 {
                _mm_prefetch::<_MM_HINT_T1>(ws[i].wrapping_add(R * w.stride + k).cast());
            }
            // SAFETY: k + 16 <= cols.
            let w16 = unsafe { _mm512_loadu_ps(ws[i].add(k)) };
            for j in 0..T {
                acc[i][j] = _mm512_fmadd_ps(w16, x16[j], acc[i][j]);
            }
        }
    }
    let tail = w.cols - whole;
    if tail > 0 {
        // Lanes beyond the tail keep their sum untouched: fma(0, 0, -0.0) would be +0.0.
        let mask = (1 << tail) - 1;
        for i in 0..R {
            // SAFETY: `tail` values are left in each row.
            let w16 = unsafe { _mm512_maskz_loadu_ps(mask, ws[i].add(whole)) };
            for j in 0..T {
                // SAFETY: as above.
                let x16 = unsafe { _mm512_maskz_loadu_ps(mask, xs[j].add(whole)) };
                acc[i][j] = _mm512_mask3_fmadd_ps(w16, x16, acc[i][j], mask);
            }
        }
    }
    for j in 0..T {
        for i in 0..R {
            out[(t + j) * w.rows + r + i] = tree(acc[i][j]);
        }
    }
}

/// [`shared::tree`]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn tree(lanes: __m512) -> f32 {
    let high = _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(lanes), 1));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
