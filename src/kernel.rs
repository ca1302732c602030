//! CPU kernels behind one trait: a readable scalar truth, and one file per instruction set that gives the same bits.

/// An instruction set the CPU kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// Plain Rust; the truth the others are compared with.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
}
