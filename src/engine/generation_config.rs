//! What a checkpoint says about generating with it: end tokens and default sampling.

use serde_json::Value;

use crate::engine::sampler::SamplingParams;
use crate::load::Description;

/// `generation_config.json`, completed by `config.json`.
#[derive(Clone, Debug, Default)]
pub struct GenerationConfig {
    /// Tokens that end an answer, without duplicates.
    pub eos_ids: Vec<u32>,
    /// How the model's authors sample; greedy unless they set `do_sample`.
    pub sampling: SamplingParams,
}

impl GenerationConfig {
    /// What a folder's description says.
    pub fn of(Description { config, generation, .. }: &Description) -> Self {
        let mut eos_ids = Vec::new();
        for value in [&generation["eos_token_id"], &config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
            collect_ids(value, &mut eos_ids);
        }
        Self { eos_ids, sampling: sampling(generation) }
    }
}

fn sampling(generation: &Value) -> SamplingParams {
    if generation["do_sample"] != Value::Bool(true) {
        return SamplingParams::default();
    }
    let number = |name: &str, default: f32| generation[name].as_f64().map_or(default, |x| x as f32);
    SamplingParams {
        temperature: number("temperature", 1.0),
        top_p: number("top_p", 1.0),
        top_k: generation["top_k"].as_u64().unwrap_or(0) as usize,
        min_p: number("min_p", 0.0),
        repetition_penalty: number("repetition_penalty", 1.0),
        ..SamplingParams::default()
    }
}

/// Adds a single id or a list of ids.
fn collect_ids(value: &Value, ids: &mut Vec<u32>) {
    let list = match value {
        Value::Array(list) => list.as_slice(),
        single => std::slice::from_ref(single),
    };
    for id in list.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Result;

    fn load(generation: Option<&str>, config: &str) -> Result<GenerationConfig> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        if let Some(text) = generation {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        }
        Description::read(dir.path()).map(|description| GenerationConfig::of(&description))
    }

    #[test]
    fn end_tokens_come_from_everywhere_once() {
        let got =
            load(Some(r#"{"eos_token_id":[5,2]}"#), r#"{"eos_token_id":2,"text_config":{"eos_token_id":7}}"#).unwrap();
        assert_eq!(got.eos_ids, [5, 2, 7]);
        assert!(load(None, "{}").unwrap().eos_ids.is_empty());
        assert_eq!(load(None, r#"{"eos_token_id":[null,-1,4294967296,3]}"#).unwrap().eos_ids, [3]);
    }

    #[test]
    fn sampling_is_greedy_unless_do_sample() {
        let quiet = load(Some(r#"{"do_sample":false,"temperature":0.6}"#), "{}").unwrap();
        assert_eq!(quiet.sampling, SamplingParams::default());
        let hot = load(Some(r#"{"do_sample":true,"temperature":0.6,"top_p":0.95,"top_k":20}"#), "{}").unwrap();
        assert_eq!((hot.sampling.temperature, hot.sampling.top_p, hot.sampling.top_k), (0.6, 0.95, 20));
    }

    #[test]
    fn broken_json_names_the_file() {
        let error = load(Some("{"), "{}").unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("not valid JSON"), "{error}");
    }
}
