//! Memory through which a pool's ranks agree, each perhaps a process of its own: where every expert is, and the way of
//! experts to each rank.
//!
//! ```text
//! first     its host writes places and their version, and sends experts to all ranks
//!           its device says with which pass all take a version (take_table)
//! others    their devices take it with that pass, copy what was sent to them, and count
//! ```
//!
//! So the others' hosts have nothing to do. A rank that is alone has the same memory for itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::admissions::Road;
use crate::cuda::{Address, Cuda, PinnedBuffer, SharedMemory, kernels};
use crate::experts::mailbox::LINE;
use crate::model::Share;
use crate::{Error, Result};

/// Lines of words: experts of each layer that are held, then what is agreed, then a line of each rank.
const HELD: usize = 0;
const VERSION: usize = 1;
const AGREED: usize = 2;
const FROM: usize = 3;
const BEGUN: usize = 4;
const TAKEN: usize = 5;

/// A rank that has not said where its memory is.
const ABSENT: u32 = u32::MAX;

/// What all ranks see.
pub(super) struct Board {
    share: Share,
    pub(super) places: PinnedBuffer<u64>, // [layers, experts]: the slot of each and 1; 0: in RAM
    words: PinnedBuffer<u32>,             // [TAKEN + ranks, 16]
    areas: Vec<Option<Area>>,             // [ranks]: those that this one uses
    memory: Option<SharedMemory>,         // `None`: the rank is alone
}

/// What is one rank's.
struct Area {
    road: Option<Road>,           // `None`: its user has it
    addresses: PinnedBuffer<u64>, // [1 + regions]: of its slots, and where its device sees the experts' memory
}

impl Board {
    /// Of `places` experts in `regions` of memory, `held` of each layer in VRAM. `first`: what the first rank's is
    /// [called](Board::path), of another.
    ///
    /// Errors: `Error::Resources`; `Error::Invalid` where the ranks do not hold as much.
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        (share, first): (Share, Option<&Path>),
        (places, regions): (usize, usize),
        held: usize,
    ) -> Result<Self> {
        let mut memory = match (share.is_whole(), share.rank, first) {
            (true, ..) => None,
            (false, 0, _) => Some(SharedMemory::new()?),
            (false, _, Some(path)) => Some(SharedMemory::open(path)?),
            (false, rank, None) => {
                return Err(Error::Invalid(format!(
                    "rank {rank} holds what the first one does: give the first one's pool"
                )));
            }
        };
        fn piece<T: bytemuck::Pod>(
            cuda: &Arc<Cuda>,
            memory: &mut Option<SharedMemory>,
            len: usize,
        ) -> Result<PinnedBuffer<T>> {
            memory.as_mut().map_or_else(|| PinnedBuffer::new(cuda, len), |memory| PinnedBuffer::shared(memory, len))
        }
        let places = piece(cuda, &mut memory, places)?;
        let words: PinnedBuffer<u32> = piece(cuda, &mut memory, (TAKEN + share.of) * LINE)?;
        let area = |rank: usize| {
            if let (Some(memory), false) = (&mut memory, share.rank == 0 || share.rank == rank) {
                memory.skip::<u64>(Road::RING);
                memory.skip::<u32>(Road::COUNTS);
                memory.skip::<u64>(1 + regions);
                return Ok(None);
            }
            let road =
                Road { ring: piece(cuda, &mut memory, Road::RING)?, counts: piece(cuda, &mut memory, Road::COUNTS)? };
            Ok(Some(Area { road: Some(road), addresses: piece(cuda, &mut memory, 1 + regions)? }))
        };
        let areas = (0..share.of).map(area).collect::<Result<_>>()?;
        let board = Self { share, places, words, areas, memory };
        if share.rank == 0 {
            board.word(HELD).store(held as u32, Ordering::Relaxed);
            (1..share.of).for_each(|rank| board.word(TAKEN + rank).store(ABSENT, Ordering::Release));
        } else if board.word(HELD).load(Ordering::Relaxed) as usize != held {
            return Err(Error::Invalid("the ranks' pools differ: give each as many bytes".into()));
        }
        Ok(board)
    }

    fn word(&self, line: usize) -> &std::sync::atomic::AtomicU32 {
        self.words.atomic(line * LINE)
    }

    fn address(&self, line: usize) -> Address<u32> {
        self.words.address().add(line * LINE)
    }

    /// By what the other ranks open it.
    pub(super) fn path(&self) -> Option<&Path> {
        self.memory.as_ref().map(SharedMemory::path)
    }

    /// Says where this rank's slots begin and where its device sees the experts' memory: from now on it is sent
    /// experts.
    pub(super) fn join(&mut self, slots: Address<u8>, regions: &[u64]) {
        let rank = self.share.rank;
        let addresses = &mut self.areas[rank].as_mut().expect("a rank has its own").addresses;
        addresses[0] = slots.to_u64();
        addresses[1..].copy_from_slice(regions);
        self.word(TAKEN + rank).store(0, Ordering::Release);
    }

    /// Whether all ranks are there and have taken this version.
    pub(super) fn have_taken(&self, version: u32) -> bool {
        (0..self.share.of).all(|rank| self.word(TAKEN + rank).load(Ordering::Acquire) == version)
    }

    /// The way to a rank, which the caller has from now on, where its slots begin, and where its device sees the
    /// experts' memory. Panics: called twice (a bug).
    pub(super) fn way_to(&mut self, rank: usize) -> (Road, Address<u8>, &[u64]) {
        let area = self.areas[rank].as_mut().expect("the first rank has all");
        let road = area.road.take().expect("taken once");
        (road, Address::of_another(area.addresses[0]), &area.addresses[1..])
    }

    /// This rank's own way, until it is taken.
    pub(super) fn road(&self) -> &Road {
        let area = self.areas[self.share.rank].as_ref().expect("a rank has its own");
        area.road.as_ref().expect("not yet taken")
    }

    /// Says that the places are of this version.
    pub(super) fn publish(&self, version: u32) {
        self.word(VERSION).store(version, Ordering::Release);
    }

    /// Where the first host writes the version of the places, and where this rank's device says which it has taken.
    pub(super) fn versions(&self) -> (Address<u32>, Address<u32>) {
        (self.address(VERSION), self.address(TAKEN + self.share.rank))
    }

    /// What the ranks' devices agree on.
    pub(super) fn agreed(&self) -> kernels::Agreed {
        let word = |line| if self.share.is_whole() { Address::NULL } else { self.address(line) };
        kernels::Agreed {
            version: word(AGREED),
            from: word(FROM),
            begun: word(BEGUN),
            is_first: (self.share.rank == 0).into(),
        }
    }
}
