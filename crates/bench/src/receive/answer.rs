//! The answer in plain words: what to receive with, when pages can be mapped, and whether that pays.

use super::{ReceiveReport, ReceiveRow};
use crate::stats::Figure;
use crate::verdict::doubt;

/// Below this share of mapped bytes the rest is a copy with more calls.
const MAPPED_PERCENT: f64 = 90.0;

/// The sentences that a report's rows support.
pub(super) fn of(report: &ReceiveReport) -> Vec<String> {
    [cheapest(report), mappable(report), verdict(report), floor(report)]
        .into_iter()
        .flatten()
        .collect()
}

fn measured(report: &ReceiveReport) -> impl Iterator<Item = &ReceiveRow> {
    report.rows.iter().filter(|row| row.receiver_us_per_mib.is_some())
}

/// The cheapest way to get the bytes under the first conditions, where all ways were run.
fn cheapest(report: &ReceiveReport) -> Option<String> {
    let condition = measured(report).next()?.condition();
    let rows = || measured(report).filter(|row| row.condition() == condition);
    let cost =
        |row: &ReceiveRow| row.receiver_us_per_mib.map_or(f64::INFINITY, |figure| figure.median);
    let best = rows()
        .filter(|row| !matches!(row.path.as_str(), "discard" | "auto"))
        .min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let cost = best.receiver_us_per_mib?;
    let beside = match best.receiver_us_ratio {
        Some(ratio) if best.path != "read" => {
            format!(", {:.2} × read ({})", ratio.median, ratio.interval(2))
        }
        _ => String::new(),
    };
    let others = rows()
        .filter(|row| row.path != best.path && !matches!(row.path.as_str(), "discard" | "auto"));
    let doubt =
        doubt(cost, others.filter_map(|row| Some((row.path.clone(), row.receiver_us_per_mib?))));
    Some(format!(
        "Cheapest to receive with, taken by hand ({condition}): {}, {:.0} µs of the receiving host's CPU per MiB ({}){beside}{doubt}.",
        best.path,
        cost.median,
        cost.interval(0)
    ))
}

/// Under which conditions nearly everything was mapped.
fn mappable(report: &ReceiveReport) -> Option<String> {
    let mapped: Vec<&ReceiveRow> = measured(report).filter(|row| row.path == "mapped").collect();
    if mapped.is_empty() {
        return None;
    }
    let words = |is_mapped: bool| {
        let conditions =
            mapped.iter().filter(|row| (row.mapped_percent > Some(MAPPED_PERCENT)) == is_mapped);
        let mut words: Vec<String> = conditions
            .map(|row| {
                let pages =
                    if row.page_order == super::PageOrder::Single { ", single pages" } else { "" };
                format!("MTU {} sent by {}{pages}", row.mtu, row.sent_by)
            })
            .collect();
        words.sort();
        words.dedup();
        if words.is_empty() { "none".into() } else { words.join("; ") }
    };
    Some(format!(
        "Pages could be mapped for over {MAPPED_PERCENT:.0} % of the bytes with: {}. Not with: {}.",
        words(true),
        words(false)
    ))
}

/// Whether mapping paid where it worked.
fn verdict(report: &ReceiveReport) -> Option<String> {
    let mut verdicts: Vec<(Figure, String)> = measured(report)
        .filter(|row| row.path == "mapped" && row.mapped_percent > Some(MAPPED_PERCENT))
        .filter_map(|row| {
            let ratio = row.receiver_us_ratio?;
            let words =
                format!("{:.2} × read ({}; {})", ratio.median, ratio.interval(2), row.condition());
            Some((ratio, words))
        })
        .collect();
    verdicts.sort_by(|(one, _), (other, _)| one.median.total_cmp(&other.median));
    let (best_ratio, best) = verdicts.first()?;
    let (_, worst) = verdicts.last()?;
    let paid = if best_ratio.is_below(1.0) {
        "At its best mapping cost"
    } else {
        "Mapping was not shown to pay here: it cost"
    };
    Some(format!("{paid} {best}; at its worst {worst}."))
}

fn floor(report: &ReceiveReport) -> Option<String> {
    let row = measured(report).find(|row| row.path == "discard")?;
    let cost = row.receiver_us_per_mib?;
    Some(format!(
        "Receiving without taking a byte ({}) costs {:.0} µs per MiB ({}): what the network stack itself costs the receiver.",
        row.condition(),
        cost.median,
        cost.interval(0)
    ))
}
