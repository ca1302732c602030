//! Checkpoints made, copied and damaged on the spot, and the real command run on them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The command with a cache of its own and no network.
pub fn moebius(cache: &Path, args: &[&str]) -> Command {
    let built = env!("CARGO_BIN_EXE_moebius");
    let mut command = Command::new(std::env::var_os("CARGO_BIN_EXE_moebius").unwrap_or(built.into()));
    command.args(args).arg("--cache-dir").arg(cache).stdin(Stdio::null());
    command.env("HF_HOME", cache.join("hf")).env("HF_ENDPOINT", "http://127.0.0.1:1");
    command
}

/// Every file below `dir`, by its path from there.
pub fn files(dir: &Path) -> Vec<String> {
    fn collect(dir: &Path, at: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(at).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => collect(dir, &path, found),
                false => found.push(path.strip_prefix(dir).unwrap().display().to_string()),
            }
        }
    }
    let mut found = Vec::new();
    collect(dir, dir, &mut found);
    found.sort();
    found
}

/// A checkpoint to be damaged, with a cache folder beside it.
pub struct Checkpoint {
    root: TempDir,
}

impl Checkpoint {
    /// A copy of the checkpoint in `from`.
    pub fn copy_of(from: &Path) -> Self {
        let this = Self::empty();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            if !entry.file_name().to_string_lossy().starts_with("reference") {
                std::fs::copy(entry.path(), this.dir().join(entry.file_name())).unwrap();
            }
        }
        this
    }

    fn empty() -> Self {
        let this = Self { root: tempfile::tempdir().unwrap() };
        std::fs::create_dir(this.dir()).unwrap();
        this
    }

    /// A Qwen3-MoE of `layers` layers, each with 3 x 16 MiB of experts in a shard of its own.
    pub fn synthetic(layers: usize) -> Self {
        const EXPERTS: usize = 32;
        let this = Self::empty();
        let config = json!({"model_type": "qwen3_moe", "hidden_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32,
            "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
                "num_hidden_layers": layers, "vocab_size": 64,
            "max_position_embeddings": 256, "norm_topk_prob": true});
        std::fs::write(this.dir().join("config.json"), config.to_string()).unwrap();
        let ends = [
            ("model.embed_tokens".into(), vec![64, 512]),
            ("lm_head".into(), vec![64, 512]),
            ("model.norm".into(), vec![512]),
        ];
        this.write("ends.safetensors", &ends);
        for layer in 0..layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let mut tensors = vec![
                (name("input_layernorm"), vec![512]),
                (name("post_attention_layernorm"), vec![512]),
                (name("self_attn.q_proj"), vec![128, 512]),
                (name("self_attn.k_proj"), vec![64, 512]),
                (name("self_attn.v_proj"), vec![64, 512]),
                (name("self_attn.o_proj"), vec![512, 128]),
                (name("self_attn.q_norm"), vec![32]),
                (name("self_attn.k_norm"), vec![32]),
                (name("mlp.gate"), vec![EXPERTS, 512]),
            ];
            for expert in 0..EXPERTS {
                tensors.extend(
                    ["gate", "up", "down"]
                        .map(|part| (name(&format!("mlp.experts.{expert}.{part}_proj")), vec![512, 512])),
                );
            }
            this.write(&format!("layer-{layer:02}.safetensors"), &tensors);
        }
        this
    }

    /// A file of BF16 tensors called `NAME.weight`, with values between 1/8 and 1/4 in size that depend on name and
    /// place.
    fn write(&self, file: &str, tensors: &[(String, Vec<usize>)]) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, shape) in tensors {
            let start = data.len();
            let mut state = name.bytes().fold(1u64, |hash, b| (hash ^ b as u64).wrapping_mul(0x100_0000_01b3)) | 1;
            for _ in 0..shape.iter().product() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let random = (state >> 48) as u16;
                data.extend(((random & 0x807f) | 0x3e00).to_le_bytes());
            }
            header.insert(
                format!("{name}.weight"),
                json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]}),
            );
        }
        store(&self.dir().join(file), &Value::Object(header), &data);
    }

    pub fn dir(&self) -> PathBuf {
        self.root.path().join("model")
    }

    pub fn cache(&self) -> PathBuf {
        self.root.path().join("cache")
    }

    /// A path for something else.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub fn remove(&self, name: &str) -> &Self {
        std::fs::remove_file(self.file(name)).unwrap();
        self
    }

    /// Changes a JSON file.
    pub fn json(&self, name: &str, edit: impl FnOnce(&mut Value)) -> &Self {
        let mut value = serde_json::from_slice(&std::fs::read(self.file(name)).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(self.file(name), value.to_string()).unwrap();
        self
    }

    /// Sets fields of config.json.
    pub fn config(&self, fields: Value) -> &Self {
        self.json("config.json", |config| fields.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone()))
    }

    /// Changes any file's bytes.
    pub fn bytes(&self, name: &str, edit: impl FnOnce(&mut Vec<u8>)) -> &Self {
        let mut bytes = std::fs::read(self.file(name)).unwrap();
        edit(&mut bytes);
        std::fs::write(self.file(name), bytes).unwrap();
        self
    }

    /// Changes header and data of a safetensors file.
    pub fn tensors(&self, name: &str, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) -> &Self {
        let bytes = std::fs::read(self.file(name)).unwrap();
        let (header, data) = bytes[8..].split_at(u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
        let (mut header, mut data) = (serde_json::from_slice(header).unwrap(), data.to_vec());
        edit(&mut header, &mut data);
        store(&self.file(name), &header, &data);
        self
    }

    /// Runs a command, whose argument `MODEL` stands for this checkpoint.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(&self.cache(), args).output().unwrap()
    }

    /// As `run`, not started, with any cache folder.
    pub fn command(&self, cache: &Path, args: &[&str]) -> Command {
        let dir = self.dir();
        let args: Vec<&str> =
            args.iter().map(|&arg| if arg == "MODEL" { dir.to_str().unwrap() } else { arg }).collect();
        moebius(cache, &args)
    }
}

fn store(path: &Path, header: &Value, data: &[u8]) {
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    std::fs::write(path, bytes).unwrap();
}
