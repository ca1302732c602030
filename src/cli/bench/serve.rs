//! `moebius bench serve`: measures any OpenAI-compatible server under load.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::cli::measure::server::{self, Amount, Arrivals, Endpoint, PromptSource, ServingOptions, ServingProgress};
use crate::{Error, Result};

use crate::cli::args::{parse_duration, read_text};
use crate::cli::print_line;
use crate::cli::terminal::Status;
use crate::config::choice_of;

const LOADS: &str = "\
Each load is measured separately. With --concurrency, every client waits for its answer before it \
                     sends the next request. With --rate, requests arrive at random times, also while earlier ones \
                     still run, and latencies count from the planned arrival. With --turns, every client has \
                     conversations, and the report has the time to first token and the cached share of each turn. \
                     Ctrl-C prints what was measured so far. TLS certificates are checked against the system's \
                     authorities, or against the PEM file in SSL_CERT_FILE.";

/// Measure throughput, time to first token and inter-token latency of an OpenAI-compatible server.
#[derive(clap::Args)]
#[command(after_help = LOADS)]
pub(crate) struct Args {
    /// Base URL of the API.
    #[arg(long, default_value = "http://127.0.0.1:8080/v1")]
    url: String,
    /// Model name to send [default: the only model of the server].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// File with the server's API key.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// The server's API key. Other users can see the command line: prefer --api-key-file.
    #[arg(long, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// Numbers of concurrent clients, each with one request at a time.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4,8,16")]
    concurrency: Vec<usize>,
    /// Average request rates per second, instead of clients.
    #[arg(
        long,
        value_name = "R,R",
        allow_negative_numbers = true,
        value_delimiter = ',',
        conflicts_with = "concurrency"
    )]
    rate: Vec<f64>,
    /// Requests per load [default: 8 per client; with --turns 2 conversations per client].
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    requests: Option<usize>,
    /// Duration of each load, such as 90s or 5m [default with --rate: 60s].
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// Approximate tokens per prompt, as the server counts them; all prompts differ from their first token on.
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens at the start of all prompts that are the same.
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared_prefix_tokens: usize,
    /// Messages of a conversation: each request after the first sends the answers so far and one message more.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["rate", "prompts"])]
    turns: usize,
    /// Approximate tokens of a conversation's later messages; the first one has --prompt-tokens.
    #[arg(long, value_name = "N", default_value_t = 100)]
    turn_tokens: usize,
    /// File of prompts, one per line: text, a JSON string, or a JSON object with `prompt` or `messages`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "shared_prefix_tokens"])]
    prompts: Option<PathBuf>,
    /// Tokens per answer; a maximum if the server does not support `ignore_eos`.
    #[arg(long, value_name = "N", default_value_t = 128)]
    output_tokens: usize,
    /// Endpoint to measure.
    #[arg(long, default_value = "chat", value_parser = choice_of(&Endpoint::ALL))]
    endpoint: Endpoint,
    /// Random seed of prompts and arrivals [default: a new one per run, so that the server cannot have cached the
    /// prompts].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Warm-up requests before each load, which do not count.
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: usize,
    /// Maximum time of one request.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    timeout: Duration,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let json = args.json;
    let options = args.into_options()?;
    let status = Status::new();
    let report = server::run(&options, &|ServingProgress { load, done, total }| {
        status.report(&load.to_string(), done, total, false);
    })?;
    drop(status);
    if json {
        print_line(&serde_json::to_string(&report).expect("a report of numbers and strings is JSON"))?;
    } else {
        print_line(report.to_string().trim_end())?;
    }
    match report.failures().first() {
        _ if report.completed() > 0 => Ok(()),
        Some(failed) => Err(Error::Invalid(format!(
            "no request was answered; the most frequent failure was {} ({}): check the server's log, or lower the load",
            failed.kind, failed.example
        ))),
        None => Err(Error::Invalid("stopped before a request was answered: let it run longer".into())),
    }
}

impl Args {
    fn into_options(self) -> Result<ServingOptions> {
        let api_key = match &self.api_key_file {
            Some(path) => Some(read_text(path)?.trim().to_string()),
            None => self.api_key,
        };
        let loads = match self.rate.is_empty() {
            true => self.concurrency.into_iter().map(Arrivals::Clients).collect(),
            false => self.rate.into_iter().map(Arrivals::Rate).collect(),
        };
        let prompts = match &self.prompts {
            Some(path) => PromptSource::Lines(read_text(path)?),
            None => PromptSource::Random { tokens: self.prompt_tokens, shared: self.shared_prefix_tokens },
        };
        let amount = self.requests.map(Amount::Requests).or(self.duration.map(Amount::Duration));
        let now =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64 & 0xffff_ffff);
        Ok(ServingOptions {
            url: self.url,
            api_key,
            model: self.model,
            endpoint: self.endpoint,
            loads,
            amount,
            prompts,
            turns: self.turns,
            turn_tokens: self.turn_tokens,
            output_tokens: self.output_tokens,
            seed: self.seed.unwrap_or_else(now),
            warmup: self.warmup,
            timeout: self.timeout,
        })
    }
}
