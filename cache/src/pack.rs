//! Where every byte of a packed expert lies: tiles of 16 rows, in the order the kernels read them.
//!
//! A matrix `[n, k]` (`y = W x`, `k` contiguous in the source) is cut into tiles of 16 rows; a last partial tile is
//! filled with zero weights. A tile of an integer matrix holds its scales, then its codes:
//!
//! ```text
//! scales  [k / group_size][16] bf16 or f16, or as [`Scales`] says, then zeros up to a multiple of 64 bytes
//! codes   [k / 32] blocks of as many 64-byte lines as a code has bits; a line: [16 rows][4] u8
//! ```
//!
//! Byte `[r][j]` of a line has the codes of row `r` and of inputs `j`, `4 + j`, `8 + j`, ..., one of each run of 4
//! inputs, the lowest bits first. Of a block come the lines of its first 16 inputs, then those of the others, then the
//! highest bits where their number is odd:
//!
//! ```text
//! 8 bits  [8]                  a run of 4 inputs each: code + 128, or the bits of E4M3
//! 4       [4]                  two runs each: code + 8 of INT4; of MXFP4 E2M1, which stands for twice its value
//! 6       [2: 2 x 4 bits][1: 4 x 2 upper bits] of 16 inputs, twice
//! 5       [4: 2 x 4 bits][1: 8 x the highest bit]
//! 3       [2: 4 x 2 bits][1: 8 x the highest bit]
//! 2       [2: 4 x 2 bits]
//! ```
//!
//! Codes that are places in a grid lie in words, see [`Grid`]: line `i` of 256 inputs has word `i` of the 16 rows.
//!
//! A tile of a BF16 matrix has no scales, and zeros up to a multiple of 32 inputs:
//!
//! ```text
//! weights [ceil(k / 32) 16][16][2] bf16                       (one 64-byte line: 16 rows x 2 inputs)
//! ```
//!
//! This is the operand order of `vpdpbusd` (unsigned weights, signed activations), `vdpbf16ps`, and an AMX B tile.
//!
//! ```
//! use moebius_cache::pack::{ExpertLayout, Precision};
//!
//! // One expert of Qwen3-30B-A3B: 3 x 2048 x 768 weights of 4 bits, and a 16-bit scale for every 128 of them.
//! let layout = ExpertLayout::new(2048, 768, Precision::int4(128))?;
//! assert_eq!(layout.bytes(), 3 * 2048 * 768 * (4 * 128 + 16) / (8 * 128));
//! # Ok::<(), moebius_cache::Error>(())
//! ```
//!
//! An expert is `gate` and `up` with their tiles alternating (gate 0, up 0, gate 1, up 1, ...), then `down`: a slice of
//! intermediate rows is one contiguous run of bytes.

mod grid;
mod grids;
mod precision;
mod precisions;
mod tile;

pub use grid::Grid;
pub use precision::{CodeType, Counts, DOUBLED_E2M1, E4M3, IQ4, Precision, Row, SUPER_BLOCK, ScaleType, Scales};
pub use precisions::{ExpertPrecision, Precisions};
pub(crate) use tile::pack_tile;
pub use tile::{Blocks, Weights, pack_expert, pack_matrix, unpack_code, unpack_expert, unpack_matrix, unpack_scale};

use std::ops::Range;

use crate::{Error, Result};

/// The group sizes there are kernels for, smallest first.
pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// The largest group size that divides rows of all these lengths.
pub fn largest_group_size(lengths: &[usize]) -> Option<usize> {
    GROUP_SIZES.into_iter().rev().find(|group| lengths.iter().all(|length| length.is_multiple_of(*group)))
}

/// Rows of one tile.
pub const TILE_ROWS: usize = 16;

/// A BF16 tile is filled with zeros up to a multiple of so many inputs: those of one AMX tile, 1 KiB.
pub const BF16_INPUTS: usize = 32;

/// The bytes of one packed matrix `[n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Output rows.
    pub n: usize,
    /// Inputs, the contiguous dimension of the source.
    pub k: usize,
    /// Storage of the weights.
    pub precision: Precision,
}

impl MatrixLayout {
    /// Errors: `Error::Invalid` when a dimension is zero, or the group size is not 32, 64 or 128 or does not divide
    /// `k`.
    pub fn new(n: usize, k: usize, precision: Precision) -> Result<Self> {
        if n == 0 || k == 0 {
            return Err(Error::Invalid(format!("a matrix of {n} x {k} has no weights")));
        }
        if let (Some(g), Some(row)) = (precision.group_size(), precision.row()) {
            if row.group_size == 0 && !GROUP_SIZES.contains(&g) {
                return Err(Error::Invalid(format!("group size {g} is not 32, 64 or 128")));
            }
            if !k.is_multiple_of(precision.unit()) {
                if precision.unit() != g {
                    let unit = precision.unit();
                    return Err(Error::Invalid(format!(
                        "{precision} needs rows of a multiple of {unit} weights, not of {k}: choose --experts int8"
                    )));
                }
                return Err(Error::Invalid(format!(
                    "group size {g} does not divide a row of {k} weights: choose --group-size 32, 64 or 128 that \
                     does, or --experts bf16"
                )));
            }
        }
        Ok(Self { n, k, precision })
    }

    /// Tiles of 16 rows, the last one possibly filled with zeros.
    #[inline]
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Bytes of the scales at the start of a tile (a multiple of 64; 0 for BF16).
    #[inline]
    pub fn scale_bytes(&self) -> usize {
        let (Some(g), Some(row)) = (self.precision.group_size(), self.precision.row()) else { return 0 };
        row.scales.bytes(self.k, g).next_multiple_of(64)
    }

    /// Bytes of one tile, scales included.
    #[inline]
    pub fn tile_bytes(&self) -> usize {
        self.scale_bytes() + self.precision.line_bytes(self.k)
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.tiles() * self.tile_bytes()
    }

    /// The matrix of some inputs alone, and which bytes of a tile are its tile's. Both ends are multiples of
    /// [`Precision::unit`], and of 32. Errors: there are none of them.
    pub fn of_inputs(&self, inputs: Range<usize>) -> Result<(Self, Vec<TilePart>)> {
        let part = Self::new(self.n, inputs.len(), self.precision)?;
        let lines = |k| self.precision.line_bytes(k);
        let mut parts = vec![TilePart {
            from: self.scale_bytes() + lines(inputs.start),
            to: part.scale_bytes(),
            bytes: lines(inputs.len()),
        }];
        if let (Some(group), Some(Row { scales, .. })) = (self.precision.group_size(), self.precision.row()) {
            // What a tile's rows have once belongs to all parts.
            let head = if scales == Scales::E4m3 { scales.head_bytes() } else { 0 };
            let (from, end) = (scales.bytes(inputs.start, group), scales.bytes(inputs.len(), group));
            parts.push(TilePart { from, to: head, bytes: end - head });
            parts.extend((head > 0).then_some(TilePart { from: 0, to: 0, bytes: head }));
        }
        Ok((part, parts))
    }
}

/// A run of bytes of a tile, and where it is in the tile of some of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePart {
    /// In the tile of all inputs.
    pub from: usize,
    /// In the tile of some.
    pub to: usize,
    /// Of both.
    pub bytes: usize,
}

/// What an expert has before `down`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertKind {
    /// `gate` and `up`: `down(activation(gate x, up x))`.
    #[default]
    Gated,
    /// `up` alone: `down(activation(up x))`. Its tiles lie as those of `gate` and `up` of half the rows.
    Ungated,
}

impl ExpertKind {
    /// Its layout. Errors: `Error::Invalid` as [`MatrixLayout::new`], and an ungated one of half tiles.
    pub fn layout(
        self,
        hidden: usize,
        intermediate: usize,
        precision: impl Into<ExpertPrecision>,
    ) -> Result<ExpertLayout> {
        let ExpertPrecision { gate, down } = precision.into();
        let rows = match self {
            ExpertKind::Gated => intermediate,
            ExpertKind::Ungated if intermediate.is_multiple_of(2 * TILE_ROWS) => intermediate / 2,
            ExpertKind::Ungated => {
                return Err(Error::Invalid(format!(
                    "experts without a gate need a width that is a multiple of 32, and it is {intermediate}"
                )));
            }
        };
        Ok(ExpertLayout {
            gate: MatrixLayout::new(rows, hidden, gate)?,
            down: MatrixLayout::new(hidden, intermediate, down)?,
        })
    }
}

/// The bytes of one packed expert: `down(silu(gate x) * up x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// `gate` and `up`, each `[intermediate, hidden]`; of an ungated one each is every second tile of `up`.
    pub gate: MatrixLayout,
    /// `[hidden, intermediate]`.
    pub down: MatrixLayout,
}

impl ExpertLayout {
    /// Errors: `Error::Invalid` as [`MatrixLayout::new`].
    pub fn new(hidden: usize, intermediate: usize, precision: impl Into<ExpertPrecision>) -> Result<Self> {
        ExpertKind::Gated.layout(hidden, intermediate, precision)
    }

    /// What it has before `down`.
    pub fn kind(&self) -> ExpertKind {
        if self.gate.n == self.down.k { ExpertKind::Gated } else { ExpertKind::Ungated }
    }

    /// Weights of the expert.
    pub fn weights(&self) -> usize {
        2 * self.gate.n * self.gate.k + self.down.n * self.down.k
    }

    /// What the width of an expert may be cut at: multiples of this.
    pub fn width_unit(&self) -> usize {
        self.down.precision.unit().max(2 * TILE_ROWS)
    }

    /// The expert of a part of its width alone. Errors: as [`ExpertKind::layout`].
    pub fn of_width(&self, width: Range<usize>) -> Result<Self> {
        let precision = ExpertPrecision { gate: self.gate.precision, down: self.down.precision };
        self.kind().layout(self.gate.k, width.len(), precision)
    }

    /// Offset of tile `i` of `gate` in the expert.
    pub fn gate_tile(&self, i: usize) -> usize {
        2 * i * self.gate.tile_bytes()
    }

    /// Offset of tile `i` of `up` in the expert.
    pub fn up_tile(&self, i: usize) -> usize {
        (2 * i + 1) * self.gate.tile_bytes()
    }

    /// Offset of tile `i` of `down` in the expert.
    pub fn down_tile(&self, i: usize) -> usize {
        2 * self.gate.bytes() + i * self.down.tile_bytes()
    }

    /// Bytes of the whole expert, rounded up to a multiple of 64: the stride from one expert of a layer to the next.
    pub fn bytes(&self) -> usize {
        (2 * self.gate.bytes() + self.down.bytes()).next_multiple_of(64)
    }
}
