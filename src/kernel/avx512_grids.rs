//! Codes that are places in a grid, for AVX-512: looked up in registers where there are VBMI and GFNI, gathered from
//! memory elsewhere.
//!
//! In registers the 64 places of a line, four of each of 16 rows, are looked up at once, in the order in which they
//! lie; activations are brought into that order, or, for AMX and many tokens, codes into theirs. A place stands for few
//! levels, which it takes little to look up, and a second table makes codes of levels and signs:
//!
//! ```text
//! plane   [places of the grid] bytes   of a run of four: two levels of 3 bits, in bits 0 to 2 and 5 to 7; two planes
//!                                      of a run of eight: four levels of 2 bits; two planes
//! signs   [64] bytes                   beside two levels in bits 3 and 4, beside four in bits 4 to 7
//! codes   [64] bytes                   what a level and a sign stand for, of each of two weights
//! ```
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use moebius_cache::pack::{self, Counts, Grid, SUPER_BLOCK};

use super::ActivationRows;
use super::activations::CODES;
use super::shared::PREFETCH_TOKENS;
use super::tiles::{INTEGER_ROWS, Scales, Stream, bias, grid, grid_at, is_grid, row};

/// Inputs whose words lie together.
const BLOCK: usize = 32;
/// Blocks of a super-block.
const BLOCKS: usize = SUPER_BLOCK / BLOCK;

/// Whether a row's codes can be looked up in registers: their places are no digits.
pub(super) const fn are_places(number: usize) -> bool {
    is_grid(number) && !matches!(grid(number), Grid::Tq1_0)
}

/// `by_place!(number, function(arguments))` is `function::<ROW>(arguments)` for the row of this number, of those whose
/// codes are places.
macro_rules! by_place {
    ($number:expr, $function:ident $arguments:tt) => {
        $crate::kernel::avx512_grids::by_place!(@ $number, $function $arguments, 14 15 16 17 18 20 21)
    };
    (@ $number:expr, $function:ident $arguments:tt, $($row:literal)*) => {{
        const { assert!([$($row),*].len() == $crate::kernel::avx512_grids::ROWS_OF_PLACES, "a number for each row") };
        match $number {
            $($row => $function::<$row> $arguments,)*
            other => unreachable!("row {other} has no places"),
        }
    }};
}
pub(super) use by_place;

/// So many rows have places.
pub(super) const ROWS_OF_PLACES: usize = {
    let (mut row, mut count) = (0, 0);
    while row < INTEGER_ROWS {
        count += are_places(row) as usize;
        row += 1;
    }
    count
};

/// Whether this CPU can: AVX-512 VBMI and GFNI.
pub(super) fn looks_up() -> bool {
    is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("gfni")
}

/// The levels of each place, in two planes.
#[repr(C, align(64))]
struct Planes([[u8; 2048]; 2]);

impl Planes {
    /// Those of a grid.
    fn of(grid: Grid) -> &'static Self {
        static OF_GRIDS: [OnceLock<Planes>; 8] = [const { OnceLock::new() }; 8];
        OF_GRIDS[grid as usize].get_or_init(|| {
            let mut planes = Self([[0; 2048]; 2]);
            for (i, levels) in grid.places().into_iter().enumerate() {
                let level = |weight: usize| (levels >> (4 * weight) & 15) as u8;
                for (p, plane) in planes.0.iter_mut().enumerate() {
                    plane[i] = match grid.run() {
                        4 => level(2 * p) | level(2 * p + 1) << 5,
                        _ => (0..4).fold(0, |byte, j| byte | level(4 * p + j) << (2 * j)),
                    };
                }
            }
            planes
        })
    }
}

#[repr(C, align(64))]
struct Table([u8; 64]);

/// What bits 0 to 5 stand for, of the first and the second of two weights: unsigned codes. Of a run of four bits 0 to 2
/// are the first's level, bit 3 its sign; of the second's, four bits further down, bit 0 is its sign, bits 1 to 3 its
/// level. Of a run of eight bits 0 and 1, 2 and 3 are levels, bits 4 and 5 signs.
const fn codes(number: usize) -> [Table; 2] {
    let (grid, mut codes) = (grid(number), [Table([0; 64]), Table([0; 64])]);
    let mut i = 0;
    while i < 128 {
        let (second, bits) = (i / 64, i % 64);
        let (level, negative) = match (grid.run(), second) {
            (4, 0) => (bits & 7, bits >> 3 & 1),
            (4, _) => (bits >> 1 & 7, bits & 1),
            _ => (bits >> (2 * second) & 3, bits >> (4 + second) & 1),
        };
        let values = grid.values();
        let size = if level < values.len() { values[level] as i8 as i32 } else { 0 };
        let code = match (grid.has_ones(), negative == 1) {
            (true, false) => size + 1,
            (true, true) => size - 1,
            (false, false) => size,
            (false, true) => -size,
        };
        codes[second].0[bits] = (code + bias(number)) as u8;
        i += 1;
    }
    codes
}

/// For `vpmultishiftqb`: from which bit of its dword on each byte takes its eight, of two dwords.
const fn from_bits(offsets: [i32; 4]) -> i64 {
    let (mut bytes, mut i) = ([0; 8], 0);
    while i < 8 {
        bytes[i] = (offsets[i % 4] + 32 * (i as i32 / 4)) as u8 & 63;
        i += 1;
    }
    i64::from_le_bytes(bytes)
}

/// Where bits of a block are in its words.
struct Bits {
    /// Of each half what stands beside the levels: signs, or whether numbers are an eighth less.
    signs: [i64; 2],
    /// Of each line of places the upper bits, the highest as the highest of a byte.
    upper: [i64; 2],
}

/// Those of each block of a super-block.
const fn bits(number: usize) -> [Bits; BLOCKS] {
    let grid = grid(number);
    let mut all = [const { Bits { signs: [0; 2], upper: [0; 2] } }; BLOCKS];
    let mut i = 0;
    while i < 2 * BLOCKS {
        let (block, half) = (i / 2, i % 2);
        let (lowest, upper_bits) = (grid.upper_at(block).1 as i32, grid.upper_bits() as i32);
        let (mut signs, mut upper) = ([0; 4], [0; 4]);
        let mut byte = 0;
        while byte < 4 {
            // The run of eight weights, which four of them, and at which bit of the result they shall begin.
            let (eight, four, at) = match grid.run() {
                4 => (2 * half + byte / 2, byte as i32 % 2, 3),
                _ => (2 * half + byte % 2, byte as i32 / 2, 4),
            };
            signs[byte] = match (grid.has_ones(), grid.has_all_signs()) {
                (true, _) => lowest + grid.less_at(eight) as i32 - 7,
                (_, true) => 8 * eight as i32 + 4 * four - at,
                // All seven, for the eighth.
                _ if four == 1 => 7 * eight as i32,
                _ => 7 * eight as i32 - at,
            };
            let run = if grid.run() == 4 { 4 * half + byte } else { byte };
            upper[byte] = lowest + upper_bits * (run as i32 + 1) - 8;
            byte += 1;
        }
        all[block].signs[half] = from_bits(signs);
        all[block].upper[half] = from_bits(upper);
        i += 1;
    }
    all
}

/// For `vgf2p8affineqb`: bytes with which four signs in the order of the bits from one on, of seven bits of which they
/// are the last three and what makes the number of ones even; of IQ1 the highest bit everywhere.
const fn last_signs(number: usize) -> i64 {
    match (grid(number).has_ones(), grid(number).run()) {
        (true, _) => 0x8080_8080_8080_8080_u64 as i64,
        // Bit 7 of the result is made of the bits of the lowest byte, bit 0 of those of the highest.
        (_, 4) => 0x0000_0010_2040_7f00,
        _ => 0x0000_0000_1020_407f,
    }
}

/// Bytes of what `last_signs` is for.
const fn last_bytes(number: usize) -> u64 {
    match grid(number).run() {
        4 => 0xaaaa_aaaa_aaaa_aaaa,
        _ => 0xcccc_cccc_cccc_cccc,
    }
}

/// A super-block of some tokens, as its weights are reached.
#[repr(C, align(64))]
struct Inputs<const T: usize> {
    /// Of each 16 inputs the four of each line of codes.
    codes: [[i8; SUPER_BLOCK]; T],
    /// What codes that are unsigned count too much, of each group.
    less: [[i32; SUPER_BLOCK / 16]; T],
}

impl<const T: usize> Inputs<T> {
    /// Those of super-block `i`.
    ///
    /// # Safety
    /// AVX-512 F and BW; what `ActivationRows::check` promises of `x`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill<const ROW: usize>(&mut self, x: &ActivationRows<'_>, i: usize) {
        let order = match grid(ROW).run() {
            4 => _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
            _ => _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15),
        };
        let order = _mm512_broadcast_i32x4(order);
        let groups = SUPER_BLOCK / row(ROW).group_size;
        for t in 0..T {
            let from = x.codes(t).wrapping_add(i * SUPER_BLOCK * x.stride);
            for (j, to) in self.codes[t].as_chunks_mut::<CODES>().0.iter_mut().enumerate() {
                // SAFETY: a super-block is whole blocks of so many codes.
                unsafe {
                    let all = _mm512_loadu_si512(from.wrapping_add(j * CODES * x.stride).cast());
                    _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_shuffle_epi8(all, order));
                }
            }
            for g in 0..groups {
                self.less[t][g] = -bias(ROW) * x.sum(i * groups + g, t);
            }
        }
    }
}

/// What the places of a block are looked up to.
struct Block {
    /// Of each half: of a run of four two planes of its line, of a run of eight two halves of both planes of the only
    /// line.
    levels: [[__m512i; 2]; 2],
    signs: __m512i,
}

/// The tables of a row, in registers.
#[derive(Clone, Copy)]
struct Tables {
    planes: &'static Planes,
    codes: [__m512i; 2],
    last: __m512i,
}

impl Tables {
    /// # Safety
    /// AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn of<const ROW: usize>() -> Self {
        // SAFETY: 64 bytes of a table.
        let of_table = |table: &[u8]| unsafe { _mm512_loadu_si512(table[..64].as_ptr().cast()) };
        let codes = const { &codes(ROW) };
        let codes = [of_table(&codes[0].0), of_table(&codes[1].0)];
        Self { planes: Planes::of(grid(ROW)), codes, last: _mm512_set1_epi64(last_signs(ROW)) }
    }

    /// Looks up the places of block `block` of a super-block, whose words begin at `lines`.
    ///
    /// # Safety
    /// The super-block's words to read; AVX-512 F, BW and VBMI.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn block<const ROW: usize>(&self, lines: *const u8, block: usize) -> Block {
        let (grid, bits, at) = (grid(ROW), &const { bits(ROW) }[block], grid_at(ROW, block).0);
        // SAFETY: as promised by the caller.
        let line = |at: usize| unsafe { _mm512_loadu_si512(lines.add(at).cast()) };
        let above = line(64 * grid.upper_at(block).0);
        let signs = if grid.has_ones() { above } else { line(at + (grid.block_words() - 1) * 64) };
        let mut levels = [[_mm512_setzero_si512(); 2]; 2];
        for half in 0..2 * 4 / grid.run() {
            let places = line(at + 64 * half);
            let mut masks = [0; 3];
            let mut upper = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(bits.upper[half]), above);
            for bit in (0..grid.upper_bits()).rev() {
                masks[bit] = _mm512_movepi8_mask(upper);
                upper = _mm512_add_epi8(upper, upper);
            }
            let half_of = _mm512_movepi8_mask(places);
            for plane in 0..2 {
                // SAFETY: the planes have as many bytes as there are places.
                levels[half][plane] = unsafe { lookup::<ROW>(&self.planes.0[plane], places, half_of, masks) };
            }
        }
        if grid.run() == 8 {
            let ([a, b], low_words) = (levels[0], _mm512_set1_epi32(0xffff));
            // low_words ? first : second
            levels[0][0] = _mm512_ternarylogic_epi32(low_words, a, _mm512_slli_epi32(b, 16), 0xca);
            levels[1][0] = _mm512_ternarylogic_epi32(low_words, _mm512_srli_epi32(a, 16), b, 0xca);
        }
        Block { levels, signs }
    }

    /// The codes of a half of the block, unsigned: four lines, in the order of [`Inputs`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
    fn half<const ROW: usize>(&self, of: &Block, block: usize, half: usize) -> [__m512i; 4] {
        let (grid, bits) = (grid(ROW), &const { bits(ROW) }[block]);
        let mut beside = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(bits.signs[half]), of.signs);
        if grid.has_ones() {
            beside = _mm512_gf2p8affine_epi64_epi8(beside, self.last, 0);
        } else if !grid.has_all_signs() {
            beside = _mm512_mask_gf2p8affine_epi64_epi8(beside, last_bytes(ROW), beside, self.last, 0);
        }
        let next = if grid.has_ones() { beside } else { _mm512_srli_epi16(beside, 2) };
        let (no_signs, low_nibbles) = (_mm512_set1_epi8(!0x18), _mm512_set1_epi8(15));
        if grid.run() == 4 {
            // no_signs ? levels : signs
            let first = _mm512_ternarylogic_epi32(no_signs, of.levels[half][0], beside, 0xca);
            let second = _mm512_ternarylogic_epi32(no_signs, of.levels[half][1], next, 0xca);
            return [
                _mm512_permutexvar_epi8(first, self.codes[0]),
                _mm512_permutexvar_epi8(_mm512_srli_epi16(first, 4), self.codes[1]),
                _mm512_permutexvar_epi8(second, self.codes[0]),
                _mm512_permutexvar_epi8(_mm512_srli_epi16(second, 4), self.codes[1]),
            ];
        }
        let all = of.levels[half][0];
        let first = _mm512_ternarylogic_epi32(low_nibbles, all, beside, 0xca);
        let second = _mm512_ternarylogic_epi32(low_nibbles, _mm512_srli_epi16(all, 4), next, 0xca);
        [
            _mm512_permutexvar_epi8(first, self.codes[0]),
            _mm512_permutexvar_epi8(first, self.codes[1]),
            _mm512_permutexvar_epi8(second, self.codes[0]),
            _mm512_permutexvar_epi8(second, self.codes[1]),
        ]
    }
}

/// Writes the codes of whole super-blocks as bytes, signed or with the row's bias: 16 rows of 4 inputs to a line.
///
/// # Safety
/// AVX-512 F, BW, VL and VBMI, GFNI; `ROW` has places; `lines` are whole super-blocks, and `to` has a line for each
/// 4 of their inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
pub(super) unsafe fn unpack_places<const ROW: usize>(lines: &[u8], to: &mut [MaybeUninit<[u8; 64]>], signed: bool) {
    // SAFETY: as promised to this function.
    let tables = unsafe { Tables::of::<ROW>() };
    let bias = _mm512_set1_epi8(if signed { bias(ROW) as i8 } else { 0 });
    // Of two vectors the bytes of the first, or the words, where there are ones.
    let (bytes, words) = (_mm512_set1_epi16(0xff), _mm512_set1_epi32(0xffff));
    for (i, lines) in lines.chunks_exact(grid(ROW).words() * 64).enumerate() {
        for block in 0..BLOCKS {
            // SAFETY: the words of the super-block.
            let of = unsafe { tables.block::<ROW>(lines.as_ptr(), block) };
            for half in 0..2 {
                // A line has one byte of each run of four inputs: four lines of four are turned about their diagonal.
                let w = tables.half::<ROW>(&of, block, half);
                let even = |a, b| _mm512_ternarylogic_epi32(bytes, a, _mm512_slli_epi16(b, 8), 0xca);
                let odd = |a, b| _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(a, 8), b, 0xca);
                let low = |a, b| _mm512_ternarylogic_epi32(words, a, _mm512_slli_epi32(b, 16), 0xca);
                let high = |a, b| _mm512_ternarylogic_epi32(words, _mm512_srli_epi32(a, 16), b, 0xca);
                let (even, odd) = ([even(w[0], w[1]), even(w[2], w[3])], [odd(w[0], w[1]), odd(w[2], w[3])]);
                let columns =
                    [low(even[0], even[1]), low(odd[0], odd[1]), high(even[0], even[1]), high(odd[0], odd[1])];
                let order = if grid(ROW).run() == 4 { [0, 1, 2, 3] } else { [0, 2, 1, 3] };
                for (j, column) in order.into_iter().enumerate() {
                    let at = to[((i * BLOCKS + block) * 2 + half) * 4 + j].as_mut_ptr();
                    // SAFETY: a line.
                    unsafe { _mm512_storeu_si512(at.cast(), _mm512_sub_epi8(columns[column], bias)) };
                }
            }
        }
    }
}

/// Adds the products of a tile whose codes are places in a grid, as `Kernel::matmul` says.
///
/// # Safety
/// AVX-512 F, BW, VL, VNNI and VBMI, GFNI; `ROW` has places; what `ActivationRows::check` promises.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,gfni")]
pub(super) unsafe fn add_places<const ROW: usize, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    stream: Stream,
    acc: &mut [__m512; T],
) {
    let (grid, group_size) = (grid(ROW), row(ROW).group_size);
    // SAFETY: as promised to this function.
    let tables = unsafe { Tables::of::<ROW>() };
    let mut inputs = Inputs::<T> { codes: [[0; SUPER_BLOCK]; T], less: [[0; SUPER_BLOCK / 16]; T] };
    if T <= PREFETCH_TOKENS {
        // The lines that prefetching from the first code on would step over.
        let first = lines.as_ptr().wrapping_sub(scales.bytes.len());
        stream.from(first).prefetch(first, scales.bytes.len() / 64);
    }
    for (i, lines) in lines.chunks_exact(grid.words() * 64).enumerate() {
        // SAFETY: as promised to this function.
        unsafe { inputs.fill::<ROW>(x, i) };
        for block in 0..BLOCKS {
            let g = i * BLOCKS + block;
            if T <= PREFETCH_TOKENS {
                let from = lines.as_ptr().wrapping_add(grid_at(ROW, block).0);
                stream.from(from).prefetch(from, grid.block_words());
            }
            // SAFETY: the words of the super-block.
            let of = unsafe { tables.block::<ROW>(lines.as_ptr(), block) };
            // SAFETY: the scales of the block, before `lines`.
            let w_scales = unsafe { odd_scales::<ROW>(scales, of.signs, g) };
            let mut dot = [[_mm512_setzero_si512(); 2]; T];
            for half in 0..2 {
                let w = tables.half::<ROW>(&of, block, half);
                for t in 0..T {
                    if half == 0 || group_size == 16 {
                        let less = inputs.less[t][BLOCK / group_size * block + half * 16 / group_size];
                        dot[t] = [_mm512_set1_epi32(less), _mm512_setzero_si512()];
                    }
                    for j in 0..4 {
                        // SAFETY: 4 of the super-block's codes.
                        let four = unsafe {
                            let at = BLOCK * block + 16 * half + 4 * j;
                            inputs.codes[t].as_ptr().add(at).cast::<i32>().read_unaligned()
                        };
                        let four = _mm512_set1_epi32(four);
                        dot[t][j % 2] = _mm512_dpbusd_epi32(dot[t][j % 2], w[j], four);
                    }
                    if half == 1 || group_size == 16 {
                        let group = BLOCK / group_size * g + half * 16 / group_size;
                        let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(dot[t][0], dot[t][1]));
                        let w_scale = w_scales[half * 16 / group_size];
                        let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x.scale(group, t)));
                        acc[t] = _mm512_fmadd_ps(sum, scale, acc[t]);
                    }
                }
            }
        }
        if T <= PREFETCH_TOKENS && grid.more_words() > 0 {
            let from = lines.as_ptr().wrapping_add(BLOCKS * grid.block_words() * 64);
            stream.from(from).prefetch(from, grid.more_words());
        }
    }
}

/// The bytes of `plane` at 64 places: `high` says where bit 7 of a place is one, `upper` the same of its upper bits.
///
/// # Safety
/// As many bytes as there are places; AVX-512 F, BW and VBMI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn lookup<const ROW: usize>(plane: &[u8], places: __m512i, high: u64, upper: [u64; 3]) -> __m512i {
    // SAFETY: 64 bytes of the plane.
    let part = |at: usize| unsafe { _mm512_loadu_si512(plane[at..][..64].as_ptr().cast()) };
    let mut found = [_mm512_setzero_si512(); 8];
    for i in 0..1 << grid(ROW).upper_bits() {
        let first = _mm512_permutex2var_epi8(part(256 * i), places, part(256 * i + 64));
        let second = _mm512_permutex2var_epi8(part(256 * i + 128), places, part(256 * i + 192));
        found[i] = _mm512_mask_blend_epi8(high, first, second);
    }
    for bit in 0..grid(ROW).upper_bits() {
        for i in 0..1 << (grid(ROW).upper_bits() - 1 - bit) {
            found[i] = _mm512_mask_blend_epi8(upper[bit], found[2 * i], found[2 * i + 1]);
        }
    }
    found[0]
}

/// The scales of 16 rows of the one group, or the two, of a block, of whose counts some are above its signs.
///
/// # Safety
/// The block's scales to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn odd_scales<const ROW: usize>(scales: Scales<'_>, signs: __m512i, block: usize) -> [__m512; 2] {
    let pack::Scales::Odd { halvings, counts } = row(ROW).scales else { unreachable!("other scales") };
    let groups = BLOCK / row(ROW).group_size;
    let (at, head) = row(ROW).scales.at(groups * block, row(ROW).group_size);
    // SAFETY: as promised by the caller.
    let d = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(scales.bytes.as_ptr().add(head).cast()) });
    // Exact, as are products with small integers.
    let d = _mm512_mul_ps(d, _mm512_set1_ps(1.0 / f32::from(1u8 << halvings)));
    let (one, mut odd) = (_mm512_set1_epi32(1), [_mm512_setzero_si512(); 2]);
    match counts {
        Counts::Within if !grid(ROW).has_ones() => {
            odd[0] = _mm512_or_si512(_mm512_srli_epi32(signs, 27), one);
        }
        Counts::Apart(4) if groups == 2 => {
            // SAFETY: as promised by the caller: the bytes of two groups.
            let bytes = unsafe { _mm_loadu_si128(scales.bytes.as_ptr().add(at).cast()) };
            let twice = _mm_set1_epi8(30);
            let low = _mm_and_si128(_mm_add_epi8(bytes, bytes), twice);
            let high = _mm_and_si128(_mm_srli_epi16(bytes, 3), twice);
            odd[0] = _mm512_or_si512(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high)), one);
            odd[1] = _mm512_or_si512(_mm512_cvtepu8_epi32(_mm_unpackhi_epi64(low, high)), one);
        }
        _ => {
            for group in 0..groups {
                // SAFETY: as promised by the caller.
                let count = unsafe { odd_counts16::<ROW>(scales, groups * block + group) };
                odd[group] = _mm512_or_si512(_mm512_add_epi32(count, count), one);
            }
        }
    }
    let scale = |odd: __m512i| _mm512_mul_ps(d, _mm512_cvtepi32_ps(odd));
    [scale(odd[0]), scale(odd[1])]
}

/// What 16 rows of a group count, of scales that are odd.
///
/// # Safety
/// The group's scales and codes to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn odd_counts16<const ROW: usize>(scales: Scales<'_>, group: usize) -> __m512i {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways to the codes of a super-block, from any words.
    fn unpacks_alike<const ROW: usize>() {
        let words = grid(ROW).words() * 64;
        let mut bytes: Vec<u8> = vec![0; 2 * words];
        let mut state = 1u64 + ROW as u64;
        bytes.iter_mut().for_each(|byte| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *byte = (state >> 56) as u8;
        });
        let mut found = [MaybeUninit::<[u8; 64]>::uninit(); 2 * SUPER_BLOCK / 4];
        // SAFETY: the caller has seen that the features are there; two super-blocks, and their lines.
        unsafe { unpack_places::<ROW>(&bytes, &mut found, true) };
        for k in (0..2 * SUPER_BLOCK).step_by(16) {
            let mut want = [[0u8; 64]; 4];
            // SAFETY: as above; lines of an array.
            unsafe {
                let runs = grid_runs::<ROW>(bytes.as_ptr(), k, _mm512_setzero_si512());
                (0..4).for_each(|j| _mm512_storeu_si512(want[j].as_mut_ptr().cast(), runs[j]));
            }
            for (j, want) in want.iter().enumerate() {
                // SAFETY: `unpack_places` has written all lines.
                assert_eq!(unsafe { found[k / 4 + j].assume_init_ref() }, want, "row {ROW}, inputs {k}, line {j}");
            }
        }
    }

    #[test]
    fn codes_by_registers_are_those_by_gathers() {
        if !is_x86_feature_detected!("avx512vl") || !is_x86_feature_detected!("avx512bw") || !looks_up() {
            println!("skipped: this CPU has no AVX-512 VBMI and GFNI");
            return;
        }
        for row in (0..INTEGER_ROWS).filter(|&row| are_places(row)) {
            by_place!(row, unpacks_alike());
        }
    }
}
