//! The forward pass: one for every architecture.
//!
//! ```text
//! x = embed(ids)
//! layer:  h = norm(x);  x += attention(h)
//!         h = norm(x);  dense: x += mlp(h)
//!                       moe:   submit(h, route(h)); x += shared(h); x += finish()
//! logits = lm_head(norm(x[last rows]))
//! ```

use crate::Result;
use crate::attention::{AttentionBuffers, Step, attention};
use crate::backend::{Backend, Routing};
use crate::batch::Batch;
use crate::experts::ExpertExecutor;
use crate::kv_cache::KvCache;
use crate::model::{Ffn, LayerConfig, ModelConfig};
use crate::weights::{FfnWeights, MlpWeights, Weights};

/// A model ready to run on a backend, with the buffers of its forward pass.
pub struct Model<B: Backend> {
    /// The device.
    pub backend: B,
    /// What it is.
    pub config: ModelConfig,
    /// Resident weights.
    pub weights: Weights<B>,
    /// Where routed experts run; `None` for a model without any.
    pub experts: Option<Box<dyn ExpertExecutor<B::Tensor>>>,
    buffers: Buffers<B>,
    inv_freq: Vec<f32>, // [rope.dim / 2]
    max_logit_rows: usize,
}

/// Activations, allocated once at their largest.
struct Buffers<B: Backend> {
    x: B::Tensor,      // [T, hidden], the residual stream
    h: B::Tensor,      // [T, hidden], its norm
    angles: B::Tensor, // [T, rope.dim]
    attention: AttentionBuffers<B>,
    mlp: Vec<MlpBuffers<B>>, // one for each width
    routing: Routing,
    last: B::Tensor,        // [R, hidden], rows of x of which logits are wanted
    last_normed: B::Tensor, // [R, hidden]
    logits: B::Tensor,      // [R, vocab]
    host_logits: Vec<f32>,  // [R, vocab]
}

/// Activations of an MLP of one width, `[T, width]` each.
struct MlpBuffers<B: Backend> {
    width: usize,
    gate: B::Tensor,
    up: B::Tensor,
    product: B::Tensor,
}

/// Sees what passes between layers, as `capture` does.
pub trait Tap<B: Backend> {
    /// The residual stream `[T, hidden]` after layer `layer`.
    fn hidden(&mut self, backend: &B, layer: usize, x: &B::Tensor);
    /// The experts that layer `layer` chose.
    fn routing(&mut self, layer: usize, routing: &Routing);
}

impl<B: Backend> Model<B> {
    /// Allocates the buffers for passes of at most `max_tokens` tokens and `max_logit_rows` rows of logits at a time.
    pub fn new(
        backend: B,
        config: ModelConfig,
        weights: Weights<B>,
        experts: Option<Box<dyn ExpertExecutor<B::Tensor>>>,
        max_tokens: usize,
        max_logit_rows: usize,
    ) -> Self {
        let hidden = config.hidden_size;
        let mut widths: Vec<usize> = config.layers.iter().filter_map(mlp_width).collect();
        widths.sort_unstable();
        widths.dedup();
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let buffers = Buffers {
            x: tensor(hidden),
            h: tensor(hidden),
            angles: tensor(config.rope.dim),
            attention: AttentionBuffers::new(&backend, &config, max_tokens),
            mlp: widths.iter().map(|&width| MlpBuffers { width, gate: tensor(width), up: tensor(width), product: tensor(width) }).collect(),
            routing: Routing::default(),
            last: backend.tensor(max_logit_rows, hidden),
            last_normed: backend.tensor(max_logit_rows, hidden),
            logits: backend.tensor(max_logit_rows, config.vocab_size),
            host_logits: Vec::with_capacity(max_logit_rows * config.vocab_size),
        };
        let inv_freq = config.rope.inv_freq();
        Self { backend, config, weights, experts, buffers, inv_freq, max_logit_rows }
    }

    /// Reads the batch: stores its keys and values, and leaves its hidden states for [`Model::logits`].
    ///
    /// Errors: `Error::Cache` when an expert's bytes are not what was written, found at its first use.
    pub fn forward(&mut self, batch: &Batch, kv: &mut KvCache<B>, mut tap: Option<&mut dyn Tap<B>>) -> Result<()> {
        let Self { backend, config, weights, experts, buffers, inv_freq, .. } = self;
        buffers.set_rows(backend, batch.len());
        let Buffers { x, h, angles, attention: attention_buffers, mlp: mlp_buffers, routing, .. } = buffers;

        backend.embed(&weights.embedding, &batch.tokens, x);
        backend.rope_angles(inv_freq, config.rope.attention_factor(), &batch.positions, angles);
        let step = Step { backend, batch, angles, norm_eps: config.norm_eps, interleaved: config.rope.interleaved };
        let mut moe_index = 0;
        for (i, (layer, w)) in config.layers.iter().zip(&weights.layers).enumerate() {
            backend.rms_norm(x, &w.attention_norm, config.norm_eps, h);
            attention(&step, &layer.attention, &w.attention, &mut kv.layers[i], attention_buffers, h, x);

            backend.rms_norm(x, &w.ffn_norm, config.norm_eps, h);
            match (&layer.ffn, &w.ffn) {
                (Ffn::Dense { .. }, FfnWeights::Dense(w)) => mlp(backend, w, mlp_buffers, mlp_width(layer), h, x),
                (Ffn::Moe(moe), FfnWeights::Moe { router, shared }) => {
                    let experts = experts.as_mut().expect("a model with MoE layers has an executor");
                    backend.route(router, &moe.router, h, routing);
                    experts.submit(moe_index, h, routing)?;
                    if let Some(w) = shared {
                        mlp(backend, w, mlp_buffers, mlp_width(layer), h, x);
                    }
                    experts.finish(x)?;
                    moe_index += 1;
                    if let Some(tap) = &mut tap {
                        tap.routing(i, routing);
                    }
                }
                _ => panic!("configuration and weights of one layer are of one kind"),
            }
            if let Some(tap) = &mut tap {
                tap.hidden(backend, i, x);
            }
        }
        Ok(())
    }

    /// Logits `[rows, vocab]` of rows of the last batch, on the host; at most [`Model::max_logit_rows`] rows at a time.
    pub fn logits(&mut self, rows: &[usize]) -> &mut [f32] {
        let Self { backend, config, weights, buffers, .. } = self;
        let Buffers { x, last, last_normed, logits, host_logits, .. } = buffers;
        for t in [&mut *last, &mut *last_normed, &mut *logits] {
            backend.set_rows(t, rows.len());
        }
        backend.gather(x, rows, last);
        backend.rms_norm(last, &weights.norm, config.norm_eps, last_normed);
        backend.linear(&weights.lm_head, last_normed, logits);
        backend.read(logits, host_logits);
        host_logits
    }

    /// Rows of logits that one call may ask for.
    pub fn max_logit_rows(&self) -> usize {
        self.max_logit_rows
    }
}

impl<B: Backend> Buffers<B> {
    fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.x, &mut self.h, &mut self.angles] {
            backend.set_rows(t, rows);
        }
        for m in &mut self.mlp {
            for t in [&mut m.gate, &mut m.up, &mut m.product] {
                backend.set_rows(t, rows);
            }
        }
        self.attention.set_rows(backend, rows);
    }
}

/// `x += down(silu(gate h) * up h)`.
fn mlp<B: Backend>(backend: &B, w: &MlpWeights<B>, buffers: &mut [MlpBuffers<B>], width: Option<usize>, h: &B::Tensor, x: &mut B::Tensor) {
    let MlpBuffers { gate, up, product, .. } =
        buffers.iter_mut().find(|b| Some(b.width) == width).expect("there is a buffer for every width");
    backend.linears(h, [(&w.gate, gate), (&w.up, up)]);
    backend.silu_mul(gate, up, product);
    backend.linear_add(&w.down, product, x);
}

/// Width of the layer's dense MLP or shared expert.
pub(crate) fn mlp_width(layer: &LayerConfig) -> Option<usize> {
    match &layer.ffn {
        Ffn::Dense { intermediate_size } => Some(*intermediate_size),
        Ffn::Moe(moe) => moe.shared_intermediate_size,
    }
}
