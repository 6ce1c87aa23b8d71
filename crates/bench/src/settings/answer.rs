//! The answer in plain words: which settings pay, what they come to together, and whether that is more than the choice of
//! path.

use super::row::{is_above, is_below};
use super::{Report, Role, Row};
use crate::stats::Figure;

/// The sentences that a report's rows support.
pub(super) fn of(report: &Report) -> Vec<String> {
    let mut paths: Vec<&str> = report.rows.iter().map(|row| row.path.as_str()).collect();
    paths.dedup();
    paths.sort_unstable();
    paths.dedup();
    let of_path = |path: &str| report.rows.iter().filter(|row| row.path == path).collect::<Vec<_>>();
    let mut sentences: Vec<String> = paths
        .iter()
        .flat_map(|path| {
            let rows = of_path(path);
            [best(path, &rows), together(&rows), worst(&rows), nothing(&rows)]
        })
        .flatten()
        .collect();
    sentences.extend(choice(report));
    sentences
}

/// Rows that are compared with the hosts as they are, one change each.
fn single<'a>(rows: &[&'a Row]) -> Vec<(&'a Row, Figure)> {
    let is_single = |row: &&&Row| row.role == Role::Setting && row.changes_compared == 0;
    rows.iter().filter(is_single).filter_map(|row| Some((*row, row.us_ratio?))).collect()
}

/// What two equal rows differ by.
fn equal(rows: &[&Row]) -> Option<Figure> {
    rows.iter().find(|row| row.role == Role::Control)?.us_ratio
}

fn words(ratio: Figure) -> String {
    format!("{:.2} × ({:.2} to {:.2})", ratio.median, ratio.low, ratio.high)
}

fn best(path: &str, rows: &[&Row]) -> Option<String> {
    let mut paying = single(rows);
    if paying.is_empty() {
        return None;
    }
    paying.retain(|(_, ratio)| is_below(*ratio, equal(rows)));
    paying.sort_by(|one, other| one.1.median.total_cmp(&other.1.median));
    let Some((row, ratio)) = paying.first() else {
        return Some(format!("With {path} no setting surely pays here."));
    };
    let setting = row.changes.first()?;
    let alone =
        paying.iter().all(|(other, _)| other.changes.first().is_some_and(|one| one.name == setting.name));
    let rest = if alone { " Nothing else surely pays." } else { "" };
    Some(format!(
        "With {path} the setting that pays most is {}: both hosts' cost is {} ({}; it risks: {}).{rest}",
        setting.value,
        words(*ratio),
        setting.command,
        setting.risk
    ))
}

fn together(rows: &[&Row]) -> Option<String> {
    let row = rows.iter().find(|row| row.role == Role::Together)?;
    let commands: Vec<&str> = row.changes.iter().map(|setting| setting.command.as_str()).collect();
    Some(format!(
        "All that surely paid with {}, together ({}): {}. The commands: {}",
        row.path,
        row.own(),
        words(row.us_ratio?),
        commands.join("; ")
    ))
}

fn worst(rows: &[&Row]) -> Option<String> {
    let mut costly = single(rows);
    costly.retain(|(_, ratio)| is_above(*ratio, equal(rows)));
    costly.sort_by(|one, other| other.1.median.total_cmp(&one.1.median));
    let words: Vec<String> =
        costly.iter().map(|(row, ratio)| format!("{} {}", row.own(), words(*ratio))).collect();
    (!words.is_empty()).then(|| format!("With {} these surely cost: {}.", rows[0].path, words.join("; ")))
}

fn nothing(rows: &[&Row]) -> Option<String> {
    let equal = equal(rows);
    let unclear =
        single(rows).into_iter().filter(|(_, ratio)| !is_below(*ratio, equal) && !is_above(*ratio, equal));
    let names: Vec<String> = unclear.map(|(row, _)| row.own()).collect();
    (!names.is_empty())
        .then(|| format!("With {} these cannot be told from no change: {}.", rows[0].path, names.join(", ")))
}

/// The dearest path against the cheapest, both with nothing changed.
fn choice(report: &Report) -> Option<String> {
    let mut plain: Vec<(&str, f64)> = report
        .rows
        .iter()
        .filter(|row| row.role == Role::Basis)
        .filter_map(|row| Some((row.path.as_str(), row.us_per_mib?.median)))
        .collect();
    plain.sort_by(|one, other| one.1.total_cmp(&other.1));
    let ((cheap, least), (dear, most)) = (*plain.first()?, *plain.last()?);
    (cheap != dear).then(|| {
        format!(
            "The choice of path, with nothing changed: {cheap} costs both hosts {:.2} × what {dear} does.",
            least / most
        )
    })
}
