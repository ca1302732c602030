//! Kimi delta attention: ragged batches from zeros and from a kept state.

use moebius::backend::{KdaInputs, KdaRule, Load, Recur};
use moebius::model::{Facts, Kda, KdaDecay};

use crate::common;
use crate::steps::steps;
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
        let mut all = Vec::new();
        for (batch, seed) in steps() {
            let rows = batch.len();
            let part = |cols: usize, n: u64| b.filled(cols, &random(rows * cols, seed + n));
            let (qkv, decay, gate) = (part(3 * inner, 0), part(inner, 1), part(inner, 2));
            let beta = b.filled_f32(heads, &random(rows * heads, seed + 3));
            let mut out = b.filled(inner, &vec![9.0; rows * inner]);
            let rule = KdaRule { config, rates: &rates, dt_bias: &dt_bias, norm: &weight, eps: 1e-5 };
            let inputs = KdaInputs { qkv: &qkv, decay: &decay, beta: &beta, gate: &gate };
            b.kda(&mut state, &b.on_device(&batch), &rule, inputs, &mut out);
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
