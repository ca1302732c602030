//! The local copy of a repository, laid out as Hugging Face's own tools have it: `blobs` by tag, `snapshots` of links
//! to them, `refs`.

use std::io::Result;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::answer::{Commit, Tag};

/// `models--org--name`.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// That of repository `id` below `cache`.
    pub(super) fn new(cache: &Path, id: &str) -> Self {
        Self(cache.join(format!("models--{}", id.replace('/', "--"))))
    }

    /// Where the content with `tag` is, or would be.
    pub(super) fn blob(&self, tag: &Tag) -> PathBuf {
        self.0.join("blobs").join(tag.as_str())
    }

    /// The snapshots of all commits.
    pub(super) fn snapshots(&self) -> PathBuf {
        self.0.join("snapshots")
    }

    /// The snapshot of `commit`.
    pub(super) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.snapshots().join(commit.as_str())
    }

    /// The snapshot of the main branch as it was when it was last downloaded.
    pub(super) fn main(&self) -> Option<PathBuf> {
        let commit = std::fs::read_to_string(self.main_ref()).ok()?;
        Some(self.snapshot(&Commit::parse(commit.trim())?))
    }

    /// The file that names the commit of the main branch.
    pub(super) fn main_ref(&self) -> PathBuf {
        self.0.join("refs/main")
    }

    /// From now on `commit` is the main branch.
    pub(super) fn set_main(&self, commit: &Commit) -> Result<()> {
        std::fs::create_dir_all(self.0.join("refs"))?;
        std::fs::write(self.main_ref(), commit.as_str())
    }

    /// Makes the content with `tag` the file `name` of `commit`.
    pub(super) fn link(&self, commit: &Commit, name: &str, tag: &Tag) -> Result<()> {
        let snapshot = self.snapshot(commit);
        std::fs::create_dir_all(&snapshot)?;
        let link = snapshot.join(name);
        if link.symlink_metadata().is_ok() {
            std::fs::remove_file(&link)?; // it leads nowhere, or to another content
        }
        symlink(Path::new("../../blobs").join(tag.as_str()), link)
    }
}
