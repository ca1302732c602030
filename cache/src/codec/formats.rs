//! The registry of formats: every [`Source`](super::Source) is of one of these, and the table of docs/formats.md has a
//! row for each. What reads a format is a row of [`READERS`], made in the format's own file: how it is found, listed
//! and announced in a config follows from that row.

mod awq;
mod bytes;
mod compressed_tensors;
pub(super) mod float;
pub(super) mod fp8;
mod gguf;
mod gptq;
mod mxfp4;
mod nvfp4;

use serde_json::Value;

use super::{Found, Stored};
use crate::Result;
use crate::checkpoint::{Checkpoint, Dtype, GgmlType, TensorView};
use crate::pack::Precision;

/// What reads the matrices of a format. A field that says nothing of a format is as in [`Reader::NONE`].
#[derive(Debug)]
pub(super) struct Reader {
    /// What `quant_method` calls it.
    pub(super) methods: &'static [&'static str],
    /// Whether a `quantization_config` with one of these methods says what is supported. Errors: one clause.
    pub(super) check: fn(&Value) -> std::result::Result<(), String>,
    /// The precision that keeps weights of this config, whose rows have these lengths.
    pub(super) kept_by: fn(&Value, &[usize]) -> Option<Precision>,
    /// The precision that holds exactly what a dense matrix of this name, with rows of this length, is in this config.
    pub(super) holds: fn(&Value, &str, usize) -> Option<Precision>,
    /// Types of the elements of `NAME.weight`, or of the weights of all experts in one tensor.
    pub(super) dtype: fn(Dtype) -> bool,
    /// `NAME.tensor` holds the weights in the place of `NAME.weight`; empty: no such tensor.
    pub(super) tensor: &'static str,
    /// What ends the names of tensors that hold the weights of all experts; empty: nothing.
    pub(super) stack: &'static str,
    /// Shape `[n, k]` of the matrix, or of each of a stack, that such a tensor holds; `None`: its own, or it has none.
    pub(super) shape: fn(&Checkpoint, &TensorView<'_>) -> Option<[usize; 2]>,
    /// Reads a matrix that was found by its element type, its tensor or its stack.
    pub(super) read: for<'a> fn(Stored<'a>) -> Result<Found<'a>>,
}

impl Reader {
    /// What no config, tensor or element type leads to.
    const NONE: Self = Self {
        methods: &[],
        check: |_| Ok(()),
        kept_by: |_, _| None,
        holds: |_, _, _| None,
        dtype: |_| false,
        tensor: "",
        stack: "",
        shape: |_, _| None,
        read: |stored| Err(stored.view.error(float::unsupported(stored.view.dtype))),
    };
}

/// Every reader.
pub(super) static READERS: [Reader; 9] = [
    float::READER,
    fp8::READER,
    compressed_tensors::READER,
    bytes::READER,
    gptq::READER,
    awq::READER,
    mxfp4::READER,
    nvfp4::READER,
    gguf::READER,
];

/// What a matrix is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain numbers: BF16, F16 or F32.
    Float(Dtype),
    /// FP8 E4M3 with scales for blocks, runs of inputs, rows or the whole.
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
    /// 4-bit floats in blocks of 32.
    Mxfp4,
    /// 4-bit floats in blocks of 16, whose scales are E4M3.
    Nvfp4,
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
    /// Whether weights are plain numbers, not quantized ones.
    pub(super) fn is_plain(self) -> bool {
        matches!(self, Self::Float(_))
    }

    /// Whether runs of 32 inputs or fewer have scales of their own, where codes and scales are not kept.
    pub(super) fn is_in_groups(self) -> bool {
        self != Self::Fp8
    }

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
            .chain([Self::Mxfp4, Self::Nvfp4])
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
            Self::Nvfp4 => write!(f, "NVFP4"),
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
