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
//! IQ1_S and IQ1_M have numbers in place of magnitudes, -1, 0 and 1, and a bit in place of signs that says whether they
//! are an eighth more or less: codes are eight times that. Their upper words are four, half a word for each 32 inputs:
//! three bits of each index, then of IQ1_S the scale's count, three bits, and one bit for all; of IQ1_M a bit for each
//! index.
//!
//! TQ1_0 has digits to the base of three, five to a byte, the first in its highest part: digit `d` of words 0 to 7 are
//! inputs `32 d` to `32 d + 31`, of words 8 to 11 inputs `160 + 16 d` and on, of word 12 inputs `240 + 4 d` and on.
//!
//! Source: ggml's `dequantize_row_iq*` and `dequantize_row_tq*`.

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
    Iq1S,
    Iq1M,
    Tq1_0,
}

/// Inputs whose words lie together.
const BLOCK: usize = 32;

impl Grid {
    /// Weights of one index.
    #[inline]
    pub const fn run(self) -> usize {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S | Self::Iq1S | Self::Iq1M => 8,
            Self::Iq3Xxs | Self::Iq3S | Self::Tq1_0 => 4,
        }
    }

    /// Words of 32 inputs of a row; of digits there are none of 32 inputs alone.
    #[inline]
    pub const fn block_words(self) -> usize {
        match self {
            Self::Tq1_0 => 0,
            _ => BLOCK / self.run() / 4 + !self.has_ones() as usize,
        }
    }

    /// Words behind those of all blocks.
    #[inline]
    pub const fn more_words(self) -> usize {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq3Xxs => 0,
            Self::Iq2S | Self::Iq3S => 2,
            Self::Iq1S | Self::Iq1M => 4,
            Self::Tq1_0 => 13,
        }
    }

    /// Words of a super-block of a row.
    #[inline]
    pub const fn words(self) -> usize {
        SUPER_BLOCK / BLOCK * self.block_words() + self.more_words()
    }

    /// Whether weights are made of -1, 0 and 1, and have no signs beside.
    #[inline]
    pub const fn has_ones(self) -> bool {
        matches!(self, Self::Iq1S | Self::Iq1M | Self::Tq1_0)
    }

    /// Where the upper bits of the indices of a block are: word, and the lowest bit.
    #[inline]
    pub const fn upper_at(self, block: usize) -> (usize, usize) {
        match self.more_words() {
            0 => (block * self.block_words() + self.block_words() - 1, 28),
            more => (SUPER_BLOCK / BLOCK * self.block_words() + block * more / 8, block * more * 4 % 32),
        }
    }

    /// Which of the bits behind `upper_at` says that a run is an eighth less.
    #[inline]
    pub const fn less_at(self, run: usize) -> usize {
        if matches!(self, Self::Iq1S) { 15 } else { 12 + run }
    }

    /// Where a run of four digits is: word, and digit.
    #[inline]
    pub const fn digit_at(block: usize, run: usize) -> (usize, usize) {
        match (block, 2 * (block % 5) + run / 4) {
            (0..5, _) => (run, block),
            (_, 5) => (12, run % 4),
            (_, digit) => (8 + run % 4, digit),
        }
    }

    /// Whether there is a bit for each sign, and upper bits of indices lie apart.
    #[inline]
    pub const fn has_all_signs(self) -> bool {
        matches!(self, Self::Iq2S | Self::Iq3S)
    }

    /// Bits of an index above its byte.
    #[inline]
    pub const fn upper_bits(self) -> usize {
        match self {
            Self::Iq2Xxs | Self::Iq3Xxs => 0,
            Self::Iq2Xs | Self::Iq3S => 1,
            Self::Iq2S => 2,
            Self::Iq1S | Self::Iq1M => 3,
            Self::Tq1_0 => 0,
        }
    }

    /// The largest magnitude.
    #[inline]
    pub const fn largest(self) -> i8 {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => 43,
            Self::Iq3Xxs => 62,
            Self::Iq3S => 15,
            Self::Iq1S | Self::Iq1M => 9,
            Self::Tq1_0 => 1,
        }
    }

    /// The magnitudes of four weights in a word: of index `i`, or of its halves at `2 i` and `2 i + 1` where it has
    /// eight; of IQ1 eight times -1, 0 and 1.
    #[inline]
    pub const fn magnitudes(self) -> &'static [u32] {
        match self {
            Self::Iq2Xxs => &IQ2_XXS,
            Self::Iq2Xs => &IQ2_XS,
            Self::Iq2S => &IQ2_S,
            Self::Iq3Xxs => &IQ3_XXS,
            Self::Iq3S => &IQ3_S,
            Self::Iq1S | Self::Iq1M => &IQ1,
            Self::Tq1_0 => &[],
        }
    }

    /// The mean square of the codes of any bits.
    pub fn mean_square(self) -> f32 {
        if self == Self::Tq1_0 {
            return 2.0 / 3.0;
        }
        let numbers = self.magnitudes().iter().flat_map(|four| four.to_le_bytes());
        let squares: f32 = numbers.map(|number| f32::from(number as i8).powi(2)).sum();
        squares / (4 * self.magnitudes().len()) as f32 + f32::from(u8::from(self.has_ones()))
    }

    /// Of each index the places of its magnitudes among those there are, a nibble each, as a GPU reads them.
    pub fn places(self) -> Vec<u32> {
        let place = |magnitude: u8| self.values().iter().position(|&value| value == magnitude).unwrap_or(0) as u32;
        let each =
            self.magnitudes().chunks(self.run() / 4).map(|index| index.iter().flat_map(|four| four.to_le_bytes()));
        each.map(|all| all.enumerate().fold(0, |word, (i, magnitude)| word | place(magnitude) << (4 * i))).collect()
    }

    /// The magnitudes there are.
    pub const fn values(self) -> &'static [u8] {
        match self {
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => &IQ2_VALUES,
            Self::Iq3Xxs => &IQ3_XXS_VALUES,
            Self::Iq3S => &IQ3_S_VALUES,
            Self::Iq1S | Self::Iq1M => &IQ1_VALUES,
            Self::Tq1_0 => &[],
        }
    }

    /// The upper bits of the indices of a block, and what is above them, by the definition.
    fn upper(self, word: &impl Fn(usize) -> u32, block: usize) -> u32 {
        let (at, lowest) = self.upper_at(block);
        word(at) >> lowest
    }

    /// The index of a run of the weights of block `block`, by the definition.
    fn index(self, word: &impl Fn(usize) -> u32, block: usize, run: usize) -> usize {
        let low = word(block * self.block_words() + run / 4) >> (8 * (run % 4)) & 0xff;
        let bits = self.upper_bits();
        (low | (self.upper(word, block) >> (bits * run) & ((1 << bits) - 1)) << 8) as usize
    }

    /// The code of an input of a super-block whose words these are, by the definition.
    pub fn code(self, word: impl Fn(usize) -> u32, input: usize) -> i8 {
        let (block, within) = (input / BLOCK, input % BLOCK);
        if self == Self::Tq1_0 {
            let (at, digit) = Self::digit_at(block, within / 4);
            let byte = (word(at) >> (8 * (within % 4))) as u8;
            // A byte times a power of three has the next digit in its highest part.
            let shifted = byte.wrapping_mul(3u8.pow(digit as u32));
            return ((u16::from(shifted) * 3) >> 8) as i8 - 1;
        }
        let index = self.index(&word, block, within / self.run());
        let at = within % self.run();
        let four = self.magnitudes()[index * self.run() / 4 + at / 4];
        let magnitude = (four >> (8 * (at % 4))) as u8 as i8;
        if self.has_ones() {
            let less = self.upper(&word, block) >> self.less_at(within / 8) & 1 == 1;
            return magnitude + if less { -1 } else { 1 };
        }
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

    /// The count of the scale of block `block`, where it lies within the words.
    pub fn count(self, word: impl Fn(usize) -> u32, block: usize) -> u8 {
        match self {
            Self::Iq1S => (self.upper(&word, block) >> 12 & 7) as u8,
            Self::Tq1_0 => 0,
            _ => (word(block * self.block_words() + self.block_words() - 1) >> 28) as u8,
        }
    }

    /// The words of a super-block whose weights, in units of their scales, are nearest to these; `count(block)` is what
    /// goes above the signs. Slow.
    pub(crate) fn nearest(self, weights: &[f32], count: impl Fn(usize) -> u8, words: &mut [u32]) {
        words.fill(0);
        if self.has_ones() {
            return self.nearest_ones(weights, count, words);
        }
        for (block, w) in weights.chunks_exact(BLOCK).enumerate() {
            let first = block * self.block_words();
            let last = first + self.block_words() - 1;
            for (run, w) in w.chunks_exact(self.run()).enumerate() {
                let magnitudes: [f32; 8] = std::array::from_fn(|i| w.get(i).map_or(0.0, |w| w.abs()));
                let error = |index: &[u32]| -> f32 {
                    let fours = index.iter().zip(magnitudes.chunks_exact(4));
                    let of_four = |(four, w): (&u32, &[f32])| -> f32 {
                        let codes = four.to_le_bytes();
                        (0..4).map(|i| (w[i] - f32::from(codes[i])).powi(2)).sum()
                    };
                    fours.map(of_four).sum()
                };
                let all = self.magnitudes().chunks_exact(self.run() / 4).map(error).zip(0u32..);
                let (_, index) = all.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
                words[first + run / 4] |= (index & 0xff) << (8 * (run % 4));
                if self.upper_bits() > 0 {
                    let (at, lowest) = self.upper_at(block);
                    words[at] |= (index >> 8) << (lowest + self.upper_bits() * run);
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

impl Grid {
    fn nearest_ones(self, weights: &[f32], count: impl Fn(usize) -> u8, words: &mut [u32]) {
        if self == Self::Tq1_0 {
            let mut bytes = [[0u16; 4]; 13];
            for (i, w) in weights.iter().enumerate() {
                let (at, digit) = Self::digit_at(i / BLOCK, i % BLOCK / 4);
                bytes[at][i % 4] += (w.round_ties_even().clamp(-1.0, 1.0) + 1.0) as u16 * 3u16.pow(4 - digit as u32);
            }
            // The least byte whose digits are these.
            for (word, bytes) in words.iter_mut().zip(bytes) {
                *word = u32::from_le_bytes(bytes.map(|digits| (digits * 256).div_ceil(243) as u8));
            }
            return;
        }
        for (block, w) in weights.chunks_exact(BLOCK).enumerate() {
            let nearest = |w: &[f32], less: bool| -> (f32, usize) {
                let beside = if less { -1.0 } else { 1.0 };
                // Of four numbers whose bits these are.
                let errors = |w: &[f32]| -> [f32; 256] {
                    std::array::from_fn(|bits| {
                        let number = |i: usize| 8.0 * ((bits >> (2 * i) & 3) as f32 - 1.0) + beside;
                        w.iter().enumerate().map(|(i, w)| (w - number(i)).powi(2)).sum()
                    })
                };
                let [first, second] = [errors(&w[..4]), errors(&w[4..])];
                let error = |eight: &u16| first[usize::from(eight & 255)] + second[usize::from(eight >> 8)];
                let all = grids::IQ1.iter().map(error).zip(0..);
                all.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default()
            };
            let runs: Vec<_> = w.chunks_exact(8).map(|w| [nearest(w, false), nearest(w, true)]).collect();
            let [more, less] = [0, 1].map(|i| runs.iter().map(|run| run[i].0).sum::<f32>());
            let (at, lowest) = self.upper_at(block);
            for (run, both) in runs.iter().enumerate() {
                let of_all = self == Self::Iq1S;
                let is_less = if of_all { less < more } else { both[1].0 < both[0].0 };
                let index = both[usize::from(is_less)].1 as u32;
                words[block] |= (index & 0xff) << (8 * run);
                let bit = u32::from(is_less) << self.less_at(run);
                words[at] |= ((index >> 8) << (3 * run) | bit) << lowest;
            }
            if self == Self::Iq1S {
                words[at] |= u32::from(count(block)) << (lowest + 12);
            }
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

const IQ1_VALUES: [u8; 3] = [-8i8 as u8, 0, 8];
static IQ1: [u32; 4096] = expanded::<2, 4096>(&grids::IQ1, &[IQ1_VALUES[0], IQ1_VALUES[1], IQ1_VALUES[2], 0]);
