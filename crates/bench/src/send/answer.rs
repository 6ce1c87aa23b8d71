//! The answer in plain words: what to use here, what it saves and how surely, what silently copied, which
//! setting costs most.

use super::{SendReport, SendRow};
use crate::quantity::Size;
use crate::stats::{Figure, VERDICT_ROUNDS_MIN};
use std::collections::BTreeSet;

/// The sentences that a report's rows support.
pub(super) fn of(report: &SendReport) -> Vec<String> {
    let mut sentences = Vec::new();
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

fn measured(report: &SendReport) -> impl Iterator<Item = &SendRow> {
    report.rows.iter().filter(|row| row.sender_us_per_mib.is_some())
}

/// The rows of a workload under its plainest conditions: offloads on, no cork, the chunk nearest to 64 KiB.
fn plainest<'a>(report: &'a SendReport, workload: &str) -> Option<Vec<&'a SendRow>> {
    let plainness = |row: &&SendRow| {
        let distance = (row.chunk_bytes as f64 / 65_536.0).log2().abs();
        (row.offloads != "on", row.cork, (distance * 1000.0) as u64)
    };
    let condition =
        measured(report).filter(|row| row.workload == workload).min_by_key(plainness)?.condition();
    Some(measured(report).filter(|row| row.condition() == condition).collect())
}

fn cost(row: &SendRow) -> Option<Figure> {
    row.sender_us_per_mib
}

fn median_cost(row: &SendRow) -> f64 {
    cost(row).map_or(f64::INFINITY, |cost| cost.median)
}

/// The cheapest way of really sending something.
fn best<'a>(rows: &[&'a SendRow]) -> Option<&'a SendRow> {
    rows.iter()
        .filter(|row| !matches!(row.path.as_str(), "floor" | "auto" | "planned"))
        .min_by(|one, other| median_cost(one).total_cmp(&median_cost(other)))
        .copied()
}

/// The cheapest path, what it saves, and which others were not shown to cost more. Without enough rounds there is no
/// verdict.
fn cheapest(rows: &[&SendRow]) -> Option<String> {
    let best = best(rows)?;
    let figure = cost(best)?;
    let what = format!("{} in chunks of {}", best.workload, Size(best.chunk_bytes));
    if !figure.is_conclusive() {
        return Some(format!(
            "No verdict on the cheapest path for {what}: {} has {} usable rounds, and a verdict takes {VERDICT_ROUNDS_MIN}.",
            best.path, best.rounds
        ));
    }
    let head = format!(
        "Cheapest path for {what}: {}, {:.0} µs of the sending host's CPU per MiB ({})",
        best.path,
        figure.median,
        figure.interval(0)
    );
    let plain = rows
        .iter()
        .find(|row| row.path == "read+write")
        .or(rows.iter().find(|row| row.path == "read+send"));
    let saving = match (best.sender_us_ratio, plain.filter(|plain| plain.path != best.path)) {
        (Some(ratio), Some(plain)) => {
            let words =
                format!("; that is {:.2} × {} ({})", ratio.median, plain.path, ratio.interval(2));
            let is_sure = plain.cheapest_us_ratio.is_some_and(|ratio| ratio.is_above(1.0));
            if is_sure {
                format!("{words} and saves {:.0} %", 100.0 * (1.0 - ratio.median))
            } else {
                format!("{words}, so it was not shown to be cheaper")
            }
        }
        _ => String::new(),
    };
    let is_tied = |row: &&&SendRow| !row.cheapest_us_ratio.is_some_and(|ratio| ratio.is_above(1.0));
    let ties: Vec<&str> = rows
        .iter()
        .filter(|row| {
            row.path != best.path && !matches!(row.path.as_str(), "floor" | "auto" | "planned")
        })
        .filter(is_tied)
        .map(|row| row.path.as_str())
        .collect();
    let equals = match ties.as_slice() {
        [] => String::new(),
        ties => format!("; no difference from it was shown for {}", ties.join(", ")),
    };
    let paced = if rows.iter().any(|row| row.paced.is_some()) {
        "; rows that are paced include the cost of timers, and do not compare with rows that are not"
    } else {
        ""
    };
    Some(format!("{head}{saving}{equals}{paced}."))
}

fn distance_to_floor(rows: &[&SendRow]) -> Option<String> {
    let (best, floor) = (best(rows)?, rows.iter().find(|row| row.path == "floor")?);
    let (figure, ratio) = (cost(floor)?, floor.cheapest_us_ratio?);
    if !figure.is_conclusive() {
        return None;
    }
    let distance = if ratio.is_below(1.0) {
        format!("costs {:.2} × as much", 1.0 / ratio.median)
    } else {
        "was not shown to cost more".into()
    };
    Some(format!(
        "The network stack alone, sending the same few pages again and again, costs {:.0} µs per MiB ({}): {} {distance}.",
        figure.median,
        figure.interval(0),
        best.path
    ))
}

fn copied_after_all(rows: &[&SendRow]) -> Option<String> {
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
    let receiver = |wanted: &dyn Fn(&SendRow) -> bool| {
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
fn pages_copied(report: &SendReport) -> Option<String> {
    let mut paths: Vec<&str> = measured(report)
        .filter(|row| {
            row.copied_known_by.as_deref() == Some("proof") && row.copied_percent > Some(1.0)
        })
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
fn dearest_setting(report: &SendReport) -> Vec<String> {
    let Some((rows, best)) = measured(report).next().and_then(|first| {
        let rows = plainest(report, &first.workload)?;
        let best = best(&rows)?;
        Some((rows, best))
    }) else {
        return Vec::new();
    };
    let same_path: Vec<&SendRow> = measured(report)
        .filter(|row| row.path == best.path && row.workload == best.workload)
        .filter(|row| !rows.iter().any(|plain| std::ptr::eq(*plain, *row)))
        .collect();
    let differs = |row: &SendRow| {
        (row.offloads != best.offloads, row.cork != best.cork, row.chunk_bytes != best.chunk_bytes)
    };
    let dearest = |name: &dyn Fn(&SendRow) -> Option<String>| {
        let (row, name) = same_path
            .iter()
            .filter_map(|row| Some((*row, name(row)?)))
            .max_by(|(one, _), (other, _)| median_cost(one).total_cmp(&median_cost(other)))?;
        let (with, without) = (cost(row)?, cost(best)?);
        let is_sure = with.is_conclusive() && without.is_conclusive() && with.low > without.high;
        if !is_sure {
            return Some(None);
        }
        Some(Some(format!(
            "{name}: {} then costs {:.0} µs per MiB ({}), {:.2} × as much",
            best.path,
            with.median,
            with.interval(0),
            with.median / without.median
        )))
    };
    let setting = dearest(&|row| match differs(row) {
        (true, false, false) => Some("scatter-gather and checksum offload off".into()),
        (false, true, false) => Some("TCP_CORK on".into()),
        _ => None,
    });
    let chunk = dearest(&|row| {
        (differs(row) == (false, false, true))
            .then(|| format!("chunks of {}", Size(row.chunk_bytes)))
    });
    let sentence = |what: &str, dearest: Option<String>| match dearest {
        Some(dearest) => format!("The {what} that costs most, of those tried: {dearest}."),
        None => format!("No {what} that was tried was shown to cost more."),
    };
    setting
        .map(|dearest| sentence("setting", dearest))
        .into_iter()
        .chain(chunk.map(|dearest| sentence("chunk size", dearest)))
        .collect()
}
