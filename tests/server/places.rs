//! A client with more sockets than there are places, in all the ways of holding them: others are answered at once.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use moebius::engine::{Event, FinishReason, RequestStats};
use moebius::server::ServerOptions;
use serde_json::json;

use crate::fixture::*;

/// How a hostile client holds its sockets.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    first: &'static str, // what it sends when it has connected
    drip: &'static str,  // what it sends again and again
    again: bool,         // it connects anew when it is put out
    reads: usize,        // bytes that it takes at a time
}

const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ";
const BODY: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n{\"";
const EXPECT: &str =
    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 200000\r\n\r\n";
const GET: &str = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
const FILE: &str = "GET /web/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n";

const fn way(name: &'static str, first: &'static str, drip: &'static str) -> Way {
    Way { name, first, drip, again: true, reads: 4096 }
}

const WAYS: &[Way] = &[
    Way { again: false, ..way("silent", "", "") },
    Way { again: false, ..way("heads by the byte", HEAD, "x") },
    way("heads by the byte, anew", HEAD, "x"),
    way("bodies by the byte", BODY, "x"),
    way("kept alive, asking", GET, GET),
    way("bodies that wait to be asked for", EXPECT, ""),
    way("silent, anew", "", ""),
    Way { reads: 1, ..way("answers by the byte", FILE, FILE) },
];

/// A client that holds sockets until it is stopped.
struct Attack {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Attack {
    /// With all its sockets open.
    fn start(address: SocketAddr, way: Way, sockets: usize, every: Duration) -> Self {
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, count) = (stop.clone(), opened.clone());
        let open = move || {
            count.fetch_add(1, Relaxed);
            let mut socket = TcpStream::connect(address).unwrap();
            let _ = socket.write_all(way.first.as_bytes());
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let thread = spawn(move || {
            let mut all: Vec<TcpStream> = (0..sockets).map(|_| open()).collect();
            let mut bytes = vec![0; way.reads];
            while !stopped.load(Relaxed) {
                let round = Instant::now();
                all.retain_mut(|socket| {
                    let ended = match socket.write(way.drip.as_bytes()).and_then(|_| socket.read(&mut bytes)) {
                        Ok(n) => n == 0,
                        Err(e) => e.kind() != ErrorKind::WouldBlock,
                    };
                    if ended && way.again {
                        *socket = open();
                    }
                    !ended || way.again
                });
                sleep(every.saturating_sub(round.elapsed()));
            }
        });
        while opened.load(Relaxed) < sockets {
            sleep(Duration::from_millis(5));
        }
        Self { stop, opened, thread }
    }

    /// How many sockets it has opened in all.
    fn stop(self) -> usize {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap();
        self.opened.load(Relaxed)
    }
}

/// The longest that a normal client's requests took while `way` goes on: those about the server, and one to the model.
fn longest(server: &Fixture, way: Way, sockets: usize, every: Duration, rounds: usize) -> (Duration, Duration) {
    let attack = Attack::start(server.address, way, sockets, every);
    let mut longest = (Duration::ZERO, Duration::ZERO);
    for _ in 0..rounds {
        for path in ["/health", "/ready", "/metrics"] {
            let started = Instant::now();
            assert_eq!(raw(server.address, "GET", path, b"").0, 200, "{path}, {}", way.name);
            longest.0 = longest.0.max(started.elapsed());
        }
        let started = Instant::now();
        assert_eq!(post(server.address, "/v1/chat/completions", hello()).0, 200, "{}", way.name);
        longest.1 = longest.1.max(started.elapsed());
        sleep(every / 2);
    }
    let opened = attack.stop();
    println!(
        "{:>34}: {:.3} s, a completion {:.3} s; {opened} sockets opened",
        way.name,
        longest.0.as_secs_f64(),
        longest.1.as_secs_f64()
    );
    longest
}

fn assert_answered_in_time(places: usize, sockets: usize, every: Duration, rounds: usize) {
    for &way in WAYS {
        let server = saying_with(ServerOptions { max_connections: places, ..ServerOptions::default() }, "x");
        let (about, completion) = longest(&server, way, sockets, every, rounds);
        assert!(about < Duration::from_secs(1), "{}: {about:?}", way.name);
        assert!(completion < Duration::from_secs(2), "{}: {completion:?}", way.name);
    }
}

#[test]
fn a_client_with_too_many_sockets_keeps_nobody_out() {
    assert_answered_in_time(32, 40, Duration::from_millis(20), 20);
}

#[test]
#[ignore = "takes minutes, and 2,300 file handles"]
fn eleven_hundred_sockets_keep_nobody_out() {
    assert_answered_in_time(1024, 1100, Duration::from_secs(1), 20);
}

#[test]
fn where_all_are_answered_others_are_told_to_come_back() {
    let mut server = start_with(ServerOptions { max_connections: 2, ..ServerOptions::default() });
    let stream = with(hello(), json!({"stream": true})).to_string();
    let streams = [(); 2].map(|()| send(server.address, "POST", "/v1/chat/completions", stream.as_bytes()));
    let running = [(); 2].map(|()| server.next());
    running.iter().for_each(|submission| submission.events.send(token(39)).unwrap());
    let mut refused = send(server.address, "POST", "/v1/messages", hello().to_string().as_bytes());
    let mut text = String::new();
    refused.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 503") && text.contains("retry-after: 2") && text.contains("overloaded_error"),
        "{text}"
    );
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(raw(server.address, "GET", path, b"").0, 200, "{path}");
    }
    // Silent ones in the reserve do not change that.
    let _silent: Vec<TcpStream> = (0..100).map(|_| connect(server.address)).collect();
    let (status, metrics) = raw(server.address, "GET", "/metrics", b"");
    assert!(status == 200 && metrics.contains("moebius_connections_ended_total "), "{metrics}");
    // The running ones were not touched.
    for submission in running {
        submission.events.send(Event::Done(FinishReason::Stop, RequestStats::default())).unwrap();
    }
    for stream in streams {
        assert!(BufReader::new(stream).lines().any(|line| line.unwrap() == "data: [DONE]"));
    }
    assert_eq!(raw(server.address, "GET", "/version", b"").0, 200, "places are free again");
}

#[test]
fn a_kept_connection_is_kept_until_others_want_its_place() {
    let server = saying_with(ServerOptions { max_connections: 2, ..ServerOptions::default() }, "x");
    let ask = |socket: &mut TcpStream| {
        write!(socket, "{GET}").unwrap();
        let mut bytes = [0; 1024];
        let n = socket.read(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..n]).to_ascii_lowercase()
    };
    let mut kept = connect(server.address);
    assert!(!ask(&mut kept).contains("connection: close"));
    assert!(!ask(&mut kept).contains("connection: close"), "a place is free");
    let mut other = connect(server.address);
    assert!(
        ask(&mut other).contains("connection: close"),
        "all places are taken: its next request had better come over a new one"
    );
    assert!(!ask(&mut kept).contains("connection: close"), "a place is free again");
    let _two = [(); 2].map(|()| connect(server.address));
    kept.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(kept.read(&mut [0; 8]).unwrap_or(0), 0, "the idle one makes room");
}
