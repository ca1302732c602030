//! Random numbers that depend on a seed alone.

/// SplitMix64: the state is a counter, so any place of the sequence is reached at once.
pub struct Random(pub u64);

impl Random {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// The sequence of `seed` from its `index`-th number on.
    pub fn at(seed: u64, index: u64) -> Self {
        Self(seed.wrapping_add(index.wrapping_mul(Self::STEP)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}
