//! The GPUs of a run: those that are named, or as many of those that there are as make it fastest.

use std::sync::Arc;

use super::plan::{GpuPlan, check_vram, size};
use super::speed::{GpuRates, on_gpu};
use crate::config::Device;
use crate::cuda::{self, Cuda, DeviceInfo, MAX_RANKS, Rank};
use crate::load::machine::{Machine, gib};
use crate::load::spec::Spec;
use crate::load::speed::{CpuRates, Expected};
use crate::{Error, Result};

/// How much faster more GPUs must be, in decode times in a prompt, to be used.
const WORTH: f64 = 1.1;

/// Bytes over which bandwidths are measured.
const SAMPLE_BYTES: usize = 128 << 20;

/// The GPUs of a run.
pub struct Gpus {
    /// In the order of their ranks.
    pub devices: Vec<Arc<Cuda>>,
    /// Where there were others: why these.
    pub choice: Option<String>,
}

impl Gpus {
    /// Opens them; `None`: it runs on the CPU. Errors: `Error::Device` when a named one cannot be used;
    /// `Error::Invalid` for some that are not alike.
    pub fn open(spec: &Spec<'_>, machine: &Machine) -> Result<Option<Self>> {
        let bounded = bounds(spec)?;
        match &spec.config.device {
            Device::Cpu => Ok(None),
            Device::Auto => Ok(Cuda::open(0).ok().map(|first| choose(spec, first, machine))),
            Device::Cuda(numbers) => Ok(Some(Self { devices: named(spec, numbers)?, choice: bounded })),
        }
    }

    /// The one that has the least memory.
    pub fn least(&self) -> DeviceInfo {
        let bytes = |of: fn(&DeviceInfo) -> u64| self.devices.iter().map(|cuda| of(&cuda.info)).min().unwrap_or(0);
        let (total_bytes, free_bytes) = (bytes(|info| info.total_bytes), bytes(|info| info.free_bytes));
        DeviceInfo { total_bytes, free_bytes, ..self.devices[0].info.clone() }
    }
}

/// How much each GPU may take, where they differ. Errors: `Error::Invalid` for another number of sizes than of GPUs.
pub fn bounds(spec: &Spec<'_>) -> Result<Option<String>> {
    let (bounds, refuse) = (&spec.config.vram, |why: String| Err(Error::Invalid(format!("--vram {why}"))));
    let numbers = match &spec.config.device {
        Device::Cuda(numbers) if bounds.len() > 1 => numbers,
        Device::Auto if bounds.len() > 1 => {
            return refuse(format!(
                "has {} sizes: name the GPUs that have them, as in --device cuda:0,1",
                bounds.len()
            ));
        }
        _ => return Ok(None),
    };
    if bounds.len() != numbers.len() {
        let (sizes, gpus) = (bounds.len(), numbers.len());
        return refuse(format!("has {sizes} sizes for --device {}: give {gpus}, or one for all", spec.config.device));
    }
    let each = numbers.iter().zip(bounds).map(|(n, bound)| format!("{} of cuda:{n}", size(*bound)));
    let each: Vec<String> = each.collect();
    let differ = bounds.iter().any(|bound| *bound != bounds[0]);
    Ok(differ.then(|| format!("{} may be taken, and all take as much, because shares are equal", each.join(", "))))
}

fn named(spec: &Spec<'_>, numbers: &[usize]) -> Result<Vec<Arc<Cuda>>> {
    let refuse = |why: String| Err(Error::Invalid(format!("--device {}: {why}", spec.config.device)));
    let mut distinct = numbers.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() < numbers.len() {
        return refuse("a GPU is named twice, name each once".into());
    }
    if numbers.len() > MAX_RANKS {
        return refuse(format!("a model is divided among {MAX_RANKS} GPUs at most"));
    }
    let devices = numbers.iter().map(|number| Cuda::open(*number)).collect::<Result<Vec<_>>>()?;
    let first = &devices[0].info;
    if let Some((number, other)) = numbers.iter().zip(&devices).find(|(_, cuda)| cuda.info.kind() != first.kind()) {
        let (first, other) = (&first.name, &other.info.name);
        return refuse(format!("cuda:{number} is a {other} and the first is a {first}, name GPUs of one kind"));
    }
    if spec.config.vram.len() > 1 {
        let mut each = numbers.iter().zip(&devices).zip(&spec.config.vram);
        each.try_for_each(|((number, cuda), bound)| {
            check_vram(*bound, &DeviceInfo { name: format!("cuda:{number}"), ..cuda.info.clone() })
        })?;
    }
    Ok(devices)
}

/// As many GPUs like the first one as make the model fastest.
fn choose(spec: &Spec<'_>, first: Arc<Cuda>, machine: &Machine) -> Gpus {
    let (numbers, mut said) = cuda::alike();
    let mut devices = vec![first.clone()];
    if numbers.len() > 1 {
        let counts = counts(numbers.len());
        let expected = match expected(spec, &first, machine, &counts) {
            Ok(expected) => expected,
            Err(error) => return Gpus { devices, choice: Some(format!("one GPU: {error}")) },
        };
        let mut best = best(&counts, &expected);
        for number in &numbers[1..] {
            if devices.len() == best {
                break;
            }
            let why = match Cuda::open(*number) {
                Ok(cuda) if cuda.info.free_bytes >= first.info.free_bytes / 4 * 3 => {
                    devices.push(cuda);
                    continue;
                }
                Ok(cuda) => format!("{:.1} GiB of its VRAM are free", gib(cuda.info.free_bytes)),
                Err(error) => error.to_string(),
            };
            said.push(format!("cuda:{number} is left out: {why}"));
        }
        best = counts.iter().copied().filter(|&n| n <= devices.len()).max().unwrap_or(1);
        devices.truncate(best);
        if best > 1
            && let Err(error) = Rank::of_devices(&devices)
        {
            said.push(error.to_string());
            devices.truncate(1);
        }
        let each = counts.iter().zip(&expected).map(|(n, expected)| match expected {
            Some(expected) => format!("{n}: {expected}"),
            None => format!("{n}: does not fit, or cannot be divided so"),
        });
        said.insert(
            0,
            format!("{} of {} GPUs ({})", devices.len(), numbers.len(), each.collect::<Vec<_>>().join("; ")),
        );
    }
    Gpus { devices, choice: (!said.is_empty()).then(|| said.join("; ")) }
}

/// One, two, four and so on, and all.
fn counts(all: usize) -> Vec<usize> {
    (0..).map(|i| 1 << i).take_while(|n| *n < all).chain([all]).collect()
}

/// How fast so many GPUs like the first one should be; `None`: the model does not fit them, or cannot be divided so.
fn expected(spec: &Spec<'_>, first: &Arc<Cuda>, machine: &Machine, counts: &[usize]) -> Result<Vec<Option<Expected>>> {
    first.enter_thread()?;
    let cpu = CpuRates::measure(spec, machine, 128)?;
    let (vram_bytes, pcie_bytes) = (first.vram_bandwidth(SAMPLE_BYTES)?, first.pcie_bandwidth(SAMPLE_BYTES)?);
    let of = |&gpus: &usize| {
        let spec = spec.on(gpus);
        let plan = GpuPlan::attempt(&spec, &first.info, machine).ok()?.ok()?;
        on_gpu(&plan, &spec, &GpuRates::of(&cpu, gpus, vram_bytes, pcie_bytes)).ok()
    };
    Ok(counts.iter().map(of).collect())
}

/// The number of GPUs that are worth it.
fn best(counts: &[usize], expected: &[Option<Expected>]) -> usize {
    let speed = |expected: &Expected| expected.decode_tok_per_s * expected.prefill_tok_per_s;
    let mut best = (1, 0.0);
    for (&n, expected) in counts.iter().zip(expected) {
        if let Some(speed) = expected.as_ref().map(speed).filter(|speed| *speed > WORTH * best.1) {
            best = (n, speed);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_gpus_are_used_where_they_are_worth_it() {
        assert_eq!((counts(1), counts(4), counts(6)), (vec![1], vec![1, 2, 4], vec![1, 2, 4, 6]));
        let of = |decode_tok_per_s, prefill_tok_per_s| {
            Some(Expected { decode_tok_per_s, prefill_tok_per_s, prefill_tokens: 8192 })
        };
        let slower = of(70.0, 1100.0);
        assert_eq!(best(&[1, 2], &[of(100.0, 1000.0), slower]), 1);
        assert_eq!(best(&[1, 2, 4], &[of(100.0, 1000.0), of(100.0, 1900.0), of(98.0, 2000.0)]), 2, "four bring little");
        assert_eq!(best(&[1, 2, 4], &[None, None, slower]), 4, "fewer are too small");
        assert_eq!(best(&[1, 2], &[None, None]), 1);
    }
}
