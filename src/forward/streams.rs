//! Several residual streams: what mixes them into what a part of a layer, or the output head, reads.

use super::loader::Loader;
use crate::Result;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, ConnectWeights};
use crate::model;

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
    scale: B::Norm,      // [3]
}

impl<B: Backend> Connection<B> {
    pub(super) fn load(loader: &Loader<'_, B>, name: &str, of: model::Connections) -> Result<Self> {
        let Loader { backend, source, .. } = *loader;
        let numbers = |part: &str, shape: &[usize]| source.numbers(&format!("{name}_{part}"), shape);
        Ok(Self {
            of_streams: backend.load_norm(numbers("fn", &[of.rows(), of.count * loader.model.hidden_size])?)?,
            base: backend.load_norm(numbers("base", &[of.rows()])?)?,
            scale: backend.load_norm(numbers("scale", &[3])?)?,
        })
    }

    /// What a part reads of the streams, through its norm, into `h`; and how the streams go on.
    pub(super) fn read(
        &self,
        backend: &B,
        (norm, eps): (&B::Norm, f32),
        x: &B::Tensor,
        ConnectBuffers { read, shares, of }: &mut ConnectBuffers<B>,
        h: &mut B::Tensor,
    ) {
        let weights = ConnectWeights { of_streams: &self.of_streams, base: &self.base, scale: &self.scale };
        backend.collapse_streams(x, &weights, (*of, eps), shares, read);
        backend.rms_norm(read, norm, eps, h);
    }
}

/// Activations of connections.
pub(super) struct ConnectBuffers<B: Backend> {
    read: B::Tensor,              // [T, hidden], f32
    pub(super) shares: B::Tensor, // [T, rows], f32: `pre`, `post` and `C`
    of: model::Connections,
}

impl<B: Backend> ConnectBuffers<B> {
    /// `None`: streams are not connected.
    pub(super) fn new(backend: &B, model: &model::ModelConfig, max_tokens: usize) -> Result<Option<Self>> {
        let Some(of) = model.connections() else { return Ok(None) };
        Ok(Some(Self {
            read: backend.tensor_f32(max_tokens, model.hidden_size)?,
            shares: backend.tensor_f32(max_tokens, of.rows())?,
            of,
        }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        [&mut self.read, &mut self.shares].into_iter().for_each(|t| backend.set_rows(t, rows));
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
