//! Rotary position embedding, and how it is stretched beyond the context it was trained for.

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Rotated width of a head.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairs are neighbours (2i, 2i + 1) instead of halves (i, i + dim / 2).
    pub interleaved: bool,
    /// Stretching beyond the trained context.
    pub scaling: RopeScaling,
}

/// How positions beyond the trained context are reached.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// High frequencies kept, low ones divided by a factor, a ramp between.
    Yarn(Yarn),
    /// The same by wavelength.
    Llama3(Llama3),
    /// Frequencies of a head of `dim` numbers, of which only the first `rotated / 2` turn. Source: HF
    /// modeling_rope_utils, "proportional".
    Proportional {
        /// Numbers that turn.
        rotated: usize,
    },
    /// Each frequency divided by a factor of its own, `[dim / 2]`: what GGUF files keep of Llama 3's.
    Factors(Vec<f32>),
}

/// Llama 3's stretching. Source: HF modeling_rope_utils.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama3 {
    /// Stretch of the context.
    pub factor: f64,
    /// Context before stretching.
    pub original_max_position: f64,
    /// Wavelengths over the original context up to which a frequency is divided by the factor.
    pub low_freq_factor: f64,
    /// Wavelengths over the original context from which it is kept.
    pub high_freq_factor: f64,
}

/// YaRN. Source: arXiv 2309.00071, and HF modeling_rope_utils.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Stretch of the context.
    pub factor: f64,
    /// Context before stretching.
    pub original_max_position: f64,
    /// Rotations over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which it is divided by the factor.
    pub beta_slow: f64,
    /// Multiplies cos and sin.
    pub attention_factor: f32,
    /// The ramp's ends are rounded outward to whole indices.
    pub truncate: bool,
}

impl Yarn {
    /// `0.1 * mscale * ln(factor) + 1`.
    pub fn mscale(factor: f64, mscale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
    }
}

impl Rope {
    /// Angle per position of each rotated pair, `[dim / 2]`.
    pub fn inv_freq(&self) -> Vec<f32> {
        // f32 powers as HF computes them: at position 100,000 the last bits of a frequency are whole radians'
        // fractions.
        let plain = |i: usize| 1.0 / (self.theta as f32).powf((2 * i) as f32 / self.dim as f32);
        let half = self.dim / 2;
        match &self.scaling {
            RopeScaling::None => (0..half).map(plain).collect(),
            RopeScaling::Linear { factor } => (0..half).map(|i| plain(i) / *factor as f32).collect(),
            RopeScaling::Proportional { rotated } => {
                (0..half).map(|i| if i < rotated / 2 { plain(i) } else { 0.0 }).collect()
            }
            RopeScaling::Factors(factors) => factors.iter().enumerate().map(|(i, factor)| plain(i) / factor).collect(),
            RopeScaling::Llama3(l) => (0..half)
                .map(|i| {
                    let turns = l.original_max_position * f64::from(plain(i)) / std::f64::consts::TAU;
                    // Where both factors are one there is no ramp between them.
                    let ramp = l.high_freq_factor - l.low_freq_factor;
                    let kept = match ramp > 0.0 {
                        true => ((turns - l.low_freq_factor) / ramp).clamp(0.0, 1.0) as f32,
                        false => {
                            if turns >= l.low_freq_factor {
                                1.0
                            } else {
                                0.0
                            }
                        }
                    };
                    (1.0 - kept) * plain(i) / l.factor as f32 + kept * plain(i)
                })
                .collect(),
            RopeScaling::Yarn(y) => {
                // The index whose frequency makes `rotations` turns over the original context.
                let index = |rotations: f64| {
                    self.dim as f64 * (y.original_max_position / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (index(y.beta_fast), index(y.beta_slow));
                if y.truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(self.dim as f64 - 1.0));
                if low == high {
                    high += 0.001; // HF's guard against a division by zero
                }
                (0..half)
                    .map(|i| {
                        let interpolated = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        plain(i) / y.factor as f32 * interpolated + plain(i) * (1.0 - interpolated)
                    })
                    .collect()
            }
        }
    }

    /// Multiplies cos and sin.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(y) => y.attention_factor,
            _ => 1.0,
        }
    }
}
