//! Experts in RAM that a decode step reads over the link, while the CPU reads the others: kernels multiply with them
//! where they lie, in pinned memory.
//!
//! ```text
//! before a pass   the share that goes over the link is brought to the device, by the number of the pass's tokens
//! in a pass       publish (kernels/handoff.cu) tells those from the CPU's: both sides know in the same moment
//! after it        its time is compared with that of other shares (`machine/trial.rs`)
//! ```
//!
//! Nothing waits behind these reads: the hand-over's polls begin when they have ended. How fast both sides are together
//! depends on whether the link or the cores are what bounds reading, so shares are tried, not reckoned.

use std::sync::Arc;

use super::FEW_TOKENS;
use super::parts::Parts;
use super::products::Choices;
use super::residents::Residents;
use crate::Result;
use crate::cuda::kernels::handoff::EIGHTHS;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer, kernels};
use crate::experts::cost::CostModel;
use crate::experts::residency::{Move, Place, Residency};
use crate::machine::trial::Trial;

/// Another share must take so much less time.
const GAIN: f32 = 0.99;

/// Beside the experts in RAM that it wants, a layer takes about as long as so many experts do on the CPU.
const OTHER_WORK: usize = 2;

/// Memory of the device and memory that it is brought from.
pub(super) struct Buffers {
    own: DeviceBuffer<i32>,     // [FEW_TOKENS, top_k]: what a layer computes on the device
    reach: DeviceBuffer<u64>,   // [layers, experts]: where the device reads them; 0: it must not
    staged: PinnedBuffer<u64>,  // the same
    eighths: DeviceBuffer<u32>, // [FEW_TOKENS]: of passes of 1 token, 2, ..
    shares: PinnedBuffer<u32>,  // the same
}

impl Buffers {
    pub(super) fn new(cuda: &Arc<Cuda>, (layers, experts): (usize, usize), top_k: usize) -> Result<Self> {
        Ok(Self {
            own: DeviceBuffer::new(cuda, FEW_TOKENS * top_k)?,
            reach: DeviceBuffer::new(cuda, layers * experts)?,
            staged: PinnedBuffer::new(cuda, layers * experts)?,
            eighths: DeviceBuffer::new(cuda, FEW_TOKENS)?,
            shares: PinnedBuffer::new(cuda, FEW_TOKENS)?,
        })
    }
}

/// How the experts in RAM are shared out in decode.
pub(super) struct Split {
    experts: usize,
    buffers: Buffers,
    host: Vec<u64>,              // [layers, experts]: where the device sees them in RAM
    is_whole: Vec<bool>,         // [layers, experts]: the checksum held
    shares: [Share; FEW_TOKENS], // of passes of 1 token, 2, ..
    is_new: bool,                // something is to be brought to the device
}

/// What goes over the link.
#[derive(Clone, Copy)]
struct Share {
    eighths: u32,
    trial: Trial<3, 2, 32>, // less, as much, and more
}

impl Share {
    /// Of the next pass.
    fn next(&self) -> u32 {
        (self.eighths + self.trial.way() as u32).saturating_sub(1).min(EIGHTHS as u32)
    }

    /// That pass took so long.
    fn took(&mut self, seconds: f32) {
        const AS_NOW: usize = 1;
        let Some(ways) = self.trial.took(seconds) else { return };
        let best = (0..ways.len()).min_by(|&a, &b| ways[a].total_cmp(&ways[b])).expect("there are three");
        let moves = best != AS_NOW && ways[best] < GAIN * ways[AS_NOW];
        self.trial.keep(if moves { best } else { AS_NOW });
        if moves {
            self.eighths = self.next();
            self.trial = Trial::default();
        }
    }
}

impl Split {
    /// Where every expert lies in one piece of pinned memory, of one GPU: `None` elsewhere. A layer wants so many
    /// experts in RAM for a token, in the mean.
    pub(super) fn new(parts: &Parts, buffers: Buffers, costs: &CostModel, wanted: f64) -> Option<Self> {
        let shape = parts.shape();
        if !parts.share().is_whole() || !parts.are_for_kernels() {
            return None;
        }
        let mut host = Vec::with_capacity(shape.layers() * shape.experts);
        for (layer, layout) in shape.layouts.iter().enumerate() {
            for expert in 0..shape.experts {
                let mut whole = None;
                parts.each(layer, expert, |_, runs| {
                    let from = parts.for_kernels(&runs, Address::NULL).map(|run| run.from);
                    whole = from.filter(|_| runs.bytes == layout.bytes());
                });
                host.push(whole?);
            }
        }
        let layout = shape.layouts[shape.layers() / 2]; // stands for all
        let (by_link, _) = costs.in_decode(wanted, layout.bytes() as f64);
        let eighths = (EIGHTHS as f64 * by_link as f64 / wanted.max(1.0)).round() as u32;
        Some(Self {
            experts: shape.experts,
            buffers,
            is_whole: vec![false; host.len()],
            host,
            shares: [Share { eighths, trial: Trial::default() }; FEW_TOKENS],
            is_new: true,
        })
    }

    /// Whether a pass of so many tokens is shared out.
    pub(super) fn is_for(tokens: usize) -> bool {
        tokens <= FEW_TOKENS
    }

    /// An expert's bytes are what they should be, here and in VRAM.
    pub(super) fn is_checked(&mut self, index: usize, residents: &Residents, residency: &Residency) {
        self.is_whole[index] = true;
        self.place(index / self.experts, (index % self.experts) as u16, residents, residency);
    }

    fn place(&mut self, layer: usize, expert: u16, residents: &Residents, residency: &Residency) {
        let index = layer * self.experts + expert as usize;
        self.buffers.staged[index] = match residency.place(layer, expert) {
            Place::Vram(slot) => residents.address(slot).to_u64(),
            Place::Ram if self.is_whole[index] => self.host[index],
            Place::Ram | Place::OnHolder => 0,
        };
        self.is_new = true;
    }

    /// Takes in [what moved](Residency::moves).
    pub(super) fn update(&mut self, residents: &Residents, residency: &Residency) {
        for &Move { layer, expert, .. } in residency.moves() {
            self.place(layer, expert, residents, residency);
        }
    }

    /// Brings what has changed to the device, before the next pass in the compute stream.
    pub(super) fn bring(&mut self, cuda: &Cuda) {
        let Self { buffers, shares, is_new, .. } = self;
        if std::mem::take(is_new) {
            cuda.upload(&cuda.compute, buffers.reach.address(), &buffers.staged);
        }
        let mut changed = false;
        for (to, share) in buffers.shares.iter_mut().zip(shares) {
            changed |= *to != share.next();
            *to = share.next();
        }
        if changed {
            cuda.upload(&cuda.compute, buffers.eighths.address(), &buffers.shares);
        }
    }

    /// What goes over the link in the next pass of so many tokens.
    pub(super) fn eighths(&self, tokens: usize) -> u32 {
        self.shares.get(tokens.wrapping_sub(1)).map_or(0, Share::next)
    }

    /// A pass of so many tokens, whose layers wanted so many experts in RAM, took so long.
    pub(super) fn took(&mut self, tokens: usize, (layers, wanted): (usize, usize), seconds: f32) {
        if let Some(share) = self.shares.get_mut(tokens.wrapping_sub(1)) {
            share.took(seconds / (OTHER_WORK * layers + wanted) as f32);
        }
    }

    /// What `publish` is given in a pass of so many tokens.
    pub(super) fn of_layer(&self, layer: usize, tokens: usize) -> kernels::Split {
        let Buffers { own, eighths, .. } = &self.buffers;
        kernels::Split {
            reach: self.table(layer),
            eighths: eighths.address().add(tokens - 1),
            own: own.address(),
            tokens: tokens as i32,
        }
    }

    /// Where kernels find the experts that a layer computes on the device.
    pub(super) fn table(&self, layer: usize) -> Address<u64> {
        self.buffers.reach.address().add(layer * self.experts)
    }

    /// What the device computes of `choices`.
    pub(super) fn own(&self, choices: Choices) -> Choices {
        Choices { ids: self.buffers.own.address(), ..choices }
    }
}

/// Nothing is read over the link.
pub(super) const NO_SPLIT: kernels::Split =
    kernels::Split { reach: Address::NULL, eighths: Address::NULL, own: Address::NULL, tokens: 0 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_go_where_steps_are_fastest() {
        for (first, best) in [(2u32, 3u32), (0, 0), (8, 8), (1, 5), (7, 2)] {
            let mut share = Share { eighths: first, trial: Trial::default() };
            for _ in 0..5000 {
                assert!(share.next() <= EIGHTHS as u32);
                share.took(1.0 + share.next().abs_diff(best) as f32 / 20.0);
            }
            assert_eq!(share.eighths, best, "from {first}");
        }
    }

    #[test]
    fn a_share_stays_where_others_gain_nothing() {
        let mut share = Share { eighths: 3, trial: Trial::default() };
        for _ in 0..3000 {
            share.took(1.0 - 0.001 * share.next() as f32);
        }
        assert_eq!(share.eighths, 3);
    }
}
