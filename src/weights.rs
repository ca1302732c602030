//! Resident weights: from named tensors of a checkpoint onto a backend, checked for shape and finite values.

use half::bf16;
use moebius_cache::checkpoint::{Checkpoint, Dtype};
use rayon::prelude::*;

use crate::backend::Backend;
use crate::config::DenseBits;
use crate::model::{Attention, Ffn, Gqa, LayerConfig, Mla, ModelConfig, Moe};
use crate::tensor::HostTensor;
use crate::{Error, Result};

/// Where resident weights come from, by their Hugging Face names.
pub trait TensorSource {
    /// The tensor `name` as `[rows, cols]`. Errors: missing, misshapen, NaN or infinite; each by name.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>>;

    /// A vector, decoded.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>>;
}

impl TensorSource for Checkpoint {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let source = self.source(name, [rows, cols])?;
        if let Some(view) = source.plain().filter(|view| view.dtype == Dtype::BF16)
            && let Ok(data) = bytemuck::try_cast_slice::<u8, bf16>(view.data)
        {
            if !data.par_chunks(1 << 18).all(|c| c.iter().all(|w| w.to_bits() & 0x7f80 != 0x7f80)) {
                return Err(Error::Model(format!("tensor `{name}` holds NaN or infinite weights: download its shard again")));
            }
            return Ok(HostTensor::Bf16 { data: data.into(), cols });
        }
        let mut data = vec![0.0; rows * cols];
        // Whole heads: a latent's keys are turned a head at a time.
        const ROWS: usize = 256;
        data.par_chunks_mut(ROWS * cols).enumerate().try_for_each(|(i, rows)| source.decode(i * ROWS, rows))?;
        Ok(HostTensor::F32 { data: data.into(), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let view = self.tensor(name)?;
        view.expect_shape(&[len])?;
        let mut data = vec![0.0; len];
        moebius_cache::codec::decode_f32(&view, &mut data)?;
        Ok(data)
    }
}

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
    /// Norms of query and key heads, `[head_dim]` each.
    pub qk_norm: Option<(B::Norm, B::Norm)>,
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
        let (prefix, hidden, vocab) = (&model.prefix, model.hidden_size, model.vocab_size);
        let embedding = format!("{prefix}model.embed_tokens.weight");
        let head = if model.tied_embeddings { embedding.clone() } else { format!("{prefix}lm_head.weight") };
        let layers = model.layers.iter().enumerate().map(|(i, layer)| {
            let weights = loader.layer(&format!("{prefix}model.layers.{i}"), layer)?;
            report(i + 1, model.layers.len())?;
            Ok(weights)
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            embedding: backend.load_embedding(source.matrix(&embedding, vocab, hidden)?)?,
            norm: loader.norm(&format!("{prefix}model.norm.weight"), hidden)?,
            lm_head: backend.load_linear(source.matrix(&head, vocab, hidden)?, None, bits)?,
        })
    }

    /// Bytes of resident weights that a decode step of one token reads.
    pub fn bytes_per_token(&self, backend: &B) -> usize {
        let mlp = |m: &MlpWeights<B>| [&m.gate, &m.up, &m.down].map(|w| backend.linear_bytes(w)).iter().sum::<usize>();
        let layer = |l: &LayerWeights<B>| {
            let attention = match &l.attention {
                AttentionWeights::Gqa(a) => [&a.q, &a.k, &a.v, &a.o].map(|w| backend.linear_bytes(w)).iter().sum::<usize>(),
                AttentionWeights::Mla(a) => {
                    let query = match &a.q {
                        MlaQuery::Direct(q) => backend.linear_bytes(q),
                        MlaQuery::Lora { a, b, .. } => backend.linear_bytes(a) + backend.linear_bytes(b),
                    };
                    query + [&a.kv_a, &a.o].map(|w| backend.linear_bytes(w)).iter().sum::<usize>() + backend.latent_up_bytes(&a.up)
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
            },
            ffn_norm: self.norm(&format!("{name}.post_attention_layernorm.weight"), hidden)?,
            ffn: match &layer.ffn {
                Ffn::Dense { intermediate_size } => FfnWeights::Dense(self.mlp(&format!("{name}.mlp"), *intermediate_size)?),
                Ffn::Moe(moe) => self.moe(&format!("{name}.mlp"), moe)?,
            },
        })
    }

    fn gqa(&self, name: &str, a: &Gqa) -> Result<GqaWeights<B>> {
        let (hidden, q, kv) = (self.model.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim);
        Ok(GqaWeights {
            q: self.linear(&format!("{name}.q_proj"), q, hidden, a.bias)?,
            k: self.linear(&format!("{name}.k_proj"), kv, hidden, a.bias)?,
            v: self.linear(&format!("{name}.v_proj"), kv, hidden, a.bias)?,
            o: self.linear(&format!("{name}.o_proj"), hidden, q, a.bias)?,
            qk_norm: if a.qk_norm {
                let norm = |which| self.norm(&format!("{name}.{which}_norm.weight"), a.head_dim);
                Some((norm("q")?, norm("k")?))
            } else {
                None
            },
        })
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
        let hidden = self.model.hidden_size;
        let router = self.source.matrix(&format!("{name}.gate.weight"), moe.num_experts, hidden)?.to_f32().into_owned();
        let bias = match moe.router.correction_bias {
            true => Some(self.source.vector(&format!("{name}.gate.e_score_correction_bias"), moe.num_experts)?),
            false => None,
        };
        Ok(FfnWeights::Moe {
            router: self.backend.load_router(router, bias)?,
            shared: match moe.shared_intermediate_size {
                Some(width) => Some(self.mlp(&format!("{name}.shared_experts"), width)?),
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
        })
    }

    fn linear(&self, name: &str, n: usize, k: usize, bias: bool) -> Result<B::Linear> {
        let weight = self.source.matrix(&format!("{name}.weight"), n, k)?;
        let bias = if bias { Some(self.source.vector(&format!("{name}.bias"), n)?) } else { None };
        self.backend.load_linear(weight, bias, self.bits)
    }

    fn norm(&self, name: &str, len: usize) -> Result<B::Norm> {
        self.backend.load_norm(self.source.vector(name, len)?)
    }
}
