//! Another GPU that holds experts of every layer for this one, which has everything else. Hidden states go out and the
//! sum of its experts comes back, beside the CPU's share, through memory that both see (kernels/handoff.cu).
//!
//! ```text
//! this one    publish                     fetch     in its compute stream, or in its recorded step
//! the other   take      products   give             enqueued by a thread of its own: a layer, or a step's recording
//! ```
//!
//! One that fails says so to the other: nobody waits any longer, and the pass ends with an error.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use half::bf16;

use super::admissions;
use super::epilogue::DeviceEpilogue;
use super::handoff::{self, Outbox};
use super::over_link::NOTHING;
use super::parts::Parts;
use super::products::{Choices, LayerInput, Products, Sink};
use super::residents::Residents;
use super::ring::Crossing;
use super::{FEW_TOKENS, Sizes};
use crate::Result;
use crate::backend::cuda::Tensor;
use crate::cuda::{Address, Cuda, DeviceBuffer, Graph, PinnedBuffer, kernels, launch};
use crate::experts::cost::OtherLink;
use crate::experts::mailbox::{LINE, Room, blocks};
use crate::experts::residency::Residency;
use crate::experts::{CpuExperts, Epilogue, ExpertShape};
use crate::model::Share;

/// How often a GPU that is at work is asked whether it has failed.
const WATCH: Duration = Duration::from_millis(1);

/// What both GPUs see.
pub(super) struct Channel {
    outbox: Outbox,
    stop: PinnedBuffer<u32>, // one number: one of the two has failed
    copied: AtomicU64,       // bytes of experts that have crossed the other one's link
}

impl Channel {
    /// Allocates for passes of `sizes`, on the GPU that has everything else.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, sizes: &Sizes) -> Result<Self> {
        let numbers = sizes.tokens * shape.hidden();
        let choices = sizes.tokens * sizes.top_k;
        let room = Room { x: 2 * numbers, y: 4 * numbers, choices, counters: shape.layers() };
        Ok(Self { outbox: Outbox::new(cuda, &room)?, stop: PinnedBuffer::new(cuda, 1)?, copied: AtomicU64::new(0) })
    }

    fn stop(&self) {
        self.stop.atomic(0).store(1, Ordering::Release);
    }
}

/// Experts of a layer and of the next one that cross the other one's link.
pub(super) type Lists = [Vec<u16>; 2];

/// What the other one is asked to enqueue.
enum Job {
    /// What a layer's tokens chose of it.
    Layer { layer: usize, tokens: usize, crossing: Lists },
    /// All layers of a recorded step.
    Step { tokens: usize },
}

/// The other GPU, as this one sees it.
pub(super) struct Holder {
    channel: Arc<Channel>,
    jobs: Option<Sender<Job>>, // `None`: it is ending
    thread: Option<JoinHandle<()>>,
    link: OtherLink,
}

impl Holder {
    /// Gives `on` the experts that are in VRAM by `residency`, and lets others of prompts cross a ring of `sizes.ring`
    /// at `link` bytes a second. Errors: VRAM ends; `Error::Cache` for a damaged one.
    pub(super) fn new(
        (main, on): (Arc<Cuda>, Arc<Cuda>),
        (cpu, parts): (&mut CpuExperts, &Parts),
        residency: &Residency,
        (sizes, link): (&Sizes, f64),
    ) -> Result<Self> {
        let channel_to = Arc::new(Channel::new(&main, parts.shape(), sizes)?);
        on.enter_thread()?;
        let side = Side::new(&on, parts.shape(), cpu.epilogue(), sizes).and_then(|mut side| {
            side.residents.fill(parts, residency, |layer| cpu.check_layer(layer))?;
            side.parts = Some(Parts::new(cpu.memory().clone(), Share::WHOLE, &[])?);
            Ok(side)
        });
        main.enter_thread()?;
        let (side, (jobs, of_thread)) = (side?, channel());
        let seen = channel_to.clone();
        let serve = move || {
            let fail = |why: &str| {
                main.fail(|| format!("a GPU that holds experts has failed: {why}"));
                seen.stop();
            };
            let served = catch_unwind(AssertUnwindSafe(|| side.serve(&of_thread, &seen, &main, &fail)));
            if served.is_err() {
                fail("a bug in its thread");
            }
        };
        let link = OtherLink { bytes: link, passes: sizes.ring >= 2 };
        Ok(Self { channel: channel_to, jobs: Some(jobs), thread: Some(std::thread::spawn(serve)), link })
    }

    /// What crosses its link.
    pub(super) fn link(&self) -> OtherLink {
        self.link
    }

    /// Bytes of experts that have crossed its link since the start.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.channel.copied.load(Ordering::Relaxed)
    }

    /// Enqueues what brings hidden states and routing to it, to be multiplied with what it holds and what is
    /// `crossing`. Choices are counted in `used`, unless that is null.
    pub(super) fn publish(
        &self,
        cuda: &Cuda,
        input: &LayerInput<'_>,
        (experts, crossing): (usize, Lists),
        used: Address<u32>,
    ) {
        handoff::publish(cuda, &self.channel.outbox, input, (Address::NULL, experts), used, NOTHING);
        if !cuda.is_recording() {
            self.ask(Job::Layer { layer: input.layer, tokens: input.routing.tokens(), crossing });
        }
    }

    /// Lets it compute its part of a recorded step that was launched.
    pub(super) fn step(&self, tokens: usize) {
        self.ask(Job::Step { tokens });
    }

    /// Enqueues the kernel that waits for its sum and adds it; `numbers` elements.
    pub(super) fn fetch(&self, cuda: &Cuda, (layer, numbers): (usize, usize), out: &mut Tensor) {
        let Channel { outbox, stop, .. } = &*self.channel;
        handoff::fetch(cuda, outbox, (layer, numbers), admissions::NOTHING, stop.address(), out);
    }

    fn ask(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job); // one that has ended has said so
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.channel.stop();
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The other GPU's side.
pub(super) struct Side {
    cuda: Arc<Cuda>,
    residents: Residents,
    products: Products,
    parts: Option<Parts>, // of whole experts; `None`: it is planned
    crossing: Crossing,
    marks: DeviceBuffer<u64>, // [experts]: not 0 for those that are multiplied here
    layers: usize,
    hidden: usize,
    top_k: usize,
    x: DeviceBuffer<bf16>,      // [tokens, hidden]
    ids: DeviceBuffer<i32>,     // [tokens, top_k]
    weights: DeviceBuffer<f32>, // [tokens, top_k]
    y: DeviceBuffer<f32>,       // [tokens, hidden]: the sum
    count: DeviceBuffer<u32>,   // [layers]: what was taken
    arrived: DeviceBuffer<u32>, // blocks that are done
}

impl Side {
    /// Takes the VRAM for passes of `sizes`, and for `sizes.resident` experts of each layer.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, epilogue: &Epilogue, sizes: &Sizes) -> Result<Self> {
        let (layers, hidden, top_k) = (shape.layers(), shape.hidden(), sizes.top_k);
        let epilogue = DeviceEpilogue::new(cuda, epilogue, layers, (sizes.share, &(0..shape.intermediate())))?;
        Ok(Self {
            residents: Residents::new(cuda, shape, sizes.resident)?,
            products: Products::new(cuda, shape, epilogue, sizes)?,
            parts: None,
            crossing: Crossing::new(cuda, shape, sizes.ring / 2)?,
            marks: DeviceBuffer::new(cuda, shape.experts)?,
            layers,
            hidden,
            top_k,
            x: DeviceBuffer::new(cuda, sizes.tokens * hidden)?,
            ids: DeviceBuffer::new(cuda, sizes.tokens * top_k)?,
            weights: DeviceBuffer::new(cuda, sizes.tokens * top_k)?,
            y: DeviceBuffer::new(cuda, sizes.tokens * hidden)?,
            count: DeviceBuffer::zeros(cuda, layers)?,
            arrived: DeviceBuffer::zeros(cuda, 1)?,
            cuda: cuda.clone(),
        })
    }

    /// Enqueues what it is asked for, and looks after the two GPUs while there is work under way.
    fn serve(mut self, jobs: &Receiver<Job>, channel: &Channel, main: &Cuda, fail: &dyn Fn(&str)) {
        if let Err(error) = self.cuda.enter_thread() {
            return fail(&error.to_string());
        }
        let mut graphs = HashMap::new();
        let mut is_busy = false;
        loop {
            let job = match is_busy {
                false => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                true => jobs.recv_timeout(WATCH),
            };
            let ran = match job {
                Ok(Job::Layer { layer, tokens, crossing }) => {
                    for (layer, experts) in (layer..self.layers).zip(crossing) {
                        self.crossing.list(layer, experts.into_iter().map(usize::from));
                    }
                    self.layer(channel, layer, tokens);
                    channel.copied.store(self.crossing.copied_bytes(), Ordering::Relaxed);
                    Ok(())
                }
                Ok(Job::Step { tokens }) => self.step(channel, tokens, &mut graphs),
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if let Err(error) = ran.and_then(|()| self.cuda.poll()) {
                fail(&error.to_string());
            }
            if main.check().is_err() {
                channel.stop();
            }
            is_busy = self.cuda.is_busy();
        }
        // Its memory is given up behind this.
        let _ = self.cuda.synchronize();
    }

    /// Enqueues a layer's products with what is published for it, and their sum's way back.
    fn layer(&mut self, Channel { outbox, stop, .. }: &Channel, layer: usize, tokens: usize) {
        let Self { cuda, products, x, y, residents, crossing, parts, marks, .. } = self;
        let (numbers, choices) = (tokens * self.hidden, tokens * self.top_k);
        let (count, mailbox) = (self.count.address().add(layer), &outbox.mailbox);
        launch!(cuda, &cuda.compute, kernels::take, [blocks(2 * numbers), 1, 1];
            mailbox.x.address().cast(), mailbox.ids.address(), mailbox.weights.address(), x.address().cast(),
            self.ids.address(), self.weights.address(), y.address().cast(), (numbers / 8) as i32, choices as i32,
            self.arrived.address(), count, outbox.down.address().add(layer * LINE), stop.address());
        let (stream, table) = (&cuda.compute, residents.table(layer));
        let (ids, weights) = (self.ids.address(), self.weights.address());
        let choices = Choices { layer, tokens, top_k: self.top_k, ids, weights };
        if let (true, Some(parts)) = (crossing.is_listed(layer), parts) {
            let held = |layer| residents.held(layer).to_vec();
            crossing.multiply((parts, products), x.address(), choices, held);
            let mut marked = held(layer);
            crossing.mark(layer, &mut marked);
            cuda.upload(stream, marks.address(), &marked);
            products.combine(stream, marks.address(), choices, &(0..tokens), y.address(), false);
        } else if tokens <= FEW_TOKENS {
            products.few_gate_up(stream, table, x.address(), choices);
            products.few_down(stream, table, choices, y.address(), Sink::ADD);
        } else {
            products.grouped(stream, table, x.address(), choices, Address::NULL);
            products.combine(stream, table, choices, &(0..tokens), y.address(), false);
        }
        launch!(cuda, &cuda.compute, kernels::give, [blocks(4 * numbers), 1, 1];
            y.address().cast(), mailbox.y_address.cast(), (numbers / 4) as i32, self.arrived.address(), count,
            mailbox.up.address().add(layer * LINE));
    }

    /// Launches the recording of all layers, of a pass that has run op by op before.
    fn step(&mut self, channel: &Channel, tokens: usize, graphs: &mut HashMap<usize, Graph>) -> Result<()> {
        (0..self.layers).for_each(|layer| self.crossing.list(layer, []));
        let cuda = self.cuda.clone();
        let all = || {
            (0..self.layers).for_each(|layer| self.layer(channel, layer, tokens));
            Ok(())
        };
        let graph = match graphs.entry(tokens) {
            Entry::Occupied(graph) => graph.into_mut(),
            Entry::Vacant(place) => place.insert(Graph::record(&cuda, all)?),
        };
        graph.launch();
        Ok(())
    }
}

/// A run of the experts that `of` says others hold, as those of a GPU that has nothing else.
pub(super) fn residency_of(of: &Residency, experts: std::ops::Range<usize>) -> Residency {
    let slots = experts.len();
    let order = |layer: usize| {
        let own = of.on_holders(layer)[experts.clone()].to_vec();
        let all = [of.in_vram(layer), of.in_ram(layer), of.on_holders(layer)].concat();
        let others: Vec<u16> = all.into_iter().filter(|expert| !own.contains(expert)).collect();
        [own, others].concat()
    };
    Residency::new((0..of.layers()).map(order), slots, 0)
}
