//! `bench serve` against a server whose times are known, and against our own: what it says is what happened.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod command;
mod fake;
#[path = "../common/tls.rs"]
mod tls;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake::{Fake, Reply, chat};
use moebius::cli::measure::server::{
    Amount, Arrivals, Endpoint, FailureKind, PromptSource, ServingOptions, ServingReport, run,
};
use serde_json::json;

fn options(url: String) -> ServingOptions {
    ServingOptions {
        url,
        api_key: None,
        model: None,
        endpoint: Endpoint::Chat,
        loads: vec![Arrivals::Clients(1)],
        amount: Some(Amount::Requests(8)),
        prompts: PromptSource::Random { tokens: 101, shared: 0 },
        turns: 1,
        turn_tokens: 20,
        output_tokens: 6,
        seed: 1,
        warmup: 0,
        timeout: Duration::from_secs(20),
    }
}

fn measure(options: &ServingOptions) -> ServingReport {
    run(options, &|_| {}).unwrap()
}

fn refusal(options: &ServingOptions) -> String {
    run(options, &|_| {}).unwrap_err().to_string()
}

/// What was slept is a lower bound; how late a busy machine wakes up is known only for the luckiest request.
fn assert_about(least: f64, best: f64, slack: f64) {
    assert!((least - 0.5..least + slack).contains(&best), "{best} ms instead of {least}");
}

#[test]
fn known_delays_are_what_is_measured() {
    let server = Fake::new(|body, _| Reply::Events(chat(body, 60, 20)));
    let loads = vec![Arrivals::Clients(1), Arrivals::Clients(4)];
    let report =
        measure(&ServingOptions { loads, warmup: 1, amount: Some(Amount::Requests(12)), ..options(server.url()) });
    assert_eq!((report.model.as_str(), report.levels.len(), report.completed()), ("fake-model", 2, 24));
    assert!(report.notes.is_empty() && !report.interrupted, "{report}");
    for level in &report.levels {
        assert_about(60.0, level.first_token_ms.as_ref().unwrap().min, 40.0);
        assert_about(20.0, level.inter_token_ms.as_ref().unwrap().min, 15.0);
        assert_about(160.0, level.latency_ms.as_ref().unwrap().min, 80.0);
        let gaps = level.gap_ms.as_ref().unwrap();
        assert_eq!(gaps.samples, 12 * 5);
        assert!(gaps.max >= gaps.p99 && gaps.p99 >= gaps.p50 && gaps.p50 > 15.0);
        assert_eq!((level.completed, level.failed), (12, 0));
        // Two tokens a word and seven besides: 47 words.
        let prompt = level.prompt_tokens.as_ref().unwrap();
        assert_eq!((prompt.min, prompt.max, level.cached_prompt_tokens), (101.0, 101.0, Some(48)));
        let output = level.output_tokens.as_ref().unwrap();
        assert_eq!((output.min, output.max, level.counted_as_chunks), (6.0, 6.0, 0));
        assert!((level.output_tok_per_s * level.seconds - 72.0).abs() < 1e-6);
        assert!((level.requests_per_s * level.seconds - 12.0).abs() < 1e-6);
        assert!((level.total_tok_per_s.unwrap() * level.seconds - 12.0 * 107.0).abs() < 1e-6);
        assert!(level.sent_late_ms.is_none());
    }
    assert!(report.levels[0].seconds > 12.0 * 0.16 && report.levels[1].seconds < report.levels[0].seconds);
    assert_eq!(server.log.most_under_way.load(Ordering::Relaxed), 4);
    // One connection a client, used again.
    assert_eq!(server.log.connections.load(Ordering::Relaxed), 4);

    let bodies = server.bodies();
    assert_eq!(bodies.len(), 26); // one to warm up before each load
    let prompts: HashSet<String> = bodies.iter().map(|body| body["messages"].to_string()).collect();
    assert_eq!(prompts.len(), 26);
    for body in &bodies {
        assert_eq!(
            (&body["model"], &body["stream"], &body["max_tokens"]),
            (&json!("fake-model"), &json!(true), &json!(6))
        );
        assert_eq!((&body["ignore_eos"], &body["stream_options"]), (&json!(true), &json!({"include_usage": true})));
    }
    let text = report.to_string();
    assert!(text.contains("4 clients") && text.contains("few samples") && text.contains("4.0% cached"), "{text}");
}

#[test]
fn turns_send_what_was_answered_and_are_told_apart() {
    let server = Fake::new(|body, _| {
        let turn = body["messages"].as_array().unwrap().len() as u64 / 2;
        Reply::Events(chat(body, 10 + 40 * turn, 1))
    });
    let report =
        measure(&ServingOptions { turns: 3, amount: None, loads: vec![Arrivals::Clients(2)], ..options(server.url()) });
    let level = &report.levels[0];
    let turns: Vec<_> = level.turns.iter().map(|turn| (turn.turn, turn.completed)).collect();
    assert_eq!((level.completed, turns), (12, vec![(1, 4), (2, 4), (3, 4)]));
    let first: Vec<f64> = level.turns.iter().map(|turn| turn.first_token_ms.as_ref().unwrap().min).collect();
    assert!(first[0] >= 9.5 && first[1] >= 49.5 && first[2] >= 89.5, "{first:?}");
    let cached: Vec<f64> = level.turns.iter().map(|turn| turn.cached_share.unwrap()).collect();
    assert!(cached.iter().all(|share| (share - 4.0 / 101.0).abs() < 0.01), "{cached:?}");
    let bodies = server.bodies();
    for body in bodies.iter().filter(|body| body["messages"].as_array().unwrap().len() > 1) {
        let messages = body["messages"].as_array().unwrap();
        assert_eq!((&messages[1]["role"], &messages[1]["content"]), (&json!("assistant"), &json!("xxxxxx")));
        let before = &messages[..messages.len() - 2];
        assert!(bodies.iter().any(|body| body["messages"].as_array().unwrap() == before), "{body}");
        let words = messages[2]["content"].as_str().unwrap().split(' ').count();
        assert!((6..8).contains(&words), "20 tokens are {words} words");
    }
    let text = report.to_string();
    assert!(
        text.contains("3 turns, prompts of 101 tokens, later messages of 20") && text.contains("answers"),
        "{text}"
    );
    let completions = ServingOptions { turns: 2, endpoint: Endpoint::Completions, ..options(server.url()) };
    assert!(refusal(&completions).contains("use --endpoint chat"));
}

#[test]
fn failures_are_counted_by_kind_and_measured_by_none() {
    let server = Fake::new(|body, number| {
        let text = || (5, "data: {\"choices\": [{\"delta\": {\"content\": \"x\"}}]}\n\n".to_string());
        match number % 8 {
            2 => Reply::Json(503, json!({"error": {"message": "too busy"}})),
            3 => Reply::Cut(vec![text()]),
            4 => Reply::Events(vec![text()]), // an end without a reason
            5 => Reply::Events(vec![text(), (0, "data: {\"choices\"\n\n".into())]),
            6 => Reply::Events(vec![text(), (0, "data: {\"error\": {\"message\": \"out of memory\"}}\n\n".into())]),
            7 => Reply::Events(vec![(60_000, String::new())]),
            0 if number > 0 => Reply::Events(vec![(0, "data: [DONE]\n\n".into())]),
            _ => Reply::Events(chat(body, 5, 1)),
        }
    });
    let timeout = Duration::from_secs(1);
    let report = measure(&ServingOptions {
        timeout,
        amount: Some(Amount::Requests(14)),
        loads: vec![Arrivals::Clients(2)],
        ..options(server.url())
    });
    let level = &report.levels[0];
    let count = |kind| level.failures.iter().find(|failed| failed.kind == kind).map_or(0, |failed| failed.count);
    assert_eq!((level.completed, level.failed), (1, 13), "{report}");
    assert_eq!(
        (count(FailureKind::Http(503)), count(FailureKind::Broken), count(FailureKind::Malformed)),
        (2, 4, 2),
        "{report}"
    );
    assert_eq!(
        (count(FailureKind::Reported), count(FailureKind::Timeout), count(FailureKind::Empty)),
        (2, 2, 1),
        "{report}"
    );
    assert_eq!((level.latency_ms.as_ref().unwrap().samples, level.output_tok_per_s * level.seconds), (1, 6.0));
    let text = report.to_string();
    assert!(text.contains("2 x HTTP 503: too busy") && text.contains("error in the stream: out of memory"), "{text}");
    assert_eq!(report.failures()[0].count, 4);
}

#[test]
fn refused_fields_are_left_out_and_that_is_said() {
    let server = Fake::new(|body, _| {
        let refused = ["ignore_eos", "stream_options"].into_iter().find(|name| body.get(name).is_some());
        match refused {
            Some(name) => Reply::Json(
                400,
                json!({"error": {"message": format!("Unrecognized request argument supplied: {name}")}}),
            ),
            None if body.get("max_tokens").is_some() => {
                Reply::Json(400, json!({"error": {"message": "Use 'max_completion_tokens' instead."}}))
            }
            None => Reply::Events(chat(body, 1, 1)),
        }
    });
    let report = measure(&options(server.url()));
    let notes = report.notes.join("\n");
    for word in
        ["ignore_eos", "stream_options", "max_completion_tokens", "each word counts as one", "each chunk counts as one"]
    {
        assert!(notes.contains(word), "{notes}");
    }
    let level = &report.levels[0];
    assert_eq!((level.completed, level.failed, level.counted_as_chunks), (8, 0, 8));
    assert_eq!(level.output_tokens.as_ref().unwrap().max, 6.0);
    assert!(level.prompt_tokens.is_none() && level.total_tok_per_s.is_none() && level.cached_prompt_tokens.is_none());
    assert_eq!(server.bodies()[0]["messages"][0]["content"].as_str().unwrap().split(' ').count(), 101);
}

#[test]
fn times_at_a_rate_count_from_the_planned_arrival() {
    // One at a time, 40 ms each, while 50 a second arrive: the queue grows by 20 ms with each request.
    let free = Arc::new(Mutex::new(std::time::Instant::now()));
    let server = Fake::new(move |body, number| {
        if number < 2 {
            return Reply::Events(chat(body, 0, 0));
        }
        let mut free = free.lock().unwrap();
        let now = std::time::Instant::now();
        *free = (*free).max(now) + Duration::from_millis(40);
        Reply::Events(chat(body, (*free - now).as_millis() as u64, 0))
    });
    let report = measure(&ServingOptions {
        loads: vec![Arrivals::Rate(50.0)],
        amount: Some(Amount::Requests(40)),
        ..options(server.url())
    });
    let level = &report.levels[0];
    assert_eq!((level.completed, level.rate, level.clients), (40, Some(50.0), None));
    // Requests are sent when they are due, not when the server has time.
    let seen = server.log.seen.lock().unwrap();
    let sent_within = (seen[41].at - seen[2].at).as_secs_f64();
    assert!(sent_within < 1.3, "{sent_within}");
    let (first, latency) = (level.first_token_ms.as_ref().unwrap(), level.latency_ms.as_ref().unwrap());
    assert!(first.max > 400.0 && first.min < 150.0, "{report}");
    assert!(latency.max >= first.max && level.seconds > 1.6, "{report}");
    assert!(level.sent_late_ms.as_ref().unwrap().min >= 0.0);
}

#[test]
fn a_duration_ends_a_load() {
    let server = Fake::new(|body, _| Reply::Events(chat(body, 10, 1)));
    for load in [Arrivals::Clients(2), Arrivals::Rate(40.0)] {
        let report = measure(&ServingOptions {
            loads: vec![load],
            amount: Some(Amount::Duration(Duration::from_millis(600))),
            ..options(server.url())
        });
        let level = &report.levels[0];
        assert!((5..=100).contains(&level.completed) && level.failed == 0, "{report}");
        assert!((0.3..5.0).contains(&level.seconds), "{report}");
    }
}

#[test]
fn prompts_of_a_file_are_asked_in_turn() {
    let server = Fake::new(|body, _| Reply::Events(chat(body, 1, 0)));
    let text = "What is 2+2?\n{\"prompt\": \"b\"}\n\"c d\"\n".to_string();
    for endpoint in Endpoint::ALL {
        let before = server.bodies().len();
        let prompts = PromptSource::Lines(text.clone());
        let report =
            measure(&ServingOptions { prompts, endpoint, amount: Some(Amount::Requests(4)), ..options(server.url()) });
        assert!(report.notes[0].contains("3 prompts for 4 requests"), "{report}");
        let bodies = server.bodies().split_off(before);
        let texts: Vec<_> = bodies
            .iter()
            .map(|body| body["prompt"].as_str().or(body["messages"][0]["content"].as_str()).unwrap())
            .collect();
        assert_eq!(texts, ["What is 2+2?", "b", "c d", "What is 2+2?"]);
        let path = if endpoint == Endpoint::Chat { "POST /v1/chat/completions " } else { "POST /v1/completions " };
        assert!(server.log.seen.lock().unwrap().last().unwrap().head.starts_with(path));
    }
    assert!(
        refusal(&ServingOptions { prompts: PromptSource::Lines("\n".into()), ..options(server.url()) })
            .contains("--prompts has no lines")
    );
}

#[test]
fn a_shared_prefix_begins_all_prompts() {
    let server = Fake::new(|body, _| Reply::Events(chat(body, 1, 0)));
    measure(&ServingOptions { prompts: PromptSource::Random { tokens: 207, shared: 107 }, ..options(server.url()) });
    let texts: Vec<String> =
        server.bodies().iter().map(|body| body["messages"][0]["content"].as_str().unwrap().to_string()).collect();
    let words = |i: usize| texts[i].split(' ').collect::<Vec<_>>();
    let common = words(0).into_iter().zip(words(1)).take_while(|(a, b)| a == b).count();
    assert!((50..56).contains(&common) && words(0).len() == 100, "{common} of {}", words(0).len());
}

#[test]
fn a_key_is_sent_and_not_shown() {
    let server = Fake::new(|body, _| Reply::Events(chat(body, 1, 0)));
    let report = measure(&ServingOptions { api_key: Some("secret".into()), ..options(server.url()) });
    let seen = server.log.seen.lock().unwrap();
    assert!(seen.iter().all(|seen| seen.head.to_lowercase().contains("authorization: bearer secret\r\n")));
    assert!(!serde_json::to_string(&report).unwrap().contains("secret"));
}

#[test]
fn a_server_that_cannot_be_measured_is_refused_with_a_remedy() {
    let answers = |status: u16, body: serde_json::Value| Fake::new(move |_, _| Reply::Json(status, body.clone()));
    let server = answers(401, json!({"error": {"message": "no key"}}));
    assert!(refusal(&options(server.url())).contains("HTTP 401: no key): give the server's key"));
    let server = answers(404, json!({"error": {"message": "no such model"}}));
    assert!(refusal(&options(server.url())).contains("no such model): check --url"));
    let server = answers(400, json!({"detail": "context is 64 tokens"}));
    assert!(refusal(&options(server.url())).contains("context is 64 tokens): check --prompt-tokens"));
    let server = answers(200, json!({"choices": []}));
    assert!(refusal(&options(server.url())).contains("one JSON object instead of a stream"));
    let server = Fake::new(|_, _| Reply::Events(vec![(0, "data: ".to_string() + &"x".repeat(2 << 20))]));
    assert!(refusal(&options(server.url())).contains("an event of more than 1024 KiB"));
    // Nobody listens there any more.
    let url = server.url();
    drop(server);
    assert!(refusal(&options(url)).contains("start the server"));
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let base = || options("http://127.0.0.1:1/v1".into());
    let random = |tokens, shared| PromptSource::Random { tokens, shared };
    for (options, want) in [
        (ServingOptions { loads: vec![Arrivals::Clients(0)], ..base() }, "--concurrency is 0"),
        (ServingOptions { loads: vec![Arrivals::Clients(usize::MAX)], ..base() }, "--concurrency"),
        (ServingOptions { loads: vec![Arrivals::Rate(0.0)], ..base() }, "--rate is 0"),
        (ServingOptions { loads: vec![Arrivals::Rate(f64::NAN)], ..base() }, "--rate is NaN"),
        (ServingOptions { loads: vec![Arrivals::Rate(f64::INFINITY)], ..base() }, "--rate is inf"),
        (ServingOptions { amount: Some(Amount::Requests(0)), ..base() }, "--requests is 0"),
        (ServingOptions { amount: Some(Amount::Duration(Duration::ZERO)), ..base() }, "--duration"),
        (ServingOptions { timeout: Duration::MAX, ..base() }, "--timeout"),
        (ServingOptions { prompts: random(0, 0), ..base() }, "--prompt-tokens is 0"),
        (ServingOptions { prompts: random(usize::MAX, 0), ..base() }, "--prompt-tokens"),
        (ServingOptions { prompts: random(10, 11), ..base() }, "--shared-prefix-tokens is 11"),
        (ServingOptions { output_tokens: 0, ..base() }, "--output-tokens is 0"),
        (ServingOptions { warmup: usize::MAX, ..base() }, "--warmup"),
    ] {
        let refusal = refusal(&options);
        assert!(refusal.contains(want) && refusal.contains("give"), "{refusal}");
    }
}
