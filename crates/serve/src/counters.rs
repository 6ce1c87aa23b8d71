//! What one event loop has done, for whoever wants to know meanwhile.
//!
//! Only the loop itself adds; others read. So an addition is a load and a store, not a locked instruction.

use crate::status::Status;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A number that one thread adds to and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds. For the owning thread alone.
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// Takes away. For the owning thread alone.
    pub fn subtract(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(count), Relaxed);
    }

    /// What it has come to.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What one event loop has done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Responses by the first digit of their status, from 1.
    pub responses: [Counter; 5],
    /// Connections that were accepted.
    pub accepted: Counter,
    /// Connections that are open.
    pub open: Counter,
    /// Connections that were turned away or ended for want of room.
    pub crowded_out: Counter,
    /// Connections whose client was too slow.
    pub timed_out: Counter,
    /// Responses that were cut short because their file changed meanwhile.
    pub cut_short: Counter,
    /// Times that the disk had to be waited for.
    pub disk_waits: Counter,
}

impl Counters {
    /// Counts a response.
    pub fn count(&self, status: Status) {
        let class = usize::from(status.code / 100);
        if let Some(counter) = class.checked_sub(1).and_then(|index| self.responses.get(index)) {
            counter.add(1);
        }
    }
}
