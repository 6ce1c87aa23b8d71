//! The answer in plain words: what to use here, what it saves and how surely, what silently copied, which
//! setting costs most.

use super::{Report, Row};
use crate::quantity::Size;
use crate::stats::Figure;
use crate::warning::Kind;
use std::collections::BTreeSet;

/// The sentences that a report's rows support.
pub(super) fn of(report: &Report) -> Vec<String> {
    let mut sentences = Vec::new();
    if report.warnings.iter().any(|warning| warning.kind == Kind::Disturbed) {
        sentences.push("The machine was not quiet: take what follows with care, and measure again.".into());
    }
    let mut workloads = BTreeSet::new();
    for row in measured(report) {
        if !workloads.insert(row.workload.as_str()) {
            continue;
        }
        let Some(rows) = plainest(report, &row.workload) else { continue };
        // A run that was stopped may not have come to the cheapest path yet.
        let condition = rows[0].condition();
        if report
            .rows
            .iter()
            .any(|row| row.condition() == condition && row.rounds == 0 && row.refused.is_none())
        {
            continue;
        }
        sentences.extend(cheapest(&rows));
        sentences.extend(distance_to_floor(&rows));
        sentences.extend(copied_after_all(&rows));
    }
    sentences.extend(pages_copied(report));
    sentences.extend(dearest_setting(report));
    sentences
}

fn measured(report: &Report) -> impl Iterator<Item = &Row> {
    report.rows.iter().filter(|row| row.sender_us_per_mib.is_some())
}

/// The rows of a workload under its plainest conditions: offloads on, no cork, the chunk nearest to 64 KiB.
fn plainest<'a>(report: &'a Report, workload: &str) -> Option<Vec<&'a Row>> {
    let plainness = |row: &&Row| {
        let distance = (row.chunk_bytes as f64 / 65_536.0).log2().abs();
        (row.offloads != "on", row.cork, (distance * 1000.0) as u64)
    };
    let condition =
        measured(report).filter(|row| row.workload == workload).min_by_key(plainness)?.condition();
    Some(measured(report).filter(|row| row.condition() == condition).collect())
}

fn cost(row: &Row) -> Option<Figure> {
    row.sender_us_per_mib
}

fn median_cost(row: &Row) -> f64 {
    cost(row).map_or(f64::INFINITY, |cost| cost.median)
}

/// The cheapest way of really sending something.
fn best<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    rows.iter()
        .filter(|row| !matches!(row.path.as_str(), "floor" | "auto" | "planned"))
        .min_by(|one, other| median_cost(one).total_cmp(&median_cost(other)))
        .copied()
}

fn cheapest(rows: &[&Row]) -> Option<String> {
    let best = best(rows)?;
    let figure = cost(best)?;
    let head = format!(
        "Cheapest path for {} in chunks of {}: {}, {:.0} µs of the sending host's CPU per MiB ({:.0} to {:.0})",
        best.workload,
        Size(best.chunk_bytes),
        best.path,
        figure.median,
        figure.low,
        figure.high
    );
    let plain =
        rows.iter().find(|row| row.path == "read+write").or(rows.iter().find(|row| row.path == "read+send"));
    let saving = match (best.sender_us_ratio, plain) {
        (Some(ratio), Some(plain)) if plain.path != best.path && ratio.high >= 1.0 => format!(
            "; that is {:.2} × {} ({:.2} to {:.2}), so it is not measurably cheaper",
            ratio.median, plain.path, ratio.low, ratio.high
        ),
        (Some(ratio), Some(plain)) if plain.path != best.path => format!(
            "; that is {:.2} × {} ({:.2} to {:.2}) and saves {:.0} %",
            ratio.median,
            plain.path,
            ratio.low,
            ratio.high,
            100.0 * (1.0 - ratio.median)
        ),
        _ => String::new(),
    };
    let ties: Vec<&str> = rows
        .iter()
        .filter(|row| row.path != best.path && !matches!(row.path.as_str(), "floor" | "auto" | "planned"))
        .filter(|row| is_tied(row, best))
        .map(|row| row.path.as_str())
        .collect();
    let equals = match ties.as_slice() {
        [] => String::new(),
        ties => format!("; {} cannot be told from it", ties.join(", ")),
    };
    Some(format!("{head}{saving}{equals}."))
}

/// Whether a row cannot be told from the best: by the rounds' ratios, which are steadier than the costs, or by
/// the costs where there is nothing to divide by.
fn is_tied(row: &Row, best: &Row) -> bool {
    match (row.sender_us_ratio, best.sender_us_ratio) {
        (Some(row), Some(best)) => row.low <= best.high,
        _ => cost(row).zip(cost(best)).is_some_and(|(row, best)| row.low <= best.high),
    }
}

fn distance_to_floor(rows: &[&Row]) -> Option<String> {
    let (best, floor) = (best(rows)?, rows.iter().find(|row| row.path == "floor")?);
    let (best_cost, floor_cost) = (cost(best)?, cost(floor)?);
    let distance = if best_cost.low <= floor_cost.high {
        "cannot be told from that floor".into()
    } else {
        format!("is at {:.2} × that floor", best_cost.median / floor_cost.median)
    };
    Some(format!(
        "The network stack alone, with no data moved, costs {:.0} µs per MiB ({:.0} to {:.0}): {} {distance}.",
        floor_cost.median, floor_cost.low, floor_cost.high, best.path
    ))
}

fn copied_after_all(rows: &[&Row]) -> Option<String> {
    let copied: Vec<String> = rows
        .iter()
        .filter(|row| row.path.ends_with("zerocopy"))
        .filter_map(|row| {
            let percent = row.copied_percent.filter(|&percent| percent > 1.0)?;
            let ratio = row
                .sender_us_ratio
                .map_or(String::new(), |ratio| format!(", at {:.2} × the plain way", ratio.median));
            Some(format!("{} ({percent:.0} %{ratio})", row.path))
        })
        .collect();
    if copied.is_empty() {
        return None;
    }
    let receiver = |wanted: &dyn Fn(&Row) -> bool| {
        let costs: Vec<f64> = rows
            .iter()
            .filter(|row| wanted(row))
            .filter_map(|row| row.receiver_us_per_mib.map(|figure| figure.median))
            .collect();
        Figure::of(&costs).map(|figure| figure.median)
    };
    let with = receiver(&|row| row.path.ends_with("zerocopy"));
    let without = receiver(&|row| row.path.ends_with("+send") || row.path.ends_with("+write"));
    let at_receiver = match (with, without) {
        (Some(with), Some(without)) => {
            format!(
                "; the receiving host then pays {with:.0} µs per MiB, against {without:.0} for a plain send"
            )
        }
        _ => String::new(),
    };
    Some(format!("Silently copied after all: {}{at_receiver}.", copied.join(", ")))
}

/// Paths that move pages, under conditions where the pages were copied all the same.
fn pages_copied(report: &Report) -> Option<String> {
    let mut paths: Vec<&str> = measured(report)
        .filter(|row| row.copied_known_by.as_deref() == Some("proof") && row.copied_percent > Some(1.0))
        .map(|row| row.path.as_str())
        .collect();
    paths.sort_unstable();
    paths.dedup();
    (!paths.is_empty()).then(|| {
        format!(
            "Without scatter-gather the stack copied what was to travel as it is, in {}.",
            paths.join(", ")
        )
    })
}

/// The one setting, and the one chunk size, that makes the best path dearest when nothing else changes.
fn dearest_setting(report: &Report) -> Vec<String> {
    let Some((rows, best)) = measured(report).next().and_then(|first| {
        let rows = plainest(report, &first.workload)?;
        let best = best(&rows)?;
        Some((rows, best))
    }) else {
        return Vec::new();
    };
    let same_path: Vec<&Row> = measured(report)
        .filter(|row| row.path == best.path && row.workload == best.workload)
        .filter(|row| !rows.iter().any(|plain| std::ptr::eq(*plain, *row)))
        .collect();
    let differs = |row: &Row| {
        (row.offloads != best.offloads, row.cork != best.cork, row.chunk_bytes != best.chunk_bytes)
    };
    let dearest = |name: &dyn Fn(&Row) -> Option<String>| {
        let (row, name) = same_path
            .iter()
            .filter_map(|row| Some((*row, name(row)?)))
            .max_by(|(one, _), (other, _)| median_cost(one).total_cmp(&median_cost(other)))?;
        let (with, without) = (cost(row)?, cost(best)?);
        if with.low <= without.high {
            return Some(None);
        }
        Some(Some(format!(
            "{name}: {} then costs {:.0} µs per MiB ({:.0} to {:.0}), {:.2} × as much",
            best.path,
            with.median,
            with.low,
            with.high,
            with.median / without.median
        )))
    };
    let setting = dearest(&|row| match differs(row) {
        (true, false, false) => Some("scatter-gather and checksum offload off".into()),
        (false, true, false) => Some("TCP_CORK on".into()),
        _ => None,
    });
    let chunk = dearest(&|row| {
        (differs(row) == (false, false, true)).then(|| format!("chunks of {}", Size(row.chunk_bytes)))
    });
    let sentence = |what: &str, dearest: Option<String>| match dearest {
        Some(dearest) => format!("The {what} that costs most, of those tried: {dearest}."),
        None => format!("No {what} that was tried costs measurably more."),
    };
    setting
        .map(|dearest| sentence("setting", dearest))
        .into_iter()
        .chain(chunk.map(|dearest| sentence("chunk size", dearest)))
        .collect()
}
