//! Conversion: right bytes, built once, resumed after a kill, rebuilt when the source changes, nothing left behind on
//! errors.
#![allow(clippy::unwrap_used)] // a test

mod common;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{INT4, Model, SMALL, files};
use moebius_cache::convert::{self, Calibration, ConvertPhase, ExpertMoments, Inputs, Job, OfExpert, Progress, ensure};
use moebius_cache::pack::unpack_expert;
use moebius_cache::quantize::{Moments, quantize_expert};
use moebius_cache::{Checkpoint, Error, ExpertCache, Precision, Result};
use tempfile::TempDir;

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

/// Every expert of the cache is that of the model.
fn assert_holds(model: &Model, cache: &ExpertCache) {
    let layout = cache.layout(0);
    for layer in 1..=model.layers {
        let i = cache.layer_index(layer).unwrap();
        for e in 0..model.experts {
            let [gate, up, down] = [0, 1, 2].map(|part| f32s(&model.weights(layer, e, part)));
            assert_eq!(cache.expert(i, e), quantize_expert(&layout, &gate, &up, &down), "layer {layer}, expert {e}");
            cache.check_expert(i, e).unwrap();
        }
    }
}

fn model_and_cache() -> (TempDir, std::path::PathBuf, std::path::PathBuf) {
    let dir = TempDir::new().unwrap();
    let (model, cache) = (dir.path().join("model"), dir.path().join("cache"));
    SMALL.write(&model);
    (dir, model, cache)
}

#[test]
fn a_cache_holds_the_experts_and_is_found_again() {
    let (_dir, model, cache_dir) = model_and_cache();
    let (cache, phases) = SMALL.ensure(&model, &cache_dir);
    let cache = cache.unwrap();
    assert_holds(&SMALL, &cache);
    assert_eq!(phases, [ConvertPhase::Converting, ConvertPhase::Finishing]);
    assert_eq!((cache.layer_index(0), cache.layer_index(4), cache.num_layers()), (None, Some(3), 4));
    assert!(cache.header().layers.iter().all(|entry| entry.offset % 4096 == 0));
    cache.verify(&|_, _| ()).unwrap();
    assert_eq!(files(&cache_dir).len(), 1, "{:?}", files(&cache_dir));

    let (again, phases) = SMALL.ensure(&model, &cache_dir);
    assert_eq!((again.unwrap().header(), phases), (cache.header(), vec![]));
    let checkpoint = Checkpoint::open(&model).unwrap();
    assert_eq!(convert::locate(&SMALL.job(&checkpoint, INT4), &cache_dir).unwrap().as_deref(), Some(cache.path()));
    assert_eq!(convert::list(&cache_dir).unwrap().len(), 1);
}

#[test]
fn bf16_keeps_every_bit() {
    let (_dir, model, cache_dir) = model_and_cache();
    let checkpoint = Checkpoint::open(&model).unwrap();
    let cache = ensure(&SMALL.job(&checkpoint, Precision::Bf16), &cache_dir, &|_| ()).unwrap();
    let truth = [0, 1, 2].map(|part| f32s(&SMALL.weights(2, 3, part)));
    assert_eq!(unpack_expert(&cache.layout(0), cache.expert(1, 3)), truth);
}

/// Gives every expert the same inputs.
#[derive(Debug)]
struct SameInputs;

impl Inputs for SameInputs {
    fn each_layer(&self, take: &mut dyn FnMut(usize, OfExpert<'_>) -> Result<()>) -> Result<()> {
        let of = |inputs: usize| Moments::of_squares(&(0..inputs).map(|i| (i % 7) as f32).collect::<Vec<_>>());
        let moments = ExpertMoments { hidden: of(SMALL.hidden), intermediate: of(SMALL.intermediate) };
        (0..SMALL.layers).try_for_each(|i| take(i, &|_| moments.clone()))
    }
}

const A_TEXT: Calibration<'static> = Calibration { name: "a text", inputs: Some(&SameInputs) };

#[test]
fn a_calibrated_cache_stands_beside_the_plain_one() {
    let (_dir, model, cache_dir) = model_and_cache();
    let checkpoint = Checkpoint::open(&model).unwrap();
    let job = |name, inputs| Job { calibration: Some(Calibration { name, inputs }), ..SMALL.job(&checkpoint, INT4) };
    let absent = ensure(&job("a text", None), &cache_dir, &|_| ()).unwrap_err().to_string();
    assert!(absent.contains("no int4") && absent.contains("calibrated with a text"), "{absent}");
    let plain = ensure(&SMALL.job(&checkpoint, INT4), &cache_dir, &|_| ()).unwrap();
    let calibrated = ensure(&job("a text", Some(&SameInputs)), &cache_dir, &|_| ()).unwrap();
    assert_ne!(plain.path(), calibrated.path());
    assert_ne!(plain.expert(0, 0), calibrated.expert(0, 0));
    assert_eq!(calibrated.header().source.as_ref().unwrap().calibration.as_deref(), Some("a text"));
    // Found again without inputs; another text is another cache, and the plain one is still there.
    assert_eq!(ensure(&job("a text", None), &cache_dir, &|_| ()).unwrap().path(), calibrated.path());
    assert!(ensure(&job("another text", None), &cache_dir, &|_| ()).is_err());
    ensure(&job("another text", Some(&SameInputs)), &cache_dir, &|_| ()).unwrap();
    assert_eq!(SMALL.ensure(&model, &cache_dir).1, []);
    assert_eq!(files(&cache_dir).len(), 3, "{:?}", files(&cache_dir));

    let bf16 = Job { precision: Precision::Bf16.into(), ..job("a text", Some(&SameInputs)) };
    assert!(ensure(&bf16, &cache_dir, &|_| ()).unwrap_err().to_string().contains("--experts int4"));
}

#[test]
fn the_same_content_elsewhere_is_not_built_again() {
    let (dir, model, cache_dir) = model_and_cache();
    SMALL.ensure(&model, &cache_dir).0.unwrap();
    let copy = dir.path().join("copy");
    SMALL.write(&copy);
    assert_eq!(SMALL.ensure(&copy, &cache_dir).1, [ConvertPhase::Comparing]);
    assert_eq!(SMALL.ensure(&copy, &cache_dir).1, [], "remembered");
    assert_eq!(SMALL.ensure(&model, &cache_dir).1, []);
}

#[test]
fn a_changed_shard_is_built_again_and_the_old_cache_removed() {
    let (_dir, model, cache_dir) = model_and_cache();
    SMALL.ensure(&model, &cache_dir).0.unwrap();
    let other = Model { seed: 6, ..SMALL };
    other.write_layer(&model, 3, |_, _| ());
    let (cache, phases) = SMALL.ensure(&model, &cache_dir);
    assert!(
        phases.contains(&ConvertPhase::Converting) && matches!(phases.last(), Some(ConvertPhase::Removed(_))),
        "{phases:?}"
    );
    let truth = quantize_expert(
        &cache.as_ref().unwrap().layout(0),
        &f32s(&other.weights(3, 1, 0)),
        &f32s(&other.weights(3, 1, 1)),
        &f32s(&other.weights(3, 1, 2)),
    );
    assert_eq!(cache.unwrap().expert(2, 1), truth);
    assert_eq!(files(&cache_dir).len(), 1, "{:?}", files(&cache_dir));
}

#[test]
fn one_changed_weight_outside_of_the_samples_is_seen() {
    let (_dir, model, cache_dir) = model_and_cache();
    SMALL.ensure(&model, &cache_dir).0.unwrap();
    SMALL.write_layer(&model, 2, |name, bytes| {
        if name.contains("experts.5.down") {
            bytes[0] ^= 1;
        }
    });
    let (cache, phases) = SMALL.ensure(&model, &cache_dir);
    cache.unwrap();
    let changed = ConvertPhase::Replacing("the checkpoint has changed".into());
    assert_eq!(phases, [ConvertPhase::Comparing, changed, ConvertPhase::Converting, ConvertPhase::Finishing]);
    assert_eq!(files(&cache_dir).len(), 1);
}

#[test]
fn two_at_once_build_once() {
    let (_dir, model, cache_dir) = model_and_cache();
    let built = std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| SMALL.ensure(&model, &cache_dir)));
        both.map(|thread| thread.join().unwrap())
    });
    let conversions = built.iter().filter(|(_, phases)| phases.contains(&ConvertPhase::Converting)).count();
    assert_eq!(conversions, 1);
    built.iter().for_each(|(cache, _)| assert_holds(&SMALL, cache.as_ref().unwrap()));
    assert_eq!(files(&cache_dir).len(), 1, "{:?}", files(&cache_dir));
}

#[test]
fn a_nan_is_refused_by_name_and_leaves_nothing() {
    let (_dir, model, cache_dir) = model_and_cache();
    SMALL.write_layer(&model, 3, |name, bytes| {
        if name.contains("experts.4.up") {
            bytes[100..102].copy_from_slice(&half::bf16::NAN.to_le_bytes());
        }
    });
    let error = SMALL.ensure(&model, &cache_dir).0.unwrap_err();
    assert!(error.to_string().contains("model.layers.3.mlp.experts.4.up_proj.weight holds a NaN"), "{error}");
    assert_eq!(files(&cache_dir), [""; 0]);
}

#[test]
fn wrong_shapes_and_missing_tensors_are_named_before_work_starts() {
    let (_dir, model, cache_dir) = model_and_cache();
    let checkpoint = Checkpoint::open(&model).unwrap();
    let error = ensure(&Model { hidden: 128, ..SMALL }.job(&checkpoint, INT4), &cache_dir, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("has shape [64, 96] where [64, 128] is expected"), "{error}");
    let error = ensure(&Model { layers: 5, ..SMALL }.job(&checkpoint, INT4), &cache_dir, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("tensor model.layers.5.mlp.experts.0.gate_proj.weight is missing"), "{error}");
    let error = ensure(&SMALL.job(&checkpoint, Precision::int8(128)), &cache_dir, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("group size 128 does not divide"), "{error}");
    assert!(!cache_dir.exists());
}

/// Runs the test called `name`, which is ignored otherwise, in a process of its own.
fn subprocess(name: &str, model: &Path, cache_dir: &Path) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env("MODEL", model).env("CACHE_DIR", cache_dir);
    command.output().unwrap()
}

fn argument(name: &str) -> std::path::PathBuf {
    std::env::var_os(name).expect("run by another test").into()
}

#[test]
#[ignore = "run in a subprocess by a_killed_build_is_resumed"]
fn dies_in_the_third_layer() {
    die_in_the_third_layer(None);
}

#[test]
#[ignore = "run in a subprocess by a_killed_calibrated_build_is_resumed"]
fn dies_in_the_third_calibrated_layer() {
    die_in_the_third_layer(Some(A_TEXT));
}

fn die_in_the_third_layer(calibration: Option<Calibration<'_>>) {
    let checkpoint = Checkpoint::open(&argument("MODEL")).unwrap();
    let calls = AtomicUsize::new(0);
    let result = ensure(&Job { calibration, ..SMALL.job(&checkpoint, INT4) }, &argument("CACHE_DIR"), &|_| {
        if calls.fetch_add(1, Ordering::Relaxed) == SMALL.experts * 2 + 2 {
            std::process::abort();
        }
    });
    unreachable!("{result:?}");
}

#[test]
fn a_killed_calibrated_build_is_resumed() {
    let (dir, model, cache_dir) = model_and_cache();
    assert!(!subprocess("dies_in_the_third_calibrated_layer", &model, &cache_dir).status.success());
    let checkpoint = Checkpoint::open(&model).unwrap();
    let job = Job { calibration: Some(A_TEXT), ..SMALL.job(&checkpoint, INT4) };
    let converted = AtomicUsize::new(0);
    let resumed = ensure(&job, &cache_dir, &|progress: Progress| {
        converted.fetch_add((progress.phase == ConvertPhase::Converting) as usize, Ordering::Relaxed);
    });
    let converted = converted.into_inner();
    assert!((SMALL.experts * 2..=SMALL.experts * 3).contains(&converted), "{converted}");
    let whole = ensure(&job, &dir.path().join("another"), &|_| ()).unwrap();
    assert!(std::fs::read(resumed.unwrap().path()).unwrap() == std::fs::read(whole.path()).unwrap());
}

#[test]
fn a_killed_build_is_resumed() {
    let (_dir, model, cache_dir) = model_and_cache();
    assert!(!subprocess("dies_in_the_third_layer", &model, &cache_dir).status.success());
    let left = files(&cache_dir);
    assert!(
        left.iter().any(|name| name.ends_with(".partial")) && !left.iter().any(|name| name.ends_with(".moebius")),
        "{left:?}"
    );

    let checkpoint = Checkpoint::open(&model).unwrap();
    let converted = AtomicUsize::new(0);
    let cache = ensure(&SMALL.job(&checkpoint, INT4), &cache_dir, &|progress: Progress| {
        converted.fetch_add((progress.phase == ConvertPhase::Converting) as usize, Ordering::Relaxed);
    });
    assert_holds(&SMALL, &cache.unwrap());
    // The first layer was on disk before the third began; the second may have been.
    let converted = converted.into_inner();
    assert!((SMALL.experts * 2..=SMALL.experts * 3).contains(&converted), "{converted}");
    assert_eq!(files(&cache_dir).len(), 1, "{:?}", files(&cache_dir));
}

#[test]
fn a_build_killed_after_its_cache_was_there_leaves_nothing() {
    let (_dir, model, cache_dir) = model_and_cache();
    assert!(!subprocess("dies_in_the_third_layer", &model, &cache_dir).status.success());
    let lock = files(&cache_dir).into_iter().find(|name| name.ends_with(".lock")).unwrap();
    SMALL.ensure(&model, &cache_dir).0.unwrap();

    // It was killed between publishing the cache and removing its lock.
    let lock = File::create(cache_dir.join(lock)).unwrap();
    lock.lock().unwrap();
    SMALL.ensure(&model, &cache_dir).0.unwrap();
    assert_eq!(files(&cache_dir).len(), 2, "somebody holds that lock");
    drop(lock);
    SMALL.ensure(&model, &cache_dir).0.unwrap();
    assert_eq!(files(&cache_dir).len(), 1, "{:?}", files(&cache_dir));
}

#[test]
fn a_resumed_build_trusts_neither_damaged_layers_nor_another_source() {
    let (_dir, model, cache_dir) = model_and_cache();
    for damage in ["layer", "source"] {
        assert!(!subprocess("dies_in_the_third_layer", &model, &cache_dir).status.success());
        let partial = files(&cache_dir).into_iter().find(|name| name.ends_with(".partial")).unwrap();
        if damage == "layer" {
            let path = cache_dir.join(partial);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[4096 + 70_000] ^= 4;
            std::fs::write(&path, bytes).unwrap();
        } else {
            SMALL.write_layer(&model, 1, |_, _| ());
        }
        let (cache, phases) = SMALL.ensure(&model, &cache_dir);
        assert_holds(&SMALL, &cache.unwrap());
        assert_eq!(phases.contains(&ConvertPhase::Resuming), damage == "layer", "{phases:?}");
        std::fs::remove_dir_all(&cache_dir).unwrap();
    }
}

#[test]
fn a_damaged_cache_is_reported_and_replaced() {
    let (_dir, model, cache_dir) = model_and_cache();
    let cache = SMALL.ensure(&model, &cache_dir).0.unwrap();
    let path = cache.path().to_path_buf();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = cache.header().layers[2].offset as usize + 4 * cache.layout(0).bytes() + 77;
    bytes[at] ^= 0x10;
    drop(cache);
    std::fs::write(&path, &bytes).unwrap();

    let damaged = ExpertCache::open(&path).unwrap();
    damaged.check_expert(2, 3).unwrap();
    for error in [damaged.check_expert(2, 4).unwrap_err(), damaged.verify(&|_, _| ()).unwrap_err()] {
        assert!(error.to_string().contains("expert 4 of layer 3 is damaged"), "{error}");
        assert!(error.to_string().contains("moebius cache build --force"), "{error}");
    }
    let checkpoint = Checkpoint::open(&model).unwrap();
    let rebuilt = convert::build(&SMALL.job(&checkpoint, INT4), &cache_dir, &|_| ()).unwrap();
    assert_holds(&SMALL, &rebuilt);

    std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
    let (cache, phases) = SMALL.ensure(&model, &cache_dir);
    assert!(matches!(&phases[0], ConvertPhase::Replacing(why) if why.contains("cut off")), "{phases:?}");
    assert_holds(&SMALL, &cache.unwrap());
}

#[test]
fn a_folder_that_cannot_be_written_is_one_clear_sentence() {
    let (dir, model, _) = model_and_cache();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = SMALL.ensure(&model, &file.join("cache")).0.unwrap_err();
    assert!(matches!(error, Error::CacheDir { .. }) && error.to_string().contains("--cache-dir"), "{error}");
}

/// Mounts a small file system, or says why not.
fn tmpfs(at: &Path, options: &str) -> bool {
    std::fs::create_dir_all(at).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
    let mounted = mounted.is_ok_and(|output| output.status.success());
    if !mounted {
        eprintln!("SKIPPED: mounting a tmpfs needs root");
    }
    mounted
}

fn unmount(at: &Path) {
    assert!(Command::new("umount").arg(at).status().unwrap().success());
}

#[test]
fn a_full_or_read_only_disk_is_known_before_work_starts() {
    let (dir, model, _) = model_and_cache();
    let (full, read_only) = (dir.path().join("full"), dir.path().join("read-only"));
    if tmpfs(&full, "size=64k") {
        let (result, phases) = SMALL.ensure(&model, &full);
        let left = files(&full);
        unmount(&full);
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains(
                "the cache needs 0.25 MiB of disk, 0.06 MiB are free; choose another folder with --cache-dir"
            ),
            "{error}"
        );
        assert_eq!((phases, left), (vec![], vec![]));
    }
    if tmpfs(&read_only, "ro") {
        let error = SMALL.ensure(&model, &read_only).0.unwrap_err().to_string();
        unmount(&read_only);
        assert!(error.ends_with("cannot be written; choose another folder with --cache-dir"), "{error}");
    }
}

const MEDIUM: Model = Model { layers: 4, experts: 16, hidden: 1024, intermediate: 256, seed: 3 };

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
#[ignore = "run in a subprocess by conversion_needs_little_memory"]
fn converts_and_prints_its_memory() {
    let checkpoint = Checkpoint::open(&argument("MODEL")).unwrap();
    let (anonymous, mapped) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let before = (status("RssAnon"), status("RssFile"));
    let watch = |_| {
        anonymous.fetch_max(status("RssAnon"), Ordering::Relaxed);
        mapped.fetch_max(status("RssFile"), Ordering::Relaxed);
    };
    ensure(&MEDIUM.job(&checkpoint, Precision::Bf16), &argument("CACHE_DIR"), &watch).unwrap();
    println!("memory {} {}", anonymous.into_inner() - before.0, mapped.into_inner() - before.1);
}

#[test]
fn conversion_needs_little_memory() {
    let dir = TempDir::new().unwrap();
    MEDIUM.write(dir.path());
    let output = subprocess("converts_and_prints_its_memory", dir.path(), &dir.path().join("cache"));
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.split_once("memory ")).unwrap_or_else(|| panic!("{text}")).1;
    let bytes: Vec<usize> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    let layer_bytes = MEDIUM.experts * MEDIUM.hidden * MEDIUM.intermediate * 3 * 2;
    println!("a layer has {layer_bytes} bytes; anonymous and mapped memory grew by {bytes:?}");
    assert!(bytes[0] < 2 * layer_bytes && bytes[1] < 2 * layer_bytes, "{bytes:?} with layers of {layer_bytes}");
}
