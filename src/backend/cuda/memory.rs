//! Batches and activations on the device.

use std::ops::Range;

use half::bf16;

use super::{CudaBackend, CudaBatch};
use crate::Result;
use crate::backend::Memory;
use crate::backend::batch::Batch;
use crate::cuda::{Address, DeviceBuffer, PinnedBuffer};

/// Activations `[rows, cols]`.
pub struct Tensor {
    pub(super) data: Data,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Numbers of activations.
pub(super) enum Data {
    F32(DeviceBuffer<f32>),
    Bf16(DeviceBuffer<bf16>),
}

impl Tensor {
    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Its numbers. Panics unless they are f32.
    pub fn f32(&self) -> Address<f32> {
        match &self.data {
            Data::F32(buffer) => buffer.address(),
            Data::Bf16(_) => panic!("a tensor of bf16 numbers where f32 is asked for"),
        }
    }

    /// Its numbers. Panics unless they are bf16.
    pub fn bf16(&self) -> Address<bf16> {
        match &self.data {
            Data::Bf16(buffer) => buffer.address(),
            Data::F32(_) => panic!("a tensor of f32 numbers where bf16 is asked for"),
        }
    }

    /// Some of its rows, lent: as a tensor that must not outlive it.
    pub(super) fn run(&self, rows: &Range<usize>) -> Tensor {
        assert!(rows.end <= self.rows);
        let numbers = rows.start * self.cols..rows.end * self.cols;
        let data = match &self.data {
            Data::F32(buffer) => Data::F32(buffer.lend(numbers)),
            Data::Bf16(buffer) => Data::Bf16(buffer.lend(numbers)),
        };
        Tensor { data, rows: rows.len(), cols: self.cols }
    }

    fn max_rows(&self) -> usize {
        let len = match &self.data {
            Data::F32(buffer) => buffer.len(),
            Data::Bf16(buffer) => buffer.len(),
        };
        len / self.cols
    }
}

impl Memory for CudaBackend {
    type Batch = CudaBatch;
    type Tensor = Tensor;
    type Host = PinnedBuffer<f32>;

    fn is_plan(&self) -> bool {
        self.cuda.is_plan()
    }

    fn batch(&self, max_tokens: usize) -> Result<CudaBatch> {
        CudaBatch::new(&self.cuda, max_tokens, self.limits.table)
    }

    fn set_batch(&self, to: &mut CudaBatch, batch: &Batch) {
        to.set(&self.cuda, batch);
    }

    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        Ok(Tensor { data: Data::Bf16(DeviceBuffer::zeros(&self.cuda, max_rows * cols)?), rows: max_rows, cols })
    }

    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        Ok(Tensor { data: Data::F32(DeviceBuffer::zeros(&self.cuda, max_rows * cols)?), rows: max_rows, cols })
    }

    fn set_rows(&self, t: &mut Tensor, rows: usize) {
        assert!(rows <= t.max_rows(), "a tensor of {} rows was asked for {rows}", t.max_rows());
        t.rows = rows;
    }

    fn host(&self, numbers: usize) -> Result<PinnedBuffer<f32>> {
        PinnedBuffer::new(&self.cuda, numbers)
    }

    fn read_rows(&self, t: &Tensor, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        assert!(rows.end <= t.rows && out.len() == rows.len() * t.cols);
        match &t.data {
            Data::F32(buffer) => buffer.read_from(rows.start * t.cols, out),
            Data::Bf16(_) => panic!("a tensor of bf16 numbers where f32 is asked for"),
        }
    }

    fn read(&self, t: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        out.resize(t.rows * t.cols, 0.0);
        match &t.data {
            Data::F32(buffer) => buffer.read(out),
            Data::Bf16(buffer) => {
                let mut narrow = vec![bf16::ZERO; out.len()];
                buffer.read(&mut narrow)?;
                out.iter_mut().zip(narrow).for_each(|(o, w)| *o = w.to_f32());
                Ok(())
            }
        }
    }
}
