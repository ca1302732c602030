//! Any text as `config.json`: refused, or a model of sane size whose memory can be counted.
#![no_main]

use moebius::config::EngineConfig;
use moebius::load::{self, Budget};

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(model) = moebius::models::parse(text) {
        assert!((1..=4096).contains(&model.layers.len()));
        let config = EngineConfig::default();
        let _ = load::precision(&model, &config).and_then(|precision| Budget::new(&model, &config, precision, 8 << 30));
    }
});
