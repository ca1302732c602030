//! The engine thread: many requests at once, their limits and ends, and what it costs when nobody asks.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::engine::{again, greedy, prompt, read, seeded};
use common::{cache_dir, demo_dir, folder, resident_bytes};
use moebius::backend::batch::{BLOCK_SIZE, Batch};
use moebius::config::EngineConfig;
use moebius::engine::generation_config::GenerationConfig;
use moebius::engine::{self, EngineHandle, Event, FinishReason, Request, Tenant};
use moebius::forward::block_pool::BlockMove;
use moebius::forward::tap::Tap;
use moebius::forward::{Forward, Measure};
use moebius::load::{self, Loaded};
use moebius::model::ModelConfig;
use moebius::text::chat_template::RenderOptions;
use moebius::text::model::TextModel;
use moebius::{Error, Result};
use moebius_cache::format::ExpertCache;

const MODELS: [&str; 2] = ["moe-gqa", "moe-mla"];

/// Tests run one after the other: some look at the whole process, and two engines on two cores only disturb each other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config(max_context: usize) -> EngineConfig {
    EngineConfig {
        cache_dir: Some(cache_dir()),
        threads: Some(2),
        max_context: Some(max_context),
        ..Default::default()
    }
}

/// An engine after `change` was done to what it was loaded from.
fn start_changed(model: &str, max_context: usize, change: impl FnOnce(&mut Loaded)) -> EngineHandle {
    let (folder, config) = (folder(model, &demo_dir(model)), config(max_context));
    let mut loaded = load::load(&folder, &config, &|_| {}).unwrap();
    change(&mut loaded);
    let end_tokens = GenerationConfig::of(&folder.description).eos_ids;
    engine::start_loaded(model, loaded, &config, end_tokens, Instant::now()).unwrap()
}

fn start(model: &str, max_context: usize) -> EngineHandle {
    engine::start(&folder(model, &demo_dir(model)), &config(max_context), &|_| {}).unwrap()
}

/// A whole answer, with its numbers checked.
fn answer(engine: &EngineHandle, request: Request) -> (Vec<u32>, FinishReason) {
    let prompt_tokens = request.prompt.len();
    let (tokens, end) = read(engine.submit(request).unwrap());
    let (reason, stats) = end.unwrap();
    assert_eq!((stats.prompt_tokens, stats.completion_tokens), (prompt_tokens, tokens.len()));
    assert_eq!(stats.decode_bytes > 0, tokens.len() > 1 || reason == FinishReason::Stop && !tokens.is_empty());
    (tokens, reason)
}

/// Each alone, then all at once.
fn check_together(engine: &EngineHandle, requests: &[Request]) {
    let name = &engine.info().model;
    let alone: Vec<_> = requests.iter().map(|r| answer(engine, again(r)).0).collect();
    let together: Vec<_> = requests.iter().map(|r| engine.submit(again(r)).unwrap()).collect();
    for (i, (events, alone)) in together.into_iter().zip(&alone).enumerate() {
        let (tokens, end) = read(events);
        assert_eq!(end.unwrap().0, FinishReason::Length);
        assert_eq!(&tokens, alone, "{name}: request {i} of {}", requests.len());
        assert_eq!(Some(tokens.len()), requests[i].max_tokens);
    }
}

#[test]
fn requests_together_answer_as_each_alone() {
    let _alone = alone();
    for model in MODELS {
        let engine = start(model, 1024);
        // More than run at once, prompts longer than a batch among them.
        let lengths = [1, 70, 5, 600, 64, 128, 3, 200, 63, 17];
        let mut requests = Vec::new();
        for (i, &length) in lengths.iter().enumerate() {
            requests.push(greedy(prompt(length, i as u32), 30));
            requests.push(seeded(prompt(length, i as u32), 30, i as u64));
        }
        check_together(&engine, &requests);
        let texts = [11, 11, 12].map(|seed| answer(&engine, seeded(prompt(40, 1), 30, seed)).0);
        assert!(texts[0] == texts[1] && texts[0] != texts[2], "a seed is a text");
    }
}

#[test]
fn a_small_pool_changes_no_text() {
    let _alone = alone();
    for model in MODELS {
        // Room for one whole context: the five need 21 blocks.
        let engine = start_changed(model, 384, |loaded| loaded.kv_blocks = 384 / BLOCK_SIZE);
        let mut requests: Vec<_> = (0..4).map(|i| seeded(prompt(90 + i, i as u32), 150, i as u64)).collect();
        requests.push(greedy(prompt(300, 9), 60));
        check_together(&engine, &requests);
    }
}

#[test]
fn a_dropped_receiver_frees_its_blocks() {
    let _alone = alone();
    let engine = start_changed("moe-gqa", 4096, |loaded| loaded.kv_blocks = 4096 / BLOCK_SIZE);
    // Without an end each of these would take some four thousand steps.
    for i in 0..40 {
        let mut events = engine.submit(greedy(prompt(500, i), 4096)).unwrap();
        let waiting = engine.submit(greedy(prompt(500, i), 4096)).unwrap();
        assert!(matches!(events.blocking_recv(), Some(Event::Token(..))));
        drop(waiting);
    }
    let started = Instant::now();
    let (tokens, reason) = answer(&engine, greedy(prompt(4095, 1), 10));
    assert_eq!((tokens.len(), reason), (1, FinishReason::Length), "the whole pool, after {:?}", started.elapsed());
}

#[test]
fn limits_end_an_answer() {
    let _alone = alone();
    let engine = start("moe-mla", 256);
    let whole = answer(&engine, greedy(prompt(200, 1), 1000));
    assert_eq!((whole.0.len(), whole.1), (56, FinishReason::Length), "the context ends");
    assert_eq!(answer(&engine, Request { max_tokens: None, ..greedy(prompt(200, 1), 0) }), whole);
    for n in [0, 1, 2, 55, 56] {
        assert_eq!(answer(&engine, greedy(prompt(200, 1), n)), (whole.0[..n].to_vec(), FinishReason::Length));
    }
    assert_eq!(answer(&engine, greedy(prompt(255, 1), usize::MAX)).0.len(), 1);
    for length in [0, 256, 257] {
        assert!(matches!(engine.submit(greedy(prompt(length, 1), 1)), Err(Error::Invalid(_))), "{length} tokens");
    }
}

#[test]
fn an_end_token_ends_and_is_not_told() {
    let _alone = alone();
    let text = TextModel::open(demo_dir("moe-gqa").to_str().unwrap(), &config(512), &|_| {}).unwrap();
    let prompt = text.chat_prompt(
        &[serde_json::json!({"role": "user", "content": "What is 2+2?"})],
        &RenderOptions { add_generation_prompt: true, ..Default::default() },
    );
    let ends = GenerationConfig::of(&folder("moe-gqa", &demo_dir("moe-gqa")).description).eos_ids;
    let request = greedy(prompt.unwrap(), 100);
    let (all, reason) = answer(text.engine(), again(&request));
    assert_eq!((all.len(), reason), (100, FinishReason::Length));
    let end = all.iter().position(|t| ends.contains(t)).expect("the model ends its answer");
    assert!(end > 0);
    let (tokens, reason) = answer(text.engine(), Request { ignore_eos: false, ..request });
    assert_eq!((&tokens[..], reason), (&all[..end], FinishReason::Stop));
}

#[test]
fn a_token_outside_the_vocabulary_fails_alone() {
    let _alone = alone();
    let engine = start("moe-gqa", 256);
    let (bad, good) =
        (engine.submit(greedy(vec![5, 1 << 30], 5)).unwrap(), engine.submit(greedy(prompt(9, 1), 5)).unwrap());
    assert!(matches!(read(bad), (tokens, Err(Error::Invalid(_))) if tokens.is_empty()));
    assert_eq!(read(good).0.len(), 5);
}

/// A model that fails, or that meets a bug.
struct Broken(Box<dyn Forward>, Option<&'static str>);

impl Forward for Broken {
    fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()> {
        match self.1 {
            Some(bug) => panic!("{bug}"),
            None if batch.len() > 1 => Err(Error::Model("an expert is damaged".into())),
            None => self.0.forward(batch, tap),
        }
    }

    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &std::sync::Arc<[f32]>>) -> Result<()> {
        self.0.hold(vectors)
    }

    fn save_state(&mut self, slot: usize, snapshot: usize) {
        self.0.save_state(slot, snapshot);
    }

    fn restore_state(&mut self, slot: usize, snapshot: usize) {
        self.0.restore_state(slot, snapshot);
    }

    fn move_block(&mut self, moved: BlockMove) {
        self.0.move_block(moved);
    }

    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]> {
        self.0.logits(rows)
    }

    fn max_logit_rows(&self) -> usize {
        self.0.max_logit_rows()
    }

    fn shortlists(
        &mut self,
        rows: &[usize],
        inverse_temperatures: &[f32],
        out: &mut Vec<moebius::backend::tensor::Shortlist>,
    ) -> moebius::Result<()> {
        self.0.shortlists(rows, inverse_temperatures, out)
    }

    fn whole_rows(&mut self) -> moebius::Result<&mut [f32]> {
        self.0.whole_rows()
    }

    fn enter_thread(&self) -> Result<()> {
        self.0.enter_thread()
    }
}

impl Measure for Broken {
    fn resident_bytes_per_token(&self) -> u64 {
        self.0.resident_bytes_per_token()
    }

    fn traffic(&self) -> moebius::experts::Traffic {
        self.0.traffic()
    }

    fn resident_experts(&self) -> usize {
        self.0.resident_experts()
    }

    fn rates(&self) -> moebius::Result<Option<moebius::backend::Rates>> {
        self.0.rates()
    }

    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.0.foresight_gain(tokens)
    }

    fn choose(&mut self, ids: &[i32], guesses: &[i32], tokens: usize) -> Result<()> {
        self.0.choose(ids, guesses, tokens)
    }

    fn profile(&mut self, batch: &Batch) -> moebius::Result<Vec<moebius::backend::OpTime>> {
        self.0.profile(batch)
    }
}

/// The same engine with its model broken.
fn start_broken(bug: Option<&'static str>) -> EngineHandle {
    let (folder, config) = (folder("broken", &demo_dir("moe-gqa")), config(256));
    let mut loaded = load::load(&folder, &config, &|_| {}).unwrap();
    loaded.model = Box::new(Broken(loaded.model, bug));
    let end_tokens = GenerationConfig::of(&folder.description).eos_ids;
    engine::start_loaded("broken", loaded, &config, end_tokens, Instant::now()).unwrap()
}

#[test]
fn a_failed_step_fails_who_was_in_it() {
    let _alone = alone();
    let engine = start_broken(None);
    for _ in 0..3 {
        let (tokens, end) = read(engine.submit(greedy(prompt(9, 1), 5)).unwrap());
        assert!(tokens.is_empty() && end.unwrap_err().to_string().contains("an expert is damaged"));
        assert_eq!(answer(&engine, greedy(prompt(1, 1), 5)).0.len(), 5, "the engine lives on");
    }
}

#[test]
fn a_damaged_expert_is_refused_whenever_it_is_asked_for() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let config = EngineConfig { cache_dir: Some(dir.path().into()), ..config(256) };
    let load = || load::load(&folder("damaged", &demo_dir("moe-gqa")), &config, &|_| {}).unwrap();
    drop(load());
    let mut files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let path = files.find(|path| path.extension().is_some_and(|e| e == "moebius")).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    for layer in &ExpertCache::open(&path).unwrap().header().layers {
        bytes[layer.offset as usize..][..layer.bytes as usize].iter_mut().step_by(97).for_each(|b| *b ^= 1);
    }
    std::fs::write(&path, bytes).unwrap();
    let engine = engine::start_loaded("damaged", load(), &config, Vec::new(), Instant::now()).unwrap();
    for _ in 0..3 {
        let (tokens, end) = read(engine.submit(greedy(prompt(9, 1), 5)).unwrap());
        assert!(tokens.is_empty() && end.unwrap_err().to_string().contains(path.to_str().unwrap()));
    }
}

#[test]
fn a_bug_ends_the_engine_and_everyone_hears_of_it() {
    let _alone = alone();
    let engine = start_broken(Some("a test's panic"));
    assert!(engine.is_running());
    let waiting: Vec<_> = (0..20).filter_map(|i| engine.submit(greedy(prompt(9, i), 5)).ok()).collect();
    assert!(!waiting.is_empty());
    for events in waiting {
        let Err(Error::Stopped(text)) = read(events).1 else { panic!("not stopped") };
        assert_eq!(text, "a bug: a test's panic");
    }
    assert!(matches!(engine.submit(greedy(prompt(9, 1), 5)), Err(Error::Stopped(_))));
    assert!(!engine.is_running());
}

/// Threads of this process that engines own.
fn engine_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "engine" || name.starts_with("worker-")).count()
}

#[test]
fn the_engine_stops_with_its_last_handle() {
    let _alone = alone();
    let engine = start("moe-gqa", 512);
    answer(&engine, greedy(prompt(9, 1), 2));
    assert!(engine_threads() >= 2);
    let second = engine.clone();
    drop(engine);
    let events = second.submit(greedy(prompt(9, 1), 300)).unwrap();
    drop(second);
    assert_eq!(read(events).0.len(), 300, "what was asked for is still answered");
    let deadline = Instant::now() + Duration::from_secs(20);
    while engine_threads() > 0 {
        assert!(Instant::now() < deadline, "{} threads of engines are left", engine_threads());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Time that this process has run on any core, in ticks of 10 ms.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..].split_whitespace().collect();
    fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
}

#[test]
fn an_idle_engine_sleeps() {
    let _alone = alone();
    let engine = start("moe-gqa", 512);
    answer(&engine, greedy(prompt(9, 1), 20));
    std::thread::sleep(Duration::from_millis(300));
    let before = cpu_ticks();
    std::thread::sleep(Duration::from_millis(1000));
    let used = cpu_ticks() - before;
    assert!(used <= 5, "{used} ticks of 10 ms in an idle second");
}

#[test]
fn requests_are_refused_while_memory_is_short() {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    static AVAILABLE: AtomicU64 = AtomicU64::new(u64::MAX);
    let _alone = alone();
    let engine = start_changed("moe-gqa", 512, |loaded| loaded.available_bytes = || AVAILABLE.load(Relaxed));
    let mut running = engine.submit(greedy(prompt(9, 1), 300)).unwrap();
    assert!(matches!(running.blocking_recv(), Some(Event::Token(..))));
    AVAILABLE.store(100 << 20, Relaxed);
    let (tokens, end) = read(engine.submit(greedy(prompt(9, 2), 5)).unwrap());
    let error = end.unwrap_err();
    assert!(tokens.is_empty() && matches!(error, Error::Resources(_)), "{error}");
    assert!(error.to_string().contains("100 MiB") && error.to_string().contains("close other programs"), "{error}");
    // What ran goes on, and when there is memory again so does the rest.
    let mut rest = 0;
    while let Some(event) = running.blocking_recv() {
        match event {
            Event::Token(..) => rest += 1,
            Event::Captured(_) => {}
            Event::Done(..) => break,
            Event::Failed(error) => panic!("{error}"),
        }
    }
    assert_eq!(rest, 299);
    AVAILABLE.store(u64::MAX, Relaxed);
    assert_eq!(answer(&engine, greedy(prompt(9, 2), 5)).0.len(), 5);
}

#[test]
fn memory_stays_after_many_requests() {
    let _alone = alone();
    let engine = start("moe-gqa", 512);
    let ask = |i: u64| answer(&engine, seeded(prompt(100 + i as usize % 50, i as u32), 8, i));
    (0..40).for_each(|i| drop(ask(i)));
    let before = resident_bytes();
    (0..200).for_each(|i| drop(ask(i)));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 4 << 20, "{} KiB more after 200 requests", grown >> 10);
}

/// The tokens of an answer, and how many of the prompt's were in the cache.
fn answer_reusing(engine: &EngineHandle, request: Request) -> (Vec<u32>, usize) {
    let (tokens, end) = read(engine.submit(request).unwrap());
    (tokens, end.unwrap().1.cached_tokens)
}

#[test]
fn what_was_read_before_is_not_read_again_and_no_text_changes() {
    let _alone = alone();
    for model in MODELS {
        let plain = EngineConfig { prefix_cache: false, ..config(512) };
        let plain = engine::start(&folder(model, &demo_dir(model)), &plain, &|_| {}).unwrap();
        let engine = start(model, 512);
        // Turns of a conversation, each with the one before, a retry, and another that begins alike.
        let mut text = prompt(150, 1);
        for turn in 0..4 {
            let (want, _) = answer_reusing(&plain, seeded(text.clone(), 40, turn));
            for attempt in 0..2 {
                let (tokens, cached) = answer_reusing(&engine, seeded(text.clone(), 40, turn));
                assert_eq!(tokens, want, "{model}, turn {turn}");
                let known = if turn == 0 && attempt == 0 {
                    0
                } else {
                    (text.len() - 1 - if attempt == 0 { 11 } else { 0 }) / 64 * 64
                };
                assert!(cached >= known, "{model}, turn {turn}: {cached} of {}", text.len());
            }
            text.extend(want.into_iter().chain(prompt(10, 50 + turn as u32)));
        }
        let branch: Vec<u32> = text[..130].iter().copied().chain(prompt(60, 9)).collect();
        let (tokens, cached) = answer_reusing(&engine, greedy(branch.clone(), 30));
        assert_eq!((tokens, cached), (answer_reusing(&plain, greedy(branch, 30)).0, 128));
        let metrics = |name: &str| engine.metrics().all().find(|m| m.0 == name).unwrap().3;
        assert!(metrics("prompt_tokens_reused_total") > metrics("prompt_tokens_computed_total"));
        assert_eq!(
            (metrics("requests_finished_total"), metrics("requests_waiting"), metrics("kv_blocks_used")),
            (9, 0, 0)
        );
    }
}

#[test]
fn tenants_find_only_what_they_read_themselves() {
    let _alone = alone();
    // Too few blocks for all: whoever gives way must not come back to the blocks of another.
    let engine = start_changed("moe-gqa", 512, |loaded| loaded.kv_blocks = 12);
    let of = |tenant: u32| Request { tenant: Tenant(tenant), ..greedy(prompt(200, 1), 30) };
    let (want, cached) = answer_reusing(&engine, of(1));
    assert_eq!(cached, 0);
    assert_eq!(answer_reusing(&engine, of(1)), (want.clone(), 192), "her own");
    assert_eq!(answer_reusing(&engine, of(2)), (want.clone(), 0), "as if nobody had asked before");
    assert_eq!(answer_reusing(&engine, of(0)), (want.clone(), 0));
    assert_eq!(answer_reusing(&engine, of(2)).1, 192);

    let together: Vec<_> =
        [3, 4, 3, 4].map(|tenant| engine.submit(of(tenant)).unwrap()).into_iter().map(read).collect();
    let cached: Vec<usize> = together.iter().map(|(_, end)| end.as_ref().unwrap().1.cached_tokens).collect();
    assert!(together.iter().all(|(tokens, _)| *tokens == want));
    assert_eq!(&cached[..2], [0, 0], "the first of each tenant computes, also beside the other's");
}

#[test]
fn answers_go_on_while_a_long_prompt_is_read() {
    let _alone = alone();
    let engine = engine::start(
        &folder("moe-gqa", &demo_dir("moe-gqa")),
        &EngineConfig { max_gap: Duration::ZERO, ..config(2048) },
        &|_| {},
    )
    .unwrap();
    let mut running = engine.submit(greedy(prompt(9, 1), 1000)).unwrap();
    assert!(matches!(running.blocking_recv(), Some(Event::Token(..))));
    let mut long = engine.submit(greedy(prompt(1900, 2), 1)).unwrap();
    assert!(matches!(long.blocking_recv(), Some(Event::Token(..))));
    let mut tokens = 1;
    while let Ok(Event::Token(..)) = running.try_recv() {
        tokens += 1;
    }
    assert!(tokens >= 1900 / 32, "{tokens} tokens while the prompt was read in parts of at most 32");
}

#[test]
fn a_full_queue_is_told() {
    let _alone = alone();
    let config = EngineConfig { max_sequences: 1, max_queue: 2, ..config(512) };
    let engine = engine::start(&folder("moe-gqa", &demo_dir("moe-gqa")), &config, &|_| {}).unwrap();
    let mut running = engine.submit(greedy(prompt(9, 1), 400)).unwrap();
    assert!(matches!(running.blocking_recv(), Some(Event::Token(..))));
    let waiting: Vec<_> = (0..2).map(|i| engine.submit(greedy(prompt(9, i), 1)).unwrap()).collect();
    let error = engine.submit(greedy(prompt(9, 1), 1)).unwrap_err();
    assert!(matches!(error, Error::Busy(_)) && error.to_string().contains("--max-queue"), "{error}");
    drop(running);
    for events in waiting {
        assert_eq!(read(events).0.len(), 1);
    }
    assert_eq!(answer(&engine, greedy(prompt(9, 1), 1)).0.len(), 1);
}

#[test]
fn a_panicking_grammar_fails_alone() {
    #[derive(Debug)]
    struct Broken;
    impl moebius::engine::Constraint for Broken {
        fn mask(&mut self, _: &mut [f32]) -> moebius::Result<()> {
            panic!("broken on purpose")
        }
        fn accept(&mut self, _: u32) -> moebius::Result<()> {
            Ok(())
        }
        fn is_complete(&mut self) -> bool {
            false
        }
        fn fork(&self) -> Box<dyn moebius::engine::Constraint> {
            Box::new(Self)
        }
    }
    let _alone = alone();
    let engine = start("moe-gqa", 512);
    let alone = answer(&engine, greedy(prompt(9, 1), 30));
    let running = engine.submit(greedy(prompt(9, 1), 30)).unwrap();
    let broken = engine.submit(Request { constraint: Some(Box::new(Broken)), ..greedy(prompt(9, 2), 30) }).unwrap();
    assert!(read(broken).1.unwrap_err().to_string().contains("broken on purpose"));
    assert_eq!(read(running).0, alone.0);
}
