//! Pipes, folders, sockets and links where files belong: in the cache folder, and in a model's.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::child::{ended, sentence};
use super::common::checkpoint::{Checkpoint, files};
use super::common::fixture_dir;

#[allow(unsafe_code)] // mkfifo
pub(crate) fn make_pipe(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

fn make_folder(path: &Path) {
    std::fs::create_dir(path).unwrap();
}

fn make_link_to_itself(path: &Path) {
    std::os::unix::fs::symlink(path, path).unwrap();
}

fn make_socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
}

type Make = fn(&Path);
const OTHERS: [(&str, Make); 4] =
    [("pipe", make_pipe), ("folder", make_folder), ("link", make_link_to_itself), ("socket", make_socket)];

fn model() -> Checkpoint {
    Checkpoint::copy_of(&fixture_dir("qwen3_moe"))
}

fn build(model: &Checkpoint) -> std::process::Command {
    model.command(&model.cache(), &["cache", "build", "MODEL"])
}

/// The name of the cache of [`model`], without its ending, and the key in it.
fn names(model: &Checkpoint) -> (String, String) {
    let (code, stderr) = ended(build(model));
    assert_eq!(code, Some(0), "{stderr}");
    let name = files(&model.cache()).pop().unwrap();
    std::fs::remove_file(model.cache().join(&name)).unwrap();
    let name = name.strip_suffix(".moebius").unwrap().to_string();
    let key = name.rsplitn(4, '-').take(3).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("-");
    (name, key)
}

#[test]
fn strangers_in_the_cache_folder_are_passed_over() {
    let model = model();
    let (name, _) = names(&model);
    for (_, make) in OTHERS {
        for stranger in ["x.moebius", "x.partial", "x.lock"] {
            make(&model.cache().join(stranger));
        }
        make(&model.cache().join(format!("{name}.sources.json")));
        for command in ["build", "info", "verify"] {
            let (code, stderr) = ended(model.command(&model.cache(), &["cache", command, "MODEL"]));
            assert_eq!(code, Some(0), "{command}: {stderr}");
        }
        std::fs::remove_dir_all(model.cache()).unwrap();
        std::fs::create_dir(model.cache()).unwrap();
    }
}

#[test]
fn what_has_the_place_of_a_cache_is_named_with_the_remedy() {
    let model = model();
    let (name, key) = names(&model);
    for (kind, make) in OTHERS {
        for place in [format!("{name}.moebius"), format!("{key}.partial"), format!("{key}.lock")] {
            make(&model.cache().join(&place));
            let words = sentence(build(&model));
            assert!(
                words.contains(&place) && words.contains(&format!("a {kind} is where")) && words.contains("remove it"),
                "{words}"
            );
            let left = files(&model.cache());
            assert!(left.iter().all(|left| *left == place), "{left:?}");
            std::fs::remove_dir_all(model.cache()).unwrap();
            std::fs::create_dir(model.cache()).unwrap();
        }
    }
    make_folder(&model.cache().join(format!("{name}.moebius")));
    let words = sentence(model.command(&model.cache(), &["cache", "build", "--force", "MODEL"]));
    assert!(words.contains("a folder is where") && files(&model.cache()).is_empty(), "{words}");
}

#[test]
fn what_has_the_place_of_a_models_file_is_a_sentence() {
    for place in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        for (kind, make) in OTHERS {
            let model = model();
            let _ = std::fs::remove_file(model.file(place));
            make(&model.file(place));
            let words = sentence(model.command(&model.cache(), &["generate", "MODEL", "x"]));
            assert!(words.contains(model.dir().to_str().unwrap()), "{kind} {place}: {words}");
            assert_eq!(files(&model.cache()).iter().find(|name| name.ends_with(".partial")), None);
        }
    }
    let model = Checkpoint::copy_of(&fixture_dir("qwen3_moe_dense_layer_sharded"));
    for place in ["model-00002-of-00003.safetensors", "model.safetensors.index.json"] {
        let bytes = std::fs::read(model.file(place)).unwrap();
        model.remove(place);
        make_pipe(&model.file(place));
        // Without its index it is a folder of shards.
        let (code, stderr) = ended(build(&model));
        assert_eq!(code, Some(i32::from(place.ends_with("safetensors"))), "{stderr}");
        model.remove(place);
        std::fs::write(model.file(place), bytes).unwrap();
    }
}

#[test]
fn words_of_a_file_are_cut() {
    let model = model();
    for words in ["x".repeat(100_000), "x ".repeat(50_000)] {
        model.config(serde_json::json!({"model_type": words}));
        let error = sentence(build(&model));
        assert!(error.contains("is not supported") && error.len() < 3000, "{} bytes", error.len());
    }
}
