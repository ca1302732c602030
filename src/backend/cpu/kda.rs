//! Kimi delta attention after its convolution, one token after the other: the order that makes chunking exact.
//!
//! ```text
//! for each (sequence, head), spread over the workers:
//!   for each token:  q, k = q / |q| / sqrt(dim), k / |k|;   beta = sigmoid(b);   decays by number of the key
//!                    out = norm(delta_step(state, q, k, v, decays, beta)) * sigmoid(g)
//! ```

use super::recur::{L2_EPS, State, softplus};
use super::{Cpu, lock};
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;
use crate::backend::{KdaInputs, KdaRule};
use crate::kernel::DeltaToken;
use crate::machine::workers::Shared;
use crate::model::KdaDecay;

impl Cpu {
    pub(super) fn run_kda(
        &self,
        state: &mut State,
        batch: &Batch,
        rule: &KdaRule<'_, Self>,
        KdaInputs { qkv, decay, beta, gate }: KdaInputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let (config, kernel, scratch) = (rule.config, self.kernel, &self.scratch);
        let (heads, dim, inner) = (config.num_heads, config.head_dim, config.inner_dim());
        assert!(qkv.cols() == 3 * inner && decay.cols() == inner && gate.cols() == inner && beta.cols() == heads);
        let (states, cols) = (Shared::new(&mut state.heads), out.cols());
        let out = Shared::new(out.data_mut());
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            let memory = scratch.values.take(6 * dim);
            let (of_query, memory) = memory.split_at_mut(dim);
            let (of_key, memory) = memory.split_at_mut(dim);
            let (q, memory) = memory.split_at_mut(dim);
            let (k, memory) = memory.split_at_mut(dim);
            let (decays, read) = memory.split_at_mut(dim);
            // What makes an L2 norm, scaled, of an RMS norm.
            of_query.fill(1.0 / dim as f32);
            of_key.fill(1.0 / (dim as f32).sqrt());
            for unit in worker.share(batch.spans.len() * heads) {
                let (span, head) = (&batch.spans[unit / heads], unit % heads);
                let at = (span.slot * heads + head) * dim * dim;
                // SAFETY: a slot belongs to one sequence, and in it a head to one unit.
                #[allow(unsafe_code)]
                let state = unsafe { states.slice_mut(at..at + dim * dim) };
                if span.start == 0 {
                    state.fill(0.0);
                }
                let columns = head * dim..(head + 1) * dim;
                for t in span.rows.clone() {
                    let row = qkv.row(t);
                    let part = |i: usize| &row[i * inner + head * dim..][..dim];
                    let eps = L2_EPS / dim as f32;
                    kernel.rms_norm(part(0), of_query, eps, q);
                    kernel.rms_norm(part(1), of_key, eps, k);
                    let biased = decay.row(t)[columns.clone()].iter().zip(&rule.dt_bias[columns.clone()]);
                    let rate = rule.rates[head];
                    for (to, (f, bias)) in decays.iter_mut().zip(biased) {
                        let log = match config.decay {
                            KdaDecay::Softplus => -rate * softplus(f + bias),
                            KdaDecay::Bounded { lower } => lower / (1.0 + (-rate * (f + bias)).exp()),
                        };
                        *to = log.exp();
                    }
                    let beta = 1.0 / (1.0 + (-beta.row(t)[head]).exp());
                    kernel.delta_step(state, &DeltaToken { q, k, v: part(2), decay: decays, beta }, read);
                    let at = t * cols + head * dim;
                    // SAFETY: a row's columns of a head belong to one unit.
                    #[allow(unsafe_code)]
                    let out = unsafe { out.slice_mut(at..at + dim) };
                    kernel.rms_norm(read, rule.norm, rule.eps, out);
                    kernel.sigmoid_mul(&gate.row(t)[columns.clone()], out);
                }
            }
        });
    }
}
