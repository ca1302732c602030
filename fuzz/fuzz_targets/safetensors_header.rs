//! Any bytes: refused, or every tensor lies inside of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(entries) = moebius_cache::checkpoint::parse_safetensors(bytes) {
        for entry in entries.values() {
            assert!(bytes.get(entry.bytes.clone()).is_some());
        }
    }
});
