//! Prompts of another engine: the experts that it does not compute itself cross PCIe and are multiplied on its device,
//! in the order of its stream.
//!
//! ```text
//! submit    the engine's stream   copies hidden states and routing
//!           copy stream           this layer's experts into one half of a ring, what comes next into the other
//!           compute stream        their products with all tokens, and the sum
//! sync      the engine's stream   waits for the sum and rounds it
//! ```
//!
//! A batch that is larger than the buffers goes in parts, and its experts cross for each. Of an engine with several
//! ranks each does this with its part of every expert's width, and the engine adds the sums.

use std::sync::Arc;

use half::bf16;

use super::Sizes;
use super::epilogue::DeviceEpilogue;
use super::parts::Parts;
use super::products::{Choices, Products};
use super::ring::Crossing;
use crate::cuda::kernels::rows::ROW_NUMBERS;
use crate::cuda::kernels::stream::STREAM_THREADS;
use crate::cuda::{Address, Cuda, CudaEvent, CudaStream, DeviceBuffer, Registered, kernels, launch};
use crate::experts::service::{DeviceTokens, ExpertService, RowType, ServedLayer};
use crate::model::Share;
use crate::{Error, Result};

/// Experts of a layer that `experts_sort` takes.
pub(super) const MAX_EXPERTS: usize = 512;
/// Pairs of a token and an expert that it takes.
pub(super) const MAX_PAIRS: usize = 131_072;
/// Ids that an engine may have for the experts of a layer.
pub(super) const MAX_IDS: usize = 4096;

/// Which batches go this way, and how many of their tokens at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSizes {
    /// Tokens from which on a batch does.
    pub from_tokens: usize,
    /// Tokens that are multiplied at once.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// VRAM that experts pass through.
    pub ring_bytes: usize,
}

/// The experts of one model, for the prompts of one device.
pub struct Prompts {
    _registered: Arc<Vec<Registered>>, // first: given up while `service` still maps them
    cuda: Arc<Cuda>,
    service: Arc<ExpertService>,
    from_tokens: usize,
    pairs: usize, // of a token and an expert, that there is room for
    parts: Parts,
    crossing: Crossing, // the experts of each layer that cross for a prompt, as it was last
    products: Products,
    experts: DeviceBuffer<i32>, // [ids]: the expert that an id stands for
    x: DeviceBuffer<bf16>,      // [tokens, hidden]
    ids: DeviceBuffer<i32>,     // [pairs]
    weights: DeviceBuffer<f32>, // [pairs]
    here: DeviceBuffer<u64>,    // [experts]: all ones
    taken: CudaEvent,           // the last batch is in the buffers
    done: CudaEvent,            // and is not needed there any more
    sums: Vec<Sum>,
}

/// The sum of a batch, until the engine takes it.
struct Sum {
    numbers: DeviceBuffer<f32>, // [tokens, hidden]
    given: CudaEvent,           // the engine has taken the last one
    busy: bool,
}

/// Products of these parts of a service's experts with up to `tokens` tokens, beside a ring of so many experts.
pub(super) fn products(
    cuda: &Arc<Cuda>,
    (service, parts): (&ExpertService, &Parts),
    (tokens, top_k): (usize, usize),
    ring: usize,
) -> Result<Products> {
    let shape = parts.shape();
    service.with_epilogue(|epilogue| {
        let (share, holders, on_holders) = (parts.share(), 0, 0);
        let sizes = Sizes { tokens, cpu_tokens: 0, top_k, resident: 0, ring, share, holders, on_holders };
        let epilogue = DeviceEpilogue::new(cuda, epilogue, shape.layers(), (share, parts.width()))?;
        Products::new(cuda, shape, epilogue, &sizes)
    })
}

impl Prompts {
    /// Takes the VRAM. `share`: what this device computes of every expert; `registered`: the experts, pinned where they
    /// lie.
    ///
    /// Errors: `Error::Resources` where VRAM ends; `Error::Invalid` for more experts than the kernels take.
    pub fn new(
        cuda: &Arc<Cuda>,
        (service, share): (&Arc<ExpertService>, Share),
        sizes: PromptSizes,
        registered: Arc<Vec<Registered>>,
    ) -> Result<Self> {
        let parts = Parts::new(service.memory().clone(), share, &registered)?;
        let shape = parts.shape();
        if shape.experts > MAX_EXPERTS {
            return Err(Error::Invalid(format!(
                "prompts cannot be computed on the GPU: a layer has {} experts and at most {MAX_EXPERTS} are \
                 supported",
                shape.experts
            )));
        }
        let top_k = sizes.top_k.max(1);
        let tokens = sizes.tokens.min(MAX_PAIRS / top_k).max(1);
        let pairs = tokens * top_k;
        let half = (sizes.ring_bytes / 2 / shape.most_bytes()).clamp(1, shape.experts);
        let prompts = Self {
            crossing: Crossing::new(cuda, shape, half)?,
            products: products(cuda, (service, &parts), (tokens, top_k), 2 * half)?,
            from_tokens: sizes.from_tokens,
            pairs,
            experts: DeviceBuffer::zeros(cuda, MAX_IDS)?,
            x: DeviceBuffer::zeros(cuda, tokens * shape.hidden())?,
            ids: DeviceBuffer::zeros(cuda, pairs)?,
            weights: DeviceBuffer::zeros(cuda, pairs)?,
            here: DeviceBuffer::from_slice(cuda, &vec![1; shape.experts])?,
            taken: CudaEvent::new(cuda)?,
            done: CudaEvent::new(cuda)?,
            sums: vec![Sum::new(cuda, tokens * shape.hidden())?],
            parts,
            service: service.clone(),
            cuda: cuda.clone(),
            _registered: registered,
        };
        cuda.synchronize()?;
        Ok(prompts)
    }

    /// Whether it is of this service.
    pub fn is_of(&self, service: &Arc<ExpertService>) -> bool {
        Arc::ptr_eq(&self.service, service)
    }

    /// Whether a batch of a layer goes this way.
    pub fn takes(&self, layer: &ServedLayer, batch: &DeviceTokens) -> bool {
        batch.tokens >= self.from_tokens
            && batch.rows == RowType::Bf16
            && (1..=32).contains(&batch.top_k)
            && layer.is_loaded()
    }

    /// Enqueues a batch that [`takes`](Prompts::takes) says goes this way, and returns what [`sync`](Prompts::sync)
    /// wants. Errors: VRAM, the device, more ids than an engine may have.
    pub fn submit(&mut self, layer: &ServedLayer, batch: &DeviceTokens, stream: &CudaStream) -> Result<usize> {
        let (cuda, hidden) = (self.cuda.clone(), self.parts.shape().hidden());
        let experts = layer.experts_of_ids();
        if experts.len() > MAX_IDS {
            return Err(Error::Invalid(format!("{} ids of experts: at most {MAX_IDS} are supported", experts.len())));
        }
        self.crossing.list(layer.index(), experts.iter().filter_map(|&expert| usize::try_from(expert).ok()));
        let sum = self.sum(batch.tokens * hidden)?;
        let out = self.sums[sum].numbers.address();
        cuda.wait(&cuda.compute, &self.sums[sum].given);
        launch!(cuda, &cuda.compute, kernels::clear, [(batch.tokens * hidden).div_ceil(ROW_NUMBERS), 1, 1];
            out, (batch.tokens * hidden) as i64);
        let most = (self.pairs / batch.top_k).min(self.x.len() / hidden);
        for first in (0..batch.tokens).step_by(most) {
            let tokens = most.min(batch.tokens - first);
            let from = |address: u64, each: usize| address + (first * each) as u64;
            let part = DeviceTokens {
                x: from(batch.x, 2 * hidden),
                ids: from(batch.ids, batch.top_k * batch.id_bytes),
                weights: from(batch.weights, batch.top_k * size_of::<f32>()),
                tokens,
                ..*batch
            };
            self.take(&part, &experts, stream);
            let choices = Choices {
                layer: layer.index(),
                tokens,
                top_k: batch.top_k,
                ids: self.ids.address(),
                weights: self.weights.address(),
            };
            let (all, x) = (self.parts.shape().experts, self.x.address());
            self.crossing.multiply((&self.parts, &self.products), x, choices, |_| vec![0; all]);
            self.products.combine(
                &cuda.compute,
                self.here.address(),
                choices,
                &(0..tokens),
                out.add(first * hidden),
                false,
            );
            cuda.record(&self.done, &cuda.compute);
        }
        cuda.check()?;
        Ok(sum)
    }

    /// Enqueues what brings a sum of `numbers` numbers to `out`, bf16.
    pub fn sync(&mut self, sum: usize, numbers: usize, out: u64, stream: &CudaStream) -> Result<()> {
        let (cuda, sum) = (&self.cuda, &mut self.sums[sum]);
        cuda.wait(stream, &self.done);
        launch!(cuda, stream, kernels::rounded, [numbers.div_ceil(ROW_NUMBERS), 1, 1];
            sum.numbers.address(), Address::of_another(out), numbers as i64);
        cuda.record(&sum.given, stream);
        sum.busy = false;
        cuda.check()
    }

    /// A sum that nobody has.
    fn sum(&mut self, numbers: usize) -> Result<usize> {
        let free = self.sums.iter().position(|sum| !sum.busy && sum.numbers.len() >= numbers);
        let index = match free {
            Some(index) => index,
            None => {
                self.sums.push(Sum::new(&self.cuda, numbers.max(self.x.len()))?);
                self.sums.len() - 1
            }
        };
        self.sums[index].busy = true;
        Ok(index)
    }

    /// Copies hidden states and routing in the engine's order: it may overwrite its own at once.
    fn take(&self, part: &DeviceTokens, experts: &[i32], stream: &CudaStream) {
        let (cuda, choices) = (&self.cuda, part.tokens * part.top_k);
        let bytes = part.tokens * self.parts.shape().hidden() * size_of::<bf16>();
        cuda.wait(stream, &self.done);
        cuda.copy_within(stream, self.x.address(), Address::of_another(part.x), bytes);
        cuda.upload(stream, self.experts.address(), experts);
        launch!(cuda, stream, kernels::take_choices, [choices.div_ceil(STREAM_THREADS), 1, 1];
            Address::of_another(part.ids), Address::of_another(part.weights), self.experts.address(),
            self.ids.address(), self.weights.address(), choices as i32, (part.id_bytes / 4) as i32,
            experts.len() as i32);
        cuda.record(&self.taken, stream);
        cuda.wait(&cuda.compute, &self.taken);
    }
}

impl Sum {
    fn new(cuda: &Arc<Cuda>, numbers: usize) -> Result<Self> {
        Ok(Self { numbers: DeviceBuffer::zeros(cuda, numbers)?, given: CudaEvent::new(cuda)?, busy: false })
    }
}
