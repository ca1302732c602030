//! A decode step touches the allocator not at all, whatever the model and precision.
#![allow(clippy::unwrap_used)]

mod common;

#[path = "common/allocations.rs"]
mod allocations;

use allocations::allocations;
use common::{Run, load_model};
use moebius::backend::batch::Batch;
use moebius::config::{DenseBits, EngineConfig, ExpertBits};
use moebius::forward::block_pool::BlockPool;

#[test]
fn a_decode_step_does_not_allocate() {
    for model in ["moe-gqa", "moe-mla", "gpt-oss", "qwen3-next", "nemotron-h", "kimi-linear", "glm-5.3-flash"] {
        for (experts, dense) in [
            (ExpertBits::Int4, DenseBits::Bf16),
            (ExpertBits::Int8, DenseBits::Int8),
            (ExpertBits::Bf16, DenseBits::Bf16),
        ] {
            let mut loaded = load_model(model, &EngineConfig { experts, dense, ..Default::default() });
            let mut run = Run::new(&mut BlockPool::new(loaded.kv_blocks), 200);
            let mut batch = Batch::default();
            run.push(&mut batch, &(7..107).collect::<Vec<u32>>());
            loaded.model.forward(&batch, None).unwrap();
            let mut steps = |loaded: &mut moebius::load::Loaded, n: u32| {
                for token in 0..n {
                    batch.clear();
                    run.push(&mut batch, &[7 + token]);
                    loaded.model.forward(&batch, None).unwrap();
                    loaded.model.logits(&[0]).unwrap();
                }
            };
            // Scratch memory grows in the first steps, and experts are checked as they are met.
            steps(&mut loaded, 30);
            let before = allocations();
            steps(&mut loaded, 30);
            assert_eq!(allocations() - before, 0, "{model} {experts:?} {dense:?}");
        }
    }
}
