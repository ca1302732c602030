//! Load: 200 clients on the demo model in the built server, over real sockets. They ask all there is to ask, leave in
//! the middle, send nonsense and read slowly; every answer must be the one that was given alone, and afterwards nothing
//! may be left of them.
//!
//! `cargo test` runs ten seconds of it; `cargo test --release --test load -- --ignored --nocapture` two minutes, and
//! says what it saw.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod cases;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod health;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cases::Case;
use clients::{Counts, World};
use common::served::Served;
use serde_json::json;

const CLIENTS: usize = 200;

/// Fewer places than clients, so that some wait and some are told to come back.
const OPTIONS: [&str; 10] =
    ["--threads", "1", "--max-sequences", "16", "--max-queue", "64", "--max-context", "2048", "--client-timeout", "10"];

/// What the process may grow by between two quiet moments: its heap keeps the size of the busiest moment, which comes
/// by chance, and grew by 8 MiB in two minutes before it stood still. A leak of 4 KiB per request would be 30.
const TOLERANCE_BYTES: u64 = 16 << 20;

#[test]
fn ten_seconds() {
    load(Duration::from_secs(3), Duration::from_secs(7));
}

#[test]
#[ignore = "takes two minutes"]
fn two_minutes() {
    load(Duration::from_secs(30), Duration::from_secs(120));
}

fn load(warm_up: Duration, time: Duration) {
    let mut server = Served::start("demo", &OPTIONS);
    let address = server.address();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let started = Instant::now();
    let cases: Arc<Vec<Case>> = Arc::new(runtime.block_on(cases::answered_alone(address)));
    runtime.block_on(fill_cache(address));
    println!("{} cases answered alone, the cache filled: {:.1} s", cases.len(), started.elapsed().as_secs_f64());

    // The listener's, and what the runtime has for signals.
    std::thread::sleep(Duration::from_secs(1));
    // A second process that renders chat templates stays, once two requests came together.
    let idle = handles(server.pid()) + 1;

    run(&runtime, address, &cases, warm_up, 1);
    let before = quiet(&runtime, &server, idle);
    let health = health::Watch::start(address);
    let counts = run(&runtime, address, &cases, time, 2);
    let health = health.stop();
    let after = quiet(&runtime, &server, idle);
    assert!(server.is_running());

    println!("{} s, {CLIENTS} clients: {counts}", time.as_secs());
    println!("/health: {}; a bare socket beside it: {}", health.server, health.bare);
    println!("before {before:?}\nafter  {after:?}");
    counts.check();
    let grown = after.private_bytes.saturating_sub(before.private_bytes);
    assert!(grown <= TOLERANCE_BYTES, "the process has grown by {} KiB", grown >> 10);
    // Where others keep the cores busy, a bare socket is late as well, and that is not ours; twice, for the system lets
    // a thread that has worked wait longer than one that slept.
    let limit = Duration::from_millis(50) + 2 * health.bare.p99;
    assert!(health.server.p99 < limit, "/health: {}, a bare socket: {}", health.server, health.bare);
}

/// Lets all clients loose for a time, and waits until each has ended what it had begun.
fn run(
    runtime: &tokio::runtime::Runtime,
    address: SocketAddr,
    cases: &Arc<Vec<Case>>,
    time: Duration,
    round: u64,
) -> Arc<Counts> {
    let world = Arc::new(World { address, cases: cases.clone(), until: Instant::now() + time, counts: Arc::default() });
    runtime.block_on(async {
        let all: Vec<_> =
            (0..CLIENTS as u64).map(|i| tokio::spawn(clients::client(world.clone(), round << 32 | i))).collect();
        for client in all {
            client.await.unwrap();
        }
    });
    world.counts.clone()
}

/// Every block of the KV cache is written once: its memory is the process's from then on.
async fn fill_cache(address: SocketAddr) {
    let total = wire::metric(address, "kv_blocks_total").await;
    let mut wire = wire::Wire::open(address).await.unwrap();
    for i in 0.. {
        if wire::metric(address, "kv_blocks_kept").await + 64 >= total {
            return;
        }
        assert!(i < 100, "the cache does not fill");
        let prompt: Vec<u64> = (0..1990).map(|k| 10 + (i * 7919 + k * (i + 1)) % 900).collect();
        let reply = wire.ask("/v1/completions", &json!({"prompt": prompt, "max_tokens": 1})).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

/// What is left of the clients when all of them are gone.
#[derive(Debug)]
#[allow(dead_code)] // printed
struct Left {
    private_bytes: u64, // RAM that is not of files
    all_bytes: u64,     // RAM, the mapped experts included
    threads: u64,
}

/// Waits until nothing runs and no more than `idle` files and sockets are open, and looks at the process. Panics: it
/// does not come to rest.
fn quiet(runtime: &tokio::runtime::Runtime, server: &Served, idle: usize) -> Left {
    let address = server.address();
    let deadline = Instant::now() + Duration::from_secs(60);
    let busy = || {
        runtime.block_on(async {
            let mut busy = Vec::new();
            for level in ["requests_running", "requests_waiting", "kv_blocks_used"] {
                let n = wire::metric(address, level).await;
                busy.extend((n > 0).then(|| format!("{level} {n}")));
            }
            busy
        })
    };
    loop {
        let (busy, open) = (busy(), handles(server.pid()));
        if busy.is_empty() && open <= idle {
            return look(server.pid());
        }
        assert!(Instant::now() < deadline, "left behind: {busy:?}, {open} file handles, and at first {idle}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Files and sockets that are open.
fn handles(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn look(pid: u32) -> Left {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    Left { private_bytes: field("RssAnon") << 10, all_bytes: field("VmRSS") << 10, threads: field("Threads") }
}
