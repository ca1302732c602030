//! Rows that are looked up in a mapped file while a model runs, and are never loaded.

use std::collections::BTreeMap;

use super::{Checkpoint, Dtype, TensorView};
use crate::codec::{decode_f32, decode_fp8, e8m0};
use crate::{Error, Result};

/// A matrix in some tensors, one below the other. It keeps their files mapped.
#[derive(Debug)]
pub struct Table {
    checkpoint: Checkpoint,      // with these tensors only
    parts: Vec<(usize, String)>, // first row and name of each tensor
    rows: usize,
    cols: usize,
    scale: f32, // of all tensors, where they are FP8 and have one
}

impl Checkpoint {
    /// The rows of the tensors `prefix0.weight`, `prefix1.weight` and so on, or of `name` where they are one. Tensors
    /// `STEM.shard_0.weight` of FP8 have one scale, `STEM.weight_scale`; or `NAME.weight` has powers of two beside it,
    /// those of its rows, `NAME.scale`.
    ///
    /// Errors: `Error::Checkpoint` saying where they should be when there are none; rows of another length than `cols`.
    pub fn table(&self, name: &str, prefix: &str, cols: usize) -> Result<Table> {
        let numbered = (0..).map(|i| format!("{prefix}{i}.weight")).take_while(|name| self.get(name).is_some());
        let mut names: Vec<String> = numbered.collect();
        if names.is_empty() && self.get(name).is_some() {
            names.push(name.into());
        }
        if names.is_empty() {
            let what = format!(
                "the table of {prefix}0.weight and those that follow is missing: its files belong into this folder, \
                 beside the model's others, so finish the download"
            );
            return Err(Error::Checkpoint { path: self.dir.clone(), what });
        }
        let (mut parts, mut tensors, mut rows) = (Vec::new(), BTreeMap::new(), 0);
        for name in names {
            let (view, shard) = (self.tensor(&name)?, self.tensors[&name]);
            let scales = scales_of(&name).and_then(|name| self.get(&name));
            if let Some(scales) = scales {
                let [rows, runs] = [view.shape.first(), scales.shape.get(1)].map(|n| n.copied().unwrap_or(0));
                if scales.dtype != Dtype::F8E8M0 || runs == 0 || cols % runs != 0 {
                    return Err(scales.error("does not hold E8M0 scales of runs of rows: download its shard again"));
                }
                scales.expect_shape(&[rows, runs])?;
            }
            match *view.shape {
                [part, width] if width == cols => {
                    self.shards[shard].read_at_random(view.data);
                    parts.push((rows, name.clone()));
                    rows += part;
                }
                _ => view.expect_shape(&[view.shape.first().copied().unwrap_or(0), cols])?,
            }
            if let Some(scales) = scales {
                let shard = self.tensors[scales.name];
                self.shards[shard].read_at_random(scales.data);
                tensors.insert(scales.name.into(), shard);
            }
            tensors.insert(name, shard);
        }
        let is_fp8 = |(_, name): &(usize, String)| {
            let scaled = scales_of(name).is_some_and(|scales| self.get(&scales).is_some());
            !scaled && self.get(name).is_some_and(|view| view.dtype == Dtype::F8E4M3)
        };
        let mut scale = [1.0];
        if parts.iter().any(is_fp8) {
            let stem = prefix.rsplit_once('.').map_or(prefix, |(stem, _)| stem);
            let view = self.tensor(&format!("{stem}.weight_scale"))?;
            match view.shape.iter().product::<usize>() {
                1 => decode_f32(&view, &mut scale)?,
                _ => view.expect_shape(&[1])?,
            }
        }
        let checkpoint = Checkpoint {
            dir: self.dir.clone(),
            shards: self.shards.clone(),
            tensors,
            permuted: BTreeMap::new(),
            quantization: self.quantization.clone(),
            larger_than_memory: self.larger_than_memory,
        };
        Ok(Table { checkpoint, parts, rows, cols, scale: scale[0] })
    }
}

/// What has the scales of a table's rows, where each has its own.
fn scales_of(name: &str) -> Option<String> {
    Some(format!("{}.scale", name.strip_suffix(".weight")?))
}

impl Table {
    /// Rows of all tensors.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row `i`, decoded. Errors: it holds NaN. Panics: there is no such row, or it has another length (bugs).
    pub fn row(&self, i: usize, out: &mut [f32]) -> Result<()> {
        assert!(i < self.rows && out.len() == self.cols, "a row of the table");
        let part = self.parts.partition_point(|(first, _)| *first <= i) - 1;
        let (first, name) = &self.parts[part];
        let view = self.checkpoint.tensor(name)?;
        let bytes = view.data.len() / view.shape[0];
        let data = &view.data[(i - first) * bytes..][..bytes];
        match view.dtype {
            Dtype::BF16 | Dtype::F16 | Dtype::F32 => {
                decode_f32(&TensorView { shape: &view.shape[1..], data, ..view }, out)
            }
            Dtype::F8E4M3 => {
                let beside = scales_of(name).and_then(|scales| self.checkpoint.get(&scales));
                let decoded = match beside {
                    Some(scales) => {
                        let runs = scales.data.len() / view.shape[0]; // of a row
                        let scales = &scales.data[(i - first) * runs..][..runs];
                        if scales.contains(&255) {
                            return Err(view.error("has scales that are no numbers: download its shard again"));
                        }
                        let run = self.cols / runs;
                        let mut all = data.chunks(run).zip(out.chunks_mut(run)).zip(scales);
                        all.try_for_each(|((data, out), scale)| decode_fp8(data, e8m0(*scale, 0), out))
                    }
                    None => decode_fp8(data, self.scale, out),
                };
                decoded.map_err(|what| view.error(what))
            }
            _ => self.checkpoint.source(name, [view.shape[0], self.cols])?.decode(i - first, out),
        }
    }
}
