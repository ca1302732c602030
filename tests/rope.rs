//! Rotary frequencies and softmax scales against HF transformers, positions 0 to 131,072.
//!
//! `tests/data/yarn.json` was written by `tests/data/yarn_reference.py`.

#![allow(clippy::unwrap_used)]

mod common;

use common::small;
use moebius::backend::batch::Batch;
use moebius::backend::cpu::Cpu;
use moebius::backend::{Attend, Memory};
use moebius::config::{Device, EngineConfig};
use moebius::engine::Layers;
use moebius::engine::capture::{Wanted, capture};
use moebius::machine::workers::Team;
use moebius::model::{Attention, Gqa, Rope, RopeScaling};
use serde_json::Value;

/// Completes a config with dimensions that do not matter here.
fn model(config: &Value) -> moebius::model::ModelConfig {
    let mut full = serde_json::json!({
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 128, "q_lora_rank": null, "kv_lora_rank": 8, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 8, "vocab_size": 16, "n_routed_experts": 4, "num_experts": 4,
            "num_experts_per_tok": 2,
    });
    full.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    moebius::model::families::parse(&full.to_string()).unwrap()
}

fn floats(v: &Value) -> Vec<f32> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

#[test]
fn frequencies_angles_and_scales_are_those_of_transformers() {
    let reference: Value = serde_json::from_str(include_str!("data/yarn.json")).unwrap();
    let positions: Vec<u32> = floats(&reference["positions"]).iter().map(|&p| p as u32).collect();
    let backend = Cpu::new(std::sync::Arc::new(Team::new(&[0]).unwrap()), moebius::kernel::best());
    let cases = reference["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 7);
    for (name, case) in cases {
        let model = model(&case["config"]);
        let rope = model.ropes()[0];
        let inv_freq = rope.inv_freq();
        for (i, (got, want)) in inv_freq.iter().zip(floats(&case["inv_freq"])).enumerate() {
            assert!((got - want).abs() <= 3e-7 * want, "{name}: frequency {i} is {got}, not {want}");
        }
        let factor = case["attention_factor"].as_f64().unwrap() as f32;
        assert!((rope.attention_factor() - factor).abs() < 1e-6, "{name}: cos and sin carry {factor}");

        let half = inv_freq.len();
        let mut angles = backend.tensor(positions.len(), 2 * half).unwrap();
        let batch = Batch { positions: positions.clone(), ..Batch::default() };
        backend.rope_angles(&inv_freq, rope.attention_factor(), &batch, &mut angles);
        for (t, &position) in positions.iter().enumerate() {
            // A frequency off by its last bit turns position p by p * frequency * 2^-24 radians.
            for (part, key) in ["cos", "sin"].iter().enumerate() {
                for (i, want) in floats(&case[*key][t]).iter().enumerate() {
                    let got = angles.row(t)[part * half + i];
                    let tolerance = 1e-5 + 3e-7 * position as f32 * inv_freq[i];
                    assert!(
                        (got - want).abs() < tolerance,
                        "{name}: {key} of pair {i} at {position} is {got}, not {want}"
                    );
                }
            }
        }

        let scale = match &model.layers[0].attention {
            Attention::Gqa(a) => a.scale,
            Attention::Mla(a) => a.scale,
            _ => unreachable!(),
        };
        let want = case["scaling"].as_f64().unwrap() as f32;
        assert!((scale - want).abs() < 1e-6 * want, "{name}: softmax scale is {scale}, not {want}");
    }
}

#[test]
fn kimis_softmax_scale_carries_mscale_squared() {
    let reference: Value = serde_json::from_str(include_str!("data/yarn.json")).unwrap();
    let Attention::Mla(a) = model(&reference["cases"]["kimi-k2.5"]["config"]).layers[0].attention.clone() else {
        panic!("Kimi has MLA")
    };
    assert!((a.scale - 0.1447).abs() < 1e-4, "{}", a.scale);
}

/// The residual stream after both layers of a small model, `[tokens, hidden]` each, whose attention is changed.
fn hidden(change: impl Fn(usize, &mut Gqa)) -> [Vec<f32>; 2] {
    let mut model = moebius::model::families::parse(&small::config("llama").to_string()).unwrap();
    for (i, layer) in model.layers.iter_mut().enumerate() {
        let Attention::Gqa(a) = &mut layer.attention else { panic!("Llama has grouped queries") };
        change(i, a);
    }
    let config =
        EngineConfig { device: Device::Cpu, threads: Some(1), max_context: Some(128), ..EngineConfig::default() };
    let mut loaded = small::of(model, &config);
    let tokens: Vec<u32> = (0..40).map(|i| 7 + i * 37 % 900).collect();
    let wanted = Wanted { hidden: Some(Layers::All), ..Wanted::default() };
    let mut hidden = capture(&mut loaded, &tokens, &wanted, 64).unwrap().hidden;
    [0, 1].map(|layer| hidden.remove(&layer).unwrap())
}

#[test]
fn each_layer_turns_by_its_own_rope() {
    let wide = Rope { dim: 32, theta: 10_000.0, interleaved: false, scaling: RopeScaling::None };
    let part = Rope { dim: 16, theta: 500.0, ..wide.clone() };
    let hidden = |ropes: [&Rope; 2]| hidden(|layer, a| a.rope = Some(ropes[layer].clone()));
    let (same, other) = (hidden([&wide, &wide]), hidden([&part, &part]));
    let (first, last) = (hidden([&part, &wide]), hidden([&wide, &part]));
    assert!(same[0] == last[0] && other[0] == first[0], "a layer does not see the next one's rope");
    assert!(same[0] != first[0] && same[1] != last[1] && other[1] != first[1]);
    // Position 0 is not turned, by whatever rope.
    let start = |hidden: &[Vec<f32>; 2]| [0, 1].map(|layer| hidden[layer][..128].to_vec());
    assert_eq!(start(&last), start(&same));
}

#[test]
fn each_layer_has_its_own_heads() {
    let narrow = |a: &mut Gqa| {
        (a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim) = (2, 1, 16, 16);
        a.rope = a.rope.clone().map(|rope| Rope { dim: 16, ..rope });
    };
    let wide = hidden(|_, _| ());
    let mixed = hidden(|layer, a| {
        if layer == 1 {
            narrow(a)
        }
    });
    assert!(mixed[0] == wide[0] && mixed[1] != wide[1]);
    let other = hidden(|layer, a| {
        if layer == 0 {
            narrow(a)
        }
    });
    assert!(other[0] != wide[0] && other[1].iter().all(|x| x.is_finite()));
}
