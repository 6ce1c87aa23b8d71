//! A row of `profile`: the contract, and how people are shown it.

use super::count::Counted;
use super::groups::OTHER;
use crate::stats::Figure;
use crate::view::{Bar, Column, Tabled};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// How many functions of a host people are shown; programs get all.
const SHOWN: usize = 25;

/// What a row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Everything on a host.
    Total,
    /// A group of functions.
    Group,
    /// One function.
    Function,
    /// Another program that ran meanwhile: no part of the load.
    Other,
}

/// Where some of the time went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileRow {
    /// Which host, doing what.
    pub host: String,
    /// What the row is about.
    pub kind: Kind,
    /// The group's or the function's name.
    pub name: String,
    /// The group.
    pub group: String,
    /// How often the CPU was seen there.
    pub ticks: u64,
    /// In percent of the CPU's time.
    pub load_percent: f64,
    /// In percent of the host's load: what would be saved if it cost nothing, and so the most that any change to it
    /// can save.
    pub bound_percent: f64,
    /// The same in µs of CPU per MiB; `null` where nothing was moved that could be counted.
    pub bound_us_per_mib: Option<f64>,
    /// Ticks for each byte of the function's code, as `readprofile` has it: high is a small hot place. `null` for groups.
    pub normalised_load: Option<f64>,
    /// What the meter read meanwhile, in percent of the CPU; only in the row of everything.
    pub meter_load_percent: Option<f64>,
    /// The row's place among those of its kind on its host, from 1.
    pub rank: usize,
}

/// The rows of one host; `meter` is its load in percent and its cost in µs per MiB.
pub(super) fn rows(host: &str, counted: &Counted, meter: Option<(f64, f64)>) -> Vec<ProfileRow> {
    let busy = counted.busy().max(1) as f64;
    let row = |kind, name: &str, group: &str, ticks: u64, rank| ProfileRow {
        host: host.into(),
        kind,
        name: name.into(),
        group: group.into(),
        ticks,
        load_percent: 100.0 * ticks as f64 / counted.total.max(1) as f64,
        bound_percent: 100.0 * ticks as f64 / busy,
        bound_us_per_mib: meter.map(|(_, us_per_mib)| us_per_mib * ticks as f64 / busy),
        normalised_load: None,
        meter_load_percent: None,
        rank,
    };
    let total = ProfileRow {
        meter_load_percent: meter.map(|(load_percent, _)| load_percent),
        ..row(Kind::Total, "all of it", "", counted.busy(), 1)
    };
    let groups = counted.groups().into_iter().enumerate();
    let groups =
        groups.map(|(index, (group, ticks))| row(Kind::Group, group, group, ticks, index + 1));
    let mut functions: Vec<_> = counted.functions.iter().collect();
    functions.sort_by_key(|(name, function)| (Reverse(function.ticks), name.as_str()));
    let functions = functions.into_iter().enumerate().map(|(index, (name, function))| ProfileRow {
        normalised_load: Some(function.ticks as f64 / function.size_bytes.max(1) as f64),
        ..row(Kind::Function, name, function.group, function.ticks, index + 1)
    });
    let mut others: Vec<_> = counted.others.iter().collect();
    others.sort_by_key(|(name, ticks)| (Reverse(**ticks), name.as_str()));
    let others = others.into_iter().enumerate().map(|(index, (name, ticks))| ProfileRow {
        bound_percent: 0.0,
        bound_us_per_mib: None,
        ..row(Kind::Other, name, OTHER_PROGRAMS, *ticks, index + 1)
    });
    [total].into_iter().chain(groups).chain(functions).chain(others).collect()
}

/// The group of rows that are other programs.
const OTHER_PROGRAMS: &str = "other programs";

/// What the profile of a host says, in words.
pub(super) fn answer(host: &str, counted: &Counted, meter: Option<(f64, f64)>) -> Vec<String> {
    let busy = counted.busy().max(1) as f64;
    let largest: Vec<String> = counted
        .groups()
        .iter()
        .take(4)
        .map(|(group, ticks)| format!("{group} {:.0} %", 100.0 * *ticks as f64 / busy))
        .collect();
    let read = meter.map_or(String::new(), |(load, _)| format!(" (the meter read {load:.1} %)"));
    let other: u64 = counted
        .functions
        .values()
        .filter(|function| function.group == OTHER)
        .map(|f| f.ticks)
        .sum();
    let kernel = counted.kernel().max(1) as f64;
    let others: Vec<String> = counted
        .others
        .iter()
        .filter(|(_, ticks)| 100 * **ticks > counted.total)
        .map(|(name, ticks)| {
            format!("{name} {:.0} %", 100.0 * *ticks as f64 / counted.total.max(1) as f64)
        })
        .collect();
    let others = (!others.is_empty()).then(|| {
        format!(
            "Other programs had this CPU meanwhile and are no part of these figures: {}.",
            others.join(", ")
        )
    });
    let own = format!(
        "The {host}: {:.1} % load{read}, of which {}. Removing any of these altogether would save about that much of what the kernel's ticks see (not the hypervisor's exits). \
         No group claims {:.1} % of the kernel's ticks.",
        counted.load_percent(),
        largest.join(", "),
        100.0 * other as f64 / kernel,
    );
    [own].into_iter().chain(others).collect()
}

const COLUMNS: [Column<ProfileRow>; 6] = [
    Column::narrow("where", |row| row.name.clone()),
    Column::narrow("ticks", |row| row.ticks.to_string()),
    Column::narrow("% of the\nload", |row| format!("{:.1}", row.bound_percent)),
    Column::narrow("µs/MiB", |row| {
        row.bound_us_per_mib.map_or("?".into(), |us| format!("{us:.1}"))
    }),
    Column::narrow("ticks per\nbyte of code", |row| {
        row.normalised_load.map_or(String::new(), |load| format!("{load:.4}"))
    }),
    Column::narrow("group", |row| {
        if row.kind == Kind::Function { row.group.clone() } else { String::new() }
    }),
];

impl Tabled for ProfileRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "share of the host's load")];
    const UNIT: &'static str = "percent: the most that any change there could save.";

    fn name(&self) -> String {
        self.name.clone()
    }

    fn group(&self) -> String {
        let kind = match self.kind {
            Kind::Function => "functions",
            Kind::Total | Kind::Group => "groups",
            Kind::Other => "other programs, in ticks",
        };
        format!("{}: {kind}", self.host)
    }

    fn rounds(&self) -> usize {
        usize::from(self.rank <= SHOWN)
    }

    fn refused(&self) -> Option<&str> {
        None
    }

    fn bars(&self) -> Vec<Bar> {
        let exactly = Figure::exactly(self.bound_percent);
        let is_shown = self.kind == Kind::Group;
        Bar::of("sender", Some(exactly).filter(|_| is_shown), String::new()).into_iter().collect()
    }

    fn notes(rows: &[Self]) -> Vec<String> {
        let is_long = rows.iter().any(|row| row.rank > SHOWN);
        let more =
            format!("The JSON report has every function; here are the first {SHOWN} of each host.");
        let late = "The looks come from a timer, which waits while interrupts are off: what happens then is counted where \
             they come on again (_raw_spin_unlock_irqrestore and its like).";
        is_long.then_some(more).into_iter().chain([late.into()]).collect()
    }
}
