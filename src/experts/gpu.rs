//! Routed experts beside a CUDA backend: in VRAM, streamed into it, or on the CPU, each where it is cheapest.
//!
//! ```text
//! few tokens    experts in VRAM by two kernels; the CPU computes the others: kernels publish hidden states and routing into
//!               memory that both see, and wait for the sum; nothing is copied or called in between
//! many tokens   experts cross PCIe as they lie in RAM, on a stream of their own, a layer ahead of the compute stream;
//!               grouped products read them in that form; in between, the CPU takes the share that lets both end together. Where
//!               few of a layer are chosen, only those cross, once the routing is known
//! ```
//!
//! Which experts of a layer are on the GPU for a batch is one table of addresses on the device: 0 means the CPU's.

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::ExpertLayout;

use super::cpu::PARALLEL_VALUES;
use super::residency::{Move, Use};
use super::{CpuExperts, ExpertExecutor, ExpertMemory, Traffic};
use crate::Result;
use crate::backend::Routing;
use crate::backend::cuda::{CudaBackend, CudaRouting, Tensor, packed};
use crate::cuda::{Address, Cuda, DeviceBuffer, Event, PinnedBuffer, Registered, launch};
use crate::workers::Shared;

/// Tokens up to which experts in VRAM are multiplied as they are read, once for each token; sorted and in tiles beyond. Measured on an H200.
const FEW_TOKENS: usize = 4;

/// Tokens up to which a batch is no prompt, whatever the user says of prompts.
const NO_PROMPT: usize = 8;

/// What can be done with a batch, from measured speeds.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    /// Bytes of experts that the CPU reads in a second.
    pub cpu_bytes: f64,
    /// Products of a weight and an activation that it computes in a second, many tokens to an expert.
    pub cpu_products: f64,
    /// Bytes that cross PCIe in a second.
    pub pcie_bytes: f64,
}

impl Speeds {
    /// What kernels reach of plain reading's bandwidth.
    pub const CPU_SHARE: f64 = 0.9;

    /// Seconds that the CPU takes for one of `all` experts of a layer, in the mean, for a batch of `tokens` with `top_k` each.
    pub fn cpu_seconds(&self, all: usize, tokens: usize, top_k: usize, layout: &ExpertLayout) -> f64 {
        let weights = (3 * layout.gate.n * layout.gate.k) as f64;
        let share = top_k as f64 / all as f64;
        let chosen = Self::chosen(all, tokens, top_k);
        (chosen * layout.bytes() as f64 / self.cpu_bytes).max(tokens as f64 * share * weights / self.cpu_products)
    }

    /// The share of `all` experts that at least one of `tokens` tokens chooses, in the mean.
    fn chosen(all: usize, tokens: usize, top_k: usize) -> f64 {
        1.0 - (1.0 - top_k as f64 / all as f64).powi(tokens.min(1 << 20) as i32)
    }

    /// Whether so few experts are chosen that only those should cross.
    fn picks(all: usize, tokens: usize, top_k: usize) -> bool {
        Self::chosen(all, tokens, top_k) < 0.7
    }

    /// How many of `experts` to stream for `tokens` tokens with `top_k` each, so that PCIe and CPU end together.
    pub fn streamed(&self, experts: usize, all: usize, tokens: usize, top_k: usize, layout: &ExpertLayout) -> usize {
        let cpu = self.cpu_seconds(all, tokens, top_k, layout);
        let crossing = if Self::picks(all, tokens, top_k) { Self::chosen(all, tokens, top_k) } else { 1.0 };
        let stream = crossing * layout.bytes() as f64 / self.pcie_bytes;
        let together = |n: usize| (n as f64 * stream).max((experts - n) as f64 * cpu);
        // A split costs the hand-over of all hidden states: it must pay.
        let (all_cpu, all_streamed) = (experts as f64 * cpu, experts as f64 * stream);
        let best = (0..=experts).min_by(|&a, &b| together(a).total_cmp(&together(b))).unwrap_or(0);
        match together(best) < 0.85 * all_cpu.min(all_streamed) {
            true => best,
            false if all_cpu <= all_streamed => 0,
            false => experts,
        }
    }
}

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
}

/// All routed experts of a model.
pub struct GpuExperts {
    _registered: Vec<Registered>, // first: given up while `memory` is still mapped
    cuda: Arc<Cuda>,
    cpu: CpuExperts,
    memory: Arc<ExpertMemory>,
    layout: ExpertLayout,
    format: packed::Format,
    layers: usize,
    experts: usize,
    sizes: Sizes,
    speeds: Speeds,
    forced: Option<Prefill>,

    resident: DeviceBuffer<u8>,                // [layers, resident, stride]
    order: Vec<Vec<u16>>,                      // [layers]: experts, residents first
    tables: DeviceBuffer<u64>,                 // [layers, experts]: addresses of residents
    host_tables: Vec<u64>,                     // the same
    marks: Option<(usize, DeviceBuffer<u64>)>, // not 0 for residents and so many others

    ring: Ring,
    checked: Vec<bool>, // [layers]

    // Work space of the grouped products.
    pair_slot: DeviceBuffer<i32>,
    offsets: DeviceBuffer<i32>,
    tiles: DeviceBuffer<i32>,
    h: DeviceBuffer<bf16>,
    y: DeviceBuffer<bf16>,

    handoff: Handoff,
    streamed_bytes: u64,
    submitted: Option<Submitted>,
    learning: Option<Learning>,
}

/// Counts of chosen experts on their way from the device, and what follows from them.
struct Learning {
    used: Use,
    path: Option<PathBuf>,
    counts: DeviceBuffer<u32>,   // [layers, experts], since the start
    snapshot: PinnedBuffer<u32>, // the same, as they were some passes ago
    taken: Event,                // when `snapshot` had come
    before: Vec<u32>,            // the snapshot before
    passes: u32,
    moves: Vec<Move>, // still to be made
    saved: Instant,
}

/// Passes from one look at the counts to the next.
const LOOK: u32 = 64;

/// Experts that change places before one pass.
const MOVES: usize = 2;

/// Counts are saved so often, and at the end.
const SAVE: Duration = Duration::from_secs(60);

/// Where prompts' experts run, if the user says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// On the CPU.
    Cpu,
    /// On the GPU.
    Gpu,
}

/// The layer that was submitted.
struct Submitted {
    layer: usize,
    tokens: usize,
    top_k: usize,
    ids: Address<i32>,
    weights: Address<f32>,
    cpu: bool,
    /// What the GPU will add when it is done.
    gpu: Option<Gpu>,
}

/// The GPU's part of a layer.
#[derive(Clone, Copy)]
enum Gpu {
    /// `h` is there; the products with `down` are to come.
    Few { table: Address<u64> },
    /// `y` is there; the sum is to come.
    Many { table: Address<u64> },
}

/// Memory that both sides see.
struct Handoff {
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
fn handoff_blocks(numbers: usize) -> usize {
    (numbers >> 14).clamp(1, 16)
}

/// How long the device may take to publish before it is asked whether it has failed, in which case it never will. Nothing is asked of the driver sooner: while
/// another thread gives memory back, it may answer nobody before all kernels have ended, and those wait for this thread.
const PATIENCE: Duration = Duration::from_secs(10);

/// Words of a cache line.
const LINE: usize = 16;

/// Two halves of VRAM that experts pass through: one is filled while the other is used.
struct Ring {
    bytes: DeviceBuffer<u8>,   // [2, half, stride]
    half: usize,               // experts of a half
    tables: DeviceBuffer<u64>, // [2, experts]
    filled: [Event; 2],
    used: [Event; 2],
    holds: [Option<(usize, Range<usize>)>; 2], // layer, and places in its order
}

impl GpuExperts {
    /// Takes over experts in RAM, copies those that are to live in VRAM, and pins the others where they lie.
    ///
    /// Errors: `Error::Cache` for a damaged expert that is copied; `Error::Resources` where VRAM ends.
    pub fn new(
        cuda: Arc<Cuda>,
        mut cpu: CpuExperts,
        precision: Precision,
        sizes: Sizes,
        speeds: Speeds,
        forced: Option<Prefill>,
    ) -> Result<Self> {
        let memory = cpu.memory().clone();
        let (layers, experts, layout) = (memory.cache().num_layers(), memory.cache().num_experts(), memory.cache().layout());
        let stride = memory.stride();
        let path = memory.cache().is_file().then(|| Use::path_of(memory.cache().path()));
        let saved = path.as_deref().and_then(|path| Use::load(path, layers, experts));
        let used = saved.unwrap_or_else(|| Use::new(layers, experts));
        let order: Vec<Vec<u16>> = (0..layers).map(|layer| used.order(layer)).collect();

        let resident = DeviceBuffer::new(&cuda, layers * sizes.resident * stride)?;
        let mut tables = vec![0u64; layers * experts];
        for (layer, order) in order.iter().enumerate().filter(|_| sizes.resident > 0) {
            cpu.check_layer(layer)?;
            for (place, &expert) in order[..sizes.resident].iter().enumerate() {
                let to = resident.address().add((layer * sizes.resident + place) * stride);
                let expert = expert as usize;
                memory.each_run(layer, expert..expert + 1, |offset, bytes| cuda.upload(&cuda.copy, to.add(offset), bytes));
                tables[layer * experts + expert] = to.to_u64();
            }
        }
        cuda.synchronize()?;

        let pairs = sizes.tokens * sizes.top_k;
        let streams = sizes.ring >= 2;
        let registered = match streams && sizes.resident < experts {
            // Not pinned is slower, not wrong: some systems allow it for no memory of files.
            true => memory.regions().into_iter().map_while(|region| Registered::new(region, !memory.is_copy()).ok()).collect(),
            false => Vec::new(),
        };
        let learning = match sizes.resident == experts {
            true => None,
            false => Some(Learning {
                used,
                path,
                counts: DeviceBuffer::zeros(&cuda, layers * experts)?,
                snapshot: PinnedBuffer::new(&cuda, layers * experts)?,
                taken: Event::new(&cuda)?,
                before: vec![0; layers * experts],
                passes: 0,
                moves: Vec::new(),
                saved: Instant::now(),
            }),
        };
        let half = (sizes.ring / 2).min(experts - sizes.resident);
        Ok(Self {
            format: precision.into(),
            layers,
            experts,
            speeds,
            forced,
            tables: DeviceBuffer::from_slice(&cuda, &tables)?,
            marks: None,
            ring: Ring::new(&cuda, half, stride, experts)?,
            checked: vec![false; layers],
            pair_slot: DeviceBuffer::new(&cuda, pairs)?,
            offsets: DeviceBuffer::new(&cuda, experts + 1)?,
            tiles: DeviceBuffer::new(&cuda, 4 * (pairs / 16 + experts + 1))?,
            h: DeviceBuffer::new(&cuda, pairs * layout.down.k)?,
            y: DeviceBuffer::new(&cuda, pairs * layout.down.n)?,
            handoff: Handoff::new(&cuda, layers, layout.gate.k, &sizes)?,
            host_tables: tables,
            resident,
            order,
            layout,
            memory,
            sizes,
            cpu,
            cuda,
            _registered: registered,
            streamed_bytes: 0,
            submitted: None,
            learning,
        })
    }

    /// Bytes of VRAM that [`new`](GpuExperts::new) takes.
    pub fn device_bytes(layout: &ExpertLayout, layers: usize, experts: usize, sizes: &Sizes) -> u64 {
        let (stride, pairs) = (layout.bytes().next_multiple_of(64), sizes.tokens * sizes.top_k);
        let ring = 2 * (sizes.ring / 2).min(experts - sizes.resident);
        let work = pairs * (4 + 2 * layout.down.k + 2 * layout.down.n + 1) + 16 * (experts + 1);
        ((layers * sizes.resident + ring) * stride + work + 20 * layers * experts) as u64
    }

    /// Bytes of pinned RAM that [`new`](GpuExperts::new) takes, and of what is converted for the CPU.
    pub fn host_bytes(layout: &ExpertLayout, layers: usize, sizes: &Sizes) -> u64 {
        let (hidden, tokens) = (layout.gate.k, sizes.cpu_tokens);
        (tokens * (2 * hidden + 4 * hidden + 4 * hidden + 8 * sizes.top_k) + 2 * layers * LINE * 4) as u64
    }

    /// Experts of a layer that cross PCIe for a batch of `tokens`.
    fn streamed(&self, tokens: usize) -> usize {
        let others = self.experts - self.sizes.resident;
        let must = tokens > self.sizes.cpu_tokens;
        match self.forced {
            // There is no room for two experts.
            _ if self.sizes.ring < 2 => 0,
            _ if self.cuda.is_recording() => 0,
            Some(Prefill::Cpu) if !must => 0,
            Some(Prefill::Gpu) if tokens > NO_PROMPT => others,
            _ if must => others,
            _ => self.speeds.streamed(others, self.experts, tokens, self.sizes.top_k, &self.layout),
        }
    }

    /// Where choices of `layer` are counted.
    fn counts(&self, layer: usize) -> Address<u32> {
        self.learning.as_ref().map_or(Address::NULL, |l| l.counts.address().add(layer * self.experts))
    }

    /// Gives an outsider the place of a resident. Its copy and the new addresses come before the next pass in the compute stream.
    fn make(&mut self, Move { layer, resident, outsider }: Move) -> Result<()> {
        self.cpu.check_layer(layer)?;
        let Self { cuda, memory, order, host_tables, tables, experts, sizes, ring, .. } = self;
        let to = self.resident.address().add((layer * sizes.resident + resident) * memory.stride());
        let row = &mut host_tables[layer * *experts..(layer + 1) * *experts];
        let (old, new) = (order[layer][resident] as usize, order[layer][outsider] as usize);
        order[layer].swap(resident, outsider);
        (row[old], row[new]) = (0, to.to_u64());
        memory.each_run(layer, new..new + 1, |offset, bytes| cuda.upload(&cuda.compute, to.add(offset), bytes));
        cuda.upload(&cuda.compute, tables.address().add(layer * *experts), row);
        // What was said of this layer's places is no longer so.
        self.marks = None;
        ring.holds.iter_mut().filter(|held| held.as_ref().is_some_and(|(l, _)| *l == layer)).for_each(|held| *held = None);
        Ok(())
    }

    /// Addresses of residents of `layer`.
    fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.experts)
    }

    /// A table of `layer` that is not 0 for residents and for `streamed` others.
    fn marks(&mut self, layer: usize, streamed: usize) -> Result<Address<u64>> {
        if self.marks.as_ref().is_none_or(|(n, _)| *n != streamed) {
            let mut marks = vec![0u64; self.layers * self.experts];
            for (layer, order) in self.order.iter().enumerate() {
                for &expert in &order[..self.sizes.resident + streamed] {
                    marks[layer * self.experts + expert as usize] = 1;
                }
            }
            // A pass that still runs reads the old one.
            self.cuda.synchronize()?;
            self.marks = Some((streamed, DeviceBuffer::from_slice(&self.cuda, &marks)?));
        }
        Ok(self.marks.as_ref().map_or(Address::NULL, |(_, marks)| marks.address().add(layer * self.experts)))
    }

    /// Enqueues the copies of some experts of `layer` into half `slot` of the ring, unless they are there.
    fn fill(&mut self, slot: usize, layer: usize, places: Range<usize>) -> Result<()> {
        if self.ring.holds[slot].as_ref() == Some(&(layer, places.clone())) {
            return Ok(());
        }
        let mut numbers: Vec<usize> = self.order[layer][places.clone()].iter().map(|&expert| expert as usize).collect();
        numbers.sort_unstable();
        // Residents are computed with the first half.
        self.copy(slot, layer, &numbers, places.start == self.sizes.resident)?;
        self.ring.holds[slot] = Some((layer, places));
        Ok(())
    }

    /// Enqueues the copies of experts of `layer`, in ascending order, into half `slot` of the ring, and its table, with residents in it or not.
    fn copy(&mut self, slot: usize, layer: usize, numbers: &[usize], with_residents: bool) -> Result<()> {
        if !self.checked[layer] {
            self.cpu.check_layer(layer)?;
            self.checked[layer] = true;
        }
        let Self { cuda, ring, memory, .. } = self;
        let (stride, experts) = (memory.stride(), self.experts);
        cuda.wait(&cuda.copy, &ring.used[slot]);
        let mut table = vec![0u64; experts];
        let mut to = ring.bytes.address().add(slot * ring.half * stride);
        // Neighbours in the file cross together.
        for run in numbers.chunk_by(|a, b| a + 1 == *b) {
            memory.each_run(layer, run[0]..run[0] + run.len(), |offset, bytes| cuda.upload(&cuda.copy, to.add(offset), bytes));
            for &expert in run {
                table[expert] = to.to_u64();
                to = to.add(stride);
            }
        }
        if with_residents {
            let residents = &self.host_tables[layer * experts..(layer + 1) * experts];
            table.iter_mut().zip(residents).filter(|(_, resident)| **resident != 0).for_each(|(t, r)| *t = *r);
        }
        cuda.upload(&cuda.copy, ring.tables.address().add(slot * experts), &table);
        cuda.record(&ring.filled[slot], &cuda.copy);
        self.streamed_bytes += (numbers.len() * self.layout.bytes()) as u64;
        Ok(())
    }

    /// Halves that `streamed` experts of a layer take: the places in its order.
    fn halves(&self, streamed: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, end, half) = (self.sizes.resident, self.sizes.resident + streamed, self.ring.half);
        (first..end).step_by(half.max(1)).map(move |at| at..end.min(at + half))
    }

    /// Streams experts of `layer` and computes `y` with them and with the residents. `counted`: choices already are.
    fn stream(&mut self, layer: usize, streamed: usize, x: &Tensor, routing: &CudaRouting, counted: bool) -> Result<()> {
        let count = self.halves(streamed).count();
        for (i, places) in self.halves(streamed).enumerate() {
            let slot = self.ring.slot(layer, &places, count);
            self.fill(slot, layer, places)?;
            // What comes next is on its way while this is computed.
            let next = self.halves(streamed).nth(i + 1).map(|places| (layer, places));
            let first = || self.halves(streamed).next().filter(|_| layer + 1 < self.layers).map(|places| (layer + 1, places));
            if let Some((layer, places)) = next.or_else(first)
                && !self.ring.holds.contains(&Some((layer, places.clone())))
            {
                self.fill(1 - slot, layer, places)?;
            }
            self.multiply(slot, layer, x, routing, counted);
        }
        Ok(())
    }

    /// As [`stream`](GpuExperts::stream), but only those of the `streamed` that some token chose cross: for few tokens waiting for the routing costs less than
    /// copies that nobody needs.
    fn stream_chosen(&mut self, layer: usize, streamed: usize, x: &Tensor, routing: &CudaRouting, counted: bool) -> Result<()> {
        let mut ids = Vec::new();
        routing.read_ids(&mut ids)?;
        let chosen: HashSet<i32> = ids.into_iter().collect();
        let candidates = &self.order[layer][self.sizes.resident..self.sizes.resident + streamed];
        let mut numbers: Vec<usize> = candidates.iter().filter(|&&e| chosen.contains(&i32::from(e))).map(|&e| e as usize).collect();
        numbers.sort_unstable();
        // Once at least, for the residents.
        for i in 0..numbers.len().div_ceil(self.ring.half).max(1) {
            let (slot, from) = (i % 2, i * self.ring.half);
            self.ring.holds[slot] = None;
            self.copy(slot, layer, &numbers[from..numbers.len().min(from + self.ring.half)], i == 0)?;
            self.multiply(slot, layer, x, routing, counted);
        }
        Ok(())
    }

    /// `y` of the experts in half `slot` of the ring, once they are there.
    fn multiply(&self, slot: usize, layer: usize, x: &Tensor, routing: &CudaRouting, counted: bool) {
        self.cuda.wait(&self.cuda.compute, &self.ring.filled[slot]);
        let used = if counted { Address::NULL } else { self.counts(layer) };
        self.grouped(self.ring.tables.address().add(slot * self.experts), x, routing, used);
        self.cuda.record(&self.ring.used[slot], &self.cuda.compute);
    }

    /// `y` of all pairs whose expert is in `table`, counted in `used` unless that is null.
    fn grouped(&self, table: Address<u64>, x: &Tensor, routing: &CudaRouting, used: Address<u32>) {
        let (cuda, stream, layout) = (&self.cuda, &self.cuda.compute, &self.layout);
        let (tokens, top_k, experts) = (routing.tokens(), routing.top_k(), self.experts);
        let pairs = tokens * top_k;
        let (tile, gate_up, down, shared) = self.format.grouped(&cuda.info, pairs / experts);
        launch!(cuda, stream, "experts_sort", [experts, 1, 1], 1024, 0;
            routing.ids(), table, self.pair_slot.address(), self.offsets.address(), self.tiles.address(), pairs as i32, experts as i32, tile as i32, used);
        let (hidden, intermediate) = (layout.gate.k, layout.down.k);
        let rows = pairs / tile + experts;
        launch!(cuda, stream, gate_up, [intermediate.div_ceil(16).div_ceil(4), rows, 1], 128, shared;
            self.tiles.address(), self.pair_slot.address(), table, x.bf16(), self.h.address(), hidden as i32, intermediate as i32, self.format.group,
            top_k as i32);
        launch!(cuda, stream, down, [hidden.div_ceil(16).div_ceil(8), rows, 1], 128, shared;
            self.tiles.address(), self.pair_slot.address(), table, self.h.address(), self.y.address(), hidden as i32, intermediate as i32,
            self.format.group, top_k as i32);
    }

    /// The CPU's part of one layer, once its hidden states have come.
    fn serve(&mut self, layer: usize, tokens: usize, top_k: usize) -> Result<()> {
        let Self { handoff, cpu, cuda, .. } = self;
        let expected = handoff.passes[layer].wrapping_add(1);
        handoff.passes[layer] = expected;
        let done = handoff.wait(cuda, layer, expected).and_then(|()| handoff.compute(cpu, layer, tokens, top_k));
        // Whatever happened: the device waits for it.
        handoff.flag(&handoff.up, layer).store(expected, Ordering::Release);
        done
    }
}

impl ExpertExecutor<CudaBackend> for GpuExperts {
    fn submit(&mut self, layer: usize, x: &Tensor, routing: &CudaRouting) -> Result<()> {
        let (tokens, top_k) = (routing.tokens(), routing.top_k());
        assert!(tokens <= self.sizes.tokens && self.submitted.is_none());
        let streamed = self.streamed(tokens);
        let resident = self.sizes.resident;
        let cpu = resident + streamed < self.experts;
        assert!(!cpu || tokens <= self.sizes.cpu_tokens, "the CPU was given more tokens than was allocated for");
        let table = if streamed > 0 { self.marks(layer, streamed)? } else { self.table(layer) };
        if cpu {
            // First, so that the CPU begins while the device goes on.
            let Handoff { h, ids, weights, down, count, arrived, .. } = &self.handoff;
            launch!(self.cuda, &self.cuda.compute, "publish", [handoff_blocks(tokens * x.cols()), 1, 1], 1024, 0;
                x.bf16(), routing.ids(), routing.weights(), table, (tokens * x.cols() / 8) as i32, (tokens * top_k) as i32, self.experts as i32,
                h.address(), ids.address(), weights.address(), self.counts(layer), arrived.address(), count.address().add(layer), down.address().add(layer * LINE));
        }
        let gpu = if streamed > 0 {
            match Speeds::picks(self.experts, tokens, top_k) {
                true => self.stream_chosen(layer, streamed, x, routing, cpu)?,
                false => self.stream(layer, streamed, x, routing, cpu)?,
            }
            Some(Gpu::Many { table })
        } else if resident == 0 {
            None
        } else if tokens <= FEW_TOKENS {
            let (hidden, intermediate) = (self.layout.gate.k as i32, self.layout.down.k as i32);
            launch!(self.cuda, &self.cuda.compute, self.format.few().0, [self.layout.down.k.div_ceil(16), tokens * top_k, 1], 256, 0;
                routing.ids(), table, x.bf16(), self.h.address(), hidden, intermediate, self.format.group, self.experts as i32, top_k as i32);
            Some(Gpu::Few { table })
        } else {
            self.grouped(table, x, routing, Address::NULL);
            Some(Gpu::Many { table })
        };
        if streamed == 0 && tokens <= FEW_TOKENS {
            // The shared expert reads `x`, and nothing of the above.
            self.cuda.promise_independent();
        }
        let (ids, weights) = (routing.ids(), routing.weights());
        self.submitted = Some(Submitted { layer, tokens, top_k, ids, weights, cpu, gpu });
        Ok(())
    }

    fn finish(&mut self, out: &mut Tensor) -> Result<()> {
        let Some(Submitted { layer, tokens, top_k, ids, weights, cpu, gpu }) = self.submitted.take() else {
            panic!("`finish` comes after `submit`")
        };
        let (stream, hidden, intermediate) = (&self.cuda.compute, self.layout.gate.k, self.layout.down.k);
        match gpu {
            None => {}
            Some(Gpu::Few { table }) => {
                launch!(self.cuda, stream, self.format.few().1, [hidden.div_ceil(16), tokens, 1], 512, 0;
                    ids, weights, table, self.h.address(), out.f32(), hidden as i32, intermediate as i32, self.format.group, self.experts as i32,
                    top_k as i32);
            }
            Some(Gpu::Many { table }) => {
                launch!(self.cuda, stream, "experts_combine", [tokens, hidden.div_ceil(2048), 1], 256, 0;
                    ids, weights, table, self.y.address(), out.f32(), hidden as i32, self.experts as i32, top_k as i32);
            }
        }
        if cpu {
            let Handoff { y, up, count, .. } = &self.handoff;
            launch!(self.cuda, stream, "fetch", [handoff_blocks(tokens * hidden), 1, 1], 1024, 0;
                count.address().add(layer), up.address().add(layer * LINE), y.address(), out.f32(), (tokens * hidden / 4) as i32);
            if !self.cuda.is_recording() {
                self.serve(layer, tokens, top_k)?;
            }
        }
        Ok(())
    }

    fn replayed(&mut self, tokens: usize) -> Result<()> {
        if self.sizes.resident == self.experts {
            return Ok(());
        }
        let mut failed = Ok(());
        for layer in 0..self.layers {
            // All layers, whatever happened in one: the device waits in each.
            failed = failed.and(self.serve(layer, tokens, self.sizes.top_k));
        }
        failed
    }

    fn between_passes(&mut self) -> Result<()> {
        let Some(learning) = &mut self.learning else { return Ok(()) };
        learning.passes += 1;
        if learning.passes.is_multiple_of(LOOK) {
            learning.look(&self.cuda, &self.order, self.sizes)?;
        }
        let now = learning.moves.len().min(MOVES);
        let moves: Vec<Move> = learning.moves.drain(..now).collect();
        moves.into_iter().try_for_each(|m| self.make(m))
    }

    fn traffic(&self) -> Traffic {
        Traffic { link: self.streamed_bytes, ..ExpertExecutor::traffic(&self.cpu) }
    }

    fn resident(&self) -> usize {
        self.sizes.resident
    }
}

impl Learning {
    /// Takes in the last snapshot, asks for the next, and decides what to move.
    fn look(&mut self, cuda: &Cuda, order: &[Vec<u16>], sizes: Sizes) -> Result<()> {
        if self.passes > LOOK {
            cuda.wait_host(&self.taken)?; // long ago
            let new: Vec<u32> = self.snapshot.iter().zip(&self.before).map(|(now, before)| now.wrapping_sub(*before)).collect();
            self.before.copy_from_slice(&self.snapshot);
            self.used.add(&new, sizes.top_k);
            self.moves = self.used.moves(order, sizes.resident, LOOK as usize * MOVES);
        }
        cuda.download(&cuda.compute, self.counts.address(), &mut self.snapshot);
        cuda.record(&self.taken, &cuda.compute);
        if self.saved.elapsed() > SAVE {
            self.save();
        }
        Ok(())
    }

    /// Not saved is forgotten, not wrong.
    fn save(&mut self) {
        self.saved = Instant::now();
        if let Some(path) = &self.path {
            let _ = self.used.save(path);
        }
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        self.save();
    }
}

impl Handoff {
    fn new(cuda: &Arc<Cuda>, layers: usize, hidden: usize, sizes: &Sizes) -> Result<Self> {
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
        let take = |x: &mut [f32], y: &mut [f32], h: &[bf16]| {
            x.iter_mut().zip(h).for_each(|(x, h)| *x = h.to_f32());
            y.fill(0.0);
        };
        let (x, y, h) = (&mut self.x[..numbers], &mut self.y[..numbers], &self.h[..numbers]);
        if numbers < PARALLEL_VALUES {
            take(x, y, h);
        } else {
            let (x, y) = (Shared::new(x), Shared::new(y));
            cpu.team().run(&|worker| {
                let part = worker.share(numbers);
                // SAFETY: workers' shares are disjoint.
                #[allow(unsafe_code)]
                let (x, y) = unsafe { (x.slice_mut(part.clone()), y.slice_mut(part.clone())) };
                take(x, y, &h[part]);
            });
        }
        self.routing.top_k = top_k;
        self.routing.ids.clear();
        self.routing.ids.extend_from_slice(&self.ids[..choices]);
        self.routing.weights.clear();
        self.routing.weights.extend_from_slice(&self.weights[..choices]);
        cpu.submit_rows(layer, &self.x[..numbers], &self.routing)?;
        cpu.finish_rows(&mut self.y[..numbers])
    }
}

impl Ring {
    fn new(cuda: &Arc<Cuda>, half: usize, stride: usize, experts: usize) -> Result<Self> {
        let events = || Ok::<_, crate::Error>([Event::new(cuda)?, Event::new(cuda)?]);
        Ok(Self {
            bytes: DeviceBuffer::new(cuda, 2 * half * stride)?,
            half,
            tables: DeviceBuffer::zeros(cuda, 2 * experts)?,
            filled: events()?,
            used: events()?,
            holds: [None, None],
        })
    }

    /// The half that holds these experts, or that they should come to.
    fn slot(&self, layer: usize, places: &Range<usize>, halves: usize) -> usize {
        let held = self.holds.iter().position(|holds| holds.as_ref() == Some(&(layer, places.clone())));
        // The one that was filled longer ago: they alternate.
        held.unwrap_or_else(|| {
            let newest = |i: usize| self.holds[i].as_ref().map_or(0, |(l, p)| (l * halves.max(1) + p.start) + 1);
            usize::from(newest(1) < newest(0))
        })
    }
}
