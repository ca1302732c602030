//! How fast a server is to those who use it: throughput, time to first token and inter-token latency of any
//! OpenAI-compatible URL, under load from clients or at a rate. It knows no engine, so that one way of measuring fits
//! all servers.
//!
//! `client` connects, `sse` reads streams, `api` asks and times one request, `prompts` says what, `load` when, `report`
//! what came out.

mod api;
mod client;
mod load;
mod prompts;
mod report;
pub mod sse;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Error, Result};
use api::{Answered, Api, Fields, cannot};
use client::Client;
use load::Target;
use prompts::{Measure, Prompt, Prompts};
pub use report::{Failed, FailureKind, Level, Report, Spread};

/// Upper bounds of what a user can ask for, of clients, requests of a level, and tokens: a slip of the finger must not
/// fill memory.
const MAX_CLIENTS: usize = 4096;
const MAX_REQUESTS: usize = 1_000_000;
const MAX_TOKENS: usize = 4_000_000;
const MAX_DURATION: Duration = Duration::from_secs(7 * 24 * 3600);

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The API, with its `/v1`.
    pub url: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// `None`: the one that the server has.
    pub model: Option<String>,
    /// Which of the API's two.
    pub endpoint: Endpoint,
    /// Loads, measured one after the other.
    pub loads: Vec<Load>,
    /// How much of each; `None`: 8 requests per client, or a minute of arrivals.
    pub amount: Option<Amount>,
    /// What is asked.
    pub prompts: PromptSource,
    /// Tokens of each answer.
    pub output_tokens: usize,
    /// Of prompts and arrivals.
    pub seed: u64,
    /// Requests before each load that do not count.
    pub warmup: usize,
    /// For one request, from its start or planned arrival to its end.
    pub timeout: Duration,
}

/// Where requests go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Endpoint {
    /// `/chat/completions`.
    Chat,
    /// `/completions`.
    Completions,
}

impl Endpoint {
    /// Both.
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

/// What makes requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// So many clients, each with one request at a time.
    Clients(usize),
    /// So many requests per second on average, at random times, whatever became of those before.
    Rate(f64),
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clients(1) => f.write_str("1 client"),
            Self::Clients(clients) => write!(f, "{clients} clients"),
            Self::Rate(rate) => write!(f, "{rate} arrivals/s"),
        }
    }
}

/// When a load is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// After so many requests.
    Requests(usize),
    /// After this time no more are sent; those under way are waited for.
    Duration(Duration),
}

impl Amount {
    /// Whether a request may be sent at this time, after `sent` others.
    fn allows(self, sent: usize, elapsed: Duration) -> bool {
        match self {
            Self::Requests(n) => sent < n,
            Self::Duration(duration) => elapsed < duration && sent < MAX_REQUESTS,
        }
    }
}

/// What requests ask.
#[derive(Clone, Debug)]
pub enum PromptSource {
    /// Random words of about `tokens` tokens by the server's own count, all different but for the first `shared` ones.
    Random {
        /// Tokens of a prompt.
        tokens: usize,
        /// Of those, how many all prompts have in common.
        shared: usize,
    },
    /// Lines of a file: text, JSON strings, or JSON objects with `prompt` or `messages`.
    Lines(String),
}

/// How far a load is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Which.
    pub load: Load,
    /// Requests, or seconds.
    pub done: u64,
    /// Of how many.
    pub total: u64,
}

/// Measures all loads, until they are done or Ctrl-C is pressed.
///
/// Errors: options out of range, or a server that cannot be reached or refuses the first request. Later failures are in
/// the report.
pub fn run(options: &Options, progress: &dyn Fn(Progress)) -> Result<Report> {
    check(options)?;
    let failed = |e: std::io::Error| Error::Resources(format!("the measurement cannot run: {e}"));
    moebius_cache::threads::probe(4)?; // tokio panics where its two do not start
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
    let report = runtime.block_on(async {
        let mut stop = pin!(async {
            // Where signals cannot be had, Ctrl-C ends the process as ever.
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending().await
            }
        });
        let mut notes = Vec::new();
        let target = tokio::select! {
            target = prepare(options, &mut notes) => Arc::new(target?),
            () = &mut stop => return Err(Error::Invalid("stopped before anything was measured: let the first requests end".into())),
        };
        let (mut levels, mut interrupted) = (Vec::new(), false);
        for &load in &options.loads {
            if options.warmup > 0 {
                let clients = if let Load::Clients(clients) = load { clients.min(options.warmup) } else { 1 };
                let amount = Amount::Requests(options.warmup);
                (_, interrupted) = load::measure(&target, Load::Clients(clients), amount, &mut stop, &|_, _| {}).await;
            }
            if !interrupted {
                let amount = options.amount.unwrap_or(load.default_amount());
                let report = |done, total| progress(Progress { load, done, total });
                let (level, stopped) = load::measure(&target, load, amount, &mut stop, &report).await;
                levels.push(level);
                interrupted = stopped;
            }
            if interrupted {
                break;
            }
        }
        if levels.iter().any(|level| level.counted_as_chunks > 0) {
            notes.push("the server did not count the tokens of all answers: where it did not, each chunk counts as one".into());
        }
        Ok(report(options, &target, notes, levels, interrupted))
    });
    // The system may still look up a name on another thread; nobody waits for it.
    runtime.shutdown_background();
    report
}

fn report(options: &Options, target: &Target, mut notes: Vec<String>, levels: Vec<Level>, interrupted: bool) -> Report {
    let requests = levels.iter().map(|level| level.completed + level.failed).sum::<usize>();
    match &target.prompts {
        Prompts::Lines(lines) if lines.len() < requests => {
            notes.push(format!(
                "{} prompts for {requests} requests: they repeat, and a prefix cache may know them",
                lines.len()
            ));
        }
        _ => {}
    }
    if levels.iter().any(|level| level.completed + level.failed >= MAX_REQUESTS)
        && matches!(options.amount, Some(Amount::Duration(_)))
    {
        notes.push(format!("no load has more than {MAX_REQUESTS} requests: it ended with them, before its time"));
    }
    let (prompt_tokens, shared_prefix_tokens) = match options.prompts {
        PromptSource::Random { tokens, shared } => (Some(tokens), shared),
        PromptSource::Lines(_) => (None, 0),
    };
    Report {
        url: options.url.clone(),
        model: target.api.model.clone(),
        endpoint: options.endpoint.name(),
        prompt_tokens,
        shared_prefix_tokens,
        output_tokens: options.output_tokens,
        seed: options.seed,
        notes,
        interrupted,
        levels,
    }
}

impl Load {
    fn default_amount(self) -> Amount {
        match self {
            Self::Clients(clients) => Amount::Requests(8 * clients),
            Self::Rate(_) => Amount::Duration(Duration::from_secs(60)),
        }
    }
}

fn check(options: &Options) -> Result<()> {
    let within = |flag: &str, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::Invalid(format!("{flag} is {value}: give a number from {least} to {most}"))),
    };
    for load in &options.loads {
        match *load {
            Load::Clients(clients) => within("--concurrency", clients, 1, MAX_CLIENTS)?,
            Load::Rate(rate) if (1e-3..=1e5).contains(&rate) => {}
            Load::Rate(rate) => {
                return Err(Error::Invalid(format!("--rate is {rate}: give a number from 0.001 to 100000")));
            }
        }
    }
    match options.amount {
        Some(Amount::Requests(requests)) => within("--requests", requests, 1, MAX_REQUESTS)?,
        Some(Amount::Duration(duration)) if duration.is_zero() || duration > MAX_DURATION => {
            return Err(Error::Invalid("--duration is out of range: give more than nothing and at most a week".into()));
        }
        _ => {}
    }
    if options.timeout.is_zero() || options.timeout > MAX_DURATION {
        return Err(Error::Invalid("--timeout is out of range: give more than nothing and at most a week".into()));
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
    within("--warmup", options.warmup, 0, MAX_REQUESTS)
}

/// Learns how the server wants to be asked and how many tokens it takes a word for.
async fn prepare(options: &Options, notes: &mut Vec<String>) -> Result<Target> {
    let client = Client::new(&options.url, options.api_key.as_deref())?;
    let lines = match &options.prompts {
        PromptSource::Lines(text) => Some(prompts::parse(text, options.endpoint)?),
        PromptSource::Random { .. } => None,
    };
    let model = match &options.model {
        Some(model) => model.clone(),
        None => Api::only_model(&client, options.timeout).await?,
    };
    let mut api =
        Api { client, endpoint: options.endpoint, model, timeout: options.timeout, fields: Fields::default() };
    let prompts = match (lines, &options.prompts) {
        (None, PromptSource::Random { tokens, shared }) => {
            let measure = measure(&mut api, options.seed, *tokens, notes).await?;
            Prompts::random(options.seed, *tokens, *shared, measure)
        }
        (lines, _) => {
            let lines = lines.expect("prompts that are not random were read");
            probe(&mut api, &lines[0], notes).await?;
            Prompts::Lines(lines)
        }
    };
    let next = if let Prompts::Lines(_) = prompts { 0 } else { PROBES };
    Ok(Target { api, prompts, output_tokens: options.output_tokens, next: next.into(), seed: options.seed })
}

/// Random prompts that [`measure`] asks; the load's come after them.
const PROBES: u64 = 2;

/// Learns from two prompts how many tokens the server takes a word for.
async fn measure(api: &mut Api, seed: u64, tokens: usize, notes: &mut Vec<String>) -> Result<Measure> {
    let (few, most) = (16, 1024);
    let (mut words, mut counts) = (few, Vec::new());
    for number in 0..PROBES {
        let prompt = Prompts::Random { seed, words, shared: 0 }.get(number);
        let Some(count) = probe(api, &prompt, notes).await?.usage.prompt_tokens else { break };
        counts.push((words, count as usize));
        // Then one of about the length asked, where that is not too long: no longer, since the template's share is not
        // yet known.
        words = (tokens.saturating_mul(few) / (count as usize).max(1)).clamp(2 * few, most);
    }
    let measure = if let [few, many] = counts[..] { Measure::through(few, many) } else { None };
    if measure.is_none() {
        notes.push("the server does not count the tokens of prompts: each word is taken for one".into());
    }
    Ok(measure.unwrap_or(Measure::UNKNOWN))
}

/// Asks for one token. Fields that the server refuses are left out from here on, and that is noted.
async fn probe(api: &mut Api, prompt: &Prompt, notes: &mut Vec<String>) -> Result<Answered> {
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
