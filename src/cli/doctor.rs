//! `moebius doctor`: what this machine has, and what would make it faster.

use std::path::PathBuf;

use crate::cli::measure::bench::BANDWIDTH_BYTES;
use crate::cli::measure::doctor::{self, Finding};
use crate::config::EngineConfig;
use crate::machine::topology::Topology;
use crate::{Result, hub, load};

use super::print_line;
use super::terminal::Status;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also show in which formats the parts of this model are stored and what they become: `demo`, a directory, a GGUF
    /// file, or a Hugging Face id.
    model: Option<String>,
    /// Directory of packed experts [default: ~/.cache/moebius].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Print a JSON array with name, value and cost of each finding.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let cache_dir = load::cache_dir(&EngineConfig { cache_dir: args.cache_dir, ..EngineConfig::default() })?;
    // First, because measuring takes seconds.
    let of_model = match &args.model {
        Some(model) => doctor::examine_model(model, &hub::resolve(model, &cache_dir)?)?,
        None => Vec::new(),
    };
    let topology = Topology::read();
    let status = Status::new();
    status.report("measuring how fast RAM is read", 0, 0, false);
    let mut findings =
        doctor::examine(&topology, &cache_dir, BANDWIDTH_BYTES.min((topology.available_bytes / 4) as usize));
    drop(status);
    findings.extend(of_model);
    if args.json {
        return print_line(&serde_json::to_string(&findings).expect("findings are strings"));
    }
    let width = findings.iter().map(|f| f.name.len()).max().unwrap_or(0);
    for Finding { name, value, cost } in &findings {
        print_line(&format!("{name:width$}  {value}"))?;
        if let Some(remedy) = cost {
            print_line(&format!("{:width$}  -> {remedy}", ""))?;
        }
    }
    Ok(())
}
