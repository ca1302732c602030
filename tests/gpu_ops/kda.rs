//! Kimi delta attention: ragged batches from zeros and from a kept state.

use moebius::backend::batch::Batch;
use moebius::backend::{KdaInputs, KdaRule, Load, Recur};
use moebius::model::{Facts, Kda, KdaDecay};

use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, need_gpu, random};

/// What is normed is rounded before, which makes much of it where a head reads little.
const RULE: Within = Within { each: 2.0 * ROUNDING, of_rms: 48.0 * ROUNDING, rms: 1.5 * ROUNDING };

/// Tokens of each sequence in a step; their positions go on from step to step. A sequence's slot is its number, from
/// the last down.
const STEPS: &[&[usize]] = &[&[5, 1, 133, 16], &[1, 1, 1, 1], &[3, 66, 1, 17], &[1, 2, 3, 4]];

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
        let mut starts = [0; 4];
        let mut all = Vec::new();
        for (i, step) in STEPS.iter().enumerate() {
            let mut batch = Batch::default();
            for (s, &tokens) in step.iter().enumerate() {
                batch.push(&vec![1; tokens], starts[s], &[0; 4]).slot = 3 - s;
                starts[s] += tokens;
            }
            let (rows, seed) = (batch.len(), 80 + 10 * i as u64);
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
