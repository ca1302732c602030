//! Ops on rows: products over packed weights, and what needs a row alone.

use std::ops::Range;

use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::load::{Embedding, Heads, Linear};
use super::{Cpu, Numbers, PARALLEL, Scratch, Shortlister, lock};
use crate::Result;
use crate::backend::Dense;
use crate::backend::batch::Batch;
use crate::backend::tensor::{Shortlist, Tensor};
use crate::kernel::{ActivationRows, FORMS, Kernel, Rows, Start, chunk, chunks, form};
use crate::machine::workers::{Claimant, Claims, Cut, Shared};
use crate::model::{Activation, GateActivation};

/// Tiles that go through the kernel together.
const TILES: usize = 6;
/// Tokens that pass over them together, their results in L1.
pub(super) const TOKENS: usize = 64;
/// Numbers that a worker's results of those take.
pub(super) const RESULTS: usize = TOKENS * TILES * TILE_ROWS;
/// Half of a small L2.
const RUN_BYTES: usize = 512 << 10;

/// What happens to the numbers already in the output.
#[derive(Clone, Copy)]
enum Write {
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
    fn apply<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N], write: Write) {
        let (rows, k, kernel) = (x.rows(), x.cols(), self.kernel);
        let mut needed = [None; FORMS];
        let jobs = jobs.map(|(w, out)| {
            assert_eq!((w.layout.k, w.layout.n, rows), (k, out.cols(), out.rows()));
            needed[form(w.layout.precision)] = Some(w.layout.precision);
            let cols = out.cols();
            (w, Output { data: Shared::new(out.data_mut()), cols, bias: w.bias.as_deref(), write })
        });
        let total = jobs.iter().map(|(w, _)| w.layout.tiles()).sum();
        let mut activations = self.activations.borrow_mut();
        let mut needed = needed.into_iter();
        let prepared = activations.each_mut().map(|of| Some(of.start(kernel, needed.next().flatten()?, k, rows)));
        let prepare = |mine: Range<usize>| {
            for of in prepared.iter().flatten() {
                for i in mine.clone() {
                    let (t, inputs) = chunk(i, rows, k);
                    // SAFETY: each chunk is prepared by one worker, before the barrier.
                    #[allow(unsafe_code)]
                    unsafe {
                        of.put_inputs(kernel, t..t + 1, inputs.start, &x.row(t)[inputs]);
                    }
                }
            }
        };
        let alone = rows * k < PARALLEL;
        if alone {
            prepare(0..chunks(rows, k));
        }
        let (claims, scratch) = (Claims::default(), &self.scratch);
        self.team.run(&|worker| {
            let y = &mut lock(&scratch[worker.index]).values;
            if !alone {
                prepare(worker.share(chunks(rows, k)));
                worker.barrier();
            }
            let mut claimant = Claimant::new(worker.index);
            while let Some(run) = claims.next(&mut claimant, Cut::DEFAULT, worker.count, total) {
                let mut before = 0;
                for (w, output) in &jobs {
                    let tiles = w.layout.tiles();
                    let here = |tile: usize| tile.clamp(before, before + tiles) - before;
                    let of_this = here(run.start)..here(run.end);
                    before += tiles;
                    let weights = Tiles { layout: &w.layout, packed: &w.tiles, range: of_this };
                    let x = prepared[form(w.layout.precision)].as_ref().expect("each weight's form was prepared");
                    // SAFETY: after the barrier no worker writes rows.
                    #[allow(unsafe_code)]
                    let x = |tokens| unsafe { x.rows(tokens) };
                    multiply(kernel, weights, rows, x, y, |first, col, cols, y, stride| {
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
        let parts = if w.heads.is_multiple_of(self.team.working()) { 1 } else { layout.tiles().div_ceil(TILES) };
        let scratch = &self.scratch;
        self.team.run(&|worker| {
            let Scratch { values: y, activations, .. } = &mut *lock(&scratch[worker.index]);
            for unit in worker.share(w.heads * parts) {
                let (head, part) = (unit / parts, unit % parts);
                let tiles = layout.tiles() * part / parts..layout.tiles() * (part + 1) / parts;
                let packed = &w.tiles[head * layout.bytes()..][..layout.bytes()];
                for first in (0..rows).step_by(TOKENS) {
                    let tokens = TOKENS.min(rows - first);
                    let prepared = activations.start(kernel, layout.precision, layout.k, tokens);
                    for t in 0..tokens {
                        let x = &x.row(first + t)[head * x_head + x_at..][..layout.k];
                        // SAFETY: the scratch memory is this worker's own.
                        #[allow(unsafe_code)]
                        unsafe {
                            prepared.put(kernel, t..t + 1, x);
                        }
                    }
                    let x = |tokens| activations.rows(tokens);
                    let weights = Tiles { layout, packed, range: tiles.clone() };
                    multiply(kernel, weights, tokens, x, y, |from, col, cols, y, stride| {
                        output.store(first + from, head * out_head + out_at + col, cols, y, stride);
                    });
                }
            }
        });
    }
}

/// `out = activation(gate, up)`, all `[n]`.
pub(crate) fn activate(kernel: &dyn Kernel, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => kernel.silu_mul(gate, up, out),
        Activation::GeluTanh => kernel.gelu_mul(gate, up, out),
        Activation::ClampedSilu { limit } => kernel.clamped_silu_mul(gate, up, limit, out),
        Activation::SiluOfClamped { limit } => kernel.silu_of_clamped_mul(gate, up, limit, out),
        Activation::ClampedSwiglu { limit, alpha } => kernel.clamped_swiglu(gate, up, limit, alpha, out),
        // Compared this way round, NaN stays.
        Activation::ReluSquared => out.iter_mut().zip(up).for_each(|(out, &up)| {
            let x = if up < 0.0 { 0.0 } else { up };
            *out = x * x;
        }),
    }
}

impl Dense for Cpu {
    type Shortlister = Shortlister;

    fn embed(&self, embedding: &Embedding, batch: &Batch, width: usize, out: &mut Tensor) {
        self.each_row(out, |t, out, _| {
            let row = &embedding.0[batch.tokens[t] as usize * width..][..width];
            for out in out.chunks_exact_mut(width) {
                out.iter_mut().zip(row).for_each(|(o, w)| *o = w.to_f32());
            }
        });
    }

    fn rms_norm(&self, x: &Tensor, w: &Vec<f32>, eps: f32, out: &mut Tensor) {
        assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()));
        let kernel = self.kernel;
        self.each_row(out, |t, out, _| kernel.rms_norm(x.row(t), w, eps, out));
    }

    fn layer_norm(&self, x: &Tensor, w: &Vec<f32>, eps: f32, out: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(out, |t, out, scratch| {
            let centred = scratch.values.take(w.len());
            let mean = x.row(t).iter().sum::<f32>() / w.len() as f32;
            centred.iter_mut().zip(x.row(t)).for_each(|(to, x)| *to = x - mean);
            kernel.rms_norm(centred, w, eps, out);
        });
    }

    fn rms_norm_heads(&self, x: &mut Tensor, w: &Vec<f32>, eps: f32, cols: Range<usize>) {
        let kernel = self.kernel;
        self.each_row(x, |_, row, scratch| {
            let scratch = scratch.values.take(w.len());
            for part in row[cols.clone()].chunks_exact_mut(w.len()) {
                scratch.copy_from_slice(part);
                kernel.rms_norm(scratch, w, eps, part);
            }
        });
    }

    fn linears<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N]) {
        self.apply(x, jobs, Write::Set);
    }

    fn linear_add(&self, w: &Linear, x: &Tensor, out: &mut Tensor) {
        self.apply(x, [(w, out)], Write::Add);
    }

    fn linear_groups(&self, w: &Heads, x: &Tensor, out: &mut Tensor) {
        self.apply_heads(w, x, 0, out, 0);
    }

    fn activate(&self, activation: Activation, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(out, |t, out, _| activate(kernel, activation, gate.row(t), up.row(t), out));
    }

    fn gate(&self, gate: &Tensor, activation: GateActivation, x: &mut Tensor) {
        let (kernel, each) = (self.kernel, x.cols() / gate.cols());
        if (activation, each) == (GateActivation::Sigmoid, 1) {
            return self.each_row(x, |t, x, _| kernel.sigmoid_mul(gate.row(t), x));
        }
        let of = |gate: f32| match activation {
            GateActivation::Sigmoid => 1.0 / (1.0 + (-gate).exp()),
            // Above 20 it is its argument. Source: torch.nn.functional.softplus.
            GateActivation::Softplus if gate > 20.0 => gate,
            GateActivation::Softplus => gate.exp().ln_1p(),
        };
        self.each_row(x, |t, x, _| {
            x.chunks_exact_mut(each).zip(gate.row(t)).for_each(|(x, gate)| kernel.scale(x, of(*gate)));
        });
    }

    fn gate_rows(&self, w: &Vec<f32>, h: &Tensor, x: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, _| {
            let mut gate = [0.0];
            kernel.dot_f32(Rows::new(w, 1, w.len()), Rows::new(h.row(t), 1, w.len()), &mut gate);
            kernel.scale(x, 1.0 / (1.0 + (-gate[0]).exp()));
        });
    }

    fn scale(&self, x: &mut Tensor, factor: f32) {
        let kernel = self.kernel;
        self.each_number(x, |x| kernel.scale(x, factor));
    }

    fn softcap(&self, x: &mut Tensor, cap: f32) {
        self.each_number(x, |x| x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh()));
    }

    fn clear(&self, x: &mut Tensor) {
        x.data_mut().fill(0.0);
    }

    fn rounded(&self, x: &Tensor, out: &mut Tensor) {
        out.data_mut().copy_from_slice(x.data());
    }

    fn norm_add(&self, y: &Tensor, (w, eps): (&Vec<f32>, f32), scale: f32, x: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, scratch| {
            let normed = scratch.values.take(w.len());
            kernel.rms_norm(y.row(t), w, eps, normed);
            x.iter_mut().zip(&*normed).for_each(|(x, y)| *x = (*x + y) * scale);
        });
    }

    fn gather(&self, x: &Tensor, rows: &[usize], first: usize, out: &mut Tensor, at: usize) {
        for (i, &row) in rows.iter().enumerate() {
            out.row_mut(at + i).copy_from_slice(x.row(row - first));
        }
    }

    fn shortlister(&self, max_rows: usize, cols: usize) -> Result<Shortlister> {
        self.shortlister_of(max_rows, cols)
    }

    fn shortlist(
        &self,
        shortlister: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        self.list_largest(shortlister, logits, inverse_temperatures, out);
        Ok(())
    }
}

/// Some tiles of packed weights.
struct Tiles<'a> {
    layout: &'a MatrixLayout,
    packed: &'a [u8],
    range: Range<usize>,
}

/// Some tiles of packed weights times all tokens; `store(first token, column, columns, values, stride)` gets the
/// results, which pass through `y`.
fn multiply<'x>(
    kernel: &dyn Kernel,
    Tiles { layout, packed, range: tiles }: Tiles<'_>,
    tokens: usize,
    x: impl Fn(Range<usize>) -> ActivationRows<'x>,
    y: &mut Numbers,
    store: impl Fn(usize, usize, usize, &[f32], usize),
) {
    // Weights stay in L2 while tokens pass over them, and 64 tokens stay there while the weights do.
    let run = (RUN_BYTES / layout.tile_bytes() / TILES).max(1) * TILES;
    for from in tiles.clone().step_by(run) {
        let to = tiles.end.min(from + run);
        for first in (0..tokens).step_by(TOKENS) {
            let some = first..tokens.min(first + TOKENS);
            for tile in (from..to).step_by(TILES) {
                let end = to.min(tile + TILES);
                let stride = (end - tile) * TILE_ROWS;
                let y = y.take(some.len() * stride);
                let tiles = &packed[tile * layout.tile_bytes()..end * layout.tile_bytes()];
                kernel.matmul(layout, &tiles.into(), &x(some.clone()), Start::Zero, y);
                let col = tile * TILE_ROWS;
                store(first, col, stride.min(layout.n - col), y, stride);
            }
        }
    }
}
