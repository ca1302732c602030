//! Replies with tags: `<think>` first, then content, in which calls stand between markers.
//!
//! ```text
//! Start ─▶ Reasoning ─▶ Content ─▶ Head ─▶ Json | Raw | Parameters ─▶ Close ─┐
//!   └───────────────────▶ ▲  ▲       └ no call: as content ┘                 │
//!                            └───────────────────────────────────────────────┘
//! ```

use super::ReplyStart;
use super::format::{ArgumentForm, CallFormat, Markup};
use super::head::{self, CallHead};
use super::json::{Scan, Scanner};
use super::parameters::{self, Parameters};
use super::pipe::{Input, ReplyOutput, first};

/// Text that waits is read with every token up to here: far above any marker, name or white space of a model that means
/// well.
const EAGER_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct Tags {
    markup: Markup,
    again: usize, // bytes of waiting text before which another look would find nothing
    state: State,
    trim: bool,       // white space that follows a marker is dropped
    in_section: bool, // calls of this section may follow
}

#[derive(Debug)]
enum State {
    /// Nothing but white space yet.
    Start(ReplyStart),
    Reasoning,
    Content,
    /// A call may begin behind this many bytes of white space.
    Head {
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
    pub(super) fn new(markup: Markup, start: ReplyStart) -> Self {
        Self { markup, again: 0, state: State::Start(start), trim: false, in_section: false }
    }

    pub(super) fn read(&mut self, input: &mut Input, output: &mut ReplyOutput) {
        if input.text.len() < self.again && !input.ended {
            return;
        }
        while self.step(input, output) {}
        // What waits is read from its beginning, so a long text is read again only when it is longer by a part of
        // itself.
        let length = input.text.len();
        self.again = if length < EAGER_BYTES { 0 } else { length + length / 8 };
    }

    /// One transition; whether another may follow. At the end of the input no text is left waiting.
    fn step(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        if self.trim {
            input.skip_blank();
            self.trim = input.text.is_empty();
        }
        match &mut self.state {
            State::Start(start) => {
                let start = *start;
                self.start(start, input)
            }
            State::Reasoning => self.reasoning(input, output),
            State::Content => self.content(input, output),
            State::Head { blank } => {
                let blank = *blank;
                self.head(blank, input, output)
            }
            State::Json { .. } => self.json(input, output),
            State::Raw => self.raw(input, output),
            State::Parameters(parameters) => match parameters.step(input, output) {
                parameters::ParameterStep::Wait => false,
                parameters::ParameterStep::More => true,
                parameters::ParameterStep::Done => self.go(State::Close),
            },
            State::Close => self.close(input),
        }
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    fn format(&self) -> &'static CallFormat {
        self.markup.format.expect("only a format has calls")
    }

    fn start(&mut self, start: ReplyStart, input: &mut Input) -> bool {
        let text = input.text.trim_start();
        let blank = input.text.len() - text.len();
        if self.markup.thinks && !input.ended && "<think>".starts_with(text) && text.len() < "<think>".len() {
            return false;
        }
        if self.markup.thinks && text.starts_with("<think>") {
            input.skip(blank + "<think>".len());
            self.trim = true;
            return self.go(State::Reasoning);
        }
        self.trim = start == ReplyStart::Reasoning;
        self.go(if start == ReplyStart::Reasoning { State::Reasoning } else { State::Content })
    }

    fn reasoning(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        // A section of calls is unmistakable: some models forget to close their reasoning before it.
        let mut ends = vec!["</think>"];
        let section = self.markup.format.and_then(|format| format.section.as_ref());
        ends.extend(section.map(|section| section.open.trim_end()));
        match first(&input.text, &ends) {
            Some((at, marker)) => {
                output.reasoning(input.text[..at].trim_end());
                input.skip(if marker == "</think>" { at + marker.len() } else { at });
                self.trim = true;
                self.go(State::Content)
            }
            None => {
                let settled = input.settled(&ends);
                output.reasoning(&input.text[..settled]);
                input.skip(settled);
                false
            }
        }
    }

    fn content(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let (mut markers, mut section_end) = (Vec::new(), None);
        if let Some(format) = self.markup.format {
            markers.extend(format.starts);
            if self.in_section {
                section_end = format.section.as_ref().map(|section| section.close.trim_start());
                markers.push(format.opener);
                markers.extend(section_end);
            }
        }
        match first(&input.text, &markers) {
            Some((at, marker)) => {
                let settled = input.text[..at].trim_end().len();
                output.content(&input.text[..settled]);
                if Some(marker) == section_end {
                    input.skip(at + marker.len());
                    (self.trim, self.in_section) = (true, false);
                    return true;
                }
                input.skip(settled);
                self.go(State::Head { blank: at - settled })
            }
            None => {
                let settled = input.settled(&markers);
                output.content(&input.text[..settled]);
                input.skip(settled);
                false
            }
        }
    }

    fn head(&mut self, blank: usize, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let format = self.format();
        match head::read(format, input, blank) {
            CallHead::Open => return false,
            CallHead::Call { name, id, length, arguments } if output.tool(&name).is_some() => {
                output.call(&name, id);
                input.skip(blank + length);
                self.in_section = format.section.is_some();
                return self.go(match (arguments, &format.arguments) {
                    (Some(json), _) => {
                        output.arguments(&json);
                        State::Close
                    }
                    (None, ArgumentForm::Json) => State::Json { scanner: Scanner::default(), begun: false },
                    (None, ArgumentForm::Parameters(frame)) => {
                        State::Parameters(Parameters::new(format, *frame, &name))
                    }
                });
            }
            _ => {}
        }
        // No call, or one of a tool that the request does not have: its marker is content, and what follows is read
        // again.
        let mut markers = format.starts.iter().chain([&format.opener]);
        let marker = markers.find(|marker| input.text[blank..].starts_with(**marker));
        let length = blank + marker.map_or(0, |marker| marker.len());
        output.content(&input.text[..length]);
        input.skip(length);
        self.go(State::Content)
    }

    fn json(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let format = self.format();
        let State::Json { scanner, begun } = &mut self.state else { return false };
        // A marker that is a special token is one wherever it stands; a tag may stand in a string.
        let marker = format.section.as_ref().map(|_| format.closer);
        if !*begun {
            input.skip_blank();
            match input.text.bytes().next() {
                None if input.ended => return self.empty(output),
                None => return false,
                Some(b'{') => *begun = true,
                Some(b'<') if marker.is_some_and(|marker| marker.starts_with(&*input.text) && !input.ended) => {
                    return false;
                }
                Some(_) if marker.is_some_and(|marker| input.text.starts_with(marker)) => {
                    return self.empty(output);
                }
                Some(_) => return self.go(State::Raw),
            }
        }
        let stop = marker.and_then(|marker| input.text.find(marker));
        let known = stop.unwrap_or(input.text.len() - marker.map_or(0, |marker| input.held(&[marker])));
        let (mut length, mut complete) = (known, stop.is_some());
        for (at, byte) in input.text[..known].bytes().enumerate() {
            match scanner.push(byte) {
                Scan::Alien if marker.is_none() => (length, complete) = (at, true),
                Scan::End => (length, complete) = (at + 1, true),
                _ => continue,
            }
            break;
        }
        output.arguments(&input.text[..length]);
        input.skip(length);
        complete && self.go(State::Close)
    }

    /// A call without a word of arguments.
    fn empty(&mut self, output: &mut ReplyOutput) -> bool {
        output.arguments("{}");
        self.go(State::Close)
    }

    fn raw(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let closer = self.format().closer.trim_start();
        let stop = input.text.find(closer);
        let length = match stop {
            Some(at) => input.text[..at].trim_end().len(),
            None => input.settled(&[closer]),
        };
        output.arguments(&input.text[..length]);
        input.skip(length);
        stop.is_some() && self.go(State::Close)
    }

    /// Drops what closes a call, and no other text.
    fn close(&mut self, input: &mut Input) -> bool {
        let format = self.format();
        let junk: &[char] = match format.arguments {
            ArgumentForm::Json => &[' ', '\n', '\r', '\t', '}', '`'],
            ArgumentForm::Parameters(_) => &[' ', '\n', '\r', '\t'],
        };
        input.skip(input.text.len() - input.text.trim_start_matches(junk).len());
        let closer = format.closer.trim_start();
        if input.text.starts_with(closer) {
            input.skip(closer.len());
        } else if closer.starts_with(&*input.text) {
            if !input.ended {
                return false;
            }
            input.text.clear();
        }
        self.trim = true;
        self.go(State::Content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::reply::Tool;
    use crate::text::reply::format::{HERMES, KIMI, QWEN_CODER};
    use serde_json::json;

    /// Text that can neither go out nor be dropped yet.
    #[test]
    fn a_long_wait_is_not_read_with_every_token() {
        let tool = Tool { name: "f".into(), description: None, parameters: json!({}), strict: false };
        for (format, before, unit) in [
            (None, "", " "),
            (Some(&HERMES), "a", "\n"),
            (Some(&HERMES), "<tool_call>", " "),
            (Some(&HERMES), "<tool_call>{\"name\": \"", "x"),
            (Some(&HERMES), "<tool_call>{\"arguments\": \"", "x"),
            (Some(&QWEN_CODER), "<tool_call>\n<function=f>\n", "x"),
            (Some(&QWEN_CODER), "<tool_call>\n<function=f>\n<parameter=", "x"),
            (Some(&QWEN_CODER), "<tool_call>\n<function=f>\n<parameter=a>\n", "1"),
            (Some(&KIMI), "<|tool_calls_section_begin|>", " "),
        ] {
            let mut output = ReplyOutput::new([tool.clone()].into());
            let mut tags = Tags::new(Markup { thinks: true, format }, ReplyStart::Answer);
            let mut input = Input { text: before.into(), ended: false };
            tags.read(&mut input, &mut output);
            let mut read = 0;
            for _ in 0..100_000 {
                input.text.push_str(unit);
                let length = input.text.len();
                let reads = length >= tags.again;
                tags.read(&mut input, &mut output);
                read += if reads { length } else { 0 };
            }
            assert!(input.text.len() >= 100_000, "{before:?} waits");
            assert!(read < 20_000_000, "{before:?}: {read} bytes are read");
            input.ended = true;
            tags.read(&mut input, &mut output);
            assert!(input.text.is_empty());
        }
    }
}
