//! Sends the requests of one load: from clients that wait for their answers (a closed loop), or at random times whether
//! or not earlier requests have ended (an open loop).
//!
//! In an open loop the time of a request counts from its planned arrival. A generator that waits for a slow server and
//! counts from the actual sending would leave out the wait that it should measure (coordinated omission).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use super::api::{Answered, Api};
use super::prompts::{Prompts, TestPrompt};
use super::report::{FailedRequest, FailureKind, Failures, Level, Spread, Turn};
use super::{Amount, Arrivals};
use crate::kernel::random::Random;

/// Pause of a client after a failure. Without it, a server that refuses at once would get thousands of requests a
/// second.
const PAUSE: Duration = Duration::from_millis(100);

/// Concurrent requests of an open loop. More arrivals wait, and their time runs.
const MAX_UNDER_WAY: usize = 4096;

/// What all requests of a run share.
pub(super) struct Target {
    pub(super) api: Api,
    pub(super) prompts: Prompts,
    pub(super) later: Prompts, // messages of a conversation after the first
    pub(super) turns: usize,
    pub(super) output_tokens: usize,
    pub(super) next: AtomicU64, // request
    pub(super) seed: u64,
}

impl Target {
    fn next_body(&self) -> Bytes {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.api.body(&self.prompts.get(number), self.output_tokens)
    }

    /// The prompt of the next turn of a client whose last turn was answered so, and which it is; of a new conversation
    /// after the last one.
    fn next_turn(&self, before: Option<(usize, TestPrompt, String)>) -> (usize, TestPrompt) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match before {
            Some((turn, prompt, answer)) if turn < self.turns => {
                (turn + 1, prompt.with_turn(&answer, self.later.get(number)))
            }
            _ => (1, self.prompts.get(number)),
        }
    }
}

/// The end of one request.
struct RequestOutcome {
    end: Duration,          // since the level's start
    late: Option<Duration>, // sent, after it was to arrive
    turn: usize,            // of its conversation, from 1 on
    result: std::result::Result<Answered, FailedRequest>,
}

/// Runs one load until its amount is done or `stop` resolves; returns whether it was stopped. `progress` gets what is
/// done, and of how much.
pub(super) async fn measure(
    target: &Arc<Target>,
    load: Arrivals,
    amount: Amount,
    stop: &mut (impl Future<Output = ()> + Unpin),
    progress: &dyn Fn(u64, u64),
) -> (Level, bool) {
    let (sender, mut outcomes) = unbounded_channel();
    let started = Instant::now();
    let mut tasks = JoinSet::new(); // dropped, it ends what is under way
    match load {
        Arrivals::Clients(clients) => {
            let sent = Arc::new(AtomicUsize::new(0));
            for _ in 0..clients {
                tasks.spawn(client(target.clone(), amount, started, sent.clone(), sender.clone()));
            }
        }
        Arrivals::Rate(rate) => {
            tasks.spawn(arrivals(target.clone(), rate, amount, started, sender.clone()));
        }
    }
    drop(sender);
    let mut done = Vec::new();
    loop {
        tokio::select! {
            outcome = outcomes.recv() => match outcome {
                Some(outcome) => done.push(outcome),
                None => return (level(load, done), false),
            },
            () = &mut *stop => return (level(load, done), true),
        }
        match amount {
            Amount::Requests(n) => progress(done.len() as u64, n as u64),
            Amount::Duration(d) => progress(started.elapsed().min(d).as_secs(), d.as_secs()),
        }
    }
}

/// One client, which sends the next request when the last one has ended.
async fn client(
    target: Arc<Target>,
    amount: Amount,
    started: Instant,
    sent: Arc<AtomicUsize>,
    outcomes: UnboundedSender<RequestOutcome>,
) {
    let mut before = None;
    while amount.allows(sent.fetch_add(1, Ordering::Relaxed), started.elapsed()) {
        let (turn, prompt) = target.next_turn(before.take());
        let body = target.api.body(&prompt, target.output_tokens);
        let result = target.api.ask(body, Instant::now()).await;
        let failed = result.is_err();
        before = result.as_ref().ok().map(|answered| (turn, prompt, answered.text.clone()));
        let _ = outcomes.send(RequestOutcome { end: started.elapsed(), late: None, turn, result });
        if failed {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Sends requests at random, independent times, on average `rate` per second (a Poisson process).
async fn arrivals(
    target: Arc<Target>,
    rate: f64,
    amount: Amount,
    started: Instant,
    outcomes: UnboundedSender<RequestOutcome>,
) {
    let slots = Arc::new(Semaphore::new(MAX_UNDER_WAY));
    let mut requests = JoinSet::new();
    for (number, due) in times(target.seed, rate).enumerate() {
        if !amount.allows(number, due) {
            break;
        }
        let body = target.next_body(); // before its time has come
        let planned = started + due;
        tokio::time::sleep_until(planned.into()).await;
        let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (target, outcomes) = (target.clone(), outcomes.clone());
        requests.spawn(async move {
            let late = Some(planned.elapsed());
            let result = target.api.ask(body, planned).await;
            let _ = outcomes.send(RequestOutcome { end: started.elapsed(), late, turn: 1, result });
            drop(slot);
        });
        while requests.try_join_next().is_some() {}
    }
    while requests.join_next().await.is_some() {}
}

/// The times at which requests arrive.
fn times(seed: u64, rate: f64) -> impl Iterator<Item = Duration> {
    let mut random = Random(!seed); // not the prompts' numbers
    let mut seconds = 0.0;
    std::iter::repeat_with(move || {
        seconds -= (1.0 - random.uniform()).ln() / rate;
        Duration::from_secs_f64(seconds)
    })
}

fn level(load: Arrivals, outcomes: Vec<RequestOutcome>) -> Level {
    let seconds = outcomes.iter().map(|outcome| outcome.end).max().unwrap_or_default().as_secs_f64();
    let late = outcomes.iter().filter_map(|outcome| outcome.late).map(ms).collect();
    let (mut failures, mut answers) = (Failures::default(), Vec::new());
    let mut turns = BTreeMap::<usize, Vec<usize>>::new(); // -> their answers
    for outcome in outcomes {
        match outcome.result {
            Ok(answer) if answer.chunks == 0 => {
                failures.add(FailureKind::Empty, 1, "the answer ended without any text")
            }
            Ok(answer) => {
                turns.entry(outcome.turn).or_default().push(answers.len());
                answers.push(answer);
            }
            Err(failure) => failures.add(failure.kind, 1, &failure.message),
        }
    }
    let failures = failures.list();
    let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
    let output: u64 = answers.iter().map(Answered::tokens).sum();
    // A sum over only some of the requests would mislead.
    let prompts: Option<Vec<u64>> = answers.iter().map(|answer| answer.usage.prompt_tokens).collect();
    let cached: Option<Vec<u64>> = answers.iter().map(|answer| answer.usage.cached_tokens).collect();
    let spread = |value: &dyn Fn(&Answered) -> Option<f64>| Spread::of(answers.iter().filter_map(value).collect());
    let of_turn = |(turn, of): (usize, Vec<usize>)| {
        let of = || of.iter().map(|&i| &answers[i]);
        let sum = |count: fn(&Answered) -> Option<u64>| of().map(count).sum::<Option<u64>>();
        let prompts = sum(|answer| answer.usage.prompt_tokens);
        Turn {
            turn,
            completed: of().count(),
            prompt_tokens: prompts.map(|tokens| tokens as f64 / of().count() as f64),
            cached_share: Option::zip(sum(|answer| answer.usage.cached_tokens), prompts)
                .map(|(cached, tokens)| cached as f64 / tokens as f64),
            first_token_ms: Spread::of(of().map(|answer| ms(answer.first)).collect()),
        }
    };
    let turns = turns.into_iter().map(of_turn).collect();
    Level {
        clients: if let Arrivals::Clients(clients) = load { Some(clients) } else { None },
        rate: if let Arrivals::Rate(rate) = load { Some(rate) } else { None },
        seconds,
        completed: answers.len(),
        failed: failures.iter().map(|failed| failed.count).sum(),
        requests_per_s: per_second(answers.len() as f64),
        output_tok_per_s: per_second(output as f64),
        total_tok_per_s: prompts.as_ref().map(|prompts| per_second((prompts.iter().sum::<u64>() + output) as f64)),
        prompt_tokens: prompts.and_then(|prompts| Spread::of(prompts.into_iter().map(|n| n as f64).collect())),
        cached_prompt_tokens: cached.filter(|cached| !cached.is_empty()).map(|cached| cached.iter().sum()),
        output_tokens: spread(&|answer| Some(answer.tokens() as f64)),
        counted_as_chunks: answers.iter().filter(|answer| !answer.is_counted()).count(),
        first_token_ms: spread(&|answer| Some(ms(answer.first))),
        inter_token_ms: spread(&Answered::inter_token_ms),
        gap_ms: Spread::of(answers.iter().flat_map(|answer| answer.gaps_ms.iter().copied()).collect()),
        latency_ms: spread(&|answer| Some(ms(answer.end))),
        sent_late_ms: Spread::of(late),
        turns,
        failures,
    }
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::measure::server::api::TokenCounts;

    #[test]
    fn arrivals_are_a_poisson_process() {
        let n = 20_000;
        let times: Vec<f64> = times(3, 50.0).take(n).map(|t| t.as_secs_f64()).collect();
        let gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.iter().all(|&gap| gap >= 0.0));
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Of an exponential distribution the deviation is the mean, and 1/e of the gaps are longer than it.
        assert!((mean * 50.0 - 1.0).abs() < 0.03, "{mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03);
        let longer = gaps.iter().filter(|&&gap| gap > mean).count() as f64 / gaps.len() as f64;
        assert!((longer - (-1f64).exp()).abs() < 0.02, "{longer}");
        assert!(super::times(3, 50.0).take(9).eq(super::times(3, 50.0).take(9)));
        assert!(super::times(3, 50.0).take(9).ne(super::times(4, 50.0).take(9)));
    }

    fn answered(first: u64, last: u64, tokens: Option<u64>) -> Answered {
        let at = Duration::from_millis;
        let usage = TokenCounts { prompt_tokens: Some(10), completion_tokens: tokens, cached_tokens: Some(4) };
        Answered {
            first: at(first),
            last: at(last),
            end: at(last + 5),
            chunks: 6,
            gaps_ms: vec![1.0, 3.0],
            usage,
            ..Answered::default()
        }
    }

    fn outcome(end: u64, result: std::result::Result<Answered, FailedRequest>) -> RequestOutcome {
        RequestOutcome { end: Duration::from_millis(end), late: None, turn: 1, result }
    }

    #[test]
    fn a_level_sums_up_what_was_answered() {
        let done = vec![
            outcome(1000, Ok(answered(100, 300, Some(11)))),
            outcome(2000, Ok(answered(200, 250, None))),
            outcome(500, Ok(Answered::default())),
            outcome(100, Err(FailedRequest::new(FailureKind::Http(500), "x"))),
        ];
        let level = level(Arrivals::Clients(2), done);
        assert_eq!((level.completed, level.failed, level.seconds), (2, 2, 2.0));
        assert_eq!((level.requests_per_s, level.output_tok_per_s, level.total_tok_per_s), (1.0, 8.5, Some(18.5)));
        let inter = level.inter_token_ms.unwrap();
        assert_eq!((inter.min, inter.max), (10.0, 20.0)); // 50 ms for 5 more chunks, 200 ms for 10 more tokens
        assert_eq!((level.first_token_ms.unwrap().mean, level.latency_ms.unwrap().max), (150.0, 305.0));
        assert_eq!(
            (level.gap_ms.unwrap().samples, level.cached_prompt_tokens, level.counted_as_chunks),
            (4, Some(8), 1)
        );
        assert!(level.sent_late_ms.is_none());
    }

    #[test]
    fn nothing_is_not_a_number() {
        let level = level(Arrivals::Rate(1.0), vec![]);
        assert_eq!((level.requests_per_s, level.completed), (0.0, 0));
        assert!(
            level.first_token_ms.is_none() && level.prompt_tokens.is_none() && level.cached_prompt_tokens.is_none()
        );
    }
}
