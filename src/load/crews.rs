//! How many workers take part: measured where memory is as fast as it gets, kept for a day beside the caches; the
//! engine goes on from there (`machine/workers/crews.rs`).
//!
//! ```text
//! a step     some weights, in the precision of the experts, times some rows, as dense layers do
//! few rows   4 MiB, one row: as many workers as read fastest
//! many rows  16 MiB, 32 rows: as many as multiply fastest
//! ```
//!
//! Whatever slows a team down is in the steps: threads that share a core and do not say so, cores that others use,
//! memory that gives no more, waiting for each other. All candidates take turns, and each one's best turn counts: a
//! disturbance that passes chooses nothing.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::LoadProgress;
use super::cache::cache_dir;
use super::machine::Machine;
use super::place::SMALL_BYTES;
use super::spec::Spec;
use crate::Result;
use crate::backend::Dense;
use crate::backend::cpu::{Cpu, Linear};
use crate::backend::tensor::Tensor;
use crate::kernel::Kernel;
use crate::machine::topology::{self, Topology};
use crate::machine::workers::{AWAKE, Crews, Team, sizes_of};

/// Weights that the steps read in turn: more than stays in a cache.
pub(crate) const SAMPLE_BYTES: usize = 512 << 20;
/// A matrix of the weights. Steps of one row take one, as decode does; those of many take several, because dispatches
/// of a prompt are long.
const MATRIX_BYTES: usize = 4 << 20;
const MATRICES_OF_MANY: usize = 4;
/// Inputs of a row.
const INPUTS: usize = 2048;
/// Rows of a step of many: an expert's in a prompt.
const MANY: usize = 32;
/// Turns of each candidate, and how long one is.
const TURNS: usize = 3;
const TURN: Duration = Duration::from_millis(5);
/// Fewer workers are taken where they are slower by less than this: the others' cores are free for other work.
const EQUAL: f64 = 1.02;
/// Two workers are few enough to need no choice.
pub(crate) const NO_CHOICE: usize = 2;
/// A choice counts for so long: neighbours come and go.
const VALID: Duration = Duration::from_secs(24 * 3600);
/// First line of the file.
const HEADER: &str = "moebius crews 1";

/// Lets the team take part with as many workers as are fastest, unless the user has chosen, or the model is so small
/// that it does not matter, and says how many.
pub(super) fn choose(
    spec: &Spec<'_>,
    machine: &Machine,
    weights: u64,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<()> {
    if spec.config.threads.is_some() || weights < SMALL_BYTES || machine.team.threads() <= NO_CHOICE {
        return Ok(());
    }
    let precision = spec.precision.as_ref().map_or(Precision::int4(32), |precision| precision.layer(0).gate);
    let key = key(&Topology::read(), machine.kernel, precision);
    let path = cache_dir(spec.config).ok().map(|dir| path_of(&dir, &key));
    let kept = path.as_deref().and_then(|path| kept(path, &key));
    let choice = match kept {
        Some(choice) => choice,
        None => {
            let choice = measure(&machine.team, machine.kernel, precision, SAMPLE_BYTES)?;
            // What cannot be kept is measured again.
            let _ = path.map(|path| keep(&path, &key, &choice));
            choice
        }
    };
    machine.team.set_crews(choice.crews);
    machine.team.try_crews();
    report(LoadProgress::Experts(&format!("threads: {choice}")));
    Ok(())
}

/// What was chosen, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub(crate) crews: Crews,
    all: usize,
    /// How many times as long a step takes with all workers: of one row, of many.
    slower: [f64; 2],
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { crews: Crews { few, many, stride }, all, slower: [one_row, many_rows] } = *self;
        let why = |slower: f64| match slower {
            _ if slower < 1.03 => "more are no faster".to_string(),
            _ => format!("all take {:.0}% longer", 100.0 * (slower - 1.0)),
        };
        let part = |workers: usize, slower: f64| match workers == all {
            true => format!("all {all} cores"),
            false => format!("{workers} of {all} cores ({})", why(slower)),
        };
        write!(f, "decode on {}, prompts on {}", part(few, one_row), part(many, many_rows))?;
        match stride {
            1 => Ok(()),
            _ => write!(f, "; every second core first, because neighbours slow each other down"),
        }
    }
}

/// Measures, on a team of one worker per core, with `sample` bytes of weights. The turns add up to a quarter of a
/// second, to more where a step takes longer than a turn.
///
/// Errors: `Error::Resources` where there is no such memory.
pub(crate) fn measure(
    team: &Arc<Team>,
    kernel: &'static dyn Kernel,
    precision: Precision,
    sample: usize,
) -> Result<Choice> {
    let (all, before) = (team.threads(), team.crews());
    let mut steps = Steps::new(team, kernel, precision, sample)?;
    let choice = team.with_caller(|| {
        let half = all.div_ceil(2);
        let [in_turn, every_second] = steps.best([(half, 1), (half, 2)], 1);
        // Only where it is clear: the order of turns has its reasons.
        let stride = if every_second[0] * 1.1 < in_turn[0] { 2 } else { 1 };
        let mut sizes = sizes_of(all);
        sizes.reverse();
        let seconds = steps.best(sizes.map(|workers| (workers, stride)), 2);
        pick(stride, &sizes, &seconds)
    });
    team.set_crews(before);
    team.fit(usize::MAX);
    Ok(choice)
}

/// The smallest of the fastest, where steps of one row and of many take `seconds` with so many workers, all of them
/// first.
fn pick(stride: usize, sizes: &[usize], seconds: &[[f64; 2]]) -> Choice {
    let fastest = |i: usize| seconds.iter().map(|seconds| seconds[i]).fold(f64::INFINITY, f64::min);
    let smallest = |i: usize| {
        let equal = sizes.iter().zip(seconds).filter(|(_, seconds)| seconds[i] <= EQUAL * fastest(i));
        equal.map(|(workers, _)| *workers).min().unwrap_or(sizes[0])
    };
    let crews = Crews { few: smallest(0), many: smallest(1), stride };
    Choice { crews, all: sizes[0], slower: [0, 1].map(|i| seconds[0][i] / fastest(i)) }
}

/// What is timed.
struct Steps {
    team: Arc<Team>,
    backend: Cpu,
    weights: Vec<Linear>,
    inputs: [Tensor; 2], // of one row, of many
    out: [Tensor; MATRICES_OF_MANY],
    last: usize, // matrix that was read
}

impl Steps {
    fn new(team: &Arc<Team>, kernel: &'static dyn Kernel, precision: Precision, sample: usize) -> Result<Self> {
        let backend = Cpu::new(team.clone(), kernel);
        let sample = sample.min((topology::available_bytes() / 8) as usize).max(MATRICES_OF_MANY * MATRIX_BYTES);
        let n = MATRIX_BYTES / MatrixLayout::new(TILE_ROWS, INPUTS, precision)?.bytes() * TILE_ROWS;
        let weights =
            (0..sample / MATRIX_BYTES).map(|_| backend.sample(n, INPUTS, precision)).collect::<Result<_>>()?;
        let inputs = [1, MANY].map(|rows| {
            let mut x = Tensor::new(rows, INPUTS);
            x.data_mut().fill(0.5);
            x
        });
        let out = std::array::from_fn(|_| Tensor::new(MANY, n));
        Ok(Self { team: team.clone(), backend, weights, inputs, out, last: 0 })
    }

    /// Seconds of a step with each number of workers at a stride, of one row and, as the second of two kinds, of many:
    /// the best turn's mean.
    fn best<const N: usize>(&mut self, candidates: [(usize, usize); N], kinds: usize) -> [[f64; 2]; N] {
        let mut best = [[f64::INFINITY; 2]; N];
        for _ in 0..TURNS {
            for ((workers, stride), best) in candidates.iter().zip(&mut best) {
                self.team.set_crews(Crews { few: *workers, many: *workers, stride: *stride });
                self.team.fit(usize::MAX);
                for i in 0..kinds {
                    best[i] = best[i].min(self.turn(i));
                }
            }
        }
        best
    }

    fn turn(&mut self, kind: usize) -> f64 {
        // Meanwhile those that join wake up, and those that leave go to sleep.
        self.steps(kind, AWAKE);
        self.steps(kind, TURN)
    }

    /// Seconds of a step, from as many as take `time`.
    fn steps(&mut self, kind: usize, time: Duration) -> f64 {
        let (started, mut steps) = (Instant::now(), 0);
        while steps == 0 || started.elapsed() < time {
            self.step(kind);
            steps += 1;
        }
        started.elapsed().as_secs_f64() / f64::from(steps)
    }

    fn step(&mut self, kind: usize) {
        let Self { backend, weights, inputs, out, last, .. } = self;
        let x = &inputs[kind];
        out.iter_mut().for_each(|out| out.set_rows(x.rows()));
        let mut job = |out| {
            *last = (*last + 1) % weights.len();
            (&weights[*last], out)
        };
        match kind {
            0 => backend.linears(x, [job(&mut out[0])]),
            _ => backend.linears(x, out.each_mut().map(job)),
        }
    }
}

/// What a choice depends on, in one line.
fn key(topology: &Topology, kernel: &dyn Kernel, precision: Precision) -> String {
    let mut key = format!("{} {} {precision}", env!("CARGO_PKG_VERSION"), kernel.simd());
    for core in &topology.cores {
        let cpus: Vec<String> = core.cpus.iter().map(ToString::to_string).collect();
        let _ = write!(key, " {}/{}/{}", cpus.join("+"), core.node, core.cache);
    }
    if let Some(cpus) = topology.cgroup_cpus {
        let _ = write!(key, " quota {cpus}");
    }
    format!("{key} {} {}", topology.total_bytes >> 30, topology.cpu_model.replace('\n', " "))
}

/// The file of a machine: several may share a directory.
fn path_of(dir: &Path, key: &str) -> PathBuf {
    // FNV-1a.
    let hash = key
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    dir.join(format!("{hash:016x}.crews"))
}

/// The choice that is kept for a machine; `None`: there is none, it is old, or another machine's.
fn kept(path: &Path, key: &str) -> Option<Choice> {
    let age = SystemTime::now().duration_since(std::fs::metadata(path).ok()?.modified().ok()?).ok()?;
    let text = moebius_cache::file::read_text(path).ok()?;
    let mut lines = text.lines();
    if age > VALID || lines.next()? != HEADER || lines.next()? != key {
        return None;
    }
    let numbers: Vec<f64> = lines.next()?.split(' ').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [few, many, stride, all, one_row, many_rows] = numbers[..] else { return None };
    let crews = Crews { few: few as usize, many: many as usize, stride: stride as usize };
    Some(Choice { crews, all: all as usize, slower: [one_row, many_rows] })
}

/// Writes a choice as a whole or not at all.
fn keep(path: &Path, key: &str, choice: &Choice) -> std::io::Result<()> {
    let Choice { crews: Crews { few, many, stride }, all, slower: [one_row, many_rows] } = choice;
    let partial = path.with_extension(format!("crews.{}", std::process::id()));
    let text = format!("{HEADER}\n{key}\n{few} {many} {stride} {all} {one_row:.3} {many_rows:.3}\n");
    std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&partial);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel;

    #[test]
    fn the_smallest_of_the_fastest_is_taken() {
        // Memory is saturated by 24, arithmetic wants all.
        let choice = pick(1, &[32, 24, 16], &[[1.0, 1.0], [1.01, 1.3], [1.2, 2.0]]);
        assert_eq!(choice.crews, Crews { few: 24, many: 32, stride: 1 });
        let said = choice.to_string();
        assert_eq!(said, "decode on 24 of 32 cores (more are no faster), prompts on all 32 cores");
        // Half of the cores are none.
        let choice = pick(2, &[64, 32, 16], &[[3.0, 1.1], [1.0, 1.0], [1.6, 2.0]]);
        assert_eq!(choice.crews, Crews { few: 32, many: 32, stride: 2 });
        let said = choice.to_string();
        assert!(said.contains("32 of 64 cores (all take 200% longer)") && said.contains("every second"), "{said}");
    }

    #[test]
    fn a_choice_is_kept_for_its_machine_alone() {
        let dir = tempfile::tempdir().unwrap();
        let choice = pick(1, &[8, 4], &[[1.5, 1.0], [1.0, 2.0]]);
        let key = key(&Topology::read(), kernel::best(), Precision::Bf16);
        let path = path_of(dir.path(), &key);
        assert_eq!(kept(&path, &key), None);
        keep(&path, &key, &choice).unwrap();
        assert_eq!(kept(&path, &key), Some(choice));
        assert_eq!(kept(&path, &format!("{key} more")), None);
        for hostile in ["", "moebius crews 1", &format!("{HEADER}\n{key}\n1 2 x 4 5 6"), &format!("{HEADER}\n{key}\n1")]
        {
            std::fs::write(&path, hostile).unwrap();
            assert_eq!(kept(&path, &key), None, "{hostile}");
        }
    }

    #[test]
    fn a_team_is_measured_as_it_is() {
        let topology = Topology::read();
        let team = Arc::new(Team::on_nodes(&topology.seats(topology.default_threads())).unwrap());
        let choice = measure(&team, kernel::best(), Precision::int4(32), 16 << 20).unwrap();
        let Crews { few, many, .. } = choice.crews;
        assert!((1..=team.threads()).contains(&few) && (1..=team.threads()).contains(&many), "{choice}");
        assert_eq!(team.crews(), Crews::all(team.threads()));
    }
}
