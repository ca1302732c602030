//! What follows attention in a layer: one MLP, or a router and experts.

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

impl Ffn {
    /// Rows of `gate` and `up` of the dense MLP or the shared expert; `None`: there is neither.
    pub fn mlp_width(&self) -> Option<usize> {
        match self {
            Ffn::Dense { intermediate_size } => Some(*intermediate_size),
            Ffn::Moe(moe) => moe.shared_intermediate_size,
        }
    }

    /// Router and experts; `None`: it is dense.
    pub fn moe(&self) -> Option<&Moe> {
        match self {
            Ffn::Dense { .. } => None,
            Ffn::Moe(moe) => Some(moe),
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

impl Moe {
    /// Products of a token with the router and its routed experts, in a model of this width.
    pub fn products(&self, hidden: usize) -> usize {
        hidden * (3 * self.router.top_k * self.intermediate_size + self.num_experts)
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
        (!self.intermediate_size.is_multiple_of(8) || !hidden.is_multiple_of(8)).then(|| {
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
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, with `gate` at most `limit` and `up` within `limit` of 0. Source: HF
    /// modeling_gpt_oss.
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
