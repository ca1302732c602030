//! Compiles one plain loop for several instruction sets and chooses at run time.
//!
//! The loops are ordinary Rust that the compiler vectorizes; floating-point sums run in a fixed number of lanes and are
//! never contracted, so every version gives the same bits.

/// `multiversion!(fn name(arg: Type, ...) -> Type = [avx512, avx2, plain])`: `name` runs the best of the three
/// `#[inline(always)]` functions, which may well be the same one.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? = [$avx512:path,
        $avx2:path, $plain:path]) => {
        $(#[$doc])*
        #[allow(unsafe_code)]
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    $avx512($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    $avx2($($arg),*)
                }
                if $crate::simd::has_avx512() {
                    // SAFETY: the features are those just tested.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $plain($($arg),*)
        }
    };
}

pub(crate) use multiversion;

/// Whether this machine has the AVX-512 subsets that [`multiversion`] compiles for.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}
