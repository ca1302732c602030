//! Weights in host memory and `y = W x + b` over them.

use std::ops::Range;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};
use rayon::prelude::*;

use super::{Cpu, PARALLEL, Scratch, lock, take};
use crate::backend::tensor::{HostTensor, Tensor};
use crate::config::DenseBits;
use crate::kernel::{ActivationRows, Kernel, Start};
use crate::machine::memory::Buffer;
use crate::machine::workers::{Claims, Cut, Shared};
use crate::{Error, Result};

/// Tiles that go through the kernel together.
const TILES: usize = 6;
/// Tokens that pass over them together, their results in L1.
const TOKENS: usize = 64;
/// Half of a small L2.
const RUN_BYTES: usize = 512 << 10;

impl Buffer<bf16> {
    /// Copies a weight, rounding f32 to bf16.
    pub(super) fn from_bf16(weight: &HostTensor<'_>) -> Result<Self> {
        const CHUNK: usize = 1 << 18;
        let mut buffer = Self::zeros(weight.rows() * weight.cols())?;
        match weight {
            HostTensor::Bf16 { data, .. } => {
                buffer
                    .par_chunks_mut(CHUNK)
                    .zip(data.par_chunks(CHUNK))
                    .for_each(|(to, from)| to.copy_from_slice(from));
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

/// Packed weights `[n, k]` of `y = W x + b`.
pub struct Linear {
    layout: MatrixLayout,
    tiles: Buffer<u8>,
    bias: Option<Vec<f32>>,
}

impl Linear {
    pub(super) fn new(
        weight: HostTensor<'_>,
        bias: Option<Vec<f32>>,
        bits: DenseBits,
        nodes: &[usize],
    ) -> Result<Self> {
        let (n, k) = (weight.rows(), weight.cols());
        let why = || {
            Error::Invalid(format!(
                "a weight with rows of {k} numbers cannot be stored in groups of 32: use --dense bf16"
            ))
        };
        let layout = MatrixLayout::new(n, k, bits.precision(k).ok_or_else(why)?)?;
        let mut tiles = interleaved(layout.bytes(), nodes)?;
        pack(&layout, &weight, 0, &mut tiles);
        Ok(Self { layout, tiles, bias })
    }

    /// Bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        self.tiles.len()
    }
}

/// Room for weights that any worker may read: from all nodes' memory in turn, so that each step uses every node's
/// bandwidth.
fn interleaved(bytes: usize, nodes: &[usize]) -> Result<Buffer<u8>> {
    let buffer = Buffer::zeros(bytes)?;
    if nodes.len() > 1 {
        // Refused in some containers: pages then lie where they are first written.
        let _ = buffer.interleave(nodes);
    }
    Ok(buffer)
}

/// A whole matrix, packed on all cores.
pub(crate) fn packed(layout: &MatrixLayout, weight: &HostTensor<'_>) -> Vec<u8> {
    let mut tiles = vec![0; layout.bytes()];
    pack(layout, weight, 0, &mut tiles);
    tiles
}

/// Packs the matrix that begins at row `first` of `weight` on all cores; of other forms than packed there is a tile at
/// a time.
fn pack(layout: &MatrixLayout, weight: &HostTensor<'_>, first: usize, tiles: &mut [u8]) {
    tiles.par_chunks_mut(layout.tile_bytes()).enumerate().for_each(|(i, tile)| {
        let (from, to) = (i * TILE_ROWS, layout.n.min((i + 1) * TILE_ROWS));
        let layout = MatrixLayout { n: to - from, ..*layout };
        moebius_cache::quantize::quantize_matrix(&layout, &weight.rows_to_f32(first + from..first + to), tile);
    });
}

/// Packed weights `[heads, n, k]`, each head with tiles of its own.
pub(super) struct Heads {
    heads: usize,
    layout: MatrixLayout, // of one head
    tiles: Buffer<u8>,
}

impl Heads {
    pub(super) fn new(heads: usize, weight: HostTensor<'_>, nodes: &[usize]) -> Result<Self> {
        let layout = MatrixLayout::new(weight.rows() / heads, weight.cols(), Precision::Bf16)?;
        let mut tiles = interleaved(heads * layout.bytes(), nodes)?;
        for (head, tiles) in tiles.chunks_exact_mut(layout.bytes()).enumerate() {
            pack(&layout, &weight, head * layout.n, tiles);
        }
        Ok(Self { heads, layout, tiles })
    }

    /// Bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        self.tiles.len()
    }
}

/// What happens to the numbers already in the output.
#[derive(Clone, Copy)]
pub(super) enum Write {
    Set,
    Add,
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
            match (self.write, self.bias) {
                (Write::Set, None) => out.copy_from_slice(&row[..cols]),
                (Write::Set, Some(bias)) => {
                    out.iter_mut().zip(row).zip(&bias[col..]).for_each(|((o, v), b)| *o = v + b);
                }
                (Write::Add, None) => out.iter_mut().zip(row).for_each(|(o, v)| *o += v),
                (Write::Add, Some(bias)) => {
                    out.iter_mut().zip(row).zip(&bias[col..]).for_each(|((o, v), b)| *o += v + b);
                }
            }
        }
    }
}

impl Cpu {
    /// `out = W x + b` or `out += W x + b` for some weights and one `x`, in one dispatch.
    pub(super) fn apply<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N], write: Write) {
        let (rows, k, kernel) = (x.rows(), x.cols(), self.kernel);
        let precision = jobs[0].0.layout.precision;
        let jobs = jobs.map(|(w, out)| {
            assert_eq!((w.layout.k, w.layout.precision, w.layout.n, rows), (k, precision, out.cols(), out.rows()));
            let cols = out.cols();
            (w, Output { data: Shared::new(out.data_mut()), cols, bias: w.bias.as_deref(), write })
        });
        let total = jobs.iter().map(|(w, _)| w.layout.tiles()).sum();
        let mut activations = self.activations.borrow_mut();
        let prepared = activations.start(kernel, precision, k, rows);
        // SAFETY: each row is prepared by one worker, before the barrier.
        #[allow(unsafe_code)]
        let prepare = |mine: Range<usize>| mine.for_each(|t| unsafe { prepared.put(kernel, t..t + 1, x.row(t)) });
        let alone = rows * k < PARALLEL;
        if alone {
            prepare(0..rows);
        }
        let (claims, scratch) = (Claims::default(), &self.scratch);
        self.team.run(&|worker| {
            let y = &mut lock(&scratch[worker.index]).values;
            if !alone {
                prepare(worker.share(rows));
                worker.barrier();
            }
            // SAFETY: after the barrier nobody writes rows.
            #[allow(unsafe_code)]
            let x = |tokens| unsafe { prepared.rows(tokens) };
            while let Some(run) = claims.next(Cut::DEFAULT, worker.count, total) {
                let mut before = 0;
                for (w, output) in &jobs {
                    let tiles = w.layout.tiles();
                    let here = |tile: usize| tile.clamp(before, before + tiles) - before;
                    let of_this = here(run.start)..here(run.end);
                    before += tiles;
                    multiply(kernel, &w.layout, &w.tiles, of_this, rows, x, y, |first, col, cols, y, stride| {
                        output.store(first, col, cols, y, stride)
                    });
                }
            }
        });
    }

    /// `out[t, h, out_at..] = W[h] x[t, h, x_at..]`, heads, or parts of them if there are few, shared out over the
    /// workers.
    pub(super) fn apply_heads(&self, w: &Heads, x: &Tensor, x_at: usize, out: &mut Tensor, out_at: usize) {
        let (layout, rows, kernel) = (&w.layout, x.rows(), self.kernel);
        let (x_head, out_head, cols) = (x.cols() / w.heads, out.cols() / w.heads, out.cols());
        assert!(rows == out.rows() && x_at + layout.k <= x_head && out_at + layout.n <= out_head);
        let output = Output { data: Shared::new(out.data_mut()), cols, bias: None, write: Write::Set };
        let parts = if w.heads.is_multiple_of(self.team.threads()) { 1 } else { layout.tiles().div_ceil(TILES) };
        let scratch = &self.scratch;
        self.team.run(&|worker| {
            let Scratch { values: y, activations, .. } = &mut *lock(&scratch[worker.index]);
            for unit in worker.share(w.heads * parts) {
                let (head, part) = (unit / parts, unit % parts);
                let tiles = layout.tiles() * part / parts..layout.tiles() * (part + 1) / parts;
                let weights = &w.tiles[head * layout.bytes()..][..layout.bytes()];
                for first in (0..rows).step_by(TOKENS) {
                    let tokens = TOKENS.min(rows - first);
                    let prepared = activations.start(kernel, Precision::Bf16, layout.k, tokens);
                    for t in 0..tokens {
                        let x = &x.row(first + t)[head * x_head + x_at..][..layout.k];
                        // SAFETY: the scratch memory is this worker's own.
                        #[allow(unsafe_code)]
                        unsafe {
                            prepared.put(kernel, t..t + 1, x);
                        }
                    }
                    let x = |tokens| activations.rows(tokens);
                    multiply(kernel, layout, weights, tiles.clone(), tokens, x, y, |from, col, cols, y, stride| {
                        output.store(first + from, head * out_head + out_at + col, cols, y, stride);
                    });
                }
            }
        });
    }
}

/// Some tiles of packed weights times all tokens; `store(first token, column, columns, values, stride)` gets the
/// results, which pass through `y`.
#[allow(clippy::too_many_arguments)]
fn multiply<'x>(
    kernel: &dyn Kernel,
    layout: &MatrixLayout,
    packed: &[u8],
    tiles: Range<usize>,
    tokens: usize,
    x: impl Fn(Range<usize>) -> ActivationRows<'x>,
    y: &mut Vec<f32>,
    store: impl Fn(usize, usize, usize, &[f32], usize),
) {
    // Weights stay in L2 while tokens pass over them, and 64 tokens stay there while the weights do.
    let run = (RUN_BYTES / layout.tile_bytes()).max(TILES);
    for from in tiles.clone().step_by(run) {
        let to = tiles.end.min(from + run);
        for first in (0..tokens).step_by(TOKENS) {
            let some = first..tokens.min(first + TOKENS);
            for tile in (from..to).step_by(TILES) {
                let end = to.min(tile + TILES);
                let stride = (end - tile) * TILE_ROWS;
                let y = take(y, some.len() * stride);
                let tiles = &packed[tile * layout.tile_bytes()..end * layout.tile_bytes()];
                kernel.matmul(layout, &tiles.into(), &x(some.clone()), Start::Zero, y);
                let col = tile * TILE_ROWS;
                store(first, col, stride.min(layout.n - col), y, stride);
            }
        }
    }
}
