//! Several residual streams, and n-grams: single rows, and a convolution from zeros and from what was kept.

use moebius::backend::{ConnectWeights, Dense, Load, Memory, NgramInputs, NgramNorms, ReadBy, Recur, Streams};
use moebius::model::{Connections, LastRead, StateShape};

use crate::common;
use crate::steps::steps;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, host, need_gpu, ragged, random};

/// Sums of f32 in another order, and functions that are right to 2^-21.
const F32: Within = Within { each: 1e-5, of_rms: 1e-5, rms: 1e-5 };
/// The same, of numbers that are divided twenty times.
const CONNECTED: Within = Within { each: 5e-5, of_rms: 5e-5, rms: 5e-5 };
/// The same, of many tokens: products are those of numbers with 16 bits.
const SPLIT: Within = Within { each: 1e-4, of_rms: 2e-4, rms: 5e-5 };
/// Rounded once to bf16 after such sums, or from a gate that was.
const TWICE: Within = Within { each: 3.0 * ROUNDING, of_rms: ROUNDING, rms: ROUNDING };

#[test]
fn embeddings_are_in_every_stream() {
    need_gpu!();
    let sides = Sides::new();
    let (batch, ..) = ragged(&[(1, 1), (70, 3)]);
    let table = random(50 * 24, 1);
    let (got, want) = both!(sides, |b| {
        let mut out = b.tensor_f32(batch.len(), 4 * 24).unwrap();
        b.embed(&b.load_embedding(host(24, &table)).unwrap(), &b.on_device(&batch), 24, &mut out);
        b.numbers(&out)
    });
    assert_eq!(got, want);
    assert!(got.chunks(4 * 24).all(|row| row.chunks(24).all(|stream| stream == &row[..24])));
}

#[test]
fn streams_are_mixed_and_get_their_shares() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, hidden, streams, rank) in [(1, 96, 4, 8usize), (5, 2560, 4, 320), (70, 136, 2, 16), (3, 24, 3, 24)] {
        let (width, gates) = (streams * hidden, (rank + streams).next_multiple_of(8));
        let what = format!("{rows} rows of {streams} streams of {hidden}");
        let (x, w) = (random(rows * width, 2), random(width, 3));
        for narrow in [false, true] {
            let (got, want) = both!(sides, |b| {
                let x = if narrow { b.filled(width, &x) } else { b.filled_f32(width, &x) };
                let mut out = b.tensor(rows, width).unwrap();
                b.norm_streams(&x, &b.load_norm(w.clone().into()).unwrap(), 1e-6, hidden, &mut out);
                b.numbers(&out)
            });
            check(&format!("norms, {what}, bf16 {narrow}"), &got, &want, Within::BF16);
        }
        let (got, want) = both!(sides, |b| {
            let (mut low, mut inject) = (b.tensor(rows, rank).unwrap(), b.tensor_f32(rows, streams).unwrap());
            b.mixer_gates(&b.filled_f32(gates, &random(rows * gates, 4)), &mut low, &mut inject);
            (b.numbers(&low), b.numbers(&inject))
        });
        check(&format!("gates, {what}"), &got.0, &want.0, Within::BF16);
        check(&format!("shares, {what}"), &got.1, &want.1, F32);
        let (got, want) = both!(sides, |b| {
            let mut out = b.tensor(rows, hidden).unwrap();
            b.mix_streams(&b.filled(width, &random(rows * width, 5)), &b.filled(width, &x), &mut out);
            b.numbers(&out)
        });
        check(&format!("mixed, {what}"), &got, &want, Within::BF16);
        let (got, want) = both!(sides, |b| {
            let mut x = b.filled_f32(width, &x);
            let (y, inject) = (b.filled_f32(hidden, &random(rows * hidden, 6)), random(rows * streams, 7));
            b.inject(&y, &b.filled_f32(streams, &inject), &mut x);
            b.numbers(&x)
        });
        check(&format!("injected, {what}"), &got, &want, F32);
        let (got, want) = both!(sides, |b| {
            let mut key = b.filled(width, &random(rows * width, 8));
            let (of_key, of_query) =
                (b.load_norm(w.clone().into()).unwrap(), b.load_norm(random(width, 9).into()).unwrap());
            let norms = NgramNorms { key: &of_key, query: &of_query, eps: 1e-6 };
            let value = b.filled(hidden, &random(rows * hidden, 10));
            b.gate_ngrams(&norms, &b.filled_f32(width, &x), &value, &mut key);
            b.numbers(&key)
        });
        check(&format!("gated n-grams, {what}"), &got, &want, TWICE);
    }
}

#[test]
fn streams_are_connected() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, hidden, count) in [(1, 96, 4), (5, 2560, 4), (32, 520, 4), (33, 136, 2), (70, 1032, 3)] {
        let of = Connections { count, iterations: 20, eps: 1e-6, last: LastRead::Shares };
        let (width, what) = (count * hidden, format!("{rows} rows of {count} streams of {hidden}"));
        let (x, y) = (random(rows * width, 11), random(rows * hidden, 12));
        let (got, want) = both!(sides, |b| {
            let norm = |n: usize, seed| b.load_norm(random(n, seed).into()).unwrap();
            let run = |numbers: usize| (norm(numbers * width, 13), norm(numbers, 14), norm(3, 15));
            let (mut x, y) = (b.filled_f32(width, &x), b.filled_f32(hidden, &y));
            let mut read = b.tensor_f32(rows, hidden).unwrap();
            let (of_streams, base, scale) = run(count);
            let w = ConnectWeights { of_streams: &of_streams, base: &base, scale: &scale };
            let mut pre = b.tensor_f32(rows, count).unwrap();
            b.collapse_streams(&x, &w, (of, 1e-6), ReadBy::Own, &mut pre, &mut read);
            let weighed = b.numbers(&read);
            let (of_streams, base, scale) = run(of.rows());
            let w = ConnectWeights { of_streams: &of_streams, base: &base, scale: &scale };
            let mut shares = b.tensor_f32(rows, of.rows()).unwrap();
            b.collapse_streams(&x, &w, (of, 1e-6), ReadBy::Own, &mut shares, &mut read);
            let collapsed = b.numbers(&read);
            let shares_of = b.numbers(&shares);
            let (mut others, mut reads) = (b.tensor_f32(rows, of.rows()).unwrap(), Vec::new());
            for by in [ReadBy::First, ReadBy::Shares(&shares)] {
                b.collapse_streams(&x, &w, (of, 1e-6), by, &mut others, &mut read);
                reads.extend(b.numbers(&read));
            }
            b.sum_streams(&x, of, &shares, &mut read);
            reads.extend(b.numbers(&read));
            b.connect_streams(&y, &shares, &mut x);
            let connected = b.numbers(&x);
            b.mean_streams(&x, &mut read);
            let behind: Vec<f32> = shares_of.chunks(of.rows()).flat_map(|row| row[count..].to_vec()).collect();
            [weighed, collapsed, behind, reads, connected, b.numbers(&read)]
        });
        let parts = ["weighed", "collapsed", "shares", "read by others", "connected", "mean"];
        for ((part, got), want) in parts.iter().zip(&got).zip(&want) {
            check(&format!("{part}, {what}"), got, want, if rows > 32 { SPLIT } else { CONNECTED });
        }
    }
}

#[test]
fn ngrams_are_convolved_from_zeros_and_from_what_was_kept() {
    need_gpu!();
    let sides = Sides::new();
    for (channels, width, dilation) in [(96, 4, 3), (1032, 4, 3), (520, 2, 2)] {
        let (got, want) = both!(sides, |b| {
            let shape = StateShape { past_inputs: (width - 1) * dilation, channels, numbers: 0 };
            let mut state = b.state(4, shape).unwrap();
            let taps = b.load_norm(random(width * channels, 20).into()).unwrap();
            let mut all = Vec::new();
            for (batch, seed) in steps() {
                let numbers = batch.len() * channels;
                let gated = b.filled(channels, &random(numbers, seed));
                let normed = b.filled(channels, &random(numbers, seed + 1));
                let mut x = b.filled_f32(channels, &random(numbers, seed + 2));
                let inputs = NgramInputs { gated: &gated, normed: &normed, taps: &taps, dilation };
                b.convolve_ngrams(&mut state, &b.on_device(&batch), &inputs, &mut x);
                all.extend(b.numbers(&x));
            }
            all
        });
        check(&format!("{channels} channels, {width} taps {dilation} apart"), &got, &want, F32);
    }
}

#[test]
fn rows_are_written_where_they_belong() {
    need_gpu!();
    let sides = Sides::new();
    let rows = random(3 * 40, 50);
    let (got, want) = both!(sides, |b| {
        let mut to = b.filled(40, &vec![1.0; 7 * 40]);
        b.write_rows(&mut to, 2, &rows).unwrap();
        b.numbers(&to)
    });
    assert!(got == want && got[2 * 40..5 * 40] == rows && got[..2 * 40].iter().all(|x| *x == 1.0));
}
