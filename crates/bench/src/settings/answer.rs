//! The answers of the experiment `settings`: which settings pay, their combined gain, and the gain
//! of the choice of method.

use super::row::{is_above, pays};
use super::{MethodComparison, Role, SettingRow, SettingsReport};
use crate::stats::{Estimate, VERDICT_ROUNDS_MIN};
use crate::verdict::{Safety, ratio_text};

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &SettingsReport, comparison: Option<&MethodComparison>) -> Vec<String> {
    let mut paths: Vec<&str> = report.rows.iter().map(|row| row.path.as_str()).collect();
    paths.sort_unstable();
    paths.dedup();
    let conclusive_rows = || report.rows.iter().filter(|row| row.rounds >= VERDICT_ROUNDS_MIN);
    if conclusive_rows().next().is_none() {
        return vec![format!(
            "No verdict: it takes {VERDICT_ROUNDS_MIN} rounds (--rounds {VERDICT_ROUNDS_MIN})."
        )];
    }
    let of_path = |path: &str| conclusive_rows().filter(|row| row.path == path).collect::<Vec<_>>();
    let mut sentences: Vec<String> = paths
        .iter()
        .flat_map(|path| {
            let rows = of_path(path);
            [
                best_sentence(path, &rows),
                together_sentence(&rows),
                worst_sentence(&rows),
                segmentation_sentence(&rows),
                inconclusive_sentence(&rows),
            ]
        })
        .flatten()
        .collect();
    sentences.extend(comparison.map(|MethodComparison { cheapest, most_expensive, ratio }| {
        format!(
            "The choice of path, with nothing changed: {cheapest} costs both hosts {} what \
             {most_expensive} does.",
            ratio_text(*ratio)
        )
    }));
    sentences
}

/// The rows with a single change, which are compared with the unchanged hosts.
fn single_change_rows<'a>(rows: &[&'a SettingRow]) -> Vec<(&'a SettingRow, Estimate)> {
    let is_single = |row: &&&SettingRow| row.role == Role::Setting && row.changes_compared == 0;
    rows.iter().filter(is_single).filter_map(|row| Some((*row, row.us_ratio?))).collect()
}

/// The cost ratio of two equal rows, from the control row.
fn control_ratio(rows: &[&SettingRow]) -> Option<Estimate> {
    rows.iter().find(|row| row.role == Role::Control)?.us_ratio
}

fn best_sentence(path: &str, rows: &[&SettingRow]) -> Option<String> {
    let mut paying = single_change_rows(rows);
    if paying.is_empty() {
        return None;
    }
    let control_ratio = control_ratio(rows);
    paying.retain(|(row, ratio)| {
        row.throughput_ratio.is_some_and(|throughput| pays(*ratio, throughput, control_ratio))
    });
    paying
        .retain(|(row, _)| row.changes.iter().all(|setting| setting.safety != Some(Safety::Risky)));
    paying.sort_by(|one, other| one.1.median.total_cmp(&other.1.median));
    let Some((row, ratio)) = paying.first() else {
        return Some(format!("With {path} no setting was shown to pay here."));
    };
    let setting = row.changes.first()?;
    let alone = paying
        .iter()
        .all(|(other, _)| other.changes.first().is_some_and(|one| one.name == setting.name));
    let rest = if alone { " No other setting was shown to pay." } else { "" };
    let safety = setting.safety.map_or("", Safety::name);
    Some(format!(
        "With {path} the setting that saves most is {}: both hosts' cost is {} ({}; {safety}: \
         {}).{rest}",
        setting.value,
        ratio_text(*ratio),
        setting.command,
        setting.risk
    ))
}

fn together_sentence(rows: &[&SettingRow]) -> Option<String> {
    let row = rows.iter().find(|row| row.role == Role::Together)?;
    let (ratio, throughput) = (row.us_ratio?, row.throughput_ratio?);
    let commands: Vec<&str> = row.changes.iter().map(|setting| setting.command.as_str()).collect();
    let verdict = if pays(ratio, throughput, control_ratio(rows)) {
        format!("{}. The commands: {}", ratio_text(ratio), commands.join("; "))
    } else {
        format!("{}, which shows no difference: measure longer (--for 10m).", ratio_text(ratio))
    };
    let changes = row.own_changes();
    Some(format!("All changes that paid alone with {}, together ({changes}): {verdict}", row.path))
}

/// The rows with several changes, each compared with the row that lacks the last one.
fn segmentation_sentence(rows: &[&SettingRow]) -> Option<String> {
    let sentences: Vec<String> = rows
        .iter()
        .filter(|row| row.role == Role::Setting && row.changes_compared > 0)
        .filter_map(|row| Some(format!("{} {}", row.own_changes(), ratio_text(row.us_ratio?))))
        .collect();
    (!sentences.is_empty()).then(|| {
        format!(
            "With {} and segmentation off, so that packets arrive one by one as from a wire, each \
             in addition to the one before: {}.",
            rows[0].path,
            sentences.join("; ")
        )
    })
}

fn worst_sentence(rows: &[&SettingRow]) -> Option<String> {
    let mut costly = single_change_rows(rows);
    costly.retain(|(_, ratio)| is_above(*ratio, control_ratio(rows)));
    costly.sort_by(|one, other| other.1.median.total_cmp(&one.1.median));
    let texts: Vec<String> = costly
        .iter()
        .map(|(row, ratio)| format!("{} {}", row.own_changes(), ratio_text(*ratio)))
        .collect();
    (!texts.is_empty()).then(|| {
        format!("With {} these were shown to cost more: {}.", rows[0].path, texts.join("; "))
    })
}

fn inconclusive_sentence(rows: &[&SettingRow]) -> Option<String> {
    let control_ratio = control_ratio(rows);
    let unclear = single_change_rows(rows).into_iter().filter(|(row, ratio)| {
        let throughput = row.throughput_ratio.unwrap_or(*ratio);
        !pays(*ratio, throughput, control_ratio) && !is_above(*ratio, control_ratio)
    });
    let names: Vec<String> = unclear.map(|(row, _)| row.own_changes()).collect();
    (!names.is_empty())
        .then(|| format!("With {} these show no difference: {}.", rows[0].path, names.join(", ")))
}
