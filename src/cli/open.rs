//! Opens a model for the Python package as the commands do: by their flags, with their progress on stderr.

use std::ffi::OsString;

use clap::{CommandFactory, Parser};

use crate::config::EngineConfig;
use crate::text::model::TextModel;
use crate::{Error, Result};

use super::args::complete;
use super::terminal::Status;

/// An option of the engine.
pub struct EngineOption {
    /// Its flag without dashes: `max_context` of `--max-context`.
    pub name: String,
    /// What its value is called, such as SIZE; `None`: it is a switch.
    pub value_name: Option<String>,
    /// The values there are; none: they cannot be listed.
    pub choices: Vec<String>,
    /// Without it, if that can be said by a value.
    pub default: Option<String>,
    /// What it does.
    help: String,
}

impl EngineOption {
    fn of(arg: &clap::Arg) -> Self {
        let takes_value = arg.get_action().takes_values();
        let choices = arg.get_possible_values().into_iter().map(|value| value.get_name().to_string());
        let default = arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
        let value_name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
        Self {
            name: arg.get_id().to_string(),
            value_name: value_name.filter(|_| takes_value),
            choices: choices.filter(|_| takes_value).collect(),
            default: default.filter(|_| takes_value),
            help: arg.get_help().map(ToString::to_string).unwrap_or_default(),
        }
    }

    /// Whether it takes a value; else it is a switch.
    pub fn takes_value(&self) -> bool {
        self.value_name.is_some()
    }

    /// What it does, and its default.
    pub fn help(&self) -> String {
        self.default.as_ref().map_or(self.help.clone(), |value| format!("{} [default: {value}]", self.help))
    }
}

/// Every option of [`open`].
pub fn options() -> Vec<EngineOption> {
    EngineConfig::command().get_arguments().map(EngineOption::of).collect()
}

/// Finds or downloads `model` and starts its engine with `flags` such as `--max-context=4096`. Prints the progress of
/// loading on stderr, unless `quiet`.
///
/// Errors: `Error::Invalid` for an unknown flag or a wrong value; else as [`TextModel::open`].
pub fn open(model: &str, flags: &[OsString], quiet: bool) -> Result<TextModel> {
    let config = EngineConfig::try_parse_from(flags).map_err(|e| {
        let text = e.to_string();
        let message = text.trim_start_matches("error: ").lines().take_while(|line| !line.is_empty()).map(str::trim);
        Error::Invalid(message.collect::<Vec<_>>().join(" "))
    })?;
    let config = complete(config)?;
    let status = (!quiet).then(Status::new);
    TextModel::open(model, &config, &|progress| {
        if let Some(status) = &status {
            status.loading(progress);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_option_is_one_sentence() {
        for (flag, message) in [
            (
                "--experts=int3",
                "invalid value 'int3' for '--experts <auto|bf16|int8|int4|auto:4.5bpw>': \"int3\" is unknown: use \
                 auto, bf16, int8, int4, or a size such as auto:4.5bpw",
            ),
            ("--threads=0", "--threads is 0: give at least 1"),
            ("--max-contxt=1", "unexpected argument '--max-contxt' found"),
        ] {
            let error = open("demo", &[flag.into()], true).err().expect("it is wrong");
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn options_have_names_and_words() {
        let options = options();
        assert!(options.iter().all(|option| !option.help().is_empty()));
        let of = |name| options.iter().find(|option| option.name == name).expect("it is an option");
        assert!(
            of("max_sequences").help().ends_with("[default: 16]")
                && of("max_sequences").takes_value()
                && !of("lock").takes_value()
        );
    }
}
