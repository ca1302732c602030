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

mod epilogue;
mod handoff;
mod learning;
mod ring;

use std::sync::Arc;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::ExpertLayout;

use super::cost::CostModel;
use super::residency::{Move, Use};
use super::{CpuExperts, ExpertExecutor, ExpertMemory, Traffic};
use crate::Result;
use crate::backend::cuda::{CudaBackend, CudaRouting, Tensor, packed};
use crate::cuda::{Address, Cuda, DeviceBuffer, Registered, launch};
use epilogue::DeviceEpilogue;
use handoff::Handoff;
use learning::Learning;
use ring::Ring;

/// Tokens up to which experts in VRAM are multiplied as they are read, once for each token; sorted and in tiles beyond.
/// Measured on an H200.
const FEW_TOKENS: usize = 4;

/// Tokens up to which a batch is no prompt, whatever the user says of prompts.
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
}

/// All routed experts of a model.
pub struct GpuExperts {
    _registered: Vec<Registered>, // first: given up while `memory` is still mapped
    cuda: Arc<Cuda>,
    cpu: CpuExperts,
    memory: Arc<ExpertMemory>,
    layout: ExpertLayout,
    format: packed::Format,
    epilogue: DeviceEpilogue,
    layers: usize,
    experts: usize,
    sizes: Sizes,
    costs: CostModel,
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

impl GpuExperts {
    /// Takes over experts in RAM, copies those that are to live in VRAM, and pins the others where they lie.
    ///
    /// Errors: `Error::Cache` for a damaged expert that is copied; `Error::Resources` where VRAM ends.
    pub fn new(
        cuda: Arc<Cuda>,
        mut cpu: CpuExperts,
        precision: Precision,
        sizes: Sizes,
        costs: CostModel,
        forced: Option<Prefill>,
    ) -> Result<Self> {
        let memory = cpu.memory().clone();
        let (layers, experts, layout) =
            (memory.cache().num_layers(), memory.cache().num_experts(), memory.cache().layout());
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
                memory.each_run(layer, expert..expert + 1, |offset, bytes| {
                    cuda.upload(&cuda.copy, to.add(offset), bytes)
                });
                tables[layer * experts + expert] = to.to_u64();
            }
        }
        cuda.synchronize()?;

        let pairs = sizes.tokens * sizes.top_k;
        let streams = sizes.ring >= 2;
        let registered = match streams && sizes.resident < experts {
            // Not pinned is slower, not wrong: some systems allow it for no memory of files.
            true => memory
                .regions()
                .into_iter()
                .map_while(|region| Registered::new(region, !memory.is_copy()).ok())
                .collect(),
            false => Vec::new(),
        };
        let learning = match sizes.resident == experts {
            true => None,
            false => Some(Learning::new(&cuda, used, path, layers * experts)?),
        };
        let half = (sizes.ring / 2).min(experts - sizes.resident);
        Ok(Self {
            format: precision.into(),
            epilogue: DeviceEpilogue::new(&cuda, cpu.epilogue(), layers)?,
            layers,
            experts,
            costs,
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
        (tokens * (2 * hidden + 4 * hidden + 4 * hidden + 8 * sizes.top_k) + 2 * layers * handoff::LINE * 4) as u64
    }

    /// Experts of a layer that cross PCIe for a batch of `tokens`.
    fn streamed(&self, tokens: usize) -> usize {
        let others = self.experts - self.sizes.resident;
        let must = tokens > self.sizes.cpu_tokens;
        match self.forced {
            // There is no room for two experts.
            _ if self.sizes.ring < 2 => 0,
            // Nothing can be copied by hand in a recording.
            _ if self.cuda.is_rehearsing() => 0,
            Some(Prefill::Cpu) if !must => 0,
            Some(Prefill::Gpu) if tokens > NO_PROMPT => others,
            _ if must => others,
            _ => self.costs.streamed(others, self.experts, tokens, self.sizes.top_k, &self.layout),
        }
    }

    /// Where choices of `layer` are counted.
    fn counts(&self, layer: usize) -> Address<u32> {
        self.learning.as_ref().map_or(Address::NULL, |learning| learning.counts(layer * self.experts))
    }

    /// Gives an outsider the place of a resident. Its copy and the new addresses come before the next pass in the
    /// compute stream.
    fn make(&mut self, Move { layer, resident, outsider }: Move) -> Result<()> {
        self.cpu.check_layer(layer)?;
        let Self { cuda, memory, order, host_tables, tables, experts, sizes, .. } = self;
        let to = self.resident.address().add((layer * sizes.resident + resident) * memory.stride());
        let row = &mut host_tables[layer * *experts..(layer + 1) * *experts];
        let (old, new) = (order[layer][resident] as usize, order[layer][outsider] as usize);
        order[layer].swap(resident, outsider);
        (row[old], row[new]) = (0, to.to_u64());
        memory.each_run(layer, new..new + 1, |offset, bytes| cuda.upload(&cuda.compute, to.add(offset), bytes));
        cuda.upload(&cuda.compute, tables.address().add(layer * *experts), row);
        // What was said of this layer's places is no longer so.
        self.marks = None;
        self.ring.forget(layer);
        Ok(())
    }

    /// Addresses of residents of `layer`.
    fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.experts)
    }

    /// `y` of all pairs whose expert is in `table`, counted in `used` unless that is null.
    fn grouped(&self, layer: usize, table: Address<u64>, x: &Tensor, routing: &CudaRouting, used: Address<u32>) {
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
            self.format.f16, top_k as i32, self.epilogue.of(layer));
        launch!(cuda, stream, down, [hidden.div_ceil(16).div_ceil(8), rows, 1], 128, shared;
            self.tiles.address(), self.pair_slot.address(), table, self.h.address(), self.y.address(), hidden as i32, intermediate as i32,
            self.format.group, self.format.f16, top_k as i32, self.epilogue.of(layer));
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
            self.handoff.publish(&self.cuda, layer, x, routing, table, self.experts, self.counts(layer));
        }
        let gpu = if streamed > 0 {
            match CostModel::picks(self.experts, tokens, top_k) {
                true => self.stream_chosen(layer, streamed, x, routing, cpu)?,
                false => self.stream(layer, streamed, x, routing, cpu)?,
            }
            Some(Gpu::Many { table })
        } else if resident == 0 {
            None
        } else if tokens <= FEW_TOKENS {
            let (hidden, intermediate) = (self.layout.gate.k as i32, self.layout.down.k as i32);
            launch!(self.cuda, &self.cuda.compute, self.format.few().0, [self.layout.down.k.div_ceil(16), tokens * top_k, 1], 256, 0;
                routing.ids(), table, x.bf16(), self.h.address(), hidden, intermediate, self.format.group, self.format.f16, self.experts as i32,
                top_k as i32, self.epilogue.of(layer));
            Some(Gpu::Few { table })
        } else {
            self.grouped(layer, table, x, routing, Address::NULL);
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
                    ids, weights, table, self.h.address(), out.f32(), hidden as i32, intermediate as i32, self.format.group, self.format.f16,
                    self.experts as i32, top_k as i32, self.epilogue.of(layer));
            }
            Some(Gpu::Many { table }) => {
                launch!(self.cuda, stream, "experts_combine", [tokens, hidden.div_ceil(2048), 1], 256, 0;
                    ids, weights, table, self.y.address(), out.f32(), hidden as i32, self.experts as i32, top_k as i32);
            }
        }
        if cpu {
            self.handoff.fetch(&self.cuda, layer, tokens * hidden, out);
            if !self.cuda.is_recording() {
                self.handoff.serve(&self.cuda, &mut self.cpu, layer, tokens, top_k)?;
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
            failed = failed.and(self.handoff.serve(&self.cuda, &mut self.cpu, layer, tokens, self.sizes.top_k));
        }
        failed
    }

    fn between_passes(&mut self) -> Result<()> {
        let Some(learning) = &mut self.learning else { return Ok(()) };
        let moves = learning.next_moves(&self.cuda, &self.order, self.sizes)?;
        moves.into_iter().try_for_each(|m| self.make(m))
    }

    fn traffic(&self) -> Traffic {
        Traffic { link: self.streamed_bytes, ..ExpertExecutor::traffic(&self.cpu) }
    }

    fn resident(&self) -> usize {
        self.sizes.resident
    }
}
