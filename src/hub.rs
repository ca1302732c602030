//! From the model a user names to the directory it lies in: the demo, a directory, or a repository of the Hugging Face
//! hub.
//!
//! ```text
//! demo      the model in the binary
//! gguf      a GGUF file as a folder in the Hugging Face layout
//! failure   why a file could not be had
//! answer    what a hub says, checked before any of it becomes a path
//! client    requests; the token goes to the hub alone
//! folder    the local copy, which other tools of Hugging Face share
//! fetch     one file, kept only if it is what was announced
//! ```
//!
//! A hub is not trusted.
//!
//! Imports model and load. Read [`resolve`] first.

mod answer;
mod client;
pub mod demo;
mod failure;
mod fetch;
mod folder;
pub mod gguf;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use moebius_cache::checkpoint::gguf::in_folder as find_gguf;

use crate::load::folder::read_json;
use crate::{Error, Result};
use answer::{Commit, is_plain};
use client::HubClient;
use failure::FetchFailure;
use folder::Folder;

/// A directory with the `config.json` of `model`, named as for [`resolve`]: of a repository that is not here, nothing
/// else is downloaded. One of GGUF files has no such file, and is downloaded.
pub fn resolve_config(model: &str, cache_dir: &Path) -> Result<PathBuf> {
    match model != demo::NAME && !Path::new(model).exists() && is_hub_id(model) {
        true => Hub::from_env()?.config(model, cache_dir),
        false => resolve(model, cache_dir),
    }
}

/// The directory of `model`: `demo`, a directory, a GGUF file, or a hub id such as `Qwen/Qwen3-30B-A3B`, downloaded if
/// it is not complete. A GGUF model becomes a directory below `cache_dir`.
///
/// HF_HOME, HF_TOKEN and HF_ENDPOINT mean what they mean everywhere.
pub fn resolve(model: &str, cache_dir: &Path) -> Result<PathBuf> {
    if model == demo::NAME {
        return demo::materialize(cache_dir);
    }
    let path = Path::new(model);
    if path.is_dir() {
        return directory(path, cache_dir);
    }
    if path.exists() {
        return match path.extension().is_some_and(|e| e == "gguf") {
            true => gguf::materialize(path, cache_dir),
            false => Err(Error::Invalid(format!(
                "{model} is a file: give a GGUF file, or the directory of a checkpoint, with its config.json"
            ))),
        };
    }
    // Also where a folder of that name may be out of our sight: `sudo -u` begins in a directory that is closed to us.
    if !is_hub_id(model) {
        return Err(not_found(path));
    }
    Hub::from_env()?.model(model, cache_dir)
}

/// Why there is nothing at `path`, as far as this user can see.
fn not_found(path: &Path) -> Error {
    let model = path.display();
    if path.try_exists().is_err_and(|e| e.kind() == ErrorKind::PermissionDenied) {
        return Error::Invalid(format!(
            "{model} may not be read by user {}: change the owner or mode of the folders above it",
            moebius_cache::user_id()
        ));
    }
    let kind = if path.extension().is_some_and(|e| e == "gguf") { "file" } else { "directory" };
    Error::Invalid(format!(
        "there is no {kind} {model}: a model is `{}`, a directory, a GGUF file, or a hub id such as Qwen/Qwen3-30B-A3B",
        demo::NAME
    ))
}

/// A checkpoint's directory as it is, or, of one that holds a GGUF model and no config.json, that which stands for it.
fn directory(path: &Path, cache_dir: &Path) -> Result<PathBuf> {
    let has = |name: &str| path.join(name).is_file();
    // Some repositories of GGUF files have a config.json, and no tokenizer to it.
    if has("config.json") && has("tokenizer.json") {
        return Ok(path.to_path_buf());
    }
    match find_gguf(path)? {
        Some(file) => gguf::materialize(&file, cache_dir),
        None if has("config.json") => Ok(path.to_path_buf()),
        None => Err(Error::Model(format!(
            "{} has no config.json and no GGUF file: give the directory of a checkpoint in the Hugging Face layout",
            path.display()
        ))),
    }
}

fn home() -> Option<PathBuf> {
    std::env::home_dir().filter(|path| path.is_absolute())
}

/// `org/name` in the hub's alphabet.
fn is_hub_id(model: &str) -> bool {
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    model.split_once('/').is_some_and(|(org, name)| valid(org) && valid(name))
}

/// A hub and the local copies of what was downloaded from it.
struct Hub {
    cache: PathBuf,
    client: HubClient,
}

impl Hub {
    fn from_env() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let hf_home = variable("HF_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".cache/huggingface")));
        let Some(hf_home) = hf_home else {
            return Err(Error::Invalid("there is no home directory to download to: set HF_HOME".into()));
        };
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        // `hf auth login` leaves a token there.
        let token = variable("HF_TOKEN").or_else(|| std::fs::read_to_string(hf_home.join("token")).ok());
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        Ok(Self { cache: hf_home.join("hub"), client: HubClient::new(&endpoint, token) })
    }

    /// The directory of a complete local copy, made so if necessary.
    fn model(&self, id: &str, cache_dir: &Path) -> Result<PathBuf> {
        let dir = match self.local(id) {
            Some(dir) => dir,
            None => self.download(id)?,
        };
        directory(&dir, cache_dir)
    }

    /// The directory of a copy that has its config.json, made so if necessary.
    fn config(&self, id: &str, cache_dir: &Path) -> Result<PathBuf> {
        if let Some(dir) = self.local(id) {
            return directory(&dir, cache_dir);
        }
        if let Some(dir) = self.folder(id).main().filter(|dir| dir.join("config.json").exists()) {
            return Ok(dir);
        }
        let listing = self.client.list(id).map_err(|e| self.explain(id, e))?;
        match listing.files.iter().any(|name| name == "config.json") {
            true => self.fetch(id, &listing.commit, &["config.json"]),
            false => self.model(id, cache_dir),
        }
    }

    fn folder(&self, id: &str) -> Folder {
        Folder::new(&self.cache, id)
    }

    fn local(&self, id: &str) -> Option<PathBuf> {
        let folder = self.folder(id);
        if let Some(dir) = folder.main()
            && dir.join("config.json").exists()
            && is_complete(&dir)
        {
            return Some(dir);
        }
        // A repository of GGUF files: any of them leads to the folder.
        let dirs = std::fs::read_dir(folder.snapshots()).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        dirs.into_iter().find(|dir| {
            find_gguf(dir)
                .is_ok_and(|file| file.is_some_and(|file| moebius_cache::checkpoint::gguf::files_of(&file).is_ok()))
        })
    }

    fn download(&self, id: &str) -> Result<PathBuf> {
        let listing = self.client.list(id).map_err(|e| self.explain(id, e))?;
        let listed: Vec<&str> = listing.files.iter().map(String::as_str).collect();
        let has_config = listed.contains(&"config.json");
        if !has_config && !listed.iter().any(|name| is_gguf(name)) {
            return Err(Error::Model(format!(
                "{id} has no config.json on {}: it is not a checkpoint in the Hugging Face layout",
                self.client.endpoint()
            )));
        }
        // Small files first: a copy with all its weights has all the rest.
        let mut files: Vec<&str> = listed.iter().copied().filter(|name| is_text_side(name)).collect();
        let mut weights: Vec<&str> = listed.iter().copied().filter(|name| is_weights(name)).collect();
        if weights.is_empty() {
            weights = gguf_files(&listed, id)?;
            files.clear(); // it says all about itself
        }
        if weights.is_empty() {
            return Err(Error::Model(format!(
                "{id} has no safetensors or GGUF weights on {}: choose a repository that has them",
                self.client.endpoint()
            )));
        }
        files.extend(weights);
        self.fetch(id, &listing.commit, &files)?;
        self.local(id).ok_or_else(|| {
            Error::Model(format!(
                "{id}: the repository on {} does not hold the files that its own index names: choose another \
                 repository",
                self.client.endpoint()
            ))
        })
    }

    /// The directory of `commit`, with `files` downloaded that are not there yet.
    fn fetch(&self, id: &str, commit: &Commit, files: &[&str]) -> Result<PathBuf> {
        let folder = self.folder(id);
        for (i, name) in files.iter().enumerate() {
            let place = format!("[{}/{}]", i + 1, files.len());
            fetch::fetch(&self.client, &folder, id, commit, name, &place).map_err(|e| self.explain(id, e))?;
        }
        let kept = folder.set_main(commit).map_err(fetch::unwritable(&folder.main_ref()));
        kept.map_err(|e| self.explain(id, e))?;
        Ok(folder.snapshot(commit))
    }

    fn explain(&self, id: &str, failure: FetchFailure) -> Error {
        let endpoint = self.client.endpoint();
        let broken = |what: String| {
            format!(
                "cannot download {id} from {endpoint} ({what}): check the connection and try again, what is there is \
                 kept, or give the directory of a copy instead"
            )
        };
        Error::Model(match failure {
            FetchFailure::Status(401 | 403) => format!(
                "{endpoint} does not give {id} to us: it does not exist, or it is private or gated; check the name, \
                 or set HF_TOKEN to a token that may read it"
            ),
            FetchFailure::Status(404) => {
                format!("there is no {id} on {endpoint}: check the name, or give a directory instead")
            }
            FetchFailure::Status(status) => broken(format!("HTTP status {status}")),
            FetchFailure::Broken(what) => broken(what),
            FetchFailure::Untrusted(what) => format!(
                "cannot download {id} from {endpoint} ({what}): install its authority's certificate, or name a PEM \
                 file in SSL_CERT_FILE"
            ),
            FetchFailure::Refused(what) => format!(
                "what {endpoint} says of {id} cannot be used ({what}): try again, check HF_ENDPOINT, or give the \
                 directory of a copy instead"
            ),
            FetchFailure::Locked(path) => {
                format!(
                    "another process is downloading {id} ({} is locked): wait for it, then try again",
                    path.display()
                )
            }
            FetchFailure::Local(what) => format!("cannot keep {id}: {what}"),
        })
    }
}

/// Small files that say how to read the weights and how to talk.
fn is_text_side(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "config.json",
        "hf_quant_config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ];
    NAMES.contains(&name)
}

/// Weights in the Hugging Face layout; `consolidated*` are the same weights again in their author's own.
fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains('/') && !name.starts_with("consolidated")
}

/// A language model's GGUF file; a vision tower lies beside it in a file of its own.
fn is_gguf(name: &str) -> bool {
    name.ends_with(".gguf") && !name.contains('/') && !name.starts_with("mmproj")
}

/// The GGUF files of a repository that has one model in them. Errors: it has several, in several precisions.
fn gguf_files<'a>(listed: &[&'a str], id: &str) -> Result<Vec<&'a str>> {
    let files: Vec<&str> = listed.iter().copied().filter(|name| is_gguf(name)).collect();
    let mut models: Vec<&str> =
        files.iter().map(|name| name.split("-00").next().filter(|_| name.contains("-of-")).unwrap_or(name)).collect();
    models.sort_unstable();
    models.dedup();
    match models.len() {
        0 | 1 => Ok(files),
        n => {
            Err(Error::Model(format!("{id} has {n} models in GGUF files: download the one to run, and give that file")))
        }
    }
}

/// Whether every weight file that the checkpoint names is there. A name that leads out of it is nowhere.
fn is_complete(dir: &Path) -> bool {
    match read_json(&dir.join("model.safetensors.index.json")) {
        Ok(Some(index)) => index["weight_map"].as_object().is_some_and(|map| {
            map.values().all(|file| file.as_str().is_some_and(|file| is_plain(file) && dir.join(file).is_file()))
        }),
        Ok(None) => std::fs::read_dir(dir).is_ok_and(|mut files| {
            files.any(|file| {
                file.is_ok_and(|file| is_weights(&file.file_name().to_string_lossy()) && file.path().is_file())
            })
        }),
        Err(_) => false,
    }
}
