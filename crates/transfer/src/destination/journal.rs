//! The journal of a large file that is being received: which ranges are in the partial file.
//!
//! A transfer that is killed leaves the partial file and its journal. The next transfer of the same
//! version of the file requests the ranges that are missing, and reads nothing of the partial file.
//!
//! The journal begins with a header. Records of equal size follow. The checksum of each record
//! depends on the header, so a torn or foreign record ends the journal. A record is written after
//! its range. After a restart of the host, only records before a record of a sync count.

use crate::checksum::crc;
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;

/// The first bytes, with the version of the format.
const MAGIC: &[u8; 8] = b"haul\0jn2";
/// The bytes of a number.
const NUMBER: usize = 8;
/// Magic, version, size, two parts of the boot, inode, checksum.
const HEADER_BYTES: usize = 7 * NUMBER;
/// Offset, length, checksum.
const RECORD_BYTES: usize = 3 * NUMBER;
/// The offset of a record of a sync. The record's length is the length of the journal before the
/// sync: the ranges up to there are on the disk. Other threads write records during the sync.
const SYNCED: u64 = u64::MAX;
/// The most bytes of a journal that are read: 256 GiB in chunks of 256 KiB.
const JOURNAL_BYTES_MAX: u64 = 32 << 20;
/// The most ranges of a file in an answer to the source, whose frame has a limit.
const RANGES_MAX: usize = 1000;

/// Identifies the file that a journal belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Original {
    /// The version, as the source computed it.
    pub version: u64,
    /// The size, in bytes.
    pub size: u64,
}

/// A journal that is being written.
#[derive(Debug)]
pub struct Journal {
    file: File,
    /// The checksum of the header, with which each record's checksum begins.
    seed: u64,
}

impl Journal {
    /// A new journal of a partial file, in place of another.
    pub fn create(
        folder: impl AsFd,
        name: &[u8],
        original: Original,
        partial: &Stat,
    ) -> rustix::io::Result<Self> {
        match rustix::fs::unlinkat(&folder, name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::WRONLY
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::APPEND
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut file = File::from(rustix::fs::openat(folder, name, flags, mode)?);
        let header = header(original, partial);
        write(&mut file, &header)?;
        Ok(Self { file, seed: crc(&header) })
    }

    /// Goes on with a journal, whose ranges count.
    pub fn go_on(
        folder: impl AsFd,
        name: &[u8],
        original: Original,
        partial: &Stat,
        ranges: &[Range<u64>],
    ) -> rustix::io::Result<Self> {
        // A process that is still there writes to the old journal, which nothing reads any more.
        let journal = Self::create(folder, name, original, partial)?;
        for range in ranges {
            journal.record(range.clone())?;
        }
        Ok(journal)
    }

    /// Records that a range is in the partial file. Any thread may call this.
    pub fn record(&self, range: Range<u64>) -> rustix::io::Result<()> {
        write(&mut &self.file, &record(self.seed, range.start, range.end - range.start))
    }

    /// The length of the journal, in bytes.
    pub fn length(&self) -> rustix::io::Result<u64> {
        Ok(rustix::fs::fstat(&self.file)?.st_size as u64)
    }

    /// Records that a sync, which began at this length of the journal, is over.
    pub fn record_sync(&self, length: u64) -> rustix::io::Result<()> {
        write(&mut &self.file, &record(self.seed, SYNCED, length))
    }
}

/// One call, so that records of different threads do not mix.
fn write(file: &mut impl Write, bytes: &[u8]) -> rustix::io::Result<()> {
    let written = file.write_all(bytes);
    written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn header(original: Original, partial: &Stat) -> [u8; HEADER_BYTES] {
    let [boot, boot_rest] = boot();
    let mut header = [0; HEADER_BYTES];
    header[..NUMBER].copy_from_slice(MAGIC);
    let numbers = [original.version, original.size, boot, boot_rest, partial.st_ino];
    for (at, number) in numbers.into_iter().enumerate() {
        put(&mut header, at + 1, number);
    }
    let sum = crc(&header[..HEADER_BYTES - NUMBER]);
    put(&mut header, 6, sum);
    header
}

fn record(seed: u64, offset: u64, length: u64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    put(&mut record, 0, offset);
    put(&mut record, 1, length);
    let sum = crc(&[&seed.to_le_bytes()[..], &record[..2 * NUMBER]].concat());
    put(&mut record, 2, sum);
    record
}

fn put(bytes: &mut [u8], at: usize, number: u64) {
    bytes[at * NUMBER..][..NUMBER].copy_from_slice(&number.to_le_bytes());
}

fn get(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; NUMBER];
    number.copy_from_slice(&bytes[at * NUMBER..][..NUMBER]);
    u64::from_le_bytes(number)
}

/// The number of this start of the host (/proc, Linux 2.3); zeros if it is unknown.
fn boot() -> [u64; 2] {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    let half = |range: Range<usize>| {
        digits.get(range).and_then(|half| u64::from_str_radix(half, 16).ok()).unwrap_or(0)
    };
    [half(0..16), half(16..32)]
}

/// Why a journal is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unusable {
    /// It is not a journal, or its beginning is torn.
    Torn,
    /// It is of another version of the file, or of another partial file.
    Foreign,
}

/// The ranges in the partial file, in order.
pub fn read(
    journal: impl Read,
    original: Original,
    partial: &Stat,
) -> Result<Vec<Range<u64>>, Unusable> {
    let mut bytes = Vec::new();
    journal.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes).map_err(|_| Unusable::Torn)?;
    parse(&bytes, original, partial.st_ino, partial.st_size as u64)
}

fn parse(
    bytes: &[u8],
    original: Original,
    inode: u64,
    partial_size: u64,
) -> Result<Vec<Range<u64>>, Unusable> {
    let (header, records) = bytes.split_at_checked(HEADER_BYTES).ok_or(Unusable::Torn)?;
    let is_whole =
        header.starts_with(MAGIC) && get(header, 6) == crc(&header[..HEADER_BYTES - NUMBER]);
    if !is_whole {
        return Err(Unusable::Torn);
    }
    if [get(header, 1), get(header, 2), get(header, 5)] != [original.version, original.size, inode]
    {
        return Err(Unusable::Foreign);
    }
    let is_same_boot = [get(header, 3), get(header, 4)] == boot() && boot() != [0, 0];
    let (seed, mut ranges, mut synced) = (crc(header), Vec::new(), 0);
    for bytes in records.chunks_exact(RECORD_BYTES) {
        let (offset, length) = (get(bytes, 0), get(bytes, 1));
        if bytes != record(seed, offset, length) {
            break;
        }
        if offset == SYNCED {
            let records = length.saturating_sub(HEADER_BYTES as u64) / RECORD_BYTES as u64;
            synced = usize::try_from(records).unwrap_or(usize::MAX);
        }
        let end = offset.checked_add(length).filter(|&end| end <= original.size.min(partial_size));
        match end {
            _ if offset == SYNCED => ranges.push(0..0),
            Some(end) => ranges.push(offset..end),
            // The partial file does not have what the journal says.
            None if is_same_boot => return Err(Unusable::Foreign),
            None => break,
        }
    }
    if !is_same_boot {
        ranges.truncate(synced);
    }
    Ok(joined(ranges))
}

/// Joins ranges that touch, and keeps the largest ranges if there are many.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    if joined.len() > RANGES_MAX {
        joined.sort_by_key(|range| std::cmp::Reverse(range.end - range.start));
        joined.truncate(RANGES_MAX);
        joined.sort_by_key(|range| range.start);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ORIGINAL: Original = Original { version: 7, size: 1 << 30 };

    fn written(ranges: &[Range<u64>]) -> Vec<u8> {
        let stat = rustix::fs::stat("/").unwrap();
        let header = header(ORIGINAL, &stat);
        let mut bytes = header.to_vec();
        for range in ranges {
            bytes.extend(record(crc(&header), range.start, range.end - range.start));
        }
        bytes
    }

    fn inode() -> u64 {
        rustix::fs::stat("/").unwrap().st_ino
    }

    #[test]
    fn a_journal_of_another_file_is_foreign() {
        let bytes = written(&[0..5, 5..9]);
        let size = ORIGINAL.size;
        let ranges = parse(&bytes, ORIGINAL, inode(), size).unwrap();
        assert_eq!(ranges, vec![0..9; 1]);
        for original in [Original { version: 8, ..ORIGINAL }, Original { size: 9, ..ORIGINAL }] {
            assert_eq!(parse(&bytes, original, inode(), size), Err(Unusable::Foreign));
        }
        assert_eq!(parse(&bytes, ORIGINAL, inode() + 1, size), Err(Unusable::Foreign));
        // The partial file was truncated.
        assert_eq!(parse(&bytes, ORIGINAL, inode(), 4), Err(Unusable::Foreign));
        assert_eq!(parse(b"text", ORIGINAL, inode(), size), Err(Unusable::Torn));
    }

    /// After a restart, ranges that were not synced may be missing on the disk.
    #[test]
    fn after_a_restart_only_synced_ranges_count() {
        let mut bytes = written(&[]);
        put(&mut bytes, 3, 1);
        let sum = crc(&bytes[..HEADER_BYTES - NUMBER]);
        put(&mut bytes, 6, sum);
        bytes.truncate(HEADER_BYTES);
        let seed = crc(&bytes);
        bytes.extend(record(seed, 0, 5));
        assert_eq!(parse(&bytes, ORIGINAL, inode(), ORIGINAL.size), Ok(Vec::new()));
        // A record of another thread during the sync does not count.
        let length = bytes.len() as u64;
        bytes.extend(record(seed, 10, 5));
        bytes.extend(record(seed, SYNCED, length));
        bytes.extend(record(seed, 5, 5));
        let ranges = parse(&bytes, ORIGINAL, inode(), ORIGINAL.size).unwrap();
        assert_eq!(ranges, vec![0..5; 1]);
    }

    proptest! {
        /// A journal that is cut or changed at any place never has a range that was not written.
        #[test]
        fn a_torn_journal_has_only_ranges_that_were_written(
            starts in prop::collection::vec(0_u64..1000, 1..20),
            cut in any::<prop::sample::Index>(),
            change in prop::option::of((any::<prop::sample::Index>(), 1_u8..)),
        ) {
            let ranges: Vec<_> = starts.iter().map(|start| start * 10..start * 10 + 10).collect();
            let mut bytes = written(&ranges);
            bytes.truncate(cut.index(bytes.len() + 1));
            if let Some((at, bits)) = change
                && !bytes.is_empty()
            {
                let at = at.index(bytes.len());
                bytes[at] ^= bits;
            }
            if let Ok(read) = parse(&bytes, ORIGINAL, inode(), ORIGINAL.size) {
                for range in read {
                    for at in range {
                        prop_assert!(ranges.iter().any(|range| range.contains(&at)));
                    }
                }
            }
        }
    }
}
