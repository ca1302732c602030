//! What this process may use of the machine: cores, SMT siblings, NUMA nodes, caches, memory, SIMD flags.
//!
//! Everything is read from a root directory, so that tests can use recorded trees of other machines.

use std::collections::BTreeMap;
use std::path::Path;

use moebius_cache::limits::{self, ControlGroup, meminfo_bytes};

/// One physical core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The CPUs (hardware threads) of this core that the process may use, ascending.
    pub cpus: Vec<usize>,
    /// The NUMA node its memory comes from: its own, or the nearest one where its own has none for this process.
    pub node: usize,
    /// The first CPU of those that share its last-level cache.
    pub cache: usize,
}

/// The place of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The CPU it is pinned to.
    pub cpu: usize,
    /// The number of the NUMA node its memory comes from.
    pub node: usize,
    /// Its place in the order in which seats are taken: fewer workers take those of the lowest turns.
    pub turn: usize,
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
    /// Whether this process may take memory of it.
    pub allowed: bool,
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
    /// CPUs that the kernel keeps free of other work and that are left alone, because the process was not put on them
    /// alone.
    pub isolated: Vec<usize>,
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
        Topology::read_from(Path::new("/"))
    }

    /// From a tree that holds `proc/` and `sys/`.
    ///
    /// Missing files leave their fields empty: a container may hide any of them.
    pub fn read_from(root: &Path) -> Topology {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_string();
        let cpuinfo = text("proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.trim() == name));
            line.and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().to_string()).unwrap_or_default()
        };
        let status = text("proc/self/status");
        let allowed =
            |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(|list| parse_list(list.trim()));
        let (allowed_cpus, allowed_nodes) = (allowed("Cpus_allowed_list:"), allowed("Mems_allowed_list:"));
        let mut online = parse_list(&text("sys/devices/system/cpu/online"));
        if online.is_empty() {
            online = allowed_cpus.clone().unwrap_or_else(|| vec![0]);
        }
        let mut usable: Vec<usize> =
            online.iter().copied().filter(|cpu| allowed_cpus.as_ref().is_none_or(|a| a.contains(cpu))).collect();
        // The administrator reserved these: only a mask of nothing else says that they are meant for this process.
        let mut isolated = parse_list(&text("sys/devices/system/cpu/isolated"));
        isolated.retain(|cpu| usable.contains(cpu));
        if isolated.len() == usable.len() {
            isolated.clear();
        }
        usable.retain(|cpu| !isolated.contains(cpu));

        let meminfo = text("proc/meminfo");
        let memory = |name: &str| meminfo_bytes(&meminfo, name);
        let total_bytes = memory("MemTotal").unwrap_or(0);
        let mut nodes = Vec::new();
        for id in parse_list(&text("sys/devices/system/node/online")) {
            let dir = format!("sys/devices/system/node/node{id}");
            let total_bytes = meminfo_bytes(&text(&format!("{dir}/meminfo")), "MemTotal").unwrap_or(0);
            let allowed = allowed_nodes.as_ref().is_none_or(|nodes| nodes.contains(&id));
            nodes.push(Node { id, cpus: parse_list(&text(&format!("{dir}/cpulist"))), total_bytes, allowed });
        }
        if nodes.is_empty() {
            nodes.push(Node { id: 0, cpus: online.clone(), total_bytes, allowed: true });
        }
        // One column per online node, in their order.
        let distance = |from: usize, to: usize| {
            let row = text(&format!("sys/devices/system/node/node{}/distance", nodes[from].id));
            row.split_whitespace().nth(to).and_then(|d| d.parse::<u32>().ok()).unwrap_or(if from == to {
                10
            } else {
                20
            })
        };
        let memory_node = |own: usize| {
            let with_memory = (0..nodes.len()).filter(|&n| nodes[n].total_bytes > 0 && nodes[n].allowed);
            with_memory.min_by_key(|&n| (n != own, distance(own, n))).unwrap_or(own)
        };
        let memory_nodes: Vec<usize> = (0..nodes.len()).map(|own| nodes[memory_node(own)].id).collect();

        let mut cores: BTreeMap<usize, Core> = BTreeMap::new();
        for &cpu in &usable {
            let siblings = parse_list(&text(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")));
            let first = siblings.first().copied().unwrap_or(cpu);
            let node = memory_nodes[nodes.iter().position(|n| n.cpus.contains(&cpu)).unwrap_or(0)];
            let shared = parse_list(&text(&format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list")));
            let cache = shared.first().copied().unwrap_or(0);
            cores.entry(first).or_insert(Core { cpus: Vec::new(), node, cache }).cpus.push(cpu);
        }

        let group = ControlGroup::read(&text);
        let available_bytes = group.available_bytes(&meminfo);
        let first = usable.first().copied().unwrap_or(0);
        let caches = (0..8)
            .filter_map(|i| {
                let file = |name: &str| text(&format!("sys/devices/system/cpu/cpu{first}/cache/index{i}/{name}"));
                Some(Cache {
                    level: file("level").parse().ok()?,
                    kind: file("type"),
                    bytes: parse_size(&file("size"))?,
                })
            })
            .collect();
        let huge = text("sys/kernel/mm/transparent_hugepage/enabled");
        Topology {
            cpu_model: field("model name"),
            cpu_flags: field("flags").split_whitespace().map(String::from).collect(),
            cores: cores.into_values().collect(),
            isolated,
            nodes,
            caches,
            total_bytes,
            available_bytes,
            cgroup_bytes: group.memory_bytes,
            cgroup_cpus: group.cpus,
            huge_pages: huge
                .split_once('[')
                .and_then(|(_, s)| s.split_once(']'))
                .map_or("never", |(s, _)| s)
                .to_string(),
        }
    }

    /// Whether two usable CPUs share a core.
    pub fn has_smt(&self) -> bool {
        self.cores.iter().any(|core| core.cpus.len() > 1)
    }

    /// Worker threads: one per usable physical core, within the control group's quota (a throttled thread stalls all
    /// others).
    pub fn default_threads(&self) -> usize {
        let quota = self.cgroup_cpus.map_or(usize::MAX, |cpus| cpus.floor() as usize);
        self.cores.len().min(quota).max(1)
    }

    /// Where `threads` workers sit: one per core first, then on SMT siblings, then over again; as many on every NUMA
    /// node as can be, and in a node as many on every last-level cache, each of which has its own way to memory.
    ///
    /// Workers of one node stand together, and of one cache in it. Empty when there is no usable CPU.
    pub fn seats(&self, threads: usize) -> Vec<Seat> {
        let mut of_cache: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut place = |core: &Core| {
            let place = of_cache.entry((core.node, core.cache)).or_default();
            *place += 1;
            *place
        };
        let mut cores: Vec<(usize, &Core)> = self.cores.iter().map(|core| (place(core), core)).collect();
        cores.sort_by_key(|&(place, _)| place); // stable: of a place they stay in order
        let mut of_node: BTreeMap<usize, usize> = BTreeMap::new();
        let mut order = Vec::new();
        for (_, core) in cores {
            let place = of_node.entry(core.node).or_default();
            *place += 1;
            order.extend(core.cpus.iter().enumerate().map(|(sibling, &cpu)| (sibling, *place, core, cpu)));
        }
        order.sort_by_key(|&(sibling, place, core, _)| (sibling, place, core.node));
        let taken = if order.is_empty() { 0 } else { threads };
        let taken = order.iter().cycle().take(taken).enumerate();
        let mut seats: Vec<(usize, Seat)> =
            taken.map(|(turn, &(_, _, core, cpu))| (core.cache, Seat { cpu, node: core.node, turn })).collect();
        seats.sort_by_key(|&(cache, seat)| (seat.node, cache));
        seats.into_iter().map(|(_, seat)| seat).collect()
    }

    /// The CPUs of [`seats`](Topology::seats).
    pub fn worker_cpus(&self, threads: usize) -> Vec<usize> {
        self.seats(threads).iter().map(|seat| seat.cpu).collect()
    }

    /// Nodes whose memory this process may use.
    pub fn memory_nodes(&self) -> Vec<usize> {
        self.nodes.iter().filter(|n| n.total_bytes > 0 && n.allowed).map(|n| n.id).collect()
    }
}

/// Whether the processor has AMX, as it says itself: `/proc/cpuinfo` of a kernel that does not know AMX is silent about
/// it.
pub fn cpu_has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_TILE_INT8 == BF16_TILE_INT8
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// RAM that can be taken right now, as [`Topology::available_bytes`], and within `ulimit -v`, without reading all the
/// rest.
pub fn available_bytes() -> u64 {
    limits::available_bytes().min(limits::address_space_bytes().unwrap_or(u64::MAX))
}

/// The most RAM that this process ever had, mapped files included.
pub fn peak_bytes() -> u64 {
    meminfo_bytes(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmHWM").unwrap_or(0)
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
        assert!(
            topology.total_bytes > 0
                && topology.available_bytes > 0
                && topology.available_bytes <= topology.total_bytes
        );
        assert!(topology.default_threads() >= 1);
        assert_eq!(topology.worker_cpus(5).len(), 5);
    }

    #[test]
    fn two_nodes_with_smt_and_a_hole_in_the_numbering() {
        let mut files = vec![
            (
                "proc/cpuinfo".to_string(),
                "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma\n".to_string(),
            ),
            ("proc/meminfo".into(), "MemTotal: 1000 kB\nMemAvailable: 600 kB\n".into()),
            ("proc/self/status".into(), "Name:\tx\nCpus_allowed_list:\t1-3,5-6\nMems_allowed_list:\t0-3\n".into()),
            ("sys/devices/system/cpu/online".into(), "0-7\n".into()),
            ("sys/devices/system/node/node2/distance".into(), "20 10 15\n".into()),
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
            files.push((
                format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"),
                format!("{},{}\n", cpu % 4, cpu % 4 + 4),
            ));
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let dir = tree(&files);
        let topology = Topology::read_from(dir.path());
        assert_eq!(topology.cpu_model, "Some CPU");
        assert_eq!(topology.cpu_flags, ["fpu", "avx2", "fma"]);
        assert_eq!(
            topology.cores,
            [(vec![1, 5], 0), (vec![2, 6], 3), (vec![3], 3)].map(|(cpus, node)| Core { cpus, node, cache: 0 })
        );
        assert!(topology.has_smt());
        assert_eq!(topology.memory_nodes(), [0, 3]);
        assert_eq!(
            topology.nodes.iter().map(|n| (n.id, n.total_bytes)).collect::<Vec<_>>(),
            [(0, 512000), (2, 0), (3, 512000)]
        );
        assert_eq!(topology.caches, [Cache { level: 1, kind: "Data".into(), bytes: 48 << 10 }]);
        assert_eq!((topology.cgroup_bytes, topology.available_bytes), (Some(409600), 307200));
        assert_eq!((topology.cgroup_cpus, topology.default_threads()), (Some(2.5), 2));
        assert_eq!(topology.worker_cpus(7), [1, 5, 1, 2, 3, 6, 2]);
        assert_eq!(topology.huge_pages, "madvise");
    }

    /// A machine of `nodes`, each with its CPUs and memory, `smt` threads per core numbered as Linux does: first
    /// threads first.
    fn machine(nodes: &[(usize, &[usize], bool)], smt: usize, status: &str, isolated: &str) -> Topology {
        let mut files = vec![
            ("proc/meminfo".to_string(), "MemTotal: 1000 kB\n".to_string()),
            ("proc/self/status".into(), status.into()),
            ("sys/devices/system/cpu/isolated".into(), isolated.into()),
        ];
        let ids: Vec<String> = nodes.iter().map(|n| n.0.to_string()).collect();
        files.push(("sys/devices/system/node/online".into(), ids.join(",")));
        let (mut online, cores) = (Vec::new(), nodes.iter().map(|n| n.1.len()).sum::<usize>());
        let hole = nodes.iter().flat_map(|n| n.1).max().map_or(0, |max| max + 1).max(cores);
        for (i, (id, first_threads, memory)) in nodes.iter().enumerate() {
            let mut cpus = Vec::new();
            for &first in *first_threads {
                let siblings: Vec<String> = (0..smt).map(|t| (first + t * hole).to_string()).collect();
                for sibling in &siblings {
                    files.push((
                        format!("sys/devices/system/cpu/cpu{sibling}/topology/thread_siblings_list"),
                        siblings.join(","),
                    ));
                }
                cpus.extend(siblings);
            }
            let dir = format!("sys/devices/system/node/node{id}");
            files.push((format!("{dir}/cpulist"), cpus.join(",")));
            files.push((
                format!("{dir}/meminfo"),
                format!("Node {id} MemTotal: {} kB\n", if *memory { 500 } else { 0 }),
            ));
            // The farther apart in the list, the farther apart.
            let row: Vec<String> = (0..nodes.len()).map(|j| (10 + 6 * i.abs_diff(j)).to_string()).collect();
            files.push((format!("{dir}/distance"), row.join(" ")));
            online.extend(cpus);
        }
        files.push(("sys/devices/system/cpu/online".into(), online.join(",")));
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        Topology::read_from(tree(&files).path())
    }

    fn on_nodes(seats: &[Seat]) -> Vec<(usize, usize)> {
        seats.iter().map(|seat| (seat.cpu, seat.node)).collect()
    }

    #[test]
    fn workers_are_spread_over_the_nodes_and_stand_together_by_node() {
        for count in [1, 2, 4, 8] {
            for smt in [1, 2] {
                // Cores numbered round robin, so that a node's CPUs are never consecutive; every third number is
                // missing.
                let number = |core: usize| core + core / 2;
                let cpus: Vec<Vec<usize>> =
                    (0..count).map(|n| (0..4).map(|c| number(c * count + n)).collect()).collect();
                let nodes: Vec<(usize, &[usize], bool)> =
                    cpus.iter().enumerate().map(|(i, c)| (i + i / 2, &c[..], true)).collect();
                let topology = machine(&nodes, smt, "", "");
                assert_eq!((topology.cores.len(), topology.has_smt()), (4 * count, smt == 2));
                for threads in [count, 2 * count, 4 * count] {
                    let seats = topology.seats(threads);
                    for (i, (id, cpus, _)) in nodes.iter().enumerate() {
                        let per_node = threads / count;
                        let expected: Vec<(usize, usize)> = cpus[..per_node].iter().map(|&cpu| (cpu, *id)).collect();
                        assert_eq!(
                            on_nodes(&seats[i * per_node..(i + 1) * per_node]),
                            expected,
                            "{count} nodes, {threads} threads"
                        );
                    }
                }
                // More threads than cores: siblings, or the same CPUs again, as many on each node.
                let seats = topology.seats(8 * count);
                assert_eq!(seats.iter().filter(|seat| seat.node == nodes[count - 1].0).count(), 8);
            }
        }
    }

    #[test]
    fn few_workers_are_spread_over_the_last_level_caches() {
        let mut files: Vec<(String, String)> = vec![("sys/devices/system/cpu/online".into(), "0-7".into())];
        for cpu in 0..8 {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list");
            files.push((dir, if cpu < 4 { "0-3".into() } else { "4-7".into() }));
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let topology = Topology::read_from(tree(&files).path());
        assert_eq!(topology.worker_cpus(2), [0, 4]);
        assert_eq!(topology.worker_cpus(5), [0, 1, 2, 4, 5]);
        let turns: Vec<usize> = topology.seats(8).iter().map(|seat| seat.turn).collect();
        assert_eq!(turns, [0, 2, 4, 6, 1, 3, 5, 7]);
    }

    #[test]
    fn nodes_without_memory_or_without_cpus() {
        let all = "Mems_allowed_list:\t0-9\n";
        // Node 1 has no memory, node 5 no CPUs: cores of 1 use the nearest memory, and no worker sits on 5.
        let nodes: [(usize, &[usize], bool); 4] =
            [(0, &[0, 1], true), (1, &[2, 3], false), (5, &[], true), (6, &[4, 5], true)];
        let topology = machine(&nodes, 1, all, "");
        assert_eq!(on_nodes(&topology.seats(6)), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 6), (5, 6)]);
        assert_eq!(topology.memory_nodes(), [0, 5, 6]);
        // Memory that the control group does not give.
        let topology = machine(&nodes, 1, "Mems_allowed_list:\t6\n", "");
        assert_eq!(topology.memory_nodes(), [6]);
        assert!(topology.seats(6).iter().all(|seat| seat.node == 6));
    }

    #[test]
    fn isolated_cores_are_left_alone_unless_the_process_was_put_there() {
        let nodes: [(usize, &[usize], bool); 1] = [(0, &[0, 1, 2, 3], true)];
        let cpus = |allowed: &str| {
            let topology = machine(&nodes, 1, &format!("Cpus_allowed_list:\t{allowed}\n"), "2-3\n");
            (topology.worker_cpus(topology.default_threads()), topology.isolated)
        };
        assert_eq!(cpus("0-3"), (vec![0, 1], vec![2, 3]));
        assert_eq!(cpus("1-2"), (vec![1], vec![2]));
        assert_eq!(cpus("2-3"), (vec![2, 3], vec![]));
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
        let topology = Topology::read_from(dir.path());
        assert_eq!((topology.cgroup_bytes, topology.available_bytes, topology.cgroup_cpus), (Some(1000), 100, None));
    }

    #[test]
    fn an_empty_tree_is_one_core() {
        let dir = tree(&[]);
        let topology = Topology::read_from(dir.path());
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
