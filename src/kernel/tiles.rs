//! Packed tiles on their way through a kernel, and what is asked of the memory while they are.
#![allow(unsafe_code)]

use std::ops::Range;

use moebius_cache::pack::MatrixLayout;
#[cfg(target_arch = "x86_64")]
use moebius_cache::pack::{self, CodeType, Grid, Row};
#[cfg(target_arch = "x86_64")]
use moebius_cache::{Precision, ScaleType};

#[cfg(target_arch = "x86_64")]
use super::Start;

/// How many bytes ahead of its use a weight is asked for, where a few tokens wait for its arrival; 0 is no help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Into L2: far enough to start the hardware's own prefetching of a page before the page is used.
    pub l2: usize,
    /// Into L1.
    pub l1: usize,
}

impl Ahead {
    /// Two cores of a Xeon, INT4 g128, one token, best share of plain reading (V2-Lite, Qwen3-30B, Kimi K2): 93 to 95,
    /// 89 to 91, 98 to 101% with 4096 and 1024; 88, 82, 91% with L1 alone; 82, 81, 85% with 8 KiB instead of 4.
    /// Sixteen cores, the time of a layer: 4% less with 6144 or 8192 than with 4096, 8% more without L2's.
    #[cfg(target_arch = "x86_64")]
    const INTEL: Ahead = Ahead { l2: 6144, l1: 1024 };

    /// Two cores of an EPYC (Zen 4), the same: 18 to 30% less time than with 4096 and 1024, a page to the byte being
    /// the worst distance of all; 5 to 8% less than with 8192, and steadier than with none.
    #[cfg(target_arch = "x86_64")]
    const AMD: Ahead = Ahead { l2: 6144, l1: 0 };

    /// Two cores of an EPYC (Zen 5), weights from RAM, 9.5 and 11 KiB instead of 6: Q4_K, Q5_K, Q6_K, IQ4_XS and NVFP4
    /// are read 3 to 22% faster with one row of activations, Q4_K, Q6_K and MXFP4 1 to 17% with two; INT8 and BF16 2 to
    /// 8% slower with one, INT4 in groups of 128 between 7% slower and 4% faster.
    #[cfg(target_arch = "x86_64")]
    const AMD_FAR: Ahead = Ahead { l2: 10752, l1: 0 };

    /// What helps most on the processor that this runs on, with so many rows of activations.
    #[cfg(target_arch = "x86_64")]
    fn of(precision: Precision, rows: usize) -> Ahead {
        static AMD: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        // "AuthenticAMD", four letters to a register.
        if !*AMD.get_or_init(|| std::arch::x86_64::__cpuid(0).ebx.to_le_bytes() == *b"Auth") {
            return Ahead::INTEL;
        }
        let is_far = precision
            .row_number()
            .is_some_and(|number| row(number).codes.bits() < 8 && (rows > 1 || takes_long(number)));
        if is_far { Ahead::AMD_FAR } else { Ahead::AMD }
    }
}

/// Some packed tiles, one behind the other, and what is read after them.
#[derive(Clone, Copy)]
pub struct Tiles<'a> {
    pub(super) bytes: &'a [u8],
    next: &'a [u8],
    ahead: Option<Ahead>,
}

impl<'a> Tiles<'a> {
    /// Tiles after which the caller reads `next`: it is on its way when they are done. How far ahead, a kernel knows
    /// best.
    pub fn before(bytes: &'a [u8], next: &'a [u8], ahead: Option<Ahead>) -> Self {
        Self { bytes, next, ahead }
    }

    /// Some of them, of a matrix of this layout.
    pub(super) fn part(&self, layout: &MatrixLayout, tiles: Range<usize>) -> Self {
        let (bytes, rest) = self.bytes[..].split_at(tiles.end * layout.tile_bytes());
        let next = if rest.is_empty() { self.next } else { rest };
        Self { bytes: &bytes[tiles.start * layout.tile_bytes()..], next, ..*self }
    }

    /// The tiles.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Asks for what is read some time after the kilobyte that begins at byte `at`, as kernels do: reading alone can be
    /// timed so.
    pub fn prefetch(&self, layout: &MatrixLayout, at: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            let at = self.bytes[at..].as_ptr();
            self.stream(layout, 1).from(at).prefetch(at, 16);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (layout, at);
    }

    /// The addresses that are read some time after those of the tiles, with so many rows of activations.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn stream(&self, layout: &MatrixLayout, rows: usize) -> Stream {
        let ahead = self.ahead.unwrap_or_else(|| Ahead::of(layout.precision, rows));
        let end = self.bytes.as_ptr_range().end.addr();
        let jump = if self.next.is_empty() { 0 } else { self.next.as_ptr().addr().wrapping_sub(end) };
        Stream { end, jump, ahead }
    }

    /// Where what is read after the tiles begins.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn next(&self) -> *const u8 {
        if self.next.is_empty() { self.bytes.as_ptr_range().end } else { self.next.as_ptr() }
    }
}

impl<'a> From<&'a [u8]> for Tiles<'a> {
    /// Tiles in a longer run of them: what lies behind them is read next.
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, next: &[], ahead: None }
    }
}

/// What to prefetch for a place in the tiles.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Stream {
    end: usize,  // address after the tiles
    jump: usize, // from there to what is read next
    ahead: Ahead,
}

#[cfg(target_arch = "x86_64")]
impl Stream {
    /// For the lines of about a kilobyte from `at` on; to look for each line where the tiles end would cost more than
    /// it brings.
    #[inline(always)]
    pub(super) fn from(self, at: *const u8) -> Distances {
        let after = |bytes: usize| {
            let jump = if at.addr() + bytes < self.end { 0 } else { self.jump };
            bytes.wrapping_add(jump)
        };
        Distances { l2: after(self.ahead.l2), l1: after(self.ahead.l1) }
    }

    /// Where `at` is, which may lie after the tiles.
    #[inline(always)]
    pub(super) fn place(self, at: *const u8) -> *const u8 {
        if at.addr() < self.end { at } else { at.wrapping_add(self.jump) }
    }
}

/// From where some lines are used to what is prefetched meanwhile.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Distances {
    l2: usize,
    l1: usize,
}

#[cfg(target_arch = "x86_64")]
impl Distances {
    /// While `lines` cache lines from `at` on are used.
    #[inline(always)]
    pub(super) fn prefetch(self, at: *const u8, lines: usize) {
        fetch(at.wrapping_add(self.l2), lines);
        fetch_l1(at.wrapping_add(self.l1), lines);
    }
}

/// The row of a precision, whose number is a constant of the functions that are compiled for it.
#[cfg(target_arch = "x86_64")]
#[inline(always)] // as all of these: hot loops have rows as constants, and a call there costs a tenth of a decode step
pub(super) const fn row(number: usize) -> Row {
    Row::ALL[number]
}

/// `by_row!(number, function[N, ..](arguments))` is `function::<ROW, N, ..>(arguments)` for the row of this number, of
/// those whose codes are integers.
#[cfg(target_arch = "x86_64")]
macro_rules! by_row {
    ($number:expr, $function:ident $n:tt $arguments:tt) => {
        $crate::kernel::tiles::by_row!(@ $number, $function $n $arguments, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
            17 18 19 20 21 22 23)
    };
    (@ $number:expr, $function:ident $n:tt $arguments:tt, $($row:literal)*) => {{
        const { assert!([$($row),*].len() == $crate::kernel::tiles::INTEGER_ROWS, "a number for each row") };
        match $number {
            $($row => $crate::kernel::tiles::by_row!(@@ $row $function $n $arguments),)*
            other => unreachable!("there is no row {other}"),
        }
    }};
    (@@ $row:literal $function:ident[$($n:tt),*]($($argument:expr),*)) => {
        $function::<$row, $($n),*>($($argument),*)
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use by_row;

/// So many rows have integers as codes: the first ones.
#[cfg(target_arch = "x86_64")]
pub(super) const INTEGER_ROWS: usize = {
    let mut count = 0;
    while count < Row::ALL.len() && !Row::ALL[count].codes.are_floats() {
        count += 1;
    }
    count
};

/// What makes codes unsigned, for instructions that want them so: stored with integers, looked up with tables.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn bias(number: usize) -> i32 {
    -(row(number).codes.range()[0] as i32)
}

/// The largest code once it is unsigned.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn largest(number: usize) -> i32 {
    row(number).codes.range()[1] as i32 + bias(number)
}

/// Bits of a code, but for an odd one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn even_bits(number: usize) -> usize {
    row(number).codes.bits() / 2 * 2
}

/// Whether codes are looked up.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn is_table(number: usize) -> bool {
    row(number).codes.table().is_some()
}

/// The grid whose places codes are. Panics: they are none (a bug).
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn grid(number: usize) -> Grid {
    match row(number).codes {
        CodeType::Grid(grid) => grid,
        _ => panic!("codes that are no places in a grid"),
    }
}

/// Whether codes are places in a grid.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn is_grid(number: usize) -> bool {
    matches!(row(number).codes, CodeType::Grid(_))
}

/// What four bits of a table stand for, `add` added; of a grid what is added; zeros where there is none.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn table(codes: CodeType, add: i32) -> [i8; 16] {
    let mut table = match codes.table() {
        Some(table) => *table,
        None if matches!(codes, CodeType::Grid(_)) => [0; 16],
        None => return [0; 16],
    };
    let mut i = 0;
    while i < 16 {
        table[i] = (table[i] as i32 + add) as i8; // as a byte: above 127 it is unsigned
        i += 1;
    }
    table
}

/// Whether a row's codes or scales take many instructions to unpack.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn takes_long(number: usize) -> bool {
    row(number).codes.bits() % 2 == 1 || !matches!(row(number).scales, pack::Scales::Plain)
}

/// Bytes of the lines of 16 inputs, but for an odd bit's.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn half_bytes(number: usize) -> usize {
    even_bits(number) * 32
}

/// From the lines of one half of a block of 32 inputs to those of the next.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn step(number: usize, half: usize) -> usize {
    if is_grid(number) {
        return row(number).codes.bytes(16); // for prefetching alone
    }
    half_bytes(number) + half * (row(number).codes.bits() % 2) * 64
}

/// Lines of 64 bytes that a half of a block brings.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn half_lines(number: usize, half: usize) -> usize {
    step(number, half).div_ceil(64)
}

/// The scales at the beginning of a tile.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) lines: &'a [u8], // of a grid's codes, above whose signs scales may lie
    pub(super) group: usize,    // inputs that share one
    pub(super) f16: bool,       // not bf16
    pub(super) f32: bool,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Scales<'a> {
    /// Those of a tile, and what follows.
    pub(super) fn split(layout: &MatrixLayout, tile: &'a [u8]) -> (Self, &'a [u8]) {
        let (bytes, lines) = tile.split_at(layout.scale_bytes());
        let (group, scales) = (layout.precision.group_size().unwrap_or(0), layout.precision.scales());
        (Self { bytes, lines, group, f16: scales == ScaleType::F16, f32: scales == ScaleType::F32 }, lines)
    }
}

/// Where the words of block `block` of 32 inputs begin in the lines of a grid's codes, and those of its super-block.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) const fn grid_at(number: usize, block: usize) -> (usize, usize) {
    let first = block / 8 * grid(number).words() * 64;
    (first + block % 8 * grid(number).block_words() * 64, first)
}

/// Where a tile's results go, and what is read meanwhile.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct To {
    pub(super) start: Start,
    pub(super) stride: usize, // from one token's results to the next's
    pub(super) stream: Stream,
}

/// Brings `lines` cache lines from `at` on into L2.
#[inline(always)]
pub(crate) fn fetch(at: *const u8, lines: usize) {
    #[cfg(target_arch = "x86_64")]
    for i in 0..lines {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has it, and any address will do: a prefetch of nothing does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(64 * i).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, lines);
}

/// As [`fetch`], into L1.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fetch_l1(at: *const u8, lines: usize) {
    for i in 0..lines {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: as in `fetch`.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64 * i).cast()) };
    }
}
