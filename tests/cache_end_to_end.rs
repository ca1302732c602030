//! The cache as the command uses it: killed, damaged, outdated, shared; the answer is right or there is none.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use common::checkpoint::{Checkpoint, files};
use common::fixture_dir;

/// What one forward pass with the caches in `cache` computes, or the sentence that says why not.
fn answer(model: &Checkpoint, cache: &Path) -> Result<Vec<u8>, String> {
    let out = model.beside("answer.safetensors");
    let args =
        ["capture", "MODEL", "--tokens", "1,2,3,4,5,6,7,8", "--logits", "--router", "--out", out.to_str().unwrap()];
    let output = model.command(cache, &args).output().unwrap();
    if !output.status.success() {
        assert!(!out.exists());
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let bytes = std::fs::read(&out).unwrap();
    std::fs::remove_file(out).unwrap();
    Ok(bytes)
}

/// The answer without any cache from before.
fn fresh_answer(model: &Checkpoint) -> Vec<u8> {
    answer(model, tempfile::tempdir().unwrap().path()).unwrap()
}

fn built(model: &Checkpoint) -> PathBuf {
    let output = model.run(&["cache", "build", "MODEL"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().into()
}

fn inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

#[test]
fn a_killed_build_is_continued_and_the_answer_is_right() {
    let model = Checkpoint::synthetic(3);
    let mut child = model.command(&model.cache(), &["cache", "build", "MODEL"]).stdout(Stdio::null()).spawn().unwrap();
    let is_partial = |name: &String| name.ends_with(".partial");
    while !files(&model.cache()).iter().any(is_partial) {
        assert!(child.try_wait().unwrap().is_none(), "the build ended before it could be killed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    let left = files(&model.cache());
    assert!(left.iter().any(is_partial) && !left.iter().any(|name| name.ends_with(".moebius")), "{left:?}");

    assert_eq!(answer(&model, &model.cache()).unwrap(), fresh_answer(&model));
    let left = files(&model.cache());
    assert!(left.len() == 1 && left[0].ends_with(".moebius"), "{left:?}");
}

#[test]
fn two_processes_build_once() {
    let model = Checkpoint::synthetic(2);
    let start = || model.command(&model.cache(), &["cache", "build", "MODEL"]).stdout(Stdio::piped()).spawn().unwrap();
    let (mut first, mut second) = (start(), start());
    // A second build would put a new file in the place of the one that the first to end has left.
    let path = loop {
        let ended = first.try_wait().unwrap().or(second.try_wait().unwrap());
        if ended.is_some() {
            let left = files(&model.cache());
            break model.cache().join(left.iter().find(|name| name.ends_with(".moebius")).unwrap());
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    let before = inode(&path);
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success());
    assert_eq!(inode(&path), before);
    assert_eq!(files(&model.cache()).len(), 1, "{:?}", files(&model.cache()));
}

#[test]
fn a_damaged_cache_gives_no_wrong_answer() {
    let model = Checkpoint::copy_of(&fixture_dir("qwen3_moe"));
    let path = built(&model);
    let whole = std::fs::read(&path).unwrap();
    let right = answer(&model, &model.cache()).unwrap();
    let (mut errors, mut answers) = (0, 0);
    for i in 0..40 {
        let mut damaged = whole.clone();
        // Header, table and the ends of layers first, then all over the file.
        let at = if i < 8 { i * 1000 } else { (i * 2_654_435_761) % whole.len() };
        damaged[at] ^= 1 << (i % 8);
        std::fs::write(&path, &damaged).unwrap();
        let verified = model.run(&["cache", "verify", "MODEL"]).status.success();
        match answer(&model, &model.cache()) {
            Ok(bytes) => {
                answers += 1;
                assert!(bytes == right, "byte {at}");
            }
            Err(text) => {
                errors += 1;
                assert!(text.starts_with("error: ") && text.contains("moebius cache build --force"), "{text}");
                assert_eq!(text.lines().count(), 1, "{text}");
                assert!(!verified, "byte {at}: {text}");
            }
        }
    }
    assert!(errors > 10 && answers > 3, "{errors} errors, {answers} answers");

    let mut damaged = whole.clone();
    let half = whole.len() / 2;
    damaged[half..half + 4096].fill(0);
    std::fs::write(&path, damaged).unwrap();
    // A copy looks at every expert, also at those that no token goes to.
    let out = model.beside("answer.safetensors");
    let copied =
        ["capture", "MODEL", "--tokens", "1", "--logits", "--experts-memory", "copy", "--out", out.to_str().unwrap()];
    let output = model.run(&copied);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("is damaged") && text.lines().count() == 1, "{text}");
    assert!(!model.run(&["cache", "verify", "MODEL"]).status.success());
    assert!(model.run(&["cache", "build", "MODEL", "--force"]).status.success());
    assert_eq!(answer(&model, &model.cache()).unwrap(), right);

    for bytes in [&whole[..whole.len() - 1], &whole[..100], &[]] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(answer(&model, &model.cache()).unwrap(), right, "a cut-off file is built again");
    }
}

#[test]
fn a_changed_checkpoint_is_converted_again() {
    let model = Checkpoint::copy_of(&fixture_dir("qwen3_moe_dense_layer_sharded"));
    let before = answer(&model, &model.cache()).unwrap();
    let shard = "model-00002-of-00003.safetensors";
    let modified = std::fs::metadata(model.file(shard)).unwrap().modified().unwrap();
    // The sign of one weight of every expert in the shard; the file's size and time stay as they were.
    model.tensors(shard, |header, data| {
        for (_, tensor) in header
            .as_object()
            .unwrap()
            .iter()
            .filter(|(name, _)| name.contains("experts") && name.contains("down_proj"))
        {
            data[tensor["data_offsets"][0].as_u64().unwrap() as usize + 1] ^= 0x80;
        }
    });
    std::fs::File::options().write(true).open(model.file(shard)).unwrap().set_modified(modified).unwrap();
    let after = answer(&model, &model.cache()).unwrap();
    assert_ne!(after, before);
    assert_eq!(after, fresh_answer(&model));
    assert_eq!(
        files(&model.cache()).iter().filter(|name| name.ends_with(".moebius")).count(),
        1,
        "the outdated cache is gone"
    );
}

#[test]
fn a_moved_or_copied_checkpoint_is_not_converted_again() {
    let model = Checkpoint::copy_of(&fixture_dir("deepseek_v3"));
    let right = answer(&model, &model.cache()).unwrap();
    let path = model.cache().join(&files(&model.cache())[0]);
    let before = inode(&path);
    let copy = Checkpoint::copy_of(&model.dir());
    for _ in 0..2 {
        assert_eq!(answer(&copy, &model.cache()).unwrap(), right);
        assert_eq!(inode(&path), before);
    }
    let caches: Vec<_> = files(&model.cache()).into_iter().filter(|name| name.ends_with(".moebius")).collect();
    assert_eq!(caches.len(), 1, "{caches:?}");
}
