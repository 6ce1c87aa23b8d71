//! How often and how long to measure, and how far a run has come.

use crate::BenchError;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The most rounds that make sense.
const ROUNDS_MAX: usize = 1000;

/// How often and how long to measure.
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
    /// Many short windows tell more than few long ones: a machine's speed moves by a fifth within a second, and the ratios of
    /// neighbouring windows do not depend on those before them (ARCHITECTURE.md).
    pub const QUICK: Self = Self { rounds: 15, window: Duration::from_millis(30) };

    pub(crate) fn check(self) -> Result<(), BenchError> {
        if (1..=ROUNDS_MAX).contains(&self.rounds) {
            return Ok(());
        }
        Err(BenchError::BadInput(format!("rounds must be 1 to {ROUNDS_MAX}, not {}", self.rounds)))
    }
}

/// How far a run has come.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Rows measured, counting each round.
    pub done: usize,
    /// How many there will be.
    pub total: usize,
    /// What is measured next.
    pub next: String,
}

/// Tells how far a run has come, and asks whether it is to go on.
pub(crate) struct Steps<'a> {
    done: usize,
    total: usize,
    is_stopped: &'a AtomicBool,
    tell: &'a mut dyn FnMut(Progress),
}

impl<'a> Steps<'a> {
    pub(crate) fn new(
        total: usize,
        is_stopped: &'a AtomicBool,
        tell: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { done: 0, total, is_stopped, tell }
    }

    /// Says what comes next; returns whether to do it.
    pub(crate) fn go_on(&mut self, next: &str) -> bool {
        (self.tell)(Progress { done: self.done, total: self.total, next: next.into() });
        self.done += 1;
        !self.is_stopped.load(Relaxed)
    }
}
