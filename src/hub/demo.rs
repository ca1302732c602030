//! The demo model that the binary carries, so that a first conversation needs no download.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::{Error, Result};

/// The name by which the bundled model is called.
pub const NAME: &str = "demo";

const FILES: &[(&str, &[u8])] = &[
    ("chat_template.jinja", include_bytes!("../../demo/moe-gqa/chat_template.jinja")),
    ("config.json", include_bytes!("../../demo/moe-gqa/config.json")),
    ("generation_config.json", include_bytes!("../../demo/moe-gqa/generation_config.json")),
    ("model.safetensors", include_bytes!("../../demo/moe-gqa/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../demo/moe-gqa/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo/moe-gqa/tokenizer_config.json")),
];

/// Writes the bundled checkpoint below `cache_dir`, unless it is already there, and gives its directory.
///
/// Every file is compared with the bundled bytes and replaced by a rename when it differs, so a damaged copy is mended
/// and any number of processes may do this at once.
pub fn materialize(cache_dir: &Path) -> Result<PathBuf> {
    let dir = cache_dir.join(format!("{NAME}-{:016x}", content_hash()));
    for &(name, bytes) in FILES {
        let path = dir.join(name);
        if moebius_cache::file::read(&path).is_ok_and(|present| present == bytes) {
            continue;
        }
        replace(&dir, &path, bytes).map_err(|e| {
            Error::Resources(format!(
                "cannot write the demo model to {}: {}; name a directory that can be written with --cache-dir",
                dir.display(),
                moebius_cache::said_of_writing(&e)
            ))
        })?;
    }
    Ok(dir)
}

fn replace(dir: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let name = path.file_name().expect("a bundled file has a name").to_string_lossy();
    // Two threads of one process need different names too.
    let temporary = dir.join(format!(".{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
    let result = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path));
    if result.is_err() {
        // Nothing half-written stays; the error that matters is the first one.
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

fn content_hash() -> u64 {
    let mut hash = Xxh3::new();
    for &(name, bytes) in FILES {
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_written_once_and_mended() {
        let cache = tempfile::tempdir().unwrap();
        let dir = materialize(cache.path()).unwrap();
        let weights = dir.join("model.safetensors");
        let written = std::fs::metadata(&weights).unwrap().modified().unwrap();
        assert_eq!(materialize(cache.path()).unwrap(), dir);
        assert_eq!(std::fs::metadata(&weights).unwrap().modified().unwrap(), written);

        let mut bytes = std::fs::read(&weights).unwrap();
        bytes[1000] ^= 1;
        std::fs::write(&weights, bytes).unwrap();
        materialize(cache.path()).unwrap();
        assert_eq!(std::fs::read(&weights).unwrap(), FILES[3].1);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), FILES.len());
    }

    #[test]
    fn many_at_once_agree() {
        let cache = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| materialize(cache.path()).unwrap());
            }
        });
        let dir = materialize(cache.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), FILES.len());
    }

    #[test]
    fn an_unusable_place_names_the_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = materialize(&file.path().join("below")).unwrap_err().to_string();
        assert!(error.contains("--cache-dir"), "{error}");
    }
}
