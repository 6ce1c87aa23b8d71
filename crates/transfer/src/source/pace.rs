//! Limits the bytes of content per second of all streams together.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A limit of bytes per second.
#[derive(Debug)]
pub struct Pace {
    /// Bytes per second; 0 for no limit.
    rate: u64,
    /// When the bytes that were sent so far may be gone.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// A limit; 0 for no limit.
    pub fn new(rate: u64) -> Self {
        Self { rate, free_at: Mutex::default() }
    }

    /// The time to wait after so many bytes were sent.
    pub fn take(&self, bytes: u64) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let time = Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        let now = Instant::now();
        let free_at = {
            let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let at = free_at.map_or(now, |at| at.max(now)) + time;
            *free_at.insert(at)
        };
        free_at - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_streams_together_keep_to_the_rate() {
        let (pace, begun) = (Pace::new(1_000_000), Instant::now());
        let waits: Vec<_> = (0..10).map(|_| begun.elapsed() + pace.take(10_000)).collect();
        assert!(waits[9] >= Duration::from_millis(100), "{waits:?}");
        assert_eq!(Pace::new(0).take(u64::MAX), Duration::ZERO);
    }
}
