//! The answers of the experiment `loan`: the sizes at which loans pay, and their gain over
//! `sendfile`.

use super::{Destination, LoanReport, LoanRow};
use crate::stats::Estimate;
use haul_units::Size;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &LoanReport) -> Vec<String> {
    let mut sentences: Vec<String> = [Destination::Sink, Destination::Tcp, Destination::Udp]
        .into_iter()
        .filter_map(|destination| break_even_sentence(report, destination))
        .collect();
    sentences.extend(sendfile_sentence(report));
    sentences.extend(waiting_sentence(report));
    sentences
}

fn rows<'a>(
    report: &'a LoanReport,
    destination: Destination,
    path: &'a str,
) -> impl Iterator<Item = &'a LoanRow> {
    report.rows.iter().filter(move |row| {
        row.to == destination.name() && row.path == path && row.send_ratio.is_some()
    })
}

/// The sizes at which a loan costs the sending host less than a send, those at which it costs more,
/// and the receiving host's cost.
fn break_even_sentence(report: &LoanReport, destination: Destination) -> Option<String> {
    let lent: Vec<&LoanRow> = rows(report, destination, "lend").collect();
    let sizes = |is_wanted: &dyn Fn(Estimate) -> bool| {
        let wanted = lent.iter().filter(|row| row.send_ratio.is_some_and(is_wanted));
        let sizes: Vec<String> = wanted.map(|row| Size(row.piece_bytes).to_string()).collect();
        if sizes.is_empty() { "no size".into() } else { sizes.join(", ") }
    };
    let last = lent.last()?;
    let ratio = last.send_ratio?;
    let copy_note = if last.copied_percent.unwrap_or(0.0) > 1.0 {
        let receiver = |path: &str| {
            let row =
                rows(report, destination, path).find(|row| row.piece_bytes == last.piece_bytes)?;
            Some(row.receiver_us_per_mib?.median)
        };
        match (receiver("lend"), receiver("send")) {
            (Some(lend), Some(send)) => format!(
                "where the receiving host makes the copy (it then pays {lend:.0} µs per MiB, \
                 {send:.0} for a send, at {})",
                Size(last.piece_bytes)
            ),
            _ => "where the kernel copies it".into(),
        }
    } else {
        "where nothing is copied".into()
    };
    let route = match destination {
        Destination::Tcp => "Over TCP to the other host",
        Destination::Udp => "In datagrams to the other host",
        Destination::Sink => "In datagrams to a device that takes them as a card does",
    };
    Some(format!(
        "{route}, {copy_note}, lending costs the sending host less than a send at {}, more at {}; \
         {:.2} × at {} ({}).",
        sizes(&|ratio| ratio.is_below(1.0)),
        sizes(&|ratio| ratio.is_above(1.0)),
        ratio.median,
        Size(last.piece_bytes),
        ratio.interval(2)
    ))
}

/// The cost of loans compared with `sendfile`, which the original measurement left open.
fn sendfile_sentence(report: &LoanReport) -> Option<String> {
    let best = rows(report, Destination::Tcp, "lend")
        .filter_map(|row| Some((row, row.sendfile_ratio?)))
        .min_by(|(_, one), (_, other)| one.median.total_cmp(&other.median))?;
    let (row, ratio) = best;
    let gain = if ratio.is_above(1.0) {
        "Lending gains nothing over sendfile here"
    } else if ratio.is_below(1.0) {
        "Lending costs the sending host less than sendfile"
    } else {
        "No difference between lending and sendfile was shown"
    };
    Some(format!(
        "{gain}: at its best it costs {:.2} × as much ({}, {} at a time over TCP). In all cases \
         the bytes need not be in a file.",
        ratio.median,
        ratio.interval(2),
        Size(row.piece_bytes)
    ))
}

/// The throughput lost by waiting for each loan before the next one.
fn waiting_sentence(report: &LoanReport) -> Option<String> {
    let slowest = rows(report, Destination::Tcp, "lend, waiting for each")
        .filter_map(|row| {
            let pipelined = rows(report, Destination::Tcp, "lend")
                .find(|other| other.piece_bytes == row.piece_bytes)?;
            let (waiting, pipelined) =
                (row.throughput_bits_per_second?, pipelined.throughput_bits_per_second?);
            // Only rows that were shown to be slower.
            let is_slower = waiting.is_conclusive() && pipelined.is_above(waiting.high);
            is_slower.then(|| (row.piece_bytes, pipelined.median / waiting.median))
        })
        .max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    Some(format!(
        "Waiting for each loan before the next one made TCP up to {:.1} × slower ({} at a time).",
        slowest.1,
        Size(slowest.0)
    ))
}
