//! The plan is what loading does: VRAM and RAM as they are really taken, and every refusal with its remedy.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::checkpoint::{Checkpoint, moebius};
use common::folder;
use moebius::backend::batch::Batch;
use moebius::config::{Device, EngineConfig, ExpertBits, ExpertsMemory};
use moebius::load;
use moebius::load::plan::{Plan, plan};
use serde_json::Value;

/// Tests that look at this process's memory run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn part(plan: &Plan, name: &str) -> u64 {
    plan.parts.iter().filter(|part| part.name == name).map(|part| part.vram_bytes + part.ram_bytes).sum()
}

/// Anonymous memory of this process, in bytes.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn ram_is_what_loading_takes() {
    let _alone = alone();
    let checkpoint = Checkpoint::synthetic(4);
    let config = EngineConfig {
        experts: ExpertBits::Bf16,
        experts_memory: ExpertsMemory::Copy,
        device: Device::Cpu,
        threads: Some(2),
        max_batch_tokens: Some(256),
        cache_dir: Some(checkpoint.cache()),
        ..Default::default()
    };
    let folder = folder("test", &checkpoint.dir());
    let plan = plan("test", &folder.spec(&config).unwrap(), None).unwrap();
    // Converted before it is measured: that takes memory of its own.
    drop(load::load(&folder, &config, &|_| {}).unwrap());
    let before = anonymous_bytes();
    let mut loaded = load::load(&folder, &config, &|_| {}).unwrap();
    // Activations and the KV cache take their memory as it is used: one full batch, in one of the sequences.
    let mut batch = Batch::default();
    batch.push(&[1; 256], 0, &[0, 1, 2, 3]);
    loaded.model.forward(&batch, None).unwrap();
    let taken = (anonymous_bytes() - before) as f64;
    let sequences = (plan.kv_tokens / plan.max_context) as u64;
    let kv = part(&plan, "KV cache");
    let planned = (plan.ram_bytes() - kv + kv / sequences) as f64;
    assert!(part(&plan, "experts") > 150 << 20);
    assert!((taken / planned - 1.0).abs() < 0.03, "{taken} taken, {planned} planned: {plan}");
    assert_eq!((plan.max_context, plan.device.as_str()), (loaded.max_context, "CPU"));
}

fn output(args: &[&str]) -> (bool, String) {
    let cache = tempfile::tempdir().unwrap();
    let mut command: Command = moebius(cache.path(), args);
    let output = command.output().unwrap();
    let text = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let (success, text) = output(&[args, &["--json"]].concat());
    assert!(success, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[track_caller]
fn refused(args: &[&str], words: &[&str]) {
    let (success, text) = output(args);
    assert!(!success && text.starts_with("error: ") && text.trim_end().lines().count() == 1, "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?}: `{word}` is not in: {text}");
    }
}

const LITE: [&str; 5] = ["plan", "--shape", "deepseek-v2-lite", "--ram", "64GiB"];

#[test]
fn a_plan_needs_no_weights_and_no_gpu() {
    let cpu = json(&[&LITE[..], &["--device", "cpu"]].concat());
    assert_eq!((&cpu["device"], &cpu["resident_experts"]), (&"CPU".into(), &0.into()));
    assert!(
        cpu["expected"]["decode_tok_per_s"].as_f64().unwrap() > 0.0
            && cpu["expected"]["prefill_tok_per_s"].as_f64().unwrap() > 0.0
    );
    assert!(cpu["advice"][0].as_str().unwrap().contains("--dense int8"), "{cpu}");
    let (_, text) = output(&["plan", "demo", "--device", "cpu"]);
    assert!(text.contains("KV cache") && text.contains("expected"), "{text}");
}

#[test]
fn limits_have_remedies() {
    let with = |flags: &[&'static str]| [&LITE[..], flags].concat();
    refused(&with(&["--device", "cpu", "--vram", "16GiB"]), &["--vram is for a GPU", "leave it out"]);
    refused(
        &with(&["--device", "cpu", "--resident-experts", "4"]),
        &["--resident-experts is for a GPU", "leave it out"],
    );
    refused(&with(&["--device", "cpu", "--kv-host", "1GiB"]), &["--kv-host is for a GPU", "leave it out"]);
    refused(&with(&["--device", "cpu", "--prefill", "gpu"]), &["--prefill gpu is for a GPU", "leave it out"]);
    refused(&with(&["--device", "cpu", "--max-context", "1"]), &["--max-context 1", "give at least 2"]);
    refused(&with(&["--device", "cpu", "--max-context", "200000"]), &["--max-context 200000", "give at most 163840"]);
    refused(
        &["plan", "--shape", "deepseek-v2-lite", "--ram", "4GiB", "--device", "cpu"],
        &["needs", "are free", "more memory"],
    );
    refused(&["plan", "demo", "--device", "cuda:7"], &["cuda:7", "use --device cpu"]);
    refused(&["plan", "demo", "--device", "cuda:0,7"], &["cuda:", "use --device cpu"]);
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use crate::common::gpu::{device, on_gpu};
    use crate::common::{cache_dir, fixture_dir, model_in};
    use moebius::config::{DenseBits, KvBits, PrefillOn};
    use moebius::cuda::Cuda;
    use moebius::load::gpu::CONTEXT_BYTES;
    use moebius::load::{Budget, Kept, Spec, Stored};
    use moebius::machine::topology::Topology;
    use moebius::model::{Attention, Ffn};

    /// VRAM taken after loading, as planned to within 1 percent, and how many experts of a layer are there.
    #[track_caller]
    fn check(dir: &std::path::Path, what: &str, config: EngineConfig) -> usize {
        let config =
            on_gpu(EngineConfig { cache_dir: Some(cache_dir()), threads: Some(2), max_context: Some(256), ..config });
        let machine = load::machine(&config, &Topology::read()).unwrap();
        let folder = folder("test", dir);
        let spec = folder.spec(&config).unwrap();
        let planned = plan("test", &spec, None).unwrap();
        let Budget::Gpu(cuda, own) = Budget::new(&spec, &machine).unwrap() else { panic!("{what}: on the CPU") };
        let job = load::cache_job("test", &folder.checkpoint, &folder.model, spec.precision.clone().unwrap());
        let experts = moebius_cache::convert::ensure(&job, &cache_dir(), &|_| {}).unwrap();
        let budget = Budget::Gpu(cuda.clone(), own);
        let lines = Mutex::new(Vec::new());
        let stored = Stored { resident: &folder.checkpoint, experts: Some(experts) };
        let loaded = load::assemble(&spec, stored, budget, machine, &|progress| {
            if let load::LoadProgress::Experts(line) = progress {
                lines.lock().unwrap().push(line.to_string());
            }
        })
        .unwrap();
        let (taken, total) = (cuda[0].allocated() as f64, (planned.vram_bytes() - CONTEXT_BYTES) as f64);
        eprintln!("{what}: {taken} bytes of VRAM taken, {total} planned");
        assert!((taken / total - 1.0).abs() < 0.01, "{what}: {taken} taken, {total} planned: {planned}");
        assert_eq!((loaded.max_context, planned.kv_tokens), (planned.max_context, loaded.kv_blocks * 64), "{what}");
        let told: Vec<_> = lines.into_inner().unwrap().into_iter().filter(|line| line.contains("of VRAM")).collect();
        assert_eq!(told, [loaded.device.unwrap()], "{what}: told once");
        assert!(
            told[0].contains("resident") && told[0].contains("a context of 256") && told[0].contains("tok/s in decode"),
            "{}",
            told[0]
        );
        planned.resident_experts
    }

    #[test]
    fn vram_is_what_loading_takes() {
        let _alone = alone();
        if device().is_none() {
            return;
        }
        let qwen = Checkpoint::synthetic(2);
        let small = |vram_mib: u64| EngineConfig {
            vram: vec![vram_mib << 20],
            max_batch_tokens: Some(256),
            ..Default::default()
        };
        assert_eq!(check(&qwen.dir(), "all resident", EngineConfig::default()), 32);
        let some = EngineConfig { resident_experts: Some(10), ..Default::default() };
        assert_eq!(check(&qwen.dir(), "some resident", some), 10);
        let none = EngineConfig { resident_experts: Some(0), prefill: PrefillOn::Cpu, ..Default::default() };
        assert_eq!(check(&qwen.dir(), "none resident", none), 0);
        check(&qwen.dir(), "a small budget", small(760));
        check(&qwen.dir(), "int8 keys and values", EngineConfig { kv: KvBits::Int8, ..Default::default() });
        for (dense, what) in [(DenseBits::Int8, "int8 dense"), (DenseBits::Int4, "int4 dense")] {
            check(&qwen.dir(), what, EngineConfig { dense, ..Default::default() });
        }
        for (name, what) in [
            ("deepseek_v2_lite", "latent attention"),
            ("deepseek_v4", "entries"),
            ("deepseek_v41", "shared entries"),
            ("glm5_next", "streams"),
            ("kimi_linear", "recurrent state"),
            ("nemotron_h", "experts without a gate"),
        ] {
            check(&fixture_dir(name), what, EngineConfig { experts: ExpertBits::Bf16, ..Default::default() });
        }
    }

    #[test]
    fn what_the_gpu_lacks_is_named() {
        let config = EngineConfig { device: Device::Cuda(vec![0]), vram: vec![24 << 30], ..EngineConfig::default() };
        let of = |name: &str| model_in(&fixture_dir(name));
        let (mut attention, mut delta_net, mut experts) = (of("qwen3_moe"), of("qwen3_next"), of("qwen3_moe"));
        attention.layers.iter_mut().for_each(|layer| {
            let Attention::Gqa(a) = &mut layer.attention else { panic!("grouped queries") };
            a.head_dim = 20;
        });
        delta_net.layers.iter_mut().for_each(|layer| {
            if let Attention::DeltaNet(a) = &mut layer.attention {
                a.key_head_dim = 192;
            }
        });
        experts.layers.iter_mut().for_each(|layer| {
            let Ffn::Moe(moe) = &mut layer.ffn else { panic!("experts") };
            moe.num_experts = 513;
        });
        for (model, what) in
            [(attention, "heads of 20 elements"), (delta_net, "keys of up to 128"), (experts, "at most 512 experts")]
        {
            let refused =
                plan("a model", &Spec::new(&model, &config, Kept::NOTHING).unwrap(), None).unwrap_err().to_string();
            assert!(refused.contains(what) && refused.ends_with(": use --device cpu"), "{refused}");
        }
    }

    #[test]
    fn a_gpu_is_planned_for_that_is_not_here() {
        let _alone = alone();
        // The command does not know the emulator, this process might.
        if device().is_some() && Cuda::open(0).is_ok_and(|cuda| !cuda.info.is_emulated()) {
            return eprintln!("skipped: there is a GPU");
        }
        let with = |flags: &[&'static str]| [&LITE[..], &["--device", "cuda:0"], flags].concat();
        let decode = |plan: &Value| plan["expected"]["decode_tok_per_s"].as_f64().unwrap();
        let large = json(&with(&["--vram", "24GiB"]));
        assert_eq!((&large["resident_experts"], &large["is_assumed"]), (&64.into(), &true.into()));
        // A model of which this machine could hold nothing.
        let huge = json(&["plan", "--shape", "deepseek-v3", "--vram", "48GiB", "--ram", "600GiB"]);
        assert!((1..256).contains(&huge["resident_experts"].as_u64().unwrap()), "{huge}");
        let small = json(&with(&["--vram", "6GiB"]));
        assert!(small["resident_experts"].as_u64().unwrap() < 64);
        assert!(small["advice"].to_string().contains("more VRAM all experts would be resident"), "{small}");
        assert!(decode(&large) > decode(&small));

        refused(&with(&[]), &["give --vram to plan for a GPU that is not here"]);
        refused(&with(&["--vram", "16"]), &["--vram 16 bytes", "such as 16GiB"]);
        // Of each of several.
        let of = |device, vram| [&LITE[..], &["--device", device, "--vram", vram]].concat();
        let two = json(&of("cuda:0,1", "6GiB,5GiB"));
        assert_eq!((&two["vram_limit_bytes"], &two["holders"]), (&(5u64 << 30).into(), &Value::Array(vec![])));
        assert!(large["advice"].to_string().contains("with a second GPU like it"), "{large}");
        assert!(!two["advice"].to_string().contains("with a second GPU"), "{two}");
        // Asked for, where shares would be chosen.
        let holds = json(&[&of("cuda:0,1", "6GiB")[..], &["--split", "experts"]].concat());
        assert!(holds["holders"][0]["experts"].as_u64().unwrap() > 0, "{holds}");
        assert!(holds["choice"].to_string().contains("--split experts, so cuda:0 has all but experts"), "{holds}");
        // Too uneven for shares: the larger one has all but experts that the other one holds.
        let two = json(&of("cuda:0,1", "4GiB,6GiB"));
        let held = &two["holders"][0];
        assert_eq!((&two["vram_limit_bytes"], &held["vram_limit_bytes"]), (&(6u64 << 30).into(), &(4u64 << 30).into()));
        assert!(held["experts"].as_u64().unwrap() > 0 && held["vram_bytes"].as_u64().unwrap() <= 4 << 30, "{two}");
        assert!(decode(&two) > decode(&json(&with(&["--vram", "6GiB"]))), "{two}");
        refused(&of("cuda:0,1,2", "24GiB,6GiB"), &["2 sizes for --device cuda:0,1,2", "give 3, or one for all"]);
        refused(&of("auto", "24GiB,6GiB"), &["2 sizes", "as in --device cuda:0,1"]);
        refused(&with(&["--vram", "1GiB"]), &["GiB of VRAM", "raise --vram to "]);
        refused(&with(&["--vram", "8GiB", "--resident-experts", "65"]), &["a layer has 64 experts", "auto"]);
        refused(&with(&["--vram", "6GiB", "--resident-experts", "64"]), &["give at most", "or auto"]);
        refused(&with(&["--vram", "5GiB", "--max-context", "163840"]), &["use --max-context"]);
        refused(
            &["plan", "--shape", "kimi-k2", "--vram", "48GiB", "--ram", "64GiB"],
            &["experts need", "use a machine with more memory"],
        );
    }
}
