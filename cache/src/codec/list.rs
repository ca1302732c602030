//! What matrices a checkpoint holds: names and shapes of all that [`find`](super::find) finds, of stacked experts the
//! first.

use super::Quantization;
use crate::checkpoint::{Checkpoint, Dtype};

impl Checkpoint {
    /// Name and shape `[n, k]` of every matrix, sorted by name; of experts, stacked or not, those of number 0 stand for
    /// all.
    pub fn matrices(&self) -> Vec<(String, [usize; 2])> {
        let names = self.names().filter(|name| {
            name.split_once(".experts.")
                .is_none_or(|(_, rest)| !rest.starts_with(|c: char| c.is_ascii_digit()) || rest.starts_with("0."))
        });
        let mut found: Vec<_> = names.flat_map(|name| self.matrices_of(name)).collect();
        found.sort();
        found
    }

    /// Those that the tensor `name` holds the weights of.
    fn matrices_of(&self, name: &str) -> Vec<(String, [usize; 2])> {
        let Some(view) = self.get(name) else { return Vec::new() };
        let (stem, part) = name.rsplit_once('.').unwrap_or(("", name));
        let matrix = |n: usize, k: usize| vec![(format!("{stem}.weight"), [n, k])];
        match (part, view.shape) {
            ("weight", &[n, k]) => matrix(n, k),
            ("weight_packed", &[n, words]) => {
                let bits = match self.quantization() {
                    Quantization::CompressedTensors { bits, .. } => *bits as usize,
                    _ => 4,
                };
                // The last word of a row may not be full.
                let shape = self.get(&format!("{stem}.weight_shape")).filter(|shape| shape.shape == [2]);
                let bytes = |dtype| if dtype == Dtype::I64 { 8 } else { 4 };
                let k = shape.map(|s| {
                    s.data
                        .get(bytes(s.dtype)..)
                        .and_then(<[u8]>::first_chunk)
                        .map_or(0, |&word| u32::from_le_bytes(word)) as usize
                });
                matrix(n, k.filter(|&k| k != 0 && k <= words * 32 / bits).unwrap_or(words * 32 / bits))
            }
            ("qweight", &[rows, cols]) => match self.quantization() {
                Quantization::Gptq { bits, .. } => matrix(cols, rows.saturating_mul(32) / *bits as usize),
                _ => matrix(cols.saturating_mul(8), rows),
            },
            _ => stacked(name, view.shape),
        }
    }
}

/// The first expert's matrices in a tensor of all experts.
fn stacked(name: &str, shape: &[usize]) -> Vec<(String, [usize; 2])> {
    let Some((head, part)) = name.rsplit_once(".experts.") else { return Vec::new() };
    let of = |part: &str, n: usize, k: usize| (format!("{head}.experts.0.{part}.weight"), [n, k]);
    match (part.strip_suffix(".weight").unwrap_or(part), shape) {
        ("gate_up_proj_blocks", &[_, n, blocks, 16]) => {
            vec![of("gate_proj", n / 2, blocks * 32), of("up_proj", n / 2, blocks * 32)]
        }
        ("down_proj_blocks", &[_, n, blocks, 16]) => vec![of("down_proj", n, blocks * 32)],
        ("gate_up_proj", &[_, n, k]) => vec![of("gate_proj", n / 2, k), of("up_proj", n / 2, k)],
        (part @ ("gate_proj" | "up_proj" | "down_proj" | "w1" | "w2" | "w3"), &[_, n, k]) => vec![of(part, n, k)],
        _ => Vec::new(),
    }
}
