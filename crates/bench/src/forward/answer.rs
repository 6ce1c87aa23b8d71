//! The answer in plain words: what to forward with, and what it does to small messages.

use super::{ForwardReport, ForwardRow};
use crate::stats::Figure;
use crate::verdict::doubt;

/// The sentences that a report's rows support.
pub(super) fn of(report: &ForwardReport) -> Vec<String> {
    let mut kinds: Vec<&str> = Vec::new();
    for row in report.rows.iter().filter(|row| row.cost().is_some()) {
        if !kinds.contains(&row.traffic.as_str()) {
            kinds.push(&row.traffic);
        }
    }
    kinds
        .into_iter()
        .filter_map(|traffic| {
            let rows: Vec<&ForwardRow> = report
                .rows
                .iter()
                .filter(|row| {
                    row.traffic == traffic
                        && row.path != crate::tested_method::AUTO
                        && row.cost().is_some()
                })
                .collect();
            if traffic == "bulk" { bulk(&rows) } else { messages(traffic, &rows) }
        })
        .collect()
}

fn least<'a>(
    rows: &[&'a ForwardRow],
    of: impl Fn(&ForwardRow) -> Option<Figure>,
) -> Option<(&'a ForwardRow, Figure)> {
    rows.iter()
        .filter_map(|row| Some((*row, of(row)?)))
        .min_by(|(_, one), (_, other)| one.median.total_cmp(&other.median))
}

/// The figures of all rows but one.
fn others(
    rows: &[&ForwardRow],
    best: &ForwardRow,
    of: impl Fn(&ForwardRow) -> Option<Figure>,
) -> Vec<(String, Figure)> {
    let others = rows.iter().filter(|row| row.title() != best.title());
    others.filter_map(|row| Some((row.title(), of(row)?))).collect()
}

fn bulk(rows: &[&ForwardRow]) -> Option<String> {
    let (best, cost) = least(rows, |row| row.forwarder_us_per_mib)?;
    let beside = match best.forwarder_us_ratio {
        Some(ratio) if best.path != "copy" => {
            format!(", {:.2} × copy ({})", ratio.median, ratio.interval(2))
        }
        _ => String::new(),
    };
    let doubt = doubt(cost, others(rows, best, |row| row.forwarder_us_per_mib));
    Some(format!(
        "Cheapest to forward bulk with: {}, {:.0} µs of the forwarder's CPU per MiB ({}){beside}{doubt}.",
        best.title(),
        cost.median,
        cost.interval(0)
    ))
}

fn messages(traffic: &str, rows: &[&ForwardRow]) -> Option<String> {
    let size = traffic.split_once(':')?.1;
    let (cheapest, cost) = least(rows, |row| row.forwarder_us_per_message)?;
    let (fastest, latency) = least(rows, |row| row.latency_p50_us)?;
    let of_way = |path: &str| {
        let of_path: Vec<&ForwardRow> =
            rows.iter().copied().filter(|row| row.path == path).collect();
        least(&of_path, |row| row.latency_p50_us).map(|(_, figure)| figure.median)
    };
    let raised = match (of_way("copy"), of_way("splice")) {
        (Some(copy), Some(splice)) => {
            format!("; through a pipe half take up to {splice:.1} µs, through a buffer {copy:.1}")
        }
        _ => String::new(),
    };
    let cost_doubt = doubt(cost, others(rows, cheapest, |row| row.forwarder_us_per_message));
    let latency_doubt = doubt(latency, others(rows, fastest, |row| row.latency_p50_us));
    Some(format!(
        "Messages of {size}: {} costs the forwarder least, {:.1} µs a message there and back{cost_doubt}. {} is the fastest, \
         {:.1} µs{latency_doubt}{raised}.",
        cheapest.title(),
        cost.median,
        fastest.title(),
        latency.median
    ))
}
