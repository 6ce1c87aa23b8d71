//! The report as a table in the terminal.

use crate::findings::median;
use crate::report::PairsReport;
use std::fmt::Write;

/// The most hosts of a table. More hosts do not fit into a line.
const TABLE_HOSTS_MAX: usize = 16;

/// The findings, and a table: a row for each sending host and a column for each receiving host.
pub fn text(report: &PairsReport) -> String {
    let mut text = String::new();
    let hosts = &report.hosts;
    let rates = report.pairs.iter().filter_map(|pair| pair.bytes_per_s);
    if (2..=TABLE_HOSTS_MAX).contains(&hosts.len()) {
        let width = hosts.iter().map(|host| host.name.chars().count()).max().unwrap_or(0).max(6);
        let _ = write!(text, "{:width$}", "MiB/s");
        for host in hosts {
            let _ = write!(text, "  {:>width$}", host.name);
        }
        for (from, host) in hosts.iter().enumerate() {
            let _ = write!(text, "\n{:width$}", host.name);
            for to in 0..hosts.len() {
                let _ = write!(text, "  {:>width$}", cell(report, from, to));
            }
        }
        text.push_str("\n(rows send, columns receive)\n\n");
    }
    if let Some(rate) = median(rates) {
        let trip = median(report.pairs.iter().filter_map(|pair| pair.round_trip_us));
        let _ = writeln!(
            text,
            "{} hosts: {} between most of them, {:.0} µs there and back",
            hosts.len(),
            crate::findings::rate_text(rate),
            trip.unwrap_or(0.0)
        );
    }
    if hosts.len() < 2 {
        text.push_str("one host has no pair to measure: start haul on several hosts\n");
    } else if report.findings.sentences.is_empty() {
        text.push_str("no host differs from the others\n");
    }
    for sentence in &report.findings.sentences {
        let _ = writeln!(text, "{sentence}");
    }
    text
}

fn cell(report: &PairsReport, from: usize, to: usize) -> String {
    if from == to {
        return "-".to_owned();
    }
    let pair = report.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to));
    match pair.and_then(|pair| pair.bytes_per_s) {
        Some(rate) => format!("{:.0}", rate / f64::from(1 << 20)),
        None => "lost".to_owned(),
    }
}
