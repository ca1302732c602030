//! The precisions that weights are packed in, and all that is to be known of each: a new one is a row of this file.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

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
            Precision::Bf16 => write!(f, "bf16"),
            Precision::Int8 { group_size, .. } => write!(f, "int8-g{group_size}"),
            Precision::Int4 { group_size, .. } => write!(f, "int4-g{group_size}"),
            Precision::Mxfp4 => write!(f, "mxfp4"),
        }?;
        if self.scales() == ScaleType::F16 { write!(f, "-f16") } else { Ok(()) }
    }
}
