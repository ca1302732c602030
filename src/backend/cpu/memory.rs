//! Batches and activations in host memory: a batch is read as it is.

use std::ops::Range;

use super::Cpu;
use crate::Result;
use crate::backend::Memory;
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;

impl Memory for Cpu {
    type Batch = Batch;
    type Tensor = Tensor;
    type Host = Vec<f32>;

    fn is_plan(&self) -> bool {
        self.heap.is_plan()
    }

    fn batch(&self, _max_tokens: usize) -> Result<Batch> {
        Ok(Batch::default())
    }

    fn set_batch(&self, to: &mut Batch, batch: &Batch) {
        to.clone_from(batch);
    }

    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        Tensor::on(&self.heap, max_rows, cols)
    }

    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        self.tensor(max_rows, cols)
    }

    fn set_rows(&self, t: &mut Tensor, rows: usize) {
        t.set_rows(rows);
    }

    fn host(&self, numbers: usize) -> Result<Vec<f32>> {
        self.heap.zeros(&[numbers])
    }

    fn read_rows(&self, t: &Tensor, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&t.data()[rows.start * t.cols()..rows.end * t.cols()]);
        Ok(())
    }

    fn read(&self, t: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        out.extend_from_slice(t.data());
        Ok(())
    }
}
