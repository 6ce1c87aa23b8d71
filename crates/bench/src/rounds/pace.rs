//! The number and length of measurements, their time limit, and the progress of a run.

use crate::error::BenchError;
use crate::stats::VERDICT_ROUNDS_MIN;
use haul_soak::exclusive;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The most rounds that are accepted.
pub(super) const ROUNDS_MAX: usize = 1000;

/// The number of rounds, the length of a window and the time limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// How often each row is measured. With a time limit, rows of open questions are measured more
    /// often.
    pub rounds: usize,
    /// How long each row is measured in each round.
    pub window: Duration,
    /// The time limit; `None` for exactly `rounds` rounds.
    pub limit: Option<TimeLimit>,
}

/// The time in which an experiment has to answer its questions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeLimit {
    /// The start of the experiment.
    start: Instant,
    /// How long this process had waited at the start for another measurement. Later waiting does
    /// not count.
    waited: Duration,
    /// The time that the experiment may take.
    pub budget: Duration,
    /// The precision at which a row needs no more rounds: half the width of a ratio's interval, in
    /// percent of the ratio.
    pub within_percent: f64,
}

impl TimeLimit {
    /// A limit that begins now.
    pub fn starting_now(budget: Duration, within_percent: f64) -> Self {
        Self { start: Instant::now(), waited: exclusive::waited(), budget, within_percent }
    }

    /// The time of the budget that was used.
    fn elapsed(&self) -> Duration {
        let waited = exclusive::waited().saturating_sub(self.waited);
        self.start.elapsed().saturating_sub(waited)
    }

    /// The end of a share of the time that remains.
    pub(crate) fn end_of_share(&self, share: f64) -> Instant {
        Instant::now() + self.budget.saturating_sub(self.elapsed()).mul_f64(share)
    }
}

impl Pace {
    /// Twenty-one rounds.
    pub const FULL: Self = Self { rounds: 21, window: Duration::from_millis(50), limit: None };
    /// Fifteen rounds with shorter windows.
    ///
    /// Many short windows give narrower intervals than few long ones. A machine's speed changes by
    /// a fifth within a second, and the ratios of neighbouring windows are independent of earlier
    /// ones (docs/decisions/measurement.md).
    pub const QUICK: Self = Self { rounds: 15, window: Duration::from_millis(30), limit: None };

    /// The same windows, with a time limit: as many rounds as a verdict needs, then as many as the
    /// open questions need and the time allows.
    #[must_use]
    pub fn with_limit(self, limit: TimeLimit) -> Self {
        Self { rounds: VERDICT_ROUNDS_MIN, limit: Some(limit), ..self }
    }

    /// Whether the time limit is over.
    pub(crate) fn is_over(self) -> bool {
        self.limit.is_some_and(|limit| limit.elapsed() >= limit.budget)
    }

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
    /// The part of the run that is done: measurements, or milliseconds of a time limit.
    pub done: usize,
    /// The whole run, in the same unit.
    pub total: usize,
    /// The name of the next row.
    pub next: String,
}

/// Reports a run's progress and checks whether it was stopped.
pub(crate) struct Steps<'a> {
    done: usize,
    total: usize,
    limit: Option<TimeLimit>,
    is_stopped: &'a AtomicBool,
    report: &'a mut dyn FnMut(Progress),
}

impl<'a> Steps<'a> {
    pub(crate) fn new(
        total: usize,
        is_stopped: &'a AtomicBool,
        report: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { done: 0, total, limit: None, is_stopped, report }
    }

    /// Reports the progress by the time of a limit, if there is one.
    pub(crate) fn with_limit(mut self, limit: Option<TimeLimit>) -> Self {
        self.limit = limit;
        self
    }

    /// Reports the next step; returns whether to take it.
    pub(crate) fn go_on(&mut self, next: &str) -> bool {
        let (done, total) = match self.limit {
            None => (self.done.min(self.total), self.total),
            Some(limit) => {
                let total = limit.budget.as_millis() as usize;
                ((limit.elapsed().as_millis() as usize).min(total), total)
            }
        };
        (self.report)(Progress { done, total, next: next.into() });
        self.done += 1;
        !self.is_stopped.load(Relaxed)
    }
}
