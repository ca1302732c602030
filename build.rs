//! Reads what `kernels/*.cu` declare of their kernels, compiles them where an nvcc is found, and embeds the fatbins;
//! without one the engine runs on the CPU.
//!
//! nvcc is looked for in `$NVCC`, `$CUDA_HOME`, `$CUDA_PATH`, `.cu/` (see `scripts/cuda-toolchain`), `$PATH` and
//! `/usr/local/cuda`. A fatbin is kept under a hash of its source, the headers it includes and the flags, so that an
//! edit compiles what it changed. `$CUDAARCHS` (CMake's name for it) compiles for these compute capabilities alone, as
//! "80;90a", or for "all" that a release has.

#[path = "kernels/contract.rs"]
mod contract;

use std::collections::BTreeSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

/// Machine code for 8.x, Hopper, Blackwell of both kinds, and PTX for what comes after.
const TARGETS: [&str; 5] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_100f,code=sm_100f",
    "arch=compute_120f,code=sm_120f",
    "arch=compute_80,code=compute_80",
];
const FLAGS: [&str; 6] = ["-std=c++17", "-O3", "-fatbin", "-compress-mode=size", "--Werror=all-warnings", "-lineinfo"];

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDAARCHS"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("Cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets it"));
    match contract::read(&root.join("kernels")) {
        Ok(contract) => fs::write(out.join("contract.rs"), contract.rust()).expect("OUT_DIR can be written"),
        Err(why) => return println!("cargo::error={why}"),
    }
    let mut sources = files(&root.join("kernels"), "cu");
    // The one that takes longest begins first: at the end, all cores but one would wait for it.
    sources.sort_by_key(|source| (source.file_stem().is_none_or(|name| name != "experts_gemm"), source.clone()));
    let nvcc = env::var_os("CARGO_FEATURE_CUDA").and_then(|_| find_nvcc(&root));
    let mut list = String::from("pub(super) const MODULES: &[(&str, &[u8])] = &[\n");
    // As many at a time as there are cores.
    let next = AtomicUsize::new(0);
    let fatbins: Vec<OnceLock<PathBuf>> = sources.iter().map(|_| OnceLock::new()).collect();
    if let Some(nvcc) = &nvcc {
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
                scope.spawn(|| {
                    while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < sources.len()) {
                        let _ = fatbins[i].set(compile(nvcc, &sources[i], &out));
                    }
                });
            }
        });
    }
    for (source, fatbin) in sources.iter().zip(&fatbins) {
        let name = source.file_stem().expect("a file has a name").to_string_lossy();
        match fatbin.get() {
            Some(path) => writeln!(list, "    ({name:?}, include_bytes!({path:?})),"),
            None => writeln!(list, "    ({name:?}, &[]),"),
        }
        .expect("a string takes it");
    }
    list += "];\n";
    fs::write(out.join("modules.rs"), list).expect("OUT_DIR can be written");
    println!("cargo::rustc-env=MOEBIUS_KERNELS={}", if nvcc.is_some() { codes(&targets()) } else { "none".into() });
    println!("cargo::rustc-env=MOEBIUS_COMMIT={}", commit(&root));
}

/// What machine code a build has: `sm_80 sm_90a`.
fn codes(targets: &[String]) -> String {
    targets.iter().filter_map(|target| Some(target.split_once(",code=")?.1)).collect::<Vec<_>>().join(" ")
}

/// The commit of a release. Other builds do not look for it: each commit would have everything compiled again.
fn commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("rev-parse").args(arguments).current_dir(root).output().ok()?;
        output.status.success().then(|| text(&output.stdout).trim().to_string())
    };
    let log = is_release().then(|| git(&["--git-path", "logs/HEAD"])).flatten().map(|path| root.join(path));
    let Some(log) = log.filter(|log| log.is_file()) else { return "unknown".into() };
    println!("cargo:rerun-if-changed={}", log.display());
    git(&["--short=12", "HEAD"]).unwrap_or("unknown".into())
}

fn is_release() -> bool {
    env::var("PROFILE").is_ok_and(|profile| profile == "release")
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect()
}

fn find_nvcc(root: &Path) -> Option<PathBuf> {
    let named = env::var_os("NVCC").map(PathBuf::from);
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    let homes = homes.chain([root.join(".cu/nvidia/cu13")]).map(|home| home.join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<PathBuf> = env::split_paths(&path).map(|dir| dir.join("nvcc")).collect();
    named.into_iter().chain(homes).chain(on_path).chain(["/usr/local/cuda/bin/nvcc".into()]).find(|path| path.is_file())
}

fn compile(nvcc: &Path, source: &Path, out: &Path) -> PathBuf {
    let targets = targets();
    let mut hasher = DefaultHasher::new();
    (nvcc, &targets, FLAGS).hash(&mut hasher);
    let mut sources = BTreeSet::new();
    with_headers(source, &mut sources);
    sources.iter().for_each(|path| fs::read(path).expect("a source can be read").hash(&mut hasher));
    // target/kernels, for all profiles and features: the build's own folder is target/PROFILE/build/NAME/out.
    let dir = out.ancestors().nth(4).unwrap_or(out).join("kernels");
    fs::create_dir_all(&dir).expect("the target folder can be written");
    let name = source.file_stem().expect("a file has a name").to_string_lossy();
    let fatbin = dir.join(format!("{name}-{:016x}.fatbin", hasher.finish()));
    if !fatbin.is_file() {
        let partial = fatbin.with_extension(format!("{}.partial", std::process::id()));
        let mut command = Command::new(nvcc);
        command.args(FLAGS).args(targets.iter().map(|t| format!("-gencode={t}"))).arg(source).arg("-o").arg(&partial);
        if let Some(bin) = nvcc.parent() {
            let path = env::join_paths(
                [bin.into()].into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())),
            );
            command.env("PATH", path.expect("a path of paths"));
        }
        let output = command.output().unwrap_or_else(|e| panic!("{} cannot run: {e}", nvcc.display()));
        assert!(output.status.success(), "{}:\n{}{}", source.display(), text(&output.stdout), text(&output.stderr));
        fs::rename(&partial, &fatbin).expect("a finished file can be renamed");
    }
    fatbin
}

/// A release is for everyone's machine, a test build for the developer's.
fn targets() -> Vec<String> {
    let count = match env::var("CUDAARCHS") {
        Ok(list) if list != "all" => {
            return list.split([';', ',']).map(|n| format!("arch=compute_{n},code=sm_{n}", n = n.trim())).collect();
        }
        Err(_) if !is_release() => 2,
        _ => TARGETS.len(),
    };
    TARGETS[..count].iter().map(|t| t.to_string()).collect()
}

/// A source and all that it includes from its own folder.
fn with_headers(source: &Path, all: &mut BTreeSet<PathBuf>) {
    let Ok(text) = fs::read_to_string(source) else { return };
    if !all.insert(source.to_path_buf()) {
        return;
    }
    let names = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("#include \"")?.strip_suffix('"'))
        .filter(|name| name.ends_with(".cuh"));
    names.for_each(|name| with_headers(&source.with_file_name(name), all));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
