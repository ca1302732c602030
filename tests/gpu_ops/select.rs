//! Choosing positions, and latent attention over what was chosen.

use moebius::backend::batch::Batch;
use moebius::backend::{Attend, Choice, IndexQueries, KeyNorm, Load, Memory, Rotary, Select, Softmax};
use moebius::config::KvBits;
use moebius::model::{Candidates, ChosenBy, Indexer, Mla, Score, Selection, Values};

use super::latents::config;
use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, host, need_gpu, ragged, random};

/// As with latents that are not chosen.
const LATENT: Within = Within { each: ROUNDING, of_rms: 12.0 * ROUNDING, rms: 1.25 * ROUNDING };

/// Positions of each sequence, and how many of them are queries: fewer than are chosen, as many, and more.
const BATCHES: [&[(usize, usize)]; 4] = [
    &[(1, 1), (24, 1), (25, 1), (300, 1)],
    &[(64, 1), (130, 3), (700, 1)],
    &[(150, 150), (90, 4)],
    &[(90, 1), (200, 40), (24, 24), (17, 17), (33, 1)],
];

/// Keys of ones and minus ones, which a LayerNorm leaves as they are, and small whole queries and weights: both sides
/// have the same scores to the last bit, and many that are equal.
fn whole(n: usize, seed: u64, most: f32) -> Vec<f32> {
    random(n, seed).iter().map(|x| (x * most).round()).collect()
}

fn balanced(tokens: usize, dim: usize, seed: u64) -> Vec<f32> {
    let sign = |x: f32| if x > 0.0 { 1.0 } else { -1.0 };
    let halves = random(tokens * dim / 2, seed);
    halves
        .chunks(dim / 2)
        .flat_map(|half| half.iter().map(move |&x| sign(x)).chain(half.iter().map(move |&x| -sign(x))))
        .collect()
}

fn check_choice(sides: &Sides, indexer: &Indexer, sequences: &[(usize, usize)], bits: KvBits) {
    let (last, all, pool) = ragged(sequences);
    let config = config(4, 64, (32, 16, 32));
    let config = Mla { selection: Some(Selection { by: ChosenBy::Own, indexer: indexer.clone() }), ..config };
    let Mla { num_heads: heads, kv_lora_rank: rank, v_head_dim: v, .. } = config;
    let (cols, cache, dim) = (heads * config.qk_head_dim(), config.cache_dim(), indexer.head_dim);
    let (q, latents) = (random(last.len() * cols, 41), random(all.len() * cache, 42));
    let kv_b: Vec<f32> = random(heads * 64 * rank, 43).iter().map(|w| 0.2 * w).collect();
    let keys = balanced(all.len(), dim, 44);
    let (queries, weights) =
        (whole(last.len() * indexer.num_heads * dim, 45, 2.0), whole(last.len() * indexer.num_heads, 46, 3.0));
    let (got, want) = both!(sides, |b| {
        let mut kv = b.kv(pool, (1, cache, Values::OfKeys(rank)), bits).unwrap();
        let batch = b.on_device(&all);
        b.kv_write(&mut kv, &batch, &b.filled(cache, &latents), None);
        let mut angles = b.tensor_f32(all.len(), 8).unwrap();
        // Angles of nothing: what rotates is a test of whole models.
        b.rope_angles(&b.load_norm(vec![0.0; 4].into()).unwrap(), 1.0, &batch, &mut angles);
        let (ones, zeros) = (b.load_norm(vec![1.0; dim].into()).unwrap(), b.load_norm(vec![0.0; dim].into()).unwrap());
        let mut index = b.index(pool, indexer).unwrap();
        let rotary = Rotary { angles: &angles, interleaved: false };
        let norm = KeyNorm { weight: &ones, bias: Some(&zeros), eps: 0.0 };
        b.index_write(&mut index, &batch, indexer, (Some(&rotary), &norm, None), &b.filled(dim, &keys));

        let batch = b.on_device(&last);
        let (mut chosen, mut scores) =
            (b.chosen(indexer, last.len()).unwrap(), b.select_scratch(indexer, last.len()).unwrap());
        let (queries, weights) =
            (b.filled(indexer.num_heads * dim, &queries), b.filled_f32(indexer.num_heads, &weights));
        if let Some(of) = indexer.candidates {
            let first = Indexer { candidates: Some(Candidates { by: ChosenBy::Own, ..of }), ..indexer.clone() };
            let others = whole(last.len() * indexer.num_heads * dim, 47, 2.0);
            let (others, mut scores) =
                (b.filled(indexer.num_heads * dim, &others), b.select_scratch(&first, last.len()).unwrap());
            let queries = IndexQueries { q: &others, weights: Some(&weights) };
            b.select(&index, &batch, &first, &queries, &mut scores, &mut chosen);
        }
        let queries = IndexQueries { q: &queries, weights: Some(&weights) };
        b.select(&index, &batch, indexer, &queries, &mut scores, &mut chosen);

        let mut scratch = b.latent_scratch(&config, last.len()).unwrap();
        let mut out = b.filled(heads * v, &vec![9.0; last.len() * heads * v]);
        let up = b.load_latent_up(&config, host(rank, &kv_b)).unwrap();
        let gathered = b.gathered(&kv, indexer, last.len()).unwrap();
        let choice = Choice { chosen: &chosen, gathered: &gathered };
        let q = b.filled(cols, &q);
        b.absorb_latent(&batch, &up, &mut scratch, (&q, Some(&choice)));
        b.attend_latent(&kv, &batch, &up, &mut scratch, (&q, Some(&choice)), &mut out);
        b.numbers(&out)
    });
    check(&format!("{indexer:?}, {bits}, {sequences:?}"), &got, &want, LATENT);
}

/// An indexer that chooses single positions.
fn of_positions(num_heads: usize, head_dim: usize, top_k: usize) -> Indexer {
    let score = Score::Weighted { latent: 64 };
    Indexer { num_heads, head_dim, interleaved: false, unit: 1, top_k, score, candidates: None }
}

#[test]
fn the_best_positions_are_attended_to_of_equals_the_lower() {
    need_gpu!();
    let sides = Sides::new();
    for (num_heads, head_dim, top_k, bits) in
        [(8, 32, 24, KvBits::Bf16), (16, 24, 100, KvBits::Int8), (40, 128, 64, KvBits::Bf16)]
    {
        let indexer = of_positions(num_heads, head_dim, top_k);
        for batch in BATCHES {
            check_choice(&sides, &indexer, batch, bits);
        }
    }
}

/// A few rows that see much more than they choose are chosen for by several blocks each; many rows by one.
#[test]
fn parts_of_a_row_choose_what_one_does() {
    need_gpu!();
    let sides = Sides::new();
    let few: &[(usize, usize)] = &[(330, 1), (1200, 2), (81, 1), (161, 1), (1027, 3)];
    let many: &[(usize, usize)] = &[(1200, 40), (400, 1)];
    for (seed, top_k) in [1, 3, 10, 20, 37].into_iter().enumerate() {
        let [num_heads, head_dim] = [[4, 16], [8, 32]][seed % 2];
        let indexer = of_positions(num_heads, head_dim, top_k);
        for batch in [few, many] {
            check_choice(&sides, &indexer, batch, KvBits::Bf16);
        }
    }
    for (blocks, size, top_k) in [(3, 8, 10), (20, 4, 30)] {
        let indexer = Indexer {
            num_heads: 4,
            head_dim: 16,
            interleaved: false,
            unit: 1,
            top_k,
            score: Score::Weighted { latent: 64 },
            candidates: Some(Candidates { by: ChosenBy::Earlier, blocks, size }),
        };
        for batch in [few, many] {
            check_choice(&sides, &indexer, batch, KvBits::Bf16);
        }
    }
    for (unit, top_k, score) in [(4, 3, Score::Pooled), (16, 2, Score::Pooled), (8, 5, Score::Largest)] {
        let indexer = Indexer { num_heads: 2, head_dim: 32, interleaved: false, unit, top_k, score, candidates: None };
        Chosen { indexer: &indexer, kv_heads: 2, sequences: few, bits: KvBits::Bf16, turn: 0.0 }.check(&sides);
    }
}

/// Sequences of grouped queries, and what is chosen by.
struct Chosen<'a> {
    indexer: &'a Indexer,
    kv_heads: usize,
    sequences: &'a [(usize, usize)],
    bits: KvBits,
    turn: f32, // radians from a position to the next, of all that rotates
}

impl Chosen<'_> {
    /// Keys whose units have means of ones and minus ones, though no position has.
    fn keys(&self, all: &Batch) -> Vec<f32> {
        let (dim, unit) = (self.indexer.head_dim, self.indexer.unit);
        let mut keys = balanced(all.len(), dim, 54);
        if self.indexer.score == Score::Pooled {
            for t in 0..all.len() {
                let inside = all.positions[t] as usize % unit;
                let share = if unit == 1 { 1.0 } else { [0.5, 1.5][inside % 2] };
                for i in 0..dim {
                    keys[t * dim + i] = match inside {
                        0 => keys[t * dim + i] * share,
                        _ => keys[(t - inside) * dim + i] * 2.0 * share,
                    };
                }
            }
        }
        keys
    }

    /// What the sequences' last tokens attend to, when index keys came `part` tokens at a time.
    fn attended<B: Filled>(&self, b: &B, part: usize) -> Vec<f32> {
        let &Self { indexer, kv_heads, sequences, bits, turn } = self;
        let (last, all, pool) = ragged(sequences);
        let (heads, head, dim) = (6, 64, indexer.head_dim);
        let (cols, kv_cols) = (heads * head, kv_heads * head);
        let (q, k, v) =
            (random(last.len() * cols, 51), random(all.len() * kv_cols, 52), random(all.len() * kv_cols, 53));
        let (keys, queries) = (self.keys(&all), whole(last.len() * indexer.num_heads * dim, 55, 2.0));
        let mut kv = b.kv(pool, (kv_heads, head, Values::Own(head)), bits).unwrap();
        b.kv_write(&mut kv, &b.on_device(&all), &b.filled(kv_cols, &k), Some(&b.filled(kv_cols, &v)));
        let frequencies = b.load_norm(vec![turn; 4].into()).unwrap();
        let ones = b.load_norm(vec![1.0; dim].into()).unwrap();
        let norm = KeyNorm { weight: &ones, bias: None, eps: 0.0 };
        let mut index = b.index(pool, indexer).unwrap();
        for first in (0..all.len()).step_by(part) {
            let rows = first..all.len().min(first + part);
            let mut some = Batch::default();
            all.part(rows.clone(), &mut some);
            let (batch, mut angles) = (b.on_device(&some), b.tensor_f32(rows.len(), 8).unwrap());
            b.rope_angles(&frequencies, 1.0, &batch, &mut angles);
            let rotary = Rotary { angles: &angles, interleaved: false };
            let keys = b.filled(dim, &keys[rows.start * dim..rows.end * dim]);
            b.index_write(&mut index, &batch, indexer, (Some(&rotary), &norm, None), &keys);
        }
        let batch = b.on_device(&last);
        let (mut chosen, mut scores) =
            (b.chosen(indexer, last.len()).unwrap(), b.select_scratch(indexer, last.len()).unwrap());
        let queries = IndexQueries { q: &b.filled(indexer.num_heads * dim, &queries), weights: None };
        b.select(&index, &batch, indexer, &queries, &mut scores, &mut chosen);
        let (gathered, mut out) =
            (b.gathered(&kv, indexer, last.len()).unwrap(), b.filled(cols, &vec![9.0; last.len() * cols]));
        let choice = Choice { chosen: &chosen, gathered: &gathered };
        let softmax = Softmax { scale: 0.75, window: None, sinks: None, choice: Some(&choice) };
        b.attend(&kv, &batch, &softmax, &b.filled(cols, &q), &mut out);
        b.numbers(&out)
    }

    fn check(&self, sides: &Sides) {
        let all = self.sequences.iter().map(|(end, _)| end).sum();
        let (got, want) = both!(sides, |b| self.attended(b, all));
        let within = Within { each: ROUNDING, of_rms: 4.0 * ROUNDING, rms: 0.75 * ROUNDING };
        check(&format!("{:?}, {}, {:?}", self.indexer, self.bits, self.sequences), &got, &want, within);
        // Of angles no score is whole: the GPU is compared with itself.
        let turned = Self { turn: 0.3, ..*self };
        let whole = turned.attended(&sides.gpu, all);
        for part in [if all < 500 { 1 } else { 7 }, 130] {
            assert!(turned.attended(&sides.gpu, part) == whole, "{:?} in parts of {part}", self.indexer);
        }
    }
}

const LONG: [&[(usize, usize)]; 2] =
    [&[(1, 1), (192, 1), (193, 1), (600, 1)], &[(513, 2), (300, 40), (70, 70), (130, 3)]];

/// Each KV head has blocks of its own, the one that the query stands in among them.
#[test]
fn each_kv_head_attends_to_blocks_of_its_own() {
    need_gpu!();
    let sides = Sides::new();
    for (num_heads, unit, top_k, bits) in
        [(2, 64, 3, KvBits::Bf16), (3, 128, 2, KvBits::Int8), (1, 128, 4, KvBits::Bf16), (2, 24, 5, KvBits::Int8)]
    {
        let indexer = Indexer {
            num_heads,
            head_dim: 32,
            interleaved: false,
            unit,
            top_k,
            score: Score::Largest,
            candidates: None,
        };
        for sequences in LONG {
            Chosen { indexer: &indexer, kv_heads: num_heads, sequences, bits, turn: 0.0 }.check(&sides);
        }
    }
}

/// Whole units by the mean of their keys, and what a query sees after them.
#[test]
fn units_are_chosen_by_the_mean_of_their_keys() {
    need_gpu!();
    let sides = Sides::new();
    for (num_heads, head_dim, kv_heads, unit, top_k, bits) in [
        (8, 24, 2, 4, 6, KvBits::Bf16),
        (4, 128, 3, 16, 3, KvBits::Int8),
        (3, 32, 1, 64, 2, KvBits::Bf16),
        (2, 16, 2, 1, 40, KvBits::Bf16),
    ] {
        let indexer =
            Indexer { num_heads, head_dim, interleaved: false, unit, top_k, score: Score::Pooled, candidates: None };
        for &sequences in BATCHES[..2].iter().chain(&LONG[1..]) {
            Chosen { indexer: &indexer, kv_heads, sequences, bits, turn: 0.0 }.check(&sides);
        }
    }
}
