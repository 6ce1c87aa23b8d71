//! Counters of one event loop. Only the loop adds; other threads read.

use haul_http::status::Status;
use haul_server::{ConnectionCounters, SingleWriterCounter, Transport};
use std::time::Duration;

/// The upper bounds of the latency histogram's classes, in microseconds; one more class has none.
pub const LATENCY_BOUNDS_US: [u64; 12] = [
    100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000,
    30_000_000,
];

/// Counters of one [`Transport`].
#[derive(Debug, Default)]
pub struct TransportCounters {
    /// Bytes that sockets accepted.
    pub bytes: SingleWriterCounter,
    /// Of those, the bytes whose sending was timed.
    pub timed_bytes: SingleWriterCounter,
    /// The event loop's CPU time for `timed_bytes`, in nanoseconds.
    pub timed_ns: SingleWriterCounter,
}

/// Counters of one event loop.
#[derive(Debug, Default)]
pub struct Counters {
    /// The connections.
    pub connections: ConnectionCounters,
    /// Responses by the first digit of their status, from 1.
    pub responses: [SingleWriterCounter; 5],
    /// Responses by the time from the request's head to the last byte in the socket.
    pub latencies: [SingleWriterCounter; LATENCY_BOUNDS_US.len() + 1],
    /// The sum of these times, in microseconds.
    pub latency_us: SingleWriterCounter,
    transports: [TransportCounters; Transport::COUNT],
    /// Send methods that the kernel refused.
    pub fallbacks: SingleWriterCounter,
    /// Responses cut short because their file changed.
    pub cut_short: SingleWriterCounter,
    /// Jobs that may wait for the disk.
    pub disk_waits: SingleWriterCounter,
    /// Log lines dropped because they could not be written fast enough.
    pub log_dropped: SingleWriterCounter,
}

impl Counters {
    /// Counts a response.
    pub fn responded(&self, status: Status) {
        let class = usize::from(status.code / 100);
        if let Some(counter) = class.checked_sub(1).and_then(|index| self.responses.get(index)) {
            counter.add(1);
        }
    }

    /// Counts the time that a response took.
    pub fn took(&self, time: Duration) {
        let us = time.as_micros() as u64;
        let class = LATENCY_BOUNDS_US.iter().position(|&bound| us <= bound);
        self.latencies[class.unwrap_or(LATENCY_BOUNDS_US.len())].add(1);
        self.latency_us.add(us);
    }

    /// Counts bytes that a socket accepted, and their CPU time if it was measured.
    pub fn sent(&self, transport: Transport, bytes: u64, cost: Option<Duration>) {
        let counters = &self.transports[transport.index()];
        counters.bytes.add(bytes);
        if let Some(cost) = cost {
            counters.timed_bytes.add(bytes);
            counters.timed_ns.add(cost.as_nanos() as u64);
        }
    }

    /// The counters of a transport.
    pub fn by(&self, transport: Transport) -> &TransportCounters {
        &self.transports[transport.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_transport_is_counted_apart() {
        let counters = Counters::default();
        for (at, transport) in Transport::all().enumerate() {
            counters.sent(transport, at as u64 + 1, Some(Duration::from_nanos(at as u64)));
        }
        for (at, transport) in Transport::all().enumerate() {
            let counted = counters.by(transport);
            let counts = (counted.bytes.get(), counted.timed_ns.get());
            assert_eq!(counts, (at as u64 + 1, at as u64), "{}", transport.name());
        }
    }

    #[test]
    fn each_latency_is_in_the_class_of_its_bound() {
        let counters = Counters::default();
        for us in [0, 100, 101, 30_000_000, 30_000_001] {
            counters.took(Duration::from_micros(us));
        }
        let counts: Vec<_> = counters.latencies.iter().map(SingleWriterCounter::get).collect();
        assert_eq!((counts[0], counts[1], counts[11], counts[12]), (2, 1, 1, 1));
    }
}
