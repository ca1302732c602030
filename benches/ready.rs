//! From a checkpoint to the first token: conversion, and time to ready from a cold and a warm page cache, with the RAM
//! that each takes.
//!
//! `cargo bench --bench ready -- dir=FOLDER [shape=NAME] [layers=N] [loads=gpu,gpu-ram,cpu] [json=FILE]`. In FOLDER a
//! checkpoint of random weights of a known shape is written, in the hub's names and shards, unless it is there from an
//! earlier run; then it is converted as `moebius cache build` does, and loaded as `moebius serve` does: `gpu` as much
//! on it as fits, `gpu-ram` with all experts in RAM. Each step is a process of its own, so that each has a peak of its
//! own; before a cold one the files are written to disk and dropped from the page cache.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use half::bf16;
use moebius::backend::cuda::{CudaBackend, Limits};
use moebius::backend::source::TensorSource;
use moebius::backend::tensor::HostTensor;
use moebius::config::{DenseBits, Device, EngineConfig};
use moebius::cuda::{Cuda, DeviceInfo};
use moebius::engine::{self, Event, Request};
use moebius::forward::weights::Weights;
use moebius::load::synthetic::Synthetic;
use moebius::load::{self, Description, LoadProgress, ModelFolder};
use moebius::machine::topology::{self, Topology};
use moebius::model::ModelConfig;
use moebius::model::families::shapes;
use moebius::{Error, Result};
use moebius_cache::convert;
use rayon::prelude::*;
use serde_json::{Value, json};

/// Bytes of a shard, as the hub cuts them.
const SHARD_BYTES: usize = 5_000_000_000;

/// Tokens of the prompt whose first token is waited for.
const PROMPT: u32 = 32;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().find_map(|a| a.strip_prefix(name)?.strip_prefix('=').map(String::from));
    let dir = PathBuf::from(
        value("dir")
            .ok_or_else(|| Error::Invalid("say where to put the checkpoint and its cache: dir=FOLDER".into()))?,
    );
    match value("step").as_deref() {
        Some("convert") => return print(&convert(&dir)?),
        Some(step) => return print(&load(&dir, step)?),
        None => {}
    }
    let shape = value("shape").unwrap_or("deepseek-v2-lite".into());
    let layers = value("layers").and_then(|n| n.parse().ok());
    let (model, text) = (shapes::shape(&shape, layers)?, shapes::config(&shape)?);
    let loads = value("loads").unwrap_or("gpu,gpu-ram,cpu".into());

    let source = checkpoint_in(&dir);
    let written = match source.join("config.json").is_file() {
        true => Value::Null,
        false => write(&source, &model, text)?,
    };
    drop_pages(&dir)?;
    let mut report = json!({ "machine": machine(), "shape": shape, "layers": model.layers.len(), "written": written });
    report["convert"] = in_own_process(&dir, "convert")?;
    let mut rows = Vec::new();
    for step in loads.split(',') {
        for pages in ["cold", "warm"] {
            if pages == "cold" {
                drop_pages(&dir)?;
            }
            let mut row = in_own_process(&dir, step)?;
            row["pages"] = pages.into();
            eprintln!("{row}");
            rows.push(row);
        }
    }
    report["loads"] = rows.into();
    if let Some(file) = value("json") {
        std::fs::write(&file, report.to_string()).map_err(Error::unwritable(Path::new(&file)))?;
    }
    print(&report)
}

fn print(report: &Value) -> Result<()> {
    println!("{report}");
    Ok(())
}

fn machine() -> Value {
    let topology = Topology::read();
    let gpu = moebius::cuda::devices().first().map(|info| info.name.clone());
    json!({ "cpu": topology.cpu_model, "cores": topology.cores.len(), "gpu": gpu })
}

fn checkpoint_in(dir: &Path) -> PathBuf {
    dir.join("checkpoint")
}

fn config_in(dir: &Path) -> EngineConfig {
    EngineConfig { cache_dir: Some(dir.join("cache")), ..Default::default() }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// One step of this bench as a process, and what it printed.
fn in_own_process(dir: &Path, step: &str) -> Result<Value> {
    let own = std::env::current_exe().map_err(Error::io(Path::new("this program")))?;
    let output = Command::new(&own)
        .arg(format!("dir={}", dir.display()))
        .arg(format!("step={step}"))
        .output()
        .map_err(Error::io(&own))?;
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).map_err(|_| Error::Invalid(format!("{step} failed: {}", said())))
}

/// Files of a folder and all in it.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Brings all files to disk and out of the page cache.
fn drop_pages(dir: &Path) -> Result<()> {
    for path in files(dir) {
        File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io(&path))?;
        let input = format!("if={}", path.display());
        Command::new("dd")
            .args([&input, "iflag=nocache", "count=0", "status=none"])
            .status()
            .map_err(Error::io(Path::new("dd")))?;
    }
    Ok(())
}

/// Notes what resident weights are asked for.
#[derive(Default)]
struct Names(Mutex<Vec<(String, Vec<usize>)>>);

impl TensorSource for Names {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        self.0.lock().expect("no thread has ended with it").push((name.into(), vec![rows, cols]));
        Ok(HostTensor::Bf16 { data: vec![bf16::ZERO; rows * cols].into(), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>> {
        self.0.lock().expect("no thread has ended with it").push((name.into(), vec![len]));
        Ok(vec![0.0; len].into())
    }
}

/// Names and shapes of all tensors, layer by layer.
fn tensors(model: &ModelConfig) -> Result<Vec<(String, Vec<usize>)>> {
    let info = DeviceInfo {
        name: String::new(),
        capability: (9, 0),
        multiprocessors: 1,
        shared_bytes: 0,
        total_bytes: 0,
        free_bytes: 0,
    };
    let (names, nothing) = (Names::default(), CudaBackend::new(Cuda::plan(info), Limits { context: 64, table: 1 })?);
    Weights::load(&nothing, &names, model, DenseBits::Bf16, &|_, _| Ok(()))?;
    let mut all = names.0.into_inner().expect("no thread has ended with it");
    for (layer, moe) in model.moe_layers() {
        let (wide, narrow) = (model.hidden_size, moe.intermediate_size);
        for e in 0..moe.num_experts {
            let [gate, up, down] = model.names.expert(layer, e);
            all.extend([(gate, vec![narrow, wide]), (up, vec![narrow, wide]), (down, vec![wide, narrow])]);
        }
    }
    let layer = |name: &str| name.split(".layers.").nth(1)?.split('.').next()?.parse::<usize>().ok();
    all.sort_by_key(|(name, _)| layer(name).unwrap_or(usize::MAX));
    Ok(all)
}

fn bytes_of(shape: &[usize]) -> usize {
    2 * shape.iter().product::<usize>()
}

/// Writes shards, their index, and last the configuration.
fn write(dir: &Path, model: &ModelConfig, config: &str) -> Result<Value> {
    let started = Instant::now();
    std::fs::create_dir_all(dir).map_err(Error::unwritable(dir))?;
    let mut shards: Vec<Vec<(String, Vec<usize>)>> = Vec::new();
    let mut left = 0;
    for tensor in tensors(model)? {
        let bytes = bytes_of(&tensor.1);
        if shards.is_empty() || bytes > left {
            shards.push(Vec::new());
            left = SHARD_BYTES;
        }
        left = left.saturating_sub(bytes);
        shards.last_mut().expect("just pushed").push(tensor);
    }
    let (mut map, mut all) = (BTreeMap::new(), 0);
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        map.extend(shard.iter().map(|(name, _)| (name.clone(), file.clone())));
        all += write_shard(&dir.join(&file), shard, &Synthetic::of(model))?;
    }
    let put =
        |name: &str, text: String| std::fs::write(dir.join(name), text).map_err(Error::unwritable(&dir.join(name)));
    put("model.safetensors.index.json", json!({ "metadata": { "total_size": all }, "weight_map": map }).to_string())?;
    let mut config: Value = serde_json::from_str(config).expect("a shape is JSON");
    config["num_hidden_layers"] = model.layers.len().into();
    put("config.json", config.to_string())?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({ "gb": all as f64 / 1e9, "shards": shards.len(), "seconds": seconds }))
}

/// Returns the bytes of its tensors.
fn write_shard(path: &Path, tensors: &[(String, Vec<usize>)], weights: &Synthetic) -> Result<usize> {
    let (mut header, mut at, mut places) = (serde_json::Map::new(), 0, Vec::new());
    for (name, shape) in tensors {
        let end = at + bytes_of(shape);
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
        places.push(at);
        at = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = File::create(path).map_err(Error::unwritable(path))?;
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)
        .and_then(|()| file.write_all_at(&header, 8))
        .map_err(Error::unwritable(path))?;
    tensors.par_iter().zip(places).try_for_each(|((name, shape), place)| {
        let weight = match shape[..] {
            [rows, cols] => weights.matrix(name, rows, cols)?,
            _ => weights.vector(name, shape[0])?,
        };
        let numbers: Vec<bf16> = match weight {
            HostTensor::Bf16 { data, .. } => data.into_owned(),
            other => other.to_f32().iter().map(|&w| bf16::from_f32(w)).collect(),
        };
        file.write_all_at(bytemuck::cast_slice(&numbers), (8 + header.len() + place) as u64)
            .map_err(Error::unwritable(path))
    })?;
    Ok(at)
}

/// As `moebius cache build` does, of files that are not in the page cache.
fn convert(dir: &Path) -> Result<Value> {
    let (source, config) = (checkpoint_in(dir), config_in(dir));
    let started = Instant::now();
    let folder = ModelFolder::open("ready", Description::read(&source)?)?;
    let precision = folder.spec(&config)?.precision;
    let precision = precision.ok_or_else(|| Error::Invalid("a shape without experts".into()))?;
    let job = load::cache_job("ready", &folder.checkpoint, &folder.model, precision.clone());
    convert::ensure(&job, &load::cache_dir(&config)?, &|_| {})?;
    let seconds = started.elapsed().as_secs_f64();
    let read = expert_bytes(&folder.model) as f64;
    Ok(json!({
        "precision": precision.to_string(), "seconds": seconds, "source_gb": read / 1e9,
            "source_gb_per_s": read / seconds / 1e9,
        "peak_ram_gib": gib(topology::peak_bytes()), "cache_gb": size(&dir.join("cache")) as f64 / 1e9,
    }))
}

/// Bytes of the routed experts in a checkpoint.
fn expert_bytes(model: &ModelConfig) -> u64 {
    model
        .moe_layers()
        .map(|(_, moe)| bytes_of(&[3, moe.num_experts, moe.intermediate_size, model.hidden_size]) as u64)
        .sum()
}

/// Bytes of all files in a folder.
fn size(dir: &Path) -> u64 {
    files(dir).iter().filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum()
}

/// As `moebius serve` does, to the first token of the first answer.
fn load(dir: &Path, how: &str) -> Result<Value> {
    let (device, resident_experts) = match how {
        "gpu" => (Device::Cuda(vec![0]), None),
        "gpu-ram" => (Device::Cuda(vec![0]), Some(0)),
        "cpu" => (Device::Cpu, None),
        _ => return Err(Error::Invalid(format!("loads={how}: give some of gpu, gpu-ram and cpu"))),
    };
    let config = EngineConfig { device, resident_experts, max_context: Some(4096), ..config_in(dir) };
    let source = checkpoint_in(dir);
    let bytes = size(&dir.join("cache")) + size(&source) - expert_bytes(&Description::read(&source)?.model()?);
    let lines = std::sync::Mutex::new(Vec::new());
    let started = Instant::now();
    let engine = engine::start(&ModelFolder::open("ready", Description::read(&source)?)?, &config, &|progress| {
        if let (LoadProgress::Experts(line), Ok(mut lines)) = (progress, lines.lock()) {
            lines.push(line.to_string());
        }
    })?;
    let (ready, peak) = (started.elapsed().as_secs_f64(), topology::peak_bytes());
    let request =
        Request { prompt: (1..=PROMPT).collect(), max_tokens: Some(1), ignore_eos: true, ..Request::default() };
    let mut events = engine.submit(request)?;
    let first = events.blocking_recv();
    let first_token = started.elapsed().as_secs_f64();
    match first {
        Some(Event::Token(..)) => {}
        Some(Event::Failed(error)) => return Err(error),
        _ => return Err(Error::Invalid("an answer without a token".into())),
    }
    Ok(json!({
        "load": how, "gb": bytes as f64 / 1e9, "ready_s": ready, "gb_per_s": bytes as f64 / ready / 1e9,
            "first_token_s": first_token,
        "peak_ram_gib_ready": gib(peak), "peak_ram_gib": gib(topology::peak_bytes()),
            "said": lines.into_inner().unwrap_or_default(),
    }))
}
