//! The answers of the experiment `forward`: the cheapest method for bulk transfers, and the cost
//! and latency of messages.

use super::{ForwardReport, ForwardRow};
use crate::stats::Estimate;
use crate::verdict::uncertainty;

/// The answers that a report's rows support, one sentence each.
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
                        && row.path != haul_workers::tested_method::AUTO
                        && row.cost().is_some()
                })
                .collect();
            if traffic == "bulk" { bulk_sentence(&rows) } else { message_sentence(traffic, &rows) }
        })
        .collect()
}

fn row_with_least<'a>(
    rows: &[&'a ForwardRow],
    of: impl Fn(&ForwardRow) -> Option<Estimate>,
) -> Option<(&'a ForwardRow, Estimate)> {
    rows.iter()
        .filter_map(|row| Some((*row, of(row)?)))
        .min_by(|(_, one), (_, other)| one.median.total_cmp(&other.median))
}

/// The figures of all rows except one, with the rows' titles.
fn other_estimates(
    rows: &[&ForwardRow],
    best: &ForwardRow,
    of: impl Fn(&ForwardRow) -> Option<Estimate>,
) -> Vec<(String, Estimate)> {
    let others = rows.iter().filter(|row| row.title() != best.title());
    others.filter_map(|row| Some((row.title(), of(row)?))).collect()
}

fn bulk_sentence(rows: &[&ForwardRow]) -> Option<String> {
    let (best, cost) = row_with_least(rows, |row| row.forwarder_us_per_mib)?;
    let comparison = match best.forwarder_us_ratio {
        Some(ratio) if best.path != "copy" => {
            format!(", {:.2} × copy ({})", ratio.median, ratio.interval(2))
        }
        _ => String::new(),
    };
    let uncertainty =
        uncertainty(cost, other_estimates(rows, best, |row| row.forwarder_us_per_mib));
    Some(format!(
        "Cheapest forward method for a bulk transfer: {}, {:.0} µs of the forwarder's CPU per MiB \
         ({}){comparison}{uncertainty}.",
        best.title(),
        cost.median,
        cost.interval(0)
    ))
}

fn message_sentence(traffic: &str, rows: &[&ForwardRow]) -> Option<String> {
    let size = traffic.split_once(':')?.1;
    let (cheapest, cost) = row_with_least(rows, |row| row.forwarder_us_per_message)?;
    let (fastest, latency) = row_with_least(rows, |row| row.latency_p50_us)?;
    let latency_of = |path: &str| {
        let of_path: Vec<&ForwardRow> =
            rows.iter().copied().filter(|row| row.path == path).collect();
        row_with_least(&of_path, |row| row.latency_p50_us).map(|(_, estimate)| estimate.median)
    };
    let latencies = match (latency_of("copy"), latency_of("splice")) {
        (Some(copy), Some(splice)) => {
            format!("; the median through a pipe is {splice:.1} µs, through a buffer {copy:.1}")
        }
        _ => String::new(),
    };
    let cost_uncertainty =
        uncertainty(cost, other_estimates(rows, cheapest, |row| row.forwarder_us_per_message));
    let latency_uncertainty =
        uncertainty(latency, other_estimates(rows, fastest, |row| row.latency_p50_us));
    Some(format!(
        "Messages of {size}: {} costs the forwarder least, {:.1} µs per round \
         trip{cost_uncertainty}. {} is the fastest, {:.1} µs{latency_uncertainty}{latencies}.",
        cheapest.title(),
        cost.median,
        fastest.title(),
        latency.median
    ))
}
