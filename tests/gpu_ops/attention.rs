//! Grouped-query attention over the paged cache, and what queries, keys and values go through before it.

use half::bf16;
use moebius::backend::{Attend, Backend, Dense, Heads, KV_GROUP, Load, Memory, Rotary, Softmax};
use moebius::config::KvBits;
use moebius::model::{Values, Window};

use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, need_gpu, ragged, random};

/// Query heads, KV heads, and the widths of a key and a value: every kernel at its own widths and below, one query head
/// to a KV head, several, and more than a block serves.
const HEADS: &[(usize, usize, usize, usize)] = &[
    (4, 2, 64, 64),
    (2, 2, 24, 24),
    (20, 1, 32, 32),
    (3, 1, 48, 32),
    (4, 2, 96, 96),
    (3, 1, 80, 80),
    (4, 1, 128, 128),
    (2, 2, 136, 136),
    (2, 1, 192, 128),
    (2, 1, 256, 256),
    (18, 1, 200, 200),
    (2, 2, 72, 256),
    (3, 1, 512, 512),
    (20, 1, 264, 264),
    (2, 2, 320, 24),
    (2, 1, 64, 392),
];

/// Positions of each sequence, and how many of them are queries.
const BATCHES: &[&[(usize, usize)]] = &[
    &[(1, 1)],
    &[(64, 1), (1, 1), (65, 1), (130, 1), (700, 1)],
    &[(5, 4), (200, 2), (64, 3)],
    &[(70, 70), (2, 2), (129, 129)],
    &[(300, 130)],
    // Single rows before and after prompts.
    &[(90, 1), (64, 4), (200, 70), (17, 17), (33, 1)],
];

/// Probabilities and the result are rounded to bf16, 0.42 of a rounding in the mean each. Of some thousand numbers one
/// is four times as far off.
const ATTENTION: Within = Within { each: ROUNDING, of_rms: 4.0 * ROUNDING, rms: 0.75 * ROUNDING };

/// Scores spread by about 2: a softmax that prefers some positions and forgets none.
fn scale(dim: usize) -> f32 {
    6.0 / (dim as f32).sqrt()
}

/// Everything before a token is seen, and nothing else.
fn all_of<B: Backend>(scale: f32) -> Softmax<'static, B> {
    Softmax { scale, window: None, sinks: None, choice: None }
}

fn check_attention(
    sides: &Sides,
    (heads, kv_heads, dim, width): (usize, usize, usize, usize),
    sequences: &[(usize, usize)],
    bits: KvBits,
) {
    let (last, all, pool) = ragged(sequences);
    let (cols, key_cols, value_cols) = (heads * dim, kv_heads * dim, kv_heads * width);
    let q = random(last.len() * cols, 31);
    let [k, v] = [(32, key_cols), (33, value_cols)].map(|(seed, cols)| random(all.len() * cols, seed));
    let (got, want) = both!(sides, |b| {
        let mut kv = b.kv(pool, (kv_heads, dim, Values::Own(width)), bits).unwrap();
        b.kv_write(&mut kv, &b.on_device(&all), &b.filled(key_cols, &k), Some(&b.filled(value_cols, &v)));
        let mut out = b.filled(heads * width, &vec![9.0; last.len() * heads * width]);
        b.attend(&kv, &b.on_device(&last), &all_of(scale(dim)), &b.filled(cols, &q), &mut out);
        b.numbers(&out)
    });
    check(&format!("{heads} heads on {kv_heads} of {dim} and {width}, {bits}, {sequences:?}"), &got, &want, ATTENTION);
}

#[test]
fn attention_over_bf16() {
    need_gpu!();
    let sides = Sides::new();
    for &heads in HEADS {
        BATCHES.iter().for_each(|batch| check_attention(&sides, heads, batch, KvBits::Bf16));
    }
}

#[test]
fn attention_over_int8() {
    need_gpu!();
    let sides = Sides::new();
    for &heads in HEADS {
        BATCHES.iter().for_each(|batch| check_attention(&sides, heads, batch, KvBits::Int8));
    }
}

/// Attention over a cache whose blocks went to the host, and back to another cache, has the same bits.
fn check_moved<B: Filled>(b: &B, bits: KvBits) {
    let (last, all, pool) = ragged(&[(200, 2), (64, 1), (130, 130)]);
    let (heads, kv_heads, dim, width) = (4, 2, 96, 64);
    let [q, k, v] =
        [(last.len() * heads * dim, 37), (all.len() * kv_heads * dim, 38), (all.len() * kv_heads * width, 39)]
            .map(|(count, seed)| random(count, seed));
    let dims = (kv_heads, dim, Values::Own(width));
    let mut kv = b.kv(pool, dims, bits).unwrap();
    b.kv_write(&mut kv, &b.on_device(&all), &b.filled(kv_heads * dim, &k), Some(&b.filled(kv_heads * width, &v)));
    let attend = |kv: &B::Kv| {
        let mut out = b.filled(heads * width, &vec![9.0; last.len() * heads * width]);
        b.attend(kv, &b.on_device(&last), &all_of(scale(dim)), &b.filled(heads * dim, &q), &mut out);
        b.numbers(&out)
    };
    let before = attend(&kv);
    let bytes = b.kv_block_bytes(&kv);
    let mut host = b.host(pool * bytes / 4).unwrap();
    for (block, to) in bytemuck::cast_slice_mut::<f32, u8>(&mut host).chunks_exact_mut(bytes).enumerate() {
        b.kv_to_host(&kv, block, to);
    }
    let mut other = b.kv(pool, dims, bits).unwrap();
    for (block, from) in bytemuck::cast_slice::<f32, u8>(&host).chunks_exact(bytes).enumerate() {
        b.kv_to_device(&mut other, block, from);
    }
    assert_eq!(attend(&other), before);
}

#[test]
fn blocks_go_to_the_host_and_back() {
    need_gpu!();
    let sides = Sides::new();
    for bits in [KvBits::Bf16, KvBits::Int8] {
        check_moved(&sides.gpu, bits);
        check_moved(&sides.cpu, bits);
    }
}

/// Many steps of a walk through the context, and the ends of some.
#[test]
fn attention_of_long_prompts() {
    need_gpu!(real);
    let sides = Sides::new();
    for &heads in HEADS {
        for bits in [KvBits::Bf16, KvBits::Int8] {
            check_attention(&sides, heads, &[(1500, 700), (513, 513), (1024, 128), (640, 5), (1, 1), (333, 333)], bits);
        }
    }
}

/// More sequences than are ever recorded, and more rows than are read one by one.
#[test]
fn attention_of_many_sequences() {
    need_gpu!();
    let sides = Sides::new();
    let many: Vec<_> = (0..270).map(|i| (1 + i % 67, 1)).collect();
    check_attention(&sides, (2, 1, 64, 64), &many, KvBits::Bf16);
}

/// Windows of less than a page, of some and of everything, where they begin and end in pages; chunks; sinks that weigh
/// little and that leave little to others.
#[test]
fn attention_in_windows_and_with_sinks() {
    need_gpu!();
    let sides = Sides::new();
    let sequences = [(300, 1), (64, 1), (65, 1), (1, 1), (200, 2), (330, 170), (17, 17), (130, 129)];
    let (last, all, pool) = ragged(&sequences);
    for (heads, kv_heads, dim, width) in
        [(4, 2, 64, 64), (18, 1, 96, 96), (2, 1, 128, 128), (4, 2, 192, 128), (2, 1, 256, 256), (4, 2, 512, 512)]
    {
        let (cols, key_cols, value_cols) = (heads * dim, kv_heads * dim, kv_heads * width);
        let q = random(last.len() * cols, 34);
        let [k, v] = [(35, key_cols), (36, value_cols)].map(|(seed, cols)| random(all.len() * cols, seed));
        let scores: Vec<f32> = (0..heads).map(|head| [-2.0, 7.0, 1.0][head % 3]).collect();
        for (window, with_sinks) in [
            (Some(Window::Sliding(1)), false),
            (Some(Window::Sliding(50)), true),
            (Some(Window::Sliding(64)), false),
            (Some(Window::Sliding(128)), true),
            (Some(Window::Sliding(1000)), false),
            (Some(Window::Chunk(7)), false),
            (Some(Window::Chunk(64)), true),
            (Some(Window::Chunk(150)), false),
            (None, true),
        ] {
            // What is seen does not depend on how it is stored: half of the cases tell.
            let stored: &[KvBits] = if with_sinks { &[KvBits::Bf16, KvBits::Int8] } else { &[KvBits::Bf16] };
            for &bits in stored {
                let (got, want) = both!(sides, |b| {
                    let mut kv = b.kv(pool, (kv_heads, dim, Values::Own(width)), bits).unwrap();
                    b.kv_write(&mut kv, &b.on_device(&all), &b.filled(key_cols, &k), Some(&b.filled(value_cols, &v)));
                    let sinks = with_sinks.then(|| b.load_norm(scores.clone().into()).unwrap());
                    let softmax = Softmax { scale: scale(dim), window, sinks: sinks.as_ref(), choice: None };
                    let mut out = b.filled(heads * width, &vec![9.0; last.len() * heads * width]);
                    b.attend(&kv, &b.on_device(&last), &softmax, &b.filled(cols, &q), &mut out);
                    b.numbers(&out)
                });
                check(
                    &format!("{heads} heads on {kv_heads} of {dim}/{width}, {bits}, {window:?}, sinks {with_sinks}"),
                    &got,
                    &want,
                    ATTENTION,
                );
            }
        }
    }
}

/// What a cache of INT8 holds of rows of `dim` numbers.
fn rounded(rows: &[f32], dim: usize) -> Vec<f32> {
    let group = |x: &[f32]| -> Vec<f32> {
        let scale = bf16::from_f32(x.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0).to_f32();
        let inverse = if scale < 1e-30 { 0.0 } else { 1.0 / scale };
        x.iter()
            .map(|x| bf16::from_f32((x * inverse).round_ties_even().clamp(-127.0, 127.0) * scale).to_f32())
            .collect()
    };
    rows.chunks(dim).flat_map(|row| row.chunks(KV_GROUP).flat_map(group)).collect()
}

/// A value alone is its own attention: numbers of every size, and groups of zeros, of one number and of an odd width.
#[test]
fn int8_holds_codes_times_scales() {
    need_gpu!();
    let sides = Sides::new();
    let dim = 88;
    let mut numbers: Vec<f32> = (0..=u16::MAX)
        .map(|bits| bf16::from_bits(bits.wrapping_mul(31)).to_f32())
        .filter(|n| *n == 0.0 || (1e-25..1e37).contains(&n.abs()))
        .collect();
    numbers.extend(random(50 * dim, 40));
    numbers.extend(vec![0.0; 3 * dim]);
    numbers.extend((0..dim).flat_map(|i| (0..dim).map(move |j| if i == j { 3.0 } else { 0.0 })));
    numbers.resize(numbers.len().next_multiple_of(dim), 0.0);
    let rows = numbers.len() / dim;
    let (batch, _, pool) = ragged(&vec![(1, 1); rows]);
    let (got, want) = both!(sides, |b| {
        let mut kv = b.kv(pool, (1, dim, Values::Own(dim)), KvBits::Int8).unwrap();
        let (batch, none) = (b.on_device(&batch), b.filled(dim, &vec![0.0; rows * dim]));
        b.kv_write(&mut kv, &batch, &none, Some(&b.filled(dim, &numbers)));
        let mut out = b.tensor(rows, dim).unwrap();
        b.attend(&kv, &batch, &all_of(1.0), &none, &mut out);
        b.numbers(&out)
    });
    assert_eq!(got, want);
    assert_eq!(want, rounded(&numbers, dim));
}

/// On the CPU the bits of attention are those of bf16 that holds the same numbers.
#[test]
fn int8_reads_as_bf16() {
    need_gpu!();
    let b = &Sides::new().cpu;
    for (batch, (heads, kv_heads, dim, width)) in BATCHES.iter().zip(HEADS.iter().cycle().skip(4)) {
        let (last, all, pool) = ragged(batch);
        let [q, k, v] =
            [(last.len() * heads * dim, 37), (all.len() * kv_heads * dim, 38), (all.len() * kv_heads * width, 39)]
                .map(|(count, seed)| random(count, seed));
        let attended = |k: &[f32], v: &[f32], bits| {
            let mut kv = b.kv(pool, (*kv_heads, *dim, Values::Own(*width)), bits).unwrap();
            b.kv_write(&mut kv, &all, &b.filled(kv_heads * dim, k), Some(&b.filled(kv_heads * width, v)));
            let mut out = b.tensor(last.len(), heads * width).unwrap();
            b.attend(&kv, &last, &all_of(scale(*dim)), &b.filled(heads * dim, &q), &mut out);
            b.numbers(&out)
        };
        assert_eq!(attended(&k, &v, KvBits::Int8), attended(&rounded(&k, *dim), &rounded(&v, *width), KvBits::Bf16));
    }
}

/// How heads are prepared: rotated columns and whether pairs are neighbours, with a norm or without.
#[derive(Clone, Copy, Debug)]
struct Form {
    turned: usize,
    at: usize,
    interleaved: bool,
    norm: bool,
}

impl Form {
    fn rotary<'a, B: Backend>(&self, angles: &'a B::Tensor) -> Rotary<'a, B> {
        Rotary { angles, interleaved: self.interleaved }
    }
}

fn check_heads((heads, kv_heads, dim): (usize, usize, usize), form: Form, bits: KvBits, sides: &Sides) {
    let (last, all, pool) = ragged(&[(1, 1), (66, 1), (130, 30)]);
    let (cols, kv_cols, eps) = (heads * dim, kv_heads * dim, 1e-6);
    let [q, k, v] = [(34, cols), (35, kv_cols), (36, kv_cols)].map(|(seed, cols)| random(all.len() * cols, seed));
    let norms = [37, 38].map(|seed| -> Vec<f32> { random(dim, seed).iter().map(|w| 1.0 + 0.5 * w).collect() });
    let inv_freq: Vec<f32> = (0..form.turned / 2).map(|i| 100f32.powf(-(i as f32) / form.turned as f32)).collect();
    // A normed number is root 3 times as large as one from -1 to 1.
    let scale = if form.norm { 2.0 } else { 6.0 } / (dim as f32).sqrt();

    // Queries of all positions, prepared, and attention of the last ones.
    macro_rules! run {
        ($b:ident, $prepare:expr) => {{
            let (mut kv, batch) = ($b.kv(pool, (kv_heads, dim, Values::Own(dim)), bits).unwrap(), $b.on_device(&all));
            let mut angles = $b.tensor_f32(all.len(), form.turned).unwrap();
            $b.rope_angles(&$b.load_norm(inv_freq.clone().into()).unwrap(), 1.2, &batch, &mut angles);
            let [mut q, mut k, v] = [(&q, cols), (&k, kv_cols), (&v, kv_cols)].map(|(x, cols)| $b.filled(cols, x));
            $prepare(&mut kv, &batch, &angles, &mut q, &mut k, &v);
            let prepared = $b.numbers(&q);
            let queries: Vec<f32> = last_rows(&all, &last, &prepared, cols);
            let mut out = $b.tensor(last.len(), cols).unwrap();
            $b.attend(&kv, &$b.on_device(&last), &all_of(scale), &$b.filled(cols, &queries), &mut out);
            (prepared, $b.numbers(&out))
        }};
    }
    let b = &sides.gpu;
    let weights = norms.clone().map(|w| b.load_norm(w.into()).unwrap());
    let norm = |i: usize| form.norm.then_some((&weights[i], dim, eps));
    let fused = run!(b, |kv: &mut _, batch: &_, angles: &_, q: &mut _, k: &mut _, v: &_| {
        let (q, k) = (
            Heads { x: q, heads, dim, norm: norm(0), rope_at: form.at },
            Heads { x: k, heads: kv_heads, dim, norm: norm(1), rope_at: form.at },
        );
        b.prepare_heads(kv, batch, Some(&form.rotary(angles)), q, k, Some(v));
    });
    let in_turn = run!(b, |kv: &mut _, batch: &_, angles: &_, q: &mut _, k: &mut _, v: &_| {
        for (x, cols, w) in [(&mut *q, cols, &weights[0]), (&mut *k, kv_cols, &weights[1])] {
            if form.norm {
                b.rms_norm_heads(x, w, eps, 0..cols);
            }
            b.rope(x, dim, form.at, &form.rotary(angles));
        }
        b.kv_write(kv, batch, k, Some(v));
    });
    let b = &sides.cpu;
    let reference = run!(b, |kv: &mut _, batch: &_, angles: &_, q: &mut _, k: &mut _, v: &_| {
        for (x, cols, w) in [(&mut *q, cols, &norms[0]), (&mut *k, kv_cols, &norms[1])] {
            if form.norm {
                b.rms_norm_heads(x, w, eps, 0..cols);
            }
            b.rope(x, dim, form.at, &form.rotary(angles));
        }
        b.kv_write(kv, batch, k, Some(v));
    });
    let what = format!("{heads} heads on {kv_heads} of {dim}, {bits}, {form:?}");
    check(&format!("{what}: queries"), &fused.0, &reference.0, Within::BF16);
    // Between the norm and the rotation as well, and of both numbers of a pair.
    check(
        &format!("{what}: queries in turn"),
        &in_turn.0,
        &reference.0,
        Within { each: ROUNDING, of_rms: 4.0 * ROUNDING, rms: 0.75 * ROUNDING },
    );
    // Rounded queries move scores, which spread by up to 2, by 0.42 of a rounding of that; probabilities and result are
    // rounded as above. A code of INT8 may be the next one, which moves a number of a key by as much as two roundings.
    check(&what, &fused.1, &reference.1, Within { each: ROUNDING, of_rms: 8.0 * ROUNDING, rms: 1.5 * ROUNDING });
    if bits == KvBits::Bf16 {
        check(
            &format!("{what}: in turn"),
            &in_turn.1,
            &reference.1,
            Within { each: ROUNDING, of_rms: 20.0 * ROUNDING, rms: 2.0 * ROUNDING },
        );
    }
}

/// Rows of `x`, of the tokens of `all`, that `last` has.
fn last_rows(
    all: &moebius::backend::batch::Batch,
    last: &moebius::backend::batch::Batch,
    x: &[f32],
    cols: usize,
) -> Vec<f32> {
    let rows = all.spans.iter().zip(&last.spans).map(|(all, last)| all.rows.end - last.rows.len()..all.rows.end);
    rows.flat_map(|rows| x[rows.start * cols..rows.end * cols].to_vec()).collect()
}

#[test]
fn heads_at_once_equal_heads_in_turn() {
    need_gpu!();
    let sides = Sides::new();
    for bits in [KvBits::Bf16, KvBits::Int8] {
        for norm in [false, true] {
            for interleaved in [false, true] {
                check_heads((4, 2, 64), Form { turned: 64, at: 0, interleaved, norm }, bits, &sides);
                check_heads((3, 1, 48), Form { turned: 16, at: 0, interleaved, norm }, bits, &sides);
                check_heads((2, 2, 72), Form { turned: 32, at: 40, interleaved, norm }, bits, &sides);
            }
        }
        check_heads((9, 3, 256), Form { turned: 256, at: 0, interleaved: false, norm: true }, bits, &sides);
        check_heads((4, 2, 512), Form { turned: 128, at: 0, interleaved: false, norm: true }, bits, &sides);
    }
}
