//! The cache folder: who may write in it, how much fits, and how a file gets its final name.
#![allow(unsafe_code)] // fallocate, fadvise and statvfs

use std::ffi::CString;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cut::Listed;
use crate::error::{may_not_read, readable_bytes, said_of_writing};
use crate::{Error, Result, file};

/// `.map_err(unwritable(path))`: an error of a file in the cache folder.
pub(super) fn unwritable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |e| {
        let what = match e.kind() {
            ErrorKind::PermissionDenied => said_of_writing(&e),
            ErrorKind::ReadOnlyFilesystem => "cannot be written".into(),
            _ => format!("cannot be written ({e})"),
        };
        Error::CacheDir { path, what }
    }
}

/// The cache files in a folder, sorted; none if there is no folder.
pub(super) fn caches(dir: &Path) -> Result<Vec<PathBuf>> {
    files(dir, "moebius")
}

/// The cache files in a folder with the inode of each: a file that was replaced shows.
pub(super) fn inodes(dir: &Path) -> Result<Vec<(PathBuf, Option<u64>)>> {
    let with_inode = |path: PathBuf| {
        let inode = std::fs::metadata(&path).ok().map(|stat| stat.ino());
        (path, inode)
    };
    Ok(caches(dir)?.into_iter().map(with_inode).collect())
}

/// The files in a folder with this extension, sorted; none if there is no folder.
pub(super) fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            return Err(Error::CacheDir { path: dir.into(), what: may_not_read() });
        }
        entries => entries.map_err(unwritable(dir))?,
    };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == extension));
    files.sort();
    Ok(files)
}

/// The right to build one cache, held by one process at a time; given back when dropped, and by the system when the
/// process dies.
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
    _listed: Option<Listed>,
}

impl Lock {
    /// Creates the folder if need be, and waits for the lock called `name`; `waiting` is called once if that takes
    /// time.
    ///
    /// Errors: `Error::CacheDir` when the folder cannot be written.
    pub(super) fn take(dir: &Path, name: &str, waiting: &dyn Fn()) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(unwritable(dir))?;
        let mut told = false;
        loop {
            let path = dir.join(format!("{name}.lock"));
            let file = file::create(&path).map_err(unwritable(&path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if !told {
                        waiting();
                        told = true;
                    }
                    file.lock().map_err(unwritable(&path))?;
                }
                Err(TryLockError::Error(e)) => return Err(unwritable(&path)(e)),
            }
            if is_at(&file, &path) {
                return Ok(Self { _listed: Listed::unfinished(&path), path, _file: file });
            }
        }
    }

    /// Removes the file of a lock whose holder was killed after it had published its cache.
    pub(super) fn sweep(dir: &Path, name: &str) {
        let path = dir.join(format!("{name}.lock"));
        if file::open(&path).is_ok_and(|file| file.try_lock().is_ok() && is_at(&file, &path)) {
            let _ = std::fs::remove_file(&path);
        }
    }

    /// Whether a process holds the lock called `name` right now.
    pub(super) fn is_taken(dir: &Path, name: &str) -> bool {
        file::open(&dir.join(format!("{name}.lock")))
            .is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is still locked: see `take`. An error leaves an empty file, which is harmless.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether `path` still names a file that was locked. The last holder removes it at the end, and a lock on a file
/// without a name keeps no process out.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |stat: std::fs::Metadata| (stat.dev(), stat.ino());
    std::fs::metadata(path).ok().map(inode) == file.metadata().ok().map(inode)
}

/// Opens or creates `path` and makes it `bytes` long with all of its space reserved.
///
/// Errors: `Error::CacheDir` when the disk has not that much space, or the file cannot be written. A file made in vain
/// is removed.
pub(super) fn reserve(path: &Path, bytes: u64) -> Result<File> {
    let file = file::create(path).map_err(unwritable(path))?;
    let dir = path.parent().unwrap_or(path);
    let taken = file.metadata().map_err(unwritable(path))?.blocks() * 512; // by an unfinished build
    let free = free_bytes(dir).map(|free| free + taken);
    grow(&file, bytes, free).map_err(|e| {
        let _ = std::fs::remove_file(path); // the error that counts is the one returned
        match e.kind() {
            ErrorKind::FileTooLarge => {
                let needs = readable_bytes(bytes);
                let what = format!(
                    "the cache needs a file of {needs}, more than `ulimit -f` or this disk's file system allow: raise \
                     that limit"
                );
                Error::CacheDir { path: dir.to_path_buf(), what }
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                let free = free.map_or("too few".into(), readable_bytes);
                let what = format!("the cache needs {} of disk, {free} are free", readable_bytes(bytes));
                Error::CacheDir { path: dir.to_path_buf(), what }
            }
            _ => unwritable(path)(e),
        }
    })?;
    Ok(file)
}

fn grow(file: &File, bytes: u64, free: Option<u64>) -> std::io::Result<()> {
    if free.is_some_and(|free| free < bytes) {
        return Err(ErrorKind::StorageFull.into());
    }
    file.set_len(bytes)?;
    // SAFETY: the descriptor is open as long as `file`; the call changes no memory of ours.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as libc::off_t) } {
        0 => Ok(()),
        _ => match std::io::Error::last_os_error() {
            // A file system that cannot reserve has at least said that there is room.
            e if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            e => Err(e),
        },
    }
}

/// Space that this user may still fill on the disk of `dir`.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let dir = CString::new(dir.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `dir` ends with a zero, and `stat` has room for the result.
    let code = unsafe { libc::statvfs(dir.as_ptr(), stat.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it filled `stat`.
    let stat = unsafe { stat.assume_init() };
    Some(stat.f_bavail * stat.f_frsize)
}

/// Writes a small file such that a reader sees the old bytes or the new ones.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&temporary); // the error that counts is the one returned
        unwritable(path)(e)
    })
}

/// Gives a complete file its final name, and returns when both would survive a power cut.
pub(super) fn publish(file: &File, from: &Path, to: &Path) -> Result<()> {
    file.sync_all().map_err(unwritable(from))?;
    // Writing leaves small pages in the page cache; read again through the map, most file systems give huge ones.
    // SAFETY: the descriptor is open; this only advises.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    std::fs::rename(from, to).map_err(unwritable(to))?;
    let dir = to.parent().unwrap_or(to);
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(unwritable(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_another_user_names_this_one() {
        let said = unwritable(Path::new("/c/a.lock"))(ErrorKind::PermissionDenied.into()).to_string();
        let user = crate::user_id();
        let remedy = "change the folder's owner; choose another folder with --cache-dir";
        assert_eq!(said, format!("/c/a.lock: user {user} may not write there: {remedy}"));
    }
}
