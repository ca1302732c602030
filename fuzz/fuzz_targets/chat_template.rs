//! Any text as a chat template: refused, or rendered, or failing with words; within its fuel.
#![no_main]

use moebius::text::chat_template::{ChatTemplate, RenderOptions};
use serde_json::{Map, json};

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(template) = ChatTemplate::compile(text, Map::new()) {
        let messages = [json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": null})];
        let _ = template.render(&messages, &RenderOptions::default());
    }
});
