//! A model's files are opened once on the way from its name to an engine, as the system counts.
#![allow(clippy::unwrap_used, unsafe_code)] // helpers of tests are outside #[test] functions

mod common;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use common::{cache_dir, demo_dir};
use moebius::config::EngineConfig;
use moebius::text::TextModel;

/// How often each file in a folder was opened since, by this process or another.
struct Opens(libc::c_int);

impl Opens {
    fn of(dir: &Path) -> Self {
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path is a C string, and the descriptor is read below only.
        let queue = unsafe {
            let queue = libc::inotify_init1(libc::IN_NONBLOCK);
            assert!(queue >= 0 && libc::inotify_add_watch(queue, path.as_ptr(), libc::IN_OPEN) >= 0);
            queue
        };
        Self(queue)
    }

    fn count(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        let mut buffer = [0u8; 1 << 16];
        loop {
            // SAFETY: the buffer is as long as it says.
            let read = unsafe { libc::read(self.0, buffer.as_mut_ptr().cast(), buffer.len()) };
            let Ok(read) = usize::try_from(read) else { return counts };
            let mut at = 0;
            while at < read {
                // Watch, mask, cookie, length of the name; then the name, filled up with zeros.
                let len = u32::from_ne_bytes(buffer[at + 12..at + 16].try_into().unwrap()) as usize;
                let name = CStr::from_bytes_until_nul(&buffer[at + 16..at + 16 + len]);
                if let Ok(name) = name {
                    *counts.entry(name.to_str().unwrap().to_string()).or_default() += 1;
                }
                at += 16 + len;
            }
        }
    }
}

#[test]
fn from_a_name_to_an_engine() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo_dir("moe-gqa")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let name = dir.path().to_str().unwrap();
    let config = EngineConfig {
        cache_dir: Some(cache_dir()),
        threads: Some(2),
        max_context: Some(256),
        ..EngineConfig::default()
    };
    let opens = Opens::of(dir.path());
    let model = TextModel::open(name, &config, &|_| {}).unwrap();
    let counts = opens.count();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        assert_eq!(counts.get(file), Some(&1), "{file}: {counts:?}");
    }
    drop(model);
}
