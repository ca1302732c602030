//! Any bytes: refused, or every layer lies inside of them. The header's checksum is made right first, else nothing gets
//! past it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    moebius_cache::format::reseal(&mut bytes);
    if let Ok((header, experts)) = moebius_cache::format::parse(&bytes) {
        assert_eq!(experts.len(), header.layers.len() * header.num_experts);
        for layer in &header.layers {
            assert!(bytes.get(layer.offset as usize..(layer.offset + layer.bytes) as usize).is_some());
        }
    }
});
