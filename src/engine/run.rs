//! The engine's thread: it owns model, KV cache and sequences, and does one step after the other.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::{
    CaptureWanted, Captured, Event, FinishReason, HookPoint, QueuePlace, Request, RequestStats, Steer, Submission,
    Token,
};
use crate::backend::Addition;
use crate::backend::batch::{BLOCK_SIZE, Batch, Span};
use crate::backend::tensor::Shortlist;
use crate::config::EngineConfig;
use crate::engine::capture::{RowSizes, each_logits};
use crate::engine::metrics::Metrics;
use crate::engine::prefill_budget::PrefillBudget;
use crate::engine::sampler::{Logprobs, Sampler};
use crate::engine::scheduler::{Scheduler, Sequence, StateCopy};
use crate::experts::Traffic;
use crate::forward::Forward;
use crate::forward::block_pool::{BlockPool, Sharing};
use crate::forward::tap::{Positions, Take, Tap};
use crate::load::{LEAST_BYTES, Loaded};
use crate::{Error, Result};

/// What the engine keeps with the sequence of a request.
struct Generation {
    events: mpsc::UnboundedSender<Event>,
    sampler: Sampler,
    max_tokens: usize,
    ignore_eos: bool,
    steer: Vec<Steer>,
    capture: Option<CaptureWanted>,
    captured: usize, // positions whose rows were emitted, and are not again when the sequence is computed again
    place: Option<QueuePlace>, // in the queue, until its first step
    clocks: Clocks,
    decode_bytes: u64,
    ended: bool,
}

/// When a request got how far.
struct Clocks {
    submitted: Instant,
    started: Option<Instant>,    // its first step
    prefilled: Option<Instant>,  // its first token came, or its prompt was read and that was all
    last_token: Option<Instant>, // so far
}

/// The owner of everything that runs.
pub(super) struct Engine {
    model: Box<dyn Forward>,
    scheduler: Scheduler<Generation>,
    budget: PrefillBudget,
    metrics: Arc<Metrics>,
    batch: Batch,
    sampled: Vec<usize>,            // of this step: running sequences at their end
    rows: Vec<usize>,               // of this step: their rows of the batch, to sample from
    inverse_temperatures: Vec<f32>, // of this step
    lists: Vec<Shortlist>,          // of this step
    undecided: Vec<usize>,          // of `sampled`: their whole rows are needed
    tap: Tap,                       // of this step
    takers: Vec<Taker>,             // of `tap.takes`
    ends: Ends,
    vocab_size: usize,
    resident_bytes: u64,
    available_bytes: fn() -> u64, // RAM of the machine that can be taken
}

/// Who wants what a tap takes.
struct Taker {
    index: usize,    // of the running sequence
    position: usize, // of the first row
    logits: bool,
}

/// Where every generation ends.
struct Ends {
    tokens: Vec<u32>,
    max_context: usize,
}

impl Engine {
    /// Of a model in memory, whose generations end at `end_tokens`.
    pub(super) fn new(loaded: Loaded, config: &EngineConfig, end_tokens: Vec<u32>, metrics: Arc<Metrics>) -> Self {
        let sharing = match (config.prefix_cache, loaded.model.config().has_recurrent_state()) {
            (true, false) => Sharing::Blocks,
            (true, true) if loaded.snapshots > 0 => Sharing::States(loaded.snapshots),
            _ => Sharing::None,
        };
        let pool = BlockPool::new(loaded.kv_blocks).sharing(sharing).with_host(loaded.host_blocks);
        Metrics::set(&metrics.kv_blocks_total, loaded.kv_blocks);
        Metrics::set(&metrics.state_snapshots_total, loaded.snapshots);
        Self {
            resident_bytes: loaded.model.resident_bytes_per_token(),
            scheduler: Scheduler::new(pool, config.max_sequences, loaded.max_batch_tokens),
            budget: PrefillBudget::new(config.max_gap),
            metrics,
            ends: Ends { tokens: end_tokens, max_context: loaded.max_context },
            available_bytes: loaded.available_bytes,
            vocab_size: loaded.model.config().vocab_size,
            model: loaded.model,
            batch: Batch::default(),
            sampled: Vec::new(),
            rows: Vec::new(),
            inverse_temperatures: Vec::new(),
            lists: Vec::new(),
            undecided: Vec::new(),
            tap: Tap::default(),
            takers: Vec::new(),
        }
    }

    /// Serves until all handles are dropped and all generations complete.
    pub(super) fn run(&mut self, queue: &mut mpsc::UnboundedReceiver<Submission>) {
        if let Err(error) = self.model.enter_thread() {
            return self.give_up(queue, &error.to_string());
        }
        loop {
            if self.scheduler.is_idle() {
                match queue.blocking_recv() {
                    Some(submission) => self.add(submission),
                    None => return,
                }
            }
            while let Ok(submission) = queue.try_recv() {
                self.add(submission);
            }
            let cancelled = &self.metrics.requests_cancelled_total;
            self.scheduler.retire(|s| s.state.events.is_closed(), |_| Metrics::add(cancelled, 1));
            if let Err(error) = self.step() {
                // All sequences of the step share its error; other sequences go on.
                for i in 0..self.scheduler.plan().len() {
                    let index = self.scheduler.plan()[i].index;
                    let error = match &error {
                        Error::Resources(why) => Error::Resources(why.clone()),
                        error => Error::Model(error.to_string()),
                    };
                    self.scheduler.sequence(index).state.fail(error, &self.metrics);
                }
                self.scheduler.retire(|s| s.state.ended, drop);
            }
            self.publish();
        }
    }

    /// Nothing here can compute any more, or be trusted to, as after a panic: all requests fail with the reason, and no
    /// other is taken.
    pub(super) fn give_up(&mut self, queue: &mut mpsc::UnboundedReceiver<Submission>, why: &str) {
        let failed = || Event::Failed(Error::Stopped(why.into()));
        queue.close();
        self.scheduler.retire(|_| true, |s| drop(s.state.events.send(failed())));
        while let Ok(submission) = queue.try_recv() {
            let _ = submission.events.send(failed());
        }
    }

    fn publish(&self) {
        let (metrics, pool) = (&*self.metrics, self.scheduler.pool());
        Metrics::set(&metrics.requests_running, self.scheduler.running());
        Metrics::set(&metrics.preemptions_total, self.scheduler.preempted() as usize);
        Metrics::set(&metrics.kv_blocks_used, pool.total_blocks() - pool.free_blocks());
        Metrics::set(&metrics.kv_blocks_kept, pool.kept_blocks());
        Metrics::set(&metrics.kv_blocks_on_host, pool.blocks_on_host());
        Metrics::set(&metrics.state_snapshots_kept, pool.kept_states());
    }

    fn add(&mut self, Submission { request, events, submitted, place }: Submission) {
        let refuse = |error: Error| {
            Metrics::add(&self.metrics.requests_failed_total, 1);
            let _ = events.send(Event::Failed(error));
        };
        let biased = request.sampling.logit_bias.iter().map(|(token, _)| token);
        if let Some(token) = request.prompt.iter().chain(biased).find(|&&t| t as usize >= self.vocab_size) {
            return refuse(Error::Invalid(format!("token id {token} is not in the vocabulary of {}", self.vocab_size)));
        }
        if request.max_tokens == Some(0) && request.capture.is_none() {
            let stats = RequestStats { prompt_tokens: request.prompt.len(), ..RequestStats::default() };
            let _ = events.send(Event::Done(FinishReason::Length, stats));
            return;
        }
        // What runs has its memory; more could take the machine down.
        let available = (self.available_bytes)();
        if available < LEAST_BYTES {
            return refuse(Error::Resources(format!(
                "memory is short: {} MiB of this machine's are left and {} are kept free, so no new request is taken; \
                 try again later, or close other programs",
                available >> 20,
                LEAST_BYTES >> 20
            )));
        }
        let room = self.ends.max_context - request.prompt.len();
        let max_tokens = request.max_tokens.unwrap_or(room).min(room);
        if let Some(wanted) = &request.capture {
            let prompt = request.prompt.len();
            let bytes = wanted.bytes(prompt, prompt + max_tokens, RowSizes::of(self.model.config()));
            if bytes as u64 > available - LEAST_BYTES {
                return refuse(Error::Resources(format!(
                    "what is to be captured takes {} MiB and {} are free: ask for fewer layers or positions, or for \
                     no logits",
                    bytes >> 20,
                    (available - LEAST_BYTES) >> 20
                )));
            }
        }
        if let Err(error) = self.model.hold(&mut request.steer.iter().map(|steer| &steer.vector)) {
            return refuse(error);
        }
        let (reuses, offers) = untouched(&request);
        let stops = match self.scheduler.pool().keeps_states() {
            true => stops(&request.prompt, &self.ends.tokens),
            false => Vec::new(),
        };
        let generation = Generation {
            events,
            sampler: Sampler::new(request.sampling, request.constraint, request.logprobs),
            max_tokens,
            ignore_eos: request.ignore_eos,
            steer: request.steer,
            capture: request.capture,
            captured: 0,
            place: Some(place),
            clocks: Clocks { submitted, started: None, prefilled: None, last_token: None },
            decode_bytes: 0,
            ended: false,
        };
        let mut sequence = Sequence::new(request.prompt, request.client, generation).of(request.tenant);
        (sequence.reuses, sequence.offers, sequence.stops) = (reuses, offers, stops);
        self.scheduler.add(sequence);
    }

    /// One forward pass for all, one token for each sequence that is at its end.
    fn step(&mut self) -> Result<()> {
        let now = Instant::now();
        self.plan(now);
        let prefill_tokens = self.scheduler.prefill_tokens();
        for moved in self.scheduler.take_moves() {
            self.model.move_block(moved);
        }
        for &StateCopy { slot, snapshot } in self.scheduler.restores() {
            self.model.restore_state(slot, snapshot as usize);
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        let before = self.model.traffic();
        let tap = Some(&mut self.tap).filter(|tap| !tap.is_empty());
        self.model.forward(&self.batch, tap)?;
        self.emit_captured()?;
        let moved = self.model.traffic().since(before);
        self.count_experts(moved);
        let read = moved.total() + self.resident_bytes;
        for &StateCopy { slot, snapshot } in self.scheduler.commit() {
            self.model.save_state(slot, snapshot as usize);
        }
        Metrics::add(&self.metrics.steps_total, 1);
        self.end_readers();

        // At most one row per sequence, and no more sequences than rows of logits.
        if !self.rows.is_empty() {
            self.sample(read)?;
        }
        self.scheduler.retire(|s| s.state.ended, drop);
        if prefill_tokens > 0 {
            self.budget.record(prefill_tokens, now.elapsed());
        }
        Ok(())
    }

    /// Counts what a step read of experts.
    fn count_experts(&self, Traffic { ram, link, vram, choices, ahead, foreseen }: Traffic) {
        let metrics = &self.metrics;
        for (counter, n) in [
            (&metrics.expert_hits_total, choices.hits),
            (&metrics.expert_misses_total, choices.misses),
            (&metrics.expert_ram_bytes_total, ram),
            (&metrics.expert_link_bytes_total, link),
            (&metrics.expert_vram_bytes_total, vram),
            (&metrics.expert_ahead_bytes_total, ahead),
            (&metrics.expert_foreseen_total, foreseen.hits),
            (&metrics.expert_unforeseen_total, foreseen.misses),
        ] {
            Metrics::add(counter, n as usize);
        }
    }

    /// Plans the step that begins `now`.
    fn plan(&mut self, now: Instant) {
        self.scheduler.next(&mut self.batch, self.budget.tokens());
        self.sampled.clear();
        self.rows.clear();
        self.tap.clear();
        self.takers.clear();
        let mut prompt_tokens = 0;
        for i in 0..self.scheduler.plan().len() {
            let part = self.scheduler.plan()[i].clone();
            let sequence = self.scheduler.sequence(part.index);
            let generation = &mut sequence.state;
            if generation.clocks.started.is_none() {
                (generation.clocks.started, generation.place) = (Some(now), None);
                Metrics::add(&self.metrics.prompt_tokens_reused_total, sequence.shared);
            }
            if generation.clocks.prefilled.is_none() {
                prompt_tokens += part.rows.len();
            }
            if !generation.steer.is_empty() || generation.capture.is_some() {
                let span = &self.batch.spans[i];
                generation.tap(part.index, sequence.prompt_tokens, span, &mut self.tap, &mut self.takers);
            }
            if generation.max_tokens > 0 {
                self.sampled.extend(part.sampled.clone().map(|_| part.index));
                self.rows.extend(part.sampled);
            }
        }
        Metrics::add(&self.metrics.prompt_tokens_computed_total, prompt_tokens);
    }

    /// Emits what the pass has captured.
    fn emit_captured(&mut self) -> Result<()> {
        let Self { model, scheduler, tap, takers, vocab_size, .. } = self;
        let mut emit = |taker: &Taker, captured: Captured| {
            let _ = scheduler.sequence(taker.index).state.events.send(Event::Captured(captured));
        };
        for ((number, layer), rows) in std::mem::take(&mut tap.taken) {
            let taker = &takers[number];
            let count = tap.takes[number].rows.len();
            let what = HookPoint::Hidden(layer);
            emit(taker, Captured { what, position: taker.position, count, rows, experts: Vec::new() });
        }
        for ((number, layer), routing) in std::mem::take(&mut tap.routed) {
            let (what, count) = (HookPoint::Router(layer), routing.tokens());
            let (taker, rows, experts) = (&takers[number], routing.weights, routing.ids);
            emit(taker, Captured { what, position: taker.position, count, rows, experts });
        }
        for (taker, take) in takers.iter().zip(&tap.takes).filter(|(taker, _)| taker.logits) {
            each_logits(&mut **model, take.rows.clone(), |row, logits| {
                let position = taker.position + row - take.rows.start;
                let (count, rows) = (logits.len() / *vocab_size, logits.to_vec());
                emit(taker, Captured { what: HookPoint::Logits, position, count, rows, experts: Vec::new() });
            })?;
        }
        for (taker, take) in takers.iter().zip(&tap.takes) {
            scheduler.sequence(taker.index).state.captured = taker.position + take.rows.len();
        }
        Ok(())
    }

    /// Ends sequences that were only to be read, and have been.
    fn end_readers(&mut self) {
        for i in 0..self.scheduler.plan().len() {
            let part = self.scheduler.plan()[i].clone();
            let sequence = self.scheduler.sequence(part.index);
            if !part.sampled.is_empty() && sequence.state.max_tokens == 0 {
                sequence.state.clocks.prefilled = Some(Instant::now());
                sequence.finish(FinishReason::Length, &self.metrics);
            }
        }
    }

    /// A token for each sequence whose last row was computed: from the largest logits where they decide, else from the
    /// whole row.
    fn sample(&mut self, read: u64) -> Result<()> {
        let Self {
            model,
            scheduler,
            metrics,
            sampled,
            rows,
            inverse_temperatures,
            lists,
            undecided,
            ends,
            vocab_size,
            ..
        } = self;
        // A bug while one sequence chooses its token, such as in its grammar, ends that sequence alone.
        let one = |sequence: &mut Sequence<Generation>,
                   choose: &mut dyn FnMut(&mut Sequence<Generation>) -> Result<bool>| {
            let chosen = catch_unwind(AssertUnwindSafe(|| choose(sequence)));
            let chosen = chosen
                .unwrap_or_else(|panic| Err(Error::Model(format!("a bug while choosing a token: {}", words(&*panic)))));
            chosen.unwrap_or_else(|error| {
                sequence.state.fail(error, metrics);
                true
            })
        };
        let mut listed = false;
        inverse_temperatures.clear();
        inverse_temperatures.extend(sampled.iter().map(|&index| {
            let at = scheduler.sequence(index).state.sampler.shortlists_at();
            listed |= at.is_some();
            at.unwrap_or(1.0) // nobody looks at that list
        }));
        if listed {
            model.shortlists(rows, inverse_temperatures, lists)?;
        }
        undecided.clear();
        for (i, &index) in sampled.iter().enumerate() {
            let sequence = scheduler.sequence(index);
            let decided = sequence.state.sampler.shortlists_at().is_some()
                && one(sequence, &mut |sequence| {
                    let token = sequence.state.sampler.sample_shortlist(&lists[i], &sequence.tokens)?;
                    token.map_or(Ok(false), |token| emit(sequence, token, None, ends, read, metrics).map(|()| true))
                });
            if !decided {
                undecided.push(i);
            }
        }
        if undecided.is_empty() {
            return Ok(());
        }
        let logits = if listed { model.whole_rows()? } else { model.logits(rows)? };
        for &i in &*undecided {
            one(scheduler.sequence(sampled[i]), &mut |sequence| {
                let row = &mut logits[i * *vocab_size..][..*vocab_size];
                let (token, logprobs) = sequence.state.sampler.sample(row, &sequence.tokens, sequence.prompt_tokens)?;
                emit(sequence, token, logprobs, ends, read, metrics).map(|()| true)
            });
        }
        Ok(())
    }
}

/// Adds the next token to `sequence` and emits it to its receiver.
fn emit(
    sequence: &mut Sequence<Generation>,
    token: u32,
    logprobs: Option<Box<Logprobs>>,
    ends: &Ends,
    read: u64,
    metrics: &Metrics,
) -> Result<()> {
    let now = Instant::now();
    let generation = &mut sequence.state;
    if generation.clocks.prefilled.is_some() {
        generation.decode_bytes += read;
    }
    generation.clocks.prefilled.get_or_insert(now);
    generation.clocks.last_token = Some(now);
    Metrics::add(&metrics.generated_tokens_total, 1);
    if !generation.ignore_eos && ends.tokens.contains(&token) {
        sequence.finish(FinishReason::Stop, metrics);
        return Ok(());
    }
    let complete = generation.sampler.accept(token)?;
    sequence.tokens.push(token);
    // A receiver that is gone is noticed, and its sequence retired, before the next step.
    let _ = sequence.state.events.send(Event::Token(Token { id: token, logprobs, stats: sequence.stats() }));
    if complete {
        sequence.finish(FinishReason::Stop, metrics);
    } else if sequence.tokens.len() - sequence.prompt_tokens == sequence.state.max_tokens
        || sequence.tokens.len() >= ends.max_context
    {
        sequence.finish(FinishReason::Length, metrics);
    }
    Ok(())
}

impl Sequence<Generation> {
    fn finish(&mut self, reason: FinishReason, metrics: &Metrics) {
        Metrics::add(&metrics.requests_finished_total, 1);
        let stats = self.stats();
        self.state.ended = true;
        let _ = self.state.events.send(Event::Done(reason, stats));
    }

    fn stats(&self) -> RequestStats {
        let between = |a: Option<Instant>, b: Option<Instant>| Option::zip(a, b).map_or(Duration::ZERO, |(a, b)| b - a);
        let Clocks { submitted, started, prefilled, last_token } = self.state.clocks;
        RequestStats {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.shared,
            completion_tokens: self.tokens.len() - self.prompt_tokens,
            queued: between(Some(submitted), started),
            prefill: between(started, prefilled),
            decode: between(prefilled, last_token),
            decode_bytes: self.state.decode_bytes,
        }
    }
}

/// Of how many of a request's first tokens the keys and values may be those of other requests, and those of other
/// requests may be these.
///
/// Steering changes them from the first position on where it adds something; what is captured has to be computed.
fn untouched(request: &Request) -> (usize, usize) {
    let first = |positions: &Positions| positions.first(request.prompt.len()).unwrap_or(usize::MAX);
    let offers = request.steer.iter().map(|steer| first(&steer.positions)).min().unwrap_or(usize::MAX);
    let captured = request.capture.as_ref().map_or(usize::MAX, |wanted| first(&wanted.positions));
    (offers.min(captured), offers)
}

/// Where the state of a prompt is kept, at the ends of blocks: where its first message ends, which other conversations
/// may begin with, and where its last one ends. A next turn begins with that, though the chat template may leave out
/// the thoughts behind it. Messages end with the tokens `ends`, as answers do.
fn stops(prompt: &[u32], ends: &[u32]) -> Vec<usize> {
    let is_end = |token: &u32| ends.contains(token);
    let (first, last) = (prompt.iter().position(is_end), prompt.iter().rposition(is_end));
    let after = match (first, last) {
        (Some(first), Some(last)) => [first + 1, last + 1],
        _ => [prompt.len() - 1; 2],
    };
    let mut stops: Vec<usize> = after.into_iter().map(|end| end / BLOCK_SIZE * BLOCK_SIZE).collect();
    stops.dedup();
    stops.retain(|&stop| stop > 0);
    stops
}

impl Generation {
    /// Puts into `tap` what happens to its part `span` of the batch.
    fn tap(&self, index: usize, prompt_tokens: usize, span: &Span, tap: &mut Tap, takers: &mut Vec<Taker>) {
        let positions = span.start..span.start + span.rows.len();
        let rows =
            |run: &Range<usize>| span.rows.start + run.start - span.start..span.rows.start + run.end - span.start;
        for Steer { layer, vector, coefficient, positions: at } in &self.steer {
            let runs = at.within(prompt_tokens, positions.clone());
            tap.additions.extend(runs.map(|run| Addition {
                layer: *layer,
                rows: rows(&run),
                vector: vector.clone(),
                coefficient: *coefficient,
            }));
        }
        let Some(wanted) = &self.capture else { return };
        for run in
            wanted.positions.within(prompt_tokens, positions.start.max(self.captured)..positions.end.max(self.captured))
        {
            tap.takes.push(Take { layers: wanted.layers.clone(), router: wanted.router, rows: rows(&run) });
            takers.push(Taker { index, position: run.start, logits: wanted.logits });
        }
    }

    fn fail(&mut self, error: Error, metrics: &Metrics) {
        Metrics::add(&metrics.requests_failed_total, 1);
        self.ended = true;
        let _ = self.events.send(Event::Failed(error));
    }
}

/// The message of a panic.
pub(super) fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without words")
}
