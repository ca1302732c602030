//! Recurrent layers on the device: gated DeltaNet, of which a few tokens of a sequence go one by one
//! (kernels/delta_net.cu) and many in chunks (kernels/delta_net_chunks.cu); Kimi delta attention (kernels/kda.cu and
//! kda_chunks.cu) and Mamba-2 (kernels/mamba2.cu and mamba2_chunks.cu), which do the same; short convolutions
//! (kernels/short_conv.cu).

use half::bf16;

use super::load::Rule;
use super::{CudaBackend, CudaBatch, Tensor};
use crate::Result;
use crate::backend::{DeltaInputs, KdaInputs, KdaRule, Mamba2Inputs, Mamba2Rule, Recur};
use crate::cuda::kernels::delta_net::{CHUNKED_FROM, COLUMNS, CONV_CHANNELS, CONV_THREADS, CONV_TOKENS, NORM_HEADS};
use crate::cuda::kernels::delta_net_chunks::{ACROSS_COLUMNS, CHUNK, TRIANGLES};
use crate::cuda::kernels::kda::KDA_COLUMNS;
use crate::cuda::kernels::kda_chunks::{KDA_CHUNK, KDA_TRIANGLES};
use crate::cuda::kernels::mamba2::SSM_COLUMNS;
use crate::cuda::kernels::short_conv::{SHORT_CONV_THREADS, SHORT_CONV_TOKENS};
use crate::cuda::kernels::{self, DeltaBatch, DeltaGates, DeltaShape, KdaGates, KdaShape, Mamba2Shape, Mamba2Weights};
use crate::cuda::{Address, DeviceBuffer, launch};
use crate::model::{DeltaGate, DeltaNet, Kda, KdaDecay, StateShape};

/// Of a layer, by slot.
pub struct State {
    pub(super) slots: usize,
    pub(super) inputs: DeviceBuffer<f32>, // [slots, past inputs, channels], oldest first
    pub(super) heads: DeviceBuffer<f32>,  // [slots, value heads, key_head_dim, value_head_dim]
}

/// Activations.
pub struct DeltaScratch {
    gates: DeviceBuffer<f32>,  // [T, b and a, value heads]
    mixed: DeviceBuffer<bf16>, // [T, conv_dim]: queries, keys and values after the convolution
    // Of chunks.
    triangles: DeviceBuffer<bf16>, // [value heads, T, TRIANGLES, CHUNK]
    scales: DeviceBuffer<f32>,     // [value heads, T, 4]
}

/// Activations of chunks.
pub struct KdaScratch {
    triangles: DeviceBuffer<bf16>, // [heads, T, KDA_TRIANGLES, KDA_CHUNK]
    norms: DeviceBuffer<f32>,      // [heads, T, 2]
}

impl Recur for CudaBackend {
    type State = State;
    type DeltaScratch = DeltaScratch;
    type KdaScratch = KdaScratch;

    fn state(&self, slots: usize, shape: StateShape) -> Result<State> {
        Ok(State {
            slots,
            inputs: DeviceBuffer::zeros(&self.cuda, slots * shape.past_inputs * shape.channels)?,
            heads: DeviceBuffer::zeros(&self.cuda, slots * shape.numbers)?,
        })
    }

    fn copy_state(&self, state: &mut State, from: usize, to: usize) {
        assert!(from.max(to) < state.slots, "a slot that is there");
        for part in [&state.inputs, &state.heads] {
            let len = part.len() / state.slots;
            let slot = |i: usize| part.address().add(i * len);
            self.cuda.copy_within(&self.cuda.compute, slot(to), slot(from), len * size_of::<f32>());
        }
    }

    fn state_len(&self, state: &State) -> usize {
        (state.inputs.len() + state.heads.len()) / state.slots
    }

    fn save_state(&self, state: &State, slot: usize, mut out: &mut [f32]) {
        for part in [&state.inputs, &state.heads] {
            let len = part.len() / state.slots;
            let (of_part, rest) = out.split_at_mut(len);
            self.cuda.download(&self.cuda.compute, part.address().add(slot * len), of_part);
            out = rest;
        }
    }

    fn restore_state(&self, state: &mut State, slot: usize, mut from: &[f32]) {
        for part in [&state.inputs, &state.heads] {
            let len = part.len() / state.slots;
            let (of_part, rest) = from.split_at(len);
            self.cuda.upload(&self.cuda.compute, part.address().add(slot * len), of_part);
            from = rest;
        }
    }

    fn delta_scratch(&self, config: &DeltaNet, max_tokens: usize) -> Result<DeltaScratch> {
        let chunked = if max_tokens < CHUNKED_FROM { 0 } else { max_tokens * config.num_value_heads };
        Ok(DeltaScratch {
            gates: DeviceBuffer::new(&self.cuda, max_tokens * 2 * config.num_value_heads)?,
            mixed: DeviceBuffer::new(&self.cuda, max_tokens * config.conv_dim())?,
            triangles: DeviceBuffer::new(&self.cuda, chunked * TRIANGLES * CHUNK)?,
            scales: DeviceBuffer::new(&self.cuda, chunked * 4)?,
        })
    }

    fn delta_net(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        w: &Rule,
        scratch: &mut DeltaScratch,
        DeltaInputs { h, qkv, z }: DeltaInputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let (config, eps) = (&w.config, w.eps);
        let (stream, channels, heads) = (&self.cuda.compute, config.conv_dim(), config.num_value_heads);
        assert!(qkv.cols() == channels && z.cols() == config.value_dim() && out.cols() == z.cols());
        let sequences =
            DeltaBatch { seq_first: batch.seq_first(), seq_slots: batch.seq_slots(), positions: batch.positions() };
        let shape = DeltaShape {
            key_heads: config.num_key_heads as i32,
            value_heads: heads as i32,
            key_dim: config.key_head_dim as i32,
            value_dim: config.value_head_dim as i32,
            taps: config.conv_width as i32,
            eps,
            sigmoid: i32::from(config.gate == DeltaGate::Sigmoid),
        };
        self.route_logits(&w.gates, h, 2 * heads, scratch.gates.address());
        let grid = [channels.div_ceil(CONV_CHANNELS), batch.sequences(), batch.longest().div_ceil(CONV_TOKENS)];
        launch!(self.cuda, stream, kernels::delta_net_conv, grid;
            qkv.bf16(), state.inputs.address(), w.taps.address(), Address::NULL, scratch.mixed.address(), sequences,
            channels as i32, config.conv_width as i32);
        let gates =
            DeltaGates { gates: scratch.gates.address(), rates: w.rates.address(), dt_bias: w.dt_bias.address() };
        if batch.shortest() < CHUNKED_FROM {
            let grid = [heads, config.value_head_dim.div_ceil(COLUMNS), batch.sequences()];
            launch!(self.cuda, stream, kernels::delta_net_rule, grid;
                qkv.bf16(), scratch.mixed.address(), gates, state.inputs.address(), state.heads.address(), out.bf16(),
                sequences, shape);
        }
        if batch.longest() >= CHUNKED_FROM {
            let grid = [heads, batch.longest().div_ceil(CHUNK), batch.sequences()];
            launch!(self.cuda, stream, kernels::delta_net_within, grid;
                scratch.mixed.address(), gates, scratch.triangles.address(), scratch.scales.address(), sequences,
                shape, batch.rows() as i32);
            let grid = [heads, config.value_head_dim.div_ceil(ACROSS_COLUMNS), batch.sequences()];
            launch!(self.cuda, stream, kernels::delta_net_across, grid;
                qkv.bf16(), scratch.mixed.address(), scratch.triangles.address(), scratch.scales.address(),
                state.inputs.address(), state.heads.address(), out.bf16(), sequences, shape, batch.rows() as i32);
        }
        launch!(self.cuda, stream, kernels::delta_net_norm, [batch.rows(), heads.div_ceil(NORM_HEADS), 1];
            out.bf16(), z.bf16(), w.norm.address(), shape);
    }

    fn convolve(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        (taps, bias): (&DeviceBuffer<f32>, Option<&DeviceBuffer<f32>>),
        x: &Tensor,
        out: &mut Tensor,
    ) {
        let (stream, channels) = (&self.cuda.compute, x.cols);
        let width = taps.len() / channels;
        assert!(out.cols == channels && state.inputs.len() == state.slots * (width - 1) * channels);
        let sequences =
            DeltaBatch { seq_first: batch.seq_first(), seq_slots: batch.seq_slots(), positions: batch.positions() };
        let grid = [channels.div_ceil(CONV_CHANNELS), batch.sequences(), batch.longest().div_ceil(CONV_TOKENS)];
        launch!(self.cuda, stream, kernels::delta_net_conv, grid;
            x.bf16(), state.inputs.address(), taps.address(), bias.map_or(Address::NULL, DeviceBuffer::address),
            out.bf16(), sequences, channels as i32, width as i32);
        launch!(self.cuda, stream, kernels::convolve_keep, [channels.div_ceil(CONV_THREADS), batch.sequences(), 1];
            x.bf16(), state.inputs.address(), sequences, channels as i32, width as i32);
    }

    fn kda_scratch(&self, config: &Kda, max_tokens: usize) -> Result<KdaScratch> {
        let chunked = if max_tokens < CHUNKED_FROM { 0 } else { max_tokens * config.num_heads };
        Ok(KdaScratch {
            triangles: DeviceBuffer::new(&self.cuda, chunked * KDA_TRIANGLES * KDA_CHUNK)?,
            norms: DeviceBuffer::new(&self.cuda, chunked * 2)?,
        })
    }

    fn kda(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        rule: &KdaRule<'_, Self>,
        scratch: &mut KdaScratch,
        KdaInputs { qkv, decay, beta, gate }: KdaInputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let (stream, config) = (&self.cuda.compute, rule.config);
        let (heads, dim, inner) = (config.num_heads, config.head_dim, config.inner_dim());
        assert!(qkv.cols == 3 * inner && decay.cols == inner && gate.cols == inner && beta.cols == heads);
        let sequences =
            DeltaBatch { seq_first: batch.seq_first(), seq_slots: batch.seq_slots(), positions: batch.positions() };
        let lower = match config.decay {
            KdaDecay::Softplus => None,
            KdaDecay::Bounded { lower } => Some(lower),
        };
        let shape = KdaShape {
            heads: heads as i32,
            dim: dim as i32,
            bounded: i32::from(lower.is_some()),
            lower: lower.unwrap_or_default(),
        };
        let gates =
            KdaGates { f: decay.bf16(), b: beta.f32(), rates: rule.rates.address(), dt_bias: rule.dt_bias.address() };
        if batch.shortest() < CHUNKED_FROM {
            launch!(self.cuda, stream, kernels::kda_rule, [heads, dim.div_ceil(KDA_COLUMNS), batch.sequences()];
                qkv.bf16(), gates, state.heads.address(), out.bf16(), sequences, shape);
        }
        if batch.longest() >= CHUNKED_FROM {
            let (triangles, norms) = (scratch.triangles.address(), scratch.norms.address());
            let grid = [heads, batch.longest().div_ceil(KDA_CHUNK), batch.sequences()];
            launch!(self.cuda, stream, kernels::kda_within, grid;
                qkv.bf16(), gates, triangles, norms, sequences, shape, batch.rows() as i32);
            let grid = [heads, dim.div_ceil(ACROSS_COLUMNS), batch.sequences()];
            launch!(self.cuda, stream, kernels::kda_across, grid;
                qkv.bf16(), gates, triangles, norms, state.heads.address(), out.bf16(), sequences, shape,
                batch.rows() as i32);
        }
        let shape = DeltaShape {
            key_heads: heads as i32,
            value_heads: heads as i32,
            key_dim: dim as i32,
            value_dim: dim as i32,
            taps: config.conv_width as i32,
            eps: rule.eps,
            sigmoid: 1,
        };
        launch!(self.cuda, stream, kernels::delta_net_norm, [batch.rows(), heads.div_ceil(NORM_HEADS), 1];
            out.bf16(), gate.bf16(), rule.norm.address(), shape);
    }

    fn mamba2(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        rule: &Mamba2Rule<'_, Self>,
        Mamba2Inputs { xbc, z, dt }: Mamba2Inputs<'_, Self>,
        out: &mut Tensor,
    ) {
        let (stream, config) = (&self.cuda.compute, rule.config);
        let (heads, inner) = (config.num_heads, config.inner_dim());
        assert!(xbc.cols == config.conv_dim() && z.cols == inner && out.cols == inner && dt.cols == heads);
        let sequences =
            DeltaBatch { seq_first: batch.seq_first(), seq_slots: batch.seq_slots(), positions: batch.positions() };
        let shape = Mamba2Shape {
            heads: heads as i32,
            head_dim: config.head_dim as i32,
            state_dim: config.state_dim as i32,
            groups: config.num_groups as i32,
            eps: rule.eps,
        };
        let weights =
            Mamba2Weights { rates: rule.rates.address(), dt_bias: rule.dt_bias.address(), skip: rule.skip.address() };
        let (xbc, dt, states) = (xbc.bf16(), dt.f32(), state.heads.address());
        if batch.shortest() < CHUNKED_FROM {
            let grid = [heads, config.head_dim.div_ceil(SSM_COLUMNS), batch.sequences()];
            launch!(self.cuda, stream, kernels::mamba2_scan, grid;
                xbc, dt, weights, states, out.bf16(), sequences, shape);
        }
        if batch.longest() >= CHUNKED_FROM {
            let grid = [heads, config.head_dim.div_ceil(ACROSS_COLUMNS), batch.sequences()];
            launch!(self.cuda, stream, kernels::mamba2_across, grid;
                xbc, dt, weights, states, out.bf16(), sequences, shape);
        }
        launch!(self.cuda, stream, kernels::mamba2_norm, [batch.rows(), config.num_groups, 1];
            out.bf16(), z.bf16(), rule.norm.address(), shape);
    }

    fn short_conv(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        taps: &DeviceBuffer<f32>,
        bcx: &Tensor,
        out: &mut Tensor,
    ) {
        let (stream, channels) = (&self.cuda.compute, out.cols);
        let width = taps.len() / channels;
        assert!(bcx.cols == 3 * channels && state.inputs.len() == state.slots * (width - 1) * channels);
        let sequences =
            DeltaBatch { seq_first: batch.seq_first(), seq_slots: batch.seq_slots(), positions: batch.positions() };
        let across = channels.div_ceil(SHORT_CONV_THREADS);
        let grid = [across, batch.sequences(), batch.longest().div_ceil(SHORT_CONV_TOKENS)];
        launch!(self.cuda, stream, kernels::short_conv, grid;
            bcx.bf16(), state.inputs.address(), taps.address(), out.bf16(), sequences, channels as i32, width as i32);
        launch!(self.cuda, stream, kernels::short_conv_keep, [across, batch.sequences(), 1];
            bcx.bf16(), state.inputs.address(), sequences, channels as i32, width as i32);
    }
}
