//! What follows attention in a layer: a dense MLP, or a router and a shared expert beside the routed ones.

use super::join::{Partial, join};
use super::loader::Loader;
use crate::Result;
use crate::backend::Backend;
use crate::model::{Ffn, Moe};

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

impl<B: Backend> FfnWeights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, ffn: &Ffn) -> Result<Self> {
        match ffn {
            Ffn::Dense { intermediate_size } => {
                Ok(FfnWeights::Dense(MlpWeights::load(loader, &format!("{layer}.mlp"), *intermediate_size)?))
            }
            Ffn::Moe(moe) => Self::load_moe(loader, &format!("{layer}.{}", loader.model.names.moe), moe),
        }
    }

    fn load_moe(loader: &Loader<'_, B>, name: &str, moe: &Moe) -> Result<Self> {
        let (hidden, names) = (loader.model.hidden_size, &loader.model.names);
        let router = format!("{name}.{}", names.router);
        let weight = loader.source.matrix(&format!("{router}.weight"), moe.num_experts, hidden)?.to_f32().into_owned();
        let vector = |wanted, name: String| {
            if wanted { loader.source.vector(&name, moe.num_experts).map(Some) } else { Ok(None) }
        };
        let bias = vector(moe.router.bias, format!("{router}.bias"))?;
        let correction_bias = vector(moe.router.correction_bias, format!("{name}.{}", names.correction_bias))?;
        let shared = format!("{name}.{}", names.shared_expert);
        Ok(FfnWeights::Moe {
            router: loader.backend.load_router(weight, bias, correction_bias)?,
            shared: match moe.shared_intermediate_size {
                Some(width) => {
                    let mlp = MlpWeights::load(loader, &shared, width)?;
                    let gate = || loader.source.matrix(&format!("{shared}_gate.weight"), 1, hidden);
                    let output_gate = if moe.shared_gate {
                        Some(loader.backend.load_norm(gate()?.to_f32().into_owned())?)
                    } else {
                        None
                    };
                    Some(MlpWeights { output_gate, ..mlp })
                }
                None => None,
            },
        })
    }

    /// Bytes that a token reads of it.
    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let mlp = match self {
            FfnWeights::Dense(mlp) => Some(mlp),
            FfnWeights::Moe { shared, .. } => shared.as_ref(),
        };
        mlp.map_or(0, |m| [&m.gate, &m.up, &m.down].map(|w| backend.linear_bytes(w)).iter().sum())
    }
}

impl<B: Backend> MlpWeights<B> {
    fn load(loader: &Loader<'_, B>, name: &str, width: usize) -> Result<Self> {
        let hidden = loader.model.hidden_size;
        Ok(Self {
            gate: loader.linear(&format!("{name}.gate_proj"), width, hidden, false)?,
            up: loader.linear(&format!("{name}.up_proj"), width, hidden, false)?,
            down: loader.linear(&format!("{name}.down_proj"), hidden, width, false)?,
            output_gate: None,
        })
    }
}

/// Activations of an MLP of one width, `[T, width]` each.
pub(super) struct MlpBuffers<B: Backend> {
    width: usize,
    gate: B::Tensor,
    up: B::Tensor,
    product: B::Tensor,
}

impl<B: Backend> MlpBuffers<B> {
    pub(super) fn new(backend: &B, width: usize, max_tokens: usize) -> Result<Self> {
        let tensor = || backend.tensor(max_tokens, width);
        Ok(Self { width, gate: tensor()?, up: tensor()?, product: tensor()? })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.gate, &mut self.up, &mut self.product] {
            backend.set_rows(t, rows);
        }
    }

    /// Those of `width`.
    pub(super) fn of(all: &mut [Self], width: Option<usize>) -> &mut Self {
        all.iter_mut().find(|b| Some(b.width) == width).expect("there is a buffer for every width")
    }
}

/// `x += down(silu(gate h) * up h)`. The gate of a gated one multiplies what `down` reads, not what it gives.
pub(super) fn mlp<B: Backend>(
    backend: &B,
    w: &MlpWeights<B>,
    MlpBuffers { gate, up, product, .. }: &mut MlpBuffers<B>,
    h: &B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
    backend.gated_linears(h, (&w.gate, &w.up), (gate, up), product);
    if let Some(gate) = &w.output_gate {
        backend.gate_rows(gate, h, product);
    }
    join(backend, Partial::Product(&w.down, product), x)
}
