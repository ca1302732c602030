//! Downloads one file: goes on where an earlier attempt was cut off, and keeps only what is, byte for byte, what was
//! announced.

use std::cmp::Ordering;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use moebius_cache::convert::free_bytes;
use moebius_cache::user_id;
use ring::digest::Context;

use super::answer::{Announced, Commit};
use super::client::HubClient;
use super::failure::{FetchFailure, Result};
use super::folder::Folder;

/// A connection that breaks in the middle of a file is taken up again this often.
const ATTEMPTS: u32 = 5;

/// Seconds to wait for another process that downloads the same file.
const LOCK_SECONDS: usize = 5;

/// Downloads the file `name` of `commit` into `folder` unless it is there; `place` is shown before its name.
pub(super) fn fetch(
    client: &HubClient,
    folder: &Folder,
    id: &str,
    commit: &Commit,
    name: &str,
    place: &str,
) -> Result<()> {
    let mut attempt = 0;
    while !folder.snapshot(commit).join(name).exists() {
        attempt += 1;
        let download = Download { client, id, commit, name, bar: bar(format!("{place} {name}")) };
        match download.attempt(folder) {
            Err(FetchFailure::Broken(_) | FetchFailure::Status(500..)) if attempt < ATTEMPTS => {}
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(100 << attempt));
    }
    Ok(())
}

struct Download<'a> {
    client: &'a HubClient,
    id: &'a str,
    commit: &'a Commit,
    name: &'a str,
    bar: ProgressBar,
}

impl Download<'_> {
    fn attempt(&self, folder: &Folder) -> Result<()> {
        let announced = self.client.announce(self.id, self.commit, self.name)?;
        let blob = folder.blob(&announced.tag);
        std::fs::create_dir_all(blob.parent().expect("a blob is in a folder")).map_err(unwritable(&blob))?;
        let _lock = lock(blob.with_extension("lock"))?;
        // Another commit may have the same content, or another process has just brought it.
        if std::fs::metadata(&blob).map_or(true, |blob| blob.len() != announced.size) {
            let part = blob.with_extension("part");
            self.complete(&part, &announced)?;
            std::fs::rename(&part, &blob).map_err(unwritable(&blob))?;
        }
        folder.link(self.commit, self.name, &announced.tag).map_err(unwritable(&blob))
    }

    /// Downloads what is missing of the file at `path`, which is removed when it is not what was announced.
    fn complete(&self, path: &Path, announced: &Announced) -> Result<()> {
        let mut part = PartialDownload::open(path, announced)?;
        let size = announced.size;
        self.bar.set_length(size);
        if part.len < size {
            check_room(path, size - part.len)?;
            let (start, mut content) = self.client.content(self.id, self.commit, self.name, part.len, size)?;
            if start < part.len {
                part.restart(announced)?; // the server knows no ranges
            }
            self.bar.set_position(part.len);
            part.append(&mut content, size, &self.bar)?;
        }
        let wrong = match part.len.cmp(&size) {
            Ordering::Less => {
                return Err(FetchFailure::Broken(format!("{} of {size} bytes of {} came", part.len, self.name)));
            }
            Ordering::Greater => format!("{} is longer than the {size} bytes that were announced", self.name),
            Ordering::Equal if part.digest.take().is_none_or(|digest| announced.tag.is_of(digest)) => {
                self.bar.finish_and_clear();
                return Ok(());
            }
            Ordering::Equal => format!("the hash of {} is not the one that was announced", self.name),
        };
        std::fs::remove_file(path).map_err(unwritable(path))?;
        Err(FetchFailure::Refused(format!("{wrong}, and it was removed")))
    }
}

/// A file that is not whole yet.
struct PartialDownload {
    path: PathBuf,
    file: File,
    len: u64,                // bytes
    digest: Option<Context>, // of what there is
}

impl PartialDownload {
    /// What an earlier attempt has left at `path`, which is nothing if it cannot be the beginning of what was
    /// announced.
    fn open(path: &Path, announced: &Announced) -> Result<Self> {
        let file = File::options().read(true).append(true).create(true).open(path).map_err(unwritable(path))?;
        let mut part = Self { path: path.into(), file, len: 0, digest: announced.tag.digest(announced.size) };
        let mut bytes = vec![0; 1 << 20];
        loop {
            let read = part.file.read(&mut bytes).map_err(unwritable(path))?;
            part.count(&bytes[..read]);
            if part.len > announced.size {
                part.restart(announced)?;
            } else if read == 0 {
                return Ok(part);
            }
        }
    }

    fn count(&mut self, bytes: &[u8]) {
        self.len += bytes.len() as u64;
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
    }

    fn restart(&mut self, announced: &Announced) -> Result<()> {
        self.file.set_len(0).map_err(unwritable(&self.path))?;
        (self.len, self.digest) = (0, announced.tag.digest(announced.size));
        Ok(())
    }

    /// Writes `content` behind what there is, and ends when there is more than `size` bytes.
    fn append(&mut self, content: &mut impl Read, size: u64, bar: &ProgressBar) -> Result<()> {
        let mut bytes = vec![0; 1 << 18];
        while self.len <= size {
            let read = content.read(&mut bytes).map_err(|e| FetchFailure::Broken(e.to_string()))?;
            if read == 0 {
                break;
            }
            self.file.write_all(&bytes[..read]).map_err(unwritable(&self.path))?;
            self.count(&bytes[..read]);
            bar.set_position(self.len);
        }
        Ok(())
    }
}

/// Refuses a file that would fill the disk.
fn check_room(path: &Path, bytes: u64) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    match free_bytes(dir) {
        Some(free) if free < bytes => Err(FetchFailure::Local(format!(
            "its next file needs {} MiB of disk and {} are free in {}: make room, or set HF_HOME to a folder on \
             another disk",
            bytes.div_ceil(1 << 20),
            free >> 20,
            dir.display()
        ))),
        _ => Ok(()),
    }
}

/// Takes the lock of a file, which lasts as long as what is returned.
fn lock(path: PathBuf) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(unwritable(&path))?;
    for _ in 0..LOCK_SECONDS {
        if file.try_lock().is_ok() {
            return Ok(file);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    Err(FetchFailure::Locked(path))
}

/// `.map_err(unwritable(path))`: a file of the local copy could not be written.
pub(super) fn unwritable(path: &Path) -> impl Fn(std::io::Error) -> FetchFailure {
    let dir = path.parent().unwrap_or(path).to_path_buf();
    move |e| {
        let remedy = match e.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "make room, or set HF_HOME to a folder on another disk".into()
            }
            ErrorKind::PermissionDenied => {
                format!("change its owner to user {}, or set HF_HOME to a folder that can be written", user_id())
            }
            _ => "check the folder, or set HF_HOME to one that can be written".into(),
        };
        FetchFailure::Local(format!("{} cannot be written ({e}): {remedy}", dir.display()))
    }
}

/// A file's progress on stderr; nothing when that is not a terminal.
fn bar(message: String) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar:.dim} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    ProgressBar::new(0).with_style(style.expect("the template is a constant")).with_message(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_another_user_names_this_one() {
        let FetchFailure::Local(said) = unwritable(Path::new("/hf/blobs/a"))(ErrorKind::PermissionDenied.into()) else {
            unreachable!("it is a failure of this machine")
        };
        let remedy =
            format!(": change its owner to user {}, or set HF_HOME to a folder that can be written", user_id());
        assert!(said.starts_with("/hf/blobs cannot be written (") && said.ends_with(&remedy), "{said}");
    }
}
