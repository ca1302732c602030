//! An answer as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use tokio_stream::Stream;

use super::answer::{Answer, AnswerStep};
use super::error::ApiError;

/// After this silence the stream sends a comment, so that proxies do not time out during a long prefill.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// How an endpoint writes an answer as events.
pub(super) trait EventFormat: Send + Unpin + 'static {
    /// Events before the first step.
    fn open(&mut self) -> Vec<Event>;
    /// Events of a step.
    fn step(&mut self, step: AnswerStep, answer: &Answer) -> Vec<Event>;
    /// Events after the last step.
    fn close(&mut self, answer: &Answer) -> Vec<Event>;
    /// The event of an error, after the status line has been sent.
    fn fail(&mut self, error: ApiError) -> Event {
        Event::default().data(error.to_json().to_string())
    }
}

/// Streams an answer as server-sent events. A disconnect of the client drops it and cancels the request.
pub(super) fn stream<S: EventFormat>(answer: Answer, mut shape: S) -> Response {
    let events = shape.open().into();
    let stream = EventStream { answer: Some(answer), shape, events };
    Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

struct EventStream<S> {
    answer: Option<Answer>, // until it has ended
    shape: S,
    events: VecDeque<Event>,
}

impl<S: EventFormat> Stream for EventStream<S> {
    type Item = std::result::Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { answer: slot, shape, events } = &mut *self;
        loop {
            if let Some(event) = events.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let Some(answer) = slot else { return Poll::Ready(None) };
            match std::task::ready!(answer.poll_next(context)) {
                Some(Ok(step)) => events.extend(shape.step(step, answer)),
                Some(Err(error)) => {
                    events.push_back(shape.fail(error));
                    *slot = None;
                }
                None => {
                    events.extend(shape.close(answer));
                    *slot = None;
                }
            }
        }
    }
}
