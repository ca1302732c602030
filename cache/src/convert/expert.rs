//! One expert: read, hashed, packed or quantized and packed, sixteen rows at a time, so that each row is in the cache
//! of the core throughout.

use xxhash_rust::xxh3::xxh3_64;

use crate::Result;
use crate::codec::Source;
use crate::format::ExpertRecord;
use crate::pack::{
    Blocks, ExpertKind, ExpertLayout, MatrixLayout, Precision, TILE_ROWS, Weights, pack_tile, unpack_matrix,
};
use crate::quantize::{Moments, Scratch, quantize_tile, quantize_tile_for};

/// What an expert reads of the text that it is calibrated for.
#[derive(Clone, Debug)]
pub struct ExpertMoments {
    /// The input of `gate` and `up`.
    pub hidden: Moments,
    /// The input of `down`.
    pub intermediate: Moments,
}

/// A whole expert, packed. Errors: `Error::Checkpoint` when a tensor cannot be decoded.
pub fn packed(layout: &ExpertLayout, sources: &[Source<'_>; 3]) -> Result<Vec<u8>> {
    let mut buffers = ExpertBuffers::default();
    buffers.convert(layout, sources, None)?;
    Ok(buffers.packed)
}

/// The buffers of one thread.
#[derive(Default)]
pub(super) struct ExpertBuffers {
    tiles: Tiles,
    packed: Vec<u8>,
}

impl ExpertBuffers {
    /// The packed bytes of an expert, for inputs with these moments where they are known, and its hashes. Errors:
    /// `Error::Checkpoint` when a tensor cannot be decoded.
    pub(super) fn convert(
        &mut self,
        layout: &ExpertLayout,
        [gate, up, down]: &[Source<'_>; 3],
        moments: Option<&ExpertMoments>,
    ) -> Result<(&[u8], ExpertRecord)> {
        self.packed.resize(layout.bytes(), 0);
        let end = layout.down_tile(layout.down.tiles());
        self.packed[end..].fill(0);
        let [of_hidden, of_down] = [moments.map(|m| &m.hidden), moments.map(|m| &m.intermediate)];
        let [gate, up] = match layout.kind() {
            ExpertKind::Gated => [
                self.matrix(&layout.gate, gate, of_hidden, |i| layout.gate_tile(i))?,
                self.matrix(&layout.gate, up, of_hidden, |i| layout.up_tile(i))?,
            ],
            ExpertKind::Ungated => {
                let all = MatrixLayout { n: layout.down.k, ..layout.gate };
                [self.matrix(&all, up, of_hidden, |i| i * all.tile_bytes())?; 2]
            }
        };
        let source = [gate, up, self.matrix(&layout.down, down, of_down, |i| layout.down_tile(i))?];
        Ok((&self.packed, ExpertRecord { packed: xxh3_64(&self.packed), source }))
    }

    /// Packs one matrix, tile `i` to `place(i)`, and returns the hash of its source.
    fn matrix(
        &mut self,
        layout: &MatrixLayout,
        source: &Source<'_>,
        moments: Option<&Moments>,
        place: impl Fn(usize) -> usize,
    ) -> Result<u64> {
        let mut hasher = source.hasher(layout.tiles());
        for i in 0..layout.tiles() {
            hasher.step(i);
            self.tiles.pack_for(layout, source, moments, i, &mut self.packed[place(i)..][..layout.tile_bytes()])?;
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
        self.pack_for(layout, source, None, i, out)
    }

    /// The same, for inputs with these moments where they are known.
    fn pack_for(
        &mut self,
        layout: &MatrixLayout,
        source: &Source<'_>,
        moments: Option<&Moments>,
        i: usize,
        out: &mut [u8],
    ) -> Result<()> {
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
        match moments {
            Some(moments) => quantize_tile_for(layout, &self.rows, moments, &mut self.scratch, out),
            None => quantize_tile(layout, &self.rows, &mut self.scratch, out),
        }
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
