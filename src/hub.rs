//! From the model a user names to the directory it lies in: the demo, a directory, or a repository of the Hugging Face hub.

use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::{ProgressBar, ProgressStyle};
use moebius_cache::checkpoint::gguf::in_folder as find_gguf;

use crate::generation_config::read_json;
use crate::{Error, Result, demo, gguf};

/// A connection that breaks in the middle of a file is taken up again this often.
const ATTEMPTS: usize = 5;

/// A directory with the `config.json` of `model`, named as for [`resolve`]: of a repository that is not here, nothing else is downloaded.
/// One of GGUF files has no such file, and is downloaded.
pub fn resolve_config(model: &str, cache_dir: &Path) -> Result<PathBuf> {
    match model != demo::NAME && !Path::new(model).exists() && is_hub_id(model) {
        true => Hub::from_env()?.config(model, cache_dir),
        false => resolve(model, cache_dir),
    }
}

/// The directory of `model`: `demo`, a directory, a GGUF file, or a hub id such as `Qwen/Qwen3-30B-A3B`, downloaded if it is not complete.
/// A GGUF model becomes a directory below `cache_dir`.
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
            false => {
                Err(Error::Invalid(format!("{model} is a file: give a GGUF file, or the directory of a checkpoint, with its config.json")))
            }
        };
    }
    if !is_hub_id(model) {
        return Err(Error::Invalid(format!(
            "there is no directory {model}: a model is `{}`, a directory, a GGUF file, or a hub id such as Qwen/Qwen3-30B-A3B",
            demo::NAME
        )));
    }
    Hub::from_env()?.model(model, cache_dir)
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

/// A hub and the local copy of what was downloaded from it.
struct Hub {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
}

impl Hub {
    fn from_env() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let hf_home = variable("HF_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".cache/huggingface")));
        let cache = match hf_home {
            Some(dir) => dir.join("hub"),
            None => return Err(Error::Invalid("there is no home directory to download to: set HF_HOME".into())),
        };
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Ok(Self { endpoint: endpoint.trim_end_matches('/').into(), token: variable("HF_TOKEN"), cache })
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
        let local = Cache::new(self.cache.clone()).repo(Repo::new(id.into(), RepoType::Model));
        if local.get("config.json").is_none() {
            let api = self.api().map_err(|e| self.explain(id, &e))?;
            let info = api.model(id.into()).info().map_err(|e| self.explain(id, &e))?;
            if !info.siblings.iter().any(|file| file.rfilename == "config.json") {
                return self.model(id, cache_dir);
            }
            self.file(&api, &api.model(id.into()), id, "config.json", "[1/1]")?;
        }
        let path = local.get("config.json").expect("just downloaded");
        Ok(path.parent().expect("a file is in a directory").to_path_buf())
    }

    fn local(&self, id: &str) -> Option<PathBuf> {
        let cache = Cache::new(self.cache.clone()).repo(Repo::new(id.into(), RepoType::Model));
        if let Some(dir) = cache.get("config.json").and_then(|config| Some(config.parent()?.to_path_buf()))
            && is_complete(&dir)
        {
            return Some(dir);
        }
        // A repository of GGUF files: any of them leads to the folder.
        let snapshots = self.cache.join(format!("models--{}", id.replace('/', "--"))).join("snapshots");
        let dirs = std::fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        dirs.into_iter()
            .find(|dir| find_gguf(dir).is_ok_and(|file| file.is_some_and(|file| moebius_cache::checkpoint::gguf::files_of(&file).is_ok())))
    }

    fn download(&self, id: &str) -> Result<PathBuf> {
        let api = self.api().map_err(|e| self.explain(id, &e))?;
        let remote = api.model(id.into());
        let info = remote.info().map_err(|e| self.explain(id, &e))?;
        let listed: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        let has_config = listed.contains(&"config.json");
        if !has_config && !listed.iter().any(|name| is_gguf(name)) {
            return Err(Error::Model(format!(
                "{id} has no config.json on {}: it is not a checkpoint in the Hugging Face layout",
                self.endpoint
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
                self.endpoint
            )));
        }
        files.extend(weights);

        // The branch may move between two files: go round again until one commit has them all.
        for _ in 0..3 {
            for (i, file) in files.iter().enumerate() {
                self.file(&api, &remote, id, file, &format!("[{}/{}]", i + 1, files.len()))?;
            }
            if let Some(dir) = self.local(id) {
                return Ok(dir);
            }
        }
        Err(Error::Model(format!("{id}: the repository on {} does not hold the files that its own index names", self.endpoint)))
    }

    /// Downloads one file unless it is there; goes on where an earlier attempt, or an earlier run, was cut off.
    fn file(&self, api: &Api, remote: &ApiRepo, id: &str, name: &str, place: &str) -> Result<()> {
        let local = Cache::new(self.cache.clone()).repo(Repo::new(id.into(), RepoType::Model));
        let mut attempt = 0;
        while local.get(name).is_none() {
            attempt += 1;
            let Err(error) = self.attempt(api, remote, id, name, Bar::new(format!("{place} {name}"))) else { continue };
            let refused = status(&error).is_some_and(|status| (400..500).contains(&status) && status != 416);
            if attempt >= ATTEMPTS || refused {
                return Err(self.explain(id, &error));
            }
            std::thread::sleep(std::time::Duration::from_millis(100 << attempt));
        }
        Ok(())
    }

    fn attempt(&self, api: &Api, remote: &ApiRepo, id: &str, name: &str, bar: Bar) -> std::result::Result<(), ApiError> {
        let metadata = api.metadata(&remote.url(name))?;
        let local = Cache::new(self.cache.clone()).repo(Repo::new(id.into(), RepoType::Model));
        let blob = local.blob_path(metadata.etag());
        // A part that is already whole, or longer than it may be, cannot be continued by a range request.
        let part = blob.with_extension("part");
        if std::fs::metadata(&part).is_ok_and(|part| part.len() >= metadata.size() as u64) {
            std::fs::remove_file(&part)?;
        }
        let path = remote.download_with_progress(name, bar)?;
        // A server that ignores the range, or ends early without saying so, must not leave a file that looks whole.
        if std::fs::metadata(&path)?.len() != metadata.size() as u64 {
            std::fs::remove_file(&path)?;
            std::fs::remove_file(&blob)?;
            return Err(ApiError::InvalidResume);
        }
        Ok(())
    }

    fn api(&self) -> std::result::Result<Api, ApiError> {
        let builder = ApiBuilder::from_cache(Cache::new(self.cache.clone())).with_endpoint(self.endpoint.clone());
        match &self.token {
            Some(token) => builder.with_token(Some(token.trim().into())).build(),
            None => builder.build(), // the token that `hf auth login` left, if any
        }
    }

    fn explain(&self, id: &str, error: &ApiError) -> Error {
        let endpoint = &self.endpoint;
        Error::Model(match (status(error), error) {
            (Some(401 | 403), _) => format!(
                "{endpoint} does not give {id} to us: it does not exist, or it is private or gated; check the name, or set HF_TOKEN to a token that may read it"
            ),
            (Some(404), _) => format!("there is no {id} on {endpoint}: check the name, or give a directory instead"),
            (_, ApiError::LockAcquisition(path)) => {
                format!("another process is downloading {id} ({} is locked): wait for it, then try again", path.display())
            }
            _ => format!(
                "cannot download {id} from {endpoint} ({error}): check the connection and try again, what is there is kept, or give the directory of a copy instead"
            ),
        })
    }
}

/// The HTTP status inside an error; hf-hub's client is not ours to name, its text is.
fn status(error: &ApiError) -> Option<u16> {
    let text = error.to_string();
    let (_, digits) = text.split_once("http status: ")?;
    digits.trim().parse().ok()
}

/// Small files that say how to read the weights and how to talk.
fn is_text_side(name: &str) -> bool {
    const NAMES: [&str; 7] = [
        "config.json",
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
        n => Err(Error::Model(format!("{id} has {n} models in GGUF files: download the one to run, and give that file"))),
    }
}

/// Whether every weight file that the checkpoint names is there.
fn is_complete(dir: &Path) -> bool {
    match read_json(&dir.join("model.safetensors.index.json")) {
        Ok(Some(index)) => index["weight_map"]
            .as_object()
            .is_some_and(|map| map.values().all(|file| file.as_str().is_some_and(|file| dir.join(file).is_file()))),
        Ok(None) => std::fs::read_dir(dir).is_ok_and(|mut files| {
            files.any(|file| file.is_ok_and(|file| is_weights(&file.file_name().to_string_lossy()) && file.path().is_file()))
        }),
        Err(_) => false,
    }
}

/// A file's progress bar on stderr; nothing when that is not a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new(message: String) -> Self {
        let bar = ProgressBar::new(0).with_message(message);
        let style = ProgressStyle::with_template("{msg} {wide_bar:.dim} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        bar.set_style(style.expect("the template is a constant"));
        Self(bar)
    }
}

impl Progress for Bar {
    fn init(&mut self, size: usize, _filename: &str) {
        self.0.reset();
        self.0.set_length(size as u64);
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    /// A hub of one repository `org/tiny` that cuts the connection in the middle of its weights, `cuts` times.
    struct FakeHub {
        files: HashMap<&'static str, Vec<u8>>,
        cuts: Mutex<usize>,
        ranges: Mutex<Vec<String>>, // of requests for the weights
        status: u16,                // other than 200: the answer to everything
    }

    impl FakeHub {
        fn start(cuts: usize, status: u16) -> (Arc<Self>, String) {
            let weights: Vec<u8> = (0..300_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
            let files = HashMap::from([
                ("config.json", b"{}".to_vec()),
                ("tokenizer.json", b"{ }".to_vec()),
                ("model.safetensors.index.json", br#"{"weight_map":{"a":"model-1.safetensors"}}"#.to_vec()),
                ("model-1.safetensors", weights),
                ("original/consolidated.safetensors", b"no".to_vec()),
            ]);
            let hub = Arc::new(Self { files, cuts: Mutex::new(cuts), ranges: Mutex::default(), status });
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", listener.local_addr().unwrap());
            let server = hub.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let (server, stream) = (server.clone(), stream.unwrap());
                    std::thread::spawn(move || server.answer(stream));
                }
            });
            (hub, endpoint)
        }

        fn answer(&self, mut stream: TcpStream) {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|line| line.ok());
            let request = lines.next().unwrap_or_default();
            let mut range = None;
            for line in lines.take_while(|line| !line.is_empty()) {
                if let Some((name, value)) = line.split_once(": ")
                    && name.eq_ignore_ascii_case("range")
                {
                    range = Some(value.to_string());
                }
            }
            let path = request.split(' ').nth(1).unwrap_or_default();
            if self.status != 200 {
                let _ = write!(stream, "HTTP/1.1 {} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", self.status);
                return;
            }
            if path == "/api/models/org/tiny/revision/main" || path == "/api/models/org/tiny" {
                let siblings: Vec<_> = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
                let body = serde_json::json!({"siblings": siblings, "sha": "c0ffee"}).to_string();
                let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
                return;
            }
            let name = path.strip_prefix("/org/tiny/resolve/main/").unwrap_or_default();
            let Some(bytes) = self.files.get(name) else {
                let _ = write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                return;
            };
            let range = range.unwrap();
            let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let start: usize = start.parse().unwrap();
            let end = end.parse().map_or(bytes.len(), |end: usize| end + 1);
            let body = &bytes[start..end];
            let _ = write!(
                stream,
                "HTTP/1.1 206 Partial\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{}/{}\r\nETag: \"{name}-tag\"\r\nx-repo-commit: c0ffee\r\nConnection: close\r\n\r\n",
                body.len(),
                end - 1,
                bytes.len()
            );
            let mut body = body;
            if name.ends_with("1.safetensors") && range != "bytes=0-0" {
                self.ranges.lock().unwrap().push(range);
                let mut cuts = self.cuts.lock().unwrap();
                if *cuts > 0 {
                    *cuts -= 1;
                    body = &body[..body.len().min(100_000)];
                }
            }
            let _ = stream.write_all(body);
        }
    }

    fn hub(cache: &Path, endpoint: &str) -> Hub {
        Hub { cache: cache.into(), endpoint: endpoint.into(), token: None }
    }

    #[test]
    fn a_cut_download_resumes_and_then_needs_no_network() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, endpoint) = FakeHub::start(2, 200);
        let dir = hub(cache.path(), &endpoint).model("org/tiny", cache.path()).unwrap();
        assert_eq!(std::fs::read(dir.join("model-1.safetensors")).unwrap(), fake.files["model-1.safetensors"]);
        assert_eq!(*fake.ranges.lock().unwrap(), ["bytes=0-", "bytes=100000-", "bytes=200000-"]);
        assert!(dir.join("tokenizer.json").exists() && !dir.join("original").exists());

        assert_eq!(hub(cache.path(), "http://127.0.0.1:1").model("org/tiny", cache.path()).unwrap(), dir);
        std::fs::remove_file(dir.join("model-1.safetensors")).unwrap();
        assert!(hub(cache.path(), "http://127.0.0.1:1").model("org/tiny", cache.path()).is_err());
    }

    #[test]
    fn a_later_run_goes_on_where_an_earlier_one_gave_up() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, endpoint) = FakeHub::start(0, 200);
        let blobs = cache.path().join("models--org--tiny/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        // hf-hub names a part after the blob's tag; everything behind its last dot gives way to "part".
        std::fs::write(blobs.join("model-1.part"), &fake.files["model-1.safetensors"][..1234]).unwrap();
        let dir = hub(cache.path(), &endpoint).model("org/tiny", cache.path()).unwrap();
        assert_eq!(std::fs::read(dir.join("model-1.safetensors")).unwrap(), fake.files["model-1.safetensors"]);
        assert_eq!(*fake.ranges.lock().unwrap(), ["bytes=1234-"]);
    }

    #[test]
    fn failures_say_what_to_do() {
        let cache = tempfile::tempdir().unwrap();
        let unreachable = hub(cache.path(), "http://127.0.0.1:1").model("org/tiny", cache.path()).unwrap_err().to_string();
        assert!(unreachable.contains("http://127.0.0.1:1") && unreachable.contains("directory"), "{unreachable}");
        let (_, endpoint) = FakeHub::start(0, 401);
        let gated = hub(cache.path(), &endpoint).model("org/tiny", cache.path()).unwrap_err().to_string();
        assert!(gated.contains("HF_TOKEN"), "{gated}");
        let (_, endpoint) = FakeHub::start(0, 404);
        let absent = hub(cache.path(), &endpoint).model("org/tiny", cache.path()).unwrap_err().to_string();
        assert!(absent.contains("there is no org/tiny"), "{absent}");
    }

    #[test]
    fn names_are_told_apart() {
        let cache = tempfile::tempdir().unwrap();
        assert!(resolve("demo", cache.path()).unwrap().join("config.json").exists());
        let name = cache.path().to_str().unwrap();
        assert!(resolve(name, cache.path()).unwrap_err().to_string().contains("has no config.json"));
        std::fs::write(cache.path().join("config.json"), "{}").unwrap();
        assert_eq!(resolve(name, cache.path()).unwrap(), cache.path());
        for name in ["nonsense", "./a/b", "/no/such/place", "a/b/c", "../no-such-place", "", "org/..", "org/na me"] {
            let error = resolve(name, cache.path()).unwrap_err().to_string();
            assert!(error.contains("there is no directory"), "{name}: {error}");
        }
        assert!(is_hub_id("Qwen/Qwen3-30B-A3B") && is_hub_id("deepseek-ai/DeepSeek-V2-Lite"));
    }
}
