//! One expert: read, hashed, quantized and packed, sixteen rows at a time, so that each row is in the cache of the core throughout.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::Result;
use crate::checkpoint::TensorView;
use crate::codec;
use crate::format::ExpertRecord;
use crate::pack::{ExpertLayout, MatrixLayout, TILE_ROWS};
use crate::quantize::{Scratch, quantize_tile};

/// The buffers of one thread.
pub(super) struct Worker {
    layout: ExpertLayout,
    rows: Vec<f32>, // [16, k]
    scratch: Scratch,
    packed: Vec<u8>,
}

impl Worker {
    pub(super) fn new(layout: ExpertLayout) -> Self {
        Self { layout, rows: Vec::new(), scratch: Scratch::default(), packed: vec![0; layout.bytes()] }
    }

    /// The packed bytes of an expert, and its hashes. Errors: `Error::Checkpoint` when a tensor cannot be decoded.
    pub(super) fn convert(&mut self, [gate, up, down]: &[TensorView<'_>; 3]) -> Result<(&[u8], ExpertRecord)> {
        let layout = self.layout;
        let source = [
            self.matrix(&layout.gate, gate, |i| layout.gate_tile(i))?,
            self.matrix(&layout.gate, up, |i| layout.up_tile(i))?,
            self.matrix(&layout.down, down, |i| layout.down_tile(i))?,
        ];
        Ok((&self.packed, ExpertRecord { packed: xxh3_64(&self.packed), source }))
    }

    /// Packs one matrix, tile `i` to `place(i)`, and returns the hash of its source.
    fn matrix(&mut self, layout: &MatrixLayout, view: &TensorView<'_>, place: impl Fn(usize) -> usize) -> Result<u64> {
        let row_bytes = layout.k * codec::element_bytes(view)?;
        let mut hasher = Xxh3::new();
        for (i, bytes) in view.data.chunks(TILE_ROWS * row_bytes).enumerate() {
            hasher.update(bytes);
            self.rows.resize(bytes.len() / row_bytes * layout.k, 0.0);
            codec::decode_range_f32(view, i * TILE_ROWS * layout.k, &mut self.rows)?;
            quantize_tile(layout, &self.rows, &mut self.scratch, &mut self.packed[place(i)..][..layout.tile_bytes()]);
        }
        Ok(hasher.digest())
    }
}
