//! Routed experts in VRAM: microseconds of a layer, of all its kernels, as a recorded pass launches them.
//!
//! `cargo bench --bench experts_in_vram [-- shape=NAME layers=8 tokens=1,64,512 precision=int4-g128 ids=FILE]`. A shape
//! may be HIDDENxINTERMEDIATExEXPERTSxTOP_K. Tokens choose at random, or as FILE says: i32 [layers, most tokens, top
//! k]. A pass has so many layers that caches hold little of what the next one reads. A row of JSON for each number of
//! tokens: the median pass, and TFLOP/s of its products.

#[allow(dead_code)] // what benches of the CPU's experts need besides
mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{SHAPES, Shape, store_of};
use half::bf16;
use moebius::Result;
use moebius::backend::cuda::{CudaBackend, CudaRouting, Limits};
use moebius::backend::{Load, Memory, Route, RouterTensors};
use moebius::cuda::{Cuda, Graph};
use moebius::experts::cost::CostModel;
use moebius::experts::gpu::{Forced, GpuExperts, Sizes};
use moebius::experts::{CpuExperts, ExpertExecutor, ExpertMemory};
use moebius::machine::heap::Heap;
use moebius::machine::topology::Topology;
use moebius::machine::workers::Team;
use moebius::model::{Router, Scoring, Share};
use moebius_cache::Precision;

const PASSES: usize = 15;

/// What the command line says; what stands for a missing name is the default.
fn argument(name: &str, default: &str) -> String {
    let prefix = format!("{name}=");
    let found = std::env::args().find_map(|argument| argument.strip_prefix(&prefix).map(str::to_owned));
    found.unwrap_or(default.into())
}

fn shape(name: &str) -> Shape {
    if let Some(known) = SHAPES.into_iter().find(|shape| shape.name == name) {
        return known;
    }
    let numbers: Vec<usize> = name.split('x').filter_map(|number| number.parse().ok()).collect();
    let [hidden, intermediate, experts, top_k] = numbers[..] else {
        panic!("shape={name}: use one of {:?} or four numbers with x between them", SHAPES.map(|shape| shape.name))
    };
    Shape { name: "random", hidden, intermediate, experts, top_k }
}

/// Those choices on the device.
fn routing(b: &CudaBackend, shape: &Shape, ids: &[i32]) -> Result<CudaRouting> {
    let tokens = ids.len() / shape.top_k;
    let mut to = b.routing(tokens, shape.top_k)?;
    let router = b.load_router(RouterTensors::of(vec![0.0; shape.experts * shape.hidden].into()))?;
    b.route(&router, &Router::new(shape.top_k, Scoring::Softmax), &b.tensor(tokens, shape.hidden)?, &mut to);
    b.cuda().upload(&b.cuda().compute, to.ids(), ids);
    Ok(to)
}

fn main() -> Result<()> {
    let shape = shape(&argument("shape", "qwen3-30b-a3b"));
    let precision: Precision = argument("precision", "int4-g128").parse().unwrap_or_else(|e| panic!("precision: {e}"));
    let tokens: Vec<usize> = argument("tokens", "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
        .split(',')
        .map(|count| count.parse().unwrap_or_else(|e| panic!("tokens: {count}: {e}")))
        .collect();
    let most = tokens.iter().copied().max().unwrap_or(1);

    let b = CudaBackend::new(Cuda::open(0)?, Limits { context: 1024, table: 1024 })?;
    let layers = argument("layers", "8").parse().unwrap_or_else(|e| panic!("layers: {e}"));
    let (cache, heap) = (Arc::new(store_of(&shape, precision, layers)?), Heap::default());
    let team = Arc::new(Team::new(&Topology::read().worker_cpus(2))?);
    let memory = Arc::new(ExpertMemory::mapped(cache));
    let cpu = CpuExperts::new(&heap, memory, team, moebius::kernel::best(), shape.top_k)?;
    let sizes = Sizes {
        tokens: most,
        cpu_tokens: 1,
        top_k: shape.top_k,
        resident: shape.experts,
        ring: 0,
        share: Share::WHOLE,
        holders: 0,
        on_holders: 0,
    };
    let costs = CostModel { cpu_bytes: 1e9, cpu_products: 1e18, pcie_bytes: 1e9 };
    let mut experts = GpuExperts::new(b.cuda().clone(), &heap, cpu, sizes, costs, Forced::default())?;

    let mut state = 1;
    let chosen: Vec<i32> = match argument("ids", "").as_str() {
        "" => common::routing(layers * most, &shape, &mut state).ids,
        file => {
            let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{file}: {e}"));
            bytes.chunks_exact(4).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect()
        }
    };
    assert_eq!(chosen.len(), layers * most * shape.top_k, "ids of {layers} layers, {most} tokens");
    for tokens in tokens {
        let of_layer = tokens * shape.top_k;
        let routings = chosen.chunks_exact(most * shape.top_k).map(|ids| routing(&b, &shape, &ids[..of_layer]));
        let routings = routings.collect::<Result<Vec<_>>>()?;
        let (x, mut out) = (b.tensor(tokens, shape.hidden)?, b.tensor_f32(tokens, shape.hidden)?);
        let numbers: Vec<bf16> =
            (0..tokens * shape.hidden).map(|_| bf16::from_f32(common::uniform(&mut state))).collect();
        b.cuda().upload(&b.cuda().compute, x.bf16(), &numbers);
        b.cuda().upload(&b.cuda().compute, out.f32(), &vec![0.0f32; tokens * shape.hidden]);
        let mut pass = || -> Result<()> {
            for (layer, routing) in routings.iter().enumerate() {
                experts.submit(layer, &x, routing)?;
                experts.finish(&mut out)?;
            }
            Ok(())
        };
        pass()?;
        let graph = Graph::record(b.cuda(), pass)?;
        // Several at a time: what a launch costs the host is hidden, as it is where passes follow one another.
        const AT_A_TIME: usize = 4;
        let mut times = Vec::new();
        for _ in 0..PASSES + 2 {
            let since = Instant::now();
            (0..AT_A_TIME).for_each(|_| graph.launch());
            b.cuda().synchronize()?;
            times.push(since.elapsed().as_secs_f64() / (AT_A_TIME * layers) as f64);
        }
        let times = &mut times[2..];
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let tflops = 6.0 * (of_layer * shape.hidden * shape.intermediate) as f64 / median / 1e12;
        println!("{{\"tokens\": {tokens}, \"us\": {:.1}, \"tflops\": {tflops:.1}}}", 1e6 * median);
    }
    Ok(())
}
