//! Any bytes as a stream of events: no panic, no more kept than an event may have, and cutting changes nothing.
#![no_main]

use moebius::cli::measure::server::sse::{EventParser, TooLarge};

fn read(pieces: &[&[u8]]) -> Result<Vec<String>, TooLarge> {
    let (mut parser, mut events) = (EventParser::default(), Vec::new());
    for piece in pieces {
        parser.push(piece, &mut |data| events.push(data))?;
    }
    parser.finish(&mut |data| events.push(data));
    Ok(events)
}

libfuzzer_sys::fuzz_target!(|input: (u16, &[u8])| {
    let (cut, bytes) = input;
    let (a, b) = bytes.split_at((cut as usize).min(bytes.len()));
    assert_eq!(read(&[a, b]), read(&[bytes]));
});
