//! Connections to one server: HTTP/1.1, plain or over TLS, kept and used again.

use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};

use super::report::{FailedRequest, FailureKind};
use crate::{Error, Result};

type Sender = SendRequest<Full<Bytes>>;

/// Maximum bytes of one answer, so that an endless stream does not fill memory.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// A server, its key, and idle connections to it.
pub(super) struct HttpClient {
    host: String, // an IPv6 address without its brackets
    port: u16,
    host_header: HeaderValue,
    path: String, // of the URL, without a slash at the end
    tls: Option<(TlsConnector, ServerName<'static>)>,
    key: Option<HeaderValue>,
    idle: Mutex<Vec<Sender>>,
}

impl HttpClient {
    /// Parses the URL and, for https, loads the system's certificate authorities. Does not connect yet.
    pub(super) fn new(url: &str, api_key: Option<&str>) -> Result<Self> {
        let wrong =
            |why: &str| Error::Invalid(format!("--url {url} {why}: give a URL such as http://127.0.0.1:8080/v1"));
        let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("does not begin with http:// or https://")),
        };
        if uri.query().is_some() {
            return Err(wrong("has a query"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(Error::Invalid("--url contains a name or password: give the key with --api-key-file".into()));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_string();
        if host.is_empty() {
            return Err(wrong("names no host"));
        }
        let tls = secure.then(|| connector(&host)).transpose()?;
        let key = api_key.map(|key| {
            let mut header = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| {
                Error::Invalid("the API key has characters that are not allowed in HTTP: check --api-key".into())
            })?;
            header.set_sensitive(true);
            Ok::<_, Error>(header)
        });
        Ok(Self {
            port: authority.port_u16().unwrap_or(if secure { 443 } else { 80 }),
            host,
            host_header: HeaderValue::try_from(authority.as_str()).map_err(|_| wrong("is not a URL"))?,
            path: uri.path().trim_end_matches('/').to_string(),
            tls,
            key: key.transpose()?,
            idle: Mutex::default(),
        })
    }

    /// Sends a request to `path` below the URL. Returns the answer when its head has arrived.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> std::result::Result<HttpResponse<'_>, FailedRequest> {
        // A server may close an idle connection at any moment, so its failure is not the server's. The failure of a new
        // connection is.
        if let Some(sender) = self.take_idle()
            && let Ok(answer) = self.send_on(sender, &method, path, &body).await
        {
            return Ok(answer);
        }
        let sender = self.connect().await?;
        self.send_on(sender, &method, path, &body).await
    }

    async fn send_on(
        &self,
        mut sender: Sender,
        method: &Method,
        path: &str,
        body: &Bytes,
    ) -> std::result::Result<HttpResponse<'_>, FailedRequest> {
        let broken = |e: hyper::Error| {
            FailedRequest::new(FailureKind::Broken, format!("the connection broke before an answer: {e}"))
        };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.path))
            .header(HOST, &self.host_header)
            .header(USER_AGENT, concat!("moebius/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "text/event-stream, application/json");
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request.body(Full::new(body.clone())).expect("the parts were parsed before");
        sender.ready().await.map_err(broken)?;
        let response = sender.send_request(request).await.map_err(broken)?;
        Ok(HttpResponse { client: self, sender: Some(sender), response, bytes: 0 })
    }

    async fn connect(&self) -> std::result::Result<Sender, FailedRequest> {
        let failed = |e: &dyn std::fmt::Display| {
            FailedRequest::new(
                FailureKind::Connect,
                format!("{}: {e}", self.host_header.to_str().unwrap_or(&self.host)),
            )
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| failed(&e))?;
        stream.set_nodelay(true).map_err(|e| failed(&e))?;
        let sender = match &self.tls {
            None => handshake(stream).await,
            Some((tls, name)) => handshake(tls.connect(name.clone(), stream).await.map_err(|e| failed(&e))?).await,
        };
        sender.map_err(|e| failed(&e))
    }

    fn take_idle(&self) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|sender| !sender.is_closed());
        idle.pop()
    }
}

async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> hyper::Result<Sender> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with its sender. An error of the connection reaches the request that waits on it.
    tokio::spawn(connection);
    Ok(sender)
}

fn connector(host: &str) -> Result<(TlsConnector, ServerName<'static>)> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        let remedy = "install the package ca-certificates, or name a PEM file in SSL_CERT_FILE";
        return Err(Error::Invalid(format!(
            "this system trusts no certificate authority, which https needs: {remedy}"
        )));
    }
    let name = ServerName::try_from(host.to_string())
        .map_err(|_| Error::Invalid(format!("{host} in --url is not a host that a certificate can name: check it")))?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has the suites of TLS 1.2 and 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((TlsConnector::from(Arc::new(config)), name))
}

/// An answer whose head has arrived. Dropping it before its end closes the connection, so that the server stops.
pub(super) struct HttpResponse<'a> {
    client: &'a HttpClient,
    sender: Option<Sender>,
    response: Response<Incoming>,
    bytes: usize,
}

impl HttpResponse<'_> {
    /// The HTTP status.
    pub(super) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// Whether its content type is JSON, so that it is no stream.
    pub(super) fn is_json(&self) -> bool {
        let content_type = self.response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        content_type.is_some_and(|value| value.trim_start().to_ascii_lowercase().starts_with("application/json"))
    }

    /// The next bytes. `None` at the end, when the connection is free for another request.
    pub(super) async fn chunk(&mut self) -> std::result::Result<Option<Bytes>, FailedRequest> {
        while let Some(frame) = self.response.body_mut().frame().await {
            let broken = |e: hyper::Error| {
                FailedRequest::new(FailureKind::Broken, format!("the connection broke within an answer: {e}"))
            };
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            self.bytes += data.len();
            if self.bytes > MAX_ANSWER_BYTES {
                return Err(FailedRequest::new(
                    FailureKind::Malformed,
                    format!("an answer of more than {} MiB", MAX_ANSWER_BYTES >> 20),
                ));
            }
            return Ok(Some(data));
        }
        if let Some(sender) = self.sender.take() {
            self.client.idle.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        }
        Ok(None)
    }

    /// The first `limit` bytes of the body as text.
    pub(super) async fn text(mut self, limit: usize) -> std::result::Result<String, FailedRequest> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            bytes.extend_from_slice(&chunk[..chunk.len().min(limit - bytes.len())]);
            if bytes.len() == limit {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        let client = HttpClient::new("http://[::1]:8000/v1/", Some("k")).unwrap();
        assert_eq!((&*client.host, client.port, &*client.path), ("::1", 8000, "/v1"));
        let client = HttpClient::new("http://example.com", None).unwrap();
        assert_eq!((&*client.host, client.port, &*client.path), ("example.com", 80, ""));
    }

    #[test]
    fn a_url_that_is_none_is_refused() {
        for url in [
            "",
            "127.0.0.1:8080",
            "/v1",
            "ftp://x/v1",
            "http://",
            "http:///v1",
            "http://a b/",
            "http://x/v1?a=b",
            "http://u:p@x/v1",
        ] {
            assert!(HttpClient::new(url, None).is_err_and(|e| e.to_string().contains("--url")), "{url}");
        }
        assert!(HttpClient::new("http://x", Some("a\nb")).is_err());
    }
}
