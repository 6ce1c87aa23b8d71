//! Cold files: whether a range is in memory, and how to bring it there.
//!
//! `sendfile` and every other call that sends a file waits for the disk where a page is not in
//! memory, on a non-blocking socket too. A program with an event loop asks first
//! ([`Source::is_resident`]), and lets another thread read ([`Source::prefetch`]).

use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;

/// The bytes that [`Source::prefetch`] reads before it returns. The rest is read while they are
/// sent.
pub const PREFETCH_AWAITED_BYTES: u64 = 2 << 20;
/// The bytes that [`Source::prefetch`] has the kernel read, at most.
const PREFETCH_BYTES_MAX: u64 = 4 << 20;
/// The kernel reads ahead in pieces of this size or more (`read_ahead_kb` of most disks).
const READAHEAD_BYTES: usize = 128 << 10;

impl Source<'_> {
    /// Whether a range is in memory, so that sending it does not wait for the disk.
    ///
    /// Only its first and its last page are checked: readahead fills those between them. So ask for
    /// pieces of up to 2 MiB ([`PREFETCH_AWAITED_BYTES`]). True where it cannot be known, such as
    /// on a file system without `RWF_NOWAIT` (Linux 4.14). Takes one or two system calls.
    pub fn is_resident(&self, range: Range<u64>) -> bool {
        if range.is_empty() || self.as_memory().is_some() {
            return true;
        }
        [range.start, range.end - 1].into_iter().all(|at| {
            let mut byte = [0];
            let mut buffers = [IoSliceMut::new(&mut byte)];
            let file = self.descriptor();
            let read = rustix::io::preadv2(file, &mut buffers, at, ReadWriteFlags::NOWAIT);
            !matches!(read, Err(Errno::AGAIN))
        })
    }

    /// Reads a range into memory, for a send that follows soon. **It waits for the disk**: call it
    /// in a thread that may.
    ///
    /// It waits for at most the first 2 MiB ([`PREFETCH_AWAITED_BYTES`]) and has the kernel read
    /// the next 2 MiB meanwhile, so that a disk and a network take turns without waiting for each
    /// other. For a longer range, call it for each piece. Of a range that ends behind the file's
    /// end, the rest is ignored.
    pub fn prefetch(&self, range: Range<u64>) -> Result<(), Error> {
        if range.is_empty() || self.as_memory().is_some() {
            return Ok(());
        }
        let file = self.descriptor();
        let ahead = NonZeroU64::new((range.end - range.start).min(PREFETCH_BYTES_MAX));
        // A file system without readahead reads below.
        let _ = rustix::fs::fadvise(file, range.start, ahead, Advice::WillNeed);
        let awaited_end = range.end.min(range.start.saturating_add(PREFETCH_AWAITED_BYTES));
        for at in (range.start..awaited_end).step_by(READAHEAD_BYTES).chain([awaited_end - 1]) {
            let read = rustix::io::pread(file, &mut [0], at);
            if read.map_err(|errno| failed(Call::Pread)(errno.into()))? == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Memory;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn a_file_that_was_dropped_from_memory_is_brought_back() {
        // Not in /tmp, which may be in memory itself.
        let folder = std::env::current_dir().unwrap();
        let mut file = tempfile::tempfile_in(folder).unwrap();
        file.write_all(&vec![7; 6 << 20]).unwrap();
        file.sync_all().unwrap();
        let whole = 0..6 << 20;
        assert!(Source::from(&file).is_resident(whole.clone()), "it was just written");
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let mut byte = [0];
        let first = &mut [IoSliceMut::new(&mut byte)];
        if rustix::io::preadv2(&file, first, 0, ReadWriteFlags::NOWAIT) != Err(Errno::AGAIN) {
            eprintln!("SKIPPED: this file system keeps every page, or lacks RWF_NOWAIT");
            return;
        }
        assert!(!Source::from(&file).is_resident(whole.clone()));
        Source::from(&file).prefetch(whole).unwrap();
        assert!(Source::from(&file).is_resident(0..PREFETCH_AWAITED_BYTES));
    }

    #[test]
    fn empty_ranges_ends_of_files_and_memory_need_nothing() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        let source = Source::from(&file);
        assert!(source.is_resident(5..5));
        source.prefetch(5..5).unwrap();
        source.prefetch(0..u64::MAX).unwrap();
        source.prefetch(100..200).unwrap();
        let memory = Memory::new(&[1; 100][..], 100).unwrap();
        assert!(Source::from(&memory).is_resident(0..100));
        Source::from(&memory).prefetch(0..100).unwrap();
        let folder = File::open("/").unwrap();
        assert!(Source::from(&folder).is_resident(0..10), "sending finds out");
        assert!(Source::from(&folder).prefetch(0..10).is_err());
    }
}
