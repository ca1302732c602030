//! What would make a model fit that does not. Every remedy is tried before it is offered.

use std::fmt::{self, Display};

use super::spec::Spec;
use crate::config::{CPU_BATCH_TOKENS, DenseBits, EngineConfig, ExpertBits, KvBits};

/// Passes are not offered smaller, nor contexts: they would be of no use.
const LEAST_BATCH_TOKENS: usize = 32;
const LEAST_CONTEXT: usize = 512;

/// A choice that takes less memory.
#[derive(Clone, Copy, Debug)]
enum Change {
    MaxContext(usize),
    Experts(ExpertBits),
    Kv(KvBits),
    Dense(DenseBits),
    MaxBatchTokens(usize),
}

impl Change {
    fn apply(self, config: &mut EngineConfig) {
        match self {
            Self::MaxContext(tokens) => config.max_context = Some(tokens),
            Self::Experts(bits) => config.experts = bits,
            Self::Kv(bits) => config.kv = bits,
            Self::Dense(bits) => config.dense = bits,
            Self::MaxBatchTokens(tokens) => config.max_batch_tokens = Some(tokens),
        }
    }
}

impl Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MaxContext(tokens) => write!(f, "--max-context {tokens}"),
            Self::Experts(bits) => write!(f, "--experts {bits}"),
            Self::Kv(bits) => write!(f, "--kv {bits}"),
            Self::Dense(bits) => write!(f, "--dense {bits}"),
            Self::MaxBatchTokens(tokens) => write!(f, "--max-batch-tokens {tokens}"),
        }
    }
}

/// Powers of two below `n`, largest first, down to `least`.
fn below(n: usize, least: usize) -> impl Iterator<Item = usize> {
    let largest = n.next_power_of_two() / 2;
    std::iter::successors(Some(largest), |n| Some(n / 2)).take_while(move |&n| n >= least)
}

/// What a user could change, kind by kind, each from the least loss to the most.
fn kinds(spec: &Spec<'_>) -> Vec<Vec<Change>> {
    let config = spec.config;
    let contexts = config.max_context.into_iter().flat_map(|tokens| below(tokens, LEAST_CONTEXT));
    let experts = (config.experts != ExpertBits::Int4 && spec.model.moe().is_some()).then_some(ExpertBits::Int4);
    let kv = match config.kv {
        KvBits::Bf16 => Some(KvBits::Int8),
        KvBits::Bf16x2 => Some(KvBits::Bf16),
        _ => None,
    };
    let dense: &[DenseBits] = match config.dense {
        DenseBits::Auto | DenseBits::Bf16 => &[DenseBits::Int8, DenseBits::Int4],
        DenseBits::Int8 => &[DenseBits::Int4],
        DenseBits::Int4 | DenseBits::Out | DenseBits::Down => &[],
    };
    let batches = below(config.max_batch_tokens.unwrap_or(CPU_BATCH_TOKENS), LEAST_BATCH_TOKENS);
    let all = [
        contexts.map(Change::MaxContext).collect(),
        experts.into_iter().map(Change::Experts).collect(),
        kv.into_iter().map(Change::Kv).collect(),
        dense.iter().copied().map(Change::Dense).collect(),
        batches.map(Change::MaxBatchTokens).collect(),
    ];
    all.into_iter().filter(|kind: &Vec<Change>| !kind.is_empty()).collect()
}

/// The flags with which the model `fits`: of each kind the mildest that suffices alone, else as few and as mild
/// together as will do. `None`: nothing helps.
pub(super) fn flags(spec: &Spec<'_>, fits: &dyn Fn(&Spec<'_>) -> bool) -> Option<String> {
    let helps = |changes: &[Change]| {
        let mut config = spec.config.clone();
        changes.iter().for_each(|change| change.apply(&mut config));
        spec.again(&config).is_ok_and(|spec| fits(&spec))
    };
    let kinds = kinds(spec);
    let alone: Vec<_> = kinds.iter().filter_map(|kind| kind.iter().find(|change| helps(&[**change]))).collect();
    if !alone.is_empty() {
        return Some(either(&alone));
    }
    let mut together: Vec<Change> = kinds.iter().filter_map(|kind| kind.last().copied()).collect();
    if !helps(&together) {
        return None;
    }
    let mut kept = 0;
    for kind in kinds.iter().rev() {
        let at = together.len() - 1 - kept;
        let change = together.remove(at);
        if helps(&together) {
            continue;
        }
        together.insert(at, change);
        kept += 1;
        for milder in kind {
            together[at] = *milder;
            if helps(&together) {
                break;
            }
        }
    }
    let flags: Vec<_> = together.iter().map(ToString::to_string).collect();
    Some(flags.join(" "))
}

/// `a`, `a or b`, `a, b or c`
pub(super) fn either(all: &[impl Display]) -> String {
    let words: Vec<_> = all.iter().map(ToString::to_string).collect();
    match words.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => words.concat(),
    }
}
