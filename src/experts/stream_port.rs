//! Routed experts in the order of another engine's CUDA streams, recorded into its graphs or not.
//!
//! ```text
//! submit   publish_rows on the engine's stream: tokens and routing to pinned memory, a record into the ring
//!          (kernels/stream.cu), and a wake of the owner: by this thread or, while a graph is recorded, by a host
//!          function on a branch beside the first batch of the recording
//! owner    worker 0 of the team: reads records in order, computes, counts the slot's `up`; polls a little, then sleeps
//! sync     the branch joins; fetch_rows waits for `up` and copies the sum to the engine's memory
//! ```
//!
//! The host does not know when a recorded graph runs, hence the branch: as many wakes are counted as batches were
//! recorded in that stream, and every batch makes one record, so the owner may sleep when it has served as many records
//! as there were wakes. A host function takes 20 microseconds, as long as the products of experts on the device, so
//! there is none for each batch. What is handed over lies in a slot that is used again when its sync was enqueued, in
//! the same stream: buffers never move, and only what is in flight takes memory.
//!
//! Prompts that are not recorded may go another way: through the device itself (`gpu/prompts.rs`). And the device may
//! hold some of the experts: their part is computed between submit and sync, beside the owner's (`gpu/held.rs`).
//!
//! Of an engine with several ranks, only the first one's owner computes. Others publish nothing: the sum of what their
//! devices do not compute is zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::Choices;
use super::gpu::admissions;
use super::gpu::held::{HeldExperts, HeldSizes, KeptRows};
use super::gpu::prompts::{PromptSizes, Prompts};
use super::mailbox::{Mailbox, Room, blocks};
use super::service::{DeviceTokens, RowType, ServedLayer, Tokens};
use crate::cuda::kernels::rows::ROW_NUMBERS;
use crate::cuda::kernels::stream::RECORD_WORDS;
use crate::cuda::{Address, Cuda, CudaEvent, CudaStream, DeviceBuffer, PinnedBuffer, kernels, launch};
use crate::machine::workers::{Gate, Team};
use crate::{Error, Result};

/// Records that may wait, far more than slots.
const RECORDS: usize = 4096;
/// Slots of a stream: batches in flight.
const SLOTS: usize = 8;
/// How long the owner polls after it has served: longer than what is between two layers.
const POLL: Duration = Duration::from_millis(2);

const PANICKED: &str = "the experts' thread panicked: see its message above";

/// The experts' side of a device.
pub struct StreamPort {
    cuda: Arc<Cuda>,
    mailroom: &'static Mailroom,
    streams: Mutex<HashMap<(usize, bool), StreamSlots>>, // by stream, and whether it is being recorded
    prompts: Mutex<Vec<Prompts>>,                        // of each model whose prompts this device computes
}

/// What the owner and the streams share. Graphs may run as long as the process does, so it lives as long.
struct Mailroom {
    ring: PinnedBuffer<u32>, // [RECORDS, RECORD_WORDS]
    head: DeviceBuffer<u32>,
    wakes: Gate,
    slots: RwLock<Vec<&'static BatchSlot>>,
    layers: RwLock<Vec<Arc<ServedLayer>>>,
    held: RwLock<Vec<Arc<HeldExperts>>>, // of each model of which this device holds some
    failed: Mutex<Option<String>>,
}

/// Room for one batch in flight.
struct BatchSlot {
    mailbox: Mailbox,
    kept: Option<KeptRows>, // for experts that the device holds
    forked: CudaEvent,
    woken: CudaEvent,
}

// SAFETY: the host only passes the addresses of device buffers on; it never reads them.
#[allow(unsafe_code)]
unsafe impl Sync for Mailroom {}

/// The slots of a stream.
struct StreamSlots {
    side: CudaStream,
    slots: Vec<(usize, bool)>,                       // index, and whether a batch is in it
    recording: Option<(u64, &'static RecordedWake)>, // the last one, by its number
}

/// What a recorded graph tells the owner when it begins. Kept as long as the graph may run: for ever.
struct RecordedWake {
    wakes: &'static Gate,
    batches: AtomicU32, // of the stream, in this recording
}

/// A batch that was submitted.
#[derive(Debug)]
pub struct Ticket {
    stream: (usize, bool),
    bytes: usize,
    has_branch: bool, // which wakes the owner
    answer: Answer,
}

/// Where the sum comes from.
#[derive(Debug)]
enum Answer {
    /// The CPU, through a slot; and experts that the device holds of a layer.
    Slot(usize, Option<usize>),
    /// The device: which model's prompts, and which of their sums.
    Prompts(usize, usize),
    /// Another rank.
    Elsewhere,
}

impl Ticket {
    /// Bytes of its sum.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamPort {
    /// Opens device `ordinal` for experts that `team` computes, and starts the thread that owns the team from now on.
    /// Errors: `Error::Device`.
    pub fn open(ordinal: usize, team: &Arc<Team>) -> Result<Self> {
        let cuda = Cuda::open(ordinal)?;
        let mailroom = cuda.as_guest(|| {
            cuda.kernels.prepare(kernels::publish_rows);
            cuda.kernels.prepare(kernels::fetch_rows);
            cuda.kernels.prepare(kernels::take_table);
            let mailroom = Mailroom {
                ring: PinnedBuffer::new(&cuda, RECORDS * RECORD_WORDS)?,
                head: DeviceBuffer::zeros(&cuda, 1)?,
                wakes: Gate::new(0),
                slots: RwLock::default(),
                layers: RwLock::default(),
                held: RwLock::default(),
                failed: Mutex::default(),
            };
            cuda.synchronize()?;
            Ok(&*Box::leak(Box::new(mailroom)))
        })?;
        let team = team.clone();
        std::thread::Builder::new()
            .name("moebius-experts".into())
            .spawn(move || {
                // Where it is refused, the owner goes wherever the system puts it.
                let _ = team.pin_caller();
                mailroom.own();
            })
            .map_err(|e| Error::Resources(format!("cannot start the experts' thread: {e}; raise `ulimit -u`")))?;
        Ok(Self { cuda, mailroom, streams: Mutex::default(), prompts: Mutex::default() })
    }

    /// Lets the device compute its [share](ServedLayer::device_share) of the prompts of a layer's model of
    /// `sizes.from_tokens` tokens or more, if they are bf16 and not recorded, in layers that are
    /// [loaded](ServedLayer::load). Does nothing where it does already.
    ///
    /// Errors: `Error::Resources` where VRAM ends; `Error::Invalid` for more experts than its kernels take.
    pub fn compute_prompts(&self, layer: &ServedLayer, sizes: PromptSizes) -> Result<()> {
        let (service, mut all) = (layer.service(), lock(&self.prompts));
        if let (Some(part), false) = (layer.device_share(), all.iter().any(|prompts| prompts.is_of(service))) {
            let new = || Prompts::new(&self.cuda, (service, part), sizes, service.pinned());
            all.push(self.cuda.as_guest(new)?);
        }
        Ok(())
    }

    /// Lets the device hold its [share](ServedLayer::device_share) of experts of a layer's model, and this layer use
    /// them in batches of bf16 of up to `sizes.tokens` tokens. The first call for a model takes the memory; its `sizes`
    /// are kept. `first`: of another rank, the first one's [`pool`](StreamPort::pool).
    ///
    /// Errors: `Error::Resources` where VRAM ends; `Error::Invalid` for too little of it or more experts than its
    /// kernels take; `Error::Cache` for a damaged expert.
    pub fn hold_experts(&self, layer: &ServedLayer, sizes: HeldSizes, first: Option<&Path>) -> Result<()> {
        let Some(part) = layer.device_share() else { return Ok(()) };
        self.cuda.as_guest(|| {
            let held = match self.mailroom.held(layer) {
                Some(held) => held,
                None => {
                    let pinned = layer.service().pinned();
                    let held = Arc::new(HeldExperts::new(&self.cuda, (layer, part), sizes, pinned, first)?);
                    let mut all = self.mailroom.held.write().unwrap_or_else(PoisonError::into_inner);
                    all.push(held.clone());
                    held
                }
            };
            held.add_layer(layer)
        })
    }

    /// Experts of each layer that the device holds of a layer's model, and the choices of its batches; `None`: it holds
    /// none.
    pub fn held(&self, layer: &ServedLayer) -> Option<(usize, Choices)> {
        self.mailroom.held(layer).map(|held| held.state())
    }

    /// What the first rank's others are given to hold the same experts of a layer's model.
    pub fn pool(&self, layer: &ServedLayer) -> Option<PathBuf> {
        self.mailroom.held(layer).and_then(|held| held.pool())
    }

    /// Makes a layer known. It is kept as long as the process lives: recorded graphs may ask for it.
    pub fn add_layer(&self, layer: Arc<ServedLayer>) -> usize {
        let mut layers = self.mailroom.layers.write().unwrap_or_else(PoisonError::into_inner);
        layers.push(layer);
        layers.len() - 1
    }

    /// Errors: what went wrong since the last call; the sums of that were NaN.
    pub fn check(&self) -> Result<()> {
        match lock(&self.mailroom.failed).take() {
            Some(text) => Err(Error::Device(text)),
            None => self.cuda.check(),
        }
    }

    /// Enqueues on the stream that its engine calls `stream` what brings a batch to a layer of
    /// [`add_layer`](StreamPort::add_layer).
    ///
    /// Errors: too many batches of this stream wait for their [`sync`](StreamPort::sync), memory, the device.
    pub fn submit(&self, layer: usize, batch: &DeviceTokens, stream: usize) -> Result<Ticket> {
        self.check()?;
        self.cuda.as_guest(|| {
            let handle = stream;
            let stream = CudaStream::of_another(handle);
            let recording = stream.recording()?;
            let capturing = recording.is_some();
            let served = self.mailroom.layer(layer);
            let hidden = served.service().memory().cache().header().hidden;
            let (bytes, choices) = (batch.tokens * hidden * batch.rows.bytes(), batch.tokens * batch.top_k);
            let stream_of = (handle, capturing);
            let ticket = |answer, has_branch| Ticket { stream: stream_of, bytes, has_branch, answer };
            if !capturing {
                let mut all = lock(&self.prompts);
                if let Some(at) = all.iter().position(|p| p.is_of(served.service()) && p.takes(&served, batch)) {
                    let sum = all[at].submit(&served, batch, &stream)?;
                    return Ok(ticket(Answer::Prompts(at, sum), false));
                }
            }
            let held = self.mailroom.held(&served).filter(|held| held.takes(&served, batch));
            if !served.is_first() && held.is_none() {
                return Ok(ticket(Answer::Elsewhere, false));
            }
            let mut streams = lock(&self.streams);
            let slots = match streams.entry(stream_of) {
                Entry::Occupied(slots) => slots.into_mut(),
                Entry::Vacant(none) => none.insert(StreamSlots::new()?),
            };
            let index = self.slot(slots, (bytes, choices), held.is_some())?;
            let slot = self.mailroom.slot(index);
            let held = held.as_ref().zip(slot.kept.as_ref());
            let kept = held.map_or_else(KeptRows::none, |(held, kept)| {
                held.begin(&stream, (handle, recording), served.index());
                held.rows(served.index(), kept)
            });
            let begins = match recording {
                _ if !served.is_first() => None, // nothing wakes anyone
                None => {
                    self.mailroom.wakes.add(1);
                    None
                }
                Some(recording) => slots.recorded(recording, &self.mailroom.wakes),
            };
            if let Some(wake) = begins {
                self.cuda.record(&slot.forked, &stream);
                self.cuda.wait(&slots.side, &slot.forked);
                // SAFETY: it lives as long as the process.
                #[allow(unsafe_code)]
                unsafe {
                    self.cuda.call_host(&slots.side, count_wakes, std::ptr::from_ref(wake).cast_mut().cast())
                };
                self.cuda.record(&slot.woken, &slots.side);
            }
            let Mailbox { x, ids, weights, arrived, count, .. } = &slot.mailbox;
            let ring = if served.is_first() { self.mailroom.ring.address() } else { Address::NULL };
            launch!(self.cuda, &stream, kernels::publish_rows, [blocks(bytes), 1, 1];
                Address::of_another(batch.x), Address::of_another(batch.ids), Address::of_another(batch.weights),
                (bytes / 16) as i32, choices as i32, (batch.id_bytes / 4) as i32, x.address(), ids.address(),
                weights.address(), arrived.address(), count.address(), self.mailroom.head.address(), ring,
                RECORDS as i32, index as i32, layer as i32, batch.tokens as i32, batch.top_k as i32,
                batch.rows as i32, kept);
            if let Some((held, kept)) = held {
                held.multiply(&stream, served.index(), batch, kept);
            }
            self.cuda.check()?;
            Ok(ticket(Answer::Slot(index, held.map(|_| layer)), begins.is_some()))
        })
    }

    /// Enqueues on the same stream what waits for the sum and copies it to `out`, of the batch's shape and type and
    /// aligned to 16 bytes.
    pub fn sync(&self, ticket: Ticket, out: u64) -> Result<()> {
        self.cuda.as_guest(|| {
            let stream = CudaStream::of_another(ticket.stream.0);
            let (index, layer) = match ticket.answer {
                Answer::Prompts(at, sum) => return lock(&self.prompts)[at].sync(sum, ticket.bytes / 2, out, &stream),
                Answer::Slot(index, layer) => (index, layer.map(|layer| self.mailroom.layer(layer))),
                Answer::Elsewhere => {
                    let numbers = ticket.bytes / 4; // zero is zero in all three types
                    launch!(self.cuda, &stream, kernels::clear, [numbers.div_ceil(ROW_NUMBERS), 1, 1];
                        Address::of_another(out), numbers as i64);
                    return self.cuda.check();
                }
            };
            let slot = self.mailroom.slot(index);
            let held = layer.as_ref().and_then(|layer| Some((self.mailroom.held(layer)?, layer.index())));
            let is_first = layer.as_ref().is_none_or(|layer| layer.is_first());
            if ticket.has_branch {
                self.cuda.wait(&stream, &slot.woken);
            }
            let (mut here, mut coming) = (Address::NULL, admissions::NOTHING);
            if let (Some((held, layer)), Some(kept)) = (&held, &slot.kept) {
                coming = held.join(&stream, *layer, kept);
                here = kept.sum();
            }
            let Mailbox { count, up, y_address, .. } = &slot.mailbox;
            let host_y = if is_first { *y_address } else { Address::NULL };
            launch!(self.cuda, &stream, kernels::fetch_rows, [blocks(ticket.bytes) + admissions::blocks(&coming), 1, 1];
                count.address(), up.address(), host_y, here, Address::of_another(out), (ticket.bytes / 16) as i32,
                coming);
            if let Some((held, _)) = &held {
                held.end();
            }
            if let Some(of) = lock(&self.streams).get_mut(&ticket.stream) {
                of.slots.iter_mut().filter(|(of, _)| *of == index).for_each(|(_, busy)| *busy = false);
            }
            self.cuda.check()
        })
    }

    /// A free slot of the stream that is large enough, and `keeps` rows on the device; makes one if there is none.
    fn slot(&self, of: &mut StreamSlots, (bytes, choices): (usize, usize), keeps: bool) -> Result<usize> {
        let fits = |index: usize| {
            let BatchSlot { mailbox, kept, .. } = self.mailroom.slot(index);
            mailbox.x.len() >= bytes && mailbox.ids.len() >= choices && kept.is_some() == keeps
        };
        if let Some((index, busy)) = of.slots.iter_mut().find(|(index, busy)| !busy && fits(*index)) {
            *busy = true;
            return Ok(*index);
        }
        if of.slots.iter().filter(|(_, busy)| *busy).count() >= SLOTS {
            return Err(Error::Invalid(format!(
                "{SLOTS} batches of one stream wait for their sync_forward: call it before the next submit_forward"
            )));
        }
        let (bytes, choices) = (bytes.next_power_of_two().max(1 << 14), choices.next_power_of_two().max(128));
        let cuda = &self.cuda;
        let room = Room { x: bytes, y: bytes, choices, counters: 1 };
        let slot = BatchSlot {
            mailbox: Mailbox::new(cuda, &room)?,
            kept: if keeps { Some(KeptRows::new(cuda, bytes, choices)?) } else { None },
            forked: CudaEvent::new(cuda)?,
            woken: CudaEvent::new(cuda)?,
        };
        cuda.synchronize()?;
        let mut slots = self.mailroom.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.len() == RECORDS {
            return Err(Error::Resources(format!("{RECORDS} batches of all streams have a place: use fewer streams")));
        }
        slots.push(Box::leak(Box::new(slot)));
        of.slots.push((slots.len() - 1, true));
        Ok(slots.len() - 1)
    }
}

impl StreamSlots {
    /// None yet, of the current thread's device.
    fn new() -> Result<Self> {
        Ok(Self { side: CudaStream::beside()?, slots: Vec::new(), recording: None })
    }

    /// Counts a batch of a recording. Returns what its graph is to tell the owner, for the first one.
    fn recorded(&mut self, recording: u64, wakes: &'static Gate) -> Option<&'static RecordedWake> {
        match self.recording {
            Some((number, wake)) if number == recording => {
                wake.batches.fetch_add(1, Ordering::Relaxed);
                None
            }
            _ => {
                let wake = &*Box::leak(Box::new(RecordedWake { wakes, batches: AtomicU32::new(1) }));
                self.recording = Some((recording, wake));
                Some(wake)
            }
        }
    }
}

/// What the driver calls when a recorded graph comes to its first submit.
///
/// # Safety
/// `wake` is a [`RecordedWake`].
#[allow(unsafe_code)]
unsafe extern "C" fn count_wakes(wake: *mut c_void) {
    // SAFETY: the caller's promise.
    let RecordedWake { wakes, batches } = unsafe { &*wake.cast::<RecordedWake>() };
    wakes.add(batches.load(Ordering::Relaxed));
}

impl Mailroom {
    fn layer(&self, index: usize) -> Arc<ServedLayer> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner)[index].clone()
    }

    fn held(&self, layer: &ServedLayer) -> Option<Arc<HeldExperts>> {
        let all = self.held.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|held| held.is_of(layer.service())).cloned()
    }

    fn slot(&self, index: usize) -> &'static BatchSlot {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)[index]
    }

    /// The owner's thread.
    fn own(&self) {
        let (mut served, mut last) = (0u32, Instant::now());
        loop {
            if let Some(record) = self.record(served) {
                served = served.wrapping_add(1);
                self.serve(record);
                last = Instant::now();
                continue;
            }
            // Records may come before their wakes, never without.
            let expected = |wakes: u32| wakes.wrapping_sub(served) as i32 > 0;
            let waited = last.elapsed();
            if waited < POLL {
                (0..32).for_each(|_| std::hint::spin_loop());
            } else if expected(self.wakes.get()) {
                // The device is busy with what is in front of it.
                std::thread::sleep((waited / 32).clamp(Duration::from_micros(20), Duration::from_millis(1)));
            } else {
                self.wakes.wait(expected);
                last = Instant::now();
            }
        }
    }

    /// The record at a place of the ring, once it is there.
    fn record(&self, place: u32) -> Option<[u32; RECORD_WORDS]> {
        let at = (place as usize % RECORDS) * RECORD_WORDS;
        if self.ring.atomic(at).load(Ordering::Acquire) != place.wrapping_add(1) {
            return None;
        }
        Some(std::array::from_fn(|i| self.ring.atomic(at + i).load(Ordering::Relaxed)))
    }

    /// Computes a batch. Whatever happens, the stream gets an answer: it waits for it.
    fn serve(&self, [_, slot, count, layer, tokens, top_k, rows, is_held]: [u32; RECORD_WORDS]) {
        let slot = self.slot(slot as usize);
        let layer = self.layer(layer as usize);
        let rows = [RowType::F32, RowType::F16, RowType::Bf16][rows as usize];
        let bytes = tokens as usize * layer.service().memory().cache().header().hidden * rows.bytes();
        let choices = (tokens * top_k) as usize;
        let mailbox = &slot.mailbox;
        let mut y = lock(&mailbox.y);
        let out = &mut y[..bytes];
        let batch = Tokens {
            x: &mailbox.x[..bytes],
            rows,
            ids: &mailbox.ids[..choices],
            weights: &mailbox.weights[..choices],
            top_k: top_k as usize,
        };
        let held = if is_held == 1 { self.held(&layer) } else { None };
        let done = catch_unwind(AssertUnwindSafe(|| {
            if let Some(held) = &held {
                held.note(layer.index(), batch.ids); // which the device may overwrite after the answer
            }
            layer.forward_pinned(batch, out)
        }));
        let failed = match done {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(PANICKED.into()),
        };
        if let Some(text) = failed {
            // NaN in all three types.
            out.fill(0xff);
            lock(&self.failed).get_or_insert(text);
        }
        mailbox.answer(0, count);
        if let Some(held) = held {
            let done = catch_unwind(AssertUnwindSafe(|| held.chosen(layer.index())));
            if done.is_err() {
                lock(&self.failed).get_or_insert(PANICKED.into());
            }
        }
    }
}
