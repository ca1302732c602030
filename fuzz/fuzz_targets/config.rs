//! Any text as `config.json`: refused, or a model of sane size whose memory can be counted.
#![no_main]

use moebius::config::EngineConfig;
use moebius::kernel;
use moebius::load::{Budget, Kept, Machine, Spec};
use moebius::machine::heap::Heap;
use moebius::machine::workers::Team;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(model) = moebius::model::families::parse(text) {
        assert!((1..=4096).contains(&model.layers.len()));
        let config = EngineConfig::default();
        let team = Team::new(&[0]).expect("one worker is the caller");
        let (kernel, heap) = (kernel::best(), Heap::default());
        let machine = Machine { team: team.into(), kernel, heap, available_bytes: 8 << 30 };
        let _ = Spec::new(&model, &config, Kept::NOTHING).and_then(|spec| Budget::new(&spec, &machine));
    }
});
