//! Counters with one writer: an addition is a load and a store, not a locked instruction.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub struct SingleWriterCounter(AtomicU64);

impl SingleWriterCounter {
    /// Adds `count`. Only the owning thread may call this: concurrent additions are lost.
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// Subtracts `count`. Only the owning thread may call this.
    pub fn subtract(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(count), Relaxed);
    }

    /// Sets the value. Only the owning thread may call this.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters of one event loop's connections.
#[derive(Debug, Default)]
pub struct ConnectionCounters {
    /// Connections accepted.
    pub accepted: SingleWriterCounter,
    /// Connections open.
    pub open: SingleWriterCounter,
    /// Connections that are accepted and wait for a place ([`crate::event_loop::LoopSettings`]).
    pub waiting: SingleWriterCounter,
    /// Connections closed before their first byte was read: their client had as many as it may
    /// have, or too many of them waited for a place.
    pub refused: SingleWriterCounter,
    /// Connections closed to make room for new ones.
    pub evicted: SingleWriterCounter,
    /// Connections closed because the peer exceeded a time limit; idle ones are not counted.
    pub timed_out: SingleWriterCounter,
}
