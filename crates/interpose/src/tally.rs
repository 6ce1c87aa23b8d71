//! The shared memory of `haul run`: this process's counters, and the tables of leased files and of
//! sockets.

use haul_tally::{
    LOG_ENTRIES, MAGIC, SLOTS, TALLY_WORDS, header, log_entry, log_entry_at, slot, slot_at,
};
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// First word of the mapped tally. Null before the constructor, and without `haul run`.
static TALLY: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// First word of this process's slot. Null while nothing is counted.
static SLOT: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// ID of the process that the tables belong to. In the child of `vfork`, which shares the memory,
/// the ID differs.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The ID of the process that the tables belong to.
pub fn process() -> u32 {
    PROCESS.load(Relaxed)
}

/// Whether the calling process is the one that the tables belong to. A system call.
pub fn is_own_process() -> bool {
    // SAFETY: getpid only returns a number.
    process() == unsafe { libc::getpid() }.unsigned_abs()
}

/// A word of the tally; `None` beyond its end, and without a tally.
pub fn word(index: usize) -> Option<&'static AtomicU64> {
    let words = TALLY.load(Acquire);
    if words.is_null() || index >= TALLY_WORDS {
        return None;
    }
    // SAFETY: the mapping has this length, is aligned to a page, and is never removed. The memory
    // file is sealed against shrinking. Each process accesses the words atomically.
    Some(unsafe { &*words.add(index) })
}

/// Begins to use a mapping of the tally, and takes a slot. Returns false if the mapping is not a
/// tally of this version.
///
/// # Safety
///
/// `mapping` is a shared, writable mapping of [`haul_tally::TALLY_BYTES`] that is never removed.
pub unsafe fn begin(mapping: *mut AtomicU64) -> bool {
    // SAFETY: the caller's contract.
    if unsafe { (*mapping).load(Relaxed) } != MAGIC {
        return false;
    }
    TALLY.store(mapping, Release);
    take_slot(true);
    true
}

/// Takes a slot for this process: at its start, and in the child after `fork`. `may_ask` is whether
/// the process may make system calls.
pub fn take_slot(may_ask: bool) {
    let Some(taken) = word(header::SLOTS_TAKEN) else { return };
    // A child has its parent's name. A process with a seccomp filter does not ask.
    let parent_name = [get(slot::NAME), get(slot::NAME + 1)];
    let name = if parent_name == [0; 2] { name() } else { parent_name };
    // SAFETY: getpid only returns a number.
    let process = unsafe { libc::getpid() }.unsigned_abs();
    PROCESS.store(process, Relaxed);
    let number = taken.fetch_add(1, Relaxed) as usize;
    let own = if number < SLOTS { Some(number) } else { ended_slot(name, process, may_ask) };
    let Some(first) = word(slot_at(own.unwrap_or(SLOTS - 1))) else { return };
    SLOT.store(std::ptr::from_ref(first).cast_mut(), Release);
    // Without an own slot, the process adds to the counters of another process.
    if own.is_some() {
        set(slot::NAME, name[0]);
        set(slot::NAME + 1, name[1]);
        set(slot::PROCESS, process.into());
        set(slot::STATE, slot::RUNNING);
    }
}

/// Takes the slot of a process with this name that ended.
fn ended_slot(name: [u64; 2], process: u32, may_ask: bool) -> Option<usize> {
    let value = |index: usize, position: usize| {
        word(slot_at(index) + position).map_or(0, |word| word.load(Relaxed))
    };
    // The processes begin at different slots, because each slot is on another page.
    let order = (0..SLOTS).map(|step| (process as usize + step) % SLOTS);
    order.into_iter().find(|&index| {
        let has_name = [slot::NAME, slot::NAME + 1].map(|half| value(index, half)) == name;
        if !has_name || value(index, slot::IS_QUIET) != 0 {
            return false;
        }
        let owner = value(index, slot::PROCESS);
        // A process that was killed, or that called `exec`, is still entered as running.
        let has_ended = value(index, slot::STATE) == slot::ENDED
            || owner == process.into()
            || may_ask && is_gone(owner as u32);
        // Another process may take the slot at the same moment.
        has_ended
            && word(slot_at(index) + slot::PROCESS).is_some_and(|word| {
                word.compare_exchange(owner, process.into(), Relaxed, Relaxed).is_ok()
            })
    })
}

/// Whether a process does not run.
fn is_gone(process: u32) -> bool {
    let Ok(process) = libc::pid_t::try_from(process) else { return false };
    // SAFETY: signal 0 is not sent.
    process > 0 && unsafe { libc::kill(process, 0) } != 0
}

/// Enters that this process ended, if the slot is its own.
pub fn end_slot() {
    if get(slot::PROCESS) == process().into() {
        set(slot::STATE, slot::ENDED);
    }
}

/// The name of this process, 16 bytes in two words.
fn name() -> [u64; 2] {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { crate::next::prctl(libc::PR_GET_NAME, name.as_mut_ptr() as libc::c_ulong, 0, 0, 0) };
    let (low, high) = name.split_at(8);
    [low, high].map(|half| u64::from_le_bytes(half.try_into().unwrap_or_default()))
}

/// Whether this process counts.
pub fn is_active() -> bool {
    !SLOT.load(Relaxed).is_null()
}

/// A word of the header.
pub fn header(index: usize) -> u64 {
    word(index).map_or(0, |word| word.load(Relaxed))
}

fn counter(index: usize) -> Option<&'static AtomicU64> {
    let first = SLOT.load(Acquire);
    if first.is_null() || index >= haul_tally::SLOT_WORDS {
        return None;
    }
    // SAFETY: the slot has `SLOT_WORDS` words inside of the mapping, which is never removed.
    Some(unsafe { &*first.add(index) })
}

/// Adds to a counter of this process.
pub fn add(index: usize, amount: u64) {
    if let Some(counter) = counter(index) {
        counter.fetch_add(amount, Relaxed);
    }
}

/// Adds one call and its bytes to a pair of counters.
pub fn add_call(index: usize, bytes: u64) {
    add(index, 1);
    add(index + 1, bytes);
}

/// Sets a word of this process's slot.
pub fn set(index: usize, value: u64) {
    if let Some(counter) = counter(index) {
        counter.store(value, Relaxed);
    }
}

/// A word of this process's slot.
pub fn get(index: usize) -> u64 {
    counter(index).map_or(0, |counter| counter.load(Relaxed))
}

/// A connection whose bytes several processes, or unseen calls, sent.
pub struct LogEntry {
    /// Number of the socket (`SO_COOKIE`).
    pub cookie: u64,
    /// Bytes that the kernel had counted when this process first used the socket.
    pub begin_bytes: u64,
    /// Bytes that the kernel counts now.
    pub end_bytes: u64,
    /// Bytes that this process sent by calls that the interposer saw.
    pub seen_bytes: u64,
}

/// Appends to the log. Returns false if the log is full.
pub fn log(entry: &LogEntry) -> bool {
    let Some(taken) = word(header::LOG_TAKEN) else { return false };
    let index = taken.fetch_add(1, Relaxed) as usize;
    if index >= LOG_ENTRIES {
        return false;
    }
    let at = log_entry_at(index);
    let words = [
        (log_entry::BEGIN_BYTES, entry.begin_bytes),
        (log_entry::END_BYTES, entry.end_bytes),
        (log_entry::SEEN_BYTES, entry.seen_bytes),
        // Last, because it marks the entry as complete.
        (log_entry::COOKIE, entry.cookie.wrapping_add(1)),
    ];
    for (position, value) in words {
        if let Some(word) = word(at + position) {
            word.store(value, Release);
        }
    }
    true
}
