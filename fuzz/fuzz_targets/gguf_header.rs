//! Any bytes behind a GGUF's first ones: refused, or every tensor lies inside of them and overlaps no other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let bytes = [&b"GGUF\x03\0\0\0"[..], bytes].concat();
    if let Ok(parsed) = moebius_cache::checkpoint::gguf::parse(&bytes) {
        let mut ranges: Vec<_> = parsed.tensors.values().map(|entry| (entry.bytes.start, entry.bytes.end)).collect();
        ranges.sort_unstable();
        assert!(ranges.iter().all(|&(start, end)| start < end && end <= bytes.len()));
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    }
});
