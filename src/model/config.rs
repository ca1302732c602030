//! `ModelConfig`: what a model is, as plain data.

use super::{Attention, Ffn, Moe, Rope};

/// Everything the forward pass needs to know about a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of the checkpoint's config.
    pub architecture: String,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Positions the model was made for, prompt and answer together.
    pub max_context: usize,
    /// Epsilon of the layer norms and the final norm.
    pub norm_eps: f32,
    /// Added to the stored weights of all norms but [`DeltaNet`](super::DeltaNet)'s own: some families store them
    /// around zero.
    pub norm_offset: f32,
    /// The output head is the embedding.
    pub tied_embeddings: bool,
    /// What the checkpoint calls its tensors.
    pub names: Names,
    /// In order, bottom first.
    pub layers: Vec<LayerConfig>,
}

/// What a checkpoint calls its tensors, where families differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Names {
    /// Before `embed_tokens.`, `layers.` and `norm.`, with its dot.
    pub body: &'static str,
    /// The output head.
    pub head: &'static str,
    /// The feed-forward part of an MoE layer.
    pub moe: &'static str,
    /// Its router.
    pub router: &'static str,
    /// Its router's bias for choosing.
    pub correction_bias: &'static str,
    /// Its shared expert.
    pub shared_expert: &'static str,
    /// The projections of its routed experts: gate, up and down, of expert 5 in `experts.5.NAME.weight`. Where a
    /// checkpoint has them stacked, the reader finds them by these names all the same.
    pub experts: [&'static str; 3],
}

impl Default for Names {
    fn default() -> Self {
        Self {
            body: "model.",
            head: "lm_head",
            moe: "mlp",
            router: "gate",
            correction_bias: "gate.e_score_correction_bias",
            shared_expert: "shared_experts",
            experts: ["gate_proj", "up_proj", "down_proj"],
        }
    }
}

/// One layer: attention, then a feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// How tokens look at each other.
    pub attention: Attention,
    /// What follows it.
    pub ffn: Ffn,
}

impl LayerConfig {
    /// Dense matrices, `[n, k]` each, in a model of this width: projections, and a dense MLP or the shared expert.
    pub fn matrices(&self, hidden: usize) -> Vec<(usize, usize)> {
        let mlp = self.ffn.mlp_width().map_or(vec![], |width| vec![(width, hidden), (width, hidden), (hidden, width)]);
        [self.attention.matrices(hidden), mlp].concat()
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
        self.layers.iter().enumerate().filter_map(|(i, layer)| Some((i, layer.ffn.moe()?)))
    }

    /// The routed experts' dimensions; `None`: a dense model.
    pub fn moe(&self) -> Option<&Moe> {
        self.moe_layers().next().map(|(_, moe)| moe)
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

    /// Bytes of KV cache one token takes over all layers, `parts` bf16 numbers to a key or value, dimensions filled up
    /// to whole tiles.
    pub fn kv_bytes_per_token(&self, parts: usize) -> usize {
        let bytes = |(heads, key_dim, value_dim): (usize, usize, usize)| {
            heads.saturating_mul(2 * parts * (key_dim.next_multiple_of(32) + value_dim.next_multiple_of(16)))
        };
        self.layers.iter().map(|l| bytes(l.attention.kv_dims())).sum()
    }

    /// Some layers keep a state instead of keys and values: what was read of a sequence cannot be shared, or partly
    /// forgotten.
    pub fn has_recurrent_state(&self) -> bool {
        self.state_bytes_per_sequence() > 0
    }

    /// Bytes of recurrent state one sequence takes over all layers.
    pub fn state_bytes_per_sequence(&self) -> usize {
        let states = self.layers.iter().filter_map(|layer| layer.attention.state());
        states.map(|state| size_of::<f32>() * state.len()).sum()
    }
}
