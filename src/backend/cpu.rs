//! The CPU backend: a product for boxes without a GPU, and the oracle for those with one.

mod attention;
mod delta_net;
mod kv;
mod linear;
mod route;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;

use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::{HostTensor, Tensor};
use crate::backend::{Addition, Attend, DeltaRule, Dense, Load, Memory, Record, Recur, Route, Routing, Softmax};
use crate::config::{DenseBits, KvBits};
use crate::kernel::{Activations, Kernel, Rows};
use crate::machine::memory::Buffer;
use crate::machine::workers::{Shared, Team};
use crate::model::{self, Mla, Router};

pub use delta_net::{DeltaNet, State};
pub use kv::Kv;
use linear::Heads;
pub use linear::Linear;
#[cfg(feature = "cuda")]
pub(crate) use linear::packed;

/// Ops on host memory, run by a team of pinned workers.
pub struct Cpu {
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    // Scratch memory that grows to the largest batch once, so that a decode step does not allocate.
    activations: RefCell<Activations>,
    router_scratch: RefCell<Vec<f32>>, // [tokens, experts]
    partial: RefCell<Vec<f32>>,        // attention's sums of segments
    scratch: Vec<Mutex<Scratch>>,      // one per worker
}

/// f32 router weights `[experts, hidden]`, the bias of its logits and the bias for choosing.
pub struct RouterWeights {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    correction_bias: Option<Vec<f32>>,
}

/// `kv_b_proj` split for absorption.
pub struct LatentUp {
    key: Heads,   // per head [kv_lora_rank, nope]: moves a query into the latent's space
    value: Heads, // per head [v_head_dim, kv_lora_rank]: reads a value out of a latent
}

/// Latent attention in the latent's space.
pub struct LatentScratch {
    query: Tensor, // [T, heads, kv_lora_rank + rope]
    mixed: Tensor, // [T, heads, kv_lora_rank]
}

/// `[vocab, hidden]` bf16.
pub struct Embedding(Buffer<bf16>);

impl Cpu {
    /// A backend whose ops run on `team` with `kernel`.
    pub fn new(team: Arc<Team>, kernel: &'static dyn Kernel) -> Self {
        let scratch = (0..team.threads()).map(|_| Mutex::default()).collect();
        Self {
            team,
            kernel,
            activations: Default::default(),
            router_scratch: Default::default(),
            partial: Default::default(),
            scratch,
        }
    }
}

/// Numbers of a tensor below which an op on its rows is not worth waking the team for.
const PARALLEL: usize = 1 << 15;

impl Cpu {
    /// `work(t, row t of out, scratch)` for every row, on all workers if there is much to do.
    fn each_row(&self, out: &mut Tensor, work: impl Fn(usize, &mut [f32], &mut Scratch) + Sync) {
        let (rows, cols) = (out.rows(), out.cols());
        if rows == 1 || rows * cols < PARALLEL {
            let mut scratch = lock(&self.scratch[0]);
            return (0..rows).for_each(|t| work(t, out.row_mut(t), &mut scratch));
        }
        let (shared, scratch) = (Shared::new(out.data_mut()), &self.scratch);
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            for t in worker.share(rows) {
                // SAFETY: a row is in one worker's share.
                #[allow(unsafe_code)]
                let row = unsafe { shared.slice_mut(t * cols..(t + 1) * cols) };
                work(t, row, &mut scratch);
            }
        });
    }
}

impl Cpu {
    /// Copies columns `[x_at, x_at + width)` of each head of `x` to `out_at` of each head of `out`.
    fn copy_heads(&self, num_heads: usize, width: usize, x: &Tensor, x_at: usize, out: &mut Tensor, out_at: usize) {
        assert_eq!(x.rows(), out.rows());
        let (from, to) = (x.cols() / num_heads, out.cols() / num_heads);
        self.each_row(out, |t, out, _| {
            for (x, out) in x.row(t).chunks_exact(from).zip(out.chunks_exact_mut(to)) {
                out[out_at..][..width].copy_from_slice(&x[x_at..][..width]);
            }
        });
    }
}

/// Memory whose contents last for one op; it only grows.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    activations: Activations,
    // Attention's own.
    row: Vec<f32>,
    scores: Vec<f32>,
    probabilities: Activations,
}

/// `len` numbers of memory that only grows, whatever they are, from the boundary of a cache line on: AMX takes twice as
/// long elsewhere.
fn take(memory: &mut Vec<f32>, len: usize) -> &mut [f32] {
    const LINE: usize = 16;
    if memory.len() < len + LINE {
        memory.resize(len + LINE, 0.0);
    }
    let first = memory.as_ptr().align_offset(LINE * size_of::<f32>());
    &mut memory[first..first + len]
}

/// A worker's own scratch memory; nobody else ever holds it.
fn lock(scratch: &Mutex<Scratch>) -> MutexGuard<'_, Scratch> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory for Cpu {
    type Batch = Batch;
    type Tensor = Tensor;
    type Host = Vec<f32>;

    fn batch(&self, _max_tokens: usize) -> Result<Batch> {
        Ok(Batch::default())
    }

    fn set_batch(&self, to: &mut Batch, batch: &Batch) {
        to.clone_from(batch);
    }

    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        Ok(Tensor::new(max_rows, cols))
    }

    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        self.tensor(max_rows, cols)
    }

    fn set_rows(&self, t: &mut Tensor, rows: usize) {
        t.set_rows(rows);
    }

    fn host(&self, numbers: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; numbers])
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

impl Load for Cpu {
    type Linear = Linear;
    type LatentUp = LatentUp;
    type DeltaNet = DeltaNet;
    type Norm = Vec<f32>;
    type Router = RouterWeights;
    type Embedding = Embedding;

    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Linear> {
        Linear::new(weight, bias, bits, self.team.nodes())
    }

    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<LatentUp> {
        let (heads, nope) = (config.num_heads, config.qk_nope_head_dim);
        Ok(LatentUp {
            key: Heads::new(heads, kv_b.head_rows(heads, 0, nope).transpose_heads(heads), self.team.nodes())?,
            value: Heads::new(heads, kv_b.head_rows(heads, nope, nope + config.v_head_dim), self.team.nodes())?,
        })
    }

    fn load_delta_net(&self, config: &model::DeltaNet, rule: DeltaRule) -> Result<DeltaNet> {
        Ok(DeltaNet::new(config, rule))
    }

    fn load_norm(&self, weight: Vec<f32>) -> Result<Vec<f32>> {
        Ok(weight)
    }

    fn load_router(
        &self,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        correction_bias: Option<Vec<f32>>,
    ) -> Result<RouterWeights> {
        Ok(RouterWeights { weight, bias, correction_bias })
    }

    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<Embedding> {
        Ok(Embedding(Buffer::from_bf16(&weight)?))
    }

    fn linear_bytes(&self, w: &Linear) -> usize {
        w.bytes()
    }

    fn latent_up_bytes(&self, w: &LatentUp) -> usize {
        w.key.bytes() + w.value.bytes()
    }
}

impl Dense for Cpu {
    type Shortlister = ();

    fn embed(&self, embedding: &Embedding, batch: &Batch, out: &mut Tensor) {
        self.each_row(out, |t, out, _| {
            let row = &embedding.0[batch.tokens[t] as usize * out.len()..][..out.len()];
            for (o, w) in out.iter_mut().zip(row) {
                *o = w.to_f32();
            }
        });
    }

    fn rms_norm(&self, x: &Tensor, w: &Vec<f32>, eps: f32, out: &mut Tensor) {
        assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()));
        let kernel = self.kernel;
        self.each_row(out, |t, out, _| kernel.rms_norm(x.row(t), w, eps, out));
    }

    fn rms_norm_heads(&self, x: &mut Tensor, w: &Vec<f32>, eps: f32, cols: Range<usize>) {
        let kernel = self.kernel;
        self.each_row(x, |_, row, scratch| {
            let scratch = take(&mut scratch.values, w.len());
            for part in row[cols.clone()].chunks_exact_mut(w.len()) {
                scratch.copy_from_slice(part);
                kernel.rms_norm(scratch, w, eps, part);
            }
        });
    }

    fn linears<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N]) {
        self.apply(x, jobs, linear::Write::Set);
    }

    fn linear_add(&self, w: &Linear, x: &Tensor, out: &mut Tensor) {
        self.apply(x, [(w, out)], linear::Write::Add);
    }

    fn silu_mul(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(out, |t, out, _| kernel.silu_mul(gate.row(t), up.row(t), out));
    }

    fn sigmoid_mul(&self, gate: &Tensor, x: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, _| kernel.sigmoid_mul(gate.row(t), x));
    }

    fn gate_rows(&self, w: &Vec<f32>, h: &Tensor, x: &mut Tensor) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, _| {
            let mut gate = [0.0];
            kernel.dot_f32(Rows::new(w, 1, w.len()), Rows::new(h.row(t), 1, w.len()), &mut gate);
            kernel.scale(x, 1.0 / (1.0 + (-gate[0]).exp()));
        });
    }

    fn gather(&self, x: &Tensor, rows: &[usize], first: usize, out: &mut Tensor, at: usize) {
        for (i, &row) in rows.iter().enumerate() {
            out.row_mut(at + i).copy_from_slice(x.row(row - first));
        }
    }

    fn shortlister(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}

impl Attend for Cpu {
    type Kv = Kv;
    type LatentScratch = LatentScratch;

    fn kv(&self, blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Kv> {
        Kv::new(blocks, heads, key_dim, value_dim, bits)
    }

    fn rope_angles(&self, inv_freq: &Vec<f32>, factor: f32, batch: &Batch, out: &mut Tensor) {
        let half = inv_freq.len();
        for (t, &position) in batch.positions.iter().enumerate() {
            let (cos, sin) = out.row_mut(t).split_at_mut(half);
            for i in 0..half {
                let angle = position as f32 * inv_freq[i];
                (cos[i], sin[i]) = (angle.cos() * factor, angle.sin() * factor);
            }
        }
    }

    fn rope(&self, x: &mut Tensor, head_dim: usize, at: usize, interleaved: bool, angles: &Tensor) {
        let half = angles.cols() / 2;
        let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        self.each_row(x, |t, row, _| {
            let (cos, sin) = angles.row(t).split_at(half);
            for head in row.chunks_exact_mut(head_dim) {
                let part = &mut head[at..at + 2 * half];
                if interleaved {
                    for ([a, b], (cos, sin)) in part.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin)) {
                        turn(a, b, *cos, *sin);
                    }
                } else {
                    let (first, second) = part.split_at_mut(half);
                    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                        turn(a, b, *cos, *sin);
                    }
                }
            }
        });
    }

    fn kv_write(&self, kv: &mut Kv, batch: &Batch, key: &Tensor, value: Option<&Tensor>) {
        self.store(kv, batch, key, value);
    }

    fn attend(
        &self,
        kv: &Kv,
        batch: &Batch,
        num_heads: usize,
        softmax: &Softmax<'_, Self>,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        self.attend_tiles(kv, batch, num_heads, softmax, q, out);
    }

    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<LatentScratch> {
        Ok(LatentScratch {
            query: self.tensor(max_tokens, config.num_heads * config.cache_dim())?,
            mixed: self.tensor(max_tokens, config.num_heads * config.kv_lora_rank)?,
        })
    }

    fn attend_latent(
        &self,
        kv: &Kv,
        batch: &Batch,
        config: &Mla,
        up: &LatentUp,
        LatentScratch { query, mixed }: &mut LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        query.set_rows(q.rows());
        mixed.set_rows(q.rows());
        // Absorbed, whatever the number of tokens: one way of computing, hence equal bits.
        self.apply_heads(&up.key, q, 0, query, 0);
        self.copy_heads(
            config.num_heads,
            config.qk_rope_head_dim,
            q,
            config.qk_nope_head_dim,
            query,
            config.kv_lora_rank,
        );
        self.attend_tiles(
            kv,
            batch,
            config.num_heads,
            &Softmax { scale: config.scale, window: None, sinks: None },
            query,
            mixed,
        );
        self.apply_heads(&up.value, mixed, 0, out, 0);
    }
}

impl Recur for Cpu {
    type State = State;
    type DeltaScratch = ();

    fn state(&self, slots: usize, config: &model::DeltaNet) -> Result<State> {
        State::new(slots, config)
    }

    fn delta_scratch(&self, _: &model::DeltaNet, _: usize) -> Result<()> {
        Ok(())
    }

    fn delta_net(
        &self,
        state: &mut State,
        batch: &Batch,
        config: (&model::DeltaNet, f32),
        w: &DeltaNet,
        (): &mut (),
        h: &Tensor,
        (qkv, z): (&Tensor, &Tensor),
        out: &mut Tensor,
    ) {
        self.run_delta_net(state, batch, config, w, h, (qkv, z), out);
    }
}

impl Route for Cpu {
    type Routing = Routing;

    fn routing(&self, _max_tokens: usize, _top_k: usize) -> Result<Routing> {
        Ok(Routing::default())
    }

    fn read_routing(&self, routing: &Routing, out: &mut Routing) -> Result<()> {
        out.clone_from(routing);
        Ok(())
    }

    fn route(&self, w: &RouterWeights, router: &Router, x: &Tensor, out: &mut Routing) {
        self.choose(w, router, x, out);
    }
}

impl Record for Cpu {
    type Additions = Vec<Addition<Vec<f32>>>;

    fn additions(&self, _layers: usize) -> Result<Vec<Addition<Vec<f32>>>> {
        Ok(Vec::new())
    }

    fn set_additions(&self, to: &mut Vec<Addition<Vec<f32>>>, mut additions: Vec<Addition<Vec<f32>>>) -> Result<()> {
        additions.sort_by_key(|addition| addition.layer); // stable: of a layer they stay in order
        *to = additions;
        Ok(())
    }

    fn add_vectors(&self, additions: &Vec<Addition<Vec<f32>>>, layer: usize, first: usize, x: &mut Tensor) {
        let from = additions.partition_point(|addition| addition.layer < layer);
        let additions = &additions[from..additions.partition_point(|addition| addition.layer <= layer)];
        if additions.is_empty() {
            return;
        }
        self.each_row(x, |t, row, _| {
            for Addition { vector, coefficient, .. } in
                additions.iter().filter(|addition| addition.rows.contains(&(first + t)))
            {
                row.iter_mut().zip(&**vector).for_each(|(x, v)| *x += coefficient * v);
            }
        });
    }
}
