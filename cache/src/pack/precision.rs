//! The precisions that weights are packed in, and all that is to be known of each: a new one is a row of this file.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{BF16_INPUTS, GROUP_SIZES, TILE_ROWS};

/// Twice what four bits of E2M1 stand for, so that all are integers: a sign, two bits of exponent, one of mantissa.
///
/// Source: the OCP microscaling specification 1.0.
pub const DOUBLED_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The type of a group's scale, two bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleType {
    /// 8 bits of significand, the range of f32.
    #[default]
    Bf16,
    /// 11 bits, up to 65504: where a checkpoint has them.
    F16,
}

impl ScaleType {
    /// The bits of the nearest scale there is; beyond the range the last one.
    pub fn to_bits(self, scale: f32) -> u16 {
        match self {
            ScaleType::Bf16 => bf16::from_f32(scale).to_bits(),
            ScaleType::F16 => f16::from_f32(scale.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_bits(),
        }
    }

    /// The scale that has these bits.
    pub fn from_bits(self, bits: u16) -> f32 {
        match self {
            ScaleType::Bf16 => bf16::from_bits(bits).to_f32(),
            ScaleType::F16 => f16::from_bits(bits).to_f32(),
        }
    }

    fn is_bf16(&self) -> bool {
        *self == ScaleType::Bf16
    }
}

/// The type of a code. The smaller ones stand first: of those that hold a source, the first is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeType {
    /// The bits of E2M1, which stand for twice their value: [`DOUBLED_E2M1`].
    E2m1,
    /// Integers of 4 bits, stored with 8 added.
    Int4,
    /// Integers of 8 bits, stored with 128 added.
    Int8,
}

impl CodeType {
    /// Every one of them.
    pub const ALL: [Self; 3] = [Self::E2m1, Self::Int4, Self::Int8];

    /// Bits of a stored code.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2m1 | Self::Int4 => 4,
            Self::Int8 => 8,
        }
    }

    /// The smallest and the largest code.
    pub const fn range(self) -> [i8; 2] {
        match self {
            Self::E2m1 => [-12, 12],
            Self::Int4 => [-8, 7],
            Self::Int8 => [-128, 127],
        }
    }

    /// Whether codes are values of a table, and not every integer of their range.
    pub const fn is_table(self) -> bool {
        match self {
            Self::E2m1 => true,
            Self::Int4 | Self::Int8 => false,
        }
    }

    /// The code that these bits stand for.
    pub const fn code(self, stored: u8) -> i8 {
        match self {
            Self::E2m1 => DOUBLED_E2M1[stored as usize],
            Self::Int4 => stored as i8 - 8,
            Self::Int8 => (stored ^ 0x80) as i8,
        }
    }

    /// The byte whose codes are all zero.
    pub const fn zero_byte(self) -> u8 {
        match self {
            Self::E2m1 => 0x00,
            Self::Int4 => 0x88,
            Self::Int8 => 0x80,
        }
    }

    /// The precision of these codes, in groups of `group_size` where there is a choice.
    pub const fn precision(self, group_size: usize) -> Precision {
        match self {
            Self::E2m1 => Precision::Mxfp4,
            Self::Int4 => Precision::int4(group_size),
            Self::Int8 => Precision::int8(group_size),
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
    /// 4-bit floats, E2M1, one bf16 scale per 32 inputs of a row: half of MXFP4's own, since codes count twice. All
    /// that MXFP4 has are bf16 numbers, the least two of them subnormal.
    Mxfp4,
}

impl Precision {
    /// Every precision there is.
    pub fn all() -> Vec<Self> {
        let coded = CodeType::ALL.into_iter().flat_map(|codes| GROUP_SIZES.map(|group| codes.precision(group)));
        let mut all = vec![Self::Bf16];
        all.extend(coded.flat_map(|precision| [precision, precision.with_scales(ScaleType::F16)]));
        all.dedup(); // MXFP4 has one size of groups and one type of scales
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

    /// The same with scales of another type, where there is a choice.
    pub fn with_scales(self, scales: ScaleType) -> Self {
        match self {
            Precision::Int8 { group_size, .. } => Precision::Int8 { group_size, scales },
            Precision::Int4 { group_size, .. } => Precision::Int4 { group_size, scales },
            Precision::Bf16 | Precision::Mxfp4 => self,
        }
    }

    /// The same in groups of `group_size`, where there are groups. MXFP4 has one size; INT8 keeps it in others.
    pub fn in_groups(self, group_size: usize) -> Self {
        match self {
            Precision::Int8 { scales, .. } => Precision::Int8 { group_size, scales },
            Precision::Int4 { scales, .. } => Precision::Int4 { group_size, scales },
            Precision::Mxfp4 if group_size != 32 => Precision::int8(group_size),
            Precision::Bf16 | Precision::Mxfp4 => self,
        }
    }

    /// The coarsest precision that keeps weights of both, with scales in BF16.
    pub fn coarsest_of(self, other: Self) -> Self {
        match (self.group_size(), other.group_size()) {
            (Some(a), Some(b)) if self.codes() == other.codes() => {
                self.in_groups(a.min(b)).with_scales(ScaleType::Bf16)
            }
            (Some(a), Some(b)) => Precision::int8(a.min(b)),
            _ => Precision::Bf16,
        }
    }

    /// Its name, without groups and scales.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::Int8 { .. } => "int8",
            Precision::Int4 { .. } => "int4",
            Precision::Mxfp4 => "mxfp4",
        }
    }

    /// Type of the codes; `None` for BF16.
    pub const fn codes(self) -> Option<CodeType> {
        match self {
            Precision::Bf16 => None,
            Precision::Int8 { .. } => Some(CodeType::Int8),
            Precision::Int4 { .. } => Some(CodeType::Int4),
            Precision::Mxfp4 => Some(CodeType::E2m1),
        }
    }

    /// Bytes of `k` inputs of the 16 rows of a tile, without scales.
    pub(super) const fn line_bytes(self, k: usize) -> usize {
        match self.codes() {
            None => k.next_multiple_of(BF16_INPUTS) * TILE_ROWS * 2,
            Some(codes) => k * TILE_ROWS * codes.bits() / 8,
        }
    }

    /// Inputs that share a scale; `None` for BF16.
    pub fn group_size(self) -> Option<usize> {
        match self {
            Precision::Bf16 => None,
            Precision::Int8 { group_size, .. } | Precision::Int4 { group_size, .. } => Some(group_size),
            Precision::Mxfp4 => Some(32),
        }
    }

    /// Type of the scales, where there are any.
    pub fn scales(self) -> ScaleType {
        match self {
            Precision::Int8 { scales, .. } | Precision::Int4 { scales, .. } => scales,
            Precision::Bf16 | Precision::Mxfp4 => ScaleType::Bf16,
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Precision::Int8 { group_size, .. } | Precision::Int4 { group_size, .. } => {
                write!(f, "{}-g{group_size}", self.name())
            }
            Precision::Bf16 | Precision::Mxfp4 => f.write_str(self.name()),
        }?;
        if self.scales() == ScaleType::F16 { write!(f, "-f16") } else { Ok(()) }
    }
}
