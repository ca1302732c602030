//! The GPUs of a run: those that are named, or as many of those that there are as make it fastest.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::plan::{GpuPlan, Short, check_vram, may_take, size};
use super::speed::products;
use super::stages::Place;
use super::ways::{Card, How, Ways, are_uneven, least, without_remedy};
use crate::config::{Device, EngineConfig, Split};
use crate::cuda::{self, Cuda, DeviceInfo, MAX_RANKS, Rank};
use crate::load::machine::Machine;
use crate::load::spec::Spec;
use crate::load::speed::CpuRates;
use crate::{Error, Result};

/// The GPUs of a run.
pub struct Gpus {
    /// In the order of their ranks.
    pub devices: Vec<Arc<Cuda>>,
    /// Those that can hold experts for the one device.
    pub beside: Vec<Beside>,
    /// The devices, where each has some of the layers; else empty.
    pub stages: Vec<Place>,
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
            Device::Auto => choose(spec, machine),
            Device::Cuda(numbers) => named(spec, numbers, machine).map(Some),
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
        least(self.devices.iter().map(|cuda| &cuda.info))
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

fn named(spec: &Spec<'_>, numbers: &[usize], machine: &Machine) -> Result<Gpus> {
    let mut distinct = numbers.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() < numbers.len() {
        return refuse(spec, "a GPU is named twice, name each once");
    }
    if numbers.len() > MAX_RANKS {
        return refuse(spec, &format!("a model is divided among {MAX_RANKS} GPUs at most"));
    }
    let mut devices = numbers.iter().map(|number| Cuda::open(*number)).collect::<Result<Vec<_>>>()?;
    let bounds = &spec.config.vram;
    if bounds.len() > 1 {
        let mut each = numbers.iter().zip(&devices).zip(bounds);
        each.try_for_each(|((number, cuda), bound)| {
            check_vram(*bound, &DeviceInfo { name: format!("cuda:{number}"), ..cuda.info.clone() })
        })?;
    }
    let place = |(i, (&number, cuda)): (usize, (&usize, &Arc<Cuda>))| {
        let vram = bounds.get(i).or(bounds.first()).copied().unwrap_or(may_take(&cuda.info));
        Place { number, info: cuda.info.clone(), vram }
    };
    let places: Vec<Place> = numbers.iter().zip(&devices).enumerate().map(place).collect();
    let (sharing, choice) = Sharing::of(spec, &places, machine, &|| Rank::of_devices(&devices).map(drop))?;
    let mut gpus = Gpus { devices: Vec::new(), beside: Vec::new(), stages: Vec::new(), vram: bounds.clone(), choice };
    match sharing {
        Sharing::Width => {}
        Sharing::Layers => gpus.stages = places,
        Sharing::Experts { first } => {
            let own = devices.remove(first);
            gpus.vram = bounds.get(first).or(bounds.first()).copied().into_iter().collect();
            let others = places.iter().enumerate().filter(|(i, _)| *i != first).map(|(_, place)| place);
            let beside = devices.drain(..).zip(others);
            gpus.beside = beside.map(|(cuda, &Place { number, vram, .. })| Beside { cuda, number, vram }).collect();
            devices.push(own);
        }
    }
    gpus.devices = devices;
    Ok(gpus)
}

fn refuse<T>(spec: &Spec<'_>, why: &str) -> Result<T> {
    Err(Error::Invalid(format!("--device {}: {why}", spec.config.device)))
}

/// What each of several GPUs that are named has of a model.
pub enum Sharing {
    /// A share of everything.
    Width,
    /// Some of the layers.
    Layers,
    /// The first has all but experts that the others can hold.
    Experts {
        /// Its index.
        first: usize,
    },
}

impl Sharing {
    /// Of a model on these GPUs, and why; `reach` fails where they do not reach each other's memory. Errors:
    /// `Error::Invalid` for a way that was asked for and cannot be.
    pub fn of(
        spec: &Spec<'_>,
        places: &[Place],
        machine: &Machine,
        reach: &dyn Fn() -> Result<()>,
    ) -> Result<(Self, Option<String>)> {
        let (split, is_moe) = (spec.config.split, spec.model.moe().is_some());
        if places.len() == 1 {
            return Ok((Sharing::Width, None));
        }
        let in_layers = |why: &str| Ok((Sharing::Layers, Some(format!("{why}, so each GPU has some of the layers"))));
        let why = match split {
            Split::Layers => return in_layers("--split layers"),
            Split::Experts if !is_moe => {
                return refuse(spec, "--split experts: this model has none, use --split layers");
            }
            Split::Experts => "--split experts".into(),
            Split::Width => match apart(places, reach).or_else(|| undivided(spec)) {
                Some(why) => return refuse(spec, &format!("{why}: use --split layers")),
                None => return Ok((Sharing::Width, None)),
            },
            Split::Auto => match uneven(places).or_else(|| apart(places, reach)) {
                Some(why) if is_moe => why,
                Some(why) => return in_layers(&why),
                None => match undivided(spec) {
                    Some(why) => return in_layers(&why),
                    None => return Ok((Sharing::Width, None)),
                },
            },
        };
        // The strongest one has everything else; of equal ones the first.
        let strength = |i: &usize| (products(&places[*i].info) as u64, places[*i].vram, usize::MAX - i);
        let first = (0..places.len()).max_by_key(strength).unwrap_or(0);
        let own = &places[first];
        let others: Vec<&Place> = (0..places.len()).filter(|i| *i != first).map(|i| &places[i]).collect();
        let config = EngineConfig { vram: vec![own.vram], ..spec.config.clone() };
        let beside = spec.with(&config).with_beside(others.iter().map(|place| place.vram).collect());
        if split == Split::Auto && matches!(GpuPlan::attempt(&beside, &own.info, machine), Ok(Err(Short::Vram(_)))) {
            return in_layers(&format!("{why}, and what is no expert does not fit cuda:{} alone", own.number));
        }
        let names: Vec<String> = others.iter().map(|place| format!("cuda:{}", place.number)).collect();
        let choice = format!("{why}, so cuda:{} has all but experts that {} can hold", own.number, names.join(", "));
        Ok((Sharing::Experts { first }, Some(choice)))
    }
}

/// Why a model's width cannot be divided among GPUs.
fn apart(places: &[Place], reach: &dyn Fn() -> Result<()>) -> Option<String> {
    let first = &places[0];
    match places.iter().find(|place| place.info.kind() != first.info.kind()) {
        Some(Place { number, info, .. }) => {
            Some(format!("cuda:{number} is a {} and cuda:{} a {}", info.name, first.number, first.info.name))
        }
        None => reach().err().map(|error| without_remedy(&error)),
    }
}

/// Why equal shares would waste what may be taken of some GPUs.
fn uneven(places: &[Place]) -> Option<String> {
    let each = places.iter().map(|place| format!("{} of cuda:{}", size(place.vram), place.number));
    let vram: Vec<u64> = places.iter().map(|place| place.vram).collect();
    are_uneven(&vram).then(|| format!("{} may be taken", each.collect::<Vec<_>>().join(", ")))
}

/// What of a model as many GPUs as `spec` says cannot divide.
fn undivided(spec: &Spec<'_>) -> Option<String> {
    let share = spec.largest_share();
    let of_model = || spec.model.share(share).map(drop);
    let of_experts = || spec.expert_shape()?.map_or(Ok(()), |shape| shape.part(share).map(drop));
    of_model().and_then(|()| of_experts()).err().map(|error| without_remedy(&error))
}

/// The GPUs of this machine that make the model fastest, and why; `None`: none can be used.
fn choose(spec: &Spec<'_>, machine: &Machine) -> Result<Option<Gpus>> {
    let mut cards: Vec<Card> = cuda::devices().into_iter().enumerate().map(|(i, info)| Card::known(i, info)).collect();
    let mut left = Vec::new();
    cards.retain(|card| {
        let lack = card.info.lacks();
        left.extend(lack.iter().map(|lack| format!("{} is left alone: it {lack}", card.name())));
        lack.is_none()
    });
    if let Some(gpus) = fastest(spec, machine, &mut cards, &mut left)? {
        return Ok(Some(gpus));
    }
    let one = cards.first().and_then(|card| Cuda::open(card.number).ok());
    Ok(one.map(|cuda| Gpus {
        devices: vec![cuda],
        beside: Vec::new(),
        stages: Vec::new(),
        vram: spec.config.vram.clone(),
        choice: (!left.is_empty()).then(|| left.join("; ")),
    }))
}

/// The same of several that can be used; `None`: of these `cards` one is left, or none.
fn fastest(spec: &Spec<'_>, machine: &Machine, cards: &mut Vec<Card>, left: &mut Vec<String>) -> Result<Option<Gpus>> {
    if cards.len() < 2 {
        return Ok(None);
    }
    let cpu = CpuRates::measure(spec, machine, 128)?;
    let (mut open, mut reaches) = (BTreeMap::new(), true);
    // Those that look worth it are opened, which tells more of them, until all that are chosen are open.
    while cards.len() > 1 {
        let reach = |a: &Card, b: &Card| reaches && cuda::can_access(a.number, b.number);
        let ways = Ways { spec, machine, cpu: &cpu, cards, reach: &reach };
        let (way, why) = ways.choose();
        let chosen: Vec<(usize, u64)> = way.cards.iter().map(|&i| (cards[i].number, ways.vram(i))).collect();
        let closed: Vec<usize> =
            chosen.iter().map(|(number, _)| *number).filter(|number| !open.contains_key(number)).collect();
        if !closed.is_empty() {
            cards.retain_mut(|card| {
                if !closed.contains(&card.number) {
                    return true;
                }
                match Cuda::open(card.number).and_then(|cuda| card.measure(&cuda).map(|()| cuda)) {
                    Ok(cuda) => open.insert(card.number, cuda).is_none(),
                    Err(error) => {
                        left.push(format!("{} is left alone: {error}", card.name()));
                        false
                    }
                }
            });
            continue;
        }
        let mut devices: Vec<Arc<Cuda>> = chosen.iter().filter_map(|(number, _)| open.remove(number)).collect();
        if way.how == How::Width
            && let Err(error) = Rank::of_devices(&devices)
        {
            left.push(without_remedy(&error));
            reaches = false;
            open.extend(chosen.iter().map(|(number, _)| *number).zip(devices));
            continue;
        }
        open.into_iter().for_each(|(number, cuda)| cuda.close(number));
        let others = if way.how == How::Experts { devices.split_off(1) } else { Vec::new() };
        let place =
            |(cuda, &(number, vram)): (&Arc<Cuda>, &(usize, u64))| Place { number, info: cuda.info.clone(), vram };
        let stages = match way.how {
            How::Layers => devices.iter().zip(&chosen).map(place).collect(),
            How::Width | How::Experts => Vec::new(),
        };
        let beside = others.into_iter().zip(&chosen[1..]);
        devices[0].enter_thread()?;
        return Ok(Some(Gpus {
            devices,
            beside: beside.map(|(cuda, &(number, vram))| Beside { cuda, number, vram }).collect(),
            stages,
            vram: spec.config.vram.clone(),
            choice: Some([&[why], &left[..]].concat().join("; ")),
        }));
    }
    Ok(None)
}
