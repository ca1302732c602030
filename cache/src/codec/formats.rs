//! The registry of formats: every [`Source`](super::Source) is of one of these, and the table of docs/formats.md has a
//! row for each.

use crate::checkpoint::{Dtype, GgmlType};

/// What a matrix is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain numbers: BF16, F16 or F32.
    Float(Dtype),
    /// FP8 E4M3 with scales for blocks, rows or the whole.
    Fp8,
    /// Integers with a scale for each run of inputs.
    Integers {
        /// Whose layout it is.
        by: Library,
        /// 4 or 8.
        bits: usize,
        /// Whether groups have zero points.
        zeros: bool,
    },
    /// Integers whose inputs are grouped out of order, which GPTQ calls act-order.
    OutOfOrder(Library),
    /// 4-bit floats in blocks of 32, as gpt-oss has them.
    Mxfp4,
    /// A block type of GGUF files.
    Gguf(GgmlType),
}

/// Who writes integers in a layout of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field's names
pub enum Library {
    CompressedTensors,
    Gptq,
    Awq,
}

impl Format {
    /// Every one of them.
    pub fn all() -> impl Iterator<Item = Self> {
        use Library::*;
        let integers =
            |by| [(4, false), (8, false), (4, true), (8, true)].map(|(bits, zeros)| Self::Integers { by, bits, zeros });
        [Dtype::BF16, Dtype::F16, Dtype::F32]
            .map(Self::Float)
            .into_iter()
            .chain([Self::Fp8])
            .chain(integers(CompressedTensors))
            .chain(integers(Gptq))
            .chain([Self::Integers { by: Awq, bits: 4, zeros: true }])
            .chain([CompressedTensors, Gptq].map(Self::OutOfOrder))
            .chain([Self::Mxfp4])
            .chain(GgmlType::ALL.map(Self::Gguf))
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Float(dtype) => write!(f, "{dtype:?}"),
            Self::Fp8 => write!(f, "FP8 E4M3"),
            Self::Integers { by, bits, zeros } => {
                write!(f, "{by} INT{bits}{}", if *zeros { " with zero points" } else { "" })
            }
            Self::OutOfOrder(by) => write!(f, "{by} in act-order"),
            Self::Mxfp4 => write!(f, "MXFP4"),
            Self::Gguf(kind) => write!(f, "GGUF {kind}"),
        }
    }
}

impl std::fmt::Display for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::Gptq => "GPTQ",
            Self::Awq => "AWQ",
        })
    }
}
