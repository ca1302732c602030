//! Opens a model for the Python package as the commands do: by their flags, with their progress on stderr.

use std::ffi::OsString;

use clap::{CommandFactory, Parser};

use crate::text::model::TextModel;
use crate::{Error, Result};

use super::args::{ContentArgs, EngineArgs, SchedulingArgs};
use super::terminal::Status;

#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Options {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    scheduling: SchedulingArgs,
    #[command(flatten)]
    content: ContentArgs,
}

/// An option of the engine.
pub struct EngineOption {
    /// Its flag without dashes: `max_context` of `--max-context`.
    pub name: String,
    /// Whether it takes a value; else it is a switch.
    pub takes_value: bool,
    /// What it does, and its default.
    pub help: String,
}

/// Every option of [`open`].
pub fn options() -> Vec<EngineOption> {
    let of = |arg: &clap::Arg| {
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let takes_value = arg.get_action().takes_values();
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let default = if takes_value && !defaults.is_empty() {
            format!(" [default: {}]", defaults.join(","))
        } else {
            String::new()
        };
        EngineOption { name: arg.get_id().to_string(), takes_value, help: help + &default }
    };
    Options::command().get_arguments().map(of).collect()
}

/// Finds or downloads `model` and starts its engine with `flags` such as `--max-context=4096`. Prints the progress of
/// loading on stderr, unless `quiet`.
///
/// Errors: `Error::Invalid` for an unknown flag or a wrong value; else as [`TextModel::open`].
pub fn open(model: &str, flags: &[OsString], quiet: bool) -> Result<TextModel> {
    let options = Options::try_parse_from(flags).map_err(|e| {
        let text = e.to_string();
        let message = text.trim_start_matches("error: ").lines().take_while(|line| !line.is_empty()).map(str::trim);
        Error::Invalid(message.collect::<Vec<_>>().join(" "))
    })?;
    let config = options.content.over(options.scheduling.over(options.engine.to_config()?));
    let status = (!quiet).then(Status::new);
    TextModel::open(model, &config, &|progress| {
        if let Some(status) = &status {
            status.loading(progress);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::EngineConfig;

    #[test]
    fn a_wrong_option_is_one_sentence() {
        for (flag, message) in [
            (
                "--experts=int3",
                "invalid value 'int3' for '--experts <EXPERTS>' [possible values: auto, bf16, int8, int4]",
            ),
            ("--threads=0", "--threads is 0: give at least 1"),
            ("--max-contxt=1", "unexpected argument '--max-contxt' found"),
        ] {
            let error = open("demo", &[flag.into()], true).err().expect("it is wrong");
            assert_eq!(error.to_string(), message);
        }
    }

    /// To add a choice is to add a field; then this says where its flag and its keyword are missing.
    #[test]
    fn every_choice_is_a_flag_and_a_keyword() {
        let names = |lines: &mut dyn Iterator<Item = &str>| -> BTreeSet<String> {
            let top = lines.filter_map(|line| line.strip_prefix("    ")).filter(|line| !line.starts_with([' ', '"']));
            top.filter_map(|line| Some(line.split_once(':')?.0.to_string())).collect()
        };
        let fields = names(&mut format!("{:#?}", EngineConfig::default()).lines());
        let flags: BTreeSet<String> = options().into_iter().map(|option| option.name).collect();
        // Flags say what differs from the default.
        let positive = flags.iter().map(|name| name.strip_prefix("no_").unwrap_or(name).to_string());
        assert_eq!(positive.collect::<BTreeSet<_>>(), fields);
        let python = include_str!("../../python/moebius/options.py");
        let class = python.split("class EngineOptions").nth(1).expect("it is there");
        let keywords = names(&mut class.lines().skip(1).take_while(|line| !line.starts_with("class")));
        assert_eq!(keywords, flags);
    }

    #[test]
    fn options_have_names_and_words() {
        let options = options();
        assert!(options.iter().all(|option| !option.help.is_empty()));
        let of = |name| options.iter().find(|option| option.name == name).expect("it is an option");
        assert!(
            of("max_sequences").help.ends_with("[default: 16]")
                && of("max_sequences").takes_value
                && !of("lock").takes_value
        );
    }
}
