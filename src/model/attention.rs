//! How the tokens of a sequence look at each other: one type for each kind of attention.

use super::Rope;

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
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
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

/// Gated DeltaNet: linear attention with a decaying state and the delta rule. Source: arXiv 2412.06464, and HF
/// modeling_qwen3_next.
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
    /// The checkpoint has the first value head of each key head, then the second of each, and so on; they are put
    /// beside each other when loaded.
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
    /// Rotary embedding of that part.
    pub rope: Rope,
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

/// What a kind of attention needs and costs: nobody else asks which kind it is.
impl Attention {
    /// KV heads, and elements of a key and of a value of each; zeros where there are none. Latent attention's values
    /// are the first elements of its keys.
    pub fn kv_dims(&self) -> (usize, usize, usize) {
        match self {
            Attention::Gqa(a) => (a.num_kv_heads, a.head_dim, a.head_dim),
            Attention::Mla(a) => (1, a.cache_dim(), a.kv_lora_rank),
            Attention::DeltaNet(_) => (0, 0, 0),
        }
    }

    /// Its rotary embedding, if it has one.
    pub fn rope(&self) -> Option<&Rope> {
        match self {
            Attention::Gqa(a) => Some(&a.rope),
            Attention::Mla(a) => Some(&a.rope),
            Attention::DeltaNet(_) => None,
        }
    }

    /// Whether both have activations of the same widths: layers that do share buffers.
    pub fn same_widths(&self, other: &Self) -> bool {
        match (self, other) {
            (Attention::Gqa(a), Attention::Gqa(b)) => {
                let widths = |a: &Gqa| (a.num_heads, a.num_kv_heads, a.head_dim, a.output_gate);
                widths(a) == widths(b)
            }
            (Attention::Mla(a), Attention::Mla(b)) => {
                let latents = |a: &Mla| (a.q_lora_rank, a.kv_lora_rank);
                let heads = |a: &Mla| (a.num_heads, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim);
                (latents(a), heads(a)) == (latents(b), heads(b))
            }
            (Attention::DeltaNet(a), Attention::DeltaNet(b)) => a == b,
            _ => false,
        }
    }

    /// The recurrent state that replaces keys and values, if this kind has one.
    pub fn recurrent(&self) -> Option<&DeltaNet> {
        match self {
            Attention::DeltaNet(a) => Some(a),
            Attention::Gqa(_) | Attention::Mla(_) => None,
        }
    }

    /// Its projections, `[n, k]` each, in a model of this width.
    pub fn matrices(&self, hidden: usize) -> Vec<(usize, usize)> {
        match self {
            Attention::Gqa(a) => {
                let (q, kv) = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim);
                let gate = a.output_gate.then_some((q, hidden));
                [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)].into_iter().chain(gate).collect()
            }
            Attention::DeltaNet(a) => {
                vec![(a.conv_dim(), hidden), (a.value_dim(), hidden), (hidden, a.value_dim())]
            }
            Attention::Mla(a) => {
                let q = a.num_heads * a.qk_head_dim();
                let query = a.q_lora_rank.map_or(vec![(q, hidden)], |rank| vec![(rank, hidden), (q, rank)]);
                [query, vec![(a.cache_dim(), hidden), (hidden, a.num_heads * a.v_head_dim)]].concat()
            }
        }
    }

    /// Matrices that each of its heads has, `[n, k]`, kept at 16 bits; the first number is that of the heads.
    pub fn head_matrices(&self) -> (usize, Vec<(usize, usize)>) {
        match self {
            Attention::Gqa(_) | Attention::DeltaNet(_) => (0, vec![]),
            Attention::Mla(a) => {
                (a.num_heads, vec![(a.kv_lora_rank, a.qk_nope_head_dim), (a.v_head_dim, a.kv_lora_rank)])
            }
        }
    }

    /// Its weights that are f32, norms and biases apart, in a model of this width.
    pub fn f32_weights(&self, hidden: usize) -> usize {
        match self {
            Attention::Gqa(_) | Attention::Mla(_) => 0,
            Attention::DeltaNet(a) => a.conv_dim() * a.conv_width + 2 * a.num_value_heads * hidden,
        }
    }

    /// f32 elements of a token's activations on the CPU.
    pub fn activation_len(&self) -> usize {
        match self {
            Attention::Gqa(a) => {
                let gate = if a.output_gate { a.num_heads } else { 0 };
                a.head_dim * (2 * (a.num_heads + a.num_kv_heads) + gate)
            }
            Attention::DeltaNet(a) => a.conv_dim() + 2 * a.value_dim(),
            Attention::Mla(a) => {
                let head = a.qk_head_dim() + a.cache_dim() + a.kv_lora_rank + a.v_head_dim;
                2 * a.q_lora_rank.unwrap_or(0) + a.cache_dim() + a.num_heads * head
            }
        }
    }

    /// Products of a token besides those of [`matrices`](Attention::matrices): with its own state, or to make keys and
    /// values of its latent.
    pub fn inner_products(&self) -> f64 {
        match self {
            Attention::Gqa(_) => 0.0,
            Attention::DeltaNet(a) => 4.0 * a.value_dim() as f64 * a.key_head_dim as f64,
            Attention::Mla(a) => {
                a.kv_lora_rank as f64 * a.num_heads as f64 * (a.qk_nope_head_dim + a.v_head_dim) as f64
            }
        }
    }

    /// Products of a token and one that it attends to.
    pub fn products_per_pair(&self) -> usize {
        match self {
            Attention::Gqa(a) => 2 * a.num_heads * a.head_dim,
            Attention::DeltaNet(_) => 0,
            Attention::Mla(a) => a.num_heads * (a.qk_head_dim() + a.v_head_dim),
        }
    }

    /// Seconds that a GPU takes for a layer of this kind in decode, whatever it reads. Measured on an H200.
    pub fn gpu_seconds(&self) -> f64 {
        match self {
            Attention::Gqa(_) | Attention::DeltaNet(_) => 30e-6,
            Attention::Mla(_) => 44e-6,
        }
    }

    /// What the GPU's kernels lack for it, if anything.
    pub fn gpu_lacks(&self) -> Option<String> {
        match self {
            Attention::Gqa(a) => (a.head_dim > 256 || !a.head_dim.is_multiple_of(8))
                .then(|| format!("the GPU has no attention for heads of {} elements", a.head_dim)),
            Attention::Mla(a) => {
                let widths = [a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim];
                let fits = a.kv_lora_rank <= 512
                    && a.cache_dim() <= 576
                    && a.qk_head_dim() <= 256
                    && widths.iter().all(|n| n.is_multiple_of(8));
                (!fits).then(|| {
                    let (rank, head) = (a.kv_lora_rank, a.qk_head_dim());
                    format!("the GPU has no latent attention of rank {rank} with heads of {head} elements")
                })
            }
            Attention::DeltaNet(a) => {
                let fits = a.key_head_dim <= 128
                    && a.key_head_dim.is_multiple_of(4)
                    && a.value_head_dim.is_multiple_of(2)
                    && a.conv_width <= 8;
                (!fits).then(|| {
                    format!(
                        "the GPU has gated DeltaNet for keys of up to 128 elements and convolutions of up to 8, not {} \
                         and {}",
                        a.key_head_dim, a.conv_width
                    )
                })
            }
        }
    }
}
