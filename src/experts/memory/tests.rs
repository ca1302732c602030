//! Slices against the expert they were cut from.

use moebius_cache::Precision;
use moebius_cache::format::Contents;

use super::*;
use crate::machine::topology::{Seat, Topology};

const PRECISION: Precision = Precision::int4(32);

fn store() -> Arc<ExpertCache> {
    let contents = Contents {
        model: "random",
        hidden: 224,
        intermediate: 160,
        num_experts: 5,
        kind: Default::default(),
        precision: PRECISION.into(),
        layers: &[0, 1, 2],
    };
    let cache = ExpertCache::anonymous(&contents, |layer, expert, bytes| {
        let mut random = crate::kernel::random::Random((layer * 5 + expert) as u64);
        bytes.fill_with(|| random.bits() as u8);
    });
    Arc::new(cache.unwrap())
}

/// As many workers on each of several nodes as given, whether or not this machine has them.
fn team(workers: &[usize]) -> Team {
    let cpus = Topology::read().worker_cpus(workers.iter().sum());
    let nodes = workers.iter().enumerate().flat_map(|(node, &count)| std::iter::repeat_n(node, count));
    let seats = cpus.into_iter().zip(nodes).enumerate();
    Team::on_nodes(&seats.map(|(turn, (cpu, node))| Seat { cpu, node, turn }).collect::<Vec<_>>()).unwrap()
}

#[test]
fn every_tile_is_on_one_node_unchanged() {
    let store = store();
    for workers in [&[1][..], &[3], &[1, 1], &[3, 1], &[1, 1, 1, 1], &[1; 8], &[2, 1, 1, 2]] {
        let team = team(workers);
        let memory = ExpertMemory::copied(store.clone(), &team, &[], &|_, _| ()).unwrap();
        assert_eq!((memory.nodes(), memory.is_copy()), (workers.len(), true));
        let layout = store.layout(0);
        let (gate, down) = (layout.gate.tiles(), layout.down.tiles());
        for (layer, expert) in (0..3).flat_map(|layer| (0..5).map(move |expert| (layer, expert))) {
            let whole = store.expert(layer, expert);
            let (mut gate_up_seen, mut down_seen) = (0, 0);
            for node in 0..memory.nodes() {
                for tiles in [
                    memory.gate_tiles_of(node),
                    memory.gate_tiles_of(node).take(1).collect::<Vec<_>>().first().map_or(0..0, |&t| t..t + 1),
                ] {
                    if !tiles.is_empty() {
                        let expected = &whole[layout.gate_tile(tiles.start)..layout.gate_tile(tiles.end)];
                        assert_eq!(memory.gate_up_tiles(layer, expert, tiles), expected);
                    }
                }
                let tiles = memory.down_tiles_of(node);
                if !tiles.is_empty() {
                    let expected = &whole[layout.down_tile(tiles.start)..layout.down_tile(tiles.end)];
                    assert_eq!(memory.down_tiles(layer, expert, tiles.clone()), expected);
                    assert_eq!(
                        memory.down_tiles(layer, expert, tiles.end - 1..tiles.end),
                        &expected[expected.len() - layout.down.tile_bytes()..]
                    );
                }
                assert_eq!((memory.gate_tiles_of(node).start, tiles.start), (gate_up_seen, down_seen));
                (gate_up_seen, down_seen) = (memory.gate_tiles_of(node).end, tiles.end);
            }
            assert_eq!((gate_up_seen, down_seen), (gate, down));
        }
    }
}

#[test]
fn slices_are_in_proportion_to_the_workers() {
    let memory = ExpertMemory::copied(store(), &team(&[3, 1]), &[], &|_, _| ()).unwrap();
    assert_eq!([memory.gate_tiles_of(0), memory.gate_tiles_of(1)], [0..7, 7..10]);
    assert_eq!([memory.down_tiles_of(0), memory.down_tiles_of(1)], [0..10, 10..14]);
    let memory = ExpertMemory::copied(store(), &team(&[2, 2]), &[0], &|_, _| ()).unwrap();
    assert_eq!((memory.nodes(), memory.gate_tiles_of(0)), (1, 0..10));
    memory.lock().unwrap_or_else(|e| assert!(e.to_string().contains("ulimit"), "{e}"));
}

#[test]
#[should_panic(expected = "more than one node")]
fn a_run_over_two_nodes_is_a_bug() {
    ExpertMemory::copied(store(), &team(&[1, 1]), &[], &|_, _| ()).unwrap().gate_up_tiles(0, 0, 4..6);
}

#[test]
fn slices_lie_on_their_nodes() {
    let topology = Topology::read();
    let seats = topology.seats(topology.default_threads());
    let team = Team::on_nodes(&seats).unwrap();
    if team.nodes().len() < 2 {
        eprintln!("skipped: slices_lie_on_their_nodes: this needs two NUMA nodes with CPUs and memory");
        return;
    }
    let memory = ExpertMemory::copied(store(), &team, &[], &|_, _| ()).unwrap();
    let placed = memory.placed(team.nodes()).expect("move_pages");
    assert!(placed.iter().all(|&share| share > 0.9), "{placed:?}");
}
