//! The answers of the experiment `interrupts`: what grouping packets saves on either host, and its
//! effect on message latency.

use super::{InterruptsReport, InterruptsRow};
use crate::stats::Estimate;
use crate::verdict::uncertainty;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &InterruptsReport) -> Vec<String> {
    ["transmit", "datagrams", "stream"]
        .into_iter()
        .filter_map(|traffic| cheapest_sentence(report, traffic))
        .chain(latency_sentence(report))
        .collect()
}

fn rows_of<'a>(
    report: &'a InterruptsReport,
    traffic: &'a str,
) -> impl Iterator<Item = &'a InterruptsRow> {
    report.rows.iter().filter(move |row| row.traffic == traffic && row.ratio.is_some())
}

fn cheapest_sentence(report: &InterruptsReport, traffic: &str) -> Option<String> {
    let first = rows_of(report, traffic).next()?;
    let median = |row: &InterruptsRow| row.ratio.map_or(f64::INFINITY, |ratio| ratio.median);
    let best =
        rows_of(report, traffic).min_by(|one, other| median(one).total_cmp(&median(other)))?;
    let ratio = best.ratio?;
    let subject = match traffic {
        "transmit" => "Sending datagrams",
        "datagrams" => "Receiving datagrams",
        _ => "Receiving a stream",
    };
    let median = |estimate: Option<Estimate>| estimate.map_or(0.0, |estimate| estimate.median);
    let grouping = |row: &InterruptsRow| match traffic {
        "transmit" => format!("{:.0} a call", median(row.packets_per_call)),
        "stream" => format!("{:.1} to a poll", median(row.packets_per_poll)),
        _ => format!("{:.1} packets to an interrupt", median(row.packets_per_interrupt)),
    };
    Some(if best.path == first.path || !ratio.is_below(1.0) {
        format!("{subject}: nothing tried was shown to be cheaper than {}.", first.path)
    } else {
        format!(
            "{subject}: cheapest by {}, {:.2} × {} ({}), with {} instead of {}.",
            best.path,
            ratio.median,
            first.path,
            ratio.interval(2),
            grouping(best),
            grouping(first)
        )
    })
}

fn latency_sentence(report: &InterruptsReport) -> Option<String> {
    let mut latencies: Vec<(String, Estimate)> = rows_of(report, "messages")
        .filter_map(|row| Some((row.path.clone(), row.latency_p50_us?)))
        .collect();
    latencies.sort_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
    let ((best, least), (worst, most)) = (latencies.first()?, latencies.last()?);
    Some(format!(
        "The median round trip of a small message takes {:.1} µs with {best}, {:.1} with \
         {worst}{}.",
        least.median,
        most.median,
        uncertainty(*least, latencies[1..].iter().cloned())
    ))
}
