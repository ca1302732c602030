//! Kimi delta attention: ragged batches from zeros and from a kept state.

use moebius::backend::{KdaInputs, KdaRule, Load, Recur};
use moebius::model::{Facts, Kda, KdaDecay};

use crate::common;
use crate::steps::{IN_CHUNKS, MOST, in_parts, steps};
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, need_gpu, random};

/// What is normed is rounded before, which makes much of it where a head reads little.
const RULE: Within = Within { each: 2.0 * ROUNDING, of_rms: 48.0 * ROUNDING, rms: 1.5 * ROUNDING };

fn check_rule(sides: &Sides, config: &Kda) {
    let (inner, heads) = (config.inner_dim(), config.num_heads);
    let (got, want) = both!(sides, |b| {
        let norm = |n: usize, seed: u64, by: f32| {
            b.load_norm(random(n, seed).iter().map(|x| x * by).collect::<Vec<_>>().into()).unwrap()
        };
        let rates = random(heads, 73).iter().map(|a| a.exp()).collect::<Vec<_>>();
        let rates = b.load_norm(rates.into()).unwrap();
        let (dt_bias, weight) = (norm(inner, 74, 2.0), norm(config.head_dim, 75, 1.0));
        let mut state = b.state(4, config.state().unwrap()).unwrap();
        #[allow(clippy::let_unit_value)] // on the CPU it is nothing
        let mut scratch = b.kda_scratch(config, 256).unwrap();
        let mut all = Vec::new();
        for (batch, seed) in steps() {
            let rows = batch.len();
            let part = |cols: usize, n: u64| b.filled(cols, &random(rows * cols, seed + n));
            let (qkv, decay, gate) = (part(3 * inner, 0), part(inner, 1), part(inner, 2));
            let beta = b.filled_f32(heads, &random(rows * heads, seed + 3));
            let mut out = b.filled(inner, &vec![9.0; rows * inner]);
            let rule = KdaRule { config, rates: &rates, dt_bias: &dt_bias, norm: &weight, eps: 1e-5 };
            let inputs = KdaInputs { qkv: &qkv, decay: &decay, beta: &beta, gate: &gate };
            b.kda(&mut state, &b.on_device(&batch), &rule, &mut scratch, inputs, &mut out);
            all.extend(b.numbers(&out));
        }
        all
    });
    check(&format!("{config:?}"), &got, &want, RULE);
}

#[test]
fn kda_from_zeros_and_from_a_state() {
    need_gpu!();
    let sides = Sides::new();
    let decay = KdaDecay::Softplus;
    let plain = Kda { num_heads: 3, head_dim: 128, conv_width: 4, decay, gate_rank: None };
    check_rule(&sides, &plain);
    // A bounded decay, and widths that fill no block.
    check_rule(&sides, &Kda { decay: KdaDecay::Bounded { lower: -5.0 }, head_dim: 24, ..plain.clone() });
    check_rule(&sides, &Kda { num_heads: 1, head_dim: 72, ..plain });
}

/// The same tokens at once and a few at a time, with states that are kept and that are forgotten at once.
#[test]
fn kda_in_chunks_equals_token_by_token() {
    need_gpu!();
    let b = &Sides::new().gpu;
    let of = |head_dim, decay| Kda { num_heads: 2, head_dim, conv_width: 4, decay, gate_rank: None };
    let bounded = KdaDecay::Bounded { lower: -5.0 };
    for (config, rate) in [
        (of(128, KdaDecay::Softplus), 1.0),
        (of(128, bounded), 1.0),
        (of(72, KdaDecay::Softplus), 1e-4),
        (of(40, KdaDecay::Softplus), 100.0),
        (of(8, bounded), 0.02),
    ] {
        let (inner, heads) = (config.inner_dim(), config.num_heads);
        let norm = |numbers: Vec<f32>| b.load_norm(numbers.into()).unwrap();
        let rates = norm(random(heads, 73).iter().map(|a| a.exp() * rate).collect());
        let (dt_bias, weight) = (norm(random(inner, 74)), norm(random(config.head_dim, 75)));
        let rule = KdaRule { config: &config, rates: &rates, dt_bias: &dt_bias, norm: &weight, eps: 1e-5 };
        let run = |most: usize| {
            let mut state = b.state(4, config.state().unwrap()).unwrap();
            let mut scratch = b.kda_scratch(&config, MOST).unwrap();
            in_parts(most, |batch, seed, tokens, rows| {
                let of =
                    |cols: usize, i: u64| random(tokens * cols, seed + i)[rows.start * cols..rows.end * cols].to_vec();
                let part = |cols: usize, i: u64| b.filled(cols, &of(cols, i));
                let (qkv, decay, gate) = (part(3 * inner, 0), part(inner, 1), part(inner, 2));
                let beta = b.filled_f32(heads, &of(heads, 3));
                let mut out = b.filled(inner, &vec![9.0; rows.len() * inner]);
                let inputs = KdaInputs { qkv: &qkv, decay: &decay, beta: &beta, gate: &gate };
                b.kda(&mut state, &b.on_device(batch), &rule, &mut scratch, inputs, &mut out);
                b.numbers(&out)
            })
        };
        check(&format!("rates {rate}, {config:?}"), &run(MOST), &run(31), IN_CHUNKS);
    }
}
