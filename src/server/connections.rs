//! Sockets: how many, how patient, and TLS.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::ServerOptions;
use crate::{Error, Result};

/// Headers of a request at most, and bytes of its first line and headers together.
const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Certificate and key, ready for handshakes.
pub(super) struct Tls(TlsAcceptor);

impl Tls {
    /// Errors: `Error::Invalid` naming the file that cannot be used.
    pub(super) fn load(chain: &Path, key: &Path) -> Result<Self> {
        let unusable = |path: &Path, e: &dyn std::fmt::Display| Error::Invalid(format!("{}: not usable for TLS: {e}", path.display()));
        let certificates = CertificateDer::pem_file_iter(chain)
            .and_then(|all| all.collect::<std::result::Result<Vec<_>, _>>())
            .map_err(|e| unusable(chain, &e))?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| unusable(key, &e))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(tokio_rustls::rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable(chain, &e))?
            .with_no_client_auth()
            .with_single_cert(certificates, private)
            .map_err(|e| unusable(chain, &e))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

/// Answers on `listener` until `stop` says so; then requests that run may end.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Option<Tls>,
    router: Router,
    options: ServerOptions,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(options.max_connections));
    let graceful = GracefulShutdown::new();
    let tls = tls.map(|tls| tls.0);
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place.expect("nobody closes it"),
            () = told(&mut stop) => break,
        };
        let (socket, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                // Out of file handles, or a client that is gone already: others may end meanwhile.
                Err(_) => {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            () = told(&mut stop) => break,
        };
        let _ = socket.set_nodelay(true); // each event of a stream is a packet
        let router = router.clone().layer(axum::Extension(ConnectInfo(peer)));
        let (tls, watcher, patience) = (tls.clone(), graceful.watcher(), options.client_timeout);
        tokio::spawn(async move {
            let _place = place;
            match tls {
                None => talk(Patient::new(socket, patience), router, patience, watcher).await,
                Some(tls) => {
                    if let Ok(Ok(socket)) = timeout(patience, tls.accept(socket)).await {
                        talk(Patient::new(socket, patience), router, patience, watcher).await;
                    }
                }
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn told(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|&stop| stop).await);
}

/// Requests of one connection, one after the other.
async fn talk(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    patience: Duration,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience) // idle connections end by it too
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    // What goes wrong on a connection concerns its client, who is told by status or by the end of it.
    let _ = watcher.watch(connection).await;
}

/// A socket that fails when the other side does not take what it is sent for too long.
struct Patient<S> {
    socket: S,
    patience: Duration,
    stalled: Option<Pin<Box<Sleep>>>, // since a write could not go on
}

impl<S> Patient<S> {
    fn new(socket: S, patience: Duration) -> Self {
        Self { socket, patience, stalled: None }
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let patience = self.patience;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.watch(context, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.socket).poll_flush(context);
        self.watch(context, poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.socket).poll_shutdown(context);
        self.watch(context, poll)
    }
}
