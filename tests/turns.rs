//! The next turn of a conversation goes on where the last one stood, and its answer is that of reading everything
//! again.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{cache_dir, fixture_dir, folder, resident_bytes, small};
use moebius::backend::batch::BLOCK_SIZE;
use moebius::config::{EngineConfig, ExpertBits};
use moebius::engine::{self, EngineHandle, Event, Logprobs, Request, RequestStats, SamplingParams, Steer, Tenant};
use moebius::engine::{CaptureWanted, Layers, Positions};
use moebius::kernel::random::Random;
use moebius::load::{self, Loaded};

/// Two engines on two cores only disturb each other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Models with recurrent state: DeltaNet, short convolutions, n-grams; and one of attention alone.
const MODELS: [&str; 5] = ["qwen3-next", "qwen3.5", "lfm2_moe", "qwen4_exp", "minimax-m2"];

/// Ends a message.
const END: u32 = 3;

fn config(prefix_cache: bool) -> EngineConfig {
    EngineConfig {
        cache_dir: Some(cache_dir()),
        threads: Some(2),
        max_context: Some(2048),
        max_batch_tokens: Some(256),
        max_sequences: 4,
        experts: ExpertBits::Bf16,
        prefix_cache,
        ..Default::default()
    }
}

fn loaded(model: &str, config: &EngineConfig) -> Loaded {
    let dir = fixture_dir(model);
    if dir.is_dir() {
        return load::load(&folder(model, &dir), config, &|_| {}).unwrap();
    }
    small::load(model, config)
}

/// An engine with room for so many blocks and snapshots.
fn start(model: &str, blocks: usize, snapshots: usize) -> EngineHandle {
    let config = config(true);
    let mut loaded = loaded(model, &config);
    assert!(loaded.snapshots >= snapshots || !loaded.model.config().has_recurrent_state());
    (loaded.kv_blocks, loaded.snapshots) = (blocks, snapshots);
    engine::start_loaded(model, loaded, &config, vec![END], Instant::now()).unwrap()
}

/// An engine that reads everything again.
fn forgetful(model: &str) -> EngineHandle {
    let config = config(false);
    engine::start_loaded(model, loaded(model, &config), &config, vec![END], Instant::now()).unwrap()
}

type Said = Vec<(u32, Logprobs)>;

/// The answer's tokens with the bits that they were drawn from.
fn ask(engine: &EngineHandle, request: Request) -> (Said, RequestStats) {
    let mut events = engine.submit(Request { logprobs: Some(1), ..request }).unwrap();
    let mut said = Vec::new();
    loop {
        match events.blocking_recv().unwrap() {
            Event::Token(token) => said.push((token.id, *token.logprobs.unwrap())),
            Event::Captured(_) => {}
            Event::Done(_, stats) => return (said, stats),
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

/// Someone's conversation: a system message that others have as well, then turns.
struct Conversation {
    random: Random,
    messages: Vec<u32>,
    tenant: Tenant,
    turns: usize,
}

/// What the chat template puts before an answer; of an answer of the past it puts the beginning alone.
const ASKS: [u32; 4] = [5, 6, 7, 8];

impl Conversation {
    fn new(seed: u64, tenant: u32) -> Self {
        let mut random = Random(seed);
        let system = below(&mut random, 2) as u32;
        let messages = (0..150 + 40 * system).map(|i| 20 + (i * 7 + system) % 400).chain([END]).collect();
        let mut conversation = Self { random, messages, tenant: Tenant(tenant), turns: 0 };
        conversation.say();
        conversation
    }

    /// A message of someone else's, now and then a long one.
    fn say(&mut self) {
        let longest = if below(&mut self.random, 5) == 0 { 300 } else { 70 };
        let length = 1 + below(&mut self.random, longest);
        let random = &mut self.random;
        self.messages.extend((0..length).map(|_| 20 + below(random, 400) as u32));
        self.messages.push(END);
        self.turns += 1;
    }

    fn request(&mut self) -> Request {
        Request {
            prompt: [&self.messages[..], &ASKS].concat(),
            max_tokens: Some(1 + below(&mut self.random, 150)),
            sampling: SamplingParams { temperature: 1.0, seed: Some(self.turns as u64), ..Default::default() },
            ignore_eos: true,
            tenant: self.tenant,
            ..Request::default()
        }
    }

    /// Takes an answer in: as it was, or without its thoughts.
    fn goes_on(&mut self, said: &Said) {
        let thoughts = if below(&mut self.random, 2) == 0 { said.len() / 2 } else { 0 };
        self.messages.extend(if thoughts > 0 { &ASKS[..2] } else { &ASKS[..] });
        self.messages.extend(said[thoughts..].iter().map(|(token, _)| token));
        self.messages.push(END);
        self.say();
    }
}

fn below(random: &mut Random, n: usize) -> usize {
    (random.uniform() * n as f64) as usize
}

fn copy(request: &Request) -> Request {
    let Request { prompt, max_tokens, sampling, ignore_eos, tenant, steer, .. } = request;
    Request {
        prompt: prompt.clone(),
        sampling: sampling.clone(),
        steer: steer.clone(),
        max_tokens: *max_tokens,
        ignore_eos: *ignore_eos,
        tenant: *tenant,
        ..Request::default()
    }
}

/// `agents` conversations at a time, each with another after its last turn or when the context is full, until
/// `enough` turns were taken or it is time. Returns tokens of prompts, and those of them that were in the cache.
fn talk(engine: &EngineHandle, truth: &EngineHandle, agents: u64, turns: usize, deadline: Instant) -> [usize; 2] {
    let agent = |agent: u64| {
        let mut tokens = [0; 2];
        let mut conversations: Vec<_> = (0..3).map(|i| Conversation::new(agent * 1000 + i, agent as u32 % 2)).collect();
        for turn in 0..turns {
            if Instant::now() > deadline {
                break;
            }
            // Now with one, now with another.
            let which = below(&mut conversations[0].random, 3);
            let conversation = &mut conversations[which];
            let request = conversation.request();
            let (said, stats) = ask(engine, copy(&request));
            let (want, _) = ask(truth, request);
            let name = &engine.info().model;
            assert!(said == want, "{name}: agent {agent}, turn {turn}, {} of the prompt cached", stats.cached_tokens);
            tokens[0] += stats.prompt_tokens;
            tokens[1] += stats.cached_tokens;
            conversation.goes_on(&said);
            if conversation.messages.len() + 200 > engine.info().max_context {
                conversations[which] = Conversation::new(agent * 1000 + 3 + turn as u64, agent as u32 % 2);
            }
        }
        tokens
    };
    let agent = &agent;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..agents).map(|i| scope.spawn(move || agent(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).fold([0; 2], |a, b| [a[0] + b[0], a[1] + b[1]])
    })
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[test]
fn turns_are_answered_as_if_everything_was_read_again() {
    let _alone = alone();
    for model in MODELS {
        let truth = forgetful(model);
        // Alone with memory for everything; several with little.
        for (agents, blocks, snapshots) in [(1, 200, 16), (3, 60, 5), (4, 33, 2)] {
            let engine = start(model, blocks, snapshots);
            let [tokens, cached] = talk(&engine, &truth, agents, 6, far());
            println!("{model}, {agents} agents: {cached} of {tokens} tokens were cached");
            if agents == 1 {
                assert!(2 * cached > tokens, "{model}: {cached} of {tokens} tokens were cached");
            }
        }
    }
}

/// A turn after a long prompt reads what is new and less than a block more.
#[test]
fn a_turn_reads_what_is_new() {
    let _alone = alone();
    for model in ["qwen3-next", "lfm2_moe"] {
        let engine = start(model, 200, 8);
        let mut messages: Vec<u32> = (0..1000).map(|i| 20 + i * 31 % 400).chain([END]).collect();
        let prompt = |messages: &[u32]| Request {
            prompt: [messages, &ASKS].concat(),
            max_tokens: Some(100),
            ignore_eos: true,
            ..Request::default()
        };
        let (said, first) = ask(&engine, prompt(&messages));
        assert_eq!(first.cached_tokens, 0);
        // Without its thoughts.
        let end = messages.len();
        messages.extend([5, 6].iter().chain(said[60..].iter().map(|(token, _)| token)).chain(&[END]));
        messages.extend((0..20).chain([END]));
        let (said, second) = ask(&engine, prompt(&messages));
        assert_eq!(second.cached_tokens, end / BLOCK_SIZE * BLOCK_SIZE, "{model}");
        // As it was.
        messages.extend(ASKS.iter().chain(said.iter().map(|(token, _)| token)).chain(&[END]));
        let end = messages.len() - 2; // the last token of an answer was never read
        messages.extend((0..20).chain([END]));
        assert_eq!(ask(&engine, prompt(&messages)).1.cached_tokens, end / BLOCK_SIZE * BLOCK_SIZE, "{model}");
    }
}

#[test]
fn states_are_kept_apart_from_steered_ones_and_those_of_other_tenants() {
    let _alone = alone();
    let model = "qwen3-next";
    let (engine, truth) = (start(model, 200, 16), forgetful(model));
    let vector: std::sync::Arc<[f32]> =
        (0..engine.info().hidden_size).map(|i| (i * 37 % 101) as f32 / 20.0 - 2.5).collect();
    let plain = || Conversation::new(1, 0).request();
    let steered = |from: usize| Request {
        steer: vec![Steer {
            layer: 0,
            vector: vector.clone(),
            coefficient: 1.0,
            positions: Positions::Some(std::iter::once(from..from + 3).collect()),
        }],
        ..plain()
    };
    let check = |request: Request, cached: usize| {
        let (said, stats) = ask(&engine, copy(&request));
        assert_eq!((said == ask(&truth, request).0, stats.cached_tokens), (true, cached));
    };
    let last = (plain().prompt.len() - 4) / BLOCK_SIZE * BLOCK_SIZE;
    check(steered(70), 0);
    check(plain(), 0);
    check(plain(), last);
    check(steered(70), 0);
    check(steered(last + 10), last);
    check(Request { tenant: Tenant(7), ..plain() }, 0);
    check(plain(), last);
    // What is captured is computed.
    let capture = Some(CaptureWanted { layers: Layers::All, positions: Positions::All, logits: false, router: false });
    assert_eq!(ask(&engine, Request { capture, ..plain() }).1.cached_tokens, 0);
}

/// Who is cancelled while its prompt is read leaves nothing wrong behind.
#[test]
fn after_cancelled_turns() {
    let _alone = alone();
    for model in ["qwen3-next", "qwen4_exp"] {
        let (engine, truth) = (start(model, 60, 4), forgetful(model));
        let mut conversation = Conversation::new(5, 0);
        for turn in 0..6 {
            let request = conversation.request();
            for told in 0..2 {
                let mut events = engine.submit(Request { max_tokens: Some(500), ..copy(&request) }).unwrap();
                (0..told * 70).for_each(|_| assert!(matches!(events.blocking_recv(), Some(Event::Token(_)))));
            }
            let (said, _) = ask(&engine, copy(&request));
            assert!(said == ask(&truth, request).0, "{model}: turn {turn}");
            conversation.goes_on(&said);
        }
    }
}

/// Many agents over more conversations than there is memory for: every answer is right, nothing is left behind, and
/// memory stays what it was.
fn soak(time: Duration) {
    let _alone = alone();
    for model in ["qwen3-next", "lfm2_moe"] {
        let (engine, truth) = (start(model, 50, 12), forgetful(model));
        let started = Instant::now();
        let of_model = time / 2;
        talk(&engine, &truth, 16, 30, started + of_model / 3);
        let before = resident_bytes();
        let [mut tokens, mut cached] = [0; 2];
        while started.elapsed() < of_model {
            let of_round = talk(&engine, &truth, 16, 30, started + of_model);
            (tokens, cached) = (tokens + of_round[0], cached + of_round[1]);
        }
        let after = resident_bytes();
        let level = |name: &str| engine.metrics().all().find(|metric| metric.0 == name).unwrap().3;
        println!(
            "{model}: {} answers, {cached} of {tokens} tokens cached, {} preemptions, {} of {} snapshots, {} MiB, then \
             {} MiB",
            level("requests_finished_total"),
            level("preemptions_total"),
            level("state_snapshots_kept"),
            level("state_snapshots_total"),
            before >> 20,
            after >> 20
        );
        // Three hundredths, and what an allocator may hold back.
        assert!(after < before + before * 3 / 100 + (8 << 20), "{before} bytes, then {after}");
        assert!(level("state_snapshots_kept") <= 12 && level("kv_blocks_kept") <= 50);
        // The engine publishes after its last step.
        let deadline = Instant::now() + Duration::from_secs(10);
        while level("kv_blocks_used") > 0 {
            assert!(Instant::now() < deadline, "{} blocks are held by nobody", level("kv_blocks_used"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_short_soak() {
    soak(Duration::from_secs(20));
}

/// `cargo test --release --test turns -- --ignored`, or so many seconds: `SOAK_SECONDS=180`.
#[test]
#[ignore = "ten minutes"]
fn a_long_soak() {
    let seconds = std::env::var("SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(600);
    soak(Duration::from_secs(seconds));
}
