//! Entries of several positions, made of tokens in steps, and attention over them and a window.

use moebius::backend::batch::Batch;
use moebius::backend::{Compress, CompressRule, IndexQueries, Load, Recur, Seen, Select};
use moebius::config::KvBits;
use moebius::model::{
    ChosenBy, Compressed, Compressor, EntryKeys, Facts, Indexer, Rope, RopeScaling, Score, Selection,
};

use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, need_gpu, random};

/// As attention over latents; rows are rounded on the way, and where both sides round otherwise, so are scores.
const ENTRIES: Within = Within { each: ROUNDING, of_rms: 12.0 * ROUNDING, rms: 1.5 * ROUNDING };

/// Rounded to bf16 before they are rotated as well.
const TWICE: Within = Within { each: 3.0 * ROUNDING, of_rms: 2.0 * ROUNDING, rms: ROUNDING };

/// Tokens of each sequence in a step; their positions go on from step to step. A sequence's slot is its number, from
/// the last down.
const STEPS: &[&[usize]] = &[&[5, 1, 133, 16], &[1, 1, 1, 1], &[3, 66, 1, 17], &[1, 2, 3, 4], &[30, 1, 9, 1]];

/// Blocks of a sequence.
const BLOCKS: u32 = 4;

struct Case {
    dim: usize,
    heads: usize,
    window: usize,
    ratio: usize,
    top_k: Option<usize>, // entries are chosen, and overlap
}

impl Case {
    fn config(&self) -> Compressed {
        let rope = Rope { dim: 8, theta: 1e4, interleaved: true, scaling: RopeScaling::None };
        let indexer = |top_k| Indexer {
            num_heads: 4,
            head_dim: 32,
            interleaved: true,
            unit: self.ratio,
            top_k,
            score: Score::Entries { latent: 8, keys: EntryKeys::OfPositions },
            candidates: None,
        };
        let selection = self.top_k.map(|top_k| Selection { by: ChosenBy::Own, indexer: indexer(top_k) });
        Compressed {
            num_heads: self.heads,
            head_dim: self.dim,
            q_lora_rank: 8,
            norms_queries: true,
            rope,
            window: self.window,
            groups: 1,
            o_lora_rank: 8,
            compressor: Some(Compressor {
                dim: self.dim,
                ratio: self.ratio,
                overlaps: self.top_k.is_some(),
                bias: true,
            }),
            borrows: false,
            selection,
        }
    }

    fn check(&self, sides: &Sides) {
        let (dim, heads) = (self.dim, self.heads);
        let config = self.config();
        let of = config.compressor.unwrap();
        let shape = config.state().unwrap();
        let (got, want) = both!(sides, |b| {
            let mut state = b.state(4, shape).unwrap();
            let pool = (STEPS[0].len() as u32 * BLOCKS) as usize;
            let (mut entries, scratch) =
                (b.entries(pool, of, KvBits::Bf16).unwrap(), b.entries_scratch(&config, 160).unwrap());
            let norm =
                |n: usize, seed| b.load_norm(random(n, seed).iter().map(|w| 1.0 + 0.3 * w).collect::<Vec<_>>().into());
            let (bias, weight) = (b.load_norm(random(of.ratio * of.width(), 2).into()).unwrap(), norm(dim, 3).unwrap());
            let (sinks, inv_freq) = (norm(heads, 4).unwrap(), b.load_norm(config.rope.inv_freq().into()).unwrap());
            let indexer = config.selection.as_ref().map(|selection| &selection.indexer);
            let mut index = indexer.map(|indexer| b.index(pool, indexer).unwrap());
            let mut chosen = indexer.map(|indexer| b.chosen(indexer, 160).unwrap());
            let (mut starts, mut rows, mut out) = ([0; 4], Vec::new(), Vec::new());
            for (i, step) in STEPS.iter().enumerate() {
                let mut batch = Batch::default();
                for (s, &tokens) in step.iter().enumerate() {
                    // From the last block down.
                    let blocks: Vec<u32> = (0..BLOCKS).rev().map(|block| s as u32 * BLOCKS + block).collect();
                    batch.push(&vec![1; tokens], starts[s], &blocks).slot = 3 - s;
                    starts[s] += tokens;
                }
                let (tokens, seed) = (batch.len(), 10 + 10 * i as u64);
                let on_device = b.on_device(&batch);
                let mut made = b.filled(dim, &vec![0.0; tokens * dim]);
                let rule = CompressRule {
                    compressor: of,
                    bias: &bias,
                    norm: &weight,
                    eps: 1e-6,
                    inv_freq: if of.overlaps { Some(&inv_freq) } else { None },
                    state: (0, shape.numbers),
                };
                b.compress(
                    &mut state,
                    &on_device,
                    &rule,
                    &b.filled(2 * of.width(), &random(tokens * 2 * of.width(), seed)),
                    &mut made,
                );
                if !of.overlaps {
                    b.rope_entries(&on_device, of.ratio, &inv_freq, &mut made);
                }
                b.entries_write(&mut entries, &on_device, &made);
                let numbers = b.numbers(&made);
                rows.extend(
                    batch
                        .positions
                        .iter()
                        .enumerate()
                        .filter(|(_, p)| of.ends_at(**p as usize))
                        .flat_map(|(t, _)| numbers[t * dim..(t + 1) * dim].to_vec()),
                );
                if let (Some(indexer), Some(index), Some(chosen)) = (indexer, &mut index, &mut chosen) {
                    // Small whole numbers: both sides have the same scores, and many that are equal.
                    let whole =
                        |n: usize, seed| -> Vec<f32> { random(n, seed).iter().map(|x| (x * 2.0).round()).collect() };
                    let width = indexer.num_heads * indexer.head_dim;
                    b.index_entries(index, &on_device, of.ratio, &b.filled(32, &whole(tokens * 32, seed + 1)));
                    let (mut scores, q, weights) = (
                        b.select_scratch(indexer, 160).unwrap(),
                        b.filled(width, &whole(tokens * width, seed + 2)),
                        b.filled_f32(indexer.num_heads, &whole(tokens * indexer.num_heads, seed + 3)),
                    );
                    let queries = IndexQueries { q: &q, weights: Some(&weights) };
                    b.select(index, &on_device, indexer, &queries, &mut scores, chosen);
                }
                let seen = Seen {
                    window: self.window,
                    entries: Some(&entries),
                    chosen: chosen.as_ref(),
                    scratch: &scratch,
                    scale: 1.0 / (dim as f32).sqrt(),
                    sinks: &sinks,
                };
                let (q, kv) = (
                    b.filled(heads * dim, &random(tokens * heads * dim, seed + 4)),
                    b.filled(dim, &random(tokens * dim, seed + 5)),
                );
                let mut of_step = b.filled(heads * dim, &vec![9.0; tokens * heads * dim]);
                b.attend_entries(&mut state, &on_device, &seen, (&q, &kv), &mut of_step);
                out.extend(b.numbers(&of_step));
            }
            (rows, out)
        });
        let what =
            format!("{heads} heads of {dim}, window {}, ratio {}, of which {:?}", self.window, self.ratio, self.top_k);
        let rounded = if of.overlaps { Within::BF16 } else { TWICE };
        check(&format!("entries, {what}"), &got.0, &want.0, rounded);
        check(&what, &got.1, &want.1, ENTRIES);
    }
}

#[test]
fn entries_are_made_kept_and_attended_to() {
    need_gpu!();
    let sides = Sides::new();
    for (dim, heads, window, ratio, top_k) in [
        (48, 4, 12, 4, Some(5)),
        (512, 20, 128, 4, Some(100)),
        (72, 17, 17, 24, None),
        (128, 4, 40, 128, None),
        (24, 3, 1, 1, None),
    ] {
        Case { dim, heads, window, ratio, top_k }.check(&sides);
    }
}
