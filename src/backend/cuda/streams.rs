//! Several residual streams on the device, and what n-grams add to them (kernels/streams.cu and streams_product.cu).

use half::bf16;

use super::memory::Data;
use super::recur::State;
use super::{CudaBackend, CudaBatch, Tensor};
use crate::Result;
use crate::backend::{ConnectWeights, NgramInputs, NgramNorms, ReadBy, Streams};
use crate::cuda::kernels::streams::{
    MAX_STREAMS, NGRAM_CHANNELS, NGRAM_TOKENS, PRODUCT_ROWS, PRODUCT_TOKENS, STREAM_NUMBERS, STREAM_THREADS,
};
use crate::cuda::kernels::streams_product::PRODUCT_TILE;
use crate::cuda::{Address, DeviceBuffer, kernels, launch};
use crate::model::Connections;

/// Tokens up to which a block has a row of a connection's product; beyond, tensor cores have all rows.
const FEW_TOKENS: usize = 32;

impl CudaBackend {
    /// Reads the streams by the shares `by`, and makes `post` and `C` of `shares`, where there are numbers for them.
    fn collapse(
        &self,
        x: &Tensor,
        of: Connections,
        (shares, numbers): (Address<f32>, usize),
        (by, by_numbers): (Address<f32>, usize),
        out: &mut Tensor,
    ) {
        let grid = [out.cols.div_ceil(STREAM_NUMBERS), x.rows, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::collapse_streams, grid;
            x.f32(), shares, by, out.f32(), out.cols as i32, of.count as i32, numbers as i32, by_numbers as i32,
            of.iterations as i32, of.eps);
    }
}

impl Streams for CudaBackend {
    fn write_rows(&self, to: &mut Tensor, first: usize, numbers: &[f32]) -> Result<()> {
        let at = first * to.cols;
        assert!(at + numbers.len() <= to.rows * to.cols, "rows of the tensor");
        let numbers: Vec<bf16> = numbers.iter().map(|x| bf16::from_f32(*x)).collect();
        self.cuda.upload(&self.cuda.compute, to.bf16().add(at), &numbers);
        Ok(())
    }

    fn norm_streams(&self, x: &Tensor, w: &DeviceBuffer<f32>, eps: f32, width: usize, out: &mut Tensor) {
        assert_eq!((x.rows, x.cols, w.len()), (out.rows, out.cols, x.cols));
        let (stream, grid) = (&self.cuda.compute, [out.rows, out.cols / width, 1]);
        match &x.data {
            Data::F32(x) => {
                launch!(self.cuda, stream, kernels::rms_norm_f32, grid;
                    x.address(), w.address(), eps, out.bf16(), width as i32);
            }
            Data::Bf16(x) => {
                launch!(self.cuda, stream, kernels::rms_norm_bf16, grid;
                    x.address(), w.address(), eps, out.bf16(), width as i32);
            }
        }
    }

    fn mixer_gates(&self, gates: &Tensor, low: &mut Tensor, inject: &mut Tensor) {
        assert!(gates.cols >= low.cols + inject.cols && gates.rows == low.rows && gates.rows == inject.rows);
        launch!(self.cuda, &self.cuda.compute, kernels::mixer_gates, [gates.rows, 1, 1];
            gates.f32(), low.bf16(), inject.f32(), gates.cols as i32, low.cols as i32, inject.cols as i32);
    }

    fn mix_streams(&self, gate: &Tensor, normed: &Tensor, out: &mut Tensor) {
        assert_eq!((gate.rows, gate.cols, gate.rows), (normed.rows, normed.cols, out.rows));
        let grid = [out.cols.div_ceil(STREAM_NUMBERS), out.rows, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::mix_streams, grid;
            gate.bf16(), normed.bf16(), out.bf16(), out.cols as i32, (gate.cols / out.cols) as i32);
    }

    fn inject(&self, y: &Tensor, inject: &Tensor, x: &mut Tensor) {
        assert_eq!((y.rows, x.rows, x.cols), (inject.rows, y.rows, inject.cols * y.cols));
        let grid = [y.cols.div_ceil(STREAM_NUMBERS), y.rows, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::inject, grid;
            y.f32(), inject.f32(), x.f32(), y.cols as i32, inject.cols as i32);
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
        let (stream, numbers) = (&self.cuda.compute, shares.cols);
        assert!(of.count <= MAX_STREAMS && numbers <= PRODUCT_ROWS && x.cols == of.count * out.cols);
        let (kernel, grid) = match x.rows <= FEW_TOKENS {
            true => (kernels::streams_product_row, [numbers, x.rows.div_ceil(PRODUCT_TOKENS), 1]),
            false => (kernels::streams_product_tile, [x.rows.div_ceil(PRODUCT_TILE), 1, 1]),
        };
        launch!(self.cuda, stream, kernel, grid;
            x.f32(), w.of_streams.address(), w.base.address(), w.scale.address(), shares.f32(), x.cols as i32,
            numbers as i32, of.count as i32, x.rows as i32, eps);
        let (by, by_numbers) = match by {
            ReadBy::Own => (shares.f32(), numbers),
            ReadBy::Shares(before) => (before.f32(), before.cols),
            ReadBy::First => (Address::NULL, 0),
        };
        self.collapse(x, of, (shares.f32(), numbers), (by, by_numbers), out);
    }

    fn sum_streams(&self, x: &Tensor, of: Connections, shares: &Tensor, out: &mut Tensor) {
        // Nothing is made of the shares again: there is nothing behind those of so few numbers.
        self.collapse(x, of, (shares.f32(), of.count), (shares.f32(), shares.cols), out);
    }

    fn connect_streams(&self, y: &Tensor, shares: &Tensor, x: &mut Tensor) {
        let grid = [y.cols.div_ceil(STREAM_NUMBERS), y.rows, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::connect_streams, grid;
            y.f32(), shares.f32(), x.f32(), y.cols as i32, (x.cols / y.cols) as i32);
    }

    fn mean_streams(&self, x: &Tensor, out: &mut Tensor) {
        let grid = [out.cols.div_ceil(STREAM_NUMBERS), out.rows, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::mean_streams, grid;
            x.f32(), out.f32(), out.cols as i32, (x.cols / out.cols) as i32);
    }

    fn gate_ngrams(&self, norms: &NgramNorms<'_, Self>, x: &Tensor, value: &Tensor, key: &mut Tensor) {
        assert_eq!((x.rows, x.cols, x.rows), (key.rows, key.cols, value.rows));
        let grid = [x.rows, x.cols / value.cols, 1];
        launch!(self.cuda, &self.cuda.compute, kernels::gate_ngrams, grid;
            x.f32(), value.bf16(), key.bf16(), norms.key.address(), norms.query.address(), norms.eps,
            value.cols as i32);
    }

    fn add_ngrams(&self, u: &Tensor, x: &mut Tensor) {
        assert_eq!((u.rows, u.cols), (x.rows, x.cols));
        launch!(self.cuda, &self.cuda.compute, kernels::add_ngrams, [x.cols.div_ceil(STREAM_NUMBERS), x.rows, 1];
            u.bf16(), x.f32(), x.cols as i32);
    }

    fn convolve_ngrams(&self, state: &mut State, batch: &CudaBatch, inputs: &NgramInputs<'_, Self>, x: &mut Tensor) {
        let (stream, channels) = (&self.cuda.compute, x.cols);
        let (NgramInputs { gated, normed, taps, dilation }, kept) = (inputs, state.inputs.address());
        let width = taps.len() / channels;
        let past = (width - 1) * dilation;
        assert!(state.inputs.len() == state.slots * past * channels && normed.cols == channels);
        let grid = [channels.div_ceil(NGRAM_CHANNELS), batch.sequences(), batch.longest().div_ceil(NGRAM_TOKENS)];
        launch!(self.cuda, stream, kernels::convolve_ngrams, grid;
            gated.bf16(), normed.bf16(), kept, taps.address(), x.f32(), batch.seq_first(), batch.seq_slots(),
            batch.positions(), channels as i32, width as i32, *dilation as i32);
        launch!(self.cuda, stream, kernels::keep_ngrams, [channels.div_ceil(STREAM_THREADS), batch.sequences(), 1];
            normed.bf16(), kept, batch.seq_first(), batch.seq_slots(), batch.positions(), channels as i32,
            past as i32);
    }
}
