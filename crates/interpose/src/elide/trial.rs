//! Which way is cheaper, by the CPU time of the calling thread, for each class of size.
//!
//! The first calls alternate in blocks. Afterwards the cheaper way is taken, and one block in
//! [`EXPLORE_INTERVAL`] goes the other way, because a cost changes with the load. A call also pays
//! for freeing the memory of earlier calls, so only the second half of a block is measured. The
//! clock of a thread leaves out what the kernel does in interrupts.

use crate::tally;
use haul_tally::{SizeClass, header};
use libc::ssize_t;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of each way after which the ways are compared.
const BYTES_MIN: u64 = 4 << 20;
/// Bytes of a way after which older measurements count half.
const BYTES_MAX: u64 = 64 << 20;
/// Calls of a block, which all go the same way.
const BLOCK_CALLS: u64 = 32;
/// One block in this many goes the other way.
const EXPLORE_INTERVAL: u64 = 64;
/// The other way is taken if its cost is below this share of the cost of the present one.
const SWITCH_SHARE: f64 = 0.95;

/// The costs of a way.
struct Way {
    ns: AtomicU64,
    bytes: AtomicU64,
}

/// The two ways of a class.
struct Class {
    elided: Way,
    copied: Way,
    calls: AtomicU64,
    /// 1 while copying is the chosen way.
    is_copying: AtomicU64,
}

static CLASSES: [Class; SizeClass::COUNT] = [const {
    Class {
        elided: Way { ns: AtomicU64::new(0), bytes: AtomicU64::new(0) },
        copied: Way { ns: AtomicU64::new(0), bytes: AtomicU64::new(0) },
        calls: AtomicU64::new(0),
        is_copying: AtomicU64::new(0),
    }
}; SizeClass::COUNT];

/// The way of one call.
pub struct Choice {
    /// Whether the copy is left out.
    pub is_elided: bool,
    /// Whether the call is measured.
    pub is_measured: bool,
}

/// Chooses the way of the next call.
pub fn choose(class: SizeClass) -> Choice {
    let class = &CLASSES[class.index()];
    if tally::header(header::IS_UNTRIED) == 1 {
        return Choice { is_elided: true, is_measured: false };
    }
    let number = class.calls.fetch_add(1, Relaxed);
    let (block, position) = (number / BLOCK_CALLS, number % BLOCK_CALLS);
    let is_measured = position >= BLOCK_CALLS / 2;
    let is_known = |way: &Way| way.bytes.load(Relaxed) >= BYTES_MIN;
    if !(is_known(&class.elided) && is_known(&class.copied)) {
        return Choice { is_elided: block.is_multiple_of(2), is_measured };
    }
    let is_copying = class.is_copying.load(Relaxed) == 1;
    match block % EXPLORE_INTERVAL {
        0 => Choice { is_elided: is_copying, is_measured },
        1 => Choice { is_elided: !is_copying, is_measured },
        _ => Choice { is_elided: !is_copying, is_measured: false },
    }
}

/// The CPU time of this thread.
pub struct Clock(u64);

impl Clock {
    /// Reads the clock.
    pub fn start() -> Self {
        Self(Self::now_ns())
    }

    fn now_ns() -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the structure lives through the call.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Records the cost of a call that sent so many bytes, and compares the ways.
    pub fn record(self, class: SizeClass, is_elided: bool, sent: ssize_t) {
        let ns = Self::now_ns().saturating_sub(self.0);
        let Ok(bytes) = u64::try_from(sent) else { return };
        let class = &CLASSES[class.index()];
        let way = if is_elided { &class.elided } else { &class.copied };
        way.ns.fetch_add(ns, Relaxed);
        if way.bytes.fetch_add(bytes, Relaxed) + bytes > BYTES_MAX {
            way.ns.store(way.ns.load(Relaxed) / 2, Relaxed);
            way.bytes.store(way.bytes.load(Relaxed) / 2, Relaxed);
        }
        let cost = |way: &Way| {
            let bytes = way.bytes.load(Relaxed);
            (bytes >= BYTES_MIN).then(|| way.ns.load(Relaxed) as f64 / bytes as f64)
        };
        let (Some(elided), Some(copied)) = (cost(&class.elided), cost(&class.copied)) else {
            return;
        };
        let is_copying = class.is_copying.load(Relaxed) == 1;
        if !is_copying && copied < elided * SWITCH_SHARE {
            class.is_copying.store(1, Relaxed);
        } else if is_copying && elided < copied * SWITCH_SHARE {
            class.is_copying.store(0, Relaxed);
        }
    }
}
