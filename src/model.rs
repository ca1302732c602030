//! `ModelConfig`: what a model is, as plain data. An architecture is a file in `models/` that fills this in.

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
    /// Added to the stored weights of all norms but [`DeltaNet`]'s own: some families store them around zero.
    pub norm_offset: f32,
    /// The output head is the embedding.
    pub tied_embeddings: bool,
    /// What the checkpoint calls its tensors.
    pub names: Names,
    /// Rotary embedding, the same in every layer.
    pub rope: Rope,
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
    /// The projections of its routed experts: gate, up and down, of expert 5 in `experts.5.NAME.weight`. Where a checkpoint has them stacked, the
    /// reader finds them by these names all the same.
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

/// The attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Attention {
    /// Grouped queries: several query heads share one key/value head.
    Gqa(Gqa),
    /// Multi-head latent attention: keys and values are linear in one cached latent.
    Mla(Mla),
    /// Gated delta rule: a state of fixed size instead of keys and values.
    DeltaNet(DeltaNet),
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// RMS norm of queries and keys before RoPE.
    pub qk_norm: QkNorm,
    /// Biases on the projections.
    pub bias: Bias,
    /// A token sees itself and the `window - 1` before it; `None`: all before it.
    pub window: Option<usize>,
    /// Every head has a learned score that takes part in its softmax and brings no value.
    pub sinks: bool,
    /// The heads' outputs are multiplied with the sigmoid of a projection that `q_proj` has behind each head's query.
    pub output_gate: bool,
    /// Multiplies the scores.
    pub scale: f32,
}

/// RMS norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head.
    PerHead,
    /// Of all heads together.
    FullWidth,
}

/// Which projections of attention have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// None.
    None,
    /// Queries, keys and values.
    Qkv,
    /// Those and the output.
    All,
}

/// Gated DeltaNet: linear attention with a decaying state and the delta rule. Source: arXiv 2412.06464, and HF modeling_qwen3_next.
///
/// ```text
/// q, k, v = silu(convolution over the last conv_width inputs);   q = q / |q| / sqrt(key_head_dim);   k = k / |k|
/// S = exp(-exp(A_log) softplus(a + dt_bias)) S;   S += k (sigmoid(b) (v - S^T k))^T;   out = norm(S^T q) * silu(z)
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Heads of queries and keys.
    pub num_key_heads: usize,
    /// Heads of values, each with a state; a multiple of `num_key_heads`, neighbours share a query and a key.
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_head_dim: usize,
    /// Width of a value head.
    pub value_head_dim: usize,
    /// Inputs that a number of q, k or v is made of, its own included.
    pub conv_width: usize,
    /// The checkpoint has the first value head of each key head, then the second of each, and so on; they are put beside each other when loaded.
    pub tiled: bool,
}

impl DeltaNet {
    /// Queries, keys and values of a token: what the convolution runs over.
    pub fn conv_dim(&self) -> usize {
        2 * self.num_key_heads * self.key_head_dim + self.value_dim()
    }

    /// Values of a token.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// f32 numbers that a sequence keeps: past inputs of the convolution, and the heads' states.
    pub fn state_len(&self) -> usize {
        (self.conv_width - 1) * self.conv_dim() + self.value_dim() * self.key_head_dim
    }
}

/// Multi-head latent attention. Source: DeepSeek-V2 report, section 2.1.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Heads.
    pub num_heads: usize,
    /// Width of the query latent; `None`: queries come straight from the hidden state.
    pub q_lora_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Width of a head's part without position.
    pub qk_nope_head_dim: usize,
    /// Width of a head's rotated part; all heads share one such key.
    pub qk_rope_head_dim: usize,
    /// Width of a head's value.
    pub v_head_dim: usize,
    /// Biases on `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`.
    pub bias: bool,
    /// Multiplies the scores; YaRN's mscale squared is in it.
    pub scale: f32,
}

impl Mla {
    /// Epsilon of the `q_a` and `kv_a` norms, whatever `rms_norm_eps` says. Source: HF modeling_deepseek_v3.
    pub const NORM_EPS: f32 = 1e-6;

    /// Width of a query or key head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Width of one cached row: the latent, then the rotated key.
    pub fn cache_dim(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

/// The feed-forward part of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Ffn {
    /// `down(silu(gate x) * up x)`.
    Dense {
        /// Rows of `gate` and `up`.
        intermediate_size: usize,
    },
    /// A router and experts.
    Moe(Moe),
}

/// Mixture of experts: `scaling * sum_i w_i expert_i(x) + shared(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Routed experts.
    pub num_experts: usize,
    /// Rows of a routed expert's `gate` and `up`.
    pub intermediate_size: usize,
    /// Rows of the shared expert's `gate` and `up`; `None`: there is none.
    pub shared_intermediate_size: Option<usize>,
    /// The shared expert's output is multiplied with the sigmoid of a learned product with `x`.
    pub shared_gate: bool,
    /// What is between the routed experts' products.
    pub activation: Activation,
    /// Biases on the routed experts' projections.
    pub expert_bias: bool,
    /// How experts are chosen and weighted.
    pub router: Router,
}

/// From `gate x` and `up x` to what `down` is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, with `gate` at most `limit` and `up` within `limit` of 0. Source: HF modeling_gpt_oss.
    ClampedSwiglu {
        /// Bound of `gate` and `up`.
        limit: f32,
        /// Steepness of the sigmoid.
        alpha: f32,
    },
}

/// How a router turns logits into experts and weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Experts per token.
    pub top_k: usize,
    /// A learned bias is part of the logits.
    pub bias: bool,
    /// What makes scores of logits.
    pub scoring: Scoring,
    /// A learned bias takes part in choosing, never in weighting.
    pub correction_bias: bool,
    /// Only experts of the best groups can be chosen.
    pub groups: Option<Groups>,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// `routed_scaling_factor`, multiplied into the weights.
    pub scaling: f32,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    /// Each on its own.
    Sigmoid,
}

/// Group-limited choice. Source: DeepSeek-V2 report, section 2.2.2; V3 report, section 2.1.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups of neighbouring experts; divides their number.
    pub count: usize,
    /// Groups that stay.
    pub top_k: usize,
    /// What makes a group's score of its experts'.
    pub score: GroupScore,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// Its best expert's (V2).
    Max,
    /// The sum of its two best (V3).
    TopTwoSum,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Rotated width of a head.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairs are neighbours (2i, 2i + 1) instead of halves (i, i + dim / 2).
    pub interleaved: bool,
    /// Stretching beyond the trained context.
    pub scaling: RopeScaling,
}

/// How positions beyond the trained context are reached.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// High frequencies kept, low ones divided by a factor, a ramp between.
    Yarn(Yarn),
    /// The same by wavelength.
    Llama3(Llama3),
    /// Each frequency divided by a factor of its own, `[dim / 2]`: what GGUF files keep of Llama 3's.
    Factors(Vec<f32>),
}

/// Llama 3's stretching. Source: HF modeling_rope_utils.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama3 {
    /// Stretch of the context.
    pub factor: f64,
    /// Context before stretching.
    pub original_max_position: f64,
    /// Wavelengths over the original context up to which a frequency is divided by the factor.
    pub low_freq_factor: f64,
    /// Wavelengths over the original context from which it is kept.
    pub high_freq_factor: f64,
}

/// YaRN. Source: arXiv 2309.00071, and HF modeling_rope_utils.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Stretch of the context.
    pub factor: f64,
    /// Context before stretching.
    pub original_max_position: f64,
    /// Rotations over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which it is divided by the factor.
    pub beta_slow: f64,
    /// Multiplies cos and sin.
    pub attention_factor: f32,
    /// The ramp's ends are rounded outward to whole indices.
    pub truncate: bool,
}

impl Yarn {
    /// `0.1 * mscale * ln(factor) + 1`.
    pub fn mscale(factor: f64, mscale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
    }
}

impl Rope {
    /// Angle per position of each rotated pair, `[dim / 2]`.
    pub fn inv_freq(&self) -> Vec<f32> {
        // f32 powers as HF computes them: at position 100,000 the last bits of a frequency are whole radians' fractions.
        let plain = |i: usize| 1.0 / (self.theta as f32).powf((2 * i) as f32 / self.dim as f32);
        let half = self.dim / 2;
        match &self.scaling {
            RopeScaling::None => (0..half).map(plain).collect(),
            RopeScaling::Linear { factor } => (0..half).map(|i| plain(i) / *factor as f32).collect(),
            RopeScaling::Factors(factors) => factors.iter().enumerate().map(|(i, factor)| plain(i) / factor).collect(),
            RopeScaling::Llama3(l) => (0..half)
                .map(|i| {
                    let turns = l.original_max_position * f64::from(plain(i)) / std::f64::consts::TAU;
                    let kept = ((turns - l.low_freq_factor) / (l.high_freq_factor - l.low_freq_factor)).clamp(0.0, 1.0) as f32;
                    (1.0 - kept) * plain(i) / l.factor as f32 + kept * plain(i)
                })
                .collect(),
            RopeScaling::Yarn(y) => {
                // The index whose frequency makes `rotations` turns over the original context.
                let index = |rotations: f64| {
                    self.dim as f64 * (y.original_max_position / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (index(y.beta_fast), index(y.beta_slow));
                if y.truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(self.dim as f64 - 1.0));
                if low == high {
                    high += 0.001; // HF's guard against a division by zero
                }
                (0..half)
                    .map(|i| {
                        let interpolated = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        plain(i) / y.factor as f32 * interpolated + plain(i) * (1.0 - interpolated)
                    })
                    .collect()
            }
        }
    }

    /// Multiplies cos and sin.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(y) => y.attention_factor,
            _ => 1.0,
        }
    }
}

impl ModelConfig {
    /// The MoE layers in order: model layer number and configuration.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &Moe)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| match &l.ffn {
            Ffn::Moe(moe) => Some((i, moe)),
            Ffn::Dense { .. } => None,
        })
    }

    /// The routed experts' dimensions; `None`: a dense model.
    pub fn moe(&self) -> Option<&Moe> {
        self.moe_layers().next().map(|(_, moe)| moe)
    }

    /// The first layer's attention of each kind.
    pub fn attentions(&self) -> Vec<&Attention> {
        let mut found: Vec<&Attention> = Vec::new();
        for LayerConfig { attention, .. } in &self.layers {
            if !found.iter().any(|other| std::mem::discriminant(*other) == std::mem::discriminant(attention)) {
                found.push(attention);
            }
        }
        found
    }

    /// Bytes of KV cache one token takes over all layers, `parts` bf16 numbers to a key or value, dimensions filled up to whole tiles.
    pub fn kv_bytes_per_token(&self, parts: usize) -> usize {
        let bytes = |(heads, key_dim, value_dim): (usize, usize, usize)| {
            heads.saturating_mul(2 * parts * (key_dim.next_multiple_of(32) + value_dim.next_multiple_of(16)))
        };
        self.layers.iter().map(|l| bytes(l.attention.kv_dims())).sum()
    }

    /// Some layers keep a state instead of keys and values: what was read of a sequence cannot be shared, or partly forgotten.
    pub fn has_recurrent_state(&self) -> bool {
        self.state_bytes_per_sequence() > 0
    }

    /// Bytes of recurrent state one sequence takes over all layers.
    pub fn state_bytes_per_sequence(&self) -> usize {
        let bytes = |layer: &LayerConfig| match &layer.attention {
            Attention::DeltaNet(a) => size_of::<f32>() * a.state_len(),
            Attention::Gqa(_) | Attention::Mla(_) => 0,
        };
        self.layers.iter().map(bytes).sum()
    }
}

impl Attention {
    /// KV heads, and numbers of a key and of a value of each; zeros where there are none. Latent attention's values are the first numbers of its keys.
    pub fn kv_dims(&self) -> (usize, usize, usize) {
        match self {
            Attention::Gqa(a) => (a.num_kv_heads, a.head_dim, a.head_dim),
            Attention::Mla(a) => (1, a.cache_dim(), a.kv_lora_rank),
            Attention::DeltaNet(_) => (0, 0, 0),
        }
    }
}
