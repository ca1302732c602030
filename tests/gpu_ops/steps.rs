//! Ragged batches of four sequences that keep a state from step to step.

use moebius::backend::batch::Batch;

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
