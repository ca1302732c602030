//! A layer's tokens on their way to the CPU's experts, and their sum on its way back, through memory that both sides
//! see (kernels/handoff.cu).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use half::bf16;

use super::Sizes;
use super::products::LayerInput;
use crate::Result;
use crate::backend::Routing;
use crate::backend::cuda::Tensor;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer, launch};
use crate::experts::CpuExperts;

/// Memory that both sides see.
pub(super) struct Handoff {
    h: PinnedBuffer<bf16>,      // [cpu_tokens, hidden]
    ids: PinnedBuffer<i32>,     // [cpu_tokens, top_k]
    weights: PinnedBuffer<f32>, // [cpu_tokens, top_k]
    y: PinnedBuffer<f32>,       // [cpu_tokens, hidden]
    down: PinnedBuffer<u32>,    // [layers, 16]: a line each
    up: PinnedBuffer<u32>,      // [layers, 16]
    count: DeviceBuffer<u32>,   // [layers]
    arrived: DeviceBuffer<u32>, // blocks that have written
    passes: Vec<u32>,           // [layers]: what `down` will be next
    x: Vec<f32>,                // [cpu_tokens, hidden]
    routing: Routing,
    hidden: usize,
}

/// Blocks of the kernels that hand so many numbers over: enough to fill PCIe, few for few tokens.
fn blocks(numbers: usize) -> usize {
    (numbers >> 14).clamp(1, 16)
}

/// How long the device may take to publish before it is asked whether it has failed, in which case it never will.
/// Nothing is asked of the driver sooner: while another thread gives memory back, it may answer nobody before all
/// kernels have ended, and those wait for this thread.
const PATIENCE: Duration = Duration::from_secs(10);

/// Words of a cache line.
pub(super) const LINE: usize = 16;

impl Handoff {
    /// Room for so many layers.
    pub(super) fn new(cuda: &Arc<Cuda>, layers: usize, hidden: usize, sizes: &Sizes) -> Result<Self> {
        let (tokens, choices) = (sizes.cpu_tokens, sizes.cpu_tokens * sizes.top_k);
        Ok(Self {
            h: PinnedBuffer::new(cuda, tokens * hidden)?,
            ids: PinnedBuffer::new(cuda, choices)?,
            weights: PinnedBuffer::new(cuda, choices)?,
            y: PinnedBuffer::new(cuda, tokens * hidden)?,
            down: PinnedBuffer::new(cuda, layers * LINE)?,
            up: PinnedBuffer::new(cuda, layers * LINE)?,
            count: DeviceBuffer::zeros(cuda, layers)?,
            arrived: DeviceBuffer::zeros(cuda, 1)?,
            passes: vec![0; layers],
            x: vec![0.0; tokens * hidden],
            routing: Routing::default(),
            hidden,
        })
    }

    /// Enqueues what brings hidden states and routing to the host; ids that are in `table` are left out. Choices are
    /// counted in `used`.
    pub(super) fn publish(
        &self,
        cuda: &Cuda,
        input: &LayerInput<'_>,
        table: Address<u64>,
        experts: usize,
        used: Address<u32>,
    ) {
        let LayerInput { layer, x, routing } = *input;
        let Self { h, ids, weights, down, count, arrived, .. } = self;
        let (numbers, choices) = (routing.tokens() * x.cols(), routing.tokens() * routing.top_k());
        launch!(cuda, &cuda.compute, "publish", [blocks(numbers), 1, 1], 1024, 0;
            x.bf16(), routing.ids(), routing.weights(), table, (numbers / 8) as i32, choices as i32, experts as i32, h.address(), ids.address(),
            weights.address(), used, arrived.address(), count.address().add(layer), down.address().add(layer * LINE));
    }

    /// Enqueues what waits for the host's sum of so many numbers and adds it.
    pub(super) fn fetch(&self, cuda: &Cuda, layer: usize, numbers: usize, out: &mut Tensor) {
        let Self { y, up, count, .. } = self;
        launch!(cuda, &cuda.compute, "fetch", [blocks(numbers), 1, 1], 1024, 0;
            count.address().add(layer), up.address().add(layer * LINE), y.address(), out.f32(), (numbers / 4) as i32);
    }

    /// The CPU's part of one layer, once its hidden states have come.
    pub(super) fn serve(
        &mut self,
        cuda: &Cuda,
        cpu: &mut CpuExperts,
        layer: usize,
        tokens: usize,
        top_k: usize,
    ) -> Result<()> {
        let expected = self.passes[layer].wrapping_add(1);
        self.passes[layer] = expected;
        let done = self.wait(cuda, layer, expected).and_then(|()| self.compute(cpu, layer, tokens, top_k));
        // Whatever happened: the device waits for it.
        self.flag(&self.up, layer).store(expected, Ordering::Release);
        done
    }

    fn flag<'a>(&self, flags: &'a PinnedBuffer<u32>, layer: usize) -> &'a AtomicU32 {
        flags.atomic(layer * LINE)
    }

    /// Waits until the device has published `layer`. Errors: the device failed.
    fn wait(&self, cuda: &Cuda, layer: usize, expected: u32) -> Result<()> {
        let down = self.flag(&self.down, layer);
        let (mut spins, mut since) = (0u32, None);
        while down.load(Ordering::Acquire) != expected {
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1 << 16) {
                cuda.check()?;
                if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    cuda.poll()?;
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn compute(&mut self, cpu: &mut CpuExperts, layer: usize, tokens: usize, top_k: usize) -> Result<()> {
        let (numbers, choices) = (tokens * self.hidden, tokens * top_k);
        let (hidden, h) = (self.hidden, &self.h[..numbers]);
        cpu.each_row(&mut self.x[..numbers], hidden, |t, x| {
            x.iter_mut().zip(&h[t * hidden..]).for_each(|(x, h)| *x = h.to_f32());
        });
        cpu.each_row(&mut self.y[..numbers], hidden, |_, y| y.fill(0.0));
        self.routing.top_k = top_k;
        self.routing.ids.clear();
        self.routing.ids.extend_from_slice(&self.ids[..choices]);
        self.routing.weights.clear();
        self.routing.weights.extend_from_slice(&self.weights[..choices]);
        cpu.submit_rows(layer, &self.x[..numbers], &self.routing)?;
        cpu.finish_rows(&mut self.y[..numbers])
    }
}
