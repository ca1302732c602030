//! Several residual streams: what mixes them into what a part of a layer, or the output head, reads.

use super::loader::Loader;
use crate::Result;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, ConnectWeights, ReadBy};
use crate::model::{self, LastRead};

/// The weights of a mixer, as [`model::Mixer`] says.
pub(super) struct Mixer<B: Backend> {
    norm: B::Norm,    // [streams * hidden]
    gates: B::Linear, // [rank, then streams, then rows of zeros; streams * hidden]: `down` and `inject`
    up: B::Linear,    // [streams * hidden, rank]
}

impl<B: Backend> Mixer<B> {
    pub(super) fn load(loader: &Loader<'_, B>, name: &str, mixer: model::Mixer) -> Result<Self> {
        let Loader { backend, source, bits, .. } = *loader;
        let (model::Mixer { count, rank }, width) = (mixer, mixer.count * loader.model.hidden_size);
        let mut gates = vec![source.matrix(&format!("{name}.input_mix_weight_down.weight"), rank, width)?];
        // The last one gives nothing back to the streams.
        let inject = format!("{name}.block_inject_weight.weight");
        let injects = name.contains(".layers.");
        if injects {
            gates.push(source.matrix(&inject, count, width)?);
        }
        let rows = rank + if injects { count } else { 0 };
        gates.push(gates[0].zero_rows(mixer.gate_rows() - rows));
        Ok(Self {
            norm: loader.norm(&format!("{name}.hc_norm.weight"), width)?,
            gates: backend.load_linear(HostTensor::stacked(&gates), None, bits)?,
            up: loader.linear(&format!("{name}.input_mix_weight_up"), width, rank, false)?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        backend.linear_bytes(&self.gates) + backend.linear_bytes(&self.up)
    }
}

/// The weights of a connection, as [`model::Connections`] says.
pub(super) struct Connection<B: Backend> {
    of_streams: B::Norm, // [rows, streams * hidden], f32: `fn`
    base: B::Norm,       // [rows]
    scale: B::Norm,      // [3], or of the output head [1]
}

impl<B: Backend> Connection<B> {
    /// That of a layer's part.
    pub(super) fn load(loader: &Loader<'_, B>, name: &str, of: model::Connections) -> Result<Self> {
        Self::load_rows(loader, name, [of.rows(), of.count, 3])
    }

    /// That of the output head, which gives nothing back to the streams.
    pub(super) fn load_last(loader: &Loader<'_, B>, name: &str, of: model::Connections) -> Result<Self> {
        Self::load_rows(loader, name, [of.count, of.count, 1])
    }

    fn load_rows(loader: &Loader<'_, B>, name: &str, [rows, streams, scales]: [usize; 3]) -> Result<Self> {
        let Loader { backend, source, .. } = *loader;
        let numbers = |part: &str, shape: &[usize]| source.numbers(&format!("{name}_{part}"), shape);
        Ok(Self {
            of_streams: backend.load_norm(numbers("fn", &[rows, streams * loader.model.hidden_size])?)?,
            base: backend.load_norm(numbers("base", &[rows])?)?,
            scale: backend.load_norm(numbers("scale", &[scales])?)?,
        })
    }

    fn weights(&self) -> ConnectWeights<'_, B> {
        ConnectWeights { of_streams: &self.of_streams, base: &self.base, scale: &self.scale }
    }

    /// What a part reads of the streams, through its norm, into `h`; and how the streams go on, into `shares`.
    /// `before`: the shares of the connection before, if there is one.
    pub(super) fn read(
        &self,
        backend: &B,
        (norm, eps): (&B::Norm, f32),
        x: &B::Tensor,
        (ConnectBuffers { read, of }, before): (&mut ConnectBuffers<B>, Option<&B::Tensor>),
        shares: &mut B::Tensor,
        h: &mut B::Tensor,
    ) {
        let by = match (of.last, before) {
            (LastRead::Ahead, Some(before)) => ReadBy::Shares(before),
            (LastRead::Ahead, None) => ReadBy::First,
            (LastRead::Mean | LastRead::Shares, _) => ReadBy::Own,
        };
        backend.collapse_streams(x, &self.weights(), (*of, eps), by, shares, read);
        backend.rms_norm(read, norm, eps, h);
    }
}

/// What the output head makes of connected streams, before its norm.
pub(super) struct LastBuffers<B: Backend> {
    read: B::Tensor,           // [R, hidden], f32
    shares: Option<B::Tensor>, // [R, streams], f32: `pre`; or all of the last connection's, [R, rows]
    of: model::Connections,
}

impl<B: Backend> LastBuffers<B> {
    /// `None`: streams are not connected.
    pub(super) fn new(backend: &B, model: &model::ModelConfig, max_rows: usize) -> Result<Option<Self>> {
        let Some(of) = model.connections() else { return Ok(None) };
        Ok(Some(Self {
            read: backend.tensor_f32(max_rows, model.hidden_size)?,
            shares: match of.last {
                LastRead::Mean => None,
                LastRead::Shares => Some(backend.tensor_f32(max_rows, of.count)?),
                LastRead::Ahead => Some(backend.tensor_f32(max_rows, of.rows())?),
            },
            of,
        }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        [&mut self.read].into_iter().chain(&mut self.shares).for_each(|t| backend.set_rows(t, rows));
    }

    /// What the head's norm reads of rows `x` of the streams; `gather` brings the same rows of the last connection's
    /// shares.
    pub(super) fn read(
        &mut self,
        backend: &B,
        (w, eps): (Option<&Connection<B>>, f32),
        x: &B::Tensor,
        gather: impl FnOnce(&mut B::Tensor),
    ) -> &B::Tensor {
        let Self { read, shares, of } = self;
        match (w, shares) {
            (Some(w), Some(shares)) => {
                backend.collapse_streams(x, &w.weights(), (*of, eps), ReadBy::Own, shares, read);
            }
            (None, Some(shares)) => {
                gather(shares);
                backend.sum_streams(x, *of, shares, read);
            }
            (_, None) => backend.mean_streams(x, read),
        }
        read
    }
}

/// Activations of connections.
pub(super) struct ConnectBuffers<B: Backend> {
    read: B::Tensor, // [T, hidden], f32
    of: model::Connections,
}

impl<B: Backend> ConnectBuffers<B> {
    /// `None`: streams are not connected.
    pub(super) fn new(backend: &B, model: &model::ModelConfig, max_tokens: usize) -> Result<Option<Self>> {
        let Some(of) = model.connections() else { return Ok(None) };
        Ok(Some(Self { read: backend.tensor_f32(max_tokens, model.hidden_size)?, of }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        backend.set_rows(&mut self.read, rows);
    }
}

/// Activations of mixers.
pub(super) struct MixBuffers<B: Backend> {
    pub(super) normed: B::Tensor, // [T, streams * hidden]
    pub(super) gate: B::Tensor,   // [T, streams * hidden]
    pub(super) inject: B::Tensor, // [T, streams], f32: what each stream gets of the part's result
    gates: B::Tensor,             // [T, gate rows], f32
    low: B::Tensor,               // [T, rank]
    pub(super) hidden_size: usize,
}

impl<B: Backend> MixBuffers<B> {
    /// `None`: there is one stream.
    pub(super) fn new(backend: &B, model: &model::ModelConfig, max_tokens: usize) -> Result<Option<Self>> {
        let Some(mixer) = model.mixer() else { return Ok(None) };
        let width = model.streams().width();
        Ok(Some(Self {
            normed: backend.tensor(max_tokens, width)?,
            gate: backend.tensor(max_tokens, width)?,
            inject: backend.tensor_f32(max_tokens, mixer.count)?,
            gates: backend.tensor_f32(max_tokens, mixer.gate_rows())?,
            low: backend.tensor(max_tokens, mixer.rank)?,
            hidden_size: model.hidden_size,
        }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.normed, &mut self.gate, &mut self.inject, &mut self.gates, &mut self.low] {
            backend.set_rows(t, rows);
        }
    }

    /// Mixes the streams `x` into `h`.
    pub(super) fn mix(&mut self, backend: &B, w: &Mixer<B>, eps: f32, x: &B::Tensor, h: &mut B::Tensor) {
        let Self { normed, gate, inject, gates, low, hidden_size } = self;
        backend.norm_streams(x, &w.norm, eps, *hidden_size, normed);
        backend.linear(&w.gates, normed, gates);
        backend.mixer_gates(gates, low, inject);
        backend.linear(&w.up, low, gate);
        backend.mix_streams(gate, normed, h);
    }
}
