//! The memory that the program's last reads filled, so that a send from that memory can be
//! attributed to its source.
//!
//! An entry is a hint, because the program can change the memory after the read. So one read of a
//! file in [`SAMPLE_INTERVAL`] is a sample. When the memory of a sample is sent, a piece of the
//! memory is compared with the file.

use crate::errno::PreservedErrno;
use crate::kernel;
use crate::next;
use crate::tally;
use haul_tally::{DescriptorKind, slot};
use libc::{c_int, off64_t};
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// Reads of fewer bytes are not recorded: copying them costs less than recording them.
pub const BYTES_MIN: usize = 4096;
/// Entries of the table. Of a server with more buffers in use, some sends are attributed to other
/// memory.
const ENTRIES: usize = 64;
/// One read of a file in this many is a sample.
const SAMPLE_INTERVAL: usize = 64;
/// Bytes of a sample that are compared.
const SAMPLE_BYTES: usize = 512;

/// Memory that a read filled. In one cache line, because the program's data evicts the table.
#[repr(align(32))]
struct Entry {
    /// First address of the memory. 0: no entry.
    start: AtomicUsize,
    /// The address after the memory.
    end: AtomicUsize,
    /// Whether the memory came from a TCP socket, else from a file.
    is_socket: AtomicBool,
}

static TABLE: [Entry; ENTRIES] = [const {
    Entry {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        is_socket: AtomicBool::new(false),
    }
}; ENTRIES];
/// Number of reads that were recorded.
static RECORDED: AtomicUsize = AtomicUsize::new(0);

/// The sample that waits for its memory to be sent. One at a time; a thread that finds it in use
/// skips its own sample.
static SAMPLE: Sample = Sample {
    is_in_use: AtomicBool::new(false),
    start: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    fd: AtomicUsize::new(0),
    device: AtomicU64::new(0),
    inode: AtomicU64::new(0),
    offset: AtomicU64::new(0),
};

struct Sample {
    /// Held for a few instructions by the thread that changes or reads the fields.
    is_in_use: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    fd: AtomicUsize,
    device: AtomicU64,
    inode: AtomicU64,
    offset: AtomicU64,
}

/// Where in the file the first byte of a read is.
#[derive(Clone, Copy)]
pub enum Position {
    /// At this offset.
    At(off64_t),
    /// So many bytes before the file's current position, which the call moved.
    BeforeCurrent(usize),
}

/// Records that a read from `fd` filled memory.
pub fn record(fd: c_int, kind: DescriptorKind, start: usize, bytes: usize, position: Position) {
    if bytes < BYTES_MIN || !matches!(kind, DescriptorKind::File | DescriptorKind::Tcp) {
        return;
    }
    let number = RECORDED.fetch_add(1, Relaxed);
    let end = start.saturating_add(bytes);
    let entry = &TABLE[number % ENTRIES];
    entry.start.store(0, Relaxed);
    entry.end.store(end, Relaxed);
    entry.is_socket.store(kind == DescriptorKind::Tcp, Relaxed);
    entry.start.store(start, Release);
    SAMPLE.drop_if_overlaps(start, end);
    if number.is_multiple_of(SAMPLE_INTERVAL) && kind == DescriptorKind::File {
        SAMPLE.take(fd, start, end, position);
    }
}

/// The source of memory at `address`, and the number of bytes from there on that came from it.
pub fn source_of(address: usize) -> Option<(DescriptorKind, usize)> {
    let newest = RECORDED.load(Relaxed);
    for back in 1..=ENTRIES.min(newest) {
        let entry = &TABLE[newest.wrapping_sub(back) % ENTRIES];
        let start = entry.start.load(Acquire);
        let end = entry.end.load(Relaxed);
        if start != 0 && start <= address && address < end {
            let is_socket = entry.is_socket.load(Relaxed);
            let kind = if is_socket { DescriptorKind::Tcp } else { DescriptorKind::File };
            return Some((kind, end - address));
        }
    }
    None
}

/// Compares the sample with its file if the memory from `start` to `end` was sent and holds the
/// sample.
pub fn check_sample(start: usize, end: usize) {
    if SAMPLE.start.load(Relaxed) != 0 {
        SAMPLE.check(start, end);
    }
}

impl Sample {
    fn lock(&self) -> bool {
        !self.is_in_use.swap(true, Acquire)
    }

    fn unlock(&self) {
        self.is_in_use.store(false, Release);
    }

    fn take(&self, fd: c_int, start: usize, end: usize, position: Position) {
        let _errno = PreservedErrno::read();
        let Some(status) = kernel::status(fd) else { return };
        let offset = match position {
            Position::At(offset) => offset,
            Position::BeforeCurrent(bytes) => {
                // SAFETY: the call changes nothing.
                let current = unsafe { libc::lseek64(fd, 0, libc::SEEK_CUR) };
                current.saturating_sub_unsigned(bytes as u64)
            }
        };
        if offset < 0 || !self.lock() {
            return;
        }
        self.end.store(end, Relaxed);
        self.fd.store(fd as usize, Relaxed);
        self.device.store(status.st_dev, Relaxed);
        self.inode.store(status.st_ino, Relaxed);
        self.offset.store(offset as u64, Relaxed);
        self.start.store(start, Relaxed);
        self.unlock();
    }

    fn drop_if_overlaps(&self, start: usize, end: usize) {
        let sample = self.start.load(Relaxed);
        if sample != 0 && sample < end && start < self.end.load(Relaxed) && self.lock() {
            self.start.store(0, Relaxed);
            self.unlock();
        }
    }

    fn check(&self, sent_start: usize, sent_end: usize) {
        let _errno = PreservedErrno::read();
        if !self.lock() {
            return;
        }
        let start = self.start.load(Relaxed);
        // The piece in the middle: headers and checksums of a program are at the ends.
        let middle = start + (self.end.load(Relaxed).saturating_sub(start)) / 2;
        let is_covered = sent_start <= middle && middle + SAMPLE_BYTES <= sent_end;
        if start == 0 || !is_covered || middle + SAMPLE_BYTES > self.end.load(Relaxed) {
            return self.unlock();
        }
        let fd = self.fd.load(Relaxed) as c_int;
        let offset = self.offset.load(Relaxed) + (middle - start) as u64;
        let is_same_file = kernel::status(fd).is_some_and(|status| {
            status.st_dev == self.device.load(Relaxed) && status.st_ino == self.inode.load(Relaxed)
        });
        self.start.store(0, Relaxed);
        self.unlock();
        if !is_same_file {
            return;
        }
        let mut of_file = [0u8; SAMPLE_BYTES];
        // SAFETY: the buffer has this length.
        let read = unsafe {
            next::pread64(fd, of_file.as_mut_ptr().cast(), SAMPLE_BYTES, offset as off64_t)
        };
        if read == SAMPLE_BYTES as isize {
            // SAFETY: the program has just sent this memory, so it is readable. Another thread may
            // change it during the comparison, so the bytes are read as volatile.
            let is_equal = (0..SAMPLE_BYTES)
                .all(|at| unsafe { ((middle + at) as *const u8).read_volatile() } == of_file[at]);
            tally::add(slot::SAMPLES, 1);
            tally::add(slot::SAMPLES_EQUAL, u64::from(is_equal));
        }
    }
}
