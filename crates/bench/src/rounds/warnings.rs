//! What in any run deserves a warning, whatever was measured.

use super::{Run, Series};
use crate::stats::VERDICT_ROUNDS_MIN;
use crate::topology::Quiet;
use crate::warning::{Kind, Warning};
use haul_soak::Baseline;

/// Steal beyond this bends figures. `/proc/stat` counts it in ticks of 10 ms, so that one tick is 5 % of a
/// window of 200 ms.
const STEAL_PERCENT: f64 = 6.0;
/// Quiet CPUs' speed may change this much between two calibrations.
const DRIFT_PERCENT: f64 = 10.0;
/// Other processes may take this much of a CPU that should be quiet.
const DISTURBANCE_PERCENT: f64 = 3.0;
/// Below this load, what other processes do on a quiet machine (half a percent) is a good part of it.
pub(crate) const LOW_LOAD_PERCENT: f64 = 5.0;
/// An interval may be this wide, as a share of its median to each side.
const SPREAD: f64 = 0.10;

impl Run<'_> {
    /// What a pair of calibrations says about the machine.
    pub(super) fn note_calibration(&mut self, before: &Quiet, after: &Quiet) {
        let drift =
            most(before.here.drift_percent(&after.here), before.there.drift_percent(&after.there));
        if drift.abs() > DRIFT_PERCENT {
            self.drifts.push(drift);
        }
        let readings = [&before.here, &after.here, &before.there, &after.there];
        let disturbance =
            readings.into_iter().map(Baseline::disturbance_percent).fold(0.0, f64::max);
        if disturbance > DISTURBANCE_PERCENT {
            self.disturbances.push(disturbance);
        }
    }

    /// What the rounds say about themselves; `cost` is the figure that the rows are compared by, and `name` what
    /// a row is called.
    pub(crate) fn warn<C, R>(
        &mut self,
        rows: &[Series<C, R>],
        name: impl Fn(&C) -> String,
        cost: impl Fn(&R) -> f64,
    ) {
        let mut warnings = Vec::new();
        if self.host.steal_percent > STEAL_PERCENT {
            warnings.push(Warning::new(
                Kind::Steal,
                format!(
                    "the hypervisor took up to {:.0} % of a CPU in a window; it is counted as load",
                    self.host.steal_percent
                ),
            ));
        }
        let measured = || rows.iter().filter(|row| !row.rounds.is_empty());
        warnings.extend(measured().map(|row| row.rounds.len()).min().and_then(too_few_rounds));
        if !self.drifts.is_empty() {
            let (rounds, worst) = (self.drifts.len(), self.drifts.iter().copied().fold(0.0, most));
            warnings.push(Warning::new(
                Kind::FrequencyDrift,
                format!(
                    "a quiet CPU ran up to {worst:+.0} % after a round against before it, in {rounds} of the rounds \
                     (frequency, or neighbours); loads do not depend on it, costs that wait for memory do"
                ),
            ));
        }
        if !self.disturbances.is_empty() {
            let worst = self.disturbances.iter().copied().fold(0.0, f64::max);
            let rounds = self.disturbances.len();
            warnings.push(Warning::new(
                Kind::Disturbed,
                format!(
                    "other processes took up to {worst:.1} % of a CPU that should have been quiet, in {rounds} of \
                     the rounds"
                ),
            ));
        }
        if self.slips > 0 {
            let words = format!(
                "windows that slipped, because a process was not woken in time, and were measured again: {}",
                self.slips
            );
            warnings.push(Warning::new(Kind::Slipped, words));
        }
        if self.repeats > 0 {
            let words = format!(
                "windows that were measured again because other programs ran in them: {}",
                self.repeats
            );
            warnings.push(Warning::new(Kind::Disturbed, words));
        }
        warnings.extend(unsteady(rows, &name, &cost));
        for row in measured() {
            if let Some(last) = row.failures.last() {
                let (name, count) = (name(&row.case), row.failures.len());
                let words = format!("{name}: rounds that failed: {count}, the last: {last}");
                warnings.push(Warning::new(Kind::Unsteady, words));
            }
        }
        self.warnings.extend(warnings);
    }
}

/// The one further from 0.
fn most(one: f64, other: f64) -> f64 {
    if other.abs() > one.abs() { other } else { one }
}

/// Where the least row has too few rounds.
pub(crate) fn too_few_rounds(rounds: usize) -> Option<Warning> {
    (rounds < VERDICT_ROUNDS_MIN).then(|| {
        let words = format!(
            "a row has {rounds} usable rounds, and a verdict takes {VERDICT_ROUNDS_MIN}: measure again, with more --rounds"
        );
        Warning::new(Kind::TooFewRounds, words)
    })
}

/// Rows whose rounds differ widely.
pub(crate) fn unsteady<C, R>(
    rows: &[Series<C, R>],
    name: impl Fn(&C) -> String,
    cost: impl Fn(&R) -> f64,
) -> Option<Warning> {
    let is_unsteady =
        |row: &&Series<C, R>| row.figure(&cost).is_some_and(|figure| figure.spread() > SPREAD);
    let unsteady: Vec<String> =
        rows.iter().filter(is_unsteady).map(|row| name(&row.case)).collect();
    (!unsteady.is_empty()).then(|| {
        let words = format!("cost differs by more than 10 % between rounds in {}", list(&unsteady));
        Warning::new(Kind::Unsteady, words)
    })
}

/// The first few, and how many more.
pub(crate) fn list(rows: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = rows.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match rows.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}
