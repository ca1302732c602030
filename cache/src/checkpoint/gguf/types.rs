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
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl GgmlType {
    /// Every one of them.
    pub const ALL: [Self; 13] = {
        use GgmlType::*;
        [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4]
    };

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
            Self::IQ4_XS => (256, 136),
            Self::MXFP4 => (32, 17),
        }
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

/// The type of this number in a file. Errors: its name, or number, and what to do.
pub(super) fn dtype(number: u32) -> Result<Dtype, String> {
    use GgmlType::*;
    Ok(match number {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Ggml(Q4_0),
        3 => Dtype::Ggml(Q4_1),
        6 => Dtype::Ggml(Q5_0),
        7 => Dtype::Ggml(Q5_1),
        8 => Dtype::Ggml(Q8_0),
        10 => Dtype::Ggml(Q2_K),
        11 => Dtype::Ggml(Q3_K),
        12 => Dtype::Ggml(Q4_K),
        13 => Dtype::Ggml(Q5_K),
        14 => Dtype::Ggml(Q6_K),
        20 => Dtype::Ggml(IQ4_NL),
        23 => Dtype::Ggml(IQ4_XS),
        24 => Dtype::I8,
        25 => Dtype::I16,
        26 => Dtype::I32,
        27 => Dtype::I64,
        28 => Dtype::F64,
        30 => Dtype::BF16,
        39 => Dtype::Ggml(MXFP4),
        _ => {
            let name = match number {
                16 => "IQ2_XXS",
                17 => "IQ2_XS",
                18 => "IQ3_XXS",
                19 => "IQ1_S",
                21 => "IQ3_S",
                22 => "IQ2_S",
                29 => "IQ1_M",
                34 => "TQ1_0",
                35 => "TQ2_0",
                _ => "",
            };
            let what = if name.is_empty() { format!("number {number}") } else { name.to_string() };
            return Err(format!(
                "{what}, which is not supported: use a file in Q2_K to Q8_0, IQ4_NL, IQ4_XS, MXFP4, BF16, F16 or F32"
            ));
        }
    })
}
