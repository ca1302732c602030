//! What the clients do: ask, leave, send nonsense, read slowly.

use std::fmt;
use std::io::{Error, Result};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use moebius::kernel::random::Random;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::cases::{CHAT, Case, said, streamed};
use super::wire::{Wire, post};

/// What all clients share.
pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) cases: Arc<Vec<Case>>,
    pub(crate) until: Instant,
    pub(crate) counts: Arc<Counts>,
}

/// What has happened.
#[derive(Default)]
pub(crate) struct Counts {
    right: AtomicU64,
    slow: AtomicU64,    // of the right ones, by slow readers
    refused: AtomicU64, // nonsense, with the status it deserves
    left: AtomicU64,
    stalled: AtomicU64,
    told_to_wait: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [right, slow, refused] = [&self.right, &self.slow, &self.refused].map(|count| count.load(Relaxed));
        let [left, stalled, waited] = [&self.left, &self.stalled, &self.told_to_wait].map(|count| count.load(Relaxed));
        write!(f, "{right} right answers ({slow} read slowly), {} wrong, ", self.wrong.lock().unwrap().len())?;
        write!(
            f,
            "{refused} refusals of nonsense, {left} left in the middle, {stalled} stopped reading, {waited} times \
             told to wait"
        )
    }
}

impl Counts {
    /// Panics: something was wrong, or something never happened.
    pub(crate) fn check(&self) {
        let wrong = self.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "{} wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(10)]);
        for (what, count) in [
            ("answered", &self.right),
            ("read slowly", &self.slow),
            ("refused", &self.refused),
            ("left", &self.left),
            ("stalled", &self.stalled),
            ("told to wait", &self.told_to_wait),
        ] {
            assert!(count.load(Relaxed) > 0, "nobody was {what}");
        }
    }

    fn wrong(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }
}

fn below(random: &mut Random, n: usize) -> usize {
    (random.uniform() * n as f64) as usize
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// One client, until time is up; what it has begun it ends.
pub(crate) async fn client(world: Arc<World>, seed: u64) {
    let mut random = Random::at(seed, 0);
    let mut kept = None;
    sleep(Duration::from_millis(below(&mut random, 1000) as u64)).await;
    while Instant::now() < world.until {
        let what = below(&mut random, 100);
        let result = match what {
            0..60 => ask(&world, &mut random, &mut kept).await,
            60..75 => leave(&world, &mut random).await,
            75..85 => nonsense(&world, &mut random).await,
            85..93 => read_slowly(&world, &mut random).await,
            93..97 => stall(&world, &mut random).await,
            _ => {
                sleep(Duration::from_millis(below(&mut random, 500) as u64)).await;
                Ok(())
            }
        };
        if let Err(error) = result {
            world.counts.wrong(format!("what {what} does fails: {error}"));
            kept = None;
        }
        sleep(Duration::from_millis(below(&mut random, 100) as u64)).await;
    }
}

fn with_stream(case: &Case, streams: bool) -> Value {
    let mut body = case.body.clone();
    body["stream"] = streams.into();
    body
}

/// Asks and compares, on the connection that is kept or a new one. Does as told when told to wait.
async fn ask(world: &World, random: &mut Random, kept: &mut Option<Wire>) -> Result<()> {
    let case = &world.cases[below(random, world.cases.len())];
    let streams = below(random, 2) == 0;
    if below(random, 4) == 0 {
        *kept = None;
    }
    loop {
        let (mut wire, is_old) = match kept.take() {
            Some(wire) => (wire, true),
            None => (Wire::open(world.address).await?, false),
        };
        let reply = match wire.ask(case.path, &with_stream(case, streams)).await {
            // The server ends a connection that was idle for long, perhaps just as it is used again: clients ask anew.
            Err(_) if is_old && wire.is_untouched() => continue,
            reply => reply?,
        };
        if !reply.closes {
            *kept = Some(wire);
        }
        if reply.status == 429 {
            count(&world.counts.told_to_wait);
            let seconds = reply.retry_after.ok_or_else(|| Error::other("a 429 does not say when to come back"))?;
            sleep(Duration::from_secs(seconds)).await;
            if Instant::now() < world.until {
                continue;
            }
            return Ok(());
        }
        if compare(world, case, streams, &reply) {
            count(&world.counts.right);
        }
        return Ok(());
    }
}

fn compare(world: &World, case: &Case, streams: bool, reply: &super::wire::Reply) -> bool {
    let text = match (reply.status, streams) {
        (200, true) => streamed(case.path, &reply.events()),
        (200, false) => said(case.path, &reply.json()),
        _ => {
            world.counts.wrong(format!("{} {}: {}", case.path, reply.status, reply.text()));
            return false;
        }
    };
    if text != case.answer {
        world
            .counts
            .wrong(format!("{} {} (stream: {streams}): {:?}, and alone {:?}", case.path, case.body, text, case.answer));
    }
    text == case.answer
}

/// Goes away: within its request, before the answer, or within it.
async fn leave(world: &World, random: &mut Random) -> Result<()> {
    let case = &world.cases[below(random, world.cases.len())];
    let bytes = post(case.path, with_stream(case, below(random, 3) > 0).to_string().as_bytes());
    let mut wire = Wire::open(world.address).await?;
    match below(random, 3) {
        0 => {
            wire.send(&bytes[..below(random, bytes.len())]).await?;
            sleep(Duration::from_millis(below(random, 300) as u64)).await;
        }
        1 => {
            wire.send(&bytes).await?;
            sleep(Duration::from_millis(below(random, 200) as u64)).await;
        }
        _ => {
            wire.send(&bytes).await?;
            wire.read_some(below(random, 2000)).await?;
        }
    }
    count(&world.counts.left);
    Ok(())
}

/// Sends what nobody should, and wants the status that it deserves.
async fn nonsense(world: &World, random: &mut Random) -> Result<()> {
    let chat = |fields: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        post(CHAT, body.to_string().as_bytes())
    };
    let long = "word ".repeat(3000);
    let (bytes, want) = match below(random, 14) {
        0 => (post(CHAT, b"{\"messages\": ["), 400),
        1 => (post(CHAT, "[".repeat(50_000).as_bytes()), 400),
        2 => (post(CHAT, b"{\"messages\": \"\xff\xfe\"}"), 400),
        3 => (chat(json!({"temperature": 1e9})), 400),
        4 => (chat(json!({"nobody_knows": 1})), 400),
        5 => (chat(json!({"model": "other"})), 404),
        6 => (chat(json!({"messages": [{"role": "user", "content": long}]})), 400),
        7 => (chat(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}})), 400),
        8 => (chat(json!({"stop": vec!["x"; 10_000]})), 400),
        9 => (post("/v1/messages", b"{\"max_tokens\": -1, \"messages\": []}"), 400),
        10 => (post("/v1/nothing", b"{}"), 404),
        11 => (b"DELETE /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec(), 405),
        12 => (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n{".to_vec(),
            413,
        ),
        _ => (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), 400),
    };
    let mut wire = Wire::open(world.address).await?;
    wire.send(&bytes).await?;
    let reply = wire.reply().await?;
    match reply.status == want {
        true => count(&world.counts.refused),
        false => world.counts.wrong(format!(
            "{} for {:?}: {}",
            reply.status,
            String::from_utf8_lossy(&bytes[..bytes.len().min(200)]),
            reply.text()
        )),
    }
    Ok(())
}

/// Reads a short stream a few bytes at a time, to its end.
async fn read_slowly(world: &World, random: &mut Random) -> Result<()> {
    let short: Vec<&Case> = world.cases.iter().filter(|case| case.path == CHAT && case.answer.len() < 20).collect();
    let case = short[below(random, short.len())];
    let mut wire = Wire::open_slow(world.address).await?;
    let streams = below(random, 3) == 0; // a stream has many more bytes
    let reply = wire.ask(case.path, &with_stream(case, streams)).await?;
    if reply.status == 429 {
        count(&world.counts.told_to_wait);
    } else if compare(world, case, streams, &reply) {
        count(&world.counts.right);
        count(&world.counts.slow);
    }
    Ok(())
}

/// Asks for much more than it reads, and goes.
async fn stall(world: &World, random: &mut Random) -> Result<()> {
    let body = json!({"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": true, "max_tokens": 400,
        "stream": true});
    let mut wire = Wire::open_slow(world.address).await?;
    wire.send(&post(CHAT, body.to_string().as_bytes())).await?;
    wire.read_some(500).await?;
    sleep(Duration::from_millis(below(random, 3000) as u64)).await;
    count(&world.counts.stalled);
    Ok(())
}
