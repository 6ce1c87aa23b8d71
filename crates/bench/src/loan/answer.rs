//! The answer in plain words: at which sizes lending pays, and what it gains over `sendfile`.

use super::{LoanReport, LoanRow, To};
use crate::quantity::Size;
use crate::stats::Figure;

/// The sentences that a report's rows support.
pub(super) fn of(report: &LoanReport) -> Vec<String> {
    let mut sentences: Vec<String> =
        [To::Sink, To::Tcp, To::Udp].into_iter().filter_map(|to| break_even(report, to)).collect();
    sentences.extend(over_sendfile(report));
    sentences.extend(waiting(report));
    sentences
}

fn rows<'a>(report: &'a LoanReport, to: To, path: &'a str) -> impl Iterator<Item = &'a LoanRow> {
    report
        .rows
        .iter()
        .filter(move |row| row.to == to.name() && row.path == path && row.send_ratio.is_some())
}

/// At which sizes lending costs the sending host less, at which more, and what the other host pays.
fn break_even(report: &LoanReport, to: To) -> Option<String> {
    let lent: Vec<&LoanRow> = rows(report, to, "lend").collect();
    let sizes = |is_wanted: &dyn Fn(Figure) -> bool| {
        let wanted = lent.iter().filter(|row| row.send_ratio.is_some_and(is_wanted));
        let sizes: Vec<String> = wanted.map(|row| Size(row.piece_bytes).to_string()).collect();
        if sizes.is_empty() { "no size".into() } else { sizes.join(", ") }
    };
    let last = lent.last()?;
    let ratio = last.send_ratio?;
    let truth = if last.copied_percent.unwrap_or(0.0) > 1.0 {
        let receiver = |path: &str| {
            let row = rows(report, to, path).find(|row| row.piece_bytes == last.piece_bytes)?;
            Some(row.receiver_us_per_mib?.median)
        };
        match (receiver("lend"), receiver("send")) {
            (Some(lend), Some(send)) => format!(
                "where the copy is made after all, when it arrives (the receiving host then pays {lend:.0} µs per MiB, {send:.0} for a send, at {})",
                Size(last.piece_bytes)
            ),
            _ => "where it is copied after all".into(),
        }
    } else {
        "where nothing is copied".into()
    };
    let place = match to {
        To::Tcp => "Over TCP to the other host",
        To::Udp => "In datagrams to the other host",
        To::Sink => "In datagrams to a device that takes them as a card does",
    };
    Some(format!(
        "{place}, {truth}, lending costs the sending host less than a send at {}, more at {}; {:.2} × at {} ({}).",
        sizes(&|ratio| ratio.is_below(1.0)),
        sizes(&|ratio| ratio.is_above(1.0)),
        ratio.median,
        Size(last.piece_bytes),
        ratio.interval(2)
    ))
}

/// The open question of the original: what does lending gain over `sendfile`?
fn over_sendfile(report: &LoanReport) -> Option<String> {
    let best = rows(report, To::Tcp, "lend")
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
        "{gain}: at its best it costs {:.2} × as much ({}, {} at a time over TCP). What it gains everywhere is that the bytes need not be in a file.",
        ratio.median,
        ratio.interval(2),
        Size(row.piece_bytes)
    ))
}

/// What it costs to wait for each loan instead of sending on.
fn waiting(report: &LoanReport) -> Option<String> {
    let dearest = rows(report, To::Tcp, "lend, waiting for each")
        .filter_map(|row| {
            let pipelined =
                rows(report, To::Tcp, "lend").find(|other| other.piece_bytes == row.piece_bytes)?;
            let (waited, sent_on) =
                (row.throughput_bits_per_second?, pipelined.throughput_bits_per_second?);
            // Only where it was shown to be slower.
            let is_slower = waited.is_conclusive() && sent_on.is_above(waited.high);
            is_slower.then(|| (row.piece_bytes, sent_on.median / waited.median))
        })
        .max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    Some(format!(
        "Waiting for each loan before the next one made TCP up to {:.1} × slower ({} at a time).",
        dearest.1,
        Size(dearest.0)
    ))
}
