//! Several residual streams: every op is a function of single rows, but for the convolution of n-grams, whose columns a
//! sequence has to itself.

use super::recur::State;
use super::{Cpu, lock};
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;
use crate::backend::{ConnectWeights, NgramInputs, NgramNorms, ReadBy, Streams};
use crate::kernel::{Kernel, Rows};
use crate::machine::workers::Shared;
use crate::model::Connections;

/// `|g|` is not less. Source: HF modeling_qwen4_exp, `Qwen4ExpTextPLELayer`.
const SMALLEST_GATE: f32 = 1e-6;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `to = scale * (of_streams rms(x)) + base`, all streams normed together; `to` has a row of each.
fn product_of_streams(
    kernel: &dyn Kernel,
    x: &[f32],
    w: &ConnectWeights<'_, Cpu>,
    (count, eps): (usize, f32),
    to: &mut [f32],
) {
    let row = || Rows::new(x, 1, x.len());
    let mut squares = [0.0];
    kernel.dot_f32(row(), row(), &mut squares);
    let scale = 1.0 / (squares[0] / x.len() as f32 + eps).sqrt();
    kernel.dot_f32(Rows::new(w.of_streams, to.len(), x.len()), row(), to);
    for (i, (m, base)) in to.iter_mut().zip(w.base).enumerate() {
        *m = *m * scale * w.scale[(i / count).min(2)] + base;
    }
}

impl Streams for Cpu {
    fn write_rows(&self, to: &mut Tensor, first: usize, numbers: &[f32]) -> Result<()> {
        let cols = to.cols();
        to.data_mut()[first * cols..][..numbers.len()].copy_from_slice(numbers);
        Ok(())
    }

    fn norm_streams(&self, x: &Tensor, w: &Vec<f32>, eps: f32, width: usize, out: &mut Tensor) {
        assert_eq!((x.rows(), x.cols(), w.len()), (out.rows(), out.cols(), out.cols()));
        let kernel = self.kernel;
        self.each_row(out, |t, out, _| {
            let parts = x.row(t).chunks_exact(width).zip(w.chunks_exact(width));
            out.chunks_exact_mut(width).zip(parts).for_each(|(out, (x, w))| kernel.rms_norm(x, w, eps, out));
        });
    }

    fn mixer_gates(&self, gates: &Tensor, low: &mut Tensor, inject: &mut Tensor) {
        let (kernel, rank, streams) = (self.kernel, low.cols(), inject.cols());
        let share = 1.0 / streams as f32;
        self.each_row(low, |t, low, scratch| {
            let gate = scratch.values.take(rank);
            gate.copy_from_slice(&gates.row(t)[..rank]);
            kernel.scale(gate, share);
            low.copy_from_slice(gate);
            kernel.sigmoid_mul(gate, low);
        });
        self.each_row(inject, |t, inject, _| {
            for (inject, gate) in inject.iter_mut().zip(&gates.row(t)[rank..]) {
                *inject = 2.0 / (1.0 + (-gate * share).exp());
            }
        });
    }

    fn mix_streams(&self, gate: &Tensor, normed: &Tensor, out: &mut Tensor) {
        let (kernel, width) = (self.kernel, out.cols());
        let share = 1.0 / (normed.cols() / width) as f32;
        self.each_row(out, |t, out, scratch| {
            let part = scratch.values.take(width);
            out.fill(0.0);
            for (normed, gate) in normed.row(t).chunks_exact(width).zip(gate.row(t).chunks_exact(width)) {
                part.copy_from_slice(normed);
                kernel.sigmoid_mul(gate, part);
                out.iter_mut().zip(&*part).for_each(|(out, x)| *out += x);
            }
            kernel.scale(out, share);
        });
    }

    fn inject(&self, y: &Tensor, inject: &Tensor, x: &mut Tensor) {
        let (kernel, width) = (self.kernel, y.cols());
        self.each_row(x, |t, x, _| {
            let streams = x.chunks_exact_mut(width).zip(inject.row(t));
            streams.for_each(|(x, share)| kernel.add_scaled(y.row(t), *share, x));
        });
    }

    fn collapse_streams(
        &self,
        x: &Tensor,
        w: &ConnectWeights<'_, Self>,
        (of, eps): (Connections, f32),
        by: ReadBy<'_, Self>,
        shares: &mut Tensor,
        out: &mut Tensor,
    ) {
        let (kernel, count, width) = (self.kernel, of.count, out.cols());
        assert!(x.cols() == count * width && [count, of.rows()].contains(&shares.cols()));
        self.each_row(shares, |t, shares, _| {
            product_of_streams(kernel, x.row(t), w, (count, eps), shares);
            let (pre, rest) = shares.split_at_mut(count);
            pre.iter_mut().for_each(|pre| *pre = sigmoid(*pre) + of.eps);
            let Some((post, mixed)) = rest.split_at_mut_checked(count) else { return };
            post.iter_mut().for_each(|post| *post = 2.0 * sigmoid(*post));
            for row in mixed.chunks_exact_mut(count) {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                row.iter_mut().for_each(|x| *x = (*x - largest).exp());
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|x| *x = *x / sum + of.eps);
            }
            for i in 0..of.iterations {
                if i > 0 {
                    for row in mixed.chunks_exact_mut(count) {
                        let sum = row.iter().sum::<f32>() + of.eps;
                        row.iter_mut().for_each(|x| *x /= sum);
                    }
                }
                for k in 0..count {
                    let sum = (0..count).map(|j| mixed[j * count + k]).sum::<f32>() + of.eps;
                    (0..count).for_each(|j| mixed[j * count + k] /= sum);
                }
            }
        });
        match by {
            ReadBy::Own => self.sum_streams(x, of, shares, out),
            ReadBy::Shares(before) => self.sum_streams(x, of, before, out),
            ReadBy::First => self.each_row(out, |t, out, _| out.copy_from_slice(&x.row(t)[..width])),
        }
    }

    fn sum_streams(&self, x: &Tensor, _: Connections, shares: &Tensor, out: &mut Tensor) {
        let (kernel, width) = (self.kernel, out.cols());
        self.each_row(out, |t, out, _| {
            out.fill(0.0);
            for (stream, share) in x.row(t).chunks_exact(width).zip(shares.row(t)) {
                kernel.add_scaled(stream, *share, out);
            }
        });
    }

    fn connect_streams(&self, y: &Tensor, shares: &Tensor, x: &mut Tensor) {
        let (kernel, width) = (self.kernel, y.cols());
        let count = x.cols() / width;
        self.each_row(x, |t, x, scratch| {
            let before = scratch.values.take(count * width);
            before.copy_from_slice(x);
            let (post, mixed) = shares.row(t)[count..].split_at(count);
            for (k, x) in x.chunks_exact_mut(width).enumerate() {
                x.copy_from_slice(y.row(t));
                kernel.scale(x, post[k]);
                for (j, before) in before.chunks_exact(width).enumerate() {
                    kernel.add_scaled(before, mixed[j * count + k], x);
                }
            }
        });
    }

    fn mean_streams(&self, x: &Tensor, out: &mut Tensor) {
        let (kernel, width) = (self.kernel, out.cols());
        let share = 1.0 / (x.cols() / width) as f32;
        self.each_row(out, |t, out, _| {
            out.fill(0.0);
            x.row(t).chunks_exact(width).for_each(|stream| kernel.add_scaled(stream, 1.0, out));
            kernel.scale(out, share);
        });
    }

    fn gate_ngrams(&self, norms: &NgramNorms<'_, Self>, x: &Tensor, value: &Tensor, key: &mut Tensor) {
        let (kernel, width, eps) = (self.kernel, value.cols(), norms.eps);
        let scale = 1.0 / (width as f32).sqrt();
        self.each_row(key, |t, key, scratch| {
            let (of_key, of_query) = scratch.values.take(2 * width).split_at_mut(width);
            for (s, key) in key.chunks_exact_mut(width).enumerate() {
                let stream = s * width..(s + 1) * width;
                kernel.rms_norm(key, &norms.key[stream.clone()], eps, of_key);
                kernel.rms_norm(&x.row(t)[stream.clone()], &norms.query[stream], eps, of_query);
                let mut gate = [0.0];
                kernel.dot_f32(Rows::new(of_key, 1, width), Rows::new(of_query, 1, width), &mut gate);
                let gate = gate[0] * scale;
                let root = gate.abs().max(SMALLEST_GATE).sqrt();
                let root = if gate == 0.0 { 0.0 } else { root.copysign(gate) };
                key.copy_from_slice(value.row(t));
                kernel.scale(key, 1.0 / (1.0 + (-root).exp()));
            }
        });
    }

    fn add_ngrams(&self, u: &Tensor, x: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, _| kernel.add_scaled(u.row(t), 1.0, x));
    }

    fn convolve_ngrams(&self, state: &mut State, batch: &Batch, inputs: &NgramInputs<'_, Self>, x: &mut Tensor) {
        let channels = x.cols();
        let past = (inputs.taps.len() / channels - 1) * inputs.dilation;
        assert!(state.inputs.len() == state.slots * past * channels && inputs.normed.cols() == channels);
        // Whole lines of a cache.
        const COLUMNS: usize = 256;
        let parts = channels.div_ceil(COLUMNS);
        let (scratch, kernel) = (&self.scratch, self.kernel);
        let (kept, out) = (Shared::new(&mut state.inputs), Shared::new(x.data_mut()));
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            for unit in worker.share(batch.spans.len() * parts) {
                let (span, first) = (&batch.spans[unit / parts], unit % parts * COLUMNS);
                let columns = first..channels.min(first + COLUMNS);
                let width = columns.len();
                let (sum, active) = scratch.values.take(2 * width).split_at_mut(width);
                // SAFETY: a slot belongs to one sequence, and in it a column to one unit.
                #[allow(unsafe_code)]
                let kept = |i: usize| unsafe {
                    let row = (span.slot * past + i) * channels;
                    kept.slice_mut(row + columns.start..row + columns.end)
                };
                if span.start == 0 {
                    (0..past).for_each(|i| kept(i).fill(0.0));
                }
                // The input of the row that stands `at - past` rows behind the span's first.
                let input = |at: usize| match at.checked_sub(past) {
                    Some(row) => &inputs.normed.row(span.rows.start + row)[columns.clone()],
                    None => &*kept(at),
                };
                for (i, t) in span.rows.clone().enumerate() {
                    for (tap, weights) in inputs.taps.chunks_exact(channels).enumerate() {
                        let weights = &weights[columns.clone()];
                        for ((sum, x), w) in sum.iter_mut().zip(input(i + tap * inputs.dilation)).zip(weights) {
                            *sum = if tap == 0 { x * w } else { *sum + x * w };
                        }
                    }
                    active.copy_from_slice(sum);
                    kernel.sigmoid_mul(sum, active);
                    // SAFETY: a row's columns belong to one unit.
                    #[allow(unsafe_code)]
                    let out = unsafe { out.slice_mut(t * channels + columns.start..t * channels + columns.end) };
                    let gated = &inputs.gated.row(t)[columns.clone()];
                    out.iter_mut().zip(gated).zip(&*active).for_each(|((out, u), conv)| *out += u + conv);
                }
                // Each moves to a place before its own.
                (0..past).for_each(|i| kept(i).copy_from_slice(input(i + span.rows.len())));
            }
        });
    }
}
