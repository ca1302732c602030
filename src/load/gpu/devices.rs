//! The GPUs of a run: those that are named, or as many of those that there are as make it fastest.

use std::sync::Arc;

use super::plan::{GpuPlan, check_vram, size};
use super::speed::{GpuRates, on_gpu, products};
use crate::config::{Device, EngineConfig};
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
    /// Those that can hold experts for the one device.
    pub beside: Vec<Beside>,
    /// What bounds the devices' VRAM, if something does.
    pub vram: Vec<u64>,
    /// Where there were others: why these.
    pub choice: Option<String>,
}

/// A GPU that can hold experts for another one.
pub struct Beside {
    /// It.
    pub cuda: Arc<Cuda>,
    /// In `--device`.
    pub number: usize,
    /// VRAM that may be taken.
    pub vram: u64,
}

impl Gpus {
    /// Opens them; `None`: it runs on the CPU. Errors: `Error::Device` when a named one cannot be used;
    /// `Error::Invalid` for some that are not alike.
    pub fn open(spec: &Spec<'_>, machine: &Machine) -> Result<Option<Self>> {
        check_bounds(spec.config)?;
        match &spec.config.device {
            Device::Cpu => Ok(None),
            Device::Auto => Ok(Cuda::open(0).ok().map(|first| {
                let (devices, choice) = choose(spec, first, machine);
                Self { devices, beside: Vec::new(), vram: spec.config.vram.clone(), choice }
            })),
            Device::Cuda(numbers) => named(spec, numbers).map(Some),
        }
    }

    /// The choices of a run, with what bounds the devices.
    pub fn config(&self, config: &EngineConfig) -> EngineConfig {
        EngineConfig { vram: self.vram.clone(), ..config.clone() }
    }

    /// The run on these GPUs, of choices that are theirs.
    pub fn spec<'a>(&self, spec: &Spec<'a>, config: &'a EngineConfig) -> Spec<'a> {
        match self.beside.is_empty() {
            true => spec.with(config).on(self.devices.len()),
            false => spec.with(config).with_beside(self.beside.iter().map(|of| of.vram).collect()),
        }
    }

    /// Why these GPUs, where there were others, and which of them `plan` leaves out.
    pub fn choice(&self, plan: &GpuPlan) -> Option<String> {
        let held = |number| plan.holders.iter().any(|holder| holder.number == number);
        let out = self.beside.iter().enumerate().filter(|(i, _)| !held(*i)).map(|(_, of)| {
            format!("; cuda:{} is left out: it has no room for an expert, or none is left for it", of.number)
        });
        self.choice.as_ref().map(|choice| choice.clone() + &out.collect::<String>())
    }

    /// The one that has the least memory.
    pub fn least(&self) -> DeviceInfo {
        let bytes = |of: fn(&DeviceInfo) -> u64| self.devices.iter().map(|cuda| of(&cuda.info)).min().unwrap_or(0);
        let (total_bytes, free_bytes) = (bytes(|info| info.total_bytes), bytes(|info| info.free_bytes));
        DeviceInfo { total_bytes, free_bytes, ..self.devices[0].info.clone() }
    }
}

/// Errors: `Error::Invalid` for another number of sizes of VRAM than of GPUs.
fn check_bounds(config: &EngineConfig) -> Result<()> {
    let (sizes, refuse) = (config.vram.len(), |why: String| Err(Error::Invalid(format!("--vram has {why}"))));
    match &config.device {
        Device::Auto if sizes > 1 => {
            refuse(format!("{sizes} sizes: name the GPUs that have them, as in --device cuda:0,1"))
        }
        Device::Cuda(numbers) if sizes > 1 && sizes != numbers.len() => {
            refuse(format!("{sizes} sizes for --device {}: give {}, or one for all", config.device, numbers.len()))
        }
        _ => Ok(()),
    }
}

/// Whether what GPUs may take is so different that equal shares would waste it.
pub fn are_uneven(vram: &[u64]) -> bool {
    let (least, most) = (vram.iter().min().copied().unwrap_or(0), vram.iter().max().copied().unwrap_or(0));
    least < most / 4 * 3
}

fn named(spec: &Spec<'_>, numbers: &[usize]) -> Result<Gpus> {
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
    let bounds = &spec.config.vram;
    if bounds.len() > 1 {
        let mut each = numbers.iter().zip(&devices).zip(bounds);
        each.try_for_each(|((number, cuda), bound)| {
            check_vram(*bound, &DeviceInfo { name: format!("cuda:{number}"), ..cuda.info.clone() })
        })?;
    }
    let bound = |i: usize| bounds.get(i).or(bounds.first()).copied();
    let vram: Vec<u64> = devices.iter().enumerate().map(|(i, cuda)| bound(i).unwrap_or(cuda.info.free_bytes)).collect();
    let Some(why) = apart(numbers, &devices, &vram) else {
        return Ok(Gpus { devices, beside: Vec::new(), vram: bounds.clone(), choice: None });
    };
    if spec.model.moe().is_none() {
        return refuse(format!("{why}, and this model has no experts that one could hold: name one GPU"));
    }
    // The strongest one has everything else; of equal ones the first.
    let strength = |i: &usize| (products(&devices[*i].info) as u64, vram[*i], usize::MAX - i);
    let first = (0..devices.len()).max_by_key(strength).unwrap_or(0);
    let others: Vec<usize> = (0..devices.len()).filter(|i| *i != first).collect();
    let names: Vec<String> = others.iter().map(|i| format!("cuda:{}", numbers[*i])).collect();
    let choice = format!("{why}, so cuda:{} has all but experts that {} can hold", numbers[first], names.join(", "));
    Ok(Gpus {
        devices: vec![devices[first].clone()],
        beside: others
            .iter()
            .map(|&i| Beside { cuda: devices[i].clone(), number: numbers[i], vram: vram[i] })
            .collect(),
        vram: bound(first).into_iter().collect(),
        choice: Some(choice),
    })
}

/// Why a model cannot be divided among GPUs, or should not.
fn apart(numbers: &[usize], devices: &[Arc<Cuda>], vram: &[u64]) -> Option<String> {
    let first = &devices[0].info;
    if devices.len() == 1 {
        return None;
    }
    if let Some((number, other)) = numbers.iter().zip(devices).find(|(_, cuda)| cuda.info.kind() != first.kind()) {
        return Some(format!("cuda:{number} is a {} and cuda:{} a {}", other.info.name, numbers[0], first.name));
    }
    if are_uneven(vram) {
        let each = numbers.iter().zip(vram).map(|(number, vram)| format!("{} of cuda:{number}", size(*vram)));
        return Some(format!("{} may be taken", each.collect::<Vec<_>>().join(", ")));
    }
    let error = Rank::of_devices(devices).err()?.to_string();
    Some(error.split(": give one GPU").next().unwrap_or_default().into())
}

/// As many GPUs like the first one as make the model fastest.
fn choose(spec: &Spec<'_>, first: Arc<Cuda>, machine: &Machine) -> (Vec<Arc<Cuda>>, Option<String>) {
    let (numbers, mut said) = cuda::alike();
    let mut devices = vec![first.clone()];
    if numbers.len() > 1 {
        let counts = counts(numbers.len());
        let expected = match expected(spec, &first, machine, &counts) {
            Ok(expected) => expected,
            Err(error) => return (devices, Some(format!("one GPU: {error}"))),
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
    (devices, (!said.is_empty()).then(|| said.join("; ")))
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
