//! The output head: rows of the residual stream become logits.

use std::ops::Range;

use super::buffers::{Part, Parts};
use super::streams::{LastBuffers, MixBuffers};
use super::weights::{HeadWeights, Last};
use crate::backend::Backend;
use crate::backend::tensor::Shortlist;
use crate::model::{ModelConfig, Norm, Share};
use crate::{Error, Result};

/// Buffers for `R` rows at most.
pub(super) struct Head<B: Backend> {
    max_rows: usize,
    vocab_size: usize,
    norm: Norm,
    norm_eps: f32,
    scale: f32,           // multiplies the logits
    softcap: Option<f32>, // bounds them
    last: B::Tensor,      // [R, streams * hidden], rows of x of which logits are wanted
    mixing: Option<MixBuffers<B>>,
    connected: Option<LastBuffers<B>>,
    last_normed: B::Tensor,                       // [R, hidden]
    part: Option<(Vec<Range<usize>>, B::Tensor)>, // the ranks' parts of the vocabulary; logits of this one's, [R, part]
    logits: B::Tensor,                            // [R, vocab]
    host: B::Host,                                // [R, vocab]
    shortlister: B::Shortlister,
    rows: usize, // of the last call
}

impl<B: Backend> Head<B> {
    pub(super) fn new(backend: &B, model: &ModelConfig, max_rows: usize) -> Result<Self> {
        let (hidden, vocab_size) = (model.hidden_size, model.vocab_size);
        let own = backend.share();
        let columns = (0..own.of).map(|rank| model.vocabulary_share(Share { rank, ..own })).collect::<Option<Vec<_>>>();
        let part = columns.map(|columns| {
            let part = backend.tensor_f32(max_rows, columns[own.rank].len())?;
            Ok::<_, Error>((columns, part))
        });
        Ok(Self {
            max_rows,
            vocab_size,
            norm: model.norm,
            norm_eps: model.norm_eps,
            scale: model.logit_scale,
            softcap: model.logit_softcap,
            last: backend.tensor_f32(max_rows, model.streams().width())?,
            mixing: MixBuffers::new(backend, model, max_rows)?,
            connected: LastBuffers::new(backend, model, max_rows)?,
            last_normed: backend.tensor(max_rows, hidden)?,
            part: part.transpose()?,
            logits: backend.tensor_f32(max_rows, vocab_size)?,
            rows: 0,
            shortlister: backend.shortlister(max_rows, vocab_size)?,
            host: backend.host(max_rows.saturating_mul(vocab_size))?,
        })
    }

    /// Rows of logits that one call may ask for.
    pub(super) fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Whether ranks compute logits together.
    pub(super) fn is_divided(&self) -> bool {
        self.part.is_some()
    }

    /// Logits of rows of the last batch, on the device: `lm_head(norm(x[rows]))`.
    pub(super) fn compute(&mut self, backend: &B, weights: &HeadWeights<B>, parts: &Parts<B>, rows: &[usize]) {
        let Self { last, connected, last_normed, part, logits, mixing, .. } = self;
        for t in [&mut *last, &mut *last_normed, &mut *logits] {
            backend.set_rows(t, rows.len());
        }
        parts.gather(backend, rows, |part| &part.x, last);
        match (&weights.last, mixing, self.norm) {
            (Last::Mixer(mixer), Some(mixing), _) => {
                mixing.set_rows(backend, rows.len());
                mixing.mix(backend, mixer, self.norm_eps, last, last_normed);
            }
            (Last::Connected(connection, norm), ..) => {
                let connected = connected.as_mut().expect("connected streams have room for what the head reads");
                connected.set_rows(backend, rows.len());
                let read = connected.read(backend, (connection.as_ref(), self.norm_eps), last, |to| {
                    parts.gather(backend, rows, Part::last_shares, to);
                });
                backend.rms_norm(read, norm, self.norm_eps, last_normed);
            }
            (Last::Mixer(_), None, _) => panic!("several streams have buffers for their mixer"),
            (Last::Norm(norm), _, Norm::Rms) => backend.rms_norm(last, norm, self.norm_eps, last_normed),
            (Last::Norm(norm), _, Norm::Layer) => backend.layer_norm(last, norm, self.norm_eps, last_normed),
        }
        match part {
            None => backend.linear(&weights.linear, last_normed, logits),
            Some((columns, part)) => {
                backend.set_rows(part, rows.len());
                backend.linear(&weights.linear, last_normed, part);
                backend.gather_columns(part, columns, logits);
            }
        }
        if self.scale != 1.0 {
            backend.scale(logits, self.scale);
        }
        if let Some(cap) = self.softcap {
            backend.softcap(logits, cap);
        }
        self.rows = rows.len();
    }

    /// The largest of each computed row.
    pub(super) fn shortlists(
        &mut self,
        backend: &B,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        backend.shortlist(&mut self.shortlister, &self.logits, inverse_temperatures, out)
    }

    /// The computed rows, on the host.
    pub(super) fn whole_rows(&mut self, backend: &B) -> Result<&mut [f32]> {
        let host = &mut self.host[..self.rows * self.vocab_size];
        backend.read_rows(&self.logits, 0..self.rows, host)?;
        Ok(host)
    }
}
