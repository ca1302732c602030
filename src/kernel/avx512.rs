//! AVX-512 with VNNI: 16 rows of a tile are the 16 lanes of one register.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::sync::OnceLock;

use moebius_cache::pack::{self, BF16_INPUTS, Counts, Grid, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::avx2::counts;
use super::shared::PREFETCH_TOKENS;
use super::tiles::{
    INTEGER_ROWS, Scales, To, bias, by_row, even_bits, grid, grid_at, half_bytes, half_lines, is_grid, is_table, row,
    step, table,
};
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
    let to = To { start, stride: count * TILE_ROWS, stream: tiles.stream() };
    for (i, tile) in tiles.bytes.chunks_exact(layout.tile_bytes()).enumerate() {
        // SAFETY: as promised to this function.
        unsafe { one_tile(layout, tile, x, &mut out[i * TILE_ROWS..], to) };
    }
}

/// Tokens that share one pass over a tile of codes: two accumulators each, and the weights, in 32 registers. Half as
/// many of llama.cpp's types, which compiles in half the time; many tokens are AMX's.
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
                Some(row) => by_row!(row, tokens[](scales, lines, &now, out, to)),
            }
        }
        t += take;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tokens<const ROW: usize>(scales: Scales<'_>, lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    if const { is_planar(ROW) } && is_x86_feature_detected!("avx512vbmi") {
        // SAFETY: as promised to this function; the feature was detected, `x` has as many rows as the instance takes.
        unsafe {
            match x.len() {
                1 => planar_block::<ROW, 1>(scales, lines, x, out, to),
                2 => planar_block::<ROW, 2>(scales, lines, x, out, to),
                3 => planar_block::<ROW, 3>(scales, lines, x, out, to),
                4 => planar_block::<ROW, 4>(scales, lines, x, out, to),
                5 => planar_block::<ROW, 5>(scales, lines, x, out, to),
                6 => planar_block::<ROW, 6>(scales, lines, x, out, to),
                n => unreachable!("{n} tokens in a block"),
            }
        }
        return;
    }
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
                    let c = j % CHAINS;
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

/// Whether codes are places in a small grid, each of which stands for four weights.
const fn is_planar(number: usize) -> bool {
    is_grid(number) && matches!(grid(number), Grid::Iq3Xxs | Grid::Iq3S)
}

/// Of each of four weights the codes that places in a grid stand for, unsigned.
#[repr(C, align(64))]
struct Planes([[u8; 512]; 4]);

impl Planes {
    /// Those of a grid.
    fn of<const ROW: usize>() -> &'static Self {
        static OF_GRIDS: [OnceLock<Planes>; 2] = [const { OnceLock::new() }; 2];
        let code = |i: usize, plane: usize| {
            let four = grid(ROW).magnitudes().get(i).map_or([0; 4], |four| four.to_le_bytes());
            four[plane] + bias(ROW) as u8
        };
        let planes = || Planes(std::array::from_fn(|plane| std::array::from_fn(|i| code(i, plane))));
        OF_GRIDS[grid(ROW).upper_bits()].get_or_init(planes)
    }
}

/// What seven bits of signs are with the eighth, which makes the number of ones even.
static EVEN: [u8; 128] = {
    let mut signs = [0; 128];
    let mut i = 0;
    while i < 128 {
        signs[i] = i as u8 | (i.count_ones() as u8 & 1) << 7;
        i += 1;
    }
    signs
};

/// [`block`] of codes that are places in a small grid.
///
/// The 64 places of a line are looked up at once in registers, in the order in which they lie: the first of each four
/// weights, then the second ones. Activations are brought into that order; gathering from memory takes four times as
/// long.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn planar_block<const ROW: usize, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let (grid, planes) = (grid(ROW), Planes::of::<ROW>());
    let codes = x.codes_of::<T>();
    let mut weights = lines.as_ptr();
    if T <= PREFETCH_TOKENS {
        // The lines that prefetching from the first code on would step over.
        let first = weights.wrapping_sub(scales.bytes.len());
        to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    }
    // SAFETY: 64 bytes of a table.
    let of_table = |table: &[u8], at: usize| unsafe { _mm512_loadu_si512(table[at..][..64].as_ptr().cast()) };
    let even = [of_table(&EVEN, 0), of_table(&EVEN, 64)];
    let twice = _mm512_set1_epi8((2 * bias(ROW)) as i8);
    let across = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for g in 0..x.k / x.group {
        let ahead = to.stream.from(weights);
        // SAFETY: the scales of group `g`, before `lines`.
        let [w_scale, _] = unsafe { scales16::<ROW>(scales, g) };
        let mut dot = [[_mm512_setzero_si512(); 2]; T];
        for t in 0..T {
            dot[t][0] = _mm512_set1_epi32(-bias(ROW) * x.sum(g, t));
        }
        let (at, first) = grid_at(ROW, g);
        // SAFETY: the words of the group, inside the tile whose length was checked.
        let line = |at: usize| unsafe { _mm512_loadu_si512(lines.as_ptr().add(at).cast()) };
        let signs = line(at + (grid.block_words() - 1) * 64);
        for half in 0..2 {
            if T <= PREFETCH_TOKENS {
                ahead.prefetch(weights, half_lines(ROW, half));
            }
            weights = weights.wrapping_add(step(ROW, half));
            let places = line(at + 64 * half);
            let upper = _mm512_movepi8_mask(places);
            // The signs of weights 0 to 7 in the lower bytes of a dword, of 8 to 15 in the others.
            let each = if grid.has_all_signs() { 8 } else { 7 };
            let from = (2 * each * half) as i64;
            let of_dword = from * 0x0101 + (from + each as i64) * 0x0101_0000;
            let bits = _mm512_set1_epi64(of_dword | (of_dword + 0x2020_2020) << 32);
            let mut negative = _mm512_multishift_epi64_epi8(bits, signs);
            if !grid.has_all_signs() {
                negative = _mm512_permutex2var_epi8(even[0], negative, even[1]);
            }
            // Places in the second half of a grid of 512.
            let mut beyond = 0;
            if grid.upper_bits() > 0 {
                let (word, lowest) = grid.upper_at(g % 8);
                let above = _mm512_srl_epi32(line(first + 64 * word), _mm_cvtsi32_si128(lowest as i32));
                let lowest = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
                let above = _mm512_shuffle_epi8(above, _mm512_broadcast_i32x4(lowest));
                let bits = _mm512_set1_epi32([0x0804_0201, 0x8040_2010_u32 as i32][half]);
                beyond = _mm512_test_epi8_mask(above, bits);
            }
            let mut four = [_mm512_setzero_si512(); T];
            for t in 0..T {
                // SAFETY: the codes of 16 inputs.
                let x16 = unsafe {
                    let k = 32 * g + 16 * half;
                    _mm_loadu_si128(codes[t].add(k / BLOCK * x.stride * BLOCK + k % BLOCK).cast())
                };
                four[t] = _mm512_broadcast_i32x4(_mm_shuffle_epi8(x16, across));
            }
            macro_rules! plane {
                ($($j:literal)*) => {$({
                    let table = &planes.0[$j];
                    let lookup = |at: usize| {
                        let low = _mm512_permutex2var_epi8(of_table(table, at), places, of_table(table, at + 64));
                        let high =
                            _mm512_permutex2var_epi8(of_table(table, at + 128), places, of_table(table, at + 192));
                        _mm512_mask_blend_epi8(upper, low, high)
                    };
                    let mut code = lookup(0);
                    if grid.upper_bits() > 0 {
                        code = _mm512_mask_blend_epi8(beyond, code, lookup(256));
                    }
                    let bit = _mm512_set1_epi16(0x1001 << $j);
                    let code = _mm512_mask_sub_epi8(code, _mm512_test_epi8_mask(negative, bit), twice, code);
                    for t in 0..T {
                        let x4 = _mm512_shuffle_epi32::<{ 0x55 * $j }>(four[t]);
                        dot[t][$j % 2] = _mm512_dpbusd_epi32(dot[t][$j % 2], code, x4);
                    }
                })*};
            }
            plane!(0 1 2 3);
        }
        for t in 0..T {
            let sum = _mm512_add_epi32(dot[t][0], dot[t][1]);
            let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x.scale(g, t)));
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[t]);
        }
    }
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

/// What 16 rows of a group count, of scales that are odd.
///
/// # Safety
/// The group's scales and codes to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn odd_counts16<const ROW: usize>(scales: Scales<'_>, group: usize) -> __m512i {
    let pack::Scales::Odd { counts, .. } = row(ROW).scales else { unreachable!("other scales") };
    let (at, _) = row(ROW).scales.at(group, row(ROW).group_size);
    // SAFETY: as promised by the caller.
    unsafe {
        match counts {
            Counts::Zero => _mm512_setzero_si512(),
            Counts::Apart(4) => {
                let bytes = _mm_loadl_epi64(scales.bytes.as_ptr().add(at).cast());
                let all = _mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4));
                _mm512_and_si512(_mm512_cvtepu8_epi32(all), _mm512_set1_epi32(15))
            }
            Counts::Apart(_) => {
                // A bit of each row.
                let bits = scales.bytes.as_ptr().add(at).cast::<[u16; 3]>().read_unaligned();
                (0..3).fold(_mm512_setzero_si512(), |count, bit| {
                    let own = _mm512_maskz_set1_epi32(bits[bit], 1 << bit);
                    _mm512_or_si512(count, own)
                })
            }
            Counts::Within => {
                let (word, lowest) = grid(ROW).upper_at(group % 8);
                let first = scales.lines.as_ptr().add(grid_at(ROW, group).1);
                let line = _mm512_loadu_si512(first.add(64 * word).cast());
                if !grid(ROW).has_ones() {
                    return _mm512_srli_epi32(line, 28);
                }
                let above = _mm512_srl_epi32(line, _mm_cvtsi32_si128(lowest as i32 + 12));
                _mm512_and_si512(above, _mm512_set1_epi32(7))
            }
        }
    }
}

/// The codes of the 16 inputs from `k` on whose words are in `lines`: four runs of 4 inputs of 16 rows, `add` added.
///
/// # Safety
/// The words of the inputs' super-block to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn grid_runs<const ROW: usize>(lines: *const u8, k: usize, add: __m512i) -> [__m512i; 4] {
    let (grid, block, half) = (grid(ROW), k / 32, k / 16 % 2);
    let (at, first) = grid_at(ROW, block);
    // SAFETY: as promised by the caller.
    let line = |at: usize| unsafe { _mm512_loadu_si512(lines.add(at).cast()) };
    let shifted = |x: __m512i, by: usize| _mm512_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
    let mut w = [_mm512_setzero_si512(); 4];
    if grid == Grid::Tq1_0 {
        let add = _mm512_sub_epi8(add, _mm512_set1_epi8(1));
        for (run, w) in w.iter_mut().enumerate() {
            let (word, digit) = Grid::digit_at(block % 8, 4 * half + run);
            // Times a power of three, without what is above a byte: the digit is in its highest part.
            let (bytes, low) = (line(first + 64 * word), _mm512_set1_epi16(255));
            let (power, three) = (_mm512_set1_epi16([1, 3, 9, 27, 81][digit]), _mm512_set1_epi16(3));
            let shifted = |bytes: __m512i| _mm512_and_si512(_mm512_mullo_epi16(bytes, power), low);
            let even = _mm512_mullo_epi16(shifted(_mm512_and_si512(bytes, low)), three);
            let odd = _mm512_mullo_epi16(shifted(_mm512_srli_epi16(bytes, 8)), three);
            let digits = _mm512_or_si512(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(low, odd));
            *w = _mm512_add_epi8(digits, add);
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
            let seven = _mm512_and_si512(shifted(signs, 7 * eight), _mm512_set1_epi32(127));
            // Four bits are even or odd: of each a bit of this number.
            let folded = _mm512_and_si512(_mm512_xor_si512(seven, _mm512_srli_epi32(seven, 4)), _mm512_set1_epi32(15));
            let odd = _mm512_srlv_epi32(_mm512_set1_epi32(0x6996), folded);
            _mm512_or_si512(seven, _mm512_slli_epi32(odd, 7)) // and more above the lowest byte
        };
        let lowest = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        let negative = _mm512_shuffle_epi8(negative, lowest);
        for four in 0..2 {
            let run = if grid.run() == 4 { 2 * eight + four } else { eight };
            let low = shifted(line(at + run / 4 * 64), 8 * (run % 4));
            let mut index = _mm512_and_si512(low, _mm512_set1_epi32(255));
            if grid.upper_bits() > 0 {
                let mask = _mm512_set1_epi32((1 << grid.upper_bits()) - 1);
                let bits = _mm512_and_si512(shifted(above, above_at + grid.upper_bits() * run), mask);
                index = _mm512_or_si512(index, _mm512_slli_epi32(bits, 8));
            }
            if grid.run() == 8 {
                index = _mm512_add_epi32(_mm512_add_epi32(index, index), _mm512_set1_epi32(four as i32));
            }
            // SAFETY: there are so many indices.
            let size = unsafe { _mm512_i32gather_epi32::<4>(index, grid.magnitudes().as_ptr().cast()) };
            if grid.has_ones() {
                // An eighth of a number beside: all bits where it is less.
                let less = _mm512_slli_epi32(shifted(above, above_at + grid.less_at(run)), 31);
                let beside = _mm512_or_si512(_mm512_srai_epi32(less, 31), _mm512_set1_epi8(1));
                w[2 * pair + four] = _mm512_add_epi8(_mm512_add_epi8(size, beside), add);
                continue;
            }
            let bits = _mm512_set1_epi32([0x0804_0201, 0x8040_2010_u32 as i32][four]);
            let mask = _mm512_test_epi8_mask(negative, bits);
            w[2 * pair + four] = _mm512_mask_sub_epi8(_mm512_add_epi8(size, add), mask, add, size);
        }
    }
    w
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
