//! A hub on the loopback, honest or not, and what becomes of its answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

use super::*;

const COMMIT: &str = "c0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff";
const WEIGHTS: &str = "model-1.safetensors";

#[derive(Clone, Debug)]
struct Ask {
    method: String,
    path: String,
    host: String,
    range: Option<String>,
    token: Option<String>,
}

#[derive(Default)]
struct Reply {
    status: u16,
    headers: BTreeMap<&'static str, String>,
    body: Vec<u8>,
    cut: Option<usize>, // bytes of the body that are sent
}

impl Reply {
    fn redirect(to: &str) -> Self {
        Self { status: 302, headers: BTreeMap::from([("Location", to.to_string())]), ..Self::default() }
    }
}

type Twist = Box<dyn Fn(&Ask, &mut Reply) + Send + Sync>;

/// A hub of one repository `org/tiny`, whose honest answers `twist` may change.
struct FakeHub {
    files: BTreeMap<&'static str, Vec<u8>>,
    asks: Mutex<Vec<Ask>>,
    twist: Twist,
    endpoint: String,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The tag that the real hub gives: of weights the SHA-256, of small files what git has.
fn tag(name: &str, bytes: &[u8]) -> String {
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    match name.ends_with(".safetensors") {
        true => hex(digest(&SHA256, bytes).as_ref()),
        false => hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref()),
    }
}

impl FakeHub {
    fn start(twist: impl Fn(&Ask, &mut Reply) + Send + Sync + 'static) -> Arc<Self> {
        let weights: Vec<u8> = (0..300_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let files = BTreeMap::from([
            ("config.json", b"{}".to_vec()),
            ("tokenizer.json", b"{ }".to_vec()),
            ("generation_config.json", Vec::new()),
            ("model.safetensors.index.json", br#"{"weight_map":{"a":"model-1.safetensors"}}"#.to_vec()),
            (WEIGHTS, weights),
            ("original/consolidated.safetensors", b"no".to_vec()),
        ]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let hub = Arc::new(Self { files, asks: Mutex::default(), twist: Box::new(twist), endpoint });
        let server = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (server, stream) = (server.clone(), stream.unwrap());
                std::thread::spawn(move || server.answer(stream));
            }
        });
        hub
    }

    fn honest() -> Arc<Self> {
        Self::start(|_, _| {})
    }

    /// A hub with a token, whose local copies are in `cache`.
    fn client(&self, cache: &Path) -> Hub {
        Hub { cache: cache.into(), client: HubClient::new(&self.endpoint, Some("secret".into())) }
    }

    fn asks(&self) -> Vec<Ask> {
        self.asks.lock().unwrap().clone()
    }

    /// Ranges of requests for the weights.
    fn ranges(&self) -> Vec<String> {
        self.asks()
            .into_iter()
            .filter(|ask| ask.method == "GET" && ask.path.ends_with(WEIGHTS))
            .filter_map(|ask| ask.range)
            .collect()
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|line| line.ok());
        let Some(first) = lines.next() else { return };
        let headers: Vec<(String, String)> = lines
            .take_while(|line| !line.is_empty())
            .filter_map(|line| {
                line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value.to_string()))
            })
            .collect();
        let header = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
        let mut words = first.split(' ').map(String::from);
        let ask = Ask {
            method: words.next().unwrap(),
            path: words.next().unwrap_or_default(),
            host: header("host").unwrap_or_default(),
            range: header("range"),
            token: header("authorization"),
        };
        self.asks.lock().unwrap().push(ask.clone());
        let mut reply = self.honest_reply(&ask);
        (self.twist)(&ask, &mut reply);
        let mut text = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
        reply.headers.entry("Content-Length").or_insert(reply.body.len().to_string());
        reply
            .headers
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
        let _ = write!(stream, "{text}\r\n");
        if ask.method != "HEAD" {
            let _ = stream.write_all(&reply.body[..reply.cut.unwrap_or(usize::MAX).min(reply.body.len())]);
        }
    }

    fn honest_reply(&self, ask: &Ask) -> Reply {
        if ask.path == "/api/models/org/tiny/revision/main" {
            return listing(COMMIT, &self.files.keys().copied().collect::<Vec<_>>());
        }
        let name = ask
            .path
            .strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/"))
            .or(ask.path.strip_prefix("/cdn/"))
            .unwrap_or_default();
        let Some(bytes) = self.files.get(name) else { return Reply { status: 404, ..Reply::default() } };
        let mut reply = Reply { status: 200, body: bytes.clone(), ..Reply::default() };
        reply.headers.extend([("ETag", format!("\"{}\"", tag(name, bytes))), ("X-Repo-Commit", COMMIT.into())]);
        if let Some(range) = &ask.range {
            let start: usize = range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse().unwrap();
            reply.status = 206;
            reply.body = bytes[start..].to_vec();
            reply.headers.insert("Content-Range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len()));
        }
        reply
    }
}

fn listing(commit: &str, names: &[&str]) -> Reply {
    let siblings: Vec<_> = names.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
    let body = serde_json::json!({"siblings": siblings, "sha": commit}).to_string().into_bytes();
    Reply { status: 200, body, ..Reply::default() }
}

/// Every path below `dir`, sorted; links are not followed.
fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.symlink_metadata().unwrap().is_dir() {
            all.extend(tree(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

fn folder(cache: &Path) -> PathBuf {
    cache.join("models--org--tiny")
}

#[test]
fn a_cut_download_resumes_and_then_needs_no_network() {
    let cache = tempfile::tempdir().unwrap();
    let cuts = Mutex::new(2);
    let fake = FakeHub::start(move |ask, reply| {
        let mut cuts = cuts.lock().unwrap();
        if ask.method == "GET" && ask.path.ends_with(WEIGHTS) && *cuts > 0 {
            (*cuts, reply.cut) = (*cuts - 1, Some(100_000));
        }
    });
    let dir = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap();
    assert_eq!(std::fs::read(dir.join(WEIGHTS)).unwrap(), fake.files[WEIGHTS]);
    assert_eq!(fake.ranges(), ["bytes=0-", "bytes=100000-", "bytes=200000-"]);
    assert!(dir.join("tokenizer.json").exists() && !dir.join("original").exists());

    let offline = Hub { cache: cache.path().into(), client: HubClient::new("http://127.0.0.1:1", None) };
    assert_eq!(offline.model("org/tiny", cache.path()).unwrap(), dir);
    assert_eq!(offline.config("org/tiny", cache.path()).unwrap(), dir);
    std::fs::remove_file(dir.join(WEIGHTS)).unwrap();
    assert!(offline.model("org/tiny", cache.path()).is_err());
    assert_eq!(offline.config("org/tiny", cache.path()).unwrap(), dir);
}

#[test]
fn the_copy_is_laid_out_as_other_tools_have_it() {
    let cache = tempfile::tempdir().unwrap();
    let fake = FakeHub::honest();
    let dir = fake.client(cache.path()).config("org/tiny", cache.path()).unwrap();
    assert_eq!(tree(&dir), [dir.join("config.json")], "and nothing else");
    assert_eq!(fake.client(cache.path()).model("org/tiny", cache.path()).unwrap(), dir);
    let folder = folder(cache.path());
    assert_eq!(dir, folder.join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    for (name, bytes) in fake.files.iter().filter(|(name, _)| !name.contains('/')) {
        let blob = tag(name, bytes);
        assert_eq!(std::fs::read_link(dir.join(name)).unwrap(), Path::new("../../blobs").join(&blob));
        assert_eq!(&std::fs::read(folder.join("blobs").join(blob)).unwrap(), bytes);
    }
    assert!(tree(&folder).iter().all(|path| path.extension().is_none_or(|e| e != "part")));

    // What other tools have downloaded is not downloaded again, for whichever commit.
    std::fs::remove_dir_all(folder.join("snapshots")).unwrap();
    let before = fake.ranges().len();
    assert_eq!(fake.client(cache.path()).model("org/tiny", cache.path()).unwrap(), dir);
    assert_eq!(fake.ranges().len(), before);
}

#[test]
fn a_later_run_goes_on_where_an_earlier_one_gave_up() {
    // Beginnings of the file, whole ones, other ones, too long ones; and a server that knows no ranges.
    let weights = FakeHub::honest().files[WEIGHTS].clone();
    let blob = tag(WEIGHTS, &weights);
    for (left, ranges) in [
        (weights[..1234].to_vec(), &["bytes=1234-"][..]),
        (weights.clone(), &[]),
        ([&weights[..], b"more"].concat(), &["bytes=0-"]),
    ] {
        for has_ranges in [true, false] {
            let fake = FakeHub::start(move |ask, reply| {
                if !has_ranges && ask.range.is_some() && ask.path.ends_with(WEIGHTS) {
                    (reply.status, reply.body) = (200, FakeHub::honest().files[WEIGHTS].clone());
                    reply.headers.remove("Content-Range");
                }
            });
            let cache = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(folder(cache.path()).join("blobs")).unwrap();
            std::fs::write(folder(cache.path()).join("blobs").join(&blob).with_extension("part"), &left).unwrap();
            let dir = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap();
            assert!(std::fs::read(dir.join(WEIGHTS)).unwrap() == weights);
            assert_eq!(fake.ranges(), ranges);
        }
    }
}

#[test]
fn failures_say_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let fails = |endpoint: &str| {
        let hub = Hub { cache: cache.path().into(), client: HubClient::new(endpoint, None) };
        hub.model("org/tiny", cache.path()).unwrap_err().to_string()
    };
    let unreachable = fails("http://127.0.0.1:1");
    assert!(unreachable.contains("http://127.0.0.1:1") && unreachable.contains("directory"), "{unreachable}");
    for (status, says) in [(401, "HF_TOKEN"), (404, "there is no org/tiny"), (503, "HTTP status 503")] {
        let fake = FakeHub::start(move |_, reply| *reply = Reply { status, ..Reply::default() });
        assert!(fails(&fake.endpoint).contains(says), "{}", fails(&fake.endpoint));
    }
    assert!(fails("no address").contains("is no address"), "{}", fails("no address"));
}

/// Changes the answers to questions of `method` about the file `name`.
fn about(method: &'static str, name: &'static str, change: impl Fn(&Ask, &mut Reply) + Send + Sync + 'static) -> Twist {
    Box::new(move |ask, reply| {
        if ask.method == method && ask.path.ends_with(name) {
            change(ask, reply);
        }
    })
}

fn header(method: &'static str, name: &'static str, header: &'static str, value: &'static str) -> Twist {
    about(method, name, move |_, reply| drop(reply.headers.insert(header, value.into())))
}

fn lists(commit: &'static str, more: &'static str) -> Twist {
    about("GET", "/main", move |_, reply| *reply = listing(commit, &["config.json", WEIGHTS, more]))
}

/// A repository whose index names a file outside of it, which is there.
fn index_of_elsewhere(ask: &Ask, reply: &mut Reply) {
    if !ask.path.ends_with("index.json") {
        return;
    }
    let index = br#"{"weight_map":{"a":"../../../../../victim"}}"#;
    reply.headers.insert("ETag", tag("index.json", index));
    if ask.range.is_some() {
        reply.headers.insert("Content-Range", format!("bytes 0-{}/{}", index.len() - 1, index.len()));
    }
    reply.body = index.to_vec();
}

#[test]
fn a_hostile_hub_makes_nothing_outside_of_its_folder() {
    let long = "a".repeat(200);
    let long: &'static str = Box::leak(long.into_boxed_str());
    let cases: Vec<(&str, Twist)> = vec![
        ("the tag", header("HEAD", "config.json", "ETag", "\"../../../../victim\"")),
        ("the tag", header("HEAD", WEIGHTS, "X-Linked-Etag", "\"../../../../victim\"")),
        ("the tag", header("HEAD", WEIGHTS, "ETag", "/etc/passwd")),
        ("the tag", header("HEAD", WEIGHTS, "ETag", "..")),
        ("the tag", header("HEAD", WEIGHTS, "ETag", "W/\"a.part\"")),
        ("the tag", header("HEAD", WEIGHTS, "ETag", long)),
        ("the tag", header("HEAD", WEIGHTS, "ETag", "\"\"")),
        ("the tag", header("HEAD", WEIGHTS, "ETag", "")),
        ("its commit", lists("../../../../evil/commit", WEIGHTS)),
        ("its commit", lists("", WEIGHTS)),
        ("its commit", lists("c0ffee", WEIGHTS)),
        ("answers for", header("HEAD", WEIGHTS, "X-Repo-Commit", "../../../../evil/commit")),
        ("answers for", header("HEAD", WEIGHTS, "X-Repo-Commit", "")),
        ("answers for", header("HEAD", WEIGHTS, "X-Repo-Commit", "0000000000000000000000000000000000000000")),
        ("lists a file", lists(COMMIT, "../victim.safetensors")),
        ("lists a file", lists(COMMIT, "/victim.safetensors")),
        ("lists a file", lists(COMMIT, "a/../../victim.safetensors")),
        ("lists a file", lists(COMMIT, "..\\victim.safetensors")),
        ("lists a file", lists(COMMIT, "a//b")),
        ("lists a file", lists(COMMIT, "a\nb.safetensors")),
        ("lists a file", lists(COMMIT, "")),
        ("not JSON", about("GET", "/main", |_, reply| reply.body = b"<html>".to_vec())),
        ("the size", header("HEAD", WEIGHTS, "X-Linked-Size", "-1")),
        ("the size", header("HEAD", WEIGHTS, "X-Linked-Size", "99999999999999999999999")),
        ("MiB of disk", header("HEAD", WEIGHTS, "X-Linked-Size", "9999999999999999999")),
        (
            "the size",
            about("HEAD", WEIGHTS, |_, reply| {
                reply.status = 302;
                reply.headers.insert("Location", "http://localhost:1/x".into());
            }),
        ),
        ("announced with 300001 bytes", header("HEAD", WEIGHTS, "X-Linked-Size", "300001")),
        ("announced with 299999 bytes", header("HEAD", WEIGHTS, "X-Linked-Size", "299999")),
        ("announced with 300000 bytes", header("GET", WEIGHTS, "Content-Range", "bytes 5-299999/300000")),
        ("announced with 300000 bytes", header("GET", WEIGHTS, "Content-Range", "")),
        ("fewer", about("GET", WEIGHTS, |_, reply| reply.status = 416)),
        (
            "longer",
            about("GET", WEIGHTS, |_, reply| {
                reply.body.extend(b"more");
            }),
        ),
        ("the hash of model-1", about("GET", WEIGHTS, |_, reply| reply.body[7] ^= 1)),
        ("the hash of config", about("GET", "config.json", |_, reply| reply.body = b"[]".to_vec())),
        ("redirects more than 5 times", about("GET", WEIGHTS, |ask, reply| *reply = Reply::redirect(&ask.path))),
        ("redirects more than 5 times", about("HEAD", WEIGHTS, |ask, reply| *reply = Reply::redirect(&ask.path))),
        ("redirects more than 5 times", about("GET", "/main", |ask, reply| *reply = Reply::redirect(&ask.path))),
        ("no address", about("GET", WEIGHTS, |_, reply| *reply = Reply::redirect("ftp://127.0.0.1/x"))),
        ("no address", about("GET", WEIGHTS, |_, reply| *reply = Reply::redirect("file:///etc/passwd"))),
        ("no address", about("GET", WEIGHTS, |_, reply| *reply = Reply::redirect(""))),
        ("its own index", Box::new(index_of_elsewhere)),
    ];
    for (i, (says, twist)) in cases.into_iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("victim"), "mine").unwrap();
        let cache = root.path().join("hf/hub");
        std::fs::create_dir_all(folder(&cache)).unwrap();
        let outside =
            || tree(root.path()).into_iter().filter(|path| !path.starts_with(folder(&cache))).collect::<Vec<_>>();
        let before = outside();
        let fake = FakeHub::start(twist);
        let error = fake.client(&cache).model("org/tiny", &cache).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1 && error.len() < 500, "{i}: {says}: {error}");
        assert_eq!(outside(), before, "{i}: {says}");
        assert_eq!(std::fs::read_to_string(root.path().join("victim")).unwrap(), "mine");
        // What was refused is not kept either, and links lead to blobs only.
        let blobs = folder(&cache).join("blobs");
        let wrong = |path: &PathBuf| {
            let part = path.extension().is_some_and(|e| e == "part") && path.metadata().unwrap().len() > 0;
            let link = std::fs::read_link(path).is_ok_and(|to| to.parent() != Some(Path::new("../../blobs")));
            part || link
        };
        assert!(!tree(&folder(&cache)).iter().any(wrong), "{i}: {says}: {:?}", tree(&blobs));
        assert!(fake.asks().len() < 40);
    }
}

#[test]
fn a_hub_that_answers_otherwise_the_second_time_gains_nothing() {
    // Beside the content it names other tags and commits, which the hub does not read.
    let cache = tempfile::tempdir().unwrap();
    let fake = FakeHub::start(|ask, reply| {
        if ask.method == "GET" && ask.path.contains("/resolve/") {
            reply.headers.extend([
                ("ETag", "\"../../../../victim\"".to_string()),
                ("X-Repo-Commit", "../../../../evil".to_string()),
            ]);
        }
    });
    let dir = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap();
    assert_eq!(dir, folder(cache.path()).join("snapshots").join(COMMIT));

    // After a cut it announces another tag: the file begins anew, under that name, and has to be what was announced.
    let (cache, asked) = (tempfile::tempdir().unwrap(), Mutex::new(0));
    let fake = FakeHub::start(move |ask, reply| {
        if !ask.path.ends_with(WEIGHTS) {
            return;
        }
        let mut asked = asked.lock().unwrap();
        *asked += 1;
        match (*asked, ask.method.as_str()) {
            (2, "GET") => reply.cut = Some(1000),
            (3.., "HEAD") => drop(reply.headers.insert("ETag", format!("\"{}\"", "ab".repeat(32)))),
            _ => {}
        }
    });
    let error = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap_err().to_string();
    assert!(error.contains("the hash of model-1"), "{error}");
    assert_eq!(fake.ranges(), ["bytes=0-", "bytes=0-"]);
}

#[test]
fn a_damaged_beginning_is_found_and_removed() {
    let cache = tempfile::tempdir().unwrap();
    let fake = FakeHub::honest();
    let part = folder(cache.path()).join("blobs").join(tag(WEIGHTS, &fake.files[WEIGHTS])).with_extension("part");
    std::fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::fs::write(&part, [0; 5000]).unwrap();
    let error = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap_err().to_string();
    assert!(error.contains("removed") && error.contains("try again") && !part.exists(), "{error}");
    assert!(fake.client(cache.path()).model("org/tiny", cache.path()).is_ok());
}

#[test]
fn a_token_follows_no_redirect_to_another_host() {
    // Large files as the real hub has them: it says what they are, and that they are elsewhere.
    let storage = FakeHub::honest();
    for other in [storage.endpoint.clone(), storage.endpoint.replace("127.0.0.1", "localhost")] {
        let elsewhere = move |ask: &Ask, reply: &mut Reply| {
            if ask.path.ends_with(WEIGHTS) && ask.path.contains("/resolve/") {
                let location = format!("{other}/cdn/{WEIGHTS}");
                let linked = reply.headers["ETag"].clone();
                *reply = Reply::redirect(&location);
                reply.headers.extend([
                    ("X-Repo-Commit", COMMIT.into()),
                    ("X-Linked-Size", "300000".into()),
                    ("X-Linked-Etag", linked),
                ]);
                reply.headers.insert("ETag", "\"of-the-redirect\"".into());
            }
        };
        let (fake, cache) = (FakeHub::start(elsewhere), tempfile::tempdir().unwrap());
        let dir = fake.client(cache.path()).model("org/tiny", cache.path()).unwrap();
        assert!(std::fs::read(dir.join(WEIGHTS)).unwrap() == storage.files[WEIGHTS]);
        assert!(fake.asks().iter().all(|ask| ask.token.as_deref() == Some("Bearer secret")));
    }
    let asks = storage.asks();
    assert!(asks.len() == 2 && asks.iter().all(|ask| ask.token.is_none() && ask.method == "GET"), "{asks:?}");

    // The same port under another name is another host; back home it is told again.
    let fake = FakeHub::start(|ask, reply| {
        let port = ask.host.rsplit(':').next().unwrap();
        match &*ask.path {
            path if ask.method == "GET" && path.starts_with("/org/") => {
                *reply = Reply::redirect(&format!("http://localhost:{port}/away{path}"))
            }
            path if path.starts_with("/away") => {
                let file = path.rsplit('/').next().unwrap();
                *reply = Reply::redirect(&format!("//127.0.0.1:{port}/cdn/{file}"));
            }
            _ => {}
        }
    });
    let cache = tempfile::tempdir().unwrap();
    fake.client(cache.path()).model("org/tiny", cache.path()).unwrap();
    assert!(fake.asks().iter().any(|ask| ask.path.starts_with("/away")));
    for ask in fake.asks() {
        assert_eq!(ask.token.is_some(), ask.host.starts_with("127.0.0.1"), "{ask:?}");
    }
}

#[test]
fn a_renamed_repository_is_followed() {
    let fake = FakeHub::start(|ask, reply| {
        if let Some(rest) = ask.path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")) {
            *reply = Reply::redirect(&format!("/cdn/{rest}"));
        }
    });
    let cache = tempfile::tempdir().unwrap();
    assert!(fake.client(cache.path()).model("org/tiny", cache.path()).is_ok());
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
