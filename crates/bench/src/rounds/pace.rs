//! The number and length of measurements, and the progress of a run.

use crate::error::BenchError;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The most rounds that are accepted.
const ROUNDS_MAX: usize = 1000;

/// The number of rounds and the length of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// How often each row is measured.
    pub rounds: usize,
    /// How long each row is measured in each round.
    pub window: Duration,
}

impl Pace {
    /// Twenty-one rounds.
    pub const FULL: Self = Self { rounds: 21, window: Duration::from_millis(50) };
    /// Fifteen rounds with shorter windows.
    ///
    /// Many short windows give narrower intervals than few long ones. A machine's speed changes by
    /// a fifth within a second, and the ratios of neighbouring windows are independent of earlier
    /// ones (docs/decisions/measurement.md).
    pub const QUICK: Self = Self { rounds: 15, window: Duration::from_millis(30) };

    /// Refuses a number of rounds that is 0 or too large.
    pub fn check(self) -> Result<(), BenchError> {
        if (1..=ROUNDS_MAX).contains(&self.rounds) {
            return Ok(());
        }
        Err(BenchError::BadInput(format!("rounds must be 1 to {ROUNDS_MAX}, not {}", self.rounds)))
    }
}

/// The progress of a run.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Measurements completed, counting every row of every round.
    pub done: usize,
    /// Measurements in total.
    pub total: usize,
    /// The name of the next row.
    pub next: String,
}

/// Reports a run's progress and checks whether it was stopped.
pub(crate) struct Steps<'a> {
    done: usize,
    total: usize,
    is_stopped: &'a AtomicBool,
    report: &'a mut dyn FnMut(Progress),
}

impl<'a> Steps<'a> {
    pub(crate) fn new(
        total: usize,
        is_stopped: &'a AtomicBool,
        report: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { done: 0, total, is_stopped, report }
    }

    /// Reports the next step; returns whether to take it.
    pub(crate) fn go_on(&mut self, next: &str) -> bool {
        (self.report)(Progress { done: self.done, total: self.total, next: next.into() });
        self.done += 1;
        !self.is_stopped.load(Relaxed)
    }
}
