//! The largest logits of rows, by all workers: each takes parts of all rows, one thread the bound of a row.
//!
//! One thread alone would wait for a whole row, number after number, out of the caches of the cores that computed it.

use std::sync::{Mutex, PoisonError};

use super::{Cpu, lock};
use crate::Result;
use crate::backend::shortlist::{KEPT, Parts};
use crate::backend::tensor::{Shortlist, Tensor};
use crate::machine::workers::Shared;

/// What finds the largest logits of rows.
pub struct Shortlister {
    parts: Parts,                       // of a row
    largest: Vec<f32>,                  // [rows, parts]
    sums: Vec<f32>,                     // [rows, parts]
    bounds: Vec<f32>,                   // [rows], of the numbers that are listed
    found: Vec<Mutex<Vec<(u32, f32)>>>, // [rows], token and logit
}

impl Cpu {
    pub(super) fn shortlister_of(&self, max_rows: usize, cols: usize) -> Result<Shortlister> {
        let parts = Parts::of(cols);
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[parts.width.max(parts.count)]))?;
        let of_parts = || self.heap.zeros(&[max_rows, parts.count]);
        self.heap.count::<Mutex<Vec<(u32, f32)>>>(&[max_rows]);
        self.heap.count::<(u32, f32)>(&[max_rows, 4 * KEPT]);
        let lists = if self.heap.is_plan() { 0 } else { max_rows };
        Ok(Shortlister {
            parts,
            largest: of_parts()?,
            sums: of_parts()?,
            bounds: self.heap.zeros(&[max_rows])?,
            found: (0..lists).map(|_| Mutex::new(Vec::with_capacity(4 * KEPT))).collect(),
        })
    }

    pub(super) fn list_largest(
        &self,
        Shortlister { parts, largest, sums, bounds, found }: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) {
        let (rows, parts, count) = (logits.rows(), *parts, parts.count);
        assert!(rows == inverse_temperatures.len() && rows <= bounds.len() && logits.cols() == parts.cols);
        let list_of = |row: usize| found[row].lock().unwrap_or_else(PoisonError::into_inner);
        (0..rows).for_each(|row| list_of(row).clear());
        let (shared_largest, shared_sums, shared_bounds) =
            (Shared::new(largest), Shared::new(sums), Shared::new(bounds));
        let (kernel, scratch) = (self.kernel, &self.scratch);
        self.team.run(&|worker| {
            let room = &mut lock(&scratch[worker.index]).values;
            for part in worker.share(count) {
                for (row, &inverse) in inverse_temperatures.iter().enumerate() {
                    let at = row * count + part;
                    // SAFETY: a part is in one worker's share.
                    #[allow(unsafe_code)]
                    let (to_largest, to_sum) =
                        unsafe { (shared_largest.slice_mut(at..at + 1), shared_sums.slice_mut(at..at + 1)) };
                    (to_largest[0], to_sum[0]) =
                        parts.weigh(kernel, logits.row(row), part, inverse, room.take(parts.width));
                }
            }
            worker.barrier();
            for row in worker.share(rows) {
                // SAFETY: after the barrier they are only read, and a row's bound is in one worker's share.
                #[allow(unsafe_code)]
                let (largest, bound) = unsafe {
                    (shared_largest.slice(row * count..(row + 1) * count), shared_bounds.slice_mut(row..row + 1))
                };
                bound[0] = parts.bound(largest, room.take(count));
            }
            worker.barrier();
            // SAFETY: after the second barrier both are only read.
            #[allow(unsafe_code)]
            let (largest, bounds) = unsafe { (shared_largest.slice(0..rows * count), shared_bounds.slice(0..rows)) };
            for (row, (largest, &bound)) in largest.chunks(count).zip(bounds).enumerate() {
                // The lock is held for a number alone, not while others are looked through.
                parts.find(logits.row(row), worker.share(count), (largest, bound), |number| list_of(row).push(number));
            }
        });
        out.resize_with(rows, Shortlist::default);
        for (row, list) in out.iter_mut().enumerate() {
            let of_row = row * count..(row + 1) * count;
            list.best.clone_from(&list_of(row));
            list.conclude(&largest[of_row.clone()], &sums[of_row], inverse_temperatures[row]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Dense;
    use crate::backend::shortlist::RowShortlister;
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
                let mut alone = RowShortlister::default();
                for (row, list) in lists.iter().enumerate() {
                    let Shortlist { best, total } = alone.list(logits.row(row), inverse_temperatures[row]);
                    assert!(*best == list.best && total.to_bits() == list.total.to_bits(), "row {row} of {cols}");
                }
                let bits = |lists: &[Shortlist]| lists.iter().map(|list| list.total.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&lists), bits(first.get_or_insert(lists.clone())));
            }
        }
    }
}
