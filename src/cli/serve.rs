//! `moebius serve`: the HTTP server.

use std::net::{IpAddr, SocketAddr};

use moebius::Result;
use moebius::server::Server;
use moebius::text_model::TextModel;

use super::args::EngineArgs;
use super::print_line;
use super::terminal::Status;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a hub id such as Qwen/Qwen3-30B-A3B.
    model: String,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 chooses a free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let config = args.engine.to_config()?;
    // The port first: to learn after minutes of loading that it is taken would be unkind.
    let server = Server::bind(SocketAddr::new(args.host, args.port))?;
    let status = Status::new();
    let model = TextModel::open(&args.model, &config, &|p| status.loading(p))?;
    drop(status);

    let info = model.engine().info();
    print_line(&format!(
        "serving {} at http://{}/v1 ({} experts, {} dense, {} kv, {} context, ready in {:.1} s)",
        info.model,
        server.address(),
        info.experts,
        info.dense,
        info.kv,
        info.max_context,
        info.ready_s
    ))?;
    if !args.host.is_loopback() {
        eprintln!("note: there is no access control: whoever reaches {} may use the model", server.address());
    }
    server.run(model)
}
