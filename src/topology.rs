//! What this process may use of the machine: cores, SMT siblings, NUMA nodes, caches, memory, SIMD flags.
//!
//! Everything is read from a root directory, so that tests can use recorded trees of other machines.

use std::collections::BTreeMap;
use std::path::Path;

/// One physical core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The CPUs (hardware threads) of this core that the process may use, ascending.
    pub cpus: Vec<usize>,
    /// The NUMA node it belongs to.
    pub node: usize,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number; numbers may have holes.
    pub id: usize,
    /// All its CPUs, whether or not this process may use them.
    pub cpus: Vec<usize>,
    /// Its memory; 0 on a node that only has CPUs.
    pub total_bytes: u64,
}

/// One cache as the first usable CPU sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// 1, 2 or 3.
    pub level: u32,
    /// `Data`, `Instruction` or `Unified`.
    pub kind: String,
    /// Size of one instance.
    pub bytes: u64,
}

/// What this process may use of the machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    /// As the CPU calls itself.
    pub cpu_model: String,
    /// Feature flags, as in /proc/cpuinfo.
    pub cpu_flags: Vec<String>,
    /// Physical cores with at least one usable CPU, ordered by first CPU.
    pub cores: Vec<Core>,
    /// NUMA nodes, ascending; at least one.
    pub nodes: Vec<Node>,
    /// Caches of the first usable CPU.
    pub caches: Vec<Cache>,
    /// RAM of the machine.
    pub total_bytes: u64,
    /// RAM that can be taken without swapping, within the control group's limit.
    pub available_bytes: u64,
    /// The control group's memory limit, if there is one.
    pub cgroup_bytes: Option<u64>,
    /// The control group's CPU quota in cores, if there is one.
    pub cgroup_cpus: Option<f64>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: String,
}

impl Topology {
    /// Of this process on this machine.
    pub fn read() -> Topology {
        let allowed = std::fs::read_to_string("/proc/self/status")
            .ok()
            .and_then(|s| s.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:").map(|list| parse_list(list.trim()))));
        Topology::read_from(Path::new("/"), allowed.as_deref())
    }

    /// From a tree that holds `proc/` and `sys/`; `allowed` are the CPUs of the process, `None` all.
    ///
    /// Missing files leave their fields empty: a container may hide any of them.
    pub fn read_from(root: &Path, allowed: Option<&[usize]>) -> Topology {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_string();
        let cpuinfo = text("proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.trim() == name));
            line.and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().to_string()).unwrap_or_default()
        };
        let mut online = parse_list(&text("sys/devices/system/cpu/online"));
        if online.is_empty() {
            online = allowed.map_or_else(|| vec![0], <[usize]>::to_vec);
        }
        let usable: Vec<usize> = online.iter().copied().filter(|cpu| allowed.is_none_or(|a| a.contains(cpu))).collect();

        let meminfo = text("proc/meminfo");
        let memory = |name: &str| meminfo_bytes(&meminfo, name);
        let total_bytes = memory("MemTotal").unwrap_or(0);
        let mut nodes = Vec::new();
        for id in parse_list(&text("sys/devices/system/node/online")) {
            let dir = format!("sys/devices/system/node/node{id}");
            let total_bytes = meminfo_bytes(&text(&format!("{dir}/meminfo")), "MemTotal").unwrap_or(0);
            nodes.push(Node { id, cpus: parse_list(&text(&format!("{dir}/cpulist"))), total_bytes });
        }
        if nodes.is_empty() {
            nodes.push(Node { id: 0, cpus: online.clone(), total_bytes });
        }

        let mut cores: BTreeMap<usize, Core> = BTreeMap::new();
        for &cpu in &usable {
            let siblings = parse_list(&text(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")));
            let first = siblings.first().copied().unwrap_or(cpu);
            let node = nodes.iter().find(|n| n.cpus.contains(&cpu)).map_or(nodes[0].id, |n| n.id);
            cores.entry(first).or_insert(Core { cpus: Vec::new(), node }).cpus.push(cpu);
        }

        let (cgroup_bytes, cgroup_used, cgroup_cpus) = cgroup(&text);
        let available_bytes = available(&meminfo, cgroup_bytes, cgroup_used);
        let first = usable.first().copied().unwrap_or(0);
        let caches = (0..8)
            .filter_map(|i| {
                let file = |name: &str| text(&format!("sys/devices/system/cpu/cpu{first}/cache/index{i}/{name}"));
                Some(Cache { level: file("level").parse().ok()?, kind: file("type"), bytes: parse_size(&file("size"))? })
            })
            .collect();
        let huge = text("sys/kernel/mm/transparent_hugepage/enabled");
        Topology {
            cpu_model: field("model name"),
            cpu_flags: field("flags").split_whitespace().map(String::from).collect(),
            cores: cores.into_values().collect(),
            nodes,
            caches,
            total_bytes,
            available_bytes,
            cgroup_bytes,
            cgroup_cpus,
            huge_pages: huge.split_once('[').and_then(|(_, s)| s.split_once(']')).map_or("never", |(s, _)| s).to_string(),
        }
    }

    /// Whether two usable CPUs share a core.
    pub fn has_smt(&self) -> bool {
        self.cores.iter().any(|core| core.cpus.len() > 1)
    }

    /// Worker threads: one per usable physical core, within the control group's quota (a throttled thread stalls all others).
    pub fn default_threads(&self) -> usize {
        let quota = self.cgroup_cpus.map_or(usize::MAX, |cpus| cpus.floor() as usize);
        self.cores.len().min(quota).max(1)
    }

    /// The CPUs that `threads` workers are pinned to: one per core first, then SMT siblings, then over again.
    pub fn worker_cpus(&self, threads: usize) -> Vec<usize> {
        let siblings = self.cores.iter().map(|core| core.cpus.len()).max().unwrap_or(0);
        let order: Vec<usize> = (0..siblings).flat_map(|i| self.cores.iter().filter_map(move |core| core.cpus.get(i).copied())).collect();
        order.iter().copied().cycle().take(if order.is_empty() { 0 } else { threads }).collect()
    }
}

/// RAM that can be taken right now, as [`Topology::available_bytes`], without reading all the rest.
pub fn available_bytes() -> u64 {
    let text = |path: &str| std::fs::read_to_string(Path::new("/").join(path)).unwrap_or_default().trim().to_string();
    let (limit, used, _) = cgroup(&text);
    available(&text("proc/meminfo"), limit, used)
}

/// What the machine has, within the control group's limit.
fn available(meminfo: &str, cgroup_limit: Option<u64>, cgroup_used: u64) -> u64 {
    let machine = meminfo_bytes(meminfo, "MemAvailable").or(meminfo_bytes(meminfo, "MemFree")).unwrap_or(0);
    cgroup_limit.map_or(machine, |limit| machine.min(limit.saturating_sub(cgroup_used)))
}

/// Limit and use of memory and the CPU quota of this process's control group, version 2 or 1.
///
/// In a container the group's own directory is usually mounted as the root of the hierarchy; elsewhere /proc/self/cgroup
/// names it. Limits of every level up to the root apply.
fn cgroup(text: &impl Fn(&str) -> String) -> (Option<u64>, u64, Option<f64>) {
    let own = text("proc/self/cgroup");
    let path = |controller: &str| {
        let line = own.lines().find(|l| l.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == controller)));
        line.and_then(|l| l.splitn(3, ':').nth(2)).unwrap_or("/").trim_matches('/').to_string()
    };
    let levels = |base: &str, controller: &str| {
        let mut dirs = vec![base.to_string()];
        for part in path(controller).split('/').filter(|p| !p.is_empty()) {
            dirs.push(format!("{}/{part}", dirs[dirs.len() - 1]));
        }
        dirs
    };
    // Version 1 writes "no limit" as a huge number.
    let bytes = |file: String| text(&file).parse::<u64>().ok().filter(|&b| b < 1 << 60);
    let mut memory: Option<(u64, u64)> = None;
    let mut quota: Option<f64> = None;
    let mut tighten = |cpus: f64| quota = Some(quota.map_or(cpus, |q| q.min(cpus)));
    let mut groups: Vec<(Option<u64>, u64)> = Vec::new();
    for dir in levels("sys/fs/cgroup", "") {
        groups.push((bytes(format!("{dir}/memory.max")), bytes(format!("{dir}/memory.current")).unwrap_or(0)));
        let max = text(&format!("{dir}/cpu.max"));
        if let Some((Ok(limit), Ok(period))) = max.split_once(' ').map(|(l, p)| (l.parse::<f64>(), p.parse::<f64>())) {
            tighten(limit / period);
        }
    }
    for dir in levels("sys/fs/cgroup/memory", "memory") {
        let used = bytes(format!("{dir}/memory.usage_in_bytes")).unwrap_or(0);
        groups.push((bytes(format!("{dir}/memory.limit_in_bytes")), used));
    }
    for dir in levels("sys/fs/cgroup/cpu", "cpu") {
        let value = |name: &str| text(&format!("{dir}/{name}")).parse::<f64>().ok().filter(|&v| v > 0.0);
        if let (Some(limit), Some(period)) = (value("cpu.cfs_quota_us"), value("cpu.cfs_period_us")) {
            tighten(limit / period);
        }
    }
    for (limit, used) in groups {
        if let Some(limit) = limit.filter(|&l| memory.is_none_or(|(m, u)| l.saturating_sub(used) < m.saturating_sub(u))) {
            memory = Some((limit, used));
        }
    }
    (memory.map(|m| m.0), memory.map_or(0, |m| m.1), quota)
}

/// `0-3,8,10-11`; what does not parse is left out.
fn parse_list(list: &str) -> Vec<usize> {
    let mut out = Vec::new();
    for part in list.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            // A bound against a lying file: no machine has a million CPUs.
            out.extend(first..=last.min(first.saturating_add(1 << 20)));
        }
    }
    out
}

/// `48K`, `2048K`, `260M`
fn parse_size(size: &str) -> Option<u64> {
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &size[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// `MemTotal:  123 kB`, with `Node 0 ` in front in a node's file.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.split_whitespace().last() == Some(name)))?;
    line.split_once(':')?.1.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        dir
    }

    #[test]
    fn reads_this_machine() {
        let topology = Topology::read();
        assert!(!topology.cores.is_empty() && !topology.nodes.is_empty());
        assert!(topology.total_bytes > 0 && topology.available_bytes > 0 && topology.available_bytes <= topology.total_bytes);
        assert!(topology.default_threads() >= 1);
        assert_eq!(topology.worker_cpus(5).len(), 5);
    }

    #[test]
    fn two_nodes_with_smt_and_a_hole_in_the_numbering() {
        let mut files = vec![
            ("proc/cpuinfo".to_string(), "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma\n".to_string()),
            ("proc/meminfo".into(), "MemTotal: 1000 kB\nMemAvailable: 600 kB\n".into()),
            ("sys/devices/system/cpu/online".into(), "0-7\n".into()),
            ("sys/devices/system/node/online".into(), "0,2-3\n".into()),
            ("sys/devices/system/node/node0/cpulist".into(), "0-1,4-5\n".into()),
            ("sys/devices/system/node/node0/meminfo".into(), "Node 0 MemTotal:  500 kB\n".into()),
            ("sys/devices/system/node/node2/cpulist".into(), "2-3,6-7\n".into()),
            ("sys/devices/system/node/node2/meminfo".into(), "Node 2 MemTotal:  0 kB\n".into()),
            ("sys/devices/system/node/node3/cpulist".into(), "\n".into()),
            ("sys/devices/system/node/node3/meminfo".into(), "Node 3 MemTotal:  500 kB\n".into()),
            ("sys/devices/system/cpu/cpu1/cache/index0/level".into(), "1\n".into()),
            ("sys/devices/system/cpu/cpu1/cache/index0/type".into(), "Data\n".into()),
            ("sys/devices/system/cpu/cpu1/cache/index0/size".into(), "48K\n".into()),
            ("sys/kernel/mm/transparent_hugepage/enabled".into(), "always [madvise] never\n".into()),
            ("sys/fs/cgroup/memory.max".into(), "409600\n".into()),
            ("sys/fs/cgroup/memory.current".into(), "102400\n".into()),
            ("sys/fs/cgroup/cpu.max".into(), "250000 100000\n".into()),
        ];
        for cpu in 0..8 {
            files
                .push((format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), format!("{},{}\n", cpu % 4, cpu % 4 + 4)));
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let dir = tree(&files);
        let topology = Topology::read_from(dir.path(), Some(&[1, 2, 3, 5, 6]));
        assert_eq!(topology.cpu_model, "Some CPU");
        assert_eq!(topology.cpu_flags, ["fpu", "avx2", "fma"]);
        assert_eq!(
            topology.cores,
            [Core { cpus: vec![1, 5], node: 0 }, Core { cpus: vec![2, 6], node: 2 }, Core { cpus: vec![3], node: 2 }]
        );
        assert!(topology.has_smt());
        assert_eq!(topology.nodes.iter().map(|n| (n.id, n.total_bytes)).collect::<Vec<_>>(), [(0, 512000), (2, 0), (3, 512000)]);
        assert_eq!(topology.caches, [Cache { level: 1, kind: "Data".into(), bytes: 48 << 10 }]);
        assert_eq!((topology.cgroup_bytes, topology.available_bytes), (Some(409600), 307200));
        assert_eq!((topology.cgroup_cpus, topology.default_threads()), (Some(2.5), 2));
        assert_eq!(topology.worker_cpus(7), [1, 2, 3, 5, 6, 1, 2]);
        assert_eq!(topology.huge_pages, "madvise");
    }

    #[test]
    fn control_groups_of_version_1_and_nested_ones() {
        let dir = tree(&[
            ("proc/self/cgroup", "5:memory:/a/b\n4:cpu,cpuacct:/a\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "900\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "500\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "100\n"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"),
            ("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n"),
        ]);
        let topology = Topology::read_from(dir.path(), Some(&[0]));
        assert_eq!((topology.cgroup_bytes, topology.available_bytes, topology.cgroup_cpus), (Some(1000), 100, None));
    }

    #[test]
    fn an_empty_tree_is_one_core() {
        let dir = tree(&[]);
        let topology = Topology::read_from(dir.path(), None);
        assert_eq!((topology.cores.len(), topology.nodes.len(), topology.default_threads()), (1, 1, 1));
        assert_eq!(topology.huge_pages, "never");
    }

    #[test]
    fn lists_and_sizes() {
        assert_eq!(parse_list("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list("x,3-,4"), [4]);
        assert_eq!((parse_size("2M"), parse_size("7Q")), (Some(2 << 20), None));
    }
}
