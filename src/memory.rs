//! Anonymous memory in huge pages, and how fast a team can read it.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::workers::{Shared, Team};
use crate::{Error, Result};

/// The size of the pages that the kernel maps a memory with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB, whatever the system's setting.
    Small,
    /// 2 MiB where the system allows them.
    Huge,
}

/// Zeroed anonymous memory that starts on a 2 MiB boundary.
pub struct Memory {
    start: *mut u8,
    len: usize,
    mapped: (*mut libc::c_void, usize),
}

// SAFETY: the mapping is owned like a Box; shared references only read.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Errors: `Error::Resources` when the system refuses.
    pub fn new(len: usize, pages: Pages) -> Result<Self> {
        let size = len.next_multiple_of(HUGE_PAGE) + HUGE_PAGE;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(Error::Resources(format!("cannot map {} MiB: {}", size >> 20, std::io::Error::last_os_error())));
        }
        let start = mapped.cast::<u8>().map_addr(|a| a.next_multiple_of(HUGE_PAGE));
        let advice = if pages == Pages::Huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range is inside the mapping; advice, refused or not, changes no content.
        unsafe { libc::madvise(start.cast(), size - HUGE_PAGE, advice) };
        Ok(Self { start, len, mapped: (mapped, size) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping this value made and owns.
        unsafe { libc::munmap(self.mapped.0, self.mapped.1) };
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are inside the mapping and live as long as it.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; exclusive through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// GB/s (10^9 bytes) that the team reads `total_bytes` of fresh memory with, all workers at once: the best of `passes`.
///
/// `total_bytes` should be several times the last-level cache. Errors: `Error::Resources` when there is no such memory.
pub fn read_bandwidth(team: &Team, total_bytes: usize, pages: Pages, passes: usize) -> Result<f64> {
    let mut memory = Memory::new(total_bytes, pages)?;
    let len = memory.len();
    let view = Shared::new(&mut memory);
    // Pages come to the node of whoever writes them first.
    team.run(&|worker| {
        // SAFETY: shares are disjoint.
        unsafe { view.slice_mut(worker.share(len)) }.fill(1);
    });
    let mut best = Duration::MAX;
    let sink = AtomicU64::new(0);
    for _ in 0..passes {
        let start = Instant::now();
        team.run(&|worker| {
            // SAFETY: nobody writes any more.
            let part = unsafe { view.slice(worker.share(len)) };
            sink.fetch_xor(read(part), Relaxed);
        });
        best = best.min(start.elapsed());
    }
    std::hint::black_box(sink.into_inner());
    Ok(total_bytes as f64 / best.as_secs_f64() / 1e9)
}

/// Touches every byte with the widest loads there are.
fn read(part: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(part: &[u8]) -> u64 {
            fold::<64>(part)
        }
        #[target_feature(enable = "avx2")]
        fn avx2(part: &[u8]) -> u64 {
            fold::<32>(part)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            return unsafe { avx512(part) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: just detected.
            return unsafe { avx2(part) };
        }
    }
    fold::<16>(part)
}

/// Four accumulators of `N` bytes; the compiler makes them registers.
#[inline(always)]
fn fold<const N: usize>(part: &[u8]) -> u64 {
    let mut acc = [[0u64; 32]; 1];
    let (lines, _) = part.as_chunks::<256>();
    for line in lines {
        for (acc, bytes) in acc[0].iter_mut().zip(line.as_chunks::<8>().0) {
            *acc |= u64::from_ne_bytes(*bytes);
        }
    }
    acc[0].iter().fold(0, |a, b| a ^ b).wrapping_add(N as u64)
}
