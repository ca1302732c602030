//! numpy's random integers: multipliers of DeepSeek-V4.1's hashes are not in its checkpoints, but drawn by
//! `numpy.random.default_rng(seed)`, which promises the same numbers to all.
//!
//! ```text
//! seed ──SeedSequence──▶ 256 bits ──▶ PCG64: state = state * MULTIPLIER + increment, each step 64 bits of it
//! ```
//!
//! Sources: numpy's `bit_generator.pyx`, `pcg64.h` and `distributions.c`; M. O'Neill's PCG; D. Lemire, "Fast random
//! integer generation in an interval".

/// `default_rng(seed)`.
pub(super) struct Generator {
    state: u128,
    increment: u128,
}

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

impl Generator {
    pub(super) fn new(seed: u32) -> Self {
        let [a, b, c, d] = seed_sequence(seed);
        let join = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut generator = Self { state: 0, increment: join(c, d) << 1 | 1 };
        generator.step();
        generator.state = generator.state.wrapping_add(join(a, b));
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// An integer below `end`, which takes more than 32 bits: numpy draws smaller ones otherwise.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        assert!(end > u64::from(u32::MAX) + 1, "a bound of more than 32 bits");
        // As many products have each upper half, but for those whose lower half is among the first.
        let unfair = end.wrapping_neg() % end;
        loop {
            let product = u128::from(self.next()) * u128::from(end);
            if product as u64 >= unfair {
                return (product >> 64) as u64;
            }
        }
    }
}

/// `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_sequence(seed: u32) -> [u64; 4] {
    let shifted = |x: u32| x ^ x >> 16;
    let mut constant = 0x43b0_d7e5u32;
    let mut hash = |x: u32| {
        let x = x ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        shifted(x.wrapping_mul(constant))
    };
    let mut pool = [seed, 0, 0, 0].map(&mut hash);
    for from in 0..pool.len() {
        for to in (0..pool.len()).filter(|to| *to != from) {
            let (mixed, other) = (pool[to].wrapping_mul(0xca01_f9dd), hash(pool[from]).wrapping_mul(0x4973_f715));
            pool[to] = shifted(mixed.wrapping_sub(other));
        }
    }
    let mut constant = 0x8b51_f9ddu32;
    let mut word = |i: usize| {
        let x = pool[i % pool.len()] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        u64::from(shifted(x.wrapping_mul(constant)))
    };
    [0, 2, 4, 6].map(|i| word(i) | word(i + 1) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANT: [(u32, u64, [u64; 4]); 4] = [
        (10007, 46539488107671, [38316089043178, 2419940637372, 17979855408368, 36993708333550]),
        (140098, 46539488107671, [33858441617462, 25755430973449, 15460690153111, 41309657467676]),
        (0, 8589934599, [5471459236, 2317450226, 351959890, 141971308]),
        (
            4294967295,
            9223372036854775808,
            [2323769260371640015, 2020525339703518209, 2649733857077390922, 5709094837115896458],
        ),
    ];

    /// `default_rng(seed).integers(0, end, 4)`.
    #[test]
    fn integers_are_those_of_numpy() {
        for (seed, end, want) in WANT {
            let mut generator = Generator::new(seed);
            assert_eq!([(); 4].map(|()| generator.below(end)), want, "of seed {seed}");
        }
    }
}
