//! Matrices on the host: `Tensor`, activations allocated once at their largest; `HostTensor`, a weight on its way to a
//! backend.

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use crate::Result;
use crate::machine::heap::Heap;

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

    /// As [`Tensor::new`], from `heap`. Errors: `Error::Resources` when there is no memory.
    pub fn on(heap: &Heap, max_rows: usize, cols: usize) -> Result<Self> {
        Ok(Self { data: heap.zeros(&[max_rows, cols])?, rows: max_rows, cols })
    }

    /// Takes `rows` rows into use; their contents are whatever was there before. Panics beyond the maximum.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(
            rows * self.cols <= self.data.len(),
            "a tensor of {} rows was asked for {rows}",
            self.data.len() / self.cols
        );
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

/// A weight `[rows, cols]` on the host on its way to a backend. A vector is one column.
pub enum HostTensor<'a> {
    /// As most checkpoints come.
    Bf16 {
        /// `[rows, cols]`
        data: Cow<'a, [bf16]>,
        /// Numbers in a row.
        cols: usize,
    },
    /// Everything else, decoded.
    F32 {
        /// `[rows, cols]`
        data: Cow<'a, [f32]>,
        /// Numbers in a row.
        cols: usize,
    },
    /// No numbers: the memory of a model is only counted.
    Shape {
        /// Rows.
        rows: usize,
        /// Numbers in a row.
        cols: usize,
    },
}

impl From<Vec<f32>> for HostTensor<'static> {
    fn from(column: Vec<f32>) -> Self {
        HostTensor::F32 { data: column.into(), cols: 1 }
    }
}

/// A tensor of other numbers of `$self`: `$make` of its data, and the shape that this has.
macro_rules! rearranged {
    ($self:expr, [$rows:expr, $cols:expr], $data:ident => $make:expr) => {
        match $self {
            HostTensor::Bf16 { data: $data, .. } => HostTensor::Bf16 { data: $make.into(), cols: $cols },
            HostTensor::F32 { data: $data, .. } => HostTensor::F32 { data: $make.into(), cols: $cols },
            HostTensor::Shape { .. } => HostTensor::Shape { rows: $rows, cols: $cols },
        }
    };
}

impl<'a> HostTensor<'a> {
    /// Numbers in a row.
    pub fn cols(&self) -> usize {
        match self {
            HostTensor::Bf16 { cols, .. } | HostTensor::F32 { cols, .. } | HostTensor::Shape { cols, .. } => *cols,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        match self {
            HostTensor::Bf16 { data, cols } => data.len() / cols,
            HostTensor::F32 { data, cols } => data.len() / cols,
            HostTensor::Shape { rows, .. } => *rows,
        }
    }

    /// All numbers as f32; none of a shape.
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            HostTensor::Bf16 { data, .. } => data.par_iter().map(|w| w.to_f32()).collect::<Vec<_>>().into(),
            HostTensor::F32 { data, .. } => Cow::Borrowed(data),
            HostTensor::Shape { .. } => Cow::Borrowed(&[]),
        }
    }

    /// Some rows as f32; none of a shape.
    pub fn rows_to_f32(&self, rows: Range<usize>) -> Cow<'_, [f32]> {
        let range = rows.start * self.cols()..rows.end * self.cols();
        match self {
            HostTensor::Bf16 { data, .. } => data[range].iter().map(|w| w.to_f32()).collect::<Vec<_>>().into(),
            HostTensor::F32 { data, .. } => Cow::Borrowed(&data[range]),
            HostTensor::Shape { .. } => Cow::Borrowed(&[]),
        }
    }

    /// All numbers as f32, kept for good: `heap` counts them, and where it hands out nothing there are none.
    pub fn keep(self, heap: &Heap) -> Vec<f32> {
        heap.count::<f32>(&[self.rows(), self.cols()]);
        match self {
            _ if heap.is_plan() => Vec::new(),
            HostTensor::F32 { data, .. } => data.into_owned(),
            other => other.to_f32().into_owned(),
        }
    }

    /// `f` of each number.
    pub(crate) fn map(self, f: impl Fn(f32) -> f32) -> HostTensor<'a> {
        let cols = self.cols();
        let mut data = match self {
            HostTensor::Shape { .. } => return self,
            HostTensor::F32 { data, .. } => data.into_owned(),
            HostTensor::Bf16 { .. } => self.to_f32().into_owned(),
        };
        data.iter_mut().for_each(|x| *x = f(*x));
        HostTensor::F32 { data: data.into(), cols }
    }

    /// The same numbers in rows of `cols`.
    pub fn reshaped(self, cols: usize) -> Self {
        rearranged!(self, [self.rows() * self.cols() / cols, cols], data => data)
    }

    /// The rows `[from, to)` of a tensor whose rows come in `heads` equal parts, part after part.
    pub(crate) fn head_rows(&self, heads: usize, from: usize, to: usize) -> HostTensor<'static> {
        let cols = self.cols();
        let part = self.rows() / heads * cols;
        fn pick<T: Copy>(data: &[T], part: usize, from: usize, to: usize) -> Vec<T> {
            data.chunks_exact(part).flat_map(|head| &head[from..to]).copied().collect()
        }
        rearranged!(self, [heads * (to - from), cols], data => pick(data, part, from * cols, to * cols))
    }

    /// These rows, in this order.
    pub(crate) fn rows_by(&self, order: &[usize]) -> HostTensor<'static> {
        fn pick<T: Copy + Default + Send + Sync>(data: &[T], cols: usize, order: &[usize]) -> Vec<T> {
            let mut picked = vec![T::default(); order.len() * cols];
            picked
                .par_chunks_mut(cols)
                .zip(order)
                .for_each(|(picked, &row)| picked.copy_from_slice(&data[row * cols..][..cols]));
            picked
        }
        let cols = self.cols();
        rearranged!(self, [order.len(), cols], data => pick(data, cols, order))
    }

    /// These columns, in this order.
    pub(crate) fn cols_by(&self, order: &[usize]) -> HostTensor<'static> {
        fn pick<T: Copy + Default + Send + Sync>(data: &[T], cols: usize, order: &[usize]) -> Vec<T> {
            let mut picked = vec![T::default(); data.len() / cols * order.len()];
            picked.par_chunks_mut(order.len()).zip(data.par_chunks(cols)).for_each(|(picked, row)| {
                picked.iter_mut().zip(order).for_each(|(to, &col)| *to = row[col]);
            });
            picked
        }
        let cols = self.cols();
        rearranged!(self, [self.rows(), order.len()], data => pick(data, cols, order))
    }

    /// So many rows of zeros, as wide as its own.
    pub(crate) fn zero_rows(&self, rows: usize) -> HostTensor<'static> {
        fn zeros<T: Clone + Default>(_: &[T], n: usize) -> Vec<T> {
            vec![T::default(); n]
        }
        let cols = self.cols();
        rearranged!(self, [rows, cols], data => zeros(data, rows * cols))
    }

    /// The rows of several tensors, one after the other; of equal width and kind.
    pub(crate) fn stacked(parts: &[HostTensor<'_>]) -> HostTensor<'static> {
        let cols = parts[0].cols();
        let bf16 = |part: &HostTensor<'_>| match part {
            HostTensor::Bf16 { data, .. } => Some(data.to_vec()),
            HostTensor::F32 { .. } | HostTensor::Shape { .. } => None,
        };
        assert!(parts.iter().all(|part| part.cols() == cols), "rows of one width");
        if parts.iter().any(|part| matches!(part, HostTensor::Shape { .. })) {
            return HostTensor::Shape { rows: parts.iter().map(HostTensor::rows).sum(), cols };
        }
        match parts.iter().map(bf16).collect::<Option<Vec<_>>>() {
            Some(parts) => HostTensor::Bf16 { data: parts.concat().into(), cols },
            None => HostTensor::F32 {
                data: parts.iter().flat_map(|part| part.to_f32().into_owned()).collect::<Vec<_>>().into(),
                cols,
            },
        }
    }

    /// Each of `heads` equal parts transposed.
    pub(crate) fn transpose_heads(&self, heads: usize) -> HostTensor<'static> {
        let (rows, cols) = (self.rows() / heads, self.cols());
        fn turn<T: Copy>(data: &[T], rows: usize, cols: usize) -> Vec<T> {
            data.chunks_exact(rows * cols)
                .flat_map(|head| (0..cols).flat_map(move |c| (0..rows).map(move |r| head[r * cols + c])))
                .collect()
        }
        rearranged!(self, [heads * cols, rows], data => turn(data, rows, cols))
    }
}

/// The largest logits of a row, and what the others weigh: most tokens can be chosen from that.
#[derive(Clone, Debug, Default)]
pub struct Shortlist {
    /// Token and logit, the largest first, of equals the lower token; as many as the device gives.
    pub best: Vec<(u32, f32)>,
    /// Sum over the whole row of `exp((logit - largest) * inverse_temperature)`.
    pub total: f64,
}
