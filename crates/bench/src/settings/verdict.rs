//! The verdict of the experiment `settings`: the change that saves most, if its risk permits the
//! advice.

use super::change::{Change, MTU_DEFAULT, Tuning};
use super::row::{pays, ratio};
use super::{Role, SettingRound, SettingsSeries};
use crate::rounds::Run;
use crate::stats::Estimate;
use crate::verdict::{Confidence, Question, Safety, Verdict, saving, saving_text, too_few_rounds};

/// The verdict on the changes of a single setting, with any of the measured send methods. A risky
/// change is never one.
pub(super) fn of(
    rows: &[SettingsSeries],
    run: &Run<'_>,
    device: &str,
    basis_tuning: &Tuning,
) -> Option<Verdict> {
    let withheld = |reason: &str| {
        Some(Verdict::withheld(Question::Settings, reason, run.longer_command("settings")))
    };
    let singles = || rows.iter().filter_map(|row| Some((row, single_change(row)?)));
    let safe: Vec<(&SettingsSeries, &Change)> =
        singles().filter(|(_, change)| change.safety() != Safety::Risky).collect();
    if safe.is_empty() {
        return None;
    }
    if let Some(obstacle) = run.obstacle() {
        return withheld(&obstacle);
    }
    let fewest_rounds =
        rows.iter().map(SettingsSeries::ratio_rounds).filter(|&rounds| rounds > 0).min();
    if let Some(reason) = too_few_rounds(fewest_rounds.unwrap_or(0)) {
        return withheld(&reason);
    }
    let paying = safe.into_iter().filter_map(|(row, change)| {
        let cost = ratio(row, rows, SettingRound::total_us_per_mib)?;
        let throughput = ratio(row, rows, |round| round.costs.bytes_per_second)?;
        pays(cost, throughput, control_ratio(row, rows)).then_some((row, change, cost))
    });
    let paying: Vec<_> = paying.collect();
    let best = paying.iter().min_by(|(.., one), (.., other)| one.median.total_cmp(&other.median));
    let Some((.., least)) = best else {
        return withheld("no setting was shown to save CPU time here");
    };
    // Of several that may save as much, the most widely used one.
    let may_be_best = |(.., cost): &&(_, _, Estimate)| cost.low <= least.high;
    let &(row, change, cost) =
        paying.iter().filter(may_be_best).min_by_key(|(_, change, _)| change.preference())?;
    // The same comparison, with an interval that holds for all settings jointly and for other runs.
    let basis = rows
        .iter()
        .find(|other| other.case.method == row.case.method && other.case.role == Role::Basis)?;
    let jointly = row.ratio_among_methods(basis, singles().count(), SettingRound::total_us_per_mib);
    let is_certain = jointly.is_some_and(|ratio| ratio.is_below(1.0));
    let across_runs = row.ratio_to_method(basis, SettingRound::total_us_per_mib).unwrap_or(cost);
    if !across_runs.is_below(1.0) {
        return withheld("no setting was shown to save CPU time here beyond what runs differ by");
    }
    let saving = saving(across_runs);
    let baseline = baseline(change, basis_tuning);
    Some(Verdict {
        confidence: if is_certain { Confidence::Certain } else { Confidence::Likely },
        choice: Some(change.to_string()),
        baseline: Some(baseline.clone()),
        saving_percent: Some(saving),
        how: Some(change.command(device)),
        safety: change.safety(),
        ..Verdict::without_saving(
            Question::Settings,
            &format!(
                "{change} saves {} of both hosts' CPU against {} ({}, MTU {MTU_DEFAULT}); {}: {}",
                saving_text(saving),
                baseline,
                row.case.method,
                change.safety().name(),
                change.risk()
            ),
        )
    })
}

/// What a change is compared with.
fn baseline(change: &Change, basis: &Tuning) -> String {
    match change {
        Change::Congestion(_) => basis.congestion.clone(),
        _ => "this host's settings".into(),
    }
}

/// The change of a row that makes exactly one.
fn single_change(row: &SettingsSeries) -> Option<&Change> {
    match row.case.changes.as_slice() {
        [change] if row.case.role == Role::Setting => Some(change),
        _ => None,
    }
}

/// The cost ratio of two equal rows of the same method.
fn control_ratio(row: &SettingsSeries, rows: &[SettingsSeries]) -> Option<Estimate> {
    let control = rows
        .iter()
        .find(|other| other.case.method == row.case.method && other.case.role == Role::Control)?;
    ratio(control, rows, SettingRound::total_us_per_mib)
}
