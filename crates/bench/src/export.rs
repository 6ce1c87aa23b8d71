//! Reports for people and programs, one form a file.

pub mod html;
pub mod markdown;
pub mod terminal;

use crate::quantity::{Rate, Size};
use crate::report::{Report, Row};
use crate::stats::Figure;
use crate::way::AUTO;

/// The JSON contract, indented, with a newline at its end.
pub fn json(report: &impl serde::Serialize) -> String {
    // Reports hold no map with keys that are not text, the one thing that cannot be written.
    serde_json::to_string_pretty(report).unwrap_or_default() + "\n"
}

/// Rows that can be compared, under the words for their conditions.
fn groups(report: &Report) -> Vec<(String, Vec<&Row>)> {
    let mut groups: Vec<(String, Vec<&Row>)> = Vec::new();
    // A run that was stopped has rows that it never came to.
    for row in report.rows.iter().filter(|row| row.rounds > 0 || row.refused.is_some()) {
        let title = format!(
            "{} in chunks of {}, {}offloads {}",
            row.workload,
            Size(row.chunk_bytes),
            if row.cork { "corked, " } else { "" },
            row.offloads
        );
        match groups.iter_mut().find(|(other, _)| *other == title) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((title, vec![row])),
        }
    }
    groups
}

/// One line on the machine and one on the lab.
fn setting(report: &Report) -> [String; 2] {
    let (host, lab) = (&report.host, &report.lab);
    let apart =
        lab.cache_line_round_trip_ns.map_or(String::new(), |trip| format!(" ({:.0} ns apart)", trip.median));
    let rate = lab.rate_bits_per_second.map_or("full speed".into(), |rate| format!("held at {}", Rate(rate)));
    [
        format!(
            "haul {} on Linux {}, {}, {} CPUs, {}",
            report.haul, host.kernel, host.cpu, host.cpus, report.started
        ),
        format!(
            "{}: sender on CPU {}, receiver on CPU {}{apart}, MTU {}, {}, {rate}",
            lab.kind, lab.sender_cpu, lab.receiver_cpu, lab.mtu, lab.congestion
        ),
    ]
}

/// What to know of all the figures: one line each.
fn notes(report: &Report) -> Vec<String> {
    let chosen = report.rows.iter().any(|row| row.path == AUTO && row.rounds > 0);
    let auto =
        "auto is the library's own choice, in calls of the size it chooses: the chunk does not bind it.";
    observer(report).into_iter().chain(chosen.then(|| auto.into())).collect()
}

/// One line on the observer effect.
fn observer(report: &Report) -> Option<String> {
    let observer = report.observer.as_ref()?;
    let Figure { median, low, high } = observer.throughput_ratio;
    Some(format!(
        "The meter's own effect: with it the throughput of {} differs by {:+.1} % ({:+.1} to {:+.1}, {} pairs).",
        observer.path,
        100.0 * (median - 1.0),
        100.0 * (low - 1.0),
        100.0 * (high - 1.0),
        observer.pairs
    ))
}

/// A column of a table for people: its head, and what it says of a row.
struct Column {
    head: &'static str,
    says: fn(&Row) -> String,
}

/// The columns that fit a narrow terminal, then those for more room.
const COLUMNS: [Column; 7] = [
    Column { head: "path", says: |row| row.path.clone() },
    Column { head: "sender\nµs/MiB", says: |row| number(row.sender_us_per_mib, 1.0, 0) },
    Column { head: "× plain\n(interval)", says: |row| ratio(row.sender_us_ratio) },
    Column { head: "sender\nload %", says: |row| number(row.sender_load_percent, 1.0, 1) },
    Column { head: "receiver\nµs/MiB", says: |row| number(row.receiver_us_per_mib, 1.0, 0) },
    Column { head: "Gbit/s", says: |row| number(row.throughput_bits_per_second, 1e9, 1) },
    Column {
        head: "copied\n%",
        says: |row| row.copied_percent.map_or("?".into(), |percent| format!("{percent:.0}")),
    },
];
const MORE_COLUMNS: [Column; 5] = [
    Column { head: "sender µs/MiB\ninterval", says: |row| interval(row.sender_us_per_mib) },
    Column { head: "receiver\nload %", says: |row| number(row.receiver_load_percent, 1.0, 1) },
    Column { head: "getrusage\nµs/MiB", says: |row| number(row.rusage_us_per_mib, 1.0, 0) },
    Column {
        head: "calls\n/MiB",
        says: |row| row.syscalls_per_mib.map_or("?".into(), |calls| format!("{calls:.1}")),
    },
    Column { head: "copied,\nknown by", says: |row| row.copied_known_by.clone().unwrap_or_default() },
];

fn number(figure: Option<Figure>, unit: f64, digits: usize) -> String {
    figure.map_or("?".into(), |figure| format!("{:.digits$}", figure.median / unit))
}

fn interval(figure: Option<Figure>) -> String {
    figure.map_or("?".into(), |figure| format!("{:.0} to {:.0}", figure.low, figure.high))
}

fn ratio(figure: Option<Figure>) -> String {
    figure.map_or("?".into(), |figure| format!("{:.2} ({:.2}–{:.2})", figure.median, figure.low, figure.high))
}
