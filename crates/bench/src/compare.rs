//! The comparison of two measurements, row by row: two reports or runs, or two builds of haul that
//! are measured in the same rounds.
//!
//! The cost of a row differs between two runs on the same machine, because the machine does. So a
//! row is compared by its cost relative to that of another row of the same rounds, its baseline,
//! and the interval covers what such ratios differ by from run to run. A baseline itself is
//! compared by its cost, whose interval is several times as wide.

use crate::host::HostFacts;
use crate::report::{LabFacts, Report};
use crate::rounds::{MOVED_FACTOR_MIN, RoundCost};
use crate::stats::Estimate;
use crate::verdict::Confidence;
use crate::view::TableRow;
use crate::warning::Warning;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod builds;
mod files;
mod row;

pub use builds::builds;
pub use files::{LoadError, RunReports, load};

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
    /// The rows that only one of them has.
    pub not_in_both: Vec<String>,
    /// Warnings about the figures; those of two reports are in the reports.
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
}

impl Finding {
    /// The finding of a ratio: by its own interval, and by one that holds jointly for all rows.
    pub(crate) fn of(ratio: Option<Estimate>, jointly: Option<Estimate>) -> Self {
        let difference = |ratio: Option<Estimate>| match ratio {
            Some(ratio) if ratio.is_above(1.0) => Difference::More,
            Some(ratio) if ratio.is_below(1.0) => Difference::Less,
            _ => Difference::NotShown,
        };
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
        };
        format!("{what} ({})", self.confidence.name())
    }
}

/// Compares two runs, or two reports of one experiment.
pub fn runs(a: &RunReports, b: &RunReports) -> Comparison {
    let (left, right) = (&a.rows, &b.rows);
    let is_same = |one: &MeasuredRow, other: &MeasuredRow| {
        (&one.experiment, &one.group, &one.name) == (&other.experiment, &other.group, &other.name)
    };
    let pairs: Vec<(&MeasuredRow, &MeasuredRow)> = left
        .iter()
        .filter_map(|one| Some((one, right.iter().find(|other| is_same(one, other))?)))
        .collect();
    let compared = pairs.iter().map(|(one, other)| one.compare(other, pairs.len())).collect();
    let missing = |rows: &[MeasuredRow], others: &[MeasuredRow], name: &str| -> Vec<String> {
        rows.iter()
            .filter(|row| !others.iter().any(|other| is_same(row, other)))
            .map(|row| format!("{} {}: {} only in {name}", row.experiment, row.group, row.name))
            .collect()
    };
    let mut not_in_both = missing(left, right, &a.side.name);
    not_in_both.extend(missing(right, left, &b.side.name));
    Comparison {
        schema: SCHEMA.into(),
        differences: differences(&a.side, &b.side),
        a: a.side.clone(),
        b: b.side.clone(),
        is_interleaved: false,
        rows: compared,
        not_in_both,
        warnings: Vec::new(),
    }
}

/// The differences of two machines and links that affect the costs.
fn differences(a: &Side, b: &Side) -> Vec<String> {
    let mut differences = Vec::new();
    let mut compare = |what: &str, one: String, other: String| {
        if one != other {
            differences.push(format!("{what}: {one} and {other}"));
        }
    };
    compare("kernel", a.host.kernel.clone(), b.host.kernel.clone());
    compare("CPU", a.host.cpu.clone(), b.host.cpu.clone());
    compare("number of CPUs", a.host.cpus.to_string(), b.host.cpus.to_string());
    if let (Some(one), Some(other)) = (&a.lab, &b.lab) {
        compare("link", one.kind.clone(), other.kind.clone());
        compare("MTU", one.mtu.to_string(), other.mtu.to_string());
        compare("congestion control", one.congestion.clone(), other.congestion.clone());
        let distance = |lab: &LabFacts| Some(lab.cache_line_round_trip_ns?.median);
        if let (Some(near), Some(far)) = (distance(one), distance(other))
            && near.max(far) > MOVED_FACTOR_MIN * near.min(far)
        {
            compare("distance of the CPUs", format!("{near:.0} ns"), format!("{far:.0} ns"));
        }
    }
    differences
}

/// A row of a report, with its cost in each round and that of its baseline.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MeasuredRow {
    experiment: String,
    group: String,
    name: String,
    /// The cost in the rounds at the more frequent distance of the CPUs.
    cost: Option<Estimate>,
    /// The baseline's name, and this row's cost divided by it in the same round. `None` for a
    /// baseline, and for a row that has none.
    relative: Option<(String, Option<Estimate>)>,
    /// The deviation of such a ratio from run to run.
    deviation: f64,
}

impl MeasuredRow {
    /// The rows of a report.
    pub(crate) fn all<R: TableRow>(report: &Report<R>) -> Vec<Self> {
        let measured = |row: &&R| !row.round_costs().is_empty();
        report
            .rows
            .iter()
            .filter(measured)
            .map(|row| {
                let row_of = |name: &str| {
                    report
                        .rows
                        .iter()
                        .find(|other| other.group() == row.group() && other.method() == name)
                };
                let other = R::BASELINES
                    .iter()
                    .find_map(|name| row_of(name))
                    .filter(|other| !std::ptr::eq(*other, row));
                let usual = row.round_costs().iter().filter(|round| !round.is_at_other_distance);
                let usual: Vec<f64> = usual.map(|round| round.cost).collect();
                Self {
                    experiment: report.experiment.clone(),
                    group: row.group(),
                    name: row.name(),
                    cost: Estimate::of(&usual),
                    relative: other.map(|other| {
                        let ratios = ratios(row.round_costs(), other.round_costs());
                        (other.name(), Estimate::of(&ratios))
                    }),
                    deviation: R::RUN_DEVIATION,
                }
            })
            .collect()
    }

    /// The same row of two measurements; `count` is the number of rows that are compared.
    fn compare(&self, other: &Self, count: usize) -> RowComparison {
        let ratio = |count| match (&self.relative, &other.relative) {
            (Some((_, one)), Some((_, other))) => {
                Some((*other)?.quotient_of_runs((*one)?, self.deviation, count))
            }
            (None, None) => Some(other.cost?.quotient_of_costs(self.cost?, count)),
            _ => None,
        };
        RowComparison {
            experiment: self.experiment.clone(),
            group: self.group.clone(),
            name: self.name.clone(),
            compared_with: self.relative.as_ref().map(|(name, _)| name.clone()),
            a: self.cost,
            b: other.cost,
            ratio: ratio(1),
            finding: Finding::of(ratio(1), ratio(count)),
            refused: None,
        }
    }
}

/// The costs of one row divided by those of another in the same rounds.
fn ratios(row: &[RoundCost], other: &[RoundCost]) -> Vec<f64> {
    let ratio = |round: &RoundCost| {
        let is_same = |other: &&RoundCost| {
            other.round == round.round && other.is_at_other_distance == round.is_at_other_distance
        };
        Some(round.cost / other.iter().find(is_same)?.cost)
    };
    row.iter().filter_map(ratio).collect()
}
