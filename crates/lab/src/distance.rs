//! Cache-line latency between two CPUs: the time for a cache line to move from one to the other and
//! back.
//!
//! Packet memory that one host has read is written by the other next, so every copy's cost includes
//! this time. The round trip takes about 50 ns between two CPUs of one core complex, about 300 ns
//! between different ones. A hypervisor may move a guest's CPUs between the two cases at any time
//! without notice.

use crate::error::LabError;
use crate::lab::Lab;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

/// Round trips in a batch, and number of batches. The shortest batch counts: longer ones were
/// interrupted.
const TRIPS: u32 = 100;
const BATCHES: u32 = 10;
/// Time limit of the measurement. If a CPU is kept from running for this long, it yields no result.
const TIMEOUT: Duration = Duration::from_millis(200);

/// A flag alone on its cache line and on the adjacent line, which some CPUs prefetch.
#[repr(align(128))]
struct Flag(AtomicU32);

impl Lab {
    /// Measures the round trip of a cache line between the two hosts' CPUs, the shortest of a few
    /// batches.
    ///
    /// `None` if both hosts share a CPU, or if one of the CPUs was kept from running.
    pub fn cache_line_round_trip(&self) -> Result<Option<Duration>, LabError> {
        if self.sender.cpu() == self.receiver.cpu() {
            return Ok(None);
        }
        let flag = Flag(AtomicU32::new(0));
        thread::scope(|scope| {
            let responder = scope.spawn(|| self.receiver.run(|| respond(&flag)));
            let round_trip = self.sender.run(|| ping(&flag));
            // Ends without being stopped: each wait has its own deadline.
            let responded =
                responder.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            responded?;
            round_trip
        })
    }
}

fn ping(flag: &Flag) -> Option<Duration> {
    let deadline = Instant::now() + TIMEOUT;
    let mut shortest = Duration::MAX;
    for batch in 0..BATCHES {
        let started = Instant::now();
        for trip in 0..TRIPS {
            let number = 2 * (batch * TRIPS + trip);
            flag.0.store(number + 1, Release);
            wait_for(flag, number + 2, deadline)?;
        }
        shortest = shortest.min(started.elapsed());
    }
    Some(shortest / TRIPS)
}

fn respond(flag: &Flag) -> Option<()> {
    let deadline = Instant::now() + TIMEOUT;
    for number in (0..TRIPS * BATCHES).map(|trip| 2 * trip) {
        wait_for(flag, number + 1, deadline)?;
        flag.0.store(number + 2, Release);
    }
    Some(())
}

fn wait_for(flag: &Flag, number: u32, deadline: Instant) -> Option<()> {
    /// Reads of the flag between two reads of the clock.
    const POLLS_PER_CLOCK_READ: u32 = 10_000;
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if flag.0.load(Acquire) == number {
                return Some(());
            }
            spin_loop();
        }
        if Instant::now() >= deadline {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_line_round_trip_is_plausible() {
        let lab = match Lab::veth(&crate::lab::Settings::default()) {
            Ok(lab) => lab,
            Err(error) => {
                return eprintln!(
                    "SKIPPED: CPUs' distance is not tested, there is no lab: {error}"
                );
            }
        };
        // A CPU that was kept from running yields no result; ten such attempts take two seconds.
        let trip = (0..10).find_map(|_| lab.cache_line_round_trip().unwrap()).unwrap();
        // A load from the core's own cache takes a nanosecond; no round trip on one board takes ten
        // microseconds.
        assert!(trip > Duration::from_nanos(4) && trip < Duration::from_micros(10), "{trip:?}");
    }

    #[test]
    fn a_ping_without_a_response_times_out() {
        let flag = Flag(AtomicU32::new(0));
        assert_eq!(ping(&flag), None);
    }
}
