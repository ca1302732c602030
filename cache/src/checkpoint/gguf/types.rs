//! The block types of GGUF tensors.

use super::Dtype;

/// A block type whose weights `codec::gguf` decodes; the names are llama.cpp's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)] // the field's names
pub enum GgmlType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
}

impl GgmlType {
    /// Every one of them.
    pub const ALL: [Self; 22] = {
        use GgmlType::*;
        [
            Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS,
            IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4,
        ]
    };

    /// Its number in a file.
    pub fn number(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2_K => 10,
            Self::Q3_K => 11,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::IQ2_XXS => 16,
            Self::IQ2_XS => 17,
            Self::IQ3_XXS => 18,
            Self::IQ1_S => 19,
            Self::IQ4_NL => 20,
            Self::IQ3_S => 21,
            Self::IQ2_S => 22,
            Self::IQ4_XS => 23,
            Self::IQ1_M => 29,
            Self::TQ1_0 => 34,
            Self::TQ2_0 => 35,
            Self::MXFP4 => 39,
        }
    }

    /// Weights and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 | Self::IQ4_NL => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q2_K => (256, 84),
            Self::Q3_K => (256, 110),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
            Self::IQ1_S => (256, 50),
            Self::IQ1_M => (256, 56),
            Self::IQ2_XXS | Self::TQ2_0 => (256, 66),
            Self::IQ2_XS => (256, 74),
            Self::IQ2_S => (256, 82),
            Self::IQ3_XXS => (256, 98),
            Self::IQ3_S => (256, 110),
            Self::IQ4_XS => (256, 136),
            Self::TQ1_0 => (256, 54),
            Self::MXFP4 => (32, 17),
        }
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

/// The type of this number in a file. Errors: the number, and what to do.
pub(super) fn dtype(number: u32) -> Result<Dtype, String> {
    Ok(match number {
        0 => Dtype::F32,
        1 => Dtype::F16,
        24 => Dtype::I8,
        25 => Dtype::I16,
        26 => Dtype::I32,
        27 => Dtype::I64,
        28 => Dtype::F64,
        30 => Dtype::BF16,
        _ => match GgmlType::ALL.into_iter().find(|kind| kind.number() == number) {
            Some(kind) => Dtype::Ggml(kind),
            None => {
                return Err(format!(
                    "number {number}, which is not supported: use a file in Q2_K to Q8_0, IQ1_S to IQ4_XS, TQ1_0, \
                     TQ2_0, MXFP4, BF16, F16 or F32"
                ));
            }
        },
    })
}
