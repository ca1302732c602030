//! What a model makes of a text: its perplexity, and how far its probabilities are from a reference's.
//!
//! ```text
//! text ─▶ windows ─▶ each_row(reference) ─▶ Rows, in an unnamed file
//!                 └▶ each_row(model) ──────────▶ Tally ─▶ Evaluation
//! ```
//!
//! The two models are never in memory together. A window is a sequence of its own; of its tokens all but the first are
//! scored, each by the probabilities after the tokens before it.

mod report;
mod rows;

use rayon::prelude::*;

use crate::backend::batch::Batch;
use crate::engine::capture::each_logits;
use crate::forward::block_pool::{BlockPool, BlockTable};
use crate::load::Loaded;
use crate::{Error, Result};

pub use report::{Comparison, Difference, Evaluation, Span};
pub use rows::Rows;

/// Cuts a text's tokens into windows of `length` tokens, each with `prefix` (a BOS token) in front. A rest of one token
/// has nothing to score and is left out.
pub fn windows(tokens: &[u32], prefix: &[u32], length: usize) -> Result<Vec<Vec<u32>>> {
    let Some(fresh) = length.checked_sub(prefix.len()).filter(|&fresh| fresh > 0 && length > 1) else {
        return Err(Error::Invalid(format!("--context {length} has no token to score: give at least 16")));
    };
    let windows = tokens.chunks(fresh).map(|part| [prefix, part].concat());
    let windows: Vec<Vec<u32>> = windows.filter(|window| window.len() > 1).collect();
    match windows.is_empty() {
        true => Err(Error::Invalid("the text has fewer than two tokens: give a longer one".into())),
        false => Ok(windows),
    }
}

/// Tokens that are scored.
pub fn scored(windows: &[Vec<u32>]) -> usize {
    windows.iter().map(|window| window.len() - 1).sum()
}

/// A scored token.
#[derive(Clone, Copy, Debug)]
pub struct Scored {
    /// Its window.
    pub window: usize,
    /// Its position in the window, at least 1.
    pub position: usize,
    /// Itself.
    pub token: u32,
}

/// Reads all windows. `emit` has, in order, some scored tokens and the logarithms of the probabilities that the model
/// gave in their places, `[n, vocab]`. Errors: a token that is not in the vocabulary; as the model's.
pub fn each_row(
    loaded: &mut Loaded,
    windows: &[Vec<u32>],
    progress: &dyn Fn(usize),
    mut emit: impl FnMut(&[Scored], &[f32]) -> Result<()>,
) -> Result<()> {
    let vocab = loaded.model.config().vocab_size;
    if let Some(token) = windows.iter().flatten().find(|&&token| token as usize >= vocab) {
        return Err(Error::Invalid(format!("token id {token} is not in the vocabulary of {vocab}")));
    }
    let (mut blocks, mut batch, mut done) = (BlockTable::default(), Batch::default(), 0);
    let longest = windows.iter().map(Vec::len).max().unwrap_or_default();
    if !BlockPool::new(loaded.kv_blocks).grow(&mut blocks, longest) {
        return Err(Error::Resources(format!("memory does not hold a window of {longest} tokens: lower --context")));
    }
    for (window, tokens) in windows.iter().enumerate() {
        for (i, part) in tokens.chunks(loaded.max_batch_tokens).enumerate() {
            let first = i * loaded.max_batch_tokens;
            batch.clear();
            batch.push(part, first, &blocks);
            loaded.model.forward(&batch, None)?;
            // After the last token nothing is known of the text.
            let rows = part.len().min(tokens.len() - 1 - first);
            let mut result = Ok(());
            each_logits(&mut *loaded.model, 0..rows, |row, logits| {
                let tokens: Vec<Scored> = (0..logits.len() / vocab)
                    .map(|n| first + row + n + 1)
                    .map(|position| Scored { window, position, token: tokens[position] })
                    .collect();
                let mut logits = logits.to_vec();
                logits.par_chunks_mut(vocab).for_each(log_probabilities);
                if result.is_ok() {
                    result = emit(&tokens, &logits);
                }
            })?;
            result?;
            done += rows;
            progress(done);
        }
    }
    Ok(())
}

/// `logits - log(sum(exp(logits)))`
fn log_probabilities(logits: &mut [f32]) {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    let all = f64::from(top) + sum.ln();
    logits.iter_mut().for_each(|x| *x = (f64::from(*x) - all) as f32);
}

/// What each scored token cost, and how far it was from the reference.
#[derive(Debug, Default)]
pub struct Tally {
    scored: Vec<Scored>,
    nats: Vec<f64>, // -log p
    against: Vec<Far>,
}

/// A scored token beside the reference's.
#[derive(Clone, Copy, Debug)]
struct Far {
    nats: f64,
    kl: f64,
    same_top: bool,
    p: [f32; 2], // of the token: here, there
}

impl Tally {
    /// Adds scored tokens, with the reference's rows where there is one.
    pub fn add(&mut self, scored: &[Scored], rows: &[f32], reference: Option<&[f32]>) {
        let vocab = rows.len() / scored.len();
        self.scored.extend_from_slice(scored);
        self.nats.extend(scored.iter().zip(rows.chunks(vocab)).map(|(s, row)| -f64::from(row[s.token as usize])));
        let Some(reference) = reference else { return };
        let pairs = rows.par_chunks(vocab).zip(reference.par_chunks(vocab)).zip(scored);
        self.against.par_extend(pairs.map(|((row, reference), scored)| {
            let of = |row: &[f32]| f64::from(row[scored.token as usize]);
            Far {
                nats: -of(reference),
                kl: divergence(reference, row),
                same_top: top(row) == top(reference),
                p: [of(row).exp() as f32, of(reference).exp() as f32],
            }
        }));
    }
}

/// `sum(p (log p - log q))`, never below 0.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let terms = p.iter().zip(q).map(|(&p, &q)| match f64::from(p).exp() {
        0.0 => 0.0, // and its logarithm may be infinite
        share => share * f64::from(p - q),
    });
    terms.sum::<f64>().max(0.0)
}

/// The likeliest token; of equals the lowest.
fn top(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, &x)| if x > row[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        let logs = |p: &[f64]| p.iter().map(|p| p.ln() as f32).collect::<Vec<_>>();
        let (p, q) = (logs(&[0.5, 0.25, 0.25]), logs(&[0.25, 0.25, 0.5]));
        assert!((divergence(&p, &q) - 0.25 * 2f64.ln()).abs() < 1e-7);
        assert_eq!(divergence(&p, &p), 0.0);
        // What the first never says costs nothing.
        assert!((divergence(&logs(&[1.0, 0.0]), &logs(&[0.5, 0.5])) - 2f64.ln()).abs() < 1e-7);
    }

    #[test]
    fn log_probabilities_sum_to_one_and_large_logits_are_no_trouble() {
        let mut row = vec![1000.0, 999.0, -1000.0, 998.5];
        log_probabilities(&mut row);
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(top(&row), 0);
    }

    #[test]
    fn windows_begin_with_the_prefix_and_leave_no_token_out() {
        let tokens: Vec<u32> = (10..21).collect();
        let cut = windows(&tokens, &[1], 5).expect("it can be cut");
        assert_eq!(cut, [vec![1, 10, 11, 12, 13], vec![1, 14, 15, 16, 17], vec![1, 18, 19, 20]]);
        assert_eq!(scored(&cut), 11);
        assert_eq!(windows(&tokens, &[], 5).expect("it can be cut").len(), 2, "a last token alone is left out");
        assert!(windows(&tokens, &[1], 1).is_err() && windows(&[7], &[], 5).is_err());
    }
}
