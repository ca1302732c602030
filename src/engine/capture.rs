//! What passes compute on the way, written down: logits, residual stream, routing.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use crate::backend::Routing;
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::forward::Forward;
use crate::forward::block_pool::{BlockPool, BlockTable};
pub use crate::forward::tap::{Layers, Positions};
use crate::forward::tap::{Take, Tap};
use crate::load::Loaded;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// What a request wants to have of its tokens.
#[derive(Clone, Debug)]
pub struct CaptureWanted {
    /// The residual stream after these layers.
    pub layers: Layers,
    /// At these positions.
    pub positions: Positions,
    /// Logits at these positions, too, as the model gives them.
    pub logits: bool,
    /// The experts of these positions in every MoE layer, too, and their weights.
    pub router: bool,
}

/// What a position has that can be captured.
#[derive(Clone, Copy, Debug)]
pub struct RowSizes {
    /// Layers.
    pub layers: usize,
    /// Numbers of all residual streams.
    pub stream_width: usize,
    /// Logits.
    pub vocab_size: usize,
    /// Experts that it chooses, in all layers together.
    pub choices: usize,
}

impl RowSizes {
    /// Of a model.
    pub fn of(model: &ModelConfig) -> Self {
        Self {
            layers: model.layers.len(),
            stream_width: model.streams().width(),
            vocab_size: model.vocab_size,
            choices: model.moe_layers().map(|(_, moe)| moe.router.top_k).sum(),
        }
    }
}

impl CaptureWanted {
    /// Refuses layers that the model does not have, a router where it has none, and wanting nothing. Errors:
    /// `Error::Invalid`.
    pub fn check(&self, sizes: RowSizes) -> Result<()> {
        if self.layers == Layers::NONE && !self.logits && !self.router {
            return Err(Error::Invalid(
                "nothing is to be captured: name layers, or ask for logits or for the router's choices".into(),
            ));
        }
        if self.router && sizes.choices == 0 {
            return Err(Error::Invalid("the model has no router to capture: leave `router` out".into()));
        }
        self.layers.check(sizes.layers)?;
        self.positions.check()
    }

    /// Bytes of all rows of a sequence of `tokens` tokens, `prompt_tokens` of them its prompt; the last generated is
    /// never read.
    pub fn bytes(&self, prompt_tokens: usize, tokens: usize, sizes: RowSizes) -> usize {
        let RowSizes { layers, stream_width, vocab_size, choices } = sizes;
        let read = tokens.saturating_sub(1).max(prompt_tokens);
        let positions: usize = self.positions.within(prompt_tokens, 0..read).map(|range| range.len()).sum();
        let floats = self.layers.count(layers) * stream_width + usize::from(self.logits) * vocab_size;
        let row = floats * size_of::<f32>() + usize::from(self.router) * choices * size_of::<(i32, f32)>();
        positions.saturating_mul(row)
    }
}

/// What was captured of consecutive positions of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Captured {
    /// Where.
    pub what: HookPoint,
    /// The first position; the prompt begins at 0.
    pub position: usize,
    /// How many positions.
    pub count: usize,
    /// A row for each: `[count, streams * hidden]`, `[count, vocab]`, or weights of experts `[count, top_k]`.
    pub rows: Vec<f32>,
    /// Of a router: the experts, `[count, top_k]`.
    pub experts: Vec<i32>,
}

/// Where in the forward pass rows are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HookPoint {
    /// The residual stream after this layer, whatever was added to it there; before the final norm.
    Hidden(usize),
    /// Logits, before sampling changes them.
    Logits,
    /// Where this layer sends the position's token.
    Router(usize),
}

/// Logits of `rows` of the last batch, as many at a time as the model gives: `emit(row, logits)`, `[n, vocab]` from
/// that row on.
pub fn each_logits(model: &mut dyn Forward, rows: Range<usize>, mut emit: impl FnMut(usize, &[f32])) -> Result<()> {
    let most = model.max_logit_rows();
    for first in rows.clone().step_by(most) {
        let some: Vec<usize> = (first..rows.end.min(first + most)).collect();
        emit(first, model.logits(&some)?);
    }
    Ok(())
}

/// What to write down.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// `logits` [T, vocab].
    pub logits: bool,
    /// `hidden.{i}` [T, hidden], after layer i, before the final norm; `[T, streams, hidden]` where there are several.
    pub hidden: Option<Layers>,
    /// `router.{i}.ids` and `router.{i}.weights` [T, top_k] of every MoE layer.
    pub router: bool,
}

/// What one pass over some tokens computed.
#[derive(Debug, Default)]
pub struct Capture {
    /// The tokens, `[T]`.
    pub tokens: Vec<u32>,
    /// `[T, vocab]`, if wanted.
    pub logits: Vec<f32>,
    /// By layer: `[T, streams * hidden]`.
    pub hidden: HashMap<usize, Vec<f32>>,
    /// By layer: experts and weights, `[T, top_k]` each.
    pub router: HashMap<usize, Routing>,
}

/// Reads `tokens` in chunks of at most `chunk` tokens.
///
/// Errors: `Error::Invalid` when the prompt is empty, too long, or has a token or layer the model does not have.
pub fn capture(loaded: &mut Loaded, tokens: &[u32], wanted: &Wanted, chunk: usize) -> Result<Capture> {
    check(loaded.model.config(), loaded.max_context, tokens, wanted)?;
    let Loaded { model, kv_blocks, .. } = loaded;
    let mut pool = BlockPool::new(*kv_blocks);
    let mut blocks = BlockTable::default();
    assert!(pool.grow(&mut blocks, tokens.len()), "the pool holds a whole context");
    let mut capture = Capture { tokens: tokens.to_vec(), ..Default::default() };
    let mut batch = Batch::default();
    for (i, part) in tokens.chunks(chunk).enumerate() {
        batch.clear();
        let end = i * chunk + part.len();
        batch.push(part, i * chunk, &blocks[..end.div_ceil(BLOCK_SIZE)]);
        let layers = wanted.hidden.clone().unwrap_or(Layers::NONE);
        let take = Take { layers, router: wanted.router, rows: 0..part.len() };
        let mut tap = Tap { takes: vec![take], ..Tap::default() };
        model.forward(&batch, Some(&mut tap))?;
        for ((_, layer), rows) in tap.taken {
            capture.hidden.entry(layer).or_default().extend(rows);
        }
        for ((_, layer), routing) in &tap.routed {
            capture.router.entry(*layer).or_default().append(routing, 0..part.len());
        }
        if wanted.logits {
            each_logits(&mut **model, 0..part.len(), |_, logits| capture.logits.extend_from_slice(logits))?;
        }
    }
    Ok(capture)
}

fn check(model: &ModelConfig, max_context: usize, tokens: &[u32], wanted: &Wanted) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::Invalid("the prompt is empty: give it some text, or token ids".into()));
    }
    if tokens.len() > max_context {
        let n = tokens.len();
        return Err(Error::Invalid(format!(
            "the prompt has {n} tokens and the context holds {max_context}: shorten it, or raise --max-context if the \
             model allows more"
        )));
    }
    if let Some(token) = tokens.iter().find(|&&t| t as usize >= model.vocab_size) {
        return Err(Error::Invalid(format!("token id {token} is not in the vocabulary of {}", model.vocab_size)));
    }
    wanted.hidden.as_ref().map_or(Ok(()), |layers| layers.check(model.layers.len()))
}

/// Refuses a place that cannot be written to, before a model is loaded for it. Errors: `Error::Invalid`.
pub fn check_out(path: &Path) -> Result<()> {
    // The finished file is renamed over the old one, which must not happen to a device.
    if path.exists() && !path.is_file() {
        return Err(Error::Invalid(format!(
            "--out {} is a directory or device: give the name of a file",
            path.display()
        )));
    }
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() && !dir.is_dir() => Err(Error::Invalid(format!(
            "--out {}: there is no directory {}, create it first",
            path.display(),
            dir.display()
        ))),
        _ => Ok(()),
    }
}

impl Capture {
    /// Writes a safetensors file, whole or not at all. Errors: as [`Error::unwritable`].
    pub fn write(&self, model: &ModelConfig, path: &Path) -> Result<()> {
        let t = self.tokens.len();
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        let tokens: Vec<i64> = self.tokens.iter().map(|&t| t as i64).collect();
        tensors.push(("tokens".into(), Dtype::I64, vec![t], bytemuck::cast_slice(&tokens).to_vec()));
        let floats = |values: &[f32]| bytemuck::cast_slice(values).to_vec();
        if !self.logits.is_empty() {
            tensors.push(("logits".into(), Dtype::F32, vec![t, model.vocab_size], floats(&self.logits)));
        }
        for (layer, values) in &self.hidden {
            tensors.push((format!("hidden.{layer}"), Dtype::F32, model.streams().rows(t), floats(values)));
        }
        for (layer, routing) in &self.router {
            let shape = vec![t, routing.top_k];
            tensors.push((
                format!("router.{layer}.ids"),
                Dtype::I32,
                shape.clone(),
                bytemuck::cast_slice(&routing.ids).to_vec(),
            ));
            tensors.push((format!("router.{layer}.weights"), Dtype::F32, shape, floats(&routing.weights)));
        }
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), data).expect("a tensor's bytes are its shape's"))
        });
        let bytes = safetensors::serialize(views, None).expect("tensors with distinct names serialize");
        let mut partial = path.as_os_str().to_os_string();
        partial.push(".partial");
        let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
        written.map_err(|e| {
            let _ = std::fs::remove_file(&partial);
            Error::unwritable(path)(e)
        })
    }
}
