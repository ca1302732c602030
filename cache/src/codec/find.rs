//! Where a matrix lies in a checkpoint: for itself, or stacked with those of the other experts. How it is stored is for
//! the formats' own files.

use super::float::{self, Transposed};
use super::formats::READERS;
use super::{Codec, Format, Found, Rows, Source, latent};
use crate::checkpoint::{Checkpoint, TensorView};
use crate::{Error, Result};

/// A matrix that was found, before its format's file has read it.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// The tensor that holds its weights; of a stack the part that does.
    pub(super) view: TensorView<'a>,
    /// Its number in a stack.
    pub(super) part: Option<usize>,
    /// `[n, k]`.
    pub(super) shape: [usize; 2],
}

impl<'a> Stored<'a> {
    /// Reads it by the type of its elements.
    pub(super) fn read(self) -> Result<Found<'a>> {
        let reader = READERS.iter().find(|reader| (reader.dtype)(self.view.dtype));
        reader.map_or_else(|| Err(self.view.error(float::unsupported(self.view.dtype))), |reader| (reader.read)(self))
    }

    /// The tensor `NAME.part`, where that of the weights is `NAME.something`.
    pub(super) fn beside(&self, part: &str) -> Option<TensorView<'a>> {
        self.checkpoint.get(&self.name_beside(part))
    }

    /// The same, where the format cannot do without. Errors: it is missing.
    pub(super) fn tensor_beside(&self, part: &str) -> Result<TensorView<'a>> {
        self.checkpoint.tensor(&self.name_beside(part))
    }

    fn name_beside(&self, part: &str) -> String {
        let stem = self.view.name.rsplit_once('.').map_or("", |(stem, _)| stem);
        format!("{stem}.{part}")
    }

    /// What belongs to this matrix in another stack. Errors: nothing does.
    pub(super) fn in_stack(&self, view: TensorView<'a>) -> Result<TensorView<'a>> {
        self.part.map_or(Ok(view), |expert| part(view, expert))
    }
}

/// Of a stack that of an expert. Errors: there is none.
fn part(view: TensorView<'_>, expert: usize) -> Result<TensorView<'_>> {
    match view.shape.first() {
        Some(&experts) if expert < experts && view.shape.len() > 2 => Ok(view.part(expert)),
        _ => Err(view.error(format!(
            "has shape {:?}, which has no expert {expert}: config.json and weights do not belong together",
            view.shape
        ))),
    }
}

pub(super) fn find<'a>(checkpoint: &'a Checkpoint, name: &str, [n, k]: [usize; 2]) -> Result<Source<'a>> {
    if n == 0 || k == 0 {
        return Err(Error::Invalid(format!(
            "tensor {name} of {n} x {k} has no weights: config.json is not that of a model"
        )));
    }
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let found = if let Some(view) = checkpoint.get(name) {
        let rows = checkpoint.permuted_head(name).map_or(Rows::ALL, |head| Rows::Pairs { head });
        Found { rows, ..matrix(checkpoint, view, None, [n, k])? }
    } else if let Some(found) = quantized(checkpoint, stem, [n, k])? {
        found
    } else if let Some(found) = stacked(checkpoint, stem, [n, k])? {
        found
    } else if let Some(found) = latent::found(checkpoint, stem, [n, k])? {
        found
    } else {
        return Err(checkpoint.tensor(name).err().unwrap_or_else(|| unreachable!("it was looked up before")));
    };
    Ok(found.named(name, [n, k]))
}

/// A matrix in tensors of a format's own names. Where several formats share a name, the config says which it is.
fn quantized<'a>(checkpoint: &'a Checkpoint, stem: &str, shape: [usize; 2]) -> Result<Option<Found<'a>>> {
    let own = READERS.iter().filter(|reader| !reader.tensor.is_empty());
    let Some((view, first)) =
        own.clone().find_map(|reader| Some((checkpoint.get(&format!("{stem}.{}", reader.tensor))?, reader)))
    else {
        return Ok(None);
    };
    let mut sharing = own.filter(|reader| reader.tensor == first.tensor);
    let reader = match sharing.clone().count() {
        1 => first,
        _ => sharing.find(|reader| checkpoint.quantization().is_read_by(reader)).ok_or_else(|| {
            view.error(
                "is packed as by GPTQ or AWQ, and config.json has no quantization_config that says which: download it \
                 again",
            )
        })?,
    };
    (reader.read)(Stored { checkpoint, view, part: None, shape }).map(Some)
}

/// The shape of the matrix in a tensor of elements that hold several of its weights; `None`: its own.
pub(super) fn held_shape(checkpoint: &Checkpoint, view: &TensorView<'_>) -> Option<[usize; 2]> {
    let reader = READERS.iter().find(|reader| (reader.dtype)(view.dtype))?;
    (reader.shape)(checkpoint, view)
}

/// A whole matrix `[n, k]`, or number `part` of stacked ones, by the type of its elements.
fn matrix<'a>(
    checkpoint: &'a Checkpoint,
    view: TensorView<'a>,
    part: Option<usize>,
    [n, k]: [usize; 2],
) -> Result<Found<'a>> {
    let whole = part.map_or(view, |i| view.part(i));
    // A matrix of one row may lie as a vector.
    let holds = held_shape(checkpoint, &whole);
    if !(n == 1 && whole.shape == [k]) && holds != Some([n, k]) && (holds.is_some() || whole.shape != [n, k]) {
        whole.expect_shape(&[n, k])?;
    }
    Stored { checkpoint, view: whole, part, shape: [n, k] }.read()
}

/// Tensors that hold all experts of a layer: those of `HEAD.experts.e.PART` are at `HEAD.experts`, or at `HEAD` itself.
struct Stack<'a, 's> {
    checkpoint: &'a Checkpoint,
    head: &'s str,
    expert: usize,
}

impl<'a> Stack<'a, '_> {
    fn get(&self, name: &str) -> Option<TensorView<'a>> {
        let head = self.head;
        let stack = |suffix| self.checkpoint.get(&format!("{head}.experts.{name}{suffix}"));
        let beside = || self.checkpoint.get(&format!("{head}.{name}.weight")).filter(|view| view.shape.len() == 3);
        ["", ".weight"].into_iter().find_map(stack).or_else(beside)
    }

    /// Plain numbers or quantized ones, of which `[n, k]` lies as it is or, plain ones only, `turned`.
    fn matrix(&self, view: TensorView<'a>, [n, k]: [usize; 2], turned: bool, what: &str) -> Result<Found<'a>> {
        let whole = part(view, self.expert)?;
        let found = match float::element_bytes(view.dtype).filter(|_| turned) {
            Some(_) => Found::new(
                Format::Float(view.dtype),
                ", transposed",
                vec![whole],
                Codec::Values(Box::new(Transposed { view: whole, n, k })),
            ),
            None => matrix(self.checkpoint, view, Some(self.expert), [n, k])?,
        };
        Ok(Found { words: found.words + what, ..found })
    }
}

/// Expert `e` of `HEAD.experts.e.PART` in tensors that hold all experts.
fn stacked<'a>(checkpoint: &'a Checkpoint, stem: &str, [n, k]: [usize; 2]) -> Result<Option<Found<'a>>> {
    let Some((head, rest)) = stem.rsplit_once(".experts.") else { return Ok(None) };
    let Some((expert, name)) = rest.split_once('.').and_then(|(e, name)| Some((e.parse().ok()?, name))) else {
        return Ok(None);
    };
    let stack = Stack { checkpoint, head, expert };
    let (role, second) = match name {
        "gate_proj" | "w1" => ("gate", Some(0)),
        "up_proj" | "w3" => ("up", Some(1)),
        "down_proj" | "w2" => ("down", None),
        _ => return Ok(None),
    };
    // Granite has names of its own.
    let gate_up = stack.get("gate_up_proj").or_else(|| stack.get("input_linear"));
    let down = || stack.get("output_linear").filter(|_| role == "down");
    // Of a square matrix the shape does not say which way it lies; its neighbour's then does.
    let (hidden, width) = if role == "down" { (n, k) } else { (k, n) };
    let turned = |view: &TensorView<'_>, shape: [usize; 2]| {
        if view.shape.get(1..) != Some(&[shape[1], shape[0]]) {
            return false;
        }
        match (&gate_up, shape[0] != shape[1]) {
            (_, true) => true,
            (Some(pair), false) if pair.name != view.name => pair.shape.get(1..) == Some(&[hidden, 2 * width]),
            (None, false) => false,
            (Some(_), false) => {
                stack.get("down_proj").is_some_and(|down| down.shape.get(1..) == Some(&[width, hidden]))
            }
        }
    };
    if let Some(view) = stack.get(name).or_else(|| stack.get(&format!("{role}_proj"))).or_else(down) {
        return stack.matrix(view, [n, k], turned(&view, [n, k]), ", stacked").map(Some);
    }
    // Where a stack of both has biases, rows of gate and up alternate; elsewhere one matrix follows the other.
    let alternates = stack.get("gate_up_proj_bias").is_some();
    let (all_rows, rows) = match second {
        None => (n, Rows::ALL),
        Some(second) if alternates => (2 * n, Rows::From { first: second, step: 2 }),
        Some(second) => (2 * n, Rows::From { first: second * n, step: 1 }),
    };
    if let (Some(view), Some(_)) = (gate_up, second) {
        let found = stack.matrix(view, [all_rows, k], turned(&view, [all_rows, k]), ", gate and up stacked")?;
        return Ok(Some(Found { rows, ..found }));
    }
    let name = if role == "down" { "down_proj" } else { "gate_up_proj" };
    let own = READERS.iter().filter(|reader| !reader.stack.is_empty());
    let Some((view, reader)) =
        own.into_iter().find_map(|reader| Some((stack.get(&format!("{name}{}", reader.stack))?, reader)))
    else {
        return Ok(None);
    };
    let stored = Stored { checkpoint, view: part(view, expert)?, part: Some(expert), shape: [all_rows, k] };
    Ok(Some(Found { rows, ..(reader.read)(stored)? }))
}
