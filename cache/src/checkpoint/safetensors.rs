//! The header of a safetensors file, checked.
//!
//! The `safetensors` crate checks the header: lengths, JSON, types, sizes without overflow, and that the tensors cover
//! the file exactly, without holes or overlaps. Here its findings become sentences.

use std::collections::HashMap;

use safetensors::SafeTensors;
use safetensors::tensor::SafeTensorError;

use super::{Dtype, Entry};

/// Reads the header of `bytes`, a whole safetensors file; every range it returns lies inside of them.
///
/// Errors: one clause that names the fault and its remedy.
pub fn parse(bytes: &[u8]) -> std::result::Result<HashMap<String, Entry>, String> {
    let (header_bytes, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| explain(&e, bytes.len()))?;
    let start = 8 + header_bytes;
    let mut entries = HashMap::new();
    for (name, info) in metadata.tensors() {
        let Some(dtype) = dtype(info.dtype) else {
            return Err(format!("tensor {name} is of the unsupported type {}; convert it to BF16", info.dtype));
        };
        let (from, to) = info.data_offsets;
        entries.insert(name, Entry { dtype, shape: info.shape.clone(), bytes: start + from..start + to });
    }
    Ok(entries)
}

fn explain(error: &SafeTensorError, file_bytes: usize) -> String {
    use SafeTensorError::*;
    let cause = match error {
        HeaderTooSmall => format!("has {file_bytes} bytes, too few for a safetensors file"),
        HeaderTooLarge => "claims a header of more than 100 MB, so it is no safetensors file".into(),
        InvalidHeaderLength => {
            format!("claims a header longer than its {file_bytes} bytes: it is cut off, or no safetensors file")
        }
        MetadataIncompleteBuffer => {
            format!("has {file_bytes} bytes, not what its header promises: it is cut off, or was written to")
        }
        InvalidOffset(name) => format!("tensor {name} does not begin where the one before it ends"),
        TensorInvalidInfo => "has a tensor whose bytes do not fit its type and shape".into(),
        ValidationOverflow => "has a tensor of impossible size".into(),
        other => format!("has no valid safetensors header ({other})"),
    };
    format!("{cause}; download it again")
}

fn dtype(dtype: safetensors::Dtype) -> Option<Dtype> {
    use safetensors::Dtype as S;
    Some(match dtype {
        S::F64 => Dtype::F64,
        S::F32 => Dtype::F32,
        S::F16 => Dtype::F16,
        S::BF16 => Dtype::BF16,
        S::F8_E4M3 => Dtype::F8E4M3,
        S::F8_E5M2 => Dtype::F8E5M2,
        S::F8_E8M0 => Dtype::F8E8M0,
        S::F4 => Dtype::F4,
        S::I64 => Dtype::I64,
        S::I32 => Dtype::I32,
        S::I16 => Dtype::I16,
        S::I8 => Dtype::I8,
        S::U64 => Dtype::U64,
        S::U32 => Dtype::U32,
        S::U16 => Dtype::U16,
        S::U8 => Dtype::U8,
        S::BOOL => Dtype::Bool,
        _ => return None,
    })
}
