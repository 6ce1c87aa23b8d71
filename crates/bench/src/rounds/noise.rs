//! The noise of the machine during a run, and the bounds beyond which there is no verdict.
//!
//! Interleaved rounds and intervals already account for noise that hits all rows alike. The bounds
//! are for noise so strong that the machine measured is another one than the report names.

use crate::stats::Estimate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The largest mean steal of a verdict, in percent of a CPU.
const STEAL_PERCENT_MAX: f64 = 10.0;
/// The largest median change of an idle CPU's speed within a round of a verdict, in percent.
const DRIFT_PERCENT_MAX: f64 = 25.0;
/// The largest share of windows with other programs of a verdict, in percent. Beyond it, most
/// rounds that remain lie between two disturbed ones.
const DISTURBED_PERCENT_MAX: f64 = 50.0;

/// The noise of the machine during a run.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Noise {
    /// The CPU time that the hypervisor took, in percent of a CPU: the mean over all windows.
    pub steal_percent: f64,
    /// The change of an idle CPU's speed during a round, in percent: the median of its magnitude.
    pub drift_percent: f64,
    /// The share of windows in which other programs used a host's CPU, after repetitions.
    pub disturbed_percent: f64,
    /// Why the readings of the meter are wrong: a control group was throttled, or another haul
    /// measured at the same time. Absent if they are right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
}

impl Noise {
    /// The larger value of each kind.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            steal_percent: self.steal_percent.max(other.steal_percent),
            drift_percent: self.drift_percent.max(other.drift_percent),
            disturbed_percent: self.disturbed_percent.max(other.disturbed_percent),
            invalid: self.invalid.or(other.invalid),
        }
    }

    /// Why the run supports no verdict, as a clause: the run is invalid, or a reading of the noise
    /// is above its limit. `None` without such a reason.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let Self { steal_percent, drift_percent, disturbed_percent, invalid } = self;
        if invalid.is_some() {
            invalid.clone()
        } else if *steal_percent > STEAL_PERCENT_MAX {
            Some(format!("the hypervisor took {steal_percent:.0} % of a CPU"))
        } else if *disturbed_percent > DISTURBED_PERCENT_MAX {
            Some(format!("other programs ran in {disturbed_percent:.0} % of the windows"))
        } else if *drift_percent > DRIFT_PERCENT_MAX {
            Some(format!("the speed of an idle CPU changed by {drift_percent:.0} % within a round"))
        } else {
            None
        }
    }
}

/// Readings of the noise, one for each window or round.
#[derive(Debug, Default)]
pub(super) struct NoiseReadings {
    /// Steal in each window.
    pub steal_percents: Vec<f64>,
    /// Magnitude of the change of an idle CPU's speed in each round.
    pub drift_percents: Vec<f64>,
    /// Whether other programs ran, for each window.
    pub disturbed: Vec<bool>,
}

impl NoiseReadings {
    pub(super) fn summary(&self) -> Noise {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let disturbed: Vec<f64> =
            self.disturbed.iter().map(|&disturbed| if disturbed { 100.0 } else { 0.0 }).collect();
        Noise {
            steal_percent: mean(&self.steal_percents),
            drift_percent: Estimate::of(&self.drift_percents)
                .map_or(0.0, |estimate| estimate.median),
            disturbed_percent: mean(&disturbed),
            invalid: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_round_of_many_is_no_obstacle() {
        let mut readings = NoiseReadings::default();
        for round in 0..20 {
            let is_bad = round == 7;
            readings.steal_percents.push(if is_bad { 50.0 } else { 0.0 });
            readings.drift_percents.push(if is_bad { 45.0 } else { 3.0 });
            readings.disturbed.push(is_bad);
        }
        assert_eq!(readings.summary().obstacle(), None);
        assert_eq!(NoiseReadings::default().summary().obstacle(), None);
    }

    #[test]
    fn noise_in_most_rounds_is_named() {
        let mut readings = NoiseReadings::default();
        readings.disturbed.extend([true, true, true, false]);
        let obstacle = readings.summary().obstacle().unwrap();
        assert!(obstacle.contains("75 % of the windows"), "{obstacle}");
        readings.steal_percents.extend([30.0, 20.0]);
        let obstacle = readings.summary().obstacle().unwrap();
        assert!(obstacle.contains("25 % of a CPU"), "{obstacle}");
    }
}
