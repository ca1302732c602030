//! Sockets: places for connections, timeouts and TLS.
//!
//! ```text
//! places       the connections, and which one is closed when all places are taken
//! line         a socket and its bodies, which report what the connection is busy with
//! tls          certificate and key
//! open_files   the system's limit of sockets
//! ```

mod line;
mod open_files;
mod places;
mod tls;

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::header::{CONNECTION, HeaderValue};
use hyper::body::{Body, Incoming};
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use line::{Arriving, ClientSocket, Leaving};
pub(super) use open_files::fit;
pub(super) use places::ConnectionPlaces;
use places::{Activity, ConnectionPlace};
pub(super) use tls::Tls;

/// Maximum headers of a request, and bytes of its first line and headers together.
const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 64 << 10;

/// New connections that the system queues. It makes further ones wait for a second and retry.
const BACKLOG: i32 = 4096;

/// While all places are taken, this many new connections are accepted at once, and then none for a moment. Clients that
/// reconnect at once should take neither the CPU, nor the places of others before their heads have arrived.
const AT_ONCE: usize = 4;
const MOMENT: Duration = Duration::from_millis(1);

/// Pause when the system has no free socket.
const NO_SOCKET: Duration = Duration::from_millis(10);

/// Time for a body to arrive when the server stops.
const LAST_BODIES: Duration = Duration::from_secs(1);

/// Marks a request that came over a reserve place, where few routes are answered.
#[derive(Clone)]
pub(super) struct OfReserve;

/// Listens on an address.
pub(super) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    socket2::SockRef::from(&listener).listen(BACKLOG)?; // the library's own backlog is 128
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// What all connections share.
pub(super) struct ConnectionContext {
    pub(super) tls: Option<Tls>,
    pub(super) router: Router,
    pub(super) places: Arc<ConnectionPlaces>,
    pub(super) patience: Duration,
    pub(super) stop: watch::Receiver<bool>,
}

impl ConnectionContext {
    /// Answers on `listener` until `stop`. Running answers then complete.
    pub(super) async fn serve(self, listener: TcpListener) {
        let server = Arc::new(self);
        let (alive, mut all_gone) = mpsc::channel::<()>(1);
        let mut stop = server.stop.clone();
        for i in 0usize.. {
            if i.is_multiple_of(AT_ONCE) && server.places.are_taken() {
                sleep(MOMENT).await;
            }
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped(&mut stop) => break,
            };
            match accepted {
                Ok((socket, peer)) => server.welcome(socket, peer, alive.clone()),
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    server.places.make_room();
                    sleep(NO_SOCKET).await;
                }
            }
        }
        drop((listener, alive));
        server.places.end(&[Activity::Idle, Activity::Head]);
        if timeout(LAST_BODIES, all_gone.recv()).await.is_err() {
            server.places.end(&[Activity::Idle, Activity::Head, Activity::Body]);
            all_gone.recv().await;
        }
    }

    /// Gives a new connection a place, and answers it until it loses the place.
    fn welcome(self: &Arc<Self>, socket: TcpStream, peer: SocketAddr, alive: mpsc::Sender<()>) {
        let Some((place, ended)) = self.places.enter(peer.ip()) else { return };
        let _ = socket.set_nodelay(true); // each event of a stream is a packet
        let server = self.clone();
        tokio::spawn(async move {
            let _alive = alive;
            tokio::select! {
                () = server.talk(socket, peer, Arc::new(place)) => {}
                _ = ended => {}
            }
        });
    }

    async fn talk(&self, socket: TcpStream, peer: SocketAddr, place: Arc<ConnectionPlace>) {
        match &self.tls {
            None => self.answer_all(socket, peer, place).await,
            Some(tls) => {
                if let Ok(Ok(socket)) = timeout(self.patience, tls.0.accept(socket)).await {
                    self.answer_all(socket, peer, place).await;
                }
            }
        }
    }

    /// Answers the requests of one connection, one after another.
    async fn answer_all(
        &self,
        socket: impl AsyncRead + AsyncWrite + Unpin,
        peer: SocketAddr,
        place: Arc<ConnectionPlace>,
    ) {
        let line = ClientSocket::new(socket, place.clone(), self.patience);
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.patience) // idle connections end by it too
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(line), service_fn(|request| self.answer(request, peer, place.clone())));
        let mut connection = pin!(connection);
        let mut stop = self.stop.clone();
        // An error of a connection concerns only its client, which sees a status or the end of the connection.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = stopped(&mut stop) => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
        place: Arc<ConnectionPlace>,
    ) -> Result<Response<Leaving>, Infallible> {
        if !place.begins(!request.body().is_end_stream()) {
            return pending().await; // the connection is about to end
        }
        request.extensions_mut().insert(ConnectInfo(peer));
        if place.is_reserve() {
            request.extensions_mut().insert(OfReserve);
        }
        let request = request.map(|body| Arriving::new(body, place.clone()));
        let mut response = TowerToHyperService::new(self.router.clone()).call(request).await?;
        if place.is_wanted() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| Leaving::new(body, place)))
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|&stop| stop).await);
}
