//! One slice for all workers, each of which writes its own parts.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use super::{Team, Worker};

impl Team {
    /// `work(worker, rows, part)` on every worker, with its even share of the rows of `out` [rows, cols] and their
    /// elements. Panics: the last row is cut off.
    #[track_caller]
    pub fn each_share<T: Send + Sync>(
        &self,
        out: &mut [T],
        cols: usize,
        work: impl Fn(&Worker<'_>, Range<usize>, &mut [T]) + Sync,
    ) {
        let rows = out.len() / cols;
        assert_eq!(out.len(), rows * cols, "rows of {cols}");
        let out = Shared::new(out);
        self.run(&|worker| {
            let mine = worker.share(rows);
            // SAFETY: the workers' shares are disjoint, and `out` is borrowed for nothing else.
            let part = unsafe { out.slice_mut(mine.start * cols..mine.end * cols) };
            work(worker, mine, part);
        });
    }

    /// `work(i, chunk)` for every chunk of `cols` elements of `out`, on all workers. Panics: the last one is cut off.
    #[track_caller]
    pub fn each_chunk<T: Send + Sync>(&self, out: &mut [T], cols: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        self.each_share(out, cols, |_, mine, part| {
            mine.zip(part.chunks_exact_mut(cols)).for_each(|(i, chunk)| work(i, chunk));
        });
    }
}

/// A slice whose disjoint parts are written by several workers.
pub struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through unsafe methods whose contract is that no part is used by two threads unless all only
// read.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Takes the slice for as long as the view lives.
    pub fn new(data: &'a mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), _borrow: PhantomData }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part to write. Panics: the range ends after the slice.
    ///
    /// # Safety
    /// Until the part is dropped or the next [`Worker::barrier`], nothing else may read or write any element of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds as just checked; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }

    /// A part to read. Panics: the range ends after the slice.
    ///
    /// # Safety
    /// While the part lives, nothing may write any element of it.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds as just checked; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::topology::Topology;

    #[test]
    fn each_chunk_is_given_once_in_its_place() {
        let team = Team::new(&Topology::read().worker_cpus(3)).unwrap();
        for (chunks, cols) in [(0, 4), (1, 4), (2, 1), (7, 3), (100, 5)] {
            let mut out = vec![0; chunks * cols];
            team.each_chunk(&mut out, cols, |i, chunk| chunk.iter_mut().zip(i * cols..).for_each(|(o, v)| *o += v + 1));
            assert!(out.iter().enumerate().all(|(i, &value)| value == i + 1), "{chunks} of {cols}: {out:?}");
        }
    }

    #[test]
    #[should_panic(expected = "rows of 4")]
    fn a_chunk_that_is_cut_off_is_a_bug() {
        Team::new(&[0]).unwrap().each_chunk(&mut [0; 7], 4, |_, _| ());
    }
}
