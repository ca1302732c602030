//! Anonymous memory in huge pages, how fast a team can read it, and what the allocator keeps.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use memmap2::{Advice, MmapMut};

use crate::machine::workers::Team;
use crate::{Error, Result};

/// Arenas of the allocator at most: what is freed in one is of no use to the others.
const ARENAS: libc::c_int = 2;

/// Keeps the heaps of a process few. To be called before it has threads.
pub fn few_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's; any value is allowed at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Gives freed memory back to the system: the allocator keeps what lies below something that is still used.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches free memory only, under the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The size of the pages that the kernel maps a memory with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB, whatever the system's setting.
    Small,
    /// 2 MiB where the system allows them.
    Huge,
}

const HUGE_PAGE: usize = 2 << 20;

/// NUMA nodes of any kernel.
const MAX_NODES: usize = 1024;

fn mask_of(nodes: &[usize]) -> [u64; MAX_NODES / 64] {
    let mut mask = [0; MAX_NODES / 64];
    for &node in nodes.iter().filter(|&&node| node < MAX_NODES - 1) {
        mask[node / 64] |= 1 << (node % 64);
    }
    mask
}

/// Runs `read`. Pages of files that this thread is the first to read there come from all these NUMA nodes in turn;
/// where the thread is bound to some, or the system refuses, from where it liked before.
pub fn interleaved<T>(nodes: &[usize], read: impl FnOnce() -> T) -> T {
    let set = |policy: libc::c_int, nodes: &[usize]| {
        // SAFETY: reads a mask that is as long as it is told.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, policy, mask_of(nodes).as_ptr(), MAX_NODES) == 0 }
    };
    let is_free = nodes.len() > 1 && policy() == Some(libc::MPOL_DEFAULT);
    let is_set = is_free && set(libc::MPOL_INTERLEAVE, nodes);
    let result = read();
    if is_set {
        set(libc::MPOL_DEFAULT, &[]);
    }
    result
}

/// How this thread chooses the nodes of new pages. `None` where the system does not tell.
fn policy() -> Option<libc::c_int> {
    let mut policy = 0;
    // SAFETY: writes one number.
    let result = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, 0usize, 0usize, 0usize, 0usize) };
    (result == 0).then_some(policy)
}

/// Zeroed numbers outside the allocator's memory, from a 2 MiB boundary on; pages are taken when first written. A
/// [`Heap`](super::heap::Heap) hands them out.
pub struct Buffer<T> {
    map: Option<MmapMut>, // none: no numbers
    first: usize,         // byte of the map that is on the boundary
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// `len` zeros in huge pages. Errors: `Error::Resources` when the system refuses.
    pub(super) fn zeros(len: usize) -> Result<Self> {
        Self::with_pages(len, Pages::Huge)
    }

    /// As [`Buffer::zeros`], in pages of a chosen size.
    pub(super) fn with_pages(len: usize, pages: Pages) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<T>());
        let map = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE)).map_err(|e| {
            Error::Resources(format!(
                "{} MiB of memory could not be had ({e}): lower --max-context, choose a smaller model or raise \
                 `ulimit -v`",
                bytes.div_ceil(1 << 20)
            ))
        })?;
        let first = map.as_ptr().addr().next_multiple_of(HUGE_PAGE) - map.as_ptr().addr();
        let advice = if pages == Pages::Huge { Advice::HugePage } else { Advice::NoHugePage };
        // Advice: where the system refuses it, the same memory is a little slower.
        let _ = map.advise_range(advice, first, bytes);
        Ok(Self { map: Some(map), first, len, element: PhantomData })
    }

    /// No numbers in place of `len`, where memory is only counted.
    pub(super) fn planned(len: usize) -> Self {
        Self { len, ..Self::default() }
    }

    /// Numbers that were asked for: all that are there, but in a plan.
    pub(super) fn wanted(&self) -> usize {
        self.len
    }

    /// Asks for pages of these elements, none of them touched yet, from one NUMA node as long as it has some.
    ///
    /// Errors: the system refuses, as in some containers; pages then go to the node of the thread that writes
    /// them first.
    pub fn prefer(&self, elements: Range<usize>, node: usize) -> io::Result<()> {
        self.place(elements, libc::MPOL_PREFERRED, &[node])
    }

    /// Asks for pages, none of them touched yet, from all these NUMA nodes in turn. Errors: as
    /// [`prefer`](Buffer::prefer).
    pub fn interleave(&self, nodes: &[usize]) -> io::Result<()> {
        self.place(0..self.len, libc::MPOL_INTERLEAVE, nodes)
    }

    fn place(&self, elements: Range<usize>, policy: libc::c_int, nodes: &[usize]) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let mask = mask_of(nodes);
        // A page on the border of two parts belongs to the second.
        let page = |element: usize| (self.first + element * size_of::<T>()) / 4096 * 4096;
        let (from, to) = (page(elements.start), page(elements.end).max(page(elements.start)));
        let to = if elements.end == self.len { map.len() } else { to };
        // SAFETY: the range is inside the map, and where pages lie changes nothing about what is in them.
        match unsafe {
            libc::syscall(libc::SYS_mbind, map.as_ptr().add(from), to - from, policy, mask.as_ptr(), MAX_NODES, 0)
        } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Keeps it in memory, taking all pages now. Errors: the limit of locked memory is too low.
    pub fn lock(&self) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        // SAFETY: the range is inside the map; locking changes nothing about what is in it.
        match unsafe { libc::mlock(map.as_ptr().add(self.first).cast(), self.len * size_of::<T>()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The share of these bytes' surroundings, 2 MiB each, that one map holds in huge pages, from 0 to 1; each byte is read
/// first.
///
/// `None` where the system does not tell.
pub fn huge_share(spots: &[&u8]) -> Option<f64> {
    let first = std::ptr::from_ref(*spots.first()?).addr();
    spots.iter().for_each(|&spot| _ = std::hint::black_box(*spot));
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    let mut huge_kib = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), value) = (words.next(), words.next()) else { continue };
        let range = name.split_once('-').map(|(a, b)| (usize::from_str_radix(a, 16), usize::from_str_radix(b, 16)));
        if let Some((Ok(from), Ok(to))) = range {
            inside = (from..to).contains(&first);
        } else if inside && matches!(name, "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:") {
            huge_kib += value?.parse::<usize>().ok()?;
        }
    }
    Some((huge_kib * 1024 / HUGE_PAGE) as f64 / spots.len() as f64).map(|share| share.min(1.0))
}

/// The NUMA nodes of up to `samples` pages of `bytes`, evenly spread; a negative number is a page that is not there.
///
/// `None` where the system does not tell.
pub fn nodes_of(bytes: &[u8], samples: usize) -> Option<Vec<i32>> {
    let count = samples.min(bytes.len().div_ceil(4096));
    let mut pages: Vec<*const u8> = (0..count).map(|i| bytes[bytes.len() / count * i..].as_ptr()).collect();
    let mut nodes = vec![-1i32; count];
    let none = std::ptr::null::<i32>();
    // SAFETY: without target nodes the call only fills `nodes`, which is as long as `pages`.
    let result =
        unsafe { libc::syscall(libc::SYS_move_pages, 0, count, pages.as_mut_ptr(), none, nodes.as_mut_ptr(), 0) };
    (result == 0).then_some(nodes)
}

impl<T: Pod> Default for Buffer<T> {
    /// Nothing.
    fn default() -> Self {
        Self { map: None, first: 0, len: 0, element: PhantomData }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.map {
            Some(map) => bytemuck::cast_slice(&map[self.first..][..self.len * size_of::<T>()]),
            None => &[],
        }
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.map {
            Some(map) => bytemuck::cast_slice_mut(&mut map[self.first..][..self.len * size_of::<T>()]),
            None => &mut [],
        }
    }
}

/// Bytes of one timed stretch: milliseconds, so that on a shared machine some are undisturbed.
const STRETCH: usize = 64 << 20;

/// GB/s (10^9 bytes) that the team reads `total_bytes` of fresh memory with, all workers at once: the best stretch of
/// `passes`.
///
/// `total_bytes` should be several times the last-level cache. Errors: `Error::Resources` when there is no such memory.
pub fn read_bandwidth(team: &Team, total_bytes: usize, pages: Pages, passes: usize) -> Result<f64> {
    let mut memory = Buffer::<u8>::with_pages(total_bytes.next_multiple_of(STRETCH), pages)?;
    // Pages go to the node of the thread that writes them first.
    for stretch in memory.chunks_exact_mut(STRETCH) {
        team.each_share(stretch, 1, |_, _, part| part.fill(1));
    }
    let mut best = Duration::MAX;
    let sink = AtomicU64::new(0);
    for stretch in (0..passes).flat_map(|_| memory.chunks_exact(STRETCH)) {
        let start = Instant::now();
        team.run(&|worker| {
            sink.fetch_or(read(&stretch[worker.share(STRETCH)]), Relaxed);
        });
        best = best.min(start.elapsed());
    }
    std::hint::black_box(sink.into_inner());
    Ok(STRETCH as f64 / best.as_secs_f64() / 1e9)
}

/// Touches every byte with the widest loads there are.
pub fn read(part: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        // Intrinsics: left to itself the compiler spills these accumulators, and a third of the bandwidth is lost.
        #[target_feature(enable = "avx512f")]
        fn avx512(part: &[u8]) -> u64 {
            let mut acc = [_mm512_setzero_si512(); 4];
            for block in part.as_chunks::<256>().0 {
                for i in 0..4 {
                    // SAFETY: 64 bytes at 64 * i of 256.
                    acc[i] = _mm512_or_si512(acc[i], unsafe { _mm512_loadu_si512(block.as_ptr().add(64 * i).cast()) });
                }
            }
            _mm512_reduce_or_epi64(_mm512_or_si512(_mm512_or_si512(acc[0], acc[1]), _mm512_or_si512(acc[2], acc[3])))
                as u64
        }
        #[target_feature(enable = "avx2")]
        fn avx2(part: &[u8]) -> u64 {
            let mut acc = [_mm256_setzero_si256(); 4];
            for block in part.as_chunks::<128>().0 {
                for i in 0..4 {
                    // SAFETY: 32 bytes at 32 * i of 128.
                    acc[i] = _mm256_or_si256(acc[i], unsafe { _mm256_loadu_si256(block.as_ptr().add(32 * i).cast()) });
                }
            }
            let any = _mm256_or_si256(_mm256_or_si256(acc[0], acc[1]), _mm256_or_si256(acc[2], acc[3]));
            (_mm256_extract_epi64(any, 0)
                | _mm256_extract_epi64(any, 1)
                | _mm256_extract_epi64(any, 2)
                | _mm256_extract_epi64(any, 3)) as u64
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
    part.as_chunks::<8>().0.iter().fold(0, |acc, bytes| acc | u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        for pages in [Pages::Small, Pages::Huge] {
            let mut memory = Buffer::<u8>::with_pages(5 << 20, pages).unwrap();
            assert_eq!((memory.len(), memory.as_ptr() as usize % HUGE_PAGE), (5 << 20, 0));
            assert!(memory.iter().all(|&b| b == 0));
            memory.fill(7);
            assert_eq!(memory[memory.len() - 1], 7);
        }
        assert!(Buffer::<f32>::zeros(1 << 50).is_err() && Buffer::<f32>::zeros(usize::MAX).is_err());
        assert!(Buffer::<f32>::zeros(0).unwrap().is_empty());
    }

    #[test]
    fn tells_huge_pages_from_small_ones() {
        let share = |pages| {
            let mut memory = Buffer::<u8>::with_pages(16 << 20, pages).unwrap();
            memory.fill(1);
            let spots: Vec<&u8> = memory.iter().skip(1 << 20).step_by(4 << 20).collect();
            huge_share(&spots)
        };
        match (crate::machine::topology::Topology::read().huge_pages.as_str(), share(Pages::Huge)) {
            ("never", _) | (_, None) => {
                eprintln!("skipped: tells_huge_pages_from_small_ones: this system gives none, or does not tell")
            }
            (_, huge) => assert_eq!((huge, share(Pages::Small)), (Some(1.0), Some(0.0))),
        }
    }

    #[test]
    fn a_buffer_is_zeroed_and_on_the_nodes_it_asked_for() {
        let seats = crate::machine::topology::Topology::read().seats(2);
        let team = Team::on_nodes(&seats).unwrap();
        let mut memory = Buffer::<f32>::zeros(3 << 20).unwrap();
        let half = memory.len() / 2;
        if team.nodes().len() > 1 {
            for (i, &node) in team.nodes().iter().enumerate() {
                memory.prefer(i * half..(i + 1) * half, node).unwrap();
            }
        }
        // Written, not only read: pages that are only read may all be one.
        memory.iter_mut().for_each(|x| *x += 0.0);
        assert!(memory.iter().all(|&x| x == 0.0));
        let [first, second] = team.nodes() else {
            return eprintln!(
                "skipped: a_buffer_is_zeroed_and_on_the_nodes_it_asked_for: this needs two NUMA nodes with CPUs and \
                 memory"
            );
        };
        let nodes = nodes_of(bytemuck::cast_slice(&memory), 64).expect("move_pages");
        let share = |nodes: &[i32], on: usize| nodes.iter().filter(|&&node| node == on as i32).count();
        assert!(share(&nodes[..32], *first) > 28 && share(&nodes[32..], *second) > 28, "{nodes:?}");
    }

    #[test]
    fn what_is_read_comes_from_all_nodes_and_what_follows_does_not() {
        let own = crate::machine::topology::Topology::read().memory_nodes()[0];
        let Some(before) = policy() else {
            return eprintln!(
                "skipped: what_is_read_comes_from_all_nodes_and_what_follows_does_not: this system does not tell"
            );
        };
        // One node twice: some, on any machine.
        let within = interleaved(&[own, own], policy);
        assert!(within == Some(libc::MPOL_INTERLEAVE) || within == Some(before), "{within:?}");
        assert_eq!((policy(), interleaved(&[own], policy)), (Some(before), Some(before)));
    }

    #[test]
    fn bandwidth_is_a_number() {
        let team = Team::new(&crate::machine::topology::Topology::read().worker_cpus(2)).unwrap();
        assert!(read_bandwidth(&team, 1 << 20, Pages::Huge, 1).unwrap() > 0.01);
    }
}
