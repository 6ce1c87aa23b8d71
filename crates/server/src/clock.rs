//! The time of an event loop, read once a turn.

use std::time::{Duration, Instant, SystemTime};

/// The time of an event loop. It stands still during a turn, except for [`Clock::elapsed_ns`].
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
    turn_started: Instant,
    now: SystemTime,
}

impl Clock {
    /// A clock that starts now.
    #[expect(clippy::new_without_default, reason = "the time of its making matters")]
    pub fn new() -> Self {
        let started = Instant::now();
        Self { started, turn_started: started, now: SystemTime::now() }
    }

    /// Reads the time. To be called at the start of a turn.
    pub fn tick(&mut self) {
        self.turn_started = Instant::now();
        self.now = SystemTime::now();
    }

    /// The time of day at the start of the turn.
    pub fn now(&self) -> SystemTime {
        self.now
    }

    /// The start of the turn.
    pub fn turn_started(&self) -> Instant {
        self.turn_started
    }

    /// Whole seconds from the clock's start to the start of the turn: the unit of deadlines.
    pub fn seconds(&self) -> u32 {
        (self.turn_started - self.started).as_secs() as u32
    }

    /// The time from the start of the turn until [`Clock::seconds`] changes.
    pub fn until_next_second(&self) -> Duration {
        const SECOND: Duration = Duration::from_secs(1);
        let elapsed = self.turn_started - self.started;
        SECOND.saturating_sub(Duration::from_nanos(elapsed.subsec_nanos().into()))
    }

    /// Nanoseconds from the clock's start until now.
    pub fn elapsed_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_until_the_next_second_ends_in_it() {
        let mut clock = Clock::new();
        for (elapsed_ms, seconds, left_ms) in [(0, 0, 1000), (300, 0, 700), (1999, 1, 1)] {
            clock.turn_started = clock.started + Duration::from_millis(elapsed_ms);
            assert_eq!(clock.seconds(), seconds);
            assert_eq!(clock.until_next_second(), Duration::from_millis(left_ms));
            clock.turn_started += clock.until_next_second();
            assert_eq!(clock.seconds(), seconds + 1);
        }
    }
}
