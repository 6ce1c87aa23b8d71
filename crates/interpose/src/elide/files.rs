//! The files whose pages may be sent: each with a descriptor of the interposer and a lease that the
//! broker keeps.
//!
//! An entry is used by several threads without a lock: a thread counts itself as a user before it
//! uses the descriptor, and an entry with users is not replaced. One thread at a time makes a new
//! entry. Other threads copy in that time.

use crate::broker;
use crate::high_descriptor;
use crate::kernel;
use crate::mappings;
use crate::next;
use crate::tally;
use haul_tally::{NotElided, file_entry, file_entry_at, message::HEARTBEAT_MS_MAX};
use haul_tally::{header, slot};
use libc::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// Files that are remembered.
const ENTRIES: usize = 64;
/// The time for which a refused file is not asked for again, in ms.
const REFUSED_MS: u64 = 1000;

/// A remembered file.
struct Entry {
    /// Whether the other fields are valid.
    is_valid: AtomicBool,
    /// Threads that use the descriptor.
    users: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    /// The descriptor; -1 for a refused file.
    fd: AtomicI32,
    /// Number of the file's entry in the tally. For a refused file: the reason.
    number: AtomicU64,
    /// State of the file's entry in the tally at the time of the lease.
    state: AtomicU64,
    /// For a refused file: when it may be asked for again, in ms.
    retry_ms: AtomicU64,
    /// The time of the last use, in ms.
    used_ms: AtomicU64,
}

static TABLE: [Entry; ENTRIES] = [const {
    Entry {
        is_valid: AtomicBool::new(false),
        users: AtomicU64::new(0),
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
        fd: AtomicI32::new(-1),
        number: AtomicU64::new(0),
        state: AtomicU64::new(0),
        retry_ms: AtomicU64::new(0),
        used_ms: AtomicU64::new(0),
    }
}; ENTRIES];
/// Held by the thread that makes a new entry.
static IS_LOCKED: AtomicBool = AtomicBool::new(false);

/// A file whose pages may be sent. [`File::release`] gives it back.
pub struct File {
    entry: &'static Entry,
    fd: c_int,
    number: u16,
    state: u64,
}

impl File {
    /// The descriptor.
    pub fn fd(&self) -> c_int {
        self.fd
    }

    /// Number of the file's entry in the tally.
    pub fn entry(&self) -> u16 {
        self.number
    }

    /// Whether pages may be sent now: the descriptor still is the interposer's, the lease stands,
    /// and the broker is there to return the lease in time.
    pub fn is_ready(&self) -> bool {
        if !self.entry.is_open_as(self.fd) {
            self.entry.is_valid.store(false, SeqCst);
            return false;
        }
        self.is_leased()
    }

    fn is_leased(&self) -> bool {
        let at = file_entry_at(usize::from(self.number)) + file_entry::STATE;
        let stands = tally::word(at).is_some_and(|state| state.load(SeqCst) == self.state);
        stands && has_broker()
    }

    /// Whether the broker waits for the pages in flight.
    fn is_draining(&self) -> bool {
        let at = file_entry_at(usize::from(self.number)) + file_entry::STATE;
        let draining = self.state & !file_entry::STATE_MASK | file_entry::DRAINING;
        tally::word(at).is_some_and(|state| state.load(SeqCst) == draining)
    }

    /// Ends the use of the file.
    pub fn release(&self) {
        self.entry.users.fetch_sub(1, SeqCst);
    }
}

impl Entry {
    /// Whether a descriptor refers to the entry's file. The program can close the descriptor, and
    /// open another file in its place.
    fn is_open_as(&self, fd: c_int) -> bool {
        kernel::status(fd).is_some_and(|status| {
            status.st_dev == self.device.load(Relaxed) && status.st_ino == self.inode.load(Relaxed)
        })
    }
}

/// Whether the broker gave a sign of life not long ago.
fn has_broker() -> bool {
    let heartbeat = tally::word(header::HEARTBEAT_MS).map_or(0, |word| word.load(SeqCst));
    now_ms().saturating_sub(heartbeat) < HEARTBEAT_MS_MAX
}

/// The time in ms (`CLOCK_MONOTONIC`).
fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives through the call, which makes no system call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The file with this identity, with a lease. `mapped_from` is the descriptor from which the
/// program mapped the file.
pub fn file(device: u64, inode: u64, mapped_from: c_int) -> Result<File, NotElided> {
    if !has_broker() {
        return Err(NotElided::NoBroker);
    }
    if let Some(found) = known(device, inode) {
        return found;
    }
    if IS_LOCKED.swap(true, Acquire) {
        return Err(NotElided::Busy);
    }
    let leased = lease(device, inode, mapped_from);
    IS_LOCKED.store(false, Release);
    leased
}

/// A remembered file, or the remembered refusal. `None` if the broker must be asked.
fn known(device: u64, inode: u64) -> Option<Result<File, NotElided>> {
    let is_it = |entry: &&Entry| {
        entry.is_valid.load(Relaxed)
            && entry.inode.load(Relaxed) == inode
            && entry.device.load(Relaxed) == device
    };
    let entry = TABLE.iter().find(is_it)?;
    entry.users.fetch_add(1, SeqCst);
    // Another thread can replace the entry before this thread is counted.
    if !(entry.is_valid.load(SeqCst) && is_it(&entry)) {
        entry.users.fetch_sub(1, SeqCst);
        return None;
    }
    let found = use_entry(entry);
    if !matches!(found, Some(Ok(_))) {
        entry.users.fetch_sub(1, SeqCst);
    }
    found
}

fn use_entry(entry: &'static Entry) -> Option<Result<File, NotElided>> {
    let fd = entry.fd.load(Relaxed);
    let number = entry.number.load(Relaxed);
    let now = now_ms();
    if fd < 0 {
        if now >= entry.retry_ms.load(Relaxed) {
            entry.is_valid.store(false, SeqCst);
            return None;
        }
        return Some(Err(NotElided::ALL[number as usize % NotElided::ALL.len()]));
    }
    let file = File { entry, fd, number: number as u16, state: entry.state.load(Relaxed) };
    if !file.is_leased() {
        if file.is_draining() {
            return Some(Err(NotElided::Draining));
        }
        // The broker returned the lease, because the file was not used or a program waited for it.
        entry.is_valid.store(false, SeqCst);
        return None;
    }
    // Several calls in a millisecond do not write.
    if entry.used_ms.swap(now, Relaxed) != now
        && let Some(used) = tally::word(file_entry_at(number as usize) + file_entry::USED_MS)
    {
        used.store(now, Relaxed);
    }
    Some(Ok(file))
}

/// Opens the file, asks the broker for a lease, and remembers the answer. Under the lock.
fn lease(device: u64, inode: u64, mapped_from: c_int) -> Result<File, NotElided> {
    let place = free_place().ok_or(NotElided::Busy)?;
    let fd = open_again(device, inode, mapped_from)?;
    let answer = broker::lease(fd);
    let now = now_ms();
    let (kept, number, state, retry_ms) = match answer {
        Ok((number, state)) => (fd, u64::from(number), state, 0),
        Err(reason) => {
            // SAFETY: the descriptor is this function's.
            unsafe { next::close(fd) };
            (-1, reason as u64, 0, now + REFUSED_MS)
        }
    };
    place.device.store(device, Relaxed);
    place.inode.store(inode, Relaxed);
    place.fd.store(kept, Relaxed);
    place.number.store(number, Relaxed);
    place.state.store(state, Relaxed);
    place.retry_ms.store(retry_ms, Relaxed);
    place.used_ms.store(now, Relaxed);
    place.users.fetch_add(1, SeqCst);
    place.is_valid.store(true, SeqCst);
    match answer {
        Ok((number, state)) => {
            tally::add(slot::LEASES, 1);
            Ok(File { entry: place, fd: kept, number, state })
        }
        Err(reason) => {
            place.users.fetch_sub(1, SeqCst);
            Err(reason)
        }
    }
}

/// A place for a new entry: a free one, one whose lease ended, or the one that was not used for the
/// longest time. `None` if all are in use.
fn free_place() -> Option<&'static Entry> {
    let has_ended = |entry: &Entry| {
        let at = file_entry_at(entry.number.load(Relaxed) as usize) + file_entry::STATE;
        entry.fd.load(Relaxed) >= 0
            && tally::word(at).is_none_or(|state| state.load(SeqCst) != entry.state.load(Relaxed))
    };
    let rank = |entry: &&Entry| match entry.is_valid.load(Relaxed) {
        false => (0, 0),
        true if has_ended(entry) => (1, 0),
        true => (2, entry.used_ms.load(Relaxed)),
    };
    let place = TABLE.iter().filter(|entry| entry.users.load(Relaxed) == 0).min_by_key(rank)?;
    place.is_valid.store(false, SeqCst);
    if place.users.load(SeqCst) != 0 {
        // Another thread found the entry before it became invalid. The entry is reused later.
        return None;
    }
    let fd = place.fd.swap(-1, Relaxed);
    if fd >= 0 && high_descriptor::is_high(fd) && place.is_open_as(fd) {
        // SAFETY: the descriptor is the interposer's.
        unsafe { next::close(fd) };
    }
    Some(place)
}

/// Opens a file again for reading: the lease belongs to the open file, and the program's may be
/// open for writing, or shared with other processes.
fn open_again(device: u64, inode: u64, mapped_from: c_int) -> Result<c_int, NotElided> {
    let is_it = |fd: c_int| {
        kernel::status(fd).is_some_and(|status| status.st_dev == device && status.st_ino == inode)
    };
    if mapped_from < 0 || !is_it(mapped_from) {
        // On a file system whose maps name another device, a duplicate would not help.
        let is_closed = kernel::status(mapped_from).is_none_or(|status| status.st_ino != inode);
        if is_closed {
            mappings::keep_descriptors();
        }
        return Err(NotElided::NoFile);
    }
    let path = descriptor_path(mapped_from);
    // O_NONBLOCK: another program's lease must not hold this one up.
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: the path is a C string.
    let fd = unsafe { next::open(path.as_ptr().cast(), flags, 0) };
    let fd = high_descriptor::raise(fd).ok_or(NotElided::NoFile)?;
    if is_it(fd) {
        return Ok(fd);
    }
    // SAFETY: the descriptor is this function's.
    unsafe { next::close(fd) };
    Err(NotElided::NoFile)
}

/// `/proc/self/fd/N` as a C string.
fn descriptor_path(fd: c_int) -> [u8; 32] {
    const PREFIX: &[u8] = b"/proc/self/fd/";
    let mut path = [0u8; 32];
    path[..PREFIX.len()].copy_from_slice(PREFIX);
    let mut digits = [0u8; 10];
    let mut count = 0;
    let mut rest = fd.unsigned_abs();
    loop {
        digits[count] = b'0' + (rest % 10) as u8;
        count += 1;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    for index in 0..count {
        path[PREFIX.len() + index] = digits[count - 1 - index];
    }
    path
}

/// Closes the descriptors in the child after `fork`, so that the parent's leases can end.
pub fn forget_all() {
    for entry in &TABLE {
        entry.users.store(0, Relaxed);
        let is_valid = entry.is_valid.swap(false, Relaxed);
        let fd = entry.fd.swap(-1, Relaxed);
        if is_valid && high_descriptor::is_high(fd) && entry.is_open_as(fd) {
            // SAFETY: the descriptor is the interposer's.
            unsafe { next::close(fd) };
        }
    }
    IS_LOCKED.store(false, Relaxed);
}

/// Forgets the descriptors of a range that the program is about to close.
pub fn before_close_range(first: usize, last: usize) {
    for entry in &TABLE {
        let fd = entry.fd.load(Relaxed);
        if usize::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd)) {
            entry.is_valid.store(false, SeqCst);
            // A call that the kernel is in has a reference to the file, and may last long.
            high_descriptor::wait_while(|| entry.users.load(SeqCst) > 0);
            entry.fd.store(-1, Relaxed);
        }
    }
}
