//! What in a run of `send` deserves a warning.

use super::copies::copies_of;
use super::{Baseline, Copying, Kind, Run, Series, Warning};
use crate::report::Observer;
use crate::stats::Figure;
use haul_lab::LabError;
use std::collections::BTreeMap;

/// Steal beyond this bends figures. `/proc/stat` counts it in ticks of 10 ms, so that one tick is 5 % of a
/// window of 200 ms.
const STEAL_PERCENT: f64 = 6.0;
/// Quiet CPUs' speed may change this much between two calibrations.
const DRIFT_PERCENT: f64 = 10.0;
/// Other processes may take this much of a CPU that should be quiet.
const DISTURBANCE_PERCENT: f64 = 3.0;
/// Below this load, what other processes do on a quiet machine (half a percent) is a good part of it.
const LOW_LOAD_PERCENT: f64 = 5.0;
/// An interval may be this wide, as a share of its median to each side.
const SPREAD: f64 = 0.10;
/// Fewer rounds than this make no interval.
const ROUNDS: usize = 5;
/// A host that is busier than this is what bounds the throughput.
const BUSY_PERCENT: f64 = 85.0;
/// The share of the asked-for rate that counts as held.
const RATE_HELD: f64 = 0.95;
/// `getrusage` may miss this share of the sender's cost before it is worth a word.
const UNCHARGED: f64 = 0.15;
/// CPUs whose distance changes by this factor were moved: readings in one place differ by a tenth.
const MOVED: f64 = 2.0;
/// The meter may change the throughput by this share.
const OBSERVER: f64 = 0.03;

impl Run<'_> {
    /// What a pair of calibrations says about the machine.
    pub(super) fn note_calibration(&mut self, number: usize, before: &Baseline, after: &Baseline) {
        let round = number + 1;
        let drift = before.drift_percent(after);
        if drift.abs() > DRIFT_PERCENT {
            self.warnings.push(Warning::new(
                Kind::FrequencyDrift,
                format!(
                    "round {round}: a quiet CPU ran {drift:+.0} % after the round against before it (frequency, or neighbours); \
                     loads do not depend on it, costs that wait for memory do"
                ),
            ));
        }
        let disturbance = before.disturbance_percent().max(after.disturbance_percent());
        if disturbance > DISTURBANCE_PERCENT {
            self.disturbances.push(disturbance);
        }
    }

    /// Reads how far apart the hosts' CPUs are now. A reading that fails says nothing and is left out.
    pub(super) fn note_distance(&mut self) -> Result<(), LabError> {
        let round_trip = self.lab.cache_line_round_trip()?;
        self.round_trips_ns.extend(round_trip.map(|time| time.as_nanos() as f64));
        Ok(())
    }

    /// What the readings say of where the hypervisor kept the CPUs.
    fn warn_of_distance(&self) -> Option<Warning> {
        let near = self.round_trips_ns.iter().copied().fold(f64::INFINITY, f64::min);
        let far = self.round_trips_ns.iter().copied().fold(0.0, f64::max);
        (far >= MOVED * near).then(|| {
            Warning::new(
                Kind::Moved,
                format!(
                    "the hypervisor moved the CPUs during the run: a cache line went from one to the other and back in {near:.0} ns, then in {far:.0}; copies cost more when they are far apart, so ratios differ too"
                ),
            )
        })
    }

    /// What the figures say about themselves.
    pub(super) fn warn(&mut self, observer: Option<&Observer>) {
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
        let measured = self.series.iter().map(|series| series.rounds.len()).filter(|&rounds| rounds > 0);
        if let Some(rounds) = measured.min().filter(|&rounds| rounds < ROUNDS) {
            warnings.push(Warning::new(
                Kind::TooFewRounds,
                format!(
                    "rows with {rounds} rounds: their intervals mean little, use --rounds {ROUNDS} or more"
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
        warnings.extend(self.warn_of_distance());
        self.warn_of_rows(&mut warnings);
        for series in &self.series {
            if let (Some(last), false) = (series.failures.last(), series.rounds.is_empty()) {
                let (row, count) = (name(series), series.failures.len());
                warnings.push(Warning::new(
                    Kind::Unsteady,
                    format!("{row}: rounds that failed: {count}, the last: {last}"),
                ));
            }
        }
        if let Some(observer) = observer {
            let effect = observer.throughput_ratio.median - 1.0;
            let is_beyond = |end: f64| (end - 1.0).abs() > OBSERVER;
            let Figure { low, high, .. } = observer.throughput_ratio;
            // Only where the whole interval lies beyond; a wider one is noise.
            if is_beyond(low) && is_beyond(high) && (low > 1.0) == (high > 1.0) {
                warnings.push(Warning::new(
                    Kind::Observer,
                    format!(
                        "with the meter the throughput differs by {:+.1} % from that without",
                        100.0 * effect
                    ),
                ));
            }
        }
        self.warnings.extend(warnings);
    }

    /// One warning for all the rows it concerns, naming them.
    fn warn_of_rows(&self, warnings: &mut Vec<Warning>) {
        let mut concerned: BTreeMap<Kind, Vec<String>> = BTreeMap::new();
        for series in self.series.iter().filter(|series| !series.rounds.is_empty()) {
            for kind in self.concerns(series) {
                concerned.entry(kind).or_default().push(name(series));
            }
        }
        for (kind, rows) in concerned {
            let what = match kind {
                Kind::Disturbed => "the load is so low that other processes are a good part of it in",
                Kind::Unsteady => "cost differs by more than 10 % between rounds in",
                Kind::Copied => "the kernel copied what was to go without a copy in",
                Kind::NotSaturated => "neither host was busy, something else bounds the throughput in",
                Kind::RateNotHeld => "the rate was not held in",
                _ => {
                    "getrusage misses over 15 % of the sending host's cost (interrupts, charged to nobody) in"
                }
            };
            warnings.push(Warning::new(kind, format!("{what} {}", list(&rows))));
        }
    }

    fn concerns(&self, series: &Series) -> Vec<Kind> {
        let median =
            |of: &dyn Fn(&super::Round) -> f64| series.figure(of).map_or(0.0, |figure| figure.median);
        let mut kinds = Vec::new();
        let cost = series.figure(|round| round.sender_us_per_mib);
        if self.plan.rounds >= ROUNDS && cost.is_some_and(|cost| cost.spread() > SPREAD) {
            kinds.push(Kind::Unsteady);
        }
        if median(&|round| round.sender.load_percent) < LOW_LOAD_PERCENT {
            kinds.push(Kind::Disturbed);
        }
        let copied = copies_of(series).is_some_and(|copies| copies.percent > 50.0);
        if copied && series.copying() != Copying::Always {
            kinds.push(Kind::Copied);
        }
        match self.plan.rate {
            None => {
                let busiest = median(&|round| round.sender.load_percent.max(round.receiver.load_percent));
                if busiest < BUSY_PERCENT {
                    kinds.push(Kind::NotSaturated);
                }
            }
            Some(rate) => {
                if median(&|round| round.throughput_bits_per_second) < RATE_HELD * rate.0 as f64 {
                    kinds.push(Kind::RateNotHeld);
                }
            }
        }
        let charged = median(&|round| round.rusage_us_per_mib / round.sender_us_per_mib);
        if charged < 1.0 - UNCHARGED {
            kinds.push(Kind::AccountsDisagree);
        }
        kinds
    }
}

fn name(series: &Series) -> String {
    let condition = &series.cell.condition;
    let mut name = format!("{} {} {}", series.cell.path, condition.workload, condition.chunk);
    if condition.cork {
        name.push_str(" cork");
    }
    if condition.offloads == haul_lab::Offloads::Off {
        name.push_str(" offloads off");
    }
    name
}

/// The first few, and how many more.
fn list(rows: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = rows.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match rows.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}
