//! One forward pass with everything it computed on the way written down: logits, residual stream, routing.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use crate::backend::Routing;
use crate::batch::{BLOCK_SIZE, Batch};
use crate::forward::{Forward, Tap};
use crate::kv_cache::{BlockPool, BlockTable};
use crate::load::Loaded;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Which layers' residual streams are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Every layer's.
    All,
    /// Of these layers.
    Some(Vec<usize>),
}

impl std::str::FromStr for Layers {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        if s == "all" {
            return Ok(Layers::All);
        }
        let layers: std::result::Result<_, _> = s.split(',').map(|n| n.trim().parse()).collect();
        layers.map(Layers::Some).map_err(|_| Error::Invalid(format!("`{s}` is neither `all` nor a list of layer numbers like 0,5,9")))
    }
}

/// What to write down.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// `logits` [T, vocab].
    pub logits: bool,
    /// `hidden.{i}` [T, hidden], after layer i, before the final norm.
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
    /// By layer: `[T, hidden]`.
    pub hidden: HashMap<usize, Vec<f32>>,
    /// By layer: experts and weights, `[T, top_k]` each.
    pub router: HashMap<usize, Routing>,
}

impl Tap for (&Wanted, &mut Capture) {
    fn wants_hidden(&self, layer: usize) -> bool {
        match &self.0.hidden {
            None => false,
            Some(Layers::All) => true,
            Some(Layers::Some(layers)) => layers.contains(&layer),
        }
    }

    fn hidden(&mut self, layer: usize, x: &[f32]) {
        self.1.hidden.entry(layer).or_default().extend_from_slice(x);
    }

    fn routing(&mut self, layer: usize, routing: &Routing) {
        if self.0.router {
            let all = self.1.router.entry(layer).or_default();
            all.top_k = routing.top_k;
            all.ids.extend_from_slice(&routing.ids);
            all.weights.extend_from_slice(&routing.weights);
        }
    }
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
        run(&mut **model, &batch, wanted, &mut capture)?;
    }
    Ok(capture)
}

fn run(model: &mut dyn Forward, batch: &Batch, wanted: &Wanted, capture: &mut Capture) -> Result<()> {
    model.forward(batch, Some(&mut (wanted, &mut *capture)))?;
    if wanted.logits {
        let rows: Vec<usize> = (0..batch.len()).collect();
        for rows in rows.chunks(model.max_logit_rows()) {
            capture.logits.extend_from_slice(model.logits(rows)?);
        }
    }
    Ok(())
}

fn check(model: &ModelConfig, max_context: usize, tokens: &[u32], wanted: &Wanted) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::Invalid("the prompt is empty: give it some text, or token ids".into()));
    }
    if tokens.len() > max_context {
        let n = tokens.len();
        return Err(Error::Invalid(format!(
            "the prompt has {n} tokens and the context holds {max_context}: shorten it, or raise --max-context if the model allows more"
        )));
    }
    if let Some(token) = tokens.iter().find(|&&t| t as usize >= model.vocab_size) {
        return Err(Error::Invalid(format!("token id {token} is not in the vocabulary of {}", model.vocab_size)));
    }
    let layers = model.layers.len();
    if let Some(Layers::Some(list)) = &wanted.hidden
        && let Some(layer) = list.iter().find(|&&l| l >= layers)
    {
        return Err(Error::Invalid(format!("--hidden {layer}: the model has layers 0 to {}", layers - 1)));
    }
    Ok(())
}

/// Refuses a place that cannot be written to, before a model is loaded for it. Errors: `Error::Invalid`.
pub fn check_out(path: &Path) -> Result<()> {
    // The finished file is renamed over the old one, which must not happen to a device.
    if path.exists() && !path.is_file() {
        return Err(Error::Invalid(format!("--out {} is a directory or device: give the name of a file", path.display())));
    }
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() && !dir.is_dir() => {
            Err(Error::Invalid(format!("--out {}: there is no directory {}, create it first", path.display(), dir.display())))
        }
        _ => Ok(()),
    }
}

impl Capture {
    /// Writes a safetensors file, whole or not at all. Errors: `Error::Io`.
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
            tensors.push((format!("hidden.{layer}"), Dtype::F32, vec![t, model.hidden_size], floats(values)));
        }
        for (layer, routing) in &self.router {
            let shape = vec![t, routing.top_k];
            tensors.push((format!("router.{layer}.ids"), Dtype::I32, shape.clone(), bytemuck::cast_slice(&routing.ids).to_vec()));
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
            Error::io(path)(e)
        })
    }
}
