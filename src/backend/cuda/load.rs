//! Resident weights in VRAM.

use std::sync::Arc;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::MatrixLayout;

use super::CudaBackend;
use super::packed::PackedLinear;
use crate::backend::source::LinearWeight;
use crate::backend::tensor::HostTensor;
use crate::backend::{DeltaRule, Load, RouterTensors};
use crate::config::DenseBits;
use crate::cuda::kernels::gemm::SPLIT_THREADS;
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels, launch};
use crate::model::{DeltaNet, Mla};
use crate::{Error, Result};

/// Weights `[n, k]` and a bias `[n]`.
pub struct Linear {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) weight: Weight,
    pub(super) bias: Option<DeviceBuffer<f32>>,
}

/// Weights `[n, k]`.
pub(super) enum Weight {
    /// Rows as checkpoints have them.
    Bf16(DeviceBuffer<bf16>),
    /// Tiles as experts have them.
    Packed(Box<PackedLinear>),
}

impl Linear {
    /// Whether its weights are as checkpoints have them.
    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.weight, Weight::Bf16(_))
    }
}

/// Weights of several products, `[groups, n, k]`.
pub struct Groups {
    pub(super) groups: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) weight: DeviceBuffer<bf16>,
}

/// `kv_b_proj` as it is, and its key half transposed.
pub struct LatentUp {
    pub(super) config: Mla,
    pub(super) kv_b: DeviceBuffer<bf16>,   // [heads, nope + v, rank]
    pub(super) key_up: DeviceBuffer<bf16>, // [heads, rank, nope]
}

/// What a layer of gated DeltaNet has beside its projections.
pub struct Rule {
    pub(super) config: DeltaNet,
    pub(super) taps: DeviceBuffer<f32>,    // [conv_width, conv_dim]
    pub(super) gates: RouterWeights,       // [b and a, value heads, hidden]
    pub(super) rates: DeviceBuffer<f32>,   // [value heads], exp(A_log)
    pub(super) dt_bias: DeviceBuffer<f32>, // [value heads]
    pub(super) norm: DeviceBuffer<f32>,    // [value_head_dim]
    pub(super) eps: f32,
}

/// Router weights, the bias of the logits and the bias for choosing.
pub struct RouterWeights {
    pub(super) weight: DeviceBuffer<f32>, // [experts, hidden]
    pub(super) parts: DeviceBuffer<bf16>, // [3, experts, hidden]: their sum is `weight`
    bias: Option<DeviceBuffer<f32>>,
    correction_bias: Option<DeviceBuffer<f32>>,
    expert_scale: Option<DeviceBuffer<f32>>,
    by_token: Option<DeviceBuffer<i32>>, // [vocab, top_k]
}

impl RouterWeights {
    /// The bias of the logits, if there is one.
    pub(super) fn bias(&self) -> Address<f32> {
        self.bias.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }

    /// The factors of the experts' weights, if there are any.
    pub(super) fn expert_scale(&self) -> Address<f32> {
        self.expert_scale.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }

    /// Each token's experts, if a table has them.
    pub(super) fn by_token(&self) -> Address<i32> {
        self.by_token.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }

    /// The bias for choosing, if there is one.
    pub(super) fn correction_bias(&self) -> Address<f32> {
        self.correction_bias.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }
}

/// A weight on the device as checkpoints have it.
fn upload_bf16(cuda: &Arc<Cuda>, weight: &HostTensor<'_>) -> Result<DeviceBuffer<bf16>> {
    match weight {
        HostTensor::Bf16 { data, .. } => DeviceBuffer::from_slice(cuda, data),
        HostTensor::F32 { data, .. } => {
            let data: Vec<bf16> = data.iter().map(|w| bf16::from_f32(*w)).collect();
            DeviceBuffer::from_slice(cuda, &data)
        }
        HostTensor::Shape { rows, cols } => DeviceBuffer::new(cuda, rows * cols),
    }
}

/// f32 weights on the device.
fn upload_f32(cuda: &Arc<Cuda>, weight: &HostTensor<'_>) -> Result<DeviceBuffer<f32>> {
    match weight {
        HostTensor::Shape { rows, cols } => DeviceBuffer::new(cuda, rows * cols),
        _ => DeviceBuffer::from_slice(cuda, &weight.to_f32()),
    }
}

impl Load for CudaBackend {
    type Linear = Linear;
    type Groups = Groups;
    type LatentUp = LatentUp;
    type DeltaNet = Rule;
    type Norm = DeviceBuffer<f32>;
    type Router = RouterWeights;
    type Embedding = DeviceBuffer<bf16>;

    fn load_linear<'a>(
        &self,
        weight: impl Into<LinearWeight<'a>>,
        bias: Option<HostTensor<'_>>,
        bits: DenseBits,
    ) -> Result<Linear> {
        let weight = weight.into().plain()?;
        let (n, k) = (weight.rows(), weight.cols());
        if !k.is_multiple_of(8) {
            return Err(Error::Model(format!(
                "the GPU needs rows of multiples of 8 weights, and one has {k}: use --device cpu"
            )));
        }
        let bias = bias.map(|bias| upload_f32(&self.cuda, &bias)).transpose()?;
        let weight = match bits.precision_on_gpu(k).unwrap_or(Precision::Bf16) {
            Precision::Bf16 => Weight::Bf16(upload_bf16(&self.cuda, &weight)?),
            precision => {
                let layout = MatrixLayout::new(n, k, precision)?;
                let packed = match self.cuda.is_plan() {
                    true => DeviceBuffer::new(&self.cuda, layout.bytes())?,
                    false => DeviceBuffer::from_slice(&self.cuda, &crate::backend::cpu::packed(&layout, &weight))?,
                };
                Weight::Packed(Box::new(PackedLinear::new(precision, packed)))
            }
        };
        Ok(Linear { n, k, weight, bias })
    }

    // At 16 bits: products of packed tiles take whole rows.
    fn load_groups<'a>(&self, groups: usize, weight: impl Into<LinearWeight<'a>>, _: DenseBits) -> Result<Groups> {
        let weight = weight.into().plain()?;
        let (n, k) = (weight.rows() / groups, weight.cols());
        Ok(Groups { groups, n, k, weight: upload_bf16(&self.cuda, &weight)? })
    }

    fn load_latent_up(&self, config: &Mla, kv_b: HostTensor<'_>) -> Result<LatentUp> {
        let cuda = &self.cuda;
        let key_up = kv_b.head_rows(config.num_heads, 0, config.qk_nope_head_dim).transpose_heads(config.num_heads);
        Ok(LatentUp { config: config.clone(), kv_b: upload_bf16(cuda, &kv_b)?, key_up: upload_bf16(cuda, &key_up)? })
    }

    fn load_delta_net(&self, config: &DeltaNet, rule: DeltaRule<'_>) -> Result<Rule> {
        let upload = |weight: &HostTensor<'_>| upload_f32(&self.cuda, weight);
        Ok(Rule {
            config: config.clone(),
            taps: upload(&rule.taps())?,
            rates: upload(&rule.rates)?,
            dt_bias: upload(&rule.dt_bias)?,
            norm: upload(&rule.norm)?,
            eps: rule.eps,
            gates: self.load_router(RouterTensors::of(rule.gates))?,
        })
    }

    fn load_norm(&self, weight: HostTensor<'_>) -> Result<DeviceBuffer<f32>> {
        upload_f32(&self.cuda, &weight)
    }

    fn load_router(&self, router: RouterTensors<'_>) -> Result<RouterWeights> {
        let RouterTensors { weight, bias, correction_bias, expert_scale, by_token } = router;
        let weight = upload_f32(&self.cuda, &weight)?;
        let parts = DeviceBuffer::new(&self.cuda, 3 * weight.len())?;
        let (grid, count) = ([weight.len().div_ceil(SPLIT_THREADS), 1, 1], weight.len() as i32);
        launch!(self.cuda, &self.cuda.compute, kernels::split_f32, grid; weight.address(), parts.address(), count);
        let upload = |bias: Option<HostTensor<'_>>| bias.map(|bias| upload_f32(&self.cuda, &bias)).transpose();
        let [bias, correction_bias, expert_scale] = [upload(bias)?, upload(correction_bias)?, upload(expert_scale)?];
        let table = |ids: HostTensor<'_>| match ids {
            HostTensor::Shape { rows, cols } => DeviceBuffer::new(&self.cuda, rows * cols),
            ids => DeviceBuffer::from_slice(&self.cuda, &ids.to_f32().iter().map(|id| *id as i32).collect::<Vec<_>>()),
        };
        let by_token = by_token.map(table).transpose()?;
        Ok(RouterWeights { weight, parts, bias, correction_bias, expert_scale, by_token })
    }

    fn load_embedding(&self, weight: HostTensor<'_>) -> Result<DeviceBuffer<bf16>> {
        upload_bf16(&self.cuda, &weight)
    }

    fn linear_bytes(&self, w: &Linear) -> usize {
        match &w.weight {
            Weight::Bf16(w) => w.bytes(),
            Weight::Packed(packed) => packed.weights.bytes(),
        }
    }

    fn groups_bytes(&self, w: &Groups) -> usize {
        w.weight.bytes()
    }

    fn latent_up_bytes(&self, w: &LatentUp) -> usize {
        w.kv_b.bytes()
    }
}
