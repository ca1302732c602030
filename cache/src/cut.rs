//! Mapped files that are cut off while they are used: the system's answer is SIGBUS, ours a sentence that names the
//! file.
//!
//! A signal handler may neither allocate nor lock, so what it has to say and to remove is written down beforehand, in
//! tables of fixed size.
#![allow(unsafe_code)] // the handler

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::*};

/// Maps that are known at once; one beyond them ends the process without words.
const MAPS: usize = 1024;
/// Files to remove that are known at once; one beyond them is left behind.
const UNFINISHED: usize = 8;
/// A path and what is said about it.
const TEXT_BYTES: usize = libc::PATH_MAX as usize + 256;

static TABLE: [AddressSlot; MAPS] = [const { AddressSlot::free() }; MAPS];
static TO_REMOVE: [AddressSlot; UNFINISHED] = [const { AddressSlot::free() }; UNFINISHED];

/// An address range and a text that ends with a zero. Pages of slots that were never used take no memory.
struct AddressSlot {
    start: AtomicUsize, // FREE, TAKEN while the rest is written, else an address
    end: AtomicUsize,
    text: [AtomicU8; TEXT_BYTES],
}

const FREE: usize = 0;
const TAKEN: usize = 1;

impl AddressSlot {
    const fn free() -> Self {
        Self { start: AtomicUsize::new(FREE), end: AtomicUsize::new(0), text: [const { AtomicU8::new(0) }; TEXT_BYTES] }
    }

    fn holds(&self, address: usize) -> bool {
        let start = self.start.load(Acquire);
        start > TAKEN && (start..self.end.load(Relaxed)).contains(&address)
    }

    fn bytes(&self) -> usize {
        self.text.iter().position(|byte| byte.load(Relaxed) == 0).unwrap_or(0)
    }
}

/// A line in one of the tables, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Listed(&'static AtomicUsize);

impl Listed {
    /// What to say when a page of `map` is not there any more: what happened to the file, and `remedy`.
    pub(crate) fn map(map: &[u8], path: &Path, remedy: &str) -> Option<Self> {
        let end = format!(" was cut off, or could not be read, while it was used; {remedy}\n");
        let printable =
            path.as_os_str().as_bytes().iter().map(|&byte| if byte.is_ascii_control() { b'?' } else { byte });
        let start = map.as_ptr().addr();
        Self::add(&TABLE, start..start + map.len(), b"error: ".iter().copied().chain(printable).chain(end.bytes()))
    }

    /// A file that is of no use to anyone when this process ends.
    pub(crate) fn unfinished(path: &Path) -> Option<Self> {
        let path = std::path::absolute(path).ok()?;
        Self::add(&TO_REMOVE, usize::MAX..usize::MAX, path.as_os_str().as_bytes().iter().copied())
    }

    /// `None`: the table is full, or the text too long.
    fn add(
        table: &'static [AddressSlot],
        range: std::ops::Range<usize>,
        text: impl Iterator<Item = u8> + Clone,
    ) -> Option<Self> {
        if text.clone().count() >= TEXT_BYTES {
            return None;
        }
        let slot = table.iter().find(|slot| slot.start.compare_exchange(FREE, TAKEN, AcqRel, Relaxed).is_ok())?;
        slot.text.iter().zip(text.chain([0])).for_each(|(to, byte)| to.store(byte, Relaxed));
        slot.end.store(range.end, Relaxed);
        slot.start.store(range.start, Release);
        Some(Self(&slot.start))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.store(FREE, Release);
    }
}

/// From now on this process ends with a sentence and code 1, and leaves nothing unfinished, when a file that it has
/// mapped is cut off.
///
/// For a program's start: what a signal does is not for a library to change.
pub fn end_in_words() {
    // Not on the alternate stack: Rust's is so small that with AVX-512's or AMX's registers saved on it nothing else
    // fits. SAFETY: an all-zero sigaction is an empty one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction =
        on_bus_error as extern "C" fn(libc::c_int, *const libc::siginfo_t, *mut libc::c_void) as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for, and calls async-signal-safe functions only.
    unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *const libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system hands over what it knows of the signal; what it sent itself has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    match TABLE.iter().find(|slot| code > 0 && slot.holds(address)) {
        Some(slot) => end(slot),
        // Not one of ours: what it would have done without us, at once, or when the instruction is tried again.
        // SAFETY: both are async-signal-safe.
        None => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
    }
}

/// Says what `slot` has to say, removes what is unfinished and ends the process.
fn end(slot: &AddressSlot) -> ! {
    static ENDING: AtomicBool = AtomicBool::new(false);
    // Other threads meet the same end of the file.
    while ENDING.swap(true, AcqRel) {
        // SAFETY: async-signal-safe.
        unsafe { libc::pause() };
    }
    for unfinished in TO_REMOVE.iter().filter(|slot| slot.start.load(Acquire) > TAKEN) {
        // SAFETY: async-signal-safe, and the text ends with a zero.
        unsafe { libc::unlink(unfinished.text.as_ptr().cast()) };
    }
    let mut stderr = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: async-signal-safe; `stderr` is one descriptor, and `slot` has as many bytes. A reader who is stuck does
    // not keep us.
    unsafe {
        if libc::poll(&mut stderr, 1, 1000) == 1 {
            libc::write(libc::STDERR_FILENO, slot.text.as_ptr().cast(), slot.bytes());
        }
        libc::_exit(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_found_by_its_addresses_while_it_is_listed() {
        let memory = [0u8; 100];
        let inside = memory[50..].as_ptr().addr();
        let find = || TABLE.iter().find(|slot| slot.holds(inside));
        assert!(find().is_none());
        let listed = Listed::map(&memory, Path::new("/a\x1bb"), "try again").unwrap();
        let slot = find().unwrap();
        let text: Vec<u8> = slot.text[..slot.bytes()].iter().map(|byte| byte.load(Relaxed)).collect();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "error: /a?b was cut off, or could not be read, while it was used; try again\n"
        );
        assert!(!slot.holds(memory.as_ptr().addr() + 100) && !slot.holds(memory.as_ptr().addr() - 1));
        drop(listed);
        assert!(find().is_none());
    }

    #[test]
    fn a_full_table_and_a_long_path_are_left_out() {
        let many: Vec<_> = (0..UNFINISHED + 1).map(|i| Listed::unfinished(Path::new(&format!("/{i}")))).collect();
        assert!(many.iter().filter(|listed| listed.is_some()).count() <= UNFINISHED && many[UNFINISHED].is_none());
        drop(many);
        assert!(Listed::unfinished(Path::new("/x")).is_some());
        assert!(Listed::map(&[0], Path::new(&"x".repeat(TEXT_BYTES)), "").is_none());
    }
}
