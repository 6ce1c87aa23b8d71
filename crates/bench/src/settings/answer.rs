//! The answer in plain words: which settings pay, what they come to together, and whether that is more than the choice of
//! path.

use super::row::{is_above, pays};
use super::{Choice, Role, SettingRow, SettingsReport};
use crate::stats::{Figure, VERDICT_ROUNDS_MIN};

/// The sentences that a report's rows support.
pub(super) fn of(report: &SettingsReport, choice: Option<&Choice>) -> Vec<String> {
    let mut paths: Vec<&str> = report.rows.iter().map(|row| row.path.as_str()).collect();
    paths.sort_unstable();
    paths.dedup();
    let enough = || report.rows.iter().filter(|row| row.rounds >= VERDICT_ROUNDS_MIN);
    if enough().next().is_none() {
        return vec![format!(
            "No verdict: it takes {VERDICT_ROUNDS_MIN} rounds (--rounds {VERDICT_ROUNDS_MIN})."
        )];
    }
    let of_path = |path: &str| enough().filter(|row| row.path == path).collect::<Vec<_>>();
    let mut sentences: Vec<String> = paths
        .iter()
        .flat_map(|path| {
            let rows = of_path(path);
            [best(path, &rows), together(&rows), worst(&rows), in_pieces(&rows), nothing(&rows)]
        })
        .flatten()
        .collect();
    sentences.extend(choice.map(|Choice { cheap, dear, ratio }| {
        format!(
            "The choice of path, with nothing changed: {cheap} costs both hosts {} what {dear} does.",
            words(*ratio)
        )
    }));
    sentences
}

/// Rows that are compared with the hosts as they are, one change each.
fn single<'a>(rows: &[&'a SettingRow]) -> Vec<(&'a SettingRow, Figure)> {
    let is_single = |row: &&&SettingRow| row.role == Role::Setting && row.changes_compared == 0;
    rows.iter().filter(is_single).filter_map(|row| Some((*row, row.us_ratio?))).collect()
}

/// What two equal rows differ by.
fn equal(rows: &[&SettingRow]) -> Option<Figure> {
    rows.iter().find(|row| row.role == Role::Control)?.us_ratio
}

fn words(ratio: Figure) -> String {
    format!("{:.2} × ({})", ratio.median, ratio.interval(2))
}

fn best(path: &str, rows: &[&SettingRow]) -> Option<String> {
    let mut paying = single(rows);
    if paying.is_empty() {
        return None;
    }
    let equal = equal(rows);
    paying.retain(|(row, ratio)| {
        row.throughput_ratio.is_some_and(|throughput| pays(*ratio, throughput, equal))
    });
    paying.sort_by(|one, other| one.1.median.total_cmp(&other.1.median));
    let Some((row, ratio)) = paying.first() else {
        return Some(format!("With {path} no setting surely pays here."));
    };
    let setting = row.changes.first()?;
    let alone = paying
        .iter()
        .all(|(other, _)| other.changes.first().is_some_and(|one| one.name == setting.name));
    let rest = if alone { " Nothing else surely pays." } else { "" };
    Some(format!(
        "With {path} the setting that pays most is {}: both hosts' cost is {} ({}; it risks: {}).{rest}",
        setting.value,
        words(*ratio),
        setting.command,
        setting.risk
    ))
}

fn together(rows: &[&SettingRow]) -> Option<String> {
    let row = rows.iter().find(|row| row.role == Role::Together)?;
    let (ratio, throughput) = (row.us_ratio?, row.throughput_ratio?);
    let commands: Vec<&str> = row.changes.iter().map(|setting| setting.command.as_str()).collect();
    let verdict = if pays(ratio, throughput, equal(rows)) {
        format!("{}. The commands: {}", words(ratio), commands.join("; "))
    } else {
        format!(
            "{}, which cannot be told from no change: measure again with more rounds.",
            words(ratio)
        )
    };
    Some(format!("All that paid alone with {}, together ({}): {verdict}", row.path, row.own()))
}

/// What is set on top of another change, beside that change alone.
fn in_pieces(rows: &[&SettingRow]) -> Option<String> {
    let sentences: Vec<String> = rows
        .iter()
        .filter(|row| row.role == Role::Setting && row.changes_compared > 0)
        .filter_map(|row| Some(format!("{} {}", row.own(), words(row.us_ratio?))))
        .collect();
    (!sentences.is_empty()).then(|| {
        format!(
            "With {} and segmentation off, so that packets come one by one as from a wire, each on top of the one before: {}.",
            rows[0].path,
            sentences.join("; ")
        )
    })
}

fn worst(rows: &[&SettingRow]) -> Option<String> {
    let mut costly = single(rows);
    costly.retain(|(_, ratio)| is_above(*ratio, equal(rows)));
    costly.sort_by(|one, other| other.1.median.total_cmp(&one.1.median));
    let words: Vec<String> =
        costly.iter().map(|(row, ratio)| format!("{} {}", row.own(), words(*ratio))).collect();
    (!words.is_empty())
        .then(|| format!("With {} these surely cost: {}.", rows[0].path, words.join("; ")))
}

fn nothing(rows: &[&SettingRow]) -> Option<String> {
    let equal = equal(rows);
    let unclear = single(rows).into_iter().filter(|(row, ratio)| {
        let throughput = row.throughput_ratio.unwrap_or(*ratio);
        !pays(*ratio, throughput, equal) && !is_above(*ratio, equal)
    });
    let names: Vec<String> = unclear.map(|(row, _)| row.own()).collect();
    (!names.is_empty()).then(|| {
        format!("With {} these cannot be told from no change: {}.", rows[0].path, names.join(", "))
    })
}
