//! Server-sent events out of bytes, however they are cut.
//!
//! Source: the HTML standard, section 9.2.6. Lines end with LF, CR or CRLF; what is not `data` says nothing about an
//! answer and is dropped.

/// Bytes of one event at most: chunks of answers are small, and a server that never ends a line must not fill memory.
pub const MAX_EVENT_BYTES: usize = 1 << 20;

/// The `data` of events, as their last line arrives.
#[derive(Debug, Default)]
pub struct EventParser {
    line: Vec<u8>,
    data: Option<Vec<u8>>, // lines of this event, each with its LF
    after_cr: bool,        // an LF now belongs to the line that has ended
    begun: bool,           // a byte order mark is no longer one
}

/// An event larger than [`MAX_EVENT_BYTES`].
#[derive(Debug, PartialEq)]
pub struct TooLarge;

impl EventParser {
    /// Reads on, and gives `data` of every event that ends here. What is not UTF-8 becomes U+FFFD.
    pub fn push(&mut self, bytes: &[u8], event: &mut impl FnMut(String)) -> Result<(), TooLarge> {
        for &byte in bytes {
            let ends_crlf = std::mem::replace(&mut self.after_cr, byte == b'\r') && byte == b'\n';
            match byte {
                _ if ends_crlf => {}
                b'\r' | b'\n' => self.end_line(event),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.as_ref().map_or(0, Vec::len) > MAX_EVENT_BYTES {
                return Err(TooLarge);
            }
        }
        Ok(())
    }

    /// The stream is over. The standard drops an event without its blank line; servers that forget it behind their last
    /// one are many.
    pub fn finish(mut self, event: &mut impl FnMut(String)) {
        if !self.line.is_empty() {
            self.end_line(event);
        }
        self.end_event(event);
    }

    fn end_line(&mut self, event: &mut impl FnMut(String)) {
        let line = std::mem::take(&mut self.line);
        let mark = if self.begun { &b""[..] } else { b"\xef\xbb\xbf" };
        self.begun = true;
        let line = line.strip_prefix(mark).unwrap_or(&line);
        if line.is_empty() {
            return self.end_event(event);
        }
        let name_end = line.iter().position(|&b| b == b':').unwrap_or(line.len());
        if &line[..name_end] == b"data" {
            let value = line.get(name_end + 1..).unwrap_or_default();
            let data = self.data.get_or_insert_default();
            data.extend(value.strip_prefix(b" ").unwrap_or(value));
            data.push(b'\n');
        }
    }

    fn end_event(&mut self, event: &mut impl FnMut(String)) {
        if let Some(mut data) = self.data.take() {
            data.pop();
            event(String::from_utf8_lossy(&data).into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All events of `pieces`, one after the other.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let (mut parser, mut events) = (EventParser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, &mut |data| events.push(data)).unwrap();
        }
        parser.finish(&mut |data| events.push(data));
        events
    }

    fn whole(text: &str) -> Vec<String> {
        read([text.as_bytes()])
    }

    #[test]
    fn what_the_standard_says() {
        assert_eq!(whole("data: a\n\ndata:b\r\n\r\ndata:  c\r\rdata\n\n"), ["a", "b", " c", ""]);
        assert_eq!(whole("data: one\ndata: two\ndata:\n\n"), ["one\ntwo\n"]);
        assert_eq!(whole(": comment\n\nevent: x\nid: 7\nretry: 1\n\n:\n\ndatum: no\n data: no\n\n"), [""; 0]);
        assert_eq!(whole("event: error\ndata: {\"a\": \"b: c\"}\n\n"), ["{\"a\": \"b: c\"}"]);
        assert_eq!(whole("\u{feff}data: a\n\n"), ["a"]);
        assert_eq!(whole("\n\n\r\n\rdata: a\n\n\n\n\n"), ["a"]);
    }

    #[test]
    fn an_end_without_a_blank_line_is_an_end() {
        assert_eq!(whole("data: a\n\ndata: [DONE]"), ["a", "[DONE]"]);
        assert_eq!(whole("data: [DONE]\n"), ["[DONE]"]);
        assert_eq!(whole(""), [""; 0]);
    }

    #[test]
    fn no_event_fills_memory() {
        let mut parser = EventParser::default();
        let megabyte = vec![b'x'; MAX_EVENT_BYTES];
        assert_eq!(parser.push(&megabyte, &mut |_| {}), Ok(()));
        assert_eq!(parser.push(b"x", &mut |_| {}), Err(TooLarge));
        // Many short lines of one event are as bad.
        let mut parser = EventParser::default();
        assert_eq!(parser.push(&b"data: xxxxxxxx\n".repeat(1 << 20), &mut |_| {}), Err(TooLarge));
    }

    #[test]
    fn bytes_that_are_no_text_do_not_stop_it() {
        assert_eq!(read([&b"data: \xff\xfe\n\n"[..]]), ["\u{fffd}\u{fffd}"]);
    }

    fn line_end() -> impl Strategy<Value = &'static str> {
        prop_oneof![Just("\n"), Just("\r"), Just("\r\n")]
    }

    proptest! {
        /// Payloads come out as they went in, whatever the line ends, comments and cuts.
        #[test]
        fn events_survive_any_cut(
            payloads in prop::collection::vec("[^\r\n\u{feff}]{0,12}(\n[^\r\n]{0,12}){0,2}", 0..6),
            ends in prop::collection::vec(line_end(), 64),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let mut ends = ends.iter().cycle();
            let mut text = String::new();
            for payload in &payloads {
                text += ": ping";
                text += ends.next().unwrap();
                for line in payload.split('\n') {
                    text += &format!("data: {line}{}", ends.next().unwrap());
                }
                // Two ends that do not read as one: after CR, a lone LF would be its second half.
                text += if text.ends_with('\r') { "\r\n" } else { ends.next().unwrap() };
            }
            let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0,
                text.len()]).collect();
            places.sort_unstable();
            let pieces = places.windows(2).map(|w| &text.as_bytes()[w[0]..w[1]]);
            prop_assert_eq!(read(pieces), payloads);
        }

        /// Any bytes: no panic, and cutting changes nothing.
        #[test]
        fn any_bytes_in_any_pieces(bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b':'),
            Just(b'd'), any::<u8>()], 0..200), cut in any::<prop::sample::Index>()) {
            let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(read([a, b]), read([&bytes[..]]));
        }
    }
}
