#![no_main]
//! Bodies of every endpoint that makes a request of them. The first byte chooses the endpoint.

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use moebius::engine::{EngineHandle, EngineInfo};
use moebius::kernel::Simd;
use moebius::server::read_request;
use moebius::text::model::{TextModel, TextSide};

static MODEL: LazyLock<TextModel> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/moe-gqa");
    let text = TextSide::load(&dir).expect("the demo's tokenizer and template");
    let info = EngineInfo {
        model: "fuzzed".into(),
        architecture: "qwen3_moe".into(),
        experts: "int4".into(),
        dense: "bf16".into(),
        kv: "bf16".into(),
        activations: "8".into(),
        layers: 4,
        hidden_size: 8,
        streams: 1,
        vocab_size: 512,
        choices: 6,
        max_context: 4096,
        max_queue: 1,
        threads: 1,
        simd: Simd::Scalar,
        device: "cpu".into(),
        ready_s: 0.0,
    };
    TextModel::new(EngineHandle::from_parts(info, tokio::sync::mpsc::unbounded_channel().0), text)
});

fuzz_target!(|data: &[u8]| {
    let Some((&which, body)) = data.split_first() else { return };
    let paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/capture"];
    let _ = read_request(&MODEL, paths[usize::from(which) % paths.len()], body);
});
