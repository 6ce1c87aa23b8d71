//! The answers of the experiment `receive`: the cheapest method, the conditions under which pages
//! can be mapped, and whether mapping pays.

use super::{ReceiveReport, ReceiveRow};
use crate::stats::Estimate;
use crate::verdict::uncertainty;

/// The smallest share of mapped bytes for which mapping counts as possible. Below it, mapping is a
/// copy with more calls.
const MAPPED_PERCENT_MIN: f64 = 90.0;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &ReceiveReport) -> Vec<String> {
    [
        cheapest_sentence(report),
        mappable_sentence(report),
        mapping_sentence(report),
        floor_sentence(report),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn measured_rows(report: &ReceiveReport) -> impl Iterator<Item = &ReceiveRow> {
    report.rows.iter().filter(|row| row.receiver_us_per_mib.is_some())
}

/// The cheapest method that delivers the bytes, under the conditions of the first measured row.
fn cheapest_sentence(report: &ReceiveReport) -> Option<String> {
    let condition = measured_rows(report).next()?.condition();
    let rows = || measured_rows(report).filter(|row| row.condition() == condition);
    let cost = |row: &ReceiveRow| {
        row.receiver_us_per_mib.map_or(f64::INFINITY, |estimate| estimate.median)
    };
    let best = rows()
        .filter(|row| !matches!(row.path.as_str(), "discard" | "auto"))
        .min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let cost = best.receiver_us_per_mib?;
    let comparison = match best.receiver_us_ratio {
        Some(ratio) if best.path != "read" => {
            format!(", {:.2} × read ({})", ratio.median, ratio.interval(2))
        }
        _ => String::new(),
    };
    let others = rows()
        .filter(|row| row.path != best.path && !matches!(row.path.as_str(), "discard" | "auto"));
    let others = others.filter_map(|row| Some((row.path.clone(), row.receiver_us_per_mib?)));
    let uncertainty = uncertainty(cost, others);
    Some(format!(
        "Cheapest single receive method ({condition}): {}, {:.0} µs of the receiving host's CPU \
         per MiB ({}){comparison}{uncertainty}.",
        best.path,
        cost.median,
        cost.interval(0)
    ))
}

/// The conditions under which nearly all bytes were mapped.
fn mappable_sentence(report: &ReceiveReport) -> Option<String> {
    let mapped: Vec<&ReceiveRow> =
        measured_rows(report).filter(|row| row.path == "mapped").collect();
    if mapped.is_empty() {
        return None;
    }
    let conditions_text = |is_mapped: bool| {
        let conditions = mapped
            .iter()
            .filter(|row| (row.mapped_percent > Some(MAPPED_PERCENT_MIN)) == is_mapped);
        let mut texts: Vec<String> = conditions
            .map(|row| {
                let pages =
                    if row.page_order == super::PageOrder::Single { ", single pages" } else { "" };
                format!("MTU {} sent by {}{pages}", row.mtu, row.sent_by)
            })
            .collect();
        texts.sort();
        texts.dedup();
        if texts.is_empty() { "none".into() } else { texts.join("; ") }
    };
    Some(format!(
        "Pages could be mapped for over {MAPPED_PERCENT_MIN:.0} % of the bytes with: {}. Not \
         with: {}.",
        conditions_text(true),
        conditions_text(false)
    ))
}

/// Whether mapping costs less than reading, where it is possible.
fn mapping_sentence(report: &ReceiveReport) -> Option<String> {
    let mut ratios: Vec<(Estimate, String)> = measured_rows(report)
        .filter(|row| row.path == "mapped" && row.mapped_percent > Some(MAPPED_PERCENT_MIN))
        .filter_map(|row| {
            let ratio = row.receiver_us_ratio?;
            let text =
                format!("{:.2} × read ({}; {})", ratio.median, ratio.interval(2), row.condition());
            Some((ratio, text))
        })
        .collect();
    ratios.sort_by(|(one, _), (other, _)| one.median.total_cmp(&other.median));
    let (best_ratio, best) = ratios.first()?;
    let (_, worst) = ratios.last()?;
    let beginning = if best_ratio.is_below(1.0) {
        "At its best mapping cost"
    } else {
        "Mapping was not shown to pay here: it cost"
    };
    Some(format!("{beginning} {best}; at its worst {worst}."))
}

fn floor_sentence(report: &ReceiveReport) -> Option<String> {
    let row = measured_rows(report).find(|row| row.path == "discard")?;
    let cost = row.receiver_us_per_mib?;
    Some(format!(
        "Discarding the payload in the kernel ({}) costs {:.0} µs per MiB ({}): the cost of the \
         network stack alone on the receiving host.",
        row.condition(),
        cost.median,
        cost.interval(0)
    ))
}
