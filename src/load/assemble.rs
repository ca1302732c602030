//! Resident weights and experts put together, as budgeted.

use std::sync::Arc;

use super::budget::{Budget, CpuPlan};
use super::crews;
use super::machine::{Machine, watch_memory};
use super::place::{SMALL_BYTES, place};
use super::spec::Spec;
use super::speed::{self, CpuRates};
use super::{LoadProgress, Loaded, Stored};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::experts::cpu::CpuExperts;
use crate::experts::{Epilogue, ExpertExecutor};
use crate::forward::Model;
use crate::forward::kv_cache::{CacheSize, KvCache};
use crate::forward::weights::Weights;
use crate::machine::topology;

/// Puts resident weights and experts together.
pub fn assemble(
    spec: &Spec<'_>,
    stored: Stored<'_>,
    budget: Budget,
    machine: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let CpuPlan { weights: dense_bytes, experts: expert_bytes, max_context, kv_blocks, snapshots, .. } = match budget {
        #[cfg(feature = "cuda")]
        Budget::Gpu(devices, plan) => {
            return super::gpu::assemble(
                &spec.on(devices.len() - plan.holders.len()),
                stored,
                (devices, *plan),
                machine,
                report,
            );
        }
        #[cfg(feature = "cuda")]
        Budget::Stages(plan) => return super::gpu::assemble_stages(spec, stored, plan, machine, report),
        Budget::Cpu(plan) => plan,
    };
    let Spec { model, config, ref precision, .. } = *spec;
    let Stored { resident, experts } = stored;
    let tokens = spec.cpu_tokens();
    let limits = spec.cpu_limits();
    let (team, kernel, heap) = (machine.team.clone(), machine.kernel, &machine.heap);
    crews::choose(spec, &machine, dense_bytes + expert_bytes, report)?;
    let backend = Cpu::new(team.clone(), kernel).with(heap, limits.max_rows());
    let weights = Weights::load(&backend, resident, model, config.dense, &|done, layers| {
        report(LoadProgress::Weights(done, layers));
        watch_memory()
    })?;
    let executor: Option<Box<dyn ExpertExecutor<Cpu>>> = match (experts, model.moe()) {
        (Some(cache), Some(moe)) => {
            let memory = Arc::new(place(cache, config, &team, report)?);
            let experts = CpuExperts::new(heap, memory, team.clone(), kernel, tokens * moe.router.top_k)?;
            Some(Box::new(experts.with(Epilogue::load(heap, resident, model)?)))
        }
        _ => None,
    };
    let size = CacheSize { blocks: kv_blocks, slots: config.max_sequences, snapshots, host_blocks: 0 };
    let kv = KvCache::new(&backend, model, size, config.kv)?;
    if expert_bytes >= SMALL_BYTES {
        let rates = CpuRates::measure(spec, &machine, tokens)?;
        let expected = speed::on_cpu(spec, &rates, tokens)?;
        let (threads, read) = (team.crews().few, rates.read_bytes / 1e9);
        report(LoadProgress::Experts(&format!(
            "CPU: {threads} threads, {read:.0} GB/s; a context of {max_context}; expect {expected}"
        )));
    }
    let model = Box::new(Model::new(backend, model.clone(), weights, executor, kv, limits)?);
    let available_bytes = topology::available_bytes;
    Ok(Loaded {
        model,
        kv_blocks,
        host_blocks: 0,
        snapshots,
        max_context,
        max_batch_tokens: tokens,
        device: None,
        precision: precision.clone(),
        dense: spec.dense_words(),
        team,
        kernel,
        available_bytes,
    })
}
