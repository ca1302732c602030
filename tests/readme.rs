//! The README's table of architectures is what the registries say; its table of formats is tested in cache/tests/codecs.rs.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::{fixture_dir, root, small};
use moebius::backend::Backend;
use moebius::backend::cpu::Cpu;
use moebius::gguf;
use moebius::model::ModelConfig;
use moebius::models::{self, ARCHITECTURES};

/// A config of this architecture: of a checkpoint in the tests, of a small model, or of a named shape.
fn example(model_type: &str) -> ModelConfig {
    let fixtures = std::fs::read_dir(fixture_dir("")).unwrap().filter_map(|entry| models::read(&entry.unwrap().path()).ok());
    let small = ["qwen3.5", "gpt-oss", "llama"].map(|name| models::parse(&small::config(name).to_string()).unwrap());
    let shapes = models::shapes::names().map(|name| models::shapes::shape(name, None).unwrap());
    let mut all = fixtures.chain(small).chain(shapes);
    all.find(|model| model.architecture == model_type).unwrap_or_else(|| panic!("the tests have no {model_type}"))
}

fn row(model_type: &str, models: &str, gpu: impl Fn(&ModelConfig) -> Option<&'static str>) -> String {
    let model = example(model_type);
    let on = |lacks: Option<&str>| lacks.map_or("yes".to_string(), |what| format!("lacks {what}"));
    let gguf = gguf::ARCHITECTURES.iter().find(|(_, of)| of.contains(&model_type)).map_or("", |(name, _)| name);
    format!("| {models} | `{model_type}` | {gguf} | {} | {} |\n", on(Cpu::lacks(&model)), on(gpu(&model)))
}

#[cfg(feature = "cuda")]
#[test]
fn supported_architectures() {
    use moebius::backend::cuda::CudaBackend;
    let mut table = String::from("| models | `model_type` | in GGUF | CPU | GPU |\n|---|---|---|---|---|\n");
    for architecture in ARCHITECTURES {
        table += &row(architecture.model_type, architecture.models, CudaBackend::lacks);
    }
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.contains(&table), "README.md, under Models, should have:\n\n{table}");
}
