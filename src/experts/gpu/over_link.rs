//! Experts in RAM that a decode step reads over the link, while the CPU reads the others: kernels multiply with them
//! where they lie, in pinned memory.
//!
//! ```text
//! before a pass   what goes over the link, in eighths, is brought to the device, for each number of tokens
//! in a pass       publish (kernels/handoff.cu) chooses the experts: both sides know them in the same moment
//! after it        its time, less what experts that came into VRAM will save, is compared with that of more eighths,
//!                 fewer, and none (`machine/trial.rs`)
//! ```
//!
//! Nothing waits behind these reads: the hand-over's polls begin when they have ended. How fast both sides are together
//! depends on whether the link or the cores bound reading. So the eighths are tried, not reckoned.

use std::sync::Arc;

use super::FEW_TOKENS;
use super::parts::Parts;
use super::products::Choices;
use super::residents::Residents;
use crate::Result;
use crate::cuda::kernels::handoff::{CHOICES_OVER_LINK, EIGHTHS};
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer, kernels};
use crate::experts::by_link;
use crate::experts::cost::CostModel;
use crate::experts::residency::{Move, Place, Residency};
use crate::machine::trial::Climb;

/// Beside the experts in RAM that it wants, a layer takes about as long as so many experts do on the CPU.
const OTHER_WORK: usize = 2;

/// Memory of the device and memory that it is brought from.
pub(super) struct Buffers {
    own: DeviceBuffer<i32>,     // [FEW_TOKENS, top_k]: what a layer computes on the device
    reach: DeviceBuffer<u64>,   // [layers, experts]: where the device reads them; 0: it must not
    staged: PinnedBuffer<u64>,  // the same
    eighths: DeviceBuffer<u32>, // [FEW_TOKENS]: of passes of 1 token, 2, ..
    numbers: PinnedBuffer<u32>, // the same
}

impl Buffers {
    pub(super) fn new(cuda: &Arc<Cuda>, (layers, experts): (usize, usize), top_k: usize) -> Result<Self> {
        Ok(Self {
            own: DeviceBuffer::new(cuda, FEW_TOKENS * top_k)?,
            reach: DeviceBuffer::new(cuda, layers * experts)?,
            staged: PinnedBuffer::new(cuda, layers * experts)?,
            eighths: DeviceBuffer::new(cuda, FEW_TOKENS)?,
            numbers: PinnedBuffer::new(cuda, FEW_TOKENS)?,
        })
    }
}

/// How the experts in RAM are shared out in decode.
pub(super) struct OverLink {
    experts: usize,
    buffers: Buffers,
    host: Vec<u64>,                 // [layers, experts]: where the device sees them in RAM
    checked: Vec<bool>,             // [layers, experts]: the checksum held
    eighths: [Eighths; FEW_TOKENS], // of passes of 1 token, 2, ..
    read_s: f32,                    // seconds that the CPU takes for an expert
    reads: f32,                     // such times that one over the link takes
    is_new: bool,                   // something is to be brought to the device
}

/// What goes over the link of the experts in RAM that a layer wants.
#[derive(Clone, Copy)]
struct Eighths {
    wanted: usize, // in the mean, rounded up
    climb: Climb<4, 2, 32>,
}

impl Eighths {
    /// The next fewer and the next more by which another number of experts goes, and none: then the link is for what
    /// comes into VRAM.
    fn neighbours(wanted: usize) -> impl Fn(usize) -> [usize; 3] {
        move |at| {
            let here = by_link(wanted, at as u32);
            let below = (0..at).rfind(|&eighths| by_link(wanted, eighths as u32) < here);
            let above = (at..=EIGHTHS).find(|&eighths| by_link(wanted, eighths as u32) > here);
            let none = below.filter(|&eighths| by_link(wanted, eighths as u32) > 0).map(|_| 0);
            [below, above, none].map(|eighths| eighths.unwrap_or(at))
        }
    }

    /// Of the next pass.
    fn next(&self) -> u32 {
        self.climb.next(Self::neighbours(self.wanted)) as u32
    }

    /// That pass took so long.
    fn took(&mut self, seconds: f32) {
        self.climb.took(seconds, Self::neighbours(self.wanted));
    }
}

impl OverLink {
    /// For layers that want so many experts in RAM for a token, in the mean. `None`: this GPU has a part of every
    /// expert, or an expert is not one piece of pinned memory.
    pub(super) fn new(parts: &Parts, buffers: Buffers, costs: &CostModel, wanted: f64) -> Option<Self> {
        let shape = parts.shape();
        if !parts.share().is_whole() || !parts.are_for_kernels() {
            return None;
        }
        let mut host = Vec::with_capacity(shape.layers() * shape.experts);
        for (layer, layout) in shape.layouts.iter().enumerate() {
            for expert in 0..shape.experts {
                let mut place = None;
                parts.each(layer, expert, |_, runs| {
                    let from = parts.for_kernels(&runs, Address::NULL).map(|run| run.from);
                    place = from.filter(|_| runs.bytes == layout.bytes());
                });
                host.push(place?);
            }
        }
        let layout = shape.layouts[shape.layers() / 2]; // stands for all
        let bytes = layout.bytes() as f64;
        let (best, _) = costs.in_decode(wanted, bytes);
        let first = (EIGHTHS as f64 * best as f64 / wanted.max(1.0)).round() as usize;
        let of_tokens = |tokens: usize| Eighths {
            wanted: (tokens as f64 * wanted).ceil() as usize,
            climb: Climb::new(first.min(EIGHTHS)),
        };
        Some(Self {
            experts: shape.experts,
            buffers,
            checked: vec![false; host.len()],
            host,
            eighths: std::array::from_fn(|i| of_tokens(1 + i)),
            read_s: (bytes / costs.cpu_bytes) as f32,
            reads: costs.reads_of_link() as f32,
            is_new: true,
        })
    }

    /// An expert's bytes are what they should be, here and in VRAM.
    pub(super) fn is_checked(&mut self, index: usize, residents: &Residents, residency: &Residency) {
        self.checked[index] = true;
        self.place(index / self.experts, (index % self.experts) as u16, residents, residency);
    }

    fn place(&mut self, layer: usize, expert: u16, residents: &Residents, residency: &Residency) {
        let index = layer * self.experts + expert as usize;
        self.buffers.staged[index] = match residency.place(layer, expert) {
            Place::Vram(slot) => residents.address(slot).to_u64(),
            Place::Ram if self.checked[index] => self.host[index],
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
        let Self { buffers, eighths, is_new, .. } = self;
        let mut changed = *is_new;
        if std::mem::take(is_new) {
            cuda.upload(&cuda.compute, buffers.reach.address(), &buffers.staged);
        }
        for (to, eighths) in buffers.numbers.iter_mut().zip(eighths) {
            let next = eighths.next();
            changed |= std::mem::replace(to, next) != next;
        }
        if changed {
            cuda.upload(&cuda.compute, buffers.eighths.address(), &buffers.numbers);
        }
    }

    /// Experts that the CPU computes while one is read over the link.
    pub(super) fn reads(&self) -> f32 {
        self.reads
    }

    /// What goes over the link in the next pass of so many tokens.
    pub(super) fn eighths(&self, tokens: usize) -> u32 {
        self.eighths.get(tokens.wrapping_sub(1)).map_or(0, Eighths::next)
    }

    /// A pass of so many tokens, whose layers wanted so many experts in RAM, took so long. What came into VRAM over the
    /// same link will save the CPU so many reads of an expert.
    pub(super) fn took(&mut self, tokens: usize, (layers, wanted): (usize, usize), (seconds, saved): (f32, f32)) {
        if let Some(eighths) = self.eighths.get_mut(tokens.wrapping_sub(1)) {
            let worth = (seconds - saved * self.read_s).max(0.1 * seconds);
            eighths.took(worth / (OTHER_WORK * layers + wanted) as f32);
        }
    }

    /// What `publish` is given in a pass of so many tokens.
    pub(super) fn of_layer(&self, layer: usize, tokens: usize) -> kernels::OverLink {
        let Buffers { own, eighths, .. } = &self.buffers;
        assert!(own.len() <= CHOICES_OVER_LINK && (1..=FEW_TOKENS).contains(&tokens), "what kernels have room for");
        kernels::OverLink {
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
pub(super) const NOTHING: kernels::OverLink =
    kernels::OverLink { reach: Address::NULL, eighths: Address::NULL, own: Address::NULL, tokens: 0 };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::handoff;
    use crate::experts::pool;

    #[test]
    fn neighbours_bring_another_number_of_experts() {
        let neighbours = |wanted, at| Eighths::neighbours(wanted)(at);
        assert_eq!([neighbours(8, 2), neighbours(8, 0), neighbours(8, 8)], [[1, 3, 0], [0, 1, 0], [7, 8, 0]]);
        // 0 0 0 1 1 1 1 2 2, and 0 1 1 2 3 4 4 5 6.
        assert_eq!([neighbours(2, 0), neighbours(2, 4), neighbours(2, 8)], [[0, 3, 0], [2, 7, 4], [6, 8, 0]]);
        assert_eq!([neighbours(6, 1), neighbours(6, 2)], [[0, 3, 1], [0, 3, 2]]);
        assert_eq!(neighbours(0, 3), [3, 3, 3]);
    }

    #[test]
    fn both_sides_count_alike() {
        assert_eq!(pool::BY_LINK as usize, handoff::BY_LINK);
        for (n, eighths) in (0..40).flat_map(|n| (0..=EIGHTHS).map(move |eighths| (n, eighths))) {
            let on_device = (n * eighths + handoff::ROUND_UP) / EIGHTHS;
            assert_eq!(by_link(n, eighths as u32), on_device);
        }
    }
}
