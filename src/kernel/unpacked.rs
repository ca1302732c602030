//! Many tokens through tiles of codes, where there is no AMX: some inputs of a tile become bytes once, for all tokens.
//!
//! A block of tokens keeps its sums in registers while the groups go by. The bytes stay in L1 for the next block. A
//! register of activations meets two of weights, because loads bound these loops otherwise: 32 rows with AVX-512, 16
//! with AVX2. The sums of a group are those of few tokens, bit by bit.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use moebius_cache::pack::{MatrixLayout, SUPER_BLOCK, TILE_ROWS};

use super::activations::CODES;
use super::tiles::{Scales, To, fetch};
use super::{ActivationRows, Start};

/// Inputs that there is room for; AMX fills it.
pub(super) const INPUTS: usize = 1024;
/// Inputs that are unpacked at a time, here: with two tiles 20 KiB at most, or 24 with offsets.
const PART: usize = 2 * SUPER_BLOCK;

/// Some inputs of a tile.
#[repr(C, align(64))]
pub(super) struct Unpacked {
    /// 16 rows of 4 inputs to a line.
    pub(super) codes: [MaybeUninit<[u8; 64]>; INPUTS / 4],
    /// Of each group.
    pub(super) scales: [MaybeUninit<[f32; TILE_ROWS]>; INPUTS / 16],
    /// Of each group, where there are any.
    pub(super) offsets: [MaybeUninit<[f32; TILE_ROWS]>; INPUTS / 16],
}

/// Numbers of each token of a block: what unsigned codes count too much, and what a group's inputs add up to.
#[repr(C, align(64))]
struct OfTokens<const N: usize> {
    less: [i32; N],
    totals: [f32; N],
}

/// What a block of tokens meets.
pub(super) struct Part<'a> {
    pub(super) tiles: &'a [Unpacked],
    groups: Range<usize>,
    /// What makes the codes unsigned; 0: they are signed, or have none.
    bias: i32,
}

/// Brings each part of up to `W` tiles at a time into `Unpacked`, and multiplies it with blocks of up to `most` tokens.
#[inline(always)]
pub(super) fn each_part<const W: usize>(
    (layout, tiles): (&MatrixLayout, &[u8]),
    x: &ActivationRows<'_>,
    (most, bias): (usize, i32),
    out: &mut [f32],
    to: To,
    unpack: impl Fn(Scales<'_>, &[u8], Range<usize>, &mut Unpacked),
    multiply: impl Fn(&Part<'_>, &ActivationRows<'_>, &mut [f32], To),
) {
    let mut unpacked = [const { MaybeUninit::<Unpacked>::uninit() }; W];
    let (tile_bytes, blocks) = (layout.tile_bytes(), x.len().div_ceil(most));
    let height = x.len().div_ceil(blocks);
    let code = |input| layout.scale_bytes() + layout.precision.row().map_or(0, |row| row.codes.bytes(input));
    for (i, tiles) in tiles.chunks(W * tile_bytes).enumerate() {
        let width = tiles.len() / tile_bytes;
        for from in (0..x.k).step_by(PART) {
            let inputs = from..x.k.min(from + PART);
            for (tile, unpacked) in tiles.chunks_exact(tile_bytes).zip(&mut unpacked) {
                let (scales, lines) = Scales::split(layout, tile);
                // SAFETY: all that is in it may be uninitialized.
                unpack(scales, lines, inputs.clone(), unsafe { unpacked.assume_init_mut() });
            }
            // SAFETY: as above.
            let part_tiles = unsafe { unpacked[..width].assume_init_ref() };
            let part = Part { tiles: part_tiles, groups: from / x.group..inputs.end / x.group, bias };
            let to = if from == 0 { to } else { To { start: Start::Out, ..to } };
            // What is unpacked next. Some is asked for with each block: a core waits when it asks for all at once.
            let next = match inputs.end {
                end if end < x.k => code(end)..code(x.k.min(end + PART)),
                _ => tiles.len()..tiles.len() + code(x.k.min(PART)),
            };
            let lines = next.len().div_ceil(64);
            for (block, t) in (0..x.len()).step_by(height).enumerate() {
                let some = block * lines / blocks..(block + 1) * lines / blocks;
                for w in 0..width {
                    let next = tiles.as_ptr().wrapping_add(w * tile_bytes + next.start + 64 * some.start);
                    fetch(to.stream.place(next), some.len());
                }
                let out = &mut out[t * to.stride + W * i * TILE_ROWS..];
                multiply(&part, &x.part(t, height.min(x.len() - t)), out, to);
            }
        }
    }
}

/// Adds some groups of `W` tiles to the results of up to `R` tokens.
///
/// # Safety
/// AVX-512 F, BW, VL and VNNI; what `ActivationRows::check` promises; the part is unpacked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn add_avx512<const R: usize, const W: usize, const OFFSETS: bool>(
    part: &Part<'_>,
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let tiles: &[Unpacked; W] = part.tiles.try_into().expect("as many tiles");
    let mut acc = [[_mm512_setzero_ps(); W]; R];
    if to.start == Start::Out {
        for t in 0..R.min(x.len()) {
            for w in 0..W {
                // SAFETY: 16 numbers, as just sliced.
                acc[t][w] = unsafe { _mm512_loadu_ps(out[t * to.stride + w * TILE_ROWS..][..TILE_ROWS].as_ptr()) };
            }
        }
    }
    let mut of_tokens = OfTokens { less: [0; 16], totals: [0.0; 16] };
    let mut line = 0;
    for (i, g) in part.groups.clone().enumerate() {
        // SAFETY: as promised to this function: the codes, scales and sums of 15 tokens after any can be read.
        unsafe {
            let (x_scales, x_sums) = (x.scales(g, 0), _mm512_loadu_si512(x.sums(g, 0).cast()));
            let less = _mm512_mullo_epi32(x_sums, _mm512_set1_epi32(-part.bias));
            _mm512_store_si512(of_tokens.less.as_mut_ptr().cast(), less);
            if OFFSETS {
                let all = _mm512_mul_ps(_mm512_cvtepi32_ps(x_sums), _mm512_loadu_ps(x_scales));
                _mm512_store_ps(of_tokens.totals.as_mut_ptr(), all);
            }
            let mut dot = [[_mm512_setzero_si512(); W]; R];
            for t in 0..R {
                dot[t] = [_mm512_set1_epi32(of_tokens.less[t]); W];
            }
            for k in (g * x.group..(g + 1) * x.group).step_by(16) {
                let codes = x.codes(0).wrapping_add(k / CODES * x.stride * CODES + k % CODES);
                for j in 0..4 {
                    let mut b = [_mm512_setzero_si512(); W];
                    for w in 0..W {
                        b[w] = _mm512_load_si512(tiles[w].codes.as_ptr().add(line + j).cast());
                    }
                    for t in 0..R {
                        let four = codes.wrapping_add(t * CODES + 4 * j).cast::<i32>().read_unaligned();
                        let a = _mm512_set1_epi32(four);
                        for w in 0..W {
                            dot[t][w] = _mm512_dpbusd_epi32(dot[t][w], b[w], a);
                        }
                    }
                }
                line += 4;
            }
            for w in 0..W {
                let scale = _mm512_load_ps(tiles[w].scales.as_ptr().add(i).cast());
                for t in 0..R {
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*x_scales.add(t)));
                    acc[t][w] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t][w]), scale, acc[t][w]);
                }
                if OFFSETS {
                    let offset = _mm512_load_ps(tiles[w].offsets.as_ptr().add(i).cast());
                    for t in 0..R {
                        acc[t][w] = _mm512_fmadd_ps(offset, _mm512_set1_ps(of_tokens.totals[t]), acc[t][w]);
                    }
                }
            }
        }
    }
    for t in 0..R.min(x.len()) {
        for w in 0..W {
            let out = &mut out[t * to.stride + w * TILE_ROWS..][..TILE_ROWS];
            // SAFETY: 16 numbers, as just sliced.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t][w]) };
        }
    }
}

/// `name::<R, OFFSETS, PAIRS>`: as [`add_avx512`], one tile, whose dot products `dots` makes.
macro_rules! add_256 {
    ($name:ident, $features:literal, $dots:ident) => {
        /// # Safety
        /// What the features say; what `ActivationRows::check` promises; the part is unpacked.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name<const R: usize, const OFFSETS: bool, const PAIRS: usize>(
            part: &Part<'_>,
            x: &ActivationRows<'_>,
            out: &mut [f32],
            to: To,
        ) {
            let tile = &part.tiles[0];
            let mut acc = [[_mm256_setzero_ps(); 2]; R];
            if to.start == Start::Out {
                for t in 0..R.min(x.len()) {
                    let out = out[t * to.stride..][..TILE_ROWS].as_ptr();
                    // SAFETY: 16 numbers, as just sliced.
                    acc[t] = unsafe { [_mm256_loadu_ps(out), _mm256_loadu_ps(out.add(8))] };
                }
            }
            let mut of_tokens = OfTokens { less: [0; 4], totals: [0.0; 4] };
            let mut lines = tile.codes.as_ptr().cast::<u8>();
            for (i, g) in part.groups.clone().enumerate() {
                // SAFETY: as promised to this function: the codes, scales and sums of 15 tokens after any can be read.
                unsafe {
                    let (x_scales, x_sums) = (x.scales(g, 0), _mm_loadu_si128(x.sums(g, 0).cast()));
                    let less = _mm_mullo_epi32(x_sums, _mm_set1_epi32(-part.bias));
                    _mm_storeu_si128(of_tokens.less.as_mut_ptr().cast(), less);
                    if OFFSETS {
                        let all = _mm_mul_ps(_mm_cvtepi32_ps(x_sums), _mm_loadu_ps(x_scales));
                        _mm_storeu_ps(of_tokens.totals.as_mut_ptr(), all);
                    }
                    let mut dot = [[_mm256_setzero_si256(); 2]; R];
                    for t in 0..R {
                        dot[t] = [_mm256_set1_epi32(of_tokens.less[t]); 2];
                    }
                    $dots::<R, PAIRS>(lines, x, g, &mut dot);
                    lines = lines.add(x.group * TILE_ROWS);
                    for upper in 0..2 {
                        let scale = _mm256_load_ps(tile.scales.as_ptr().add(i).cast::<f32>().add(8 * upper));
                        for t in 0..R {
                            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(*x_scales.add(t)));
                            acc[t][upper] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][upper]), scale, acc[t][upper]);
                        }
                        if OFFSETS {
                            let offset = _mm256_load_ps(tile.offsets.as_ptr().add(i).cast::<f32>().add(8 * upper));
                            for t in 0..R {
                                let total = _mm256_set1_ps(of_tokens.totals[t]);
                                acc[t][upper] = _mm256_fmadd_ps(offset, total, acc[t][upper]);
                            }
                        }
                    }
                }
            }
            for t in 0..R.min(x.len()) {
                let out = out[t * to.stride..][..TILE_ROWS].as_mut_ptr();
                // SAFETY: 16 numbers, as just sliced.
                unsafe {
                    _mm256_storeu_ps(out, acc[t][0]);
                    _mm256_storeu_ps(out.add(8), acc[t][1]);
                }
            }
        }
    };
}
add_256!(add_vnni, "avx2,fma,avxvnni", dots_vnni);
add_256!(add_avx2, "avx2,fma", dots_avx2);

/// Four codes in every dword.
///
/// # Safety
/// 4 codes to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn four(codes: *const i8) -> __m256i {
    // SAFETY: as promised by the caller.
    _mm256_set1_epi32(unsafe { codes.cast::<i32>().read_unaligned() })
}

/// Dot products of group `g` of `R` tokens and 16 rows, added to `dot`.
///
/// # Safety
/// AVX2 and VNNI in 256 bits; the group's lines and codes to read.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
unsafe fn dots_vnni<const R: usize, const PAIRS: usize>(
    mut lines: *const u8,
    x: &ActivationRows<'_>,
    g: usize,
    dot: &mut [[__m256i; 2]; R],
) {
    // SAFETY: as promised to this function.
    unsafe {
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let codes = x.codes(0).wrapping_add(k / CODES * x.stride * CODES + k % CODES);
            for j in 0..4 {
                let b = [_mm256_load_si256(lines.cast()), _mm256_load_si256(lines.add(32).cast())];
                lines = lines.add(64);
                for t in 0..R {
                    let a = four(codes.wrapping_add(t * CODES + 4 * j));
                    for upper in 0..2 {
                        dot[t][upper] = _mm256_dpbusd_avx_epi32(dot[t][upper], b[upper], a);
                    }
                }
            }
        }
    }
}

/// [`dots_vnni`] without VNNI: `PAIRS` products of an unsigned code and a signed byte, in pairs, are added in 16 bits;
/// 0: codes are signed.
///
/// # Safety
/// AVX2; the group's lines and codes to read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dots_avx2<const R: usize, const PAIRS: usize>(
    mut lines: *const u8,
    x: &ActivationRows<'_>,
    g: usize,
    dot: &mut [[__m256i; 2]; R],
) {
    let ones = _mm256_set1_epi16(1);
    // SAFETY: as promised to this function.
    unsafe {
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let codes = x.codes(0).wrapping_add(k / CODES * x.stride * CODES + k % CODES);
            let mut pairs = [[_mm256_setzero_si256(); 2]; R];
            for j in 0..4 {
                let b = [_mm256_load_si256(lines.cast()), _mm256_load_si256(lines.add(32).cast())];
                lines = lines.add(64);
                for t in 0..R {
                    let a = four(codes.wrapping_add(t * CODES + 4 * j));
                    for upper in 0..2 {
                        let products = match PAIRS {
                            0 => _mm256_maddubs_epi16(_mm256_abs_epi8(b[upper]), _mm256_sign_epi8(a, b[upper])),
                            _ => _mm256_maddubs_epi16(b[upper], a),
                        };
                        pairs[t][upper] = match PAIRS {
                            2.. if j % PAIRS != 0 => _mm256_add_epi16(pairs[t][upper], products),
                            _ => products,
                        };
                        if PAIRS < 2 || j % PAIRS == PAIRS - 1 {
                            let sum = _mm256_madd_epi16(pairs[t][upper], ones);
                            dot[t][upper] = _mm256_add_epi32(dot[t][upper], sum);
                        }
                    }
                }
            }
        }
    }
}
