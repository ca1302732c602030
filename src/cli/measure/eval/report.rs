//! What was measured, as JSON and for people.

use std::fmt;

use serde::Serialize;

use super::{Far, Tally};

/// What a model makes of a text.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// The model's name.
    pub model: String,
    /// Precision of the experts, as loaded.
    pub experts: String,
    /// Sequences that the text was cut into.
    pub windows: usize,
    /// Tokens that were scored.
    pub tokens: usize,
    /// `exp` of the mean of `-log p`.
    pub perplexity: f64,
    /// Its standard error, of tokens as if they were independent.
    pub perplexity_error: f64,
    /// Beside the reference.
    pub against: Option<Comparison>,
}

/// How far the model's probabilities are from the reference's. KL divergences are of the model from the reference, in
/// nats.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The reference, as it was asked for.
    pub reference: String,
    /// Precision of its experts, as loaded.
    pub experts: String,
    /// The reference's perplexity.
    pub perplexity: f64,
    /// By how much the model's perplexity is larger, as a share.
    pub perplexity_change: f64,
    /// The standard error of that, of the same tokens in both.
    pub perplexity_change_error: f64,
    /// Mean of the divergence.
    pub kl_mean: f64,
    /// Divergence that half of the tokens stay below.
    pub kl_median: f64,
    /// That 90% stay below.
    pub kl_p90: f64,
    /// That 99% stay below.
    pub kl_p99: f64,
    /// The largest.
    pub kl_max: f64,
    /// Share of tokens in whose place both have the same likeliest token.
    pub top1_equal: f64,
    /// By positions in the window.
    pub spans: Vec<Span>,
    /// Tokens with the largest divergences.
    pub largest: Vec<Difference>,
}

/// Scored tokens at some positions of their windows.
#[derive(Clone, Debug, Serialize)]
pub struct Span {
    /// First position.
    pub from: usize,
    /// Last position.
    pub to: usize,
    /// Tokens there.
    pub tokens: usize,
    /// Mean of the divergence.
    pub kl_mean: f64,
    /// Share with the same likeliest token.
    pub top1_equal: f64,
}

/// A token in whose place the two differ much.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Its window, from 0.
    pub window: usize,
    /// Its position in the window.
    pub position: usize,
    /// The token of the text.
    pub token: u32,
    /// The divergence.
    pub kl: f64,
    /// Probability that the model gives the token.
    pub p: f32,
    /// Probability that the reference gives it.
    pub p_reference: f32,
    /// The end of the text before it, and its own text; empty where tokens were given.
    pub text: [String; 2],
}

/// Differences that are shown.
const LARGEST: usize = 5;

impl Tally {
    /// `exp` of the mean cost, and its standard error.
    pub fn perplexity(&self) -> (f64, f64) {
        let (mean, error) = mean_and_error(self.nats.iter().copied());
        (mean.exp(), mean.exp() * error)
    }

    /// What was found beside the reference. `text` of a position: what stood before it, and itself.
    pub fn compare(
        &self,
        reference: String,
        experts: String,
        text: impl Fn(usize, usize) -> [String; 2],
    ) -> Comparison {
        let (mean, _) = mean_and_error(self.against.iter().map(|far| far.nats));
        let (change, error) = mean_and_error(self.nats.iter().zip(&self.against).map(|(nats, far)| nats - far.nats));
        let mut order: Vec<usize> = (0..self.against.len()).collect();
        order.sort_by(|&a, &b| self.against[a].kl.total_cmp(&self.against[b].kl));
        let quantile = |share: f64| self.against[order[((order.len() - 1) as f64 * share).round() as usize]].kl;
        let all = Share::of(self.against.iter());
        Comparison {
            reference,
            experts,
            perplexity: mean.exp(),
            perplexity_change: change.exp() - 1.0,
            perplexity_change_error: change.exp() * error,
            kl_mean: all.kl_mean,
            kl_median: quantile(0.5),
            kl_p90: quantile(0.9),
            kl_p99: quantile(0.99),
            kl_max: quantile(1.0),
            top1_equal: all.top1_equal,
            spans: self.spans(),
            largest: order.iter().rev().take(LARGEST).map(|&i| self.difference(i, &text)).collect(),
        }
    }

    fn difference(&self, i: usize, text: impl Fn(usize, usize) -> [String; 2]) -> Difference {
        let (scored, far) = (self.scored[i], self.against[i]);
        Difference {
            window: scored.window,
            position: scored.position,
            token: scored.token,
            kl: far.kl,
            p: far.p[0],
            p_reference: far.p[1],
            text: text(scored.window, scored.position),
        }
    }

    /// Positions up to 15, 63, 255, ...
    fn spans(&self) -> Vec<Span> {
        let longest = self.scored.iter().map(|scored| scored.position).max().unwrap_or_default();
        let mut spans = Vec::new();
        let mut from = 1;
        while from <= longest {
            let to = ((from / 16 * 16).max(4) * 4 - 1).min(longest);
            let here = self.scored.iter().zip(&self.against).filter(|(s, _)| (from..=to).contains(&s.position));
            let share = Share::of(here.map(|(_, far)| far));
            if share.tokens > 0 {
                let Share { tokens, kl_mean, top1_equal } = share;
                spans.push(Span { from, to, tokens, kl_mean, top1_equal });
            }
            from = to + 1;
        }
        spans
    }
}

struct Share {
    tokens: usize,
    kl_mean: f64,
    top1_equal: f64,
}

impl Share {
    fn of<'a>(tokens: impl Iterator<Item = &'a Far>) -> Self {
        let (mut n, mut kl, mut equal) = (0usize, 0.0, 0usize);
        for far in tokens {
            (n, kl, equal) = (n + 1, kl + far.kl, equal + usize::from(far.same_top));
        }
        let of = |x: f64| x / n.max(1) as f64;
        Self { tokens: n, kl_mean: of(kl), top1_equal: of(equal as f64) }
    }
}

/// Mean and its standard error.
fn mean_and_error(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut n, mut mean, mut squares) = (0.0, 0.0, 0.0); // Welford's
    for x in values {
        n += 1.0;
        let off = x - mean;
        mean += off / n;
        squares += off * (x - mean);
    }
    (mean, if n > 1.0 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 })
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, experts, windows, tokens, perplexity, perplexity_error: error, against } = self;
        writeln!(f, "{model}, experts {experts}: {tokens} tokens scored in {windows} windows")?;
        writeln!(f, "perplexity    {perplexity:.4} ± {error:.4}")?;
        against.as_ref().map_or(Ok(()), |against| against.fmt(f))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |x: f64| 100.0 * x;
        writeln!(
            f,
            "against       {:.4}, so {:+.2}% ± {:.2}%   ({}, experts {})",
            self.perplexity,
            percent(self.perplexity_change),
            percent(self.perplexity_change_error),
            self.reference,
            self.experts
        )?;
        writeln!(
            f,
            "KL            mean {:.5}   median {:.5}   90% {:.4}   99% {:.4}   largest {:.3}",
            self.kl_mean, self.kl_median, self.kl_p90, self.kl_p99, self.kl_max
        )?;
        writeln!(f, "same token    {:.2}% have the same likeliest token", percent(self.top1_equal))?;
        writeln!(f, "\npositions        tokens   KL mean   same token")?;
        for span in &self.spans {
            let positions = format!("{} to {}", span.from, span.to);
            let equal = percent(span.top1_equal);
            writeln!(f, "{positions:<14} {:>8}   {:.5}   {equal:>9.2}%", span.tokens, span.kl_mean)?;
        }
        writeln!(f, "\nlargest differences")?;
        for far in &self.largest {
            let Difference { window, position, kl, p, p_reference, text: [before, token], .. } = far;
            let place = format!("window {window}, position {position}");
            writeln!(f, "{place:<26} KL {kl:.3}   p {p:.4}, reference {p_reference:.4}   {before:?} then {token:?}")?;
        }
        Ok(())
    }
}
