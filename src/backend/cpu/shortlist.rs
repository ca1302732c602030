//! The largest logits of rows, which is what a sampler needs of them.
//!
//! ```text
//! all workers, for each part of each row:   its largest number m, sum exp((x - m) inverse temperature)
//! one for each row:                         the KEPT-th largest m: so many numbers at least are as large
//! all workers, for each part of each row:   its numbers that are
//! ```
//!
//! One thread alone would wait for a whole row, number after number, out of the caches of the cores that computed it.
//! Parts depend on the vocabulary alone, so the bits do not depend on the number of workers.

use std::sync::{Mutex, PoisonError};

use super::{Cpu, lock};
use crate::Result;
use crate::backend::tensor::{Shortlist, Tensor};
use crate::machine::workers::Shared;

/// Numbers of a row that a list has.
const KEPT: usize = 64;

/// Parts of a row: several times [`KEPT`], so that few other numbers are as large as the largest of a KEPT-th part.
const PARTS: usize = 512;

/// Columns of a part are a multiple of this.
const LANES: usize = 16;

/// What finds the largest logits of rows.
pub struct Shortlister {
    width: usize,                       // of a part
    parts: usize,                       // of a row
    largest: Vec<f32>,                  // [rows, parts]
    sums: Vec<f32>,                     // [rows, parts]
    bounds: Vec<f32>,                   // [rows], of the numbers that are listed
    found: Vec<Mutex<Vec<(u32, f32)>>>, // [rows], token and logit
}

impl Cpu {
    pub(super) fn shortlister_of(&self, max_rows: usize, cols: usize) -> Result<Shortlister> {
        let width = cols.div_ceil(PARTS).next_multiple_of(LANES);
        let parts = cols.div_ceil(width);
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[width.max(parts)]))?;
        let of_parts = || self.heap.zeros(&[max_rows, parts]);
        let list = |_| {
            let mut list = self.heap.zeros(&[4 * KEPT])?;
            list.clear();
            Ok(Mutex::new(list))
        };
        Ok(Shortlister {
            width,
            parts,
            largest: of_parts()?,
            sums: of_parts()?,
            bounds: self.heap.zeros(&[max_rows])?,
            found: (0..max_rows).map(list).collect::<Result<_>>()?,
        })
    }

    pub(super) fn list_largest(
        &self,
        Shortlister { width, parts, largest, sums, bounds, found }: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) {
        let (rows, cols, width, parts) = (logits.rows(), logits.cols(), *width, *parts);
        assert!(rows == inverse_temperatures.len() && rows <= bounds.len() && cols.div_ceil(width) == parts);
        let list_of = |row: usize| found[row].lock().unwrap_or_else(PoisonError::into_inner);
        (0..rows).for_each(|row| list_of(row).clear());
        let (shared_largest, shared_sums, shared_bounds) =
            (Shared::new(largest), Shared::new(sums), Shared::new(bounds));
        let (kernel, scratch) = (self.kernel, &self.scratch);
        let part_of = |row: usize, part: usize| &logits.row(row)[part * width..cols.min((part + 1) * width)];
        self.team.run(&|worker| {
            let room = &mut lock(&scratch[worker.index]).values;
            for part in worker.share(parts) {
                for (row, &inverse) in inverse_temperatures.iter().enumerate() {
                    let x = part_of(row, part);
                    let m = largest_of(x);
                    let weights = room.take(x.len());
                    // NaN counts as -infinity; where nothing is finite the list says so.
                    weights.iter_mut().zip(x).for_each(|(w, &x)| {
                        *w = if x > f32::NEG_INFINITY { (x - m) * inverse } else { f32::NEG_INFINITY }
                    });
                    let sum = if m.is_finite() { kernel.exp_sub(weights, 0.0) } else { 0.0 };
                    let at = row * parts + part;
                    // SAFETY: a part is in one worker's share.
                    #[allow(unsafe_code)]
                    let (to_largest, to_sum) =
                        unsafe { (shared_largest.slice_mut(at..at + 1), shared_sums.slice_mut(at..at + 1)) };
                    (to_largest[0], to_sum[0]) = (m, sum);
                }
            }
            worker.barrier();
            for row in worker.share(rows) {
                // SAFETY: after the barrier they are only read, and a row's bound is in one worker's share.
                #[allow(unsafe_code)]
                let (largest, bound) = unsafe {
                    (shared_largest.slice(row * parts..(row + 1) * parts), shared_bounds.slice_mut(row..row + 1))
                };
                let order = room.take(parts);
                order.copy_from_slice(largest);
                bound[0] = match parts > KEPT {
                    true => *order.select_nth_unstable_by(KEPT - 1, |a, b| b.total_cmp(a)).1,
                    false => f32::NEG_INFINITY,
                };
            }
            worker.barrier();
            // SAFETY: after the second barrier both are only read.
            #[allow(unsafe_code)]
            let (largest, bounds) = unsafe { (shared_largest.slice(0..rows * parts), shared_bounds.slice(0..rows)) };
            for part in worker.share(parts) {
                for (row, &bound) in bounds.iter().enumerate() {
                    if largest[row * parts + part] < bound {
                        continue;
                    }
                    let large = (part * width..).zip(part_of(row, part)).filter(|(_, x)| **x >= bound);
                    list_of(row).extend(large.map(|(token, &x)| (token as u32, x)));
                }
            }
        });
        out.resize_with(rows, Shortlist::default);
        for (row, list) in out.iter_mut().enumerate() {
            let best_first = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            let mut found = list_of(row);
            if found.len() > KEPT {
                found.select_nth_unstable_by(KEPT - 1, best_first);
                found.truncate(KEPT);
            }
            found.sort_unstable_by(best_first);
            list.best.clone_from(&found);
            let best = f64::from(found.first().map_or(f32::NEG_INFINITY, |best| best.1));
            let weight = |m: f32| ((f64::from(m) - best) * f64::from(inverse_temperatures[row])).exp();
            let of_row = row * parts..(row + 1) * parts;
            let parts = largest[of_row.clone()].iter().zip(&sums[of_row]).filter(|(m, _)| m.is_finite());
            list.total = parts.map(|(&m, &sum)| f64::from(sum) * weight(m)).sum();
        }
    }
}

/// The largest number; NaN is none.
fn largest_of(x: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    let larger = |m: &mut f32, x: f32| *m = if x > *m { x } else { *m };
    whole.iter().for_each(|x| largest.iter_mut().zip(x).for_each(|(m, &x)| larger(m, x)));
    largest.iter_mut().zip(rest).for_each(|(m, &x)| larger(m, x));
    largest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Dense;
    use crate::kernel;
    use crate::kernel::random::Random;
    use crate::machine::topology::Topology;
    use crate::machine::workers::Team;

    /// What the lists should be.
    fn expected(row: &[f32], inverse: f32) -> Shortlist {
        let numbers = row.iter().enumerate().filter(|(_, x)| !x.is_nan());
        let mut best: Vec<(u32, f32)> = numbers.map(|(token, &x)| (token as u32, x)).collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let total = best.iter().map(|(_, x)| (f64::from(x - best[0].1) * f64::from(inverse)).exp()).sum();
        best.truncate(KEPT);
        Shortlist { best, total }
    }

    #[test]
    fn lists_are_those_of_sorted_rows_with_any_number_of_workers() {
        let mut random = Random(5);
        for (cols, kind) in [(1, 0), (15, 0), (64, 1), (100, 2), (2000, 0), (2000, 1), (33_333, 2), (40_000, 0)] {
            let mut logits = Tensor::new(3, cols);
            for x in logits.data_mut() {
                let uniform = random.uniform() as f32;
                *x = match kind {
                    0 => 20.0 * uniform - 10.0,
                    1 => (4.0 * uniform).floor(), // many are equal
                    _ if uniform < 0.1 => f32::NAN,
                    _ if uniform < 0.9 => f32::NEG_INFINITY,
                    _ => 1e5 * uniform,
                };
            }
            logits.row_mut(1)[cols / 2] = 1e6;
            let inverse_temperatures = [1.0, 0.5, 2.0];
            let mut first: Option<Vec<Shortlist>> = None;
            for threads in [1, 2, 5] {
                let team = Team::new(&Topology::read().worker_cpus(threads)).unwrap();
                let cpu = Cpu::new(Arc::new(team), kernel::best());
                let (mut shortlister, mut lists) = (cpu.shortlister(4, cols).unwrap(), Vec::new());
                for _ in 0..2 {
                    cpu.shortlist(&mut shortlister, &logits, &inverse_temperatures, &mut lists).unwrap();
                }
                for (row, list) in lists.iter().enumerate() {
                    if kind == 2 && list.best.first().is_none_or(|best| !best.1.is_finite()) {
                        assert!(logits.row(row).iter().all(|x| !x.is_finite()));
                        continue;
                    }
                    let Shortlist { best, total } = expected(logits.row(row), inverse_temperatures[row]);
                    assert_eq!(list.best, best, "row {row} of {cols}, {threads} workers");
                    assert!((list.total / total - 1.0).abs() < 1e-6, "{} and {total}", list.total);
                }
                let bits = |lists: &[Shortlist]| lists.iter().map(|list| list.total.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&lists), bits(first.get_or_insert(lists.clone())));
            }
        }
    }
}
