//! Plain files, opened without waiting and mapped read-only: what bears a file's name may be a pipe without a writer
//! to.
#![allow(unsafe_code)] // the map

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use memmap2::Mmap;

use crate::cut::Listed;
use crate::{Error, Result};

/// Opens a plain file for reading. Errors: as the system says, or that it is something else; it never waits.
pub fn open(path: &Path) -> io::Result<File> {
    open_as(path, OpenOptions::new().read(true), 0)
}

/// The bytes of a plain file. Errors: as [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a plain file. Errors: as [`open`], or that it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    io::read_to_string(open(path)?)
}

/// Opens or creates a plain file to be written, but none that a link leads to. Errors: as [`open`].
pub(crate) fn create(path: &Path) -> io::Result<File> {
    open_as(path, OpenOptions::new().read(true).write(true).create(true).truncate(false), libc::O_NOFOLLOW)
}

fn open_as(path: &Path, options: &mut OpenOptions, flags: libc::c_int) -> io::Result<File> {
    let opened = options.custom_flags(libc::O_NONBLOCK | flags).open(path);
    let stat = match &opened {
        Ok(file) => file.metadata(),
        // A folder, a socket or a pipe may have been refused: the reason says less than what it is.
        Err(e) if e.raw_os_error() == Some(libc::ELOOP) => std::fs::symlink_metadata(path),
        Err(_) => std::fs::metadata(path),
    };
    match stat.ok().and_then(|stat| other_than_plain(stat.file_type())) {
        Some(what) => Err(io::Error::other(format!("a {what} is where a plain file belongs: remove it"))),
        None => opened,
    }
}

fn other_than_plain(kind: FileType) -> Option<&'static str> {
    match kind {
        _ if kind.is_file() => None,
        _ if kind.is_dir() => Some("folder"),
        _ if kind.is_symlink() => Some("link"),
        _ if kind.is_fifo() => Some("pipe"),
        _ if kind.is_socket() => Some("socket"),
        _ => Some("device"),
    }
}

/// A file mapped as it lies, shared and read-only. Where the command runs, one that is cut off meanwhile ends it in
/// words.
#[derive(Debug)]
pub(crate) struct MappedFile {
    _listed: Option<Listed>, // gone before the map is
    map: Mmap,
}

impl MappedFile {
    /// Maps a plain file; `remedy` is the end of the sentence for one that is cut off. Errors: `Error::Io`.
    pub(crate) fn open(path: &Path, remedy: &str) -> Result<(File, Self)> {
        let file = open(path).map_err(Error::io(path))?;
        // SAFETY: the map is shared and read-only. A file that another process changes meanwhile can change what is
        // read, and one that it cuts off ends this process; both are outside of what a reader of files can
        // prevent. This program itself replaces files only by renaming complete ones over them, and conversion
        // compares the files' state before and after.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let _listed = Listed::map(&map, path, remedy);
        Ok((file, Self { map, _listed }))
    }
}

impl Deref for MappedFile {
    type Target = Mmap;
    fn deref(&self) -> &Mmap {
        &self.map
    }
}
