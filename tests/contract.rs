//! What the build reads of `kernels/*.cu`: right declarations, and sentences about wrong ones.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::fs;
use std::path::Path;

#[path = "../kernels/contract.rs"]
mod contract;

use contract::{Contract, Kernel, Parameters};

/// Reads one file of such a text, or says why not.
fn read(text: &str) -> Result<Contract, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("some.cuh"),
        "constexpr int WARP = 32;\n#define ROW(name, W) KERNEL(name, W * WARP, 0, int n)\n",
    )
    .unwrap();
    fs::write(dir.path().join("file.cu"), format!("#include \"some.cuh\"\n{text}")).unwrap();
    contract::read(dir.path())
}

#[test]
fn a_kernel_is_what_its_macros_make_of_it() {
    let read = read(
        "// KERNEL(no, 1, 1)
         struct Inner { const float *x, *y; int n[2]; };
         struct Outer { Inner inner; long long step; };
         #define LIST_ARGUMENTS(T) const bf16 *x, AS_BYTES(T) * y, const __grid_constant__ Outer outer
         #define FAMILY(out, M, SHARED)  \\
             KERNEL_TILE(gemm_##out##_m##M, M, 2 * M) \\
             KERNEL_BLOCKS(gemm_##out##_m##M, M * 4, M == 8 ? 1 : 2, SHARED, LIST_ARGUMENTS(f16)) { begin(); }
         FAMILY(f32, 8, ON_HOPPER(300, 100 + 4))
         constexpr int ROWS = 4, ALL = (ROWS + 1) << 2; // rows
         #ifdef HAS_WGMMA
         constexpr int ON = 1;
         #else
         constexpr int OFF = 1;
         #endif
         ROW(row, ROWS) {}",
    )
    .unwrap();
    let gemm = Kernel {
        file: "file".into(),
        threads: 32,
        shared_bytes: [104, 300],
        parameters: Parameters::List("ListArguments".into()),
        tile: [8, 16, 0],
    };
    let row = Kernel {
        file: "file".into(),
        threads: 128,
        shared_bytes: [0, 0],
        parameters: Parameters::Own(vec!["i32".into()]),
        tile: [0; 3],
    };
    assert_eq!(read.kernels.into_iter().collect::<Vec<_>>(), [("gemm_f32_m8".into(), gemm), ("row".into(), row)]);
    assert_eq!(read.lists["ListArguments"], ["Address<bf16>", "Address<u8>", "Outer"]);
    let fields = [("x", "Address<f32>"), ("y", "Address<f32>"), ("n", "[i32; 2]")];
    assert_eq!(read.structs["Inner"], fields.map(|(name, ty)| (name.to_owned(), ty.to_owned())));
    let constants: Vec<_> = read.constants["file"].iter().map(|(name, n)| (name.as_str(), *n)).collect();
    assert_eq!(constants, [("ALL", 20), ("ON", 1), ("ROWS", 4), ("WARP", 32)]);
}

#[test]
fn what_is_not_understood_is_said() {
    for (text, why) in [
        ("KERNEL(a, sizeof(int), 0, int n) {}", "file.cu: a: `sizeof ( int )` is no number"),
        ("KERNEL(a, 32, shared<4>(), int n) {}", "`shared < 4 > ( )` is no number"),
        ("constexpr int N = f(2);", "`f ( 2 )` is no number"),
        ("KERNEL(a, 32, 0, Unknown x) {}", "the type `Unknown` is not known"),
        ("KERNEL(a, 32, 0, const float** x) {}", "the parameter `const float * * x` is not understood"),
        ("KERNEL(a, 32, 0, SOME_ARGUMENTS) {}", "there is no SOME_ARGUMENTS"),
        ("KERNEL(a, 32)", "KERNEL takes a name, threads"),
        ("KERNEL(a, 32, 0, int n", "there is no `)` behind `( a , 32"),
        ("ROW(a, 1) {}\nROW(a, 2) {}", "there are two kernels a"),
        ("KERNEL_TILE(a, 1)", "KERNEL_TILE(a): there is no such kernel here"),
        ("ROW(a) {}", "ROW takes 2 arguments, not 1"),
        ("#if SOMETHING\n#endif", "`#if SOMETHING` is not understood"),
    ] {
        let said = read(text).err().unwrap_or_else(|| panic!("{text} was read"));
        assert!(said.contains(why), "{text}: {said}");
    }
}

#[test]
fn two_files_may_not_mean_two_structs() {
    let dir = tempfile::tempdir().unwrap();
    for (file, ty) in [("a", "int"), ("b", "float")] {
        let text = format!("struct Same {{ {ty} n; }};\nKERNEL({file}, 32, 0, Same same) {{}}");
        fs::write(dir.path().join(file).with_extension("cu"), text).unwrap();
    }
    assert!(contract::read(dir.path()).err().unwrap().contains("there are two structs Same"));
}

#[test]
fn our_kernels_are_written_as_rust() {
    let rust = contract::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")).unwrap().rust();
    for line in [
        "pub(crate) const embed: Kernel<(Address<bf16>, Address<u32>, Address<f32>, i32,)> =",
        "    Kernel::new(\"attend_prefill_256_256_bf16\", 128, [101376, 101376], [256, 256, 64]);",
        "    pub(crate) const KEPT: usize = 64;",
    ] {
        assert!(rust.lines().any(|l| l == line), "{line}");
    }
}
