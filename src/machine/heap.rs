//! Where a model takes the CPU's memory: a heap hands out zeros and counts them. That of a plan counts the same bytes
//! and hands out nothing, so that constructors, run on it, tell what they take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytemuck::{Pod, Zeroable};

use super::memory::Buffer;
use crate::{Error, Result};

/// Hands out zeros, and counts them. Clones count together.
#[derive(Clone, Default)]
pub struct Heap(Arc<Counts>);

#[derive(Default)]
struct Counts {
    is_plan: bool,
    vec_bytes: AtomicU64,    // from the allocator
    buffer_bytes: AtomicU64, // in maps of their own
}

impl Heap {
    /// A heap that only counts: what it hands out is empty.
    pub fn plan() -> Self {
        Self(Arc::new(Counts { is_plan: true, ..Counts::default() }))
    }

    /// Whether nothing is handed out, only counted.
    pub fn is_plan(&self) -> bool {
        self.0.is_plan
    }

    /// Bytes handed out; [`u64::MAX`]: more than that.
    pub fn bytes(&self) -> u64 {
        self.vec_bytes().saturating_add(self.0.buffer_bytes.load(Relaxed))
    }

    /// Of [`bytes`](Heap::bytes) those of the process's allocator: all that is not in maps of its own.
    pub fn vec_bytes(&self) -> u64 {
        self.0.vec_bytes.load(Relaxed)
    }

    /// Counts memory of this shape that was taken elsewhere and is kept.
    pub fn count<T>(&self, shape: &[usize]) {
        add(&self.0.vec_bytes, bytes::<T>(shape));
    }

    /// Zeros of this shape. Errors: `Error::Resources` when the allocator has no more.
    pub fn zeros<T: Zeroable>(&self, shape: &[usize]) -> Result<Vec<T>> {
        self.zeros_for(0, product(shape))
    }

    /// `len` zeros in place of `before` that are given up. Errors: as [`zeros`](Heap::zeros).
    pub fn zeros_for<T: Zeroable>(&self, before: usize, len: usize) -> Result<Vec<T>> {
        let (before, bytes) = (bytes::<T>(&[before]), bytes::<T>(&[len]));
        add(&self.0.vec_bytes, bytes.saturating_sub(before));
        bytemuck::allocation::try_zeroed_vec(if self.is_plan() { 0 } else { len }).map_err(|()| {
            Error::Resources(format!(
                "{} MiB of memory could not be had: lower --max-batch-tokens or --max-sequences, or raise `ulimit -v`",
                bytes.div_ceil(1 << 20)
            ))
        })
    }

    /// Zeros of this shape in huge pages. Errors: as [`Buffer::zeros`].
    pub fn buffer<T: Pod>(&self, shape: &[usize]) -> Result<Buffer<T>> {
        let mut buffer = Buffer::default();
        self.grow(&mut buffer, shape)?;
        Ok(buffer)
    }

    /// Makes a buffer at least as long as this shape; what was in a shorter one is lost. Errors: as [`Buffer::zeros`].
    pub fn grow<T: Pod>(&self, buffer: &mut Buffer<T>, shape: &[usize]) -> Result<()> {
        let (before, len) = (buffer.wanted(), product(shape));
        if len <= before {
            return Ok(());
        }
        *buffer = if self.is_plan() { Buffer::planned(len) } else { Buffer::zeros(len)? };
        add(&self.0.buffer_bytes, bytes::<T>(&[len]) - bytes::<T>(&[before]));
        Ok(())
    }
}

/// Configurations that lie have shapes whose product no number holds.
fn product(shape: &[usize]) -> usize {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |all, &n| all.saturating_mul(n)) }
}

fn bytes<T>(shape: &[usize]) -> u64 {
    product(shape).saturating_mul(size_of::<T>()) as u64
}

fn add(counter: &AtomicU64, bytes: u64) {
    let _ = counter.fetch_update(Relaxed, Relaxed, |before| Some(before.saturating_add(bytes)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_counts_what_is_handed_out() {
        let count = |heap: &Heap| {
            let vec = heap.zeros::<f32>(&[3, 5]).unwrap();
            let mut buffer = heap.buffer::<u8>(&[7, 11]).unwrap();
            heap.grow(&mut buffer, &[10]).unwrap();
            heap.grow(&mut buffer, &[100]).unwrap();
            heap.count::<f32>(&[2]);
            (vec.len(), buffer.len())
        };
        let (real, plan) = (Heap::default(), Heap::plan());
        assert_eq!((count(&real), count(&plan)), ((15, 100), (0, 0)));
        assert_eq!((real.bytes(), real.vec_bytes()), (60 + 100 + 8, 68));
        assert_eq!((plan.bytes(), plan.vec_bytes()), (60 + 100 + 8, 68));
    }

    #[test]
    fn shapes_without_bounds_are_counted_and_refused() {
        let plan = Heap::plan();
        for _ in 0..3 {
            assert!(plan.zeros::<f32>(&[usize::MAX, 2]).unwrap().is_empty());
            assert!(plan.buffer::<f32>(&[1 << 40, 1 << 40]).unwrap().is_empty());
        }
        assert_eq!(plan.bytes(), u64::MAX);
        let real = Heap::default();
        assert!(real.zeros::<f32>(&[usize::MAX, 2]).is_err() && real.buffer::<f32>(&[1 << 40, 1 << 40]).is_err());
        assert!(real.zeros::<f32>(&[usize::MAX, 2, 0]).unwrap().is_empty());
    }
}
