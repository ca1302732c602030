//! Bytes in the place of plain weights, `NAME.weight`: codes of 8 bits, one to a byte, or 4-bit floats, two to a byte.
//! Which they are the config says.

use serde_json::Value;

use super::{Found, Reader, Stored, compressed_tensors, float, mxfp4, nvfp4};
use crate::Result;
use crate::checkpoint::Dtype;

pub(super) const READER: Reader = Reader {
    dtype: |dtype| matches!(dtype, Dtype::I8 | Dtype::U8),
    shape: |q, weights| match (holds(q, weights.dtype), weights.shape) {
        (Holds::Mxfp4 | Holds::Nvfp4, &[n, pairs]) => Some([n, pairs.saturating_mul(2)]),
        _ => None,
    },
    read,
    ..Reader::NONE
};

enum Holds {
    Integers,
    Mxfp4,
    Nvfp4,
    Unknown,
}

fn holds(q: &Value, dtype: Dtype) -> Holds {
    match (q["quant_method"].as_str(), dtype) {
        (Some("fp8"), _) => Holds::Mxfp4,
        (Some("modelopt"), Dtype::U8) => Holds::Nvfp4,
        (_, Dtype::I8) => Holds::Integers,
        _ => Holds::Unknown,
    }
}

fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    match holds(stored.checkpoint.quantization().config(), stored.view.dtype) {
        Holds::Integers => compressed_tensors::bytes(stored),
        Holds::Mxfp4 => mxfp4::pairs(stored),
        Holds::Nvfp4 => nvfp4::pairs(stored, nvfp4::MODELOPT),
        Holds::Unknown => Err(stored.view.error(float::unsupported(stored.view.dtype))),
    }
}
