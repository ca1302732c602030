//! Any schema, expression or grammar: refused in a sentence, or compiled within bounds and good for a few steps.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use moebius::text::grammar::{Grammar, Grammars};
use moebius::text::tokenizer::Tokenizer;

libfuzzer_sys::fuzz_target!(|input: (u8, &str)| {
    static GRAMMARS: OnceLock<(Tokenizer, Grammars)> = OnceLock::new();
    let (tokenizer, grammars) = GRAMMARS.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/_tokenizer");
        let tokenizer = Tokenizer::load(&dir).expect("the fixture's tokenizer");
        let grammars = Grammars::new(&tokenizer).expect("its vocabulary");
        (tokenizer, grammars)
    });
    let (kind, text) = input;
    let grammar = match (kind % 5, serde_json::from_str(text)) {
        (0, Ok(schema)) => Grammar::JsonSchema(schema),
        (1, Ok(schema)) => Grammar::LooseSchema(schema),
        (2, _) => Grammar::Regex(text.into()),
        (3, _) => Grammar::Lark(text.into()),
        _ => Grammar::Choice(text.split('|').map(String::from).collect()),
    };
    let Ok(mut constraint) = grammars.compile(&grammar) else { return };
    for step in 0..20 {
        let mut logits: Vec<f32> = (0..tokenizer.vocab_size()).map(|id| ((id * 31 + step * 17) % 97) as f32).collect();
        if constraint.is_complete() || constraint.mask(&mut logits).is_err() {
            return;
        }
        let best = moebius::engine::sampler::argmax(&logits);
        assert!(logits[best].is_finite(), "something may follow, or it is complete");
        constraint.accept(best as u32).expect("what the mask allows is accepted");
        if tokenizer.eos_ids().contains(&(best as u32)) {
            return;
        }
    }
});
