//! How far apart two CPUs are: the time a cache line takes from one to the other and back.
//!
//! Packet memory that one host has read is written by the other next, so this time is in the cost of every
//! copy. Two CPUs of one core complex answer in about 50 ns, two of different ones in about 300. A hypervisor
//! may move a guest's CPUs from the one to the other at any moment without a word.

use crate::{Lab, LabError};
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

/// Round trips in a batch, and batches. The shortest batch counts: the others were interrupted.
const TRIPS: u32 = 100;
const BATCHES: u32 = 10;
/// When to give up. A CPU that is kept from running for this long says nothing about distance.
const PATIENCE: Duration = Duration::from_millis(200);

/// A flag alone on its cache line (and on the line next to it, which some CPUs fetch along).
#[repr(align(128))]
struct Flag(AtomicU32);

impl Lab {
    /// The round trip of a cache line between the two hosts' CPUs, the shortest of a few batches.
    /// `None` where both hosts share a CPU, and where one of them was kept from running.
    pub fn cache_line_round_trip(&self) -> Result<Option<Duration>, LabError> {
        if self.sender.cpu() == self.receiver.cpu() {
            return Ok(None);
        }
        let flag = Flag(AtomicU32::new(0));
        thread::scope(|scope| {
            let answering = scope.spawn(|| self.receiver.run(|| answer(&flag)));
            let asked = self.sender.run(|| ask(&flag));
            // Ends by itself: each wait has its own deadline.
            let answered =
                answering.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            answered?;
            asked
        })
    }
}

fn ask(flag: &Flag) -> Option<Duration> {
    let deadline = Instant::now() + PATIENCE;
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

fn answer(flag: &Flag) -> Option<()> {
    let deadline = Instant::now() + PATIENCE;
    for number in (0..TRIPS * BATCHES).map(|trip| 2 * trip) {
        wait_for(flag, number + 1, deadline)?;
        flag.0.store(number + 2, Release);
    }
    Some(())
}

fn wait_for(flag: &Flag, number: u32, deadline: Instant) -> Option<()> {
    /// Looks at the flag between two looks at the clock.
    const LOOKS: u32 = 10_000;
    loop {
        for _ in 0..LOOKS {
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
    fn two_cpus_are_some_way_apart() {
        let lab = match Lab::veth(&crate::Settings::default()) {
            Ok(lab) => lab,
            Err(error) => {
                return eprintln!(
                    "SKIPPED: CPUs' distance is not tested, there is no lab: {error}"
                );
            }
        };
        // A reading says nothing where a CPU was kept away; ten in a row would be two seconds of that.
        let trip = (0..10).find_map(|_| lab.cache_line_round_trip().unwrap()).unwrap();
        // A load from the core's own cache takes a nanosecond, and nothing on one board takes ten microseconds.
        assert!(trip > Duration::from_nanos(4) && trip < Duration::from_micros(10), "{trip:?}");
    }

    #[test]
    fn an_answer_that_never_comes_is_given_up() {
        let flag = Flag(AtomicU32::new(0));
        assert_eq!(ask(&flag), None);
    }
}
