//! The README's table of architectures is what the registries say; cache/tests/codecs.rs tests the table of formats in
//! docs/formats.md.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::{fixture_dir, root, small};
use moebius::config::{Device, EngineConfig};
use moebius::load::plan::plan;
use moebius::load::{Description, Kept, Spec};
use moebius::model::ModelConfig;
use moebius::model::families::{self, ARCHITECTURES, Architecture, GGUF};

/// A config of this architecture: of a checkpoint in the tests, of a small model, or of a named shape.
fn example(model_type: &str) -> ModelConfig {
    let fixtures = std::fs::read_dir(fixture_dir(""))
        .unwrap()
        .filter_map(|entry| Description::read(&entry.unwrap().path()).ok()?.model().ok());
    let nested = small::config("qwen3.5");
    let alone = nested["text_config"].clone();
    let small = [nested, alone, small::config("gpt-oss"), small::config("llama")]
        .map(|config| families::parse(&config.to_string()).unwrap());
    let shapes = families::shapes::names().map(|name| families::shapes::shape(name, None).unwrap());
    let mut all = fixtures.chain(small).chain(shapes);
    all.find(|model| model.architecture == model_type).unwrap_or_else(|| panic!("the tests have no {model_type}"))
}

/// Whether a GPU could take it, were there room, and if not, why.
#[cfg(feature = "cuda")]
fn on_gpu(model: &ModelConfig) -> String {
    let config = EngineConfig { device: Device::Cuda(vec![0]), vram: Some(4 << 40), ..EngineConfig::default() };
    let spec = Spec::new(model, &config, Kept::NOTHING).unwrap();
    plan("a model", &spec, Some(8 << 40)).map_or_else(|refused| refused.to_string(), |_| "yes".into())
}

/// What the registry has runs on the CPU: tests/oracle.rs.
#[cfg(feature = "cuda")]
#[test]
fn supported_architectures() {
    let mut table = String::from("| models | `model_type` | in GGUF | CPU | GPU |\n|---|---|---|---|---|\n");
    for Architecture { model_type, models, .. } in ARCHITECTURES {
        let gguf =
            GGUF.iter().find(|gguf| gguf.model_types.contains(model_type)).map_or("", |gguf| gguf.names.architecture);
        table += &format!("| {models} | `{model_type}` | {gguf} | yes | {} |\n", on_gpu(&example(model_type)));
    }
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.contains(&table), "README.md, under Models, should have:\n\n{table}");
}
