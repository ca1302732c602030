//! The largest logits of a row and what it weighs, which is what a sampler needs of it.
//!
//! ```text
//! each part of the row:   its largest number m, sum exp((x - m) inverse temperature)
//! once:                   the KEPT-th largest m: so many numbers at least are as large
//! each part of the row:   its numbers that are
//! ```
//!
//! Parts depend on the vocabulary alone, so the bits do not depend on who takes which.

use std::ops::Range;

use super::tensor::Shortlist;
use crate::kernel::{self, Kernel};

/// Numbers of a row that a list has.
pub const KEPT: usize = 64;

/// Parts of a row: several times [`KEPT`], so that few other numbers are as large as the largest of a KEPT-th part.
const PARTS: usize = 512;

/// Columns of a part are a multiple of this.
const LANES: usize = 16;

/// How a row is divided.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Columns of the row.
    pub cols: usize,
    /// Columns of a part.
    pub width: usize,
    /// Parts of the row.
    pub count: usize,
}

impl Parts {
    /// Of a row of `cols` numbers.
    pub fn of(cols: usize) -> Self {
        let width = cols.div_ceil(PARTS).next_multiple_of(LANES);
        Self { cols, width, count: cols.div_ceil(width) }
    }

    fn columns(&self, part: usize) -> Range<usize> {
        part * self.width..self.cols.min((part + 1) * self.width)
    }

    /// The largest number of a part of `row`, and the sum over the part beside it. `room`: at least `width` numbers.
    pub fn weigh(
        &self,
        kernel: &dyn Kernel,
        row: &[f32],
        part: usize,
        inverse_temperature: f32,
        room: &mut [f32],
    ) -> (f32, f32) {
        let x = &row[self.columns(part)];
        let m = largest_of(x);
        if !m.is_finite() {
            return (m, 0.0);
        }
        let weights = &mut room[..x.len()];
        // NaN counts as -infinity; where nothing is finite the list says so.
        weights.iter_mut().zip(x).for_each(|(w, &x)| {
            *w = if x > f32::NEG_INFINITY { (x - m) * inverse_temperature } else { f32::NEG_INFINITY }
        });
        (m, kernel.exp_sub(weights, 0.0))
    }

    /// KEPT numbers of the row at least are as large as this. `largest`: of each part; `room`: as many numbers.
    pub fn bound(&self, largest: &[f32], room: &mut [f32]) -> f32 {
        room.copy_from_slice(largest);
        match self.count > KEPT {
            true => *room.select_nth_unstable_by(KEPT - 1, |a, b| b.total_cmp(a)).1,
            false => f32::NEG_INFINITY,
        }
    }

    /// Gives `found` the numbers of `parts` that can be on the list, with their places. Of those that equal `bound` the
    /// first [`KEPT`] are enough: where a grammar allows few tokens, nearly all of a row do.
    pub fn find(
        &self,
        row: &[f32],
        parts: Range<usize>,
        (largest, bound): (&[f32], f32),
        mut found: impl FnMut((u32, f32)),
    ) {
        let mut equal = 0;
        for part in parts {
            let is_done = equal >= KEPT;
            if largest[part] < bound || is_done && largest[part] == bound {
                continue;
            }
            let columns = self.columns(part);
            for (token, &x) in (columns.start as u32..).zip(&row[columns]) {
                if x > bound || x == bound && equal < KEPT {
                    equal += usize::from(x == bound);
                    // Zeros are equal whatever their signs.
                    found((token, x + 0.0));
                }
            }
        }
    }
}

impl Shortlist {
    /// Of a row of which `best` has what was found, in any order, and `largest` and `sums` what was weighed.
    pub fn conclude(&mut self, largest: &[f32], sums: &[f32], inverse_temperature: f32) {
        let best = &mut self.best;
        let best_first = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if best.len() > KEPT {
            best.select_nth_unstable_by(KEPT - 1, best_first);
            best.truncate(KEPT);
        }
        best.sort_unstable_by(best_first);
        let parts = largest.iter().copied().zip(sums.iter().copied());
        self.add_up(parts.filter(|(m, _)| m.is_finite()), inverse_temperature);
    }

    /// Sets the total, where `best` is in order: of each part of the row its largest number, and the sum beside it.
    pub fn add_up(&mut self, parts: impl Iterator<Item = (f32, f32)>, inverse_temperature: f32) {
        let max = f64::from(self.best.first().map_or(f32::NEG_INFINITY, |best| best.1));
        let weight = |m: f32| ((f64::from(m) - max) * f64::from(inverse_temperature)).exp();
        self.total = parts.map(|(m, sum)| f64::from(sum) * weight(m)).sum();
    }
}

/// Lists single rows on the thread that asks.
#[derive(Debug, Default)]
pub struct RowShortlister {
    largest: Vec<f32>, // of each part
    sums: Vec<f32>,    // of each part
    room: Vec<f32>,
    list: Shortlist,
}

impl RowShortlister {
    /// The list of `row`: on the CPU, [`Dense::shortlist`](super::Dense::shortlist) gives the same bits.
    pub fn list(&mut self, row: &[f32], inverse_temperature: f32) -> &Shortlist {
        let (parts, kernel) = (Parts::of(row.len()), kernel::best());
        let Self { largest, sums, room, list } = self;
        room.resize(parts.width.max(parts.count), 0.0);
        largest.clear();
        sums.clear();
        for part in 0..parts.count {
            let (m, sum) = parts.weigh(kernel, row, part, inverse_temperature, room);
            largest.push(m);
            sums.push(sum);
        }
        let bound = parts.bound(largest, &mut room[..parts.count]);
        list.best.clear();
        parts.find(row, 0..parts.count, (largest, bound), |number| list.best.push(number));
        list.conclude(largest, sums, inverse_temperature);
        list
    }
}

/// The largest number; NaN is none.
pub fn largest_of(x: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    let larger = |m: &mut f32, x: f32| *m = if x > *m { x } else { *m };
    whole.iter().for_each(|x| largest.iter_mut().zip(x).for_each(|(m, &x)| larger(m, x)));
    largest.iter_mut().zip(rest).for_each(|(m, &x)| larger(m, x));
    largest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}
