//! What one of several devices has of a model.
//!
//! ```text
//! divided      heads, dense and shared widths, the width of every routed expert, the vocabulary of the output head
//! replicated   norms, embedding, router, MLA's latent, KV heads where there are fewer than ranks, indexers, mixers of
//!              residual streams, attention and vocabularies that cannot be divided
//! ```

use std::ops::Range;

use super::{Ffn, LayerConfig, Mlp, ModelConfig, Moe, SharedExpert};
use crate::{Error, Result};

/// The part of a model that a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Counted from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub of: usize,
}

impl Share {
    /// There is one rank.
    pub const WHOLE: Self = Self { rank: 0, of: 1 };

    /// Whether there is one rank.
    pub fn is_whole(self) -> bool {
        self.of == 1
    }

    /// The rank's run of `units`; where there are fewer units than ranks, neighbours have the same one.
    pub fn run(self, units: usize) -> Range<usize> {
        let (start, end) = (self.rank * units / self.of, (self.rank + 1) * units / self.of);
        start..end.max(start + 1)
    }

    /// The rank's run of an MLP's width. `None`: it cannot be divided so.
    pub fn width(self, width: usize) -> Option<Range<usize>> {
        let unit = [64, 8].into_iter().find(|unit| width.is_multiple_of(*unit) && width / unit >= self.of);
        match (self.is_whole(), unit) {
            (true, _) => Some(0..width),
            (false, None) => None,
            (false, Some(unit)) => {
                let run = self.run(width / unit);
                Some(run.start * unit..run.end * unit)
            }
        }
    }
}

impl LayerConfig {
    /// What a rank has of the layer's attention: all, where that cannot be divided.
    pub fn attention_share(&self, share: Share) -> Share {
        if self.attention.divided(share).is_some() { share } else { Share::WHOLE }
    }
}

impl ModelConfig {
    /// The tokens that a rank's output head has; `None`: every rank has all, and the first one's is used.
    pub fn vocabulary_share(&self, share: Share) -> Option<Range<usize>> {
        share.width(self.vocab_size).filter(|_| !share.is_whole())
    }

    /// What a rank has of it. Errors: `Error::Invalid` with what cannot be divided.
    pub fn share(&self, share: Share) -> Result<Self> {
        if share.is_whole() {
            return Ok(self.clone());
        }
        let lacks = |what: &str| {
            Error::Invalid(format!(
                "{} has {what}, which {} GPUs cannot divide yet: give one, as in --device cuda:0",
                self.architecture, share.of
            ))
        };
        let width = |width| share.width(width).map(|run| run.len()).ok_or_else(|| lacks(&format!("an MLP of {width}")));
        let mlp = |mlp: &Mlp| Ok::<_, Error>(Mlp { intermediate_size: width(mlp.intermediate_size)?, ..*mlp });
        let layers = self.layers.iter().map(|layer| {
            let attention = layer.attention.divided(share).unwrap_or_else(|| layer.attention.clone());
            let ffn = match &layer.ffn {
                Ffn::Dense(dense) => Ffn::Dense(mlp(dense)?),
                Ffn::Moe(moe) => {
                    let shared = moe.shared.as_ref();
                    let shared =
                        shared.map(|shared| Ok::<_, Error>(SharedExpert { mlp: mlp(&shared.mlp)?, ..*shared }));
                    Ffn::Moe(Moe { shared: shared.transpose()?, ..moe.clone() })
                }
                Ffn::None => Ffn::None,
            };
            Ok(LayerConfig { attention, ffn, ..layer.clone() })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_all_ranks_are_the_whole() {
        for (of, units) in [(2, 11), (4, 6), (3, 3), (1, 5)] {
            let runs: Vec<_> = (0..of).map(|rank| Share { rank, of }.run(units)).collect();
            assert_eq!(runs.iter().cloned().flatten().collect::<Vec<_>>(), (0..units).collect::<Vec<_>>());
            let longest = runs.iter().map(Range::len).max();
            assert_eq!(longest, runs.last().map(Range::len), "the last rank has the most");
        }
        let of_two: Vec<_> = (0..4).map(|rank| Share { rank, of: 4 }.run(2)).collect();
        assert_eq!(of_two, [0..1, 0..1, 1..2, 1..2]);
        assert_eq!(Share { rank: 1, of: 2 }.width(10944), Some(5440..10944));
        assert_eq!(Share { rank: 1, of: 4 }.width(36), None);
    }
}
