//! Operations written once in lanes of 16 and inlined into each instruction set's functions, where the compiler
//! vectorizes them: the same source gives the same bits.

use half::bf16;

/// Adding and subtracting this rounds to the nearest even integer, for |v| < 2^22.
const ROUND: f32 = 12_582_912.0;

/// Tokens up to which a tile is bound by its weights' arrival. Beyond, arithmetic leaves the hardware time to prefetch.
#[cfg(target_arch = "x86_64")]
pub(super) const PREFETCH_TOKENS: usize = 8;

/// The canonical end of a sum in 16 lanes.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; 16]) -> f32 {
    for apart in [8, 4, 2, 1] {
        for l in 0..apart {
            lanes[l] += lanes[l + apart];
        }
    }
    lanes[0]
}

/// exp within 2 ulp from -87.3 to 88.3; 0 below, e^88.3 above. NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOW: f32 = -87.336_54;
    const HIGH: f32 = 88.3;
    // Compared this way round, NaN passes both.
    let y = if LOW > x { LOW } else { x };
    let y = if HIGH < y { HIGH } else { y };
    // x = n ln2 + r, |r| <= ln2 / 2; e^r as Cephes' expf.
    let shifted = y.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, y);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_2e-4_f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 5.000_000_3e-1);
    let p = p.mul_add(r * r, r) + 1.0;
    // The low bits of `shifted` are n: they become the exponent.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LOW { 0.0 } else { p * power }
}

/// [`super::Kernel::quantize`]
#[inline(always)]
pub(super) fn quantize(x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    assert!(group > 0 && x.len().is_multiple_of(group) && codes.len() == x.len());
    assert!(scales.len() == x.len() / group && sums.len() == scales.len());
    for (i, (x, codes)) in x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate() {
        // As integers, magnitudes keep their order and NaN is the largest: it reaches the scale instead of vanishing.
        let max = f32::from_bits(x.iter().fold(0, |max, v| max.max(v.to_bits() & 0x7fff_ffff)));
        let (scale, inverse) = if max < 1e-35 { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
        let mut sum = 0;
        for (v, code) in x.iter().zip(codes) {
            let q = ((v * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).clamp(-127, 127);
            *code = q as i8;
            sum += q;
        }
        scales[i] = scale;
        sums[i] = sum;
    }
}

/// [`super::Kernel::remainder`]
#[inline(always)]
pub(super) fn remainder(x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]) {
    assert!(x.len() == codes.len() && x.len() == out.len() && x.len().is_multiple_of(scales.len()));
    let group = x.len() / scales.len();
    let groups = x.chunks_exact(group).zip(codes.chunks_exact(group)).zip(out.chunks_exact_mut(group));
    for (((x, codes), out), scale) in groups.zip(scales) {
        for ((out, code), x) in out.iter_mut().zip(codes).zip(x) {
            *out = x - f32::from(*code) * scale;
        }
    }
}

/// [`super::Kernel::split`] for kernels that broadcast single inputs: of 32 inputs the high parts, then the low ones,
/// as f32.
#[inline(always)]
pub(super) fn split(x: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), x.len().div_ceil(32) * 64);
    for (x, out) in x.chunks(32).zip(out.as_chunks_mut::<64>().0) {
        *out = split_block(x);
    }
}

/// High parts of up to 32 inputs, then their low ones.
#[inline(always)]
pub(super) fn split_block(x: &[f32]) -> [f32; 64] {
    let mut inputs = [0.0f32; 32];
    match x.as_array::<32>() {
        // Of a known length, so that no call is made to copy them.
        Some(x) => inputs = *x,
        None => inputs[..x.len()].copy_from_slice(x),
    }
    let mut out = [0.0; 64];
    for i in 0..32 {
        out[i] = round_to_bf16(inputs[i]);
        out[32 + i] = round_to_bf16(inputs[i] - out[i]);
    }
    out
}

/// The nearest bf16, halves to even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if x.is_nan() { f32::from_bits(bits | 0x0040_0000) } else { f32::from_bits(rounded) }
}

/// [`super::Kernel::silu_mul`]
#[inline(always)]
pub(super) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for i in 0..out.len() {
        out[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
    }
}

/// [`super::Kernel::clamped_swiglu`]
#[inline(always)]
pub(super) fn clamped_swiglu(gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for i in 0..out.len() {
        // Compared this way round, NaN stays.
        let gate = if gate[i] > limit { limit } else { gate[i] };
        let up = if up[i] > limit { limit } else { up[i] };
        let up = if up < -limit { -limit } else { up };
        out[i] = (up + 1.0) * (gate / (1.0 + exp(-(alpha * gate))));
    }
}

/// [`super::Kernel::clamped_silu_mul`]
#[inline(always)]
pub(super) fn clamped_silu_mul(gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for i in 0..out.len() {
        // Compared this way round, NaN stays.
        let silu = gate[i] / (1.0 + exp(-gate[i]));
        let silu = if silu > limit { limit } else { silu };
        let up = if up[i] > limit { limit } else { up[i] };
        let up = if up < -limit { -limit } else { up };
        out[i] = silu * up;
    }
}

/// [`super::Kernel::silu_of_clamped_mul`]
#[inline(always)]
pub(super) fn silu_of_clamped_mul(gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for i in 0..out.len() {
        // Compared this way round, NaN stays.
        let gate = if gate[i] > limit { limit } else { gate[i] };
        let up = if up[i] > limit { limit } else { up[i] };
        let up = if up < -limit { -limit } else { up };
        out[i] = gate / (1.0 + exp(-gate)) * up;
    }
}

/// [`super::Kernel::gelu_mul`]
#[inline(always)]
pub(super) fn gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    // (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)); twice the square root of 2 / pi.
    const SCALE: f32 = 1.595_769;
    for i in 0..out.len() {
        let g = gate[i];
        out[i] = g / (1.0 + exp(-(SCALE * (g + 0.044715 * (g * g * g))))) * up[i];
    }
}

/// [`super::Kernel::sigmoid_mul`]
#[inline(always)]
pub(super) fn sigmoid_mul(gate: &[f32], x: &mut [f32]) {
    assert_eq!(gate.len(), x.len());
    for i in 0..x.len() {
        x[i] /= 1.0 + exp(-gate[i]);
    }
}

/// [`super::Kernel::ssm_step`]
#[inline(always)]
pub(super) fn ssm_step(state: &mut [f32], token: &super::SsmToken<'_>, out: &mut [f32]) {
    const COLUMNS: usize = 32;
    let (rows, cols) = (token.b.len(), token.x.len());
    assert!(state.len() == rows * cols && token.c.len() == rows && out.len() == cols);
    let whole = cols / COLUMNS * COLUMNS;
    for at in (0..whole).step_by(COLUMNS) {
        ssm_columns::<COLUMNS>(state, token, out, at);
    }
    for at in whole..cols {
        ssm_columns::<1>(state, token, out, at);
    }
}

#[inline(always)]
fn ssm_columns<const N: usize>(state: &mut [f32], token: &super::SsmToken<'_>, out: &mut [f32], at: usize) {
    let mut sums = [0.0f32; N];
    for ((row, &b), &c) in state.chunks_exact_mut(token.x.len()).zip(token.b).zip(token.c) {
        let row = &mut row[at..at + N];
        for i in 0..N {
            row[i] = b.mul_add(token.x[at + i], row[i] * token.decay);
            sums[i] = row[i].mul_add(c, sums[i]);
        }
    }
    out[at..at + N].copy_from_slice(&sums);
}

/// [`super::Kernel::delta_step`]
#[inline(always)]
pub(super) fn delta_step(state: &mut [f32], token: &super::DeltaToken<'_>, out: &mut [f32]) {
    // Columns are independent of each other; so many of them stay in L1 and their sums in registers while the rows go
    // by twice.
    const COLUMNS: usize = 32;
    let (rows, cols) = (token.k.len(), token.v.len());
    assert!(state.len() == rows * cols && token.q.len() == rows && token.decay.len() == rows && out.len() == cols);
    let whole = cols / COLUMNS * COLUMNS;
    for at in (0..whole).step_by(COLUMNS) {
        delta_columns::<COLUMNS>(state, token, out, at);
    }
    for at in whole..cols {
        delta_columns::<1>(state, token, out, at);
    }
}

#[inline(always)]
fn delta_columns<const N: usize>(state: &mut [f32], token: &super::DeltaToken<'_>, out: &mut [f32], at: usize) {
    let cols = token.v.len();
    let (mut delta, mut sums) = ([0.0f32; N], [0.0f32; N]);
    for ((row, &k), &decay) in state.chunks_exact_mut(cols).zip(token.k).zip(token.decay) {
        let row = &mut row[at..at + N];
        for c in 0..N {
            row[c] *= decay;
            delta[c] = row[c].mul_add(k, delta[c]);
        }
    }
    for c in 0..N {
        delta[c] = (token.v[at + c] - delta[c]) * token.beta;
    }
    for ((row, &k), &q) in state.chunks_exact_mut(cols).zip(token.k).zip(token.q) {
        let row = &mut row[at..at + N];
        for c in 0..N {
            row[c] = delta[c].mul_add(k, row[c]);
            sums[c] = row[c].mul_add(q, sums[c]);
        }
    }
    out[at..at + N].copy_from_slice(&sums);
}

/// [`super::Kernel::exp_sub`]
#[inline(always)]
pub(super) fn exp_sub(x: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; 16];
    let (chunks, tail) = x.as_chunks_mut::<16>();
    for chunk in chunks {
        for l in 0..16 {
            chunk[l] = exp(chunk[l] - max);
            lanes[l] += chunk[l];
        }
    }
    for (l, v) in tail.iter_mut().enumerate() {
        *v = exp(*v - max);
        lanes[l] += *v;
    }
    tree(lanes)
}

/// [`super::Kernel::scale`]
#[inline(always)]
pub(super) fn scale(x: &mut [f32], scale: f32) {
    x.iter_mut().for_each(|x| *x *= scale);
}

/// [`super::Kernel::widen`]
#[inline(always)]
pub(super) fn widen(codes: &[i8], scales: &[f32], out: &mut [bf16]) {
    assert_eq!(codes.len(), out.len());
    for (codes, out) in codes.chunks(scales.len()).zip(out.chunks_mut(scales.len())) {
        for ((code, scale), out) in codes.iter().zip(scales).zip(out) {
            let bits = (f32::from(*code) * scale).to_bits();
            *out = bf16::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16);
        }
    }
}

/// [`super::Kernel::add_scaled`]
#[inline(always)]
pub(super) fn add_scaled(x: &[f32], scale: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    for (x, out) in x.iter().zip(out) {
        *out = x.mul_add(scale, *out);
    }
}

/// [`super::Kernel::rms_norm`]
#[inline(always)]
pub(super) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && w.len() == out.len());
    let mut lanes = [0.0f32; 16];
    let (chunks, tail) = x.as_chunks::<16>();
    for chunk in chunks {
        for l in 0..16 {
            lanes[l] = chunk[l].mul_add(chunk[l], lanes[l]);
        }
    }
    for (l, v) in tail.iter().enumerate() {
        lanes[l] = v.mul_add(*v, lanes[l]);
    }
    let inverse = 1.0 / (tree(lanes) / x.len() as f32 + eps).sqrt();
    for i in 0..out.len() {
        out[i] = x[i] * inverse * w[i];
    }
}

/// Walks `rows` x `tokens` in register blocks of at most `block`, the tokens of one pass few enough to stay in L1 while
/// the rows go by.
///
/// `f(row, token, [rows, tokens])` gets blocks of `block[0]` or 1 rows, and `block[1]`, half of it, or 1 tokens.
#[inline(always)]
pub(super) fn dot_blocks(
    rows: usize,
    tokens: usize,
    k: usize,
    block: [usize; 2],
    mut f: impl FnMut(usize, usize, [usize; 2]),
) {
    const L1_VALUES: usize = 1 << 13;
    let pass = (L1_VALUES / k.max(1) / block[1]).max(1) * block[1];
    for from in (0..tokens).step_by(pass) {
        let to = tokens.min(from + pass);
        let mut r = 0;
        while r < rows {
            let r_take = if rows - r >= block[0] { block[0] } else { 1 };
            let mut t = from;
            while t < to {
                let t_take = [block[1], block[1] / 2].into_iter().find(|&n| n <= to - t).unwrap_or(1);
                f(r, t, [r_take, t_take]);
                t += t_take;
            }
            r += r_take;
        }
    }
}

/// The trait methods that are this file's functions compiled with some target features.
#[cfg(target_arch = "x86_64")]
macro_rules! elementwise {
    ($features:literal) => {
        $crate::kernel::shared::elementwise! { $features;
            fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]);
            fn remainder(&self, x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]);
            fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);
            fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]);
            fn clamped_silu_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);
            fn silu_of_clamped_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);
            fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);
            fn sigmoid_mul(&self, gate: &[f32], x: &mut [f32]);
            fn delta_step(&self, state: &mut [f32], token: &$crate::kernel::DeltaToken<'_>, out: &mut [f32]);
            fn ssm_step(&self, state: &mut [f32], token: &$crate::kernel::SsmToken<'_>, out: &mut [f32]);
            fn exp_sub(&self, x: &mut [f32], max: f32) -> f32;
            fn scale(&self, x: &mut [f32], scale: f32);
            fn widen(&self, codes: &[i8], scales: &[f32], out: &mut [half::bf16]);
            fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]);
            fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
        }
    };
    ($features:literal; $(fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $type)*) $(-> $result)? {
            #[target_feature(enable = $features)]
            fn compiled($($arg: $type),*) $(-> $result)? {
                $crate::kernel::shared::$name($($arg),*)
            }
            // SAFETY: the value this is called on exists only where the features were detected.
            unsafe { compiled($($arg),*) }
        })*
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use elementwise;
