//! One answer as text: the engine's tokens decoded as they come, cut at stop strings.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::engine::{Captured, Event, Events, FinishReason, Logprobs, RequestStats, Token};
use crate::text::reply::overlap;
use crate::text::tokenizer::{Incremental, Tokenizer};
use crate::{Error, Result};

/// A step of an answer; `End` is last.
#[derive(Debug)]
pub enum Delta {
    /// More text, always valid and final.
    Text(String),
    /// The answer is complete.
    End(FinishReason, RequestStats),
}

/// The text of one request. Dropping it cancels the request.
pub struct TextStream {
    events: Events,
    tokenizer: Arc<Tokenizer>,
    decoder: Incremental,
    stops: StopStrings,
    tokens: Vec<u32>,
    logprobs: Vec<(u32, Logprobs)>, // of tokens since they were last taken
    captured: Vec<Captured>,        // since it was last taken
    stats: RequestStats,            // up to the last token received
    end: Option<Result<(FinishReason, RequestStats)>>, // emitted after the last text
    ended: bool,
}

impl TextStream {
    /// Follows a request of `prompt_tokens` tokens; `stops` end the answer and are not part of it.
    ///
    /// Errors: `Error::Invalid` when a stop string is empty.
    pub fn new(events: Events, tokenizer: Arc<Tokenizer>, stops: Vec<String>, prompt_tokens: usize) -> Result<Self> {
        Ok(Self {
            events,
            tokenizer,
            decoder: Incremental::default(),
            stops: StopStrings::new(stops)?,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            captured: Vec::new(),
            stats: RequestStats { prompt_tokens, ..Default::default() },
            end: None,
            ended: false,
        })
    }

    /// Spells out special tokens instead of leaving them out: markers of tool calls may be special tokens.
    pub fn spell_special_tokens(&mut self) {
        self.decoder.special = true;
    }

    /// The tokens received since the last call with their logprobs, if the request asked for them.
    pub fn take_logprobs(&mut self) -> Vec<(u32, Logprobs)> {
        std::mem::take(&mut self.logprobs)
    }

    /// Rows captured since the last call, if the request asked for them.
    pub fn take_captured(&mut self) -> Vec<Captured> {
        std::mem::take(&mut self.captured)
    }

    /// The stop string that ended the answer, if one did.
    pub fn stopped_at(&self) -> Option<&str> {
        self.stops.matched.map(|which| self.stops.stops[which].as_str())
    }

    /// The tokens received so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Timings up to the last token received.
    pub fn stats(&self) -> RequestStats {
        self.stats
    }

    /// Waits for the next step; `None` after the last. Not for async code.
    pub fn next_blocking(&mut self) -> Option<Result<Delta>> {
        loop {
            if let Poll::Ready(step) = self.next_within(Duration::from_secs(3600)) {
                return step;
            }
        }
    }

    /// Waits for the next step for at most `timeout`; pending after that. Not for async code.
    pub fn next_within(&mut self, timeout: Duration) -> Poll<Option<Result<Delta>>> {
        let until = Instant::now() + timeout;
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            let step = self.poll_next(&mut Context::from_waker(&waker));
            let left = until.saturating_duration_since(Instant::now());
            if step.is_ready() || left.is_zero() {
                return step;
            }
            thread::park_timeout(left);
        }
    }

    /// The next step; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Delta>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`TextStream::next`] for hand-written futures and streams.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Delta>>> {
        loop {
            if let Some(step) = self.pending() {
                return Poll::Ready(step);
            }
            let event = ready!(self.events.poll_recv(context));
            if let Some(text) = self.on_event(event) {
                return Poll::Ready(Some(Ok(Delta::Text(text))));
            }
        }
    }

    /// The step that needs no further event: the end, once, and then `None`.
    fn pending(&mut self) -> Option<Option<Result<Delta>>> {
        if self.ended {
            return Some(None);
        }
        let end = self.end.take()?;
        self.ended = true;
        Some(Some(end.map(|(reason, stats)| Delta::End(reason, stats))))
    }

    /// Takes one event, or the engine's silence. Returns the text that it completes.
    fn on_event(&mut self, event: Option<Event>) -> Option<String> {
        let text = match event {
            Some(Event::Token(Token { id, logprobs, stats })) => {
                self.stats = stats;
                self.tokens.push(id);
                self.logprobs.extend(logprobs.map(|logprobs| (id, *logprobs)));
                match self.decoder.push(&self.tokenizer, id) {
                    Ok(piece) => self.stops.push(&piece),
                    Err(e) => self.fail(e),
                }
            }
            Some(Event::Done(reason, stats)) => {
                self.end = Some(Ok((reason, stats)));
                match self.decoder.finish(&self.tokenizer) {
                    Ok(piece) => self.stops.push(&piece) + &self.stops.finish(),
                    Err(e) => self.fail(e),
                }
            }
            Some(Event::Captured(captured)) => {
                self.captured.push(captured);
                String::new()
            }
            Some(Event::Failed(e)) => self.fail(e),
            None => self.fail(Error::Stopped("it gave no reason".into())),
        };
        if self.stops.matched.is_some() {
            // Text after a stop string is not read: closing makes the engine free the sequence now.
            self.events.close();
            let stats = match &self.end {
                Some(Ok((_, stats))) => *stats,
                _ => self.stats,
            };
            self.end = Some(Ok((FinishReason::Stop, stats)));
        }
        Some(text).filter(|text| !text.is_empty())
    }

    fn fail(&mut self, error: Error) -> String {
        self.end = Some(Err(error));
        String::new()
    }
}

/// Wakes a thread that waits for an event.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Finds stop strings in text that comes in pieces. Holds back text that may be the beginning of one.
struct StopStrings {
    stops: Vec<String>,
    held: String,
    matched: Option<usize>, // which
}

impl StopStrings {
    fn new(stops: Vec<String>) -> Result<Self> {
        if stops.iter().any(String::is_empty) {
            return Err(Error::Invalid("a stop string is empty: it would end every answer at once".into()));
        }
        Ok(Self { stops, held: String::new(), matched: None })
    }

    /// The text that is certain after `piece`. After a match, nothing.
    fn push(&mut self, piece: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let found =
            self.stops.iter().enumerate().filter_map(|(i, stop)| Some((self.held.find(stop.as_str())?, i))).min();
        if let Some((at, which)) = found {
            self.matched = Some(which);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// The text held back for a stop string that did not come.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::fixture_dir;
    use proptest::prelude::*;
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    fn feed(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut matcher = StopStrings::new(stops.iter().map(|s| s.to_string()).collect()).unwrap();
        let mut out: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        out.push(matcher.finish());
        (out, matcher.matched.is_some())
    }

    #[test]
    fn stop_strings_are_found_across_pieces() {
        assert_eq!(
            feed(&["\n\nUser:"], &["Hi\n", "\nUs", "er: x"]),
            (["Hi", "", "", ""].map(String::from).to_vec(), true)
        );
        assert_eq!(
            feed(&["\n\nUser:"], &["Hi\n", "\nUs", "e."]),
            (["Hi", "", "\n\nUse.", ""].map(String::from).to_vec(), false)
        );
        assert_eq!(feed(&["aab"], &["aa", "ab"]).0.concat(), "a");
        assert_eq!(feed(&["é"], &["caf", "é!"]), (["caf", "", ""].map(String::from).to_vec(), true));
        assert_eq!(feed(&["bc", "abcd"], &["ab", "c"]).0.concat(), "a");
        assert_eq!(feed(&["stop"], &["never sto"]).0.concat(), "never sto");
        assert!(StopStrings::new(vec![String::new()]).is_err());
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(text in "[abé]{0,20}", stops in proptest::collection::vec("[abé]{1,4}", 0..3),
            cut in 1usize..4) {
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = chars.chunks(cut).map(|c| c.iter().collect()).collect();
            let mut matcher = StopStrings::new(stops.clone()).unwrap();
            let got: String = pieces.iter().map(|p| matcher.push(p)).collect::<String>() + &matcher.finish();
            // The stop string that is complete first wins; of those complete in the same piece, the one that begins
            // first.
            match stops.iter().filter_map(|s| text.find(s.as_str())).min() {
                None => prop_assert_eq!(got, text),
                Some(_) => {
                    prop_assert!(text.starts_with(&got) && matcher.matched.is_some());
                    prop_assert!(stops.iter().any(|s| text[got.len()..].starts_with(s.as_str())));
                }
            }
        }
    }

    fn stream(stops: &[&str]) -> (UnboundedSender<Event>, TextStream, Arc<Tokenizer>) {
        let tokenizer = Arc::new(Tokenizer::load(&fixture_dir()).unwrap());
        let (sender, events) = unbounded_channel();
        let stops = stops.iter().map(|s| s.to_string()).collect();
        (sender, TextStream::new(events, tokenizer.clone(), stops, 3).unwrap(), tokenizer)
    }

    #[test]
    fn an_answer_ends_with_what_was_held_back() {
        let (sender, mut answer, tokenizer) = stream(&["zzz"]);
        for id in tokenizer.encode("naïve zz", false).unwrap() {
            sender.send(Event::Token(Token { id, logprobs: None, stats: RequestStats::default() })).unwrap();
        }
        sender
            .send(Event::Done(FinishReason::Length, RequestStats { completion_tokens: 99, ..Default::default() }))
            .unwrap();
        let mut text = String::new();
        loop {
            match answer.next_blocking().unwrap().unwrap() {
                Delta::Text(piece) => text += &piece,
                Delta::End(reason, stats) => {
                    break assert_eq!((reason, stats.completion_tokens), (FinishReason::Length, 99));
                }
            }
        }
        assert_eq!(text, "naïve zz");
        assert!(answer.next_blocking().is_none());
    }

    #[test]
    fn a_stop_string_ends_the_request_at_once() {
        let (sender, mut answer, tokenizer) = stream(&["lo w"]);
        for (i, id) in tokenizer.encode("Hello world", false).unwrap().into_iter().enumerate() {
            let stats = RequestStats { completion_tokens: i + 1, decode_bytes: 7, ..Default::default() };
            let _ = sender.send(Event::Token(Token { id, logprobs: None, stats }));
        }
        let mut text = String::new();
        let (reason, stats) = loop {
            match answer.next_blocking().unwrap().unwrap() {
                Delta::Text(piece) => text += &piece,
                Delta::End(reason, stats) => break (reason, stats),
            }
        };
        assert_eq!(reason, FinishReason::Stop);
        assert_eq!(
            (stats.completion_tokens, stats.decode_bytes),
            (answer.tokens().len(), 7),
            "the engine's numbers up to there"
        );
        assert_eq!(text, "Hel");
        assert!(sender.is_closed());
        assert!(answer.next_blocking().is_none());
    }

    #[test]
    fn waiting_ends_with_the_time_or_with_an_event() {
        let (sender, mut answer, tokenizer) = stream(&[]);
        let begun = Instant::now();
        assert!(answer.next_within(Duration::from_millis(20)).is_pending());
        assert!(begun.elapsed() >= Duration::from_millis(20));
        let id = tokenizer.encode("x", false).unwrap()[0];
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            sender.send(Event::Token(Token { id, logprobs: None, stats: RequestStats::default() })).unwrap();
            sender
        });
        let step = answer.next_within(Duration::from_secs(3600));
        assert!(matches!(step, Poll::Ready(Some(Ok(Delta::Text(text)))) if text == "x"));
        drop(late.join());
    }

    #[test]
    fn a_vanished_engine_is_an_error_and_a_drop_is_a_cancel() {
        let (sender, mut answer, _) = stream(&[]);
        drop(sender);
        assert!(matches!(answer.next_blocking(), Some(Err(Error::Stopped(_)))));
        let (sender, answer, _) = stream(&[]);
        drop(answer);
        assert!(sender.is_closed());
    }
}
