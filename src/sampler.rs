//! From a row of logits to a token.

use crate::random::Random;
use crate::{Error, Result};

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Drop tokens below this share of the best one's probability; 0 drops none.
    pub min_p: f32,
    /// Divides positive logits of tokens already seen (multiplies negative ones); 1 changes nothing.
    pub repetition_penalty: f32,
    /// Same seed, same prompt: same text. `None` draws one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, seed: None }
    }
}

/// Chooses tokens for one sequence.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    order: Vec<u32>, // scratch: token ids, best first as far as needed
}

impl Sampler {
    /// Without a seed in `params`, one is drawn from the clock.
    pub fn new(params: SamplingParams) -> Self {
        let seed = params.seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |d| d.as_nanos() as u64)
        });
        Self { params, seed, order: Vec::new() }
    }

    /// The next token after `tokens`. `logits` is `[vocab]` and is changed.
    ///
    /// Depends on nothing but its arguments and the seed: the same text comes out whatever else runs.
    /// Errors: `Error::Model` when the logits are not finite.
    pub fn sample(&mut self, logits: &mut [f32], tokens: &[u32]) -> Result<u32> {
        if self.params.repetition_penalty != 1.0 {
            self.penalize(logits, tokens);
        }
        let best = argmax(logits);
        if !logits[best].is_finite() {
            return Err(Error::Model("the model computed logits that are not finite: its weights or its precision are unusable".into()));
        }
        if self.params.temperature <= 0.0 {
            return Ok(best as u32);
        }
        let (max, temperature) = (logits[best], self.params.temperature);
        // Weights relative to the best token's, which is 1.
        logits.iter_mut().for_each(|l| *l = ((*l - max) / temperature).exp());
        let weights = &*logits;
        self.order.clear();
        self.order.extend((0..weights.len() as u32).filter(|&t| weights[t as usize] > 0.0 && weights[t as usize] >= self.params.min_p));
        self.keep_best(weights);
        let total: f64 = self.order.iter().map(|&t| weights[t as usize] as f64).sum();
        let mut rest = Random::at(self.seed, tokens.len() as u64).uniform() * total;
        for &token in &self.order {
            rest -= weights[token as usize] as f64;
            if rest < 0.0 {
                return Ok(token);
            }
        }
        Ok(self.order.last().copied().unwrap_or(best as u32))
    }

    fn penalize(&mut self, logits: &mut [f32], tokens: &[u32]) {
        self.order.clear();
        self.order.extend_from_slice(tokens);
        self.order.sort_unstable();
        self.order.dedup();
        for &token in &self.order {
            let l = &mut logits[token as usize];
            *l = if *l > 0.0 { *l / self.params.repetition_penalty } else { *l * self.params.repetition_penalty };
        }
    }

    /// Applies top-k and top-p to `order`.
    fn keep_best(&mut self, weights: &[f32]) {
        let SamplingParams { top_k, top_p, .. } = self.params;
        if top_k == 0 && top_p >= 1.0 {
            return;
        }
        let by_weight = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
        if top_k > 0 && top_k < self.order.len() {
            self.order.select_nth_unstable_by(top_k - 1, by_weight);
            self.order.truncate(top_k);
        }
        self.order.sort_unstable_by(by_weight);
        if top_p < 1.0 {
            let total: f64 = self.order.iter().map(|&t| weights[t as usize] as f64).sum();
            let mut sum = 0.0;
            let keep = self.order.iter().position(|&t| {
                sum += weights[t as usize] as f64;
                sum >= top_p as f64 * total
            });
            self.order.truncate(keep.map_or(self.order.len(), |i| i + 1));
        }
    }
}

/// Index of the largest logit, the lowest of equals; NaN is never the largest unless all are.
pub fn argmax(logits: &[f32]) -> usize {
    // The value in lanes, then its place: one running best would wait for itself at every logit. NaN is larger than nothing.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 32];
    let (chunks, rest) = logits.as_chunks::<32>();
    for chunk in chunks {
        for (lane, l) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *l);
        }
    }
    let largest = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger);
    logits.iter().position(|&l| l == largest).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(SamplingParams { seed: Some(7), ..params })
    }

    fn draw(params: SamplingParams, logits: &[f32], n: usize) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        let mut s = sampler(params);
        for i in 0..n {
            counts[s.sample(&mut logits.to_vec(), &vec![0; i]).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(sampler(SamplingParams::default()).sample(&mut [1.0, 3.0, 3.0], &[]).unwrap(), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let counts = draw(SamplingParams { temperature: 1.0, ..Default::default() }, &[0.0, (3f32).ln()], 4000);
        assert!((counts[1] as f64 / 4000.0 - 0.75).abs() < 0.03, "{counts:?}");
    }

    #[test]
    fn top_k_top_p_and_min_p_cut_the_tail() {
        let logits = [(0.5f32).ln(), (0.3f32).ln(), (0.15f32).ln(), (0.05f32).ln()];
        let hot = SamplingParams { temperature: 1.0, ..Default::default() };
        assert_eq!(draw(SamplingParams { top_k: 2, ..hot.clone() }, &logits, 500)[2..], [0, 0]);
        let p = draw(SamplingParams { top_p: 0.75, ..hot.clone() }, &logits, 500);
        assert!(p[1] > 0 && p[2..] == [0, 0], "{p:?}");
        let m = draw(SamplingParams { min_p: 0.25, ..hot }, &logits, 500);
        assert!(m[2] > 0 && m[3] == 0, "{m:?}");
    }

    #[test]
    fn repetition_penalty_pushes_seen_tokens_down() {
        let mut s = sampler(SamplingParams { repetition_penalty: 2.0, ..Default::default() });
        assert_eq!(s.sample(&mut [1.0, 1.5], &[1, 1]).unwrap(), 0, "seen twice, penalized once");
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        assert!(sampler(SamplingParams::default()).sample(&mut [f32::NAN, f32::NAN], &[]).is_err());
    }
}
