//! Ops on rows: a block of threads for each, or a product.

use std::ops::Range;

use half::bf16;

use super::load::{Groups, Linear, Weight};
use super::memory::Data;
use super::product::{FEW_TOKENS, Form, JOBS, NORM_TOKENS, Out, Product};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::Result;
use crate::backend::Dense;
use crate::backend::tensor::Shortlist;
use crate::cuda::kernels::rows::{GENERAL, PLAIN, RELU_SQUARED, ROW_NUMBERS, RUNS};
use crate::cuda::kernels::shortlist::{KEPT, PART};
use crate::cuda::{Address, DeviceBuffer, PinnedBuffer, kernels, launch};
use crate::model::{Activation, GateActivation};

/// What a launch leaves for the next, and the last one for the host.
pub struct Shortlister {
    best: [DeviceBuffer<f32>; 2],
    ids: [DeviceBuffer<i32>; 2],
    sums: DeviceBuffer<f32>,                 // [rows, blocks, 2]
    inverse_temperatures: DeviceBuffer<f32>, // [rows]
    host_best: PinnedBuffer<f32>,            // [rows, KEPT]
    host_ids: PinnedBuffer<i32>,             // [rows, KEPT]
    host_sums: PinnedBuffer<f32>,
}

/// What becomes of what was in `out`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Write {
    Set,
    Add,
}

/// A grid over all numbers of a tensor, and how many there are.
fn numbers(x: &Tensor) -> ([usize; 3], i64) {
    let numbers = x.rows * x.cols;
    ([numbers.div_ceil(ROW_NUMBERS), 1, 1], numbers as i64)
}

impl From<Activation> for kernels::Activation {
    fn from(activation: Activation) -> Self {
        let silu = Self {
            form: GENERAL as i32,
            gate_max: f32::MAX,
            linear: 1.0,
            cubic: 0.0,
            silu_max: f32::MAX,
            up_max: f32::MAX,
            up_shift: 0.0,
        };
        // Twice the square root of 2 / pi.
        const GELU: f32 = 1.595_769;
        match activation {
            Activation::Silu => Self { form: PLAIN as i32, ..silu },
            Activation::ReluSquared => Self { form: RELU_SQUARED as i32, ..silu },
            Activation::GeluTanh => Self { linear: GELU, cubic: 0.044715 * GELU, ..silu },
            Activation::ClampedSilu { limit } => Self { silu_max: limit, up_max: limit, ..silu },
            Activation::SiluOfClamped { limit } => Self { gate_max: limit, up_max: limit, ..silu },
            Activation::ClampedSwiglu { limit, alpha } => {
                Self { gate_max: limit, linear: alpha, up_max: limit, up_shift: 1.0, ..silu }
            }
        }
    }
}

/// The product of `w` and the rows of `x`, whose numbers are at `from`.
pub(super) fn product(x: &Tensor, from: Address<bf16>, w: &Linear, out: &mut Tensor, write: Write) -> Product {
    assert_eq!((x.cols, x.rows, out.cols), (w.k, out.rows, w.n), "a product of other shapes");
    let (y, out) = match (&out.data, write) {
        (Data::Bf16(y), Write::Set) => (y.address().cast(), Out::Bf16),
        (Data::F32(y), Write::Set) => (y.address().cast(), Out::F32),
        (Data::F32(y), Write::Add) => (y.address().cast(), Out::F32Add),
        (Data::Bf16(_), Write::Add) => panic!("only the residual stream is added to"),
    };
    Product {
        x: from,
        x_pitch: x.cols,
        x_batch: 0,
        w: match &w.weight {
            Weight::Bf16(weight) => weight.address(),
            Weight::Packed(..) => Address::NULL,
        },
        w_batch: 0,
        bias: w.bias.as_ref().map_or(Address::NULL, DeviceBuffer::address),
        y,
        y_pitch: w.n,
        y_batch: 0,
        tokens: x.rows,
        n: w.n,
        k: w.k,
        batch: 1,
        out,
    }
}

impl CudaBackend {
    /// The products of some weights and one `x`.
    pub(super) fn apply<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N], write: Write) {
        let packed = jobs.iter().any(|(w, _)| !w.is_bf16());
        let products = jobs.map(|(w, out)| {
            let p = product(x, x.bf16(), w, out, write);
            if let Weight::Packed(packed) = &w.weight {
                self.packed_product(packed, p);
            }
            p
        });
        if packed {
            return;
        }
        if products.iter().all(|p| p.out == products[0].out) {
            products.chunks(JOBS).for_each(|some| self.products(some));
        } else {
            products.iter().for_each(|p| self.product(p));
        }
    }
}

impl Dense for CudaBackend {
    type Shortlister = Shortlister;

    fn embed(&self, embedding: &DeviceBuffer<bf16>, batch: &CudaBatch, width: usize, out: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, kernels::embed, [out.rows, out.cols / width, 1];
            embedding.address(), batch.tokens(), out.f32(), width as i32);
    }

    fn rms_norm(&self, x: &Tensor, w: &DeviceBuffer<f32>, eps: f32, out: &mut Tensor) {
        assert_eq!((x.rows, x.cols, w.len()), (out.rows, out.cols, x.cols));
        let (stream, cols) = (&self.cuda.compute, x.cols as i32);
        match &x.data {
            Data::F32(_) => self.as_it_comes(x, |rows| {
                let (x, out) = (x.run(rows), out.run(rows));
                launch!(self.cuda, stream, kernels::rms_norm_f32, [out.rows, 1, 1];
                    x.f32(), w.address(), eps, out.bf16(), cols);
            }),
            Data::Bf16(x) => {
                launch!(self.cuda, stream, kernels::rms_norm_bf16, [out.rows, 1, 1];
                    x.address(), w.address(), eps, out.bf16(), cols);
            }
        }
    }

    fn layer_norm(&self, x: &Tensor, w: &DeviceBuffer<f32>, eps: f32, out: &mut Tensor) {
        assert_eq!((x.rows, x.cols, w.len()), (out.rows, out.cols, x.cols));
        launch!(self.cuda, &self.cuda.compute, kernels::layer_norm, [out.rows, 1, 1];
            x.f32(), w.address(), eps, out.bf16(), out.cols as i32);
    }

    fn rms_norm_heads(&self, x: &mut Tensor, w: &DeviceBuffer<f32>, eps: f32, cols: Range<usize>) {
        let runs = cols.len() / w.len();
        launch!(self.cuda, &self.cuda.compute, kernels::rms_norm_heads, [x.rows, runs.div_ceil(RUNS), 1];
            x.bf16(), w.address(), eps, x.cols as i32, cols.start as i32, w.len() as i32, runs as i32);
    }

    fn linears<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N]) {
        self.apply(x, jobs, Write::Set);
    }

    fn linear_add(&self, w: &Linear, x: &Tensor, out: &mut Tensor) {
        self.apply(x, [(w, out)], Write::Add);
    }

    fn linear_groups(&self, w: &Groups, x: &Tensor, out: &mut Tensor) {
        assert_eq!((x.cols, out.cols, x.rows), (w.groups * w.k, w.groups * w.n, out.rows));
        self.product(&Product {
            x: x.bf16(),
            x_pitch: x.cols,
            x_batch: w.k,
            w: w.weight.address(),
            w_batch: w.n * w.k,
            bias: Address::NULL,
            y: out.bf16().cast(),
            y_pitch: out.cols,
            y_batch: w.n,
            tokens: x.rows,
            n: w.n,
            k: w.k,
            batch: w.groups,
            out: Out::Bf16,
        });
    }

    fn activate(&self, activation: Activation, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        let (grid, numbers) = numbers(out);
        launch!(self.cuda, &self.cuda.compute, kernels::activate, grid;
            activation.into(), gate.bf16(), up.bf16(), out.bf16(), numbers);
    }

    fn gate(&self, gate: &Tensor, activation: GateActivation, x: &mut Tensor) {
        let ((grid, numbers), each) = (numbers(x), x.cols / gate.cols);
        assert!(each == 1 || each.is_multiple_of(4), "checked when loading");
        let softplus = i32::from(activation == GateActivation::Softplus);
        launch!(self.cuda, &self.cuda.compute, kernels::gate, grid;
            gate.bf16(), x.bf16(), softplus, each as i32, numbers);
    }

    fn scale(&self, x: &mut Tensor, factor: f32) {
        let ((grid, numbers), stream) = (numbers(x), &self.cuda.compute);
        match &x.data {
            Data::F32(x) => {
                launch!(self.cuda, stream, kernels::scale_f32, grid; x.address(), factor, numbers);
            }
            Data::Bf16(x) => {
                launch!(self.cuda, stream, kernels::scale_bf16, grid; x.address(), factor, numbers);
            }
        }
    }

    fn softcap(&self, x: &mut Tensor, cap: f32) {
        let (grid, numbers) = numbers(x);
        launch!(self.cuda, &self.cuda.compute, kernels::softcap, grid; x.f32(), cap, numbers);
    }

    fn clear(&self, x: &mut Tensor) {
        let (grid, numbers) = numbers(x);
        launch!(self.cuda, &self.cuda.compute, kernels::clear, grid; x.f32(), numbers);
    }

    fn rounded(&self, x: &Tensor, out: &mut Tensor) {
        assert_eq!((x.rows, x.cols), (out.rows, out.cols));
        let (grid, numbers) = numbers(out);
        launch!(self.cuda, &self.cuda.compute, kernels::rounded, grid; x.f32(), out.bf16(), numbers);
    }

    fn norm_add(&self, y: &Tensor, (w, eps): (&DeviceBuffer<f32>, f32), scale: f32, x: &mut Tensor) {
        assert_eq!((x.rows, x.cols, w.len()), (y.rows, y.cols, x.cols));
        launch!(self.cuda, &self.cuda.compute, kernels::norm_add, [x.rows, 1, 1];
            y.f32(), w.address(), eps, scale, x.f32(), x.cols as i32);
    }

    fn gate_rows(&self, w: &DeviceBuffer<f32>, h: &Tensor, x: &mut Tensor) {
        assert!((x.rows, w.len()) == (h.rows, h.cols));
        launch!(self.cuda, &self.cuda.compute, kernels::gate_rows, [x.rows, 1, 1];
            w.address(), h.bf16(), x.bf16(), h.cols as i32, x.cols as i32);
    }

    fn gather(&self, x: &Tensor, rows: &[usize], first: usize, out: &mut Tensor, at: usize) {
        let mut staged = self.staged_rows.borrow_mut();
        staged.clear();
        staged.extend(rows.iter().map(|&row| row as u32));
        let to = self.gather_rows.address().add(at);
        self.cuda.upload(&self.cuda.compute, to, &staged);
        launch!(self.cuda, &self.cuda.compute, kernels::gather, [rows.len(), 1, 1];
            x.f32(), to, first as i32, out.f32().add(at * out.cols), x.cols as i32);
    }

    fn shortlister(&self, max_rows: usize, cols: usize) -> Result<Shortlister> {
        let cuda = &self.cuda;
        let blocks = max_rows * cols.div_ceil(PART);
        let kept = || DeviceBuffer::new(cuda, blocks * KEPT);
        let ids = || DeviceBuffer::new(cuda, blocks * KEPT);
        Ok(Shortlister {
            best: [kept()?, kept()?],
            ids: [ids()?, ids()?],
            sums: DeviceBuffer::new(cuda, 2 * blocks)?,
            inverse_temperatures: DeviceBuffer::new(cuda, max_rows)?,
            host_best: PinnedBuffer::new(cuda, max_rows * KEPT)?,
            host_ids: PinnedBuffer::new(cuda, max_rows * KEPT)?,
            host_sums: PinnedBuffer::new(cuda, 2 * blocks)?,
        })
    }

    fn shortlist(
        &self,
        s: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        let (cuda, rows, blocks) = (&self.cuda, logits.rows, logits.cols.div_ceil(PART));
        assert_eq!(inverse_temperatures.len(), rows);
        cuda.upload(&cuda.compute, s.inverse_temperatures.address(), inverse_temperatures);
        let (mut values, mut ids, mut n, mut sums) = (logits.f32(), Address::NULL, logits.cols, s.sums.address());
        for level in 0.. {
            let (best, best_ids) = (s.best[level % 2].address(), s.ids[level % 2].address());
            launch!(cuda, &cuda.compute, kernels::shortlist, [n.div_ceil(PART), rows, 1];
                values, ids, best, best_ids, s.inverse_temperatures.address(), sums, n as i32, n as i32);
            (values, ids, sums, n) = (best, best_ids, Address::NULL, n.div_ceil(PART) * KEPT);
            if n == KEPT {
                break;
            }
        }
        cuda.download(&cuda.compute, values, &mut s.host_best[..rows * KEPT]);
        cuda.download(&cuda.compute, ids, &mut s.host_ids[..rows * KEPT]);
        cuda.download(&cuda.compute, s.sums.address(), &mut s.host_sums[..rows * blocks * 2]);
        cuda.synchronize()?;

        out.resize_with(rows, Shortlist::default);
        for (row, list) in out.iter_mut().enumerate() {
            let at = row * KEPT..(row + 1) * KEPT;
            let best = s.host_ids[at.clone()].iter().zip(&s.host_best[at]);
            list.best.clear();
            list.best.extend(best.take(logits.cols).map(|(&id, &logit)| (id as u32, logit)));
            let parts = s.host_sums[row * blocks * 2..(row + 1) * blocks * 2].chunks(2);
            list.add_up(parts.map(|part| (part[0], part[1])), inverse_temperatures[row]);
        }
        Ok(())
    }

    fn norm_linears<const N: usize>(
        &self,
        x: &Tensor,
        (norm, eps): (&DeviceBuffer<f32>, f32),
        h: &mut Tensor,
        jobs: [(&Linear, &mut Tensor); N],
    ) {
        if x.rows <= NORM_TOKENS && jobs.iter().all(|(w, _)| w.is_bf16()) {
            let products = jobs.map(|(w, out)| product(x, x.f32().cast(), w, out, Write::Set));
            return products.chunks(JOBS).for_each(|some| self.gemv(some, Form::Norm(norm.address(), eps)));
        }
        self.as_it_comes(x, |rows| {
            let (x, mut h) = (x.run(rows), h.run(rows));
            self.rms_norm(&x, norm, eps, &mut h);
            let mut runs = jobs.each_ref().map(|(w, out)| (*w, out.run(rows)));
            self.linears(&h, runs.each_mut().map(|(w, out)| (*w, out)));
        });
    }

    fn gated_linears(
        &self,
        x: &Tensor,
        (gate, up): (&Linear, &Linear),
        activation: Activation,
        buffers: (&mut Tensor, &mut Tensor),
        out: &mut Tensor,
    ) {
        let silu = activation == Activation::Silu;
        if silu && x.rows <= FEW_TOKENS && gate.is_bf16() && up.is_bf16() {
            let [gate, up] = [gate, up].map(|w| product(x, x.bf16(), w, out, Write::Set));
            return self.gemv(&[gate, up], Form::Gated);
        }
        self.linears(x, [(gate, &mut *buffers.0), (up, &mut *buffers.1)]);
        self.activate(activation, buffers.0, buffers.1, out);
    }
}
