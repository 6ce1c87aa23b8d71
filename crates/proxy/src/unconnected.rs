//! Counts the connections that cannot be handed over yet, because their clients have neither an
//! upstream nor a place in a queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The number of such connections of an event loop.
#[derive(Debug, Default)]
pub struct UnconnectedCount(Arc<AtomicUsize>);

/// A connection counts as long as it keeps this value.
#[derive(Debug)]
pub struct Unconnected(Arc<AtomicUsize>);

impl UnconnectedCount {
    /// Counts another connection.
    pub fn add(&self) -> Unconnected {
        self.0.fetch_add(1, Relaxed);
        Unconnected(Arc::clone(&self.0))
    }

    /// The number of connections.
    pub fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for Unconnected {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
