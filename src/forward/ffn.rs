//! What follows attention in a layer: a dense MLP, or a router and a shared expert beside the routed ones.

use super::join::{After, Partial, Stream, Term, Through, join};
use super::loader::{Cut, Loader};
use crate::Result;
use crate::backend::{Backend, RouterTensors};
use crate::experts::{ExpertExecutor, FORESEEN_TOKENS};
use crate::model::{Activation, Ffn, LayerConfig, Mlp, ModelConfig, Moe, Residual, Router};

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
        /// Of a layer whose branches have norms of their own.
        norms: Option<BranchNorms<B>>,
        /// Around routed experts of another width than the residual stream's.
        latent: Option<Latent<B>>,
    },
    /// The layer has none.
    None,
}

/// Projections to what routed experts read, `[latent, hidden]`, and of their sum, `[hidden, latent]`.
pub struct Latent<B: Backend> {
    down: B::Linear,
    up: B::Linear,
}

/// The norms of an MoE layer whose router, MLP and routed experts read the residual stream each for itself, `[hidden]`.
pub struct BranchNorms<B: Backend> {
    router: B::Norm,      // before the router; its scale and the square root of `hidden` are in it
    experts: B::Norm,     // before the routed experts
    shared_out: B::Norm,  // of the MLP's result
    experts_out: B::Norm, // of the routed experts' result
}

/// `down(activation(gate x, up x))`, or without a gate `down(activation(up x))`.
pub struct MlpWeights<B: Backend> {
    gate: Option<B::Linear>, // [intermediate, hidden]
    up: B::Linear,           // [intermediate, hidden]
    down: B::Linear,         // [hidden, intermediate]
    activation: Activation,
    output_gate: Option<B::Norm>, // of a shared expert: its output is multiplied with the sigmoid of this times `x`
    scale: f32,                   // of a shared expert: multiplies its output
}

impl<B: Backend> FfnWeights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, config: &LayerConfig) -> Result<Self> {
        match &config.ffn {
            Ffn::Dense(mlp) => {
                let name = format!("{layer}.{}", loader.model.names.mlp);
                Ok(FfnWeights::Dense(MlpWeights::load(loader, &name, mlp)?))
            }
            Ffn::Moe(moe) => Self::load_moe(loader, layer, moe, config.residual),
            Ffn::None => Ok(FfnWeights::None),
        }
    }

    fn load_moe(loader: &Loader<'_, B>, layer: &str, moe: &Moe, residual: Residual) -> Result<Self> {
        let Loader { backend, source, model, .. } = loader;
        let (hidden, names) = (model.hidden_size, &model.names);
        let of = |part: &str| format!("{layer}.{part}");
        let router = of(names.router);
        let temperature = moe.router.temperature;
        let vector = |wanted, name: String| {
            if wanted { source.numbers(&name, &[moe.num_experts]).map(Some) } else { Ok(None) }
        };
        let tensors = RouterTensors {
            weight: {
                let weight = source.matrix(&format!("{router}.weight"), moe.num_experts, hidden)?;
                if temperature == 1.0 { weight } else { weight.map(|w| w / temperature) }
            },
            bias: vector(moe.router.bias, format!("{router}.bias"))?,
            correction_bias: vector(moe.router.correction_bias, of(names.correction_bias))?,
            expert_scale: vector(moe.router.expert_scale, of("router.per_expert_scale"))?,
            by_token: match moe.router.by_token {
                true => {
                    let shape = [model.vocab_size, moe.router.top_k];
                    Some(source.experts_by_token(&format!("{router}.tid2eid"), shape, moe.num_experts)?)
                }
                false => None,
            },
        };
        let shared = moe.shared.as_ref().map(|shared| {
            let name = of(names.shared_expert);
            let mlp = MlpWeights::load(loader, &name, &shared.mlp)?;
            let output_gate = match shared.gate {
                true => {
                    let gate = source.matrix(&format!("{name}_gate.weight"), 1, hidden)?;
                    Some(backend.load_norm(gate)?)
                }
                false => None,
            };
            Ok::<_, crate::Error>(MlpWeights { output_gate, scale: shared.scale, ..mlp })
        });
        let latent = moe.latent.map(|latent| {
            let [down, up] = names.latent.map(of);
            Ok::<_, crate::Error>(Latent {
                down: loader.linear(&down, latent, hidden, false)?,
                up: loader.linear(&up, hidden, latent, false)?,
            })
        });
        Ok(FfnWeights::Moe {
            latent: latent.transpose()?,
            router: backend.load_router(tensors)?,
            shared: shared.transpose()?,
            norms: match residual {
                Residual::Sandwich => Some(BranchNorms::load(loader, layer)?),
                Residual::PreNorm | Residual::Parallel | Residual::Streams(_) | Residual::Connected(_) => None,
            },
        })
    }

    /// Bytes that a token reads of it.
    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let (mlp, latent) = match self {
            FfnWeights::Dense(mlp) => (Some(mlp), None),
            FfnWeights::Moe { shared, latent, .. } => (shared.as_ref(), latent.as_ref()),
            FfnWeights::None => (None, None),
        };
        let of_mlp = mlp.into_iter().flat_map(|m| m.gate.iter().chain([&m.up, &m.down]));
        of_mlp.chain(latent.into_iter().flat_map(|l| [&l.down, &l.up])).map(|w| backend.linear_bytes(w)).sum()
    }
}

impl<B: Backend> BranchNorms<B> {
    /// Source: HF modeling_gemma4.
    fn load(loader: &Loader<'_, B>, layer: &str) -> Result<Self> {
        let hidden = loader.model.hidden_size;
        let norm = |which: &str| loader.norm(&format!("{layer}.{which}.weight"), hidden);
        let scale = loader.source.vector(&format!("{layer}.router.scale"), hidden)?.map(|s| s / (hidden as f32).sqrt());
        Ok(Self {
            router: loader.backend.load_norm(scale)?,
            experts: norm("pre_feedforward_layernorm_2")?,
            shared_out: norm("post_feedforward_layernorm_1")?,
            experts_out: norm("post_feedforward_layernorm_2")?,
        })
    }
}

impl<B: Backend> MlpWeights<B> {
    fn load(loader: &Loader<'_, B>, name: &str, mlp: &Mlp) -> Result<Self> {
        let (hidden, width) = (loader.model.hidden_size, mlp.intermediate_size);
        let [gate, up, down] = loader.model.names.mlp_projections.map(|which| format!("{name}.{which}"));
        if gate == up && mlp.activation.is_gated() {
            // One tensor has the rows of gate, then those of up.
            let half = |i: usize| {
                let both = loader.source.stored(&format!("{up}.weight"), 2 * width, hidden)?;
                let rows = loader.cut_stored(both.head_rows(1, i * width, (i + 1) * width), Cut::Width)?;
                loader.backend.load_linear(rows, None, loader.bits)
            };
            return Ok(Self {
                gate: Some(half(0)?),
                up: half(1)?,
                down: loader.cut_linear(&down, (hidden, width), Cut::OfWidth, false)?,
                activation: mlp.activation,
                output_gate: None,
                scale: 1.0,
            });
        }
        Ok(Self {
            gate: match mlp.activation.is_gated() {
                true => Some(loader.cut_linear(&gate, (width, hidden), Cut::Width, false)?),
                false => None,
            },
            up: loader.cut_linear(&up, (width, hidden), Cut::Width, false)?,
            down: loader.cut_linear(&down, (hidden, width), Cut::OfWidth, false)?,
            activation: mlp.activation,
            output_gate: None,
            scale: 1.0,
        })
    }
}

/// Activations of the feed-forward parts, allocated once at their largest.
pub(super) struct FfnBuffers<B: Backend> {
    mlp: Vec<MlpBuffers<B>>, // one for each width
    pub(super) routing: Option<B::Routing>,
    guess: Option<B::Routing>,        // of the next layer's
    experts_input: Option<B::Tensor>, // [T, hidden or latent], where it is not the shared expert's
    sum: Option<B::Tensor>,           // [T, hidden or latent], f32: of the branches' results, or of routed experts'
    latent: Option<B::Tensor>,        // [T, latent]: the sum as a product takes it
}

/// Activations of an MLP of one width, `[T, width]` each.
struct MlpBuffers<B: Backend> {
    width: usize,
    gate: B::Tensor,
    up: B::Tensor,
    product: B::Tensor,
}

impl<B: Backend> FfnBuffers<B> {
    pub(super) fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Self> {
        let mut widths: Vec<usize> = model.layers.iter().filter_map(|layer| layer.ffn.mlp_width()).collect();
        widths.sort_unstable();
        widths.dedup();
        let hidden = model.hidden_size;
        let branches = model.layers.iter().any(|layer| layer.residual == Residual::Sandwich);
        let weighed = model.moe_layers().any(|(_, moe)| moe.router.weighs_input);
        let latent = model.moe().and_then(|moe| moe.latent);
        let width = latent.unwrap_or(hidden);
        Ok(Self {
            mlp: widths.into_iter().map(|width| MlpBuffers::new(backend, width, max_tokens)).collect::<Result<_>>()?,
            routing: model.moe().map(|moe| backend.routing(max_tokens, moe.router.top_k)).transpose()?,
            guess: model.moe().map(|moe| backend.routing(FORESEEN_TOKENS, moe.router.top_k)).transpose()?,
            experts_input: match branches || weighed || latent.is_some() {
                true => Some(backend.tensor(max_tokens, width)?),
                false => None,
            },
            sum: match branches || latent.is_some() || model.connections().is_some() {
                true => Some(backend.tensor_f32(max_tokens, width)?),
                false => None,
            },
            latent: latent.map(|latent| backend.tensor(max_tokens, latent)).transpose()?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for m in &mut self.mlp {
            for t in [&mut m.gate, &mut m.up, &mut m.product] {
                backend.set_rows(t, rows);
            }
        }
        let others = self.experts_input.iter_mut().chain(&mut self.sum).chain(&mut self.latent);
        others.for_each(|t| backend.set_rows(t, rows));
    }

    /// Those of an MLP of `width`.
    fn mlp(all: &mut [MlpBuffers<B>], width: Option<usize>) -> &mut MlpBuffers<B> {
        all.iter_mut().find(|b| Some(b.width) == width).expect("there is a buffer for every width")
    }
}

impl<B: Backend> MlpBuffers<B> {
    fn new(backend: &B, width: usize, max_tokens: usize) -> Result<Self> {
        let tensor = || backend.tensor(max_tokens, width);
        Ok(Self { width, gate: tensor()?, up: tensor()?, product: tensor()? })
    }
}

/// The feed-forward part of one layer: what it is, what it has, and who computes its routed experts.
pub(super) struct Layer<'a, B: Backend> {
    pub(super) config: &'a Ffn,
    pub(super) batch: &'a B::Batch,
    pub(super) weights: &'a FfnWeights<B>,
    pub(super) experts: Option<(&'a mut (dyn ExpertExecutor<B> + 'static), usize)>, // and its number among MoE layers
    pub(super) chosen: Option<(&'a B::Choices, usize)>, // that replace the router's, from this number on
    pub(super) next: Option<NextRouter<'a, B>>,
}

/// What the layer after this one routes by, if that reads one stream through a norm: applied a layer early, it guesses
/// the next layer's experts, because a layer changes the stream little.
pub(super) struct NextRouter<'a, B: Backend> {
    pub(super) norm: (&'a B::Norm, f32),
    pub(super) weights: &'a B::Router,
    pub(super) config: &'a Router,
    pub(super) chosen: Option<(&'a B::Choices, usize)>, // as above
}

/// The feed-forward part of what `stream` reads, and its result into `stream`. `h` is the part's input, or a buffer for
/// it, `[T, hidden]`.
pub(super) fn ffn<B: Backend>(
    backend: &B,
    Layer { config, batch, weights, experts, chosen, next }: Layer<'_, B>,
    buffers: &mut FfnBuffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let FfnBuffers { mlp: all, routing, guess, experts_input, sum, latent: of_latent } = buffers;
    let width = config.mlp_width();
    match (config, weights, experts, routing) {
        (Ffn::Dense(_), FfnWeights::Dense(w), ..) => {
            stream.read(backend, h);
            mlp(backend, w, FfnBuffers::mlp(all, width), h, stream)
        }
        (Ffn::None, FfnWeights::None, ..) => Ok(()),
        (
            Ffn::Moe(moe),
            FfnWeights::Moe { router, shared, norms: None, latent },
            Some((experts, number)),
            Some(routing),
        ) => {
            match stream.norm {
                _ if moe.router.by_token => {
                    stream.settle(backend, h);
                    backend.route_by_token(router, &moe.router, batch, h, routing);
                }
                Some(norm) => backend.norm_route(stream.x, norm, h, router, &moe.router, routing),
                None => backend.route(router, &moe.router, h, routing),
            }
            choose(backend, chosen, routing);
            match (experts_input, latent) {
                (Some(input), Some(latent)) => {
                    backend.linear(&latent.down, h, input);
                    experts.submit(number, input, routing)?;
                }
                (Some(input), None) if moe.router.weighs_input => {
                    backend.weigh_input(routing, h, input);
                    experts.submit(number, input, routing)?;
                }
                _ => experts.submit(number, h, routing)?,
            }
            // Streams are connected once with all that the part gives.
            if let (Some(After { through: Through::Connected(_), .. }), Some(sum)) = (&stream.after, &mut *sum) {
                backend.clear(sum);
                let mut both = Stream::plain(&mut *sum);
                if let Some(w) = shared {
                    both.term = Term::First;
                    mlp(backend, w, FfnBuffers::mlp(all, width), h, &mut both)?;
                    both.term = Term::Last;
                }
                join(backend, Partial::Experts(experts), &mut both)?;
                return join(backend, Partial::Sum(sum), stream);
            }
            if let Some(w) = shared {
                stream.term = Term::First;
                mlp(backend, w, FfnBuffers::mlp(all, width), h, stream)?;
                stream.term = Term::Last;
            }
            if let (Some(next), Some(guess), true) = (next, guess, experts.foresees()) {
                backend.norm_route(stream.x, next.norm, h, next.weights, next.config, guess);
                choose(backend, next.chosen, guess);
                experts.foresee(guess);
            }
            match (latent, sum, of_latent) {
                // Ranks sum behind the projection, which every one of them has.
                (Some(latent), Some(sum), Some(rounded)) => {
                    backend.clear(sum);
                    join(backend, Partial::Experts(experts), &mut Stream::of_term(&mut *sum, Term::First))?;
                    backend.rounded(sum, rounded);
                    join(backend, Partial::Product(&latent.up, rounded), stream)
                }
                _ => join(backend, Partial::Experts(experts), stream),
            }
        }
        (
            Ffn::Moe(moe),
            FfnWeights::Moe { router, shared, norms: Some(n), .. },
            Some((experts, number)),
            Some(routing),
        ) => {
            let (Some((_, eps)), Some(after), Some(input), Some(sum)) =
                (stream.norm, &mut stream.after, experts_input, sum)
            else {
                panic!("a layer of branches has norms, and buffers for them");
            };
            backend.rms_norm(stream.x, &n.router, eps, h);
            backend.route(router, &moe.router, h, routing);
            choose(backend, chosen, routing);
            backend.rms_norm(stream.x, &n.experts, eps, input);
            experts.submit(number, input, routing)?;
            backend.clear(sum);
            let mut branch = |norm, partial: &mut dyn FnMut(&mut Stream<'_, B>) -> Result<()>| {
                let after = After { through: Through::Norm((norm, eps), 1.0), result: &mut *after.result };
                partial(&mut Stream { after: Some(after), ..Stream::plain(&mut *sum) })
            };
            if let Some(w) = shared {
                backend.rms_norm(stream.x, stream.norm.expect("seen above").0, eps, h);
                branch(&n.shared_out, &mut |sum| mlp(backend, w, FfnBuffers::mlp(all, width), h, sum))?;
            }
            branch(&n.experts_out, &mut |sum| join(backend, Partial::Experts(&mut *experts), sum))?;
            join(backend, Partial::Sum(sum), stream)
        }
        _ => panic!("configuration, weights and experts of one layer are of one kind"),
    }
}

/// Replaces the router's choice where a measurement gives another.
fn choose<B: Backend>(backend: &B, chosen: Option<(&B::Choices, usize)>, routing: &mut B::Routing) {
    if let Some((choices, first)) = chosen {
        backend.choose_experts(choices, first, routing);
    }
}

/// `down(activation(gate h, up h))` into `stream`. The gate of a gated one multiplies what `down` reads, not what it
/// gives.
fn mlp<B: Backend>(
    backend: &B,
    w: &MlpWeights<B>,
    MlpBuffers { gate, up, product, .. }: &mut MlpBuffers<B>,
    h: &B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    match &w.gate {
        Some(of_gate) => backend.gated_linears(h, (of_gate, &w.up), w.activation, (gate, up), product),
        None => {
            backend.linear(&w.up, h, up);
            backend.activate(w.activation, up, up, product);
        }
    }
    if let Some(gate) = &w.output_gate {
        backend.gate_rows(gate, h, product);
    }
    if w.scale != 1.0 {
        backend.scale(product, w.scale);
    }
    join(backend, Partial::Product(&w.down, product), stream)
}
