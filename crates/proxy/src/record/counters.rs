//! The counters of an event loop.

use crate::record::connection::{ConnectionBytes, DirectionBytes};
use crate::record::log::End;
use haul_server::{ConnectionCounters, SingleWriterCounter};
use std::sync::Arc;

/// The counters of one event loop.
#[derive(Debug, Default)]
pub struct LoopCounters {
    /// The connections.
    pub connections: ConnectionCounters,
    /// The clients of each listener, in the order of the configuration.
    pub listeners: Box<[SingleWriterCounter]>,
    /// Connections by their end, in the order of [`End::ALL`].
    pub ends: [SingleWriterCounter; End::ALL.len()],
    pub to_upstream: DirectionCounters,
    pub to_client: DirectionCounters,
}

/// Bytes of ended connections, by how they were forwarded.
#[derive(Debug, Default)]
pub struct DirectionCounters {
    pub spliced_bytes: SingleWriterCounter,
    pub copied_bytes: SingleWriterCounter,
}

impl DirectionCounters {
    fn record(&self, bytes: &DirectionBytes) {
        self.spliced_bytes.add(bytes.spliced_bytes);
        self.copied_bytes.add(bytes.copied_bytes);
    }
}

impl LoopCounters {
    /// The counters of so many loops, which have so many listeners.
    pub fn of_loops(loops: usize, listeners: usize) -> Vec<Arc<Self>> {
        let listeners = || (0..listeners).map(|_| SingleWriterCounter::default()).collect();
        let counters = |_| Arc::new(Self { listeners: listeners(), ..Self::default() });
        (0..loops).map(counters).collect()
    }

    /// Counts a connection that ended.
    pub fn record(&self, end: End, bytes: &ConnectionBytes) {
        if let Some(at) = End::ALL.iter().position(|&other| other == end) {
            self.ends[at].add(1);
        }
        self.to_upstream.record(&bytes.to_upstream);
        self.to_client.record(&bytes.to_client);
    }
}
