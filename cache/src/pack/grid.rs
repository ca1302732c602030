//! Codes that are places in a grid: llama.cpp's i-quants, of which an index stands for the magnitudes of four or eight
//! weights, and a bit of each weight for its sign.
//!
//! They are kept as they are. A super-block of 256 inputs of a row is some words of 32 bits; word `i` of 16 rows is
//! line `i` of a tile's super-block:
//!
//! ```text
//! of each 32 inputs  indices    one word, or two of IQ3: a byte for each run of eight weights, of IQ3 of four
//!                    signs      one word: of eight weights seven bits, the eighth makes the number of ones even; above
//!                               them 4 bits: the scale's count, of IQ2_XS the ninth bits of the indices
//!                               IQ2_S, IQ3_S: 32 bits
//! of all             upper      IQ2_S, IQ3_S: two words, a byte of upper bits of indices for each 32 inputs: two bits
//!                               of each, of IQ3_S one
//! ```
//!
//! Source: ggml's `dequantize_row_iq*`.

use super::SUPER_BLOCK;
use super::grids;

/// Whose codes are places in a grid, and which grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // llama.cpp's names
pub enum Grid {
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
}

/// Inputs whose words lie together.
const BLOCK: usize = 32;

impl Grid {
    /// Weights of one index.
    pub const fn run(self) -> usize {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => 8,
            Self::Iq3Xxs | Self::Iq3S => 4,
        }
    }

    /// Words of 32 inputs of a row.
    pub const fn block_words(self) -> usize {
        BLOCK / self.run() / 4 + 1
    }

    /// Words of a super-block of a row.
    pub const fn words(self) -> usize {
        SUPER_BLOCK / BLOCK * self.block_words() + if self.has_all_signs() { 2 } else { 0 }
    }

    /// Whether there is a bit for each sign, and upper bits of indices lie apart.
    pub const fn has_all_signs(self) -> bool {
        matches!(self, Self::Iq2S | Self::Iq3S)
    }

    /// Bits of an index above its byte.
    pub const fn upper_bits(self) -> usize {
        match self {
            Self::Iq2Xxs | Self::Iq3Xxs => 0,
            Self::Iq2Xs | Self::Iq3S => 1,
            Self::Iq2S => 2,
        }
    }

    /// The largest magnitude.
    pub const fn largest(self) -> i8 {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => 43,
            Self::Iq3Xxs => 62,
            Self::Iq3S => 15,
        }
    }

    /// The magnitudes of four weights in a word: of index `i`, or of its halves at `2 i` and `2 i + 1` where it has
    /// eight.
    pub const fn magnitudes(self) -> &'static [u32] {
        match self {
            Self::Iq2Xxs => &IQ2_XXS,
            Self::Iq2Xs => &IQ2_XS,
            Self::Iq2S => &IQ2_S,
            Self::Iq3Xxs => &IQ3_XXS,
            Self::Iq3S => &IQ3_S,
        }
    }

    /// Of each index the places of its magnitudes among those there are, a nibble each, as a GPU reads them.
    pub fn places(self) -> Vec<u32> {
        let place = |magnitude: u8| self.values().iter().position(|&value| value == magnitude).unwrap_or(0) as u32;
        let each =
            self.magnitudes().chunks(self.run() / 4).map(|index| index.iter().flat_map(|four| four.to_le_bytes()));
        each.map(|all| all.enumerate().fold(0, |word, (i, magnitude)| word | place(magnitude) << (4 * i))).collect()
    }

    /// The magnitudes there are.
    const fn values(self) -> &'static [u8] {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => &IQ2_VALUES,
            Self::Iq3Xxs => &IQ3_XXS_VALUES,
            Self::Iq3S => &IQ3_S_VALUES,
        }
    }

    /// The index of a run of the weights of block `block`, by the definition.
    fn index(self, word: &impl Fn(usize) -> u32, block: usize, run: usize) -> usize {
        let first = block * self.block_words();
        let upper = match self {
            Self::Iq2Xxs | Self::Iq3Xxs => 0,
            Self::Iq2Xs => word(first + 1) >> (28 + run) & 1,
            Self::Iq2S | Self::Iq3S => {
                let bits = self.upper_bits();
                let byte = word(8 * self.block_words() + block / 4) >> (8 * (block % 4)) & 0xff;
                byte >> (bits * run) & ((1 << bits) - 1)
            }
        };
        (word(first + run / 4) >> (8 * (run % 4)) & 0xff | upper << 8) as usize
    }

    /// The code of an input of a super-block whose words these are, by the definition.
    pub fn code(self, word: impl Fn(usize) -> u32, input: usize) -> i8 {
        let (block, within) = (input / BLOCK, input % BLOCK);
        let index = self.index(&word, block, within / self.run());
        let at = within % self.run();
        let four = self.magnitudes()[index * self.run() / 4 + at / 4];
        let magnitude = (four >> (8 * (at % 4))) as u8 as i8;
        let signs = word(block * self.block_words() + self.block_words() - 1);
        let negative = match self.has_all_signs() {
            true => signs >> within & 1 == 1,
            false => {
                let seven = signs >> (7 * (within / 8)) & 0x7f;
                (seven | (seven.count_ones() & 1) << 7) >> (within % 8) & 1 == 1
            }
        };
        if negative { -magnitude } else { magnitude }
    }

    /// The count of the scale of block `block`, where it lies above the signs.
    pub fn count(self, word: impl Fn(usize) -> u32, block: usize) -> u8 {
        (word(block * self.block_words() + self.block_words() - 1) >> 28) as u8
    }

    /// The words of a super-block whose weights, in units of their scales, are nearest to these; `count(block)` is what
    /// goes above the signs. Slow.
    pub(crate) fn nearest(self, weights: &[f32], count: impl Fn(usize) -> u8, words: &mut [u32]) {
        words.fill(0);
        for (block, w) in weights.chunks_exact(BLOCK).enumerate() {
            let first = block * self.block_words();
            let last = first + self.block_words() - 1;
            for (run, w) in w.chunks_exact(self.run()).enumerate() {
                let error = |index: &usize| -> f32 {
                    let four = &self.magnitudes()[index * self.run() / 4..][..self.run() / 4];
                    let each = four.iter().flat_map(|four| four.to_le_bytes());
                    w.iter().zip(each).map(|(w, magnitude)| (w.abs() - f32::from(magnitude)).powi(2)).sum()
                };
                let indices = self.magnitudes().len() * 4 / self.run();
                let index = (0..indices).min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or(0) as u32;
                words[first + run / 4] |= (index & 0xff) << (8 * (run % 4));
                match self {
                    Self::Iq2Xxs | Self::Iq3Xxs => {}
                    Self::Iq2Xs => words[last] |= (index >> 8) << (28 + run),
                    Self::Iq2S | Self::Iq3S => {
                        let at = 8 * (block % 4) + self.upper_bits() * run;
                        words[8 * self.block_words() + block / 4] |= (index >> 8) << at;
                    }
                }
            }
            for (eight, w) in w.chunks_exact(8).enumerate() {
                let mut signs = w.iter().enumerate().fold(0, |signs, (i, w)| signs | u32::from(*w < 0.0) << i);
                if self.has_all_signs() {
                    words[last] |= signs << (8 * eight);
                    continue;
                }
                if signs.count_ones() % 2 == 1 {
                    // The one that matters least is wrong.
                    let least = (0..8).min_by(|&a, &b| w[a].abs().total_cmp(&w[b].abs())).unwrap_or(0);
                    signs ^= 1 << least;
                }
                words[last] |= (signs & 0x7f) << (7 * eight);
            }
            words[last] |= u32::from(count(block)) << if self.has_all_signs() { 0 } else { 28 };
        }
    }
}

/// The magnitudes of indices, `BITS` bits each of one of `values`, four to a word.
const fn expanded<const BITS: usize, const N: usize>(indices: &[u16], values: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    let per_index = N / indices.len();
    let mut i = 0;
    while i < N {
        let packed = indices[i / per_index] >> (4 * BITS * (i % per_index));
        let mut j = 0;
        while j < 4 {
            let value = values[(packed >> (BITS * j)) as usize & ((1 << BITS) - 1)];
            words[i] |= (value as u32) << (8 * j);
            j += 1;
        }
        i += 1;
    }
    words
}

const IQ2_VALUES: [u8; 4] = [8, 25, 43, 0];
const IQ3_XXS_VALUES: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
const IQ3_S_VALUES: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
static IQ2_XXS: [u32; 512] = expanded::<2, 512>(&grids::IQ2_XXS, &IQ2_VALUES);
static IQ2_XS: [u32; 1024] = expanded::<2, 1024>(&grids::IQ2_XS, &IQ2_VALUES);
static IQ2_S: [u32; 2048] = expanded::<2, 2048>(&grids::IQ2_S, &IQ2_VALUES);
static IQ3_XXS: [u32; 256] = expanded::<3, 256>(&grids::IQ3_XXS, &IQ3_XXS_VALUES);
static IQ3_S: [u32; 512] = expanded::<3, 512>(&grids::IQ3_S, &IQ3_S_VALUES);

/// Eight numbers of IQ1_S and IQ1_M, two bits each that stand for -1, 0 and 1.
pub(crate) fn iq1(index: usize) -> [i8; 8] {
    std::array::from_fn(|i| (grids::IQ1[index] >> (2 * i) & 3) as i8 - 1)
}
