//! Routed experts of real models' shapes against the memory's read bandwidth.
//!
//! `cargo bench --bench experts [-- FILTER...]`: a row is printed when every filter is part of its name, such as
//! `qwen3 int4-g128 avx512`; `threads=N` sets the team, `tokens=N,N` the batches; `router=1` times the whole
//! MoE layer, from the router's logits to the sum (bytes are the experts' alone). Weights are cycled through so that
//! they come from RAM.

mod common;

use std::sync::Arc;
use std::time::Instant;

use moebius::backend::cpu::Cpu;
use moebius::backend::tensor::Tensor;
use moebius::backend::{Load, Route, RouterTensors};
use moebius::experts::{CpuExperts, ExpertExecutor, ExpertMemory};
use moebius::kernel::{self, Simd};
use moebius::machine::heap::Heap;
use moebius::machine::memory::{Pages, read_bandwidth};
use moebius::machine::topology::Topology;
use moebius::machine::workers::Team;
use moebius::model::Router;
use moebius_cache::Precision;
use moebius_cache::format::ExpertCache;

use common::{SHAPES, STORE_BYTES, Shape, routing, store, uniform};

fn main() -> moebius::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let topology = Topology::read();
    let threads =
        args.iter().find_map(|a| a.strip_prefix("threads=")?.parse().ok()).unwrap_or(topology.default_threads());
    let tokens = args
        .iter()
        .find_map(|a| a.strip_prefix("tokens=")?.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<usize>>>());
    let tokens = tokens.unwrap_or_else(|| vec![1, 4, 16, 64, 256]);
    let with_router = args.iter().any(|a| a == "router=1");
    let filters: Vec<&String> = args.iter().filter(|a| !a.contains('=')).collect();
    let team = Arc::new(Team::new(&topology.worker_cpus(threads))?);
    team.pin_caller()?;
    println!("{}, {threads} threads", topology.cpu_model);
    println!(
        "read bandwidth: {:.1} GB/s in 4 KiB pages, {:.1} in huge pages",
        read_bandwidth(&team, STORE_BYTES, Pages::Small, 5)?,
        read_bandwidth(&team, STORE_BYTES, Pages::Huge, 9)?
    );
    println!(
        "{:<42} {:>6} {:>9} {:>8} {:>7} {:>7} {:>10}",
        "shape precision simd", "tokens", "us/layer", "GB/s", "share", "best", "us/token"
    );

    let (g32, g128) = (32, 128);
    let precisions = [
        Precision::int4(g128),
        Precision::int4(g32),
        Precision::Mxfp4,
        Precision::Q4K,
        Precision::Q5K,
        Precision::Q6K,
        Precision::int8(g128),
        Precision::int8(g32),
        Precision::Bf16,
    ];
    for shape in &SHAPES {
        for precision in precisions {
            let wanted = |simd: Simd| {
                let name = format!("{} {precision} {simd}", shape.name);
                filters.iter().all(|f| name.contains(*f)).then_some(name)
            };
            let simds: Vec<Simd> =
                kernel::available().into_iter().filter(|&s| s != Simd::Scalar && wanted(s).is_some()).collect();
            if simds.is_empty() || !shape.intermediate.is_multiple_of(precision.unit()) {
                continue;
            }
            let store = Arc::new(store(shape, precision)?);
            let most = tokens.iter().copied().max().unwrap_or(1);
            for simd in simds {
                let kernel = kernel::get(simd).expect("listed as available");
                let memory = Arc::new(ExpertMemory::mapped(store.clone()));
                let mut experts = CpuExperts::new(&Heap::default(), memory, team.clone(), kernel, most * shape.top_k)
                    .expect("host memory");
                let router = with_router.then(|| LayerRouter::new(Cpu::new(team.clone(), kernel), shape));
                for tokens in tokens.iter().copied() {
                    measure(
                        &team,
                        &mut experts,
                        &store,
                        shape,
                        router.as_ref(),
                        tokens,
                        &wanted(simd).unwrap_or_default(),
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// Random router weights of some layers, and what they are applied with.
struct LayerRouter {
    backend: Cpu,
    config: Router,
    weights: Vec<<Cpu as Load>::Router>,
}

impl LayerRouter {
    fn new(backend: Cpu, shape: &Shape) -> Self {
        let mut state = 7;
        let config = shape.router();
        let weight = |_| (0..shape.experts * shape.hidden).map(|_| uniform(&mut state)).collect();
        let weights: Vec<Vec<f32>> = (0..16).map(weight).collect();
        let load = |weight: Vec<f32>| backend.load_router(RouterTensors::of(weight.into()));
        let weights = weights.into_iter().map(|weight| load(weight).expect("host memory")).collect();
        Self { backend, config, weights }
    }
}

fn measure(
    team: &Team,
    experts: &mut CpuExperts,
    store: &ExpertCache,
    shape: &Shape,
    router: Option<&LayerRouter>,
    tokens: usize,
    name: &str,
) -> moebius::Result<()> {
    let mut state = 1;
    let mut x = Tensor::new(tokens, shape.hidden);
    x.data_mut().fill_with(|| uniform(&mut state));
    let mut out = vec![0.0; x.data().len()];
    let (mut times, mut bytes) = (Vec::new(), 0);
    let repeats = if tokens == 1 { 120 } else { (120 / tokens).clamp(5, 40) };
    // The limit is measured beside each row: on a shared machine it moves.
    let limit = read_bandwidth(team, STORE_BYTES / 2, Pages::Huge, 2)?;
    for i in 0..repeats + 1 {
        let mut routing = routing(tokens, shape, &mut state);
        let before = experts.traffic().ram;
        let start = Instant::now();
        if let Some(router) = router {
            router.backend.route(&router.weights[i % router.weights.len()], &router.config, &x, &mut routing);
        }
        experts.submit_rows(i % store.num_layers(), x.data(), &routing)?;
        experts.finish_rows(&mut out)?;
        // The first one warms up buffers and threads.
        if i > 0 {
            times.push(start.elapsed().as_secs_f64());
            bytes += experts.traffic().ram - before;
        }
    }
    times.sort_by(f64::total_cmp);
    let gb_s = |time: f64| bytes as f64 / repeats as f64 / time / 1e9;
    // The limit is a best; so the share of the best is told beside that of the median.
    let (best, median) = (times[0], times[times.len() / 2]);
    println!(
        "{name:<42} {tokens:>6} {:>9.1} {:>8.1} {:>6.0}% {:>6.0}% {:>10.1}",
        median * 1e6,
        gb_s(median),
        gb_s(median) / limit * 100.0,
        gb_s(best) / limit * 100.0,
        median * 1e6 / tokens as f64
    );
    Ok(())
}
