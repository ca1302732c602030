//! `moebius serve`: the HTTP server.

use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::config::{LoadChoices, MessageChoices};
use crate::log::{self, LogQueue};
use crate::server::{Server, ServerOptions};
use crate::text::model::TextModel;
use crate::{Error, Result};
use clap::ValueEnum;

use super::args::{EngineArgs, read_text};
use super::process;
use super::terminal::Status;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    model: String,
    /// Address to listen on; an address other than this machine's own (127.0.0.1) requires an API key.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 chooses a free port.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    load: LoadChoices,
    #[command(flatten)]
    clients: ClientArgs,
    #[command(flatten)]
    content: MessageChoices,
    /// Format of the log.
    #[arg(long, value_enum, default_value_t = Log::Text, value_name = "FORM", help_heading = "Log")]
    log: Log,
    /// Append the log to this file, which SIGHUP reopens [default: stderr].
    #[arg(long, value_name = "FILE", help_heading = "Log")]
    log_file: Option<PathBuf>,
    /// Write prompts and answers to the log.
    #[arg(long, help_heading = "Log")]
    log_prompts: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Log {
    Text,
    Json,
    Off,
}

/// Who may use the server.
#[derive(clap::Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// API key that clients must send; may be repeated. Other users can see the command line: prefer --api-key-file.
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with API keys, one per line.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Share one prefix cache among all keys. This saves memory and time, but one key can find out what another asked.
    #[arg(long)]
    share_prefixes: bool,
    /// Accept every client that reaches the port, without a key and under any host name.
    #[arg(long)]
    insecure: bool,
    /// Origin of web pages that may use this server, such as `https://chat.example.com`, or `*`; may be repeated.
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Certificate chain (PEM); the server then speaks HTTPS.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// Limits for clients.
#[derive(clap::Args)]
#[command(next_help_heading = "Load")]
struct ClientArgs {
    /// Maximum connections; a new one beyond them closes the connection that has been idle longest.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_connections: usize,
    /// Maximum seconds for a client to send a request or to read an answer.
    #[arg(long, value_name = "S", default_value_t = 30)]
    client_timeout: u64,
    /// Seconds that running answers may continue after the signal to stop.
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain: u64,
}

impl AccessArgs {
    fn keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = read_text(path)?;
            keys.extend(
                text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from),
            );
            if keys.is_empty() {
                return Err(Error::Invalid(format!("{} contains no key: write one key per line", path.display())));
            }
        }
        match keys.iter().any(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic())) {
            true => Err(Error::Invalid("an API key must consist of visible ASCII characters without spaces".into())),
            false => Ok(keys),
        }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    crate::machine::memory::few_arenas();
    let config = args.content.over(args.load.over(args.engine.to_config()?));
    let options = ServerOptions {
        api_keys: args.access.keys()?,
        share_prefixes: args.access.share_prefixes,
        cors_origins: args.access.cors_origin.clone(),
        tls: args.access.tls_cert.clone().zip(args.access.tls_key.clone()),
        insecure: args.access.insecure,
        drain: Duration::from_secs(args.clients.drain),
        log_prompts: args.log_prompts,
        max_connections: args.clients.max_connections.max(1),
        client_timeout: Duration::from_secs(args.clients.client_timeout.max(1)),
    };
    let on_hangup = begin_log(args.log, args.log_file.as_deref())?;
    let keys = match (options.api_keys.len(), options.share_prefixes) {
        (0 | 1, _) => String::new(),
        (n, true) => format!(
            "{n} keys share one prefix cache (--share-prefixes): `cached_tokens` and response times reveal to one \
             what another asked\n"
        ),
        (n, false) => format!("{n} keys have separate prefix caches (--share-prefixes joins them)\n"),
    };
    // The port first: a taken port should not be found out after minutes of loading.
    let server = Server::bind(SocketAddr::new(args.host, args.port), options)?;
    let url = server.url();
    let server = server.start()?;
    server.on_hangup(on_hangup)?;
    let status = Status::new();
    let model = TextModel::open(&args.model, &config, &|p| status.loading(p))?;
    drop(status);

    let info = model.engine().info();
    let announcement = format!(
        "serving {} at {url}/v1 ({}, {} context, ready in {:.1} s)\nchat page: \
         {url}\n{keys}",
        info.model,
        info.precisions(),
        info.max_context,
        info.ready_s
    );
    server.set_model(model);
    // Serving does not wait for a reader of stdout.
    LogQueue::start(std::io::stdout())?.push(announcement.as_bytes());
    if args.access.insecure && !args.host.is_loopback() {
        log::print(&format!("note: there is no access control: everyone who reaches {url} can use the model"));
    }
    server.wait();
    Ok(())
}

/// Opens the log. Returns what SIGHUP does: end with the terminal, or reopen the file.
fn begin_log(form: Log, file: Option<&Path>) -> Result<Box<dyn FnMut() + Send>> {
    let stderr = log::queue_stderr()?;
    let (queue, moved) = match file {
        None => (stderr, None),
        Some(path) => {
            let (queue, moved) = log::queue_file(path)?;
            (queue, Some(moved))
        }
    };
    let colours = file.is_none() && std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_writer(queue).with_ansi(colours).with_target(false);
    match form {
        Log::Text => log.init(),
        Log::Json => log.json().flatten_event(true).init(),
        Log::Off => {}
    }
    if process::ends_with_terminal() {
        // Only once: the shell and the system both send SIGHUP, and a second SIGTERM would end at once.
        let mut terminated = false;
        return Ok(Box::new(move || {
            if !std::mem::replace(&mut terminated, true) {
                process::terminate();
            }
        }));
    }
    Ok(Box::new(move || {
        if let Some(moved) = &moved {
            moved.store(true, Relaxed);
            tracing::info!("SIGHUP: the log file was reopened");
        }
    }))
}
