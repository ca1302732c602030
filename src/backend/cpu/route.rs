//! Choosing experts: logits, scores, groups, top-k, weights. All in f32.

use std::cmp::Ordering;
use std::ops::Range;

use super::Cpu;
use super::load::RouterWeights;
use super::recur::softplus;
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;
use crate::backend::{Route, Routing};
use crate::kernel::Rows;
use crate::machine::workers::Shared;
use crate::model::{GroupScore, Groups, Router, Scoring};

/// Tokens up to which workers share the experts: with few tokens each, all would read all weights.
const FEW_TOKENS: usize = 64;

impl Cpu {
    /// `tokens`: whose experts a table has.
    fn route_rows(&self, w: &RouterWeights, router: &Router, x: &Tensor, tokens: Option<&[u32]>, out: &mut Routing) {
        let table = w.by_token.as_deref().zip(tokens);
        let (rows, k) = (x.rows(), x.cols());
        let experts = w.weight.len() / k;
        out.top_k = router.top_k;
        out.ids.resize(rows * router.top_k, 0);
        out.weights.resize(rows * router.top_k, 0.0);
        let mut scratch = self.router_scratch.borrow_mut();
        let (logits, kernel) = (scratch.take(rows * experts), self.kernel);
        let choose = |t: usize, logits: &mut [f32], ids: &mut [i32], weights: &mut [f32]| {
            for (logit, bias) in logits.iter_mut().zip(w.bias.iter().flatten()) {
                *logit += bias;
            }
            if let Some(cap) = router.softcap {
                logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
            }
            score(router.scoring, logits);
            match table {
                Some((table, tokens)) => {
                    let of_token = &table[tokens[t] as usize * ids.len()..];
                    ids.iter_mut().zip(of_token).for_each(|(id, given)| *id = *given as i32);
                }
                None => choose_one(router, logits, w.correction_bias.as_deref(), ids),
            }
            weigh(router, logits, ids, weights);
            if let Some(scale) = &w.expert_scale {
                weights.iter_mut().zip(&*ids).for_each(|(weight, &id)| *weight *= scale[id as usize]);
            }
        };
        let w = &w.weight;
        if rows == 1 {
            // The workers share the experts, so that every core reads a part of the weights.
            self.team.each_share(logits, 1, |_, mine, logits| {
                let w = Rows::new(&w[mine.start * k..mine.end * k], mine.len(), k);
                kernel.dot_f32(w, Rows::new(x.data(), 1, k), logits);
            });
            return choose(0, logits, &mut out.ids, &mut out.weights);
        }
        let (ids, weights) = (Shared::new(&mut out.ids), Shared::new(&mut out.weights));
        let choose_all = |tokens: Range<usize>, logits: &mut [f32]| {
            for (t, logits) in tokens.zip(logits.chunks_exact_mut(experts)) {
                let chosen = t * router.top_k..(t + 1) * router.top_k;
                // SAFETY: workers have disjoint shares of the tokens.
                #[allow(unsafe_code)]
                let (ids, weights) = unsafe { (ids.slice_mut(chosen.clone()), weights.slice_mut(chosen)) };
                choose(t, logits, ids, weights);
            }
        };
        if rows <= FEW_TOKENS {
            let logits = Shared::new(logits);
            return self.team.run(&|worker| {
                let mine = worker.share(experts);
                let w = Rows::new(&w[mine.start * k..mine.end * k], mine.len(), k);
                for t in 0..if mine.is_empty() { 0 } else { rows } {
                    // SAFETY: an expert is in one worker's share.
                    #[allow(unsafe_code)]
                    let logits = unsafe { logits.slice_mut(t * experts + mine.start..t * experts + mine.end) };
                    kernel.dot_f32(w, Rows::new(x.row(t), 1, k), logits);
                }
                worker.barrier();
                let mine = worker.share(rows);
                // SAFETY: after the barrier a token's logits belong to the worker in whose share it is.
                #[allow(unsafe_code)]
                choose_all(mine.clone(), unsafe { logits.slice_mut(mine.start * experts..mine.end * experts) });
            });
        }
        self.team.each_share(logits, experts, |_, mine, logits| {
            let x = Rows::new(&x.data()[mine.start * k..mine.end * k], mine.len(), k);
            kernel.dot_f32(Rows::new(w, experts, k), x, logits);
            choose_all(mine, logits);
        });
    }
}

impl Route for Cpu {
    type Routing = Routing;
    type Choices = Vec<i32>;

    fn routing(&self, max_tokens: usize, top_k: usize) -> Result<Routing> {
        let shape = [max_tokens, top_k];
        let mut routing = Routing { top_k, ids: self.heap.zeros(&shape)?, weights: self.heap.zeros(&shape)? };
        routing.ids.clear();
        routing.weights.clear();
        Ok(routing)
    }

    fn read_routing(&self, routing: &Routing, out: &mut Routing) -> Result<()> {
        out.clone_from(routing);
        Ok(())
    }

    fn route(&self, w: &RouterWeights, router: &Router, x: &Tensor, out: &mut Routing) {
        self.route_rows(w, router, x, None, out);
    }

    fn route_by_token(&self, w: &RouterWeights, router: &Router, batch: &Batch, x: &Tensor, out: &mut Routing) {
        self.route_rows(w, router, x, Some(&batch.tokens), out);
    }

    fn choices(&self, choices: usize) -> Result<Vec<i32>> {
        self.heap.zeros(&[choices])
    }

    fn set_choices(&self, to: &mut Vec<i32>, ids: &[i32]) {
        to[..ids.len()].copy_from_slice(ids);
    }

    fn choose_experts(&self, choices: &Vec<i32>, first: usize, out: &mut Routing) {
        let chosen = &choices[first..][..out.ids.len()];
        out.ids.copy_from_slice(chosen);
    }

    fn weigh_input(&self, routing: &mut Routing, h: &Tensor, out: &mut Tensor) {
        assert_eq!(routing.top_k, 1, "one expert of a token");
        let (kernel, weights) = (self.kernel, &routing.weights);
        self.each_row(out, |t, out, _| {
            out.copy_from_slice(h.row(t));
            kernel.scale(out, weights[t]);
        });
        routing.weights.fill(1.0);
    }
}

/// Logits become scores.
fn score(scoring: Scoring, logits: &mut [f32]) {
    match scoring {
        Scoring::Sigmoid => logits.iter_mut().for_each(|s| *s = 1.0 / (1.0 + (-*s).exp())),
        Scoring::SqrtSoftplus => logits.iter_mut().for_each(|s| *s = softplus(*s).sqrt()),
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|s| *s = (*s - max).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|s| *s /= sum);
        }
    }
}

/// One token's experts, best first.
fn choose_one(router: &Router, scores: &[f32], bias: Option<&[f32]>, ids: &mut [i32]) {
    let rank = |e: usize| scores[e] + bias.map_or(0.0, |b| b[e]);
    let allowed = |e: usize, open: u64| match &router.groups {
        Some(g) => open >> (e / (scores.len() / g.count)) & 1 == 1,
        None => true,
    };
    let open = router.groups.as_ref().map_or(0, |g| best_groups(g, scores.len(), &rank));

    // The best so far, best first. Of equals the lowest id, so that the choice does not depend on the order of looking.
    let mut chosen = 0;
    for e in (0..scores.len()).filter(|&e| allowed(e, open)) {
        let better = |other: i32| rank(e) > rank(other as usize);
        if chosen < ids.len() {
            chosen += 1;
        } else if !better(ids[chosen - 1]) {
            continue;
        }
        let mut slot = chosen - 1;
        while slot > 0 && better(ids[slot - 1]) {
            ids[slot] = ids[slot - 1];
            slot -= 1;
        }
        ids[slot] = e as i32;
    }
    assert_eq!(chosen, ids.len(), "the configuration allows top_k experts");
}

/// The weights of chosen experts.
fn weigh(router: &Router, scores: &[f32], ids: &[i32], weights: &mut [f32]) {
    for (weight, &id) in weights.iter_mut().zip(ids) {
        *weight = scores[id as usize];
    }
    if router.normalize {
        // The guard is HF's, against a sum of zero.
        let sum: f32 = weights.iter().sum::<f32>() + if router.scoring == Scoring::Softmax { 0.0 } else { 1e-20 };
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= router.scaling);
}

/// The best groups, as a set of bits.
fn best_groups(groups: &Groups, experts: usize, rank: &dyn Fn(usize) -> f32) -> u64 {
    let size = experts / groups.count;
    let score =
        |g: usize| {
            let members = (g * size..(g + 1) * size).map(rank);
            match groups.score {
                GroupScore::Max => members.fold(f32::NEG_INFINITY, f32::max),
                GroupScore::TopTwoSum => {
                    let (a, b) = members.fold((f32::NEG_INFINITY, f32::NEG_INFINITY), |(a, b), v| {
                        if v > a { (v, a) } else { (a, b.max(v)) }
                    });
                    a + b
                }
            }
        };
    let mut open = 0u64;
    for _ in 0..groups.top_k {
        let best = (0..groups.count)
            .filter(|g| open >> g & 1 == 0)
            .max_by(|&a, &b| score(a).partial_cmp(&score(b)).unwrap_or(Ordering::Equal).then(b.cmp(&a)))
            .expect("there are as many groups as are kept");
        open |= 1 << best;
    }
    open
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router() -> Router {
        Router { correction_bias: true, normalize: true, scaling: 2.5, ..Router::new(2, Scoring::Sigmoid) }
    }

    fn choose(router: &Router, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
        let (mut ids, mut weights) = (vec![0; router.top_k], vec![0.0; router.top_k]);
        let mut scores = logits.to_vec();
        score(router.scoring, &mut scores);
        choose_one(router, &scores, bias, &mut ids);
        weigh(router, &scores, &ids, &mut weights);
        (ids, weights)
    }

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        let (ids, weights) = choose(&router(), &[0.0, 0.1, -3.0, 0.2], Some(&[0.0, 0.0, 9.0, 0.0]));
        assert_eq!(ids, [2, 3]);
        assert!(weights[0] < weights[1], "the biased expert keeps its small score");
        assert!((weights.iter().sum::<f32>() - 2.5).abs() < 1e-5, "renormalized, then scaled once");
    }

    #[test]
    fn groups_limit_the_choice() {
        let groups = |score| Some(Groups { count: 2, top_k: 1, score });
        let logits = [4.0, -9.0, 3.0, 2.9];
        let by_max = Router { groups: groups(GroupScore::Max), ..router() };
        assert_eq!(choose(&by_max, &logits, None).0, [0, 1]);
        let by_two = Router { groups: groups(GroupScore::TopTwoSum), ..router() };
        assert_eq!(choose(&by_two, &logits, None).0, [2, 3]);
    }

    #[test]
    fn softmax_is_over_all_experts() {
        let plain = Router { scoring: Scoring::Softmax, normalize: false, scaling: 1.0, ..router() };
        let (ids, weights) = choose(&plain, &[1.0, 1.0, 1.0, 1.0], None);
        assert_eq!((ids, weights), (vec![0, 1], vec![0.25, 0.25]));
    }
}
