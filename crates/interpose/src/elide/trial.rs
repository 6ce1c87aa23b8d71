//! Compares the CPU time of eliding and of copying, separately for small and for large pieces.
//!
//! The first calls alternate in blocks. Afterwards the cheaper method is used, and one block in
//! [`EXPLORE_INTERVAL`] uses the other method, because costs change with the load. A call also pays
//! for freeing the memory of earlier calls, so only the second half of a block is measured. The
//! clock of a thread does not count the work of the kernel in interrupts.

use crate::tally;
use haul_tally::{NotElided, header};
use libc::ssize_t;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Pieces of at least so many bytes are compared separately.
const LARGE_BYTES: usize = 256 << 10;
/// The methods are compared after each of them sent this many bytes.
const BYTES_MIN: u64 = 4 << 20;
/// After this many bytes of a method, older measurements count half.
const BYTES_MAX: u64 = 64 << 20;
/// Calls of a block. All calls of a block use one method.
const BLOCK_CALLS: u64 = 32;
/// One block in this many uses the other method.
const EXPLORE_INTERVAL: u64 = 64;
/// The other method is chosen if it costs less than this share of what the present method costs.
const SWITCH_SHARE: f64 = 0.95;

/// The measured CPU time of a method.
struct Method {
    ns: AtomicU64,
    bytes: AtomicU64,
}

/// The comparison of the two methods.
pub struct Trial {
    elided: Method,
    copied: Method,
    calls: AtomicU64,
    /// Whether copying is the chosen method.
    is_copying: AtomicBool,
    /// Why the last call could not be elided: the position among all reasons, plus 1. 0: none.
    refusal: AtomicU64,
}

/// The comparison for pieces below [`LARGE_BYTES`], and for others. More classes would disturb each
/// other, because a large piece is often sent in parts of all sizes.
static TRIALS: [Trial; 2] = [const {
    Trial {
        elided: Method { ns: AtomicU64::new(0), bytes: AtomicU64::new(0) },
        copied: Method { ns: AtomicU64::new(0), bytes: AtomicU64::new(0) },
        calls: AtomicU64::new(0),
        is_copying: AtomicBool::new(false),
        refusal: AtomicU64::new(0),
    }
}; 2];

/// The comparison for pieces of this many bytes.
pub fn of(bytes: usize) -> &'static Trial {
    &TRIALS[usize::from(bytes >= LARGE_BYTES)]
}

/// The method for one call.
pub struct Choice {
    /// Whether the copy is left out.
    pub is_elided: bool,
    /// Whether the call is measured.
    pub is_measured: bool,
    /// Whether the method is used to compare the costs, and not because it is cheaper.
    pub is_comparison: bool,
}

/// The CPU time of this thread.
#[derive(Clone, Copy)]
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
}

impl Trial {
    /// Chooses the method for the next call.
    pub fn choose(&self) -> Choice {
        if tally::header(header::IS_UNTRIED) == 1 {
            return Choice { is_elided: true, is_measured: false, is_comparison: false };
        }
        let number = self.calls.fetch_add(1, Relaxed);
        let (block, position) = (number / BLOCK_CALLS, number % BLOCK_CALLS);
        let is_measured = position >= BLOCK_CALLS / 2;
        if self.elided.cost().is_none() || self.copied.cost().is_none() {
            let is_elided = block.is_multiple_of(2);
            return Choice { is_elided, is_measured, is_comparison: true };
        }
        let is_copying = self.is_copying.load(Relaxed);
        match block % EXPLORE_INTERVAL {
            0 => Choice { is_elided: is_copying, is_measured, is_comparison: true },
            position => Choice {
                is_elided: !is_copying,
                is_measured: is_measured && position == 1,
                is_comparison: false,
            },
        }
    }

    /// Records that a call could not be elided.
    pub fn refuse(&self, reason: NotElided) {
        self.refusal.store(reason as u64 + 1, Relaxed);
    }

    /// Why calls are copied if eliding was never measured: the reason of the last call that could
    /// not be elided.
    pub fn refusal(&self) -> Option<NotElided> {
        let position = self.refusal.load(Relaxed).checked_sub(1)?;
        let is_known = self.elided.cost().is_some();
        NotElided::ALL.get(position as usize).copied().filter(|_| !is_known)
    }

    /// Records the cost of a call that sent so many bytes, and compares the methods.
    pub fn record(&self, began: Clock, is_elided: bool, sent: ssize_t) {
        let ns = Clock::now_ns().saturating_sub(began.0);
        let Ok(bytes) = u64::try_from(sent) else { return };
        if is_elided { &self.elided } else { &self.copied }.add(ns, bytes);
        let (Some(elided), Some(copied)) = (self.elided.cost(), self.copied.cost()) else {
            return;
        };
        let is_copying = self.is_copying.load(Relaxed);
        if !is_copying && copied < elided * SWITCH_SHARE {
            self.is_copying.store(true, Relaxed);
        } else if is_copying && elided < copied * SWITCH_SHARE {
            self.is_copying.store(false, Relaxed);
        }
    }
}

impl Method {
    fn add(&self, ns: u64, bytes: u64) {
        self.ns.fetch_add(ns, Relaxed);
        if self.bytes.fetch_add(bytes, Relaxed) + bytes > BYTES_MAX {
            self.ns.store(self.ns.load(Relaxed) / 2, Relaxed);
            self.bytes.store(self.bytes.load(Relaxed) / 2, Relaxed);
        }
    }

    /// The cost in ns per byte; `None` if too few bytes were measured.
    fn cost(&self) -> Option<f64> {
        let bytes = self.bytes.load(Relaxed);
        (bytes >= BYTES_MIN).then(|| self.ns.load(Relaxed) as f64 / bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_method_is_used_and_the_other_is_tested_at_times() {
        let trial = of(BYTES_MIN as usize);
        let method = |is_elided| if is_elided { &trial.elided } else { &trial.copied };
        for is_elided in [true, false] {
            method(is_elided).add(if is_elided { 2_000_000 } else { 1_000_000 }, BYTES_MIN);
        }
        trial.record(Clock::start(), false, 1);
        let calls = BLOCK_CALLS * EXPLORE_INTERVAL;
        let elided = (0..calls).filter(|_| trial.choose().is_elided).count() as u64;
        assert_eq!(elided, BLOCK_CALLS);
    }
}
