//! The KV cache: storage per layer on the backend, in blocks of one pool for all sequences; and recurrent state, where
//! layers have that instead.

use super::block_pool::BlockMove;
use crate::backend::Backend;
use crate::config::KvBits;
use crate::model::{LayerConfig, ModelConfig, StateShape};
use crate::{Error, Result};

/// What one layer keeps of sequences.
pub struct LayerCache<B: Backend> {
    kv: Option<B::Kv>,           // of every position, in blocks
    index: Option<B::Index>,     // of every position, in blocks
    entries: Option<B::Entries>, // of several positions each, in blocks
    state: Option<B::State>,     // of each sequence, in slots
    ngrams: Option<B::State>,    // the same, of n-grams
}

impl<B: Backend> LayerCache<B> {
    fn new(
        backend: &B,
        (layer, hidden): (&LayerConfig, usize),
        CacheSize { blocks, slots, .. }: CacheSize,
        bits: KvBits,
    ) -> Result<Self> {
        let kv = match layer.attention.kv_dims() {
            (0, ..) => None,
            dims => Some(backend.kv(blocks, dims, bits)?),
        };
        let [state, ngrams] = layer.states(hidden).map(|shape| shape.map(|shape| backend.state(slots, shape)));
        Ok(Self {
            kv,
            index: layer.attention.index_keys().map(|indexer| backend.index(blocks, indexer)).transpose()?,
            entries: layer.attention.entries().map(|of| backend.entries(blocks, of, bits)).transpose()?,
            state: state.transpose()?,
            ngrams: ngrams.transpose()?,
        })
    }

    /// Keys and values, of a layer that has them.
    pub(super) fn kv(&mut self) -> &mut B::Kv {
        self.kv.as_mut().expect("the layer's attention has keys and values")
    }

    /// The same, to be like them.
    pub(super) fn keys_and_values(&self) -> &B::Kv {
        self.kv.as_ref().expect("the layer's attention has keys and values")
    }

    /// Index keys, of a layer that has an indexer.
    pub(super) fn index(&mut self) -> &mut B::Index {
        self.index.as_mut().expect("the layer's attention has an indexer")
    }

    /// Everything that a layer has that attends to entries: these, its index keys and its state.
    pub(super) fn compressed(&mut self) -> (Option<&mut B::Entries>, Option<&mut B::Index>, &mut B::State) {
        let state = self.state.as_mut().expect("the layer's attention has a state");
        (self.entries.as_mut(), self.index.as_mut(), state)
    }

    /// What later layers borrow: entries, and their index keys.
    pub(super) fn lent(&self) -> (Option<&B::Entries>, Option<&B::Index>) {
        (self.entries.as_ref(), self.index.as_ref())
    }

    /// Recurrent state, of a layer that has it.
    pub(super) fn state(&mut self) -> &mut B::State {
        self.state.as_mut().expect("the layer's attention has a state")
    }

    /// What n-grams keep of sequences, where they do.
    pub(super) fn ngrams(&mut self) -> Option<&mut B::State> {
        self.ngrams.as_mut()
    }

    /// Bytes of a block of keys and values, of index keys, and of entries.
    fn block_bytes(&self, backend: &B) -> [usize; 3] {
        [
            self.kv.as_ref().map_or(0, |kv| backend.kv_block_bytes(kv)),
            self.index.as_ref().map_or(0, |index| backend.index_block_bytes(index)),
            self.entries.as_ref().map_or(0, |entries| backend.entries_block_bytes(entries)),
        ]
    }

    /// All that it keeps of sequences by slot.
    fn states(&self) -> impl Iterator<Item = &B::State> {
        self.state.iter().chain(&self.ngrams)
    }

    fn states_mut(&mut self) -> impl Iterator<Item = &mut B::State> {
        self.state.iter_mut().chain(&mut self.ngrams)
    }
}

/// What there is room for.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheSize {
    /// Blocks of keys and values.
    pub blocks: usize,
    /// Sequences that run, each with its recurrent state.
    pub slots: usize,
    /// Recurrent states that are kept on the host.
    pub snapshots: usize,
    /// Blocks of keys and values more, on the host.
    pub host_blocks: usize,
}

/// Storage of all layers.
pub struct KvCache<B: Backend> {
    /// By layer.
    pub layers: Vec<LayerCache<B>>,
    snapshots: B::Host, // [snapshots, numbers of a sequence's state]
    of_sequence: usize, // numbers
    host: B::Host,      // [host blocks, bytes of a block in all layers]
    of_block: usize,    // bytes
}

impl<B: Backend> KvCache<B> {
    /// Storage of this size in every layer. Memory is taken as it is first used.
    pub fn new(backend: &B, model: &ModelConfig, size: CacheSize, bits: KvBits) -> Result<Self> {
        let (model, hidden) = (model.share(backend.share())?, model.hidden_size);
        let layers = model.layers.iter().map(|layer| LayerCache::new(backend, (layer, hidden), size, bits));
        let states = model.layers.iter().flat_map(|layer| layer.states(hidden)).flatten();
        let of_sequence = states.map(StateShape::total).sum();
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let of_block = layers.iter().map(|layer| layer.block_bytes(backend).iter().sum::<usize>()).sum();
        Ok(Self {
            layers,
            snapshots: backend.host(size.snapshots * of_sequence)?,
            of_sequence,
            host: backend.host(size.host_blocks * of_block / size_of::<f32>())?,
            of_block,
        })
    }

    /// What a layer keeps, and what the layer keeps that it borrows from.
    pub(super) fn layer(
        &mut self,
        layer: usize,
        lender: Option<usize>,
    ) -> (&mut LayerCache<B>, Option<&LayerCache<B>>) {
        let (before, rest) = self.layers.split_at_mut(layer);
        (&mut rest[0], lender.map(|lender| &before[lender]))
    }

    /// Copies a block of all layers to the host, or back.
    pub(super) fn move_block(&mut self, backend: &B, moved: BlockMove) {
        let Self { layers, host, of_block, .. } = self;
        let host = bytemuck::cast_slice_mut::<f32, u8>(host);
        let place = |at: u32| at as usize * *of_block..(at as usize + 1) * *of_block;
        match moved {
            BlockMove::ToHost(block, at) => {
                let mut to = &mut host[place(at)];
                for layer in layers {
                    let [of_kv, of_index, of_entries] = layer.block_bytes(backend);
                    let (kv, rest) = to.split_at_mut(of_kv);
                    let (index, rest) = rest.split_at_mut(of_index);
                    let (entries, rest) = rest.split_at_mut(of_entries);
                    layer.kv.iter().for_each(|from| backend.kv_to_host(from, block as usize, kv));
                    layer.index.iter().for_each(|from| backend.index_to_host(from, block as usize, index));
                    layer.entries.iter().for_each(|from| backend.entries_to_host(from, block as usize, entries));
                    to = rest;
                }
            }
            BlockMove::ToDevice(at, block) => {
                let mut from = &host[place(at)];
                for layer in layers {
                    let [of_kv, of_index, of_entries] = layer.block_bytes(backend);
                    let (kv, rest) = from.split_at(of_kv);
                    let (index, rest) = rest.split_at(of_index);
                    let (entries, rest) = rest.split_at(of_entries);
                    layer.kv.iter_mut().for_each(|to| backend.kv_to_device(to, block as usize, kv));
                    layer.index.iter_mut().for_each(|to| backend.index_to_device(to, block as usize, index));
                    layer.entries.iter_mut().for_each(|to| backend.entries_to_device(to, block as usize, entries));
                    from = rest;
                }
            }
        }
    }

    /// Copies the state in `slot` of all layers to a snapshot.
    pub(super) fn save_state(&mut self, backend: &B, slot: usize, snapshot: usize) {
        let mut to = &mut self.snapshots[snapshot * self.of_sequence..][..self.of_sequence];
        for state in self.layers.iter().flat_map(LayerCache::states) {
            let (of_layer, rest) = to.split_at_mut(backend.state_len(state));
            backend.save_state(state, slot, of_layer);
            to = rest;
        }
    }

    /// The same, back.
    pub(super) fn restore_state(&mut self, backend: &B, slot: usize, snapshot: usize) {
        let mut from = &self.snapshots[snapshot * self.of_sequence..][..self.of_sequence];
        for state in self.layers.iter_mut().flat_map(LayerCache::states_mut) {
            let (of_layer, rest) = from.split_at(backend.state_len(state));
            backend.restore_state(state, slot, of_layer);
            from = rest;
        }
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
