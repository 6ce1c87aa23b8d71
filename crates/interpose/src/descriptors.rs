//! What each file descriptor refers to, and how many bytes went to it if it is a TCP socket.
//!
//! The table is filled when a descriptor is first used, and cleared when the program closes it. A
//! descriptor that was closed by a call that the interposer did not see may have a wrong entry. The
//! functions that create descriptors clear or replace the entry, so most wrong entries do not last.

use crate::connection::Connection;
use crate::kernel;
use haul_tally::DescriptorKind;
use libc::c_int;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Descriptors below this number have an entry.
pub const TRACKED: usize = 65_536;

/// Bits of an entry with the kind, plus 1. 0: unknown.
const KIND: u8 = 0x0F;
/// Bit of an entry: another process has the socket as well.
const SHARED: u8 = 0x80;

static ENTRIES: [AtomicU8; TRACKED] = [const { AtomicU8::new(0) }; TRACKED];
/// Bytes that the kernel had counted for a TCP socket when this process first used the socket.
static BEGIN_BYTES: [AtomicU64; TRACKED] = [const { AtomicU64::new(0) }; TRACKED];
/// Bytes that the interposer counted for a TCP socket.
static SEEN_BYTES: [AtomicU64; TRACKED] = [const { AtomicU64::new(0) }; TRACKED];
/// One more than the highest descriptor that was a TCP socket.
static TCP_END: AtomicUsize = AtomicUsize::new(0);

fn index(fd: c_int) -> Option<usize> {
    usize::try_from(fd).ok().filter(|&index| index < TRACKED)
}

/// What a descriptor refers to. `just_sent` is the number of bytes that the last call gave to the
/// socket. The kernel counted these bytes already, and the interposer did not.
pub fn kind(fd: c_int, just_sent: u64) -> DescriptorKind {
    let Some(index) = index(fd) else {
        return kernel::kind_of(fd).unwrap_or(DescriptorKind::Other);
    };
    match ENTRIES[index].load(Relaxed) & KIND {
        0 => {}
        known => return DescriptorKind::ALL[usize::from(known - 1) % DescriptorKind::ALL.len()],
    }
    let Some(kind) = kernel::kind_of(fd) else { return DescriptorKind::Other };
    if kind == DescriptorKind::Tcp {
        // The socket came from an unseen call or from another process.
        let begin =
            kernel::bytes_given(fd).map_or(0, |given| given.bytes_max.saturating_sub(just_sent));
        enter_tcp(index, begin, SHARED);
    } else {
        ENTRIES[index].store(kind as u8 + 1, Relaxed);
    }
    kind
}

fn enter_tcp(index: usize, begin_bytes: u64, flags: u8) {
    BEGIN_BYTES[index].store(begin_bytes, Relaxed);
    SEEN_BYTES[index].store(0, Relaxed);
    ENTRIES[index].store((DescriptorKind::Tcp as u8 + 1) | flags, Relaxed);
    TCP_END.fetch_max(index + 1, Relaxed);
}

/// Enters a new TCP socket, to which nothing was sent.
pub fn enter_new_tcp(fd: c_int) {
    if let Some(index) = index(fd) {
        enter_tcp(index, 0, 0);
    }
}

/// Counts bytes that went to a TCP socket.
pub fn add_seen(fd: c_int, bytes: u64) {
    if let Some(index) = index(fd) {
        SEEN_BYTES[index].fetch_add(bytes, Relaxed);
    }
}

/// Clears the entry of a descriptor.
pub fn forget(fd: c_int) {
    if let Some(index) = index(fd) {
        // Most entries are 0 already, and a store would dirty the memory page.
        if ENTRIES[index].load(Relaxed) != 0 {
            ENTRIES[index].store(0, Relaxed);
        }
    }
}

/// Whether the entry of a descriptor has something.
pub fn is_known(fd: c_int) -> bool {
    index(fd).is_some_and(|index| ENTRIES[index].load(Relaxed) != 0)
}

/// Compares a TCP socket with the kernel's count before a descriptor is closed, and clears the
/// entry.
pub fn end(fd: c_int) {
    let Some(index) = index(fd) else { return };
    let entry = ENTRIES[index].load(Relaxed);
    if entry & KIND == DescriptorKind::Tcp as u8 + 1 {
        let connection = Connection {
            fd,
            begin_bytes: BEGIN_BYTES[index].load(Relaxed),
            seen_bytes: SEEN_BYTES[index].load(Relaxed),
            is_shared: entry & SHARED != 0,
        };
        connection.compare();
    }
    forget(fd);
}

/// Like [`end`] for the descriptors from `first` to `last`, both included.
pub fn end_range(first: usize, last: usize) {
    // Beyond the last TCP socket there is nothing to compare.
    for index in first..last.saturating_add(1).min(TCP_END.load(Relaxed)) {
        end(index as c_int);
    }
    for entry in ENTRIES.iter().take(last.saturating_add(1)).skip(first) {
        if entry.load(Relaxed) != 0 {
            entry.store(0, Relaxed);
        }
    }
}

/// Marks all TCP sockets as used by another process too: after `fork`, in both processes.
pub fn share_all() {
    for entry in ENTRIES.iter().take(TCP_END.load(Relaxed)) {
        if entry.load(Relaxed) & KIND == DescriptorKind::Tcp as u8 + 1 {
            entry.fetch_or(SHARED, Relaxed);
        }
    }
}

/// Begins to count anew in the child after `fork`: what the parent sent is in the parent's entry.
pub fn begin_in_child() {
    for index in 0..TCP_END.load(Relaxed) {
        let entry = ENTRIES[index].load(Relaxed);
        if entry & KIND == DescriptorKind::Tcp as u8 + 1 {
            BEGIN_BYTES[index].fetch_add(SEEN_BYTES[index].swap(0, Relaxed), Relaxed);
            ENTRIES[index].store(entry | SHARED, Relaxed);
        }
    }
}
