//! A layer's tokens on their way to the CPU's experts, and their sum on its way back, through memory that both sides
//! see (kernels/handoff.cu).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use half::bf16;

use super::Sizes;
use super::admissions;
use super::products::LayerInput;
use crate::Result;
use crate::backend::Routing;
use crate::backend::cuda::{CudaRouting, Tensor};
use crate::cuda::{Address, Cuda, PinnedBuffer, kernels, launch};
use crate::experts::mailbox::{LINE, Mailbox, Room, blocks};
use crate::experts::residency::Residency;
use crate::experts::{CpuExperts, ExpertShape, FORESEEN_TOKENS};
use crate::machine::heap::Heap;

/// One mailbox for all layers, a counter each.
pub(super) struct Outbox {
    pub(super) mailbox: Mailbox,        // x is bf16, y f32
    pub(super) down: PinnedBuffer<u32>, // [layers, 16]: what the device has published, a line each
}

impl Outbox {
    pub(super) fn new(cuda: &Arc<Cuda>, room: &Room) -> Result<Self> {
        Ok(Self { mailbox: Mailbox::new(cuda, room)?, down: PinnedBuffer::new(cuda, room.counters * LINE)? })
    }
}

/// Enqueues what brings hidden states and routing there; ids that are in `table`, of so many experts, are left out.
/// Choices are counted in `used`, unless that is null, and shared out between the CPU and this GPU as `over_link` says.
pub(super) fn publish(
    cuda: &Cuda,
    outbox: &Outbox,
    input: &LayerInput<'_>,
    (table, experts): (Address<u64>, usize),
    used: Address<u32>,
    over_link: kernels::OverLink,
) {
    let LayerInput { layer, x, routing } = *input;
    let Outbox { down, mailbox: Mailbox { x: h, ids, weights, count, arrived, .. }, .. } = outbox;
    let (numbers, choices) = (routing.tokens() * x.cols(), routing.tokens() * routing.top_k());
    launch!(cuda, &cuda.compute, kernels::publish, [blocks(2 * numbers), 1, 1];
        x.bf16(), routing.ids(), routing.weights(), table, (numbers / 8) as i32, choices as i32, experts as i32,
        h.address().cast(), ids.address(), weights.address(), used, arrived.address(), count.address().add(layer),
        down.address().add(layer * LINE), over_link);
}

/// Enqueues the kernel that waits for the sum and adds it; `numbers` elements. It does not wait where `stop` says so.
pub(super) fn fetch(
    cuda: &Cuda,
    outbox: &Outbox,
    (layer, numbers): (usize, usize),
    coming: kernels::AdmissionRing,
    stop: Address<u32>,
    out: &mut Tensor,
) {
    let Mailbox { y_address: y, up, count, .. } = &outbox.mailbox;
    let blocks = blocks(2 * numbers) + admissions::blocks(&coming);
    launch!(cuda, &cuda.compute, kernels::fetch, [blocks, 1, 1];
        count.address().add(layer), up.address().add(layer * LINE), *y, out.f32(), (numbers / 4) as i32, stop,
        coming);
}

/// The CPU's part.
pub(super) struct Handoff {
    outbox: Outbox,
    passes: Vec<u32>,           // [layers]: what `down` was last
    guesses: PinnedBuffer<u32>, // [layers, FORESEEN_TOKENS, top_k]: experts; beyond the layer's: none
    top_k: usize,
    x: Vec<f32>, // [cpu_tokens, hidden]
    routing: Routing,
    hidden: usize,
}

/// How long the device may take to publish before it is asked whether it has failed, in which case it never will.
/// The driver is not asked sooner: while another thread frees memory, the driver may block every call until all kernels
/// have ended, and those wait for this thread.
const PATIENCE: Duration = Duration::from_secs(10);

impl Handoff {
    /// Allocates for batches of `sizes.cpu_tokens`.
    pub(super) fn new(cuda: &Arc<Cuda>, heap: &Heap, shape: &ExpertShape, sizes: &Sizes) -> Result<Self> {
        let (layers, hidden) = (shape.layers(), shape.hidden());
        let numbers = sizes.cpu_tokens * hidden;
        let room = Room { x: 2 * numbers, y: 4 * numbers, choices: sizes.cpu_tokens * sizes.top_k, counters: layers };
        let mut guesses = PinnedBuffer::new(cuda, layers * FORESEEN_TOKENS * sizes.top_k)?;
        guesses.fill(u32::MAX);
        Ok(Self {
            guesses,
            top_k: sizes.top_k,
            outbox: Outbox::new(cuda, &room)?,
            passes: vec![0; layers],
            x: heap.zeros(&[numbers])?,
            routing: Routing::default(),
            hidden,
        })
    }

    /// Enqueues what brings hidden states and routing to the host; ids that are in `table` are left out. Choices are
    /// counted in `used`, and shared out between the CPU and this GPU as `over_link` says.
    pub(super) fn publish(
        &self,
        cuda: &Cuda,
        input: &LayerInput<'_>,
        (table, experts): (Address<u64>, usize),
        used: Address<u32>,
        over_link: kernels::OverLink,
    ) {
        publish(cuda, &self.outbox, input, (table, experts), used, over_link);
    }

    /// Enqueues what brings a guess of the `layer`'s experts to the host, but for those that are in `table`.
    pub(super) fn foretell(
        &self,
        cuda: &Cuda,
        (layer, experts): (usize, usize),
        guess: &CudaRouting,
        table: Address<u64>,
    ) {
        assert!(guess.tokens() <= FORESEEN_TOKENS && guess.top_k() == self.top_k);
        launch!(cuda, &cuda.compute, kernels::foretell, [1, 1, 1];
            guess.ids(), table, (guess.tokens() * self.top_k) as i32, experts as i32,
            self.guesses.address().add(layer * FORESEEN_TOKENS * self.top_k));
    }

    /// The guess of a layer's experts for `tokens` tokens, best first.
    fn guess(&self, layer: usize, tokens: usize) -> impl Iterator<Item = i32> {
        let (first, top_k) = (layer * FORESEEN_TOKENS * self.top_k, self.top_k);
        let tokens = if tokens <= FORESEEN_TOKENS { tokens } else { 0 };
        let places = (0..top_k).flat_map(move |rank| (0..tokens).map(move |token| first + token * top_k + rank));
        places.map(|place| self.guesses.atomic(place).load(Ordering::Relaxed) as i32)
    }

    /// Enqueues the kernel that waits for the host's sum and adds it; `numbers` elements.
    pub(super) fn fetch(&self, cuda: &Cuda, at: (usize, usize), coming: kernels::AdmissionRing, out: &mut Tensor) {
        fetch(cuda, &self.outbox, at, coming, Address::NULL, out);
    }

    /// What the tokens that were served last have chosen, `[tokens, top_k]`.
    pub(super) fn ids(&self) -> &[i32] {
        &self.routing.ids
    }

    /// The CPU's part of one layer, once its hidden states have come, but for what `residency` says other GPUs hold.
    /// `begins` is called with the experts that were chosen, before they are computed.
    pub(super) fn serve(
        &mut self,
        cuda: &Cuda,
        (cpu, residency): (&mut CpuExperts, &Residency),
        layer: usize,
        (tokens, top_k): (usize, usize),
        begins: impl FnOnce(&[i32]),
    ) -> Result<()> {
        let expected = self.passes[layer].wrapping_add(1);
        self.passes[layer] = expected;
        let down = self.outbox.down.atomic(layer * LINE);
        let guess = self.guess(layer, tokens).filter(|&id| !residency.is_on_holder(layer, id));
        cpu.foresee(layer, guess, &|| down.load(Ordering::Acquire) == expected);
        let come = self.wait(cuda, layer, expected);
        let done = come.and_then(|()| self.compute((cpu, residency), layer, (tokens, top_k), begins));
        // Whatever happened: the device waits for it.
        self.outbox.mailbox.answer(layer, expected);
        done
    }

    /// Waits until the device has published `layer`. Errors: the device failed.
    fn wait(&self, cuda: &Cuda, layer: usize, expected: u32) -> Result<()> {
        let down = self.outbox.down.atomic(layer * LINE);
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

    fn compute(
        &mut self,
        (cpu, residency): (&mut CpuExperts, &Residency),
        layer: usize,
        (tokens, top_k): (usize, usize),
        begins: impl FnOnce(&[i32]),
    ) -> Result<()> {
        let (numbers, choices) = (tokens * self.hidden, tokens * top_k);
        self.routing.top_k = top_k;
        self.routing.ids.clear();
        let left_out = |&id: &i32| if residency.is_on_holder(layer, id) { !id } else { id };
        self.routing.ids.extend(self.outbox.mailbox.ids[..choices].iter().map(left_out));
        begins(&self.routing.ids);
        let (hidden, h) = (self.hidden, &bytemuck::cast_slice::<u8, bf16>(&self.outbox.mailbox.x)[..numbers]);
        cpu.each_row(&mut self.x[..numbers], hidden, |t, x| {
            x.iter_mut().zip(&h[t * hidden..]).for_each(|(x, h)| *x = h.to_f32());
        });
        let y = self.outbox.mailbox.y.get_mut().unwrap_or_else(PoisonError::into_inner);
        let y = &mut bytemuck::cast_slice_mut::<u8, f32>(y)[..numbers];
        cpu.each_row(y, hidden, |_, y| y.fill(0.0));
        self.routing.weights.clear();
        self.routing.weights.extend_from_slice(&self.outbox.mailbox.weights[..choices]);
        cpu.submit_rows(layer, &self.x[..numbers], &self.routing)?;
        cpu.finish_rows(y)
    }
}
