//! What follows attention in a layer: one MLP, or a router and experts.

use moebius_cache::pack::ExpertKind;

/// The feed-forward part of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Ffn {
    /// One MLP.
    Dense(Mlp),
    /// A router and experts.
    Moe(Moe),
    /// The layer has none.
    None,
}

/// `down(activation(gate x, up x))`, or without a gate `down(activation(up x))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mlp {
    /// Rows of `gate` and `up`.
    pub intermediate_size: usize,
    /// What is between the products.
    pub activation: Activation,
}

impl Mlp {
    /// With SiLU.
    pub fn silu(intermediate_size: usize) -> Self {
        Self { intermediate_size, activation: Activation::Silu }
    }
}

impl Ffn {
    /// Rows of `gate` and `up` of the dense MLP or the shared expert; `None`: there is neither.
    pub fn mlp_width(&self) -> Option<usize> {
        match self {
            Ffn::Dense(mlp) => Some(mlp.intermediate_size),
            Ffn::Moe(moe) => moe.shared.map(|shared| shared.mlp.intermediate_size),
            Ffn::None => None,
        }
    }

    /// Router and experts; `None`: it is dense.
    pub fn moe(&self) -> Option<&Moe> {
        match self {
            Ffn::Dense(_) | Ffn::None => None,
            Ffn::Moe(moe) => Some(moe),
        }
    }

    /// Matrices of the dense MLP or the shared expert, and those around the routed experts, `[n, k]` each.
    pub fn matrices(&self, hidden: usize) -> Vec<(usize, usize)> {
        let of_mlp = |mlp: &Mlp| {
            let wide = (mlp.intermediate_size, hidden);
            let gate = mlp.activation.is_gated().then_some(wide);
            gate.into_iter().chain([wide, (hidden, mlp.intermediate_size)]).collect()
        };
        match self {
            Ffn::Dense(mlp) => of_mlp(mlp),
            Ffn::Moe(moe) => {
                let around = moe.latent.map_or(vec![], |latent| vec![(latent, hidden), (hidden, latent)]);
                [moe.shared.map_or(vec![], |shared| of_mlp(&shared.mlp)), around].concat()
            }
            Ffn::None => vec![],
        }
    }
}

/// Mixture of experts: `scaling * sum_i w_i expert_i(x) + shared(x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Routed experts.
    pub num_experts: usize,
    /// Rows of a routed expert's `gate` and `up`.
    pub intermediate_size: usize,
    /// The expert of every token, if there is one.
    pub shared: Option<SharedExpert>,
    /// What is between the routed experts' products.
    pub activation: Activation,
    /// Biases on the routed experts' projections.
    pub expert_bias: bool,
    /// Routed experts read a projection of this width, and their sum passes another one back.
    pub latent: Option<usize>,
    /// How experts are chosen and weighted.
    pub router: Router,
}

/// The expert that every token goes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpert {
    /// Itself.
    pub mlp: Mlp,
    /// Its output is multiplied with the sigmoid of a learned product with `x`.
    pub gate: bool,
    /// Multiplies its output.
    pub scale: f32,
}

impl SharedExpert {
    /// Added as it is.
    pub fn plain(mlp: Mlp) -> Self {
        Self { mlp, gate: false, scale: 1.0 }
    }
}

impl Moe {
    /// Experts with SiLU and without biases, and no shared one.
    pub fn new(num_experts: usize, intermediate_size: usize, router: Router) -> Self {
        let (shared, activation, expert_bias, latent) = (None, Activation::Silu, false, None);
        Self { num_experts, intermediate_size, shared, activation, expert_bias, latent, router }
    }

    /// Numbers that a routed expert reads and writes, in a model of this width.
    pub fn expert_width(&self, hidden: usize) -> usize {
        self.latent.unwrap_or(hidden)
    }

    /// What a routed expert has before `down`.
    pub fn expert_kind(&self) -> ExpertKind {
        if self.activation.is_gated() { ExpertKind::Gated } else { ExpertKind::Ungated }
    }

    /// Weights of a routed expert, in a model of this width.
    pub fn expert_weights(&self, hidden: usize) -> usize {
        let matrices = if self.activation.is_gated() { 3 } else { 2 };
        matrices * self.expert_width(hidden) * self.intermediate_size
    }

    /// Products of a token with the router and its routed experts, in a model of this width.
    pub fn products(&self, hidden: usize) -> usize {
        self.router.top_k * self.expert_weights(hidden) + hidden * self.num_experts
    }

    /// What the GPU's kernels lack for it, if anything, in a model of this width.
    pub fn gpu_lacks(&self, hidden: usize) -> Option<String> {
        let groups = self.router.groups.map_or(0, |groups| groups.count);
        for (n, most, what) in [
            (self.num_experts, 512, "experts of a layer"),
            (self.router.top_k, 32, "experts of a token"),
            (groups, 32, "groups"),
        ] {
            if n > most {
                return Some(format!("the GPU routes among at most {most} {what}, and there are {n}"));
            }
        }
        (!self.intermediate_size.is_multiple_of(8) || !self.expert_width(hidden).is_multiple_of(8)).then(|| {
            let width = self.intermediate_size;
            format!("the GPU needs experts whose width is a multiple of 8, and it is {width}")
        })
    }
}

/// From `gate x` and `up x` to what `down` is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `gelu(gate) * up`, GELU by its approximation with tanh.
    GeluTanh,
    /// `silu(gate) * up`, with `silu(gate)` at most `limit` and `up` within `limit` of 0. Source: HF modeling_step3p5.
    ClampedSilu {
        /// Bound of `silu(gate)` and `up`.
        limit: f32,
    },
    /// `silu(gate) * up`, with `gate` at most `limit` and `up` within `limit` of 0. Source: HF modeling_glm5_next.
    SiluOfClamped {
        /// Bound of `gate` and `up`.
        limit: f32,
    },
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, with `gate` at most `limit` and `up` within `limit` of 0. Source: HF
    /// modeling_gpt_oss.
    ClampedSwiglu {
        /// Bound of `gate` and `up`.
        limit: f32,
        /// Steepness of the sigmoid.
        alpha: f32,
    },
    /// `max(up, 0)^2`, without a gate. Source: HF modeling_nemotron_h.
    ReluSquared,
}

impl Activation {
    /// SiLU bounded as [`Self::ClampedSilu`]; 0: not bounded.
    pub fn silu_within(limit: f64) -> Self {
        if limit > 0.0 { Self::ClampedSilu { limit: limit as f32 } } else { Self::Silu }
    }

    /// Whether there is a gate beside `up`.
    pub fn is_gated(self) -> bool {
        self != Activation::ReluSquared
    }
}

/// How a router turns logits into experts and weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Experts per token.
    pub top_k: usize,
    /// A learned bias is part of the logits.
    pub bias: bool,
    /// Divides the logits.
    pub temperature: f32,
    /// Logits are `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
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
    /// A table has each token's experts, by its id; scores only weigh them. Source: HF modeling_deepseek_v4.
    pub by_token: bool,
    /// Every expert has a learned factor of its weight.
    pub expert_scale: bool,
    /// The weight multiplies the expert's input instead of its output. Only with one expert per token.
    pub weighs_input: bool,
}

impl Router {
    /// Scores of plain logits, chosen and weighted as they are.
    pub fn new(top_k: usize, scoring: Scoring) -> Self {
        Self {
            top_k,
            bias: false,
            temperature: 1.0,
            softcap: None,
            scoring,
            correction_bias: false,
            groups: None,
            normalize: false,
            scaling: 1.0,
            by_token: false,
            expert_scale: false,
            weighs_input: false,
        }
    }
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    /// Each on its own.
    Sigmoid,
    /// The square root of `ln(1 + exp(x))`, each on its own.
    SqrtSoftplus,
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
