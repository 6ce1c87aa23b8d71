//! The answer in plain words: whether not copying is still a gain where every byte must be looked at anyway.

use super::{ChecksumReport, ChecksumRow};
use crate::quantity::Size;
use crate::stats::Figure;

/// The sentences that a report's rows support: for the smallest, the middle and the largest size.
pub(super) fn of(report: &ChecksumReport) -> Vec<String> {
    let mut sizes: Vec<u64> = report.rows.iter().map(|row| row.bytes).collect();
    sizes.dedup();
    let (Some(&first), Some(&last)) = (sizes.first(), sizes.last()) else { return Vec::new() };
    let mut told = vec![first, sizes[sizes.len() / 2], last];
    told.dedup();
    let mut sentences: Vec<String> =
        told.into_iter().filter_map(|bytes| fold(report, bytes)).collect();
    sentences.extend(dearer_sums(report, last));
    sentences.extend(bandwidth(report, last));
    sentences
}

fn time(report: &ChecksumReport, path: &str, bytes: u64) -> Option<Figure> {
    report.rows.iter().find(|row: &&ChecksumRow| row.path == path && row.bytes == bytes)?.ns_per_kib
}

/// One size: the sum alone, the copy alone, both in one pass and in two.
fn fold(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let ns = |path| time(report, path, bytes).map(|figure| figure.median);
    let (sum, copy, both) = (ns("checksum")?, ns("memcpy")?, ns("checksum-copy auto")?);
    let two = ns("checksum, memcpy")?;
    let gain = 100.0 * (1.0 - sum / both);
    Some(format!(
        "{} at a time: the checksum takes {sum:.1} ns/KiB, a copy {copy:.1}, both as the library does it {both:.1} ({:.2} × the copy), one after the other {two:.1}: \
         where every byte is summed anyway, not copying it saves {gain:.0} %.",
        Size(bytes),
        both / copy
    ))
}

/// The sums of today, which take longer than a copy.
fn dearer_sums(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let saved = |name: &str| {
        let alone = time(report, name, bytes)?.median;
        let with_copy = time(report, &format!("{name}, memcpy"), bytes)?.median;
        Some((alone, 100.0 * (1.0 - alone / with_copy)))
    };
    let ((crc, crc_saved), (hash, hash_saved)) = (saved("crc32c")?, saved("blake3")?);
    Some(format!(
        "{} at a time: beside a CRC-32C ({crc:.0} ns/KiB) not copying saves {crc_saved:.0} %, beside BLAKE3 ({hash:.0} ns/KiB) {hash_saved:.0} %.",
        Size(bytes)
    ))
}

fn bandwidth(report: &ChecksumReport, bytes: u64) -> Option<String> {
    let row = report.rows.iter().find(|row| row.path == "checksum" && row.bytes == bytes)?;
    let (share, speed) = (row.read_bandwidth_share?, row.gigabytes_per_second?);
    Some(format!(
        "Of {} the checksum reads {:.1} GB/s, {:.2} of what reading alone does ({}).",
        Size(bytes),
        speed.median,
        share.median,
        share.interval(2)
    ))
}
