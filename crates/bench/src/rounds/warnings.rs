//! The warnings that any experiment can have.

use super::{Run, Series};
use crate::stats::VERDICT_ROUNDS_MIN;
use crate::topology::Quiet;
use crate::warning::{Kind, Warning};
use haul_soak::Baseline;
use std::time::Duration;

/// The largest steal time without a warning, in percent. `/proc/stat` counts it in ticks of 10 ms,
/// so one tick is 5 % of a window of 200 ms.
const STEAL_PERCENT_MAX: f64 = 6.0;
/// The largest change of an idle CPU's speed between two calibrations without a warning.
const DRIFT_PERCENT_MAX: f64 = 10.0;
/// The largest CPU use of other processes in a calibration without a warning.
const DISTURBANCE_PERCENT_MAX: f64 = 3.0;
/// Below this load, what other processes use on an idle machine (half a percent) is a considerable
/// part of it.
pub(crate) const LOW_LOAD_PERCENT_MAX: f64 = 5.0;
/// The widest interval without a warning: half its width, as a share of the median.
const SPREAD_MAX: f64 = 0.10;

impl Run<'_> {
    /// Records speed changes and disturbances that two calibrations show.
    pub(super) fn record_calibration(&mut self, before: &Quiet, after: &Quiet) {
        let drift = larger_magnitude(
            before.here.drift_percent(&after.here),
            before.there.drift_percent(&after.there),
        );
        self.noise.drift_percents.push(drift.abs());
        if drift.abs() > DRIFT_PERCENT_MAX {
            self.drifts.push(drift);
        }
        let readings = [&before.here, &after.here, &before.there, &after.there];
        let disturbance =
            readings.into_iter().map(Baseline::disturbance_percent).fold(0.0, f64::max);
        if disturbance > DISTURBANCE_PERCENT_MAX {
            self.disturbances.push(disturbance);
        }
    }

    /// Adds the warnings about all rows. `cost` is the estimate that the rows are compared by, and
    /// `name` the name of a row.
    pub(crate) fn warn<C, R>(
        &mut self,
        rows: &[Series<C, R>],
        name: impl Fn(&C) -> String,
        cost: impl Fn(&R) -> f64,
    ) {
        let mut warnings = Vec::new();
        if self.host.steal_percent > STEAL_PERCENT_MAX {
            warnings.push(Warning::new(
                Kind::Steal,
                format!(
                    "the hypervisor took up to {:.0} % of a CPU in a window; it is counted as load",
                    self.host.steal_percent
                ),
            ));
        }
        let measured = || rows.iter().filter(|row| !row.rounds.is_empty());
        let rounds_min =
            self.deciding_rounds.or_else(|| measured().map(|row| row.rounds.len()).min());
        let needed = self.time_needed;
        warnings.extend(rounds_min.and_then(|rounds| few_rounds_warning(rounds, needed)));
        if !self.drifts.is_empty() {
            let rounds = self.drifts.len();
            let worst = self.drifts.iter().copied().fold(0.0, larger_magnitude);
            warnings.push(Warning::new(
                Kind::FrequencyDrift,
                format!(
                    "an idle CPU's speed changed by up to {worst:+.0} % during a round, in \
                     {rounds} of the rounds (frequency, or neighbours); loads do not depend on it, \
                     costs that wait for memory do"
                ),
            ));
        }
        if !self.disturbances.is_empty() {
            let worst = self.disturbances.iter().copied().fold(0.0, f64::max);
            let rounds = self.disturbances.len();
            warnings.push(Warning::new(
                Kind::Disturbed,
                format!(
                    "other processes took up to {worst:.1} % of a CPU that should have been idle, \
                     in {rounds} of the rounds"
                ),
            ));
        }
        if self.slips > 0 {
            let detail = format!(
                "windows that slipped, because a process was not woken in time, and were measured \
                 again: {}",
                self.slips
            );
            warnings.push(Warning::new(Kind::Slipped, detail));
        }
        if self.disturbed_windows > 0 {
            let detail = format!(
                "windows that were measured again because other programs ran in them: {}",
                self.disturbed_windows
            );
            warnings.push(Warning::new(Kind::Disturbed, detail));
        }
        warnings.extend(unsteady_warning(rows, &name, &cost));
        for row in measured() {
            if let Some(last) = row.failures.last() {
                let (name, count) = (name(&row.case), row.failures.len());
                let detail = format!("{name}: rounds that failed: {count}, the last: {last}");
                warnings.push(Warning::new(Kind::Unsteady, detail));
            }
        }
        self.warnings.extend(warnings);
    }
}

/// The value with the larger magnitude.
fn larger_magnitude(one: f64, other: f64) -> f64 {
    if other.abs() > one.abs() { other } else { one }
}

/// A warning if the row with the fewest usable rounds has too few. `needed` is the time that enough
/// of them take, if the time limit was too short.
pub(crate) fn few_rounds_warning(rounds: usize, needed: Option<Duration>) -> Option<Warning> {
    (rounds < VERDICT_ROUNDS_MIN).then(|| {
        let remedy = needed.map_or("with more --rounds".into(), |needed| {
            format!("with --for {}s", needed.as_secs().next_multiple_of(10).max(10))
        });
        let detail = format!(
            "a row has {rounds} usable rounds, and a verdict takes {VERDICT_ROUNDS_MIN}: measure \
             again, {remedy}"
        );
        Warning::new(Kind::TooFewRounds, detail)
    })
}

/// A warning that names the rows whose rounds differ widely.
pub(crate) fn unsteady_warning<C, R>(
    rows: &[Series<C, R>],
    name: impl Fn(&C) -> String,
    cost: impl Fn(&R) -> f64,
) -> Option<Warning> {
    let is_unsteady = |row: &&Series<C, R>| {
        row.estimate(&cost).is_some_and(|estimate| estimate.spread() > SPREAD_MAX)
    };
    let names: Vec<String> = rows.iter().filter(is_unsteady).map(|row| name(&row.case)).collect();
    (!names.is_empty()).then(|| {
        let detail =
            format!("cost differs by more than 10 % between rounds in {}", short_list(&names));
        Warning::new(Kind::Unsteady, detail)
    })
}

/// The first few rows, and the number of the others.
pub(crate) fn short_list(rows: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = rows.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match rows.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}
