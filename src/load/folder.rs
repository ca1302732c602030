//! A model's folder, opened once: its files travel from here to all their readers.

use std::path::{Path, PathBuf};

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::codec::Quantization;
use serde_json::Value;

use super::spec::{Kept, Spec};
use crate::config::EngineConfig;
use crate::model::{ModelConfig, families};
use crate::{Error, Result};

/// What a folder says about its model, apart from the tensors.
#[derive(Clone, Debug)]
pub struct Description {
    /// The folder.
    pub dir: PathBuf,
    /// `config.json`; null without one.
    pub config: Value,
    /// `generation_config.json`; null without one.
    pub generation: Value,
}

impl Description {
    /// Reads both files, and how ModelOpt says that weights are quantized; any may be missing.
    ///
    /// Errors: `Error::Io`, `Error::Model` for what is not JSON.
    pub fn read(dir: &Path) -> Result<Self> {
        let json = |name: &str| Ok::<_, Error>(read_json(&dir.join(name))?.unwrap_or_default());
        let mut config = json("config.json")?;
        Quantization::join(&mut config, &json(Quantization::OWN_FILE)?);
        Ok(Self { dir: dir.into(), config, generation: json("generation_config.json")? })
    }

    /// What the model is. Errors: `Error::Io` without a `config.json`; `Error::Model` naming the field, or the
    /// architecture and the supported ones.
    pub fn model(&self) -> Result<ModelConfig> {
        let path = self.dir.join("config.json");
        if self.config.is_null() {
            return Err(Error::io(&path)(std::io::Error::from_raw_os_error(libc::ENOENT)));
        }
        families::from_json(&self.config).map_err(|e| Error::Model(format!("{}: {e}", path.display())))
    }

    /// What keeps the weights of `model`, which need not be here.
    pub fn kept(&self, model: &ModelConfig) -> Result<Kept> {
        let quantization = self.quantization()?;
        match Checkpoint::open_as(&self.dir, quantization.clone(), &families::gguf_names()) {
            Ok(checkpoint) => Ok(Kept::of(&families::named(model.clone(), &checkpoint), &checkpoint)),
            Err(_) => Kept::announced(model, &quantization),
        }
    }

    fn quantization(&self) -> Result<Quantization> {
        Quantization::parse(&self.config)
            .map_err(|what| Error::Model(format!("{}: {what}", self.dir.join("config.json").display())))
    }
}

/// A model's folder with its tensors mapped: all that a model is loaded from.
pub struct ModelFolder {
    /// As the user named the model.
    pub name: String,
    /// What it says.
    pub description: Description,
    /// What the model is.
    pub model: ModelConfig,
    /// Its tensors.
    pub checkpoint: Checkpoint,
}

impl ModelFolder {
    /// Opens the checkpoint. Errors: everything that can be wrong with one before its tensors are read.
    pub fn open(name: &str, description: Description) -> Result<Self> {
        let model = description.model()?;
        let checkpoint = Checkpoint::open_as(&description.dir, description.quantization()?, &families::gguf_names())?;
        let mut model = families::named(model, &checkpoint);
        // DeepSeek-V4.1's, which may also be made of its tokenizer.
        let path = description.dir.join("engram_token_map.json");
        if model.lacks_kinds()
            && let Some(alike) = read_json(&path)?
        {
            let numbers = serde_json::from_value(alike);
            let not_numbers = |_| Error::Model(format!("{}: not a list of numbers: download it again", path.display()));
            model.set_kinds(numbers.map_err(not_numbers)?)?;
        }
        Ok(Self { name: name.into(), description, model, checkpoint })
    }

    /// The model as it is to run. Errors: as [`Spec::new`].
    pub fn spec<'a>(&'a self, config: &'a EngineConfig) -> Result<Spec<'a>> {
        Spec::new(&self.model, config, Kept::of(&self.model, &self.checkpoint))
    }
}

/// A JSON file of a checkpoint, or `None` when it is not there.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    let bytes = match moebius_cache::file::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path)(e)),
    };
    serde_json::from_slice(&bytes)
        .or_else(|error| serde_json::from_str(&finite(&String::from_utf8_lossy(&bytes))).map_err(|_| error))
        .map(Some)
        .map_err(|e| Error::Model(format!("{}: not valid JSON ({e}): download it again", path.display())))
}

/// Python writes numbers that JSON has no word for, as in Nemotron's `time_step_limit`: null in their place.
fn finite(text: &str) -> String {
    let (mut out, mut rest, mut in_string) = (String::with_capacity(text.len()), text, false);
    while let Some(c) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !in_string && rest.starts_with(word));
        let len = match word {
            Some(word) => {
                out.push_str("null");
                word.len()
            }
            None => {
                let len = if in_string && c == '\\' {
                    1 + rest[1..].chars().next().map_or(0, char::len_utf8)
                } else {
                    c.len_utf8()
                };
                in_string ^= c == '"';
                out.push_str(&rest[..len]);
                len
            }
        };
        rest = &rest[len..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_writes_for_infinity_is_null() {
        let text = r#"{"a": [0.0, Infinity, -Infinity], "b \" NaN": NaN, "Infinity": 1}"#;
        assert_eq!(finite(text), r#"{"a": [0.0, null, null], "b \" NaN": null, "Infinity": 1}"#);
    }
}
