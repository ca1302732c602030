//! The results of a measurement of a server, as JSON and as tables.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use super::Arrivals;

/// One run, as `--json` prints it. Times are in milliseconds unless a name says otherwise.
#[derive(Debug, Serialize)]
pub struct ServingReport {
    /// URL of the server.
    pub url: String,
    /// Name of the model.
    pub model: String,
    /// `chat` or `completions`.
    pub endpoint: &'static str,
    /// Requested tokens per prompt. `None` if the prompts came from a file.
    pub prompt_tokens: Option<usize>,
    /// Requested tokens at the start of all prompts that are the same.
    pub shared_prefix_tokens: usize,
    /// Messages of a conversation, each with an answer.
    pub turns: usize,
    /// Requested tokens of its messages after the first.
    pub turn_tokens: usize,
    /// Requested tokens per answer.
    pub output_tokens: usize,
    /// Random seed of prompts and arrivals.
    pub seed: u64,
    /// What a reader should know about the numbers.
    pub notes: Vec<String>,
    /// Whether the run was stopped early. The last level then has the requests that had ended.
    pub interrupted: bool,
    /// Results of each load.
    pub levels: Vec<Level>,
}

impl ServingReport {
    /// Answered requests of all levels.
    pub fn completed(&self) -> usize {
        self.levels.iter().map(|level| level.completed).sum()
    }

    /// The failures of all levels, the most frequent kind first.
    pub fn failures(&self) -> Vec<Failed> {
        let mut all = Failures::default();
        for failed in self.levels.iter().flat_map(|level| &level.failures) {
            all.add(failed.kind, failed.count, &failed.example);
        }
        all.list()
    }
}

/// Results of one load.
#[derive(Debug, Serialize)]
pub struct Level {
    /// Closed loop: number of clients, each with one request at a time.
    pub clients: Option<usize>,
    /// Open loop: mean arrivals per second.
    pub rate: Option<f64>,
    /// From the first request to the end of the last answer.
    pub seconds: f64,
    /// Requests that were answered to the end, with text.
    pub completed: usize,
    /// Requests that failed. No other number includes them.
    pub failed: usize,
    /// Answers per second.
    pub requests_per_s: f64,
    /// Output tokens per second.
    pub output_tok_per_s: f64,
    /// Prompt and output tokens per second. `None` if the server does not count prompts.
    pub total_tok_per_s: Option<f64>,
    /// Prompt tokens per request, as the server counts them.
    pub prompt_tokens: Option<Spread>,
    /// Prompt tokens of all requests from the server's prefix cache. `None` if the server does not report them.
    pub cached_prompt_tokens: Option<u64>,
    /// Output tokens per request.
    pub output_tokens: Option<Spread>,
    /// Answers whose tokens the server did not count. Each of their chunks with text counts as one token.
    pub counted_as_chunks: usize,
    /// From the request, or its planned arrival, to the first chunk with text.
    pub first_token_ms: Option<Spread>,
    /// Time from the first to the last chunk with text, divided by the tokens less one.
    pub inter_token_ms: Option<Spread>,
    /// Between two chunks with text.
    pub gap_ms: Option<Spread>,
    /// From the request, or its planned arrival, to the end of the answer.
    pub latency_ms: Option<Spread>,
    /// Open loop: how long after its planned arrival a request was sent. The times above include this delay of the load
    /// generator.
    pub sent_late_ms: Option<Spread>,
    /// What each turn of the conversations had; all is one turn where they have one.
    pub turns: Vec<Turn>,
    /// Failures, the most frequent kind first.
    pub failures: Vec<Failed>,
}

/// The answers to the same message of all conversations.
#[derive(Debug, Serialize)]
pub struct Turn {
    /// Which message, from 1 on.
    pub turn: usize,
    /// Requests that were answered to the end, with text.
    pub completed: usize,
    /// Prompt tokens per request. `None` if the server does not count them.
    pub prompt_tokens: Option<f64>,
    /// Of these, the share that came from the server's prefix cache. `None` if the server does not report it.
    pub cached_share: Option<f64>,
    /// From the request to the first chunk with text.
    pub first_token_ms: Option<Spread>,
}

/// A distribution. Percentiles are samples (nearest rank), so with few samples p99 is the largest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Least sample.
    pub min: f64,
    /// Median: half of the samples are no larger.
    pub p50: f64,
    /// 95% are no larger.
    pub p95: f64,
    /// 99% are no larger.
    pub p99: f64,
    /// Largest sample.
    pub max: f64,
    /// Number of samples.
    pub samples: usize,
}

/// With fewer samples, p99 is the largest one.
const FEW: usize = 100;

impl Spread {
    /// `None` without samples.
    pub fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let n = samples.len();
        let percentile = |p: usize| samples[(p * n).div_ceil(100) - 1];
        let (p50, p95, p99) = (percentile(50), percentile(95), percentile(99));
        Some(Self { mean: samples.iter().sum::<f64>() / n as f64, min, p50, p95, p99, max, samples: n })
    }
}

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failed {
    /// The kind.
    pub kind: FailureKind,
    /// Number of failures.
    pub count: usize,
    /// Message of the first one.
    pub example: String,
}

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection.
    Connect,
    /// A status other than 200.
    Http(u16),
    /// The request took longer than the timeout.
    Timeout,
    /// The connection, or the stream on it, ended before the answer did.
    Broken,
    /// Not a stream of events with JSON.
    Malformed,
    /// The server reported an error within the stream.
    Reported,
    /// An answer without any text.
    Empty,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Http(status) => write!(f, "HTTP {status}"),
            Self::Timeout => f.write_str("timeout"),
            Self::Broken => f.write_str("broken stream"),
            Self::Malformed => f.write_str("malformed stream"),
            Self::Reported => f.write_str("error in the stream"),
            Self::Empty => f.write_str("empty answer"),
        }
    }
}

impl Serialize for FailureKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One request without an answer.
#[derive(Debug)]
pub(super) struct FailedRequest {
    pub(super) kind: FailureKind,
    pub(super) message: String,
}

impl FailedRequest {
    pub(super) fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// Failures by kind.
#[derive(Default)]
pub(super) struct Failures(BTreeMap<FailureKind, (usize, String)>);

impl Failures {
    pub(super) fn add(&mut self, kind: FailureKind, count: usize, message: &str) {
        self.0.entry(kind).or_insert_with(|| (0, one_line(message))).0 += count;
    }

    pub(super) fn list(self) -> Vec<Failed> {
        let mut list: Vec<Failed> =
            self.0.into_iter().map(|(kind, (count, example))| Failed { kind, count, example }).collect();
        list.sort_by_key(|failed| std::cmp::Reverse(failed.count));
        list
    }
}

/// The beginning of a server's text, without control characters.
pub(super) fn one_line(text: &str) -> String {
    const CHARS: usize = 200;
    let mut chars = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c });
    let line: String = chars.by_ref().take(CHARS).collect();
    if chars.next().is_some() { line + "…" } else { line }
}

impl fmt::Display for ServingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prompts = match (self.prompt_tokens, self.shared_prefix_tokens) {
            (None, _) => "prompts from a file".to_string(),
            (Some(n), 0) => format!("prompts of {n} tokens"),
            (Some(n), shared) => format!("prompts of {n} tokens with a common prefix of {shared}"),
        };
        let prompts = match self.turns {
            1 => prompts,
            turns => format!("{turns} turns, {prompts}, later messages of {}", self.turn_tokens),
        };
        let Self { url, model, endpoint, output_tokens, seed, .. } = self;
        writeln!(
            f,
            "{} at {}, {endpoint}: {prompts}, answers of {output_tokens}, seed {seed}",
            one_line(model),
            one_line(url)
        )?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        for level in &self.levels {
            write!(f, "\n{level}")?;
        }
        if self.levels.len() > 1 {
            self.summary(f)?;
        }
        if self.interrupted {
            writeln!(f, "\nstopped early: the last load shows the requests that had ended")?;
        }
        Ok(())
    }
}

impl ServingReport {
    /// A table of all levels.
    fn summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = (
            "load",
            "req/s",
            "output tok/s",
            "total tok/s",
            "first token p50",
            "p99 ms",
            "inter-token p50",
            "p99 ms",
            "failed",
        );
        let (load, requests, output, total, first, first99, inter, inter99, failed) = heads;
        writeln!(
            f,
            "\n{load:14} {requests:>8} {output:>13} {total:>12} {first:>16} {first99:>9} {inter:>16} {inter99:>9} \
             {failed:>7}"
        )?;
        for level in &self.levels {
            let of = |spread: &Option<Spread>, pick: fn(&Spread) -> f64| number(spread.as_ref().map(pick));
            let (first, first99) = (of(&level.first_token_ms, |s| s.p50), of(&level.first_token_ms, |s| s.p99));
            let (inter, inter99) = (of(&level.inter_token_ms, |s| s.p50), of(&level.inter_token_ms, |s| s.p99));
            let (load, requests, output) = (level.load(), level.requests_per_s, level.output_tok_per_s);
            let (total, failed) = (number(level.total_tok_per_s), level.failed);
            writeln!(
                f,
                "{load:14} {requests:>8.2} {output:>13.1} {total:>12} {first:>16} {first99:>9} {inter:>16} \
                 {inter99:>9} {failed:>7}"
            )?;
        }
        Ok(())
    }
}

impl Level {
    fn load(&self) -> String {
        let load = self.clients.map(Arrivals::Clients).or(self.rate.map(Arrivals::Rate));
        load.map_or(String::new(), |load| load.to_string())
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.1}"))
}

/// `512`, or `498 to 519`.
fn range(spread: &Spread) -> String {
    if spread.min == spread.max { spread.min.to_string() } else { format!("{} to {}", spread.min, spread.max) }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} answers in {:.1} s, {} failed", self.load(), self.completed, self.seconds, self.failed)?;
        for Failed { kind, count, example } in &self.failures {
            writeln!(f, "  {count} x {kind}: {example}")?;
        }
        let Some(output) = &self.output_tokens else { return Ok(()) };
        let total = self.total_tok_per_s.map_or(String::new(), |total| format!(", {total:.1} total tok/s"));
        writeln!(f, "  {:.2} requests/s, {:.1} output tok/s{total}", self.requests_per_s, self.output_tok_per_s)?;
        let prompt = self.prompt_tokens.as_ref().map_or("an unknown number of".into(), range);
        let cached = match (self.cached_prompt_tokens, &self.prompt_tokens) {
            (Some(cached), Some(prompt)) => {
                format!(" ({:.1}% cached)", 100.0 * cached as f64 / (prompt.mean * prompt.samples as f64))
            }
            _ => String::new(),
        };
        writeln!(f, "  prompts of {prompt} tokens{cached}, answers of {}", range(output))?;

        writeln!(
            f,
            "  {:20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}",
            "ms", "mean", "p50", "p95", "p99", "max", "samples"
        )?;
        let rows = [
            ("time to first token", &self.first_token_ms),
            ("inter-token latency", &self.inter_token_ms),
            ("gap between chunks", &self.gap_ms),
            ("request latency", &self.latency_ms),
            ("sent late", &self.sent_late_ms),
        ];
        for (name, spread) in rows {
            let Some(Spread { mean, p50, p95, p99, max, samples, .. }) = spread else { continue };
            writeln!(f, "  {name:20} {mean:>9.1} {p50:>9.1} {p95:>9.1} {p99:>9.1} {max:>9.1} {samples:>8}")?;
        }
        if self.turns.len() > 1 {
            let heads = ("turn", "answers", "prompt tokens", "cached", "first token p50", "p95 ms");
            let (turn, answers, prompt, cached, first, first95) = heads;
            writeln!(f, "  {turn:>6} {answers:>9} {prompt:>14} {cached:>9} {first:>16} {first95:>9}")?;
        }
        for Turn { turn, completed, prompt_tokens, cached_share, first_token_ms } in
            self.turns.iter().filter(|_| self.turns.len() > 1)
        {
            let cached = cached_share.map_or("-".into(), |share| format!("{:.1}%", 100.0 * share));
            let of = |pick: fn(&Spread) -> f64| number(first_token_ms.as_ref().map(pick));
            let (prompt, first, first95) = (number(*prompt_tokens), of(|s| s.p50), of(|s| s.p95));
            writeln!(f, "  {turn:>6} {completed:>9} {prompt:>14} {cached:>9} {first:>16} {first95:>9}")?;
        }
        if self.completed < FEW {
            writeln!(f, "  few samples: with fewer than {FEW} answers, p99 is the slowest")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_samples() {
        let hundred = Spread::of((1..=100).rev().map(f64::from).collect()).unwrap();
        assert_eq!((hundred.min, hundred.p50, hundred.p95, hundred.p99, hundred.max), (1.0, 50.0, 95.0, 99.0, 100.0));
        assert_eq!((hundred.mean, hundred.samples), (50.5, 100));
        let one = Spread::of(vec![7.0]).unwrap();
        assert_eq!((one.p50, one.p99, one.max, one.samples), (7.0, 7.0, 7.0, 1));
        let three = Spread::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((three.p50, three.p95, three.p99), (2.0, 3.0, 3.0));
        assert_eq!(Spread::of(vec![]), None);
    }

    proptest! {
        /// Nearest rank, by its definition: the least sample that so many percent do not pass.
        #[test]
        fn percentiles_by_definition(samples in prop::collection::vec(0.0..1e6f64, 1..300)) {
            let spread = Spread::of(samples.clone()).unwrap();
            for (p, value) in [(50.0, spread.p50), (95.0, spread.p95), (99.0, spread.p99)] {
                let enough = |x: f64| samples.iter().filter(|&&s| s <= x).count() as f64 * 100.0 >= p * samples.len(
                    ) as f64;
                let least = samples.iter().copied().filter(|&s| enough(s)).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(value, least);
            }
        }
    }

    #[test]
    fn failures_are_counted_by_kind() {
        let mut failures = Failures::default();
        failures.add(FailureKind::Timeout, 1, "slow");
        failures.add(FailureKind::Http(503), 2, "bu\x1b[2Jsy");
        failures.add(FailureKind::Http(503), 1, "other");
        let list = failures.list();
        assert_eq!((list[0].kind, list[0].count, list[0].example.as_str()), (FailureKind::Http(503), 3, "bu [2Jsy"));
        assert_eq!((list[1].kind, list[1].count), (FailureKind::Timeout, 1));
        assert_eq!(serde_json::to_value(&list[0]).unwrap()["kind"], "HTTP 503");
        assert_eq!(one_line(&"x".repeat(500)).chars().count(), 201);
    }
}
