//! A body that is written while it is sent. Its writer waits for the client, but not for long.

use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::Stream;

/// Bytes that are written ahead of the client.
const CHUNK_BYTES: usize = 64 << 10;

/// Least bytes per second that a client must read of a large answer or send of a body, after an initial wait.
pub(super) const SLOWEST: u64 = 64 << 10;

/// A body that `write` writes on its own thread, chunk by chunk as the client reads it.
///
/// A write fails when the client disconnects, or reads less than 64 KiB per second after `patience`. The body then
/// breaks off.
pub(super) fn chunked(
    patience: Duration,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
) -> Body {
    let (chunks, sent) = mpsc::channel(1);
    let handle = Handle::current();
    tokio::task::spawn_blocking(move || {
        let until = Instant::now() + patience;
        let mut out = Chunks { chunks, chunk: Vec::with_capacity(CHUNK_BYTES), handle, patience, until };
        // A body that breaks off tells the client that its end is missing.
        let _ = write(&mut out).and_then(|()| out.finish());
    });
    Body::from_stream(Sent(sent))
}

/// The same as a response of JSON.
pub(super) fn chunked_json(
    patience: Duration,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
) -> Response {
    ([(CONTENT_TYPE, "application/json")], chunked(patience, write)).into_response()
}

struct Chunks {
    chunks: mpsc::Sender<Chunk>,
    chunk: Vec<u8>,
    handle: Handle,
    patience: Duration,
    until: Instant, // when the next chunk has to be taken
}

enum Chunk {
    More(Bytes),
    /// All of it was written.
    End,
}

impl Chunks {
    fn send(&mut self, chunk: Chunk) -> io::Result<()> {
        let send = async { timeout_at(self.until, self.chunks.send(chunk)).await };
        match self.handle.block_on(send) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        self.send(Chunk::End)
    }
}

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // All bytes at once: an encoder in between may pass on that only a part was written, or nothing.
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            rest = later;
            if self.chunk.len() == CHUNK_BYTES {
                self.flush()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES));
        let worth = Duration::from_secs_f64(chunk.len() as f64 / SLOWEST as f64);
        self.send(Chunk::More(chunk.into()))?;
        // A fast start does not buy a long pause.
        self.until = (self.until + worth).min(Instant::now() + self.patience + worth);
        Ok(())
    }
}

struct Sent(mpsc::Receiver<Chunk>);

impl Stream for Sent {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.0.poll_recv(context)) {
            Some(Chunk::More(bytes)) => Some(Ok(bytes)),
            Some(Chunk::End) => None,
            None => Some(Err(io::ErrorKind::TimedOut.into())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use tokio::sync::oneshot;

    /// A body of `bytes` bytes, and the result of its writer.
    fn written(patience: Duration, bytes: usize) -> (Body, oneshot::Receiver<io::Result<()>>) {
        let (tell, told) = oneshot::channel();
        let body = chunked(patience, move |out| {
            let result = (0..bytes / 100).try_for_each(|i| out.write_all(&[i as u8; 100]));
            let end = result.as_ref().map_or_else(|e| Err(e.kind().into()), |()| Ok(()));
            let _ = tell.send(result);
            end
        });
        (body, told)
    }

    #[tokio::test]
    async fn all_that_is_written_arrives() {
        let (body, told) = written(Duration::from_secs(20), 1_000_000);
        let bytes = body.collect().await.unwrap().to_bytes();
        assert!(bytes.len() == 1_000_000 && bytes.chunks(100).enumerate().all(|(i, part)| part == [i as u8; 100]));
        assert!(told.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn who_takes_too_little_is_not_waited_for() {
        let started = Instant::now();
        let (mut body, told) = written(Duration::from_millis(200), 100_000_000);
        // A little at a time is not enough: each piece gives a second.
        body.frame().await.unwrap().unwrap();
        body.frame().await.unwrap().unwrap();
        assert_eq!(told.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        let mut end = body.frame().await;
        while let Some(Ok(_)) = end {
            end = body.frame().await;
        }
        assert!(end.is_some_and(|end| end.is_err()), "a body that lacks something must not end as if it were whole");
    }

    #[tokio::test]
    async fn who_goes_away_is_not_written_for() {
        let (body, told) = written(Duration::from_secs(20), 100_000_000);
        drop(body);
        assert_eq!(told.await.unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
