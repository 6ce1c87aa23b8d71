//! The answers of the experiment `forward`, in addition to its verdict: the library's choice, and
//! the cost and latency of messages.

use super::{ForwardReport, ForwardRow};
use crate::stats::Estimate;
use crate::verdict::{doubt, ratio_text};
use haul_workers::tested_method::AUTO;

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
                .filter(|row| row.traffic == traffic && row.cost().is_some())
                .collect();
            match traffic {
                "bulk" => bulk_sentence(&rows),
                "tls" => tls_sentence(&rows),
                _ => message_sentence(traffic, &rows),
            }
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

/// The library's own choice for a bulk transfer compared with copying.
fn bulk_sentence(rows: &[&ForwardRow]) -> Option<String> {
    let auto = rows.iter().find(|row| row.path == AUTO)?;
    let ratio = auto.forwarder_us_ratio?;
    let verdict = doubt(ratio).map_or(String::new(), |doubt| format!(": {doubt}"));
    Some(format!(
        "The library's own choice (auto) for a bulk transfer takes {} the forwarder's CPU time of \
         copy{verdict}.",
        ratio_text(ratio)
    ))
}

/// TLS that the kernel decrypts, spliced or copied, compared with TLS that the program decrypts.
fn tls_sentence(rows: &[&ForwardRow]) -> Option<String> {
    let compared = ["ktls-splice", "ktls-copy"].into_iter().filter_map(|path| {
        let of_path: Vec<&ForwardRow> =
            rows.iter().copied().filter(|row| row.path == path).collect();
        let (_, ratio) = row_with_least(&of_path, |row| row.forwarder_us_ratio)?;
        let doubt = doubt(ratio).map_or(String::new(), |doubt| format!(": {doubt}"));
        Some(format!("{path} {}{doubt}", ratio_text(ratio)))
    });
    let compared: Vec<String> = compared.collect();
    (!compared.is_empty()).then(|| {
        format!(
            "Ending TLS, of the forwarder's CPU time when the program decrypts (tls-copy): {}.",
            compared.join(", ")
        )
    })
}

/// The cost and the latency of messages by each method that the library chooses from.
fn message_sentence(traffic: &str, rows: &[&ForwardRow]) -> Option<String> {
    let size = traffic.split_once(':')?.1;
    let of_path = |path: &str, of: fn(&ForwardRow) -> Option<Estimate>| {
        let of_path: Vec<&ForwardRow> =
            rows.iter().copied().filter(|row| row.path == path).collect();
        row_with_least(&of_path, of).map(|(_, estimate)| estimate)
    };
    let cost = |path: &str| of_path(path, |row| row.forwarder_us_per_message);
    let latency = |path: &str| of_path(path, |row| row.latency_p50_us);
    let (cost_copy, cost_splice) = (cost("copy")?, cost("splice")?);
    let (latency_copy, latency_splice) = (latency("copy")?, latency("splice")?);
    Some(format!(
        "Messages of {size}, median round trip: splice {:.1} µs ({}), copy {:.1} µs ({}). The \
         forwarder's CPU for each: splice {:.1} µs ({}), copy {:.1} µs ({}).",
        latency_splice.median,
        latency_splice.interval(1),
        latency_copy.median,
        latency_copy.interval(1),
        cost_splice.median,
        cost_splice.interval(1),
        cost_copy.median,
        cost_copy.interval(1)
    ))
}
