//! Routed experts for engines other than ours: a layer's tokens as that engine has them, whichever threads they come
//! from.
//!
//! All layers share one team and one set of buffers, so calls go one after the other. Batches of any size are cut into
//! parts.

#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::cpu::CpuExperts;
use super::{Epilogue, ExpertMemory};
use crate::backend::Routing;
#[cfg(feature = "cuda")]
use crate::cuda::Registered;
use crate::kernel::Kernel;
use crate::machine::heap::Heap;
#[cfg(feature = "cuda")]
use crate::machine::memory::interleaved;
#[cfg(feature = "cuda")]
use crate::machine::topology::Topology;
use crate::machine::workers::Team;
use crate::model::Share;
use crate::{Error, Result};

/// Tokens that are computed together, and pairs of a token and an expert.
const PART_TOKENS: usize = 2048;
const PART_PAIRS: usize = 8 * PART_TOKENS;

/// Of what numbers the rows of another engine are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowType {
    /// 32 bits.
    F32,
    /// IEEE's 16 bits.
    F16,
    /// The upper 16 bits of an f32.
    Bf16,
}

impl RowType {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            RowType::F32 => 4,
            RowType::F16 | RowType::Bf16 => 2,
        }
    }

    fn read(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            RowType::F32 => out.copy_from_slice(bytemuck::cast_slice(bytes)),
            RowType::F16 => bytemuck::cast_slice::<u8, u16>(bytes)
                .iter()
                .zip(out)
                .for_each(|(x, y)| *y = f16::from_bits(*x).to_f32()),
            RowType::Bf16 => bytemuck::cast_slice::<u8, u16>(bytes)
                .iter()
                .zip(out)
                .for_each(|(x, y)| *y = bf16::from_bits(*x).to_f32()),
        }
    }

    fn write(self, numbers: &[f32], out: &mut [u8]) {
        match self {
            RowType::F32 => out.copy_from_slice(bytemuck::cast_slice(numbers)),
            RowType::F16 => {
                for (x, y) in numbers.chunks(256).zip(bytemuck::cast_slice_mut::<u8, u16>(out).chunks_mut(256)) {
                    let mut rounded = [f16::ZERO; 256];
                    rounded[..x.len()].convert_from_f32_slice(x);
                    y.iter_mut().zip(&rounded).for_each(|(y, x)| *y = x.to_bits());
                }
            }
            RowType::Bf16 => {
                bytemuck::cast_slice_mut::<u8, u16>(out)
                    .iter_mut()
                    .zip(numbers)
                    .for_each(|(y, x)| *y = bf16::from_f32(*x).to_bits());
            }
        }
    }
}

/// One layer's tokens.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// `[tokens, hidden]`, aligned to its numbers.
    pub x: &'a [u8],
    /// Of what numbers it is.
    pub rows: RowType,
    /// `[tokens, top_k]`
    pub ids: &'a [i32],
    /// `[tokens, top_k]`
    pub weights: &'a [f32],
    /// Experts per token.
    pub top_k: usize,
}

/// The same on a device.
#[cfg(feature = "cuda")]
pub struct DeviceTokens {
    /// `[tokens, hidden]`, aligned to 16 bytes.
    pub x: u64,
    /// Of what numbers it is.
    pub rows: RowType,
    /// `[tokens, top_k]`, of 32 or 64 bits.
    pub ids: u64,
    /// Bytes of an id.
    pub id_bytes: usize,
    /// `[tokens, top_k]`, f32
    pub weights: u64,
    /// Rows.
    pub tokens: usize,
    /// Experts per token.
    pub top_k: usize,
}

/// The routed experts of a model, computed for any caller.
pub struct ExpertService {
    #[cfg(feature = "cuda")]
    pinned: OnceLock<Arc<Vec<Registered>>>, // first: given up while `memory` still maps them
    memory: Arc<ExpertMemory>,
    team: Arc<Team>,
    compute: Mutex<Compute>,
}

/// Who computes, one call after the other.
struct Compute {
    cpu: CpuExperts,
    x: Vec<f32>,
    y: Vec<f32>,
    routing: Routing,
}

impl ExpertService {
    /// Computes with the team; of buffers, only those of a part are taken.
    pub fn new(
        memory: Arc<ExpertMemory>,
        epilogue: Epilogue,
        team: Arc<Team>,
        kernel: &'static dyn Kernel,
    ) -> Result<Self> {
        let heap = Heap::default();
        let cpu = CpuExperts::new(&heap, memory.clone(), team.clone(), kernel, PART_PAIRS)?.with(epilogue);
        let compute = Mutex::new(Compute { cpu, x: Vec::new(), y: Vec::new(), routing: Routing::default() });
        Ok(Self {
            #[cfg(feature = "cuda")]
            pinned: OnceLock::new(),
            memory,
            team,
            compute,
        })
    }

    /// The experts, pinned where they lie at the first call: once for all devices.
    #[cfg(feature = "cuda")]
    pub(super) fn pinned(&self) -> Arc<Vec<Registered>> {
        let pin = || {
            // This reads what is mapped and was not read before: the CPU wants it on all nodes.
            let nodes = Topology::read().memory_nodes();
            Arc::new(interleaved(&nodes, || self.memory.pin()))
        };
        self.pinned.get_or_init(pin).clone()
    }

    /// Where the experts are, and their shapes.
    pub fn memory(&self) -> &Arc<ExpertMemory> {
        &self.memory
    }

    /// Who computes them.
    pub fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// What ends their products.
    #[cfg(feature = "cuda")]
    pub(super) fn with_epilogue<T>(&self, of: impl FnOnce(&Epilogue) -> T) -> T {
        of(self.compute().cpu.epilogue())
    }

    /// Compares the checksums of a layer, unless that was done before. Errors: `Error::Cache` for a damaged expert.
    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        let mut compute = self.compute();
        self.team.with_caller(|| compute.cpu.check_layer(layer))
    }

    fn compute(&self) -> std::sync::MutexGuard<'_, Compute> {
        self.compute.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the engine itself computes an expert, by its id.
pub type Skip = dyn Fn(usize) -> bool + Send + Sync;

/// One layer of an [`ExpertService`], as another engine sees it.
///
/// An engine with several GPUs may give all of them the same tokens and add what they return. Then each is a rank: its
/// GPU computes a part of the width of experts, and the first one adds what the CPU computes.
pub struct ServedLayer {
    service: Arc<ExpertService>,
    index: usize, // among the layers with experts
    rank: Share,
    loaded: AtomicBool,
    view: RwLock<IdView>,
}

/// How the engine's ids are meant.
struct IdView {
    skip: Option<Box<Skip>>,
    logical: Vec<i32>, // [ids]: the expert that an id stands for
}

impl ServedLayer {
    /// Layer `index` among the service's, of one of the engine's ranks; ids are the experts' own. Panics: there is no
    /// such layer (a bug).
    pub fn new(service: Arc<ExpertService>, index: usize, rank: Share) -> Self {
        assert!(index < service.memory.cache().num_layers());
        let logical = (0..service.memory.cache().num_experts() as i32).collect();
        let view = RwLock::new(IdView { skip: None, logical });
        Self { service, index, rank, loaded: AtomicBool::new(false), view }
    }

    /// Whether it is of the first rank, which computes what no GPU does.
    pub fn is_first(&self) -> bool {
        self.rank.rank == 0
    }

    /// What the rank's GPU computes of every expert. Where their width cannot be divided, that is the first one's;
    /// `None`: nothing.
    pub fn device_share(&self) -> Option<Share> {
        match self.service.memory.shape().part(self.rank) {
            Ok(_) => Some(self.rank),
            Err(_) => self.is_first().then_some(Share::WHOLE),
        }
    }

    /// The service it is of.
    pub fn service(&self) -> &Arc<ExpertService> {
        &self.service
    }

    /// Ids that the engine computes itself, asked at every call; `None`: none.
    pub fn set_skip(&self, skip: Option<Box<Skip>>) {
        self.view.write().unwrap_or_else(PoisonError::into_inner).skip = skip;
    }

    /// The expert that each id stands for; ids beyond are skipped. Errors: there is no such expert.
    pub fn set_logical(&self, logical: Vec<i32>) -> Result<()> {
        let experts = self.service.memory.cache().num_experts();
        if let Some(wrong) = logical.iter().find(|&&e| usize::try_from(e).map_or(true, |e| e >= experts)) {
            return Err(Error::Invalid(format!(
                "the map names expert {wrong} of {experts}: expected 0 to {}",
                experts - 1
            )));
        }
        self.view.write().unwrap_or_else(PoisonError::into_inner).logical = logical;
        Ok(())
    }

    /// Reads all of the layer and compares its checksums, which the first rank does for all. Errors: `Error::Cache` for
    /// a damaged expert.
    pub fn load(&self) -> Result<()> {
        self.check(self.index)?;
        self.loaded.store(true, Relaxed);
        Ok(())
    }

    /// Compares the checksums of any layer, on the first rank. Errors: as [`load`](ServedLayer::load).
    pub(super) fn check(&self, layer: usize) -> Result<()> {
        if self.is_first() { self.service.check_layer(layer) } else { Ok(()) }
    }

    /// Its number among the layers with experts.
    #[cfg(feature = "cuda")]
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Whether [`load`](ServedLayer::load) has compared its checksums.
    #[cfg(feature = "cuda")]
    pub(super) fn is_loaded(&self) -> bool {
        self.loaded.load(Relaxed)
    }

    /// The expert of each id of the engine's; -1: skipped.
    #[cfg(feature = "cuda")]
    pub(super) fn experts_of_ids(&self) -> Vec<i32> {
        let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
        let skipped = |id: usize| view.skip.as_ref().is_some_and(|skip| skip(id));
        view.logical.iter().enumerate().map(|(id, &expert)| if skipped(id) { -1 } else { expert }).collect()
    }

    /// `out[t] = sum_e weight[t, e] * expert_e(x_t)` in the type of `x`, over the ids that are an expert and not
    /// skipped; `out` [tokens, hidden]. Zeros on ranks other than the first.
    ///
    /// Errors: `Error::Cache` for a damaged expert. Panics: lengths do not fit (a bug).
    pub fn forward(&self, tokens: Tokens<'_>, out: &mut [u8]) -> Result<()> {
        if !self.is_first() {
            out.fill(0);
            return Ok(());
        }
        let mut compute = self.service.compute();
        self.service.team.with_caller(|| self.run(&mut compute, tokens, out))
    }

    /// As [`forward`](ServedLayer::forward), called by the thread that the team is pinned with.
    #[cfg(feature = "cuda")]
    pub(super) fn forward_pinned(&self, tokens: Tokens<'_>, out: &mut [u8]) -> Result<()> {
        self.run(&mut self.service.compute(), tokens, out)
    }

    fn run(&self, compute: &mut Compute, all: Tokens<'_>, out: &mut [u8]) -> Result<()> {
        let hidden = self.service.memory.cache().header().hidden;
        let row_bytes = hidden * all.rows.bytes();
        let tokens = all.x.len() / row_bytes;
        assert!(all.x.len() == tokens * row_bytes && out.len() == all.x.len());
        assert!(all.ids.len() == tokens * all.top_k && all.weights.len() == all.ids.len() && all.top_k <= PART_PAIRS);
        let most = PART_TOKENS.min(PART_PAIRS / all.top_k.max(1));
        for first in (0..tokens).step_by(most) {
            let last = tokens.min(first + most);
            let (rows, choices) = (first * row_bytes..last * row_bytes, first * all.top_k..last * all.top_k);
            let part = Tokens {
                x: &all.x[rows.clone()],
                ids: &all.ids[choices.clone()],
                weights: &all.weights[choices],
                ..all
            };
            self.part(compute, part, last - first, &mut out[rows])?;
        }
        Ok(())
    }

    fn part(&self, compute: &mut Compute, part: Tokens<'_>, tokens: usize, out: &mut [u8]) -> Result<()> {
        let Compute { cpu, x, y, routing } = compute;
        let hidden = self.service.memory.cache().header().hidden;
        let numbers = tokens * hidden;
        if x.len() < numbers {
            x.resize(numbers, 0.0);
            y.resize(numbers, 0.0);
        }
        let (x, y) = (&mut x[..numbers], &mut y[..numbers]);
        {
            let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
            let expert_of = |id: &i32| match usize::try_from(*id) {
                Ok(id) if view.skip.as_ref().is_none_or(|skip| !skip(id)) => {
                    view.logical.get(id).copied().unwrap_or(-1)
                }
                _ => -1,
            };
            routing.top_k = part.top_k;
            routing.ids.clear();
            routing.ids.extend(part.ids.iter().map(expert_of));
            routing.weights.clear();
            routing.weights.extend_from_slice(part.weights);
        }
        let row_bytes = hidden * part.rows.bytes();
        cpu.each_row(x, hidden, |t, x| part.rows.read(&part.x[t * row_bytes..][..row_bytes], x));
        cpu.each_row(y, hidden, |_, y| y.fill(0.0));
        cpu.submit_rows(self.index, x, routing)?;
        cpu.finish_rows(y)?;
        cpu.each_row(out, row_bytes, |t, out| part.rows.write(&y[t * hidden..][..hidden], out));
        Ok(())
    }
}
