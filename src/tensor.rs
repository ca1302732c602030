//! `Tensor`: activations on the host, row-major f32, allocated once at their largest and used a few rows at a time.

/// A matrix `[rows, cols]` of f32 whose number of rows changes from step to step, up to a fixed maximum.
#[derive(Debug)]
pub struct Tensor {
    data: Vec<f32>, // [max_rows, cols]
    rows: usize,
    cols: usize,
}

impl Tensor {
    /// Zeros, with `rows() == max_rows`.
    pub fn new(max_rows: usize, cols: usize) -> Self {
        Self { data: vec![0.0; max_rows * cols], rows: max_rows, cols }
    }

    /// Takes `rows` rows into use; their contents are whatever was there before. Panics beyond the maximum.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows * self.cols <= self.data.len(), "a tensor of {} rows was asked for {rows}", self.data.len() / self.cols);
        self.rows = rows;
    }

    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows in use, `[rows, cols]`.
    pub fn data(&self) -> &[f32] {
        &self.data[..self.rows * self.cols]
    }

    /// The rows in use, `[rows, cols]`.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.cols]
    }

    /// One row, `[cols]`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data()[i * self.cols..][..self.cols]
    }

    /// One row, `[cols]`.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.data_mut()[i * cols..][..cols]
    }
}
