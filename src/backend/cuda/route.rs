//! Experts for each token: logits, and the choice.

use super::load::RouterWeights;
use super::{CudaBackend, CudaBatch, Tensor};
use crate::Result;
use crate::backend::{Dense, Route, Routing};
use crate::cuda::kernels::router::{CHOICES, FEW, MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, SIGMOID, SQRT_SOFTPLUS};
use crate::cuda::kernels::{self, RouteFew, RouterShape, router_logits};
use crate::cuda::{Address, DeviceBuffer, launch};
use crate::model::{GroupScore, Router, Scoring};

/// Tokens times experts up to which the router's f32 weights are multiplied as they are.
const FEW_LOGITS: usize = 8192;

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

fn router_shape(experts: usize, router: &Router) -> RouterShape {
    RouterShape {
        experts: experts as i32,
        top_k: router.top_k as i32,
        scoring: match router.scoring {
            Scoring::Softmax => 0,
            Scoring::Sigmoid => SIGMOID,
            Scoring::SqrtSoftplus => SQRT_SOFTPLUS,
        } as i32,
        normalize: i32::from(router.normalize),
        groups: router.groups.map_or(0, |g| g.count) as i32,
        group_top_k: router.groups.map_or(0, |g| g.top_k) as i32,
        group_by_two: i32::from(router.groups.is_some_and(|g| g.score == GroupScore::TopTwoSum)),
        scaling: router.scaling,
        softcap: router.softcap.unwrap_or(0.0),
    }
}

impl CudaBackend {
    /// Router logits `[T, experts]`, as exact as f32 weights allow.
    pub(super) fn route_logits(&self, w: &RouterWeights, x: &Tensor, experts: usize, logits: Address<f32>) {
        if x.rows * experts <= FEW_LOGITS || !experts.is_multiple_of(8) {
            let grid = [experts, x.rows.div_ceil(router_logits::TOKENS), 1];
            launch!(self.cuda, &self.cuda.compute, kernels::route_logits, grid;
                x.bf16(), w.weight.address(), logits, x.cols as i32, x.rows as i32, experts as i32, x.cols as i32);
            return;
        }
        self.gemm_split3(x, w.parts.address(), experts, logits);
    }

    /// Experts and weights of every row; `tokens` and their table where that has the experts.
    fn route_rows(
        &self,
        w: &RouterWeights,
        router: &Router,
        x: &Tensor,
        (tokens, by_token): (Address<u32>, Address<i32>),
        out: &mut CudaRouting,
    ) {
        let experts = w.weight.len() / x.cols;
        assert!(
            experts <= MAX_EXPERTS && router.top_k <= MAX_TOP_K && router.groups.is_none_or(|g| g.count <= MAX_GROUPS),
            "checked when loading"
        );
        out.tokens = x.rows;
        self.route_logits(w, x, experts, out.logits.address());
        launch!(self.cuda, &self.cuda.compute, kernels::route_choose, [x.rows, 1, 1];
            out.logits.address(), w.bias(), w.correction_bias(), w.expert_scale(), tokens, by_token,
            router_shape(experts, router), out.ids.address(), out.weights.address());
    }
}

impl Route for CudaBackend {
    type Routing = CudaRouting;
    type Choices = DeviceBuffer<i32>;

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

    fn route(&self, w: &RouterWeights, router: &Router, x: &Tensor, out: &mut CudaRouting) {
        self.route_rows(w, router, x, (Address::NULL, Address::NULL), out);
    }

    fn route_by_token(&self, w: &RouterWeights, router: &Router, batch: &CudaBatch, x: &Tensor, out: &mut CudaRouting) {
        self.route_rows(w, router, x, (batch.tokens(), w.by_token()), out);
    }

    fn choices(&self, choices: usize) -> Result<DeviceBuffer<i32>> {
        DeviceBuffer::zeros(&self.cuda, choices)
    }

    fn set_choices(&self, to: &mut DeviceBuffer<i32>, ids: &[i32]) {
        assert!(ids.len() <= to.len());
        self.cuda.upload(&self.cuda.compute, to.address(), ids);
    }

    fn choose_experts(&self, choices: &DeviceBuffer<i32>, first: usize, out: &mut CudaRouting) {
        let n = out.tokens * out.top_k;
        assert!(first + n <= choices.len());
        launch!(self.cuda, &self.cuda.compute, kernels::choose_experts, [n.div_ceil(CHOICES), 1, 1];
            choices.address().add(first), out.ids.address(), n as i32);
    }

    fn weigh_input(&self, routing: &mut CudaRouting, h: &Tensor, out: &mut Tensor) {
        assert_eq!(routing.top_k, 1, "one expert of a token");
        launch!(self.cuda, &self.cuda.compute, kernels::weigh_input, [h.rows, 1, 1];
            routing.weights.address(), h.bf16(), out.bf16(), h.cols as i32);
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
        if x.rows > FEW {
            self.rms_norm(x, norm, eps, h);
            return self.route(w, router, h, out);
        }
        out.tokens = x.rows;
        let shape = router_shape(w.weight.len() / x.cols, router);
        let argument = RouteFew {
            x: x.f32(),
            norm: norm.address(),
            h: h.bf16(),
            w: w.weight.address(),
            offsets: w.bias(),
            bias: w.correction_bias(),
            expert_scale: w.expert_scale(),
            logits: out.logits.address(),
            counter: out.counter.address(),
            ids: out.ids.address(),
            weights: out.weights.address(),
            shape,
            tokens: x.rows as i32,
            hidden: x.cols as i32,
            eps,
        };
        launch!(self.cuda, &self.cuda.compute, kernels::route_few, [shape.experts as usize + x.rows, 1, 1]; argument);
    }
}
