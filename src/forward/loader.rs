//! Named tensors of a checkpoint onto a backend, checked for shape and finite values.

use crate::backend::Backend;
use crate::backend::source::{LinearWeight, TensorSource};
use crate::backend::tensor::HostTensor;
use crate::config::DenseBits;
use crate::model::{ModelConfig, Share};
use crate::{Error, Result};

/// Reads one model's tensors onto one backend.
pub(super) struct Loader<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) source: &'a dyn TensorSource,
    pub(super) model: &'a ModelConfig,
    pub(super) bits: DenseBits,
    pub(super) share: Share,
}

/// What a rank has of a matrix `[n, k]`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    /// All.
    Whole,
    /// Its run of so many heads, whose rows lie one after the other.
    Heads(usize),
    /// The same in each of so many equal parts of the rows, of so many heads.
    OfEach(usize, usize),
    /// The columns that belong to such rows of another matrix. Ranks sum the products, of which the first adds a bias.
    OfHeads(usize),
    /// Rows of an MLP's width.
    Width,
    /// The columns that belong to them.
    OfWidth,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// The same for keys and values.
    pub(super) fn of_keys_and_values(&self) -> Self {
        Self { bits: self.bits.of_sensitive(), ..*self }
    }

    /// The same for what a rank has another share of.
    pub(super) fn of_share(&self, share: Share) -> Self {
        Self { share, ..*self }
    }

    /// The projection `name`, `[n, k]`, and its bias `[n]`, of which every rank has all.
    pub(super) fn linear(&self, name: &str, n: usize, k: usize, bias: bool) -> Result<B::Linear> {
        self.cut_linear(name, (n, k), Cut::Whole, bias)
    }

    /// A rank's part of the projection `name`, `[n, k]`, and of its bias `[n]`.
    pub(super) fn cut_linear(&self, name: &str, (n, k): (usize, usize), cut: Cut, bias: bool) -> Result<B::Linear> {
        let weight = format!("{name}.weight");
        let weight = self.cut_stored(self.source.stored(&weight, n, k)?, cut)?;
        let is_sum = matches!(cut, Cut::OfHeads(_) | Cut::OfWidth);
        let bias = match (bias, is_sum) {
            (false, _) => None,
            (true, true) if self.share.rank > 0 => None,
            (true, true) => Some(self.source.vector(&format!("{name}.bias"), n)?),
            (true, false) => Some(self.cut(self.source.vector(&format!("{name}.bias"), n)?, cut)),
        };
        let bits = match cut {
            Cut::OfHeads(_) => self.bits.of_out(),
            Cut::OfWidth => self.bits.of_down(),
            _ => self.bits,
        };
        self.backend.load_linear(weight, bias, bits)
    }

    /// A rank's part of a matrix to multiply with, which stays as it is stored where there is one rank. Errors: as
    /// [`TensorSource::matrix`].
    pub(super) fn cut_stored<'b>(&self, all: LinearWeight<'b>, cut: Cut) -> Result<LinearWeight<'b>> {
        Ok(match self.share.is_whole() {
            true => all,
            false => self.cut(all.plain()?, cut).into(),
        })
    }

    /// A rank's part of a matrix.
    pub(super) fn cut<'b>(&self, all: HostTensor<'b>, cut: Cut) -> HostTensor<'b> {
        let (n, k) = (all.rows(), all.cols());
        let heads = |of: usize, heads: usize| {
            let run = self.share.run(heads);
            run.start * (of / heads)..run.end * (of / heads)
        };
        let width = |of: usize| self.share.width(of).expect("the model was divided before its weights");
        let (rows, cols) = match cut {
            _ if self.share.is_whole() => return all,
            Cut::Whole => return all,
            Cut::OfEach(parts, count) => {
                let run = heads(n / parts, count);
                return all.head_rows(parts, run.start, run.end);
            }
            Cut::Heads(count) => (heads(n, count), 0..k),
            Cut::OfHeads(count) => (0..n, heads(k, count)),
            Cut::Width => (width(n), 0..k),
            Cut::OfWidth => (0..n, width(k)),
        };
        match rows.len() == n {
            true => all.cols_by(&cols.collect::<Vec<_>>()),
            false => all.head_rows(1, rows.start, rows.end),
        }
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
