//! The engine: one thread owns model, KV cache and sequences; everyone else holds an [`EngineHandle`].
//!
//! ```text
//! metrics              what is counted
//! sampler              from logits to a token
//! generation_config    what a checkpoint says about generating with it
//! capture              what passes compute on the way, written down
//! prefill_budget       how many tokens of prefill may join a step
//! scheduler            what runs next
//! queue                how many requests may wait
//! run                  the thread
//! ```
//!
//! Imports kernel, config, model, backend, experts, forward and load. Read `run` first, then `scheduler`.

pub mod capture;
pub mod generation_config;
pub mod metrics;
mod prefill_budget;
mod queue;
mod run;
pub mod sampler;
pub mod scheduler;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};
use tokio::sync::mpsc;

use crate::config::EngineConfig;
pub use crate::engine::capture::{CaptureWanted, Captured, HookPoint, RowSizes};
use crate::engine::generation_config::GenerationConfig;
use crate::engine::metrics::Metrics;
pub use crate::engine::sampler::{Constraint, Logprobs, SamplingOverrides, SamplingParams};
pub use crate::forward::block_pool::Tenant;
use crate::forward::tap::MAX_STEERS;
pub use crate::forward::tap::{Layers, Positions, Steer};
use crate::kernel::Simd;
use crate::load::{self, LoadProgress, Loaded, ModelFolder};
use crate::model::StreamShape;
use crate::{Error, Result};
use queue::Queue;
#[doc(hidden)]
pub use queue::QueuePlace;
use run::Engine;

/// One prompt to be continued.
#[derive(Debug, Default)]
pub struct Request {
    /// Token ids of the prompt, special tokens included.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; `None`: up to the context's end.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Go on after an end token.
    pub ignore_eos: bool,
    /// What the answer may say; `None`: anything.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Give each token's log probability, and those of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// What is added to its residual stream.
    pub steer: Vec<Steer>,
    /// What is captured of its tokens; with `max_tokens` 0 the prompt is read, and that is all.
    pub capture: Option<CaptureWanted>,
    /// Whom it is for, any number: when there is more to do than runs at once, clients take turns.
    pub client: u64,
    /// With whom it shares the prefixes that were read; by default with all who name no tenant.
    pub tenant: Tenant,
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
    /// Of these, tokens that were in the cache already.
    pub cached_tokens: usize,
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

/// What the engine emits to the receiver of one request, in order; `Done` or `Failed` is last.
#[derive(Debug)]
pub enum Event {
    /// One more token of the answer.
    Token(Token),
    /// What the request captures of tokens that were read just now: in the order of positions for each layer and for
    /// logits, and before the token that follows. The last token of an answer is not read, so nothing is captured of
    /// it.
    Captured(Captured),
    /// The answer is complete.
    Done(FinishReason, RequestStats),
    /// The request could not be served.
    Failed(Error),
}

/// One token of an answer.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// How likely it was, if that was asked for.
    pub logprobs: Option<Box<Logprobs>>,
    /// Where the time went up to it: all that a receiver learns if it cancels here.
    pub stats: RequestStats,
}

/// The receiving end of one request. Dropping it cancels the request and frees its blocks.
pub type Events = mpsc::UnboundedReceiver<Event>;

/// What is running, for people and clients to see.
#[derive(Clone, Debug, Serialize)]
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
    /// Bits of activations next to weights in integers on the CPU.
    pub activations: String,
    /// Layers.
    pub layers: usize,
    /// Numbers of a residual stream.
    pub hidden_size: usize,
    /// Residual streams.
    pub streams: usize,
    /// Logits of a token.
    pub vocab_size: usize,
    /// Experts that a token chooses, in all layers together.
    #[serde(skip)]
    pub choices: usize,
    /// Tokens of prompt plus answer a sequence may hold.
    pub max_context: usize,
    /// Requests that may wait.
    #[serde(skip)]
    pub max_queue: usize,
    /// Worker threads in decode.
    pub threads: usize,
    /// Instruction set of the CPU kernels.
    #[serde(serialize_with = "as_text")]
    pub simd: Simd,
    /// `cpu`; or the GPU, what takes how much of its memory, and how fast it should be, in one line.
    pub device: String,
    /// Seconds from the start of loading until ready.
    pub ready_s: f64,
}

impl EngineInfo {
    /// What runs in which precision, in a line.
    pub fn precisions(&self) -> String {
        let Self { experts, dense, kv, activations, .. } = self;
        let bits = if activations == "8" { "" } else { ", 16-bit activations" };
        format!("{experts} experts, {dense} dense, {kv} kv{bits}")
    }

    /// The residual streams.
    pub fn stream_shape(&self) -> StreamShape {
        StreamShape { streams: self.streams, hidden_size: self.hidden_size }
    }

    /// What a position has that can be captured.
    pub fn row_sizes(&self) -> RowSizes {
        let stream_width = self.stream_shape().width();
        RowSizes { layers: self.layers, stream_width, vocab_size: self.vocab_size, choices: self.choices }
    }
}

fn as_text<S: Serializer>(value: &Simd, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A request on its way to the engine thread.
#[doc(hidden)]
#[derive(Debug)]
pub struct Submission {
    pub request: Request,
    pub events: mpsc::UnboundedSender<Event>,
    pub submitted: Instant,
    pub place: QueuePlace,
}

/// A cheap, cloneable handle to a running engine. The engine stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    requests: mpsc::UnboundedSender<Submission>,
    info: Arc<EngineInfo>,
    metrics: Arc<Metrics>,
    queue: Arc<Queue>,
    thread: Option<Arc<JoinHandle<()>>>,
}

impl EngineHandle {
    /// A handle to whatever answers on the other end of `requests`: the engine's own constructor, and a test's.
    #[doc(hidden)]
    pub fn from_parts(info: EngineInfo, requests: mpsc::UnboundedSender<Submission>) -> Self {
        Self::new(info, requests, Arc::default(), None)
    }

    fn new(
        info: EngineInfo,
        requests: mpsc::UnboundedSender<Submission>,
        metrics: Arc<Metrics>,
        thread: Option<Arc<JoinHandle<()>>>,
    ) -> Self {
        let queue = Arc::new(Queue::new(info.max_queue, metrics.clone()));
        Self { requests, info: Arc::new(info), metrics, queue, thread }
    }

    /// What it counts.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What is running.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Whether requests are still answered; a bug can end the engine before its handles are dropped.
    pub fn is_running(&self) -> bool {
        !self.requests.is_closed()
    }

    /// Drops this handle. If it was the last, waits until running requests are answered and the engine has given back
    /// its memory.
    pub fn stop(self) {
        let Self { requests, thread, .. } = self;
        drop(requests);
        if let Some(thread) = thread.and_then(Arc::into_inner) {
            // What it said, if it ended by a bug, is on stderr.
            let _ = thread.join();
        }
    }

    /// Queues a request; its tokens arrive on the returned receiver.
    ///
    /// Errors: `Error::Invalid` when the prompt is empty or does not fit the context, or steering or capture do not fit
    /// the model; `Error::Busy` when too many wait; `Error::Stopped`.
    pub fn submit(&self, request: Request) -> Result<Events> {
        let limit = self.info.max_context;
        if request.prompt.is_empty() {
            return Err(Error::Invalid("the prompt is empty: give it some text, or token ids".into()));
        }
        if request.prompt.len() >= limit {
            return Err(Error::Invalid(format!(
                "the prompt has {} tokens and the context holds {limit}, answer included: shorten it, or raise \
                 --max-context if the model allows more",
                request.prompt.len()
            )));
        }
        if request.steer.len() > MAX_STEERS {
            return Err(Error::Invalid(format!(
                "{} steering vectors are too many: give at most {MAX_STEERS}",
                request.steer.len()
            )));
        }
        request.steer.iter().try_for_each(|steer| steer.check(self.info.layers, self.info.stream_shape()))?;
        request.capture.iter().try_for_each(|wanted| wanted.check(self.info.row_sizes()))?;
        let place = self.queue.place(request.tenant)?;
        let (events, receiver) = mpsc::unbounded_channel();
        let submission = Submission { request, events, submitted: Instant::now(), place };
        let stopped = |_| Error::Stopped("a bug ended it, and what it said is on stderr; start moebius again".into());
        self.requests.send(submission).map_err(stopped)?;
        Ok(receiver)
    }
}

/// Loads the model in `folder` and starts its engine thread.
///
/// `report` hears what takes time while loading. Errors: as [`load::load`].
pub fn start(
    folder: &ModelFolder,
    config: &EngineConfig,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<EngineHandle> {
    let started = Instant::now();
    let loaded = load::load(folder, config, report)?;
    start_loaded(&folder.name, loaded, config, GenerationConfig::of(&folder.description).eos_ids, started)
}

/// Starts the engine thread of a model in memory, whose answers end at `end_tokens`; loading began at `started`.
///
/// Errors: `Error::Resources` when there can be no more threads.
pub fn start_loaded(
    model: &str,
    loaded: Loaded,
    config: &EngineConfig,
    end_tokens: Vec<u32>,
    started: Instant,
) -> Result<EngineHandle> {
    let info = EngineInfo {
        model: model.to_string(),
        architecture: loaded.model.config().architecture.clone(),
        experts: loaded.precision.as_ref().map_or("none".into(), |p| p.to_string()),
        dense: loaded.dense.clone(),
        kv: config.kv.to_string(),
        activations: config.activations.to_string(),
        layers: loaded.model.config().layers.len(),
        hidden_size: loaded.model.config().hidden_size,
        streams: loaded.model.config().streams().streams,
        vocab_size: loaded.model.config().vocab_size,
        choices: RowSizes::of(loaded.model.config()).choices,
        max_context: loaded.max_context,
        threads: loaded.team.crews().few,
        simd: loaded.kernel.simd(),
        max_queue: config.max_queue,
        device: loaded.device.clone().unwrap_or_else(|| "cpu".into()),
        ready_s: started.elapsed().as_secs_f64(),
    };
    let metrics = Arc::<Metrics>::default();
    let team = loaded.team.clone();
    let mut engine = Engine::new(loaded, config, end_tokens, metrics.clone());
    let (requests, mut queue) = mpsc::unbounded_channel();
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            // Not pinned is slower, not wrong.
            let _ = team.pin_caller();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.run(&mut queue))) {
                engine.give_up(&mut queue, &format!("a bug: {}", run::words(&*panic)));
            }
        })
        .map_err(|e| Error::Resources(format!("the engine thread cannot start ({e}): raise `ulimit -u`")))?;
    Ok(EngineHandle::new(info, requests, metrics, Some(Arc::new(thread))))
}
