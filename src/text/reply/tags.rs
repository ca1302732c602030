//! Replies with tags: `<think>` first, then content, in which calls stand between markers.
//!
//! ```text
//! Start ─▶ Reasoning ─▶ Content ─▶ Head ─▶ Json | Raw | Parameters | Literals ─▶ Close ─┐
//!   └───────────────────▶ ▲  ▲       └ no call: as content ┘                            │
//!                            └──────────────────────────────────────────────────────────┘
//! ```

use super::ReplyStart;
use super::format::{ArgumentForm, CallFormat, Markup, Name, Place, Section};
use super::head::{self, CallHead};
use super::json::{Scan, Scanner};
use super::literals::Literals;
use super::parameters::{self, Parameters};
use super::pipe::{Input, ReplyOutput, first};

/// Text that waits is read with every token up to here: far above any marker, name or white space of a model that means
/// well.
const EAGER_BYTES: usize = 4096;

/// Bytes that other fields of a call may have behind its arguments.
const MAX_FIELDS: usize = 512;

/// What stands between the calls of a list.
const BETWEEN: &[char] = &[' ', '\n', '\r', '\t', ',', ';'];

#[derive(Debug)]
pub(super) struct Tags {
    markup: Markup,
    call: Option<&'static CallFormat>, // the way in which the last call was written
    again: usize,                      // bytes of waiting text before which another look would find nothing
    state: State,
    trim: bool,         // white space that follows a marker is dropped
    in_section: bool,   // calls of this section may follow
    may_be_first: bool, // the answer had no text so far
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
    Literals(Literals),
    /// The arguments are complete. Other fields of the call's object may follow.
    Close {
        fields: bool,
    },
}

/// Behind arguments.
const CLOSE: State = State::Close { fields: true };

impl Tags {
    pub(super) fn new(markup: Markup, start: ReplyStart) -> Self {
        let state = State::Start(start);
        Self { markup, call: None, again: 0, state, trim: false, in_section: false, may_be_first: true }
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
                parameters::ParameterStep::Done => self.go(CLOSE),
            },
            State::Literals(literals) => literals.read(input, output) && self.go(CLOSE),
            State::Close { fields } => {
                let fields = *fields;
                self.close(fields, input, output)
            }
        }
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// The format of the call that is read.
    fn format(&self) -> &'static CallFormat {
        self.call.or(self.markup.format).expect("only a format has calls")
    }

    fn start(&mut self, start: ReplyStart, input: &mut Input) -> bool {
        if let Some(thoughts) = self.markup.thoughts {
            let open = thoughts.open.trim_end();
            let text = input.text.trim_start();
            let blank = input.text.len() - text.len();
            if !input.ended && open.starts_with(text) && text.len() < open.len() {
                return false;
            }
            if text.starts_with(open) {
                input.skip(blank + open.len());
                self.trim = true;
                return self.go(State::Reasoning);
            }
        }
        self.trim = start == ReplyStart::Reasoning;
        self.go(if start == ReplyStart::Reasoning { State::Reasoning } else { State::Content })
    }

    fn reasoning(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let close = self.markup.thoughts.map_or("</think>", |thoughts| thoughts.close);
        let mut ends = vec![close];
        // A section of calls is unmistakable: some models forget to close their reasoning before it.
        let section = self.markup.format.filter(|format| format.place == Place::Anywhere);
        ends.extend(section.and_then(|format| format.section.as_ref()).map(Section::marker));
        match first(&input.text, &ends) {
            Some((at, marker)) => {
                output.reasoning(input.text[..at].trim_end());
                input.skip(if marker == close { at + marker.len() } else { at });
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
            if self.in_section && ["", "{"].contains(&self.format().opener) {
                return self.list(input);
            }
            if self.may_be_first
                && format.place == Place::First
                && let Some(goes_on) = self.first_call(format, input)
            {
                return goes_on;
            }
            let anywhere = format.ways().filter(|way| way.place == Place::Anywhere);
            markers.extend(anywhere.flat_map(|way| way.starts));
            if self.in_section {
                section_end = format.section.as_ref().map(|section| section.close.trim_start());
                markers.push(format.opener);
                markers.extend(section_end);
            }
        }
        let wrappers = self.markup.wrappers;
        markers.extend(wrappers);
        match first(&input.text, &markers) {
            Some((at, marker)) => {
                let settled = input.text[..at].trim_end().len();
                self.say(&input.text[..settled], output);
                if Some(marker) == section_end || wrappers.contains(&marker) {
                    input.skip(at + marker.len());
                    self.trim = true;
                    self.in_section &= Some(marker) != section_end;
                    return true;
                }
                input.skip(settled);
                self.go(State::Head { blank: at - settled })
            }
            None => {
                let settled = input.settled(&markers);
                self.say(&input.text[..settled], output);
                input.skip(settled);
                false
            }
        }
    }

    fn say(&mut self, text: &str, output: &mut ReplyOutput) {
        self.may_be_first &= text.trim().is_empty();
        output.content(text);
    }

    /// Where a call may only stand first: whether another step may follow, or `None` if the text is no call.
    fn first_call(&mut self, format: &'static CallFormat, input: &mut Input) -> Option<bool> {
        if self.call.is_some() {
            input.skip(input.text.len() - input.text.trim_start_matches(BETWEEN).len());
        }
        let text = input.text.trim_start();
        let blank = input.text.len() - text.len();
        if format.starts.iter().any(|start| text.starts_with(start)) {
            return Some(self.go(State::Head { blank }));
        }
        if !input.ended && format.starts.iter().any(|start| start.starts_with(text)) {
            return Some(false);
        }
        None
    }

    /// Between the calls of a list.
    fn list(&mut self, input: &mut Input) -> bool {
        let format = self.format();
        input.skip(input.text.len() - input.text.trim_start_matches(BETWEEN).len());
        let text = input.text.as_str();
        if text.is_empty() {
            return false;
        }
        let close = format.section.as_ref().map_or("", |section| section.close.trim_start());
        if let Some(after) = text.strip_prefix(']') {
            let (tail, after) = (close.strip_prefix(']').unwrap_or("").trim_start(), after.trim_start());
            if !input.ended && tail.len() > after.len() && tail.starts_with(after) {
                return false;
            }
            let length = if after.starts_with(tail) { text.len() - after.len() + tail.len() } else { 1 };
            input.skip(length);
            (self.trim, self.in_section) = (true, false);
            return true;
        }
        if !close.is_empty() && text.starts_with(close) {
            input.skip(close.len());
            (self.trim, self.in_section) = (true, false);
            return true;
        }
        if !close.is_empty() && !input.ended && close.starts_with(text) {
            return false;
        }
        let begins = match format.opener {
            "" => text.starts_with(|c: char| c.is_alphabetic() || c == '_'),
            opener => text.starts_with(opener),
        };
        self.in_section = begins;
        self.go(if begins { State::Head { blank: 0 } } else { State::Content })
    }

    fn head(&mut self, blank: usize, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let format = self.markup.format.expect("only a format has calls");
        match head::read(format, input, blank) {
            CallHead::Open => return false,
            CallHead::Call(call) if output.tool(&call.name).is_some() => {
                output.call(&call.name, call.id);
                input.skip(blank + call.length);
                self.call = Some(call.format);
                self.in_section = call.format.section.is_some();
                return self.go(match (call.arguments, &call.format.arguments) {
                    (Some(json), _) => {
                        output.arguments(&json);
                        State::Close { fields: false }
                    }
                    (None, ArgumentForm::Json) => State::Json { scanner: Scanner::default(), begun: false },
                    (None, ArgumentForm::Parameters(frame)) => {
                        State::Parameters(Parameters::new(call.format, *frame, &call.name))
                    }
                    (None, ArgumentForm::Literals(dialect)) => State::Literals(Literals::new(*dialect)),
                });
            }
            _ => {}
        }
        // No call, or one of a tool that the request does not have: its marker is content, and what follows is read
        // again.
        let mut markers = format.ways().flat_map(|way| way.starts.iter().chain([&way.opener]));
        let marker = markers.find(|marker| !marker.is_empty() && input.text[blank..].starts_with(**marker));
        let length = blank + marker.map_or(0, |marker| marker.len());
        output.content(&input.text[..length]);
        input.skip(length);
        (self.in_section, self.may_be_first) = (self.in_section && marker.is_some(), false);
        self.go(State::Content)
    }

    fn json(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let format = self.format();
        let State::Json { scanner, begun } = &mut self.state else { return false };
        // A marker that is a special token is one wherever it stands; a tag may stand in a string.
        let marker = format.token_closer();
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
                Some(_) if format.closer.is_empty() => return self.empty(output),
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
        complete && self.go(CLOSE)
    }

    /// A call without a word of arguments.
    fn empty(&mut self, output: &mut ReplyOutput) -> bool {
        output.arguments("{}");
        self.go(CLOSE)
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
        stop.is_some() && self.go(CLOSE)
    }

    /// Drops what closes a call, and no other text.
    fn close(&mut self, fields: bool, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let format = self.format();
        input.skip_blank();
        if fields && matches!(format.name, Name::Field(_)) && input.text.starts_with(',') {
            match fields_end(&input.text) {
                Some(Ok(length)) => input.skip(length),
                Some(Err(())) => {}
                None if !input.ended => return false,
                None => {
                    output.content(&std::mem::take(&mut input.text));
                }
            }
        }
        let junk: &[char] = match format.arguments {
            ArgumentForm::Json => &[' ', '\n', '\r', '\t', '}', '`'],
            ArgumentForm::Parameters(_) | ArgumentForm::Literals(_) => &[' ', '\n', '\r', '\t'],
        };
        let before = input.text.len() - input.text.trim_start_matches(junk).len();
        input.skip(before);
        if input.text.is_empty() && !input.ended {
            self.state = State::Close { fields: fields && before == 0 };
            return false;
        }
        let closer = format.closer.trim_start_matches(junk);
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

/// Where the fields of an object end that follow its arguments: at its brace. An error: there are none. `None`: more
/// text decides.
fn fields_end(text: &str) -> Option<Result<usize, ()>> {
    match text[1..].trim_start().chars().next() {
        Some('"') => {}
        Some(_) => return Some(Err(())),
        None => return None,
    }
    let mut scanner = Scanner::default();
    scanner.push(b'{');
    let end = text.bytes().take(MAX_FIELDS).position(|byte| scanner.push(byte) == Scan::End);
    match end {
        None if text.len() < MAX_FIELDS => None,
        end => Some(end.ok_or(())),
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
            let mut tags = Tags::new(Markup { format, ..Markup::of("<think>") }, ReplyStart::Answer);
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
