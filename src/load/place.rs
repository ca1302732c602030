//! Where the routed experts are read from: the mapped file, or a copy in huge pages, on the NUMA nodes that compute
//! them.

use std::sync::Arc;

use moebius_cache::format::ExpertCache;

use super::LoadProgress;
use super::machine::{RESERVE_BYTES, gib};
use crate::config::{EngineConfig, ExpertsMemory, Numa};
use crate::experts::ExpertMemory;
use crate::machine::memory::{self, Pages, read_bandwidth};
use crate::machine::topology::{self, Topology};
use crate::machine::workers::Team;
use crate::{Error, Result};

/// Experts smaller than this are neither copied for speed nor talked about.
pub(super) const SMALL_BYTES: u64 = 1 << 30;

/// A copy must be faster than the mapped file by this factor.
const COPY_PAYS: f64 = 1.1;

/// Decides where the experts are read from, brings them there and says where that is.
pub(super) fn place(
    cache: ExpertCache,
    config: &EngineConfig,
    team: &Team,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<ExpertMemory> {
    let topology = Topology::read();
    let mut interleave = if config.numa == Numa::Interleave { topology.memory_nodes() } else { Vec::new() };
    if interleave.len() == 1 {
        interleave.clear();
    }
    let nodes = team.nodes().len().max(interleave.len());
    let mapped = ExpertMemory::mapped(Arc::new(cache));
    let bytes = mapped.bytes();
    // Random weights are given back layer by layer as they are copied.
    let needed = if mapped.cache().is_file() { bytes } else { 2 * bytes / mapped.cache().num_layers().max(1) as u64 };
    let free = topology::available_bytes().saturating_sub(RESERVE_BYTES);
    let (copy, why) = match config.experts_memory {
        ExpertsMemory::Map => (false, pages_of(&mapped)),
        ExpertsMemory::Copy if needed > free => {
            return Err(Error::Resources(format!(
                "a copy of the experts needs {:.1} GiB of memory and {:.1} are free: use --experts-memory map",
                gib(needed),
                gib(free)
            )));
        }
        ExpertsMemory::Copy => (true, String::new()),
        ExpertsMemory::Auto => match nodes > 1 || bytes >= SMALL_BYTES {
            false => (false, String::new()),
            true if needed > free => (false, format!("; a copy would need {:.1} GiB of memory", gib(needed))),
            true if nodes > 1 => (true, String::new()),
            true => copy_pays(pages_of(&mapped), &topology.huge_pages, || {
                const SAMPLE_BYTES: usize = 256 << 20;
                let read = |pages| read_bandwidth(team, SAMPLE_BYTES, pages, 2);
                Ok(read(Pages::Huge)? / read(Pages::Small)?)
            })?,
        },
    };
    let memory = match copy {
        false => mapped,
        true => ExpertMemory::copied(mapped.into_cache(), team, &interleave, &|done, layers| {
            report(LoadProgress::Copy(done, layers))
        })?,
    };
    if config.lock {
        memory.lock()?;
    }
    if copy || bytes >= SMALL_BYTES {
        let pages = if topology.huge_pages == "never" { "4 KiB pages" } else { "huge pages" };
        let place = match (copy, nodes) {
            (false, _) if !memory.cache().is_file() => format!("in anonymous memory, {pages}"),
            (false, _) => format!("mapped from the cache file{why}"),
            (true, 1) => format!("copied into {pages}{why}"),
            (true, _) if !interleave.is_empty() => format!("copied into {pages}, interleaved over {nodes} NUMA nodes"),
            (true, _) => format!(
                "copied into {pages}, a slice of each on {nodes} NUMA nodes{}",
                misplaced(memory.placed(team.nodes()), team.nodes())
            ),
        };
        report(LoadProgress::Experts(&format!("experts: {:.1} GiB {place}", gib(bytes))));
    }
    Ok(memory)
}

/// Whether to copy experts that the page cache holds in `pages`, and what was found, as the end of a sentence.
///
/// `gain` measures how many times faster huge pages are read than small ones.
fn copy_pays(pages: String, huge_pages: &str, gain: impl FnOnce() -> Result<f64>) -> Result<(bool, String)> {
    if pages != SMALL_PAGES {
        return Ok((false, pages));
    }
    if huge_pages == "never" {
        let advice = ": `echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled` allows huge ones";
        return Ok((false, pages + advice));
    }
    let gain = gain()?;
    Ok((
        gain > COPY_PAYS,
        format!(", huge pages are read {:.0}% faster than the file's small ones", 100.0 * (gain - 1.0).max(0.0)),
    ))
}

const SMALL_PAGES: &str = ", in 4 KiB pages";

/// What the page cache gives, as the end of a sentence; empty without experts.
fn pages_of(mapped: &ExpertMemory) -> String {
    if mapped.bytes() < SMALL_BYTES || !mapped.cache().is_file() {
        return String::new();
    }
    match memory::huge_share(&spots(mapped.cache())) {
        Some(share) if share > 0.5 => ", in huge pages".into(),
        Some(_) => SMALL_PAGES.into(),
        None => String::new(),
    }
}

/// Bytes all over the file.
pub(crate) fn spots(cache: &ExpertCache) -> Vec<&u8> {
    let layers = cache.num_layers();
    let count = layers.min(16);
    (0..count).map(|i| cache.layer(layers * i / count)).filter_map(|layer| layer.get(layer.len() / 2)).collect()
}

/// What to say when slices are not on their nodes; `placed` as [`ExpertMemory::placed`].
fn misplaced(placed: Option<Vec<f64>>, nodes: &[usize]) -> String {
    let Some(placed) = placed else { return ", where the system does not tell if they are".into() };
    let worst = placed.iter().zip(nodes).min_by(|a, b| a.0.total_cmp(b.0));
    match worst {
        Some((share, node)) if *share < 0.9 => format!(
            ", but {:.0}% of node {node}'s is elsewhere: free memory there (`numactl --hardware`), or let the \
             container place memory (--cap-add SYS_NICE)",
            100.0 * (1.0 - share)
        ),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_pays_from_a_tenth_on() {
        let measured = |gain| copy_pays(SMALL_PAGES.into(), "madvise", || Ok(gain)).unwrap();
        assert_eq!(measured(1.3), (true, ", huge pages are read 30% faster than the file's small ones".into()));
        assert_eq!(measured(1.05), (false, ", huge pages are read 5% faster than the file's small ones".into()));
        assert!(!measured(0.9).0 && measured(0.9).1.contains(" 0% faster"));
        // Where nothing can be gained, nothing is measured.
        let unmeasured = |pages: &str, setting| copy_pays(pages.into(), setting, || panic!("measured")).unwrap();
        assert_eq!(unmeasured(", in huge pages", "always"), (false, ", in huge pages".into()));
        assert_eq!(unmeasured("", "madvise"), (false, String::new()));
        let (copy, why) = unmeasured(SMALL_PAGES, "never");
        assert!(!copy && why.starts_with(SMALL_PAGES) && why.contains("madvise"), "{why}");
    }

    #[test]
    fn slices_on_other_nodes_are_told_with_the_remedy() {
        assert_eq!(misplaced(Some(vec![1.0, 0.95]), &[0, 2]), "");
        let text = misplaced(Some(vec![0.85, 0.4]), &[0, 2]);
        assert!(text.contains("60% of node 2's") && text.contains("numactl") && text.contains("SYS_NICE"), "{text}");
        assert!(misplaced(None, &[0, 2]).contains("does not tell"));
    }
}
