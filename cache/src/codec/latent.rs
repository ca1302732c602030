//! `kv_b_proj` of latent attention where GGUF keeps it in two parts: keys transposed, `[heads, lora, nope]`, and
//! values, `[heads, v, lora]`.
//!
//! The matrix is `[heads * (nope + v), lora]`. Source: llama.cpp's converter.

use super::{Codec, Found, Read, Source, Stored, Values};
use crate::Result;
use crate::checkpoint::{Checkpoint, TensorView};

struct LatentUp<'a> {
    keys: Source<'a>,   // [heads * lora, nope]
    values: Source<'a>, // [heads * v, lora]
    heads: usize,
}

/// `HEAD.kv_b_proj` of shape `[n, lora]`, where its two parts are there.
pub(super) fn found<'a>(checkpoint: &'a Checkpoint, stem: &str, [n, lora]: [usize; 2]) -> Result<Option<Found<'a>>> {
    let Some(head) = stem.strip_suffix(".kv_b_proj") else { return Ok(None) };
    let [keys, values] = ["k_b_proj", "v_b_proj"].map(|part| checkpoint.get(&format!("{head}.{part}.weight")));
    let (Some(keys), Some(values)) = (keys, values) else { return Ok(None) };
    let ([heads, key_lora, nope], [value_heads, v, value_lora]) = (keys.shape, values.shape) else {
        return Err(keys.error("and its values are not one matrix for each head: convert the model again"));
    };
    if (heads, key_lora, value_lora) != (value_heads, &lora, &lora) || heads * (nope + v) != n {
        return Err(keys.error(format!(
            "of shape {:?} does not belong to values of shape {:?} and a latent of {lora}",
            keys.shape, values.shape
        )));
    }
    let of = |view: TensorView<'a>, shape: [usize; 2]| -> Result<Source<'a>> {
        Ok(Stored { checkpoint, view, part: None, shape }.read()?.named(view.name, shape))
    };
    let (keys, values) = (of(keys, [heads * lora, *nope])?, of(values, [heads * v, lora])?);
    // What is quantized is so, in whichever part.
    let kind = [keys.kind, values.kind].into_iter().find(|kind| !kind.is_plain()).unwrap_or(keys.kind);
    let parts = [keys.parts.clone(), values.parts.clone()].concat();
    let codec = Codec::Values(Box::new(LatentUp { keys, values, heads: *heads }));
    Ok(Some(Found::new(kind, ", keys and values apart", parts, codec)))
}

impl Values for LatentUp<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let (nope, [values, lora]) = (self.keys.shape()[1], self.values.shape());
        let v = values / self.heads;
        let mut turned = (usize::MAX, Vec::new()); // a head and its keys, [lora, nope]
        for (i, out) in out.chunks_exact_mut(lora).enumerate() {
            let (head, row) = ((first + i) / (nope + v), (first + i) % (nope + v));
            if row >= nope {
                self.values.decode(head * v + row - nope, out).map_err(|e| e.to_string())?;
                continue;
            }
            if turned.0 != head {
                turned = (head, vec![0.0; lora * nope]);
                self.keys.decode(head * lora, &mut turned.1).map_err(|e| e.to_string())?;
            }
            out.iter_mut().zip(turned.1.chunks_exact(nope)).for_each(|(out, keys)| *out = keys[row]);
        }
        Ok(())
    }
}
