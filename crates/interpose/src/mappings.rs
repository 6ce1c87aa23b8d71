//! Where the program mapped files. Hints: a mapping may be gone or replaced.

use std::sync::atomic::{
    AtomicUsize,
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
/// One more than the highest entry that was ever used.
static END: AtomicUsize = AtomicUsize::new(0);

/// Records a mapping of a file.
pub fn add(start: usize, bytes: usize) {
    if bytes < BYTES_MIN {
        return;
    }
    for entry in 0..ENTRIES {
        if STARTS[entry].compare_exchange(0, IN_USE, AcqRel, Relaxed).is_ok() {
            ENDS[entry].store(start.saturating_add(bytes), Relaxed);
            STARTS[entry].store(start, Release);
            END.fetch_max(entry + 1, Relaxed);
            return;
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
            // Fails if another thread replaced the entry first.
            let _ = STARTS[entry].compare_exchange(entry_start, 0, AcqRel, Relaxed);
        }
    }
}

/// The number of bytes from `address` on that a mapping of a file has; `None` if there is none.
pub fn bytes_from(address: usize) -> Option<usize> {
    (0..END.load(Relaxed)).find_map(|entry| {
        let start = STARTS[entry].load(Acquire);
        let end = ENDS[entry].load(Relaxed);
        (start > IN_USE && start <= address && address < end).then(|| end - address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the table is one for the process.
    #[test]
    fn a_mapping_is_found_until_something_else_is_mapped_there() {
        let start = 0x7000_0000;
        add(start, 64 << 10);
        add(start + (1 << 20), BYTES_MIN - 1);
        assert_eq!(bytes_from(start), Some(64 << 10));
        assert_eq!(bytes_from(start + (64 << 10) - 1), Some(1));
        assert_eq!(bytes_from(start + (64 << 10)), None);
        assert_eq!(bytes_from(start + (1 << 20)), None);
        remove(start + (64 << 10), 4096);
        assert!(bytes_from(start).is_some());
        remove(start - 4096, 4097);
        assert_eq!(bytes_from(start), None);
        for number in 0..2 * ENTRIES {
            add(start + number * BYTES_MIN, BYTES_MIN);
        }
        remove(0, usize::MAX);
        assert_eq!(bytes_from(start), None);
    }
}
