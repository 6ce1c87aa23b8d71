//! The rows of a comparison as table rows, so that every output format can show them.

use super::{Comparison, Difference, RowComparison};
use crate::host::HostFacts;
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, View, groups, number, ratio};

const COLUMNS: [Column<RowComparison>; 7] = [
    Column::narrow("row", |row| row.name.clone()),
    Column::narrow("A", |row| figure(row.a)),
    Column::narrow("B", |row| figure(row.b)),
    Column::narrow("B ÷ A\n(interval)", |row| ratio(row.ratio)),
    Column::narrow("rounds", rounds),
    Column::narrow("finding", |row| {
        let has_too_few = row.ratio.is_some() && !row.is_decided();
        if has_too_few { "too few rounds".into() } else { row.finding.text() }
    }),
    Column::wide("relative to", |row| row.compared_with.clone().unwrap_or_default()),
];

/// The rounds of both measurements.
fn rounds(row: &RowComparison) -> String {
    let count = |estimate: Option<Estimate>| estimate.map_or(0, |estimate| estimate.rounds);
    match (count(row.a), count(row.b)) {
        (0, 0) => String::new(),
        (a, b) => format!("{a}, {b}"),
    }
}

/// A cost with three digits.
fn figure(estimate: Option<Estimate>) -> String {
    let digits = estimate.map_or(0, |estimate| match estimate.median {
        median if median < 10.0 => 2,
        median if median < 100.0 => 1,
        _ => 0,
    });
    number(estimate, 1.0, digits)
}

impl TableRow for RowComparison {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const COLUMNS_EXPLAINED: &'static str = "\
        A, B: the row's cost in the unit of its experiment. B ÷ A: from the costs of the same \
        rounds, so it is not the quotient of the two columns; with its 95 % interval.";
    const LEGEND: &'static [(&'static str, &'static str)] = &[("receiver", "A"), ("sender", "B")];
    const UNIT: &'static str = "cost, in the unit of the experiment";
    const IS_SORTED: bool = false;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn group(&self) -> String {
        format!("{}: {}", self.experiment, self.group)
    }

    fn axis_key(&self) -> u64 {
        // Every group has a separate scale.
        self.group()
            .bytes()
            .fold(7, |hash, byte| u64::wrapping_add(u64::wrapping_mul(hash, 31), byte.into()))
    }

    fn round_count(&self) -> usize {
        self.a.map_or(0, |estimate| estimate.rounds)
    }

    fn refusal_reason(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn bars(&self) -> Vec<Bar> {
        [Bar::of("receiver", self.a, String::new()), Bar::of("sender", self.b, String::new())]
            .into_iter()
            .flatten()
            .collect()
    }
}

impl Comparison {
    /// Makes the view of the comparison.
    pub fn view(&self) -> View {
        let side = |letter: &str, side: &super::Side| {
            let HostFacts { name, kernel, .. } = &side.host;
            let commit = if side.commit.is_empty() { "" } else { ", commit " };
            let started = if side.started.is_empty() { "unknown time" } else { &side.started };
            format!(
                "{letter}: {} ({name}, Linux {kernel}, {started}{commit}{})",
                side.name, side.commit
            )
        };
        let mut warnings: Vec<String> = Vec::new();
        if !self.differences.is_empty() {
            warnings.push(format!(
                "the measurements differ in what affects costs: {}",
                self.differences.join("; ")
            ));
        }
        warnings.extend(self.warnings.iter().map(|warning| warning.detail.clone()));
        let note = if self.is_interleaved {
            "Both builds were measured in the same rounds."
        } else if self.rows.iter().all(|row| row.compared_with.is_none()) {
            "The costs of two runs are compared as they are, because these runs lack a row that \
             the costs could be relative to. The intervals cover what a machine's costs differ by \
             from run to run."
        } else {
            "A row is compared by its cost relative to the row in the last column, because the \
             machine's speed differs between two runs. The intervals cover what such ratios differ \
             by from run to run; for smaller differences compare two builds in one run: haul \
             compare PROGRAM PROGRAM."
        };
        View {
            title: "haul compare".into(),
            verdicts: Vec::new(),
            answers: vec![self.conclusion()],
            setting: vec![side("A", &self.a), side("B", &self.b)],
            legend: RowComparison::LEGEND.to_vec(),
            unit: RowComparison::UNIT,
            heads: COLUMNS.iter().map(Column::head).collect(),
            narrow_columns: COLUMNS.iter().filter(|column| column.is_narrow()).count(),
            groups: groups(&self.rows, &[]),
            drawings: Vec::new(),
            notes: std::iter::once(note.to_owned())
                .chain(self.not_in_both.clone())
                .chain(self.unmeasured.clone())
                .collect(),
            advice: Vec::new(),
            warnings,
        }
    }

    /// The rows that differ, in one sentence.
    pub fn conclusion(&self) -> String {
        let named = |wanted: Difference| -> Vec<String> {
            self.rows
                .iter()
                .filter(|row| row.finding.difference == wanted)
                .map(|row| {
                    let ratio = row.ratio.map_or(String::new(), |ratio| {
                        let confidence = row.finding.confidence.name();
                        format!(" {:.2} × ({}, {confidence})", ratio.median, ratio.interval(2))
                    });
                    format!("{} {}{ratio}", row.experiment, row.name)
                })
                .collect()
        };
        let (more, less) = (named(Difference::More), named(Difference::Less));
        let is_conclusive =
            |row: &&RowComparison| row.ratio.is_some_and(|ratio| ratio.is_conclusive());
        let count = self.rows.iter().filter(is_conclusive).count();
        let others = match self.rows.len() - count {
            0 => String::new(),
            others => format!(" {others} rows have too few rounds or no common baseline."),
        };
        let findings: String = match (more.as_slice(), less.as_slice()) {
            ([], []) if count == 0 => "No row can be compared.".into(),
            ([], []) => format!("No difference shown in any of {count} rows."),
            (more, []) => {
                format!("B costs more in {} of {count} rows: {}.", more.len(), more.join(", "))
            }
            ([], less) => {
                format!("B costs less in {} of {count} rows: {}.", less.len(), less.join(", "))
            }
            (more, less) => format!(
                "Of {count} rows B costs more in {}: {}; and less in {}: {}.",
                more.len(),
                more.join(", "),
                less.len(),
                less.join(", ")
            ),
        };
        findings + &others
    }
}
