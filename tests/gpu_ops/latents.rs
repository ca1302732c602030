//! Latent attention: absorbed for single rows, expanded for prompts, in one segment of the context or several.

use moebius::backend::{Attend, Heads, Load, Memory, Rotary};
use moebius::config::KvBits;
use moebius::model::{Mla, Rope, RopeScaling, Values};

use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, host, need_gpu, ragged, random};

pub(crate) fn config(num_heads: usize, kv_lora_rank: usize, (nope, rope, v): (usize, usize, usize)) -> Mla {
    // Scores spread by about 1.5.
    let scale = 4.5 / ((nope + rope) as f32).sqrt();
    Mla {
        selection: None,
        num_heads,
        q_lora_rank: None,
        kv_lora_rank,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        rope: Some(Rope { dim: rope, theta: 10_000.0, interleaved: true, scaling: RopeScaling::None }),
        v_head_dim: v,
        bias: false,
        head_gate: false,
        scale,
        position_scale: None,
        norm_eps: 1e-6,
    }
}

/// Up to 16 heads to a block and more, DeepSeek's own dimensions, and odd ones for each size of tile.
fn configs() -> [Mla; 5] {
    [
        config(4, 64, (32, 16, 32)),
        config(3, 48, (24, 8, 40)),
        config(20, 136, (64, 32, 72)),
        config(2, 512, (128, 64, 128)),
        config(2, 72, (168, 32, 200)),
    ]
}

const BATCHES: &[&[(usize, usize)]] = &[
    &[(1, 1)],
    &[(64, 1), (1, 1), (65, 1), (300, 1), (30, 3), (700, 1)],
    &[(70, 70), (2, 2), (129, 129)],
    &[(300, 130)],
    &[(90, 1), (64, 4), (200, 70), (17, 17), (33, 1)],
];

/// Rounded to bf16: absorbed queries, or expanded keys and values; probabilities; mixed latents; the result. What moves
/// a score counts 1.5 times: 0.42 (1.5^2 + 3)^(1/2) of a rounding in the mean.
const LATENT: Within = Within { each: ROUNDING, of_rms: 12.0 * ROUNDING, rms: 1.25 * ROUNDING };

pub(crate) fn check_latents(sides: &Sides, config: &Mla, sequences: &[(usize, usize)], bits: KvBits) {
    let (last, all, pool) = ragged(sequences);
    let Mla { num_heads: heads, kv_lora_rank: rank, v_head_dim: v, .. } = *config;
    let (cols, cache) = (heads * config.qk_head_dim(), config.cache_dim());
    let (q, latents) = (random(last.len() * cols, 41), random(all.len() * cache, 42));
    let unit = (3.0 / rank as f32).sqrt();
    let kv_b: Vec<f32> = random(heads * (config.qk_nope_head_dim + v) * rank, 43).iter().map(|w| unit * w).collect();
    let (got, want) = both!(sides, |b| {
        let mut kv = b.kv(pool, (1, cache, Values::OfKeys(rank)), bits).unwrap();
        b.kv_write(&mut kv, &b.on_device(&all), &b.filled(cache, &latents), None);
        let mut scratch = b.latent_scratch(config, last.len()).unwrap();
        let mut out = b.filled(heads * v, &vec![9.0; last.len() * heads * v]);
        let up = b.load_latent_up(config, host(rank, &kv_b)).unwrap();
        let (batch, q) = (b.on_device(&last), b.filled(cols, &q));
        b.absorb_latent(&batch, &up, &mut scratch, (&q, None));
        b.attend_latent(&kv, &batch, &up, &mut scratch, (&q, None), &mut out);
        b.numbers(&out)
    });
    check(&format!("{config:?}, {bits}, {sequences:?}"), &got, &want, LATENT);
}

#[test]
fn latent_attention_over_bf16_and_int8() {
    need_gpu!();
    let sides = Sides::new();
    for config in configs() {
        for batch in BATCHES {
            for bits in [KvBits::Bf16, KvBits::Int8] {
                check_latents(&sides, &config, batch, bits);
            }
        }
    }
}

/// Contexts longer than what is expanded at a time, whose softmax goes on from segment to segment.
#[test]
fn latent_attention_over_several_segments() {
    need_gpu!(real);
    let sides = Sides::new();
    // 64 KiB of keys and values to a position: segments of 4,096. With DeepSeek's dimensions, and with others, which
    // have kernels of their own.
    for rope in [64, 16] {
        for bits in [KvBits::Bf16, KvBits::Int8] {
            check_latents(
                &sides,
                &config(128, 64, (128, rope, 128)),
                &[(8192, 1), (4500, 70), (8192, 20), (4096, 5), (100, 30), (5000, 300)],
                bits,
            );
        }
    }
}

/// A latent is normed, its key part rotated; the queries' last parts are rotated.
#[test]
fn latents_go_into_the_cache_normed_and_rotated() {
    need_gpu!();
    let sides = Sides::new();
    let config = config(4, 64, (32, 16, 32));
    let (rank, rope, nope, dim) = (64, 16, 32, 48);
    let (_, all, pool) = ragged(&[(1, 1), (66, 1), (130, 30)]);
    let (q, latents) = (random(all.len() * 4 * dim, 44), random(all.len() * (rank + rope), 45));
    let norm: Vec<f32> = random(rank, 46).iter().map(|w| 1.0 + 0.5 * w).collect();
    let kv_b: Vec<f32> = random(4 * 64 * rank, 47).iter().map(|w| 0.1 * w).collect();
    let inv_freq: Vec<f32> = (0..rope / 2).map(|i| 100f32.powf(-(i as f32) / 8.0)).collect();
    for interleaved in [false, true] {
        let (got, want) = both!(sides, |b| {
            let (mut kv, batch) =
                (b.kv(pool, (1, rank + rope, Values::OfKeys(rank)), KvBits::Bf16).unwrap(), b.on_device(&all));
            let mut angles = b.tensor_f32(all.len(), rope).unwrap();
            b.rope_angles(&b.load_norm(inv_freq.clone().into()).unwrap(), 1.0, &batch, &mut angles);
            let (mut q, mut latents, norm) =
                (b.filled(4 * dim, &q), b.filled(rank + rope, &latents), b.load_norm(norm.clone().into()).unwrap());
            let (mut scratch, mut out) =
                (b.latent_scratch(&config, all.len()).unwrap(), b.tensor(all.len(), 4 * 32).unwrap());
            let up = b.load_latent_up(&config, host(rank, &kv_b)).unwrap();
            b.absorb_latent(&batch, &up, &mut scratch, (&q, None));
            let queries = Heads { x: &mut q, heads: 4, dim, norm: None, rope_at: nope };
            let keys =
                Heads { x: &mut latents, heads: 1, dim: rank + rope, norm: Some((&norm, rank, 1e-6)), rope_at: rank };
            let rotary = Rotary { angles: &angles, interleaved };
            b.prepare_heads(&mut kv, &batch, Some(&rotary), queries, keys, None);
            b.attend_latent(&kv, &batch, &up, &mut scratch, (&q, None), &mut out);
            (b.numbers(&q), b.numbers(&out))
        });
        check(&format!("queries, interleaved {interleaved}"), &got.0, &want.0, Within::BF16);
        check(&format!("interleaved {interleaved}"), &got.1, &want.1, Within { rms: 1.5 * ROUNDING, ..LATENT });
    }
}
