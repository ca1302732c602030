//! How fast a server is for its users: throughput, time to first token and inter-token latency of any OpenAI-compatible
//! URL, under load from clients or at a rate of arrivals. It knows no engine, so it measures all servers alike.
//!
//! ```text
//! client     connects
//! sse        reads streams of events
//! report     the results
//! api        sends and times one request
//! prompts    the content of requests
//! run        sends the requests of one load
//! ```

mod api;
mod client;
mod prompts;
mod report;
mod run;
pub mod sse;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Error, Result};
use api::{Answered, Api, ExactFields, cannot};
use client::HttpClient;
use prompts::{PromptLength, Prompts, TestPrompt};
pub use report::{Failed, FailureKind, Level, ServingReport, Spread, Turn};
use run::Target;

/// Upper bounds of clients, requests per load, tokens and times, so that a typing error does not fill memory.
const MAX_CLIENTS: usize = 4096;
const MAX_REQUESTS: usize = 1_000_000;
const MAX_TOKENS: usize = 4_000_000;
const MAX_TURNS: usize = 1000;
const MAX_DURATION: Duration = Duration::from_secs(7 * 24 * 3600);

/// What to measure.
#[derive(Clone, Debug)]
pub struct ServingOptions {
    /// Base URL of the API, with its `/v1`.
    pub url: String,
    /// Bearer token.
    pub api_key: Option<String>,
    /// `None`: the only model of the server.
    pub model: Option<String>,
    /// Endpoint of the API.
    pub endpoint: Endpoint,
    /// Loads, measured one after another.
    pub loads: Vec<Arrivals>,
    /// Length of each load; `None`: 8 requests per client, or 2 conversations, or a minute of arrivals.
    pub amount: Option<Amount>,
    /// Source of the prompts.
    pub prompts: PromptSource,
    /// Messages of a conversation, each with an answer; of clients, with random prompts.
    pub turns: usize,
    /// Tokens of its messages after the first.
    pub turn_tokens: usize,
    /// Tokens per answer.
    pub output_tokens: usize,
    /// Random seed of prompts and arrivals.
    pub seed: u64,
    /// Warm-up requests before each load, which do not count.
    pub warmup: usize,
    /// Maximum time of one request, from its start or planned arrival to its end.
    pub timeout: Duration,
}

/// An endpoint of the API.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Endpoint {
    /// `/chat/completions`.
    Chat,
    /// `/completions`.
    Completions,
}

impl Endpoint {
    /// Both endpoints.
    pub const ALL: [Self; 2] = [Self::Chat, Self::Completions];

    fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// From this number of clients, each with one request at a time.
    Clients(usize),
    /// At random times, on average this many per second, whether or not earlier requests have ended.
    Rate(f64),
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clients(1) => f.write_str("1 client"),
            Self::Clients(clients) => write!(f, "{clients} clients"),
            Self::Rate(rate) => write!(f, "{rate} arrivals/s"),
        }
    }
}

/// When a load ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// After this number of requests.
    Requests(usize),
    /// After this time. Requests that still run are completed.
    Duration(Duration),
}

impl Amount {
    /// Whether another request may be sent after `sent` requests and this time.
    fn allows(self, sent: usize, elapsed: Duration) -> bool {
        match self {
            Self::Requests(n) => sent < n,
            Self::Duration(duration) => elapsed < duration && sent < MAX_REQUESTS,
        }
    }
}

/// Where prompts come from.
#[derive(Clone, Debug)]
pub enum PromptSource {
    /// Random words of about `tokens` tokens as the server counts them. All prompts differ after `shared` tokens.
    Random {
        /// Tokens per prompt.
        tokens: usize,
        /// Tokens at the start of all prompts that are the same.
        shared: usize,
    },
    /// Lines of a file: text, JSON strings, or JSON objects with `prompt` or `messages`.
    Lines(String),
}

/// Progress of a load.
#[derive(Clone, Copy, Debug)]
pub struct ServingProgress {
    /// The load.
    pub load: Arrivals,
    /// Requests or seconds done.
    pub done: u64,
    /// Requests or seconds in all.
    pub total: u64,
}

/// Measures all loads, until they are done or Ctrl-C is pressed.
///
/// Errors: an option is out of range, the server cannot be reached, or it refuses the first request. The report counts
/// later failures.
pub fn run(options: &ServingOptions, progress: &dyn Fn(ServingProgress)) -> Result<ServingReport> {
    check(options)?;
    let failed = |e: std::io::Error| Error::Resources(format!("the measurement cannot run: {e}"));
    moebius_cache::threads::probe(4)?; // tokio panics when its two threads cannot start
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
    let report = runtime.block_on(async {
        let mut stop = pin!(async {
            // Without signal handling, Ctrl-C ends the process.
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending().await
            }
        });
        let mut notes = Vec::new();
        let target = tokio::select! {
            target = prepare(options, &mut notes) => Arc::new(target?),
            () = &mut stop => return Err(stopped_early()),
        };
        let (mut levels, mut interrupted) = (Vec::new(), false);
        for &load in &options.loads {
            if options.warmup > 0 {
                let clients = if let Arrivals::Clients(clients) = load { clients.min(options.warmup) } else { 1 };
                let amount = Amount::Requests(options.warmup);
                (_, interrupted) =
                    run::measure(&target, Arrivals::Clients(clients), amount, &mut stop, &|_, _| {}).await;
            }
            if !interrupted {
                let amount = options.amount.unwrap_or(load.default_amount(options.turns));
                let report = |done, total| progress(ServingProgress { load, done, total });
                let (level, stopped) = run::measure(&target, load, amount, &mut stop, &report).await;
                levels.push(level);
                interrupted = stopped;
            }
            if interrupted {
                break;
            }
        }
        if levels.iter().any(|level| level.counted_as_chunks > 0) {
            notes.push(UNCOUNTED.into());
        }
        Ok(report(options, &target, notes, levels, interrupted))
    });
    // A name lookup may still run on another thread, whose end is not waited for.
    runtime.shutdown_background();
    report
}

const UNCOUNTED: &str =
    "the server did not count the tokens of all answers: where it did not, each chunk counts as one token";

fn stopped_early() -> Error {
    Error::Invalid("stopped before anything was measured: let the first requests end".into())
}

fn report(
    options: &ServingOptions,
    target: &Target,
    mut notes: Vec<String>,
    levels: Vec<Level>,
    interrupted: bool,
) -> ServingReport {
    let requests = levels.iter().map(|level| level.completed + level.failed).sum::<usize>();
    match &target.prompts {
        Prompts::Lines(lines) if lines.len() < requests => {
            notes.push(format!(
                "{} prompts for {requests} requests: prompts repeat, and a prefix cache may hold them",
                lines.len()
            ));
        }
        _ => {}
    }
    if levels.iter().any(|level| level.completed + level.failed >= MAX_REQUESTS)
        && matches!(options.amount, Some(Amount::Duration(_)))
    {
        notes.push(format!("a load ends after {MAX_REQUESTS} requests, even before its duration is over"));
    }
    let (prompt_tokens, shared_prefix_tokens) = match options.prompts {
        PromptSource::Random { tokens, shared } => (Some(tokens), shared),
        PromptSource::Lines(_) => (None, 0),
    };
    ServingReport {
        url: options.url.clone(),
        model: target.api.model.clone(),
        endpoint: options.endpoint.name(),
        prompt_tokens,
        shared_prefix_tokens,
        turns: options.turns,
        turn_tokens: options.turn_tokens,
        output_tokens: options.output_tokens,
        seed: options.seed,
        notes,
        interrupted,
        levels,
    }
}

impl Arrivals {
    fn default_amount(self, turns: usize) -> Amount {
        match self {
            Self::Clients(clients) if turns > 1 => Amount::Requests(2 * clients * turns),
            Self::Clients(clients) => Amount::Requests(8 * clients),
            Self::Rate(_) => Amount::Duration(Duration::from_secs(60)),
        }
    }
}

fn check(options: &ServingOptions) -> Result<()> {
    let within = |flag: &str, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::Invalid(format!("{flag} is {value}: give a number from {least} to {most}"))),
    };
    for load in &options.loads {
        match *load {
            Arrivals::Clients(clients) => within("--concurrency", clients, 1, MAX_CLIENTS)?,
            Arrivals::Rate(rate) if (1e-3..=1e5).contains(&rate) => {}
            Arrivals::Rate(rate) => {
                return Err(Error::Invalid(format!("--rate is {rate}: give a number from 0.001 to 100000")));
            }
        }
    }
    match options.amount {
        Some(Amount::Requests(requests)) => within("--requests", requests, 1, MAX_REQUESTS)?,
        Some(Amount::Duration(duration)) if duration.is_zero() || duration > MAX_DURATION => {
            return Err(Error::Invalid("--duration is out of range: give more than 0 and at most a week".into()));
        }
        _ => {}
    }
    if options.timeout.is_zero() || options.timeout > MAX_DURATION {
        return Err(Error::Invalid("--timeout is out of range: give more than 0 and at most a week".into()));
    }
    if let PromptSource::Random { tokens, shared } = options.prompts {
        within("--prompt-tokens", tokens, 1, MAX_TOKENS)?;
        if shared > tokens {
            return Err(Error::Invalid(format!(
                "--shared-prefix-tokens is {shared}: give at most --prompt-tokens, {tokens}"
            )));
        }
    }
    within("--output-tokens", options.output_tokens, 1, MAX_TOKENS)?;
    within("--turns", options.turns, 1, MAX_TURNS)?;
    within("--turn-tokens", options.turn_tokens, 1, MAX_TOKENS)?;
    if options.turns > 1 && options.endpoint == Endpoint::Completions {
        return Err(Error::Invalid("--turns is for conversations: use --endpoint chat".into()));
    }
    within("--warmup", options.warmup, 0, MAX_REQUESTS)
}

/// Finds out which fields the server accepts and how many tokens a word has.
async fn prepare(options: &ServingOptions, notes: &mut Vec<String>) -> Result<Target> {
    let client = HttpClient::new(&options.url, options.api_key.as_deref())?;
    let lines = match &options.prompts {
        PromptSource::Lines(text) => Some(prompts::parse(text, options.endpoint)?),
        PromptSource::Random { .. } => None,
    };
    let model = match &options.model {
        Some(model) => model.clone(),
        None => Api::only_model(&client, options.timeout).await?,
    };
    let mut api =
        Api { client, endpoint: options.endpoint, model, timeout: options.timeout, fields: ExactFields::default() };
    let mut length = PromptLength::UNKNOWN;
    let prompts = match (lines, &options.prompts) {
        (None, PromptSource::Random { tokens, shared }) => {
            length = measure(&mut api, options.seed, *tokens, notes).await?;
            Prompts::random(options.seed, *tokens, *shared, length)
        }
        (lines, _) => {
            let lines = lines.expect("prompts that are not random were read");
            probe(&mut api, &lines[0], notes).await?;
            Prompts::Lines(lines)
        }
    };
    // A message has no template of its own to speak of, so its words are a prompt's.
    let later = Prompts::random(options.seed, options.turn_tokens, 0, length);
    let next = if let Prompts::Lines(_) = prompts { 0 } else { PROBES };
    let ServingOptions { output_tokens, turns, seed, .. } = *options;
    Ok(Target { api, prompts, later, turns, output_tokens, next: next.into(), seed })
}

/// Random prompts that [`measure`] sends; those of the loads come after them.
const PROBES: u64 = 2;

/// Finds out with two prompts how many tokens a word has.
async fn measure(api: &mut Api, seed: u64, tokens: usize, notes: &mut Vec<String>) -> Result<PromptLength> {
    let (few, most) = (16, 1024);
    let (mut words, mut counts) = (few, Vec::new());
    for number in 0..PROBES {
        let prompt = Prompts::Random { seed, words, shared: 0 }.get(number);
        let Some(count) = probe(api, &prompt, notes).await?.usage.prompt_tokens else { break };
        counts.push((words, count as usize));
        // Then one of about the wanted length, up to a bound: the share of the template is not yet known.
        words = (tokens.saturating_mul(few) / (count as usize).max(1)).clamp(2 * few, most);
    }
    let measure = if let [few, many] = counts[..] { PromptLength::through(few, many) } else { None };
    if measure.is_none() {
        notes.push("the server does not count the tokens of prompts: each word counts as one".into());
    }
    Ok(measure.unwrap_or(PromptLength::UNKNOWN))
}

/// Requests one token. Leaves out the fields that the server refuses from here on, and notes that.
async fn probe(api: &mut Api, prompt: &TestPrompt, notes: &mut Vec<String>) -> Result<Answered> {
    loop {
        match api.ask(api.body(prompt, 1), Instant::now()).await {
            Ok(answered) => return Ok(answered),
            Err(failure) => match api.fields.give_way(&failure) {
                Some(note) => notes.push(note.into()),
                None => return Err(cannot("an answer", &failure)),
            },
        }
    }
}
