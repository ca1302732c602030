//! Rows to integer codes that lose least of what a matrix gives on inputs that were seen.
//!
//! ```text
//! loss of a row:  e H e', with e = w - s q and H the mean of x' x over the inputs
//! codes:          from w itself on, each input in turn, the largest H_jj first, gets the code that is best beside all
//!                 others as they are
//! scales:         each group in turn gets the one that is best for the codes as they are
//! ```
//!
//! With `r = e H` at hand, the best code of input `j` is the nearest to `q_j + r_j / (s H_jj)`, and a code that changes
//! costs one row of `H` to keep `r`. The first round makes up for the errors of the inputs before, as GPTQ does; the
//! others for those behind as well. Sources: QuantEase (arXiv 2309.01885), GPTQ (arXiv 2210.17323).

use super::lanes::Lanes;
use super::lanes::Scalar;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::{INT4_CANDIDATES, INT5_CANDIDATES, IQ4_CANDIDATES, SMALLEST, round_scale};
use crate::pack::{IQ4, Precision, TILE_ROWS};
use crate::simd::multiversion;

/// Rounds of codes and scales: on a trained model three leave 2% more of the loss in its answers.
const ROUNDS: usize = 6;
/// Share of the diagonal's mean that is added to it, for what was seen is not all that will come: of many rows, and
/// times how often the inputs go into the rows.
struct Damping {
    least: f32,
    of_few: f32,
}

const HIDDEN: Damping = Damping { least: 0.03, of_few: 0.08 };
/// What gate and up give has rare, large values: other rows are less like those that were seen.
const INTERMEDIATE: Damping = Damping { least: 0.5, of_few: 4.0 };
/// Of squares alone.
const OF_SQUARES: f32 = 0.01;
/// How many rows for each input what the whole layer reads stands for, beside what the expert does.
const LAYER_ROWS: f32 = 4.0;

/// The mean of the products of what a matrix reads: how much an error of one input weighs, and beside another's.
#[derive(Clone, Debug)]
pub struct Moments {
    inputs: usize,
    products: Vec<f32>, // [inputs, inputs]; or [inputs]: each with itself alone
    order: Vec<u32>,    // the inputs, the largest square first
}

/// The mean of the products of rows, scaled so that the mean of the squares is 1.
#[derive(Clone, Debug)]
pub struct Products {
    inputs: usize,
    rows: usize,
    products: Vec<f32>, // [inputs, inputs]
}

impl Products {
    /// Of rows of `inputs` numbers, a multiple of 32. No rows: 0.
    pub fn of(inputs: usize, rows: &[f32]) -> Self {
        let mut products = vec![0.0; inputs * inputs];
        // As much as stays in the cache of a core.
        for rows in rows.chunks((1 << 18) / inputs * inputs) {
            add_products(inputs, rows, &mut products);
        }
        for i in 0..inputs {
            for j in 0..i {
                products[i * inputs + j] = products[j * inputs + i];
            }
        }
        let sum: f64 = (0..inputs).map(|i| f64::from(products[i * (inputs + 1)])).sum();
        let scale = (inputs as f64 / sum) as f32;
        match scale.is_finite() && scale > 0.0 {
            true => products.iter_mut().for_each(|product| *product *= scale),
            false => products.fill(0.0),
        }
        Self { inputs, rows: rows.len() / inputs, products }
    }

    /// Numbers of a row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// `self`, and `share` of it from `other`.
    fn mixed(mut self, other: &Self, share: f32) -> Self {
        assert_eq!(self.inputs, other.inputs, "inputs");
        for (own, other) in self.products.iter_mut().zip(&other.products) {
            *own += share * (other - *own);
        }
        self
    }
}

impl Moments {
    /// Of the rows that an expert's gate and up read, beside what all experts of the layer read.
    pub fn of_hidden(rows: &[f32], of_layer: &Products) -> Self {
        let own = Products::of(of_layer.inputs, rows);
        let of_layer_rows = LAYER_ROWS * own.inputs as f32;
        let share = of_layer_rows / (of_layer_rows + own.rows as f32);
        Self::of(own.mixed(of_layer, share), HIDDEN)
    }

    /// Of the rows that an expert's down reads. No rows: every input weighs the same.
    pub fn of_intermediate(inputs: usize, rows: &[f32]) -> Self {
        Self::of(Products::of(inputs, rows), INTERMEDIATE)
    }

    fn of(Products { inputs, rows, products }: Products, Damping { least, of_few }: Damping) -> Self {
        Self::damped(inputs, products, least + of_few * inputs as f32 / rows.max(1) as f32)
    }

    /// Of the mean squares of the inputs alone.
    pub fn of_squares(squares: &[f32]) -> Self {
        let mean = squares.iter().copied().map(f64::from).sum::<f64>() / squares.len() as f64;
        let scale = if mean > 0.0 && mean.is_finite() { (1.0 / mean) as f32 } else { 0.0 };
        Self::damped(squares.len(), squares.iter().map(|square| square * scale).collect(), OF_SQUARES)
    }

    /// The places of the squares.
    fn squares(&self) -> impl Iterator<Item = usize> + use<> {
        let step = if self.has_pairs() { self.inputs + 1 } else { 1 };
        (0..self.inputs).map(move |i| i * step)
    }

    fn has_pairs(&self) -> bool {
        self.products.len() > self.inputs
    }

    /// With more on the diagonal.
    fn damped(inputs: usize, products: Vec<f32>, damping: f32) -> Self {
        let mut moments = Self { inputs, products, order: (0..inputs as u32).collect() };
        let squares: Vec<usize> = moments.squares().collect();
        squares.iter().for_each(|&i| moments.products[i] += damping);
        let squares: Vec<f32> = squares.into_iter().map(|i| moments.products[i]).collect();
        moments.order.sort_by(|&a, &b| squares[b as usize].total_cmp(&squares[a as usize]));
        moments
    }
}

multiversion!(
    /// Adds the products of rows, of inputs `i` and `j >= i` at least.
    fn add_products(inputs: usize, rows: &[f32], products: &mut [f32]) = [
        add_products_of::<Avx512>, add_products_of::<Avx2>, add_products_of::<Scalar>]
);

#[inline(always)]
fn add_products_of<L: Lanes>(inputs: usize, rows: &[f32], products: &mut [f32]) {
    assert!(inputs % COLS == 0 && rows.len() % inputs == 0 && products.len() == inputs * inputs);
    for j in (0..inputs).step_by(COLS) {
        for i in (0..j + COLS).step_by(ROWS) {
            let of = Strided { data: &rows[i.min(rows.len())..], row: 1, step: inputs };
            panel::<L>(rows.len() / inputs, of, (&rows[j.min(rows.len())..], inputs), &mut products[i * inputs + j..]);
        }
    }
}

/// Rows and columns that are summed in registers.
const ROWS: usize = 8;
const COLS: usize = 32;

/// A matrix of which numbers of a row lie `step` apart, and rows `row`.
#[derive(Clone, Copy)]
struct Strided<'a> {
    data: &'a [f32],
    row: usize,
    step: usize,
}

/// `out[8, 32] += a[8, steps] b[steps, 32]`; rows of `out` lie as far apart as those of `b`.
#[inline(always)]
fn panel<L: Lanes>(steps: usize, a: Strided<'_>, (b, stride): (&[f32], usize), out: &mut [f32]) {
    let mut sums = [[L::splat(0.0); 2]; ROWS];
    for t in 0..steps {
        let b = [lanes::<L>(b, t * stride), lanes::<L>(b, t * stride + 16)];
        for r in 0..ROWS {
            let a = L::splat(a.data[r * a.row + t * a.step]);
            sums[r][0] = sums[r][0].add(a.mul(b[0]));
            sums[r][1] = sums[r][1].add(a.mul(b[1]));
        }
    }
    for r in 0..ROWS {
        for half in 0..2 {
            let out = &mut out[r * stride + 16 * half..][..16];
            let sum = lanes::<L>(out, 0).add(sums[r][half]).lanes();
            out.copy_from_slice(&sum);
        }
    }
}

#[inline(always)]
fn lanes<L: Lanes>(from: &[f32], at: usize) -> L {
    L::load(from[at..at + 16].as_array().expect("sixteen"))
}

/// Room for one tile, reused from tile to tile.
#[derive(Default)]
pub(super) struct Room {
    weights: Vec<f32>,  // [16, k]
    codes: Vec<f32>,    // [16, k]
    loss: Vec<f32>,     // [16, k], e H
    of_group: Vec<f32>, // [16, k], the codes of a group times H
}

/// A tile: up to 16 rows.
pub(super) struct Tile<'a> {
    pub(super) weights: &'a [f32],    // [rows, k]
    pub(super) codes: &'a mut [i8],   // [rows, k]
    pub(super) scales: &'a mut [f32], // [rows, k / group size]
}

multiversion!(
    /// Chooses codes and scales.
    pub(super) fn quantize(precision: Precision, moments: &Moments, tile: Tile<'_>, room: &mut Room) = [
        quantize_with::<Avx512>, quantize_with::<Avx2>, quantize_with::<Scalar>]
);

#[inline(always)]
fn quantize_with<L: Lanes>(precision: Precision, moments: &Moments, tile: Tile<'_>, room: &mut Room) {
    let k = moments.inputs;
    let choice = Choice::of(precision).unwrap_or_else(|| panic!("{precision} is kept, not chosen"));
    let group = precision.group_size().expect("a precision with groups");
    let rows = tile.weights.len() / k;
    let squares: Vec<f32> = moments.squares().map(|i| moments.products[i]).collect();
    for (i, (w, scale)) in tile.weights.chunks_exact(group).zip(&mut *tile.scales).enumerate() {
        *scale = weighed_scale(precision, w, &squares[i % (k / group) * group..][..group], choice);
    }
    let Room { weights, codes, loss, of_group } = room;
    for all in [&mut *weights, &mut *codes, &mut *loss, &mut *of_group] {
        all.clear();
        all.resize(TILE_ROWS * k, 0.0);
    }
    weights[..rows * k].copy_from_slice(tile.weights);
    let scale_of = |scales: &[f32], row: usize, j: usize| scales[row * (k / group) + j / group];
    // From the weights themselves: nothing is lost yet.
    for (i, (code, w)) in codes.iter_mut().zip(tile.weights).enumerate() {
        let scale = scale_of(tile.scales, i / k, i % k);
        *code = if scale == 0.0 { choice.nearest(0.0) } else { w / scale };
    }
    let rounds = if moments.has_pairs() { ROUNDS } else { 1 };
    for _ in 0..rounds {
        for &j in &moments.order {
            let j = j as usize;
            let inverse = 1.0 / squares[j];
            for row in 0..rows {
                let (at, scale) = (row * k + j, scale_of(tile.scales, row, j));
                if scale == 0.0 {
                    continue;
                }
                let best = choice.nearest(codes[at] + loss[at] * inverse / scale);
                let change = (best - codes[at]) * scale;
                if change != 0.0 {
                    codes[at] = best;
                    if moments.has_pairs() {
                        subtract::<L>(change, &moments.products[j * k..][..k], &mut loss[row * k..][..k]);
                    }
                }
            }
        }
        if !moments.has_pairs() {
            break;
        }
        for first in (0..k).step_by(group) {
            of_group.fill(0.0);
            for i in (0..rows).step_by(ROWS) {
                for j in (0..k).step_by(COLS) {
                    let a = Strided { data: &codes[i * k + first..], row: k, step: 1 };
                    panel::<L>(group, a, (&moments.products[first * k + j..], k), &mut of_group[i * k + j..]);
                }
            }
            for row in 0..rows {
                let here = row * k + first..row * k + first + group;
                let q = &codes[here.clone()];
                let (gain, cost) = (dot::<L>(q, &loss[here.clone()]), dot::<L>(q, &of_group[here]));
                let scale = &mut tile.scales[row * (k / group) + first / group];
                let better = round_scale(precision.scales(), *scale + gain / cost);
                let change = better - *scale;
                if *scale != 0.0 && better != 0.0 && change * (change * cost - 2.0 * gain) < 0.0 {
                    *scale = better;
                    subtract::<L>(change, &of_group[row * k..][..k], &mut loss[row * k..][..k]);
                }
            }
        }
    }
    tile.codes.iter_mut().zip(&*codes).for_each(|(to, from)| *to = *from as i8);
}

/// `to -= by * row`
#[inline(always)]
fn subtract<L: Lanes>(by: f32, row: &[f32], to: &mut [f32]) {
    let by = L::splat(by);
    for (row, to) in row.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        *to = L::load(to).sub(by.mul(L::load(row))).lanes();
    }
}

#[inline(always)]
fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = L::splat(0.0);
    for (a, b) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0) {
        sum = sum.add(L::load(a).mul(L::load(b)));
    }
    sum.sum()
}

/// The codes of a precision whose codes are chosen.
#[derive(Clone, Copy)]
pub(super) enum Choice {
    Integers { low: f32, high: f32 },
    Iq4,
}

impl Choice {
    /// `None`: it is kept.
    pub(super) fn of(precision: Precision) -> Option<Self> {
        let (low, high) = match precision {
            Precision::Int4 { .. } => (-8.0, 7.0),
            Precision::Q5_0 => (-16.0, 15.0),
            Precision::Int8 { .. } => (-127.0, 127.0),
            Precision::Iq4 { .. } => return Some(Self::Iq4),
            _ => return None,
        };
        Some(Self::Integers { low, high })
    }

    #[inline(always)]
    fn nearest(self, x: f32) -> f32 {
        match self {
            Self::Integers { low, high } => x.round_ties_even().clamp(low, high),
            Self::Iq4 => {
                let middle = |i: usize| f32::from(i16::from(IQ4[i]) + i16::from(IQ4[i + 1])) / 2.0;
                let place: usize = (0..15).map(|i| usize::from(x > middle(i))).sum();
                f32::from(IQ4[place])
            }
        }
    }

    fn largest(self) -> f32 {
        match self {
            Self::Integers { high, .. } => high,
            Self::Iq4 => f32::from(IQ4[15]),
        }
    }

    fn candidates(self) -> &'static [f32] {
        match self {
            Self::Integers { high: 7.0, .. } => &INT4_CANDIDATES,
            Self::Integers { high: 15.0, .. } => &INT5_CANDIDATES,
            Self::Integers { .. } => &[],
            Self::Iq4 => &IQ4_CANDIDATES,
        }
    }
}

/// The scale with the least weighed squared error of a group, by the candidates of the search without data, refitted.
#[inline(always)]
fn weighed_scale(precision: Precision, w: &[f32], squares: &[f32], choice: Choice) -> f32 {
    let largest = w.iter().fold(0f32, |largest, w| largest.max(w.abs()));
    let plain = round_scale(precision.scales(), largest / choice.largest());
    if largest < SMALLEST || plain == 0.0 {
        return 0.0;
    }
    let code = |w: f32, scale: f32| choice.nearest(w / scale);
    let refit = |scale: f32| {
        let (mut wq, mut qq) = (0f64, 0f64);
        for (&w, &h) in w.iter().zip(squares) {
            let (w, q, h) = (f64::from(w), f64::from(code(w, scale)), f64::from(h));
            wq += h * w * q;
            qq += h * q * q;
        }
        if qq > 0.0 { (wq / qq) as f32 } else { scale }
    };
    let error = |scale: f32| {
        let terms = w.iter().zip(squares).map(|(&w, &h)| f64::from(h) * f64::from(w - scale * code(w, scale)).powi(2));
        terms.sum::<f64>()
    };
    let (mut best, mut least) = (plain, error(plain));
    for candidate in choice.candidates() {
        let scale = round_scale(precision.scales(), refit(refit(largest / candidate)));
        let error = if scale == 0.0 { f64::INFINITY } else { error(scale) };
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::quantize_rows;

    /// Rows of inputs that have to do with each other.
    fn inputs(k: usize, count: usize) -> Vec<f32> {
        let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as i32 as f32 / (1u32 << 31) as f32;
        let of_row =
            |t: usize| (0..k).map(move |i| noise(t * 7919 + i) + noise(t * 31 + i / 8) + (i % 5) as f32 * noise(t));
        (0..count).flat_map(of_row).collect()
    }

    fn weights(n: usize, k: usize) -> Vec<f32> {
        (0..n * k).map(|i| (i as u32).wrapping_mul(2_246_822_519).rotate_left(9) as i32 as f32 * 1e-11).collect()
    }

    fn chosen(
        run: fn(Precision, &Moments, Tile<'_>, &mut Room),
        precision: Precision,
        moments: &Moments,
        weights: &[f32],
    ) -> (Vec<i8>, Vec<f32>) {
        let group = precision.group_size().expect("groups");
        let (mut codes, mut scales) = (vec![0; weights.len()], vec![0.0; weights.len() / group]);
        for i in (0..weights.len()).step_by(TILE_ROWS * moments.inputs) {
            let end = weights.len().min(i + TILE_ROWS * moments.inputs);
            let (codes, scales) = (&mut codes[i..end], &mut scales[i / group..end / group]);
            run(precision, moments, Tile { weights: &weights[i..end], codes, scales }, &mut Room::default());
        }
        (codes, scales)
    }

    /// Of what the matrix gives on `inputs`.
    fn squared_error(k: usize, inputs: &[f32], weights: &[f32], (codes, scales): &(Vec<i8>, Vec<f32>)) -> f64 {
        let group = codes.len() / scales.len();
        let error = |i: usize| f64::from(weights[i]) - f64::from(codes[i]) * f64::from(scales[i / group]);
        let errors: Vec<f64> = (0..weights.len()).map(error).collect();
        let of = |e: &[f64], x: &[f32]| e.iter().zip(x).map(|(e, &x)| e * f64::from(x)).sum::<f64>().powi(2);
        errors.chunks(k).map(|e| inputs.chunks(k).map(|x| of(e, x)).sum::<f64>()).sum()
    }

    #[test]
    fn moments_are_means_of_products() {
        let (k, x) = (64, inputs(64, 300));
        let moments = Moments::of_intermediate(k, &x);
        let mean = |i: usize, j: usize| x.chunks(k).map(|x| f64::from(x[i]) * f64::from(x[j])).sum::<f64>() / 300.0;
        let scale = (0..k).map(|i| mean(i, i)).sum::<f64>() / k as f64;
        for i in 0..k {
            for j in 0..k {
                let damping =
                    if i == j { f64::from(INTERMEDIATE.least + INTERMEDIATE.of_few * 64.0 / 300.0) } else { 0.0 };
                let error = f64::from(moments.products[i * k + j]) - (mean(i, j) / scale + damping);
                assert!(error.abs() < 1e-4, "{i} {j}: {error}");
            }
        }
        let square = |i: u32| moments.products[i as usize * (k + 1)];
        assert!(moments.order.is_sorted_by(|&a, &b| square(a) >= square(b)));
        for none in [&[][..], &vec![0.0; 2 * k]] {
            let unit = Moments::of_intermediate(k, none);
            assert!((0..k * k).all(|i| (unit.products[i] > 0.0) == (i % (k + 1) == 0)));
        }
    }

    #[test]
    fn an_expert_that_read_little_is_as_its_layer() {
        let (k, x, few) = (64, inputs(64, 500), inputs(64, 2));
        let of_layer = Products::of(k, &x);
        let pairs = |moments: Moments| {
            let places = (0..k * k).filter(|i| i % (k + 1) != 0);
            places.map(|i| moments.products[i]).collect::<Vec<_>>()
        };
        let layer = pairs(Moments::of_hidden(&[], &of_layer));
        let expected: Vec<f32> = (0..k * k).filter(|i| i % (k + 1) != 0).map(|i| of_layer.products[i]).collect();
        assert_eq!(layer, expected);
        let distance = |rows: &[f32]| {
            let own = pairs(Moments::of_hidden(rows, &of_layer));
            own.iter().zip(&layer).map(|(a, b)| (a - b).powi(2)).sum::<f32>()
        };
        let alone =
            pairs(Moments::of_intermediate(k, &few)).iter().zip(&layer).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        assert!(distance(&few) < 1e-3 * alone, "{} of {alone}", distance(&few));
    }

    #[test]
    fn what_a_matrix_gives_is_nearer_than_without_inputs() {
        let (n, k, x) = (40, 128, inputs(128, 700));
        let weights = weights(n, k);
        for (precision, most) in [
            (Precision::int4(128), 0.5),
            (Precision::int4(32), 0.5),
            (Precision::int8(64), 0.6),
            (Precision::Q5_0, 0.5),
            (Precision::iq4(128), 0.5),
        ] {
            let group = precision.group_size().expect("groups");
            let mut nearest = (vec![0; n * k], vec![0.0; n * k / group]);
            quantize_rows(precision, &weights, &mut nearest.0, &mut nearest.1);
            let of = |codes: &(Vec<i8>, Vec<f32>)| squared_error(k, &x, &weights, codes);
            let paired = of(&chosen(quantize, precision, &Moments::of_hidden(&x, &Products::of(k, &x)), &weights));
            assert!(paired < most * of(&nearest), "{precision}: {paired} of {}", of(&nearest));
        }
    }

    #[test]
    fn every_instruction_set_chooses_the_same() {
        let (n, k, x) = (20, 96, inputs(96, 50));
        let mut weights = weights(n, k);
        weights[..k].fill(0.0); // a row without scales
        multiversion!(fn only_avx2(p: Precision, m: &Moments, t: Tile<'_>, r: &mut Room) = [quantize_with::<Avx2>,
            quantize_with::<Avx2>, quantize_with::<Scalar>]);
        for moments in [Moments::of_intermediate(k, &x), Moments::of_squares(&x[..k])] {
            for precision in [Precision::int4(32), Precision::iq4(32)] {
                let best = chosen(quantize, precision, &moments, &weights);
                for run in [only_avx2, quantize_with::<Scalar>] {
                    assert!(best == chosen(run, precision, &moments, &weights), "{precision}");
                }
            }
        }
    }
}
