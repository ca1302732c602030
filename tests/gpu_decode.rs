//! Many decode steps on a GPU take no memory: none of the host's allocator, of the process, or of the device.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

#[path = "common/allocations.rs"]
mod allocations;
mod common;

use allocations::allocations;
use common::gpu::{device, need_gpu, on_gpu};
use common::{Run, demo_dir, load, resident_bytes};
use moebius::backend::batch::Batch;
use moebius::config::{EngineConfig, PrefillOn};
use moebius::cuda::Cuda;
use moebius::forward::block_pool::BlockPool;

#[test]
fn decode_steps_take_no_memory() {
    need_gpu!();
    let real = device() == Some("a GPU");
    let (models, steps) = if real { (&["moe-gqa", "moe-mla"][..], 1000) } else { (&["moe-mla"][..], 40) };
    let device = Cuda::open(0).unwrap();
    for model in models {
        for resident_experts in [None, Some(0), Some(3)] {
            // On the emulator streaming prompts is tested elsewhere.
            let prefill = if real { PrefillOn::Auto } else { PrefillOn::Cpu };
            let mut loaded =
                load(&demo_dir(model), &on_gpu(EngineConfig { resident_experts, prefill, ..Default::default() }));
            let mut pool = BlockPool::new(loaded.kv_blocks);
            let mut runs = [Run::new(&mut pool, 1200), Run::new(&mut pool, 1200)];
            let mut batch = Batch::default();
            runs.iter_mut().for_each(|run| _ = run.push(&mut batch, &(7..57).collect::<Vec<u32>>()));
            loaded.model.forward(&batch, None).unwrap();
            // One sequence and two in turn: each number is a recording of its own.
            let mut decode = |loaded: &mut moebius::load::Loaded, n: u32| {
                for step in 0..n {
                    batch.clear();
                    let sequences = 1 + step as usize % 2;
                    runs[..sequences].iter_mut().for_each(|run| _ = run.push(&mut batch, &[7 + step % 100]));
                    loaded.model.forward(&batch, None).unwrap();
                    loaded.model.logits(&[0, 1][..sequences]).unwrap();
                }
            };
            // Kernels are found, passes recorded and experts checked in the first steps.
            decode(&mut loaded, 12);
            let (free, held, before) = (device.free_bytes(), resident_bytes(), allocations());
            decode(&mut loaded, steps);
            let taken = allocations() - before;
            let what = format!("{model}, {resident_experts:?} resident, {steps} steps");
            // Where experts are not all resident, a look at their counts, every 64 passes, makes lists; steps do not.
            let looks = if resident_experts.is_some() { steps as usize / 64 + 1 } else { 0 };
            assert!(taken <= 16 * looks, "{what}: {taken} allocations");
            assert_eq!(device.free_bytes(), free, "{what}: free VRAM");
            let grown = resident_bytes().saturating_sub(held);
            assert!(grown < 1 << 20, "{what}: {} KiB more of RAM", grown >> 10);
        }
    }
}
