//! What one event loop has done, for whoever wants to know meanwhile.
//!
//! Only the loop itself adds; others read. So an addition is a load and a store, not a locked instruction.

use haul::SendMethod;
use haul_http::status::Status;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The upper ends of the latency histogram's classes, in microseconds; one more class has none.
pub const LATENCY_CLASSES_US: [u64; 12] = [
    100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000,
    30_000_000,
];

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

/// How bytes came into a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the server's memory: heads, small files, pages.
    Memory,
    /// Encrypted in the program.
    Tls,
    /// From the server's memory, encrypted in the kernel.
    KernelTls,
    /// A file, by this path of the library.
    SendMethod(SendMethod),
    /// A file, by this path of the library, encrypted in the kernel.
    KernelTlsMethod(SendMethod),
}

impl Way {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let paths = || SendMethod::ALL.into_iter();
        let others = [Self::Memory, Self::Tls, Self::KernelTls].into_iter();
        others.chain(paths().map(Self::SendMethod)).chain(paths().map(Self::KernelTlsMethod))
    }

    /// Its name in metrics.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::Memory => "memory".into(),
            Self::Tls => "tls".into(),
            Self::KernelTls => "ktls".into(),
            Self::SendMethod(path) => path.name().into(),
            Self::KernelTlsMethod(path) => format!("ktls+{path}").into(),
        }
    }

    /// Its place among [`Way::all`].
    fn index(self) -> usize {
        let of = |path| SendMethod::ALL.iter().position(|&other| other == path).unwrap_or(0);
        match self {
            Self::Memory => 0,
            Self::Tls => 1,
            Self::KernelTls => 2,
            Self::SendMethod(path) => 3 + of(path),
            Self::KernelTlsMethod(path) => 3 + SendMethod::ALL.len() + of(path),
        }
    }
}

/// What went one way.
#[derive(Debug, Default)]
pub struct WayCounters {
    /// Bytes that sockets took.
    pub bytes: Counter,
    /// Of those, the bytes whose sending was timed.
    pub timed_bytes: Counter,
    /// The loop's CPU time for those, in nanoseconds.
    pub timed_ns: Counter,
}

/// What one event loop has done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Responses by the first digit of their status, from 1.
    pub responses: [Counter; 5],
    /// Responses by how long they took, from the request's head to the last byte with the kernel.
    pub latencies: [Counter; LATENCY_CLASSES_US.len() + 1],
    /// How long all of them took, in microseconds.
    pub latency_us: Counter,
    /// Bytes by the way they took.
    ways: [WayCounters; 3 + 2 * SendMethod::ALL.len()],
    /// Times that a path was stepped down from.
    pub fallbacks: Counter,
    /// Connections that were accepted.
    pub accepted: Counter,
    /// Connections that are open.
    pub open: Counter,
    /// Connections that were ended for want of room.
    pub crowded_out: Counter,
    /// Connections whose client was too slow.
    pub timed_out: Counter,
    /// Responses that were cut short because their file changed meanwhile.
    pub cut_short: Counter,
    /// Times that the disk had to be waited for.
    pub disk_waits: Counter,
    /// Lines of the access log that were dropped because they could not be written fast enough.
    pub log_dropped: Counter,
}

impl Counters {
    /// Counts a response.
    pub fn responded(&self, status: Status) {
        let class = usize::from(status.code / 100);
        if let Some(counter) = class.checked_sub(1).and_then(|index| self.responses.get(index)) {
            counter.add(1);
        }
    }

    /// Counts how long a response took.
    pub fn took(&self, time: Duration) {
        let us = time.as_micros() as u64;
        let class = LATENCY_CLASSES_US
            .iter()
            .position(|&end| us <= end)
            .unwrap_or(LATENCY_CLASSES_US.len());
        self.latencies[class].add(1);
        self.latency_us.add(us);
    }

    /// Counts bytes that a socket took, and what they cost where that was timed.
    pub fn moved(&self, way: Way, bytes: u64, cost: Option<Duration>) {
        let counters = &self.ways[way.index()];
        counters.bytes.add(bytes);
        if let Some(cost) = cost {
            counters.timed_bytes.add(bytes);
            counters.timed_ns.add(cost.as_nanos() as u64);
        }
    }

    /// What went one way.
    pub fn by(&self, way: Way) -> &WayCounters {
        &self.ways[way.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_a_place_of_its_own() {
        let counters = Counters::default();
        for (at, way) in Way::all().enumerate() {
            counters.moved(way, at as u64 + 1, Some(Duration::from_nanos(at as u64)));
        }
        for (at, way) in Way::all().enumerate() {
            let counted = counters.by(way);
            assert_eq!(
                (counted.bytes.get(), counted.timed_ns.get()),
                (at as u64 + 1, at as u64),
                "{}",
                way.name()
            );
        }
        assert_eq!(Way::all().count(), counters.ways.len());
    }

    #[test]
    fn latencies_fall_into_their_classes() {
        let counters = Counters::default();
        for us in [0, 100, 101, 30_000_000, 30_000_001] {
            counters.took(Duration::from_micros(us));
        }
        let counts: Vec<_> = counters.latencies.iter().map(Counter::get).collect();
        assert_eq!((counts[0], counts[1], counts[11], counts[12]), (2, 1, 1, 1));
    }
}
