//! Rows of `profile`: the JSON contract, and their form in tables.

use super::count::SampleCounts;
use super::groups::OTHER;
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// Number of functions per host that tables show; the JSON report has all.
const FUNCTIONS_SHOWN: usize = 25;

/// Kinds of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "ProfileKind")]
pub enum Kind {
    /// All work on a host.
    Total,
    /// A group of functions.
    Group,
    /// One function.
    Function,
    /// Another program that ran during the profile; not part of the load.
    Other,
}

/// The time spent in a function, a group or a program.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ProfileRow {
    /// The host and its method.
    pub host: String,
    /// Kind of the row.
    pub kind: Kind,
    /// Name of the group, the function or the program.
    pub name: String,
    /// Name of the group.
    pub group: String,
    /// Number of samples.
    #[serde(rename = "ticks")]
    pub samples: u64,
    /// Time in percent of the CPU's time.
    pub load_percent: f64,
    /// Time in percent of the host's load. This would be saved if it cost nothing, so it is the
    /// most that any change to it can save.
    pub bound_percent: f64,
    /// The same in µs of CPU per MiB; `null` if no bytes were counted.
    pub bound_us_per_mib: Option<f64>,
    /// Samples per byte of the function's code, as in `readprofile`: a high value is a small hot
    /// function. `null` for groups.
    pub normalised_load: Option<f64>,
    /// The meter's reading, in percent of the CPU; only in the row of kind `total`.
    pub meter_load_percent: Option<f64>,
    /// Rank of the row among the rows of its kind on its host, from 1.
    pub rank: usize,
}

/// Makes the rows of one host; `meter` is its load in percent and its cost in µs per MiB.
pub(super) fn rows(
    host: &str,
    counts: &SampleCounts,
    meter: Option<(f64, f64)>,
) -> Vec<ProfileRow> {
    let busy = counts.busy().max(1) as f64;
    let row = |kind, name: &str, group: &str, samples: u64, rank| ProfileRow {
        host: host.into(),
        kind,
        name: name.into(),
        group: group.into(),
        samples,
        load_percent: 100.0 * samples as f64 / counts.total.max(1) as f64,
        bound_percent: 100.0 * samples as f64 / busy,
        bound_us_per_mib: meter.map(|(_, us_per_mib)| us_per_mib * samples as f64 / busy),
        normalised_load: None,
        meter_load_percent: None,
        rank,
    };
    let total = ProfileRow {
        meter_load_percent: meter.map(|(load_percent, _)| load_percent),
        ..row(Kind::Total, "all of it", "", counts.busy(), 1)
    };
    let groups = counts.groups().into_iter().enumerate();
    let groups =
        groups.map(|(index, (group, samples))| row(Kind::Group, group, group, samples, index + 1));
    let mut functions: Vec<_> = counts.functions.iter().collect();
    functions.sort_by_key(|(name, function)| (Reverse(function.samples), name.as_str()));
    let functions = functions.into_iter().enumerate().map(|(index, (name, function))| ProfileRow {
        normalised_load: Some(function.samples as f64 / function.size_bytes.max(1) as f64),
        ..row(Kind::Function, name, function.group, function.samples, index + 1)
    });
    let mut others: Vec<_> = counts.others.iter().collect();
    others.sort_by_key(|(name, samples)| (Reverse(**samples), name.as_str()));
    let others = others.into_iter().enumerate().map(|(index, (name, samples))| ProfileRow {
        bound_percent: 0.0,
        bound_us_per_mib: None,
        ..row(Kind::Other, name, OTHER_PROGRAMS, *samples, index + 1)
    });
    [total].into_iter().chain(groups).chain(functions).chain(others).collect()
}

/// Group of the rows of other programs.
const OTHER_PROGRAMS: &str = "other programs";

/// The groups with the largest shares of the load: `copy 55 %, TCP 12 %`.
pub(super) fn largest_groups(counts: &SampleCounts, count: usize) -> String {
    let busy = counts.busy().max(1) as f64;
    let largest: Vec<String> = counts
        .groups()
        .iter()
        .take(count)
        .map(|(group, samples)| format!("{group} {:.0} %", 100.0 * *samples as f64 / busy))
        .collect();
    largest.join(", ")
}

/// The profile of a host in sentences.
pub(super) fn describe_host(
    host: &str,
    counts: &SampleCounts,
    meter: Option<(f64, f64)>,
) -> Vec<String> {
    let read = meter.map_or(String::new(), |(load, _)| format!(" (the meter read {load:.1} %)"));
    let other: u64 = counts
        .functions
        .values()
        .filter(|function| function.group == OTHER)
        .map(|f| f.samples)
        .sum();
    let kernel = counts.kernel().max(1) as f64;
    let others: Vec<String> = counts
        .others
        .iter()
        .filter(|(_, samples)| 100 * **samples > counts.total)
        .map(|(name, samples)| {
            format!("{name} {:.0} %", 100.0 * *samples as f64 / counts.total.max(1) as f64)
        })
        .collect();
    let others = (!others.is_empty()).then(|| {
        format!(
            "Other programs that used this CPU are excluded from these figures: {}.",
            others.join(", ")
        )
    });
    let own = format!(
        "The {host}: {:.1} % load{read}, of which {}. Removing one of these entirely would save \
         about that share of the time that the samples cover (exits to the hypervisor are not \
         included). {:.1} % of the kernel's samples are in functions that haul does not know.",
        counts.load_percent(),
        largest_groups(counts, 4),
        100.0 * other as f64 / kernel,
    );
    [own].into_iter().chain(others).collect()
}

const COLUMNS: [Column<ProfileRow>; 6] = [
    Column::narrow("where", |row| row.name.clone()),
    Column::narrow("samples", |row| row.samples.to_string()),
    // Other programs are not part of the load.
    Column::narrow("% of the\nload", |row| match row.kind {
        Kind::Other => String::new(),
        _ => format!("{:.1}", row.bound_percent),
    }),
    Column::narrow("µs/MiB", |row| {
        let unknown = if row.kind == Kind::Other { "" } else { "?" };
        row.bound_us_per_mib.map_or(unknown.into(), |us| format!("{us:.1}"))
    }),
    Column::narrow("group", |row| {
        if row.kind == Kind::Function { row.group.clone() } else { String::new() }
    }),
    Column::wide("samples per\nbyte of code", |row| {
        row.normalised_load.map_or(String::new(), |load| format!("{load:.4}"))
    }),
];

impl TableRow for ProfileRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const COLUMNS_EXPLAINED: &'static str = "\
        samples: timer samples of the CPU. % of the load: the most that any change there can \
        save. samples per byte of code: high for a small hot function.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "share of the host's load")];
    const UNIT: &'static str = "percent: the most that any change there could save.";
    /// The rows are sorted by their samples.
    const IS_SORTED: bool = false;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn group(&self) -> String {
        let kind = match self.kind {
            Kind::Function => "functions",
            Kind::Total | Kind::Group => "groups",
            Kind::Other => "other programs, in samples",
        };
        format!("{}: {kind}", self.host)
    }

    fn round_count(&self) -> usize {
        usize::from(self.rank <= FUNCTIONS_SHOWN)
    }

    fn refusal_reason(&self) -> Option<&str> {
        None
    }

    fn bars(&self) -> Vec<Bar> {
        let exactly = Estimate::exactly(self.bound_percent);
        let is_shown = self.kind == Kind::Group;
        Bar::of("sender", Some(exactly).filter(|_| is_shown), String::new()).into_iter().collect()
    }

    fn notes(rows: &[Self]) -> Vec<String> {
        let is_long = rows.iter().any(|row| row.rank > FUNCTIONS_SHOWN);
        let more =
            format!("The JSON report has all functions; tables show {FUNCTIONS_SHOWN} per host.");
        let late = "Samples come from a timer, which waits while interrupts are off: time spent \
             then is counted where they are enabled again (_raw_spin_unlock_irqrestore and similar \
             functions).";
        is_long.then_some(more).into_iter().chain([late.into()]).collect()
    }
}
