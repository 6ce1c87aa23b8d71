//! The answer in plain words: what grouping packets saves, on either side, and what it does to messages.

use super::{InterruptsReport, InterruptsRow};
use crate::stats::Figure;
use crate::verdict::doubt;

/// The sentences that a report's rows support.
pub(super) fn of(report: &InterruptsReport) -> Vec<String> {
    ["transmit", "datagrams", "stream"]
        .into_iter()
        .filter_map(|traffic| cheapest(report, traffic))
        .chain(fastest(report))
        .collect()
}

fn of_traffic<'a>(
    report: &'a InterruptsReport,
    traffic: &'a str,
) -> impl Iterator<Item = &'a InterruptsRow> {
    report.rows.iter().filter(move |row| row.traffic == traffic && row.ratio.is_some())
}

fn cheapest(report: &InterruptsReport, traffic: &str) -> Option<String> {
    let first = of_traffic(report, traffic).next()?;
    let median = |row: &InterruptsRow| row.ratio.map_or(f64::INFINITY, |ratio| ratio.median);
    let best =
        of_traffic(report, traffic).min_by(|one, other| median(one).total_cmp(&median(other)))?;
    let ratio = best.ratio?;
    let what = match traffic {
        "transmit" => "Sending datagrams",
        "datagrams" => "Receiving datagrams",
        _ => "Receiving a stream",
    };
    let median = |figure: Option<Figure>| figure.map_or(0.0, |figure| figure.median);
    let grouped = |row: &InterruptsRow| match traffic {
        "transmit" => format!("{:.0} a call", median(row.packets_per_call)),
        "stream" => format!("{:.1} to a poll", median(row.packets_per_poll)),
        _ => format!("{:.1} packets to an interrupt", median(row.packets_per_interrupt)),
    };
    Some(if best.path == first.path || !ratio.is_below(1.0) {
        format!("{what}: nothing tried was shown to be cheaper than {}.", first.path)
    } else {
        format!(
            "{what}: cheapest by {}, {:.2} × {} ({}), with {} against {}.",
            best.path,
            ratio.median,
            first.path,
            ratio.interval(2),
            grouped(best),
            grouped(first)
        )
    })
}

fn fastest(report: &InterruptsReport) -> Option<String> {
    let mut latencies: Vec<(String, Figure)> = of_traffic(report, "messages")
        .filter_map(|row| Some((row.path.clone(), row.latency_p50_us?)))
        .collect();
    latencies.sort_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
    let ((best, least), (worst, most)) = (latencies.first()?, latencies.last()?);
    Some(format!(
        "A small message there and back takes {:.1} µs at the median with {best}, {:.1} with {worst}{}.",
        least.median,
        most.median,
        doubt(*least, latencies[1..].iter().cloned())
    ))
}
