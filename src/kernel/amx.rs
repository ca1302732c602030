//! AMX: 16 rows of weights times 16 rows of activations in one instruction.
//!
//! ```text
//! A  activations  [16 tokens][64 bytes]      as `Activations` lie
//! B  weights      [16 lines][16 rows x 4 B]  BF16 as they lie; integers as signed bytes, unpacked once per group for all tokens
//! C  results      [16 tokens][16 rows]       i32 of one group, or f32
//! ```
//!
//! `tdpbssd` is exact; `tdpbf16ps` has the order of sums that `Kernel::matmul` defines. Inline assembly, because the intrinsics are not
//! stable. Tiles are released after every call, so that a thread that sleeps has no tiles to save.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::ActivationRows;
use super::activations::CODES;
use super::avx512::widen16;
use super::shared::{self, PREFETCH_TOKENS, prefetch};

/// 32 inputs: their high parts as bf16, then their low parts.
pub(super) const SPLIT_WORDS: usize = 32;

/// Tokens from which on unpacking weights to bytes pays.
pub(super) const LEAST_TOKENS: usize = 4;

/// Whether there are tiles of INT8 and BF16, and the system lets this process use them; asks for that on the first call.
pub(super) fn detect() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| {
        let features = __cpuid_count(7, 0).edx;
        let has = |bit: u32| features >> bit & 1 == 1;
        has(22) && has(24) && has(25) && granted()
    })
}

/// Asks the kernel for the state of tiles, which programs do not have by default.
#[cfg(target_os = "linux")]
fn granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

// Which tile is what: results of two blocks of tokens by two tiles of weights, two of weights, two of activations.
const C: [usize; 4] = [0, 1, 2, 3];
const B: [usize; 2] = [4, 5];
const A: [usize; 2] = [6, 7];

/// Tiles of `tokens` rows of activations, `bytes` each, and of weights to go with them.
///
/// # Safety
/// AMX; `release` follows.
unsafe fn configure(tokens: usize, bytes: usize) {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut set = |tile: usize, rows: usize, bytes: usize| (config.rows[tile], config.row_bytes[tile]) = (rows as u8, bytes as u16);
    C.iter().for_each(|&tile| set(tile, tokens, 64));
    B.iter().for_each(|&tile| set(tile, bytes / 4, 64));
    A.iter().for_each(|&tile| set(tile, tokens, bytes));
    // SAFETY: the operand is 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly)) };
}

/// # Safety
/// AMX.
unsafe fn release() {
    // SAFETY: nobody uses the tiles any more.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

macro_rules! zero {
    ($tile:literal) => {
        asm!(concat!("tilezero tmm", $tile), options(nostack, preserves_flags, nomem))
    };
}
macro_rules! load {
    ($tile:literal, $from:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $tile, ", [{p} + {s}]"), p = in(reg) $from, s = in(reg) $stride, options(nostack, preserves_flags, readonly))
    };
}
macro_rules! store {
    ($tile:literal, $to:expr, $stride:expr) => {
        asm!(concat!("tilestored [{p} + {s}], tmm", $tile), p = in(reg) $to, s = in(reg) $stride, options(nostack, preserves_flags))
    };
}
macro_rules! multiply {
    ($instruction:literal, $c:literal, $a:literal, $b:literal) => {
        asm!(concat!($instruction, " tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, preserves_flags, nomem))
    };
}

/// [`super::Kernel::split`]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn split(x: &[f32], out: &mut [f32]) {
    let mut parts = [0.0; 2 * BF16_INPUTS];
    shared::split(x, &mut parts);
    assert_eq!(out.len(), SPLIT_WORDS);
    for (word, pair) in out.iter_mut().zip(parts.as_chunks::<2>().0) {
        *word = f32::from_bits(pair[0].to_bits() >> 16 | pair[1].to_bits() & 0xffff_0000);
    }
}

/// How many blocks of how many tokens; the last block may read more than there are, and what it has of them is forgotten.
fn cut(tokens: usize) -> (usize, usize) {
    let blocks = tokens.div_ceil(TILE_ROWS);
    (blocks, tokens.div_ceil(blocks))
}

/// One tile of results.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Results<T>([[T; TILE_ROWS]; TILE_ROWS]);

/// BF16 tiles times split activations.
///
/// # Safety
/// AMX and AVX-512; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn split_tiles(layout: &MatrixLayout, tiles: &[u8], x: &ActivationRows<'_>, out: &mut [f32], count: usize) {
    let (tokens, tile_bytes) = (x.len(), layout.tile_bytes());
    let (blocks, height) = cut(tokens);
    // SAFETY: the features are there; tiles are released below.
    unsafe { configure(height, 64) };
    let mut c = [Results([[0.0f32; TILE_ROWS]; TILE_ROWS]); 4];
    for (i, pair) in tiles.chunks(2 * tile_bytes).enumerate() {
        let width = pair.len() / tile_bytes;
        for block in (0..blocks).step_by(2) {
            let depth = (blocks - block).min(2);
            let (first, last) = (block * height, (block + depth - 1) * height);
            let b = [pair.as_ptr(), pair[pair.len() - tile_bytes..].as_ptr()];
            let a = [x.parts(first), x.parts(last)];
            // SAFETY: as many tiles of weights and rows of activations as the instance reads; `height` rows from each first can be read.
            unsafe {
                match (depth, width, height <= PREFETCH_TOKENS && blocks == 1) {
                    (1, 1, true) => split_block::<1, 1, true>(a, b, x.stride, tile_bytes, &mut c),
                    (1, _, true) => split_block::<1, 2, true>(a, b, x.stride, tile_bytes, &mut c),
                    (1, 1, _) => split_block::<1, 1, false>(a, b, x.stride, tile_bytes, &mut c),
                    (1, ..) => split_block::<1, 2, false>(a, b, x.stride, tile_bytes, &mut c),
                    (_, 1, _) => split_block::<2, 1, false>(a, b, x.stride, tile_bytes, &mut c),
                    _ => split_block::<2, 2, false>(a, b, x.stride, tile_bytes, &mut c),
                }
            }
            for (j, results) in c.iter().enumerate() {
                let (from, tile) = ((block + j / 2) * height, 2 * i + j % 2);
                if j / 2 < depth && j % 2 < width {
                    for (t, row) in (from..tokens.min(from + height)).zip(&results.0) {
                        out[(t * count + tile) * TILE_ROWS..][..TILE_ROWS].copy_from_slice(row);
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { release() };
}

/// `D` blocks of tokens times `W` tiles of weights: `c[2 d + w]`. `FETCH`: few tokens, so that all depends on when weights arrive.
///
/// # Safety
/// AMX, configured; `a` and `b` point to as much as there is of a row and a tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split_block<const D: usize, const W: usize, const FETCH: bool>(
    a: [*const f32; 2],
    b: [*const u8; 2],
    stride: usize,
    tile_bytes: usize,
    c: &mut [Results<f32>; 4],
) {
    const ROW: usize = SPLIT_WORDS * 4;
    // SAFETY: as promised by the caller; `c` are whole tiles.
    unsafe {
        (zero!(0), zero!(1), zero!(2), zero!(3));
        for block in 0..tile_bytes / 1024 {
            let [high0, high1] = a.map(|a| a.wrapping_add(block * stride * SPLIT_WORDS));
            let [low0, low1] = [high0, high1].map(|high| high.wrapping_add(SPLIT_WORDS / 2));
            let [b0, b1] = b.map(|b| b.wrapping_add(block * 1024));
            if FETCH {
                prefetch(b0, 16);
                if W == 2 {
                    prefetch(b1, 16);
                }
            }
            load!(4, b0, 64usize);
            if W == 2 {
                load!(5, b1, 64usize);
            }
            load!(6, high0, ROW);
            multiply!("tdpbf16ps", 0, 6, 4);
            if W == 2 {
                multiply!("tdpbf16ps", 1, 6, 5);
            }
            load!(7, low0, ROW);
            multiply!("tdpbf16ps", 0, 7, 4);
            if W == 2 {
                multiply!("tdpbf16ps", 1, 7, 5);
            }
            if D == 2 {
                load!(6, high1, ROW);
                multiply!("tdpbf16ps", 2, 6, 4);
                if W == 2 {
                    multiply!("tdpbf16ps", 3, 6, 5);
                }
                load!(7, low1, ROW);
                multiply!("tdpbf16ps", 2, 7, 4);
                if W == 2 {
                    multiply!("tdpbf16ps", 3, 7, 5);
                }
            }
        }
        store!(0, &raw mut c[0], 64usize);
        if W == 2 {
            store!(1, &raw mut c[1], 64usize);
        }
        if D == 2 {
            store!(2, &raw mut c[2], 64usize);
            if W == 2 {
                store!(3, &raw mut c[3], 64usize);
            }
        }
    }
}

/// The codes of one group of a tile as signed bytes: 16 rows of 4 inputs to a line.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Group([[u8; 64]; 32]);

/// Integer tiles times quantized activations.
///
/// # Safety
/// AMX and AVX-512; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn packed_tiles<const INT4: bool>(layout: &MatrixLayout, tiles: &[u8], x: &ActivationRows<'_>, out: &mut [f32], count: usize) {
    let (tokens, tile_bytes, scale_bytes) = (x.len(), layout.tile_bytes(), layout.scale_bytes());
    let (blocks, height) = cut(tokens);
    // SAFETY: the features are there; tiles are released below.
    unsafe { configure(height, x.group.min(CODES)) };
    out.fill(0.0);
    let mut unpacked = [Group([[0; 64]; 32]); 2];
    // Two sets, so that one can be stored while the other is read.
    let mut c = [[Results([[0i32; TILE_ROWS]; TILE_ROWS]); 2]; 2];
    let group_bytes = x.group * TILE_ROWS / if INT4 { 2 } else { 1 };
    for (i, pair) in tiles.chunks(2 * tile_bytes).enumerate() {
        let width = pair.len() / tile_bytes;
        for g in 0..x.k / x.group {
            let mut w_scales = [_mm512_setzero_ps(); 2];
            for (w, tile) in pair.chunks_exact(tile_bytes).enumerate() {
                let codes = &tile[scale_bytes + g * group_bytes..][..group_bytes];
                // SAFETY: a group has 16 scales of 2 bytes at the beginning of the tile, and codes for 4 inputs to a line.
                unsafe {
                    unpack::<INT4>(codes, &mut unpacked[w], tokens <= TILE_ROWS);
                    w_scales[w] = widen16(tile[g * 2 * TILE_ROWS..][..2 * TILE_ROWS].as_ptr());
                }
            }
            for block in 0..blocks {
                let first = block * height;
                let c = &mut c[block % 2];
                // SAFETY: `height` rows from the first can be read; the group lies inside the blocks of codes.
                unsafe {
                    let a = x.codes(first).add(g * x.group / CODES * x.stride * CODES + g * x.group % CODES);
                    if width == 2 { dot_block::<2>(a, x.stride, x.group, &unpacked, c) } else { dot_block::<1>(a, x.stride, x.group, &unpacked, c) }
                }
                for t in first..tokens.min(first + height) {
                    let x_scale = _mm512_set1_ps(x.scales(t)[g]);
                    for w in 0..width {
                        let sums = out[(t * count + 2 * i + w) * TILE_ROWS..][..TILE_ROWS].as_mut_ptr();
                        // SAFETY: 16 numbers each.
                        unsafe {
                            let dot = _mm512_cvtepi32_ps(_mm512_load_si512(c[w].0[t - first].as_ptr().cast()));
                            let scale = _mm512_mul_ps(w_scales[w], x_scale);
                            _mm512_storeu_ps(sums, _mm512_fmadd_ps(dot, scale, _mm512_loadu_ps(sums)));
                        }
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { release() };
}

/// # Safety
/// AVX-512; `codes` are whole lines of a group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unpack<const INT4: bool>(codes: &[u8], to: &mut Group, fetch: bool) {
    if fetch {
        prefetch(codes.as_ptr(), codes.len() / 64);
    }
    let (nibble, eight, flip) = (_mm512_set1_epi8(15), _mm512_set1_epi8(8), _mm512_set1_epi8(-128));
    for (i, line) in codes.as_chunks::<64>().0.iter().enumerate() {
        // SAFETY: lines of 64 bytes; a group has at most 128 inputs, 32 lines.
        unsafe {
            let w = _mm512_loadu_si512(line.as_ptr().cast());
            if INT4 {
                let low = _mm512_sub_epi8(_mm512_and_si512(w, nibble), eight);
                let high = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), nibble), eight);
                _mm512_store_si512(to.0[2 * i].as_mut_ptr().cast(), low);
                _mm512_store_si512(to.0[2 * i + 1].as_mut_ptr().cast(), high);
            } else {
                _mm512_store_si512(to.0[i].as_mut_ptr().cast(), _mm512_xor_si512(w, flip));
            }
        }
    }
}

/// A block of tokens times one group of `W` tiles.
///
/// # Safety
/// AMX, configured; `a` points to the group's codes of the first token.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn dot_block<const W: usize>(a: *const i8, stride: usize, group: usize, b: &[Group; 2], c: &mut [Results<i32>; 2]) {
    // SAFETY: as promised by the caller; `c` are whole tiles.
    unsafe {
        (zero!(0), zero!(1));
        for part in 0..group.div_ceil(CODES) {
            load!(6, a.wrapping_add(part * stride * CODES), CODES);
            load!(4, &raw const b[0].0[16 * part], 64usize);
            multiply!("tdpbssd", 0, 6, 4);
            if W == 2 {
                load!(5, &raw const b[1].0[16 * part], 64usize);
                multiply!("tdpbssd", 1, 6, 5);
            }
        }
        store!(0, &raw mut c[0], 64usize);
        if W == 2 {
            store!(1, &raw mut c[1], 64usize);
        }
    }
}
