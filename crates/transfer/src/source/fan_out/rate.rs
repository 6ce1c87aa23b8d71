//! How fast the hosts of a chain receive.

use haul_units::size_text;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time over which a rate is measured.
const RATE_TIME: Duration = Duration::from_secs(3);

/// How fast a host receives.
#[derive(Debug, Default)]
pub struct MemberRate {
    /// The bytes that the host had at some times of the last seconds.
    history: VecDeque<(Instant, u64)>,
    /// The highest rate so far, in bytes per second.
    pub highest: f64,
    /// Whether the host was moved to the end of the chain.
    pub was_moved: bool,
}

impl MemberRate {
    /// Records how many bytes the host has now.
    pub fn measure(&mut self, now: Instant, bytes: u64) {
        self.history.push_back((now, bytes));
        // The oldest record is at least as old as the time.
        while self.history.get(1).is_some_and(|(at, _)| now - *at >= RATE_TIME) {
            self.history.pop_front();
        }
        self.highest = self.highest.max(self.recent().unwrap_or(0.0));
    }

    /// The bytes per second of the last seconds; `None` before.
    pub fn recent(&self) -> Option<f64> {
        let ((begin, first), (end, last)) = (self.history.front()?, self.history.back()?);
        let time = *end - *begin;
        (time >= RATE_TIME).then(|| last.saturating_sub(*first) as f64 / time.as_secs_f64())
    }

    /// Begins to measure again.
    pub fn forget(&mut self) {
        self.history.clear();
    }
}

/// A rate for messages.
pub fn rate_text(bytes_per_s: f64) -> String {
    format!("{}/s", size_text(bytes_per_s as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_the_last_seconds() {
        let mut rate = MemberRate::default();
        let begun = Instant::now();
        let at = |tenths: u64| begun + Duration::from_millis(100 * tenths);
        for tenths in 0..30 {
            rate.measure(at(tenths), 1000 * tenths);
        }
        assert_eq!(rate.recent(), None);
        for tenths in 30..100 {
            rate.measure(at(tenths), 30_000 + 10 * (tenths - 30));
        }
        assert!((rate.recent().unwrap() - 100.0).abs() < 1.0);
        assert!((rate.highest - 10_000.0).abs() < 1.0);
        rate.forget();
        assert_eq!(rate.recent(), None);
    }
}
