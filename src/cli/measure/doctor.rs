//! The findings of `moebius doctor`: what this machine has, and what slows it down.

mod gpu;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use moebius_cache::Precision;
use moebius_cache::format::ExpertCache;

use crate::config::EngineConfig;
use crate::kernel::{self, Simd};
use crate::load::components::components;
use crate::load::crews;
use crate::load::plan::UNUSED_DRAFTS;
use crate::load::{Description, ModelFolder};
use crate::machine::heap::Heap;
use crate::machine::memory::{self, Pages, read_bandwidth};
use crate::machine::topology::{self, Topology};
use crate::machine::workers::{SCHEDSTAT, Team};
use crate::{Result, load};

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// The subject.
    pub name: &'static str,
    /// What was found.
    pub value: String,
    /// If it costs speed, or keeps models from being packed: the cost and the remedy in one sentence.
    pub cost: Option<String>,
}

/// Examines the machine. Measuring takes a second or two and `bandwidth_bytes` of memory.
///
/// `cache_dir` is the directory of expert caches. It need not exist yet.
pub fn examine(topology: &Topology, cache_dir: &Path, bandwidth_bytes: usize) -> Vec<Finding> {
    let mut findings = vec![
        cpu(topology),
        simd(&kernel::available(), topology::cpu_has_amx()),
        cores(topology),
        threads(topology, bandwidth_bytes),
        neighbours(Path::new(SCHEDSTAT)),
        smt(topology),
        quota(topology),
        nodes(topology),
        memory(topology),
    ];
    findings.extend(bandwidth(topology, bandwidth_bytes));
    findings.push(mapped(cache_dir));
    findings.push(disk(cache_dir));
    findings.extend(gpu::examine());
    findings
}

/// The formats in which the parts of the checkpoint in `dir` are stored, and what they become by default.
///
/// Errors: it is not there, or cannot be read.
pub fn examine_model(name: &str, dir: &Path) -> Result<Vec<Finding>> {
    let folder = ModelFolder::open(name, Description::read(dir)?)?;
    let components = components(&folder.checkpoint, &folder.spec(&EngineConfig::default())?)?;
    let drafts = (folder.model.draft_layers > 0).then_some(finding("model", UNUSED_DRAFTS, None));
    Ok(components.iter().map(|component| finding("model", component.to_string(), None)).chain(drafts).collect())
}

fn finding(name: &'static str, value: impl Into<String>, cost: Option<&str>) -> Finding {
    Finding { name, value: value.into(), cost: cost.map(String::from) }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

fn cpu(topology: &Topology) -> Finding {
    let caches = topology.caches.iter().filter(|c| c.kind != "Instruction");
    let caches: Vec<String> = caches.map(|c| format!("L{} {} KiB", c.level, c.bytes >> 10)).collect();
    let model = if topology.cpu_model.is_empty() { "unknown model" } else { &topology.cpu_model };
    finding("CPU", [&[model.to_string()], &caches[..]].concat().join(", "), None)
}

fn simd(available: &[Simd], cpu_has_amx: bool) -> Finding {
    let names: Vec<String> = available.iter().map(ToString::to_string).collect();
    let best = available.last().copied().unwrap_or(Simd::Scalar);
    let cost = match best {
        Simd::Scalar => Some(
            "without AVX2 the kernels are about ten times slower than memory: use a CPU of 2013 or later".to_string(),
        ),
        Simd::Amx => None,
        _ => cpu_has_amx.then(|| format!("prefill is several times slower than it could be: {}", load::AMX_REFUSED)),
    };
    finding("SIMD", format!("{best} (available: {})", names.join(", ")), cost.as_deref())
}

fn cores(topology: &Topology) -> Finding {
    let mut value = format!("{} usable, {} workers at most", topology.cores.len(), topology.default_threads());
    if !topology.isolated.is_empty() {
        value += &format!("; {} isolated CPUs are not used", topology.isolated.len());
    }
    finding("physical cores", value, None)
}

/// How many workers are fastest.
fn threads(topology: &Topology, bytes: usize) -> Finding {
    let measure = || {
        let team = Arc::new(Team::on_nodes(&topology.seats(topology.default_threads()))?);
        match team.threads() {
            few @ ..=crews::NO_CHOICE => Ok(format!("{few} by default")),
            _ => crews::measure(&team, kernel::best(), Precision::int4(32), bytes.min(crews::SAMPLE_BYTES))
                .map(|choice| choice.to_string()),
        }
    };
    finding("threads", measure().unwrap_or_else(|error: crate::Error| format!("not measured: {error}")), None)
}

/// Whether the kernel counts the time that a thread waits for its core.
fn neighbours(schedstat: &Path) -> Finding {
    // Zeros where it keeps the file and does not count.
    let counted = std::fs::read_to_string(schedstat).is_ok_and(|text| !text.starts_with("0 "));
    let cost = "the kernel does not count waiting times (CONFIG_SCHED_INFO), so a core that another program keeps \
                busy slows all cores down: exclude that core with `taskset`";
    match counted {
        true => finding("busy neighbours", "detected; their cores are not used", None),
        false => finding("busy neighbours", "cannot be detected", Some(cost)),
    }
}

fn smt(topology: &Topology) -> Finding {
    let value = if topology.has_smt() { "on; one thread per core is used" } else { "off or hidden" };
    finding("SMT", value, None)
}

fn quota(topology: &Topology) -> Finding {
    let cpus = topology.cgroup_cpus.map(|c| format!("{c:.1} CPUs"));
    let memory = topology.cgroup_bytes.map(gib);
    let limits: Vec<String> = [cpus, memory].into_iter().flatten().collect();
    let value = if limits.is_empty() { "no limit".to_string() } else { limits.join(", ") };
    let tight = topology.cgroup_cpus.is_some_and(|c| c < topology.cores.len() as f64);
    let cost = "the CPU quota is below the number of cores, so fewer threads are used: raise the container's CPU \
                limit, or pin the container to CPUs instead";
    finding("control group", value, tight.then_some(cost))
}

fn nodes(topology: &Topology) -> Finding {
    let nodes: Vec<String> = topology
        .nodes
        .iter()
        .map(|n| format!("node {}: {} CPUs, {}", n.id, n.cpus.len(), gib(n.total_bytes)))
        .collect();
    let mut value = nodes.join("; ");
    let several = topology.memory_nodes().len() > 1;
    if several {
        value += "; every node with cores holds a slice of each expert";
    }
    let refused = Heap::default()
        .buffer::<u8>(&[4096])
        .is_ok_and(|buffer| buffer.prefer(0..4096, topology.memory_nodes()[0]).is_err());
    let cost = "memory cannot be bound to a node, so some of it may come from another node: allow it to the \
                container (--cap-add SYS_NICE)";
    finding("NUMA", value, (several && refused).then_some(cost))
}

fn memory(topology: &Topology) -> Finding {
    finding("memory", format!("{} available of {}", gib(topology.available_bytes), gib(topology.total_bytes)), None)
}

/// The setting of huge pages, and the read bandwidth with and without them.
fn bandwidth(topology: &Topology, bytes: usize) -> Vec<Finding> {
    let measure = |pages| {
        let team = Team::on_nodes(&topology.seats(topology.default_threads()))?;
        read_bandwidth(&team, bytes, pages, 3)
    };
    let cost = (topology.huge_pages == "never").then_some(
        "transparent huge pages are off: `echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
    );
    let setting = finding("huge pages", topology.huge_pages.clone(), cost);
    let value = match (measure(Pages::Small), measure(Pages::Huge)) {
        (Ok(small), Ok(huge)) => format!("{huge:.1} GB/s with huge pages, {small:.1} without"),
        (Err(error), _) | (_, Err(error)) => format!("not measured: {error}"),
    };
    vec![setting, finding("read bandwidth", value, None)]
}

/// The pages in which the largest cache file is mapped.
fn mapped(dir: &Path) -> Finding {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| {
        let meta = entry.metadata().ok().filter(|meta| meta.is_file())?;
        Some((meta.len(), entry.path()))
    });
    let largest = files.max().and_then(|(_, path)| ExpertCache::open(&path).ok());
    let Some(cache) = largest else { return finding("mapped experts", "no cache file yet", None) };
    let name = cache.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    match memory::huge_share(&load::place::spots(&cache)) {
        None => finding("mapped experts", format!("{name}: the system does not report the page size"), None),
        Some(share) if share > 0.5 => finding("mapped experts", format!("{name}: in huge pages"), None),
        Some(_) => {
            let value =
                format!("{name}: in small pages; copied to huge pages at start if they are at least a tenth faster");
            finding("mapped experts", value, None)
        }
    }
}

/// The room for caches, and whether this user may make one.
fn disk(dir: &Path) -> Finding {
    let existing = dir.ancestors().find(|d| d.exists()).unwrap_or(Path::new("/"));
    let value = match moebius_cache::convert::free_bytes(existing) {
        Some(bytes) => format!("{} free for {}", gib(bytes), dir.display()),
        None => format!("unknown for {}", dir.display()),
    };
    // Only trying tells: modes, owners, mounts and user namespaces all have a say.
    let refused = tempfile::tempfile_in(existing).err().map(|e| unwritable(existing, e.kind()));
    finding("disk", value, refused.as_deref())
}

fn unwritable(dir: &Path, why: ErrorKind) -> String {
    let dir = dir.display();
    match why {
        ErrorKind::PermissionDenied => {
            let user = moebius_cache::user_id();
            format!("{dir} cannot be written by user {user}: change its owner, or set --cache-dir")
        }
        why => format!("{dir} cannot be written ({why}): set --cache-dir"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_this_machine() {
        let findings = examine(&Topology::read(), Path::new("/nonexistent/cache"), 1 << 20);
        let value = |name| &findings.iter().find(|f| f.name == name).unwrap().value;
        assert!(value("SIMD").contains("scalar"));
        assert!(value("read bandwidth").contains("GB/s"));
        assert!(value("disk").contains("free for /nonexistent/cache"));
        assert!(!value("GPU").is_empty());
        assert!(findings.iter().all(|f| !f.value.is_empty()));
    }

    #[test]
    fn what_costs_speed_has_a_remedy() {
        let mut topology = Topology::read();
        topology.huge_pages = "never".into();
        topology.cgroup_cpus = Some(0.5);
        let findings = examine(&topology, Path::new("/"), 1 << 20);
        let cost =
            |name| findings.iter().find(|f| f.name == name).unwrap().cost.as_deref().unwrap_or_default().to_string();
        assert!(cost("huge pages").contains("madvise"));
        assert!(cost("control group").contains("raise"));
        assert!(neighbours(Path::new("/nonexistent")).cost.unwrap().contains("taskset"));
    }

    #[test]
    fn a_cache_folder_must_be_writable() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(disk(&dir.path().join("not/yet")).cost, None);
        let user = moebius_cache::user_id();
        let denied = unwritable(Path::new("/c"), ErrorKind::PermissionDenied);
        assert_eq!(denied, format!("/c cannot be written by user {user}: change its owner, or set --cache-dir"));
        // A file system that takes no files, whoever asks.
        assert!(disk(Path::new("/proc/self")).cost.unwrap().starts_with("/proc/self cannot be written"));
    }

    #[test]
    fn the_simd_line_tells_why_amx_is_not_used() {
        let upto = |best| Simd::ALL.into_iter().filter(|&simd| simd <= best).collect::<Vec<_>>();
        let refused = simd(&upto(Simd::Avx512), true);
        assert!(refused.value.starts_with("avx512 ") && refused.cost.unwrap().contains("Linux 5.16"));
        let granted = simd(&upto(Simd::Amx), true);
        assert!(granted.value.starts_with("amx ") && granted.cost.is_none());
        assert_eq!(simd(&upto(Simd::AvxVnni), false).cost, None);
        assert!(simd(&upto(Simd::Scalar), false).cost.unwrap().contains("AVX2"));
    }
}
