//! What the speed of a layer depends on, and its bits do not.

use moebius_cache::pack::TILE_ROWS;

use crate::kernel::Ahead;
use crate::machine::workers::Cut;

/// Tokens that go through a tile before the next tile: their results fit on the stack, their weights stay in L2.
pub(super) const TOKEN_BLOCK: usize = 64;

/// What the speed of a layer with few tokens depends on, and its bits do not; `cargo bench --bench sweep` compares
/// choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// How far ahead of their use weights are asked for, if not as the kernel knows best.
    pub ahead: Option<Ahead>,
    /// The runs of tiles of `gate` and `up` that workers claim.
    pub gate_cut: Cut,
    /// The runs of tiles of `down`, in each of which all experts are added up; of many pairs, or several nodes.
    pub down_cut: Cut,
    /// Tiles of `gate`, with as many of `up`, that go through the kernel together.
    pub gate_tiles: usize,
    /// Tiles of `down` that go through the kernel together.
    pub down_tiles: usize,
    /// Whether a worker claims what it does next before it is done, so that prefetching goes on there.
    pub look_ahead: bool,
    /// Bytes of its first run of `down` that a worker brings into L2 while it waits for the others.
    pub idle_bytes: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            ahead: None,
            gate_cut: Cut::DEFAULT,
            down_cut: Cut::DEFAULT,
            gate_tiles: 2,
            down_tiles: 4,
            look_ahead: true,
            idle_bytes: 128 << 10,
        }
    }
}

impl Tuning {
    /// Numbers in a worker's room for the results of some tiles: gate and up as the kernel gives them, then each and
    /// their product.
    pub(super) fn results(&self) -> usize {
        TOKEN_BLOCK * TILE_ROWS * (5 * self.gate_tiles).max(self.down_tiles)
    }
}
