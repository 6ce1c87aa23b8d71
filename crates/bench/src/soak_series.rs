//! Several runs of a command under the load meter: its cost with an interval, compared with the
//! cost of another command or of an earlier day.
//!
//! The cost of a run is the CPU time that the kernel charged to the command, and the time that
//! interrupts took from CPUs that it left idle. The interrupts of other programs are part of it,
//! their CPU time is not. Work that the kernel's threads do for the command is not, either.
//!
//! Two commands are run in turn, so that both meet the same machine. A baseline of an earlier day
//! met another one: the CPU's frequency and the neighbours in its caches differ. So every run is
//! preceded and followed by a fixed piece of work ([`haul_soak::reference`]), and what is compared
//! is the cost divided by the time of this work.

use crate::host::HostFacts;
use crate::report::now;
use crate::stats::{Estimate, VERDICT_ROUNDS_MIN, rank_sum};
use haul_soak::report::{SoakReport, Warning};
use haul_units::MIB;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name and version of the JSON contract.
pub const SCHEMA: &str = "haul.soak-series/2";
/// The fewest runs that can be compared with others.
pub const COMPARED_RUNS_MIN: usize = VERDICT_ROUNDS_MIN;

/// The runs of a comparison with a baseline, if their number is not given. With fewer, a difference
/// of 10 % is often missed (docs/measurements/repeatability.md).
pub const BASELINE_RUNS: usize = 50;
/// The largest quotient of the CPU times of two runs without a warning.
const COST_FACTOR_MAX: f64 = 3.0;
/// The difference of two CPU times, in seconds, below which two runs are even. Interrupts of
/// other work are up to a few milliseconds of a run.
const COST_DIFFERENCE_MIN: f64 = 0.05;

/// The factor of the deviation of a series' estimate for the correlation of neighbouring runs, 0.1
/// to 0.2: √(1 + 2 · 0.15). Source: docs/measurements/repeatability.md.
const DEVIATION_FACTOR: f64 = 1.15;

/// The runs of a command, and of the command that it is compared with.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SoakSeries {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Version of haul.
    pub haul: String,
    /// The commit that haul was built from; empty if unknown.
    pub commit: String,
    /// The machine.
    pub host: HostFacts,
    /// The command.
    pub command: Vec<String>,
    /// The unit of the costs: `CPU-seconds`, or `µs/MiB` if the bytes are known.
    pub unit: String,
    /// The runs of the command.
    pub runs: Vec<SoakRun>,
    /// The cost of a run.
    pub cost: Option<Estimate>,
    /// The other command, which was run in turn with the first.
    pub versus: Option<Versus>,
    /// The comparison with a series of an earlier time.
    pub baseline: Option<BaselineRatio>,
    /// Conditions that affect the figures.
    #[serde(default)]
    pub warnings: Vec<Warning>,
}

/// The other command of a comparison.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Versus {
    /// The shell command.
    pub command: String,
    /// Its runs.
    pub runs: Vec<SoakRun>,
    /// The cost of a run.
    pub cost: Option<Estimate>,
    /// The cost of the first command divided by the cost of this command, run by run.
    pub ratio: Option<Estimate>,
}

/// The comparison with an earlier series.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct BaselineRatio {
    /// The file of the earlier series.
    pub file: String,
    /// Start time of the earlier series, RFC 3339.
    pub started: String,
    /// The cost divided by the cost of the baseline, both relative to the time of the fixed work.
    pub ratio: Estimate,
    /// The cost divided by the cost of the baseline, as both were measured: the median.
    #[serde(default)]
    pub raw_ratio: Option<f64>,
    /// The time of the fixed work divided by the time of the fixed work in the baseline: above 1 if
    /// the machine is slower now. `ratio` is about `raw_ratio` divided by this.
    #[serde(default)]
    pub slowness: Option<f64>,
}

/// One run.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SoakRun {
    /// The cost in CPU-seconds: `rusage_cpu_seconds` and `interrupt_cpu_seconds`.
    pub cpu_seconds: f64,
    /// CPU time that `getrusage` charged to the command.
    pub rusage_cpu_seconds: f64,
    /// Time that interrupts took from CPUs that had nothing else to do.
    pub interrupt_cpu_seconds: f64,
    /// CPU time of the whole machine, other programs included.
    pub machine_cpu_seconds: f64,
    /// Wall time.
    pub seconds: f64,
    /// The bytes that the command moved, if they are known.
    pub bytes: Option<u64>,
    /// CPU time of the fixed work around the run.
    pub reference_seconds: f64,
    /// The exit code, 128 plus the signal's number if a signal ended it.
    pub exit_code: u8,
}

/// The unit of the costs.
pub fn unit(has_bytes: bool) -> &'static str {
    if has_bytes { "µs/MiB" } else { "CPU-seconds" }
}

impl SoakRun {
    /// The run of a report; `None` if the meter did not have a reading. `reference_seconds` is the
    /// CPU time of the fixed work around the run.
    pub fn of(report: &SoakReport, bytes: Option<u64>, reference_seconds: f64) -> Option<Self> {
        let machine_cpu_seconds = report.cpu_seconds?;
        let interrupted: f64 = report.cpus.iter().map(|cpu| cpu.interrupted_percent).sum();
        let interrupt_cpu_seconds = interrupted / 100.0 * report.seconds;
        let rusage_cpu_seconds = report.rusage_cpu_seconds.unwrap_or(0.0);
        Some(Self {
            cpu_seconds: rusage_cpu_seconds + interrupt_cpu_seconds,
            rusage_cpu_seconds,
            interrupt_cpu_seconds,
            machine_cpu_seconds,
            seconds: report.seconds,
            bytes,
            reference_seconds,
            exit_code: report.exit_code.unwrap_or(0),
        })
    }

    /// The cost in the unit of the series.
    pub(crate) fn cost(&self) -> f64 {
        match self.bytes {
            Some(bytes) => self.cpu_seconds * 1e6 / (bytes as f64 / MIB),
            None => self.cpu_seconds,
        }
    }

    /// The cost relative to the machine's speed at the time of the run.
    fn relative_cost(&self) -> f64 {
        self.cost() / self.reference_seconds
    }
}

impl SoakSeries {
    /// The series of these runs.
    pub fn of(
        command: Vec<String>,
        runs: Vec<SoakRun>,
        versus: Option<(String, Vec<SoakRun>)>,
    ) -> Self {
        let has_bytes = runs.iter().all(|run| run.bytes.is_some());
        let costs =
            |runs: &[SoakRun]| Estimate::of(&runs.iter().map(SoakRun::cost).collect::<Vec<_>>());
        let versus = versus.map(|(command, others)| {
            let pairs = runs.iter().zip(&others);
            let ratios: Vec<f64> = pairs.map(|(one, other)| one.cost() / other.cost()).collect();
            let (cost, ratio) = (costs(&others), Estimate::of(&ratios));
            Versus { command, runs: others, cost, ratio }
        });
        Self {
            schema: SCHEMA.into(),
            started: now(),
            haul: haul_version::VERSION.into(),
            commit: haul_version::COMMIT.into(),
            host: HostFacts::here(),
            command,
            unit: unit(has_bytes).into(),
            cost: costs(&runs),
            runs,
            versus,
            baseline: None,
            warnings: Vec::new(),
        }
        .with_warnings()
    }

    /// Adds warnings about the series itself.
    fn with_warnings(mut self) -> Self {
        let others = self.versus.iter().flat_map(|versus| &versus.runs);
        let uneven = uneven_runs(self.runs.iter()).or_else(|| uneven_runs(others));
        if let Some((least, most)) = uneven {
            let detail = format!(
                "one run used {most:.3} CPU-seconds, another {least:.3}: do all runs do the same \
                 work?"
            );
            self.warnings.push(Warning { kind: "uneven".into(), detail });
        }
        self
    }

    /// Compares the series with an earlier one of the same command, which was read from `file`.
    pub fn compare_with(&mut self, file: &str, baseline: &Self) {
        let ratio_of = |values: fn(&SoakRun) -> f64| {
            let of = |series: &Self| series.runs.iter().map(values).collect::<Vec<f64>>();
            rank_sum::ratio(&of(self), &of(baseline), DEVIATION_FACTOR)
        };
        let ratios = ratio_of(SoakRun::relative_cost)
            .zip(ratio_of(SoakRun::cost))
            .zip(ratio_of(|run| run.reference_seconds));
        self.baseline = ratios.map(|((ratio, raw), slowness)| BaselineRatio {
            file: file.into(),
            started: baseline.started.clone(),
            ratio: ratio.widen_for_series(),
            raw_ratio: Some(raw.median),
            slowness: Some(slowness.median),
        });
        let runs = self.runs.len().min(baseline.runs.len());
        if runs < BASELINE_RUNS {
            let detail = format!(
                "only {runs} runs: below {BASELINE_RUNS} runs a comparison with another day can be \
                 wrong in either direction (use --runs {BASELINE_RUNS} for the baseline and now)"
            );
            self.warnings.push(Warning { kind: "few-runs".into(), detail });
        }
    }

    /// Whether the cost is higher than the baseline's by more than `percent`, beyond what the
    /// interval permits.
    pub fn is_above_baseline(&self, percent: f64) -> bool {
        self.baseline.as_ref().is_some_and(|baseline| {
            baseline.ratio.is_above(1.0) && baseline.ratio.median > 1.0 + percent / 100.0
        })
    }
}

/// The least and the largest CPU time of the runs, if the runs probably did different work.
fn uneven_runs<'a>(runs: impl Iterator<Item = &'a SoakRun>) -> Option<(f64, f64)> {
    let mut times: Vec<f64> = runs.map(|run| run.cpu_seconds).collect();
    times.sort_by(f64::total_cmp);
    let (least, most) = (*times.first()?, *times.last()?);
    let is_uneven = most > COST_FACTOR_MAX * least && most - least > COST_DIFFERENCE_MIN;
    is_uneven.then_some((least, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten runs of a command on a machine of this speed; the runs differ by up to 2 %.
    fn runs(cost: f64, speed: f64) -> Vec<SoakRun> {
        let run = |index: usize| {
            let noise = 1.0 + 0.02 * ((index * 7 % 10) as f64 - 4.5) / 4.5;
            SoakRun {
                cpu_seconds: cost * noise / speed,
                rusage_cpu_seconds: cost * noise / speed,
                interrupt_cpu_seconds: 0.0,
                machine_cpu_seconds: cost / speed,
                seconds: 1.0,
                bytes: None,
                reference_seconds: 0.02 / speed,
                exit_code: 0,
            }
        };
        (0..10).map(run).collect()
    }

    fn series(cost: f64, speed: f64) -> SoakSeries {
        SoakSeries::of(vec!["true".into()], runs(cost, speed), None)
    }

    #[test]
    fn a_slower_machine_is_not_a_dearer_command() {
        let baseline = series(0.4, 1.0);
        let mut slower = series(0.4, 0.7);
        slower.compare_with("base.json", &baseline);
        assert!(!slower.is_above_baseline(5.0), "{:?}", slower.baseline);
        let mut dearer = series(0.6, 0.7);
        dearer.compare_with("base.json", &baseline);
        assert!(dearer.is_above_baseline(5.0), "{:?}", dearer.baseline);
        assert!(!dearer.is_above_baseline(60.0));
    }

    #[test]
    fn two_commands_are_compared_run_by_run() {
        let versus = Some(("other".to_owned(), runs(0.5, 1.0)));
        let series = SoakSeries::of(vec!["one".into()], runs(0.4, 1.0), versus);
        let ratio = series.versus.unwrap().ratio.unwrap();
        assert!((ratio.median - 0.8).abs() < 1e-9 && ratio.is_below(1.0), "{ratio:?}");
    }

    #[test]
    fn the_cost_of_known_bytes_is_per_mib() {
        let mut runs = runs(0.4, 1.0);
        for run in &mut runs {
            run.bytes = Some(400 << 20);
        }
        let series = SoakSeries::of(vec!["one".into()], runs, None);
        assert_eq!(series.unit, "µs/MiB");
        assert!((series.cost.unwrap().median - 1000.0).abs() < 10.0, "{:?}", series.cost);
    }
}
