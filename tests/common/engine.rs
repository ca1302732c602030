//! Requests to an engine, and their answers.

use std::time::Duration;

use moebius::Result;
use moebius::engine::{Event, Events, FinishReason, Request, RequestStats, SamplingParams, Token};

pub fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| 7 + (i * 37 + seed * 101) % 900).collect()
}

/// `max_tokens` tokens after a prompt, end tokens included.
fn request(prompt: Vec<u32>, max_tokens: usize, sampling: SamplingParams) -> Request {
    Request { prompt, max_tokens: Some(max_tokens), sampling, ignore_eos: true, ..Request::default() }
}

pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Request {
    request(prompt, max_tokens, SamplingParams::default())
}

pub fn seeded(prompt: Vec<u32>, max_tokens: usize, seed: u64) -> Request {
    request(prompt, max_tokens, SamplingParams { temperature: 1.0, seed: Some(seed), ..Default::default() })
}

/// The same request once more.
#[allow(dead_code)] // not by every test binary
pub fn again(request: &Request) -> Request {
    let Request { prompt, max_tokens, sampling, ignore_eos, .. } = request;
    Request {
        prompt: prompt.clone(),
        sampling: sampling.clone(),
        max_tokens: *max_tokens,
        ignore_eos: *ignore_eos,
        ..Request::default()
    }
}

/// The tokens of an answer and how it ended. Panics when nothing comes for a minute.
pub fn read(mut events: Events) -> (Vec<u32>, Result<(FinishReason, RequestStats)>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut tokens = Vec::new();
    runtime.block_on(async {
        loop {
            let event =
                tokio::time::timeout(Duration::from_secs(60), events.recv()).await.expect("an event within a minute");
            match event.expect("a last event") {
                Event::Token(Token { id: token, stats, .. }) => {
                    tokens.push(token);
                    assert_eq!(stats.completion_tokens, tokens.len());
                }
                Event::Captured(_) => {}
                Event::Done(reason, stats) => break (tokens, Ok((reason, stats))),
                Event::Failed(error) => break (tokens, Err(error)),
            }
        }
    })
}
