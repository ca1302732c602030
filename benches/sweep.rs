//! What the time of one small MoE layer at one token goes into, and which settings of `Tuning` would take less of it.
//!
//! `cargo bench --bench sweep [-- seconds=N] [threads=N] [shape=NAME] [only=TEXT] [json=FILE]`. All settings take
//! turns, a few layers each, so that whatever else the machine does meets all of them; a row is the median over all
//! turns, and stands beside the default turn by turn. Beside the executor runs one whose kernel only reads: the same
//! bytes in the same order with the same claims and barriers, without arithmetic.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use moebius::backend::cpu::Cpu;
use moebius::backend::tensor::Tensor;
use moebius::backend::{Load, Route, RouterTensors, Routing};
use moebius::experts::{CpuExperts, ExpertMemory, Tuning};
use moebius::kernel::{self, ActivationRows, Ahead, DeltaToken, Kernel, Rows, Simd, SsmToken, Start, Tiles};
use moebius::machine::heap::Heap;
use moebius::machine::memory::{self, Pages, read_bandwidth};
use moebius::machine::topology::Topology;
use moebius::machine::workers::{Cut, Team};
use moebius_cache::pack::MatrixLayout;
use moebius_cache::{ExpertLayout, Precision};

use common::{SHAPES, STORE_BYTES, Shape, routing, store, uniform};

/// Layers of one setting before it is the next one's turn.
const TURN: usize = 12;
const PRECISION: Precision = Precision::int4(128);

/// `Tuning::ahead`: bytes into L2, bytes into L1.
const AHEAD: [(usize, usize); 15] = [
    (0, 0),
    (0, 1024),
    (0, 2048),
    (0, 4096),
    (2048, 512),
    (4096, 0),
    (4096, 512),
    (4096, 1024),
    (4096, 2048),
    (6144, 0),
    (6144, 1024),
    (8192, 0),
    (8192, 1024),
    (10752, 0),
    (16384, 1024),
];
/// `Tuning::idle_bytes`.
const IDLE_KIB: [usize; 4] = [0, 32, 512, 1024];
/// `Tuning::gate_cut`, `Tuning::down_cut`: levels, halvings.
const CUTS: [(u32, u32); 6] = [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3)];
/// `Tuning::gate_tiles`, `Tuning::down_tiles`.
const TILES: [(usize, usize); 6] = [(1, 4), (4, 4), (2, 1), (2, 2), (2, 8), (4, 8)];

/// The settings that are compared: each differs in one thing from the default.
fn settings() -> Vec<(String, Tuning)> {
    let base = Tuning::default();
    let mut all = vec![("default".to_string(), base)];
    for (l2, l1) in AHEAD {
        all.push((format!("ahead l2={l2} l1={l1}"), Tuning { ahead: Some(Ahead { l2, l1 }), ..base }));
    }
    all.push(("as before: no look-ahead, no idle".into(), Tuning { look_ahead: false, idle_bytes: 0, ..base }));
    all.push(("no look-ahead".into(), Tuning { look_ahead: false, ..base }));
    for kib in IDLE_KIB {
        all.push((format!("idle {kib} KiB"), Tuning { idle_bytes: kib << 10, ..base }));
    }
    for (levels, halvings) in CUTS {
        let cut = Cut { levels, halvings };
        all.push((format!("gate cut {levels} levels / {halvings}"), Tuning { gate_cut: cut, ..base }));
        all.push((format!("down cut {levels} levels / {halvings}"), Tuning { down_cut: cut, ..base }));
        all.push((format!("both cut {levels} levels / {halvings}"), Tuning { gate_cut: cut, down_cut: cut, ..base }));
    }
    for (gate_tiles, down_tiles) in TILES {
        all.push((format!("tiles gate {gate_tiles} down {down_tiles}"), Tuning { gate_tiles, down_tiles, ..base }));
    }
    all
}

/// A kernel that reads weights and does nothing with them.
struct Reader {
    inner: &'static dyn Kernel,
    prefetch: bool,
}

impl Kernel for Reader {
    fn simd(&self) -> Simd {
        self.inner.simd()
    }
    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, _: &ActivationRows<'_>, _: Start, _: &mut [f32]) {
        let mut any = 0;
        for (i, part) in tiles.bytes().chunks(if self.prefetch { 1024 } else { usize::MAX }).enumerate() {
            if self.prefetch {
                tiles.prefetch(layout, 1024 * i);
            }
            any |= memory::read(part);
        }
        // Not into an atomic: that would wait for every load under way.
        std::hint::black_box(any);
    }
    fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        self.inner.quantize(x, group, codes, scales, sums);
    }
    fn remainder(&self, x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]) {
        self.inner.remainder(x, codes, scales, out);
    }
    fn split_words(&self) -> usize {
        self.inner.split_words()
    }
    fn split(&self, x: &[f32], out: &mut [f32]) {
        self.inner.split(x, out);
    }
    fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]) {
        self.inner.clamped_swiglu(gate, up, limit, alpha, out);
    }
    fn sigmoid_mul(&self, gate: &[f32], x: &mut [f32]) {
        self.inner.sigmoid_mul(gate, x);
    }
    fn delta_step(&self, state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
        self.inner.delta_step(state, token, out);
    }
    fn silu_of_clamped_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        self.inner.silu_of_clamped_mul(gate, up, limit, out);
    }
    fn ssm_step(&self, state: &mut [f32], token: &SsmToken<'_>, out: &mut [f32]) {
        self.inner.ssm_step(state, token, out);
    }
    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        self.inner.dot_f32(w, x, out);
    }
    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        self.inner.silu_mul(gate, up, out);
    }
    fn exp_sub(&self, x: &mut [f32], max: f32) -> f32 {
        self.inner.exp_sub(x, max)
    }
    fn scale(&self, x: &mut [f32], scale: f32) {
        self.inner.scale(x, scale);
    }
    fn clamped_silu_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        self.inner.clamped_silu_mul(gate, up, limit, out);
    }
    fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        self.inner.gelu_mul(gate, up, out);
    }
    fn widen(&self, codes: &[i8], scales: &[f32], out: &mut [half::bf16]) {
        self.inner.widen(codes, scales, out);
    }
    fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]) {
        self.inner.add_scaled(x, scale, out);
    }
    fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        self.inner.rms_norm(x, w, eps, out);
    }
}

/// What takes turns.
enum Way {
    /// An executor (index) at a tuning, with the router before it or not.
    Layer(usize, Tuning, bool),
    /// The router alone.
    Router,
    /// Every worker reads its even share of each active expert, in one dispatch without a barrier.
    Plain,
    /// As `Plain`, a kilobyte at a time.
    Chunks(usize),
    /// As `Plain`, gate and up, a barrier, then down.
    Phases,
    /// Sixteen dispatches, then sixteen barriers, of nothing.
    Dispatch,
    Barrier,
    /// Sixteen barriers over one counter that all write.
    Counter,
}

struct Row {
    name: String,
    way: Way,
    times: Vec<f64>, // us
}

fn main() -> moebius::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().find_map(|a| a.strip_prefix(name)?.strip_prefix('=').map(String::from));
    let topology = Topology::read();
    let threads = value("threads").and_then(|v| v.parse().ok()).unwrap_or(topology.default_threads());
    let seconds: f64 = value("seconds").and_then(|v| v.parse().ok()).unwrap_or(40.0);
    let wanted = value("shape").unwrap_or_default();
    let team = Arc::new(Team::new(&topology.worker_cpus(threads))?);
    team.pin_caller()?;
    println!("{}, {threads} threads", topology.cpu_model);
    let mut shapes = Vec::new();
    for shape in SHAPES.iter().filter(|shape| shape.name.contains(&wanted)) {
        shapes.push(sweep(&team, shape, seconds, &value("only").unwrap_or_default())?);
    }
    let report = serde_json::json!({ "cpu": topology.cpu_model, "threads": threads, "shapes": shapes });
    if let Some(file) = value("json") {
        std::fs::write(&file, report.to_string()).map_err(|e| moebius::Error::Invalid(format!("{file}: {e}")))?;
    }
    Ok(())
}

fn sweep(team: &Arc<Team>, shape: &Shape, seconds: f64, only: &str) -> moebius::Result<serde_json::Value> {
    let layout = ExpertLayout::new(shape.hidden, shape.intermediate, PRECISION)?;
    let store = Arc::new(store(shape, PRECISION)?);
    let bytes = (shape.top_k * layout.bytes()) as f64;

    let best = kernel::best();
    let reader = |prefetch| -> &'static dyn Kernel { Box::leak(Box::new(Reader { inner: best, prefetch })) };
    let mut kernels = vec![("", best), ("read: ", reader(false)), ("read, prefetching: ", reader(true))];
    if let Some(avx2) = kernel::get(Simd::Avx2) {
        kernels.push(("avx2: ", avx2));
    }
    let memory = Arc::new(ExpertMemory::mapped(store.clone()));
    let mut executors: Vec<CpuExperts> = kernels
        .iter()
        .map(|(_, kernel)| CpuExperts::new(&Heap::default(), memory.clone(), team.clone(), *kernel, shape.top_k))
        .collect::<moebius::Result<_>>()?;
    let mut rows: Vec<Row> = Vec::new();
    let mut add = |name: String, way: Way| {
        if name.starts_with("default") || name.contains(only) {
            rows.push(Row { name, way, times: Vec::new() });
        }
    };
    add("read: even shares, one dispatch".into(), Way::Plain);
    for kib in [1, 4, 16, 64] {
        add(format!("read: even shares, {kib} KiB at a time"), Way::Chunks(kib << 10));
    }
    add("read: even shares, two phases".into(), Way::Phases);
    let settings = settings();
    for (i, (prefix, _)) in kernels.iter().enumerate() {
        // Of the others only what may be different for them.
        let some =
            |name: &str| name == "default" || name.starts_with("as before") || (i == 3 && name.starts_with("ahead"));
        for (name, tuning) in settings.iter().filter(|setting| i == 0 || some(&setting.0)) {
            add(format!("{prefix}{name}"), Way::Layer(i, *tuning, false));
        }
    }
    // What differs between two rows of one setting is noise.
    add("default, once more".into(), Way::Layer(0, Tuning::default(), false));
    add("router, then default".into(), Way::Layer(0, Tuning::default(), true));
    add("router alone".into(), Way::Router);
    add("16 dispatches".into(), Way::Dispatch);
    add("16 barriers".into(), Way::Barrier);
    add("16 barriers over one counter".into(), Way::Counter);

    let backend = Cpu::new(team.clone(), best);
    let config = shape.router();
    let mut state = 7;
    let mut weight = || -> Vec<f32> { (0..shape.experts * shape.hidden).map(|_| uniform(&mut state)).collect() };
    let mut router = || backend.load_router(RouterTensors::of(weight().into()));
    let routers = (0..16).map(|_| router()).collect::<moebius::Result<Vec<_>>>()?;
    let mut x = Tensor::new(1, shape.hidden);
    x.data_mut().fill_with(|| uniform(&mut state));
    let mut out = vec![0.0; shape.hidden];

    // Every expert once: checksums are compared at the first use.
    for executor in &mut executors {
        for layer in 0..store.num_layers() {
            for first in (0..shape.experts).step_by(shape.top_k) {
                let ids: Vec<i32> = (0..shape.top_k).map(|i| ((first + i) % shape.experts) as i32).collect();
                let all = Routing { top_k: shape.top_k, weights: vec![0.1; ids.len()], ids };
                executor.submit_rows(layer, x.data(), &all)?;
                executor.finish_rows(&mut out)?;
            }
        }
    }
    let limit = read_bandwidth(team, STORE_BYTES / 2, Pages::Huge, 4)?;
    let (started, mut layer, mut turns) = (Instant::now(), 0, 0);
    let mut limits = vec![limit];
    while started.elapsed().as_secs_f64() < seconds || turns < 3 {
        turns += 1;
        for row in &mut rows {
            if let Way::Layer(i, tuning, _) = row.way {
                executors[i].set_tuning(tuning);
            }
            for turn in 0..TURN {
                layer = (layer + 1) % store.num_layers();
                let mut routing = routing(1, shape, &mut state);
                let from = Instant::now();
                match &row.way {
                    Way::Layer(i, _, router) => {
                        if *router {
                            backend.route(&routers[layer % routers.len()], &config, &x, &mut routing);
                        }
                        executors[*i].submit_rows(layer, x.data(), &routing)?;
                        executors[*i].finish_rows(&mut out)?;
                    }
                    Way::Router => backend.route(&routers[layer % routers.len()], &config, &x, &mut routing),
                    Way::Plain => {
                        let sink = AtomicUsize::new(0);
                        team.run(&|worker| {
                            for &expert in &routing.ids {
                                let all = store.expert(layer, expert as usize);
                                let share = worker.share(all.len() / 64);
                                sink.fetch_or(
                                    memory::read(&all[64 * share.start..64 * share.end]) as usize,
                                    Ordering::Relaxed,
                                );
                            }
                        });
                    }
                    Way::Chunks(bytes) => team.run(&|worker| {
                        for &expert in &routing.ids {
                            let all = store.expert(layer, expert as usize);
                            let share = worker.share(all.len() / 64);
                            for part in all[64 * share.start..64 * share.end].chunks(*bytes) {
                                std::hint::black_box(memory::read(part));
                            }
                        }
                    }),
                    Way::Phases => {
                        let sink = AtomicUsize::new(0);
                        team.run(&|worker| {
                            for phase in 0..2 {
                                for &expert in &routing.ids {
                                    let (gate_up, down) =
                                        store.expert(layer, expert as usize).split_at(layout.down_tile(0));
                                    let all = if phase == 0 { gate_up } else { down };
                                    let share = worker.share(all.len() / 64);
                                    sink.fetch_or(
                                        memory::read(&all[64 * share.start..64 * share.end]) as usize,
                                        Ordering::Relaxed,
                                    );
                                }
                                worker.barrier();
                            }
                        });
                    }
                    Way::Dispatch => (0..16).for_each(|_| team.run(&|_| ())),
                    Way::Counter => {
                        let arrived = AtomicUsize::new(0);
                        team.run(&|worker| {
                            for all in (1..=16).map(|i| i * worker.count) {
                                arrived.fetch_add(1, Ordering::AcqRel);
                                while arrived.load(Ordering::Acquire) < all {
                                    std::hint::spin_loop();
                                }
                            }
                        });
                    }
                    Way::Barrier => team.run(&|worker| (0..16).for_each(|_| worker.barrier())),
                }
                // The first finds the caches as another setting left them.
                if turn > 0 {
                    row.times.push(from.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        if turns % 8 == 0 {
            limits.push(read_bandwidth(team, STORE_BYTES / 8, Pages::Huge, 1)?);
        }
    }
    limits.sort_by(f64::total_cmp);
    println!(
        "\n{}: {:.1} MB a layer, {turns} turns of {TURN}; plain reading of 64 MiB stretches: best {:.1} GB/s, median \
         of bests {:.1}",
        shape.name,
        bytes / 1e6,
        limits[limits.len() - 1],
        limits[limits.len() / 2]
    );
    println!(
        "{:<40} {:>9} {:>9} {:>9} {:>8} {:>10} {:>6}",
        "setting", "median us", "10% us", "90% us", "GB/s", "v default", "+-"
    );
    let medians =
        |row: &Row| -> Vec<f64> { row.times.chunks(TURN - 1).map(|turn| quantiles(turn, [0.5])[0]).collect() };
    let base = rows.iter().find(|row| row.name == "default").map(medians).unwrap_or_default();
    let mut list = Vec::new();
    for row in &rows {
        let [median, low, high] = quantiles(&row.times, [0.5, 0.1, 0.9]);
        let ratios: Vec<f64> = medians(row).iter().zip(&base).map(|(time, base)| time / base).collect();
        let [ratio, lower, upper] = quantiles(&ratios, [0.5, 0.25, 0.75]);
        // About one standard error of the median.
        let error = (upper - lower) / (turns as f64).sqrt();
        let reads = matches!(row.way, Way::Layer(..) | Way::Plain | Way::Chunks(_) | Way::Phases);
        let gb_s = if reads { bytes / median / 1e3 } else { 0.0 };
        let [percent, error_percent] = [100.0 * ratio, 100.0 * error];
        println!(
            "{:<40} {median:>9.1} {low:>9.1} {high:>9.1} {gb_s:>8.1} {percent:>9.1}% {error_percent:>6.1}",
            row.name
        );
        list.push(serde_json::json!({
            "setting": row.name, "us": median, "us_10": low, "us_90": high, "gb_s": gb_s, "of_default": ratio,
                "error": error
        }));
    }
    Ok(serde_json::json!({ "shape": shape.name, "layer_bytes": bytes, "turns": turns, "read_gb_s": limits,
            "rows": list }))
}

/// Of some numbers those at these shares of their order.
fn quantiles<const N: usize>(of: &[f64], shares: [f64; N]) -> [f64; N] {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    shares.map(|share| sorted[(sorted.len() as f64 * share) as usize])
}
