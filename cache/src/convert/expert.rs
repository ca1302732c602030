//! One expert: read, hashed, packed or quantized and packed, sixteen rows at a time, so that each row is in the cache
//! of the core throughout.

use xxhash_rust::xxh3::xxh3_64;

use crate::Result;
use crate::codec::Source;
use crate::format::ExpertRecord;
use crate::pack::{
    Blocks, ExpertKind, ExpertLayout, MatrixLayout, Precision, TILE_ROWS, Weights, pack_tile, unpack_matrix,
};
use crate::quantize::{Scratch, quantize_tile};

/// The buffers of one thread.
#[derive(Default)]
pub(super) struct ExpertBuffers {
    tiles: Tiles,
    packed: Vec<u8>,
}

impl ExpertBuffers {
    /// The packed bytes of an expert, and its hashes. Errors: `Error::Checkpoint` when a tensor cannot be decoded.
    pub(super) fn convert(
        &mut self,
        layout: &ExpertLayout,
        [gate, up, down]: &[Source<'_>; 3],
    ) -> Result<(&[u8], ExpertRecord)> {
        self.packed.resize(layout.bytes(), 0);
        let end = layout.down_tile(layout.down.tiles());
        self.packed[end..].fill(0);
        let [gate, up] = match layout.kind() {
            ExpertKind::Gated => [
                self.matrix(&layout.gate, gate, |i| layout.gate_tile(i))?,
                self.matrix(&layout.gate, up, |i| layout.up_tile(i))?,
            ],
            ExpertKind::Ungated => {
                let all = MatrixLayout { n: layout.down.k, ..layout.gate };
                [self.matrix(&all, up, |i| i * all.tile_bytes())?; 2]
            }
        };
        let source = [gate, up, self.matrix(&layout.down, down, |i| layout.down_tile(i))?];
        Ok((&self.packed, ExpertRecord { packed: xxh3_64(&self.packed), source }))
    }

    /// Packs one matrix, tile `i` to `place(i)`, and returns the hash of its source.
    fn matrix(&mut self, layout: &MatrixLayout, source: &Source<'_>, place: impl Fn(usize) -> usize) -> Result<u64> {
        let mut hasher = source.hasher(layout.tiles());
        for i in 0..layout.tiles() {
            hasher.step(i);
            self.tiles.pack(layout, source, i, &mut self.packed[place(i)..][..layout.tile_bytes()])?;
        }
        Ok(hasher.finish())
    }
}

/// Packs tiles of a source: its own codes and scales where the precision holds them, else quantized anew.
#[derive(Default)]
pub struct Tiles {
    rows: Vec<f32>, // [16, k]
    codes: Vec<i8>, // [16, k]
    scales: Vec<f32>,
    packed_scales: Vec<f32>,
    blocks: Blocks,
    scratch: Scratch,
}

impl Tiles {
    /// Tile `i` of `source`, whose shape is that of `layout`. Errors: `Error::Checkpoint` as [`Source::decode`].
    pub fn pack(&mut self, layout: &MatrixLayout, source: &Source<'_>, i: usize, out: &mut [u8]) -> Result<()> {
        let first = i * TILE_ROWS;
        let rows = TILE_ROWS.min(layout.n - first);
        let weights = rows * layout.k;
        if source.fits(layout.precision) {
            let (Some(integers), Some(group_size)) = (source.integers(), layout.precision.group_size()) else {
                source.blocks(first, rows, &mut self.blocks)?;
                pack_tile(layout, Weights::Blocks(&self.blocks, 0..rows), out);
                return Ok(());
            };
            self.codes.resize(weights, 0);
            self.scales.resize(weights / integers.group, 0.0);
            source.codes(first, &mut self.codes, &mut self.scales)?;
            let repeated =
                self.scales.iter().flat_map(|&scale| std::iter::repeat_n(scale, integers.group / group_size));
            self.packed_scales.clear();
            self.packed_scales.extend(repeated);
            pack_tile(layout, Weights::Int { codes: &self.codes, scales: &self.packed_scales }, out);
            return Ok(());
        }
        self.rows.resize(weights, 0.0);
        source.decode(first, &mut self.rows)?;
        quantize_tile(layout, &self.rows, &mut self.scratch, out);
        Ok(())
    }
}

/// What packing adds to the error of a source: root mean square of the difference over that of the weights, on some of
/// its tiles. 0: nothing.
///
/// Errors: as [`Source::decode`], and `Error::Invalid` when the precision's groups do not divide its rows.
pub fn rounding(source: &Source<'_>, precision: Precision) -> Result<f64> {
    const SAMPLES: usize = 4;
    let [n, k] = source.shape();
    let layout = MatrixLayout::new(n, k, precision)?;
    let (mut tiles, mut packed) = (Tiles::default(), vec![0; layout.tile_bytes()]);
    let (mut difference, mut size) = (0.0, 0.0);
    let samples = SAMPLES.min(layout.tiles());
    for tile in (0..samples).map(|i| i * layout.tiles() / samples) {
        let first = tile * TILE_ROWS;
        let rows = TILE_ROWS.min(n - first);
        let mut weights = vec![0.0; rows * k];
        source.decode(first, &mut weights)?;
        tiles.pack(&layout, source, tile, &mut packed)?;
        for (w, q) in weights.iter().zip(unpack_matrix(&MatrixLayout { n: rows, ..layout }, &packed)) {
            difference += (*w as f64 - q as f64).powi(2);
            size += (*w as f64).powi(2);
        }
    }
    Ok(if difference == 0.0 { 0.0 } else { (difference / size).sqrt() })
}
