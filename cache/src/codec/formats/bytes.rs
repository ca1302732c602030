//! Bytes in the place of plain weights, `NAME.weight`: codes of 8 bits, one to a byte, or 4-bit floats, two to a byte.
//! Which they are their scales' names say, or the config.

use super::{Found, Reader, Stored, compressed_tensors, float, mxfp4, nvfp4};
use crate::Result;
use crate::checkpoint::{Checkpoint, Dtype, TensorView};

pub(super) const READER: Reader = Reader {
    dtype: |dtype| matches!(dtype, Dtype::I8 | Dtype::U8),
    shape: |checkpoint, weights| match (holds(checkpoint, weights), weights.shape) {
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

fn holds(checkpoint: &Checkpoint, weights: &TensorView<'_>) -> Holds {
    let has_number = || {
        let stem = weights.name.rsplit_once('.').map_or("", |(stem, _)| stem);
        checkpoint.get(&format!("{stem}.{}", nvfp4::MODELOPT.0)).is_some()
    };
    match (checkpoint.quantization().config()["quant_method"].as_str(), weights.dtype) {
        // Of NVIDIA's DeepSeek-V4-Flash-NVFP4 the config says fp8, which the other layers are.
        (_, Dtype::U8) if has_number() => Holds::Nvfp4,
        (Some("fp8"), _) => Holds::Mxfp4,
        (Some("modelopt"), Dtype::U8) => Holds::Nvfp4,
        (_, Dtype::I8) => Holds::Integers,
        _ => Holds::Unknown,
    }
}

fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    match holds(stored.checkpoint, &stored.view) {
        Holds::Integers => compressed_tensors::bytes(stored),
        Holds::Mxfp4 => mxfp4::pairs(stored),
        Holds::Nvfp4 => nvfp4::pairs(stored, nvfp4::MODELOPT),
        Holds::Unknown => Err(stored.view.error(float::unsupported(stored.view.dtype))),
    }
}
