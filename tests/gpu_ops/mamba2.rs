//! Mamba-2 and its convolution: ragged batches from zeros and from a kept state.

use moebius::backend::{Load, Mamba2Inputs, Mamba2Rule, Recur};
use moebius::model::{Facts, Mamba2};

use crate::common;
use crate::steps::{IN_CHUNKS, MOST, in_parts, steps};
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, need_gpu, random};

/// What is normed is rounded before, which makes much of it where a group reads little.
const RULE: Within = Within { each: 4.0 * ROUNDING, of_rms: 48.0 * ROUNDING, rms: 1.5 * ROUNDING };

fn check_rule(sides: &Sides, config: &Mamba2) {
    let (channels, inner, heads) = (config.conv_dim(), config.inner_dim(), config.num_heads);
    let (got, want) = both!(sides, |b| {
        let norm = |n: usize, seed: u64, by: f32| {
            b.load_norm(random(n, seed).iter().map(|x| x * by).collect::<Vec<_>>().into()).unwrap()
        };
        let (taps, bias) = (norm(channels * config.conv_width, 71, 1.0), norm(channels, 76, 0.5));
        let rates = random(heads, 73).iter().map(|a| a.exp()).collect::<Vec<_>>();
        let rates = b.load_norm(rates.into()).unwrap();
        let (dt_bias, skip, weight) = (norm(heads, 74, 2.0), norm(heads, 77, 1.0), norm(inner, 75, 1.0));
        let mut state = b.state(4, config.state().unwrap()).unwrap();
        let mut all = Vec::new();
        for (batch, seed) in steps() {
            let rows = batch.len();
            let z = b.filled(inner, &random(rows * inner, seed));
            let dt = b.filled_f32(heads, &random(rows * heads, seed + 1));
            let xbc = b.filled(channels, &random(rows * channels, seed + 2));
            let mut mixed = b.filled(channels, &vec![9.0; rows * channels]);
            let mut out = b.filled(inner, &vec![9.0; rows * inner]);
            let batch = b.on_device(&batch);
            b.convolve(&mut state, &batch, (&taps, config.conv_bias.then_some(&bias)), &xbc, &mut mixed);
            all.extend(b.numbers(&mixed));
            let (rates, dt_bias, skip, norm) = (&rates, &dt_bias, &skip, &weight);
            let rule = Mamba2Rule { config, rates, dt_bias, skip, norm, eps: 1e-5 };
            // What both have to the last bit.
            b.mamba2(&mut state, &batch, &rule, Mamba2Inputs { xbc: &xbc, z: &z, dt: &dt }, &mut out);
            all.extend(b.numbers(&out));
        }
        all
    });
    check(&format!("{config:?}"), &got, &want, RULE);
}

#[test]
fn mamba2_from_zeros_and_from_a_state() {
    need_gpu!();
    let sides = Sides::new();
    let nano = Mamba2 {
        num_heads: 4,
        head_dim: 64,
        state_dim: 128,
        num_groups: 2,
        conv_width: 4,
        conv_bias: true,
        output_scale: 1.0,
    };
    check_rule(&sides, &nano);
    // Widths that fill no block, one group of all heads, no bias, other widths of the convolution.
    check_rule(&sides, &Mamba2 { head_dim: 40, state_dim: 24, num_groups: 1, conv_bias: false, ..nano.clone() });
    check_rule(
        &sides,
        &Mamba2 { num_heads: 3, head_dim: 8, state_dim: 16, num_groups: 3, conv_width: 7, ..nano.clone() },
    );
    check_rule(&sides, &Mamba2 { conv_width: 2, ..nano });
}

/// The same tokens at once and a few at a time, with states that are kept and that are forgotten at once.
#[test]
fn mamba2_in_chunks_equals_token_by_token() {
    need_gpu!();
    let b = &Sides::new().gpu;
    let of = |head_dim, state_dim| Mamba2 {
        num_heads: 4,
        head_dim,
        state_dim,
        num_groups: 2,
        conv_width: 4,
        conv_bias: false,
        output_scale: 1.0,
    };
    for (config, rate) in [(of(64, 128), 1.0), (of(72, 128), 1e-4), (of(40, 24), 100.0), (of(8, 64), 0.02)] {
        let (channels, inner, heads) = (config.conv_dim(), config.inner_dim(), config.num_heads);
        let norm = |numbers: Vec<f32>| b.load_norm(numbers.into()).unwrap();
        let rates = norm(random(heads, 73).iter().map(|a| a.exp() * rate).collect());
        let (dt_bias, skip, weight) = (norm(random(heads, 74)), norm(random(heads, 77)), norm(random(inner, 75)));
        let (rates, dt_bias, skip, norm) = (&rates, &dt_bias, &skip, &weight);
        let rule = Mamba2Rule { config: &config, rates, dt_bias, skip, norm, eps: 1e-5 };
        let run = |most: usize| {
            let mut state = b.state(4, config.state().unwrap()).unwrap();
            in_parts(most, |batch, seed, tokens, rows| {
                let of =
                    |cols: usize, i: u64| random(tokens * cols, seed + i)[rows.start * cols..rows.end * cols].to_vec();
                let (xbc, z) = (b.filled(channels, &of(channels, 0)), b.filled(inner, &of(inner, 1)));
                let dt = b.filled_f32(heads, &of(heads, 2));
                let mut out = b.filled(inner, &vec![9.0; rows.len() * inner]);
                b.mamba2(&mut state, &b.on_device(batch), &rule, Mamba2Inputs { xbc: &xbc, z: &z, dt: &dt }, &mut out);
                b.numbers(&out)
            })
        };
        check(&format!("rates {rate}, {config:?}"), &run(MOST), &run(31), IN_CHUNKS);
    }
}
