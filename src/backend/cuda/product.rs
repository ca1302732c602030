//! Dense products: few tokens at the speed at which weights are read, many on tensor cores.

use std::slice;
use std::sync::Arc;

use half::bf16;

use super::{CudaBackend, Tensor};
use crate::Result;
use crate::cuda::kernels::gemv::{GEMV_WARPS, HELD_BYTES, MAX_HELD, MAX_TOKENS, ROWS};
use crate::cuda::kernels::{self, Gemm, GemmTma, Gemv, Kernel, ProductJob, RankSum};
use crate::cuda::{ALONE, Address, Cuda, DeviceBuffer, launch};

/// Tokens up to which weights are multiplied as they are read.
pub(super) const FEW_TOKENS: usize = MAX_TOKENS;

/// Tokens up to which a norm is a part of the products behind it: of more it is faster by itself.
pub(super) const NORM_TOKENS: usize = 2;

/// Tokens from which on Hopper's own instructions are faster, and a library may be.
pub(super) const MANY_TOKENS: usize = 128;

/// Tokens up to which weights take the time of a product on tensor cores.
const WEIGHTS_DECIDE: usize = 64;

/// Products of one `x` that a launch takes.
pub(super) const JOBS: usize = 3;

/// What products that are cut along k leave and count. A library's products leave what they like in `partial`.
pub(super) struct Workspace {
    pub(super) partial: DeviceBuffer<f32>,
    counters: DeviceBuffer<u32>,
}

/// Tiles that may be cut.
const MAX_COUNTERS: usize = 4096;
/// f32 numbers of all parts of all cut tiles.
const PARTIAL: usize = 16 << 20;

impl Workspace {
    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        Ok(Self { partial: DeviceBuffer::new(cuda, PARTIAL)?, counters: DeviceBuffer::zeros(cuda, MAX_COUNTERS)? })
    }
}

const NO_JOB: ProductJob =
    ProductJob { w: Address::NULL, bias: Address::NULL, y: Address::NULL, w_batch: 0, y_batch: 0, n: 0, y_pitch: 0 };

/// One product, or one for each of `batch` heads.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) x: Address<bf16>,
    pub(super) x_pitch: usize,
    pub(super) x_batch: usize,
    pub(super) w: Address<bf16>,
    pub(super) w_batch: usize,
    pub(super) bias: Address<f32>,
    pub(super) y: Address<u8>,
    pub(super) y_pitch: usize,
    pub(super) y_batch: usize,
    pub(super) tokens: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
    pub(super) out: Out,
}

impl Product {
    fn job(&self) -> ProductJob {
        ProductJob {
            w: self.w,
            bias: self.bias,
            y: self.y,
            w_batch: self.w_batch as i64,
            y_batch: self.y_batch as i64,
            n: self.n as i32,
            y_pitch: self.y_pitch as i32,
        }
    }
}

/// The jobs of a launch, and the first product, which has what all share.
fn jobs(products: &[Product]) -> ([ProductJob; JOBS], &Product) {
    let shared = |p: &Product| (p.x.to_u64(), p.x_pitch, p.x_batch, p.tokens, p.k, p.batch, p.out);
    let first = &products[0];
    assert!(products.iter().all(|p| shared(p) == shared(first)), "a launch has one x, and writes one kind of numbers");
    let mut jobs = [NO_JOB; JOBS];
    jobs[..products.len()].iter_mut().zip(products).for_each(|(job, p)| *job = p.job());
    (jobs, first)
}

/// What a product writes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Out {
    Bf16,
    F32,
    F32Add,
}

/// Kernels whose blocks make the same tile, by what they write, as [`Out`] counts.
struct TileKernels<A>([Kernel<A>; 3]);

impl<A> TileKernels<A> {
    /// Tokens and outputs.
    fn size(&self) -> [usize; 2] {
        let [m, n, _] = self.0[0].tile;
        [m, n]
    }

    /// Tiles of some products.
    fn count(&self, products: &[Product]) -> usize {
        let [m, n] = self.size();
        products.iter().map(|p| p.tokens.div_ceil(m) * p.n.div_ceil(n) * p.batch).sum()
    }

    /// Parts that tiles are cut into along k: as many as wanted, while these are long and what they leave has room.
    fn splits(&self, products: &[Product], wanted: usize) -> usize {
        let (all, [m, n]) = (self.count(products), self.size());
        let splits = wanted.min(products[0].k / 512).clamp(1, 8);
        if all <= MAX_COUNTERS && splits * all * m * n <= PARTIAL { splits } else { 1 }
    }
}

static M32_N128: TileKernels<(Gemm,)> =
    TileKernels([kernels::gemm_bf16_set_m32n128, kernels::gemm_f32_set_m32n128, kernels::gemm_f32_add_m32n128]);
static M64_N64: TileKernels<(Gemm,)> =
    TileKernels([kernels::gemm_bf16_set_m64n64, kernels::gemm_f32_set_m64n64, kernels::gemm_f32_add_m64n64]);
static M64_N128: TileKernels<(Gemm,)> =
    TileKernels([kernels::gemm_bf16_set_m64n128, kernels::gemm_f32_set_m64n128, kernels::gemm_f32_add_m64n128]);
static M128_N128: TileKernels<(Gemm,)> =
    TileKernels([kernels::gemm_bf16_set_m128n128, kernels::gemm_f32_set_m128n128, kernels::gemm_f32_add_m128n128]);
static WGMMA_N64: TileKernels<(GemmTma,)> =
    TileKernels([kernels::gemm_wgmma_bf16_set_n64, kernels::gemm_wgmma_f32_set_n64, kernels::gemm_wgmma_f32_add_n64]);
static WGMMA_N128: TileKernels<(GemmTma,)> = TileKernels([
    kernels::gemm_wgmma_bf16_set_n128,
    kernels::gemm_wgmma_f32_set_n128,
    kernels::gemm_wgmma_f32_add_n128,
]);
static WGMMA_N256: TileKernels<(GemmTma,)> = TileKernels([
    kernels::gemm_wgmma_bf16_set_n256,
    kernels::gemm_wgmma_f32_set_n256,
    kernels::gemm_wgmma_f32_add_n256,
]);

/// What a product of few tokens does besides.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Plain,
    /// `x` is the residual stream, to be normed with these weights and this epsilon.
    Norm(Address<f32>, f32),
    /// Two products become one: `silu(first) * second`.
    Gated,
    /// What is written is the sum over all ranks; this one's is added to what was there, or stands over it.
    Summed {
        sum: RankSum,
        over: bool,
    },
}

impl CudaBackend {
    /// Up to [`JOBS`] products of one `x`, of any number of tokens, that write the same kind of numbers.
    pub(super) fn products(&self, products: &[Product]) {
        match products {
            [p, ..] if p.tokens <= FEW_TOKENS => self.gemv(products, Form::Plain),
            _ if products.iter().all(|p| p.n.is_multiple_of(8)) => self.gemm(products),
            _ => products.iter().for_each(|p| self.product(p)),
        }
    }

    /// One product of any number of tokens.
    pub(super) fn product(&self, p: &Product) {
        if p.n.is_multiple_of(8) && p.tokens > FEW_TOKENS {
            return self.gemm(slice::from_ref(p));
        }
        // Tiles end at multiples of 8 outputs; an odd vocabulary is multiplied a few tokens at a time.
        let bytes = if p.out == Out::Bf16 { 2 } else { 4 };
        for first in (0..p.tokens).step_by(FEW_TOKENS) {
            let (x, y) = (p.x.add(first * p.x_pitch), p.y.add(first * p.y_pitch * bytes));
            self.gemv(&[Product { x, y, tokens: FEW_TOKENS.min(p.tokens - first), ..*p }], Form::Plain);
        }
    }

    /// Up to [`JOBS`] products of one `x` of at most [`FEW_TOKENS`] rows.
    pub(super) fn gemv(&self, products: &[Product], form: Form) {
        let (job, first) = jobs(products);
        // Warps of a block that share the rows; measured on an H200.
        let k_warps = if first.k <= 256 { 4 } else { 8 };
        let rows = |p: &Product| p.n.div_ceil(GEMV_WARPS * ROWS / k_warps);
        // Each of the few blocks has a multiprocessor, and its memory, to itself.
        let info = &self.cuda.info;
        let held = first.k <= MAX_HELD
            && products.iter().map(rows).sum::<usize>() * first.batch <= info.multiprocessors
            && info.shared_bytes >= HELD_BYTES;
        let kernel = match (form, first.out) {
            (Form::Norm(..), _) => kernels::gemv_norm_bf16_set,
            (Form::Gated, _) => kernels::gemv_silu,
            (Form::Plain, Out::Bf16) => kernels::gemv_bf16_set,
            (Form::Plain, Out::F32) => kernels::gemv_f32_set,
            (_, Out::F32Add) if held => kernels::gemv_held_f32_add,
            (_, Out::F32Add) => kernels::gemv_f32_add,
            (Form::Summed { .. }, _) => panic!("ranks sum what is added to the residual stream"),
        };
        let independent = self.cuda.take_independent();
        let (norm, eps) = if let Form::Norm(norm, eps) = form { (norm, eps) } else { (Address::NULL, 0.0) };
        let (sum, over) = if let Form::Summed { sum, over } = form { (sum, over) } else { (ALONE, false) };
        assert!(!independent || sum.ranks == 1, "ranks have done the sum in front before they begin another");
        let blocks = if let Form::Gated = form { rows(first) } else { products.iter().map(rows).sum() };
        let argument = Gemv {
            job,
            x: first.x.cast(),
            norm,
            x_batch: first.x_batch as i64,
            x_pitch: first.x_pitch as i32,
            tokens: first.tokens as i32,
            k: first.k as i32,
            k_warps: k_warps as i32,
            eps,
            independent: i32::from(independent),
            over: i32::from(over),
            sum,
        };
        launch!(self.cuda, &self.cuda.compute, kernel, [blocks, first.batch, 1]; argument);
    }

    /// Up to [`JOBS`] products of one `x` on tensor cores.
    fn gemm(&self, products: &[Product]) {
        let (job, p) = jobs(products);
        if p.tokens >= MANY_TOKENS {
            // The library takes one at a time.
            if self.library.is_some() && products.len() > 1 {
                return products.iter().for_each(|p| self.product(p));
            }
            if self.by_library(p) {
                return;
            }
            if self.cuda.info.has_wgmma() {
                return self.gemm_wgmma(products);
            }
        }
        // Measured on an H200.
        let enough = self.cuda.info.multiprocessors;
        let tile = match p.tokens {
            ..=32 => &M32_N128,
            33..=256 => &M64_N64,
            _ if M128_N128.count(products) >= enough => &M128_N128,
            _ => &M64_N128,
        };
        // Fewer tiles than that are cut along k.
        let all = tile.count(products);
        let mut wanted = (2 * enough).div_ceil(all.max(1));
        if p.tokens <= WEIGHTS_DECIDE {
            // Blocks that run at once read weights as fast: parts that wait for a place only leave more sums.
            let at_once = enough * tile.0[0].blocks_at_once(&self.cuda.info);
            wanted = wanted.min(at_once / all.max(1));
        }
        let splits = tile.splits(products, wanted);
        let argument = Gemm {
            job,
            x: p.x,
            partial: self.workspace.partial.address(),
            counters: self.workspace.counters.address(),
            x_batch: p.x_batch as i64,
            x_pitch: p.x_pitch as i32,
            tokens: p.tokens as i32,
            k: p.k as i32,
        };
        let grid = [all / p.batch, splits, p.batch];
        launch!(self.cuda, &self.cuda.compute, tile.0[p.out as usize], grid; argument);
    }

    /// With Hopper's own instructions.
    fn gemm_wgmma(&self, products: &[Product]) {
        let (job, p) = jobs(products);
        // Measured on an H200: narrow tiles, cut along k, while there would be few; else wide ones.
        let enough = self.cuda.info.multiprocessors;
        let outputs: usize = products.iter().map(|p| p.n).sum();
        let (tile, blocks_at_once, cut) = match () {
            () if WGMMA_N64.count(products) <= 2 * enough => (&WGMMA_N64, 2 * enough, true),
            () if outputs < 1024 => (&WGMMA_N128, 2 * enough, false),
            () => (&WGMMA_N256, enough, false),
        };
        let all = tile.count(products);
        let splits = if cut { tile.splits(products, enough.div_ceil(all)) } else { 1 };
        let map = |address: Address<bf16>, rows: usize, pitch: usize, step: usize| {
            let step = if p.batch == 1 { 8 } else { step };
            self.cuda.tensor_map(address, [p.k, rows, p.batch], [pitch, step])
        };
        let map_of = |p: &Product| map(p.w, p.n, p.k, p.w_batch);
        let mut w = [map_of(p); JOBS];
        w.iter_mut().zip(products).skip(1).for_each(|(w, p)| *w = map_of(p));
        let argument = GemmTma {
            x: map(p.x, p.tokens, p.x_pitch, p.x_batch),
            w,
            job,
            partial: self.workspace.partial.address(),
            counters: self.workspace.counters.address(),
            tokens: p.tokens as i32,
            k: p.k as i32,
        };
        // A block takes every so many-th tile, so that copies for its next one begin early.
        let blocks = (all / p.batch).min((blocks_at_once / (splits * p.batch)).max(1));
        launch!(self.cuda, &self.cuda.compute, tile.0[p.out as usize], [blocks, splits, p.batch]; argument);
    }

    /// `y = W x` in f32, `W` the sum of three matrices `[n, k]`, one after the other.
    pub(super) fn gemm_split3(&self, x: &Tensor, parts: Address<bf16>, n: usize, y: Address<f32>) {
        let job = ProductJob { w: parts, y: y.cast(), n: n as i32, y_pitch: n as i32, ..NO_JOB };
        let argument = Gemm {
            job: [job, NO_JOB, NO_JOB],
            x: x.bf16(),
            partial: Address::NULL,
            counters: Address::NULL,
            x_batch: 0,
            x_pitch: x.cols as i32,
            tokens: x.rows as i32,
            k: x.cols as i32,
        };
        let kernel = kernels::gemm_split3_m64n64;
        let grid = [x.rows.div_ceil(kernel.tile[0]) * n.div_ceil(kernel.tile[1]), 1, 1];
        launch!(self.cuda, &self.cuda.compute, kernel, grid; argument);
    }
}
