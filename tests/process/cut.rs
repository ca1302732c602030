//! Files that are cut off while they are mapped.

use std::fs::File;
use std::process::Stdio;

use super::child::{Running, Server, ended, wait_for};
use super::common::checkpoint::{Checkpoint, files};
use std::io::Read;

fn cut(path: &std::path::Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_shard_that_is_cut_while_it_is_converted_is_named_and_nothing_is_left() {
    let model = Checkpoint::synthetic(4);
    let shard = model.file("layer-03.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    let mut command = model.command(&model.cache(), &["cache", "build", "MODEL"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut build = Running::start(command);
    wait_for("the build begins", || files(&model.cache()).iter().any(|name| name.ends_with(".partial")).then_some(()));
    cut(&shard, 1 << 20);
    let status = build.end();
    let mut stderr = String::new();
    build.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{stderr}");
    assert!(
        stderr.contains("layer-03.safetensors was cut off") && stderr.contains("download the checkpoint again"),
        "{stderr}"
    );
    assert_eq!(files(&model.cache()), Vec::<String>::new());

    std::fs::write(&shard, whole).unwrap();
    let (code, stderr) = ended(model.command(&model.cache(), &["cache", "build", "MODEL"]));
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ended(model.command(&model.cache(), &["cache", "verify", "MODEL"])).0, Some(0));
}

#[test]
fn a_cache_that_is_cut_while_it_is_served_is_named_and_built_again() {
    let cache = tempfile::tempdir().unwrap();
    let start = |options: &[&str]| {
        Server::start("demo", cache.path(), &[&["--log", "off"], options].concat(), |command| {
            command.stderr(Stdio::piped());
        })
        .ready()
    };
    let right = start(&[]).complete(4);
    for memory in ["map", "auto"] {
        let mut server = start(&["--experts-memory", memory]);
        let name = files(cache.path()).into_iter().find(|name| name.ends_with(".moebius")).unwrap();
        cut(&cache.path().join(&name), 4096);
        // No answer: the process is gone before there is one.
        assert_eq!(server.try_ask("POST", "/v1/completions", &super::child::completion(4)), None);
        let status = server.process.end();
        let mut stderr = String::new();
        server.process.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(&format!("{name} was cut off")) && stderr.contains("start again"), "{stderr}");
        assert_eq!(text(&start(&[]).complete(4)), text(&right), "built again");
    }
}

fn text(answer: &str) -> String {
    let body: serde_json::Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    body["choices"][0]["text"].as_str().unwrap().to_string()
}
