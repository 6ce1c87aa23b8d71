//! The answers of the experiment `interrupts`: what grouping packets saves on either host, and its
//! effect on message latency.

use super::{InterruptsReport, InterruptsRow};
use crate::verdict::ratio_text;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &InterruptsReport) -> Vec<String> {
    ["transmit", "datagrams", "stream"]
        .into_iter()
        .filter_map(|traffic| saving_sentence(report, traffic))
        .chain(latency_sentence(report))
        .collect()
}

fn rows_of<'a>(
    report: &'a InterruptsReport,
    traffic: &'a str,
) -> impl Iterator<Item = &'a InterruptsRow> {
    report.rows.iter().filter(move |row| row.traffic == traffic && row.ratio.is_some())
}

/// The variants that save CPU time on the host whose configuration differs, without costing more
/// on both hosts together.
fn saving_sentence(report: &InterruptsReport, traffic: &str) -> Option<String> {
    let first = rows_of(report, traffic).next()?;
    let saves = |row: &&InterruptsRow| {
        row.path != first.path
            && row.ratio.is_some_and(|ratio| ratio.is_below(1.0))
            && !row.both_ratio.is_some_and(|ratio| ratio.is_above(1.0))
    };
    let subject = match traffic {
        "transmit" => "Sending datagrams",
        "datagrams" => "Receiving datagrams",
        _ => "Receiving a stream",
    };
    let texts: Vec<String> = rows_of(report, traffic)
        .filter(saves)
        .filter_map(|row| Some(format!("{} {}", row.path, ratio_text(row.ratio?))))
        .collect();
    Some(if texts.is_empty() {
        format!("{subject}: nothing tried was shown to save CPU time over {}.", first.path)
    } else {
        format!("{subject}, CPU time compared with {}: {}.", first.path, texts.join(", "))
    })
}

fn latency_sentence(report: &InterruptsReport) -> Option<String> {
    let texts: Vec<String> = rows_of(report, "messages")
        .filter_map(|row| {
            let latency = row.latency_p50_us?;
            Some(format!("{} {:.1} µs ({})", row.path, latency.median, latency.interval(1)))
        })
        .collect();
    (!texts.is_empty())
        .then(|| format!("Median round trip of a small message: {}.", texts.join(", ")))
}
