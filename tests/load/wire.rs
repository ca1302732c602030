//! HTTP/1.1 as a client speaks it, so plain that it can stop anywhere and read as slowly as it likes.

use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

/// Nothing may take longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection.
pub(crate) struct Wire {
    socket: TcpStream,
    read: Vec<u8>, // and not yet taken
    slow: bool,
    untouched: bool, // since the last request nothing was read
}

/// What a server says to a request.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) retry_after: Option<u64>, // seconds
    pub(crate) body: Vec<u8>,
    /// The server closes the connection.
    pub(crate) closes: bool,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("all that is sent is UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The payloads of its events.
    pub(crate) fn events(&self) -> Vec<String> {
        self.text().lines().filter_map(|line| line.strip_prefix("data: ")).map(String::from).collect()
    }
}

impl Wire {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self> {
        Ok(Self { socket: TcpStream::connect(address).await?, read: Vec::new(), slow: false, untouched: true })
    }

    /// One that takes a few bytes at a time, and whose system holds few more for it.
    pub(crate) async fn open_slow(address: SocketAddr) -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4096)?;
        Ok(Self { socket: socket.connect(address).await?, read: Vec::new(), slow: true, untouched: true })
    }

    /// Sends bytes as they are.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        timeout(PATIENCE, self.socket.write_all(bytes)).await.map_err(|_| Error::from(ErrorKind::TimedOut))?
    }

    /// Whether nothing at all has come since the last request.
    pub(crate) fn is_untouched(&self) -> bool {
        self.untouched
    }

    /// Posts a body and reads the reply.
    pub(crate) async fn ask(&mut self, path: &str, body: &Value) -> Result<Reply> {
        self.untouched = true;
        self.send(&post(path, body.to_string().as_bytes())).await?;
        self.reply().await
    }

    /// Reads more. Returns whether there was anything.
    async fn more(&mut self) -> Result<bool> {
        let mut bytes = [0; 16 << 10];
        let size = if self.slow { 96 } else { bytes.len() };
        if self.slow {
            sleep(Duration::from_millis(100)).await;
        }
        let n = timeout(PATIENCE, self.socket.read(&mut bytes[..size]))
            .await
            .map_err(|_| Error::from(ErrorKind::TimedOut))??;
        self.read.extend_from_slice(&bytes[..n]);
        self.untouched &= n == 0;
        Ok(n > 0)
    }

    /// Reads at least `n` bytes of whatever comes, if there are so many.
    pub(crate) async fn read_some(&mut self, n: usize) -> Result<()> {
        while self.read.len() < n && self.more().await? {}
        Ok(())
    }

    async fn take(&mut self, n: usize) -> Result<Vec<u8>> {
        while self.read.len() < n {
            if !self.more().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.read.drain(..n).collect())
    }

    async fn take_line(&mut self) -> Result<String> {
        loop {
            if let Some(end) = self.read.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.take(end + 2).await?;
                return String::from_utf8(line[..end].to_vec()).map_err(|_| ErrorKind::InvalidData.into());
            }
            if !self.more().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Reads a reply to its end.
    pub(crate) async fn reply(&mut self) -> Result<Reply> {
        let bad = |line: &str| Error::new(ErrorKind::InvalidData, format!("no reply begins like this: {line}"));
        let first = self.take_line().await?;
        let status =
            first.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok()).ok_or_else(|| bad(&first))?;
        let mut reply = Reply { status, retry_after: None, body: Vec::new(), closes: false };
        let (mut length, mut chunked) = (None, false);
        loop {
            let line = self.take_line().await?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(": ").ok_or_else(|| bad(&line))?;
            match name {
                "content-length" => length = value.parse().ok(),
                "transfer-encoding" => chunked = value == "chunked",
                "connection" => reply.closes = value == "close",
                "retry-after" => reply.retry_after = value.parse().ok(),
                _ => {}
            }
        }
        if let Some(length) = length {
            reply.body = self.take(length).await?;
        }
        while chunked {
            let line = self.take_line().await?;
            let size = usize::from_str_radix(&line, 16).map_err(|_| bad(&line))?;
            reply.body.extend(self.take(size).await?);
            self.take_line().await?;
            chunked = size > 0;
        }
        Ok(reply)
    }
}

/// A request's bytes.
pub(crate) fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A level or counter of `/metrics`.
pub(crate) async fn metric(address: SocketAddr, name: &str) -> u64 {
    let mut wire = Wire::open(address).await.unwrap();
    wire.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let text = wire.reply().await.unwrap().text();
    let value =
        text.lines().find_map(|line| line.strip_prefix("moebius_")?.strip_prefix(name)?.strip_prefix(' ')).unwrap();
    value.parse().unwrap()
}
