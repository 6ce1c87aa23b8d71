//! The verdict of the experiment `copies`: whether lending pages pays, and what a copy would leave.

use super::ladder::PLAIN;
use super::{CopiesMeter, CopiesRow};
use crate::rounds::Noise;
use crate::stats::Estimate;
use crate::verdict::{Confidence, Question, Verdict, doubt, ratio_text, saving};
use haul_units::Size;
use haul_workers::page_cache::Folios;

/// The command that measures longer.
const LONGER: &str = "haul bench copies --for 10m";
/// The command that measures next to other programs.
const AMONG_OTHERS: &str = "haul bench copies --meter cycles";

/// How far two ratios of a row to another row lie apart at least, so that their order counts.
const ORDER_MIN: f64 = 0.05;

/// The verdict on the largest file, in the smallest calls. The spinner counts if both meters
/// measured, because the spinner sees the interrupts of both hosts.
pub(super) fn of(rows: &[CopiesRow], noise: Option<&Noise>) -> Option<Verdict> {
    let sendfile =
        rows.iter().filter(|row| row.path == "sendfile" && row.rounds > 0).max_by_key(|row| {
            let is_by_spinner = row.meter == CopiesMeter::Spinner;
            (is_by_spinner, row.file_bytes, std::cmp::Reverse(row.chunk_bytes))
        })?;
    let withheld = |reason: &str| Some(Verdict::withheld(Question::Copies, reason, LONGER));
    let disturbed = |reason: &str| {
        let how = match sendfile.meter {
            CopiesMeter::Spinner => AMONG_OTHERS,
            CopiesMeter::Cycles => LONGER,
        };
        Some(Verdict::withheld(Question::Copies, reason, how))
    };
    if let Some(reason) = noise.and_then(|noise| noise.invalid.as_ref()) {
        return disturbed(reason);
    }
    if sendfile.disturbed_percent.is_some() {
        return disturbed("other programs ran in too many windows");
    }
    if sendfile.copies != Some(0) {
        return withheld("the proof does not show that the kernel lends pages to sockets");
    }
    let Some(ratio) = sendfile.sender_us_ratio else {
        return withheld("the rounds are too few or differ too much");
    };
    if let Some(doubt) = doubt(ratio) {
        return withheld(&doubt);
    }
    let size = Size(sendfile.file_bytes);
    let kept = kept_text(sendfile, rows);
    let statement =
        format!("sendfile costs {} read+write for a file of {size}{kept}", ratio_text(ratio));
    Some(Verdict {
        choice: Some(if ratio.is_below(1.0) { "sendfile" } else { "read+write" }.into()),
        baseline: Some("read+write".into()),
        saving_percent: ratio.is_below(1.0).then(|| saving(ratio)),
        confidence: Confidence::Certain,
        ..Verdict::without_saving(Question::Copies, &statement)
    })
}

/// What the rows with one copy keep of the gain of a `sendfile` row.
fn kept_text(sendfile: &CopiesRow, rows: &[CopiesRow]) -> String {
    let kept = |path: &str| {
        let kept: Estimate = sendfile.other(path, rows)?.kept?;
        Some(format!("{path} keeps {:.2} of this gain ({})", kept.median, kept.interval(2)))
    };
    let texts: Vec<String> =
        ["sendfile-copied", "mapped+write"].into_iter().filter_map(kept).collect();
    if texts.is_empty() { String::new() } else { format!("; {}", texts.join(", ")) }
}

/// A sentence for each ladder, and a sentence for each ladder whose order depends on the meter.
pub(super) fn sentences(rows: &[CopiesRow]) -> Vec<String> {
    let sentence = |row: &CopiesRow| {
        let ratio = row.sender_us_ratio?;
        let meter = match row.meter {
            CopiesMeter::Spinner => "",
            CopiesMeter::Cycles => ", in lock step",
        };
        Some(format!(
            "{}{meter}: sendfile costs {} read+write{}.",
            ladder_name(row),
            ratio_text(ratio),
            kept_text(row, rows),
        ))
    };
    rows.iter()
        .filter(|row| row.path == "sendfile" && row.rounds > 0)
        .filter_map(sentence)
        .chain(disagreements(rows))
        .collect()
}

fn ladder_name(row: &CopiesRow) -> String {
    let place = if row.place == Folios::Huge.prefix() { " with huge folios" } else { "" };
    format!("File of {}{place}, calls of {}", Size(row.file_bytes), Size(row.chunk_bytes))
}

/// The pairs of rows that the two meters put in another order.
fn disagreements(rows: &[CopiesRow]) -> Vec<String> {
    let mut sentences = Vec::new();
    for plain in rows.iter().filter(|row| row.path == PLAIN && row.meter == CopiesMeter::Spinner) {
        let both: Vec<(&str, [f64; 2])> =
            rows.iter().filter_map(|row| ratios_by_both(row, plain, rows)).collect();
        let mut pairs = Vec::new();
        for (index, (one, [one_spinner, one_cycles])) in both.iter().enumerate() {
            for (other, [other_spinner, other_cycles]) in &both[index + 1..] {
                let (spinner, cycles) = (one_spinner / other_spinner, one_cycles / other_cycles);
                let [spinner, cycles] = [spinner, cycles].map(f64::ln);
                if spinner * cycles < 0.0 && spinner.abs().min(cycles.abs()) > ORDER_MIN {
                    pairs.push(format!(
                        "{one} to {other} {:.2} by the spinner, {:.2} in lock step",
                        spinner.exp(),
                        cycles.exp()
                    ));
                }
            }
        }
        if !pairs.is_empty() {
            sentences.push(format!(
                "{}: the meters disagree about the order of rows ({}).",
                ladder_name(plain),
                pairs.join("; ")
            ));
        }
    }
    sentences
}

/// The ratios of a row to `read+write` by the spinner and in lock step, if the row belongs to the
/// ladder of `plain`.
fn ratios_by_both<'r>(
    row: &'r CopiesRow,
    plain: &CopiesRow,
    rows: &[CopiesRow],
) -> Option<(&'r str, [f64; 2])> {
    if !row.other(PLAIN, rows).is_some_and(|other| std::ptr::eq(other, plain)) {
        return None;
    }
    if row.path == PLAIN {
        return Some((&row.path, [1.0, 1.0]));
    }
    let by_cycles = row.by_meter(CopiesMeter::Cycles, rows)?;
    let ratios = [row.sender_us_ratio?.median, by_cycles.sender_us_ratio?.median];
    Some((&row.path, ratios))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(meter: CopiesMeter, path: &str, ratio: f64) -> CopiesRow {
        CopiesRow {
            meter,
            path: path.into(),
            place: "tmpfs".into(),
            file_bytes: 1 << 20,
            chunk_bytes: 1 << 16,
            sender_us_ratio: Estimate::of(&[ratio; 9]).filter(|_| path != PLAIN),
            ..CopiesRow::default()
        }
    }

    #[test]
    fn another_order_of_the_other_meter_is_stated() {
        let by_both = |path: &str, [spinner, cycles]: [f64; 2]| {
            [row(CopiesMeter::Spinner, path, spinner), row(CopiesMeter::Cycles, path, cycles)]
        };
        let rows: Vec<CopiesRow> = [
            by_both("read+write", [1.0, 1.0]),
            by_both("sendfile-copied", [0.9, 1.1]),
            by_both("sendfile", [0.5, 0.7]),
            // Their order differs by less than such ratios do from run to run.
            by_both("mapped+write", [0.96, 1.12]),
        ]
        .into_iter()
        .flatten()
        .collect();
        assert_eq!(
            disagreements(&rows),
            ["File of 1MiB, calls of 64KiB: the meters disagree about the order of rows \
              (read+write to sendfile-copied 1.11 by the spinner, 0.91 in lock step)."]
        );
        assert!(disagreements(&rows[..2]).is_empty());
    }
}
