//! Mamba-2 after its convolution, one token after the other: the order that makes chunking exact.
//!
//! ```text
//! for each (sequence, head), spread over the workers:
//!   for each token:  d = softplus(dt + dt_bias)
//!                    y = ssm_step(state, b, c, d x, exp(-exp(A_log) d)) + D x
//! for each token, spread over the workers:  out = norm(y * silu(z)), of each group by itself
//! ```

use super::recur::{State, softplus};
use super::{Cpu, lock};
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;
use crate::backend::{Mamba2Inputs, Mamba2Rule};
use crate::kernel::SsmToken;
use crate::machine::workers::Shared;

impl Cpu {
    pub(super) fn run_mamba2(
        &self,
        state: &mut State,
        batch: &Batch,
        rule: &Mamba2Rule<'_, Self>,
        Mamba2Inputs { xbc, z, dt }: Mamba2Inputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let (config, kernel, scratch) = (rule.config, self.kernel, &self.scratch);
        let (heads, dim, n) = (config.num_heads, config.head_dim, config.state_dim);
        let (inner, of_group) = (config.inner_dim(), config.inner_dim() / config.num_groups);
        assert!(xbc.cols() == config.conv_dim() && z.cols() == inner && out.cols() == inner && dt.cols() == heads);
        let (states, results, rows) = (Shared::new(&mut state.heads), out.rows(), out.cols());
        let out = Shared::new(out.data_mut());
        self.team.run(&|worker| {
            let values = &mut lock(&scratch[worker.index]).values;
            for unit in worker.share(batch.spans.len() * heads) {
                let (span, head) = (&batch.spans[unit / heads], unit % heads);
                let at = (span.slot * heads + head) * dim * n;
                // SAFETY: a slot belongs to one sequence, and in it a head to one unit.
                #[allow(unsafe_code)]
                let state = unsafe { states.slice_mut(at..at + dim * n) };
                if span.start == 0 {
                    state.fill(0.0);
                }
                let group = inner + head / (heads / config.num_groups) * n;
                let x = values.take(dim);
                for t in span.rows.clone() {
                    let row = xbc.row(t);
                    let (b, c) = (&row[group..][..n], &row[group + config.num_groups * n..][..n]);
                    let step = softplus(dt.row(t)[head] + rule.dt_bias[head]);
                    let of_token = &row[head * dim..][..dim];
                    x.iter_mut().zip(of_token).for_each(|(to, x)| *to = step * x);
                    let at = t * rows + head * dim;
                    // SAFETY: a row's columns of a head belong to one unit.
                    #[allow(unsafe_code)]
                    let y = unsafe { out.slice_mut(at..at + dim) };
                    kernel.ssm_step(state, &SsmToken { b, c, x, decay: (-rule.rates[head] * step).exp() }, y);
                    kernel.add_scaled(of_token, rule.skip[head], y);
                }
            }
            worker.barrier();
            for t in worker.share(results) {
                let gated = values.take(of_group);
                for (group, weight) in rule.norm.chunks_exact(of_group).enumerate() {
                    let at = t * rows + group * of_group;
                    // SAFETY: after the barrier a row belongs to one worker.
                    #[allow(unsafe_code)]
                    let y = unsafe { out.slice_mut(at..at + of_group) };
                    kernel.silu_mul(&z.row(t)[group * of_group..][..of_group], y, gated);
                    kernel.rms_norm(gated, weight, rule.eps, y);
                }
            }
        });
    }
}
