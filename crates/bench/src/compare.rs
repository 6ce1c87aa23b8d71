//! The comparison of two measurements, row by row: two reports or runs, or two builds of haul that
//! are measured in the same rounds. A report of `haul soak` or of iperf3 is a run with fewer rows.
//!
//! The cost of a row differs between two runs on the same machine, because the machine does. So a
//! row is compared by its cost relative to the cost of another row of the same rounds, its
//! baseline, and the interval covers what such ratios differ by from run to run. A baseline itself
//! is compared by its cost, whose interval is several times as wide.

use crate::host::HostFacts;
use crate::report::{LabFacts, Report};
use crate::rounds::{MOVED_FACTOR_MIN, Noise, RoundCost};
use crate::stats::Estimate;
use crate::verdict::Confidence;
use crate::view::TableRow;
use crate::warning::{Kind, Warning};
use haul_units::Rate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod builds;
mod files;
mod iperf3;
mod row;
mod run_reports;
mod soak;

pub use builds::builds;
pub use files::{FILE_BYTES_MAX, LoadError, load_folder, load_report};
pub use run_reports::RunReports;

/// Name and version of the JSON contract of a comparison.
pub const SCHEMA: &str = "haul.compare/1";

/// Two measurements, row by row.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Comparison {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// The first measurement.
    pub a: Side,
    /// The second measurement.
    pub b: Side,
    /// Whether both were measured in the same rounds.
    pub is_interleaved: bool,
    /// Differences of the machines and links that affect the costs, one clause each.
    pub differences: Vec<String>,
    /// The rows that both have.
    pub rows: Vec<RowComparison>,
    /// The rows, and the experiments, that only one of them measured.
    pub not_in_both: Vec<String>,
    /// The experiments of which neither has a measured row.
    #[serde(default)]
    pub unmeasured: Vec<String>,
    /// Warnings about the figures. The warnings of the reports themselves stay in the reports.
    pub warnings: Vec<Warning>,
}

/// One of the two measurements.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Side {
    /// The file, folder or program.
    pub name: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Version of haul; empty for a program.
    pub haul: String,
    /// The commit that haul was built from; empty if unknown.
    pub commit: String,
    /// The command line of the run.
    pub command: Vec<String>,
    /// The machine.
    pub host: HostFacts,
    /// The link between the hosts.
    pub lab: Option<LabFacts>,
}

/// The comparison of one row.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RowComparison {
    /// Name of the experiment.
    pub experiment: String,
    /// The conditions of the row.
    pub group: String,
    /// The row's name within its group.
    pub name: String,
    /// The row that the cost is relative to in either measurement; `null` if the costs themselves
    /// are compared.
    pub compared_with: Option<String>,
    /// The row's cost in the first measurement, in the experiment's unit.
    pub a: Option<Estimate>,
    /// The row's cost in the second measurement.
    pub b: Option<Estimate>,
    /// The second cost divided by the first, both relative to `compared_with`.
    pub ratio: Option<Estimate>,
    /// The result.
    pub finding: Finding,
    /// The reason why the row was not measured.
    pub refused: Option<String>,
}

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Finding {
    /// The direction.
    pub difference: Difference,
    /// `certain`: holds jointly for all rows with 95 %; `likely`: for this row alone.
    pub confidence: Confidence,
}

/// The direction of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Difference {
    /// The second costs more.
    More,
    /// The second costs less.
    Less,
    /// No difference was shown.
    NotShown,
    /// The row does not have a ratio: it was not measured, or relative to different rows.
    NotComparable,
}

impl Comparison {
    /// The rows that could not be compared, each with the reason as far as it is known.
    pub fn undecided(&self) -> Vec<String> {
        let rows = self.rows.iter().filter(|row| !row.is_decided()).map(|row| {
            let reason = row.refused.as_deref().unwrap_or(if row.ratio.is_none() {
                "it has no common baseline"
            } else {
                "it has too few usable rounds"
            });
            format!("{} {}: {reason}", row.experiment, row.name)
        });
        rows.chain(self.not_in_both.iter().cloned()).collect()
    }
}

impl RowComparison {
    /// Whether the rounds support an answer, be it that no difference was shown.
    pub fn is_decided(&self) -> bool {
        self.ratio.is_some_and(|ratio| ratio.is_conclusive())
    }
}

impl Finding {
    /// The finding of a ratio: by its own interval, and by one that holds jointly for all rows.
    pub(crate) fn of(ratio: Option<Estimate>, jointly: Option<Estimate>) -> Self {
        let difference = |ratio: Option<Estimate>| match ratio {
            Some(ratio) if ratio.is_above(1.0) => Difference::More,
            Some(ratio) if ratio.is_below(1.0) => Difference::Less,
            _ => Difference::NotShown,
        };
        if ratio.is_none() {
            let confidence = Confidence::Undecided;
            return Self { difference: Difference::NotComparable, confidence };
        }
        match (difference(ratio), difference(jointly)) {
            (Difference::NotShown, _) => {
                Self { difference: Difference::NotShown, confidence: Confidence::Undecided }
            }
            (one, Difference::NotShown) => Self { difference: one, confidence: Confidence::Likely },
            (one, _) => Self { difference: one, confidence: Confidence::Certain },
        }
    }

    /// The finding in words.
    pub fn text(self) -> String {
        let what = match self.difference {
            Difference::More => "costs more",
            Difference::Less => "costs less",
            Difference::NotShown => return "no difference shown".into(),
            Difference::NotComparable => return "not comparable".into(),
        };
        format!("{what} ({})", self.confidence.name())
    }
}

/// Compares two runs, or two reports of one experiment. `None` if no row is in both.
pub fn runs(a: &RunReports, b: &RunReports) -> Option<Comparison> {
    let (left, right) = (&a.rows, &b.rows);
    let pairs: Vec<(&MeasuredRow, &MeasuredRow)> = left
        .iter()
        .filter_map(|one| Some((one, right.iter().find(|other| one.is_same(other))?)))
        .collect();
    if pairs.is_empty() {
        return None;
    }
    let compared = pairs.iter().map(|(one, other)| one.compare(other, pairs.len())).collect();
    let missing = |rows: &[MeasuredRow], others: &[MeasuredRow], name: &str| -> Vec<String> {
        rows.iter()
            .filter(|row| !others.iter().any(|other| other.is_same(row)))
            .map(|row| format!("{} {}: {} only in {name}", row.experiment, row.group, row.name))
            .collect()
    };
    let mut not_in_both = missing(left, right, &a.side.name);
    not_in_both.extend(missing(right, left, &b.side.name));
    let mut unmeasured = Vec::new();
    for (run, other) in [(a, b), (b, a)] {
        for (experiment, reason) in &run.unmeasured {
            let line = format!("{experiment}: not measured in {}: {reason}", run.side.name);
            let is_in_neither = other.unmeasured.iter().any(|(name, _)| name == experiment);
            if is_in_neither { unmeasured.push(line) } else { not_in_both.push(line) }
        }
    }
    let mut warnings: Vec<Warning> = a.warnings.clone();
    warnings.extend(b.warnings.iter().filter(|warning| !a.warnings.contains(warning)).cloned());
    for run in [a, b] {
        let name = &run.side.name;
        for (experiment, obstacle) in &run.obstacles {
            let detail = format!("no finding on {experiment}: {obstacle} in {name}");
            warnings.push(Warning::new(Kind::Unsteady, detail));
        }
    }
    Some(Comparison {
        schema: SCHEMA.into(),
        differences: differences(a, b),
        a: a.side.clone(),
        b: b.side.clone(),
        is_interleaved: false,
        rows: compared,
        not_in_both,
        unmeasured,
        warnings,
    })
}

/// The differences of two machines and links that affect the costs.
fn differences(a: &RunReports, b: &RunReports) -> Vec<String> {
    let (one, other) = (&a.side.host, &b.side.host);
    let cpus = [one, other].map(|host| match host.cpus {
        0 => "unknown".into(),
        count => count.to_string(),
    });
    let hosts = [
        clause("kernel", &one.kernel, &other.kernel),
        clause("CPU", &one.cpu, &other.cpu),
        clause("number of CPUs", &cpus[0], &cpus[1]),
    ];
    let mut differences: Vec<String> = hosts.into_iter().flatten().collect();
    let conditions = a.common_conditions(b);
    differences.extend(conditions.filter_map(|(what, one, other)| clause(what, one, other)));
    for (experiment, lab) in &a.labs {
        let others = b.labs.iter().filter(|(other, _)| other == experiment);
        for found in others.flat_map(|(_, other)| lab_differences(experiment, lab, other)) {
            if !differences.contains(&found) {
                differences.push(found);
            }
        }
    }
    differences
}

/// The differences of the links of one experiment.
fn lab_differences(experiment: &str, one: &LabFacts, other: &LabFacts) -> Vec<String> {
    let rate = |lab: &LabFacts| {
        lab.rate_bits_per_second.map_or("none".into(), |rate| Rate(rate).to_string())
    };
    let reading = |lab: &LabFacts| lab.reading.map_or("unknown".into(), |held| held.to_string());
    let ns = |lab: &LabFacts| lab.cache_line_round_trip_ns.map_or(0.0, |ns| ns.median);
    let is_other_distance = ns(one).min(ns(other)) * MOVED_FACTOR_MIN < ns(one).max(ns(other))
        && ns(one) * ns(other) > 0.0;
    let distance = is_other_distance.then(|| {
        format!("distance of the CPUs in {experiment}: {:.0} ns and {:.0} ns", ns(one), ns(other))
    });
    let links = [
        clause("link", &one.kind, &other.kind),
        clause("MTU", &one.mtu.to_string(), &other.mtu.to_string()),
        clause("congestion control", &one.congestion, &other.congestion),
        clause("rate", &rate(one), &rate(other)),
        clause("reading", &reading(one), &reading(other)),
        distance,
    ];
    links.into_iter().flatten().collect()
}

/// What two measurements differ in; `None` if they do not.
fn clause(what: &str, one: &str, other: &str) -> Option<String> {
    (one != other).then(|| format!("{what}: {one} and {other}"))
}

/// A row of a report, with its cost and its baseline's cost in each round.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MeasuredRow {
    experiment: String,
    group: String,
    name: String,
    /// The costs of the rounds at the more frequent distance of the CPUs.
    costs: Vec<f64>,
    /// The baseline's name, and this row's costs divided by its costs in the same rounds. `None`
    /// for a baseline, and for a row that has none.
    relative: Option<(String, Vec<f64>)>,
    /// Whether the rounds support an interval: neither other programs nor noise forbid it.
    has_interval: bool,
    /// The deviation of such a ratio from run to run.
    deviation: f64,
    /// Whether a round is a run of a program other than `haul bench`.
    is_program: bool,
}

impl MeasuredRow {
    /// The rows of a report.
    pub(crate) fn all<R: TableRow>(report: &Report<R>) -> Vec<Self> {
        let is_quiet = report.noise.as_ref().and_then(Noise::obstacle).is_none();
        let measured = || report.rows.iter().filter(|row| !row.round_costs().is_empty());
        let row_of = |name: &str, group: &str| {
            measured().find(|other| other.group() == group && other.method() == name)
        };
        measured()
            .map(|row| {
                let group = row.group();
                let other = R::BASELINES
                    .iter()
                    .find_map(|name| row_of(name, &group))
                    .filter(|other| !std::ptr::eq(*other, row));
                let usual = row.round_costs().iter().filter(|round| !round.is_at_other_distance);
                let is_disturbed = row.is_disturbed() || other.is_some_and(TableRow::is_disturbed);
                Self {
                    experiment: report.experiment.clone(),
                    group,
                    name: row.name(),
                    costs: usual.map(|round| round.cost).collect(),
                    relative: other.map(|other| {
                        (other.name(), ratios(row.round_costs(), other.round_costs()))
                    }),
                    has_interval: is_quiet && !is_disturbed,
                    deviation: R::RUN_DEVIATION,
                    is_program: false,
                }
            })
            .collect()
    }

    /// The cost of one run of a program, without a baseline in the same run.
    fn of_program(experiment: &str, group: &str, name: &str, cost: f64) -> Self {
        Self {
            experiment: experiment.into(),
            group: group.into(),
            name: name.into(),
            costs: vec![cost],
            relative: None,
            has_interval: true,
            deviation: 0.0,
            is_program: true,
        }
    }

    /// Whether the two rows have the same name and conditions.
    fn is_same(&self, other: &Self) -> bool {
        (&self.experiment, &self.group, &self.name)
            == (&other.experiment, &other.group, &other.name)
    }

    /// Whether the two rows are runs of the same program under the same conditions.
    fn is_same_program(&self, other: &Self) -> bool {
        self.is_program && other.is_program && self.is_same(other)
    }

    /// An estimate of one of `count` comparisons.
    fn estimate(&self, values: &[f64], count: usize) -> Option<Estimate> {
        let estimate = Estimate::among(values, count)?;
        Some(if self.has_interval { estimate } else { estimate.drop_interval() })
    }

    /// The same row of two measurements; `count` is the number of rows that are compared.
    fn compare(&self, other: &Self, count: usize) -> RowComparison {
        let ratio = |count| match (&self.relative, &other.relative) {
            (Some((name, one)), Some((same, two))) if name == same => {
                let (one, two) = (self.estimate(one, count)?, other.estimate(two, count)?);
                Some(two.quotient_of_runs(one, self.deviation, count))
            }
            (None, None) => {
                let cost = |row: &Self| row.estimate(&row.costs, count);
                Some(cost(other)?.quotient_of_costs(cost(self)?, count))
            }
            _ => None,
        };
        RowComparison {
            experiment: self.experiment.clone(),
            group: self.group.clone(),
            name: self.name.clone(),
            compared_with: self.relative.as_ref().map(|(name, _)| name.clone()),
            a: self.estimate(&self.costs, 1),
            b: other.estimate(&other.costs, 1),
            ratio: ratio(1),
            finding: Finding::of(ratio(1), ratio(count)),
            refused: None,
        }
    }
}

/// The costs of a row divided by the costs of another row in the same rounds.
fn ratios(row: &[RoundCost], other: &[RoundCost]) -> Vec<f64> {
    let ratio = |round: &RoundCost| {
        let is_same = |other: &&RoundCost| {
            other.round == round.round && other.is_at_other_distance == round.is_at_other_distance
        };
        let same = other.iter().find(is_same)?;
        (round.cost > 0.0 && same.cost > 0.0).then(|| round.cost / same.cost)
    };
    row.iter().filter_map(ratio).collect()
}
