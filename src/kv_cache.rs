//! The KV cache: one pool of blocks for all sequences, storage per layer on the backend; and recurrent state, where layers have that instead.

use crate::backend::Backend;
use crate::batch::BLOCK_SIZE;
use crate::config::KvBits;
use crate::model::{Attention, ModelConfig};
use crate::{Error, Result};

/// Hands out blocks; a block is the same index in every layer.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
}

impl BlockPool {
    /// `total` free blocks.
    pub fn new(total: usize) -> Self {
        Self { free: (0..total as u32).rev().collect() }
    }

    /// Blocks not in use.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Extends `table` until it covers `tokens` tokens; takes nothing and returns false when there are too few free blocks.
    pub fn grow(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(BLOCK_SIZE).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend((0..missing).map(|_| self.free.pop().expect("counted just above")));
        true
    }

    /// Takes all blocks of `table` back.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.free.append(table);
    }
}

/// What one layer keeps of sequences.
pub enum LayerCache<B: Backend> {
    /// Keys and values of every position, in blocks.
    Kv(B::Kv),
    /// One state for each sequence, in slots.
    State(B::State),
}

/// Storage of all layers.
pub struct KvCache<B: Backend> {
    /// By layer.
    pub layers: Vec<LayerCache<B>>,
}

impl<B: Backend> KvCache<B> {
    /// Storage for `blocks` blocks, or the state of `slots` sequences, in every layer. Memory is taken as they are first used.
    pub fn new(backend: &B, model: &ModelConfig, blocks: usize, slots: usize, bits: KvBits) -> Result<Self> {
        let layers = model.layers.iter().map(|layer| match &layer.attention {
            Attention::DeltaNet(a) => backend.state(slots, a).map(LayerCache::State),
            attention => {
                let (heads, key_dim, value_dim) = attention.kv_dims();
                backend.kv(blocks, heads, key_dim, value_dim, bits).map(LayerCache::Kv)
            }
        });
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }
}

/// Checks that `tokens` tokens of KV cache fit into `available` bytes of memory.
///
/// Errors: `Error::Resources` with what is needed, what there is and the context that would fit, if one would.
pub fn check_fits(model: &ModelConfig, tokens: usize, bits: KvBits, available: u64) -> Result<()> {
    let per_token = model.kv_bytes_per_token(bits.parts());
    let needed = (tokens as u64).saturating_mul(per_token as u64);
    if needed <= available {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let remedy = match available / (per_token as u64).max(1) {
        fits if fits < BLOCK_SIZE as u64 => "close other programs, or use --dense int8 and --experts int4".to_string(),
        fits => format!("use --max-context {fits}"),
    };
    Err(Error::Resources(format!(
        "a context of {tokens} tokens needs {:.2} GiB of memory and {:.2} are free: {remedy}",
        gib(needed),
        gib(available),
    )))
}
