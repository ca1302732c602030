//! What a person sees besides the answer: a status line while loading, dim lines, and nothing that the model could inject.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use moebius::engine::RequestStats;

/// A line on stderr that says what is being done. Where stderr is not a terminal, only work that takes long is told.
pub(crate) struct Status {
    bar: Option<ProgressBar>,
    last_told: RefCell<Instant>,
}

impl Status {
    pub(crate) fn start() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner:.cyan} {wide_msg}").expect("the template is a constant");
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, last_told: RefCell::new(Instant::now()) }
    }

    /// Shows a short line.
    pub(crate) fn report(&self, line: &str) {
        const PATIENCE: Duration = Duration::from_secs(10);
        if let Some(bar) = &self.bar {
            // A download or conversion draws its own bar; ours must not tear it.
            bar.set_message(line.to_string());
        } else if self.last_told.borrow().elapsed() >= PATIENCE {
            *self.last_told.borrow_mut() = Instant::now();
            eprintln!("{line}");
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Whether `stream` shows colours: a terminal, and NO_COLOR unset or empty.
pub(crate) fn colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Dim text, where colours are shown.
pub(crate) fn dim(text: &str, colours: bool) -> String {
    if colours { format!("\x1b[2m{text}\x1b[0m") } else { text.to_string() }
}

/// Text of a model without control characters, which a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Rates of one answer; `None` where nothing was measured.
pub(crate) struct Rates {
    pub(crate) prefill_tok_per_s: Option<f64>,
    pub(crate) decode_tok_per_s: Option<f64>,
    pub(crate) decode_gb_per_s: Option<f64>,
}

impl Rates {
    /// Prefill gives the first token; every further one is a decode step.
    pub(crate) fn of(stats: &RequestStats) -> Self {
        let per_second = |amount: f64, time: Duration| (amount > 0.0 && !time.is_zero()).then(|| amount / time.as_secs_f64());
        Self {
            prefill_tok_per_s: per_second(stats.prompt_tokens as f64, stats.prefill),
            decode_tok_per_s: per_second(stats.completion_tokens.saturating_sub(1) as f64, stats.decode),
            decode_gb_per_s: per_second(stats.decode_bytes as f64 / 1e9, stats.decode),
        }
    }
}

/// One line about an answer: `12 tokens · prefill 950 tok/s · decode 88.1 tok/s · 1.2 GB/s read`.
pub(crate) fn summary(stats: &RequestStats) -> String {
    let rates = Rates::of(stats);
    let number = |x: f64| if x < 100.0 { format!("{x:.1}") } else { format!("{x:.0}") };
    let mut line = format!("{} token{}", stats.completion_tokens, if stats.completion_tokens == 1 { "" } else { "s" });
    for (label, rate, unit) in [
        (" · prefill ", rates.prefill_tok_per_s, " tok/s"),
        (" · decode ", rates.decode_tok_per_s, " tok/s"),
        (" · ", rates.decode_gb_per_s, " GB/s read"),
    ] {
        if let Some(rate) = rate {
            line += &format!("{label}{}{unit}", number(rate));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_leaves_out_what_was_not_measured() {
        let mut stats = RequestStats { prompt_tokens: 100, completion_tokens: 11, ..Default::default() };
        assert_eq!(summary(&stats), "11 tokens");
        stats.prefill = Duration::from_millis(500);
        stats.decode = Duration::from_secs(1);
        stats.decode_bytes = 1_500_000_000;
        assert_eq!(summary(&stats), "11 tokens · prefill 200 tok/s · decode 10.0 tok/s · 1.5 GB/s read");
    }

    #[test]
    fn a_model_cannot_move_the_cursor() {
        assert_eq!(printable("a\x1b[2Jb\r\n\tc\u{9b}d"), "a[2Jb\n\tcd");
    }
}
