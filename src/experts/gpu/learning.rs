//! Which experts are chosen: counts on their way from the device to the file that the next start reads.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::cuda::{Address, Cuda, CudaEvent, DeviceBuffer, PinnedBuffer};
use crate::experts::popularity::Popularity;

/// Counts of chosen experts on their way from the device.
pub(super) struct Learning {
    popularity: Popularity,
    path: Option<PathBuf>,
    counts: DeviceBuffer<u32>,   // [layers, experts], since the start
    snapshot: PinnedBuffer<u32>, // the same, as they were some passes ago
    taken: CudaEvent,            // when `snapshot` had come
    before: Vec<u32>,            // the snapshot before
    passes: u32,
    saved: Instant,
}

/// Passes from one look at the counts to the next.
const LOOK: u32 = 64;

/// Counts are saved so often, and at the end.
const SAVE: Duration = Duration::from_secs(60);

impl Learning {
    /// Goes on from what is known of `all` experts. Counts are saved in `path`, if there is one.
    pub(super) fn new(cuda: &Arc<Cuda>, popularity: Popularity, path: Option<PathBuf>, all: usize) -> Result<Self> {
        Ok(Self {
            popularity,
            path,
            counts: DeviceBuffer::zeros(cuda, all)?,
            snapshot: PinnedBuffer::new(cuda, all)?,
            taken: CudaEvent::new(cuda)?,
            before: vec![0; all],
            passes: 0,
            saved: Instant::now(),
        })
    }

    /// Where choices are counted, from expert `first` of all layers on.
    pub(super) fn counts(&self, first: usize) -> Address<u32> {
        self.counts.address().add(first)
    }

    /// Called before every pass.
    pub(super) fn pass(&mut self, cuda: &Cuda, top_k: usize) -> Result<()> {
        self.passes += 1;
        match self.passes.is_multiple_of(LOOK) {
            true => self.look(cuda, top_k),
            false => Ok(()),
        }
    }

    /// Takes in the last snapshot, and asks for the next.
    fn look(&mut self, cuda: &Cuda, top_k: usize) -> Result<()> {
        if self.passes > LOOK {
            cuda.wait_host(&self.taken)?; // long ago
            let new: Vec<u32> =
                self.snapshot.iter().zip(&self.before).map(|(now, before)| now.wrapping_sub(*before)).collect();
            self.before.copy_from_slice(&self.snapshot);
            self.popularity.add(&new, top_k);
        }
        cuda.download(&cuda.compute, self.counts.address(), &mut self.snapshot);
        cuda.record(&self.taken, &cuda.compute);
        if self.saved.elapsed() > SAVE {
            self.save();
        }
        Ok(())
    }

    /// Not saved is forgotten, not wrong.
    fn save(&mut self) {
        self.saved = Instant::now();
        if let Some(path) = &self.path {
            let _ = self.popularity.save(path);
        }
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        self.save();
    }
}
