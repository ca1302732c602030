//! Trees of `/proc` and `/sys` as machines of one to eight NUMA nodes show them, in `tests/data/topology`: what is
//! read, where workers sit, and how experts are cut for them.
//!
//! A line is a path, a tab and what the file holds. They were written down from how such machines number things, not
//! taken from them.

use std::path::Path;
use std::sync::Arc;

use moebius::experts::ExpertMemory;
use moebius::machine::topology::{Seat, Topology};
use moebius::machine::workers::Team;
use moebius_cache::Precision;
use moebius_cache::format::{Contents, ExpertCache};

/// What must be read from a tree.
struct Machine {
    name: &'static str,
    cores: usize,
    smt: bool,
    nodes: &'static [usize],          // that are online
    memory_nodes: &'static [usize],   // whose memory may be used
    seats: &'static [(usize, usize)], // node and number of workers, one per core
    first: &'static [(usize, usize)], // CPU and node of two workers for each node of the seats
}

const MACHINES: &[Machine] = &[
    Machine {
        name: "1-ryzen-smt",
        cores: 8,
        smt: true,
        nodes: &[0],
        memory_nodes: &[0],
        seats: &[(0, 8)],
        first: &[(0, 0), (1, 0)],
    },
    Machine {
        name: "1-xeon-offline",
        cores: 14,
        smt: false,
        nodes: &[0],
        memory_nodes: &[0],
        seats: &[(0, 14)],
        first: &[(0, 0), (1, 0)],
    },
    Machine {
        name: "2-xeon-even-odd",
        cores: 32,
        smt: true,
        nodes: &[0, 1],
        memory_nodes: &[0, 1],
        seats: &[(0, 16), (1, 16)],
        first: &[(0, 0), (2, 0), (1, 1), (3, 1)],
    },
    Machine {
        name: "2-grace-gpu-memory",
        cores: 72,
        smt: false,
        nodes: &[0, 1],
        memory_nodes: &[0, 1],
        seats: &[(0, 72)],
        first: &[(0, 0), (1, 0)],
    },
    Machine {
        name: "3-sockets-hole-memoryless",
        cores: 24,
        smt: false,
        nodes: &[0, 2, 3],
        memory_nodes: &[0, 3],
        // The socket without memory is as near to 0 as to 3; the first is taken.
        seats: &[(0, 16), (3, 8)],
        first: &[(0, 0), (1, 0), (16, 3), (17, 3)],
    },
    Machine {
        name: "4-xeon-snc2",
        cores: 64,
        smt: true,
        nodes: &[0, 1, 2, 3],
        memory_nodes: &[0, 1, 2, 3],
        seats: &[(0, 16), (1, 16), (2, 16), (3, 16)],
        first: &[(0, 0), (1, 0), (16, 1), (17, 1), (32, 2), (33, 2), (48, 3), (49, 3)],
    },
    Machine {
        name: "8-epyc-nps4",
        cores: 64,
        smt: true,
        nodes: &[0, 1, 2, 3, 4, 5, 6, 7],
        memory_nodes: &[0, 1, 2, 3, 4, 5, 6, 7],
        seats: &[(0, 8), (1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (6, 8), (7, 8)],
        first: &[
            (0, 0),
            (1, 0),
            (8, 1),
            (9, 1),
            (16, 2),
            (17, 2),
            (24, 3),
            (25, 3),
            (32, 4),
            (33, 4),
            (40, 5),
            (41, 5),
            (48, 6),
            (49, 6),
            (56, 7),
            (57, 7),
        ],
    },
    Machine {
        name: "8-epyc-nps4-container",
        cores: 16,
        smt: true,
        nodes: &[0, 1, 2, 3, 4, 5, 6, 7],
        memory_nodes: &[2],
        seats: &[(2, 16)],
        first: &[(16, 2), (17, 2)],
    },
];

fn read(name: &str) -> Topology {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/topology/{name}.txt"));
    let text = std::fs::read_to_string(&file).expect("a tree of that name");
    let root = tempfile::tempdir().expect("a temporary directory");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (path, content) = line.split_once('\t').unwrap_or((line, ""));
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a path in the tree")).expect("a directory");
        std::fs::write(path, content.replace("\\n", "\n") + "\n").expect("a file");
    }
    Topology::read_from(root.path())
}

/// How many seats each node has, in their order.
fn per_node(seats: &[Seat]) -> Vec<(usize, usize)> {
    let mut nodes: Vec<(usize, usize)> = Vec::new();
    for seat in seats {
        match nodes.last_mut() {
            Some((node, count)) if *node == seat.node => *count += 1,
            _ => nodes.push((seat.node, 1)),
        }
    }
    nodes
}

#[test]
fn cores_nodes_and_seats() {
    for machine in MACHINES {
        let (name, topology) = (machine.name, read(machine.name));
        assert_eq!((topology.cores.len(), topology.has_smt()), (machine.cores, machine.smt), "{name}");
        assert_eq!(topology.nodes.iter().map(|node| node.id).collect::<Vec<_>>(), machine.nodes, "{name}");
        assert_eq!(topology.memory_nodes(), machine.memory_nodes, "{name}");
        assert_eq!(topology.default_threads(), machine.cores, "{name}");
        let seats = topology.seats(machine.cores);
        assert_eq!(per_node(&seats), machine.seats, "{name}");
        let mut cpus: Vec<usize> = seats.iter().map(|seat| seat.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        assert_eq!(cpus.len(), machine.cores, "{name}: one worker per core");
        assert!(topology.cores.iter().all(|core| cpus.contains(&core.cpus[0])), "{name}: on its first thread");
        let few = topology.seats(2 * machine.seats.len());
        assert_eq!(few.iter().map(|seat| (seat.cpu, seat.node)).collect::<Vec<_>>(), machine.first, "{name}");
        // Siblings come when all cores are taken, as many on each node.
        if machine.smt {
            let twice: Vec<(usize, usize)> = machine.seats.iter().map(|(node, count)| (*node, 2 * count)).collect();
            assert_eq!(per_node(&topology.seats(2 * machine.cores)), twice, "{name}");
        }
    }
}

#[test]
fn every_node_with_workers_holds_a_slice_in_proportion() {
    let precision = Precision::int4(32);
    let contents = Contents {
        model: "random",
        hidden: 512,
        intermediate: 384,
        num_experts: 2,
        kind: Default::default(),
        precision: precision.into(),
        layers: &[0],
    };
    let store = Arc::new(ExpertCache::anonymous(&contents, |_, expert, bytes| bytes.fill(expert as u8)).unwrap());
    let here = Topology::read();
    for machine in MACHINES {
        // Its nodes, with workers on whatever CPUs there are: two for each node, and on the first a third and a fourth.
        let mut nodes: Vec<usize> = machine.first.iter().map(|&(_, node)| node).collect();
        nodes.splice(0..0, [nodes[0]; 2]);
        let cpus = here.worker_cpus(nodes.len());
        let seats = cpus.into_iter().zip(&nodes).enumerate();
        let seats: Vec<Seat> = seats.map(|(turn, (cpu, &node))| Seat { cpu, node, turn }).collect();
        let team = Team::on_nodes(&seats).unwrap();
        let memory = ExpertMemory::copied(store.clone(), &team, &[], &|_, _| ()).unwrap();
        assert_eq!(memory.nodes(), machine.seats.len(), "{}", machine.name);
        let (mut gate, mut down, mut before) = (0, 0, 0);
        for (node, &workers) in team.threads_per_node().iter().enumerate() {
            before += workers;
            let (gate_tiles, down_tiles) = (memory.gate_tiles_of(node), memory.down_tiles_of(node));
            assert_eq!(
                (gate_tiles.start, down_tiles.start),
                (gate, down),
                "{}: slices follow each other",
                machine.name
            );
            (gate, down) = (gate_tiles.end, down_tiles.end);
            assert_eq!((gate, down), (24 * before / nodes.len(), 32 * before / nodes.len()), "{}", machine.name);
        }
        assert_eq!((gate, down), (24, 32), "{}", machine.name);
    }
}
