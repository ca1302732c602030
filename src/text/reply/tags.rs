//! Replies with tags: `<think>` first, then content, in which calls stand between markers.
//!
//! ```text
//! Start ─▶ Reasoning ─▶ Content ─▶ Header ─▶ Json | Raw | Parameters ─▶ Close ─┐
//!   └───────────────────▶ ▲  ▲        └ no call: as content ┘                 │
//!                            └────────────────────────────────────────────────┘
//! ```

use super::Part;
use super::header::{self, Arguments, Header};
use super::json::{Scan, Scanner};
use super::parser::{Output, content, first, reasoning, settled};
use super::syntax::Format;
use super::xml::{self, Parameters};

/// Text that waits is read with every token up to here: far above any marker, name or white space of a model that means
/// well.
const EAGER_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct Tags {
    format: Option<Format>,
    thinks: bool,
    calls: bool,  // tools may be called
    text: String, // not yet said
    again: usize, // bytes of it before which another look would find nothing
    state: State,
    trim: bool,       // white space that follows a marker is dropped
    in_section: bool, // calls of this section may follow
}

#[derive(Debug)]
enum State {
    /// Nothing but white space yet. `in_reasoning`: the prompt opened it.
    Start {
        in_reasoning: bool,
    },
    Reasoning,
    Content,
    /// A call may begin behind this many bytes of white space.
    Header {
        blank: usize,
    },
    /// Arguments that are JSON, up to their end.
    Json {
        scanner: Scanner,
        begun: bool,
    },
    /// Arguments that are not, up to the call's end.
    Raw,
    Parameters(Parameters),
    /// The arguments are complete.
    Close,
}

impl Tags {
    pub(super) fn new(format: Option<Format>, thinks: bool, calls: bool, in_reasoning: bool) -> Self {
        let calls = calls && format.is_some();
        Self {
            format,
            thinks,
            calls,
            text: String::new(),
            again: 0,
            state: State::Start { in_reasoning },
            trim: false,
            in_section: false,
        }
    }

    pub(super) fn push(&mut self, text: &str, output: &mut Output, parts: &mut Vec<Part>) {
        self.text.push_str(text);
        if self.text.len() < self.again {
            return;
        }
        while self.step(false, output, parts) {}
        // What waits is read from its beginning, so a long text is read again only when it is longer by a part of
        // itself.
        self.again = if self.text.len() < EAGER_BYTES { 0 } else { self.text.len() + self.text.len() / 8 };
    }

    pub(super) fn finish(&mut self, output: &mut Output, parts: &mut Vec<Part>) {
        while self.step(true, output, parts) {}
    }

    /// One transition; whether another may follow. With `end`, no text follows, and none is left waiting.
    fn step(&mut self, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        if self.trim {
            let blank = self.text.len() - self.text.trim_start().len();
            self.text.drain(..blank);
            self.trim = self.text.is_empty();
        }
        match &mut self.state {
            State::Start { in_reasoning } => {
                let in_reasoning = *in_reasoning;
                self.start(end, in_reasoning)
            }
            State::Reasoning => self.reasoning(end, parts),
            State::Content => self.content(end, parts),
            State::Header { blank } => {
                let blank = *blank;
                self.header(end, blank, output, parts)
            }
            State::Json { .. } => self.json(end, output, parts),
            State::Raw => self.raw(end, output, parts),
            State::Parameters(parameters) => match parameters.step(&mut self.text, end, output, parts) {
                xml::Step::Wait => false,
                xml::Step::More => true,
                xml::Step::Done => self.go(State::Close),
            },
            State::Close => self.close(end),
        }
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// What begins a call.
    fn openers(&self) -> &'static [&'static str] {
        match self.format {
            Some(format) if self.calls => header::openers(format, self.in_section),
            _ => &[],
        }
    }

    fn start(&mut self, end: bool, in_reasoning: bool) -> bool {
        let text = self.text.trim_start();
        let blank = self.text.len() - text.len();
        if self.thinks && !end && "<think>".starts_with(text) && text.len() < "<think>".len() {
            return false;
        }
        if self.thinks && text.starts_with("<think>") {
            self.text.drain(..blank + "<think>".len());
            self.trim = true;
            return self.go(State::Reasoning);
        }
        self.trim = in_reasoning;
        self.go(if in_reasoning { State::Reasoning } else { State::Content })
    }

    fn reasoning(&mut self, end: bool, parts: &mut Vec<Part>) -> bool {
        // A section of calls is unmistakable: some models forget to close their reasoning before it.
        let mut ends = vec!["</think>"];
        ends.extend(self.openers().first().filter(|_| self.format.is_some_and(header::has_sections)));
        match first(&self.text, &ends) {
            Some((at, marker)) => {
                reasoning(self.text[..at].trim_end(), parts);
                self.text.drain(..if marker == "</think>" { at + marker.len() } else { at });
                self.trim = true;
                self.go(State::Content)
            }
            None => {
                let said = if end { self.text.len() } else { settled(&self.text, &ends) };
                reasoning(&self.text[..said], parts);
                self.text.drain(..said);
                false
            }
        }
    }

    fn content(&mut self, end: bool, parts: &mut Vec<Part>) -> bool {
        let mut markers = self.openers().to_vec();
        let section_end = self.format.filter(|_| self.in_section).and_then(header::section_end);
        markers.extend(section_end);
        match first(&self.text, &markers) {
            Some((at, marker)) => {
                let said = self.text[..at].trim_end().len();
                content(&self.text[..said], parts);
                if Some(marker) == section_end {
                    self.text.drain(..at + marker.len());
                    (self.trim, self.in_section) = (true, false);
                    return true;
                }
                self.text.drain(..said);
                self.go(State::Header { blank: at - said })
            }
            None => {
                let said = if end || markers.is_empty() { self.text.len() } else { settled(&self.text, &markers) };
                content(&self.text[..said], parts);
                self.text.drain(..said);
                false
            }
        }
    }

    fn header(&mut self, end: bool, blank: usize, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        let format = self.format.expect("only a format has openers");
        let header = header::read(format, &self.text[blank..], end);
        match header {
            Header::Open if !end => return false,
            Header::Begin { name, id, length, arguments } if output.tool(&name).is_some() => {
                output.call(&name, id, parts);
                self.text.drain(..blank + length);
                self.in_section = header::has_sections(format);
                return self.go(match arguments {
                    Arguments::Json => State::Json { scanner: Scanner::default(), begun: false },
                    Arguments::Whole(json) => {
                        output.arguments(&json, parts);
                        State::Close
                    }
                    Arguments::Parameters => State::Parameters(Parameters::new(format, &name)),
                });
            }
            _ => {}
        }
        // No call that anyone could answer: its marker is content, and what follows is read again.
        let marker = header::openers(format, true).iter().find(|opener| self.text[blank..].starts_with(**opener));
        let length = blank + marker.map_or(0, |marker| marker.len());
        content(&self.text[..length], parts);
        self.text.drain(..length);
        self.go(State::Content)
    }

    fn json(&mut self, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        let State::Json { scanner, begun } = &mut self.state else { return false };
        // A marker that is a special token is one wherever it stands; a tag may stand in a string.
        let marker = self.format.filter(|&format| header::has_sections(format)).and_then(header::call_end);
        if !*begun {
            let blank = self.text.len() - self.text.trim_start().len();
            self.text.drain(..blank);
            match self.text.bytes().next() {
                None if end => return self.empty(output, parts),
                None => return false,
                Some(b'{') => *begun = true,
                Some(b'<') if marker.is_some_and(|marker| marker.starts_with(&*self.text) && !end) => return false,
                Some(_) if marker.is_some_and(|marker| self.text.starts_with(marker)) => {
                    return self.empty(output, parts);
                }
                Some(_) => return self.go(State::Raw),
            }
        }
        let stop = marker.and_then(|marker| self.text.find(marker));
        let held = marker.filter(|_| !end).map_or(0, |marker| super::parser::overlap(&self.text, marker));
        let known = stop.unwrap_or(self.text.len() - held);
        let (mut said, mut complete) = (known, stop.is_some());
        for (at, byte) in self.text[..known].bytes().enumerate() {
            match scanner.push(byte) {
                Scan::Alien if marker.is_none() => (said, complete) = (at, true),
                Scan::End => (said, complete) = (at + 1, true),
                _ => continue,
            }
            break;
        }
        output.arguments(&self.text[..said], parts);
        self.text.drain(..said);
        complete && self.go(State::Close)
    }

    /// A call without a word of arguments.
    fn empty(&mut self, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        output.arguments("{}", parts);
        self.go(State::Close)
    }

    fn raw(&mut self, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        let markers: Vec<_> = self.format.and_then(header::call_end).into_iter().collect();
        let stop = first(&self.text, &markers).map(|(at, _)| at);
        let said = match stop {
            Some(at) => self.text[..at].trim_end().len(),
            None if end => self.text.len(),
            None => settled(&self.text, &markers),
        };
        output.arguments(&self.text[..said], parts);
        self.text.drain(..said);
        stop.is_some() && self.go(State::Close)
    }

    /// Drops what closes a call, and no other text.
    fn close(&mut self, end: bool) -> bool {
        let format = self.format.expect("only a format has calls");
        let junk: &[char] =
            if header::has_parameters(format) { &[' ', '\n', '\r', '\t'] } else { &[' ', '\n', '\r', '\t', '}', '`'] };
        let rest = self.text.trim_start_matches(junk);
        let blank = self.text.len() - rest.len();
        self.text.drain(..blank);
        let marker = header::call_end(format).unwrap_or_default();
        if self.text.starts_with(marker) {
            self.text.drain(..marker.len());
        } else if marker.starts_with(&*self.text) {
            if !end {
                return false;
            }
            self.text.clear();
        }
        self.trim = true;
        self.go(State::Content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::reply::Tool;
    use serde_json::json;

    /// Text that can neither be said nor dropped yet.
    #[test]
    fn a_long_wait_is_not_read_with_every_token() {
        let tool = Tool { name: "f".into(), description: None, parameters: json!({}), strict: false };
        for (format, before, unit) in [
            (None, "", " "),
            (Some(Format::Hermes), "a", "\n"),
            (Some(Format::Hermes), "<tool_call>", " "),
            (Some(Format::Hermes), "<tool_call>{\"name\": \"", "x"),
            (Some(Format::Hermes), "<tool_call>{\"arguments\": \"", "x"),
            (Some(Format::Function), "<tool_call>\n<function=f>\n", "x"),
            (Some(Format::Function), "<tool_call>\n<function=f>\n<parameter=", "x"),
            (Some(Format::Function), "<tool_call>\n<function=f>\n<parameter=a>\n", "1"),
            (Some(Format::Kimi), "<|tool_calls_section_begin|>", " "),
        ] {
            let mut output = Output::of([tool.clone()].into());
            let mut tags = Tags::new(format, true, true, false);
            let mut parts = Vec::new();
            tags.push(before, &mut output, &mut parts);
            let mut read = 0;
            for _ in 0..100_000 {
                let length = tags.text.len() + unit.len();
                let reads = length >= tags.again;
                tags.push(unit, &mut output, &mut parts);
                read += if reads { length } else { 0 };
            }
            assert!(tags.text.len() >= 100_000, "{before:?} waits");
            assert!(read < 20_000_000, "{before:?}: {read} bytes are read");
            tags.finish(&mut output, &mut parts);
            assert!(tags.text.is_empty());
        }
    }
}
