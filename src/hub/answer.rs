//! What a hub says of a repository and its files, checked before any of it becomes a path.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde_json::Value;

use super::failure::{FetchFailure, Result};

/// A commit: 40 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit(String);

impl Commit {
    pub(super) fn parse(text: &str) -> Option<Self> {
        is_hex(text, 40).then(|| Self(text.into()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// What tells a file's content from any other: the SHA-256 of a large file, the SHA-1 that git has of a small one, or a
/// mirror's own word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tag(String);

impl Tag {
    /// A tag as an ETag header has it.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let text = header.strip_prefix("W/").unwrap_or(header).trim_matches('"');
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        ((1..=128).contains(&text.len()) && text.bytes().all(plain)).then(|| Self(text.into()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// What to put a content of `size` bytes through, for [`Tag::is_of`]; `None`: the tag is no hash.
    pub(super) fn digest(&self, size: u64) -> Option<Context> {
        if is_hex(&self.0, 64) {
            return Some(Context::new(&SHA256));
        }
        let mut git = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        git.update(format!("blob {size}\0").as_bytes());
        is_hex(&self.0, 40).then_some(git)
    }

    /// Whether it is the tag of what went through `digest`.
    pub(super) fn is_of(&self, digest: Context) -> bool {
        let hex: String = digest.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.eq_ignore_ascii_case(&hex)
    }
}

/// One file as a hub announces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) tag: Tag,
    pub(super) size: u64, // bytes
}

/// A repository as its main branch has it.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: Commit,
    pub(super) files: Vec<String>,
}

impl Listing {
    /// Reads the body of an answer. Errors: it is none, or names what no repository can hold.
    pub(super) fn parse(body: &[u8]) -> Result<Self> {
        let refused = |what: String| FetchFailure::Refused(what);
        let body: Value = serde_json::from_slice(body).map_err(|_| refused("its list of files is not JSON".into()))?;
        let sha = body["sha"].as_str().unwrap_or_default();
        let commit = Commit::parse(sha)
            .ok_or_else(|| refused(format!("its commit is {}, not 40 hexadecimal digits", quoted(sha))))?;
        let siblings = body["siblings"].as_array().map_or(&[][..], Vec::as_slice);
        let names = siblings.iter().map(|file| file["rfilename"].as_str().unwrap_or_default());
        let files = names.map(|name| match is_relative(name) {
            true => Ok(name.to_string()),
            false => Err(refused(format!("it lists a file {}, which is no name inside of a repository", quoted(name)))),
        });
        Ok(Self { commit, files: files.collect::<Result<_>>()? })
    }
}

/// A file's name inside of a repository: parts with a slash between them, none of which leads out of it.
fn is_relative(name: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.chars().any(|c| c == '\\' || c.is_control());
    name.split('/').all(plain)
}

/// A file's name inside of one folder.
pub(super) fn is_plain(name: &str) -> bool {
    is_relative(name) && !name.contains('/')
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// A server's words inside a message: escaped, and at most one line.
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", text.chars().take(80).collect::<String>())
}
