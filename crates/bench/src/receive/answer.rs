//! The answers of the experiment `receive`, in addition to its verdict: the library's choice, the
//! conditions under which pages can be mapped, and whether mapping pays.

use super::{MAPPED_PERCENT_MIN, ReceiveReport, ReceiveRow};
use crate::stats::Estimate;
use crate::verdict::{doubt, ratio_text};
use haul_workers::tested_method::AUTO;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &ReceiveReport) -> Vec<String> {
    [
        library_sentence(report),
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

/// The library's own choice compared with `read`, under the conditions of the first measured row.
fn library_sentence(report: &ReceiveReport) -> Option<String> {
    let condition = measured_rows(report).next()?.condition();
    let auto =
        measured_rows(report).find(|row| row.path == AUTO && row.condition() == condition)?;
    let ratio = auto.receiver_us_ratio?;
    let verdict = doubt(ratio).map_or(String::new(), |doubt| format!(": {doubt}"));
    Some(format!(
        "The library's own choice (auto; {condition}) takes {} the receiver's CPU time of \
         read{verdict}.",
        ratio_text(ratio)
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
        texts
    };
    let (with, without) = (conditions_text(true), conditions_text(false));
    Some(match (with.as_slice(), without.as_slice()) {
        ([], _) => "Zero-copy receive (mapping pages) did not work here.".into(),
        (with, []) => format!(
            "Zero-copy receive (mapping pages) worked for over {MAPPED_PERCENT_MIN:.0} % of the \
             bytes: {}.",
            with.join("; ")
        ),
        (with, without) => format!(
            "Zero-copy receive (mapping pages) worked for over {MAPPED_PERCENT_MIN:.0} % of the \
             bytes with {}. It did not with {}.",
            with.join("; "),
            without.join("; ")
        ),
    })
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
