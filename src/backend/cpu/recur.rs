//! Gated DeltaNet between its projections, one token after the other: the order that makes chunking exact.
//!
//! ```text
//! for each (sequence, key head), spread over the workers:
//!   for each token:
//!     q, k, v = silu(sum over the last inputs of weight * input)     the head's own columns
//!     q, k = q / |q| / sqrt(dim), k / |k|
//!     for each value head of it:  beta = sigmoid(b . h), decay = exp(-exp(A_log) softplus(a . h + dt_bias))
//!                                 out = norm(delta_step(state, q, k, v, decay, beta)) * gate(z)
//! ```
//!
//! A key head's columns of the convolution and its value heads' states belong to nobody else, so workers meet only at
//! the end.

use std::ops::Range;

use super::load::DeltaNet;
use super::{Cpu, Scratch, lock};
use crate::Result;
use crate::backend::batch::{Batch, Span};
use crate::backend::tensor::Tensor;
use crate::backend::{DeltaInputs, KdaInputs, KdaRule, Mamba2Inputs, Mamba2Rule, Recur};
use crate::kernel::{DeltaToken, Kernel, Rows};
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;
use crate::model::{self, DeltaGate, StateShape};

/// Added to the sum of squares of queries and keys. Source: HF modeling_qwen3_next, `l2norm`.
pub(super) const L2_EPS: f32 = 1e-6;

/// Of a layer, by slot.
pub struct State {
    pub(super) slots: usize,
    pub(super) inputs: Buffer<f32>, // [slots, past inputs, channels], oldest first
    pub(super) heads: Buffer<f32>,  // [slots, value heads, key_head_dim, value_head_dim]
}

/// One op, as all workers see it.
struct Op<'a> {
    kernel: &'a dyn Kernel,
    config: &'a model::DeltaNet,
    w: &'a DeltaNet,
    h: &'a Tensor,
    qkv: &'a Tensor,
    z: &'a Tensor,
    inputs: Shared<'a, f32>,
    heads: Shared<'a, f32>,
    out: Shared<'a, f32>,
}

impl Recur for Cpu {
    type State = State;
    type DeltaScratch = ();
    type KdaScratch = ();

    fn state(&self, slots: usize, shape: StateShape) -> Result<State> {
        Ok(State {
            slots,
            inputs: self.heap.buffer(&[slots, shape.past_inputs, shape.channels])?,
            heads: self.heap.buffer(&[slots, shape.numbers])?,
        })
    }

    fn copy_state(&self, state: &mut State, from: usize, to: usize) {
        assert!(from.max(to) < state.slots, "a slot that is there");
        for part in [&mut state.inputs, &mut state.heads] {
            let len = part.len() / state.slots;
            part.copy_within(from * len..(from + 1) * len, to * len);
        }
    }

    fn state_len(&self, state: &State) -> usize {
        (state.inputs.len() + state.heads.len()) / state.slots
    }

    fn save_state(&self, state: &State, slot: usize, out: &mut [f32]) {
        let [inputs, heads] = [&state.inputs, &state.heads].map(|part| {
            let len = part.len() / state.slots;
            &part[slot * len..(slot + 1) * len]
        });
        let (to_inputs, to_heads) = out.split_at_mut(inputs.len());
        to_inputs.copy_from_slice(inputs);
        to_heads.copy_from_slice(heads);
    }

    fn restore_state(&self, state: &mut State, slot: usize, mut from: &[f32]) {
        for part in [&mut state.inputs, &mut state.heads] {
            let len = part.len() / state.slots;
            let (of_part, rest) = from.split_at(len);
            part[slot * len..(slot + 1) * len].copy_from_slice(of_part);
            from = rest;
        }
    }

    fn delta_scratch(&self, _: &model::DeltaNet, _: usize) -> Result<()> {
        Ok(())
    }

    fn delta_net(
        &self,
        state: &mut State,
        batch: &Batch,
        w: &DeltaNet,
        (): &mut (),
        DeltaInputs { h, qkv, z }: DeltaInputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let config = &w.config;
        assert!(qkv.cols() == config.conv_dim() && z.cols() == config.value_dim() && out.cols() == z.cols());
        for (i, span) in batch.spans.iter().enumerate() {
            let alone = batch.spans[..i].iter().all(|other| other.slot != span.slot);
            assert!(alone && span.slot < state.slots, "a slot for each sequence");
        }
        let op = Op {
            kernel: self.kernel,
            config,
            w,
            h,
            qkv,
            z,
            inputs: Shared::new(&mut state.inputs),
            heads: Shared::new(&mut state.heads),
            out: Shared::new(out.data_mut()),
        };
        let (groups, scratch) = (config.num_key_heads, &self.scratch);
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            for unit in worker.share(batch.spans.len() * groups) {
                op.key_head(&batch.spans[unit / groups], unit % groups, &mut scratch);
            }
        });
    }

    fn convolve(
        &self,
        state: &mut State,
        batch: &Batch,
        (taps, bias): (&Vec<f32>, Option<&Vec<f32>>),
        x: &Tensor,
        out: &mut Tensor,
    ) {
        let (kernel, channels, scratch) = (self.kernel, x.cols(), &self.scratch);
        let past = taps.len() / channels - 1;
        assert!(out.cols() == channels && state.inputs.len() == state.slots * past * channels);
        let (inputs, out) = (Shared::new(&mut state.inputs), Shared::new(out.data_mut()));
        self.team.run(&|worker| {
            let mine = worker.share(channels);
            let mut scratch = lock(&scratch[worker.index]);
            let sums = scratch.values.take(mine.len());
            for span in &batch.spans {
                let kept = |i: usize| {
                    let at = (span.slot * past + i) * channels;
                    // SAFETY: a slot belongs to one sequence, and in it a channel to one worker.
                    #[allow(unsafe_code)]
                    unsafe {
                        inputs.slice_mut(at + mine.start..at + mine.end)
                    }
                };
                if span.start == 0 {
                    (0..past).for_each(|i| kept(i).fill(0.0));
                }
                for t in span.rows.clone() {
                    match bias {
                        Some(bias) => sums.copy_from_slice(&bias[mine.clone()]),
                        None => sums.fill(0.0),
                    }
                    for tap in 0..=past {
                        let weights = &taps[tap * channels..][mine.clone()];
                        let x = match (t + tap).checked_sub(past).filter(|row| *row >= span.rows.start) {
                            Some(row) => &x.row(row)[mine.clone()],
                            None => &*kept(t + tap - span.rows.start),
                        };
                        sums.iter_mut().zip(x).zip(weights).for_each(|((sum, x), w)| *sum += x * w);
                    }
                    // SAFETY: a row's channel belongs to one worker.
                    #[allow(unsafe_code)]
                    let out = unsafe { out.slice_mut(t * channels + mine.start..t * channels + mine.end) };
                    out.copy_from_slice(sums);
                    kernel.sigmoid_mul(sums, out);
                }
                for i in 0..past {
                    match (i + span.rows.len()).checked_sub(past) {
                        Some(row) => kept(i).copy_from_slice(&x.row(span.rows.start + row)[mine.clone()]),
                        None => kept(i).copy_from_slice(kept(i + span.rows.len())),
                    }
                }
            }
        });
    }

    fn kda_scratch(&self, _: &model::Kda, _: usize) -> Result<()> {
        Ok(())
    }

    fn kda(
        &self,
        state: &mut State,
        batch: &Batch,
        rule: &KdaRule<'_, Self>,
        (): &mut (),
        inputs: KdaInputs<'_, Self>,
        out: &mut Tensor,
    ) {
        self.run_kda(state, batch, rule, inputs, out);
    }

    fn mamba2(
        &self,
        state: &mut State,
        batch: &Batch,
        rule: &Mamba2Rule<'_, Self>,
        inputs: Mamba2Inputs<'_, Self>,
        out: &mut Tensor,
    ) {
        self.run_mamba2(state, batch, rule, inputs, out);
    }

    fn short_conv(&self, state: &mut State, batch: &Batch, taps: &Vec<f32>, bcx: &Tensor, out: &mut Tensor) {
        let channels = out.cols();
        let past = taps.len() / channels - 1;
        assert!(bcx.cols() == 3 * channels && state.inputs.len() == state.slots * past * channels);
        let (inputs, out) = (Shared::new(&mut state.inputs), Shared::new(out.data_mut()));
        self.team.run(&|worker| {
            let mine = worker.share(channels);
            for span in &batch.spans {
                let at = |i: usize| (span.slot * past + i) * channels;
                let kept = |i: usize| {
                    // SAFETY: a slot belongs to one sequence, and in it a channel to one worker.
                    #[allow(unsafe_code)]
                    unsafe {
                        inputs.slice_mut(at(i) + mine.start..at(i) + mine.end)
                    }
                };
                if span.start == 0 {
                    (0..past).for_each(|i| kept(i).fill(0.0));
                }
                for t in span.rows.clone() {
                    let [b, c, x] = [0, 1, 2].map(|part| &bcx.row(t)[part * channels..][mine.clone()]);
                    // SAFETY: a row's channel belongs to one worker.
                    #[allow(unsafe_code)]
                    let out = unsafe { out.slice_mut(t * channels + mine.start..t * channels + mine.end) };
                    for n in 0..mine.len() {
                        let mut next = b[n] * x[n];
                        let mut sum = taps[past * channels + mine.start + n] * next;
                        // The newest first: each takes the place of the one before it.
                        for i in (0..past).rev() {
                            sum += taps[i * channels + mine.start + n] * kept(i)[n];
                            std::mem::swap(&mut kept(i)[n], &mut next);
                        }
                        out[n] = c[n] * sum;
                    }
                }
            }
        });
    }
}

/// Numbers that a worker needs for a key head: inputs mixed and active, a value read and normed, gates and a decay.
pub(super) fn scratch_len(config: &model::DeltaNet) -> usize {
    let of_group = config.num_value_heads / config.num_key_heads;
    let (dim, width) = (config.key_head_dim, config.value_head_dim);
    2 * (2 * dim + of_group * width) + 2 * width + 2 * of_group + dim
}

impl Op<'_> {
    /// All tokens of a sequence, for one key head and its value heads.
    fn key_head(&self, span: &Span, group: usize, scratch: &mut Scratch) {
        let Self { kernel, config, w, .. } = self;
        let (dim, width, of_group) =
            (config.key_head_dim, config.value_head_dim, config.num_value_heads / config.num_key_heads);
        let (keys, values) = (config.num_key_heads * dim, of_group * width);
        let columns = [group * dim..(group + 1) * dim, keys + group * dim..keys + (group + 1) * dim, {
            let first = 2 * keys + group * values;
            first..first + values
        }];
        if span.start == 0 {
            self.clear(span.slot, group * of_group..(group + 1) * of_group, &columns);
        }
        let memory = scratch.values.take(scratch_len(config));
        let (mixed, memory) = memory.split_at_mut(2 * dim + values);
        let (active, memory) = memory.split_at_mut(2 * dim + values);
        let (read, memory) = memory.split_at_mut(width);
        let (normed, memory) = memory.split_at_mut(width);
        let (gates, decays) = memory.split_at_mut(2 * of_group);
        for t in span.rows.clone() {
            let mut at = 0;
            for columns in &columns {
                self.convolve(span, t, columns.clone(), &mut mixed[at..at + columns.len()]);
                at += columns.len();
            }
            active.copy_from_slice(mixed);
            kernel.sigmoid_mul(mixed, active);
            let (q, rest) = mixed.split_at_mut(dim);
            let k = &mut rest[..dim];
            let eps = L2_EPS / dim as f32;
            kernel.rms_norm(&active[..dim], &w.of_query, eps, q);
            kernel.rms_norm(&active[dim..2 * dim], &w.of_key, eps, k);
            for (kind, gates) in gates.chunks_exact_mut(of_group).enumerate() {
                let first = (kind * config.num_value_heads + group * of_group) * self.h.cols();
                let rows = Rows::new(&w.gates[first..first + of_group * self.h.cols()], of_group, self.h.cols());
                kernel.dot_f32(rows, Rows::new(self.h.row(t), 1, self.h.cols()), gates);
            }
            for (i, v) in active[2 * dim..].chunks_exact(width).enumerate() {
                let head = group * of_group + i;
                let beta = 1.0 / (1.0 + (-gates[i]).exp());
                decays.fill((-w.rates[head] * softplus(gates[of_group + i] + w.dt_bias[head])).exp());
                let at = (span.slot * config.num_value_heads + head) * dim * width;
                // SAFETY: a slot belongs to one sequence, and in it a head to one unit.
                #[allow(unsafe_code)]
                let state = unsafe { self.heads.slice_mut(at..at + dim * width) };
                kernel.delta_step(state, &DeltaToken { q, k, v, decay: decays, beta }, read);
                kernel.rms_norm(read, &w.norm, w.eps, normed);
                let place = if config.tiled { i * config.num_key_heads + group } else { head };
                let at = t * config.value_dim() + place * width;
                // SAFETY: a row's columns of a head belong to one unit.
                #[allow(unsafe_code)]
                let out = unsafe { self.out.slice_mut(at..at + width) };
                let z = &self.z.row(t)[head * width..][..width];
                match config.gate {
                    DeltaGate::Silu => kernel.silu_mul(z, normed, out),
                    DeltaGate::Sigmoid => {
                        out.copy_from_slice(normed);
                        kernel.sigmoid_mul(z, out);
                    }
                }
            }
        }
        columns.into_iter().for_each(|columns| self.keep_inputs(span, columns));
    }

    /// Nothing was read before.
    fn clear(&self, slot: usize, heads: Range<usize>, columns: &[Range<usize>]) {
        let len = self.config.key_head_dim * self.config.value_head_dim;
        let first = slot * self.config.num_value_heads;
        // SAFETY: a slot belongs to one sequence, and in it a head to one unit.
        #[allow(unsafe_code)]
        unsafe { self.heads.slice_mut((first + heads.start) * len..(first + heads.end) * len) }.fill(0.0);
        for columns in columns {
            (0..self.config.conv_width - 1).for_each(|i| self.past_mut(slot, i, columns.clone()).fill(0.0));
        }
    }

    /// Columns of kept input `i` of a sequence, the oldest first.
    #[allow(clippy::mut_from_ref)] // of memory that the caller alone has
    fn past_mut(&self, slot: usize, i: usize, columns: Range<usize>) -> &mut [f32] {
        let row = (slot * (self.config.conv_width - 1) + i) * self.config.conv_dim();
        // SAFETY: a slot belongs to one sequence, and in it a column to one unit.
        #[allow(unsafe_code)]
        unsafe {
            self.inputs.slice_mut(row + columns.start..row + columns.end)
        }
    }

    /// `out = sum over taps of tap * input` of row `t`, for some columns.
    fn convolve(&self, span: &Span, t: usize, columns: Range<usize>, out: &mut [f32]) {
        let past = self.config.conv_width - 1;
        for tap in 0..=past {
            let x = match (t + tap).checked_sub(past).filter(|row| *row >= span.rows.start) {
                Some(row) => &self.qkv.row(row)[columns.clone()],
                None => &*self.past_mut(span.slot, t + tap - span.rows.start, columns.clone()),
            };
            let weights = &self.w.taps[tap * self.config.conv_dim()..][columns.clone()];
            for ((out, x), w) in out.iter_mut().zip(x).zip(weights) {
                *out = if tap == 0 { x * w } else { *out + x * w };
            }
        }
    }

    /// Keeps the last inputs for the sequence's next tokens.
    fn keep_inputs(&self, span: &Span, columns: Range<usize>) {
        let (past, tokens) = (self.config.conv_width - 1, span.rows.len());
        for i in 0..past {
            let to = self.past_mut(span.slot, i, columns.clone());
            match (i + tokens).checked_sub(past) {
                Some(row) => to.copy_from_slice(&self.qkv.row(span.rows.start + row)[columns.clone()]),
                None => to.copy_from_slice(self.past_mut(span.slot, i + tokens, columns.clone())),
            }
        }
    }
}

/// `ln(1 + e^x)`, which is `x` where f32 cannot tell.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Load;
    use crate::backend::tensor::HostTensor;
    use crate::kernel::random::Random;
    use crate::machine::workers::Team;
    use crate::model::Facts;

    #[test]
    fn a_copied_state_goes_on_with_the_same_bits() {
        let config = model::DeltaNet {
            num_key_heads: 2,
            num_value_heads: 4,
            key_head_dim: 16,
            value_head_dim: 8,
            conv_width: 4,
            gate: DeltaGate::Silu,
            tiled: false,
        };
        let (hidden, heads) = (24, config.num_value_heads);
        let mut random = Random(7);
        let mut some = |n: usize| (0..n).map(|_| random.uniform() as f32 - 0.5).collect::<Vec<_>>();
        let cpu = Cpu::new(std::sync::Arc::new(Team::new(&[0]).unwrap()), crate::kernel::best());
        let rule = crate::backend::DeltaRule {
            conv: HostTensor::from(some(config.conv_dim() * config.conv_width)).reshaped(config.conv_width),
            gates: some(2 * heads * hidden).into(),
            rates: vec![0.5; heads].into(),
            dt_bias: some(heads).into(),
            norm: some(config.value_head_dim).into(),
            eps: 1e-6,
        };
        let w = cpu.load_delta_net(&config, rule).unwrap();
        let mut state = cpu.state(3, config.state().unwrap()).unwrap();
        let tokens = 9;
        let mut tensor = |cols: usize| {
            let mut t = Tensor::new(tokens, cols);
            t.data_mut().copy_from_slice(&some(tokens * cols));
            t
        };
        let (h, qkv, z) = (tensor(hidden), tensor(config.conv_dim()), tensor(config.value_dim()));
        let run = |state: &mut State, start: usize, slot: usize| {
            let (mut batch, mut out) = (Batch::default(), Tensor::new(tokens, config.value_dim()));
            batch.push(&vec![1; tokens], start, &[0]).slot = slot;
            cpu.delta_net(state, &batch, &w, &mut (), DeltaInputs { h: &h, qkv: &qkv, z: &z }, &mut out);
            out.data().to_vec()
        };
        run(&mut state, 0, 1);
        cpu.copy_state(&mut state, 1, 2);
        let first = run(&mut state, tokens, 1);
        assert_ne!(run(&mut state, 2 * tokens, 1), first, "the state has moved on");
        cpu.copy_state(&mut state, 2, 1);
        assert_eq!(run(&mut state, tokens, 1), first);
        assert_eq!(run(&mut state, tokens, 2), first, "the copy was left alone");
    }
}
