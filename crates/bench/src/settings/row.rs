//! A row of `settings`: the contract, and how people are shown it.

use super::change::{Change, Name, Tuning};
use super::{Role, SettingCase, SettingRound, SettingsSeries};
use crate::stats::Figure;
use crate::view::{Bar, Column, Tabled, number};
use serde::{Deserialize, Serialize};

/// One setting, with one path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SettingRow {
    /// How it was sent.
    pub path: String,
    /// What it is for.
    pub role: Role,
    /// What was changed; empty for the hosts as they are.
    pub changes: Vec<Setting>,
    /// How many of the changes, from the first on, are also in the row that this one is compared with.
    pub changes_compared: usize,
    /// What the hosts are without the changes, in words.
    pub basis: String,
    /// Rounds measured. 0 for a row that was refused.
    pub rounds: usize,
    /// What other programs used of a host's CPU, where too few windows were clean. Such a row has no intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// Why nothing was measured.
    pub refused: Option<String>,
    /// Payload that arrived.
    pub throughput_bits_per_second: Option<Figure>,
    /// Load of the sending host's CPU.
    pub sender_load_percent: Option<Figure>,
    /// Load of the receiving host's CPU.
    pub receiver_load_percent: Option<Figure>,
    /// CPU time of the sending host per MiB that arrived.
    pub sender_us_per_mib: Option<Figure>,
    /// CPU time of the receiving host per MiB that arrived.
    pub receiver_us_per_mib: Option<Figure>,
    /// Of both together.
    pub us_per_mib: Option<Figure>,
    /// The sending host's cost over that without the last change (without all, where they are put together), in the same
    /// round: the median of the rounds' ratios.
    pub sender_us_ratio: Option<Figure>,
    /// The same of the receiving host.
    pub receiver_us_ratio: Option<Figure>,
    /// The same of both together.
    pub us_ratio: Option<Figure>,
    /// The throughput over that without the last change, or without all, as above.
    pub throughput_ratio: Option<Figure>,
    /// Interrupts of both hosts' CPUs for each MiB, other than their timers'. What puts a connection into the regime where
    /// packets share them is what most of these settings do.
    #[serde(default)]
    pub interrupts_per_mib: Option<Figure>,
    /// System calls of the receiving process per MiB.
    pub receiver_syscalls_per_mib: Option<f64>,
}

/// A setting and its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its name, as `--settings` takes it.
    pub name: String,
    /// Name and value, as tables show it.
    pub value: String,
    /// What sets it on this machine.
    pub command: String,
    /// What may go wrong.
    pub risk: String,
}

/// A value over that of the row without the change, in the same rounds.
pub(super) fn ratio(
    series: &SettingsSeries,
    all: &[SettingsSeries],
    of: impl Fn(&SettingRound) -> f64,
) -> Option<Figure> {
    let case = &series.case;
    let is_other = |other: &&SettingsSeries| {
        other.case.path == case.path
            && other.case.changes == case.beside()
            && other.case.role != Role::Control
    };
    let other = all.iter().find(is_other)?;
    if case.role == Role::Basis { None } else { series.ratio_to(other, of) }
}

/// Settings do not pay that cost more throughput than this.
const THROUGHPUT_RATIO_MIN: f64 = 0.95;

/// Whether a setting surely costs less than none, and does not cost throughput.
pub(super) fn pays(cost: Figure, throughput: Figure, equal: Option<Figure>) -> bool {
    is_below(cost, equal) && throughput.median >= THROUGHPUT_RATIO_MIN
}

/// By how much two equal rows differ, to either side.
fn chance(equal: Option<Figure>) -> f64 {
    // Where the equal row has no interval nothing is known of chance, and nothing exceeds it.
    let of = |equal: Figure| {
        if equal.has_interval() { equal.high.max(1.0 / equal.low).max(1.0) } else { f64::INFINITY }
    };
    equal.map_or(1.0, of)
}

/// Whether a ratio is surely below 1, and below what two equal rows differ by.
fn is_below(ratio: Figure, equal: Option<Figure>) -> bool {
    ratio.is_below(1.0 / chance(equal))
}

/// Whether it is surely above.
pub(super) fn is_above(ratio: Figure, equal: Option<Figure>) -> bool {
    ratio.is_above(chance(equal))
}

/// The row that a series comes to, beside all the others.
pub(super) fn of(
    series: &SettingsSeries,
    all: &[SettingsSeries],
    basis: &Tuning,
    device: &str,
) -> SettingRow {
    let SettingCase { path, changes, role } = &series.case;
    let setting = |change: &Change| Setting {
        name: change.name().to_string(),
        value: change.to_string(),
        command: change.command(device),
        risk: change.risk().into(),
    };
    let calls = series.figure(|round| round.received.calls as f64 / round.received.mib());
    SettingRow {
        path: path.name().into(),
        role: *role,
        changes: changes.iter().map(setting).collect(),
        changes_compared: series.case.beside().len(),
        basis: basis.words(),
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        refused: series.why_none(),
        throughput_bits_per_second: series.figure(|round| round.costs.bytes_per_second * 8.0),
        sender_load_percent: series.figure(|round| round.costs.sender.load_percent),
        receiver_load_percent: series.figure(|round| round.costs.receiver.load_percent),
        sender_us_per_mib: series.figure(|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: series.figure(|round| round.costs.receiver_us_per_mib),
        us_per_mib: series.figure(SettingRound::us_per_mib),
        sender_us_ratio: ratio(series, all, |round| round.costs.sender_us_per_mib),
        receiver_us_ratio: ratio(series, all, |round| round.costs.receiver_us_per_mib),
        us_ratio: ratio(series, all, SettingRound::us_per_mib),
        throughput_ratio: ratio(series, all, |round| round.costs.bytes_per_second),
        interrupts_per_mib: series.figure_of_some(|round| round.costs.both_interrupts_per_mib()),
        receiver_syscalls_per_mib: calls.map(|figure| figure.median),
    }
}

impl SettingRow {
    /// The changes that it has beyond what it is compared with, in words.
    pub(super) fn own(&self) -> String {
        let own: Vec<&str> = self.changes[self.changes_compared.min(self.changes.len())..]
            .iter()
            .map(|setting| setting.value.as_str())
            .collect();
        own.join(", ")
    }
}

/// A ratio; nothing for a row that is compared with none.
fn ratio_or_nothing(row: &SettingRow, figure: Option<Figure>) -> String {
    if row.role == Role::Basis { "1".into() } else { crate::view::ratio(figure) }
}

const COLUMNS: [Column<SettingRow>; 11] = [
    Column::narrow("setting", Tabled::name),
    Column::narrow("both\nµs/MiB", |row| number(row.us_per_mib, 1.0, 0)),
    Column::narrow("× without\n(interval)", |row| ratio_or_nothing(row, row.us_ratio)),
    Column::narrow("inter-\nrupts", |row| number(row.interrupts_per_mib, 1.0, 0)),
    Column::narrow("Gbit/s", |row| number(row.throughput_bits_per_second, 1e9, 1)),
    Column::wide("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::wide("sender\n× without", |row| ratio_or_nothing(row, row.sender_us_ratio)),
    Column::wide("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::wide("receiver\n× without", |row| ratio_or_nothing(row, row.receiver_us_ratio)),
    Column::wide("sender\nload %", |row| number(row.sender_load_percent, 1.0, 0)),
    Column::wide("receiver\nload %", |row| number(row.receiver_load_percent, 1.0, 0)),
];

impl Tabled for SettingRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str = "µs of CPU per MiB, interrupts included. All charts share a scale.";

    fn name(&self) -> String {
        match self.role {
            Role::Basis => "as it is".into(),
            Role::Control => "unchanged".into(),
            Role::Together => "together".into(),
            Role::Setting if self.changes_compared > 0 => format!("+ {}", self.own()),
            Role::Setting => self.own(),
        }
    }

    fn group(&self) -> String {
        format!("{} ({})", self.path, self.basis)
    }

    fn rounds(&self) -> usize {
        self.rounds
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed_percent.is_some()
    }

    fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn bars(&self) -> Vec<Bar> {
        [
            Bar::of("sender", self.sender_us_per_mib, String::new()),
            Bar::of("receiver", self.receiver_us_per_mib, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn notes(rows: &[Self]) -> Vec<String> {
        let mut settings: Vec<&Setting> = Vec::new();
        for setting in rows.iter().flat_map(|row| &row.changes) {
            if !settings.contains(&setting) {
                settings.push(setting);
            }
        }
        // Nobody wants to switch offloads off; that row is there to show what they are worth.
        settings.retain(|setting| setting.name != Name::Offloads.to_string());
        // Values of one setting that risk the same share the line on that.
        let alike =
            |one: &&Setting, other: &&Setting| one.name == other.name && one.risk == other.risk;
        let how = settings.chunk_by(alike).flat_map(|alike| {
            let values =
                alike.iter().map(|setting| format!("{}: {}", setting.value, setting.command));
            values.chain([format!("  {} risks: {}", alike[0].name, alike[0].risk)])
        });
        let about = "× without compares both hosts' cost with that of the row that lacks the setting; + stands before what is set besides the row above; unchanged shows by how much two equal rows differ; together is measured after the others, beside the hosts as they are once more. The commands hold until the next start.";
        std::iter::once(about.into()).chain(how).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(low: f64, median: f64, high: f64) -> Figure {
        Figure { median, low, high, rounds: 9, coverage_percent: 96.1 }
    }

    #[test]
    fn only_what_exceeds_chance_pays_or_costs() {
        let as_fast = figure(0.9, 1.0, 1.1);
        let equal = Some(figure(0.92, 1.01, 1.05));
        assert!(pays(figure(0.6, 0.7, 0.8), as_fast, equal));
        assert!(!pays(figure(0.8, 0.9, 0.93), as_fast, equal), "two equal rows differ as much");
        assert!(pays(figure(0.8, 0.9, 0.95), as_fast, None));
        assert!(!pays(figure(0.9, 0.97, 1.01), as_fast, None));
        assert!(!pays(figure(0.6, 0.7, 0.8), figure(0.5, 0.6, 0.7), equal), "it is slower");
        // As much to one side as to the other.
        assert!(
            is_above(figure(1.09, 1.1, 1.2), equal) && !is_above(figure(1.07, 1.1, 1.2), equal)
        );
    }
}
