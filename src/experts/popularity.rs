//! How often each expert is chosen, as counted while the model runs: the most chosen are in VRAM at the next start.
//!
//! ```text
//! counts   of every expert of every layer, halved every 50,000 tokens, kept in a file beside the cache
//! start    the most chosen of each layer go to VRAM
//! ```

use std::path::{Path, PathBuf};

use moebius_cache::format::ExpertCache;

use crate::{Error, Result};

/// Tokens after which a choice counts half.
const HALF_LIFE: f64 = 50_000.0;

/// First line of the file.
const HEADER: &str = "moebius expert use 1";

/// How often the experts were chosen, by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Popularity {
    layers: usize,
    experts: usize,
    counts: Vec<f32>, // [layers, experts]
}

impl Popularity {
    /// Nothing is known yet.
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { layers, experts, counts: vec![0.0; layers * experts] }
    }

    /// What is known of the experts of a cache.
    pub fn of(cache: &ExpertCache) -> Self {
        let (layers, experts) = (cache.num_layers(), cache.num_experts());
        let saved = Self::path_of(cache).and_then(|path| Self::load(&path, layers, experts));
        saved.unwrap_or_else(|| Self::new(layers, experts))
    }

    /// Adds choices, `[layers, experts]`, that some tokens with `top_k` each made.
    pub fn add(&mut self, choices: &[u32], top_k: usize) {
        assert_eq!(choices.len(), self.counts.len());
        let all: f64 = choices.iter().map(|&n| f64::from(n)).sum();
        let tokens = all / (self.layers * top_k).max(1) as f64;
        let keep = 0.5f64.powf(tokens / HALF_LIFE) as f32;
        for (count, &new) in self.counts.iter_mut().zip(choices) {
            *count = *count * keep + new as f32;
        }
    }

    /// The experts of a layer, the most chosen first; equals by number.
    pub fn order(&self, layer: usize) -> Vec<u16> {
        let counts = &self.counts[layer * self.experts..(layer + 1) * self.experts];
        let mut order: Vec<u16> = (0..self.experts as u16).collect();
        order.sort_by(|&a, &b| counts[b as usize].total_cmp(&counts[a as usize]));
        order
    }

    /// The file beside a cache, of the layers that it has; `None`: the cache is no file.
    pub fn path_of(cache: &ExpertCache) -> Option<PathBuf> {
        let extension = match cache.run() {
            None => "use".into(),
            Some(run) => format!("{}-{}.use", run.start, run.end),
        };
        cache.is_file().then(|| cache.path().with_extension(extension))
    }

    /// Reads the counts of a model of `layers` and `experts`; `None`: there are none, or they are another model's.
    pub fn load(path: &Path, layers: usize, experts: usize) -> Option<Self> {
        let text = moebius_cache::file::read_text(path).ok()?;
        let mut lines = text.lines();
        if lines.next()? != HEADER {
            return None;
        }
        let row = |line: &str| {
            line.split(' ')
                .map(|n| n.parse().ok().filter(|n: &f32| n.is_finite() && *n >= 0.0))
                .collect::<Option<Vec<f32>>>()
        };
        let rows: Vec<Vec<f32>> = lines.map(row).collect::<Option<_>>()?;
        let fits = rows.len() == layers && rows.iter().all(|row| row.len() == experts);
        fits.then(|| Self { layers, experts, counts: rows.concat() })
    }

    /// Writes it as a whole or not at all. Errors: as [`Error::unwritable`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut text = String::from(HEADER);
        for row in self.counts.chunks(self.experts) {
            text.push('\n');
            let numbers: Vec<String> = row.iter().map(|n| format!("{n:.1}")).collect();
            text += &numbers.join(" ");
        }
        let partial = path.with_extension(format!("use.{}", std::process::id()));
        let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path));
        written.map_err(|e| {
            let _ = std::fs::remove_file(&partial);
            Error::unwritable(path)(e)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(layers: usize, experts: usize, of: impl Fn(usize, usize) -> u32) -> Vec<u32> {
        (0..layers * experts).map(|i| of(i / experts, i % experts)).collect()
    }

    #[test]
    fn the_most_chosen_come_first() {
        let mut used = Popularity::new(2, 4);
        used.add(&choices(2, 4, |layer, expert| [[1, 9, 5, 9], [3, 0, 0, 8]][layer][expert]), 2);
        assert_eq!(used.order(0), [1, 3, 2, 0]);
        assert_eq!(used.order(1), [3, 0, 1, 2]);
    }

    #[test]
    fn old_choices_fade() {
        let mut used = Popularity::new(1, 2);
        used.add(&[1000, 0], 1);
        for _ in 0..300 {
            used.add(&[0, 1000], 1);
        }
        assert!(used.counts[0] < 20.0, "{:?}", used.counts);
        assert_eq!(used.order(0), [1, 0]);
    }

    #[test]
    fn a_file_brings_it_back_and_a_wrong_one_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.use");
        let mut used = Popularity::new(2, 3);
        used.add(&[1, 2, 3, 40, 50, 60], 2);
        used.save(&path).unwrap();
        assert_eq!(Popularity::load(&path, 2, 3), Some(used));
        assert_eq!(Popularity::load(&path, 3, 3), None, "of another model");
        for text in [
            "",
            "moebius expert use 2\n1 2 3",
            "moebius expert use 1\n1 2 x\n1 2 3",
            "moebius expert use 1\n1 2 NaN\n1 2 3",
            "\0\0",
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Popularity::load(&path, 2, 3), None, "{text:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }
}
