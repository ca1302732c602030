//! Resident weights of a model, layer by layer.

use super::attention::AttentionWeights;
use super::ffn::FfnWeights;
use super::loader::Loader;
use crate::Result;
use crate::backend::Backend;
use crate::backend::source::TensorSource;
use crate::config::DenseBits;
use crate::model::{LayerConfig, ModelConfig};

/// All resident weights of a model.
pub struct Weights<B: Backend> {
    /// `[vocab, hidden]`
    pub embedding: B::Embedding,
    /// In order, bottom first.
    pub layers: Vec<LayerWeights<B>>,
    /// Before the output head.
    pub norm: B::Norm,
    /// `[vocab, hidden]`
    pub lm_head: B::Linear,
}

/// The resident weights of one layer.
pub struct LayerWeights<B: Backend> {
    /// Before attention.
    pub attention_norm: B::Norm,
    /// Projections.
    pub attention: AttentionWeights<B>,
    /// Before the feed-forward part.
    pub ffn_norm: B::Norm,
    /// The feed-forward part, without routed experts.
    pub ffn: FfnWeights<B>,
}

impl<B: Backend> Weights<B> {
    /// Loads everything but the routed experts. `report(done, layers)` is called after each layer and may stop it.
    pub fn load(
        backend: &B,
        source: &dyn TensorSource,
        model: &ModelConfig,
        bits: DenseBits,
        report: &dyn Fn(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let loader = Loader { backend, source, model, bits };
        let (body, hidden, vocab) = (model.names.body, model.hidden_size, model.vocab_size);
        let embedding = format!("{body}embed_tokens.weight");
        let head = if model.tied_embeddings { embedding.clone() } else { format!("{}.weight", model.names.head) };
        let layers = model.layers.iter().enumerate().map(|(i, layer)| {
            let weights = LayerWeights::load(&loader, &format!("{body}layers.{i}"), layer)?;
            report(i + 1, model.layers.len())?;
            Ok(weights)
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            embedding: backend.load_embedding(source.matrix(&embedding, vocab, hidden)?)?,
            norm: loader.norm(&format!("{body}norm.weight"), hidden)?,
            lm_head: backend.load_linear(source.matrix(&head, vocab, hidden)?, None, bits)?,
        })
    }

    /// Bytes of resident weights that a decode step of one token reads.
    pub fn bytes_per_token(&self, backend: &B) -> usize {
        let layer = |l: &LayerWeights<B>| l.attention.bytes_per_token(backend) + l.ffn.bytes_per_token(backend);
        self.layers.iter().map(layer).sum::<usize>() + backend.linear_bytes(&self.lm_head)
    }
}

impl<B: Backend> LayerWeights<B> {
    fn load(loader: &Loader<'_, B>, name: &str, layer: &LayerConfig) -> Result<Self> {
        let hidden = loader.model.hidden_size;
        Ok(Self {
            attention_norm: loader.norm(&format!("{name}.input_layernorm.weight"), hidden)?,
            attention: AttentionWeights::load(loader, name, &layer.attention)?,
            ffn_norm: loader.norm(&format!("{name}.post_attention_layernorm.weight"), hidden)?,
            ffn: FfnWeights::load(loader, name, &layer.ffn)?,
        })
    }
}
