//! The CUDA backend: every op as one or two kernels on the compute stream.
//!
//! The residual stream, angles and logits are f32, everything else between ops is bf16. Ops do not wait; `read` does.
//! What changes from step to step of decode (tokens, positions, block tables, additions) is read from device memory at
//! fixed addresses, so that a recorded pass can be launched again.

mod additions;
mod attention;
mod attention_wgmma;
mod batch;
mod delta_net;
mod library;
mod linear;
mod measure;
pub mod packed;
mod shortlist;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::backend::batch::Batch;
use crate::backend::tensor::{HostTensor, Shortlist};
use crate::backend::{Addition, Backend, DeltaRule, Form, Heads, OpTime, Rates, Routing, Softmax};
use crate::config::{DenseBits, KvBits};
use crate::cuda::cublas_lt::CublasLt;
use crate::cuda::{Address, Cuda, DeviceBuffer, Graph, PinnedBuffer, launch};
use crate::model::{DeltaNet, GroupScore, Mla, Router, Scoring};
use crate::{Error, Result};

pub use additions::Additions;
pub use attention::{Kv, LatentScratch, LatentUp};
pub use batch::CudaBatch;
pub use delta_net::{DeltaScratch, Rule, State};
pub use library::ProductRates;
pub use linear::Linear;
pub use shortlist::Shortlister;

/// Threads of a block that works on one row.
const ROW_THREADS: u32 = 256;

/// Tokens up to which a pass of one token per sequence is recorded.
const RECORDED_TOKENS: usize = 64;

/// What the backend allocates for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Positions of a sequence.
    pub context: usize,
    /// Entries of all block tables of a batch.
    pub table: usize,
}

/// Ops on one GPU.
pub struct CudaBackend {
    cuda: Arc<Cuda>,
    limits: Limits,
    workspace: linear::Workspace,
    library: Option<CublasLt>, // what multiplies many tokens, if not our own kernels
    attention: attention::Workspace,
    graphs: RefCell<HashMap<Form, Recorded>>,
    gather_rows: DeviceBuffer<u32>,
    staged_rows: RefCell<Vec<u32>>, // what goes there
}

/// Where a form of pass is on its way to being recorded.
enum Recorded {
    /// It has run once op by op, which allocated and loaded whatever it needs.
    Warm,
    Graph(Graph),
}

/// Activations `[rows, cols]`.
pub struct Tensor {
    data: Data,
    rows: usize,
    cols: usize,
}

enum Data {
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

    fn max_rows(&self) -> usize {
        let len = match &self.data {
            Data::F32(buffer) => buffer.len(),
            Data::Bf16(buffer) => buffer.len(),
        };
        len / self.cols
    }
}

/// Experts and weights of every token, on the device.
pub struct CudaRouting {
    ids: DeviceBuffer<i32>,     // [tokens, top_k]
    weights: DeviceBuffer<f32>, // [tokens, top_k]
    tokens: usize,
    top_k: usize,
    logits: DeviceBuffer<f32>,  // [tokens, experts]
    counter: DeviceBuffer<u32>, // of blocks that have ended
}

impl CudaRouting {
    /// Experts of each token, `[tokens, top_k]`; below 0: none.
    pub fn ids(&self) -> Address<i32> {
        self.ids.address()
    }

    /// The same on the host. Waits for the device.
    pub fn read_ids(&self, out: &mut Vec<i32>) -> Result<()> {
        out.resize(self.tokens * self.top_k, 0);
        self.ids.read(out)
    }

    /// Their weights.
    pub fn weights(&self) -> Address<f32> {
        self.weights.address()
    }

    /// Tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }
}

/// Router weights, the bias of the logits and the bias for choosing.
pub struct RouterWeights {
    weight: DeviceBuffer<f32>, // [experts, hidden]
    parts: DeviceBuffer<bf16>, // [3, experts, hidden]: their sum is `weight`
    bias: Option<DeviceBuffer<f32>>,
    correction_bias: Option<DeviceBuffer<f32>>,
}

/// Where a bias lies, if there is one.
fn address_of(bias: &Option<DeviceBuffer<f32>>) -> Address<f32> {
    bias.as_ref().map_or(Address::NULL, DeviceBuffer::address)
}

/// Of the kernel `choose_experts`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RouterShape {
    experts: i32,
    top_k: i32,
    sigmoid: i32,
    normalize: i32,
    groups: i32,
    group_top_k: i32,
    group_by_two: i32,
    scaling: f32,
}

// SAFETY: `RouterShape` of kernels/router.cu has the same fields.
#[allow(unsafe_code)]
unsafe impl crate::cuda::kernels::Argument for RouterShape {}

impl RouterShape {
    fn new(experts: usize, router: &Router) -> Self {
        Self {
            experts: experts as i32,
            top_k: router.top_k as i32,
            sigmoid: i32::from(router.scoring == Scoring::Sigmoid),
            normalize: i32::from(router.normalize),
            groups: router.groups.map_or(0, |g| g.count) as i32,
            group_top_k: router.groups.map_or(0, |g| g.top_k) as i32,
            group_by_two: i32::from(router.groups.is_some_and(|g| g.score == GroupScore::TopTwoSum)),
            scaling: router.scaling,
        }
    }
}

/// Of the kernel `route_few`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RouteFew {
    x: Address<f32>,
    norm: Address<f32>,
    h: Address<bf16>,
    w: Address<f32>,
    offsets: Address<f32>,
    bias: Address<f32>,
    logits: Address<f32>,
    counter: Address<u32>,
    ids: Address<i32>,
    weights: Address<f32>,
    shape: RouterShape,
    tokens: i32,
    hidden: i32,
    eps: f32,
}

// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl crate::cuda::kernels::Argument for RouteFew {}

/// Experts of a layer that the routing kernel can choose from.
const MAX_EXPERTS: usize = 512;

impl CudaBackend {
    /// Ops on `cuda`.
    pub fn new(cuda: Arc<Cuda>, limits: Limits) -> Result<Self> {
        let mut backend = Self {
            workspace: linear::Workspace::new(&cuda)?,
            library: None,
            attention: attention::Workspace::new(&cuda)?,
            graphs: RefCell::default(),
            gather_rows: DeviceBuffer::new(&cuda, 1 << 16)?,
            staged_rows: RefCell::default(),
            cuda,
            limits,
        };
        backend.choose_library()?;
        Ok(backend)
    }

    /// The device.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }
}

impl Backend for CudaBackend {
    type Batch = CudaBatch;
    type Tensor = Tensor;
    type Linear = Linear;
    type LatentUp = LatentUp;
    type LatentScratch = LatentScratch;
    type DeltaNet = Rule;
    type DeltaScratch = DeltaScratch;
    type Norm = DeviceBuffer<f32>;
    type Additions = Additions;
    type Router = RouterWeights;
    type Embedding = DeviceBuffer<bf16>;
    type Kv = Kv;
    type State = State;
    type Routing = CudaRouting;
    type Shortlister = Shortlister;
    type Host = PinnedBuffer<f32>;
    const SHORTLISTS: bool = true;

    fn batch(&self, max_tokens: usize) -> Result<CudaBatch> {
        CudaBatch::new(&self.cuda, max_tokens, self.limits.table)
    }

    fn set_batch(&self, to: &mut CudaBatch, batch: &Batch) {
        to.set(&self.cuda, batch);
    }

    fn tensor(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        if !cols.is_multiple_of(8) {
            return Err(Error::Model(format!(
                "the GPU needs widths that are multiples of 8, and one is {cols}: use --device cpu"
            )));
        }
        Ok(Tensor { data: Data::Bf16(DeviceBuffer::zeros(&self.cuda, max_rows * cols)?), rows: max_rows, cols })
    }

    fn tensor_f32(&self, max_rows: usize, cols: usize) -> Result<Tensor> {
        Ok(Tensor { data: Data::F32(DeviceBuffer::zeros(&self.cuda, max_rows * cols)?), rows: max_rows, cols })
    }

    fn additions(&self, layers: usize) -> Result<Additions> {
        Additions::new(&self.cuda, layers)
    }

    fn set_additions(&self, to: &mut Additions, additions: Vec<Addition<DeviceBuffer<f32>>>) -> Result<()> {
        if to.grow(&self.cuda, additions.len())? {
            self.graphs.borrow_mut().retain(|form, _| !form.steered); // they have the old address
        }
        to.set(&self.cuda, additions);
        Ok(())
    }

    fn routing(&self, max_tokens: usize, top_k: usize) -> Result<CudaRouting> {
        Ok(CudaRouting {
            ids: DeviceBuffer::zeros(&self.cuda, max_tokens * top_k)?,
            weights: DeviceBuffer::zeros(&self.cuda, max_tokens * top_k)?,
            tokens: 0,
            top_k,
            logits: DeviceBuffer::new(&self.cuda, max_tokens * MAX_EXPERTS)?,
            counter: DeviceBuffer::zeros(&self.cuda, 1)?,
        })
    }

    fn read_routing(&self, routing: &CudaRouting, out: &mut Routing) -> Result<()> {
        let choices = routing.tokens * routing.top_k;
        out.top_k = routing.top_k;
        out.ids.resize(choices, 0);
        out.weights.resize(choices, 0.0);
        routing.ids.read(&mut out.ids)?;
        routing.weights.read(&mut out.weights)
    }

    fn set_rows(&self, t: &mut Tensor, rows: usize) {
        assert!(rows <= t.max_rows(), "a tensor of {} rows was asked for {rows}", t.max_rows());
        t.rows = rows;
    }

    fn shortlister(&self, max_rows: usize, cols: usize) -> Result<Shortlister> {
        Shortlister::new(&self.cuda, max_rows, cols)
    }

    fn shortlist(
        &self,
        s: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        self.shortlist_rows(s, logits, inverse_temperatures, out)
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

    fn load_linear(&self, weight: HostTensor<'_>, bias: Option<Vec<f32>>, bits: DenseBits) -> Result<Linear> {
        Linear::new(&self.cuda, weight, bias, bits)
    }

    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<LatentUp> {
        LatentUp::new(&self.cuda, config, kv_b)
    }

    fn load_norm(&self, weight: Vec<f32>) -> Result<DeviceBuffer<f32>> {
        DeviceBuffer::from_slice(&self.cuda, &weight)
    }

    fn load_router(
        &self,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        correction_bias: Option<Vec<f32>>,
    ) -> Result<RouterWeights> {
        let weight = DeviceBuffer::from_slice(&self.cuda, &weight)?;
        let parts = DeviceBuffer::new(&self.cuda, 3 * weight.len())?;
        let (grid, count) = ([weight.len().div_ceil(256), 1, 1], weight.len() as i32);
        launch!(self.cuda, &self.cuda.compute, "split_f32", grid, 256, 0; weight.address(), parts.address(), count);
        let upload = |bias: Option<Vec<f32>>| bias.map(|bias| DeviceBuffer::from_slice(&self.cuda, &bias)).transpose();
        Ok(RouterWeights { weight, parts, bias: upload(bias)?, correction_bias: upload(correction_bias)? })
    }

    fn load_delta_net(&self, config: &DeltaNet, rule: DeltaRule) -> Result<Rule> {
        Rule::new(self, config, rule)
    }

    fn state(&self, slots: usize, config: &DeltaNet) -> Result<State> {
        State::new(&self.cuda, slots, config)
    }

    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<DeviceBuffer<bf16>> {
        linear::upload_bf16(&self.cuda, &weight)
    }

    fn kv(&self, blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Kv> {
        Kv::new(&self.cuda, blocks, heads, key_dim, value_dim, bits)
    }

    fn linear_bytes(&self, w: &Linear) -> usize {
        w.bytes()
    }

    fn latent_up_bytes(&self, w: &LatentUp) -> usize {
        w.bytes()
    }

    fn replay(&self, form: Form, record: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        if form.tokens > RECORDED_TOKENS {
            return record().map(|()| false);
        }
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get(&form) {
            None => {
                self.cuda.rehearse(record)?;
                graphs.insert(form, Recorded::Warm);
                return Ok(false);
            }
            Some(Recorded::Warm) => {
                let graph = Graph::record(&self.cuda, record)?;
                graphs.insert(form, Recorded::Graph(graph));
            }
            Some(Recorded::Graph(_)) => {}
        }
        if let Some(Recorded::Graph(graph)) = graphs.get(&form) {
            graph.launch();
        }
        Ok(true)
    }

    fn rates(&self) -> Result<Option<Rates>> {
        self.measure().map(Some)
    }

    fn profiling(&self, on: bool) {
        self.graphs.borrow_mut().clear();
        self.cuda.profiling(on);
    }

    fn take_profile(&self) -> Result<Vec<OpTime>> {
        let times = self.cuda.take_profile()?;
        Ok(times.into_iter().map(|(name, launches, seconds)| OpTime { name, launches, seconds }).collect())
    }

    fn enter_thread(&self) -> Result<()> {
        self.cuda.enter_thread()
    }

    fn embed(&self, embedding: &DeviceBuffer<bf16>, batch: &CudaBatch, out: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, "embed", [out.rows, 1, 1], ROW_THREADS, 0; embedding.address(), batch.tokens(), out.f32(), out.cols as i32);
    }

    fn rms_norm(&self, x: &Tensor, w: &DeviceBuffer<f32>, eps: f32, out: &mut Tensor) {
        assert_eq!((x.rows, x.cols, w.len()), (out.rows, out.cols, x.cols));
        let (stream, cols) = (&self.cuda.compute, x.cols as i32);
        match &x.data {
            Data::F32(x) => {
                launch!(self.cuda, stream, "rms_norm_f32", [out.rows, 1, 1], ROW_THREADS, 0; x.address(), w.address(), eps, out.bf16(), cols);
            }
            Data::Bf16(x) => {
                launch!(self.cuda, stream, "rms_norm_bf16", [out.rows, 1, 1], ROW_THREADS, 0; x.address(), w.address(), eps, out.bf16(), cols);
            }
        }
    }

    fn rms_norm_heads(&self, x: &mut Tensor, w: &DeviceBuffer<f32>, eps: f32, cols: Range<usize>) {
        let runs = cols.len() / w.len();
        launch!(self.cuda, &self.cuda.compute, "rms_norm_heads", [x.rows, runs.div_ceil(8), 1], ROW_THREADS, 0;
            x.bf16(), w.address(), eps, x.cols as i32, cols.start as i32, w.len() as i32, runs as i32);
    }

    fn linears<const N: usize>(&self, x: &Tensor, jobs: [(&Linear, &mut Tensor); N]) {
        self.apply(x, jobs, linear::Write::Set);
    }

    fn linear_add(&self, w: &Linear, x: &Tensor, out: &mut Tensor) {
        self.apply(x, [(w, out)], linear::Write::Add);
    }

    fn rope_angles(&self, inv_freq: &DeviceBuffer<f32>, factor: f32, batch: &CudaBatch, out: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, "rope_angles", [out.rows, 1, 1], 64, 0;
            batch.positions(), inv_freq.address(), factor, out.f32(), inv_freq.len() as i32);
    }

    fn rope(&self, x: &mut Tensor, head_dim: usize, at: usize, interleaved: bool, angles: &Tensor) {
        launch!(self.cuda, &self.cuda.compute, "rope", [x.rows, 1, 1], ROW_THREADS, 0;
            x.bf16(), angles.f32(), (x.cols / head_dim) as i32, head_dim as i32, at as i32, (angles.cols / 2) as i32, i32::from(interleaved));
    }

    fn kv_write(&self, kv: &mut Kv, batch: &CudaBatch, key: &Tensor, value: Option<&Tensor>) {
        self.store(kv, batch, key, value);
    }

    fn attention(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        num_heads: usize,
        softmax: &Softmax<'_, Self>,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        self.attend(kv, batch, num_heads, softmax, q, out);
    }

    fn delta_scratch(&self, config: &DeltaNet, max_tokens: usize) -> Result<DeltaScratch> {
        DeltaScratch::new(&self.cuda, config, max_tokens)
    }

    fn delta_net(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        config: (&DeltaNet, f32),
        w: &Rule,
        scratch: &mut DeltaScratch,
        h: &Tensor,
        (qkv, z): (&Tensor, &Tensor),
        out: &mut Tensor,
    ) {
        self.apply_rule(state, batch, config, w, scratch, h, (qkv, z), out);
    }

    fn sigmoid_mul(&self, gate: &Tensor, x: &mut Tensor) {
        let numbers = x.rows * x.cols;
        launch!(self.cuda, &self.cuda.compute, "sigmoid_mul", [numbers.div_ceil(4 * 256), 1, 1], ROW_THREADS, 0;
            gate.bf16(), x.bf16(), numbers as i64);
    }

    fn gate_rows(&self, w: &DeviceBuffer<f32>, h: &Tensor, x: &mut Tensor) {
        assert!((x.rows, w.len()) == (h.rows, h.cols));
        launch!(self.cuda, &self.cuda.compute, "gate_rows", [x.rows, 1, 1], ROW_THREADS, 0;
            w.address(), h.bf16(), x.bf16(), h.cols as i32, x.cols as i32);
    }

    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<LatentScratch> {
        LatentScratch::new(self, config, max_tokens, self.limits.context)
    }

    fn latent_attention(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        config: &Mla,
        up: &LatentUp,
        scratch: &mut LatentScratch,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        self.attend_latents(kv, batch, config, up, scratch, q, out);
    }

    fn silu_mul(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        let numbers = out.rows * out.cols;
        launch!(self.cuda, &self.cuda.compute, "silu_mul", [numbers.div_ceil(4 * 256), 1, 1], ROW_THREADS, 0;
            gate.bf16(), up.bf16(), out.bf16(), numbers as i64);
    }

    fn route(&self, w: &RouterWeights, router: &Router, x: &Tensor, out: &mut CudaRouting) {
        let experts = w.weight.len() / x.cols;
        assert!(
            experts <= MAX_EXPERTS && router.top_k <= 32 && router.groups.is_none_or(|g| g.count <= 32),
            "checked when loading"
        );
        out.tokens = x.rows;
        self.router_logits(w, x, experts, out.logits.address());
        let shape = RouterShape::new(experts, router);
        launch!(self.cuda, &self.cuda.compute, "choose_experts", [x.rows.div_ceil(4), 1, 1], 128, 0;
            out.logits.address(), address_of(&w.bias), address_of(&w.correction_bias), shape, x.rows as i32, out.ids.address(), out.weights.address());
    }

    fn norm_linears<const N: usize>(
        &self,
        x: &Tensor,
        (norm, eps): (&DeviceBuffer<f32>, f32),
        h: &mut Tensor,
        jobs: [(&Linear, &mut Tensor); N],
    ) {
        if x.rows <= linear::FEW_TOKENS && jobs.iter().all(|(w, _)| w.is_bf16()) {
            return self.few_of_norm(x, (norm, eps), jobs);
        }
        self.rms_norm(x, norm, eps, h);
        self.linears(h, jobs);
    }

    fn norm_route(
        &self,
        x: &Tensor,
        (norm, eps): (&DeviceBuffer<f32>, f32),
        h: &mut Tensor,
        w: &RouterWeights,
        router: &Router,
        out: &mut CudaRouting,
    ) {
        if x.rows > linear::FEW_TOKENS {
            self.rms_norm(x, norm, eps, h);
            return self.route(w, router, h, out);
        }
        out.tokens = x.rows;
        let shape = RouterShape::new(w.weight.len() / x.cols, router);
        let argument = RouteFew {
            x: x.f32(),
            norm: norm.address(),
            h: h.bf16(),
            w: w.weight.address(),
            offsets: address_of(&w.bias),
            bias: address_of(&w.correction_bias),
            logits: out.logits.address(),
            counter: out.counter.address(),
            ids: out.ids.address(),
            weights: out.weights.address(),
            shape,
            tokens: x.rows as i32,
            hidden: x.cols as i32,
            eps,
        };
        launch!(self.cuda, &self.cuda.compute, "route_few", [shape.experts as usize + 1, 1, 1], 256, 0; argument);
    }

    fn gated_linears(
        &self,
        x: &Tensor,
        (gate, up): (&Linear, &Linear),
        buffers: (&mut Tensor, &mut Tensor),
        out: &mut Tensor,
    ) {
        if x.rows <= linear::FEW_TOKENS && gate.is_bf16() && up.is_bf16() {
            return self.few_gated(x, (gate, up), out);
        }
        self.linears(x, [(gate, &mut *buffers.0), (up, &mut *buffers.1)]);
        self.silu_mul(buffers.0, buffers.1, out);
    }

    fn heads(
        &self,
        kv: &mut Kv,
        batch: &CudaBatch,
        angles: &Tensor,
        interleaved: bool,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Tensor>,
    ) {
        self.prepare_heads(kv, batch, angles, interleaved, q, k, v);
    }

    fn gather(&self, x: &Tensor, rows: &[usize], first: usize, out: &mut Tensor, at: usize) {
        let mut staged = self.staged_rows.borrow_mut();
        staged.clear();
        staged.extend(rows.iter().map(|&row| row as u32));
        let to = self.gather_rows.address().add(at);
        self.cuda.upload(&self.cuda.compute, to, &staged);
        launch!(self.cuda, &self.cuda.compute, "gather_rows", [rows.len(), 1, 1], ROW_THREADS, 0;
            x.f32(), to, first as i32, out.f32().add(at * out.cols), x.cols as i32);
    }

    fn add(&self, additions: &Additions, layer: usize, first: usize, x: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, "add_vectors", [x.rows, 1, 1], ROW_THREADS, 0;
            additions.of_layer(layer), additions.entries(), first as i32, x.f32(), x.cols as i32);
    }
}
