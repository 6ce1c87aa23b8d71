//! The verdict of the experiment `copies`: whether lending pages pays, and what a copy would leave.

use super::CopiesRow;
use crate::rounds::Noise;
use crate::stats::Estimate;
use crate::verdict::{Confidence, Question, Verdict, doubt, ratio_text, saving};
use haul_units::Size;

/// The command that measures longer.
const LONGER: &str = "haul bench copies --for 10m";

/// The verdict on the largest file, in the smallest calls.
pub(super) fn of(rows: &[CopiesRow], noise: Option<&Noise>) -> Option<Verdict> {
    let sendfile = rows
        .iter()
        .filter(|row| row.path == "sendfile" && row.rounds > 0)
        .max_by_key(|row| (row.file_bytes, std::cmp::Reverse(row.chunk_bytes)))?;
    let withheld = |reason: &str| Some(Verdict::withheld(Question::Copies, reason, LONGER));
    if let Some(reason) = noise.and_then(|noise| noise.invalid.as_ref()) {
        return withheld(reason);
    }
    if sendfile.disturbed_percent.is_some() {
        return withheld("other programs ran in too many windows");
    }
    if sendfile.copies != Some(0) {
        return withheld("the proof does not show that the kernel lends pages to sockets");
    }
    let Some(ratio) = sendfile.sender_us_ratio else { return withheld("too few usable rounds") };
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

/// A sentence for each ladder.
pub(super) fn sentences(rows: &[CopiesRow]) -> Vec<String> {
    let sentence = |row: &CopiesRow| {
        let ratio = row.sender_us_ratio?;
        let (file, chunk) = (Size(row.file_bytes), Size(row.chunk_bytes));
        let place = if row.place == "tmpfs-huge" { " with huge folios" } else { "" };
        Some(format!(
            "File of {file}{place}, calls of {chunk}: sendfile costs {} read+write{}.",
            ratio_text(ratio),
            kept_text(row, rows),
        ))
    };
    rows.iter()
        .filter(|row| row.path == "sendfile" && row.rounds > 0)
        .filter_map(sentence)
        .collect()
}
