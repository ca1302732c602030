//! Experts in VRAM for another engine's decode: they are multiplied there in the order of its stream, and change with
//! the text (`experts/pool.rs`).
//!
//! ```text
//! submit   the engine's stream   where a pass begins, the host's table, if it is a newer one (take_table)
//!                                publish_rows, which keeps what experts in VRAM need
//!          a stream beside it    their products
//! sync     the engine's stream   their sum and the host's (fetch_rows)
//!          the copy stream       experts on their way, beside the layers that follow
//! owner    after a layer         sends missing experts on their way
//!          after the last one    takes out slots, and writes the table of the passes that follow
//! ```
//!
//! The host does not know when a pass begins: another engine replays a graph when it likes, before the last one has
//! ended. So it is the device that takes a table, and says so. Until then the host does not write the next one, and
//! sends no expert into a slot, because the device may still look there. Which experts of a layer the host is to
//! compute, the device says with each batch.
//!
//! Batches of a model must not run at the same time on two streams.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use half::bf16;

use super::FEW_TOKENS;
use super::admissions::{self, Admissions, Limit};
use super::parts::Parts;
use super::products::{Choices, Products};
use super::prompts::{MAX_EXPERTS, MAX_PAIRS, products};
use super::residents::Residents;
use crate::cuda::{Address, Cuda, CudaEvent, CudaStream, DeviceBuffer, PinnedBuffer, Registered, kernels, launch};
use crate::experts;
use crate::experts::mailbox::LINE;
use crate::experts::pool::{LayerChoices, Pool};
use crate::experts::popularity::Popularity;
use crate::experts::residency::Residency;
use crate::experts::service::{DeviceTokens, ExpertService, RowType, ServedLayer};
use crate::model::Share;
use crate::{Error, Result};

/// How much is held, and for which batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldSizes {
    /// VRAM for experts.
    pub pool_bytes: u64,
    /// Tokens up to which a batch uses it.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
}

/// The experts of one model in one device's VRAM.
pub struct HeldExperts {
    _registered: Arc<Vec<Registered>>, // first: given up while `service` still maps them
    cuda: Arc<Cuda>,
    service: Arc<ExpertService>,
    beside: CudaStream,
    products: Products,
    tokens: usize,
    pairs: usize,
    held: usize,                      // experts of each layer, at first
    layers: RwLock<Vec<Option<Ids>>>, // `None`: the layer does not take part
    last: AtomicUsize,                // of those that do
    tables: Address<u64>,             // [layers, experts]: of `changing.residents`
    staged: Address<u64>,
    versions: PinnedBuffer<u32>, // [2, 16]: of the table that the host has written, and that was taken; a line each
    taken: DeviceBuffer<u32>,    // the latter, as the device counts
    admissions: Option<Admissions>, // `None`: nothing comes or goes
    passing: Mutex<Passing>,     // of who enqueues
    changing: Mutex<Changing>,   // of the owner; never held during a call of the driver
}

/// What a layer's ids mean.
struct Ids {
    experts: Vec<i32>,            // -1: none, or the engine's own
    on_device: DeviceBuffer<i32>, // the same
}

/// Where the pass is that is enqueued.
#[derive(Default)]
struct Passing {
    at: (usize, Option<u64>), // the engine's stream, and its recording
    layer: Option<usize>,
    layers: usize,    // of this pass, so far
    in_flight: usize, // batches between submit and sync
    has_branch: bool, // copies that nobody has waited for
}

/// Which experts are held.
struct Changing {
    pool: Pool,
    residents: Residents,
    parts: Parts,
    ids: Vec<i32>, // of the batch that is served
    version: u32,  // of the table that was written last
}

/// What a batch leaves on the device.
pub struct KeptRows {
    x: DeviceBuffer<u8>,        // [tokens, hidden], bf16
    ids: DeviceBuffer<i32>,     // [tokens, top_k]
    weights: DeviceBuffer<f32>, // [tokens, top_k]
    sum: DeviceBuffer<f32>,     // [tokens, hidden]
    given: CudaEvent,
    multiplied: CudaEvent,
}

impl KeptRows {
    /// Room for `bytes` of hidden states.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize, choices: usize) -> Result<Self> {
        Ok(Self {
            x: DeviceBuffer::new(cuda, bytes)?,
            ids: DeviceBuffer::new(cuda, choices)?,
            weights: DeviceBuffer::new(cuda, choices)?,
            sum: DeviceBuffer::new(cuda, bytes / size_of::<bf16>())?,
            given: CudaEvent::new(cuda)?,
            multiplied: CudaEvent::new(cuda)?,
        })
    }

    /// Nothing is kept.
    pub(in crate::experts) fn none() -> kernels::HeldRows {
        kernels::HeldRows {
            table: Address::NULL,
            experts: Address::NULL,
            x: Address::NULL,
            ids: Address::NULL,
            weights: Address::NULL,
            sum: Address::NULL,
            num_ids: 0,
        }
    }

    /// The sum of experts in VRAM.
    pub fn sum(&self) -> Address<f32> {
        self.sum.address()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HeldExperts {
    /// Takes the VRAM and copies experts there, as many of each layer: those that were chosen most, of those that the
    /// engine does not compute itself. `registered`: the experts, pinned where they lie.
    ///
    /// Errors: `Error::Resources` where VRAM ends; `Error::Invalid` for too little of it, or more experts than the
    /// kernels take; `Error::Cache` for a damaged expert.
    pub fn new(
        cuda: &Arc<Cuda>,
        layer: &ServedLayer,
        sizes: HeldSizes,
        registered: Arc<Vec<Registered>>,
    ) -> Result<Self> {
        let service = layer.service();
        let memory = service.memory();
        let shape = memory.shape();
        if shape.experts > MAX_EXPERTS {
            return Err(Error::Invalid(format!(
                "the GPU cannot hold experts: a layer has {} experts and at most {MAX_EXPERTS} are supported",
                shape.experts
            )));
        }
        let top_k = sizes.top_k.max(1);
        let tokens = sizes.tokens.min(MAX_PAIRS / top_k);
        let mut is_wanted = vec![false; shape.experts];
        layer.experts_of_ids().iter().filter(|&&e| e >= 0).for_each(|&e| is_wanted[e as usize] = true);
        let wanted = is_wanted.iter().filter(|&&wanted| wanted).count();
        let held = usize::try_from(sizes.pool_bytes / shape.bytes_of_one()).unwrap_or(usize::MAX).min(wanted);
        if held == 0 {
            return Err(Error::Invalid(format!(
                "{} MiB hold no expert of each of {} layers: give at least {} MiB, or none",
                sizes.pool_bytes >> 20,
                shape.layers(),
                shape.bytes_of_one().div_ceil(1 << 20)
            )));
        }
        let popularity = Popularity::of(memory.cache());
        let orders = (0..shape.layers()).map(|layer| {
            let mut order = popularity.order(layer);
            order.sort_by_key(|&expert| !is_wanted[expert as usize]);
            order
        });
        let residency = Residency::new(orders, held, 0);
        let parts = Parts::new(memory.clone(), Share::WHOLE, &registered)?;
        let mut residents = Residents::new(cuda, &shape, held)?;
        residents.fill(&parts, &residency, |layer| service.check_layer(layer))?;
        let admissions = match held < wanted && parts.are_for_kernels() {
            true => Some(Admissions::new(cuda, admissions::Buffers::new(cuda, shape.layers())?)?),
            false => None,
        };
        let new = Self {
            beside: CudaStream::beside()?,
            products: products(cuda, service, tokens, top_k)?,
            tokens,
            pairs: tokens * top_k,
            held,
            layers: RwLock::new(shape.layouts.iter().map(|_| None).collect()),
            last: AtomicUsize::new(0),
            tables: residents.table(0),
            staged: residents.staged(),
            versions: PinnedBuffer::new(cuda, 2 * LINE)?,
            taken: DeviceBuffer::zeros(cuda, 1)?,
            admissions,
            passing: Mutex::default(),
            changing: Mutex::new(Changing {
                pool: Pool::new(residency, shape.experts, &parts.kinds()),
                residents,
                parts,
                ids: Vec::new(),
                version: 0,
            }),
            service: service.clone(),
            cuda: cuda.clone(),
            _registered: registered,
        };
        cuda.synchronize()?;
        Ok(new)
    }

    /// Whether it is of this service.
    pub fn is_of(&self, service: &Arc<ExpertService>) -> bool {
        Arc::ptr_eq(&self.service, service)
    }

    /// Lets a layer take part, with its ids as they are meant now. Does nothing where it does already.
    pub fn add_layer(&self, layer: &ServedLayer) -> Result<()> {
        let at = layer.index();
        if self.layers.read().unwrap_or_else(PoisonError::into_inner)[at].is_some() {
            return Ok(());
        }
        let experts = layer.experts_of_ids();
        let ids = Ids { on_device: DeviceBuffer::from_slice(&self.cuda, &experts)?, experts };
        self.layers.write().unwrap_or_else(PoisonError::into_inner)[at] = Some(ids);
        self.last.fetch_max(at, Ordering::Relaxed);
        Ok(())
    }

    /// Experts of each layer that it has room for, and choices so far.
    pub fn state(&self) -> (usize, experts::Choices) {
        (self.held, lock(&self.changing).pool.choices())
    }

    /// Whether a batch of a layer uses it.
    pub fn takes(&self, layer: &ServedLayer, batch: &DeviceTokens) -> bool {
        batch.tokens <= self.tokens
            && batch.tokens * batch.top_k <= self.pairs
            && batch.top_k <= 32
            && batch.rows == RowType::Bf16
            && self.layers.read().unwrap_or_else(PoisonError::into_inner)[layer.index()].is_some()
    }

    /// Enqueues what comes before a batch of `layer` in `stream`, which is `at`: a handle, and its recording.
    pub fn begin(&self, stream: &CudaStream, at: (usize, Option<u64>), layer: usize) {
        let passing = &mut *lock(&self.passing);
        let goes_on = passing.at == at && passing.layer.is_some_and(|before| layer > before);
        if !goes_on {
            if passing.in_flight == 0 {
                let experts = self.service.memory().cache().num_experts();
                let entries = self.service.memory().cache().num_layers() * experts;
                launch!(self.cuda, stream, kernels::take_table, [1, 1, 1];
                    self.staged, self.tables, entries as i32, self.versions.address(), self.taken.address(),
                    self.versions.address().add(LINE));
            }
            passing.layers = 0;
        }
        passing.has_branch &= passing.at == at; // another recording waits for its own
        (passing.at, passing.layer) = (at, Some(layer));
        passing.layers += 1;
        passing.in_flight += 1;
    }

    /// What publishing a batch of `layer` keeps on the device.
    pub(in crate::experts) fn rows(&self, layer: usize, kept: &KeptRows) -> kernels::HeldRows {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let ids = layers[layer].as_ref().expect("only batches of such layers are taken");
        kernels::HeldRows {
            table: self.table(layer),
            experts: ids.on_device.address(),
            x: kept.x.address(),
            ids: kept.ids.address(),
            weights: kept.weights.address(),
            sum: kept.sum.address().cast(),
            num_ids: ids.experts.len() as i32,
        }
    }

    fn table(&self, layer: usize) -> Address<u64> {
        self.tables.add(layer * self.service.memory().cache().num_experts())
    }

    /// Enqueues the products of what was kept in `stream`, beside what follows there.
    pub fn multiply(&self, stream: &CudaStream, layer: usize, batch: &DeviceTokens, kept: &KeptRows) {
        let Self { cuda, beside, products, .. } = self;
        cuda.record(&kept.given, stream);
        cuda.wait(beside, &kept.given);
        let choices = Choices {
            layer,
            tokens: batch.tokens,
            top_k: batch.top_k,
            ids: kept.ids.address(),
            weights: kept.weights.address(),
        };
        let (table, x, out) = (self.table(layer), kept.x.address().cast(), kept.sum.address());
        if batch.tokens <= FEW_TOKENS {
            products.few_gate_up(beside, table, x, choices);
            products.few_down(beside, table, choices, out);
        } else {
            products.grouped(beside, table, x, choices, Address::NULL);
            products.combine(beside, table, choices, out);
        }
        cuda.record(&kept.multiplied, beside);
    }

    /// Enqueues what comes before the sum of a batch of `layer` is fetched in `stream`. What fetches it takes the limit
    /// along.
    pub(in crate::experts) fn join(&self, stream: &CudaStream, layer: usize, kept: &KeptRows) -> Limit {
        self.cuda.wait(stream, &kept.multiplied);
        let passing = &mut *lock(&self.passing);
        let Some(admissions) = &self.admissions else { return Limit::NONE };
        if layer == self.last.load(Ordering::Relaxed) && std::mem::take(&mut passing.has_branch) {
            admissions.join(&self.cuda, stream);
        }
        match self.sends(passing, layer) {
            true => admissions.limit(layer),
            false => Limit::NONE,
        }
    }

    /// Enqueues what follows when the sum was fetched.
    pub fn end(&self, stream: &CudaStream, layer: usize) {
        let passing = &mut *lock(&self.passing);
        if let (true, Some(admissions)) = (self.sends(passing, layer), &self.admissions) {
            admissions.admit(&self.cuda, stream, layer);
            passing.has_branch = true;
        }
        passing.in_flight -= 1;
    }

    /// Whether experts come beside what follows a layer. Only the last layer waits for that, and a recording that ends
    /// before would have failed: recordings of single layers have none.
    fn sends(&self, passing: &Passing, layer: usize) -> bool {
        passing.layers >= 2 && layer < self.last.load(Ordering::Relaxed)
    }

    /// Takes down what a batch of `layer` has chosen, as it was published.
    pub fn note(&self, layer: usize, published: &[i32]) {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let experts = layers[layer].as_ref().map_or(&[][..], |ids| &ids.experts);
        let none = i32::MIN; // of what is in VRAM none, either
        let expert = |id: i32| experts.get(id as usize).copied().filter(|&expert| expert >= 0);
        let ids = &mut lock(&self.changing).ids;
        ids.clear();
        ids.extend(published.iter().map(|&id| match id < 0 {
            true => expert(!id).map_or(none, |expert| !expert),
            false => expert(id).unwrap_or(none),
        }));
    }

    /// Takes in what was noted, and sends experts on their way.
    pub fn chosen(&self, layer: usize) {
        let Changing { pool, residents, parts, ids, version } = &mut *lock(&self.changing);
        if self.versions.atomic(LINE).load(Ordering::Acquire) != *version {
            return; // slots that were taken out may still be read
        }
        let arrived = self.admissions.as_ref().map_or(0, Admissions::come);
        pool.chosen(LayerChoices { layer, ids, arrived }, |admission| {
            if let Some(admissions) = &self.admissions {
                admissions.send(parts, admission, residents.address(admission.slot));
            }
        });
        let last = self.last.load(Ordering::Relaxed);
        if let Some(admissions) = &self.admissions
            && (layer == last || Admissions::ends_within(layer, last + 1))
        {
            admissions.show();
        }
        if layer != last {
            return;
        }
        pool.turn();
        let Some(admissions) = &self.admissions else { return };
        pool.make_room();
        let arrived = admissions.come();
        admissions.take(arrived);
        pool.arrived(arrived);
        if !pool.moved().is_empty() {
            residents.stage(pool.residency(), pool.moved());
            pool.written();
            *version = version.wrapping_add(1);
            self.versions.atomic(0).store(*version, Ordering::Release);
        }
    }
}
