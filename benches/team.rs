//! What a dispatch and a barrier of the worker team cost, and what a neighbour on one of its cores costs.
//!
//! `cargo bench --bench team [-- threads=N] [neighbour]`. `neighbour` puts a spinning thread on the last worker's core,
//! then on the first's, and times layers of one millisecond of work, claimed in small pieces as experts are.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use moebius::machine::topology::{Seat, Topology};
use moebius::machine::workers::Team;

/// Microseconds: median and 99th percentile.
fn percentiles(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    let us = |i: usize| times[i.min(times.len() - 1)].as_secs_f64() * 1e6;
    (us(times.len() / 2), us(times.len() * 99 / 100))
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// One layer: 48 pieces of work for each worker of the full team and two barriers, about a millisecond when all cores
/// are free.
///
/// Pieces are counted, not timed: a thread that is not running gets nothing done.
fn layer(team: &Team, piece: u32) {
    let (next, pieces) = (AtomicUsize::new(0), 48 * team.threads());
    team.run(&|worker| {
        for phase in 1..=2 {
            while next.fetch_add(1, Relaxed) < phase * pieces / 2 {
                for i in 0..piece {
                    std::hint::black_box(i);
                }
            }
            // A worker's last, failed claim must not count for the next phase.
            worker.barrier();
            if worker.index == 0 {
                next.store(phase * pieces / 2, Relaxed);
            }
            worker.barrier();
        }
    });
}

/// Mean and 99th percentile of a layer in milliseconds, over two seconds.
fn layers(team: &Team, piece: u32) -> (f64, f64) {
    // Long enough for whoever rests to rest.
    let (warm, mut times) = (Instant::now(), Vec::new());
    while warm.elapsed() < Duration::from_millis(300) {
        layer(team, piece);
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        let from = Instant::now();
        layer(team, piece);
        times.push(from.elapsed());
    }
    let mean = start.elapsed().as_secs_f64() * 1e3 / times.len() as f64;
    (mean, percentiles(times).1 / 1e3)
}

fn neighbour(seats: &[Seat]) -> moebius::Result<()> {
    let team = Team::on_nodes(seats)?;
    team.pin_caller()?;
    // As many steps as take 20 microseconds on a free core.
    let start = Instant::now();
    (0..10_000_000u32).for_each(|i| _ = std::hint::black_box(i));
    let piece = (10_000_000.0 * 20e-6 / start.elapsed().as_secs_f64()) as u32;
    let row = |name: &str, (mean, p99): (f64, f64)| {
        println!("{name:<44} {mean:>7.2} ms {p99:>7.2} ms at the 99th percentile")
    };
    let half = Team::on_nodes(&seats[..seats.len().div_ceil(2)])?;
    // The same work on half the threads.
    let scale = seats.len() as f64 / half.threads() as f64;
    let (mean, p99) = layers(&half, piece);
    row("half the threads, no neighbour", (mean * scale, p99 * scale));
    row("all threads, no neighbour", layers(&team, piece));
    for (name, seat) in [("last", seats[seats.len() - 1]), ("first", seats[0])] {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A team of one is how this program pins a thread.
                let _ = Team::new(&[seat.cpu]).and_then(|team| team.pin_caller());
                while !stop.load(Relaxed) {
                    spin(Duration::from_millis(1));
                }
            });
            row(&format!("all threads, neighbour on the {name} core"), layers(&team, piece));
            stop.store(true, Relaxed);
        });
    }
    row("all threads, the neighbour is gone", layers(&team, piece));
    Ok(())
}

fn main() -> moebius::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let topology = Topology::read();
    let threads =
        args.iter().find_map(|a| a.strip_prefix("threads=")?.parse().ok()).unwrap_or(topology.default_threads());
    let seats = topology.seats(threads);
    println!("{}, {threads} threads", topology.cpu_model);
    if args.iter().any(|a| a == "neighbour") {
        return neighbour(&seats);
    }
    let team = Team::on_nodes(&seats)?;
    team.pin_caller()?;
    const BARRIERS: u32 = 100;
    let (mut dispatches, mut barriers, mut woken) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..3000 {
        let start = Instant::now();
        team.run(&|_| ());
        dispatches.push(start.elapsed());
        let start = Instant::now();
        team.run(&|worker| (0..BARRIERS).for_each(|_| worker.barrier()));
        barriers.push(start.elapsed() / BARRIERS);
    }
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(1));
        let start = Instant::now();
        team.run(&|_| ());
        woken.push(start.elapsed());
    }
    for (name, times) in
        [("barrier", barriers), ("dispatch and end", dispatches), ("dispatch to sleeping workers", woken)]
    {
        let (median, p99) = percentiles(times);
        println!("{name:<30} {median:>8.2} us {p99:>8.2} us at the 99th percentile");
    }
    Ok(())
}
