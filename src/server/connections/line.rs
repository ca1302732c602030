//! A client's socket and bodies, which report to its [`ConnectionPlace`] what the connection is busy with.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::places::{ConnectionPlace, worth};

/// A socket whose writes fail when the client reads too slowly.
pub(super) struct ClientSocket<S> {
    socket: S,
    place: Arc<ConnectionPlace>,
    patience: Patience,
}

impl<S> ClientSocket<S> {
    pub(super) fn new(socket: S, place: Arc<ConnectionPlace>, patience: Duration) -> Self {
        Self { socket, place, patience: Patience::new(patience) }
    }

    /// The result of a write: the bytes written, or that none can be.
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        poll: Poll<io::Result<T>>,
        bytes: impl Fn(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        let waited = self.patience.since();
        let result = match poll {
            Poll::Ready(result) => {
                self.patience.moved(result.as_ref().map_or(0, bytes));
                Poll::Ready(result)
            }
            Poll::Pending => self.patience.poll_end(context).map(|()| Err(io::ErrorKind::TimedOut.into())),
        };
        if waited != self.patience.since() {
            self.place.stalls(self.patience.since());
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientSocket<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let poll = Pin::new(&mut self.socket).poll_read(context, into);
        if into.filled().len() > before {
            self.place.hears();
        }
        poll
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.watch(context, poll, |&taken| taken)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.socket).poll_flush(context);
        let poll = self.watch(context, poll, |_| 0);
        if matches!(poll, Poll::Ready(Ok(()))) {
            self.place.has_sent(); // hyper flushes us when its own buffer is empty
        }
        poll
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.socket).poll_shutdown(context);
        self.watch(context, poll, |_| 0)
    }
}

/// How long the client has kept the server waiting, less the time that its bytes would take at the least rate.
struct Patience {
    limit: Duration,
    waited: Duration,
    wait: Option<(Instant, Pin<Box<Sleep>>)>, /* since when nothing is taken, earlier by `waited`; until when that
                                               * may go on */
}

impl Patience {
    fn new(limit: Duration) -> Self {
        Self { limit, waited: Duration::ZERO, wait: None }
    }

    fn since(&self) -> Option<Instant> {
        self.wait.as_ref().map(|(since, _)| *since)
    }

    fn moved(&mut self, bytes: usize) {
        if let Some((since, _)) = self.wait.take() {
            self.waited = since.elapsed();
        }
        self.waited = self.waited.saturating_sub(worth(bytes));
    }

    /// Nothing moves. Ready when that has lasted too long.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let (limit, waited) = (self.limit, self.waited);
        let (_, end) = self.wait.get_or_insert_with(|| {
            let since = Instant::now() - waited; // the clock had begun before
            (since, Box::pin(sleep_until(since + limit)))
        });
        end.as_mut().poll(context)
    }
}

/// The body of a request.
pub(super) struct Arriving {
    body: Incoming,
    place: Arc<ConnectionPlace>,
}

impl Arriving {
    pub(super) fn new(body: Incoming, place: Arc<ConnectionPlace>) -> Self {
        Self { body, place }
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let poll = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &poll {
            self.place.reads(frame.data_ref().map_or(0, Bytes::len));
        }
        // The reader may keep the body; from its end on the client waits for the server.
        if matches!(poll, Poll::Ready(None)) || self.body.is_end_stream() {
            self.place.has_read();
        }
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.place.has_read();
    }
}

/// The body of an answer.
pub(super) struct Leaving {
    body: axum::body::Body,
    place: Arc<ConnectionPlace>,
}

impl Leaving {
    pub(super) fn new(body: axum::body::Body, place: Arc<ConnectionPlace>) -> Self {
        Self { body, place }
    }
}

impl Body for Leaving {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.place.has_answered();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::timeout;

    use super::*;

    /// Whether patience of 400 ms ends within a second in which `bytes` move every 20 ms.
    async fn ends(bytes: usize) -> bool {
        let mut patience = Patience::new(Duration::from_millis(400));
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(1) {
            if timeout(Duration::from_millis(20), poll_fn(|context| patience.poll_end(context))).await.is_ok() {
                return true;
            }
            patience.moved(bytes);
        }
        false
    }

    #[tokio::test]
    async fn a_byte_now_and_then_ends_patience_and_the_least_rate_does_not() {
        assert!(ends(0).await, "as long as nothing moves, breaks do not count");
        assert!(ends(1).await);
        assert!(!ends(200).await, "10 KiB a second");
    }
}
