//! AMX: 16 rows of weights times 16 rows of activations in one instruction.
//!
//! ```text
//! A  activations  [16 tokens][64 bytes]      as `Activations` lie
//! B  weights      [16 lines][16 rows x 4 B]  BF16 as they lie; integers as signed bytes, unpacked once for all tokens
//! C  results      [16 tokens][16 rows]       i32 of one group, or f32
//! ```
//!
//! `tdpbssd` is exact; `tdpbf16ps` has the order of sums that `Kernel::matmul` defines. Inline assembly, because the
//! intrinsics are not stable. Tiles are released after every call, so that a thread that sleeps has no tiles to save.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;

use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::activations::CODES;
use super::avx512::{self, e4m3, float_scales16, lookup, runs, scales16};
use super::avx512_grids::{are_places, by_place, grid_runs, looks_up, unpack_places};
use super::shared::{self, PREFETCH_TOKENS};
use super::tiles::{INTEGER_ROWS, Scales, Stream, bias, by_row, even_bits, is_grid, is_table, row, step, table};
use super::unpacked::{INPUTS, Unpacked};
use super::{ActivationRows, Kernel, Rows, Simd, Start, Tiles, check_dot};

/// 32 inputs: their high parts as bf16, then their low parts.
const SPLIT_WORDS: usize = 32;

/// Tokens from which on unpacking weights to bytes pays against VNNI, which needs no bytes: later, the smaller the
/// groups. VNNI takes 12 of the first three rows at a time, 6 of others.
fn least_tokens(row: usize, group: usize) -> usize {
    match group {
        32 if row < 3 => 10,
        32 => 7,
        _ => 6,
    }
}

/// Exists only where [`detect`] found the features: that is what every call below relies on.
struct Amx;

/// AVX-512 with tiles of INT8 and BF16, where the system lets this process use them; asks for that on the first call.
pub(super) fn detect() -> Option<&'static dyn Kernel> {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    let is_here = *GRANTED.get_or_init(|| {
        let features = __cpuid_count(7, 0).edx;
        let has = |bit: u32| features >> bit & 1 == 1;
        avx512::is_here() && has(22) && has(24) && has(25) && granted()
    });
    is_here.then_some(&Amx as &dyn Kernel)
}

impl Kernel for Amx {
    fn simd(&self) -> Simd {
        Simd::Amx
    }

    fn split_words(&self) -> usize {
        SPLIT_WORDS
    }

    fn split(&self, x: &[f32], out: &mut [f32]) {
        // SAFETY: the features were detected.
        unsafe { split(x, out) }
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
        unsafe {
            match layout.precision.row_number() {
                None => split_tiles(layout, tiles, x, start, out, count),
                Some(INTEGER_ROWS..) => float_tiles(layout, tiles, x, start, out, count),
                Some(row) if x.len() < least_tokens(row, x.group) => {
                    avx512::each_tile(layout, tiles, x, start, out, count)
                }
                Some(row) => by_row!(row, packed_tiles[](layout, tiles, x, start, out, count)),
            }
        }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { avx512::dot(w, x, out) }
    }

    shared::elementwise!("avx512f,avx512bw,avx512vl,avx2,fma");
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

/// Tiles 0 to `results - 1` hold results, up to 5 weights, 6 and 7 `tokens` rows of activations, `bytes` long each.
///
/// # Safety
/// AMX; `release` follows.
unsafe fn configure(results: usize, tokens: usize, bytes: usize) {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut set = |tile: usize, rows: usize, bytes: usize| {
        (config.rows[tile], config.row_bytes[tile]) = (rows as u8, bytes as u16)
    };
    (0..results).for_each(|tile| set(tile, tokens, 64));
    (results..6).for_each(|tile| set(tile, bytes / 4, 64));
    (6..8).for_each(|tile| set(tile, tokens, bytes));
    // SAFETY: the operand is 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly)) };
}

/// # Safety
/// AMX.
unsafe fn release() {
    // SAFETY: this thread no longer uses the tiles.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

macro_rules! zero {
    ($tile:literal) => {
        asm!(concat!("tilezero tmm", $tile), options(nostack, preserves_flags, nomem))
    };
}
macro_rules! load {
    ($tile:literal, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd tmm", $tile, ", [{p} + {s}]"),
            p = in(reg) $from,
            s = in(reg) $stride,
            options(nostack, preserves_flags, readonly)
        )
    };
}
macro_rules! store {
    ($tile:literal, $to:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{p} + {s}], tmm", $tile),
            p = in(reg) $to,
            s = in(reg) $stride,
            options(nostack, preserves_flags)
        )
    };
}
macro_rules! multiply {
    ($instruction:literal, $c:literal, $a:literal, $b:literal) => {
        asm!(concat!($instruction, " tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, preserves_flags, nomem))
    };
}

/// [`Kernel::split`]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn split(x: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), x.len().div_ceil(BF16_INPUTS) * SPLIT_WORDS);
    for (x, out) in x.chunks(BF16_INPUTS).zip(out.as_chunks_mut::<SPLIT_WORDS>().0) {
        let parts = shared::split_block(x);
        for (word, pair) in out.iter_mut().zip(parts.as_chunks::<2>().0) {
            *word = f32::from_bits(pair[0].to_bits() >> 16 | pair[1].to_bits() & 0xffff_0000);
        }
    }
}

/// How many blocks of how many tokens; the last block may read more than there are, and what it has of them is
/// forgotten.
fn cut(tokens: usize) -> (usize, usize) {
    let blocks = tokens.div_ceil(TILE_ROWS);
    (blocks, tokens.div_ceil(blocks))
}

/// One tile of results.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Results<T>([[T; TILE_ROWS]; TILE_ROWS]);

/// Where some tiles of results are, and what is read meanwhile.
#[derive(Clone, Copy)]
struct Sums {
    start: Start,
    at: [*mut f32; 4], // by one block of tokens `[w]`, by two `[2 d + w]`
    stride: usize,     // bytes from one token to the next
    stream: Stream,
}

/// A tile of results begins with what is in memory, or with nothing.
macro_rules! begin {
    ($tile:literal, $sums:expr) => {
        match $sums.start {
            Start::Zero => zero!($tile),
            Start::Out => load!($tile, $sums.at[$tile], $sums.stride),
        }
    };
}

/// BF16 tiles times split activations.
///
/// # Safety
/// AMX and AVX-512; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split_tiles(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    start: Start,
    out: &mut [f32],
    count: usize,
) {
    let (tokens, tile_bytes) = (x.len(), layout.tile_bytes());
    let (blocks, height) = cut(tokens);
    let stream = tiles.stream(layout, tokens);
    // SAFETY: the features are there; tiles are released below.
    unsafe { configure(if blocks == 1 { 3 } else { 4 }, height, 64) };
    // Blocks that are all full go to their places directly; otherwise the last one has rows of no token, which must not
    // get there.
    let full = blocks * height == tokens;
    let mut c = [Results([[0.0f32; TILE_ROWS]; TILE_ROWS]); 4];
    // One block of tokens by three tiles of weights, or two by two: what keeps six or eight products in flight.
    let most = if blocks == 1 { 3 } else { 2 };
    for (i, some) in tiles.bytes.chunks(most * tile_bytes).enumerate() {
        let width = some.len() / tile_bytes;
        // Not `map`: a library function has no target features to be inlined with.
        let at = |w: usize| some[w.min(width - 1) * tile_bytes..].as_ptr();
        let b = [at(0), at(1), at(2)];
        for block in (0..blocks).step_by(2) {
            let depth = (blocks - block).min(2);
            let a = [x.parts(block * height), x.parts((block + depth - 1) * height)];
            let mut sums = Sums { start, at: [std::ptr::null_mut(); 4], stride: 64, stream };
            for tile in 0..4 {
                let (d, w) = if blocks == 1 {
                    (0, tile.min(width - 1))
                } else {
                    ((tile / 2).min(depth - 1), (tile % 2).min(width - 1))
                };
                let from = (block + d) * height;
                sums.at[tile] = if full {
                    sums.stride = count * TILE_ROWS * 4;
                    out[(from * count + most * i + w) * TILE_ROWS..].as_mut_ptr()
                } else {
                    if start == Start::Out {
                        for (t, row) in (from..tokens.min(from + height)).zip(&mut c[tile].0) {
                            *row = out.as_chunks::<TILE_ROWS>().0[t * count + most * i + w];
                        }
                    }
                    c[tile].0.as_mut_ptr().cast()
                };
            }
            // SAFETY: there are as many tiles and blocks as the instance reads, and `height` rows from each first can
            // be read; so many rows of results are in `c`, or, from a full block's first on, in `out`.
            unsafe {
                match (blocks, width) {
                    (1, 1) => one_block::<1>(a[0], b, x.stride, tile_bytes, height, &sums),
                    (1, 2) => one_block::<2>(a[0], b, x.stride, tile_bytes, height, &sums),
                    (1, _) => one_block::<3>(a[0], b, x.stride, tile_bytes, height, &sums),
                    // A last block that is alone is read and written twice.
                    (_, 1) => two_blocks::<1>(a, b, x.stride, tile_bytes, &sums),
                    _ => two_blocks::<2>(a, b, x.stride, tile_bytes, &sums),
                }
            }
            if full {
                continue;
            }
            for d in 0..depth {
                let from = (block + d) * height;
                for w in 0..width {
                    for (t, row) in (from..tokens.min(from + height)).zip(&c[2 * d + w].0) {
                        out.as_chunks_mut::<TILE_ROWS>().0[t * count + most * i + w] = *row;
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { release() };
}

/// Bytes of a row's parts of 32 inputs.
const SPLIT_BYTES: usize = SPLIT_WORDS * 4;

/// One block of tokens times up to three tiles of weights.
///
/// # Safety
/// AMX, configured; `a` and `b` point to as much as there is of a row and a tile, `sums` to a block's results of `W`
/// tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn one_block<const W: usize>(
    a: *const f32,
    b: [*const u8; 3],
    stride: usize,
    tile_bytes: usize,
    height: usize,
    sums: &Sums,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        begin!(0, sums);
        if W > 1 {
            begin!(1, sums);
        }
        if W > 2 {
            begin!(2, sums);
        }
        for block in 0..tile_bytes / 1024 {
            let high = a.wrapping_add(block * stride * SPLIT_WORDS);
            let low = high.wrapping_add(SPLIT_WORDS / 2);
            let b = [b[0].wrapping_add(block * 1024), b[1].wrapping_add(block * 1024), b[2].wrapping_add(block * 1024)];
            if height <= PREFETCH_TOKENS {
                for w in 0..W {
                    sums.stream.from(b[w]).prefetch(b[w], 16);
                }
            }
            load!(6, high, SPLIT_BYTES);
            load!(3, b[0], 64usize);
            multiply!("tdpbf16ps", 0, 6, 3);
            if W > 1 {
                load!(4, b[1], 64usize);
                multiply!("tdpbf16ps", 1, 6, 4);
            }
            if W > 2 {
                load!(5, b[2], 64usize);
                multiply!("tdpbf16ps", 2, 6, 5);
            }
            load!(7, low, SPLIT_BYTES);
            multiply!("tdpbf16ps", 0, 7, 3);
            if W > 1 {
                multiply!("tdpbf16ps", 1, 7, 4);
            }
            if W > 2 {
                multiply!("tdpbf16ps", 2, 7, 5);
            }
        }
        store!(0, sums.at[0], sums.stride);
        if W > 1 {
            store!(1, sums.at[1], sums.stride);
        }
        if W > 2 {
            store!(2, sums.at[2], sums.stride);
        }
    }
}

/// Two blocks of tokens times up to two tiles of weights.
///
/// # Safety
/// As [`one_block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn two_blocks<const W: usize>(
    a: [*const f32; 2],
    b: [*const u8; 3],
    stride: usize,
    tile_bytes: usize,
    sums: &Sums,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        (begin!(0, sums), begin!(2, sums));
        if W > 1 {
            (begin!(1, sums), begin!(3, sums));
        }
        for block in 0..tile_bytes / 1024 {
            load!(4, b[0].wrapping_add(block * 1024), 64usize);
            if W > 1 {
                load!(5, b[1].wrapping_add(block * 1024), 64usize);
            }
            // A product waits for the one before of the same sum: all high parts come first, then the low ones.
            for part in 0..2 {
                let at = block * stride * SPLIT_WORDS + part * SPLIT_WORDS / 2;
                load!(6, a[0].wrapping_add(at), SPLIT_BYTES);
                load!(7, a[1].wrapping_add(at), SPLIT_BYTES);
                multiply!("tdpbf16ps", 0, 6, 4);
                multiply!("tdpbf16ps", 2, 7, 4);
                if W > 1 {
                    multiply!("tdpbf16ps", 1, 6, 5);
                    multiply!("tdpbf16ps", 3, 7, 5);
                }
            }
        }
        (store!(0, sums.at[0], sums.stride), store!(2, sums.at[2], sums.stride));
        if W > 1 {
            (store!(1, sums.at[1], sums.stride), store!(3, sums.at[3], sums.stride));
        }
    }
}

/// Tiles of codes times quantized activations: for some inputs at a time all tiles, for each tile all tokens.
///
/// # Safety
/// AMX and AVX-512; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn packed_tiles<const ROW: usize>(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    start: Start,
    out: &mut [f32],
    count: usize,
) {
    let (tile_bytes, scale_bytes) = (layout.tile_bytes(), layout.scale_bytes());
    let (tiles, after) = (tiles.bytes, tiles.next());
    let (blocks, height) = cut(x.len());
    // SAFETY: the features are there; tiles are released below.
    unsafe { configure(4, height, x.group.min(CODES)) };
    let mut unpacked = MaybeUninit::<Unpacked>::uninit();
    // SAFETY: all that is in it may be uninitialized.
    let unpacked = unsafe { unpacked.assume_init_mut() };
    let stride = count * TILE_ROWS;
    // With the tokens' codes for them they stay in L1.
    let chunk = if x.len() > 24 { INPUTS / 2 } else { INPUTS };
    for from in (0..x.k).step_by(chunk) {
        let to = x.k.min(from + chunk);
        let bytes = |inputs: usize| row(ROW).codes.bytes(inputs);
        for i in 0..count {
            let (scales, codes) = Scales::split(layout, &tiles[i * tile_bytes..][..tile_bytes]);
            let codes = &codes[bytes(from)..bytes(to)];
            // While a part is worked on, the one after it comes into L2: the next tile's, the first one's next, or what
            // is read after all.
            let next = match () {
                _ if i + 1 < count => codes.as_ptr().wrapping_add(tile_bytes),
                _ if to < x.k => tiles[scale_bytes..].as_ptr().wrapping_add(bytes(to)),
                _ => after,
            };
            let part = Part {
                next,
                group_bytes: bytes(x.group),
                onto: from > 0 || start == Start::Out,
                groups: from / x.group..to / x.group,
                stride,
            };
            // SAFETY: whole lines of the tile and their scales, as many as there is room for; `height` rows from each
            // block's first can be read.
            unsafe {
                unpack::<ROW>(codes, &mut unpacked.codes[..(to - from) / 4]);
                unpack_scales::<ROW>(scales, part.groups.clone(), unpacked);
                for block in 0..blocks {
                    let first = block * height;
                    let rows = height.min(x.len() - first);
                    let out = &mut out[first * stride + i * TILE_ROWS..];
                    match (row(ROW).scales.have_offsets(), rows.div_ceil(4)) {
                        (false, 1) => sum_groups::<false, 4>(unpacked, &part, x, first, rows, out),
                        (false, 2) => sum_groups::<false, 8>(unpacked, &part, x, first, rows, out),
                        (false, 3) => sum_groups::<false, 12>(unpacked, &part, x, first, rows, out),
                        (false, _) => sum_groups::<false, 16>(unpacked, &part, x, first, rows, out),
                        (true, 1) => sum_groups::<true, 4>(unpacked, &part, x, first, rows, out),
                        (true, 2) => sum_groups::<true, 8>(unpacked, &part, x, first, rows, out),
                        (true, 3) => sum_groups::<true, 12>(unpacked, &part, x, first, rows, out),
                        (true, _) => sum_groups::<true, 16>(unpacked, &part, x, first, rows, out),
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { release() };
}

/// Some groups of one tile.
struct Part {
    next: *const u8,    // the codes that are wanted after these
    group_bytes: usize, // of the codes
    onto: bool,         // the results so far are in the output
    groups: Range<usize>,
    stride: usize, // of the results
}

/// Integers of four bits that are stored with 8 added become sixteen times themselves, the upper half of a byte, which
/// takes an instruction less: the scale takes it back.
const fn is_times_16(number: usize) -> bool {
    row(number).codes.bits() == 4 && !is_table(number) && bias(number) == 8 // of a grid none is 8
}

/// # Safety
/// AVX-512; `codes` are those of 4 inputs to each line of `to`, whole blocks, of a grid whole super-blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unpack<const ROW: usize>(codes: &[u8], to: &mut [MaybeUninit<[u8; 64]>]) {
    if are_places(ROW) && looks_up() {
        // SAFETY: as promised to this function; the features were detected.
        return unsafe { unpack_by_registers(ROW, codes, to) };
    }
    let (upper, flip) = (_mm512_set1_epi8(-16), _mm512_set1_epi8(-128));
    let values = lookup(const { table(row(ROW).codes, 0) });
    let mut lines = codes.as_ptr();
    for (i, to) in to.chunks_exact_mut(4).enumerate() {
        // SAFETY: the lines of 16 inputs, and of 4 inputs to each of four.
        unsafe {
            let mut w;
            if is_times_16(ROW) {
                let (a, b) = (_mm512_loadu_si512(lines.cast()), _mm512_loadu_si512(lines.add(64).cast()));
                // (w & upper) ^ flip: 16 (code + 8) as an unsigned byte is 16 code as a signed one with its highest bit
                // flipped.
                w = [
                    _mm512_ternarylogic_epi32(_mm512_slli_epi16(a, 4), upper, flip, 0x6a),
                    _mm512_ternarylogic_epi32(a, upper, flip, 0x6a),
                    _mm512_ternarylogic_epi32(_mm512_slli_epi16(b, 4), upper, flip, 0x6a),
                    _mm512_ternarylogic_epi32(b, upper, flip, 0x6a),
                ];
            } else if is_grid(ROW) {
                w = grid_runs::<ROW>(codes.as_ptr(), 16 * i, values);
            } else {
                w = runs::<ROW>(lines, i % 2, values);
                for j in 0..4 {
                    if even_bits(ROW) == 8 {
                        w[j] = _mm512_xor_si512(w[j], flip);
                    } else if !is_table(ROW) && bias(ROW) != 0 {
                        w[j] = _mm512_sub_epi8(w[j], _mm512_set1_epi8(bias(ROW) as i8));
                    }
                }
            }
            for j in 0..4 {
                _mm512_storeu_si512(to[j].as_mut_ptr().cast(), w[j]);
            }
        }
        lines = lines.wrapping_add(step(ROW, i % 2));
    }
}

/// The rows of grids whose codes are looked up in registers.
///
/// # Safety
/// As of [`unpack`], VBMI and GFNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
unsafe fn unpack_by_registers(row: usize, codes: &[u8], to: &mut [MaybeUninit<[u8; 64]>]) {
    // SAFETY: as promised to this function.
    unsafe { by_place!(row, unpack_places(codes, to, true)) }
}

/// # Safety
/// AVX-512; the scales of the groups, as many as there is room for.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unpack_scales<const ROW: usize>(scales: Scales<'_>, groups: Range<usize>, to: &mut Unpacked) {
    let unit = _mm512_set1_ps(if is_times_16(ROW) { 1.0 / 16.0 } else { 1.0 });
    for (i, group) in groups.enumerate() {
        // SAFETY: as promised by the caller; 16 numbers each.
        unsafe {
            let [scale, offset] = scales16::<ROW>(scales, group);
            _mm512_store_ps(to.scales[i].as_mut_ptr().cast(), _mm512_mul_ps(scale, unit));
            if row(ROW).scales.have_offsets() {
                _mm512_store_ps(to.offsets[i].as_mut_ptr().cast(), offset);
            }
        }
    }
}

/// Adds some groups of a tile to the results of a block of tokens, up to `R` of them in registers.
///
/// The dots of a group are on their way through the matrix unit while those of the group before are scaled and added.
///
/// # Safety
/// AMX, configured, and AVX-512; what belongs to the groups is unpacked; the block's tokens can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn sum_groups<const OFFSETS: bool, const R: usize>(
    unpacked: &Unpacked,
    part: &Part,
    x: &ActivationRows<'_>,
    first: usize,
    rows: usize,
    out: &mut [f32],
) {
    let Part { next, group_bytes, onto, ref groups, stride } = *part;
    let mut dots = Results([[0i32; TILE_ROWS]; TILE_ROWS]); // rows past the last token stay as they are
    let mut totals = Totals([0.0; TILE_ROWS]);
    let mut acc = [_mm512_setzero_ps(); R];
    if onto {
        for t in 0..R.min(rows) {
            // SAFETY: 16 numbers.
            acc[t] = unsafe { _mm512_loadu_ps(out[t * stride..][..TILE_ROWS].as_ptr()) };
        }
    }
    let (a, lines) = (x.codes(first), x.group / 4);
    for (i, g) in (groups.start..=groups.end).enumerate() {
        // SAFETY: as promised by the caller; `dots` is a whole tile; the scales and sums of 15 tokens after any can be
        // read.
        unsafe {
            if g < groups.end {
                let a = a.wrapping_add(g * x.group / CODES * x.stride * CODES + g * x.group % CODES);
                let b = unpacked.codes.as_ptr().wrapping_add(i * lines);
                zero!(0);
                load!(4, b, 64usize);
                load!(6, a, CODES);
                multiply!("tdpbssd", 0, 6, 4);
                if x.group > CODES {
                    load!(5, b.wrapping_add(16), 64usize);
                    load!(7, a.wrapping_add(x.stride * CODES), CODES);
                    multiply!("tdpbssd", 0, 7, 5);
                }
            }
            if first == 0 && g < groups.end {
                for line in i * group_bytes / 64..(i + 1) * group_bytes / 64 {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(64 * line).cast());
                }
            }
            if i > 0 {
                let (x_scales, x_sums) = (x.scales(g - 1, first), x.sums(g - 1, first));
                let w_scale = _mm512_load_ps(unpacked.scales.as_ptr().add(i - 1).cast());
                if OFFSETS {
                    let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(x_sums.cast()));
                    _mm512_store_ps(totals.0.as_mut_ptr(), _mm512_mul_ps(sums, _mm512_loadu_ps(x_scales)));
                }
                for t in 0..R {
                    let dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots.0[t].as_ptr().cast()));
                    acc[t] = _mm512_fmadd_ps(dot, _mm512_mul_ps(w_scale, _mm512_set1_ps(*x_scales.add(t))), acc[t]);
                    if OFFSETS {
                        let w_offset = _mm512_load_ps(unpacked.offsets.as_ptr().add(i - 1).cast());
                        acc[t] = _mm512_fmadd_ps(w_offset, _mm512_set1_ps(totals.0[t]), acc[t]);
                    }
                }
            }
            if g < groups.end {
                store!(0, dots.0.as_mut_ptr(), 64usize);
            }
        }
    }
    for t in 0..R.min(rows) {
        // SAFETY: 16 numbers.
        unsafe { _mm512_storeu_ps(out[t * stride..][..TILE_ROWS].as_mut_ptr(), acc[t]) };
    }
}

/// What a group's inputs of 16 tokens add up to.
#[repr(C, align(64))]
struct Totals([f32; TILE_ROWS]);

/// Inputs of a tile of FP8 that are unpacked at a time: 16 KiB, which stay in L1.
const UNPACKED_FLOATS: usize = 512;

/// Weights of a tile as bf16, 16 rows of 2 inputs to a line.
#[repr(C, align(64))]
struct Floats([MaybeUninit<[u8; 64]>; UNPACKED_FLOATS / 2]);

/// Tiles of FP8 times split activations: for some inputs at a time all tiles, for each tile all tokens.
///
/// # Safety
/// AMX and AVX-512; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn float_tiles(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    start: Start,
    out: &mut [f32],
    count: usize,
) {
    let (tile_bytes, stride) = (layout.tile_bytes(), count * TILE_ROWS);
    let (blocks, height) = cut(x.len());
    // SAFETY: the features are there; tiles are released below.
    unsafe { configure(4, height, 64) };
    let stream = tiles.stream(layout, x.len());
    let mut unpacked = Floats([MaybeUninit::uninit(); UNPACKED_FLOATS / 2]);
    for from in (0..x.k).step_by(UNPACKED_FLOATS) {
        let to = x.k.min(from + UNPACKED_FLOATS);
        for (i, tile) in tiles.bytes.chunks_exact(tile_bytes).enumerate() {
            let (scales, lines) = Scales::split(layout, tile);
            let (groups, onto) = (from / scales.group..to / scales.group, from > 0 || start == Start::Out);
            // SAFETY: whole lines of the tile, as many as there is room for; `height` rows from each block's first can
            // be read.
            unsafe {
                let lines = &lines[from * TILE_ROWS..to * TILE_ROWS];
                if x.len() <= PREFETCH_TOKENS {
                    for lines in lines.as_chunks::<1024>().0 {
                        stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), 16);
                    }
                }
                unpack_floats(lines, &mut unpacked);
                for block in 0..blocks {
                    let first = block * height;
                    let rows = height.min(x.len() - first);
                    let out = &mut out[first * stride + i * TILE_ROWS..];
                    let part = Part { next: std::ptr::null(), group_bytes: 0, onto, groups: groups.clone(), stride };
                    match rows.div_ceil(4) {
                        1 => sum_float_groups::<4>(&unpacked, scales, &part, x, first, rows, out),
                        2 => sum_float_groups::<8>(&unpacked, scales, &part, x, first, rows, out),
                        3 => sum_float_groups::<12>(&unpacked, scales, &part, x, first, rows, out),
                        _ => sum_float_groups::<16>(&unpacked, scales, &part, x, first, rows, out),
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { release() };
}

/// # Safety
/// AVX-512; `lines` are whole, and there is room for them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn unpack_floats(lines: &[u8], to: &mut Floats) {
    for (line, to) in lines.as_chunks::<64>().0.iter().zip(to.0.as_chunks_mut::<2>().0) {
        // Of f32 numbers that are bf16 the upper halves, two inputs to a dword.
        let pair = |even: __m512, odd: __m512| {
            let even = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
            _mm512_or_si512(even, _mm512_castps_si512(odd)) // whose lower half is zero
        };
        // SAFETY: a line, and two.
        unsafe {
            let w = _mm512_loadu_si512(line.as_ptr().cast());
            _mm512_store_si512(to[0].as_mut_ptr().cast(), pair(e4m3::<0>(w), e4m3::<1>(w)));
            _mm512_store_si512(to[1].as_mut_ptr().cast(), pair(e4m3::<2>(w), e4m3::<3>(w)));
        }
    }
}

/// As [`sum_groups`], of floats.
///
/// # Safety
/// AMX, configured, and AVX-512; a tile's scales; the block's tokens can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn sum_float_groups<const R: usize>(
    floats: &Floats,
    scales: Scales<'_>,
    part: &Part,
    x: &ActivationRows<'_>,
    first: usize,
    rows: usize,
    out: &mut [f32],
) {
    let Part { onto, ref groups, stride, .. } = *part;
    let blocks = scales.group / BF16_INPUTS;
    let mut sums = Results([[0.0f32; TILE_ROWS]; TILE_ROWS]); // as `dots` there
    let mut acc = [_mm512_setzero_ps(); R];
    if onto {
        for t in 0..R.min(rows) {
            // SAFETY: 16 numbers.
            acc[t] = unsafe { _mm512_loadu_ps(out[t * stride..][..TILE_ROWS].as_ptr()) };
        }
    }
    for g in groups.start..=groups.end {
        // SAFETY: as promised by the caller; `sums` is a whole tile.
        unsafe {
            if g < groups.end {
                zero!(0);
                for block in g * blocks..(g + 1) * blocks {
                    let high = x.parts(first).wrapping_add(block * x.stride * SPLIT_WORDS);
                    let b = floats.0.as_ptr().wrapping_add((block - groups.start * blocks) * BF16_INPUTS / 2);
                    load!(4, b, 64usize);
                    load!(6, high, SPLIT_BYTES);
                    multiply!("tdpbf16ps", 0, 6, 4);
                    load!(7, high.wrapping_add(SPLIT_WORDS / 2), SPLIT_BYTES);
                    multiply!("tdpbf16ps", 0, 7, 4);
                }
            }
            if g > groups.start {
                let scale = float_scales16(scales, g - 1);
                for t in 0..R {
                    let sum = _mm512_load_ps(sums.0[t].as_ptr());
                    acc[t] = _mm512_fmadd_ps(sum, scale, acc[t]);
                }
            }
            if g < groups.end {
                store!(0, sums.0.as_mut_ptr(), 64usize);
            }
        }
    }
    for t in 0..R.min(rows) {
        // SAFETY: 16 numbers.
        unsafe { _mm512_storeu_ps(out[t * stride..][..TILE_ROWS].as_mut_ptr(), acc[t]) };
    }
}
