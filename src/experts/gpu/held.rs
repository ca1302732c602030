//! Experts in VRAM for another engine's decode: they are multiplied there in the order of its stream, and change with
//! the text (`experts/pool.rs`).
//!
//! ```text
//! submit   the engine's stream   where a pass begins, the host's table, if it is a newer one (take_table)
//!                                publish_rows, which keeps what experts in VRAM need
//!          a stream beside it    their products; on the engine's own, where it computes no expert of the layer
//! sync     the engine's stream   their sum and the host's (fetch_rows, which copies experts on their way meanwhile)
//! owner    before a layer        shows how much of what was sent comes meanwhile
//!          after it              sends missing experts on their way
//!          after the last one    takes out slots, and writes the table of the passes that follow
//! ```
//!
//! The host does not know when a pass begins: another engine replays a graph when it likes, before the last one has
//! ended. So it is the device that takes a table, and says so. Until then the host does not write the next one, and
//! sends no expert into a slot, because the device may still look there. Which experts of a layer the host is to
//! compute, the device says with each batch.
//!
//! Batches of a model must not run at the same time on two streams.
//!
//! Of an engine with several ranks each holds its part of the width of the same experts, and the engine adds the sums.
//! The first one's owner decides for all (`board`), and the CPU computes for it alone. All ranks enqueue the same
//! passes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use half::bf16;

use super::FEW_TOKENS;
use super::admissions::{self, Way};
use super::board::Board;
use super::parts::Parts;
use super::products::{Choices, Products, Sink};
use super::prompts::{MAX_EXPERTS, MAX_PAIRS, products};
use super::residents::Slots;
use super::together::Decider;
use crate::cuda::{Address, Cuda, CudaEvent, CudaStream, DeviceBuffer, Registered, kernels, launch};
use crate::experts;
use crate::experts::ExpertShape;
use crate::experts::popularity::Popularity;
use crate::experts::residency::{Move, Place, Residency};
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
    _bytes: DeviceBuffer<u8>,         // of the slots
    slots: DeviceBuffer<u64>,         // where each begins
    tables: DeviceBuffer<u64>,        // [layers, experts]: addresses; 0: in RAM alone
    own: DeviceBuffer<u32>,           // [2]: the version of the tables, and passes
    places: Address<u64>,             // [layers, experts]: of the board, as the next three are
    version: Address<u32>,
    taken: Address<u32>,
    agreed: kernels::Agreed,
    coming: kernels::AdmissionRing, // of the board; null: nothing comes or goes
    passing: Mutex<Passing>,        // of who enqueues
    host: Host,
}

/// What a rank's host has to do with which experts are held.
enum Host {
    /// The first one's owner decides. Never locked during a call of the driver.
    First(Box<Mutex<Changing>>),
    /// Others' have nothing to do: their devices use the board.
    Other { _board: Board },
}

/// What a layer's ids mean.
struct Ids {
    experts: Vec<i32>,            // -1: none, or the engine's own
    on_device: DeviceBuffer<i32>, // the same
    are_all: bool,                // none is the engine's own
}

/// Where the pass is that is enqueued.
#[derive(Default)]
struct Passing {
    at: (usize, Option<u64>), // the engine's stream, and its recording
    layer: Option<usize>,
    in_flight: usize, // batches between submit and sync
}

/// Which experts are held.
struct Changing {
    decider: Decider,
    board: Board,
    to_meet: Vec<(Parts, Slots)>, // of each rank, until all have come
    ids: Vec<i32>,                // of the batch that is served
    version: u32,                 // of the places that were written last
}

/// The most bytes that one expert of every layer has on a rank. Errors: as [`ExpertShape::part`].
fn bytes_of_one(shape: &ExpertShape, of: usize) -> Result<u64> {
    let bytes = (0..of).map(|rank| Ok(shape.part(Share { rank, of })?.0.bytes_of_one()));
    Ok(bytes.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0))
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
    /// engine does not compute itself. `share`: what this device computes of every expert; `registered`: the experts,
    /// pinned where they lie; `first`: the first rank's [`pool`](HeldExperts::pool), for another.
    ///
    /// Errors: `Error::Resources` where VRAM ends; `Error::Invalid` for too little of it, or more experts than the
    /// kernels take; `Error::Cache` for a damaged expert.
    pub fn new(
        cuda: &Arc<Cuda>,
        (layer, share): (&ServedLayer, Share),
        sizes: HeldSizes,
        registered: Arc<Vec<Registered>>,
        first: Option<&Path>,
    ) -> Result<Self> {
        let service = layer.service();
        let memory = service.memory();
        let parts = Parts::new(memory.clone(), share, &registered)?;
        let shape = parts.shape();
        let (layers, experts) = (shape.layers(), shape.experts);
        if experts > MAX_EXPERTS {
            return Err(Error::Invalid(format!(
                "the GPU cannot hold experts: a layer has {experts} experts and at most {MAX_EXPERTS} are supported"
            )));
        }
        let top_k = sizes.top_k.max(1);
        let tokens = sizes.tokens.min(MAX_PAIRS / top_k);
        let mut is_wanted = vec![false; experts];
        layer.experts_of_ids().iter().filter(|&&e| e >= 0).for_each(|&e| is_wanted[e as usize] = true);
        let wanted = is_wanted.iter().filter(|&&wanted| wanted).count();
        let one = bytes_of_one(&memory.shape(), share.of)?;
        let held = usize::try_from(sizes.pool_bytes / one).unwrap_or(usize::MAX).min(wanted);
        if held == 0 {
            return Err(Error::Invalid(format!(
                "{} MiB hold no expert of each of {layers} layers: give at least {} MiB, or none",
                sizes.pool_bytes >> 20,
                one.div_ceil(1 << 20)
            )));
        }
        let mut board = Board::new(cuda, (share, first), (layers * experts, memory.regions().len()), held)?;
        let decider = (share.rank == 0).then(|| {
            let popularity = Popularity::of(memory.cache());
            let orders = (0..layers).map(|layer| {
                let mut order = popularity.order(layer);
                order.sort_by_key(|&expert| !is_wanted[expert as usize]);
                order
            });
            let residency = Residency::new(orders, held, 0);
            board.places.iter_mut().enumerate().for_each(|(i, place)| {
                *place = place_of(&residency, i / experts, (i % experts) as u16);
            });
            Decider::new(residency, &memory.shape())
        });
        let slots = Slots::new(shape, held);
        let bytes = DeviceBuffer::new(cuda, slots.bytes())?;
        let address = |slot: usize| bytes.address().add(slots.at(slot));
        for of_layer in 0..layers {
            layer.check(of_layer)?;
            for expert in 0..experts {
                if let Some(slot) = (board.places[of_layer * experts + expert] as usize).checked_sub(1) {
                    parts.upload(cuda, of_layer, &[expert], address(slot));
                }
            }
        }
        let addresses: Vec<u64> = (0..slots.len()).map(|slot| address(slot).to_u64()).collect();
        let table: Vec<u64> =
            board.places.iter().map(|&place| if place == 0 { 0 } else { addresses[place as usize - 1] }).collect();
        let regions = parts.addresses().filter(|_| held < wanted);
        let coming = if regions.is_some() { board.road().for_kernels() } else { admissions::NOTHING };
        let ((version, taken), agreed, places) = (board.versions(), board.agreed(), board.places.address());
        let (slots, tables) = (DeviceBuffer::from_slice(cuda, &addresses)?, DeviceBuffer::from_slice(cuda, &table)?);
        let (own, products) = (DeviceBuffer::zeros(cuda, 2)?, products(cuda, (service, &parts), (tokens, top_k), 0)?);
        let beside = CudaStream::beside()?;
        cuda.synchronize()?;
        if let Some(regions) = &regions {
            board.join(bytes.address(), regions);
        }
        Ok(Self {
            beside,
            products,
            tokens,
            pairs: tokens * top_k,
            held,
            layers: RwLock::new((0..layers).map(|_| None).collect()),
            last: AtomicUsize::new(0),
            _bytes: bytes,
            slots,
            tables,
            own,
            places,
            version,
            taken,
            agreed,
            coming,
            passing: Mutex::default(),
            host: match decider {
                Some(decider) => {
                    let of_rank = |rank| {
                        let parts = Parts::new(memory.clone(), Share { rank, of: share.of }, &[])?;
                        let slots = Slots::new(parts.shape(), held);
                        Ok((parts, slots))
                    };
                    let to_meet = (0..share.of).map(of_rank).collect::<Result<_>>()?;
                    let changing = Changing { decider, board, to_meet, ids: Vec::new(), version: 0 };
                    Host::First(Box::new(Mutex::new(changing)))
                }
                None => Host::Other { _board: board },
            },
            service: service.clone(),
            cuda: cuda.clone(),
            _registered: registered,
        })
    }

    /// What other ranks are given to hold the same experts; `None`: there are none.
    pub fn pool(&self) -> Option<PathBuf> {
        match &self.host {
            Host::First(changing) => lock(changing).board.path().map(PathBuf::from),
            Host::Other { .. } => None,
        }
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
        let are_all = experts.iter().all(|&expert| expert >= 0);
        let ids = Ids { on_device: DeviceBuffer::from_slice(&self.cuda, &experts)?, experts, are_all };
        self.layers.write().unwrap_or_else(PoisonError::into_inner)[at] = Some(ids);
        self.last.fetch_max(at, Ordering::Relaxed);
        Ok(())
    }

    /// Experts of each layer that it has room for, and choices so far, which the first rank counts.
    pub fn state(&self) -> (usize, experts::Choices) {
        match &self.host {
            Host::First(changing) => (self.held, lock(changing).decider.pool.choices()),
            Host::Other { .. } => (self.held, experts::Choices::default()),
        }
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
        if !goes_on && passing.in_flight == 0 {
            let experts = self.service.memory().cache().num_experts();
            let entries = self.service.memory().cache().num_layers() * experts;
            launch!(self.cuda, stream, kernels::take_table, [1, 1, 1];
                self.places, self.slots.address(), self.tables.address(), entries as i32, self.version,
                self.own.address(), self.taken, self.agreed);
        }
        (passing.at, passing.layer) = (at, Some(layer));
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

    /// Whether the engine computes no expert of a layer: what it enqueues before the sum needs no stream beside it.
    fn are_all(&self, layer: usize) -> bool {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        layers[layer].as_ref().is_some_and(|ids| ids.are_all)
    }

    fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.service.memory().cache().num_experts())
    }

    /// Enqueues the products of what was kept in `stream`, beside what follows there. The kernel in front is ours.
    pub fn multiply(&self, stream: &CudaStream, layer: usize, batch: &DeviceTokens, kept: &KeptRows) {
        let Self { cuda, beside, products, .. } = self;
        let (are_all, behind) = (self.are_all(layer), stream.behind_ours());
        let beside = if are_all { &behind } else { beside };
        if !are_all {
            cuda.record(&kept.given, stream);
            cuda.wait(beside, &kept.given);
        }
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
            products.few_down(beside, table, choices, out, Sink::ADD);
        } else {
            products.grouped(beside, table, x, choices, Address::NULL);
            products.combine(beside, table, choices, &(0..choices.tokens), out, false);
        }
        if !are_all {
            cuda.record(&kept.multiplied, beside);
        }
    }

    /// Enqueues what comes before the sum of a batch of `layer` is fetched in `stream`. What fetches it is given what
    /// comes meanwhile.
    pub(in crate::experts) fn join(
        &self,
        stream: &CudaStream,
        layer: usize,
        kept: &KeptRows,
    ) -> kernels::AdmissionRing {
        if !self.are_all(layer) {
            self.cuda.wait(stream, &kept.multiplied);
        }
        self.coming
    }

    /// Called when what fetches the sum was enqueued.
    pub fn end(&self) {
        lock(&self.passing).in_flight -= 1;
    }

    /// Takes down what a batch of `layer` has chosen, as it was published by the first rank. The CPU begins with it.
    pub fn note(&self, layer: usize, published: &[i32]) {
        let Host::First(changing) = &self.host else { return };
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let experts = layers[layer].as_ref().map_or(&[][..], |ids| &ids.experts);
        let none = i32::MIN; // of what is in VRAM none, either
        let expert = |id: i32| experts.get(id as usize).copied().filter(|&expert| expert >= 0);
        let changing = &mut *lock(changing);
        changing.ids.clear();
        changing.ids.extend(published.iter().map(|&id| match id < 0 {
            true => expert(!id).map_or(none, |expert| !expert),
            false => expert(id).unwrap_or(none),
        }));
        changing.decider.admissions.begin_layer(&changing.ids, 0.0); // nothing goes over the link
    }

    /// Takes in what was noted, and sends experts on their way to all ranks.
    pub fn chosen(&self, layer: usize) {
        let Host::First(changing) = &self.host else { return };
        let changing = &mut *lock(changing);
        let changes = !self.coming.entries.is_null();
        if changes && !changing.board.have_taken(changing.version) {
            return; // slots that were taken out may still be read
        }
        if changes {
            changing.meet();
        }
        let last = self.last.load(Ordering::Relaxed);
        changing.decider.chosen(layer, &changing.ids);
        if layer == last {
            changing.turn();
        }
    }
}

impl Changing {
    /// Opens the way to all ranks, which have come.
    fn meet(&mut self) {
        for (rank, (mut parts, slots)) in self.to_meet.drain(..).enumerate() {
            let (road, begin, regions) = self.board.way_to(rank);
            parts.see_at(regions);
            self.decider.add(Some(Way::new(Arc::new(parts), slots, begin, road)));
        }
    }

    /// Ends a pass: where experts are in those that follow.
    fn turn(&mut self) {
        let Self { decider, board, version, .. } = self;
        decider.turn();
        decider.make_room();
        decider.arrive();
        let residency = decider.pool.residency();
        if residency.moves().is_empty() {
            return;
        }
        let experts = board.places.len() / residency.layers();
        for &Move { layer, expert, .. } in residency.moves() {
            board.places[layer * experts + expert as usize] = place_of(residency, layer, expert);
        }
        decider.pool.forget_moves();
        *version = version.wrapping_add(1);
        board.publish(*version);
    }
}

/// An expert's slot and 1; 0: it is in RAM.
fn place_of(residency: &Residency, layer: usize, expert: u16) -> u64 {
    match residency.place(layer, expert) {
        Place::Vram(slot) => slot as u64 + 1,
        Place::Ram | Place::OnHolder => 0,
    }
}
