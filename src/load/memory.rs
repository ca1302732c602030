//! What a model takes of the CPU's memory: its constructors are run on a heap that only counts.

use std::sync::Arc;

use super::spec::Spec;
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::cpu::Cpu;
use crate::config::EngineConfig;
use crate::experts::Epilogue;
use crate::experts::cpu::Buffers;
use crate::forward::Model;
use crate::forward::kv_cache::{CacheSize, KvCache};
use crate::forward::weights::Weights;
use crate::kernel::Kernel;
use crate::machine::heap::Heap;
use crate::machine::workers::Team;
use crate::{Error, Result};

/// Bytes that a model takes beside its routed experts.
pub(super) struct Counted {
    /// Resident weights.
    pub(super) weights: u64,
    /// Activations and scratch memory.
    pub(super) buffers: u64,
    /// Recurrent state of all sequences.
    pub(super) states: u64,
    /// KV cache of one token.
    pub(super) kv_token: u64,
    /// Recurrent state of a sequence, as it is kept.
    pub(super) snapshot: u64,
}

impl Counted {
    /// Of a model on the CPU alone. Errors: as [`Weights::load`], of the precision.
    pub(super) fn of(spec: &Spec<'_>, team: &Arc<Team>, kernel: &'static dyn Kernel) -> Result<Self> {
        let Spec { model, config, .. } = *spec;
        let limits = spec.cpu_limits();
        let heap = Heap::plan();
        let backend = Cpu::new(team.clone(), kernel).with(&heap, limits.max_rows());
        let weights = Weights::load(&backend, &spec.shapes(), model, config.dense, &|_, _| Ok(()))?;
        let kv = KvCache::new(
            &backend,
            model,
            CacheSize { slots: config.max_sequences, ..CacheSize::default() },
            config.kv,
        )?;
        count_experts(spec, &heap, kernel, team.threads(), limits.tokens)?;
        Model::new(backend, model.clone(), weights, None, kv, limits)?;

        let caches =
            |blocks, slots, snapshots| cache_bytes(spec, CacheSize { blocks, slots, snapshots, host_blocks: 0 });
        let (weights, states) = (weight_bytes(spec)?, caches(0, config.max_sequences, 0)?);
        let rest = Epilogue::load(&heap, &spec.shapes(), model).map(|_| heap.bytes())?.saturating_sub(weights);
        let kv_token = caches(1, 0, 0)? / BLOCK_SIZE as u64;
        let snapshot = caches(0, 0, 1)?;
        Ok(Self { weights, buffers: rest.saturating_sub(states), states, kv_token, snapshot })
    }
}

/// Counts what the CPU's part of the routed experts computes in, for batches of `tokens`.
pub(super) fn count_experts(
    spec: &Spec<'_>,
    heap: &Heap,
    kernel: &dyn Kernel,
    threads: usize,
    tokens: usize,
) -> Result<()> {
    let (Some(shape), Some(moe)) = (spec.expert_shape()?, spec.model.moe()) else { return Ok(()) };
    Buffers::new(heap, kernel, &shape, threads, tokens.saturating_mul(moe.router.top_k)).map(drop)
}

/// Bytes of all weights but the routed experts. Errors: the precision does not fit the shape of one.
pub(super) fn weight_bytes(spec: &Spec<'_>) -> Result<u64> {
    let ((heap, backend), shapes) = (Cpu::counting()?, spec.shapes());
    Weights::load(&backend, &shapes, spec.model, spec.config.dense, &|_, _| Ok(()))?;
    Epilogue::load(&heap, &shapes, spec.model)?;
    Ok(heap.bytes())
}

/// Bytes of keys and values, and of recurrent state.
pub(super) fn cache_bytes(spec: &Spec<'_>, size: CacheSize) -> Result<u64> {
    let (heap, backend) = Cpu::counting()?;
    KvCache::new(&backend, spec.model, size, spec.config.kv)?;
    Ok(heap.bytes())
}

/// Snapshots for each sequence that runs, where their number is not chosen: of conversations that wait for their next
/// turn, a few each.
const SNAPSHOTS: u64 = 4;

/// How many snapshots of recurrent state, of `one` bytes each, are kept where `free` bytes are left.
///
/// Errors: `--state-cache` is more than that, or holds none.
pub(super) fn snapshots(config: &EngineConfig, one: u64, free: u64) -> Result<usize> {
    if one == 0 || !config.prefix_cache {
        return Ok(0);
    }
    match config.state_cache {
        Some(bytes) => count("--state-cache", bytes, ("the state of a sequence", one), free),
        None => Ok((free / 8 / one).min(SNAPSHOTS * config.max_sequences as u64) as usize),
    }
}

/// How many of something, of so many bytes, are in the `bytes` that a flag gives.
///
/// Errors: they are not free, or hold none.
pub(super) fn count(flag: &str, bytes: u64, (what, one): (&str, u64), free: u64) -> Result<usize> {
    let mib = |bytes: u64| bytes as f64 / (1u64 << 20) as f64;
    if bytes > free {
        let (asked, free) = (mib(bytes), mib(free));
        return Err(Error::Resources(format!(
            "{flag} {asked:.0}MiB: {free:.0} MiB of memory are free beside the model: give at most that"
        )));
    }
    if 0 < bytes && bytes < one {
        return Err(Error::Invalid(format!(
            "{flag} {:.1}MiB: {what} of this model takes {:.1} MiB: give more, or 0 for none",
            mib(bytes),
            mib(one)
        )));
    }
    Ok((bytes / one) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ExpertBits;
    use crate::kernel;
    use crate::load::Kept;
    use crate::model::families;

    #[test]
    fn a_batch_costs_what_its_pairs_take() {
        let model = families::shapes::shape("qwen3-30b-a3b", None).unwrap();
        let of = |experts, tokens| {
            let config = EngineConfig { experts, max_batch_tokens: Some(tokens), ..EngineConfig::default() };
            let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
            Counted::of(&spec, &Arc::new(Team::new(&[0]).unwrap()), kernel::best()).unwrap().buffers
        };
        // Of each of 8 pairs of a token: its input and its intermediate row as codes, and the latter as f32.
        let more = of(ExpertBits::Int4, 4096) - of(ExpertBits::Int4, 512);
        assert!(more > 3584 * 8 * (2048 + 768 + 4 * 768), "{more}");
        // In BF16 4 bytes or more of each.
        let bf16 = of(ExpertBits::Bf16, 4096) - of(ExpertBits::Bf16, 512);
        assert!(bf16 > 3584 * 8 * (4 * (2048 + 768) + 4 * 768), "{bf16}");
    }
}
