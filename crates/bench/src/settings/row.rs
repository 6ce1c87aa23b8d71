//! A row of the experiment `settings`: its JSON fields and its table columns.

use super::change::{Change, Name, Tuning};
use super::{Role, SettingCase, SettingRound, SettingsSeries};
use crate::rounds::RoundCost;
use crate::stats::Estimate;
use crate::verdict::Safety;
use crate::view::{Advice, Bar, Column, TableRow, number};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one setting with one send method.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SettingRow {
    /// The name of the send method.
    pub path: String,
    /// The purpose of the row.
    pub role: Role,
    /// The changes; empty for the unchanged hosts.
    pub changes: Vec<AppliedSetting>,
    /// The number of changes, from the first on, that the row it is compared with also has.
    pub changes_compared: usize,
    /// The hosts' settings without the changes, in words.
    pub basis: String,
    /// Rounds measured; 0 if the row was refused.
    pub rounds: usize,
    /// Median CPU use of other programs in the disturbed rounds, in percent of one CPU. Only set if
    /// too few rounds were undisturbed; such a row does not have intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// The reason why nothing was measured.
    pub refused: Option<String>,
    /// Payload that reached the receiving program.
    pub throughput_bits_per_second: Option<Estimate>,
    /// Load of the sending host's CPU.
    pub sender_load_percent: Option<Estimate>,
    /// Load of the receiving host's CPU.
    pub receiver_load_percent: Option<Estimate>,
    /// CPU time of the sending host per received MiB.
    pub sender_us_per_mib: Option<Estimate>,
    /// CPU time of the receiving host per received MiB.
    pub receiver_us_per_mib: Option<Estimate>,
    /// CPU time of both hosts per received MiB.
    pub us_per_mib: Option<Estimate>,
    /// The sending host's cost divided by its cost in the row without the last change, in the same
    /// round: the median of the rounds' ratios. The row `together` is compared with the row without
    /// any change.
    pub sender_us_ratio: Option<Estimate>,
    /// The receiving host's cost divided likewise.
    pub receiver_us_ratio: Option<Estimate>,
    /// The cost of both hosts divided likewise.
    pub us_ratio: Option<Estimate>,
    /// The throughput divided likewise.
    pub throughput_ratio: Option<Estimate>,
    /// Interrupts on both hosts' CPUs per MiB, without timer interrupts. Most of these settings
    /// work by changing how many packets share an interrupt: they move the connection into the
    /// regime with fewer interrupts.
    #[serde(default)]
    pub interrupts_per_mib: Option<Estimate>,
    /// System calls of the receiving process per MiB.
    pub receiver_syscalls_per_mib: Option<f64>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// A setting and its value.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct AppliedSetting {
    /// The name, as `--settings` accepts it.
    pub name: String,
    /// Name and value, as tables show them.
    pub value: String,
    /// The command that applies it on this machine.
    pub command: String,
    /// The risk.
    pub risk: String,
    /// Where the setting can be made without harm; `null` in a report of an older version.
    #[serde(default)]
    pub safety: Option<Safety>,
}

/// A value divided by the value of the row without the change, in the same rounds.
pub(super) fn ratio(
    series: &SettingsSeries,
    all: &[SettingsSeries],
    of: impl Fn(&SettingRound) -> f64,
) -> Option<Estimate> {
    let case = &series.case;
    let is_other = |other: &&SettingsSeries| {
        other.case.method == case.method
            && other.case.changes == case.compared_changes()
            && other.case.role != Role::Control
    };
    let other = all.iter().find(is_other)?;
    if case.role == Role::Basis { None } else { series.ratio_to(other, of) }
}

/// The smallest throughput ratio of a setting that pays.
const THROUGHPUT_RATIO_MIN: f64 = 0.95;

/// Whether a setting pays: it saves more than two equal rows differ by chance, and keeps the
/// throughput.
pub(super) fn pays(cost: Estimate, throughput: Estimate, control: Option<Estimate>) -> bool {
    is_below(cost, control) && throughput.median >= THROUGHPUT_RATIO_MIN
}

/// The factor by which two equal rows differ by chance, at least 1.
fn chance_factor(control: Option<Estimate>) -> f64 {
    // If the control row does not have an interval, the difference by chance is unknown, and no
    // ratio exceeds it.
    let of = |control: Estimate| {
        if control.has_interval() {
            control.high.max(1.0 / control.low).max(1.0)
        } else {
            f64::INFINITY
        }
    };
    control.map_or(1.0, of)
}

/// Whether a ratio's whole interval lies below the inverse of the factor by which two equal rows
/// differ.
fn is_below(ratio: Estimate, control: Option<Estimate>) -> bool {
    ratio.is_below(1.0 / chance_factor(control))
}

/// Whether a ratio's whole interval lies above the factor by which two equal rows differ.
pub(super) fn is_above(ratio: Estimate, control: Option<Estimate>) -> bool {
    ratio.is_above(chance_factor(control))
}

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn of(
    series: &SettingsSeries,
    all: &[SettingsSeries],
    basis: &Tuning,
    device: &str,
) -> SettingRow {
    let SettingCase { method, changes, role } = &series.case;
    let setting = |change: &Change| AppliedSetting {
        name: change.name().to_string(),
        value: change.to_string(),
        command: change.command(device),
        risk: change.risk().into(),
        safety: Some(change.safety()),
    };
    let calls = series.estimate(|round| round.received.calls as f64 / round.received.mib());
    SettingRow {
        path: method.name().into(),
        role: *role,
        changes: changes.iter().map(setting).collect(),
        changes_compared: series.case.compared_changes().len(),
        basis: basis.description(),
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        refused: series.failure_reason(),
        throughput_bits_per_second: series.estimate(|round| round.costs.bytes_per_second * 8.0),
        sender_load_percent: series.estimate(|round| round.costs.sender.load_percent),
        receiver_load_percent: series.estimate(|round| round.costs.receiver.load_percent),
        sender_us_per_mib: series.estimate(|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: series.estimate(|round| round.costs.receiver_us_per_mib),
        us_per_mib: series.estimate(SettingRound::total_us_per_mib),
        sender_us_ratio: ratio(series, all, |round| round.costs.sender_us_per_mib),
        receiver_us_ratio: ratio(series, all, |round| round.costs.receiver_us_per_mib),
        us_ratio: ratio(series, all, SettingRound::total_us_per_mib),
        throughput_ratio: ratio(series, all, |round| round.costs.bytes_per_second),
        interrupts_per_mib: series.estimate_of_some(|round| round.costs.both_interrupts_per_mib()),
        round_costs: series.round_costs(SettingRound::total_us_per_mib, |_| None),
        receiver_syscalls_per_mib: calls.map(|estimate| estimate.median),
    }
}

impl SettingRow {
    /// The changes that the row it is compared with lacks, in words.
    pub(super) fn own_changes(&self) -> String {
        let own: Vec<&str> = self.changes[self.changes_compared.min(self.changes.len())..]
            .iter()
            .map(|setting| setting.value.as_str())
            .collect();
        own.join(", ")
    }
}

/// The cell of a ratio; 1 for the row that the others are compared with.
fn ratio_cell(row: &SettingRow, estimate: Option<Estimate>) -> String {
    if row.role == Role::Basis { "1".into() } else { crate::view::ratio(estimate) }
}

const COLUMNS: [Column<SettingRow>; 11] = [
    Column::narrow("setting", TableRow::name),
    Column::narrow("both\nµs/MiB", |row| number(row.us_per_mib, 1.0, 0)),
    Column::narrow("× without\n(interval)", |row| ratio_cell(row, row.us_ratio)),
    Column::narrow("inter-\nrupts", |row| number(row.interrupts_per_mib, 1.0, 0)),
    Column::narrow("Gbit/s", |row| number(row.throughput_bits_per_second, 1e9, 1)),
    Column::wide("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::wide("sender\n× without", |row| ratio_cell(row, row.sender_us_ratio)),
    Column::wide("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::wide("receiver\n× without", |row| ratio_cell(row, row.receiver_us_ratio)),
    Column::wide("sender\nload %", |row| number(row.sender_load_percent, 1.0, 0)),
    Column::wide("receiver\nload %", |row| number(row.receiver_load_percent, 1.0, 0)),
];

impl TableRow for SettingRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["as it is"];
    const COLUMNS_EXPLAINED: &'static str = "\
        both µs/MiB: CPU time of both hosts for each MiB, interrupts included. interrupts: of \
        both CPUs for each MiB.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str = "µs of CPU per MiB, interrupts included. All charts share a scale.";
    /// A row marked with + belongs below the one that it is compared with.
    const IS_SORTED: bool = false;

    fn name(&self) -> String {
        match self.role {
            Role::Basis => "as it is".into(),
            Role::Control => "unchanged".into(),
            Role::Together => "together".into(),
            Role::Setting if self.changes_compared > 0 => format!("+ {}", self.own_changes()),
            Role::Setting => self.own_changes(),
        }
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        format!("{} ({})", self.path, self.basis)
    }

    fn round_count(&self) -> usize {
        self.rounds
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed_percent.is_some()
    }

    fn refusal_reason(&self) -> Option<&str> {
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

    fn advice(rows: &[Self]) -> Vec<Advice> {
        let mut settings: Vec<&AppliedSetting> = Vec::new();
        for setting in rows.iter().flat_map(|row| &row.changes) {
            // The row with offloads off only shows their gain. It is not a recommendation.
            if !settings.contains(&setting) && setting.name != Name::Offloads.to_string() {
                settings.push(setting);
            }
        }
        let advice = |setting: &&AppliedSetting| Advice {
            setting: setting.value.clone(),
            command: setting.command.clone(),
            safety: setting.safety.map_or(String::new(), |safety| safety.name().into()),
            risk: setting.risk.clone(),
        };
        settings.iter().map(advice).collect()
    }

    fn notes(_: &[Self]) -> Vec<String> {
        vec![
            "× without: both hosts' cost divided by that of the row that lacks the setting. +: in \
             addition to the row above. unchanged: two equal rows, which differ by chance. \
             together: measured after the others, beside the unchanged hosts. The commands apply \
             until the next boot."
                .into(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(low: f64, median: f64, high: f64) -> Estimate {
        Estimate { median, low, high, rounds: 9, coverage_percent: 96.1 }
    }

    #[test]
    fn only_a_ratio_beyond_chance_pays_or_costs() {
        let same_throughput = estimate(0.9, 1.0, 1.1);
        let control = Some(estimate(0.92, 1.01, 1.05));
        assert!(pays(estimate(0.6, 0.7, 0.8), same_throughput, control));
        let small_gain = estimate(0.8, 0.9, 0.93);
        assert!(!pays(small_gain, same_throughput, control), "two equal rows differ as much");
        assert!(pays(estimate(0.8, 0.9, 0.95), same_throughput, None));
        assert!(!pays(estimate(0.9, 0.97, 1.01), same_throughput, None));
        assert!(!pays(estimate(0.6, 0.7, 0.8), estimate(0.5, 0.6, 0.7), control), "it is slower");
        // The limit is the same factor in both directions.
        assert!(
            is_above(estimate(1.09, 1.1, 1.2), control)
                && !is_above(estimate(1.07, 1.1, 1.2), control)
        );
    }
}
