//! Experts on their way into VRAM within a recorded step: a ring of pieces, and what kernels are told of it.
//!
//! ```text
//! host     Way      writes an expert's pieces into the ring, and shows as many as will cross while the CPU computes
//! device   fetch    waits for the CPU; blocks of it copy what was shown meanwhile (kernels/admissions.cuh). On a rank
//!                   that does not wait for the CPU, admit
//! ```
//!
//! One thread may send while another enqueues, and that may be of another rank, or of another process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::parts::Parts;
use super::residents::Slots;
use crate::Result;
use crate::cuda::kernels::RunsToCopy;
use crate::cuda::kernels::pool::{ADMIT_BLOCKS, PIECE_BYTES, RING_PIECES};
use crate::cuda::{Address, Cuda, PinnedBuffer, kernels, launch};
use crate::experts::mailbox::LINE;
use crate::experts::pool::{Admission, BY_LINK};

/// Pieces that an expert is cut into at most, if it is one run: several are in the ring at a time.
const MAX_PIECES: usize = RING_PIECES / 4;

/// Nothing comes.
pub(in crate::experts) const NOTHING: kernels::AdmissionRing =
    kernels::AdmissionRing { entries: Address::NULL, sent: Address::NULL, come: Address::NULL };

/// Blocks that a kernel has for them, beside its own.
pub(in crate::experts) fn blocks(ring: &kernels::AdmissionRing) -> usize {
    if ring.entries.is_null() { 0 } else { ADMIT_BLOCKS }
}

/// Enqueues the copies of what was shown, if anything ever is, where nothing waits for the CPU.
pub(super) fn admit(cuda: &Cuda, ring: kernels::AdmissionRing) {
    launch!(cuda, &cuda.compute, kernels::admit, [blocks(&ring), 1, 1]; ring);
}

/// Memory that both sides see.
pub(super) struct Road {
    pub(super) ring: PinnedBuffer<u64>,   // [RING_PIECES, 4]
    pub(super) counts: PinnedBuffer<u32>, // [2, 16]: pieces that were shown; that each block has copied
}

impl Road {
    /// Numbers of the ring.
    pub(super) const RING: usize = 4 * RING_PIECES;
    /// Numbers of the counts.
    pub(super) const COUNTS: usize = 2 * LINE;

    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        Ok(Self { ring: PinnedBuffer::new(cuda, Self::RING)?, counts: PinnedBuffer::new(cuda, Self::COUNTS)? })
    }

    /// What kernels are given, as long as this lives.
    pub(super) fn for_kernels(&self) -> kernels::AdmissionRing {
        let counts = self.counts.address();
        kernels::AdmissionRing { entries: self.ring.address().cast(), sent: counts, come: counts.add(LINE) }
    }
}

/// The host's side: experts on their way to all ranks, and how many come while the CPU computes a layer.
pub(super) struct Admissions {
    pub(super) ways: Vec<Way>, // their devices look there as long as they live
    share: f32,                // of an expert, for each that the CPU computes
    shown: Shown,              // in this layer
    shown_in_step: f32,        // experts
    least: f32,                // experts that come in a layer that misses some, if any are sent
    seen: Vec<u32>,            // [experts]: the layer, counted since the start, that chose it last
    layers: u32,
}

/// What a layer shows of what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Nothing, or what says nothing of the share.
    Nothing,
    /// As much as the share allows: more was there.
    Some,
    All,
}

impl Shown {
    /// So much is shown. The CPU computes `free` experts while nothing else crosses the link: if none, all is late.
    fn of(shown: f32, free: f32, has_more: bool) -> Self {
        match (shown > 0.0 && free > 0.0, has_more) {
            (false, _) => Self::Nothing,
            (true, true) => Self::Some,
            (true, false) => Self::All,
        }
    }
}

/// The share of an expert that comes while the CPU computes one: at first, at least, and at most.
const SHARE: f32 = 0.15;
const SHARES: (f32, f32) = (0.02, 1.0);

/// What has not come when the CPU has ended keeps the device waiting: then less is shown, else more. So something is
/// late in one layer of six.
const FASTER: f32 = 1.01;
const SLOWER: f32 = 0.95;

impl Admissions {
    /// To no rank yet. For so many layers of so many experts. About one comes in a step, whatever is late: so a change
    /// is seen.
    pub(super) fn new(layers: usize, experts: usize) -> Self {
        let (shown, seen, least) = (Shown::Nothing, vec![0; experts], 1.0 / layers as f32);
        Self { ways: Vec::new(), share: SHARE, shown, shown_in_step: 0.0, least, seen, layers: 0 }
    }

    /// The CPU begins with a layer, of whose `ids` it computes those that are experts. Shows all ranks what can come
    /// meanwhile, after those that a device reads over its link: each takes as long as `link` experts do on the CPU.
    pub(super) fn begin_layer(&mut self, ids: &[i32], link: f32) {
        let (on_cpu, by_link) = self.count(ids);
        let free = on_cpu - by_link * link;
        let experts = if on_cpu + by_link > 0.0 { (self.share * free).max(self.least) } else { 0.0 };
        let shown = self.ways.iter_mut().map(|way| way.show(experts)).fold(0.0, f32::max);
        self.shown_in_step += shown;
        self.shown = Shown::of(shown, free, self.ways.iter().any(Way::has_more));
    }

    /// The different experts among `ids` that the CPU computes, and that go over the link.
    fn count(&mut self, ids: &[i32]) -> (f32, f32) {
        self.layers = self.layers.wrapping_add(1);
        let (mut on_cpu, mut by_link) = (0.0, 0.0);
        for &id in ids.iter().filter(|&&id| id >= 0) {
            let of = if id < BY_LINK { &mut on_cpu } else { &mut by_link };
            if let Some(seen) = self.seen.get_mut((id % BY_LINK) as usize)
                && std::mem::replace(seen, self.layers) != self.layers
            {
                *of += 1.0;
            }
        }
        (on_cpu, by_link)
    }

    /// It has ended.
    pub(super) fn end_layer(&mut self) {
        let has_come = self.ways.iter().all(Way::is_idle);
        self.adjust(has_come);
    }

    fn adjust(&mut self, has_come: bool) {
        let step = match (std::mem::replace(&mut self.shown, Shown::Nothing), has_come) {
            (Shown::Nothing, _) | (Shown::All, true) => 1.0,
            (Shown::Some, true) => FASTER,
            (Shown::Some | Shown::All, false) => SLOWER,
        };
        self.share = (self.share * step).clamp(SHARES.0, SHARES.1);
    }

    /// Experts' worth of bytes that were shown since the last call.
    pub(super) fn take_shown(&mut self) -> f32 {
        std::mem::take(&mut self.shown_in_step)
    }

    /// Of the experts on their way, how many have come to all ranks.
    pub(super) fn come(&self) -> usize {
        self.ways.iter().map(Way::come).min().unwrap_or(0)
    }
}

/// Experts on their way to one device.
pub(super) struct Way {
    parts: Arc<Parts>, // of every expert, which the device's kernels can copy
    slots: Slots,
    to: Address<u8>, // where the slots begin
    road: Road,
    piece_bytes: usize,
    queue: Queue,
}

impl Way {
    /// To slots that begin at `to`. `parts` [are for kernels](Parts::are_for_kernels) of that device.
    pub(super) fn new(parts: Arc<Parts>, slots: Slots, to: Address<u8>, road: Road) -> Self {
        let largest = parts.shape().layouts.iter().map(|layout| layout.bytes()).max().unwrap_or(0);
        let piece_bytes = largest.div_ceil(MAX_PIECES).next_multiple_of(16).max(PIECE_BYTES);
        Self { parts, slots, to, road, piece_bytes, queue: Queue::default() }
    }

    /// Sends an expert, once it is [shown](Way::show).
    pub(super) fn send(&mut self, Admission { layer, expert, slot }: Admission) {
        let free = RING_PIECES as u32 - self.queue.written.wrapping_sub(self.pieces_come());
        let Self { parts, slots, to, road, piece_bytes, queue } = self;
        let mut pieces = 0;
        parts.each(layer, expert as usize, |offset, runs| {
            let runs = parts.for_kernels(&runs, to.add(slots.at(slot) + offset)).expect("all experts are pinned");
            each_piece(runs, *piece_bytes as u32, |RunsToCopy { to, from, bytes, count, from_pitch, to_pitch }| {
                assert!(pieces < free, "the ring has room for an expert");
                let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
                let at = 4 * (queue.written.wrapping_add(pieces) as usize % RING_PIECES);
                road.ring[at..at + 4].copy_from_slice(&[to, from, both(bytes, count), both(from_pitch, to_pitch)]);
                pieces += 1;
            });
        });
        queue.push(pieces);
    }

    /// Shows the device so many experts' worth of what was sent, or one piece, and says how much that was.
    fn show(&mut self, experts: f32) -> f32 {
        let shown = self.queue.show(experts);
        self.road.counts.atomic(0).store(self.queue.shown, Ordering::Release);
        shown
    }

    /// Whether more was sent than is shown.
    fn has_more(&self) -> bool {
        self.queue.written != self.queue.shown
    }

    /// Pieces that have come, and all before them.
    fn pieces_come(&self) -> u32 {
        first_missing(std::array::from_fn(|block| self.road.counts.atomic(LINE + block).load(Ordering::Acquire)))
    }

    /// Whether all that was shown has come.
    fn is_idle(&self) -> bool {
        self.pieces_come().wrapping_sub(self.queue.shown) as i32 >= 0
    }

    /// Of the experts on their way, how many have come.
    fn come(&self) -> usize {
        self.queue.before(self.pieces_come())
    }

    /// Forgets the first `n` of those that have come.
    pub(super) fn take(&mut self, n: usize) {
        self.queue.ends.drain(..n);
    }
}

/// Pieces on their way, counted since the start.
#[derive(Default)]
struct Queue {
    written: u32,
    shown: u32,          // of these
    owed: f32,           // a part of a piece that could have been shown
    of_expert: u32,      // pieces of the one that was sent last
    ends: VecDeque<u32>, // of each expert: `written` after its last piece
}

impl Queue {
    /// An expert of so many pieces is written.
    fn push(&mut self, pieces: u32) {
        self.of_expert = pieces;
        self.written = self.written.wrapping_add(pieces);
        self.ends.push_back(self.written);
    }

    /// Shows so many experts' worth, or one piece, and says how much that was.
    fn show(&mut self, experts: f32) -> f32 {
        if experts == 0.0 {
            return 0.0;
        }
        self.owed += experts * self.of_expert as f32;
        let pieces = (self.owed as u32).max(1).min(self.written.wrapping_sub(self.shown));
        self.owed = (self.owed - pieces as f32).clamp(0.0, 1.0);
        self.shown = self.shown.wrapping_add(pieces);
        if pieces > 0 { pieces as f32 / self.of_expert as f32 } else { 0.0 }
    }

    /// Experts all of whose pieces are before this one.
    fn before(&self, piece: u32) -> usize {
        self.ends.iter().take_while(|&&end| piece.wrapping_sub(end) as i32 >= 0).count()
    }
}

/// The first piece that has not come, by how many each block has copied.
fn first_missing(copied: [u32; ADMIT_BLOCKS]) -> u32 {
    let next = |(block, n): (usize, u32)| n.wrapping_mul(ADMIT_BLOCKS as u32).wrapping_add(block as u32);
    let earlier = |a: u32, b: u32| if a.wrapping_sub(b) as i32 > 0 { b } else { a };
    copied.into_iter().enumerate().map(next).reduce(earlier).expect("there are blocks")
}

/// Cuts runs into pieces of at most `most` bytes, a multiple of 16.
fn each_piece(runs: RunsToCopy, most: u32, mut put: impl FnMut(RunsToCopy)) {
    let RunsToCopy { to, from, bytes, count, from_pitch, to_pitch } = runs;
    let (runs_at_once, bytes_at_once) = ((most / bytes.max(1)).max(1), most.min(bytes.max(1)));
    for run in (0..count).step_by(runs_at_once as usize) {
        let count = runs_at_once.min(count - run);
        for at in (0..bytes).step_by(bytes_at_once as usize) {
            put(RunsToCopy {
                to: to + u64::from(run) * u64::from(to_pitch) + u64::from(at),
                from: from + u64::from(run) * u64::from(from_pitch) + u64::from(at),
                bytes: bytes_at_once.min(bytes - at),
                count,
                ..runs
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::random::Random;

    #[test]
    fn pieces_are_all_bytes_of_their_runs_once() {
        let mut random = Random(3);
        for _ in 0..200 {
            let mut number = |below: u64| 1 + (random.bits() % below) as u32;
            let (bytes, count, most) = (16 * number(300), number(9), 16 * number(200));
            let (from_pitch, to_pitch) = (bytes + 16 * number(5), bytes + 16 * number(5));
            let whole = RunsToCopy { to: 1 << 40, from: 1 << 20, bytes, count, from_pitch, to_pitch };
            let mut words = Vec::new();
            each_piece(whole, most, |piece| {
                assert!(piece.bytes * piece.count <= most && piece.bytes.is_multiple_of(16));
                for (run, at) in (0..piece.count).flat_map(|run| (0..piece.bytes).step_by(16).map(move |at| (run, at)))
                {
                    let from = piece.from + u64::from(run * piece.from_pitch + at);
                    words.push((from, piece.to + u64::from(run * piece.to_pitch + at)));
                }
            });
            words.sort_unstable();
            let all = (0..count).flat_map(|run| (0..bytes).step_by(16).map(move |at| (run, at)));
            let all = all.map(|(run, at)| {
                (whole.from + u64::from(run * from_pitch + at), whole.to + u64::from(run * to_pitch + at))
            });
            assert!(words.into_iter().eq(all), "{bytes} {count} {most}");
        }
    }

    #[test]
    fn pieces_are_counted_beyond_32_bits() {
        const { assert!(ADMIT_BLOCKS == 2 && (1u64 << 32).is_multiple_of(RING_PIECES as u64)) }
        let start = u32::MAX - 5;
        let mut queue = Queue { written: start, shown: start, ..Queue::default() };
        queue.push(4);
        queue.push(4);
        assert_eq!([queue.show(0.5), queue.show(0.6), queue.show(0.65), queue.show(9.0)], [0.5, 0.5, 0.75, 0.25]);
        assert_eq!((queue.shown, queue.show(1.0)), (start.wrapping_add(8), 0.0));
        // Of 8 pieces from an even number on, each block copies every other.
        let copied = |n: u32| [n.div_ceil(2), n / 2].map(|n| (start / 2).wrapping_add(n));
        for n in 0..=8 {
            let at = first_missing(copied(n));
            assert_eq!((at, queue.before(at)), (start.wrapping_add(n), n as usize / 4));
        }
        // One block may be ahead.
        assert_eq!(first_missing([copied(8)[0], copied(0)[1]]), start.wrapping_add(1));
        // A part of a piece is owed.
        let mut queue = Queue::default();
        queue.push(4);
        let shown: Vec<f32> = (0..4).map(|_| queue.show(0.4)).collect();
        assert_eq!(shown, [0.25, 0.5, 0.25, 0.0]);
        // A small expert comes at once, where any is to come.
        queue.push(1);
        assert_eq!([queue.show(0.0), queue.show(0.01), queue.show(0.01)], [0.0, 1.0, 0.0]);
    }

    #[test]
    fn experts_are_counted_once() {
        let mut admissions = Admissions::new(4, 8);
        let mut count = |ids: &[i32]| admissions.count(ids);
        assert_eq!(count(&[!1, !2, i32::MIN, 8, BY_LINK - 1]), (0.0, 0.0));
        assert_eq!(count(&[3, !1, 0, 3, 7, 0]), (3.0, 0.0));
        assert_eq!(count(&[3]), (1.0, 0.0));
        assert_eq!(count(&[0, 1, 2, BY_LINK + 3, BY_LINK + 3, BY_LINK + 4]), (3.0, 2.0));
    }

    #[test]
    fn a_busy_link_says_nothing_of_the_share() {
        assert_eq!([Shown::of(0.0, 2.0, true), Shown::of(0.5, 0.0, true)], [Shown::Nothing; 2]);
        assert_eq!([Shown::of(0.5, 2.0, true), Shown::of(0.5, 2.0, false)], [Shown::Some, Shown::All]);
    }

    #[test]
    fn the_share_goes_to_where_little_is_late() {
        // A layer is late if more comes than the link carries.
        for carries in [0.05f32, 0.2, 0.7] {
            let mut admissions = Admissions::new(4, 8);
            let mut late = 0;
            for layer in 0..4000 {
                admissions.shown = Shown::Some;
                let is_late = admissions.share > carries;
                late += u32::from(is_late && layer >= 2000);
                admissions.adjust(!is_late);
            }
            assert!((0.9..1.02).contains(&(admissions.share / carries)), "{carries}: {}", admissions.share);
            assert!((250..400).contains(&late), "{carries}: {late}");
        }
        // Where too little is sent, nothing says that more would come.
        let mut admissions = Admissions::new(4, 8);
        for shown in [Shown::All, Shown::Nothing] {
            admissions.shown = shown;
            admissions.adjust(true);
        }
        assert_eq!(admissions.share, SHARE);
        for (shown, came, end) in [(Shown::All, false, SHARES.0), (Shown::Some, true, SHARES.1)] {
            for _ in 0..1000 {
                admissions.shown = shown;
                admissions.adjust(came);
            }
            assert_eq!(admissions.share, end);
        }
    }
}
