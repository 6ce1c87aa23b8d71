//! Reads files ahead.

use rustix::fs::Advice;
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;

/// The most bytes that are read ahead: the largest range that a stream takes, but for ranges with
/// blocks that are cut by their content.
const AHEAD_BYTES_MAX: u64 = 4 << 20;

/// Lets the kernel read the beginning of a range in the background. Several streams read a file by
/// turns, so the kernel does not detect sequential access.
pub fn read_ahead(file: &File, range: Range<u64>) {
    let bytes = range.end.saturating_sub(range.start).min(AHEAD_BYTES_MAX);
    if let Some(bytes) = NonZeroU64::new(bytes) {
        // Without the hint, the read waits for the disk.
        let _ = rustix::fs::fadvise(file, range.start, Some(bytes), Advice::WillNeed);
    }
}
