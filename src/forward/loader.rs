//! Named tensors of a checkpoint onto a backend, checked for shape and finite values.

use crate::backend::Backend;
use crate::backend::source::TensorSource;
use crate::backend::tensor::HostTensor;
use crate::config::DenseBits;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Reads one model's tensors onto one backend.
pub(super) struct Loader<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) source: &'a dyn TensorSource,
    pub(super) model: &'a ModelConfig,
    pub(super) bits: DenseBits,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// The same for keys and values.
    pub(super) fn of_keys_and_values(&self) -> Self {
        Self { bits: self.bits.of_sensitive(), ..*self }
    }

    /// The projection `name`, `[n, k]`, and its bias `[n]`.
    pub(super) fn linear(&self, name: &str, n: usize, k: usize, bias: bool) -> Result<B::Linear> {
        let weight = self.source.matrix(&format!("{name}.weight"), n, k)?;
        let bias = if bias { Some(self.source.vector(&format!("{name}.bias"), n)?) } else { None };
        self.backend.load_linear(weight, bias, self.bits)
    }

    /// The norm `name`, `[len]`.
    pub(super) fn norm(&self, name: &str, len: usize) -> Result<B::Norm> {
        self.backend.load_norm(self.source.vector(name, len)?.map(|w| w + self.model.norm_offset))
    }

    /// How fast the states of the layer part `name` decay, `exp(A_log)`, `[heads]`. GGUF files have minus that, and
    /// of Ling 3 that itself.
    pub(super) fn rates(&self, name: &str, heads: usize) -> Result<HostTensor<'a>> {
        let signed = format!("{name}.A");
        if !self.source.has(&signed) {
            return Ok(self.source.vector(&format!("{name}.A_log"), heads)?.map(f32::exp));
        }
        let a = self.source.vector(&signed, heads)?;
        let positive = a.to_f32().iter().filter(|a| **a > 0.0).count();
        if positive > 0 && positive < heads {
            return Err(Error::Model(format!(
                "tensor `{signed}` holds numbers of both signs, which are no decays: convert the model again"
            )));
        }
        Ok(a.map(f32::abs))
    }

    /// The tensor `name` of a single number; whatever where memory is only counted.
    pub(super) fn number(&self, name: &str) -> Result<f32> {
        Ok(self.source.vector(name, 1)?.to_f32().first().copied().unwrap_or_default())
    }
}
