//! How the tokens of a sequence look at each other: one file for each kind of attention.
//!
//! ```text
//! indexer      which positions a query attends to
//! gqa          grouped queries
//! mla          latent attention
//! delta_net    gated DeltaNet
//! kda          Kimi delta attention
//! short_conv   gated short convolution
//! mamba2       Mamba-2
//! compressed   a window, and entries of several positions
//! nothing      a layer that is only a feed-forward part
//! ```

mod compressed;
mod delta_net;
mod gqa;
mod indexer;
mod kda;
mod mamba2;
mod mla;
mod nothing;
mod short_conv;

use super::{Rope, Share};

pub use compressed::{Compressed, Compressor};
pub use delta_net::{DeltaGate, DeltaNet};
pub use gqa::{Bias, GateActivation, Gqa, OutputGate, QkNorm};
pub use indexer::{Candidates, ChosenBy, EntryKeys, Indexer, Score, Selection};
pub use kda::{Kda, KdaDecay};
pub use mamba2::Mamba2;
pub use mla::Mla;
pub use nothing::Nothing;
pub use short_conv::ShortConv;

/// The attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Attention {
    /// Grouped queries: several query heads share one key/value head.
    Gqa(Gqa),
    /// Multi-head latent attention: keys and values are linear in one cached latent.
    Mla(Mla),
    /// Gated delta rule: a state of fixed size instead of keys and values.
    DeltaNet(DeltaNet),
    /// Gated short convolution: the last few inputs instead of keys and values.
    ShortConv(ShortConv),
    /// Kimi delta attention: a state of fixed size instead of keys and values.
    Kda(Kda),
    /// Mamba-2: a state of fixed size instead of keys and values.
    Mamba2(Mamba2),
    /// A window of keys that are values, beside entries of several positions each.
    Compressed(Compressed),
    /// The layer has none.
    Nothing(Nothing),
}

impl std::ops::Deref for Attention {
    type Target = dyn Facts;

    fn deref(&self) -> &Self::Target {
        match self {
            Attention::Gqa(a) => a,
            Attention::Mla(a) => a,
            Attention::DeltaNet(a) => a,
            Attention::ShortConv(a) => a,
            Attention::Kda(a) => a,
            Attention::Mamba2(a) => a,
            Attention::Compressed(a) => a,
            Attention::Nothing(a) => a,
        }
    }
}

impl Attention {
    /// Whether both have activations and scratch of the same sizes: layers that do share buffers.
    pub fn same_widths(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other) && self.widths() == other.widths()
    }
}

/// What a token sees of the positions before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Itself and as many before it as make this number.
    Sliding(usize),
    /// Those of its own chunk: positions are cut into chunks of this length.
    Chunk(usize),
}

impl Window {
    /// The first position that a token at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        match self {
            Window::Sliding(len) => (position + 1).saturating_sub(*len),
            Window::Chunk(len) => position / len * len,
        }
    }
}

/// Queries grow with their position: `1 + beta * ln(1 + floor((position + offset) / length))` times. Source: HF
/// modeling_llama4 and modeling_mistral4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScale {
    /// How much.
    pub beta: f32,
    /// Positions of a step.
    pub length: f32,
    /// Added to the position.
    pub offset: f32,
}

impl PositionScale {
    /// What multiplies queries at `position`.
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.beta * ((position as f32 + self.offset) / self.length).floor().ln_1p()
    }
}

/// KV heads, numbers of a key of each, and its values.
pub type KvDims = (usize, usize, Values);

/// The values of a KV head, and how many numbers each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Cached beside the keys.
    Own(usize),
    /// The first numbers of the keys.
    OfKeys(usize),
}

impl Values {
    /// Numbers of a value.
    pub fn dim(self) -> usize {
        match self {
            Values::Own(dim) | Values::OfKeys(dim) => dim,
        }
    }
}

/// A matrix's `[n, k]`.
pub type Matrix = (usize, usize);

/// What a layer keeps of a sequence, whatever the sequence's length, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Inputs of a convolution that are past.
    pub past_inputs: usize,
    /// Numbers of each.
    pub channels: usize,
    /// Numbers besides them: the heads' matrices.
    pub numbers: usize,
}

impl StateShape {
    /// Numbers of a sequence.
    pub fn total(self) -> usize {
        self.past_inputs * self.channels + self.numbers
    }
}

/// What a kind of attention needs and costs: only its own file knows which kind it is.
pub trait Facts {
    /// What it caches of a position, if it has keys and values.
    fn kv_dims(&self) -> KvDims {
        (0, 0, Values::Own(0))
    }

    /// What makes the entries that it caches in their place, if there are some.
    fn entries(&self) -> Option<Compressor> {
        None
    }

    /// Whether it reads the entries of an earlier layer.
    fn borrows(&self) -> bool {
        false
    }

    /// What it caches index keys for, if it does.
    fn index_keys(&self) -> Option<&Indexer> {
        self.selection().and_then(Selection::own).filter(|_| !self.borrows())
    }

    /// Its rotary embedding, if it has one.
    fn rope(&self) -> Option<&Rope> {
        None
    }

    /// Which positions its queries attend to; `None`: all that they see.
    fn selection(&self) -> Option<&Selection> {
        None
    }

    /// What a sequence keeps besides keys and values, or instead of them.
    fn state(&self) -> Option<StateShape> {
        None
    }

    /// What the sizes of its activations and of its scratch depend on.
    fn widths(&self) -> [usize; 10];

    /// Its projections in a model of this width.
    fn matrices(&self, hidden: usize) -> Vec<Matrix>;

    /// The last parts of the names of those that make keys and values alone.
    fn keys_and_values(&self) -> &'static [&'static str] {
        &[]
    }

    /// Products of a token besides those of [`matrices`](Facts::matrices): with its own state, or to make keys and
    /// values of its latent.
    fn inner_products(&self) -> f64 {
        0.0
    }

    /// Products of a token and one that it attends to.
    fn products_per_pair(&self) -> usize {
        0
    }

    /// Seconds that a GPU takes for a layer of this kind in decode, whatever it reads. Measured on an H200.
    fn gpu_seconds(&self) -> f64 {
        22e-6
    }

    /// What a rank has of it; `None`: all, which every rank computes alike.
    fn divided(&self, _: Share) -> Option<Attention> {
        None
    }

    /// What the GPU's kernels lack for it, if anything.
    fn gpu_lacks(&self) -> Option<String> {
        None
    }
}
