//! Lets one measurement run at a time on this machine.

use crate::output::Failure;
use haul_soak::exclusive::{Holder, MeasurementLock};
use std::thread;
use std::time::Duration;

/// Interval at which a waiting measurement checks whether the other ended.
const INTERVAL: Duration = Duration::from_millis(200);

/// The right to measure; without the lock if another measurement runs and this one was forced.
/// Reports at the end whether another one ran.
pub struct Measuring(Option<MeasurementLock>);

impl Measuring {
    /// Waits until no other haul measures on this machine. With `is_forced`, and in a command that
    /// the other haul measures, returns at once and prints a warning.
    pub fn begin(is_forced: bool) -> Result<Self, Failure> {
        let failed =
            |error| Failure::failed(format!("cannot look for other measurements: {error}"));
        let mut is_told = false;
        loop {
            let holder = match MeasurementLock::try_acquire().map_err(failed)? {
                Ok(lock) => return Ok(Self(Some(lock))),
                Err(holder) => holder,
            };
            let name = describe(&holder);
            if is_forced || holder.is_ancestor() {
                holder.disturb();
                eprintln!("haul: {name} measures at the same time: the figures of both are wrong");
                return Ok(Self(None));
            }
            if !is_told {
                eprintln!(
                    "haul: waiting until {name} ends its measurement (--force does not wait)"
                );
                is_told = true;
            }
            thread::sleep(INTERVAL);
        }
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        if self.0.as_ref().is_some_and(MeasurementLock::was_disturbed) {
            eprintln!("haul: another haul measured at the same time: the figures are wrong");
        }
    }
}

/// Names the process that measures.
pub fn describe(holder: &Holder) -> String {
    match holder.process {
        Some(process) if holder.command.is_empty() => format!("haul (process {process})"),
        Some(process) => format!("process {process} ({})", holder.command),
        None => "haul in another container".into(),
    }
}
