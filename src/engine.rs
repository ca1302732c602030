//! The engine: one thread owns model, KV cache and sequences; everyone else holds an [`EngineHandle`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::batch::Batch;
use crate::config::EngineConfig;
use crate::forward::Forward;
use crate::generation_config::GenerationConfig;
use crate::kernel::Simd;
use crate::kv_cache::BlockPool;
use crate::load::{self, LEAST_BYTES, LoadProgress, Loaded};
use crate::sampler::Sampler;
pub use crate::sampler::SamplingParams;
use crate::scheduler::{Scheduler, Sequence};
use crate::tensor::Shortlist;
use crate::{Error, Result};

/// One prompt to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the prompt, special tokens included.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; `None`: up to the context's end.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Go on after an end token.
    pub ignore_eos: bool,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token (not part of the answer), or a stop string found by the receiver.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
}

/// Where the time of one request went.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// From submission to the first forward pass.
    pub queued: Duration,
    /// From the first forward pass to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Weight bytes read while decoding.
    pub decode_bytes: u64,
}

/// What the engine tells the receiver of one request, in order; `Done` or `Failed` is last.
#[derive(Debug)]
pub enum Event {
    /// One more token of the answer, and where the time went up to it: all that a receiver learns if it cancels here.
    Token(u32, RequestStats),
    /// The answer is complete.
    Done(FinishReason, RequestStats),
    /// The request could not be served.
    Failed(Error),
}

/// The receiving end of one request. Dropping it cancels the request and frees its blocks.
pub type Events = mpsc::UnboundedReceiver<Event>;

/// What is running, for people and clients to see.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// The model as the user named it.
    pub model: String,
    /// `model_type` of its config.
    pub architecture: String,
    /// Precision of the experts that really runs, as `int4-g128`.
    pub experts: String,
    /// Precision of the rest that really runs, as `bf16`.
    pub dense: String,
    /// Precision of keys and values.
    pub kv: String,
    /// Tokens of prompt plus answer a sequence may hold.
    pub max_context: usize,
    /// Worker threads.
    pub threads: usize,
    /// Instruction set of the CPU kernels.
    pub simd: Simd,
    /// `cpu`; or the GPU, what takes how much of its memory, and how fast it should be, in one line.
    pub device: String,
    /// Seconds from the start of loading until ready.
    pub ready_s: f64,
}

/// A request on its way to the engine thread.
#[doc(hidden)]
#[derive(Debug)]
pub struct Submission {
    pub request: Request,
    pub events: mpsc::UnboundedSender<Event>,
    pub submitted: Instant,
}

/// A cheap, cloneable handle to a running engine. The engine stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    requests: mpsc::UnboundedSender<Submission>,
    info: Arc<EngineInfo>,
}

impl EngineHandle {
    /// A handle to whatever answers on the other end of `requests`: the engine's own constructor, and a test's.
    #[doc(hidden)]
    pub fn from_parts(info: EngineInfo, requests: mpsc::UnboundedSender<Submission>) -> Self {
        Self { requests, info: Arc::new(info) }
    }

    /// What is running.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Whether requests are still answered; a bug can end the engine before its handles are dropped.
    pub fn is_running(&self) -> bool {
        !self.requests.is_closed()
    }

    /// Queues a request; its tokens arrive on the returned receiver.
    ///
    /// Errors: `Error::Invalid` when the prompt is empty or does not fit the context; `Error::Stopped`.
    pub fn submit(&self, request: Request) -> Result<Events> {
        let limit = self.info.max_context;
        if request.prompt.is_empty() {
            return Err(Error::Invalid("the prompt is empty: give it some text, or token ids".into()));
        }
        if request.prompt.len() >= limit {
            return Err(Error::Invalid(format!(
                "the prompt has {} tokens and the context holds {limit}, answer included: shorten it, or raise --max-context if the model allows more",
                request.prompt.len()
            )));
        }
        let (events, receiver) = mpsc::unbounded_channel();
        let submission = Submission { request, events, submitted: Instant::now() };
        let stopped = |_| Error::Stopped("a bug ended it, and what it said is on stderr; start moebius again".into());
        self.requests.send(submission).map_err(stopped)?;
        Ok(receiver)
    }
}

/// Loads the model in `dir` and starts its engine thread. `model` is what the user called it.
///
/// `report` hears what takes time while loading. Errors: as [`load::load`].
pub fn start(model: &str, dir: &Path, config: &EngineConfig, report: &(dyn Fn(LoadProgress<'_>) + Sync)) -> Result<EngineHandle> {
    let started = Instant::now();
    let end_tokens = GenerationConfig::load(dir)?.eos_ids;
    let loaded = load::load(model, dir, config, report)?;
    start_loaded(model, loaded, config, end_tokens, started)
}

/// Starts the engine thread of a model in memory, whose answers end at `end_tokens`; loading began at `started`.
///
/// Errors: `Error::Resources` when there can be no more threads.
pub fn start_loaded(model: &str, loaded: Loaded, config: &EngineConfig, end_tokens: Vec<u32>, started: Instant) -> Result<EngineHandle> {
    let info = EngineInfo {
        model: model.to_string(),
        architecture: loaded.model.config().architecture.clone(),
        experts: loaded.precision.map_or("none".into(), |p| p.to_string()),
        dense: config.dense.to_string(),
        kv: config.kv.to_string(),
        max_context: loaded.max_context,
        threads: loaded.team.threads(),
        simd: loaded.kernel.simd(),
        device: loaded.device.unwrap_or_else(|| "cpu".into()),
        ready_s: started.elapsed().as_secs_f64(),
    };
    let mut engine = Engine {
        resident_bytes: loaded.model.resident_bytes_per_token(),
        scheduler: Scheduler::new(BlockPool::new(loaded.kv_blocks), config.max_sequences, loaded.max_batch_tokens),
        end_tokens,
        max_context: loaded.max_context,
        available_bytes: loaded.available_bytes,
        vocab_size: loaded.model.config().vocab_size,
        model: loaded.model,
        batch: Batch::default(),
        sampled: Vec::new(),
        rows: Vec::new(),
        inverse_temperatures: Vec::new(),
        lists: Vec::new(),
        undecided: Vec::new(),
    };
    let (requests, mut queue) = mpsc::unbounded_channel();
    let team = loaded.team;
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            // Not pinned is slower, not wrong.
            let _ = team.pin_caller();
            let run = || engine.model.enter_thread().map(|()| engine.run(&mut queue));
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                engine.give_up(&mut queue, &*panic);
            }
        })
        .map_err(|e| Error::Resources(format!("the engine thread cannot start: {e}")))?;
    Ok(EngineHandle::from_parts(info, requests))
}

/// What the engine keeps with a sequence.
struct Answer {
    events: mpsc::UnboundedSender<Event>,
    sampler: Sampler,
    max_tokens: usize,
    ignore_eos: bool,
    submitted: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    decode_bytes: u64,
    ended: bool,
}

/// The owner of everything that runs.
struct Engine {
    model: Box<dyn Forward>,
    scheduler: Scheduler<Answer>,
    batch: Batch,
    sampled: Vec<usize>,            // of this step: running sequences at their end
    rows: Vec<usize>,               // of this step: their rows of the batch, to sample from
    inverse_temperatures: Vec<f32>, // of this step
    lists: Vec<Shortlist>,          // of this step
    undecided: Vec<usize>,          // of `sampled`: their whole rows are needed
    end_tokens: Vec<u32>,
    max_context: usize,
    vocab_size: usize,
    resident_bytes: u64,
    available_bytes: fn() -> u64, // RAM of the machine that can be taken
}

impl Engine {
    /// Serves until all handles are dropped and all answers complete.
    fn run(&mut self, queue: &mut mpsc::UnboundedReceiver<Submission>) {
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
            self.scheduler.retire(|s| s.state.events.is_closed(), drop);
            if let Err(error) = self.step() {
                // The step is shared: what went wrong concerns everyone in it, and nobody else.
                for i in 0..self.scheduler.plan().len() {
                    let index = self.scheduler.plan()[i].index;
                    self.scheduler.sequence(index).state.fail(Error::Model(error.to_string()));
                }
                self.scheduler.retire(|s| s.state.ended, drop);
            }
        }
    }

    /// After a panic nothing here can be trusted to compute: whoever waits is told, and nobody else is let in.
    fn give_up(&mut self, queue: &mut mpsc::UnboundedReceiver<Submission>, panic: &(dyn Any + Send)) {
        let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
        let failed = || Event::Failed(Error::Stopped(format!("a bug: {}", text.unwrap_or("a panic without words"))));
        queue.close();
        self.scheduler.retire(|_| true, |s| drop(s.state.events.send(failed())));
        while let Ok(submission) = queue.try_recv() {
            let _ = submission.events.send(failed());
        }
    }

    fn add(&mut self, Submission { request, events, submitted }: Submission) {
        if let Some(token) = request.prompt.iter().find(|&&t| t as usize >= self.vocab_size) {
            let text = format!("token id {token} is not in the vocabulary of {}", self.vocab_size);
            let _ = events.send(Event::Failed(Error::Invalid(text)));
            return;
        }
        if request.max_tokens == Some(0) {
            let stats = RequestStats { prompt_tokens: request.prompt.len(), ..RequestStats::default() };
            let _ = events.send(Event::Done(FinishReason::Length, stats));
            return;
        }
        // What runs has its memory; more could take the machine down.
        let available = (self.available_bytes)();
        if available < LEAST_BYTES {
            let text = format!(
                "memory is short: {} MiB of this machine's are left and {} are kept free, so no new request is taken; try again later, or close other programs",
                available >> 20,
                LEAST_BYTES >> 20
            );
            let _ = events.send(Event::Failed(Error::Resources(text)));
            return;
        }
        let room = self.max_context - request.prompt.len();
        let answer = Answer {
            events,
            sampler: Sampler::new(request.sampling),
            max_tokens: request.max_tokens.unwrap_or(room).min(room),
            ignore_eos: request.ignore_eos,
            submitted,
            started: None,
            first: None,
            last: None,
            decode_bytes: 0,
            ended: false,
        };
        self.scheduler.add(Sequence::new(request.prompt, answer));
    }

    /// One forward pass for all, one token for each sequence that is at its end.
    fn step(&mut self) -> Result<()> {
        let now = Instant::now();
        self.scheduler.next(&mut self.batch);
        self.sampled.clear();
        self.rows.clear();
        for i in 0..self.scheduler.plan().len() {
            let part = self.scheduler.plan()[i];
            self.scheduler.sequence(part.index).state.started.get_or_insert(now);
            if let Some(row) = part.last_row {
                self.sampled.push(part.index);
                self.rows.push(row);
            }
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        let before = self.model.traffic();
        self.model.forward(&self.batch, None)?;
        let read = self.model.traffic().since(before).total() + self.resident_bytes;
        self.scheduler.commit();

        // At most one row per sequence, and no more sequences than rows of logits.
        if self.rows.is_empty() {
            return Ok(());
        }
        self.sample(read)?;
        self.scheduler.retire(|s| s.state.ended, drop);
        Ok(())
    }

    /// A token for each sequence whose last row was computed: from the largest logits where they decide, else from the whole row.
    fn sample(&mut self, read: u64) -> Result<()> {
        let Self { model, scheduler, sampled, rows, inverse_temperatures, lists, undecided, end_tokens, max_context, vocab_size, .. } =
            self;
        let tell = |sequence: &mut Sequence<Answer>, token: Result<u32>| match token {
            Ok(token) => tell(sequence, token, end_tokens, *max_context, read),
            Err(error) => sequence.state.fail(error),
        };
        inverse_temperatures.clear();
        inverse_temperatures.extend(sampled.iter().map_while(|&index| scheduler.sequence(index).state.sampler.shortlists_at()));
        let listed = inverse_temperatures.len() == rows.len() && model.shortlists(rows, inverse_temperatures, lists)?;
        undecided.clear();
        for (i, &index) in sampled.iter().enumerate() {
            let sequence = scheduler.sequence(index);
            let token = if listed { sequence.state.sampler.sample_shortlist(&lists[i], &sequence.tokens) } else { Ok(None) };
            match token.transpose() {
                Some(token) => tell(sequence, token),
                None => undecided.push(i),
            }
        }
        if undecided.is_empty() {
            return Ok(());
        }
        let logits = if listed { model.whole_rows()? } else { model.logits(rows)? };
        for &i in &*undecided {
            let sequence = scheduler.sequence(sampled[i]);
            let token = sequence.state.sampler.sample(&mut logits[i * *vocab_size..][..*vocab_size], &sequence.tokens);
            tell(sequence, token);
        }
        Ok(())
    }
}

/// Adds the next token to `sequence` and tells its receiver.
fn tell(sequence: &mut Sequence<Answer>, token: u32, end_tokens: &[u32], max_context: usize, read: u64) {
    let answer = &mut sequence.state;
    let finish = |answer: &mut Answer, completion_tokens, reason| {
        answer.ended = true;
        let stats = answer.stats(sequence.prompt_tokens, completion_tokens);
        let _ = answer.events.send(Event::Done(reason, stats));
    };
    let now = Instant::now();
    if answer.first.is_some() {
        answer.decode_bytes += read;
    }
    answer.first.get_or_insert(now);
    answer.last = Some(now);
    if !answer.ignore_eos && end_tokens.contains(&token) {
        finish(answer, sequence.tokens.len() - sequence.prompt_tokens, FinishReason::Stop);
        return;
    }
    sequence.tokens.push(token);
    let completion_tokens = sequence.tokens.len() - sequence.prompt_tokens;
    // A receiver that is gone is noticed, and its sequence retired, before the next step.
    let _ = answer.events.send(Event::Token(token, answer.stats(sequence.prompt_tokens, completion_tokens)));
    if completion_tokens == answer.max_tokens || sequence.tokens.len() >= max_context {
        finish(answer, completion_tokens, FinishReason::Length);
    }
}

impl Answer {
    fn fail(&mut self, error: Error) {
        self.ended = true;
        let _ = self.events.send(Event::Failed(error));
    }

    fn stats(&self, prompt_tokens: usize, completion_tokens: usize) -> RequestStats {
        let between = |a: Option<Instant>, b: Option<Instant>| Option::zip(a, b).map_or(Duration::ZERO, |(a, b)| b - a);
        RequestStats {
            prompt_tokens,
            completion_tokens,
            queued: between(Some(self.submitted), self.started),
            prefill: between(self.started, self.first),
            decode: between(self.first, self.last),
            decode_bytes: self.decode_bytes,
        }
    }
}
