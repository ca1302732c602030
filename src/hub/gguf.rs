//! A GGUF file as a checkpoint in the Hugging Face layout: config, tokenizer and chat template written out from its
//! metadata.
//!
//! Everything else of the engine then reads a folder, as ever: small files, and links to the GGUF files, whose tensors
//! `moebius_cache::checkpoint` gives under Hugging Face's names.

mod config;
mod tokenizer;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use moebius_cache::checkpoint::{Checkpoint, gguf};
use moebius_cache::codec::Quantization;
use serde_json::json;
use xxhash_rust::xxh3::Xxh3;

use crate::model::families;
use crate::model::families::gguf::{Header, Metadata};
use crate::{Error, Result};

/// Goes up when the same metadata give other files.
const VERSION: u32 = 2;

/// The folder that stands for the GGUF model at `path`, any of its files, written below `cache_dir` unless it is there.
///
/// Errors: `Error::Cache` when it is no GGUF file, or one of a split model is missing; `Error::Model` for metadata that
/// cannot be used; `Error::Resources` when the folder cannot be written.
pub fn materialize(path: &Path, cache_dir: &Path) -> Result<PathBuf> {
    let path = path.canonicalize().map_err(Error::io(path))?;
    let files = gguf::files_of(&path)?;
    let slug: String = files[0].file_stem().unwrap_or_default().to_string_lossy().chars().take(80).collect();
    let dir = cache_dir.join("gguf").join(format!("{slug}-{:016x}", identity(&files)?));
    // Written last: where it is, the rest is too.
    if dir.join("config.json").is_file() {
        return Ok(dir);
    }
    let named = |e: Error| match e {
        Error::Model(what) => Error::Model(format!("{}: {what}", files[0].display())),
        other => other,
    };
    let metadata = Metadata::new(gguf::metadata(&files[0])?).map_err(named)?;
    let checkpoint = Checkpoint::open_as(&files[0], Quantization::NONE, &families::gguf_names())?;
    let header = Header { metadata: &metadata, checkpoint: &checkpoint };
    let config = config::config(&header).map_err(named)?;
    let mut texts = tokenizer::files(&metadata).map_err(named)?;
    texts.push(("generation_config.json", json!({"eos_token_id": tokenizer::end_tokens(&metadata)}).to_string()));
    texts.push(("config.json", config.to_string()));
    write(&dir, &files, &texts).map_err(|e| {
        Error::Resources(format!(
            "cannot write what {} says of itself to {}: {}; name another directory with --cache-dir",
            files[0].display(),
            dir.display(),
            moebius_cache::said_of_writing(&e)
        ))
    })?;
    Ok(dir)
}

/// Which files these are, as the system tells: another file of the same name gets another folder.
fn identity(files: &[PathBuf]) -> Result<u64> {
    let mut hash = Xxh3::new();
    hash.update(&VERSION.to_le_bytes());
    for file in files {
        let stat = std::fs::metadata(file).map_err(Error::io(file))?;
        hash.update(file.as_os_str().as_encoded_bytes());
        hash.update(format!("\0{} {} {} {}\0", stat.len(), stat.mtime(), stat.mtime_nsec(), stat.ino()).as_bytes());
    }
    Ok(hash.digest())
}

/// Any number of processes may do this at once: every file gets its name when it is whole.
fn write(dir: &Path, files: &[PathBuf], texts: &[(&str, String)]) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let temporary = |name: &str| dir.join(format!(".{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
    for file in files {
        let name = file.file_name().expect("a file has a name").to_string_lossy().into_owned();
        std::os::unix::fs::symlink(file, temporary(&name))?;
        std::fs::rename(temporary(&name), dir.join(&name))?;
    }
    for (name, text) in texts {
        std::fs::write(temporary(name), text)
            .and_then(|()| std::fs::rename(temporary(name), dir.join(name)))
            .inspect_err(|_| {
                let _ = std::fs::remove_file(temporary(name)); // the error that counts is the one returned
            })?;
    }
    Ok(())
}
