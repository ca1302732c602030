//! Dense products: few tokens at the speed at which weights are read, many on tensor cores.

use std::sync::Arc;

use half::bf16;

use super::{CudaBackend, Tensor};
use crate::Result;
use crate::cuda::kernels::Argument;
use crate::cuda::{Address, Cuda, DeviceBuffer, TensorMap, launch};

/// Tokens up to which weights are multiplied as they are read.
pub(super) const FEW_TOKENS: usize = 8;

/// Tokens from which on Hopper's own instructions are faster, and a library may be.
pub(super) const MANY_TOKENS: usize = 128;

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

/// Of kernels/gemv.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct GemvJob {
    w: Address<bf16>,
    bias: Address<f32>,
    y: Address<u8>,
    w_batch: i64,
    y_batch: i64,
    n: i32,
    y_pitch: i32,
}

const NO_JOB: GemvJob =
    GemvJob { w: Address::NULL, bias: Address::NULL, y: Address::NULL, w_batch: 0, y_batch: 0, n: 0, y_pitch: 0 };

/// Of kernels/gemv.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemv {
    job: [GemvJob; 3],
    x: Address<bf16>,
    norm: Address<f32>,
    x_batch: i64,
    x_pitch: i32,
    tokens: i32,
    k: i32,
    k_warps: i32,
    eps: f32,
    independent: i32,
}

/// Of kernels/gemm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemm {
    x: Address<bf16>,
    w: Address<bf16>,
    y: Address<u8>,
    bias: Address<f32>,
    partial: Address<f32>,
    counters: Address<u32>,
    x_batch: i64,
    w_batch: i64,
    y_batch: i64,
    x_pitch: i32,
    y_pitch: i32,
    tokens: i32,
    n: i32,
    k: i32,
}

/// Of kernels/gemm_wgmma.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct GemmTma {
    x: TensorMap,
    w: TensorMap,
    y: Address<u8>,
    bias: Address<f32>,
    partial: Address<f32>,
    counters: Address<u32>,
    y_batch: i64,
    y_pitch: i32,
    tokens: i32,
    n: i32,
    k: i32,
}

// SAFETY: as below.
#[allow(unsafe_code)]
unsafe impl Argument for GemmTma {}
// SAFETY: the struct of the same name in the kernel's file has the same fields.
#[allow(unsafe_code)]
unsafe impl Argument for Gemv {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Argument for Gemm {}

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

/// What a product writes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Out {
    Bf16,
    F32,
    F32Add,
}

/// What a block of a product of many tokens makes.
struct Tile {
    m: usize, // tokens
    n: usize, // outputs
    /// Bytes of shared memory.
    shared: usize,
    /// By what they write, as [`Out`] counts.
    kernels: [&'static str; 3],
}

macro_rules! tile {
    ($m:literal, $n:literal, $shared:literal, $before:literal, $after:literal) => {
        Tile {
            m: $m,
            n: $n,
            shared: $shared,
            kernels: [
                concat!($before, "_bf16_set_", $after),
                concat!($before, "_f32_set_", $after),
                concat!($before, "_f32_add_", $after),
            ],
        }
    };
}

// Of kernels/gemm.cu, then of kernels/gemm_wgmma.cu.
static M32_N128: Tile = tile!(32, 128, 81_920, "gemm", "m32n128");
static M64_N64: Tile = tile!(64, 64, 65_536, "gemm", "m64n64");
static M64_N128: Tile = tile!(64, 128, 98_304, "gemm", "m64n128");
static M128_N128: Tile = tile!(128, 128, 98_304, "gemm", "m128n128");
static WGMMA_N64: Tile = tile!(128, 64, 99_456, "gemm_wgmma", "n64");
static WGMMA_N128: Tile = tile!(128, 128, 99_456, "gemm_wgmma", "n128");
static WGMMA_N256: Tile = tile!(128, 256, 197_760, "gemm_wgmma", "n256");

/// What a product of few tokens does besides.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Plain,
    /// `x` is the residual stream, to be normed with these weights and this epsilon.
    Norm(Address<f32>, f32),
    /// Two products become one: `silu(first) * second`.
    Gated,
}

impl CudaBackend {
    /// One product of any number of tokens.
    pub(super) fn product(&self, p: &Product) {
        if p.n.is_multiple_of(8) && p.tokens > FEW_TOKENS {
            return self.gemm(p);
        }
        // Tiles end at multiples of 8 outputs; an odd vocabulary is multiplied a few tokens at a time.
        let bytes = if p.out == Out::Bf16 { 2 } else { 4 };
        for first in (0..p.tokens).step_by(FEW_TOKENS) {
            let (x, y) = (p.x.add(first * p.x_pitch), p.y.add(first * p.y_pitch * bytes));
            self.gemv(&[Product { x, y, tokens: FEW_TOKENS.min(p.tokens - first), ..*p }], Form::Plain);
        }
    }

    /// Up to three products of one `x` of at most [`FEW_TOKENS`] rows.
    pub(super) fn gemv(&self, products: &[Product], form: Form) {
        let Some(first) = products.first() else { return };
        let mut job = [NO_JOB; 3];
        for (job, p) in job.iter_mut().zip(products) {
            *job = GemvJob {
                w: p.w,
                bias: p.bias,
                y: p.y,
                w_batch: p.w_batch as i64,
                y_batch: p.y_batch as i64,
                n: p.n as i32,
                y_pitch: p.y_pitch as i32,
            };
        }
        // Warps of a block that share the rows; measured on an H200.
        let k_warps = if first.k <= 256 { 4 } else { 8 };
        let rows = |p: &Product| p.n.div_ceil(128 / k_warps);
        let name = match (form, first.out) {
            (Form::Norm(..), _) => "gemv_norm_bf16_set",
            (Form::Gated, _) => "gemv_silu",
            (Form::Plain, Out::Bf16) => "gemv_bf16_set",
            (Form::Plain, Out::F32) => "gemv_f32_set",
            (Form::Plain, Out::F32Add) => "gemv_f32_add",
        };
        let (norm, eps) = if let Form::Norm(norm, eps) = form { (norm, eps) } else { (Address::NULL, 0.0) };
        let blocks = if let Form::Gated = form { rows(first) } else { products.iter().map(rows).sum() };
        let argument = Gemv {
            job,
            x: first.x,
            norm,
            x_batch: first.x_batch as i64,
            x_pitch: first.x_pitch as i32,
            tokens: first.tokens as i32,
            k: first.k as i32,
            k_warps: k_warps as i32,
            eps,
            independent: i32::from(self.cuda.take_independent()),
        };
        launch!(self.cuda, &self.cuda.compute, name, [blocks, first.batch, 1], 256, 0; argument);
    }

    fn gemm(&self, p: &Product) {
        if p.tokens >= MANY_TOKENS {
            if self.by_library(p) {
                return;
            }
            if self.cuda.info.has_wgmma() {
                return self.gemm_wgmma(p);
            }
        }
        // Measured on an H200.
        let tiles = |tile: &Tile| p.tokens.div_ceil(tile.m) * p.n.div_ceil(tile.n) * p.batch;
        let enough = self.cuda.info.multiprocessors;
        let tile = match p.tokens {
            ..=32 => &M32_N128,
            33..=256 => &M64_N64,
            _ if tiles(&M128_N128) >= enough => &M128_N128,
            _ => &M64_N128,
        };
        // Fewer tiles than that are cut along k.
        let all = tiles(tile);
        let splits = (2 * enough).div_ceil(all.max(1)).min(p.k / 512).clamp(1, 8);
        let splits = if all <= MAX_COUNTERS && splits * all * tile.m * tile.n <= PARTIAL { splits } else { 1 };
        let argument = Gemm {
            x: p.x,
            w: p.w,
            y: p.y,
            bias: p.bias,
            partial: self.workspace.partial.address(),
            counters: self.workspace.counters.address(),
            x_batch: p.x_batch as i64,
            w_batch: p.w_batch as i64,
            y_batch: p.y_batch as i64,
            x_pitch: p.x_pitch as i32,
            y_pitch: p.y_pitch as i32,
            tokens: p.tokens as i32,
            n: p.n as i32,
            k: p.k as i32,
        };
        let grid = [all / p.batch, splits, p.batch];
        launch!(self.cuda, &self.cuda.compute, tile.kernels[p.out as usize], grid, 128, tile.shared; argument);
    }

    /// With Hopper's own instructions.
    fn gemm_wgmma(&self, p: &Product) {
        // Measured on an H200: narrow tiles, cut along k, while there would be few; else wide ones.
        let (tiles, enough) =
            (|tile: &Tile| p.tokens.div_ceil(tile.m) * p.n.div_ceil(tile.n), self.cuda.info.multiprocessors);
        let tile = match () {
            () if tiles(&WGMMA_N64) * p.batch <= 2 * enough => &WGMMA_N64,
            () if p.n < 1024 => &WGMMA_N128,
            () => &WGMMA_N256,
        };
        let all = tiles(tile) * p.batch;
        let splits = if tile.n == 64 { enough.div_ceil(all).min(p.k / 512).clamp(1, 8) } else { 1 };
        let splits = if all <= MAX_COUNTERS && splits * all * tile.m * tile.n <= PARTIAL { splits } else { 1 };
        let map = |address: Address<bf16>, rows: usize, pitch: usize, step: usize| {
            let step = if p.batch == 1 { 8 } else { step };
            self.cuda.tensor_map(address, [p.k, rows, p.batch], [pitch, step])
        };
        let argument = GemmTma {
            x: map(p.x, p.tokens, p.x_pitch, p.x_batch),
            w: map(p.w, p.n, p.k, p.w_batch),
            y: p.y,
            bias: p.bias,
            partial: self.workspace.partial.address(),
            counters: self.workspace.counters.address(),
            y_batch: p.y_batch as i64,
            y_pitch: p.y_pitch as i32,
            tokens: p.tokens as i32,
            n: p.n as i32,
            k: p.k as i32,
        };
        // A block takes every so many-th tile, so that copies for its next one begin early.
        let blocks = tiles(tile).min((enough * if tile.n == 256 { 1 } else { 2 } / (splits * p.batch)).max(1));
        launch!(self.cuda, &self.cuda.compute, tile.kernels[p.out as usize], [blocks, splits, p.batch], 288, tile.shared; argument);
    }

    /// `y = W x` in f32, `W` the sum of three matrices `[n, k]`, one after the other.
    pub(super) fn gemm_split3(&self, x: &Tensor, parts: Address<bf16>, n: usize, y: Address<f32>) {
        let argument = Gemm {
            x: x.bf16(),
            w: parts,
            y: y.cast(),
            bias: Address::NULL,
            partial: Address::NULL,
            counters: Address::NULL,
            x_batch: 0,
            w_batch: 0,
            y_batch: 0,
            x_pitch: x.cols as i32,
            y_pitch: n as i32,
            tokens: x.rows as i32,
            n: n as i32,
            k: x.cols as i32,
        };
        let grid = [x.rows.div_ceil(64) * n.div_ceil(64), 1, 1];
        launch!(self.cuda, &self.cuda.compute, "gemm_split3_m64n64", grid, 128, 98_304; argument);
    }
}
