//! `mmap+send`: map the file in windows, one `send` per window.
//!
//! The kernel makes one copy, from the mapped page cache into the socket; the price is mapping and
//! unmapping each window. The program itself never accesses the mapping. So if the file shrinks,
//! the call fails with `EFAULT`, and there is no `SIGBUS`.

use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use haul_sys::region::{MappedRegion, SendMode, page_bytes};
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "mmap+send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadSend),
    attach: |_, options| {
        Ok(Box::new(MmapSend { options: options.clone(), counts: Counts::default() }))
    },
};

struct MmapSend {
    options: MethodOptions,
    counts: Counts,
}

impl super::Sealed for MmapSend {}

impl AttachedMethod for MmapSend {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if source.as_memory().is_some() {
            return Err(Error::Unsupported("memory is mapped already: use read+send"));
        }
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let window = FileWindow::map(source, offset, len)?;
        // Map, length, send, unmap.
        self.counts.calls += 4;
        let sent = window
            .region
            .send(socket, window.range.clone(), SendMode::Copy)
            .map_err(|error| window.failed(Call::Send, offset, error))?;
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// A part of a file, mapped from the page boundary before it.
pub(super) struct FileWindow {
    pub region: MappedRegion,
    /// The part inside the mapping.
    pub range: Range<usize>,
}

impl FileWindow {
    /// Maps at most `len` bytes: the window ends where the file ends, because the rest of the
    /// file's last page reads as zeros.
    ///
    /// `Ended` if the file ends at `offset` or before. A file that cannot be mapped is refused, and
    /// so is a file of length 0 that holds bytes nevertheless, as in /proc.
    pub fn map(source: Source<'_>, offset: u64, len: usize) -> Result<Self, Error> {
        let refused = |error| Error::Refused { call: Call::Mmap, error };
        let page_offset = (offset % page_bytes() as u64) as usize;
        let region = MappedRegion::of_file(
            source.descriptor(),
            offset - page_offset as u64,
            page_offset.saturating_add(len),
        )
        .map_err(refused)?;
        // After mapping: a file that was truncated in between has the shorter length.
        let file = rustix::fs::fstat(source.descriptor()).map_err(|errno| refused(errno.into()))?;
        let file_bytes = u64::try_from(file.st_size).unwrap_or(0);
        if file_bytes == 0 && has_byte_at(source, offset) {
            return Err(refused(Errno::NODEV.into()));
        }
        let left = file_bytes.saturating_sub(offset);
        if left == 0 {
            return Err(Error::Ended { at: offset });
        }
        let len = len.min(usize::try_from(left).unwrap_or(usize::MAX));
        Ok(Self { region, range: page_offset..page_offset + len })
    }

    /// Converts an error of `call` on this window: if pages are missing, the file was truncated.
    #[expect(clippy::unused_self, reason = "only meaningful for a window")]
    pub fn failed(&self, call: Call, offset: u64, error: std::io::Error) -> Error {
        match Errno::from_io_error(&error) {
            Some(Errno::FAULT) => Error::Ended { at: offset },
            _ => failed(call)(error),
        }
    }
}

/// Whether a byte can be read at `offset`.
fn has_byte_at(source: Source<'_>, offset: u64) -> bool {
    matches!(rustix::io::pread(source.descriptor(), &mut [0], offset), Ok(1))
}
