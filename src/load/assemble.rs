//! Resident weights and experts put together, as budgeted.

use std::sync::Arc;

use moebius_cache::Precision;
use moebius_cache::format::ExpertCache;

use super::LoadProgress;
use super::budget::{Budget, expert_bytes};
use super::machine::{Machine, watch_memory};
use super::place::{SMALL_BYTES, place};
use super::speed::{self, CpuRates};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::source::TensorSource;
use crate::config::{CPU_BATCH_TOKENS, EngineConfig};
use crate::experts::cpu::CpuExperts;
use crate::experts::{Between, ExpertExecutor};
use crate::forward::kv_cache::KvCache;
use crate::forward::weights::Weights;
use crate::forward::{Forward, Limits, Model};
use crate::kernel::Kernel;
use crate::machine::topology;
use crate::machine::workers::Team;
use crate::model::ModelConfig;

/// A model in memory, and what it may use.
pub struct Loaded {
    /// Ready to run.
    pub model: Box<dyn Forward>,
    /// Blocks of its KV cache.
    pub kv_blocks: usize,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Tokens of one forward pass.
    pub max_batch_tokens: usize,
    /// What it runs on, what takes how much VRAM and how fast it should be, in one line; `None`: the CPU alone.
    pub device: Option<String>,
    /// Of the routed experts; `None` for a dense model.
    pub precision: Option<Precision>,
    /// Runs the ops.
    pub team: Arc<Team>,
    /// Its instruction set.
    pub kernel: &'static dyn Kernel,
    /// RAM that can be taken, asked for at each new request.
    pub available_bytes: fn() -> u64,
}

/// Puts resident weights and experts together.
pub fn assemble(
    model: ModelConfig,
    source: &dyn TensorSource,
    experts: Option<ExpertCache>,
    config: &EngineConfig,
    budget: Budget,
    machine: Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let (max_context, kv_blocks) = match budget {
        #[cfg(feature = "cuda")]
        Budget::Gpu(cuda, plan) => {
            return super::gpu::assemble(model, source, experts, config, (cuda, plan), machine, report);
        }
        Budget::Cpu { max_context, kv_blocks } => (max_context, kv_blocks),
    };
    let (team, kernel) = (machine.team.clone(), machine.kernel);
    let backend = Cpu::new(team.clone(), kernel);
    let weights = Weights::load(&backend, source, &model, config.dense, &|done, layers| {
        report(LoadProgress::Weights(done, layers));
        watch_memory()
    })?;
    let precision = experts.as_ref().map(|cache| cache.header().precision);
    let executor: Option<Box<dyn ExpertExecutor<Cpu>>> = match (experts, model.moe()) {
        (Some(cache), Some(moe)) => {
            let experts = CpuExperts::new(
                Arc::new(place(cache, config, &team, report)?),
                team.clone(),
                kernel,
                config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS),
                moe.router.top_k,
            );
            Some(Box::new(experts.with(Between::load(source, &model)?)))
        }
        _ => None,
    };
    let kv = KvCache::new(&backend, &model, kv_blocks, config.max_sequences, config.kv)?;
    let tokens = config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS);
    if expert_bytes(&model, precision)? >= SMALL_BYTES {
        let rates = CpuRates::measure(&model, config, precision, &machine, tokens)?;
        let expected = speed::on_cpu(&model, config, precision, &rates, tokens)?;
        let (threads, read) = (team.threads(), rates.read_bytes / 1e9);
        report(LoadProgress::Experts(&format!(
            "CPU: {threads} threads, {read:.0} GB/s; a context of {max_context}; expect {expected}"
        )));
    }
    let limits = Limits { tokens, chunk_tokens: tokens, logit_rows: config.max_sequences };
    let model = Box::new(Model::new(backend, model, weights, executor, kv, limits)?);
    let available_bytes = topology::available_bytes;
    Ok(Loaded {
        model,
        kv_blocks,
        max_context,
        max_batch_tokens: tokens,
        device: None,
        precision,
        team,
        kernel,
        available_bytes,
    })
}
