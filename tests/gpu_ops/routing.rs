//! Choosing experts: every way of scoring, with ties, and after a norm.

use moebius::backend::batch::Batch;
use moebius::backend::tensor::HostTensor;
use moebius::backend::{Load, Memory, Route, RouterTensors, Routing};
use moebius::model::{GroupScore, Groups, Router, Scoring};

use crate::common;
use common::gpu::{Filled, Sides, Within, both, check, need_gpu, random};

/// Experts, and how they are chosen.
fn routers() -> Vec<(usize, Router)> {
    let plain = Router::new(2, Scoring::Softmax);
    let sigmoid =
        Router { top_k: 8, scoring: Scoring::Sigmoid, correction_bias: true, normalize: true, scaling: 2.5, ..plain };
    let groups = |count, top_k, score| Some(Groups { count, top_k, score });
    vec![
        (8, plain.clone()),
        (60, Router { top_k: 4, normalize: true, ..plain }),
        (32, Router { top_k: 4, bias: true, normalize: true, ..plain }),
        (128, Router { top_k: 8, normalize: true, scaling: 0.5, ..plain }),
        (160, Router { top_k: 6, groups: groups(8, 3, GroupScore::Max), scaling: 16.0, ..plain }),
        (12, Router { top_k: 1, ..plain }),
        (256, Router { groups: groups(8, 4, GroupScore::TopTwoSum), ..sigmoid }),
        (384, Router { correction_bias: false, scaling: 2.827, ..sigmoid }),
        (512, Router { top_k: 32, normalize: false, groups: groups(32, 5, GroupScore::TopTwoSum), ..sigmoid }),
        (72, Router { top_k: 6, groups: groups(3, 1, GroupScore::Max), ..sigmoid }),
        (96, Router { softcap: Some(2.5), ..sigmoid }),
        (128, Router { top_k: 8, normalize: true, expert_scale: true, ..plain }),
        (256, Router { top_k: 6, scoring: Scoring::SqrtSoftplus, scaling: 1.5, ..sigmoid }),
    ]
}

/// What `router` has besides `weight`.
fn tensors(weight: Vec<f32>, experts: usize, router: &Router) -> RouterTensors<'static> {
    let vector = |seed, of: fn(&f32) -> f32| Some(random(experts, seed).iter().map(of).collect::<Vec<_>>().into());
    RouterTensors {
        weight: weight.into(),
        bias: if router.bias { vector(54, |b| (b * 8.0).round() / 4.0) } else { None }, // in quarters
        correction_bias: if router.correction_bias { vector(53, |b| 0.3 * b) } else { None },
        expert_scale: if router.expert_scale { vector(60, |s| 1.0 + 0.5 * s) } else { None },
        by_token: None,
    }
}

/// Ids equal, weights up to f32's exponential functions.
fn check_routing(what: &str, got: &Routing, want: &Routing) {
    assert_eq!((got.top_k, &got.ids), (want.top_k, &want.ids), "{what}");
    check(what, &got.weights, &want.weights, Within { each: 4e-6, of_rms: 1e-7, rms: 4e-6 });
}

/// Inputs and weights of few bits make logits exact in any order of summing: many are equal, and of these the lower id
/// goes first.
#[test]
fn route_among_equals() {
    need_gpu!();
    let sides = Sides::new();
    let hidden = 72;
    for (experts, router) in routers() {
        let weight: Vec<f32> = random(experts * hidden, 51).iter().map(|w| (w * 2.0).round() / 4.0).collect();
        for tokens in [1, 3, 8, 9, 64, 200] {
            let x: Vec<f32> = random(tokens * hidden, 52).iter().map(|x| (x * 2.0).round() / 2.0).collect();
            let (got, want) = both!(sides, |b| {
                let w = b.load_router(tensors(weight.clone(), experts, &router)).unwrap();
                let mut routing = b.routing(tokens, router.top_k).unwrap();
                b.route(&w, &router, &b.filled(hidden, &x), &mut routing);
                let mut out = Routing::default();
                b.read_routing(&routing, &mut out).unwrap();
                out
            });
            check_routing(&format!("{experts} experts, {tokens} tokens, {router:?}"), &got, &want);
        }
    }
}

/// A table has the experts, some of them twice in a row of tokens; scores weigh them.
#[test]
fn route_by_token() {
    need_gpu!();
    let sides = Sides::new();
    let (hidden, experts, vocab) = (72, 256, 31);
    let router = Router { by_token: true, normalize: true, scaling: 1.5, ..Router::new(6, Scoring::SqrtSoftplus) };
    let table: Vec<f32> = (0..vocab * 6).map(|i| (i * 37 % experts) as f32).collect();
    for tokens in [1, 9, 70] {
        let mut batch = Batch::default();
        batch.push(&(0..tokens).map(|t| t * 7 % vocab as u32).collect::<Vec<_>>(), 0, &[0, 1]);
        let x = random(batch.len() * hidden, 61);
        let (got, want) = both!(sides, |b| {
            let w = RouterTensors {
                by_token: Some(HostTensor::from(table.clone()).reshaped(6)),
                ..RouterTensors::of(random(experts * hidden, 62).into())
            };
            let mut routing = b.routing(batch.len(), 6).unwrap();
            let w = b.load_router(w).unwrap();
            b.route_by_token(&w, &router, &b.on_device(&batch), &b.filled(hidden, &x), &mut routing);
            let mut out = Routing::default();
            b.read_routing(&routing, &mut out).unwrap();
            out
        });
        check_routing(&format!("{tokens} tokens by a table"), &got, &want);
    }
}

#[test]
fn route_after_a_norm() {
    need_gpu!();
    let sides = Sides::new();
    for hidden in [72, 2312] {
        for (experts, router) in routers() {
            let unit = 3.0 / (hidden as f32).sqrt();
            let weight: Vec<f32> = random(experts * hidden, 54).iter().map(|w| unit * w).collect();
            let norm: Vec<f32> = random(hidden, 55).iter().map(|w| 1.0 + 0.5 * w).collect();
            for tokens in [1, 5, 8, 9, 40] {
                let x: Vec<f32> = random(tokens * hidden, 56).iter().map(|x| 3.0 * x).collect();
                let (got, want) = both!(sides, |b| {
                    let w = b.load_router(tensors(weight.clone(), experts, &router)).unwrap();
                    let (mut h, mut routing) =
                        (b.tensor(tokens, hidden).unwrap(), b.routing(tokens, router.top_k).unwrap());
                    let norm = b.load_norm(norm.clone().into()).unwrap();
                    // Twice: what the first leaves behind must not count.
                    for _ in 0..2 {
                        b.norm_route(&b.filled_f32(hidden, &x), (&norm, 1e-6), &mut h, &w, &router, &mut routing);
                    }
                    let mut out = Routing::default();
                    b.read_routing(&routing, &mut out).unwrap();
                    (b.numbers(&h), out)
                });
                let what = format!("{experts} experts, {tokens} tokens of {hidden}, {router:?}");
                check(&format!("{what}: norm"), &got.0, &want.0, Within::BF16);
                // What is chosen is chosen of the norm as products take it.
                check_routing(&what, &got.1, &routed_on_cpu(&sides, &weight, (experts, &router), &got.0, hidden));
            }
        }
    }
}

fn routed_on_cpu(
    sides: &Sides,
    weight: &[f32],
    (experts, router): (usize, &Router),
    h: &[f32],
    hidden: usize,
) -> Routing {
    let (b, mut out) = (&sides.cpu, Routing::default());
    b.route(&b.load_router(tensors(weight.to_vec(), experts, router)).unwrap(), router, &b.filled(hidden, h), &mut out);
    out
}

/// Few tokens have a kernel of their own, which must see the norm as the others do: rounded.
#[test]
fn a_token_goes_to_the_same_experts_in_any_batch() {
    need_gpu!();
    let b = &Sides::new().gpu;
    for hidden in [72, 2312] {
        for (experts, router) in routers() {
            let unit = 3.0 / (hidden as f32).sqrt();
            let weight: Vec<f32> = random(experts * hidden, 57).iter().map(|w| unit * w).collect();
            let w = b.load_router(tensors(weight, experts, &router)).unwrap();
            let norm: Vec<f32> = random(hidden, 58).iter().map(|w| 1.0 + 0.5 * w).collect();
            let norm = b.load_norm(norm.into()).unwrap();
            let x = random(40 * hidden, 59);
            let route = |tokens: usize| {
                let (mut h, mut routing, mut out) =
                    (b.tensor(tokens, hidden).unwrap(), b.routing(tokens, router.top_k).unwrap(), Routing::default());
                b.norm_route(
                    &b.filled_f32(hidden, &x[..tokens * hidden]),
                    (&norm, 1e-6),
                    &mut h,
                    &w,
                    &router,
                    &mut routing,
                );
                b.read_routing(&routing, &mut out).unwrap();
                out
            };
            let all = route(40);
            for tokens in [1, 3, 8, 9] {
                let (got, count) = (route(tokens), tokens * router.top_k);
                let what = format!("{experts} experts, {tokens} of 40 tokens of {hidden}, {router:?}");
                assert_eq!(got.ids, all.ids[..count], "{what}");
                // An unrounded norm would be off by some 5e-3; the order of a sum may turn a rounding here and there.
                check(&what, &got.weights, &all.weights[..count], Within { each: 5e-4, of_rms: 1e-6, rms: 2e-4 });
            }
        }
    }
}

#[test]
fn the_weight_of_an_only_expert_goes_to_its_input() {
    need_gpu!();
    let sides = Sides::new();
    let (tokens, hidden, experts) = (40, 136, 12);
    let router = Router::new(1, Scoring::Sigmoid);
    let [weight, h] = [(experts * hidden, 91), (tokens * hidden, 92)].map(|(n, seed)| random(n, seed));
    let (got, want) = both!(sides, |b| {
        let (w, h) = (b.load_router(self::tensors(weight.clone(), experts, &router)).unwrap(), b.filled(hidden, &h));
        let (mut routing, mut out) = (b.routing(tokens, 1).unwrap(), b.tensor(tokens, hidden).unwrap());
        b.route(&w, &router, &h, &mut routing);
        b.weigh_input(&mut routing, &h, &mut out);
        let mut chosen = Routing::default();
        b.read_routing(&routing, &mut chosen).unwrap();
        assert!(chosen.weights.iter().all(|weight| *weight == 1.0));
        b.numbers(&out)
    });
    check("weighed inputs", &got, &want, Within::BF16);
}

#[test]
fn choose_experts() {
    need_gpu!();
    let sides = Sides::new();
    let (experts, hidden, router) = (16, 64, Router::new(4, Scoring::Softmax));
    for tokens in [1, 3, 70] {
        let weight = random(experts * hidden, 71);
        let x = random(tokens * hidden, 72);
        let choices: Vec<i32> = (0..3 * tokens * 4).map(|i| (7 * i % experts) as i32).collect();
        let (got, want) = both!(sides, |b| {
            let w = b.load_router(tensors(weight.clone(), experts, &router)).unwrap();
            let x = b.filled(hidden, &x);
            let mut routing = b.routing(tokens, 4).unwrap();
            b.route(&w, &router, &x, &mut routing);
            let mut chosen = b.choices(choices.len()).unwrap();
            b.set_choices(&mut chosen, &choices);
            b.choose_experts(&chosen, tokens * 4, &mut routing);
            let mut out = Routing::default();
            b.read_routing(&routing, &mut out).unwrap();
            out
        });
        assert_eq!(got.ids, choices[tokens * 4..2 * tokens * 4]);
        check_routing("chosen experts", &got, &want);
    }
}
