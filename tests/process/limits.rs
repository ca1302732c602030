//! Limits of a process: sizes of files, address space, threads.
#![allow(unsafe_code)] // setrlimit

use std::os::unix::process::CommandExt;
use std::process::Command;

use super::child::{ended, sentence};
use super::common::checkpoint::{Checkpoint, files, moebius};

/// `command` with a limit; the signals are as a shell would hand them over.
fn limited(mut command: Command, resource: libc::__rlimit_resource_t, limit: u64) -> Command {
    // SAFETY: between fork and exec the closure makes one call, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(resource, &libc::rlimit { rlim_cur: limit, rlim_max: limit }) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

#[test]
fn a_cache_beyond_the_largest_file_is_a_sentence_and_leaves_nothing() {
    let model = Checkpoint::synthetic(1);
    let build = model.command(&model.cache(), &["cache", "build", "MODEL"]);
    let words = sentence(limited(build, libc::RLIMIT_FSIZE, 1 << 20));
    assert!(words.contains("ulimit -f") && words.contains("--cache-dir"), "{words}");
    assert_eq!(files(&model.cache()), Vec::<String>::new());
}

#[test]
fn a_demo_beyond_the_largest_file_is_a_sentence_and_leaves_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let words = sentence(limited(moebius(cache.path(), &["generate", "demo", "x"]), libc::RLIMIT_FSIZE, 100));
    assert!(words.contains("cannot write the demo model") && words.contains("--cache-dir"), "{words}");
    assert_eq!(files(cache.path()), Vec::<String>::new());
}

#[test]
fn too_little_address_space_is_a_sentence() {
    let cache = tempfile::tempdir().unwrap();
    let (code, stderr) = ended(moebius(cache.path(), &["generate", "demo", "x", "--max-tokens", "1"]));
    assert_eq!(code, Some(0), "{stderr}");
    // Below the first not even the program itself can be mapped.
    for mib in [100, 150, 200, 300, 400, 600, 800] {
        let (code, stderr) = ended(limited(
            moebius(cache.path(), &["generate", "demo", "x", "--max-tokens", "1"]),
            libc::RLIMIT_AS,
            mib << 20,
        ));
        let refused = code == Some(1) && stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1;
        assert!(refused && stderr.contains("ulimit -v") || code == Some(0) && mib > 300, "{mib} MiB: {stderr}");
    }
}

#[test]
fn too_few_open_files_are_a_sentence() {
    let cache = tempfile::tempdir().unwrap();
    for files in [8, 12, 40] {
        for args in [&["serve", "demo", "--port", "0"][..], &["chat", "demo"], &["generate", "demo", "x"]] {
            let words = sentence(limited(moebius(cache.path(), args), libc::RLIMIT_NOFILE, files));
            assert!(words.contains("ulimit -n"), "{words}");
        }
    }
}

#[test]
fn rayons_variable_is_not_obeyed() {
    let cache = tempfile::tempdir().unwrap();
    for args in
        [&["cache", "build", "demo"][..], &["cache", "verify", "demo"], &["generate", "demo", "x", "--max-tokens", "1"]]
    {
        let mut command = moebius(cache.path(), args);
        command.env("RAYON_NUM_THREADS", "100000").env("RAYON_RS_NUM_CPUS", "100000");
        let (code, stderr) = ended(command);
        assert_eq!(code, Some(0), "{args:?}: {stderr}");
    }
}
