//! Weights in host memory and `y = W x + b` over them.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS, largest_group_size};
use rayon::prelude::*;

use super::{Cpu, Heads};
use crate::config::DenseBits;
use crate::kernel::{QuantizedRows, Rows};
use crate::memory::Buffer;
use crate::tensor::{HostTensor, Tensor};
use crate::workers::Shared;
use crate::{Error, Result};

/// Rows of weights that stay in a core's cache while tokens pass over them.
const ROWS: usize = 32;
/// Rows are shared out in multiples of this, the height of the kernels' register blocks.
const SHARE: usize = 4;
/// Tokens that pass over a block of weights while it is in the cache.
const TOKENS: usize = 128;

impl Buffer<bf16> {
    /// Copies a weight, rounding f32 to bf16.
    pub(super) fn from_bf16(weight: &HostTensor<'_>) -> Result<Self> {
        const CHUNK: usize = 1 << 18;
        let mut buffer = Self::zeros(weight.rows() * weight.cols())?;
        match weight {
            HostTensor::Bf16 { data, .. } => {
                buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
            }
            HostTensor::F32 { data, .. } => {
                buffer.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(to, from)| {
                    to.iter_mut().zip(from).for_each(|(t, f)| *t = bf16::from_f32(*f));
                });
            }
        }
        Ok(buffer)
    }
}

/// Weights `[n, k]` of `y = W x + b`.
pub struct Linear {
    n: usize,
    k: usize,
    weight: Weight,
    bias: Option<Vec<f32>>,
}

enum Weight {
    Bf16(Buffer<bf16>),
    Int8(MatrixLayout, Buffer<u8>),
}

impl Linear {
    pub(super) fn new(weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Self> {
        let (n, k) = (weight.rows(), weight.cols());
        let weight = match bits {
            DenseBits::Bf16 => Weight::Bf16(Buffer::from_bf16(&weight)?),
            DenseBits::Int8 => {
                let group_size = largest_group_size(&[k]).ok_or_else(|| {
                    Error::Invalid(format!("a weight with rows of {k} numbers cannot be stored in groups of 32: use --dense bf16"))
                })?;
                let layout = MatrixLayout::new(n, k, Precision::Int8 { group_size })?;
                let mut packed = Buffer::zeros(layout.bytes())?;
                let rows = weight.to_f32();
                packed.par_chunks_mut(layout.tile_bytes()).zip(rows.par_chunks(TILE_ROWS * k)).for_each(|(tile, rows)| {
                    let layout = MatrixLayout { n: rows.len() / k, ..layout };
                    moebius_cache::quantize::quantize_matrix(&layout, rows, tile);
                });
                Weight::Int8(layout, packed)
            }
        };
        Ok(Self { n, k, weight, bias })
    }

    /// Bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Bf16(w) => 2 * w.len(),
            Weight::Int8(_, w) => w.len(),
        }
    }
}

/// What happens to the numbers already in the output.
#[derive(Clone, Copy)]
pub(super) enum Write {
    Set,
    Add,
}

/// Activations quantized for an INT8 weight; grows to the largest batch once.
#[derive(Default)]
pub(super) struct Quantized {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    rows: Vec<u32>,
}

impl Quantized {
    fn resize(&mut self, rows: usize, k: usize, group: usize) {
        self.codes.resize(rows * k, 0);
        self.scales.resize(rows * k / group, 0.0);
        self.sums.resize(rows * k / group, 0);
        self.rows.clear();
        self.rows.extend(0..rows as u32);
    }
}

/// The output of a linear op, written by all workers in disjoint columns.
struct Output<'a> {
    data: Shared<'a, f32>,
    cols: usize,
    bias: Option<&'a [f32]>,
    write: Write,
}

impl Output<'_> {
    /// Stores `values[i][r]`, a row of `stride` for each token from `first_token` on, in the columns from `col` on.
    fn store(&self, first_token: usize, col: usize, cols: usize, values: &[f32], stride: usize) {
        for (i, row) in values.chunks_exact(stride).enumerate() {
            let at = (first_token + i) * self.cols + col;
            // SAFETY: each worker has its own columns, so no two ranges overlap.
            #[allow(unsafe_code)]
            let out = unsafe { self.data.slice_mut(at..at + cols) };
            for (c, (o, v)) in out.iter_mut().zip(row).enumerate() {
                let y = v + self.bias.map_or(0.0, |b| b[col + c]);
                match self.write {
                    Write::Set => *o = y,
                    Write::Add => *o += y,
                }
            }
        }
    }
}

impl Cpu {
    pub(super) fn apply(&self, w: &Linear, x: &Tensor, out: &mut Tensor, write: Write) {
        assert_eq!((x.cols(), out.cols(), out.rows()), (w.k, w.n, x.rows()));
        let cols = out.cols();
        let output = Output { data: Shared::new(out.data_mut()), cols, bias: w.bias.as_deref(), write };
        match &w.weight {
            Weight::Bf16(weight) => self.apply_bf16(weight, w.n, w.k, x, &output),
            Weight::Int8(layout, packed) => self.apply_int8(layout, packed, x, &output),
        }
    }

    fn apply_bf16(&self, weight: &[bf16], n: usize, k: usize, x: &Tensor, output: &Output<'_>) {
        let kernel = self.kernel;
        self.team.run(&|worker| {
            let mut y = [0.0; ROWS * TOKENS];
            for first in (0..x.rows()).step_by(TOKENS) {
                let tokens = TOKENS.min(x.rows() - first);
                let mine = worker.share(n.div_ceil(SHARE));
                let end = n.min(mine.end * SHARE);
                for row in (mine.start * SHARE..end).step_by(ROWS) {
                    let rows = ROWS.min(end - row);
                    let y = &mut y[..tokens * rows];
                    let x = Rows::new(&x.data()[first * k..][..tokens * k], tokens, k);
                    kernel.dot_bf16(Rows::new(&weight[row * k..][..rows * k], rows, k), x, y);
                    output.store(first, row, rows, y, rows);
                }
            }
        });
    }

    fn apply_int8(&self, layout: &MatrixLayout, packed: &[u8], x: &Tensor, output: &Output<'_>) {
        let (k, group) = (layout.k, layout.precision.group_size().expect("an integer layout has groups"));
        let mut scratch = self.quantized.borrow_mut();
        scratch.resize(x.rows(), k, group);
        let Quantized { codes, scales, sums, rows } = &mut *scratch;
        let groups = k / group;
        for t in 0..x.rows() {
            self.kernel.quantize(
                x.row(t),
                group,
                &mut codes[t * k..][..k],
                &mut scales[t * groups..][..groups],
                &mut sums[t * groups..][..groups],
            );
        }
        let quantized = QuantizedRows { codes, scales, sums, k, group };
        let kernel = self.kernel;
        self.team.run(&|worker| {
            let mut y = [0.0; TILE_ROWS * TOKENS];
            for (block, rows) in rows.chunks(TOKENS).enumerate() {
                for tile in worker.share(layout.tiles()) {
                    let y = &mut y[..rows.len() * TILE_ROWS];
                    let bytes = &packed[tile * layout.tile_bytes()..][..layout.tile_bytes()];
                    kernel.packed_tile(layout, bytes, &quantized, rows, y);
                    let col = tile * TILE_ROWS;
                    output.store(block * TOKENS, col, TILE_ROWS.min(layout.n - col), y, TILE_ROWS);
                }
            }
        });
    }

    /// `out[t, h, out_at..] = W[h] x[t, h, x_at..]`, heads shared out over the workers.
    pub(super) fn apply_heads(&self, w: &Heads, x: &Tensor, x_at: usize, out: &mut Tensor, out_at: usize) {
        let (x_head, out_head, cols) = (x.cols() / w.heads, out.cols() / w.heads, out.cols());
        assert!(x.rows() == out.rows() && x_at + w.k <= x_head && out_at + w.n <= out_head);
        let output = Output { data: Shared::new(out.data_mut()), cols, bias: None, write: Write::Set };
        let units_per_head = w.n.div_ceil(ROWS);
        let kernel = self.kernel;
        self.team.run(&|worker| {
            let mut y = [0.0; ROWS * TOKENS];
            for unit in worker.share(w.heads * units_per_head) {
                let (head, row) = (unit / units_per_head, unit % units_per_head * ROWS);
                let rows = ROWS.min(w.n - row);
                let weight = &w.weight[(head * w.n + row) * w.k..][..rows * w.k];
                for first in (0..x.rows()).step_by(TOKENS) {
                    let tokens = TOKENS.min(x.rows() - first);
                    let y = &mut y[..tokens * rows];
                    let x_head = &x.data()[first * x.cols() + head * x_head + x_at..];
                    kernel.dot_bf16(Rows::new(weight, rows, w.k), Rows::strided(x_head, tokens, w.k, x.cols()), y);
                    output.store(first, head * out_head + out_at + row, rows, y, rows);
                }
            }
        });
    }
}
