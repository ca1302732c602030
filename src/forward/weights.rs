//! Resident weights: from named tensors of a checkpoint onto a backend, checked for shape and finite values.

mod delta_net;

use crate::backend::Backend;
use crate::backend::source::TensorSource;
use crate::config::DenseBits;
use crate::model::{Attention, Bias, Ffn, Gqa, LayerConfig, Mla, ModelConfig, Moe, QkNorm};
use crate::{Error, Result};

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

/// The projections of one attention.
pub enum AttentionWeights<B: Backend> {
    /// Grouped queries.
    Gqa(GqaWeights<B>),
    /// Latent attention.
    Mla(MlaWeights<B>),
    /// Gated delta rule.
    DeltaNet(DeltaNetWeights<B>),
}

/// Grouped-query projections.
pub struct GqaWeights<B: Backend> {
    /// `[num_heads * head_dim, hidden]`
    pub q: B::Linear,
    /// `[num_kv_heads * head_dim, hidden]`
    pub k: B::Linear,
    /// `[num_kv_heads * head_dim, hidden]`
    pub v: B::Linear,
    /// `[hidden, num_heads * head_dim]`
    pub o: B::Linear,
    /// Norms of query and key heads, `[head_dim]` each; or of all heads together, `[heads * head_dim]`.
    pub qk_norm: Option<(B::Norm, B::Norm)>,
    /// `[num_heads]`
    pub sinks: Option<B::Norm>,
    /// `[num_heads * head_dim, hidden]`
    pub output_gate: Option<B::Linear>,
}

/// Projections and the rule of gated DeltaNet.
pub struct DeltaNetWeights<B: Backend> {
    /// Queries, keys and values before the convolution, `[conv_dim, hidden]`.
    pub qkv: B::Linear,
    /// Gate of the output, `[value_dim, hidden]`.
    pub z: B::Linear,
    /// `[hidden, value_dim]`
    pub o: B::Linear,
    /// What is between them.
    pub rule: B::DeltaNet,
}

/// Latent-attention projections.
pub struct MlaWeights<B: Backend> {
    /// Down to the query latent, its norm, up to the heads; or straight to the heads.
    pub q: MlaQuery<B>,
    /// `[kv_lora_rank + rope, hidden]`
    pub kv_a: B::Linear,
    /// Norm of the latent, `[kv_lora_rank]`
    pub kv_a_norm: B::Norm,
    /// Keys and values out of latents.
    pub up: B::LatentUp,
    /// `[hidden, num_heads * v_head_dim]`
    pub o: B::Linear,
}

/// How queries are made.
pub enum MlaQuery<B: Backend> {
    /// `[num_heads * qk_head_dim, hidden]`
    Direct(B::Linear),
    /// Through a latent.
    Lora {
        /// `[q_lora_rank, hidden]`
        a: B::Linear,
        /// `[q_lora_rank]`
        norm: B::Norm,
        /// `[num_heads * qk_head_dim, q_lora_rank]`
        b: B::Linear,
    },
}

/// A feed-forward part without its routed experts.
pub enum FfnWeights<B: Backend> {
    /// Dense.
    Dense(MlpWeights<B>),
    /// Router and shared expert.
    Moe {
        /// Router.
        router: B::Router,
        /// Shared expert.
        shared: Option<MlpWeights<B>>,
    },
}

/// `down(silu(gate x) * up x)`.
pub struct MlpWeights<B: Backend> {
    /// `[intermediate, hidden]`
    pub gate: B::Linear,
    /// `[intermediate, hidden]`
    pub up: B::Linear,
    /// `[hidden, intermediate]`
    pub down: B::Linear,
    /// Of a shared expert: its output is multiplied with the sigmoid of this times `x`, `[hidden]`.
    pub output_gate: Option<B::Norm>,
}

/// Reads one model's tensors onto one backend.
struct Loader<'a, B: Backend> {
    backend: &'a B,
    source: &'a dyn TensorSource,
    model: &'a ModelConfig,
    bits: DenseBits,
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
            let weights = loader.layer(&format!("{body}layers.{i}"), layer)?;
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
        let mlp = |m: &MlpWeights<B>| [&m.gate, &m.up, &m.down].map(|w| backend.linear_bytes(w)).iter().sum::<usize>();
        let layer = |l: &LayerWeights<B>| {
            let attention = match &l.attention {
                AttentionWeights::Gqa(a) => {
                    let all = [&a.q, &a.k, &a.v, &a.o].into_iter().chain(&a.output_gate);
                    all.map(|w| backend.linear_bytes(w)).sum::<usize>()
                }
                AttentionWeights::DeltaNet(a) => [&a.qkv, &a.z, &a.o].map(|w| backend.linear_bytes(w)).iter().sum(),
                AttentionWeights::Mla(a) => {
                    let query = match &a.q {
                        MlaQuery::Direct(q) => backend.linear_bytes(q),
                        MlaQuery::Lora { a, b, .. } => backend.linear_bytes(a) + backend.linear_bytes(b),
                    };
                    query
                        + [&a.kv_a, &a.o].map(|w| backend.linear_bytes(w)).iter().sum::<usize>()
                        + backend.latent_up_bytes(&a.up)
                }
            };
            attention
                + match &l.ffn {
                    FfnWeights::Dense(m) => mlp(m),
                    FfnWeights::Moe { shared, .. } => shared.as_ref().map_or(0, mlp),
                }
        };
        self.layers.iter().map(layer).sum::<usize>() + backend.linear_bytes(&self.lm_head)
    }
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, name: &str, layer: &LayerConfig) -> Result<LayerWeights<B>> {
        let hidden = self.model.hidden_size;
        let attention = format!("{name}.self_attn");
        Ok(LayerWeights {
            attention_norm: self.norm(&format!("{name}.input_layernorm.weight"), hidden)?,
            attention: match &layer.attention {
                Attention::Gqa(a) => AttentionWeights::Gqa(self.gqa(&attention, a)?),
                Attention::Mla(a) => AttentionWeights::Mla(self.mla(&attention, a)?),
                Attention::DeltaNet(a) => {
                    AttentionWeights::DeltaNet(self.delta_net(&format!("{name}.linear_attn"), a)?)
                }
            },
            ffn_norm: self.norm(&format!("{name}.post_attention_layernorm.weight"), hidden)?,
            ffn: match &layer.ffn {
                Ffn::Dense { intermediate_size } => {
                    FfnWeights::Dense(self.mlp(&format!("{name}.mlp"), *intermediate_size)?)
                }
                Ffn::Moe(moe) => self.moe(&format!("{name}.{}", self.model.names.moe), moe)?,
            },
        })
    }

    fn gqa(&self, name: &str, a: &Gqa) -> Result<GqaWeights<B>> {
        let (hidden, q, kv) = (self.model.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim);
        let (bias, qk) = (a.bias != Bias::None, format!("{name}.q_proj"));
        let (queries, output_gate) = match a.output_gate {
            false => (self.linear(&qk, q, hidden, bias)?, None),
            true => (self.head_part(&qk, a, 0, bias)?, Some(self.head_part(&qk, a, 1, bias)?)),
        };
        let norms = |q_len, kv_len| {
            let norm = |which, len| self.norm(&format!("{name}.{which}_norm.weight"), len);
            Ok::<_, Error>(Some((norm("q", q_len)?, norm("k", kv_len)?)))
        };
        Ok(GqaWeights {
            q: queries,
            k: self.linear(&format!("{name}.k_proj"), kv, hidden, bias)?,
            v: self.linear(&format!("{name}.v_proj"), kv, hidden, bias)?,
            o: self.linear(&format!("{name}.o_proj"), hidden, q, a.bias == Bias::All)?,
            qk_norm: match a.qk_norm {
                QkNorm::None => None,
                QkNorm::PerHead => norms(a.head_dim, a.head_dim)?,
                QkNorm::FullWidth => norms(q, kv)?,
            },
            sinks: match a.sinks {
                true => Some(self.backend.load_norm(self.source.vector(&format!("{name}.sinks"), a.num_heads)?)?),
                false => None,
            },
            output_gate,
        })
    }

    /// The first or second half of the rows of each head of a projection.
    fn head_part(&self, name: &str, a: &Gqa, half: usize, bias: bool) -> Result<B::Linear> {
        let (rows, dim) = (2 * a.num_heads * a.head_dim, a.head_dim);
        let weight = self.source.matrix(&format!("{name}.weight"), rows, self.model.hidden_size)?;
        let bias = match bias {
            true => {
                let all = self.source.vector(&format!("{name}.bias"), rows)?;
                Some(all.chunks_exact(dim).skip(half).step_by(2).flatten().copied().collect())
            }
            false => None,
        };
        self.backend.load_linear(weight.head_rows(a.num_heads, half * dim, (half + 1) * dim), bias, self.bits)
    }

    fn mla(&self, name: &str, a: &Mla) -> Result<MlaWeights<B>> {
        let (hidden, heads) = (self.model.hidden_size, a.num_heads);
        let q = heads * a.qk_head_dim();
        let kv_b_rows = heads * (a.qk_nope_head_dim + a.v_head_dim);
        let kv_b = self.source.matrix(&format!("{name}.kv_b_proj.weight"), kv_b_rows, a.kv_lora_rank)?;
        Ok(MlaWeights {
            q: match a.q_lora_rank {
                None => MlaQuery::Direct(self.linear(&format!("{name}.q_proj"), q, hidden, false)?),
                Some(rank) => MlaQuery::Lora {
                    a: self.linear(&format!("{name}.q_a_proj"), rank, hidden, a.bias)?,
                    norm: self.norm(&format!("{name}.q_a_layernorm.weight"), rank)?,
                    b: self.linear(&format!("{name}.q_b_proj"), q, rank, false)?,
                },
            },
            kv_a: self.linear(&format!("{name}.kv_a_proj_with_mqa"), a.cache_dim(), hidden, a.bias)?,
            kv_a_norm: self.norm(&format!("{name}.kv_a_layernorm.weight"), a.kv_lora_rank)?,
            up: self.backend.load_latent_up(a, kv_b)?,
            o: self.linear(&format!("{name}.o_proj"), hidden, heads * a.v_head_dim, a.bias)?,
        })
    }

    fn moe(&self, name: &str, moe: &Moe) -> Result<FfnWeights<B>> {
        let (hidden, names) = (self.model.hidden_size, &self.model.names);
        let router = format!("{name}.{}", names.router);
        let weight = self.source.matrix(&format!("{router}.weight"), moe.num_experts, hidden)?.to_f32().into_owned();
        let vector =
            |wanted, name: String| if wanted { self.source.vector(&name, moe.num_experts).map(Some) } else { Ok(None) };
        let bias = vector(moe.router.bias, format!("{router}.bias"))?;
        let correction_bias = vector(moe.router.correction_bias, format!("{name}.{}", names.correction_bias))?;
        let shared = format!("{name}.{}", names.shared_expert);
        Ok(FfnWeights::Moe {
            router: self.backend.load_router(weight, bias, correction_bias)?,
            shared: match moe.shared_intermediate_size {
                Some(width) => {
                    let mlp = self.mlp(&shared, width)?;
                    let gate = || self.source.matrix(&format!("{shared}_gate.weight"), 1, hidden);
                    let output_gate = if moe.shared_gate {
                        Some(self.backend.load_norm(gate()?.to_f32().into_owned())?)
                    } else {
                        None
                    };
                    Some(MlpWeights { output_gate, ..mlp })
                }
                None => None,
            },
        })
    }

    fn mlp(&self, name: &str, width: usize) -> Result<MlpWeights<B>> {
        let hidden = self.model.hidden_size;
        Ok(MlpWeights {
            gate: self.linear(&format!("{name}.gate_proj"), width, hidden, false)?,
            up: self.linear(&format!("{name}.up_proj"), width, hidden, false)?,
            down: self.linear(&format!("{name}.down_proj"), hidden, width, false)?,
            output_gate: None,
        })
    }

    fn linear(&self, name: &str, n: usize, k: usize, bias: bool) -> Result<B::Linear> {
        let weight = self.source.matrix(&format!("{name}.weight"), n, k)?;
        let bias = if bias { Some(self.source.vector(&format!("{name}.bias"), n)?) } else { None };
        self.backend.load_linear(weight, bias, self.bits)
    }

    fn norm(&self, name: &str, len: usize) -> Result<B::Norm> {
        let mut weight = self.source.vector(name, len)?;
        weight.iter_mut().for_each(|w| *w += self.model.norm_offset);
        self.backend.load_norm(weight)
    }
}
