//! The engine: one thread owns model, KV cache and sequences; everyone else holds an [`EngineHandle`].

use std::sync::Arc;
use std::time::Duration;

use crate::{Error, Result};

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Drop tokens below this share of the best one's probability; 0 drops none.
    pub min_p: f32,
    /// Divides positive logits of tokens already seen (multiplies negative ones); 1 changes nothing.
    pub repetition_penalty: f32,
    /// Same seed, same prompt: same text. `None` draws one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, seed: None }
    }
}

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
    /// One more token of the answer.
    Token(u32),
    /// The answer is complete.
    Done(FinishReason, RequestStats),
    /// The request could not be served.
    Failed(Error),
}

/// The receiving end of one request. Dropping it cancels the request and frees its blocks.
pub type Events = tokio::sync::mpsc::UnboundedReceiver<Event>;

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
    /// Tokens of prompt plus answer a sequence may hold.
    pub max_context: usize,
    /// Worker threads.
    pub threads: usize,
    /// Instruction set of the CPU kernels.
    pub simd: &'static str,
    /// Seconds from the start of loading until ready.
    pub ready_s: f64,
}

/// A cheap, cloneable handle to a running engine. The engine stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    requests: tokio::sync::mpsc::UnboundedSender<(Request, tokio::sync::mpsc::UnboundedSender<Event>)>,
    info: Arc<EngineInfo>,
}

impl EngineHandle {
    /// A handle to whatever answers on the other end of `requests`: the engine's own constructor, and a test's.
    #[doc(hidden)]
    pub fn from_parts(
        info: EngineInfo,
        requests: tokio::sync::mpsc::UnboundedSender<(Request, tokio::sync::mpsc::UnboundedSender<Event>)>,
    ) -> Self {
        Self { requests, info: Arc::new(info) }
    }

    /// What is running.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Queues a request; its tokens arrive on the returned receiver.
    ///
    /// Errors: `Error::Invalid` when the prompt is empty or does not fit the context; `Error::Stopped`.
    pub fn submit(&self, request: Request) -> Result<Events> {
        let limit = self.info.max_context;
        if request.prompt.is_empty() {
            return Err(Error::Invalid("the prompt is empty".into()));
        }
        if request.prompt.len() >= limit {
            return Err(Error::Invalid(format!(
                "the prompt has {} tokens and the context holds {limit}, answer included: shorten it or raise --max-context",
                request.prompt.len()
            )));
        }
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel();
        self.requests.send((request, events)).map_err(|_| Error::Stopped("its thread is gone".into()))?;
        Ok(receiver)
    }
}

/// Loads the model in `dir` and starts its engine thread. `model` is what the user called it.
///
/// `report` receives short progress lines ("converting experts", ...) while loading.
pub fn start(_model: &str, _dir: &std::path::Path, _config: &crate::config::EngineConfig, _report: &dyn Fn(&str)) -> Result<EngineHandle> {
    Err(Error::Model("the engine is not there yet".into()))
}
