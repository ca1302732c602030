//! The GPUs that `doctor` finds: whether this build runs on them, and what slows them down.

use std::path::Path;

use super::{Finding, finding};
#[cfg(feature = "cuda")]
use crate::Result;
#[cfg(feature = "cuda")]
use crate::backend::cuda::{CudaBackend, Limits, ProductRates};

/// One finding per GPU, or one that says why there is none.
pub(super) fn examine() -> Vec<Finding> {
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| driver_version(&text));
    let card = has_card(Path::new("/sys/bus/pci/devices"));
    #[cfg(feature = "cuda")]
    return match crate::cuda::probe() {
        Ok(()) => devices(driver.as_deref()),
        Err(error) => vec![without(driver.as_deref(), card, &error.to_string())],
    };
    #[cfg(not(feature = "cuda"))]
    vec![without(driver.as_deref(), card, "this build has no GPU support: build it with the feature `cuda`")]
}

/// `580.65.06` of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...".
fn driver_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(String::from)
}

/// Whether the PCI bus has a display controller of NVIDIA.
fn has_card(pci: &Path) -> bool {
    let text = |path: &Path, name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
    let is_card = |path: &Path| text(path, "vendor").trim() == "0x10de" && text(path, "class").starts_with("0x03");
    std::fs::read_dir(pci).into_iter().flatten().flatten().any(|entry| is_card(&entry.path()))
}

/// No GPU can be used: `why`, and a remedy if there is a card or a driver.
fn without(driver: Option<&str>, card: bool, why: &str) -> Finding {
    let value = match (driver, card) {
        (Some(driver), _) => format!("driver {driver} found, but not used: everything runs on the CPU"),
        (None, true) => "NVIDIA GPU found, but not used: everything runs on the CPU".into(),
        (None, false) => return finding("GPU", "none found: everything runs on the CPU", None),
    };
    let remedy = if why.contains("is installed") { ": install driver 580 or newer" } else { "" };
    finding("GPU", value, Some(&format!("{why}{remedy}")))
}

#[cfg(feature = "cuda")]
fn devices(driver: Option<&str>) -> Vec<Finding> {
    let devices = crate::cuda::devices();
    if devices.is_empty() {
        let value =
            format!("driver {} shows no GPU: everything runs on the CPU", driver.unwrap_or("of unknown version"));
        return vec![finding(
            "GPU",
            value,
            Some("in a container, start it with --gpus all; otherwise check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        )];
    }
    let each = devices.iter().enumerate().map(|(i, info)| device(i, info, driver));
    each.chain((devices.len() > 1).then(|| together(&devices))).collect()
}

/// Whether a model can be divided among the GPUs, how fast they sum, and what becomes of the others.
#[cfg(feature = "cuda")]
fn together(devices: &[crate::cuda::DeviceInfo]) -> Finding {
    use crate::cuda::{Cuda, MAX_RANKS, Rank, can_access};
    const ROW: usize = 4096;
    let (mut numbers, mut others) = (Vec::new(), Vec::new());
    for (number, info) in devices.iter().enumerate() {
        let name = format!("cuda:{number} ({}, {})", info.name, super::gib(info.total_bytes));
        let first = numbers.first().map_or(info, |first: &usize| &devices[*first]);
        let why = match () {
            () if let Some(lack) = info.lacks() => {
                others.push(format!("{name} is left alone: it {lack}"));
                continue;
            }
            () if info.kind() != first.kind() => "another kind of GPU",
            () if !numbers.iter().all(|&other| can_access(number, other)) => "no access to the others' memory",
            () if numbers.len() == MAX_RANKS => "one too many",
            () => {
                numbers.push(number);
                continue;
            }
        };
        others.push(format!(
            "{name} has no share of a model: {why}; it can hold experts, and is left alone where that brings less \
             than a tenth, as `moebius plan` says of a model"
        ));
    }
    let others = (!others.is_empty()).then(|| others.join("; "));
    if numbers.len() < 2 {
        return finding("GPUs", "none can share a model with another one", others.as_deref());
    }
    let measured = numbers.iter().map(|number| Cuda::open(*number)).collect::<Result<Vec<_>>>().and_then(|devices| {
        let ranks = Rank::of_devices(&devices)?;
        let rows = if devices[0].info.is_emulated() { 2 } else { 4096 };
        Ok((Rank::sum_seconds(&ranks, ROW)?, Rank::sum_seconds(&ranks, rows * ROW)?, rows))
    });
    let names: Vec<String> = numbers.iter().map(|number| format!("cuda:{number}")).collect();
    let what = names.join(", ");
    match measured {
        Err(error) => finding("GPUs", format!("{what} cannot share a model"), Some(&error.to_string())),
        Ok((one, many, rows)) => {
            let rate = (rows * ROW * 4) as f64 / many / 1e9;
            let (one, many) = (one * 1e6, many * 1e6);
            let value = format!(
                "{what} can share a model, and --device auto takes those that make it faster: a sum of {ROW} numbers \
                 takes {one:.1} us, of {rows} such rows {many:.0} us ({rate:.0} GB/s)"
            );
            finding("GPUs", value, others.as_deref())
        }
    }
}

#[cfg(feature = "cuda")]
fn device(ordinal: usize, info: &crate::cuda::DeviceInfo, driver: Option<&str>) -> Finding {
    const SAMPLE_BYTES: usize = 128 << 20;
    let (major, minor) = info.capability;
    let driver = driver.map_or(String::new(), |driver| format!(", driver {driver}"));
    let what = format!("cuda:{ordinal}: {}, compute capability {major}.{minor}{driver}", info.name);
    let measured = crate::cuda::Cuda::open(ordinal).and_then(|cuda| {
        let free = cuda.free_bytes();
        let sample = SAMPLE_BYTES.min((free / 4) as usize).max(1);
        let (pcie, vram) = (cuda.pcie_bandwidth(sample)? / 1e9, cuda.vram_bandwidth(sample)? / 1e9);
        let wide = if info.is_emulated() { 64 } else { 4096 };
        let rates = CudaBackend::new(cuda, Limits { context: 64, table: 1 })?.product_rates(wide)?;
        Ok((free, pcie, vram, rates))
    });
    match measured {
        Err(error) => finding(
            "GPU",
            format!("{what}, {} of VRAM, not used", super::gib(info.total_bytes)),
            Some(&error.to_string()),
        ),
        Ok((free, pcie, vram, rates)) => {
            let value = format!(
                "{what}, {} of {} of VRAM free, VRAM {vram:.0} GB/s, PCIe {pcie:.1} GB/s; supported by this build; {}",
                super::gib(free),
                super::gib(info.total_bytes),
                products(&rates)
            );
            let cost = slow(pcie, free, info.total_bytes).or_else(|| no_library(info, &rates));
            finding("GPU", value, cost.as_deref())
        }
    }
}

/// How fast dense products are with our own GEMM and with cuBLASLt.
#[cfg(feature = "cuda")]
fn products(rates: &ProductRates) -> String {
    let own = format!("BF16 products {:.0} TFLOP/s with our own GEMM", rates.own / 1e12);
    match &rates.library {
        Ok((name, rate)) => {
            format!(
                "{own}, {:.0} with {name}: {} used",
                rate / 1e12,
                if rates.library_used { "cuBLASLt is" } else { "our own is" }
            )
        }
        Err(_) => format!("{own}, cuBLASLt not found"),
    }
}

/// Where our own GEMM does not use the GPU's newest instructions, cuBLASLt may be faster.
#[cfg(feature = "cuda")]
fn no_library(info: &crate::cuda::DeviceInfo, rates: &ProductRates) -> Option<String> {
    let why = rates.library.as_ref().err().filter(|_| !info.has_wgmma() && !info.is_emulated())?;
    Some(format!("cuBLASLt may make prefill of long prompts faster: {why}"))
}

/// What slows a usable GPU down.
#[cfg(feature = "cuda")]
fn slow(pcie_gb_per_s: f64, free: u64, total: u64) -> Option<String> {
    /// PCIe 4.0 with 16 lanes gives 25.
    const PCIE: f64 = 20.0;
    if pcie_gb_per_s < PCIE {
        return Some(format!(
            "prefill of long prompts reads experts over PCIe, which gives {pcie_gb_per_s:.1} GB/s: a slot with 16 \
             lanes of PCIe 4.0 gives 25 (`nvidia-smi -q` shows lanes and generation)"
        ));
    }
    let held = 1.0 - free as f64 / total as f64;
    (held > 0.25).then(|| {
        format!(
            "other programs hold {:.0}% of its VRAM, which experts could use: `nvidia-smi` lists them",
            100.0 * held
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_used_has_a_remedy() {
        assert_eq!(without(None, false, "no NVIDIA driver is installed (libcuda.so.1 is not found)").cost, None);
        let no_driver = without(None, true, "no NVIDIA driver is installed (libcuda.so.1 is not found)");
        assert!(no_driver.cost.unwrap().ends_with("install driver 580 or newer"));
        let old = without(Some("535.104.05"), true, "the NVIDIA driver is for CUDA 12.2: install driver 580 or newer");
        assert!(
            old.value.starts_with("driver 535.104.05 found, but not used")
                && old.cost.unwrap().ends_with("install driver 580 or newer")
        );
    }

    #[test]
    fn reads_the_driver_and_the_bus() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  \
                    (dvs-builder)\nGCC version: 13.2.0";
        assert_eq!(driver_version(text).as_deref(), Some("580.65.06"));
        assert_eq!(driver_version("nothing of use"), None);
        let bus = tempfile::tempdir().unwrap();
        let add = |name: &str, vendor: &str, class: &str| {
            std::fs::create_dir(bus.path().join(name)).unwrap();
            std::fs::write(bus.path().join(name).join("vendor"), vendor).unwrap();
            std::fs::write(bus.path().join(name).join("class"), class).unwrap();
        };
        add("0000:00:01.0", "0x8086\n", "0x030000\n");
        add("0000:00:02.0", "0x10de\n", "0x040300\n");
        assert!(!has_card(bus.path()) && !has_card(Path::new("/nonexistent")));
        add("0000:00:03.0", "0x10de\n", "0x030200\n");
        assert!(has_card(bus.path()));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn whose_products_are_used_is_said() {
        let rates = |library, library_used| ProductRates { own: 200e12, library, library_used };
        let name = || "cuBLASLt 13.1.0 (libcublasLt.so.13)".to_string();
        let used = products(&rates(Ok((name(), 700e12)), true));
        assert_eq!(
            used,
            "BF16 products 200 TFLOP/s with our own GEMM, 700 with cuBLASLt 13.1.0 (libcublasLt.so.13): cuBLASLt is \
             used"
        );
        assert!(products(&rates(Ok((name(), 210e12)), false)).ends_with("our own is used"));
        let missing = || rates(Err(crate::Error::Device("libcublasLt.so.13 is not found".into())), false);
        assert!(products(&missing()).ends_with("cuBLASLt not found"));
        let card = |capability| crate::cuda::DeviceInfo {
            name: "a card".into(),
            capability,
            multiprocessors: 100,
            shared_bytes: 0,
            total_bytes: 0,
            free_bytes: 0,
        };
        assert!(no_library(&card((10, 0)), &missing()).unwrap().ends_with("libcublasLt.so.13 is not found"));
        assert_eq!(no_library(&card((9, 0)), &missing()), None);
        assert_eq!(no_library(&card((8, 0)), &rates(Ok((name(), 210e12)), false)), None);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn what_holds_a_gpu_back_is_named() {
        let gib = 1 << 30;
        assert_eq!(slow(55.0, 139 * gib, 140 * gib), None);
        assert!(slow(12.0, 139 * gib, 140 * gib).unwrap().contains("PCIe 4.0"));
        assert!(slow(55.0, 70 * gib, 140 * gib).unwrap().contains("50%"));
    }
}
