//! Where the program mapped files. Hints: a mapping may be gone or replaced.

use crate::errno::PreservedErrno;
use crate::high_descriptor;
use crate::kernel;
use crate::locks;
use crate::next;
use libc::{c_int, off64_t};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// Smaller mappings are not recorded.
const BYTES_MIN: usize = 16 << 10;
/// Mappings that are recorded. Of a program with more, some sends are attributed to other memory.
const ENTRIES: usize = 256;
/// Start of an entry while a thread writes the entry. Not the address of a page.
const IN_USE: usize = 1;

/// First address of each mapping. 0: no entry.
static STARTS: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];
/// The address after each mapping.
static ENDS: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];
/// The descriptor from which each mapping was made. The program can close it.
static DESCRIPTORS: [AtomicI32; ENTRIES] = [const { AtomicI32::new(-1) }; ENTRIES];
/// For a descriptor of the interposer: inode of its file, which identifies the file. 0: the
/// descriptor is the program's.
static KEPT_INODES: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];
/// Whether the interposer duplicates the descriptors, because the program closes them after
/// mapping.
static KEEPS: AtomicBool = AtomicBool::new(false);
/// Where each mapping begins in its file.
static OFFSETS: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];
/// One more than the highest entry that was ever used.
static END: AtomicUsize = AtomicUsize::new(0);

/// A recorded mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Bytes from the address to the end of the mapping.
    pub available: usize,
    /// The descriptor from which the mapping was made.
    pub fd: c_int,
}

/// Duplicates the descriptors of mappings from now on.
pub fn keep_descriptors() {
    KEEPS.store(true, Relaxed);
}

/// Records a mapping of a file, from an offset in the file.
pub fn add(start: usize, bytes: usize, fd: c_int, offset: off64_t) {
    if bytes < BYTES_MIN {
        return;
    }
    let kept = (KEEPS.load(Relaxed) && !locks::are_used()).then(|| keep(fd)).flatten();
    if !enter(
        start,
        bytes,
        kept.map_or(fd, |(kept, _)| kept),
        offset,
        kept.map_or(0, |(_, inode)| inode),
    ) && let Some((kept, inode)) = kept
    {
        close_kept(kept, inode);
    }
}

/// Duplicates a descriptor. Returns the duplicate and the inode of its file.
fn keep(fd: c_int) -> Option<(c_int, u64)> {
    let kept = high_descriptor::duplicate(fd)?;
    let inode = kernel::status(kept).map_or(0, |status| status.st_ino);
    if inode == 0 {
        // SAFETY: the descriptor is this function's.
        unsafe { next::close(kept) };
        return None;
    }
    Some((kept, inode))
}

/// Closes a duplicate, unless the program opened another file in its place.
fn close_kept(fd: c_int, inode: u64) {
    if !locks::are_used() && kernel::status(fd).is_some_and(|status| status.st_ino == inode) {
        // SAFETY: the descriptor is the interposer's.
        unsafe { next::close(fd) };
    }
}

/// Enters a mapping. Returns false if the table is full.
fn enter(start: usize, bytes: usize, fd: c_int, offset: off64_t, kept_inode: u64) -> bool {
    for entry in 0..ENTRIES {
        if STARTS[entry].compare_exchange(0, IN_USE, AcqRel, Relaxed).is_ok() {
            ENDS[entry].store(start.saturating_add(bytes), Relaxed);
            DESCRIPTORS[entry].store(fd, Relaxed);
            OFFSETS[entry].store(offset as usize, Relaxed);
            KEPT_INODES[entry].store(kept_inode, Relaxed);
            STARTS[entry].store(start, Release);
            END.fetch_max(entry + 1, Relaxed);
            return true;
        }
    }
    false
}

/// Forgets the duplicates in a range of descriptors that the program is about to close.
pub fn before_close_range(first: usize, last: usize) {
    if !KEEPS.load(Relaxed) {
        return;
    }
    for entry in 0..END.load(Relaxed) {
        let fd = DESCRIPTORS[entry].load(Relaxed);
        if KEPT_INODES[entry].load(Relaxed) != 0
            && usize::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd))
        {
            KEPT_INODES[entry].store(0, Relaxed);
            DESCRIPTORS[entry].store(-1, Relaxed);
        }
    }
}

/// Removes the entries that overlap a range of addresses: something else is mapped there.
pub fn remove(start: usize, bytes: usize) {
    let end = start.saturating_add(bytes);
    for entry in 0..END.load(Relaxed) {
        let entry_start = STARTS[entry].load(Acquire);
        let overlaps =
            entry_start > IN_USE && entry_start < end && start < ENDS[entry].load(Relaxed);
        if overlaps {
            let (fd, inode) = (DESCRIPTORS[entry].load(Relaxed), KEPT_INODES[entry].load(Relaxed));
            // Fails if another thread replaced the entry first.
            let is_removed =
                STARTS[entry].compare_exchange(entry_start, 0, AcqRel, Relaxed).is_ok();
            if is_removed && inode != 0 {
                let _errno = PreservedErrno::read();
                close_kept(fd, inode);
            }
        }
    }
}

/// Whether the program ever mapped a file of [`BYTES_MIN`].
pub fn were_recorded() -> bool {
    END.load(Relaxed) > 0
}

/// The mapping of a file at an address.
pub fn find(address: usize) -> Option<Found> {
    (0..END.load(Relaxed)).find_map(|entry| {
        let start = STARTS[entry].load(Acquire);
        let end = ENDS[entry].load(Relaxed);
        let fd = DESCRIPTORS[entry].load(Relaxed);
        (start > IN_USE && start <= address && address < end)
            .then(|| Found { available: end - address, fd })
    })
}

/// The position in the file of the byte at an address, by the program's call.
pub fn offset_of(address: usize) -> Option<off64_t> {
    (0..END.load(Relaxed)).find_map(|entry| {
        let start = STARTS[entry].load(Acquire);
        let offset = OFFSETS[entry].load(Relaxed);
        let is_it = start > IN_USE && start <= address && address < ENDS[entry].load(Relaxed);
        is_it.then(|| (offset + (address - start)) as off64_t)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the table is one for the process.
    #[test]
    fn a_mapping_is_found_until_something_else_is_mapped_there() {
        let start = 0x7000_0000;
        add(start, 64 << 10, 3, 0);
        add(start + (1 << 20), BYTES_MIN - 1, 3, 0);
        let bytes_from = |address| find(address).map(|found| found.available);
        assert_eq!(bytes_from(start), Some(64 << 10));
        assert_eq!(bytes_from(start + (64 << 10) - 1), Some(1));
        assert_eq!(bytes_from(start + (64 << 10)), None);
        assert_eq!(bytes_from(start + (1 << 20)), None);
        remove(start + (64 << 10), 4096);
        assert!(bytes_from(start).is_some());
        remove(start - 4096, 4097);
        assert_eq!(bytes_from(start), None);
        for number in 0..2 * ENTRIES {
            add(start + number * BYTES_MIN, BYTES_MIN, 3, 0);
        }
        remove(0, usize::MAX);
        assert_eq!(bytes_from(start), None);
    }
}
