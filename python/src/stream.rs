//! `Stream`: one answer as a stream.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use moebius::engine::{FinishReason, Logprobs, RequestStats};
use moebius::text::reply::{Parser, Part};
use moebius::text::stream::{Delta, TextStream};
use pyo3::prelude::*;

use crate::error::{Error, exception};
use crate::owned::Owned;
use crate::residual::{Arrays, Rows};

/// Time between two checks for Python's signals while waiting.
pub(crate) const PATIENCE: Duration = Duration::from_millis(50);

/// A piece of an answer: text, reasoning, tokens.
type Chunk = (String, String, Vec<u32>);

/// A token, its logprob, and the likeliest tokens with theirs.
type TokenLogprob = (u32, f32, Vec<(u32, f32)>);

/// One answer. Closing it, or dropping it, cancels the request.
#[pyclass(frozen)]
pub(crate) struct Stream {
    answer: Owned<Answer>,
}

struct Answer {
    text: TextStream,
    parser: Option<Parser>,
    emitted: usize,                               // tokens that chunks had
    next: Option<moebius::Result<Option<Chunk>>>, // found by `ready`, for `next`
    wake: Option<(UnixStream, Arc<Socket>)>,      // for `ready`
    rows: Rows,
    output: Output,
}

/// An answer so far.
#[derive(Clone, Default, IntoPyObject)]
struct Output {
    prompt_token_ids: Vec<u32>,
    text: String,
    reasoning: String,
    token_ids: Vec<u32>,
    tool_calls: Vec<(String, String, String)>, // id, name, arguments
    finish_reason: Option<&'static str>,
    logprobs: Vec<TokenLogprob>,
    stats: Stats,
}

/// Tokens and times of an answer.
#[derive(Clone, Default, IntoPyObject)]
struct Stats {
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    queued_s: f64,
    prefill_s: f64,
    decode_s: f64,
    decode_bytes: u64,
}

impl From<RequestStats> for Stats {
    fn from(stats: RequestStats) -> Self {
        Self {
            prompt_tokens: stats.prompt_tokens,
            cached_tokens: stats.cached_tokens,
            completion_tokens: stats.completion_tokens,
            queued_s: stats.queued.as_secs_f64(),
            prefill_s: stats.prefill.as_secs_f64(),
            decode_s: stats.decode.as_secs_f64(),
            decode_bytes: stats.decode_bytes,
        }
    }
}

#[pymethods]
impl Stream {
    /// Waits for more of the answer. `None`: it is complete. A signal such as that of Ctrl-C cancels the request.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Chunk>> {
        loop {
            py.check_signals().inspect_err(|_| self.close())?;
            if let Poll::Ready(chunk) = py.detach(|| self.answer.with(|answer| answer.next_within(PATIENCE)))? {
                return chunk.map_err(exception);
            }
        }
    }

    /// Waits for the end.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        while self.next(py)?.is_some() {}
        Ok(())
    }

    /// Whether `next` returns at once. If not, `fileno` becomes readable when that may have changed.
    fn ready(&self) -> PyResult<bool> {
        self.answer.with(Answer::ready)?
    }

    /// The file descriptor that an event loop waits for after `ready`.
    fn fileno(&self) -> PyResult<i32> {
        self.answer.with(|answer| Ok(answer.socket()?.0.as_raw_fd()))?
    }

    /// The answer so far.
    fn output(&self) -> PyResult<Output> {
        self.answer.with(|answer| answer.output())
    }

    /// Moves out the captured rows: arrays by layer, logits, and experts by layer. Later rows are not kept.
    fn captured<'py>(&self, py: Python<'py>) -> PyResult<Arrays<'py>> {
        Ok(self.answer.with(|answer| std::mem::take(&mut answer.rows))?.into_arrays(py))
    }

    /// Cancels the request, if it has not ended.
    fn close(&self) {
        drop(self.answer.take());
    }
}

impl Stream {
    pub(crate) fn new(text: TextStream, parser: Option<Parser>, prompt: Vec<u32>, rows: Rows) -> Self {
        let output = Output { prompt_token_ids: prompt, ..Default::default() };
        Self { answer: Owned::new(Answer { text, parser, emitted: 0, next: None, wake: None, rows, output }) }
    }
}

impl Answer {
    fn next_within(&mut self, timeout: Duration) -> Poll<moebius::Result<Option<Chunk>>> {
        if let Some(next) = self.next.take() {
            return Poll::Ready(next);
        }
        self.step(|text| text.next_within(timeout))
    }

    fn ready(&mut self) -> PyResult<bool> {
        if self.next.is_none() {
            let (receiver, sender) = self.socket()?;
            // The wake-up byte is read before the state is checked, so that no later wake-up is lost.
            while (&*receiver).read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
            let waker = Waker::from(sender.clone());
            if let Poll::Ready(next) = self.step(|text| text.poll_next(&mut Context::from_waker(&waker))) {
                self.next = Some(next);
            }
        }
        Ok(self.next.is_some())
    }

    fn socket(&mut self) -> PyResult<&(UnixStream, Arc<Socket>)> {
        if self.wake.is_none() {
            let pair = UnixStream::pair().and_then(|(receiver, sender)| {
                receiver.set_nonblocking(true)?;
                sender.set_nonblocking(true)?;
                Ok((receiver, sender))
            });
            let (receiver, sender) =
                pair.map_err(|e| Error::new_err(format!("cannot open a socket pair to wait on: {e}")))?;
            self.wake = Some((receiver, Arc::new(Socket(sender))));
        }
        Ok(self.wake.as_ref().expect("just opened"))
    }

    /// Reads steps from `wait` until there is a chunk to emit.
    fn step(
        &mut self,
        mut wait: impl FnMut(&mut TextStream) -> Poll<Option<moebius::Result<Delta>>>,
    ) -> Poll<moebius::Result<Option<Chunk>>> {
        loop {
            let delta = wait(&mut self.text);
            self.rows.extend(self.text.take_captured());
            let delta = match delta {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(delta)) => delta,
            };
            let ended = matches!(delta, Ok(Delta::End(..)));
            let (text, reasoning) = match delta {
                Ok(delta) => self.take(delta),
                Err(error) => return Poll::Ready(Err(error)),
            };
            let tokens = &self.text.tokens()[self.emitted..];
            let silent = text.is_empty() && reasoning.is_empty();
            if silent && (!ended || tokens.is_empty()) {
                continue;
            }
            let chunk = (text, reasoning, tokens.to_vec());
            self.emitted += tokens.len();
            return Poll::Ready(Ok(Some(chunk)));
        }
    }

    /// Adds a step of the answer. Returns the text and reasoning that it adds.
    fn take(&mut self, delta: Delta) -> (String, String) {
        let mut parts = Vec::new();
        match (delta, &mut self.parser) {
            (Delta::Text(text), Some(parser)) => parser.push(&text, &mut parts),
            (Delta::Text(text), None) => parts.push(Part::Content(text)),
            (Delta::End(reason, stats), parser) => {
                if let Some(parser) = parser {
                    parser.finish(&mut parts);
                }
                let called = parser.as_ref().is_some_and(|parser| parser.called());
                self.output.finish_reason = Some(match reason {
                    FinishReason::Length => "length",
                    FinishReason::Stop if called => "tool_calls",
                    FinishReason::Stop => "stop",
                });
                self.output.stats = stats.into();
            }
        }
        let (mut content, mut thoughts) = (String::new(), String::new());
        for part in parts {
            match part {
                Part::Content(text) => content += &text,
                Part::Reasoning(text) => thoughts += &text,
                Part::Call { id, name, .. } => self.output.tool_calls.push((id, name, String::new())),
                Part::Arguments { index, json } => {
                    if let Some((_, _, arguments)) = self.output.tool_calls.get_mut(index) {
                        arguments.push_str(&json);
                    }
                }
            }
        }
        self.output.text += &content;
        self.output.reasoning += &thoughts;
        (content, thoughts)
    }

    fn output(&mut self) -> Output {
        let one = |(token, Logprobs { logprob, top }): (u32, Logprobs)| (token, logprob, top);
        self.output.logprobs.extend(self.text.take_logprobs().into_iter().map(one));
        self.output.token_ids = self.text.tokens().to_vec();
        if self.output.finish_reason.is_none() {
            self.output.stats = self.text.stats().into();
        }
        self.output.clone()
    }
}

/// Wakes an event loop: a byte makes the other end readable. A full socket is already readable.
struct Socket(UnixStream);

impl Wake for Socket {
    fn wake(self: Arc<Self>) {
        let _ = (&self.0).write(&[1]);
    }
}
