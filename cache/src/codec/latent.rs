//! `kv_b_proj` of latent attention where GGUF keeps it in two parts: keys transposed, `[heads, lora, nope]`, and values, `[heads, v, lora]`.
//!
//! The matrix is `[heads * (nope + v), lora]`. Source: llama.cpp's converter of DeepSeek models.

use super::{Read, Source, Values};

pub(super) struct LatentUp<'a> {
    pub(super) keys: Source<'a>,   // [heads * lora, nope]
    pub(super) values: Source<'a>, // [heads * v, lora]
    pub(super) heads: usize,
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
