//! What is added to the residual stream after a layer, and what is taken from it: steering and capture.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::buffers::Part;
use crate::backend::{Addition, Backend, Hooks, Routing};
use crate::model::StreamShape;
use crate::{Error, Result};

/// Additions of one request at most.
pub const MAX_STEERS: usize = 256;

/// What is added to a number at most: far more than models have there, and so little that all stays finite. What is not
/// would spread from the KV blocks that others get after the sequence.
const MAX_ADDED: f32 = 1e6;

/// Ranges of one list of positions at most.
const MAX_RANGES: usize = 256;

/// Some layers of a model, the first being 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Every layer.
    All,
    /// These.
    Some(Vec<usize>),
}

impl Layers {
    /// None at all.
    pub const NONE: Self = Self::Some(Vec::new());

    /// Whether `layer` is one of them.
    pub fn contains(&self, layer: usize) -> bool {
        match self {
            Self::All => true,
            Self::Some(layers) => layers.contains(&layer),
        }
    }

    /// How many of a model of `layers` layers they are.
    pub fn count(&self, layers: usize) -> usize {
        (0..layers).filter(|&layer| self.contains(layer)).count()
    }

    /// Refuses layers that a model of `layers` layers does not have. Errors: `Error::Invalid`.
    pub fn check(&self, layers: usize) -> Result<()> {
        match self {
            Self::Some(list) if list.len() > layers => Err(Error::Invalid(format!(
                "{} layers are named and the model has {layers}: name each once",
                list.len()
            ))),
            Self::Some(list) => list.iter().try_for_each(|&layer| check_layer(layer, layers)),
            Self::All => Ok(()),
        }
    }
}

impl std::str::FromStr for Layers {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        if s == "all" {
            return Ok(Self::All);
        }
        let layers: std::result::Result<_, _> = s.split(',').map(|n| n.trim().parse()).collect();
        layers
            .map(Self::Some)
            .map_err(|_| Error::Invalid(format!("`{s}` is neither `all` nor a list of layer numbers like 0,5,9")))
    }
}

fn check_layer(layer: usize, layers: usize) -> Result<()> {
    match layer < layers {
        true => Ok(()),
        false => Err(Error::Invalid(format!("there is no layer {layer}: the model has layers 0 to {}", layers - 1))),
    }
}

/// Some positions of a sequence: its prompt from 0 on, then what was generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Positions {
    /// Every position.
    #[default]
    All,
    /// Those of the prompt.
    Prompt,
    /// Those after it: of tokens that were generated, and read again to generate the next.
    Generated,
    /// These, ascending.
    Some(Vec<Range<usize>>),
}

impl Positions {
    /// Of the positions `span` of a sequence with a prompt of so many tokens: runs of them, ascending.
    pub fn within(&self, prompt_tokens: usize, span: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let one = |range: Range<usize>| (std::iter::once(range), [].iter());
        let (one, more) = match self {
            Self::All => one(0..usize::MAX),
            Self::Prompt => one(0..prompt_tokens),
            Self::Generated => one(prompt_tokens..usize::MAX),
            Self::Some(ranges) => (std::iter::once(0..0), ranges.iter()),
        };
        one.chain(more.cloned()).map(move |range| intersection(&range, &span)).filter(|range| !range.is_empty())
    }

    /// The first of them, if there is one.
    pub fn first(&self, prompt_tokens: usize) -> Option<usize> {
        self.within(prompt_tokens, 0..usize::MAX).next().map(|range| range.start)
    }

    /// Refuses ranges that are empty, overlap or do not ascend, and too many of them. Errors: `Error::Invalid`.
    pub fn check(&self) -> Result<()> {
        let Self::Some(ranges) = self else { return Ok(()) };
        if ranges.len() > MAX_RANGES {
            return Err(Error::Invalid(format!(
                "{} ranges of positions are too many: give at most {MAX_RANGES}",
                ranges.len()
            )));
        }
        let mut end = 0;
        for range in ranges {
            if range.is_empty() || range.start < end {
                return Err(Error::Invalid(format!(
                    "the positions {} to {} are empty, or begin before others have ended: give ranges in ascending \
                     order, their ends not included",
                    range.start, range.end
                )));
            }
            end = range.end;
        }
        Ok(())
    }
}

/// What two ranges have in common; empty if nothing.
pub fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Adds `coefficient * vector` to the residual stream of one sequence.
#[derive(Clone, Debug)]
pub struct Steer {
    /// After this layer.
    pub layer: usize,
    /// `[hidden]`, added to every stream, or `[streams * hidden]`. Requests that share one share its copy on the
    /// device.
    pub vector: Arc<[f32]>,
    /// What it is multiplied with.
    pub coefficient: f32,
    /// Where.
    pub positions: Positions,
}

impl Steer {
    /// Refuses what a model of `layers` layers and such residual streams cannot add. Errors: `Error::Invalid`.
    pub fn check(&self, layers: usize, streams: StreamShape) -> Result<()> {
        check_layer(self.layer, layers)?;
        check_vector(&self.vector, streams)?;
        let largest = self.vector.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        if !self.coefficient.is_finite() || largest * self.coefficient.abs() > MAX_ADDED {
            return Err(Error::Invalid(format!(
                "the coefficient of a steering vector is {} and the vector's largest number {largest}: their product \
                 may be {MAX_ADDED} at most",
                self.coefficient
            )));
        }
        self.positions.check()
    }
}

/// Refuses a vector that the residual streams of a model cannot take. Errors: `Error::Invalid`.
pub fn check_vector(vector: &[f32], streams: StreamShape) -> Result<()> {
    let hidden = streams.hidden_size;
    if ![hidden, streams.width()].contains(&vector.len()) {
        let each = match streams.streams {
            1 => String::new(),
            n => format!(" for every one of its {n} streams alike, or {} for all", streams.width()),
        };
        return Err(Error::Invalid(format!(
            "a steering vector has {} numbers: this model's residual stream takes {hidden}{each}",
            vector.len()
        )));
    }
    match vector.iter().position(|x| !x.is_finite()) {
        Some(at) => {
            Err(Error::Invalid(format!("number {at} of a steering vector is {}: give finite numbers", vector[at])))
        }
        None => Ok(()),
    }
}

/// What one pass adds to the residual stream, and what it takes from it. Rows are the batch's.
#[derive(Debug, Default)]
pub struct Tap {
    /// In this order, before anything is taken.
    pub additions: Vec<Addition<[f32]>>,
    /// What is taken.
    pub takes: Vec<Take>,
    /// By number of the take, then layer: `[rows, streams * hidden]`.
    pub taken: BTreeMap<(usize, usize), Vec<f32>>,
    /// By number of the take, then MoE layer: experts and weights of its rows.
    pub routed: BTreeMap<(usize, usize), Routing>,
}

/// Rows of which something is wanted.
#[derive(Clone, Debug)]
pub struct Take {
    /// The residual stream after these layers.
    pub layers: Layers,
    /// Where every MoE layer sends them.
    pub router: bool,
    /// These.
    pub rows: Range<usize>,
}

impl Tap {
    /// Nothing is added and nothing taken: the pass is as any other.
    pub fn is_empty(&self) -> bool {
        self.additions.is_empty() && self.takes.is_empty()
    }

    /// What it does between layers; logits come after them.
    pub(super) fn hooks(&self) -> Hooks {
        match self.takes.iter().any(|take| take.router || take.layers != Layers::NONE) {
            true => Hooks::Read,
            false if self.additions.is_empty() => Hooks::None,
            false => Hooks::Add,
        }
    }

    /// Takes what is wanted of `part` after `layer`; `routing`: where its tokens went, if the layer is an MoE layer.
    pub(super) fn take<B: Backend>(
        &mut self,
        backend: &B,
        layer: usize,
        part: &Part<B>,
        routing: Option<&B::Routing>,
    ) -> Result<()> {
        let mut of_part = Routing::default();
        if let Some(routing) = routing.filter(|_| self.takes.iter().any(|take| take.router)) {
            backend.read_routing(routing, &mut of_part)?;
            for (number, take) in self.takes.iter().enumerate().filter(|(_, take)| take.router) {
                let Range { start, end } = intersection(&take.rows, &part.rows);
                let tokens = start - part.rows.start.min(start)..end - part.rows.start.min(start);
                self.routed.entry((number, layer)).or_default().append(&of_part, tokens);
            }
        }
        for (number, take) in self.takes.iter().enumerate().filter(|(_, take)| take.layers.contains(layer)) {
            part.read(backend, &take.rows, self.taken.entry((number, layer)).or_default())?;
        }
        Ok(())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.additions.clear();
        self.takes.clear();
        self.taken.clear();
        self.routed.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn within(positions: &Positions, span: Range<usize>) -> Vec<Range<usize>> {
        positions.within(10, span).collect()
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // lists of ranges
    fn positions_of_a_part() {
        assert_eq!(within(&Positions::All, 8..12), [8..12]);
        assert_eq!(within(&Positions::Prompt, 8..12), [8..10]);
        assert_eq!(within(&Positions::Generated, 8..12), [10..12]);
        assert!(within(&Positions::Generated, 0..10).is_empty());
        let some = Positions::Some(vec![0..3, 5..6, 9..usize::MAX]);
        assert_eq!(within(&some, 2..11), [2..3, 5..6, 9..11]);
        assert_eq!(
            (some.first(10), Positions::Generated.first(10), Positions::Some(vec![]).first(10)),
            (Some(0), Some(10), None)
        );
    }

    #[test]
    fn ranges_ascend_and_do_not_overlap() {
        let check = |ranges: Vec<Range<usize>>| Positions::Some(ranges).check();
        assert!(check(vec![0..1, 1..4, 7..usize::MAX]).is_ok());
        for wrong in [
            vec![Range { start: 3, end: 3 }],
            vec![0..2, 1..4],
            vec![5..6, 0..2],
            vec![0..1; MAX_RANGES + 1],
            vec![Range { start: 4, end: 1 }],
        ] {
            assert!(check(wrong).is_err());
        }
    }

    #[test]
    fn what_cannot_be_added_is_named() {
        let good = Steer { layer: 1, vector: vec![1.0; 4].into(), coefficient: -2.0, positions: Positions::All };
        let one = StreamShape { streams: 1, hidden_size: 4 };
        assert!(good.check(2, one).is_ok());
        assert!(good.check(2, StreamShape { streams: 2, hidden_size: 2 }).is_ok());
        let refused = |steer: Steer| steer.check(2, one).unwrap_err().to_string();
        assert!(refused(Steer { layer: 2, ..good.clone() }).contains("layers 0 to 1"));
        assert!(refused(Steer { vector: vec![1.0; 5].into(), ..good.clone() }).contains("takes 4"));
        assert!(refused(Steer { vector: vec![1.0, f32::NAN, 0.0, 0.0].into(), ..good.clone() }).contains("number 1"));
        for coefficient in [f32::INFINITY, f32::NAN, -1.1e6, 1e38] {
            assert!(refused(Steer { coefficient, ..good.clone() }).contains("at most"));
        }
    }
}
