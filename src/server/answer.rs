//! The engine's answer to one request: the parts of all its choices as they come, their ends, usage and timings.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use serde_json::{Value, json};

use super::App;
use super::ask::Ask;
use super::error::ApiError;
use super::front::Caller;
use super::memory::Reservation;
use crate::engine::{FinishReason, Logprobs, RequestStats};
use crate::text::reply::{Parser, Part};
use crate::text::stream::{Delta, TextStream};

type Result<T> = std::result::Result<T, ApiError>;

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// By itself, or at a stop string.
    Stop,
    /// At a limit of tokens.
    Length,
    /// It calls tools.
    ToolCalls,
}

impl Finish {
    /// OpenAI's name of it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// A step of an answer, with the number of its choice.
pub(super) enum AnswerStep {
    /// More of it, and the logprobs of the tokens since the last part, if they were requested.
    Part(usize, Part, Vec<(u32, Logprobs)>),
    /// The end of this choice.
    End(usize, Finish, Vec<(u32, Logprobs)>),
}

/// The choices of one request. Dropping it cancels those that still run.
pub(super) struct Answer {
    app: Arc<App>,
    caller: Caller,
    choices: Vec<Choice>,
    n: usize,
    steps: VecDeque<AnswerStep>,
    turn: usize,
    logged: Option<String>, // text of the answer so far, for the log
    #[allow(dead_code)] // held until it is dropped
    logprobs: Option<Reservation>,
}

struct Choice {
    text: TextStream,
    parser: Option<Parser>,
    reasoning_tokens: usize,
    stats: RequestStats,
    finish: Option<Finish>,
}

/// Tokens of a whole answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) reasoning_tokens: usize,
}

impl Usage {
    /// In OpenAI's format.
    pub(super) fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        })
    }
}

impl Answer {
    /// Submits the requests to the engine, once there is memory for the logprobs.
    pub(super) async fn start(app: &Arc<App>, caller: Caller, ask: Ask) -> Result<Self> {
        let model = app.model()?;
        let logprobs = match ask.logprobs_bytes(model.engine().info().max_context) {
            0 => None,
            bytes => Some(app.memory.outgoing.admit(caller.client, bytes).await?),
        };
        let mut choices = Vec::with_capacity(ask.choices.len());
        let mut logged = None;
        let steer = app.vectors.resolve(caller.tenant, &ask.steer)?;
        for (mut request, parser) in ask.choices {
            caller.sign(&mut request);
            request.steer.clone_from(&steer);
            if app.log_prompts {
                logged = Some(String::new());
                let prompt = model.tokenizer().decode(&request.prompt, false)?;
                tracing::info!(request_id = caller.request_id, prompt, "asked");
            }
            let mut text = model.complete(request, ask.stops.clone())?;
            if ask.special_tokens {
                text.spell_special_tokens();
            }
            choices.push(Choice { stats: text.stats(), text, parser, reasoning_tokens: 0, finish: None });
        }
        Ok(Self { app: app.clone(), caller, choices, n: ask.n, steps: VecDeque::new(), turn: 0, logged, logprobs })
    }

    /// Tokens so far. A prompt that choices share counts once.
    pub(super) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for (i, choice) in self.choices.iter().enumerate() {
            usage.completion_tokens += choice.stats.completion_tokens;
            usage.reasoning_tokens += choice.reasoning_tokens;
            if i % self.n == 0 {
                usage.prompt_tokens += choice.stats.prompt_tokens;
                usage.cached_tokens += choice.stats.cached_tokens;
            }
        }
        usage
    }

    /// The stop string that ended the first choice, if one did.
    pub(super) fn stopped_at(&self) -> Option<&str> {
        self.choices[0].text.stopped_at()
    }

    /// Timings of the first choice, with the field names of llama.cpp's server.
    pub(super) fn timings(&self) -> Value {
        let stats = &self.choices[0].stats;
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let rate = |tokens: usize, time: Duration| {
            if time.is_zero() { 0.0 } else { (tokens as f64 / time.as_secs_f64() * 10.0).round() / 10.0 }
        };
        let read = stats.prompt_tokens - stats.cached_tokens;
        json!({
            "queued_ms": ms(stats.queued),
            "cache_n": stats.cached_tokens,
            "prompt_n": read,
            "prompt_ms": ms(stats.prefill),
            "prompt_per_second": rate(read, stats.prefill),
            "predicted_n": stats.completion_tokens,
            "predicted_ms": ms(stats.decode),
            "predicted_per_second": rate(stats.completion_tokens.saturating_sub(1), stats.decode),
        })
    }

    /// The next step of any choice; `None` after the last.
    pub(super) async fn next(&mut self) -> Option<Result<AnswerStep>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AnswerStep>>> {
        loop {
            if let Some(step) = self.steps.pop_front() {
                return Poll::Ready(Some(Ok(step)));
            }
            let mut pending = false;
            for _ in 0..self.choices.len() {
                let i = self.turn;
                self.turn = (i + 1) % self.choices.len();
                match self.choices[i].text.poll_next(context) {
                    Poll::Pending => pending = true,
                    Poll::Ready(None) => {}
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
                    Poll::Ready(Some(Ok(delta))) => {
                        self.take(i, delta);
                        break;
                    }
                }
            }
            if self.steps.is_empty() && pending {
                return Poll::Pending;
            }
            if self.steps.is_empty() && self.choices.iter().all(|choice| choice.finish.is_some()) {
                return Poll::Ready(None);
            }
        }
    }

    /// Adds the steps of what choice `i` has generated.
    fn take(&mut self, i: usize, delta: Delta) {
        let choice = &mut self.choices[i];
        let mut parts = Vec::new();
        let end = match delta {
            Delta::Text(text) => {
                if let Some(logged) = &mut self.logged {
                    logged.push_str(&text);
                }
                match &mut choice.parser {
                    Some(parser) => parser.push(&text, &mut parts),
                    None => parts.push(Part::Content(text)),
                }
                let before = std::mem::replace(&mut choice.stats, choice.text.stats()).completion_tokens;
                if !parts.is_empty() && parts.iter().all(|part| matches!(part, Part::Reasoning(_))) {
                    choice.reasoning_tokens += choice.stats.completion_tokens - before;
                }
                None
            }
            Delta::End(reason, stats) => {
                choice.stats = stats;
                if let Some(parser) = &mut choice.parser {
                    parser.finish(&mut parts);
                }
                let called = choice.parser.as_ref().is_some_and(Parser::called);
                Some(match reason {
                    FinishReason::Length => Finish::Length,
                    FinishReason::Stop if called => Finish::ToolCalls,
                    FinishReason::Stop => Finish::Stop,
                })
            }
        };
        choice.finish = end;
        let mut logprobs = if parts.is_empty() && end.is_none() { Vec::new() } else { choice.text.take_logprobs() };
        self.steps.extend(parts.into_iter().map(|part| AnswerStep::Part(i, part, std::mem::take(&mut logprobs))));
        if let Some(finish) = end {
            self.app.http.observe(&choice.stats);
            self.steps.push_back(AnswerStep::End(i, finish, logprobs));
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        for choice in &self.choices {
            let stats = if choice.finish.is_some() { choice.stats } else { choice.text.stats() };
            tracing::info!(
                request_id = self.caller.request_id,
                prompt_tokens = stats.prompt_tokens,
                cached_tokens = stats.cached_tokens,
                completion_tokens = stats.completion_tokens,
                queued_ms = stats.queued.as_millis() as u64,
                prefill_ms = stats.prefill.as_millis() as u64,
                decode_ms = stats.decode.as_millis() as u64,
                finish = choice.finish.map_or("cancelled", Finish::name),
                "said"
            );
        }
        if let Some(answer) = &self.logged {
            tracing::info!(request_id = self.caller.request_id, answer, "said");
        }
    }
}

/// A piece of an answer that has ended or still grows.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Content(String),
    /// A call of a tool, with its arguments as JSON.
    Call { id: String, name: String, arguments: String },
}

/// The pieces of one choice, in order, for the APIs whose answers are lists of them.
#[derive(Default)]
pub(super) struct Items(pub(super) Vec<Item>);

impl Items {
    /// Whether a part begins an item; else it continues the last one.
    pub(super) fn begins(&self, part: &Part) -> bool {
        !matches!(
            (part, self.0.last()),
            (Part::Reasoning(_), Some(Item::Reasoning(_)))
                | (Part::Content(_), Some(Item::Content(_)))
                | (Part::Arguments { .. }, Some(Item::Call { .. }))
        )
    }

    /// Adds a part. Returns the text that it adds to the last item.
    pub(super) fn add(&mut self, part: Part) -> String {
        if self.begins(&part) {
            self.0.push(match &part {
                Part::Reasoning(_) => Item::Reasoning(String::new()),
                Part::Content(_) | Part::Arguments { .. } => Item::Content(String::new()),
                Part::Call { id, name, .. } => {
                    Item::Call { id: id.clone(), name: name.clone(), arguments: String::new() }
                }
            });
        }
        let added = match part {
            Part::Reasoning(text) | Part::Content(text) | Part::Arguments { json: text, .. } => text,
            Part::Call { .. } => String::new(),
        };
        let (Item::Reasoning(all) | Item::Content(all) | Item::Call { arguments: all, .. }) =
            self.0.last_mut().expect("just begun, if none was there");
        all.push_str(&added);
        added
    }
}
