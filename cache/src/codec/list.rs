//! What matrices a checkpoint holds: names and shapes of all that [`find`](super::find) finds, of stacked experts the
//! first.

use super::find::held_shape;
use super::formats::READERS;
use crate::checkpoint::{Checkpoint, Dtype, TensorView};

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
        let shape = match (part, view.shape) {
            ("weight", &[n, k]) => held_shape(self, &view).or(Some([n, k])),
            _ => self.shape_of(&view, stem, part),
        };
        shape.map_or_else(|| self.stacked(&view), |shape| vec![(format!("{stem}.weight"), shape)])
    }

    /// The shape of the matrix in a tensor `stem.part` of a format's own name.
    fn shape_of(&self, view: &TensorView<'_>, stem: &str, part: &str) -> Option<[usize; 2]> {
        let quantization = self.quantization();
        let mut own = READERS.iter().filter(|reader| reader.tensor == part);
        // Of several the last, where the config does not say which: it needs no config.
        let reader = own.clone().find(|reader| quantization.is_read_by(reader)).or_else(|| own.next_back())?;
        let [n, most] = (reader.shape)(self, view)?;
        // The last word of a row may not be full.
        let shape = self.get(&format!("{stem}.weight_shape")).filter(|shape| shape.shape == [2]);
        let k = shape.and_then(|s| {
            let word = s.data.get(if s.dtype == Dtype::I64 { 8 } else { 4 }..).and_then(<[u8]>::first_chunk);
            word.map(|&word| u32::from_le_bytes(word) as usize)
        });
        Some([n, k.filter(|&k| k != 0 && k <= most).unwrap_or(most)])
    }

    /// The first expert's matrices in a tensor of all experts.
    fn stacked(&self, view: &TensorView<'_>) -> Vec<(String, [usize; 2])> {
        let name = view.name.strip_suffix(".weight").unwrap_or(view.name);
        let beside = || name.rsplit_once('.').filter(|_| view.shape.len() == 3);
        let Some((head, part)) = name.rsplit_once(".experts.").or_else(beside) else { return Vec::new() };
        let own = READERS.iter().filter(|reader| !reader.stack.is_empty());
        let own = own.filter_map(|reader| {
            let part = part.strip_suffix(reader.stack).filter(|part| ["gate_up_proj", "down_proj"].contains(part))?;
            Some((part, (reader.shape)(self, view)?))
        });
        let plain = || {
            let &[experts, n, k] = view.shape else { return None };
            let held = (experts > 0).then(|| held_shape(self, &view.part(0))).flatten();
            Some((part, held.unwrap_or([n, k])))
        };
        let Some((part, [n, k])) = own.into_iter().next().or_else(plain) else { return Vec::new() };
        let of = |part: &str, n: usize| (format!("{head}.experts.0.{part}.weight"), [n, k]);
        match part {
            "gate_up_proj" | "input_linear" => vec![of("gate_proj", n / 2), of("up_proj", n / 2)],
            "output_linear" => vec![of("down_proj", n)],
            "gate_proj" | "up_proj" | "down_proj" | "w1" | "w2" | "w3" => vec![of(part, n)],
            _ => Vec::new(),
        }
    }
}
