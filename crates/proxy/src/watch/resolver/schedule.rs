//! When each host name is resolved again.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// The shortest time between two resolutions of a name, even if its TTL is shorter. Also the time
/// after the first failure, which doubles with each further failure.
const DELAY_MIN: Duration = Duration::from_secs(1);

/// The names, each with the time of its next resolution.
#[derive(Debug)]
pub struct Schedule {
    /// The longest time between two resolutions.
    delay_max: Duration,
    names: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    due: Instant,
    /// A thread resolves the name.
    is_busy: bool,
    /// The number of failed resolutions in a row.
    failures: u32,
}

/// The result of a resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The addresses are valid for this time; `None` if their source does not state one.
    Resolved(Option<Duration>),
    Failed,
}

/// Whether an outcome differs from the outcome of the resolution before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    None,
    /// The first failure, or the first failure after a success.
    Failed,
    /// The first success after a failure.
    Recovered,
}

/// The next task of a thread.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Resolve this name now.
    Resolve(String),
    /// Wait until this time.
    At(Instant),
    /// All names are being resolved, or the schedule lacks names.
    Nothing,
}

impl Schedule {
    /// A schedule without names.
    pub fn new(delay_max: Duration) -> Self {
        Self { delay_max, names: HashMap::new() }
    }

    /// Replaces the names. New names are due at once.
    pub fn set_names(&mut self, names: &HashSet<&str>, now: Instant) {
        self.names.retain(|name, _| names.contains(name.as_str()));
        for &name in names {
            if !self.names.contains_key(name) {
                let entry = Entry { due: now, is_busy: false, failures: 0 };
                self.names.insert(name.to_owned(), entry);
            }
        }
    }

    /// The next task. A name that is being resolved is not due again before [`Schedule::record`].
    pub fn next(&mut self, now: Instant) -> Next {
        let waiting = self.names.iter_mut().filter(|(_, entry)| !entry.is_busy);
        match waiting.min_by_key(|(_, entry)| entry.due) {
            Some((name, entry)) if entry.due <= now => {
                entry.is_busy = true;
                Next::Resolve(name.clone())
            }
            Some((_, entry)) => Next::At(entry.due),
            None => Next::Nothing,
        }
    }

    /// Records the outcome of a resolution.
    pub fn record(&mut self, name: &str, outcome: Outcome, now: Instant) -> Change {
        // The name may have left the configuration.
        let Some(entry) = self.names.get_mut(name) else { return Change::None };
        let failures = std::mem::take(&mut entry.failures);
        entry.is_busy = false;
        let (delay, change) = match outcome {
            Outcome::Resolved(time_to_live) => {
                let change = if failures > 0 { Change::Recovered } else { Change::None };
                (time_to_live.unwrap_or(self.delay_max), change)
            }
            Outcome::Failed => {
                entry.failures = failures.saturating_add(1);
                let doubled = 2u32.saturating_pow(failures);
                let change = if failures == 0 { Change::Failed } else { Change::None };
                (DELAY_MIN.saturating_mul(doubled), change)
            }
        };
        entry.due = now + delay.max(DELAY_MIN).min(self.delay_max);
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn schedule(names: &[&str]) -> (Schedule, Instant) {
        let (mut schedule, now) = (Schedule::new(INTERVAL), Instant::now());
        schedule.set_names(&names.iter().copied().collect(), now);
        (schedule, now)
    }

    /// The seconds until a name is due after these outcomes.
    fn seconds_after(outcomes: &[Outcome]) -> u64 {
        let (mut schedule, now) = schedule(&["a"]);
        for &outcome in outcomes {
            schedule.record("a", outcome, now);
        }
        let Next::At(due) = schedule.next(now) else { panic!("it is not due yet") };
        (due - now).as_secs()
    }

    #[test]
    fn a_name_is_due_when_its_time_to_live_is_over_or_the_interval() {
        let after = |seconds| seconds_after(&[Outcome::Resolved(seconds)]);
        assert_eq!(after(Some(Duration::from_secs(5))), 5);
        assert_eq!(after(Some(Duration::ZERO)), 1);
        assert_eq!(after(Some(Duration::MAX)), 30);
        assert_eq!(after(None), 30);
    }

    #[test]
    fn the_time_after_a_failure_doubles() {
        let failed = [Outcome::Failed; 40];
        let expected = [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (40, 30)];
        for (failures, seconds) in expected {
            assert_eq!(seconds_after(&failed[..failures]), seconds, "{failures}");
        }
        let recovered = Outcome::Resolved(None);
        assert_eq!(seconds_after(&[Outcome::Failed, recovered, Outcome::Failed]), 1);
    }

    #[test]
    fn the_first_failure_and_the_first_success_are_changes() {
        let (mut schedule, now) = schedule(&["a"]);
        let outcomes = [Outcome::Failed, Outcome::Failed, Outcome::Resolved(None)];
        let changes = outcomes.map(|outcome| schedule.record("a", outcome, now));
        assert_eq!(changes, [Change::Failed, Change::None, Change::Recovered]);
        assert_eq!(schedule.record("a", Outcome::Resolved(None), now), Change::None);
        assert_eq!(schedule.record("b", Outcome::Failed, now), Change::None);
    }

    #[test]
    fn each_name_is_resolved_once_at_a_time_and_those_that_are_gone_are_not() {
        let (mut schedule, now) = schedule(&["a", "b"]);
        let next = [schedule.next(now), schedule.next(now)];
        assert!(next.contains(&Next::Resolve("a".into())), "{next:?}");
        assert!(next.contains(&Next::Resolve("b".into())), "{next:?}");
        assert_eq!(schedule.next(now), Next::Nothing);
        schedule.record("a", Outcome::Resolved(None), now);
        assert_eq!(schedule.next(now), Next::At(now + INTERVAL));
        // A name that stays keeps its time.
        schedule.set_names(&["a", "c"].into(), now);
        assert_eq!(schedule.next(now), Next::Resolve("c".into()));
        assert_eq!(schedule.next(now), Next::At(now + INTERVAL));
        assert_eq!(schedule.next(now + INTERVAL), Next::Resolve("a".into()));
        schedule.set_names(&HashSet::new(), now);
        assert_eq!(schedule.next(now), Next::Nothing);
    }
}
