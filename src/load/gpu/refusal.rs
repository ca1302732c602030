//! What is said of a model that does not fit beside a GPU.

use super::plan::{CONTEXT_BYTES, GpuPlan, Planner, Short, least_bound, may_take};
use crate::Error;
use crate::config::EngineConfig;
use crate::cuda::DeviceInfo;
use crate::load::machine::{Machine, gib};
use crate::load::remedy::{either, flags};
use crate::load::spec::Spec;

/// Sizes of VRAM are told to a tenth of a GiB.
const TENTH: f64 = (1u64 << 30) as f64 / 10.0;

/// What `spec` lacks, and every remedy that was tried and helps.
pub(super) fn refusal(spec: &Spec<'_>, device: &DeviceInfo, machine: &Machine, short: Short) -> Error {
    let fits = |spec: &Spec<'_>| matches!(GpuPlan::attempt(spec, device, machine), Ok(Ok(_)));
    let with = |config: &EngineConfig| fits(&spec.with(config));
    let config = spec.config;
    let residents = |n| EngineConfig { resident_experts: n, ..config.clone() };
    if let Some(n) = config.resident_experts.filter(|_| with(&residents(None))) {
        let most = most(n, &|fewer| with(&residents(Some(fewer))));
        return Error::Resources(format!(
            "--resident-experts {n} do not fit the VRAM: give {}auto",
            most.map_or(String::new(), |most| format!("at most {most}, or "))
        ));
    }
    let mut remedies: Vec<String> = flags(spec, &fits).map(|flags| format!("use {flags}")).into_iter().collect();
    let (lack, otherwise) = match short {
        Short::Vram(bytes) => {
            let tenths = least_tenths(spec, device, bytes);
            let more = EngineConfig { vram: vec![(tenths * TENTH) as u64], ..config.clone() };
            if !config.vram.is_empty() && with(&more) {
                remedies.push(format!("raise --vram to {:.1}GiB", tenths / 10.0));
            }
            let vram = least_bound(config).unwrap_or(may_take(device));
            let lack = format!(
                "the model needs {:.1} GiB of VRAM with its experts in RAM, and {:.1} may be taken",
                tenths / 10.0,
                gib(vram)
            );
            (lack, "use a GPU with more VRAM")
        }
        Short::Ram { needed, available } => {
            let lack = format!("the experts need {:.1} GiB of memory and {:.1} are free", gib(needed), gib(available));
            (lack, "use a machine with more memory, or a smaller model")
        }
    };
    let advice = if remedies.is_empty() { otherwise.into() } else { either(&remedies) };
    Error::Resources(format!("{lack}: {advice}"))
}

/// The least VRAM that is enough, where `bytes` would be without the driver's, in tenths of a GiB.
///
/// What a plan lacks depends on the VRAM that it has to share out, so one is made of each size.
fn least_tenths(spec: &Spec<'_>, device: &DeviceInfo, bytes: u64) -> f64 {
    let rounded = |bytes: u64| ((bytes + CONTEXT_BYTES) as f64 / TENTH).ceil();
    let mut tenths = rounded(bytes);
    for _ in 0..16 {
        match (Planner { spec: spec.clone(), device, vram: (tenths * TENTH) as u64, most: None }).lacks() {
            Some(bytes) => tenths = rounded(bytes).max(tenths + 1.0),
            None => break,
        }
    }
    tenths
}

/// The largest number below `n` that `fits`, if smaller ones fit wherever larger ones do.
fn most(n: usize, fits: &dyn Fn(usize) -> bool) -> Option<usize> {
    let (mut least, mut end) = (0, n); // what fits is below `least`
    while least < end {
        let middle = (least + end) / 2;
        if fits(middle) { least = middle + 1 } else { end = middle }
    }
    least.checked_sub(1)
}
