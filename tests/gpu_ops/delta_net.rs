//! Gated DeltaNet: ragged batches from zeros and from a kept state, in parts and at once.

use moebius::backend::batch::Batch;
use moebius::backend::tensor::HostTensor;
use moebius::backend::{DeltaInputs, DeltaRule, Load, Recur};
use moebius::model::{DeltaGate, DeltaNet, Facts};

use crate::common;
use crate::steps::{IN_CHUNKS, MOST, in_parts, steps};
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, device, need_gpu, random};

const HIDDEN: usize = 72;

/// Inputs of the rule are rounded once more than on the CPU, and so is what is normed, which makes much of it where a
/// head reads little.
const RULE: Within = Within { each: 2.0 * ROUNDING, of_rms: 48.0 * ROUNDING, rms: 1.5 * ROUNDING };

/// What gated DeltaNet has beside its projections.
fn rule(config: &DeltaNet) -> DeltaRule<'static> {
    let some = |n: usize, seed: u64, by: f32| -> Vec<f32> { random(n, seed).iter().map(|x| x * by).collect() };
    let heads = config.num_value_heads;
    DeltaRule {
        conv: HostTensor::from(some(config.conv_dim() * config.conv_width, 71, 1.0)).reshaped(config.conv_width),
        gates: some(2 * heads * HIDDEN, 72, 0.2).into(),
        rates: some(heads, 73, 1.5).iter().map(|a| a.exp()).collect::<Vec<_>>().into(),
        dt_bias: some(heads, 74, 2.0).into(),
        norm: some(config.value_head_dim, 75, 1.0).into(),
        eps: 1e-6,
    }
}

fn check_rule(sides: &Sides, config: &DeltaNet) {
    let (channels, values) = (config.conv_dim(), config.value_dim());
    let (got, want) = both!(sides, |b| {
        let w = b.load_delta_net(config, rule(config)).unwrap();
        let mut state = b.state(4, config.state().unwrap()).unwrap();
        #[allow(clippy::let_unit_value)] // on the CPU it is nothing
        let mut scratch = b.delta_scratch(config, 256).unwrap();
        let mut all = Vec::new();
        for (batch, seed) in steps() {
            let rows = batch.len();
            let (h, z) =
                (b.filled(HIDDEN, &random(rows * HIDDEN, seed)), b.filled(values, &random(rows * values, seed + 1)));
            let qkv = b.filled(channels, &random(rows * channels, seed + 2));
            let mut out = b.filled(values, &vec![9.0; rows * values]);
            let inputs = DeltaInputs { h: &h, qkv: &qkv, z: &z };
            b.delta_net(&mut state, &b.on_device(&batch), &w, &mut scratch, inputs, &mut out);
            all.extend(b.numbers(&out));
        }
        all
    });
    check(&format!("{config:?}"), &got, &want, RULE);
}

#[test]
fn delta_rule_from_zeros_and_from_a_state() {
    need_gpu!();
    let sides = Sides::new();
    let plain = DeltaNet {
        num_key_heads: 2,
        num_value_heads: 4,
        key_head_dim: 128,
        value_head_dim: 128,
        conv_width: 4,
        gate: DeltaGate::Silu,
        tiled: false,
    };
    check_rule(&sides, &plain);
    check_rule(
        &sides,
        &DeltaNet { num_key_heads: 1, num_value_heads: 1, key_head_dim: 16, value_head_dim: 40, ..plain },
    );
    check_rule(
        &sides,
        &DeltaNet {
            num_key_heads: 4,
            num_value_heads: 12,
            key_head_dim: 40,
            value_head_dim: 16,
            conv_width: 2,
            gate: DeltaGate::Sigmoid,
            ..plain
        },
    );
}

/// The same tokens at once and a few at a time, from zeros and from a state, with states that are kept and that are
/// forgotten at once.
#[test]
fn the_delta_rule_in_chunks_equals_token_by_token() {
    need_gpu!();
    let b = &Sides::new().gpu;
    let of = |key_head_dim, value_head_dim| DeltaNet {
        num_key_heads: 1,
        num_value_heads: 2,
        key_head_dim,
        value_head_dim,
        conv_width: 4,
        gate: DeltaGate::Silu,
        tiled: false,
    };
    for (config, rate) in [(of(128, 128), 1.0), (of(128, 72), 1e-4), (of(24, 40), 100.0), (of(64, 8), 0.02)] {
        let mut weights = rule(&config);
        let rates: Vec<f32> = weights.rates.to_f32().iter().map(|r| r * rate).collect();
        weights.rates = rates.into();
        let (channels, values) = (config.conv_dim(), config.value_dim());
        let w = b.load_delta_net(&config, weights).unwrap();
        let run = |most: usize| {
            let mut state = b.state(4, config.state().unwrap()).unwrap();
            let mut scratch = b.delta_scratch(&config, MOST).unwrap();
            in_parts(most, |batch, seed, tokens, rows| {
                let part = |cols: usize, i: u64| {
                    b.filled(cols, &random(tokens * cols, seed + i)[rows.start * cols..rows.end * cols])
                };
                let (h, z, qkv) = (part(HIDDEN, 0), part(values, 1), part(channels, 2));
                let mut out = b.filled(values, &vec![9.0; rows.len() * values]);
                let inputs = DeltaInputs { h: &h, qkv: &qkv, z: &z };
                b.delta_net(&mut state, &b.on_device(batch), &w, &mut scratch, inputs, &mut out);
                b.numbers(&out)
            })
        };
        check(&format!("rates {rate}, {config:?}"), &run(MOST), &run(31), IN_CHUNKS);
    }
}

/// Far into a prompt: what chunks and single tokens have gathered is as far from the CPU's.
#[test]
fn the_delta_rule_gathers_no_error_over_a_long_prompt() {
    need_gpu!();
    let sides = Sides::new();
    let config = DeltaNet {
        num_key_heads: 1,
        num_value_heads: 2,
        key_head_dim: 128,
        value_head_dim: 128,
        conv_width: 4,
        gate: DeltaGate::Silu,
        tiled: false,
    };
    let (channels, values) = (config.conv_dim(), config.value_dim());
    let (tokens, pass) = if device() == Some("a GPU") { (20_000, 1000) } else { (400, 100) };
    let error = |most: usize| {
        let (got, want) = both!(sides, |b| {
            // Something is left of a token after thousands of others.
            let weights = DeltaRule { rates: vec![1e-3, 1e-2].into(), ..rule(&config) };
            let w = b.load_delta_net(&config, weights).unwrap();
            let mut state = b.state(1, config.state().unwrap()).unwrap();
            #[allow(clippy::let_unit_value)] // on the CPU it is nothing
            let mut scratch = b.delta_scratch(&config, pass).unwrap();
            let mut last = Vec::new();
            for from in (0..tokens).step_by(pass) {
                let all = [HIDDEN, values, channels].map(|cols| (cols, random(pass * cols, (from + cols) as u64)));
                for first in (0..pass).step_by(most) {
                    let rows = first..pass.min(first + most);
                    let mut batch = Batch::default();
                    // Of a position only zero matters to the rule.
                    batch.push(&vec![1; rows.len()], (from + first).min(1), &[0; 16]).slot = 0;
                    let [h, z, qkv] =
                        [0, 1, 2].map(|i| b.filled(all[i].0, &all[i].1[rows.start * all[i].0..rows.end * all[i].0]));
                    let mut out = b.filled(values, &vec![9.0; rows.len() * values]);
                    let inputs = DeltaInputs { h: &h, qkv: &qkv, z: &z };
                    b.delta_net(&mut state, &b.on_device(&batch), &w, &mut scratch, inputs, &mut out);
                    if from + pass >= tokens {
                        last.extend(b.numbers(&out));
                    }
                }
            }
            last
        });
        let squares = |each: &mut dyn Iterator<Item = f32>| each.map(|x| f64::from(x).powi(2)).sum::<f64>();
        (squares(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / squares(&mut want.iter().copied())).sqrt()
    };
    let (chunks, tokens) = (error(pass), error(31));
    assert!(chunks < 1.1 * tokens && tokens < 0.01, "chunks are off by {chunks}, single tokens by {tokens}");
    println!("chunks are off by {chunks:.6} of the CPU's numbers, single tokens by {tokens:.6}");
}

/// A snapshot: what was copied to another slot and back goes on as if nothing had come between.
#[test]
fn a_copied_state_goes_on_with_the_same_bits() {
    need_gpu!();
    let b = &Sides::new().gpu;
    let config = DeltaNet {
        num_key_heads: 2,
        num_value_heads: 4,
        key_head_dim: 32,
        value_head_dim: 40,
        conv_width: 4,
        gate: DeltaGate::Silu,
        tiled: false,
    };
    let (w, tokens) = (b.load_delta_net(&config, rule(&config)).unwrap(), 7);
    let (mut state, mut scratch) =
        (b.state(3, config.state().unwrap()).unwrap(), b.delta_scratch(&config, tokens).unwrap());
    let tensor = |cols: usize, seed: u64| b.filled(cols, &random(tokens * cols, seed));
    let (h, qkv, z) = (tensor(HIDDEN, 76), tensor(config.conv_dim(), 77), tensor(config.value_dim(), 78));
    let mut out = tensor(config.value_dim(), 79);
    let mut run = |state: &mut _, start: usize, slot: usize| {
        let mut batch = Batch::default();
        batch.push(&vec![1; tokens], start, &[0]).slot = slot;
        let inputs = DeltaInputs { h: &h, qkv: &qkv, z: &z };
        b.delta_net(state, &b.on_device(&batch), &w, &mut scratch, inputs, &mut out);
        b.numbers(&out)
    };
    run(&mut state, 0, 1);
    b.copy_state(&mut state, 1, 2);
    let first = run(&mut state, tokens, 1);
    assert_ne!(run(&mut state, 2 * tokens, 1), first, "the state has moved on");
    b.copy_state(&mut state, 2, 1);
    assert_eq!(run(&mut state, tokens, 1), first);
    assert_eq!(run(&mut state, tokens, 2), first, "the copy was left alone");
}
