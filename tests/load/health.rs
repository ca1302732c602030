//! How soon `/health` answers, and beside it how soon a bare socket does: what both are late by is the machine's.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// Asks until it is stopped.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

/// What was seen of the server, and of a socket that answers at once.
pub(crate) struct Seen {
    pub(crate) server: Times,
    pub(crate) bare: Times,
}

/// How long answers took.
pub(crate) struct Times {
    n: usize,
    median: Duration,
    pub(crate) p99: Duration,
    max: Duration,
}

impl Times {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize];
        Self { n: all.len(), median: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(
            f,
            "{} asked, median {:.2} ms, p99 {:.2} ms, most {:.2} ms",
            self.n,
            ms(self.median),
            ms(self.p99),
            ms(self.max)
        )
    }
}

impl Watch {
    pub(crate) fn start(server: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = spawn(move || {
            let bare = bare_socket();
            let (mut kept, mut kept_bare) = (connect(server), connect(bare));
            let (mut of_server, mut of_bare) = (Vec::new(), Vec::new());
            for i in 0u64.. {
                if stopped.load(Relaxed) {
                    break;
                }
                // On a connection that is kept, and every other time on a new one.
                let one = |address: SocketAddr, kept: &mut BufReader<TcpStream>| {
                    let started = Instant::now();
                    if i % 2 == 0 {
                        ask(kept)
                    } else {
                        ask(&mut connect(address))
                    }
                    started.elapsed()
                };
                of_server.push(one(server, &mut kept));
                of_bare.push(one(bare, &mut kept_bare));
                sleep(Duration::from_millis(20));
            }
            Seen { server: Times::of(of_server), bare: Times::of(of_bare) }
        });
        Self { stop, thread }
    }

    pub(crate) fn stop(self) -> Seen {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap()
    }
}

fn connect(address: SocketAddr) -> BufReader<TcpStream> {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    BufReader::new(socket)
}

/// Asks once. Panics: the answer is not 200.
fn ask(socket: &mut BufReader<TcpStream>) {
    socket.get_mut().write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let (mut line, mut length) = (String::new(), 0);
    socket.read_line(&mut line).unwrap();
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
    while line != "\r\n" {
        line.clear();
        socket.read_line(&mut line).unwrap();
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
    }
    socket.read_exact(&mut vec![0; length]).unwrap();
}

/// A thread for each connection, which answers whatever comes; it ends with its connections.
fn bare_socket() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    spawn(move || {
        for socket in listener.incoming().map_while(Result::ok) {
            spawn(move || {
                let mut socket = socket;
                let mut bytes = [0; 1024];
                while socket.read(&mut bytes).is_ok_and(|n| n > 0) {
                    if socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}
