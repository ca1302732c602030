//! Resident weights of a model, layer by layer.

use super::attention::AttentionWeights;
use super::ffn::FfnWeights;
use super::join::Term;
use super::loader::{Cut, Loader};
use super::ngrams::{self, Tables};
use super::streams::{Connection, Mixer};
use crate::Result;
use crate::backend::Backend;
use crate::backend::source::TensorSource;
use crate::config::DenseBits;
use crate::model::{LastRead, LayerConfig, ModelConfig, Residual};

/// All resident weights of a model.
pub struct Weights<B: Backend> {
    /// `[vocab, hidden]`, of the first stage.
    pub embedding: Option<B::Embedding>,
    /// In order, bottom first.
    pub layers: Vec<LayerWeights<B>>,
    pub(super) tables: Tables<B>,
    pub(super) head: Option<HeadWeights<B>>, // of the last stage
}

/// The output head, and what it reads.
pub(super) struct HeadWeights<B: Backend> {
    pub(super) last: Last<B>,
    pub(super) linear: B::Linear, // [vocab, hidden], or a rank's part of the vocabulary
}

/// What the output head reads the residual streams through.
pub(super) enum Last<B: Backend> {
    /// There is one stream.
    Norm(B::Norm), // [hidden]
    /// There are several.
    Mixer(Mixer<B>),
    /// There are several, connected: what weighs them, where that is not their mean, and the norm, `[hidden]`.
    Connected(Option<Connection<B>>, B::Norm),
}

/// What the parts of a layer read the residual streams through.
pub(super) enum Entries<B: Backend> {
    /// There is one stream.
    Norms(LayerNorms<B>),
    /// There are several: of attention, and of the feed-forward part.
    Mixers([Mixer<B>; 2]),
    /// There are several, and connected.
    Connected([Connection<B>; 2], LayerNorms<B>),
}

/// The resident weights of one layer.
pub struct LayerWeights<B: Backend> {
    pub(super) entries: Entries<B>,
    pub(super) ngrams: Option<ngrams::Weights<B>>,
    /// Projections.
    pub attention: AttentionWeights<B>,
    pub(super) attention_term: Term, // what the result of these is
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
        model.share(backend.share())?; // what cannot be divided is told before anything is read
        let loader = Loader { backend, source, model, bits, share: backend.share() };
        let (body, hidden, vocab) = (model.names.body, model.hidden_size, model.vocab_size);
        let embedding = format!("{body}{}.weight", model.names.embedding);
        let layers = model.layers.iter().enumerate().map(|(i, layer)| {
            let weights = LayerWeights::load(&loader, &format!("{body}layers.{}", model.number_of(i)), layer)?;
            report(i + 1, model.layers.len())?;
            Ok(weights)
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            embedding: match model.is_first_stage() {
                true => Some(backend.load_embedding(source.matrix(&embedding, vocab, hidden)?)?),
                false => None,
            },
            tables: Tables::load(&loader)?,
            head: match model.is_last_stage() {
                true => Some(HeadWeights::load(&loader, embedding)?),
                false => None,
            },
        })
    }

    /// Bytes of resident weights that a decode step of one token reads.
    pub fn bytes_per_token(&self, backend: &B) -> usize {
        let of_mixer = |mixer: &Mixer<B>| mixer.bytes_per_token(backend);
        let layer = |l: &LayerWeights<B>| {
            let mixers = match &l.entries {
                Entries::Norms(_) | Entries::Connected(..) => 0,
                Entries::Mixers(mixers) => mixers.iter().map(of_mixer).sum(),
            };
            let ngrams = l.ngrams.as_ref().map_or(0, |ngrams| ngrams.bytes_per_token(backend));
            l.attention.bytes_per_token(backend) + l.ffn.bytes_per_token(backend) + mixers + ngrams
        };
        let head = self.head.as_ref().map_or(0, |HeadWeights { last, linear }| {
            let last = match last {
                Last::Norm(_) | Last::Connected(..) => 0,
                Last::Mixer(mixer) => of_mixer(mixer),
            };
            last + backend.linear_bytes(linear)
        });
        self.layers.iter().map(layer).sum::<usize>() + head
    }
}

impl<B: Backend> HeadWeights<B> {
    /// `embedding`: what that is called, which is the output head of some models.
    fn load(loader: &Loader<'_, B>, embedding: String) -> Result<Self> {
        let Loader { backend, source, model, bits, share } = *loader;
        let (body, hidden, vocab) = (model.names.body, model.hidden_size, model.vocab_size);
        let norm = || loader.norm(&format!("{body}{}.weight", model.names.final_norm), hidden);
        let last = match (model.mixer(), model.connections()) {
            (None, Some(of)) => {
                let connection = match of.last {
                    LastRead::Mean | LastRead::Ahead => None,
                    LastRead::Shares => Some(Connection::load_last(loader, &format!("{body}hc_head"), of)?),
                };
                Last::Connected(connection, norm()?)
            }
            (Some(mixer), _) => Last::Mixer(Mixer::load(loader, &format!("{body}hyper_connection_mixer"), mixer)?),
            (None, None) => Last::Norm(norm()?),
        };
        let head = if model.tied_embeddings { embedding } else { format!("{}.weight", model.names.head) };
        let cut = model.vocabulary_share(share).map_or(Cut::Whole, |_| Cut::Width);
        let head = loader.cut_stored(source.stored(&head, vocab, hidden)?, cut)?;
        Ok(Self { last, linear: backend.load_linear(head, None, bits.of_sensitive())? })
    }
}

/// The norms before and after a layer's parts, `[hidden]` each.
pub struct LayerNorms<B: Backend> {
    pub(super) attention: B::Norm,
    pub(super) ffn: Option<B::Norm>, // `None`: the part reads what attention reads
    pub(super) after: Option<AfterNorms<B>>,
}

/// What the results of a layer's parts go through.
pub(super) struct AfterNorms<B: Backend> {
    pub(super) attention: B::Norm,
    pub(super) ffn: B::Norm,
    pub(super) scalar: f32, // multiplies the residual stream at the layer's end
}

impl<B: Backend> LayerNorms<B> {
    fn load(loader: &Loader<'_, B>, layer: &str, residual: Residual) -> Result<Self> {
        let names = &loader.model.names;
        let norm = |which: &str| loader.norm(&format!("{layer}.{which}.weight"), loader.model.hidden_size);
        Ok(Self {
            attention: norm(names.attention_norm)?,
            ffn: match residual {
                Residual::PreNorm | Residual::Sandwich | Residual::Connected(_) => Some(norm(names.ffn_norm)?),
                Residual::Parallel | Residual::Streams(_) => None,
            },
            after: match residual {
                Residual::Sandwich => Some(AfterNorms {
                    attention: norm("post_attention_layernorm")?,
                    ffn: norm("post_feedforward_layernorm")?,
                    scalar: loader.number(&format!("{layer}.layer_scalar"))?,
                }),
                Residual::PreNorm | Residual::Parallel | Residual::Streams(_) | Residual::Connected(_) => None,
            },
        })
    }
}

impl<B: Backend> LayerWeights<B> {
    fn load(loader: &Loader<'_, B>, name: &str, layer: &LayerConfig) -> Result<Self> {
        let share = layer.attention_share(loader.share);
        Ok(Self {
            entries: match layer.residual {
                Residual::Streams(mixer) => {
                    let of = |part: &str| Mixer::load(loader, &format!("{name}.{part}_hyper_connection"), mixer);
                    Entries::Mixers([of("attn")?, of("mlp")?])
                }
                Residual::Connected(connections) => {
                    let of = |part: &str| Connection::load(loader, &format!("{name}.hc_{part}"), connections);
                    Entries::Connected([of("attn")?, of("ffn")?], LayerNorms::load(loader, name, layer.residual)?)
                }
                residual => Entries::Norms(LayerNorms::load(loader, name, residual)?),
            },
            ngrams: layer.ngrams.as_ref().map(|config| ngrams::Weights::load(loader, name, config)).transpose()?,
            attention: AttentionWeights::load(&loader.of_share(share), name, &layer.attention)?,
            attention_term: if share == loader.share { Term::Only } else { Term::Whole },
            ffn: FfnWeights::load(loader, name, layer)?,
        })
    }
}
