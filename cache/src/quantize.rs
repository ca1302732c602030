//! Rows of f32 to integer codes with one scale per group.
//!
//! ```text
//! for each group:  for each candidate scale:  q = round(w / s), keep the s whose best refit has the least error
//!                  s = sum(w q) / sum(q q), rounded to its type;  q = round(w / s)
//! ```
//!
//! With the codes fixed, the best scale is `sum(w q) / sum(q q)` and leaves `sum(w w) - sum(w q)^2 / sum(q q)`:
//! candidates are compared by the last term alone. The largest-value scale is always among the results compared at the
//! end, so the search never loses to it. MXFP4, which is kept and not chosen, takes that scale as it is.

mod calibrated;
mod lanes;

use half::{bf16, f16};

pub use self::calibrated::{Moments, Products};
#[cfg(target_arch = "x86_64")]
use self::lanes::{Avx2, Avx512};
use self::lanes::{Lanes, Scalar};

use crate::pack::{
    Blocks, CodeType, ExpertLayout, IQ4, MatrixLayout, Precision, Row, SUPER_BLOCK, ScaleType, Scales, TILE_ROWS,
    Weights, pack_tile,
};
use crate::simd::multiversion;

/// Room for one tile of codes and scales, reused from tile to tile.
#[derive(Default)]
pub struct Scratch {
    codes: Vec<i8>,
    scales: Vec<f32>,
    weights: Vec<bf16>,
    blocks: Blocks,
    calibrated: calibrated::Room,
}

/// Whether the codes of a precision are chosen here, for the weights or for what they multiply; others are kept as they
/// lie in a checkpoint, or rounded to.
pub fn is_chosen(precision: Precision) -> bool {
    calibrated::Choice::of(precision).is_some()
}

/// Quantizes and packs the rows of one tile, 16 or, in the last tile, fewer: `rows` [<= 16, k], finite.
/// Panics: a length does not fit `layout` (a bug).
pub fn quantize_tile(layout: &MatrixLayout, rows: &[f32], scratch: &mut Scratch, out: &mut [u8]) {
    assert!(rows.len().is_multiple_of(layout.k) && rows.len() <= TILE_ROWS * layout.k, "rows");
    let Some(group_size) = layout.precision.group_size() else {
        scratch.weights.resize(rows.len(), bf16::ZERO);
        round_to_bf16(rows, &mut scratch.weights);
        return pack_tile(layout, Weights::Bf16(&scratch.weights), out);
    };
    if let Some(row) = layout.precision.row().filter(|row| !row.scales.are_single()) {
        let count = rows.len() / layout.k;
        scratch.blocks.resize(layout, count);
        in_blocks(row, rows, &mut scratch.blocks);
        return pack_tile(layout, Weights::Blocks(&scratch.blocks, 0..count), out);
    }
    scratch.codes.resize(rows.len(), 0);
    scratch.scales.resize(rows.len() / group_size, 0.0);
    quantize_rows(layout.precision, rows, &mut scratch.codes, &mut scratch.scales);
    pack_tile(layout, Weights::Int { codes: &scratch.codes, scales: &scratch.scales }, out);
}

/// [`quantize_tile`] to codes that are chosen, such that the matrix gives nearly what it gave on inputs with these
/// moments.
pub fn quantize_tile_for(
    layout: &MatrixLayout,
    rows: &[f32],
    moments: &Moments,
    scratch: &mut Scratch,
    out: &mut [u8],
) {
    let group_size = layout.precision.group_size().expect("a precision with groups");
    let Scratch { codes, scales, calibrated, .. } = scratch;
    codes.resize(rows.len(), 0);
    scales.resize(rows.len() / group_size, 0.0);
    let tile = calibrated::Tile { weights: rows, codes: &mut codes[..], scales: &mut scales[..] };
    calibrated::quantize(layout.precision, moments, tile, calibrated);
    pack_tile(layout, Weights::Int { codes: &scratch.codes, scales: &scratch.scales }, out);
}

/// Quantizes and packs a matrix `[n, k]`. Panics: a length does not fit `layout` (a bug).
pub fn quantize_matrix(layout: &MatrixLayout, weights: &[f32], out: &mut [u8]) {
    assert_eq!((weights.len(), out.len()), (layout.n * layout.k, layout.bytes()), "weights, out");
    let mut scratch = Scratch::default();
    let rows = weights.chunks(TILE_ROWS * layout.k);
    for (rows, tile) in rows.zip(out.chunks_exact_mut(layout.tile_bytes())) {
        quantize_tile(layout, rows, &mut scratch, tile);
    }
}

/// Quantizes and packs an expert: `gate` and `up` `[intermediate, hidden]`, `down` `[hidden, intermediate]`.
/// Panics: a length does not fit `layout` (a bug).
pub fn quantize_expert(layout: &ExpertLayout, gate: &[f32], up: &[f32], down: &[f32]) -> Vec<u8> {
    let mut out = vec![0; layout.bytes()];
    let mut scratch = Scratch::default();
    let gate_bytes = layout.gate.tile_bytes();
    for (weights, place) in
        [(gate, ExpertLayout::gate_tile as fn(&ExpertLayout, usize) -> usize), (up, ExpertLayout::up_tile)]
    {
        for (i, rows) in weights.chunks(TILE_ROWS * layout.gate.k).enumerate() {
            quantize_tile(&layout.gate, rows, &mut scratch, &mut out[place(layout, i)..][..gate_bytes]);
        }
    }
    let down_at = layout.down_tile(0);
    quantize_matrix(&layout.down, down, &mut out[down_at..][..layout.down.bytes()]);
    out
}

multiversion!(
    /// Quantizes whole rows, group after group: `weights` [n, k] finite, `codes` [n, k], `scales` [n, k / group_size],
    /// rounded to their type.
    ///
    /// A group whose largest magnitude is below 2^-100, or whose scale is below its type's, gets scale 0.
    /// Panics: a length does not fit, or `precision` has no groups (a bug).
    pub fn quantize_rows(precision: Precision, weights: &[f32], codes: &mut [i8],
        scales: &mut [f32]) = [rows::<Avx512>, rows::<Avx2>, rows::<Scalar>]
);

multiversion!(
    /// Rounds to nearest, ties to even.
    fn round_to_bf16(weights: &[f32], out: &mut [bf16]) = [round_to_bf16_body, round_to_bf16_body, round_to_bf16_body]
);

#[inline(always)]
fn round_to_bf16_body(weights: &[f32], out: &mut [bf16]) {
    for (w, out) in weights.iter().zip(out) {
        *out = round_bf16(*w);
    }
}

/// `bf16::from_f32` of a finite value, without its branches.
#[inline(always)]
fn round_bf16(w: f32) -> bf16 {
    let bits = w.to_bits();
    bf16::from_bits(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
}

/// The nearest scale of this type to a finite one.
#[inline(always)]
fn round_scale(scales: ScaleType, scale: f32) -> f32 {
    match scales {
        ScaleType::Bf16 => round_bf16(scale).to_f32(),
        ScaleType::F16 => scales.from_bits(scales.to_bits(scale)),
        ScaleType::F32 => scale,
    }
}

#[inline(always)]
fn rows<L: Lanes>(precision: Precision, weights: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let group_size = precision.group_size().expect("a precision with groups");
    assert_eq!((weights.len(), weights.len()), (codes.len(), scales.len() * group_size), "codes, scales");
    // The number of registers in a group is known to the compiler: it keeps the group there.
    match group_size {
        32 => groups::<L, 2>(precision, weights, codes, scales),
        64 => groups::<L, 4>(precision, weights, codes, scales),
        128 => groups::<L, 8>(precision, weights, codes, scales),
        other => panic!("group size {other}"),
    }
}

#[inline(always)]
fn groups<L: Lanes, const N: usize>(precision: Precision, weights: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let weights = weights.as_chunks::<16>().0.as_chunks::<N>().0;
    let codes = codes.as_chunks_mut::<16>().0.as_chunks_mut::<N>().0;
    for ((w, codes), scale) in weights.iter().zip(codes).zip(scales) {
        *scale = match precision {
            Precision::Int4 { scales, .. } => group::<L, Integers<-8, 7>, N, 8>(w, codes, &INT4_CANDIDATES, scales),
            Precision::Int8 { scales, .. } => group::<L, Integers<-127, 127>, N, 1>(w, codes, &INT8_CANDIDATES, scales),
            Precision::Q5_0 => group::<L, Integers<-16, 15>, N, 5>(w, codes, &INT5_CANDIDATES, ScaleType::F16),
            Precision::Iq4 { .. } => group::<L, OfIq4, N, 8>(w, codes, &IQ4_CANDIDATES, ScaleType::Bf16),
            _ => nearest(precision, w.as_flattened(), codes.as_flattened_mut()),
        };
    }
}

/// Magnitudes between which squares and their sums neither overflow nor vanish in f32; outside, the largest value sets
/// the scale.
const SEARCHED: std::ops::Range<f32> = f32::from_bits((127 - 50) << 23)..f32::from_bits((127 + 50) << 23);
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

/// What the largest magnitude is mapped to before the refit; beyond 8 it is cut. Negative: so is the scale, and codes
/// reach to -8 on the other side. Chosen greedily from 34, on trained and on normal weights: all 34 together leave 1 to
/// 2% less error.
const INT4_CANDIDATES: [f32; 8] = [7.25, 7.75, -7.75, 8.25, -8.25, 8.75, -8.75, 9.25];
/// Of five bits, reaching to -16 where the scale is negative.
const INT5_CANDIDATES: [f32; 5] = [15.5, -15.75, 16.25, -16.5, 17.25];
const INT8_CANDIDATES: [f32; 1] = [127.0];
/// Of a table that reaches from -127 to 113.
const IQ4_CANDIDATES: [f32; 8] = [113.0, 124.0, 132.0, 142.0, -112.0, -122.0, -132.0, -144.0];

/// What codes may be.
trait Codes {
    /// The largest.
    const LARGEST: f32;
    /// What stands for 0.
    const ZERO: i8;

    /// The nearest codes, as floats.
    fn nearest<L: Lanes>(x: L) -> L;
}

struct Integers<const MIN: i32, const MAX: i32>;

impl<const MIN: i32, const MAX: i32> Codes for Integers<MIN, MAX> {
    const LARGEST: f32 = MAX as f32;
    const ZERO: i8 = 0;

    /// Adding 1.5 * 2^23 rounds to an integer, ties to even.
    #[inline(always)]
    fn nearest<L: Lanes>(x: L) -> L {
        let magic = L::splat(12_582_912.0);
        x.max(L::splat(MIN as f32)).min(L::splat(MAX as f32)).add(magic).sub(magic)
    }
}

/// Values of [`IQ4`].
struct OfIq4;

impl Codes for OfIq4 {
    const LARGEST: f32 = IQ4[15] as f32;
    const ZERO: i8 = 1;

    #[inline(always)]
    fn nearest<L: Lanes>(x: L) -> L {
        x.nearest_iq4()
    }
}

/// Chooses the scale of one group and writes its codes.
#[inline(always)]
fn group<L: Lanes, Q: Codes, const N: usize, const C: usize>(
    w: &[[f32; 16]; N],
    codes: &mut [[i8; 16]; N],
    candidates: &[f32; C],
    scales: ScaleType,
) -> f32 {
    let largest = largest_magnitude::<L, N>(w);
    let plain = round_scale(scales, largest / Q::LARGEST);
    if largest < SMALLEST || plain == 0.0 {
        codes.as_flattened_mut().fill(Q::ZERO);
        return 0.0;
    }
    let mut scale = plain;
    if SEARCHED.contains(&largest) {
        let unit = 1.0 / largest;
        // All divisions at once and no branches, which would be mispredicted: with groups of 32 they took a third of
        // the time. Plain loops: the closures of iterators are not compiled for the instruction set around
        // them.
        let (mut wq, mut qq) = ([0.0; C], [0.0; C]);
        for i in 0..C {
            (wq[i], qq[i]) = fit::<L, Q, N>(w, candidates[i] * unit);
        }
        let (mut best_scales, mut explained) = ([0.0; C], [0.0; C]);
        for i in 0..C {
            best_scales[i] = wq[i] / qq[i];
            explained[i] = wq[i] * best_scales[i];
        }
        let mut best = 0;
        for i in 1..C {
            best = if explained[i] > explained[best] { i } else { best };
        }
        let refit = round_scale(scales, best_scales[best]);
        if squared_error::<L, Q, N>(w, refit) < squared_error::<L, Q, N>(w, plain) {
            scale = refit;
        }
    }
    let inverse = L::splat(1.0 / scale);
    for (x, codes) in w.iter().zip(codes) {
        Q::nearest(L::load(x).mul(inverse)).store(codes);
    }
    scale
}

/// The nearest codes for the scale that maps the largest magnitude to the largest code: of precisions that are kept,
/// not chosen.
fn nearest(precision: Precision, w: &[f32], codes: &mut [i8]) -> f32 {
    let Some(code_type) = precision.codes() else { panic!("{precision} has no codes") };
    // Less a zero point, its codes have a sign.
    let code_type = match precision {
        Precision::Uint4 { .. } => CodeType::Int { bits: 4, zero: 8 },
        _ => code_type,
    };
    let largest = w.iter().fold(0f32, |largest, w| largest.max(w.abs()));
    let scale = round_scale(precision.scales(), largest / largest_code(code_type));
    if largest < SMALLEST || scale == 0.0 {
        codes.fill(if code_type == CodeType::Iq4 { OfIq4::ZERO } else { 0 });
        return 0.0;
    }
    w.iter().zip(codes).for_each(|(&w, code)| *code = code_type.nearest(w / scale));
    scale
}

/// What the largest code counts.
fn largest_code(codes: CodeType) -> f32 {
    match codes {
        CodeType::E4m3 => 448.0,
        _ => f32::from(codes.range()[1]),
    }
}

/// The nearest codes for scales that map a group's largest magnitude, or the ends of its range, to the ends of the
/// codes': of precisions that are kept, not chosen. `weights` [rows, k], `out` has room for them.
fn in_blocks(row: Row, weights: &[f32], out: &mut Blocks) {
    let Row { codes, scales, group_size } = row;
    let high = largest_code(codes);
    let bits = |x: f32| f16::from_f32(x.clamp(0.0, f16::MAX.to_f32())).to_bits();
    let number = |bits: u16| f16::from_bits(bits).to_f32();
    // Of a group the scale, and how far below 0 it begins where there are offsets.
    let range = |w: &[f32]| {
        let (least, most) = w.iter().fold((0f32, 0f32), |(least, most), &w| (least.min(w), most.max(w)));
        match scales.have_offsets() {
            true => ((most - least) / high, -least),
            false => (most.max(-least) / high, 0.0),
        }
    };
    if let (CodeType::Grid(grid), Scales::Odd { halvings, .. }) = (codes, scales) {
        let (unit, groups) = (f32::from(1u8 << halvings), SUPER_BLOCK / group_size);
        for (block, w) in weights.chunks_exact(SUPER_BLOCK).enumerate() {
            let scale = |w: &[f32]| w.iter().fold(0f32, |largest, w| largest.max(w.abs())) / high;
            let most = f32::from(row.largest_count());
            let head = bits(scale(w) * unit / (2.0 * most + 1.0));
            out.heads[block] = head;
            let d = number(head) / unit;
            let count = |w: &[f32]| if d == 0.0 { 0.0 } else { ((scale(w) / d - 1.0) / 2.0).round().clamp(0.0, most) };
            let counts: Vec<u8> = w.chunks_exact(group_size).map(|w| count(w) as u8).collect();
            let inverse =
                |group: usize| if d == 0.0 { 0.0 } else { 1.0 / (d * (2.0 * f32::from(counts[group]) + 1.0)) };
            let scaled: Vec<f32> = w.iter().enumerate().map(|(i, w)| w * inverse(i / group_size)).collect();
            let words = &mut out.words[block * grid.words()..][..grid.words()];
            grid.nearest(&scaled, |block| counts[block * groups / 8], words);
            if !out.counts.is_empty() {
                out.counts[block * groups..][..groups].copy_from_slice(&counts);
            }
        }
        return;
    }
    if scales == Scales::E4m3 {
        let k = weights.len() / (out.heads.len() / 2);
        for (row, w) in weights.chunks_exact(k).enumerate() {
            let number = w.iter().fold(0f32, |largest, w| largest.max(w.abs())) / high / largest_code(CodeType::E4m3);
            let bits = number.to_bits();
            out.heads[2 * row..][..2].copy_from_slice(&[bits as u16, (bits >> 16) as u16]);
            for (group, w) in (row * k / group_size..).zip(w.chunks_exact(group_size)) {
                let count = CodeType::E4m3.nearest(if number == 0.0 { 0.0 } else { range(w).0 / number });
                out.counts[group] = count as u8;
                let scale = number * CodeType::E4m3.value(count);
                for (&w, code) in w.iter().zip(&mut out.codes[group * group_size..]) {
                    *code = codes.nearest(if scale == 0.0 { 0.0 } else { w / scale });
                }
            }
        }
        return;
    }
    let (of_block, groups) = match scales {
        Scales::Counted { .. } | Scales::Odd { .. } => (SUPER_BLOCK, SUPER_BLOCK / group_size),
        _ => (group_size, 1),
    };
    for (block, w) in weights.chunks_exact(of_block).enumerate() {
        let ranges = w.chunks_exact(group_size).map(range);
        let (scale, below) = ranges.clone().fold((0f32, 0f32), |(a, b), (scale, below)| (a.max(scale), b.max(below)));
        let heads = match scales {
            Scales::Counted { bits: of_count, zero, .. } => {
                let most = ((1u16 << of_count) - 1) as f32;
                [bits(scale / (most - f32::from(zero))), bits(below / most)]
            }
            // An offset is negative: the sign is the highest bit.
            _ => [bits(scale), bits(below) | 0x8000],
        };
        let per_block = if scales.have_offsets() { 2 } else { 1 };
        out.heads[block * per_block..][..per_block].copy_from_slice(&heads[..per_block]);
        for (group, (w, (scale, below))) in (block * groups..).zip(w.chunks_exact(group_size).zip(ranges)) {
            let [d, dmin] = heads.map(number);
            let (mut own, mut offset) = (d, if scales.have_offsets() { dmin } else { 0.0 });
            if let Scales::Counted { bits, zero, offsets } = scales {
                let most = ((1u16 << bits) - 1) as f32;
                let count = |x: f32, d: f32, zero: f32| if d == 0.0 { 0.0 } else { (x / d).round().min(most - zero) };
                let counts = [count(scale, d, f32::from(zero)), count(below, dmin, 0.0)];
                out.counts[group] = counts[0] as u8 + zero;
                own = d * counts[0];
                if offsets {
                    out.offsets[group] = counts[1] as u8;
                    offset = -(dmin * counts[1]);
                }
            }
            for (&w, code) in w.iter().zip(&mut out.codes[group * group_size..]) {
                let exact = if own == 0.0 { 0.0 } else { (w - offset) / own };
                *code = codes.nearest(exact);
            }
        }
    }
}

#[inline(always)]
fn largest_magnitude<L: Lanes, const N: usize>(w: &[[f32; 16]; N]) -> f32 {
    let (mut low, mut high) = (L::splat(0.0), L::splat(0.0));
    for x in w {
        let x = L::load(x);
        (low, high) = (low.min(x), high.max(x));
    }
    high.max(L::splat(0.0).sub(low)).largest()
}

/// `sum(w q)` and `sum(q q)` for the codes that `1 / inverse` as scale gives.
#[inline(always)]
fn fit<L: Lanes, Q: Codes, const N: usize>(w: &[[f32; 16]; N], inverse: f32) -> (f32, f32) {
    let inverse = L::splat(inverse);
    let (mut wq, mut qq) = (L::splat(0.0), L::splat(0.0));
    for x in w {
        let x = L::load(x);
        let q = Q::nearest(x.mul(inverse));
        wq = wq.add(x.mul(q));
        qq = qq.add(q.mul(q));
    }
    (wq.sum(), qq.sum())
}

#[inline(always)]
fn squared_error<L: Lanes, Q: Codes, const N: usize>(w: &[[f32; 16]; N], scale: f32) -> f32 {
    let (scale, inverse) = (L::splat(scale), L::splat(1.0 / scale));
    let mut sum = L::splat(0.0);
    for x in w {
        let x = L::load(x);
        let error = x.sub(scale.mul(Q::nearest(x.mul(inverse))));
        sum = sum.add(error.mul(error));
    }
    sum.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_values_of_a_table_change_at_its_limits_alone() {
        multiversion!(fn nearest(x: &[[f32; 16]], out: &mut [[i8; 16]]) = [nearest_body::<Avx512>, nearest_body::<Avx2>,
            nearest_body::<Scalar>]);
        #[inline(always)]
        fn nearest_body<L: Lanes>(x: &[[f32; 16]], out: &mut [[i8; 16]]) {
            for (x, out) in x.iter().zip(out) {
                OfIq4::nearest(L::load(x)).store(out);
            }
        }
        // Quarters from -192 to 192, and their neighbours.
        let quarters = (-768..768).map(|i| i as f32 / 4.0);
        let x: Vec<f32> = quarters.flat_map(|x| [x.next_down(), x, x.next_up(), 3.0 * x]).collect();
        let (x, mut got) = (x.as_chunks::<16>().0, vec![[0; 16]; 384]);
        let mut want = got.clone();
        nearest(x, &mut got);
        nearest_body::<Scalar>(x, &mut want);
        assert!(x.len() == 384 && got == want);
        let beyond = |x: f32| IQ4.iter().position(|&value| f32::from(value) >= x).unwrap_or(15);
        for (&x, &code) in x.as_flattened().iter().zip(got.as_flattened()) {
            let near = [beyond(x).saturating_sub(1), beyond(x)].map(|i| (f32::from(IQ4[i]) - x).abs());
            assert_eq!((f32::from(code) - x).abs(), near[0].min(near[1]), "{x}");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let weights: Vec<f32> =
            (0..128 * 512u32).map(|i| (i.wrapping_mul(2_654_435_761) as i32 >> 8) as f32 * 1e-9).collect();
        for precision in [
            Precision::int4(32),
            Precision::int4(128),
            Precision::int8(64),
            Precision::int4(32).with_scales(ScaleType::F16),
            Precision::Q5_0,
            Precision::iq4(128),
            Precision::Mxfp4,
        ] {
            let mut results = Vec::new();
            multiversion!(fn only_avx2(p: Precision, w: &[f32], c: &mut [i8], s: &mut [f32]) = [rows::<Avx2>,
                rows::<Avx2>, rows::<Scalar>]);
            for run in [quantize_rows, only_avx2, rows::<Scalar>] {
                let groups = weights.len() / precision.group_size().expect("groups");
                let (mut codes, mut scales) = (vec![0; weights.len()], vec![0.0; groups]);
                run(precision, &weights, &mut codes, &mut scales);
                results.push((codes, scales));
            }
            assert!(results[0] == results[2] && results[1] == results[2], "{precision}");
        }
    }
}
