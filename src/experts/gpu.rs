//! Routed experts beside a CUDA backend: in VRAM, streamed into it, or on the CPU, each where it is cheapest.
//!
//! ```text
//! recorded passes   the CPU computes experts that are not in VRAM: kernels publish hidden states and routing into
//!                   memory that both see, and wait for the sum. Of few tokens the GPU reads some of these experts
//!                   itself, over the link (`over_link`). While it waits for the sum, experts that were missing come
//!                   into the slots of others (`experts/pool.rs`), for the steps that follow
//! other passes      experts cross PCIe as they lie in RAM, on a stream of their own, a layer ahead of the compute
//!                   stream; the CPU takes the share that lets both end together. Where few experts of a layer are
//!                   chosen, only those cross, once the routing is known
//!
//! in VRAM, up to FEW_TOKENS tokens   two kernels, without sorting
//! in VRAM, more tokens               sorted by expert, in tiles
//! ```
//!
//! ```text
//! epilogue     biases and activation on the device
//! products     of experts in VRAM: as they are read, or grouped
//! parts        what this rank has of every expert
//! residents    experts that live in VRAM, and the tables of their addresses
//! ring         experts that pass through VRAM
//! admissions   experts on their way into VRAM within a step
//! over_link    experts in RAM that are read over the link beside the CPU's
//! board        memory through which the ranks of a pool agree
//! handoff      the CPU's part, through a mailbox
//! learning     counts of chosen experts
//! holder       another GPU that holds experts for this one
//! together     which experts are in VRAM, on all ranks
//! prompts      experts alone, of another engine's prompts
//! held         experts alone, in VRAM for another engine's decode
//! ```
//!
//! GPUs that are not alike, or do not reach each other's memory, hold whole experts for the first one, which has
//! everything else (`holder`). Of GPUs that are alike each has a part of every expert's width, and the CPU's share is
//! the first one's to add. All ranks decide alike where an expert is computed, and have the same experts in VRAM.
//!
//! Which experts of a layer are on the GPU for a batch is one table of addresses on the device: 0 means the CPU's.

pub(super) mod admissions;
mod board;
mod epilogue;
mod handoff;
pub mod held;
mod holder;
mod learning;
mod over_link;
mod parts;
mod products;
pub mod prompts;
mod residents;
mod ring;
mod together;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::cost::CostModel;
use super::pool::expected_hits;
use super::popularity::Popularity;
use super::residency::Residency;
use super::{CpuExperts, Epilogue, ExpertExecutor, ExpertMemory, ExpertShape, FORESEEN_TOKENS, Traffic};
use crate::Result;
use crate::backend::Dense as _;
use crate::backend::cuda::{CudaBackend, CudaRouting, Tensor};
use crate::cuda::{ALONE, Address, Cuda, Registered, kernels};
use crate::machine::heap::Heap;
use crate::model::Share;
use admissions::{Road, Way};
use epilogue::DeviceEpilogue;
use handoff::Handoff;
use holder::{Channel, Holder, Side};
use learning::Learning;
use over_link::{NOTHING, OverLink};
use parts::Parts;
use products::{Choices, LayerInput, Products, Sink};
use residents::Residents;
use ring::Ring;
use together::{Decider, Together};

/// Tokens up to which experts in VRAM are multiplied as they are read, each once; sorted and in tiles beyond.
/// Measured on an H200.
const FEW_TOKENS: usize = 4;

/// Tokens up to which a batch counts as decode, wherever the user wants prefill.
const NO_PROMPT: usize = 8;

/// What the executor allocates for.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of a part of a pass.
    pub tokens: usize,
    /// Tokens that the CPU may be given.
    pub cpu_tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts of each layer that live in VRAM.
    pub resident: usize,
    /// Experts that the ring holds.
    pub ring: usize,
    /// What this rank has of each.
    pub share: Share,
    /// GPUs that hold experts for this one.
    pub holders: usize,
    /// Experts of each layer that these hold together.
    pub on_holders: usize,
}

impl Sizes {
    /// Of so many experts of a layer, those that are in RAM alone.
    pub fn in_ram(&self, experts: usize) -> usize {
        experts - self.resident - self.on_holders
    }
}

/// All routed experts of a model.
pub struct GpuExperts {
    registered: Arc<Vec<Registered>>, // first: given up while `memory` is still mapped
    cuda: Arc<Cuda>,
    cpu: CpuExperts,
    memory: Arc<ExpertMemory>,
    parts: Arc<Parts>,
    sizes: Sizes,
    costs: CostModel,
    forced: Forced,
    over_link: Option<OverLink>,    // `None`: in decode the CPU reads all experts in RAM
    coming: kernels::AdmissionRing, // of memory that `together` has; null: experts in VRAM stay as at the start
    together: Together,
    residents: Residents,
    ring: Ring,
    products: Products,
    handoff: Handoff,
    holders: Vec<Holder>,
    on_holders: usize, // experts of a layer that these have
    learning: Option<Learning>,
    submitted: Option<Submitted>,
}

/// Where experts run, as far as the user decides it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// Those of prefill.
    pub prefill: Option<Prefill>,
    /// In decode the CPU computes all experts that are in RAM.
    pub decode_on_cpu: bool,
}

/// Where the experts of prefill run, if the user decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// On the CPU.
    Cpu,
    /// On the GPU.
    Gpu,
}

/// The layer that was submitted.
struct Submitted {
    choices: Choices,
    cpu: bool,    // has a part of it that is added here
    shared: bool, // it has, wherever that is added
    hops: bool,   // those that hold experts have a part
    gpu: Option<GpuPart>,
}

/// Which of a layer's experts cross for a batch.
struct Crossings {
    own: usize,            // of those that are not in VRAM here, the first cross this GPU's link
    elsewhere: Vec<usize>, // the next the link of each that holds others
    hops: bool,            // those that hold experts multiply them; else their experts cross here as well
}

/// The GPU's part of a layer.
#[derive(Clone, Copy)]
enum GpuPart {
    /// `h` is there; the products with `down` are to come.
    Few { table: Address<u64> },
    /// `y` is there; the sum is to come.
    Many { table: Address<u64> },
}

/// All memory of an executor but its counts of choices, taken once.
struct Buffers {
    residents: Residents,
    ring: Ring,
    products: Products,
    handoff: Handoff,
    road: Road,
    over_link: over_link::Buffers,
}

impl Buffers {
    /// For experts of a rank's run of their width, and their shape.
    fn new(
        cuda: &Arc<Cuda>,
        heap: &Heap,
        (shape, width): (&ExpertShape, &Range<usize>),
        epilogue: &Epilogue,
        sizes: &Sizes,
    ) -> Result<Self> {
        let half = (sizes.ring / 2).min(sizes.in_ram(shape.experts));
        let epilogue = DeviceEpilogue::new(cuda, epilogue, shape.layers(), (sizes.share, width))?;
        Ok(Self {
            residents: Residents::new(cuda, shape, sizes.resident)?,
            ring: Ring::new(cuda, shape, half)?,
            products: Products::new(cuda, shape, epilogue, sizes)?,
            handoff: Handoff::new(cuda, heap, shape, sizes)?,
            road: Road::new(cuda)?,
            over_link: over_link::Buffers::new(cuda, (shape.layers(), shape.experts), sizes.top_k)?,
        })
    }
}

/// What an executor begins with, beside its sizes.
struct Start {
    learning: Option<Learning>,
    registered: Arc<Vec<Registered>>,
    together: Together,
}

/// Counts of choices, unless every expert is in VRAM.
fn learning(
    cuda: &Arc<Cuda>,
    shape: &ExpertShape,
    sizes: &Sizes,
    popularity: Popularity,
    path: Option<PathBuf>,
) -> Result<Option<Learning>> {
    match sizes.resident == shape.experts || sizes.share.rank > 0 {
        true => Ok(None),
        false => Learning::new(cuda, popularity, path, shape.layers() * shape.experts).map(Some),
    }
}

impl GpuExperts {
    /// Takes over experts in RAM, copies those that are to live in VRAM, and pins the others where they lie.
    ///
    /// Errors: `Error::Cache` for a damaged expert that is copied; `Error::Resources` where VRAM ends.
    pub fn new(
        cuda: Arc<Cuda>,
        heap: &Heap,
        cpu: CpuExperts,
        sizes: Sizes,
        costs: CostModel,
        forced: Forced,
    ) -> Result<Self> {
        let memory = cpu.memory().clone();
        let (cache, shape) = (memory.cache(), memory.shape());
        let (layers, experts) = (shape.layers(), shape.experts);
        let (popularity, path) = (Popularity::of(cache), Popularity::path_of(cache));
        let crosses = sizes.ring >= 2 || sizes.resident > 0 || (sizes.share.is_whole() && !forced.decode_on_cpu);
        let registered = match crosses && sizes.in_ram(experts) > 0 {
            true => memory.pin(),
            false => Vec::new(),
        };
        let orders = (0..layers).map(|layer| popularity.order(layer));
        let residency = Residency::new(orders, sizes.resident, sizes.on_holders);
        let start = Start {
            learning: learning(&cuda, &shape, &sizes, popularity, path)?,
            registered: Arc::new(registered),
            together: Together::first(Decider::new(residency, &shape)),
        };
        let (mut first, way) = Self::begin(cuda, heap, cpu, (sizes, costs, forced), start)?;
        first.together.add(way);
        Ok(first)
    }

    /// Another rank's, beside those of the `first`, before anything runs. Errors: as [`new`](GpuExperts::new).
    pub fn of_rank(cuda: Arc<Cuda>, heap: &Heap, cpu: CpuExperts, share: Share, first: &mut Self) -> Result<Self> {
        let start =
            Start { learning: None, registered: first.registered.clone(), together: first.together.with_another() };
        let sizes = Sizes { share, ..first.sizes };
        let (rank, way) = Self::begin(cuda, heap, cpu, (sizes, first.costs, first.forced), start)?;
        if way.is_none() {
            first.coming = admissions::NOTHING; // nothing comes to one rank alone
        }
        first.together.add(way);
        Ok(rank)
    }

    /// Gives `on` so many of the experts that others are to hold, the most chosen first, before anything runs. Others
    /// may pass through a ring there in prompts, over a link of so many bytes a second. Errors: as
    /// [`new`](GpuExperts::new).
    pub fn hold(&mut self, on: Arc<Cuda>, experts: usize, (ring, link): (usize, f64)) -> Result<()> {
        let from = self.on_holders;
        self.on_holders += experts;
        assert!(self.on_holders <= self.sizes.on_holders, "others hold {} experts of a layer", self.sizes.on_holders);
        let residency = holder::residency_of(self.together.residency(), from..self.on_holders);
        let sizes = Sizes { resident: experts, ring, holders: 0, on_holders: 0, ..self.sizes };
        let devices = (self.cuda.clone(), on);
        self.holders.push(Holder::new(devices, (&mut self.cpu, &self.parts), &residency, (&sizes, link))?);
        Ok(())
    }

    fn begin(
        cuda: Arc<Cuda>,
        heap: &Heap,
        mut cpu: CpuExperts,
        (sizes, costs, forced): (Sizes, CostModel, Forced),
        Start { learning, registered, together }: Start,
    ) -> Result<(Self, Option<Way>)> {
        let memory = cpu.memory().clone();
        let parts = Arc::new(Parts::new(memory.clone(), sizes.share, &registered)?);
        let shape = parts.shape();
        let Buffers { mut residents, ring, products, handoff, road, over_link } =
            Buffers::new(&cuda, heap, (shape, parts.width()), cpu.epilogue(), &sizes)?;
        residents.fill(&parts, together.residency(), |layer| cpu.check_layer(layer))?;
        let (coming, way) = match sizes.resident > 0 && parts.are_for_kernels() {
            true => {
                let (slots, begin) = residents.slots();
                (road.for_kernels(), Some(Way::new(parts.clone(), slots, begin, road)))
            }
            false => (admissions::NOTHING, None),
        };
        let elsewhere = (sizes.resident + sizes.on_holders) as f64 / shape.experts as f64;
        let wanted = sizes.top_k as f64 * (1.0 - expected_hits(elsewhere));
        let over_link = match sizes.in_ram(shape.experts) > 0 && !forced.decode_on_cpu {
            true => OverLink::new(&parts, over_link, &costs, wanted),
            false => None,
        };
        let experts = Self {
            learning,
            over_link,
            together,
            parts,
            ring,
            products,
            handoff,
            holders: Vec::new(),
            on_holders: 0,
            residents,
            coming,
            sizes,
            costs,
            forced,
            submitted: None,
            memory,
            cpu,
            cuda,
            registered,
        };
        Ok((experts, way))
    }

    /// Counts on a device and a heap of a plan what [`new`](GpuExperts::new) takes, and returns the bytes of VRAM.
    pub fn count(
        cuda: &Arc<Cuda>,
        heap: &Heap,
        shape: &ExpertShape,
        epilogue: &Epilogue,
        sizes: &Sizes,
    ) -> Result<u64> {
        let before = cuda.allocated();
        let (shape, width) = &shape.part(sizes.share)?;
        let _buffers = Buffers::new(cuda, heap, (shape, width), epilogue, sizes)?;
        let _learning = learning(cuda, shape, sizes, Popularity::new(shape.layers(), shape.experts), None)?;
        let _channels = (0..sizes.holders).map(|_| Channel::new(cuda, shape, sizes)).collect::<Result<Vec<_>>>()?;
        Ok(cuda.allocated() - before)
    }

    /// The same of a GPU that holds `experts` of each layer for one of `sizes`, and lets others pass through a `ring`.
    pub fn count_holder(
        cuda: &Arc<Cuda>,
        shape: &ExpertShape,
        epilogue: &Epilogue,
        (sizes, experts, ring): (&Sizes, usize, usize),
    ) -> Result<u64> {
        let before = cuda.allocated();
        let _side = Side::new(cuda, shape, epilogue, &Sizes { resident: experts, ring, ..*sizes })?;
        Ok(cuda.allocated() - before)
    }

    /// Experts of a layer, wherever they are.
    fn experts(&self) -> usize {
        self.memory.cache().num_experts()
    }

    /// Experts of a layer that cross PCIe for a batch of `tokens`.
    fn streamed(&self, tokens: usize, layer: usize) -> usize {
        let others = self.together.residency().in_ram(layer).len();
        let must = tokens > self.sizes.cpu_tokens;
        match self.forced.prefill {
            // There is no room for two experts.
            _ if self.sizes.ring < 2 => 0,
            // Nothing can be copied by hand in a recording.
            _ if self.cuda.is_rehearsing() => 0,
            Some(Prefill::Cpu) if !must => 0,
            Some(Prefill::Gpu) if tokens > NO_PROMPT => others,
            _ if must => others,
            _ => {
                let layout = self.memory.cache().layout(self.together.residency().layers() / 2); // stands for all
                self.costs.streamed(others, self.experts(), tokens, self.sizes.top_k, &layout)
            }
        }
    }

    /// Bytes of experts that have crossed the links of GPUs that hold others.
    pub fn copied_beside(&self) -> u64 {
        self.holders.iter().map(Holder::copied_bytes).sum()
    }

    /// Where those cross, and those that others hold.
    fn crossing(&self, tokens: usize, layer: usize) -> Crossings {
        let streamed = self.streamed(tokens, layer);
        let residency = self.together.residency();
        let (in_ram, held) = (residency.in_ram(layer).len(), residency.on_holders(layer).len());
        // Where the CPU has a share, or few are chosen, hidden states would take longer than experts.
        let all = in_ram > 0 && streamed == in_ram && !CostModel::picks(self.experts(), tokens, self.sizes.top_k);
        if self.holders.is_empty() || !all {
            return Crossings { own: streamed, elsewhere: vec![0; self.holders.len()], hops: true };
        }
        let (bytes, hidden) = (self.memory.cache().layout(layer).bytes(), self.parts.shape().hidden());
        let links: Vec<_> = self.holders.iter().map(Holder::link).collect();
        match self.costs.divided((in_ram, held), bytes, tokens * hidden, &links) {
            Some(shares) => Crossings { own: shares[0], elsewhere: shares[1..].to_vec(), hops: true },
            None => Crossings { own: in_ram + held, elsewhere: vec![0; links.len()], hops: false },
        }
    }

    /// The experts of `layer` that cross the link of each GPU that holds others.
    fn crossing_elsewhere(&self, tokens: usize, layer: usize) -> Vec<Vec<u16>> {
        if layer == self.together.residency().layers() {
            return vec![Vec::new(); self.holders.len()];
        }
        let Crossings { own, elsewhere, .. } = self.crossing(tokens, layer);
        let mut rest = &self.together.residency().not_in_vram(layer)[own..];
        let mut take = |&n: &usize| {
            let (own, others) = rest.split_at(n);
            rest = others;
            own.to_vec()
        };
        elsewhere.iter().map(&mut take).collect()
    }

    /// Where choices of `layer` are counted.
    fn counts(&self, layer: usize) -> Address<u32> {
        self.learning.as_ref().map_or(Address::NULL, |learning| learning.counts(layer * self.experts()))
    }

    /// Ends the submitted layer.
    fn end(&mut self, out: &mut Tensor, sink: Sink) -> Result<()> {
        let Some(Submitted { choices, cpu, gpu, hops, .. }) = self.submitted.take() else {
            panic!("`finish` comes after `submit`")
        };
        let stream = &self.cuda.compute;
        match gpu {
            None => {}
            Some(GpuPart::Few { table }) => self.products.few_down(stream, table, choices, out.f32(), sink),
            Some(GpuPart::Many { table }) => {
                self.products.combine(stream, table, choices, &(0..choices.tokens), out.f32(), sink.over)
            }
        }
        let Choices { layer, tokens, top_k, .. } = choices;
        let coming = if self.cuda.is_rehearsing() { self.coming } else { admissions::NOTHING };
        for holder in self.holders.iter().filter(|_| hops) {
            holder.fetch(&self.cuda, (layer, tokens * out.cols()), out);
        }
        match cpu {
            true => self.handoff.fetch(&self.cuda, (layer, tokens * out.cols()), coming, out),
            false => admissions::admit(&self.cuda, coming),
        }
        if cpu && !self.cuda.is_recording() {
            let cpu = (&mut self.cpu, self.together.residency());
            self.handoff.serve(&self.cuda, cpu, layer, (tokens, top_k), |_| {})?;
        }
        Ok(())
    }
}

impl ExpertExecutor<CudaBackend> for GpuExperts {
    fn submit(&mut self, layer: usize, x: &Tensor, routing: &CudaRouting) -> Result<()> {
        let input = LayerInput { layer, x, routing };
        let (tokens, experts, resident) = (routing.tokens(), self.experts(), self.sizes.resident);
        assert_eq!(self.on_holders, self.sizes.on_holders, "experts that others are to hold are held");
        assert!(tokens <= self.sizes.tokens && self.submitted.is_none());
        let streamed = self.streamed(tokens, layer);
        let Crossings { own, hops, .. } = self.crossing(tokens, layer);
        let shared = match self.cuda.is_rehearsing() {
            true => self.sizes.in_ram(experts) > 0, // whatever is in VRAM now: it is recorded
            false => streamed < self.together.residency().in_ram(layer).len(),
        };
        // It is the first rank that hands the CPU its share and adds it.
        let cpu = shared && self.sizes.share.rank == 0;
        assert!(!cpu || tokens <= self.sizes.cpu_tokens, "the CPU was given more tokens than was allocated for");
        let over_link = self.over_link.as_ref();
        let over_link = over_link.filter(|_| cpu && self.cuda.is_rehearsing() && tokens <= FEW_TOKENS);
        let table = match streamed {
            0 => self.residents.table(layer),
            _ => self.residents.marks(self.together.residency(), layer, own),
        };
        if cpu {
            // First, so that the CPU begins while the device goes on.
            let over_link = over_link.map_or(NOTHING, |over_link| over_link.of_layer(layer, tokens));
            self.handoff.publish(&self.cuda, &input, (table, experts), self.counts(layer), over_link);
        }
        let mut counted = cpu;
        if hops && !self.holders.is_empty() {
            let elsewhere = [layer, layer + 1].map(|layer| self.crossing_elsewhere(tokens, layer));
            if elsewhere[0].iter().any(|experts| !experts.is_empty()) {
                self.cpu.check_layer(layer)?; // a damaged expert ends the pass
            }
            let [now, next] = elsewhere;
            for (holder, crossing) in self.holders.iter().zip(now.into_iter().zip(next)) {
                let used = if counted { Address::NULL } else { self.counts(layer) };
                holder.publish(&self.cuda, &input, (experts, crossing.into()), used);
                counted = true;
            }
        }
        let mut choices = Choices::from(&input);
        let gpu = if streamed > 0 {
            match CostModel::picks(experts, tokens, routing.top_k()) {
                true => self.stream_chosen(own, &input, counted)?,
                false => self.stream(own, &input, counted)?,
            }
            Some(GpuPart::Many { table })
        } else if resident == 0 && over_link.is_none() {
            None
        } else if tokens <= FEW_TOKENS {
            let table = over_link.map_or(table, |over_link| over_link.table(layer));
            choices = over_link.map_or(choices, |over_link| over_link.own(choices));
            self.products.few_gate_up(&self.cuda.compute, table, x.bf16(), choices);
            Some(GpuPart::Few { table })
        } else {
            self.products.grouped(&self.cuda.compute, table, x.bf16(), choices, Address::NULL);
            Some(GpuPart::Many { table })
        };
        if streamed == 0 && tokens <= FEW_TOKENS && (gpu.is_some() || counted) {
            // The shared expert reads `x`, and nothing of the above, which has waited for it.
            self.cuda.promise_independent();
        }
        self.submitted = Some(Submitted { choices, cpu, shared, hops, gpu });
        Ok(())
    }

    fn finish(&mut self, out: &mut Tensor) -> Result<()> {
        self.end(out, Sink::ADD)
    }

    fn finish_of_rank(&mut self, backend: &CudaBackend, out: &mut Tensor, over: bool) -> Result<bool> {
        backend.keep_pace();
        let submitted = self.submitted.as_ref().expect("`finish` comes after `submit`");
        let Submitted { choices, cpu, shared, hops, gpu } = *submitted;
        let alone = self.holders.is_empty();
        match gpu {
            // What nothing else is added to is summed as it is made, by the same kernels on all ranks.
            Some(GpuPart::Few { .. }) if !shared && alone => {
                let sum = backend.sum_within_kernels(out);
                self.end(out, Sink { over, sum: sum.unwrap_or(ALONE) })?;
                Ok(sum.is_some())
            }
            Some(GpuPart::Many { table }) if !shared && alone => {
                let stream = &self.cuda.compute;
                let is_summed = backend.sum_as_it_is_made(out, |rows| {
                    self.products.combine(stream, table, choices, rows, out.f32(), over);
                });
                self.submitted = Some(Submitted { choices, cpu, shared, hops, gpu: None });
                self.end(out, Sink::ADD)?;
                Ok(is_summed)
            }
            gpu => {
                if over && gpu.is_none() {
                    backend.clear(out);
                }
                self.end(out, Sink { over, sum: ALONE })?;
                Ok(false)
            }
        }
    }

    fn foresees(&self) -> bool {
        let layers = self.together.residency().layers();
        let waits = |s: &Submitted| s.cpu && s.choices.tokens <= FORESEEN_TOKENS && s.choices.layer + 1 < layers;
        self.cuda.is_rehearsing() && self.submitted.as_ref().is_some_and(waits)
    }

    fn foresee(&mut self, guess: &CudaRouting) {
        let submitted = self.submitted.as_ref().expect("`foresees` said so");
        let layer = submitted.choices.layer + 1;
        self.handoff.foretell(&self.cuda, (layer, self.experts()), guess, self.residents.table(layer));
    }

    fn replayed(&mut self, tokens: usize) -> Result<()> {
        self.holders.iter().for_each(|holder| holder.step(tokens));
        if self.sizes.in_ram(self.experts()) == 0 {
            return Ok(());
        }
        let Together::First { decider, .. } = &mut self.together else { return Ok(()) };
        let mut failed = Ok(());
        let layers = decider.pool.residency().layers();
        let (begun, misses) = (Instant::now(), decider.pool.choices().misses);
        self.cpu.begin_step(tokens, self.over_link.as_ref().map_or(0, |over_link| over_link.eighths(tokens)));
        let link = self.over_link.as_ref().map_or(0.0, OverLink::reads);
        for layer in 0..layers {
            if layer + 1 == layers {
                // While the device is busy. What is sent into these slots is shown in the next step.
                decider.make_room();
            }
            // All layers, whatever happened in one: the device waits in each.
            let Decider { pool, admissions, .. } = &mut **decider;
            let (cpu, batch) = ((&mut self.cpu, pool.residency()), (tokens, self.sizes.top_k));
            failed =
                failed.and(self.handoff.serve(&self.cuda, cpu, layer, batch, |ids| admissions.begin_layer(ids, link)));
            if failed.is_ok() {
                decider.chosen(layer, self.handoff.ids());
            }
        }
        let seconds = begun.elapsed().as_secs_f32();
        self.cpu.end_step(tokens, seconds);
        let saved = decider.turn();
        if let Some(over_link) = &mut self.over_link {
            let wanted = (decider.pool.choices().misses - misses) as usize;
            over_link.took(tokens, (layers, wanted), (seconds, saved));
        }
        failed
    }

    fn between_passes(&mut self) -> Result<()> {
        self.together.turn()?;
        let residency = self.together.residency();
        if let Some(over_link) = &mut self.over_link {
            for expert in self.cpu.newly_checked() {
                over_link.is_checked(expert, &self.residents, residency);
            }
            over_link.update(&self.residents, residency);
            over_link.bring(&self.cuda);
        }
        if !residency.moves().is_empty() {
            self.residents.update(residency);
            residency.moves().iter().for_each(|moved| self.ring.forget(moved.layer));
            self.together.forget_moves();
        }
        match &mut self.learning {
            Some(learning) => learning.pass(&self.cuda, self.sizes.top_k),
            None => Ok(()),
        }
    }

    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.cpu.foresight_gain(tokens)
    }

    fn traffic(&self) -> Traffic {
        let Traffic { link, vram, choices, .. } = self.together.traffic();
        let link = link + self.ring.copied_bytes() + self.copied_beside();
        Traffic { link, vram, choices, ..ExpertExecutor::traffic(&self.cpu) }
    }

    fn resident(&self) -> usize {
        self.sizes.resident
    }

    fn crosses(&self) -> bool {
        self.sizes.ring > 0
    }
}
