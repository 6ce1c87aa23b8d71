//! The answers of the experiment `checksum`: whether avoiding a copy still gains if every byte must
//! be read anyway.

use super::{ChecksumReport, ChecksumRow};
use crate::stats::Estimate;
use crate::verdict::{Question, Verdict, ratio_text, too_few_rounds};
use haul_units::Size;

/// The answers that a report's rows support, for the smallest, the middle and the largest size.
pub(super) fn of(report: &ChecksumReport) -> Vec<String> {
    let mut sizes: Vec<u64> = report.rows.iter().map(|row| row.bytes).collect();
    sizes.dedup();
    let (Some(&first), Some(&last)) = (sizes.first(), sizes.last()) else { return Vec::new() };
    let mut shown_sizes = vec![first, sizes[sizes.len() / 2], last];
    shown_sizes.dedup();
    let mut sentences: Vec<String> =
        shown_sizes.into_iter().filter_map(|bytes| size_sentence(report, bytes)).collect();
    sentences.extend(slow_checksums_sentence(report, last));
    sentences.extend(bandwidth_sentence(report, last));
    sentences
}

/// The verdict for the largest size: what a checksum costs compared with a copy.
pub(super) fn verdict(report: &ChecksumReport) -> Option<Verdict> {
    let bytes = report.rows.iter().map(|row| row.bytes).max()?;
    let ratio = |path: &str| {
        let row = report.rows.iter().find(|row| row.path == path && row.bytes == bytes)?;
        row.memcpy_ratio
    };
    let (sum, both) = (ratio("checksum")?, ratio("checksum-copy auto")?);
    if !sum.is_conclusive() || !both.is_conclusive() {
        let reason = too_few_rounds(sum.rounds.min(both.rounds))
            .unwrap_or_else(|| "the rounds give no interval of 95 %".into());
        let remedy = "haul bench checksum --for 1m";
        return Some(Verdict::withheld(Question::Checksums, &reason, remedy));
    }
    let statement = format!(
        "a checksum of {} takes {} a copy's time; copy and checksum in one pass {}",
        Size(bytes),
        ratio_text(sum),
        ratio_text(both)
    );
    Some(Verdict {
        how: Some("haul::checksum".into()),
        ..Verdict::without_saving(Question::Checksums, &statement)
    })
}

fn ns_per_kib(report: &ChecksumReport, path: &str, bytes: u64) -> Option<Estimate> {
    report.rows.iter().find(|row: &&ChecksumRow| row.path == path && row.bytes == bytes)?.ns_per_kib
}

/// One size: checksum alone, copy alone, both in one pass, and both in two passes.
fn size_sentence(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let ns = |path| ns_per_kib(report, path, bytes).map(|estimate| estimate.median);
    let (sum, copy, fused) = (ns("checksum")?, ns("memcpy")?, ns("checksum-copy auto")?);
    let sequential = ns("checksum, memcpy")?;
    let gain = 100.0 * (1.0 - sum / fused);
    Some(format!(
        "{} at a time: the checksum takes {sum:.1} ns/KiB, a copy {copy:.1}, both as the library \
         does it {fused:.1} ({:.2} × the copy), one after the other {sequential:.1}: where every \
         byte is summed anyway, not copying it saves {gain:.0} %.",
        Size(bytes),
        fused / copy
    ))
}

/// Checksums that take longer than a copy: CRC-32C and BLAKE3.
fn slow_checksums_sentence(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let saved = |name: &str| {
        let alone = ns_per_kib(report, name, bytes)?.median;
        let with_copy = ns_per_kib(report, &format!("{name}, memcpy"), bytes)?.median;
        Some((alone, 100.0 * (1.0 - alone / with_copy)))
    };
    let ((crc, crc_saved), (hash, hash_saved)) = (saved("crc32c")?, saved("blake3")?);
    Some(format!(
        "{} at a time: with CRC-32C ({crc:.0} ns/KiB) not copying saves {crc_saved:.0} %, with \
         BLAKE3 ({hash:.0} ns/KiB) {hash_saved:.0} %.",
        Size(bytes)
    ))
}

fn bandwidth_sentence(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let row = report.rows.iter().find(|row| row.path == "checksum" && row.bytes == bytes)?;
    let (share, speed) = (row.read_bandwidth_share?, row.gigabytes_per_second?);
    Some(format!(
        "With {} the checksum reads {:.1} GB/s, {:.2} of the speed of reading alone ({}).",
        Size(bytes),
        speed.median,
        share.median,
        share.interval(2)
    ))
}
