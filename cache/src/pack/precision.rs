//! The precisions that weights are packed in, and all that is to be known of each: a new one is a row of this file.
//!
//! A weight is its code times the scale of its group, and, where groups have offsets, the group's offset more:
//! `w = scale q + offset`. A precision is a type of codes ([`CodeType`]), a size of groups and a kind of scales
//! ([`Scales`]); kernels are written over these, not over precisions.
//!
//! Files of llama.cpp have scales of two levels: 16 rows of a super-block of 256 inputs have a number `d` each, and
//! `dmin` where there are offsets; each of their groups has a few bits that count how many `d` its scale is, and how
//! many `dmin` are taken off. They are kept as they are: a product of `d` and such a count is exact in f32, so nothing
//! is rounded and nothing grows. What a tile holds of a super-block is one run of bytes:
//!
//! ```text
//! d        [16] f16
//! dmin     [16] f16                         where there are offsets
//! record   of each group of 16 or 32 inputs
//!   8 bits                [16] u8            count + 128
//!   6 bits                [8] u8, [4] u8     lower 4 bits of rows r, r + 8; upper 2 bits of r, r + 4, r + 8, r + 12
//!   6 bits, with offsets  [16] u8, [8] u8    count + 64 (offset mod 4); upper 4 bits of the offsets of r, r + 8
//!   4 bits, with offsets  [16] u8            count + 16 offset
//!   4 bits, odd           [8] u8             counts of rows r, r + 8
//!   3 bits, odd           [3] u16            a bit of each row's count, the lowest first
//! ```
//!
//! All rows of a record lie together, so that a kernel makes the scales of a group's 16 rows at once, of whichever
//! group it needs.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{BF16_INPUTS, GROUP_SIZES, Grid, TILE_ROWS};

/// Twice what four bits of E2M1 stand for, so that all are integers: a sign, two bits of exponent, one of mantissa.
///
/// Source: the OCP microscaling specification 1.0.
pub const DOUBLED_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// What four bits of IQ4_NL and IQ4_XS stand for.
///
/// Source: ggml's `kvalues_iq4nl`.
pub const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// What eight bits of E4M3 stand for, NaN of both signs included: a sign, 4 bits of exponent with bias 7, 3 of
/// mantissa.
///
/// Source: the OCP 8-bit floating point specification 1.0.
pub const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits(((exponent + 120) << 23) | mantissa << 20),
        };
        values[byte] = if byte < 128 { size } else { -size };
        byte += 1;
    }
    values
};

/// The type of a group's scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleType {
    /// 8 bits of significand, the range of f32.
    #[default]
    Bf16,
    /// 11 bits, up to 65504: where a checkpoint has them.
    F16,
    /// All bits, in four bytes: of FP8, where a checkpoint has them.
    F32,
}

impl ScaleType {
    /// Bytes of a scale.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::Bf16 | ScaleType::F16 => 2,
            ScaleType::F32 => 4,
        }
    }

    /// The bits of the nearest scale there is; beyond the range the last one.
    pub fn to_bits(self, scale: f32) -> u32 {
        match self {
            ScaleType::Bf16 => bf16::from_f32(scale).to_bits().into(),
            ScaleType::F16 => f16::from_f32(scale.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_bits().into(),
            ScaleType::F32 => scale.to_bits(),
        }
    }

    /// The scale that has these bits.
    pub fn from_bits(self, bits: u32) -> f32 {
        match self {
            ScaleType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
            ScaleType::F16 => f16::from_bits(bits as u16).to_f32(),
            ScaleType::F32 => f32::from_bits(bits),
        }
    }

    /// The type that holds scales of both.
    pub fn of_both(self, other: Self) -> Self {
        match (self, other) {
            _ if self == other => self,
            (ScaleType::F32, _) | (_, ScaleType::F32) => ScaleType::F32,
            _ => ScaleType::Bf16,
        }
    }

    fn is_bf16(&self) -> bool {
        *self == ScaleType::Bf16
    }
}

/// The type of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeType {
    /// The bits of E2M1, which stand for twice their value: [`DOUBLED_E2M1`].
    E2m1,
    /// Four bits that stand for a value of [`IQ4`].
    Iq4,
    /// Floats: the bits of E4M3 themselves, [`E4M3`].
    E4m3,
    /// A place in a grid and a sign.
    Grid(Grid),
    /// Integers of so many bits, stored with `zero` added.
    Int {
        /// 2 to 6, or 8.
        bits: u8,
        /// What is stored for 0.
        zero: u8,
    },
}

impl CodeType {
    /// Bits of a stored code; of a grid's those that are no upper bits of indices.
    #[inline]
    pub const fn bits(self) -> usize {
        match self {
            Self::Grid(grid) => grid.block_words(),
            Self::E2m1 | Self::Iq4 => 4,
            Self::E4m3 => 8,
            Self::Int { bits, .. } => bits as usize,
        }
    }

    /// Bytes of the codes of `k` inputs of 16 rows; of a grid's on average, but for whole super-blocks.
    #[inline(always)] // with constants, in loops of kernels
    pub const fn bytes(self, k: usize) -> usize {
        match self {
            Self::Grid(grid) => k * TILE_ROWS * grid.words() * 4 / SUPER_BLOCK,
            _ => k * TILE_ROWS * self.bits() / 8,
        }
    }

    /// Whether codes are floats, which meet activations that are floats; integers meet integers.
    #[inline]
    pub const fn are_floats(self) -> bool {
        matches!(self, Self::E4m3)
    }

    /// What a code counts.
    pub fn value(self, code: i8) -> f32 {
        match self {
            Self::E4m3 => E4M3[usize::from(code as u8)],
            _ => f32::from(code),
        }
    }

    /// The code whose value is nearest.
    pub fn nearest(self, value: f32) -> i8 {
        match self {
            Self::E4m3 => {
                let magnitudes = &E4M3[..127];
                let above = magnitudes.partition_point(|magnitude| *magnitude < value.abs());
                let below = above.saturating_sub(1);
                let nearer = match magnitudes.get(above) {
                    Some(magnitude) if magnitude - value.abs() <= value.abs() - magnitudes[below] => above,
                    _ => below,
                };
                (nearer as u8 | u8::from(value.is_sign_negative()) << 7) as i8
            }
            Self::Grid(grid) if grid.has_ones() => {
                let [low, high] = self.range().map(f32::from);
                match grid {
                    Grid::Tq1_0 => value.round_ties_even().clamp(low, high) as i8,
                    // Beside 8 times -1, 0 or 1.
                    _ => {
                        let eight = (value / 8.0).round_ties_even().clamp(-1.0, 1.0) * 8.0;
                        (eight + if value < eight { -1.0 } else { 1.0 }) as i8
                    }
                }
            }
            Self::Grid(grid) => {
                let magnitudes = grid.magnitudes().iter().flat_map(|four| four.to_le_bytes()).map(|byte| byte as i8);
                let distance = |magnitude: &i8| (value.abs() - f32::from(*magnitude)).abs();
                let nearest = magnitudes.min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
                if value < 0.0 { -nearest } else { nearest }
            }
            Self::E2m1 | Self::Iq4 => {
                let distance = |&code: &i8| (value - f32::from(code)).abs();
                let table = self.table().into_iter().flatten().copied();
                table.min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
            }
            Self::Int { .. } => {
                let [low, high] = self.range().map(f32::from);
                value.round_ties_even().clamp(low, high) as i8
            }
        }
    }

    /// The smallest and the largest code; of floats all bytes are codes.
    #[inline]
    pub const fn range(self) -> [i8; 2] {
        match self {
            Self::E2m1 => [-12, 12],
            Self::Iq4 => [IQ4[0], IQ4[15]],
            Self::E4m3 => [i8::MIN, i8::MAX],
            Self::Grid(grid) => [-grid.largest(), grid.largest()],
            Self::Int { bits, zero } => {
                let low = -(zero as i32);
                [low as i8, (low + (1 << bits) - 1) as i8]
            }
        }
    }

    /// The values that bits stand for, where they are not every integer of their range.
    #[inline]
    pub const fn table(self) -> Option<&'static [i8; 16]> {
        match self {
            Self::E2m1 => Some(&DOUBLED_E2M1),
            Self::Iq4 => Some(&IQ4),
            Self::E4m3 | Self::Grid(_) | Self::Int { .. } => None,
        }
    }

    /// The code that these bits stand for. Panics: they are places in a grid, which do not stand alone (a bug).
    pub const fn code(self, stored: u8) -> i8 {
        match self {
            Self::Int { zero, .. } => stored.wrapping_sub(zero) as i8,
            Self::E2m1 => DOUBLED_E2M1[stored as usize],
            Self::Iq4 => IQ4[stored as usize],
            Self::E4m3 => stored as i8,
            Self::Grid(_) => panic!("a code of a grid alone"),
        }
    }

    /// The bits that stand for a code. Panics: none do (a bug).
    pub fn stored(self, code: i8) -> u8 {
        match (self, self.table()) {
            (Self::Int { zero, .. }, _) => (code as u8).wrapping_add(zero),
            (Self::E4m3, _) => code as u8,
            (_, Some(table)) => table
                .iter()
                .position(|&value| value == code)
                .unwrap_or_else(|| panic!("{code} is not in the table of {self:?}"))
                as u8,
            (_, None) => unreachable!("what is no number has a table"),
        }
    }
}

/// Codes lie in blocks of so many inputs of a row.
const BLOCK: usize = 32;

/// Super-blocks of so many inputs of a row.
pub const SUPER_BLOCK: usize = 256;

/// How the scale of a group is kept, and its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// A number of two bytes, of the precision's [`ScaleType`].
    Plain,
    /// A number in f32.
    Wide,
    /// A number in E4M3, which counts how many of the row's f32 number the scale is.
    E4m3,
    /// Two numbers in f16: a scale and an offset.
    WithOffset,
    /// A number of two bytes, of the precision's [`ScaleType`], and a byte, the code that stands for zero: so many
    /// scales are taken off.
    Zeros,
    /// A count of how many `d` of the super-block it is.
    Counted {
        /// Bits of a count, and of an offset's.
        bits: u8,
        /// What is stored for a count of 0.
        zero: u8,
        /// Whether there are counts of `dmin`, which are taken off.
        offsets: bool,
    },
    /// A count: the scale is so many times two and one more `d`, halved.
    Odd {
        /// How often it is halved.
        halvings: u8,
        /// Where counts are.
        counts: Counts,
    },
}

/// Where the counts of odd scales are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// All are 0, so that `d` is the scale of its super-block.
    Zero,
    /// In the words of a grid's codes.
    Within,
    /// Beside `d`, of so many bits: 3 or 4.
    Apart(u8),
}

impl Counts {
    /// Bits of a count beside `d`.
    #[inline]
    pub const fn bits(self) -> usize {
        match self {
            Self::Zero | Self::Within => 0,
            Self::Apart(bits) => bits as usize,
        }
    }
}

impl Scales {
    /// Whether groups have offsets.
    #[inline]
    pub const fn have_offsets(self) -> bool {
        match self {
            Self::Plain | Self::Wide | Self::E4m3 | Self::Odd { .. } => false,
            Self::WithOffset | Self::Zeros => true,
            Self::Counted { offsets, .. } => offsets,
        }
    }

    /// Whether a weight is a scale times an integer, or a float: its code, or that less the code of zero.
    #[inline]
    pub const fn are_single(self) -> bool {
        matches!(self, Self::Plain | Self::Wide | Self::Zeros)
    }

    /// Bytes of the numbers that all groups of a super-block, or of the row, share, of 16 rows.
    #[inline]
    pub const fn head_bytes(self) -> usize {
        match self {
            Self::Plain | Self::Wide | Self::WithOffset | Self::Zeros => 0,
            Self::E4m3 => 4 * TILE_ROWS,
            Self::Counted { offsets, .. } => 2 * TILE_ROWS * (1 + offsets as usize),
            Self::Odd { .. } => 2 * TILE_ROWS,
        }
    }

    /// Bytes of a group's own, of 16 rows.
    #[inline]
    pub const fn record_bytes(self) -> usize {
        match self {
            Self::Plain => 2 * TILE_ROWS,
            Self::Wide | Self::WithOffset => 4 * TILE_ROWS,
            Self::Zeros => 3 * TILE_ROWS,
            Self::E4m3 => TILE_ROWS,
            Self::Counted { bits, offsets, .. } => TILE_ROWS * bits as usize * (1 + offsets as usize) / 8,
            Self::Odd { counts, .. } => TILE_ROWS * counts.bits() / 8,
        }
    }

    /// Whether they are of two levels, in super-blocks.
    #[inline]
    pub const fn have_super_blocks(self) -> bool {
        matches!(self, Self::Counted { .. } | Self::Odd { .. })
    }

    /// Bytes of the scales of `k` inputs of 16 rows.
    #[inline(always)] // with constants, in loops of kernels
    pub const fn bytes(self, k: usize, group_size: usize) -> usize {
        let heads = match self {
            Self::Plain | Self::Wide | Self::WithOffset | Self::Zeros => 0,
            Self::E4m3 => 1,
            Self::Counted { .. } | Self::Odd { .. } => k / SUPER_BLOCK,
        };
        heads * self.head_bytes() + k / group_size * self.record_bytes()
    }

    /// Where a group's own bytes begin in a tile, and where those of its super-block, or of the row, do.
    #[inline(always)] // with constants, in loops of kernels
    pub const fn at(self, group: usize, group_size: usize) -> (usize, usize) {
        match self {
            Self::Plain | Self::Wide | Self::WithOffset | Self::Zeros | Self::E4m3 => {
                (self.head_bytes() + group * self.record_bytes(), 0)
            }
            Self::Counted { .. } | Self::Odd { .. } => {
                let groups = SUPER_BLOCK / group_size;
                let bytes = self.head_bytes() + groups * self.record_bytes();
                let head = group / groups * bytes;
                (head + self.head_bytes() + group % groups * self.record_bytes(), head)
            }
        }
    }
}

/// What kernels are made for: codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// Type of the codes.
    pub codes: CodeType,
    /// Kind of the scales.
    pub scales: Scales,
    /// Inputs that share a scale; 0: the precision says.
    pub group_size: usize,
}

impl Row {
    /// Every one there is; kernels know them by their numbers.
    pub const ALL: [Self; 26] = {
        use Scales::{Counted, Plain, Wide, WithOffset};
        const fn row(codes: CodeType, scales: Scales, group_size: usize) -> Row {
            Row { codes, scales, group_size }
        }
        const fn int(bits: u8, zero: u8) -> CodeType {
            CodeType::Int { bits, zero }
        }
        const fn odd(halvings: u8, counts: Counts) -> Scales {
            Scales::Odd { halvings, counts }
        }
        [
            row(CodeType::E2m1, Plain, 32),
            row(int(4, 8), Plain, 0),
            row(int(8, 128), Plain, 0),
            row(int(2, 0), Counted { bits: 4, zero: 0, offsets: true }, 16),
            row(int(3, 4), Counted { bits: 6, zero: 32, offsets: false }, 16),
            row(int(4, 0), Counted { bits: 6, zero: 0, offsets: true }, 32),
            row(int(5, 0), Counted { bits: 6, zero: 0, offsets: true }, 32),
            row(int(6, 32), Counted { bits: 8, zero: 128, offsets: false }, 16),
            row(CodeType::Iq4, Counted { bits: 6, zero: 32, offsets: false }, 32),
            row(CodeType::Iq4, Plain, 0),
            row(int(4, 0), WithOffset, 32),
            row(int(5, 0), WithOffset, 32),
            row(int(5, 16), Plain, 32),
            row(CodeType::E2m1, Scales::E4m3, 16),
            row(CodeType::Grid(Grid::Iq2Xxs), odd(3, Counts::Within), 32),
            row(CodeType::Grid(Grid::Iq2Xs), odd(3, Counts::Apart(4)), 16),
            row(CodeType::Grid(Grid::Iq2S), odd(3, Counts::Apart(4)), 16),
            row(CodeType::Grid(Grid::Iq3Xxs), odd(2, Counts::Within), 32),
            row(CodeType::Grid(Grid::Iq3S), odd(0, Counts::Apart(4)), 32),
            row(int(4, 0), Scales::Zeros, 0),
            row(CodeType::Grid(Grid::Iq1S), odd(3, Counts::Within), 32),
            row(CodeType::Grid(Grid::Iq1M), odd(3, Counts::Apart(3)), 16),
            row(CodeType::Grid(Grid::Tq1_0), odd(0, Counts::Zero), 128),
            row(int(2, 1), odd(0, Counts::Zero), 128),
            row(CodeType::E4m3, Plain, 0),
            row(CodeType::E4m3, Wide, 0),
        ]
    };
}

impl Row {
    /// The largest count of odd scales; of others 0.
    pub const fn largest_count(self) -> u8 {
        match (self.scales, self.codes) {
            (Scales::Odd { counts: Counts::Apart(bits), .. }, _) => (1 << bits) - 1,
            (Scales::Odd { counts: Counts::Within, .. }, CodeType::Grid(Grid::Iq1S)) => 7,
            (Scales::Odd { counts: Counts::Within, .. }, _) => 15,
            _ => 0,
        }
    }
}

/// How expert weights are stored and computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "bits")]
pub enum Precision {
    /// 16-bit brain floats, as most checkpoints come.
    Bf16,
    /// 8-bit integers, one scale per `group_size` inputs of a row.
    Int8 {
        /// Inputs that share a scale: 32, 64 or 128.
        group_size: usize,
        /// Type of the scales.
        #[serde(default, skip_serializing_if = "ScaleType::is_bf16")]
        scales: ScaleType,
    },
    /// 4-bit integers, one scale per `group_size` inputs of a row.
    Int4 {
        /// Inputs that share a scale: 32, 64 or 128.
        group_size: usize,
        /// Type of the scales.
        #[serde(default, skip_serializing_if = "ScaleType::is_bf16")]
        scales: ScaleType,
    },
    /// 4-bit integers, one scale and one zero point per `group_size` inputs of a row.
    Uint4 {
        /// Inputs that share a scale and a zero point: 32, 64 or 128.
        group_size: usize,
        /// Type of the scales.
        #[serde(default, skip_serializing_if = "ScaleType::is_bf16")]
        scales: ScaleType,
    },
    /// Places in the table [`IQ4`], whose values are denser around 0 as weights are, one bf16 scale per `group_size`
    /// inputs of a row.
    Iq4 {
        /// Inputs that share a scale: 32, 64 or 128.
        group_size: usize,
    },
    /// 4-bit floats, E2M1, one bf16 scale per 32 inputs of a row: half of MXFP4's own, since codes count twice. All
    /// that MXFP4 has are bf16 numbers, the least two of them subnormal.
    Mxfp4,
    /// 4-bit floats, E2M1, in groups of 16: scales in E4M3 that count half of a number for the whole matrix.
    Nvfp4,
    /// 8-bit floats, E4M3, one scale per `group_size` inputs of a row.
    Fp8 {
        /// Inputs that share a scale: 32, 64 or 128.
        group_size: usize,
        /// Type of the scales: bf16 or f32.
        #[serde(default, skip_serializing_if = "ScaleType::is_bf16")]
        scales: ScaleType,
    },
    /// llama.cpp's: 2 bits, groups of 16 with offsets, counts of 4 bits.
    #[serde(rename = "q2_k")]
    Q2K,
    /// llama.cpp's: 3 bits, groups of 16, counts of 6 bits.
    #[serde(rename = "q3_k")]
    Q3K,
    /// llama.cpp's: 4 bits, groups of 32 with offsets, counts of 6 bits.
    #[serde(rename = "q4_k")]
    Q4K,
    /// llama.cpp's: 5 bits, groups of 32 with offsets, counts of 6 bits.
    #[serde(rename = "q5_k")]
    Q5K,
    /// llama.cpp's: 6 bits, groups of 16, counts of 8 bits.
    #[serde(rename = "q6_k")]
    Q6K,
    /// llama.cpp's: 4 bits of a table, groups of 32, counts of 6 bits.
    #[serde(rename = "iq4_xs")]
    Iq4Xs,
    /// llama.cpp's: 4 bits of a table, groups of 32, f16 scales.
    #[serde(rename = "iq4_nl")]
    Iq4Nl,
    /// llama.cpp's: 4 bits, groups of 32, f16 scales and offsets.
    #[serde(rename = "q4_1")]
    Q4_1,
    /// llama.cpp's: 5 bits, groups of 32, f16 scales and offsets.
    #[serde(rename = "q5_1")]
    Q5_1,
    /// llama.cpp's: 5 bits, groups of 32, f16 scales.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// llama.cpp's: places in a grid, 2.06 bits, groups of 32, counts of 4 bits.
    #[serde(rename = "iq2_xxs")]
    Iq2Xxs,
    /// llama.cpp's: places in a grid, 2.31 bits, groups of 16, counts of 4 bits.
    #[serde(rename = "iq2_xs")]
    Iq2Xs,
    /// llama.cpp's: places in a grid, 2.56 bits, groups of 16, counts of 4 bits.
    #[serde(rename = "iq2_s")]
    Iq2S,
    /// llama.cpp's: places in a grid, 3.06 bits, groups of 32, counts of 4 bits.
    #[serde(rename = "iq3_xxs")]
    Iq3Xxs,
    /// llama.cpp's: places in a grid, 3.44 bits, groups of 32, counts of 4 bits.
    #[serde(rename = "iq3_s")]
    Iq3S,
    /// llama.cpp's: places in a grid of -1, 0 and 1, 1.56 bits, groups of 32, counts of 3 bits.
    #[serde(rename = "iq1_s")]
    Iq1S,
    /// llama.cpp's: places in a grid of -1, 0 and 1, 1.75 bits, groups of 16, counts of 3 bits.
    #[serde(rename = "iq1_m")]
    Iq1M,
    /// llama.cpp's: digits to the base of three, 1.69 bits, f16 scales of 256.
    #[serde(rename = "tq1_0")]
    Tq1_0,
    /// llama.cpp's: 2 bits, f16 scales of 256.
    #[serde(rename = "tq2_0")]
    Tq2_0,
}

impl Precision {
    /// Every precision there is.
    pub fn all() -> Vec<Self> {
        use Precision::*;
        let coded = [Self::int4, Self::int8, Self::uint4].into_iter().flat_map(|of| GROUP_SIZES.map(of));
        let mut all = vec![Bf16, Mxfp4];
        all.extend(coded.flat_map(|precision| [precision, precision.with_scales(ScaleType::F16)]));
        all.extend([Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Xs, Iq4Nl, Q4_1, Q5_1, Q5_0, Nvfp4]);
        all.extend([Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Iq1S, Iq1M, Tq1_0, Tq2_0]);
        all.extend(GROUP_SIZES.map(Self::iq4));
        all.extend(GROUP_SIZES.map(Self::fp8).into_iter().flat_map(|fp8| [fp8, fp8.with_scales(ScaleType::F32)]));
        all
    }

    /// INT8 with bf16 scales.
    pub const fn int8(group_size: usize) -> Self {
        Precision::Int8 { group_size, scales: ScaleType::Bf16 }
    }

    /// INT4 with bf16 scales.
    pub const fn int4(group_size: usize) -> Self {
        Precision::Int4 { group_size, scales: ScaleType::Bf16 }
    }

    /// 4 bits with zero points and bf16 scales.
    pub const fn uint4(group_size: usize) -> Self {
        Precision::Uint4 { group_size, scales: ScaleType::Bf16 }
    }

    /// 4 bits of a table with bf16 scales.
    pub const fn iq4(group_size: usize) -> Self {
        Precision::Iq4 { group_size }
    }

    /// FP8 with bf16 scales.
    pub const fn fp8(group_size: usize) -> Self {
        Precision::Fp8 { group_size, scales: ScaleType::Bf16 }
    }

    /// The same with scales of another type, where there is a choice: of integers bf16 or f16, of FP8 bf16 or f32.
    pub fn with_scales(self, scales: ScaleType) -> Self {
        let of_integers = if scales == ScaleType::F32 { ScaleType::Bf16 } else { scales };
        match self {
            Precision::Int8 { group_size, .. } => Precision::Int8 { group_size, scales: of_integers },
            Precision::Int4 { group_size, .. } => Precision::Int4 { group_size, scales: of_integers },
            Precision::Uint4 { group_size, .. } => Precision::Uint4 { group_size, scales: of_integers },
            Precision::Fp8 { group_size, .. } if scales == ScaleType::Bf16 => Precision::Fp8 { group_size, scales },
            Precision::Fp8 { group_size, .. } => Precision::Fp8 { group_size, scales: ScaleType::F32 },
            _ => self,
        }
    }

    /// The same in groups of `group_size`, where there are groups; INT8 where it has groups of one size.
    pub fn in_groups(self, group_size: usize) -> Self {
        match self {
            Precision::Int8 { scales, .. } => Precision::Int8 { group_size, scales },
            Precision::Int4 { scales, .. } => Precision::Int4 { group_size, scales },
            Precision::Uint4 { scales, .. } => Precision::Uint4 { group_size, scales },
            Precision::Fp8 { scales, .. } => Precision::Fp8 { group_size, scales },
            Precision::Iq4 { .. } => Precision::Iq4 { group_size },
            _ if self.group_size().is_some_and(|own| own != group_size) => Precision::int8(group_size),
            _ => self,
        }
    }

    /// The coarsest precision that keeps weights of both, with scales in BF16 where one of theirs does not do.
    pub fn coarsest_of(self, other: Self) -> Self {
        match (self.group_size(), other.group_size()) {
            (Some(a), Some(b)) if self.name() == other.name() => {
                let scales = match self {
                    Precision::Fp8 { .. } => self.scales().of_both(other.scales()),
                    _ => ScaleType::Bf16,
                };
                self.in_groups(a.min(b)).with_scales(scales)
            }
            (Some(a), Some(b)) => Precision::int8(a.min(b).max(GROUP_SIZES[0])),
            _ => Precision::Bf16,
        }
    }

    /// Its name, without groups and scales.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::Int8 { .. } => "int8",
            Precision::Int4 { .. } => "int4",
            Precision::Uint4 { .. } => "uint4",
            Precision::Mxfp4 => "mxfp4",
            Precision::Nvfp4 => "nvfp4",
            Precision::Fp8 { .. } => "fp8",
            Precision::Q2K => "q2_k",
            Precision::Q3K => "q3_k",
            Precision::Q4K => "q4_k",
            Precision::Q5K => "q5_k",
            Precision::Q6K => "q6_k",
            Precision::Iq4Xs => "iq4_xs",
            Precision::Iq4Nl => "iq4_nl",
            Precision::Iq4 { .. } => "iq4",
            Precision::Q4_1 => "q4_1",
            Precision::Q5_1 => "q5_1",
            Precision::Q5_0 => "q5_0",
            Precision::Iq2Xxs => "iq2_xxs",
            Precision::Iq2Xs => "iq2_xs",
            Precision::Iq2S => "iq2_s",
            Precision::Iq3Xxs => "iq3_xxs",
            Precision::Iq3S => "iq3_s",
            Precision::Iq1S => "iq1_s",
            Precision::Iq1M => "iq1_m",
            Precision::Tq1_0 => "tq1_0",
            Precision::Tq2_0 => "tq2_0",
        }
    }

    /// The number of its row in [`Row::ALL`]; `None` for BF16.
    #[inline]
    pub const fn row_number(self) -> Option<usize> {
        Some(match self {
            Precision::Bf16 => return None,
            Precision::Mxfp4 => 0,
            Precision::Int4 { .. } => 1,
            Precision::Int8 { .. } => 2,
            Precision::Q2K => 3,
            Precision::Q3K => 4,
            Precision::Q4K => 5,
            Precision::Q5K => 6,
            Precision::Q6K => 7,
            Precision::Iq4Xs => 8,
            Precision::Iq4Nl | Precision::Iq4 { .. } => 9,
            Precision::Q4_1 => 10,
            Precision::Q5_1 => 11,
            Precision::Q5_0 => 12,
            Precision::Nvfp4 => 13,
            Precision::Iq2Xxs => 14,
            Precision::Iq2Xs => 15,
            Precision::Iq2S => 16,
            Precision::Iq3Xxs => 17,
            Precision::Iq3S => 18,
            Precision::Uint4 { .. } => 19,
            Precision::Iq1S => 20,
            Precision::Iq1M => 21,
            Precision::Tq1_0 => 22,
            Precision::Tq2_0 => 23,
            Precision::Fp8 { scales: ScaleType::Bf16, .. } => 24,
            Precision::Fp8 { .. } => 25,
        })
    }

    /// Its codes and scales; `None` for BF16.
    #[inline]
    pub const fn row(self) -> Option<Row> {
        match self.row_number() {
            Some(number) => Some(Row::ALL[number]),
            None => None,
        }
    }

    /// Type of the codes; `None` for BF16.
    #[inline]
    pub const fn codes(self) -> Option<CodeType> {
        match self.row() {
            Some(row) => Some(row.codes),
            None => None,
        }
    }

    /// Bytes of `k` inputs of the 16 rows of a tile, without scales.
    pub(super) const fn line_bytes(self, k: usize) -> usize {
        match self.codes() {
            None => k.next_multiple_of(BF16_INPUTS) * TILE_ROWS * 2,
            Some(codes) => codes.bytes(k),
        }
    }

    /// Inputs that share a scale; `None` for BF16.
    #[inline]
    pub const fn group_size(self) -> Option<usize> {
        match (self, self.row()) {
            (
                Precision::Int8 { group_size, .. }
                | Precision::Int4 { group_size, .. }
                | Precision::Uint4 { group_size, .. }
                | Precision::Iq4 { group_size }
                | Precision::Fp8 { group_size, .. },
                _,
            ) => Some(group_size),
            (Precision::Iq4Nl, _) => Some(32),
            (_, Some(row)) => Some(row.group_size),
            (_, None) => None,
        }
    }

    /// Whether activations are quantized for it: its weights are integers.
    pub fn takes_integers(self) -> bool {
        self.codes().is_some_and(|codes| !codes.are_floats())
    }

    /// What divides the length of every row: a group of a block or more, or a super-block.
    pub fn unit(self) -> usize {
        match self.row() {
            Some(row) if row.scales.have_super_blocks() => SUPER_BLOCK,
            _ => self.group_size().map_or(1, |group| group.max(BLOCK)),
        }
    }

    /// Type of the scales, or of what they are multiples of.
    pub fn scales(self) -> ScaleType {
        match self {
            Precision::Int8 { scales, .. }
            | Precision::Int4 { scales, .. }
            | Precision::Uint4 { scales, .. }
            | Precision::Fp8 { scales, .. } => scales,
            Precision::Nvfp4 => ScaleType::F32,
            Precision::Bf16 | Precision::Mxfp4 | Precision::Iq4 { .. } => ScaleType::Bf16,
            _ => ScaleType::F16,
        }
    }
}

impl std::str::FromStr for Precision {
    type Err = String;

    /// As it is displayed.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().into_iter().find(|precision| precision.to_string() == text);
        found.ok_or_else(|| {
            let all: Vec<_> = Self::all().iter().map(Self::to_string).collect();
            format!("there is no precision {text:?}: choose {}", all.join(", "))
        })
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Precision::Int8 { group_size, scales }
            | Precision::Int4 { group_size, scales }
            | Precision::Uint4 { group_size, scales }
            | Precision::Fp8 { group_size, scales } => {
                write!(f, "{}-g{group_size}", self.name())?;
                match scales {
                    ScaleType::Bf16 => Ok(()),
                    ScaleType::F16 => write!(f, "-f16"),
                    ScaleType::F32 => write!(f, "-f32"),
                }
            }
            Precision::Iq4 { group_size } => write!(f, "{}-g{group_size}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}
