//! The answers of the experiment `send`, in addition to its verdict: the library's choice, the
//! methods that copied unexpectedly, and the most expensive setting.

use super::verdict::{is_nameable, subject};
use super::{SendReport, SendRow};
use crate::stats::Estimate;
use crate::verdict::{doubt, ratio_text};
use haul_units::Size;
use haul_workers::one_copy::OneCopyMethod;
use haul_workers::tested_method::AUTO;
use std::collections::BTreeSet;

/// The answers that a report's rows support, one sentence each.
pub(super) fn of(report: &SendReport) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut workloads = BTreeSet::new();
    for row in measured_rows(report) {
        if !workloads.insert(row.workload.as_str()) {
            continue;
        }
        let Some(rows) = default_rows(report, &row.workload) else { continue };
        // A run that was stopped early may have left out the cheapest method.
        let condition = rows[0].condition();
        if report
            .rows
            .iter()
            .any(|row| row.condition() == condition && row.rounds == 0 && row.refused.is_none())
        {
            continue;
        }
        sentences.extend(library_sentence(&rows));
        sentences.extend(floor_sentence(&rows));
        sentences.extend(unexpected_copies_sentence(&rows));
    }
    sentences.extend(linearized_pages_sentence(report));
    sentences.extend(most_expensive_sentences(report));
    sentences
}

fn measured_rows(report: &SendReport) -> impl Iterator<Item = &SendRow> {
    report.rows.iter().filter(|row| row.sender_us_per_mib.is_some())
}

/// The rows of a workload under the conditions nearest to the defaults: offloads on, no cork, the
/// chunk nearest to 64 KiB.
fn default_rows<'a>(report: &'a SendReport, workload: &str) -> Option<Vec<&'a SendRow>> {
    let rank = |row: &&SendRow| {
        let distance = (row.chunk_bytes as f64 / 65_536.0).log2().abs();
        (row.offloads != "on", row.cork, (distance * 1000.0) as u64)
    };
    let condition =
        measured_rows(report).filter(|row| row.workload == workload).min_by_key(rank)?.condition();
    Some(measured_rows(report).filter(|row| row.condition() == condition).collect())
}

fn sender_cost(row: &SendRow) -> Option<Estimate> {
    row.sender_us_per_mib
}

fn median_cost(row: &SendRow) -> f64 {
    sender_cost(row).map_or(f64::INFINITY, |cost| cost.median)
}

/// The cheapest method that the library may choose.
fn cheapest_row<'a>(rows: &[&'a SendRow]) -> Option<&'a SendRow> {
    rows.iter()
        .filter(|row| row.path.parse().is_ok_and(is_nameable))
        .min_by(|one, other| median_cost(one).total_cmp(&median_cost(other)))
        .copied()
}

/// The library's own choice compared with the plain method, and how certain that is.
fn library_sentence(rows: &[&SendRow]) -> Option<String> {
    let auto = rows.iter().find(|row| row.path == AUTO)?;
    let (ratio, taken) = (auto.sender_us_ratio?, auto.taken.as_deref()?);
    let plain = rows
        .iter()
        .find(|row| row.path == "read+write")
        .or(rows.iter().find(|row| row.path == "read+send"))?;
    let verdict = match doubt(ratio) {
        Some(doubt) => doubt,
        None if ratio.is_below(1.0) => "which saves".into(),
        None => "which costs more: make a plan for this machine with haul plan".into(),
    };
    Some(format!(
        "The library's own choice for {} (auto: {taken}) takes {} the sender's CPU time of {}: \
         {verdict}.",
        subject(&auto.workload, auto.chunk_bytes),
        ratio_text(ratio),
        plain.path
    ))
}

fn floor_sentence(rows: &[&SendRow]) -> Option<String> {
    let (best, floor) = (cheapest_row(rows)?, rows.iter().find(|row| row.path == "floor")?);
    let (estimate, ratio) = (sender_cost(floor)?, floor.cheapest_us_ratio?);
    if !estimate.is_conclusive() {
        return None;
    }
    let comparison = if ratio.is_below(1.0) {
        format!("costs {:.2} × as much", 1.0 / ratio.median)
    } else if ratio.is_above(1.0) {
        // No method can cost less than the stack that it uses.
        return Some("The floor row was noisier than the others: measure again.".into());
    } else {
        "was not shown to cost more".into()
    };
    Some(format!(
        "The network stack alone, sending the same few pages repeatedly, costs {:.0} µs per MiB \
         ({}): {} {comparison}.",
        estimate.median,
        estimate.interval(0),
        best.path
    ))
}

fn unexpected_copies_sentence(rows: &[&SendRow]) -> Option<String> {
    let copied: Vec<String> = rows
        .iter()
        .filter(|row| row.path.ends_with("zerocopy"))
        .filter_map(|row| {
            let percent = row.copied_percent.filter(|&percent| percent > 1.0)?;
            let ratio = row.sender_us_ratio.map_or(String::new(), |ratio| {
                format!(", at {:.2} × the plain method", ratio.median)
            });
            Some(format!("{} ({percent:.0} %{ratio})", row.path))
        })
        .collect();
    if copied.is_empty() {
        return None;
    }
    let receiver = |wanted: &dyn Fn(&SendRow) -> bool| {
        let costs: Vec<f64> = rows
            .iter()
            .filter(|row| wanted(row))
            .filter_map(|row| row.receiver_us_per_mib.map(|estimate| estimate.median))
            .collect();
        Estimate::of(&costs).map(|estimate| estimate.median)
    };
    let with = receiver(&|row| row.path.ends_with("zerocopy"));
    let without = receiver(&|row| row.path.ends_with("+send") || row.path.ends_with("+write"));
    let at_receiver = match (with, without) {
        (Some(with), Some(without)) => {
            format!(
                "; the receiving host then pays {with:.0} µs per MiB, and {without:.0} for a plain \
                 send"
            )
        }
        _ => String::new(),
    };
    Some(format!("Copied although the method avoids copies: {}{at_receiver}.", copied.join(", ")))
}

/// The methods that pass pages on, in the rows where the kernel copied the pages all the same.
fn linearized_pages_sentence(report: &SendReport) -> Option<String> {
    let is_one_copy =
        |row: &SendRow| OneCopyMethod::ALL.iter().any(|method| method.name() == row.path);
    let mut paths: Vec<&str> = measured_rows(report)
        .filter(|row| {
            row.copied_known_by.as_deref() == Some("proof") && row.copied_percent > Some(1.0)
        })
        .filter(|row| !is_one_copy(row))
        .map(|row| row.path.as_str())
        .collect();
    paths.sort_unstable();
    paths.dedup();
    (!paths.is_empty()).then(|| {
        format!(
            "Without scatter-gather the stack copied the pages instead of passing them on, in {}.",
            paths.join(", ")
        )
    })
}

/// The single setting, and the single chunk size, that raises the cheapest method's cost most when
/// nothing else changes.
fn most_expensive_sentences(report: &SendReport) -> Vec<String> {
    let Some((rows, best)) = measured_rows(report).next().and_then(|first| {
        let rows = default_rows(report, &first.workload)?;
        let best = cheapest_row(&rows)?;
        Some((rows, best))
    }) else {
        return Vec::new();
    };
    let same_path: Vec<&SendRow> = measured_rows(report)
        .filter(|row| row.path == best.path && row.workload == best.workload)
        .filter(|row| !rows.iter().any(|plain| std::ptr::eq(*plain, *row)))
        .collect();
    let differs = |row: &SendRow| {
        (row.offloads != best.offloads, row.cork != best.cork, row.chunk_bytes != best.chunk_bytes)
    };
    let most_expensive = |name: &dyn Fn(&SendRow) -> Option<String>| {
        let (row, name) = same_path
            .iter()
            .filter_map(|row| Some((*row, name(row)?)))
            .max_by(|(one, _), (other, _)| median_cost(one).total_cmp(&median_cost(other)))?;
        let (with, without) = (sender_cost(row)?, sender_cost(best)?);
        let is_conclusive =
            with.is_conclusive() && without.is_conclusive() && with.low > without.high;
        if !is_conclusive {
            return Some(None);
        }
        Some(Some(format!(
            "{name}: {} then costs {:.0} µs per MiB ({}), {:.2} × as much",
            best.path,
            with.median,
            with.interval(0),
            with.median / without.median
        )))
    };
    let setting = most_expensive(&|row| match differs(row) {
        (true, false, false) => Some("scatter-gather and checksum offload off".into()),
        (false, true, false) => Some("TCP_CORK on".into()),
        _ => None,
    });
    let chunk = most_expensive(&|row| {
        (differs(row) == (false, false, true))
            .then(|| format!("chunks of {}", Size(row.chunk_bytes)))
    });
    let sentence = |what: &str, text: Option<String>| match text {
        Some(text) => format!("The {what} that costs most, of those tried: {text}."),
        None => format!("No {what} that was tried was shown to cost more."),
    };
    setting
        .map(|text| sentence("setting", text))
        .into_iter()
        .chain(chunk.map(|text| sentence("chunk size", text)))
        .collect()
}
