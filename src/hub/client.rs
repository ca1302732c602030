//! Requests to a hub: the token goes to the hub itself, and to no host that it redirects to.

use std::sync::LazyLock;
use std::time::Duration;

use rustls_native_certs::load_native_certs;
use tokio_rustls::rustls::{self, CertificateError};
use ureq::http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE};
use ureq::http::{Method, Request, Response, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, BodyReader};

use super::answer::{Announced, Commit, Listing, Tag, quoted};
use super::failure::{FetchFailure, Result};

/// Redirects that one request follows.
const MAX_REDIRECTS: usize = 5;

/// A hub that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Bytes of a list of files at most.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// Which redirects are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    /// Those that name no host: what another host would say of a file does not count.
    Relative,
    All,
}

/// One hub.
pub(super) struct HubClient {
    agent: LazyLock<Agent>, // a model that is here needs none
    endpoint: String,
    token: Option<String>,
}

impl HubClient {
    /// The hub at `endpoint`, which is told `token`.
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Self {
        Self { agent: LazyLock::new(agent), endpoint: endpoint.trim_end_matches('/').into(), token }
    }

    /// What stands before the paths.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What the main branch of repository `id` holds.
    pub(super) fn list(&self, id: &str) -> Result<Listing> {
        let response = self.send(&Method::GET, &format!("/api/models/{id}/revision/main"), None, Follow::All)?;
        let body = response.into_body().into_with_config().limit(MAX_LIST_BYTES).read_to_vec().map_err(broken)?;
        Listing::parse(&body)
    }

    /// What the file `name` of `commit` is.
    pub(super) fn announce(&self, id: &str, commit: &Commit, name: &str) -> Result<Announced> {
        let response = self.send(&Method::HEAD, &path(id, commit, name), None, Follow::Relative)?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let refused =
            |what: &str, said: &str| FetchFailure::Refused(format!("the {what} of {name} is {}", quoted(said)));
        let said = header("x-repo-commit").unwrap_or_default();
        if said != commit.as_str() {
            return Err(FetchFailure::Refused(format!(
                "asked for commit {}, it answers for {}",
                commit.as_str(),
                quoted(said)
            )));
        }
        let said = header("x-linked-etag").or(header(ETAG.as_str())).unwrap_or_default();
        let tag = Tag::parse(said).ok_or_else(|| refused("tag", said))?;
        // The length of a redirect is its own, not the file's.
        let length = if response.status().is_redirection() { None } else { header(CONTENT_LENGTH.as_str()) };
        let said = header("x-linked-size").or(length).unwrap_or_default();
        let size = said.parse().map_err(|_| refused("size", said))?;
        Ok(Announced { tag, size })
    }

    /// The content of a file that is `size` bytes long, from `start` on or from its beginning, and which of these it
    /// is.
    pub(super) fn content(
        &self,
        id: &str,
        commit: &Commit,
        name: &str,
        start: u64,
        size: u64,
    ) -> Result<(u64, BodyReader<'static>)> {
        let response = match self.send(&Method::GET, &path(id, commit, name), Some(start), Follow::All) {
            Err(FetchFailure::Status(416)) => {
                return Err(FetchFailure::Refused(format!("{name} was announced with {size} bytes, and has fewer")));
            }
            answer => answer?,
        };
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let (start, end) = match response.status().as_u16() {
            206 => {
                let range = header(CONTENT_RANGE);
                let total = range
                    .strip_prefix(&format!("bytes {start}-"))
                    .and_then(|rest| rest.split_once('/'))
                    .map(|(_, total)| total);
                (start, total.unwrap_or("another part"))
            }
            _ => (0, header(CONTENT_LENGTH)), // without a range
        };
        if !end.is_empty() && end.parse() != Ok(size) {
            return Err(FetchFailure::Refused(format!(
                "{name} was announced with {size} bytes, and then with {}",
                quoted(end)
            )));
        }
        Ok((start, response.into_body().into_reader()))
    }

    /// An answer that is no refusal: with [`Follow::Relative`] it can be a redirect to another host.
    fn send(&self, method: &Method, path: &str, start: Option<u64>, follow: Follow) -> Result<Response<Body>> {
        let home = address(&format!("{}{path}", self.endpoint))?;
        let mut at = home.clone();
        for _ in 0..=MAX_REDIRECTS {
            // A coding would hide the lengths that are compared.
            let mut request = Request::builder().method(method).uri(&at).header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| origin(&at) == origin(&home)) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(start) = start {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let response = self.agent.run(request.body(()).map_err(broken)?).map_err(|e| unanswered(&at, &e))?;
            let location = match response.status().as_u16() {
                200..=299 => return Ok(response),
                301 | 302 | 303 | 307 | 308 => {
                    response.headers().get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default()
                }
                status => return Err(FetchFailure::Status(status)),
            };
            let next = target(&at, location)?;
            if follow == Follow::Relative && (!location.starts_with('/') || location.starts_with("//")) {
                return Ok(response);
            }
            at = next;
        }
        Err(FetchFailure::Refused(format!("it redirects more than {MAX_REDIRECTS} times")))
    }
}

fn agent() -> Agent {
    let config = Agent::config_builder()
        .max_redirects(0)
        .http_status_as_error(false)
        .user_agent(concat!("moebius/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(SILENCE))
        .timeout_per_read(Some(SILENCE))
        .tls_config(TlsConfig::builder().root_certs(roots()).build());
    config.build().into()
}

/// The authorities that this system trusts, a company's own among them; those that are built in where it has none.
fn roots() -> RootCerts {
    match load_native_certs().certs {
        none if none.is_empty() => RootCerts::WebPki,
        certs => certs.iter().map(|der| Certificate::from_der(der).to_owned()).into(),
    }
}

/// Why the host at `at` gave no answer.
fn unanswered(at: &Uri, error: &ureq::Error) -> FetchFailure {
    let ureq::Error::Io(e) = error else { return broken(error) };
    let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
    match e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) == Some(&unknown) {
        true => {
            // SSL_CERT_FILE may name a file that cannot be read.
            let unread: String = load_native_certs().errors.iter().map(|e| format!(", {e}")).take(1).collect();
            FetchFailure::Untrusted(format!("{}: {unknown}{unread}", at.host().unwrap_or_default()))
        }
        false => broken(error),
    }
}

/// Where a redirect at `from` leads. Errors: nowhere, or from https to http, where any host on the way could change a
/// file.
fn target(from: &Uri, location: &str) -> Result<Uri> {
    let (scheme, authority) = (from.scheme_str().unwrap_or_default(), from.authority().map_or("", |a| a.as_str()));
    let text = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => location.to_string(),
    };
    let next = address(&text)
        .map_err(|_| FetchFailure::Refused(format!("it redirects to {}, which is no address", quoted(location))))?;
    match scheme == "https" && next.scheme_str() != Some("https") {
        true => Err(FetchFailure::Refused(format!("it redirects from https to {}", quoted(location)))),
        false => Ok(next),
    }
}

/// A whole address. Errors: it is none of http or https.
fn address(text: &str) -> Result<Uri> {
    let uri = text
        .parse::<Uri>()
        .ok()
        .filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some());
    uri.ok_or_else(|| FetchFailure::Refused(format!("{} is no address of a hub", quoted(text))))
}

/// Scheme, host and port.
fn origin(uri: &Uri) -> (Option<&str>, Option<String>, u16) {
    let port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    (uri.scheme_str(), uri.host().map(str::to_ascii_lowercase), uri.port_u16().unwrap_or(port))
}

fn path(id: &str, commit: &Commit, name: &str) -> String {
    let byte = |b: u8| {
        if b.is_ascii_alphanumeric() || b"-_.~".contains(&b) { char::from(b).to_string() } else { format!("%{b:02X}") }
    };
    format!("/{id}/resolve/{}/{}", commit.as_str(), name.bytes().map(byte).collect::<String>())
}

fn broken(error: impl std::fmt::Display) -> FetchFailure {
    FetchFailure::Broken(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say_and_never_out_of_https() {
        let to = |from: &str, location: &str| target(&address(from).unwrap(), location).map(|uri| uri.to_string()).ok();
        let at = "https://hub.example:444/a/b?c";
        assert_eq!(to(at, "/d?e").unwrap(), "https://hub.example:444/d?e");
        assert_eq!(to(at, "//other.example/d").unwrap(), "https://other.example/d");
        assert_eq!(to(at, "https://other.example/d").unwrap(), "https://other.example/d");
        assert_eq!(to("http://hub.example/", "https://hub.example/").unwrap(), "https://hub.example/");
        for location in [
            "http://hub.example:444/d",
            "HTTP://hub.example:444/d",
            "d",
            "",
            "ftp://hub.example/d",
            "https:///d",
            "javascript:x",
        ] {
            assert_eq!(to(at, location), None, "{location}");
        }
    }

    #[test]
    fn a_host_is_its_scheme_name_and_port() {
        let same = |a: &str, b: &str| origin(&address(a).unwrap()) == origin(&address(b).unwrap());
        assert!(same("https://hub.example/a", "HTTPS://HUB.example:443/b"));
        for other in [
            "http://hub.example",
            "https://hub.example:444",
            "https://a.hub.example",
            "https://hub.example.evil",
            "https://hub.example@evil",
        ] {
            assert!(!same("https://hub.example", other), "{other}");
        }
    }
}
