//! From a row of logits to a token.

use crate::backend::shortlist::{KEPT, RowShortlister, largest_of};
use crate::backend::tensor::Shortlist;
use crate::kernel::random::Random;
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
    /// Taken off the logits of tokens that the answer has.
    pub presence_penalty: f32,
    /// Taken off the logits of tokens for each time that the answer has them.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same prompt: same text. `None` draws one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// What a request says about sampling; where it says nothing, the model's own defaults hold.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // as those of `SamplingParams`
pub struct SamplingOverrides {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<usize>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Option<Vec<(u32, f32)>>,
    pub seed: Option<u64>,
}

impl SamplingOverrides {
    /// `defaults` with these in their place.
    pub fn over(self, defaults: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: self.logit_bias.unwrap_or_else(|| defaults.logit_bias.clone()),
            seed: self.seed.or(defaults.seed),
        }
    }
}

/// What an answer may say next: a grammar, say.
pub trait Constraint: Send + std::fmt::Debug {
    /// Sets the logits `[vocab]` of tokens that may not come next to -inf.
    fn mask(&mut self, logits: &mut [f32]) -> Result<()>;
    /// Takes note of the token that came.
    fn accept(&mut self, token: u32) -> Result<()>;
    /// Nothing may follow: the answer is complete.
    fn is_complete(&mut self) -> bool;
    /// The same for another answer that has said as much.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// How likely the model held a token to be, and which others it held to be likely, before any penalty, bias,
/// temperature or constraint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// The likeliest tokens with theirs, best first.
    pub top: Vec<(u32, f32)>,
}

/// Chooses tokens for one sequence.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    constraint: Option<Box<dyn Constraint>>,
    logprobs: Option<usize>,     // how many of the likeliest are wanted
    shortlister: RowShortlister, // scratch
    order: Vec<u32>,             // scratch: token ids, best first as far as needed
    raw: Vec<f32>,               // scratch: logits as the model gave them
}

/// What comes at a place of the ranking.
enum Rank {
    /// A token, and its weight beside the best one's, which is 1.
    Token(u32, f32),
    /// The tokens are at an end.
    End,
    /// More than is known.
    Unknown,
}

impl Sampler {
    /// Without a seed in `params`, one is drawn from the clock.
    pub fn new(params: SamplingParams, constraint: Option<Box<dyn Constraint>>, logprobs: Option<usize>) -> Self {
        let seed = params.seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |d| d.as_nanos() as u64)
        });
        let shortlister = RowShortlister::default();
        Self { params, seed, constraint, logprobs, shortlister, order: Vec::new(), raw: Vec::new() }
    }

    /// At which inverse temperature a [`Shortlist`] helps; `None`: whole rows are needed.
    pub fn shortlists_at(&self) -> Option<f32> {
        if self.changes_logits() || self.logprobs.is_some() {
            return None;
        }
        Some(if self.params.temperature > 0.0 { 1.0 / self.params.temperature } else { 1.0 })
    }

    fn changes_logits(&self) -> bool {
        self.penalizes() || self.constraint.is_some()
    }

    fn penalizes(&self) -> bool {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, ref logit_bias, .. } =
            self.params;
        repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0 || !logit_bias.is_empty()
    }

    /// Takes note of the token that was chosen. Returns whether nothing may follow.
    ///
    /// Errors: `Error::Model` when the constraint does not allow it (a bug).
    pub fn accept(&mut self, token: u32) -> Result<bool> {
        let Some(constraint) = &mut self.constraint else { return Ok(false) };
        constraint.accept(token)?;
        Ok(constraint.is_complete())
    }

    /// As [`sample`](Sampler::sample), from a shortlist at the temperature that
    /// [`shortlists_at`](Sampler::shortlists_at) asks for; `None`: the list does not reach far enough.
    pub fn sample_shortlist(&self, list: &Shortlist, tokens: &[u32]) -> Result<Option<u32>> {
        if list.best.first().is_none_or(|(_, logit)| !logit.is_finite()) {
            return Err(not_finite());
        }
        Ok(draw_listed(&self.params, list, self.uniform(tokens)))
    }

    /// What decides on the token after `tokens`.
    fn uniform(&self, tokens: &[u32]) -> f64 {
        Random::at(self.seed, tokens.len() as u64).uniform()
    }

    /// The next token after `tokens`, of which `prompt_tokens` are the prompt's. `logits` is `[vocab]`; penalties and
    /// constraint change it.
    ///
    /// Depends on nothing but its arguments and the seed: the same text comes out whatever else runs.
    /// Errors: `Error::Model` when the logits are not finite, or no token is allowed.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        tokens: &[u32],
        prompt_tokens: usize,
    ) -> Result<(u32, Option<Box<Logprobs>>)> {
        let mut best = argmax(logits);
        if !logits[best].is_finite() {
            return Err(not_finite());
        }
        if self.changes_logits() {
            if self.logprobs.is_some() {
                self.raw.clear();
                self.raw.extend_from_slice(logits);
            }
            if self.penalizes() {
                self.penalize(logits, tokens, prompt_tokens);
            }
            if let Some(constraint) = &mut self.constraint {
                constraint.mask(logits)?;
            }
            best = argmax(logits);
        }
        let token = self.choose(logits, best, tokens)?;
        let Some(top) = self.logprobs else { return Ok((token, None)) };
        let raw = if self.changes_logits() { &self.raw[..] } else { &*logits };
        Ok((token, Some(Box::new(logprobs(raw, token, top, &mut self.shortlister, &mut self.order)))))
    }

    /// From logits as they count, of which `best` is the largest.
    fn choose(&mut self, logits: &[f32], best: usize, tokens: &[u32]) -> Result<u32> {
        if !logits[best].is_finite() {
            return Err(Error::Model("nothing that the model can say fits the grammar of this request".into()));
        }
        if self.params.temperature <= 0.0 {
            return Ok(best as u32);
        }
        let uniform = self.uniform(tokens);
        let listed = match self.shortlists_at() {
            Some(_) => None, // the device's list has not reached far enough
            None => draw_listed(&self.params, self.shortlister.list(logits, 1.0 / self.params.temperature), uniform),
        };
        Ok(listed.unwrap_or_else(|| self.choose_of_all(logits, best, uniform)))
    }

    /// As [`choose`](Sampler::choose), whatever the draw falls on.
    fn choose_of_all(&mut self, logits: &[f32], best: usize, uniform: f64) -> u32 {
        let Self { params, order, .. } = self;
        let weight = |token: u32| weight(logits[token as usize], logits[best], params.temperature);
        let mut total = 0.0;
        order.clear();
        order.extend((0..logits.len() as u32).filter(|&token| {
            let weight = weight(token);
            let counts = weight > 0.0 && weight >= params.min_p;
            if counts {
                total += f64::from(weight);
            }
            counts
        }));
        // Ranked as far as the draw looks, more at a time the further it gets.
        let mut ranked = 0;
        let rank = |i: usize| {
            while i >= ranked && ranked < order.len() {
                let rest = &mut order[ranked..];
                let some = (7 * ranked).max(KEPT).min(rest.len());
                rank_first(rest, some, logits);
                ranked += some;
            }
            order.get(i).map_or(Rank::End, |&token| Rank::Token(token, weight(token)))
        };
        draw(params, Some(total), uniform, rank).unwrap_or(best as u32)
    }

    /// Repetition counts prompt and answer, presence and frequency the answer alone, as other servers have it.
    fn penalize(&mut self, logits: &mut [f32], tokens: &[u32], prompt_tokens: usize) {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, ref logit_bias, .. } =
            self.params;
        let mut each = |tokens: &[u32], change: &dyn Fn(f32, usize) -> f32| {
            self.order.clear();
            self.order.extend_from_slice(tokens);
            self.order.sort_unstable();
            for alike in self.order.chunk_by(|a, b| a == b) {
                let logit = &mut logits[alike[0] as usize];
                *logit = change(*logit, alike.len());
            }
        };
        if repetition_penalty != 1.0 {
            each(tokens, &|l, _| if l > 0.0 { l / repetition_penalty } else { l * repetition_penalty });
        }
        if presence_penalty != 0.0 || frequency_penalty != 0.0 {
            each(&tokens[prompt_tokens..], &|l, count| l - presence_penalty - frequency_penalty * count as f32);
        }
        for &(token, bias) in logit_bias {
            logits[token as usize] += bias;
        }
    }
}

/// `logits` is `[vocab]`, as the model gave them; `top` of the likeliest are wanted. The others are scratch.
fn logprobs(
    logits: &[f32],
    token: u32,
    top: usize,
    shortlister: &mut RowShortlister,
    order: &mut Vec<u32>,
) -> Logprobs {
    let list = shortlister.list(logits, 1.0);
    let (max, log_total) = (list.best[0].1, list.total.ln());
    let logprob = |logit: f32| (f64::from(logit - max) - log_total) as f32;
    let logit = |token: u32| logits[token as usize];
    let top = if top <= KEPT {
        list.best.iter().take(top).map(|&(token, logit)| (token, logprob(logit))).collect()
    } else {
        order.clear();
        order.extend((0..logits.len() as u32).filter(|&token| !logit(token).is_nan()));
        let top = top.min(order.len());
        rank_first(order, top, logits);
        order[..top].iter().map(|&token| (token, logprob(logit(token)))).collect()
    };
    Logprobs { logprob: logprob(logit(token)), top }
}

/// Brings the `first` of `tokens` that a [`Shortlist`] would have first to the front, in its order.
fn rank_first(tokens: &mut [u32], first: usize, logits: &[f32]) {
    // Zeros are equal whatever their signs.
    let logit = |token: u32| logits[token as usize] + 0.0;
    let best_first = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
    if first < tokens.len() {
        tokens.select_nth_unstable_by(first, best_first);
    }
    tokens[..first].sort_unstable_by(best_first);
}

/// Of a token beside the best one, whose weight is 1.
fn weight(logit: f32, max: f32, temperature: f32) -> f32 {
    ((logit - max) / temperature).exp()
}

fn not_finite() -> Error {
    Error::Model("the model computed logits that are not finite: its weights or its precision are unusable".into())
}

/// The token that `uniform` falls on if `list` reaches so far. Its best logit is finite.
///
/// The list's total is a sum of sums in f32, that of [`Sampler::choose_of_all`] one in f64: where all tokens are kept,
/// or `top_p` of all, a draw within some 1e-7 of the boundary between two tokens may fall on the other one.
fn draw_listed(params: &SamplingParams, list: &Shortlist, uniform: f64) -> Option<u32> {
    let &(best, max) = list.best.first()?;
    let SamplingParams { temperature, min_p, .. } = *params;
    if temperature <= 0.0 {
        return Some(best);
    }
    let weight = |logit: f32| weight(logit, max, temperature);
    let mut total = Some(list.total);
    if min_p > 0.0 {
        // What others weigh that are dropped is not known, but where the list ends below `min_p` it has all that are
        // not.
        let ends = list.best.last().is_some_and(|&(_, logit)| weight(logit) < min_p);
        total = ends
            .then(|| list.best.iter().map(|&(_, logit)| weight(logit)).filter(|&w| w >= min_p).map(f64::from).sum());
    }
    let rank = |i: usize| match list.best.get(i) {
        Some(&(token, logit)) => match weight(logit) {
            w if w > 0.0 && w >= min_p => Rank::Token(token, w),
            _ => Rank::End,
        },
        None => Rank::Unknown,
    };
    draw(params, total, uniform, rank)
}

/// The token that `uniform`, in [0, 1), falls on, best first, after top-k and top-p. `total`: of all weights, if it is
/// known. `None`: it takes more than is known.
fn draw(params: &SamplingParams, total: Option<f64>, uniform: f64, mut rank: impl FnMut(usize) -> Rank) -> Option<u32> {
    let limit = if params.top_k == 0 { usize::MAX } else { params.top_k };
    let mut walk = |stop: &mut dyn FnMut(u32, f64) -> bool| {
        let mut last = None;
        for i in 0..limit {
            match rank(i) {
                Rank::Token(token, weight) => {
                    last = Some(token);
                    if stop(token, f64::from(weight)) {
                        break;
                    }
                }
                Rank::End => break,
                Rank::Unknown => return None,
            }
        }
        last
    };
    let total = match limit {
        usize::MAX => total?,
        _ => {
            let mut sum = 0.0;
            walk(&mut |_, weight| {
                sum += weight;
                false
            })?;
            sum
        }
    };
    let mut kept = total;
    if params.top_p < 1.0 {
        kept = 0.0;
        walk(&mut |_, weight| {
            kept += weight;
            kept >= f64::from(params.top_p) * total
        })?;
    }
    let (mut sum, target) = (0.0, uniform * kept);
    walk(&mut |_, weight| {
        sum += weight;
        sum > target || sum >= kept
    })
}

/// Index of the largest logit, the lowest of equals; NaN is never the largest unless all are.
pub fn argmax(logits: &[f32]) -> usize {
    // The value, then its place: one running best would wait for itself at every logit.
    const RUN: usize = 512;
    let (mut largest, mut first) = (f32::NEG_INFINITY, 0);
    for (run, logits) in logits.chunks(RUN).enumerate() {
        let m = largest_of(logits);
        if m > largest {
            (largest, first) = (m, run * RUN);
        }
    }
    logits[first..].iter().position(|&l| l == largest).map_or(0, |at| first + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(SamplingParams { seed: Some(7), ..params }, None, None)
    }

    fn draw(params: SamplingParams, logits: &[f32], n: usize) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        let mut s = sampler(params);
        for i in 0..n {
            counts[s.sample(&mut logits.to_vec(), &vec![0; i], i).unwrap().0 as usize] += 1;
        }
        counts
    }

    #[test]
    fn what_a_request_does_not_say_is_the_models_own() {
        let own = SamplingParams { temperature: 0.6, top_k: 20, seed: Some(3), ..Default::default() };
        assert_eq!(SamplingOverrides::default().over(&own), own);
        let greedy = SamplingOverrides { temperature: Some(0.0), seed: Some(4), ..Default::default() };
        assert_eq!(greedy.over(&own), SamplingParams { temperature: 0.0, seed: Some(4), ..own });
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(sampler(SamplingParams::default()).sample(&mut [1.0, 3.0, 3.0], &[], 0).unwrap().0, 1);
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
        assert_eq!(s.sample(&mut [1.0, 1.5], &[1, 1], 2).unwrap().0, 0, "seen twice, penalized once");
    }

    #[test]
    fn a_shortlist_gives_what_the_whole_row_gives() {
        let mut random = Random(3);
        let hot = SamplingParams { temperature: 0.8, ..Default::default() };
        let cases = [
            SamplingParams::default(),
            hot.clone(),
            SamplingParams { top_k: 20, ..hot.clone() },
            SamplingParams { top_p: 0.9, ..hot.clone() },
            SamplingParams { top_p: 0.5, top_k: 50, min_p: 0.01, ..hot.clone() },
            SamplingParams { min_p: 0.05, ..hot.clone() },
            SamplingParams { top_k: 1000, ..hot },
        ];
        let mut decided = [0; 7];
        for round in 0..200 {
            let logits: Vec<f32> = (0..2000).map(|_| 12.0 * (random.uniform() as f32).powi(8)).collect();
            for (case, params) in cases.iter().enumerate() {
                let mut s = sampler(params.clone());
                let tokens = vec![0; round];
                let at = f64::from(s.shortlists_at().unwrap());
                let mut best: Vec<(u32, f32)> = logits.iter().enumerate().map(|(t, &l)| (t as u32, l)).collect();
                best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                let total = logits.iter().map(|&l| (f64::from(l - best[0].1) * at).exp()).sum();
                best.truncate(64);
                let short = s.sample_shortlist(&Shortlist { best, total }, &tokens).unwrap();
                let whole = s.sample(&mut logits.clone(), &tokens, round).unwrap().0;
                assert!(short.is_none_or(|short| short == whole), "{params:?}: {short:?} and {whole}");
                decided[case] += usize::from(short.is_some());
            }
        }
        assert_eq!((decided[0], decided[2], decided[6]), (200, 200, 0), "{decided:?}");
        assert!(decided.iter().take(6).all(|&n| n > 20), "{decided:?}");
    }

    #[test]
    fn a_shortlist_that_is_not_finite_is_an_error() {
        let list = Shortlist { best: vec![(3, f32::NEG_INFINITY)], total: f64::NAN };
        assert!(sampler(SamplingParams::default()).sample_shortlist(&list, &[]).is_err());
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        assert!(sampler(SamplingParams::default()).sample(&mut [f32::NAN, f32::NAN], &[], 0).is_err());
    }

    #[test]
    fn presence_and_frequency_count_the_answer_alone() {
        let logits = [1.0, 1.5, 1.4, 0.0];
        let pick =
            |params: SamplingParams, tokens: &[u32]| sampler(params).sample(&mut logits.to_vec(), tokens, 2).unwrap().0;
        let presence = SamplingParams { presence_penalty: 0.2, ..Default::default() };
        assert_eq!((pick(presence.clone(), &[1, 1]), pick(presence, &[1, 1, 1])), (1, 2));
        let frequency = SamplingParams { frequency_penalty: 0.2, ..Default::default() };
        assert_eq!((pick(frequency.clone(), &[0, 0, 1, 2]), pick(frequency, &[0, 0, 1, 2, 1, 1, 2, 2])), (1, 0));
        let bias = SamplingParams { logit_bias: vec![(3, 2.0), (1, -100.0)], ..Default::default() };
        assert_eq!(pick(bias, &[0, 0]), 3);
    }

    #[test]
    fn logprobs_are_the_models_own() {
        let logits = [(0.5f32).ln(), (0.3f32).ln(), (0.15f32).ln(), (0.05f32).ln()];
        let bias = SamplingParams { logit_bias: vec![(3, 100.0)], ..Default::default() };
        let (token, logprobs) = Sampler::new(bias, None, Some(2)).sample(&mut logits.to_vec(), &[], 0).unwrap();
        let Logprobs { logprob, top } = *logprobs.unwrap();
        assert_eq!((token, top[0].0, top[1].0, top.len()), (3, 0, 1, 2));
        for (got, want) in [(logprob, 0.05f32), (top[0].1, 0.5), (top[1].1, 0.3)] {
            assert!((got - want.ln()).abs() < 1e-5, "{got} {want}");
        }
        let (_, logprobs) =
            Sampler::new(SamplingParams::default(), None, Some(9)).sample(&mut logits.to_vec(), &[], 0).unwrap();
        assert_eq!(logprobs.unwrap().top.len(), 4);
    }

    /// Allows some tokens.
    #[derive(Debug)]
    struct Allows(fn(usize) -> bool);

    impl Constraint for Allows {
        fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
            let others = logits.iter_mut().enumerate().filter(|(i, _)| !self.0(*i));
            others.for_each(|(_, l)| *l = f32::NEG_INFINITY);
            Ok(())
        }

        fn accept(&mut self, _: u32) -> Result<()> {
            Ok(())
        }

        fn is_complete(&mut self) -> bool {
            true
        }

        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(Self(self.0))
        }
    }

    #[test]
    fn a_constraint_has_the_last_word() {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, logit_bias: vec![(0, 50.0)], ..Default::default() };
            let mut s = Sampler::new(params, Some(Box::new(Allows(|token| token == 2))), None);
            assert_eq!(s.sample(&mut [9.0, 1.0, -5.0], &[], 0).unwrap().0, 2);
            assert!(s.shortlists_at().is_none() && s.accept(2).unwrap());
        }
        let error = Sampler::new(SamplingParams::default(), Some(Box::new(Allows(|_| false))), None)
            .sample(&mut [1.0], &[], 0)
            .unwrap_err();
        assert!(error.to_string().contains("grammar"), "{error}");
    }

    /// Rows of all kinds, small and large.
    fn rows(random: &mut Random) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for cols in [1, 5, 64, 65, 2000, 20_011] {
            for kind in 0..6 {
                let number = |_| {
                    let uniform = random.uniform() as f32;
                    match kind {
                        0 => 12.0 * uniform.powi(8),
                        1 => (4.0 * uniform).floor(), // many are equal
                        2 if uniform < 0.1 => f32::NAN,
                        2 if uniform < 0.9 => f32::NEG_INFINITY,
                        2 => 100.0 * uniform,
                        3 if uniform < 0.5 => -0.0, // as large as the others
                        3 => 0.0,
                        4 => f32::NEG_INFINITY,
                        _ => f32::NAN,
                    }
                };
                rows.push((0..cols).map(number).collect());
            }
        }
        rows
    }

    /// The obvious twin of [`argmax`], by which NaN is the smallest.
    fn largest(row: &[f32]) -> usize {
        let number = |t: usize| if row[t].is_nan() { f32::NEG_INFINITY } else { row[t] };
        (1..row.len()).fold(0, |best, t| if number(t) > number(best) { t } else { best })
    }

    #[test]
    fn argmax_is_the_first_of_the_largest() {
        for row in rows(&mut Random(11)) {
            let got = argmax(&row);
            let is_largest = row.iter().all(|l| l.is_nan() || *l <= row[got]);
            assert!(is_largest || row.iter().all(|l| l.is_nan()), "{got} of {}", row.len());
            assert!(row[..got].iter().all(|l| l.is_nan() || *l < row[got]), "{got} of {}", row.len());
        }
    }

    #[test]
    fn sample_gives_what_all_logits_give() {
        let hot = SamplingParams { temperature: 0.7, ..Default::default() };
        let cases = [
            SamplingParams::default(),
            hot.clone(),
            SamplingParams { top_k: 20, top_p: 0.8, ..hot.clone() },
            SamplingParams { top_k: 64, ..hot.clone() },
            SamplingParams { top_p: 0.9, temperature: 0.3, ..hot.clone() },
            SamplingParams { min_p: 0.05, ..hot.clone() },
            SamplingParams { top_k: 100, ..hot },
        ];
        let (mut random, mut listed, mut not_finite, mut unfit) = (Random(13), [0; 7], 0, 0);
        for round in 0..20 {
            for row in rows(&mut random) {
                let tokens: Vec<u32> = (0..round).map(|_| (random.uniform() * row.len() as f64) as u32).collect();
                for (case, params) in cases.iter().enumerate() {
                    let third: fn(usize) -> bool = |token| token.is_multiple_of(3);
                    let few: fn(usize) -> bool = |token| token.is_multiple_of(700);
                    for (penalizes, allows) in [(false, None), (true, None), (true, Some(third)), (false, Some(few))] {
                        let mut params = params.clone();
                        if penalizes {
                            (params.presence_penalty, params.repetition_penalty) = (0.5, 1.1);
                            params.logit_bias = vec![(0, 1.5)];
                        }
                        let constraint = allows.map(|allows| Box::new(Allows(allows)) as Box<dyn Constraint>);
                        let mut s = Sampler::new(SamplingParams { seed: Some(7), ..params }, constraint, None);
                        let got = s.sample(&mut row.clone(), &tokens, tokens.len() / 2);
                        if !row[largest(&row)].is_finite() {
                            assert!(got.unwrap_err().to_string().contains("not finite"));
                            not_finite += 1;
                            continue;
                        }
                        let mut logits = row.clone();
                        if penalizes {
                            s.penalize(&mut logits, &tokens, tokens.len() / 2);
                        }
                        if let Some(constraint) = &mut s.constraint {
                            constraint.mask(&mut logits).unwrap();
                        }
                        let best = largest(&logits);
                        if !logits[best].is_finite() {
                            assert!(got.unwrap_err().to_string().contains("grammar"));
                            unfit += 1;
                            continue;
                        }
                        let uniform = s.uniform(&tokens);
                        let want = match s.params.temperature > 0.0 {
                            true => s.choose_of_all(&logits, best, uniform),
                            false => best as u32,
                        };
                        assert_eq!(got.unwrap().0, want, "{:?}, {:?}, {} logits", s.params, s.constraint, row.len());
                        let list = s.shortlister.list(&logits, 1.0 / s.params.temperature.max(0.1));
                        listed[case] += usize::from(draw_listed(&s.params, list, uniform).is_some());
                    }
                }
            }
        }
        assert!(not_finite > 0 && unfit > 0 && listed.iter().all(|&n| n > 100), "{not_finite} {unfit} {listed:?}");
    }

    #[test]
    fn logprobs_are_those_of_sorted_logits() {
        for row in rows(&mut Random(17)) {
            if !row[largest(&row)].is_finite() {
                continue;
            }
            let mut sorted: Vec<u32> = (0..row.len() as u32).filter(|&t| !row[t as usize].is_nan()).collect();
            let logit = |t: u32| f64::from(row[t as usize]);
            sorted.sort_by(|&a, &b| logit(b).partial_cmp(&logit(a)).unwrap());
            let log_sum = sorted.iter().map(|&t| (logit(t) - logit(sorted[0])).exp()).sum::<f64>().ln();
            let is_near = |token: u32, got: f32| {
                let want = logit(token) - logit(sorted[0]) - log_sum;
                f64::from(got) == want || (f64::from(got) - want).abs() < 2e-6 * want.abs().max(1.0)
            };
            for (top, bias) in [(0, 0.0), (1, 1.0), (5, 0.0), (64, 0.0), (65, 1.0), (1000, 0.0)] {
                let params = SamplingParams { temperature: 0.7, logit_bias: vec![(0, bias)], ..Default::default() };
                let mut s = Sampler::new(SamplingParams { seed: Some(7), ..params }, None, Some(top));
                let (token, logprobs) = s.sample(&mut row.clone(), &[], 0).unwrap();
                let Logprobs { logprob, top: got } = *logprobs.unwrap();
                assert!(is_near(token, logprob), "{token}: {logprob}");
                assert!(got.iter().map(|(token, _)| token).eq(sorted.iter().take(top)), "{got:?}");
                assert!(got.iter().all(|&(token, logprob)| is_near(token, logprob)), "{got:?}");
            }
        }
    }
}
