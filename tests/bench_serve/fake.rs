//! A server that does what a script says, at known times.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio_rustls::TlsAcceptor;

/// What a request gets.
pub(crate) enum Reply {
    /// A status and a body.
    Json(u16, Value),
    /// Events, each so many milliseconds after the one before.
    Events(Vec<(u64, String)>),
    /// As `Events`; then the connection is closed in the middle of the stream.
    Cut(Vec<(u64, String)>),
}

/// One request as it came.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) head: String,
    pub(crate) body: Value,
}

type Script = dyn Fn(&Value, usize) -> Reply + Send + Sync;

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) seen: Mutex<Vec<Seen>>, // requests for answers
    pub(crate) connections: AtomicUsize,
    under_way: AtomicUsize,
    pub(crate) most_under_way: AtomicUsize,
}

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    pub(crate) log: Arc<Log>,
    _runtime: tokio::runtime::Runtime,
}

impl Fake {
    /// Answers by `script`, which gets a request's body and its number.
    pub(crate) fn new(script: impl Fn(&Value, usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::with_tls(None, script)
    }

    pub(crate) fn with_tls(
        tls: Option<TlsAcceptor>,
        script: impl Fn(&Value, usize) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("0.0.0.0:0")).unwrap(); // 127.0.0.2 as well
        let address = SocketAddr::from(([127, 0, 0, 1], listener.local_addr().unwrap().port()));
        let (log, script): (_, Arc<Script>) = (Arc::new(Log::default()), Arc::new(script));
        let shared = log.clone();
        runtime.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                shared.connections.fetch_add(1, Ordering::Relaxed);
                let (tls, log, script) = (tls.clone(), shared.clone(), script.clone());
                tokio::spawn(async move {
                    let _ = match tls {
                        Some(tls) => serve(tls.accept(stream).await?, &log, &*script).await,
                        None => serve(stream, &log, &*script).await,
                    };
                    std::io::Result::Ok(())
                });
            }
        });
        Self { address, log, _runtime: runtime }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Bodies of the requests for more than the one token of the first, trying ones.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        let seen = self.log.seen.lock().unwrap();
        let length = |body: &Value| body["max_tokens"].as_u64().or(body["max_completion_tokens"].as_u64());
        seen.iter().map(|seen| seen.body.clone()).filter(|body| length(body) > Some(1)).collect()
    }
}

/// One connection, request after request.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, log: &Log, script: &Script) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let length = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
            .unwrap_or(0);
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        if head.starts_with("GET /v1/models ") {
            send(&mut stream, 200, &json!({"data": [{"id": "fake-model"}]})).await?;
            continue;
        }
        let body: Value = serde_json::from_slice(&body)?;
        let number = {
            let mut seen = log.seen.lock().unwrap();
            seen.push(Seen { at: Instant::now(), head, body: body.clone() });
            seen.len() - 1
        };
        let under_way = log.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        log.most_under_way.fetch_max(under_way, Ordering::Relaxed);
        let result = answer(&mut stream, script(&body, number)).await;
        log.under_way.fetch_sub(1, Ordering::Relaxed);
        result?;
    }
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), status: u16, body: &Value) -> std::io::Result<()> {
    let body = body.to_string();
    let head =
        format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).await?;
    stream.flush().await
}

async fn answer(stream: &mut (impl AsyncWrite + Unpin), reply: Reply) -> std::io::Result<()> {
    let (events, cut) = match reply {
        Reply::Json(status, body) => return send(stream, status, &body).await,
        Reply::Events(events) => (events, false),
        Reply::Cut(events) => (events, true),
    };
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await?;
    stream.flush().await?;
    for (delay, event) in events {
        tokio::time::sleep(Duration::from_millis(delay)).await;
        stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await?;
        stream.flush().await?;
    }
    if cut {
        return Err(std::io::ErrorKind::ConnectionAborted.into());
    }
    stream.write_all(b"0\r\n\r\n").await?;
    stream.flush().await
}

/// A prompt's tokens as the fake counts them: two a word, and seven for its template.
pub(crate) fn prompt_tokens(body: &Value) -> usize {
    let text = body["prompt"].as_str().or(body["messages"][0]["content"].as_str()).unwrap();
    7 + 2 * text.split_whitespace().count()
}

/// As many chunks of text as tokens were asked for: the first after `first` milliseconds, the others `gap` apart. Then
/// what was counted.
pub(crate) fn chat(body: &Value, first: u64, gap: u64) -> Vec<(u64, String)> {
    let tokens = body["max_tokens"].as_u64().or(body["max_completion_tokens"].as_u64()).unwrap();
    let data = |value: Value| format!("data: {value}\n\n");
    let mut events = vec![(0, data(json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})))];
    for i in 0..tokens {
        events.push((
            if i == 0 { first } else { gap },
            data(json!({"choices": [{"index": 0, "delta": {"content": "x"}}]})),
        ));
    }
    events.push((0, data(json!({"choices": [{"delta": {}, "finish_reason": "length"}]}))));
    if body["stream_options"]["include_usage"] == true {
        let details = json!({"cached_tokens": 4});
        let usage = json!({"prompt_tokens": prompt_tokens(body), "completion_tokens": tokens,
            "prompt_tokens_details": details});
        events.push((0, data(json!({"choices": [], "usage": usage}))));
    }
    events.push((0, "data: [DONE]\n\n".into()));
    events
}
