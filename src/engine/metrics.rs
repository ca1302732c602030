//! What an engine counts while it runs, for everyone to read at any time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Declares the counters with their names for Prometheus, so that none is forgotten there.
macro_rules! metrics {
    ($($(#[doc = $doc:literal])* $field:ident $kind:ident,)*) => {
        /// Counters and levels of one engine. Written by its thread, read by anyone.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $($(#[doc = $doc])* pub $field: AtomicU64,)*
        }

        impl Metrics {
            /// Name, description, `counter` or `gauge`, and value of each.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &'static str, u64)> {
                [$((stringify!($field), concat!($($doc),*), stringify!($kind),
                    self.$field.load(Relaxed)),)*].into_iter()
            }
        }
    };
}

metrics! {
    /// Requests that wait for their first step.
    requests_waiting gauge,
    /// Requests that run.
    requests_running gauge,
    /// Answers that ended by themselves, at their limit or at a stop string.
    requests_finished_total counter,
    /// Requests whose client went away.
    requests_cancelled_total counter,
    /// Requests that failed.
    requests_failed_total counter,
    /// Tokens of prompts that were computed.
    prompt_tokens_computed_total counter,
    /// Tokens of prompts that other requests had computed.
    prompt_tokens_reused_total counter,
    /// Tokens of answers.
    generated_tokens_total counter,
    /// Forward passes.
    steps_total counter,
    /// Times that a request gave its KV blocks back and waited.
    preemptions_total counter,
    /// KV blocks of 64 tokens.
    kv_blocks_total gauge,
    /// KV blocks that running requests hold.
    kv_blocks_used gauge,
    /// KV blocks that no request holds, kept for requests with the same prefix.
    kv_blocks_kept gauge,
    /// KV blocks that were moved from VRAM to RAM, kept for requests with the same prefix.
    kv_blocks_on_host gauge,
    /// Snapshots of recurrent state that there is room for.
    state_snapshots_total gauge,
    /// Snapshots of recurrent state that requests with the same prefix can go on from.
    state_snapshots_kept gauge,
    /// Experts that decode found in VRAM, where others are in RAM.
    expert_hits_total counter,
    /// Experts that decode found in RAM alone, where others are in VRAM.
    expert_misses_total counter,
    /// Bytes of experts that the CPU read from RAM.
    expert_ram_bytes_total counter,
    /// Bytes of experts that crossed PCIe.
    expert_link_bytes_total counter,
    /// Bytes of experts that decode read from VRAM, where others are in RAM.
    expert_vram_bytes_total counter,
    /// Bytes of experts that were brought into the CPU's caches while the GPU computed.
    expert_ahead_bytes_total counter,
    /// Experts that the CPU read in decode, named by a guess of the layer before.
    expert_foreseen_total counter,
    /// Experts that the CPU read in decode, and no guess had named.
    expert_unforeseen_total counter,
}

impl Metrics {
    /// Counts `n` more.
    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }

    /// Sets a level.
    pub(crate) fn set(level: &AtomicU64, n: usize) {
        level.store(n as u64, Relaxed);
    }
}
