//! Batches of sequences that keep a state from step to step.

use moebius::backend::batch::Batch;

use crate::common::gpu::{ROUNDING, Within};

/// Tokens of each sequence in a step; their positions go on from step to step. A sequence's slot is its number, from
/// the last down.
const STEPS: &[[usize; 4]] = &[[5, 1, 133, 16], [1, 1, 1, 1], [3, 66, 1, 17], [1, 2, 3, 4]];

/// The batch of each step, and a seed for its numbers.
pub(crate) fn steps() -> impl Iterator<Item = (Batch, u64)> {
    let mut starts = [0; 4];
    STEPS.iter().enumerate().map(move |(i, step)| {
        let mut batch = Batch::default();
        for (s, &tokens) in step.iter().enumerate() {
            batch.push(&vec![1; tokens], starts[s], &[0; 4]).slot = 3 - s;
            starts[s] += tokens;
        }
        (batch, 80 + 10 * i as u64)
    })
}

/// Tokens of four sequences, some of them in chunks: of one, of some with an end of its own, of one and a token.
const CHUNKED: [[usize; 4]; 2] = [[300, 64, 33, 5], [127, 1, 65, 192]];

/// The sums differ by about 2^-16 before they are rounded to bf16, twice.
pub(crate) const IN_CHUNKS: Within = Within { each: 4.0 * ROUNDING, of_rms: ROUNDING, rms: 0.2 * ROUNDING };

/// The most tokens that [`in_parts`] runs at once.
pub(crate) const MOST: usize = 300;

/// What `run` gives for each sequence's tokens, at most `most` at once. It gets a batch, the seed of the numbers of all
/// of a step's tokens, how many these are, and which rows of them the batch has.
pub(crate) fn in_parts(
    most: usize,
    mut run: impl FnMut(&Batch, u64, usize, std::ops::Range<usize>) -> Vec<f32>,
) -> Vec<f32> {
    let (mut starts, mut all) = ([0; 4], Vec::new());
    for (step, lengths) in CHUNKED.iter().enumerate() {
        for (s, &tokens) in lengths.iter().enumerate() {
            let seed = 200 + 20 * step as u64 + 4 * s as u64;
            for first in (0..tokens).step_by(most) {
                let rows = first..tokens.min(first + most);
                let mut batch = Batch::default();
                batch.push(&vec![1; rows.len()], starts[s] + first, &[0; 16]).slot = s;
                all.extend(run(&batch, seed, tokens, rows));
            }
            starts[s] += tokens;
        }
    }
    all
}
