//! Output for people besides the answer: a status line while loading, dim lines, text without control characters.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::RequestStats;
use crate::load::LoadProgress;
use crate::log;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moebius_cache::convert::ConvertPhase;

/// Progress on stderr: a bar in a terminal, elsewhere a line every ten seconds.
pub(crate) struct Status {
    bar: Option<ProgressBar>,
    last_line: Mutex<Instant>,
}

impl Status {
    pub(crate) fn new() -> Self {
        Self { bar: std::io::stderr().is_terminal().then(ProgressBar::hidden), last_line: Mutex::new(Instant::now()) }
    }

    /// Shows how far loading is.
    pub(crate) fn loading(&self, progress: LoadProgress<'_>) {
        match progress {
            // These lines stay: they explain why a start takes long, or what happened to a file.
            LoadProgress::Convert(p)
                if matches!(p.phase, ConvertPhase::Replacing(_) | ConvertPhase::Waiting | ConvertPhase::Removed(_)) =>
            {
                self.note(&p.phase.to_string());
            }
            LoadProgress::Convert(p) => self.report(&p.phase.to_string(), p.bytes_done, p.bytes_total, true),
            LoadProgress::Copy(done, layers) => self.report("copying experts", done as u64, layers as u64, false),
            LoadProgress::Experts(line) => self.note(line),
            LoadProgress::Weights(done, layers) => self.report("loading layers", done as u64, layers as u64, false),
        }
    }

    /// Prints a line that stays.
    fn note(&self, line: &str) {
        match &self.bar {
            Some(bar) if !bar.is_hidden() => bar.println(line),
            _ => log::print(line),
        }
    }

    /// Shows `done` of `total`; a total of 0 is unknown.
    pub(crate) fn report(&self, what: &str, done: u64, total: u64, bytes: bool) {
        const PATIENCE: Duration = Duration::from_secs(10);
        let Some(bar) = &self.bar else {
            let mut last_line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
            if last_line.elapsed() >= PATIENCE {
                *last_line = Instant::now();
                let share = (done * 100).checked_div(total).map_or(String::new(), |percent| format!(": {percent} %"));
                log::print(&format!("{what}{share}"));
            }
            return;
        };
        if bar.is_hidden() {
            // Not earlier: a download draws its own bars, and a fast start draws none.
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        if bar.message() != what {
            let template = match (total, bytes) {
                (0, _) => "{spinner:.cyan} {msg}",
                (_, true) => "{spinner:.cyan} {msg} {wide_bar:.dim} {bytes}/{total_bytes} {bytes_per_sec} {eta} left",
                (_, false) => "{spinner:.cyan} {msg} {wide_bar:.dim} {pos}/{len}",
            };
            bar.set_style(ProgressStyle::with_template(template).expect("the template is a constant"));
            bar.set_message(what.to_string());
            bar.reset_eta();
        }
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Whether `stream` shows colours: it is a terminal, and NO_COLOR is unset or empty.
pub(crate) fn colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// `text` in dim, if `colours` are shown.
pub(crate) fn dim(text: &str, colours: bool) -> String {
    if colours { format!("\x1b[2m{text}\x1b[0m") } else { text.to_string() }
}

/// Text of a model without control characters, which could control the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Text of an error as one line of bounded length without control characters: parts of it may come from a file or a
/// server.
pub(crate) fn sentence(text: &str) -> String {
    const WORD: usize = 200;
    const LINE: usize = 2000; // words of many spaces
    let line = printable(text).replace('\n', " ");
    let words: Vec<String> = line.split(' ').map(|word| shortened(word, WORD)).collect();
    shortened(&words.join(" "), LINE)
}

/// The beginning and the end of a text of more than `max` characters.
fn shortened(text: &str, max: usize) -> String {
    let chars = text.chars().count();
    if chars <= max {
        return text.into();
    }
    let end = max / 4;
    let beginning: String = text.chars().take(max - end - 1).collect();
    beginning + "…" + &text.chars().skip(chars - end).collect::<String>()
}

/// Rates of one answer; `None` where nothing was measured.
pub(crate) struct AnswerRates {
    pub(crate) prefill_tok_per_s: Option<f64>,
    pub(crate) decode_tok_per_s: Option<f64>,
    pub(crate) decode_gb_per_s: Option<f64>,
}

impl AnswerRates {
    /// Prefill gives the first token; every further one is a decode step.
    pub(crate) fn of(stats: &RequestStats) -> Self {
        let per_second =
            |amount: f64, time: Duration| (amount > 0.0 && !time.is_zero()).then(|| amount / time.as_secs_f64());
        Self {
            prefill_tok_per_s: per_second(stats.prompt_tokens as f64, stats.prefill),
            decode_tok_per_s: per_second(stats.completion_tokens.saturating_sub(1) as f64, stats.decode),
            decode_gb_per_s: per_second(stats.decode_bytes as f64 / 1e9, stats.decode),
        }
    }
}

/// One line about an answer: `12 tokens · prefill 950 tok/s · decode 88.1 tok/s · 1.2 GB/s read`.
pub(crate) fn summary(stats: &RequestStats) -> String {
    let rates = AnswerRates::of(stats);
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
    fn a_long_word_keeps_its_ends() {
        assert_eq!(sentence("a.json: no\nsuch \x1b[2Jthing"), "a.json: no such [2Jthing");
        let long = sentence(&format!("model `{}` is unknown", "x".repeat(100_000)));
        assert!(
            long.starts_with("model `xxx") && long.contains("xx…xx") && long.ends_with("xxx` is unknown"),
            "{long}"
        );
        assert_eq!(long.chars().count(), "model  is unknown".len() + 200);
        let many = sentence(&format!("model `{}` is unknown", "é ".repeat(50_000)));
        assert!(many.chars().count() == 2000 && many.ends_with("é ` is unknown"), "{many}");
    }

    #[test]
    fn a_model_cannot_move_the_cursor() {
        assert_eq!(printable("a\x1b[2Jb\r\n\tc\u{9b}d"), "a[2Jb\n\tcd");
    }
}
