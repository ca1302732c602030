//! From the bytes of a checkpoint tensor to f32, one file per source format.
//!
//! Every codec decodes runs of elements, so that a conversion holds a few rows and never a whole tensor.

mod float;

use crate::checkpoint::{Dtype, TensorView};
use crate::{Error, Result};

/// Decodes the whole tensor.
///
/// Errors: `Error::Checkpoint` naming the tensor when its type has no codec, or it holds NaN or infinity.
/// Panics: `out` has another number of elements (a bug).
pub fn decode_f32(view: &TensorView<'_>, out: &mut [f32]) -> Result<()> {
    decode_range_f32(view, 0, out)
}

/// Decodes the elements from number `start` on, as many as `out` holds. Errors and panics as [`decode_f32`].
pub fn decode_range_f32(view: &TensorView<'_>, start: usize, out: &mut [f32]) -> Result<()> {
    let element_bytes = element_bytes(view)?;
    let bytes = &view.data[start * element_bytes..(start + out.len()) * element_bytes];
    let finite = match view.dtype {
        Dtype::F32 => float::f32(bytes, out),
        Dtype::F16 => float::f16(bytes, out),
        _ => float::bf16(bytes, out),
    };
    match finite {
        true => Ok(()),
        false => Err(view.error("holds a NaN, an infinity or a value beyond BF16: the checkpoint is damaged; download it again")),
    }
}

/// Bytes of one element of a tensor that this module decodes. Errors: `Error::Checkpoint` when it does not.
pub(crate) fn element_bytes(view: &TensorView<'_>) -> Result<usize> {
    match view.dtype {
        Dtype::F32 => Ok(4),
        Dtype::F16 | Dtype::BF16 => Ok(2),
        other => Err(unsupported(view, other)),
    }
}

fn unsupported(view: &TensorView<'_>, dtype: Dtype) -> Error {
    view.error(format!("is of type {dtype:?}, which is not supported here; use a checkpoint in BF16, F16 or F32"))
}
