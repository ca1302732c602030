//! The KV cache: storage per layer on the backend, in blocks of one pool for all sequences; and recurrent state, where
//! layers have that instead.

use crate::backend::Backend;
use crate::config::KvBits;
use crate::model::{LayerConfig, ModelConfig, Selection};
use crate::{Error, Result};

/// What one layer keeps of sequences.
pub struct LayerCache<B: Backend> {
    kv: Option<B::Kv>,        // of every position, in blocks
    index: Option<B::Index>,  // of every position, in blocks
    state: Option<B::State>,  // of each sequence, in slots
    ngrams: Option<B::State>, // the same, of n-grams
}

impl<B: Backend> LayerCache<B> {
    fn new(
        backend: &B,
        (layer, hidden): (&LayerConfig, usize),
        blocks: usize,
        slots: usize,
        bits: KvBits,
    ) -> Result<Self> {
        let kv = match layer.attention.kv_dims() {
            (0, ..) => None,
            dims => Some(backend.kv(blocks, dims, bits)?),
        };
        let own = layer.attention.selection().and_then(Selection::own);
        let [state, ngrams] = layer.states(hidden).map(|shape| shape.map(|shape| backend.state(slots, shape)));
        Ok(Self {
            kv,
            index: own.map(|indexer| backend.index(blocks, indexer)).transpose()?,
            state: state.transpose()?,
            ngrams: ngrams.transpose()?,
        })
    }

    /// Keys and values, of a layer that has them.
    pub(super) fn kv(&mut self) -> &mut B::Kv {
        self.kv.as_mut().expect("the layer's attention has keys and values")
    }

    /// Index keys, of a layer that has an indexer.
    pub(super) fn index(&mut self) -> &mut B::Index {
        self.index.as_mut().expect("the layer's attention has an indexer")
    }

    /// Recurrent state, of a layer that has it.
    pub(super) fn state(&mut self) -> &mut B::State {
        self.state.as_mut().expect("the layer's attention has a state")
    }

    /// What n-grams keep of sequences, in a layer that has them.
    pub(super) fn ngrams(&mut self) -> &mut B::State {
        self.ngrams.as_mut().expect("the layer has n-grams")
    }
}

/// Storage of all layers.
pub struct KvCache<B: Backend> {
    /// By layer.
    pub layers: Vec<LayerCache<B>>,
}

impl<B: Backend> KvCache<B> {
    /// Storage for `blocks` blocks, or the state of `slots` sequences, in every layer. Memory is taken as they are
    /// first used.
    pub fn new(backend: &B, model: &ModelConfig, blocks: usize, slots: usize, bits: KvBits) -> Result<Self> {
        let layers = model.layers.iter().map(|l| LayerCache::new(backend, (l, model.hidden_size), blocks, slots, bits));
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }
}

/// Checks that `tokens` tokens of KV cache, of `per_token` bytes each, fit into `available` bytes of memory.
///
/// Errors: `Error::Resources` with what is needed, what there is and the context that would fit.
pub fn check_fits(tokens: usize, per_token: u64, available: u64) -> Result<()> {
    let needed = (tokens as u64).saturating_mul(per_token);
    if needed <= available {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let fits = available / per_token.max(1);
    Err(Error::Resources(format!(
        "a context of {tokens} tokens needs {:.2} GiB of memory and {:.2} are free: use --max-context {fits}",
        gib(needed),
        gib(available),
    )))
}
