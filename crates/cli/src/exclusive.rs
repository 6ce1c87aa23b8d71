//! Lets one measurement run at a time on this machine.

use crate::output::{self, Failure};
use haul_soak::exclusive::{self, Holder, Notice, Policy};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A command that measures. Reports at the end whether another haul measured at the same time.
pub struct Measuring(());

impl Measuring {
    /// Lets the first meter of this command wait until no other haul measures. With `is_forced`,
    /// and in a command that the other haul measures, the meter starts at once with a warning.
    pub fn manage(is_forced: bool, stop: &Arc<AtomicBool>) -> Self {
        exclusive::manage(Policy { is_forced, is_stopped: Arc::clone(stop), report });
        Self(())
    }

    /// Waits at once. Until then, signals end this process.
    pub fn begin(is_forced: bool) -> Result<Self, Failure> {
        Self::manage(is_forced, &Arc::default()).begin_now()
    }

    /// Like [`Self::begin`], for a command that cannot be forced.
    pub fn begin_unforced() -> Result<Self, Failure> {
        exclusive::manage(Policy {
            is_forced: false,
            is_stopped: Arc::default(),
            report: report_without_option,
        });
        Self(()).begin_now()
    }

    fn begin_now(self) -> Result<Self, Failure> {
        exclusive::begin().map_err(|error| output::bench_failure(error.into()))?;
        Ok(self)
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        if exclusive::is_disturbed() {
            eprintln!("haul: another haul measured at the same time: the figures are wrong");
        }
        exclusive::end();
    }
}

fn report(notice: Notice<'_>) {
    report_with_hint(notice, " (--force measures at once)");
}

fn report_without_option(notice: Notice<'_>) {
    report_with_hint(notice, "");
}

fn report_with_hint(notice: Notice<'_>, hint: &str) {
    match notice {
        Notice::Waiting(holder) => {
            eprintln!("haul: waiting until {} ends its measurement{hint}", describe(holder));
        }
        Notice::Together(holder) => {
            let name = describe(holder);
            eprintln!("haul: {name} measures at the same time: the figures of both are wrong");
        }
        Notice::Unknown(error) => {
            eprintln!("haul: cannot check for other measurements: {error}");
        }
    }
}

/// Names the process that measures.
fn describe(holder: &Holder) -> String {
    match holder.process {
        Some(process) if holder.command.is_empty() => format!("haul (process {process})"),
        Some(process) => format!("process {process} ({})", holder.command),
        None => "haul in another container".into(),
    }
}
