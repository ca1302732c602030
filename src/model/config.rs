//! `ModelConfig`: what a model is, as plain data.

use std::sync::Arc;

use super::{Attention, Connections, Ffn, Indexer, Mixer, Moe, Ngrams, Rope, Stage, StateShape, StreamShape};
use crate::{Error, Result};

/// Everything the forward pass needs to know about a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of the checkpoint's config.
    pub architecture: String,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Positions the model was made for, prompt and answer together.
    pub max_context: usize,
    /// What the layers' norms and the final norm are.
    pub norm: Norm,
    /// Their epsilon.
    pub norm_eps: f32,
    /// Added to the stored weights of all norms but [`DeltaNet`](super::DeltaNet)'s own: some families store them
    /// around zero.
    pub norm_offset: f32,
    /// The output head is the embedding.
    pub tied_embeddings: bool,
    /// Multiplies rows of the embedding.
    pub embedding_scale: f32,
    /// Multiplies the logits.
    pub logit_scale: f32,
    /// Logits are `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    /// Layers of the checkpoint's draft head (multi-token prediction, MTP), which are not run.
    pub draft_layers: usize,
    /// What the checkpoint calls its tensors.
    pub names: Names,
    /// In order, bottom first.
    pub layers: Vec<LayerConfig>,
    /// Which layers of a larger model these are; `None`: they are all.
    pub stage: Option<Stage>,
}

/// What a checkpoint calls its tensors, where families differ. Names of a layer's parts stand behind `layers.5.`.
#[derive(Clone, Debug, PartialEq)]
pub struct Names {
    /// Before `embed_tokens.`, `layers.` and the final norm, with its dot.
    pub body: &'static str,
    /// The embedding, behind `body`.
    pub embedding: &'static str,
    /// The norm before the output head, behind `body`.
    pub final_norm: &'static str,
    /// The output head.
    pub head: &'static str,
    /// The norm before attention.
    pub attention_norm: &'static str,
    /// The norm before the feed-forward part.
    pub ffn_norm: &'static str,
    /// Grouped-query attention.
    pub attention: &'static str,
    /// Mamba-2.
    pub mamba: &'static str,
    /// Grouped-query attention's projection of its output.
    pub o: &'static str,
    /// Its norms of queries and keys.
    pub qk_norm: [&'static str; 2],
    /// Its sinks.
    pub sinks: &'static str,
    /// A dense MLP.
    pub mlp: &'static str,
    /// Its projections, and those of the shared expert: gate, up and down.
    pub mlp_projections: [&'static str; 3],
    /// The router.
    pub router: &'static str,
    /// The router's bias for choosing.
    pub correction_bias: &'static str,
    /// The shared expert.
    pub shared_expert: &'static str,
    /// The projections around routed experts of another width than the residual stream's.
    pub latent: [&'static str; 2],
    /// The routed experts.
    pub experts: &'static str,
    /// Their projections: gate, up and down, of expert 5 in `mlp.experts.5.NAME.weight`. Where a checkpoint has them
    /// stacked, the reader finds them by these names all the same.
    pub expert_projections: [&'static str; 3],
}

impl Names {
    /// Those of most families.
    pub const COMMON: Self = Self {
        body: "model.",
        embedding: "embed_tokens",
        final_norm: "norm",
        head: "lm_head",
        attention_norm: "input_layernorm",
        ffn_norm: "post_attention_layernorm",
        attention: "self_attn",
        mamba: "mamba",
        o: "o_proj",
        qk_norm: ["q_norm", "k_norm"],
        sinks: "sinks",
        mlp: "mlp",
        mlp_projections: ["gate_proj", "up_proj", "down_proj"],
        router: "mlp.gate",
        correction_bias: "mlp.gate.e_score_correction_bias",
        shared_expert: "mlp.shared_experts",
        latent: ["mlp.fc1_latent_proj", "mlp.fc2_latent_proj"],
        experts: "mlp.experts",
        expert_projections: ["gate_proj", "up_proj", "down_proj"],
    };

    /// The routed experts of a layer.
    pub fn experts_of(&self, layer: usize) -> String {
        format!("{}layers.{layer}.{}", self.body, self.experts)
    }

    /// The matrices of one expert of a layer: gate, up and down.
    pub fn expert(&self, layer: usize, expert: usize) -> [String; 3] {
        let experts = self.experts_of(layer);
        self.expert_projections.map(|which| format!("{experts}.{expert}.{which}.weight"))
    }
}

/// What a layer norm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// `x / sqrt(mean(x^2) + eps) * w`.
    Rms,
    /// The same of `x - mean(x)`.
    Layer,
}

/// How a layer's two parts read the residual stream `x` and add to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Residual {
    /// `x += attention(norm(x)); x += ffn(norm(x))`
    PreNorm,
    /// `x += norm(attention(norm(x))); x = (x + norm(ffn(x))) * scalar`, where a router, an MLP and the routed experts
    /// read `x` through norms of their own, and the results of the last two pass norms of their own. Source: HF
    /// modeling_gemma4.
    Sandwich,
    /// `h = norm(x); x += attention(h) + ffn(h)`
    Parallel,
    /// There are several streams: a mixer makes of them what a part reads, and says how much of the part's result each
    /// gets. Another one makes of them what the output head reads, in the place of the final norm.
    Streams(Mixer),
    /// There are several streams with hyper-connections.
    Connected(Connections),
}

/// One layer: attention, then a feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// How tokens look at each other.
    pub attention: Attention,
    /// What follows it.
    pub ffn: Ffn,
    /// How both join the residual stream.
    pub residual: Residual,
    /// What is added to the residual streams before attention reads them.
    pub ngrams: Option<Ngrams>,
}

impl LayerConfig {
    /// Dense matrices, `[n, k]` each, in a model of this width: projections, and a dense MLP or the shared expert.
    pub fn matrices(&self, hidden: usize) -> Vec<(usize, usize)> {
        let mixers = self.mixer().map_or(vec![], |mixer| [mixer.matrices(hidden); 2].concat());
        let connections = self.connections().map_or(vec![], |of| vec![(of.rows(), of.count * hidden); 2]);
        let ngrams = self.ngrams.iter().flat_map(|ngrams| ngrams.matrices(hidden, self.streams())).collect();
        [self.attention.matrices(hidden), self.ffn.matrices(hidden), mixers, connections, ngrams].concat()
    }

    /// What mixes the residual streams, if there are several.
    pub fn mixer(&self) -> Option<Mixer> {
        match self.residual {
            Residual::Streams(mixer) => Some(mixer),
            Residual::PreNorm | Residual::Sandwich | Residual::Parallel | Residual::Connected(_) => None,
        }
    }

    /// How the residual streams are connected, if they are.
    pub fn connections(&self) -> Option<Connections> {
        match self.residual {
            Residual::Connected(connections) => Some(connections),
            _ => None,
        }
    }

    fn streams(&self) -> usize {
        let connected = self.connections().map(|connections| connections.count);
        self.mixer().map(|mixer| mixer.count).or(connected).unwrap_or(1)
    }

    /// What a sequence keeps besides keys and values, in a model of this width: of attention, and of n-grams.
    pub fn states(&self, hidden: usize) -> [Option<StateShape>; 2] {
        [self.attention.state(), self.ngrams.as_ref().and_then(|ngrams| ngrams.state(hidden, self.streams()))]
    }

    /// Products of a token with all that is dense, in a model of this width.
    pub fn dense_products(&self, hidden: usize) -> f64 {
        let matrices = self.matrices(hidden);
        matrices.iter().map(|&(n, k)| n as f64 * k as f64).sum::<f64>() + self.attention.inner_products()
    }
}

impl ModelConfig {
    /// The MoE layers in order: model layer number and configuration.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &Moe)> {
        self.layers.iter().enumerate().filter_map(|(i, layer)| Some((self.number_of(i), layer.ffn.moe()?)))
    }

    /// The routed experts' dimensions; `None`: a dense model.
    pub fn moe(&self) -> Option<&Moe> {
        self.moe_layers().next().map(|(_, moe)| moe)
    }

    /// What mixes the residual streams, if there are several: of all layers alike.
    pub fn mixer(&self) -> Option<Mixer> {
        self.layers.first().and_then(LayerConfig::mixer)
    }

    /// How the residual streams are connected, if they are: of all layers alike.
    pub fn connections(&self) -> Option<Connections> {
        self.layers.first().and_then(LayerConfig::connections)
    }

    /// The residual streams.
    pub fn streams(&self) -> StreamShape {
        StreamShape { streams: self.layers.first().map_or(1, LayerConfig::streams), hidden_size: self.hidden_size }
    }

    /// Layers to whose start n-grams add, by their number in the model, and what they are.
    pub fn ngrams(&self) -> impl Iterator<Item = (usize, &Ngrams)> {
        self.layers.iter().enumerate().filter_map(|(i, layer)| Some((self.number_of(i), layer.ngrams.as_ref()?)))
    }

    /// Whether n-grams wait to be told [what tokens count as](Ngrams::alike).
    pub fn lacks_kinds(&self) -> bool {
        self.ngrams().any(|(_, ngrams)| ngrams.kinds.is_some() && ngrams.alike.is_none())
    }

    /// Tells them. Errors: there are not as many kinds as the config says.
    pub fn set_kinds(&mut self, alike: Vec<u32>) -> Result<()> {
        let (kinds, alike) = (alike.iter().max().map_or(0, |last| *last as usize + 1), Arc::from(alike));
        for ngrams in self.layers.iter_mut().filter_map(|layer| layer.ngrams.as_mut()) {
            if ngrams.kinds.is_some_and(|wanted| wanted != kinds) {
                return Err(Error::Model(format!(
                    "the tokenizer has {kinds} kinds of tokens, and `engram_compressed_vocab_size` is another number: \
                     download tokenizer.json and config.json again"
                )));
            }
            ngrams.alike = Some(Arc::clone(&alike));
        }
        Ok(())
    }

    /// The first layer's attention of each kind and width.
    pub fn attentions(&self) -> Vec<&Attention> {
        let mut found: Vec<&Attention> = Vec::new();
        for LayerConfig { attention, .. } in &self.layers {
            if !found.iter().any(|other| other.same_widths(attention)) {
                found.push(attention);
            }
        }
        found
    }

    /// The distinct rotary embeddings of the layers, in the order in which layers first have them.
    pub fn ropes(&self) -> Vec<&Rope> {
        let mut found = Vec::new();
        for rope in self.layers.iter().filter_map(|layer| layer.attention.rope()) {
            if !found.contains(&rope) {
                found.push(rope);
            }
        }
        found
    }

    /// The indexer of the layers that select positions: where some have candidates, one of those.
    pub fn indexer(&self) -> Option<&Indexer> {
        let all = || self.layers.iter().filter_map(|layer| Some(&layer.attention.selection()?.indexer));
        all().find(|indexer| indexer.candidates.is_some()).or_else(|| all().next())
    }

    /// The layer whose entries a layer reads, where they are not its own.
    pub fn lender(&self, layer: usize) -> Option<usize> {
        let borrows = self.layers[layer].attention.borrows();
        borrows.then(|| self.layers[..layer].iter().rposition(|before| before.attention.entries().is_some())).flatten()
    }

    /// Some layers keep a state instead of keys and values: what was read of a sequence cannot be shared, or partly
    /// forgotten.
    pub fn has_recurrent_state(&self) -> bool {
        self.layers.iter().any(|layer| layer.states(self.hidden_size).iter().any(Option::is_some))
    }
}
