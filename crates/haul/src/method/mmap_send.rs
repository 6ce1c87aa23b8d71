//! `mmap+send`: map the file, slide a window over it, one `send` a window.
//!
//! One copy, made by the kernel, from the mapped page cache into the socket; the price is mapping and
//! unmapping each window. The program itself never looks at the mapping, so a file that shrinks is an error
//! of the call (`EFAULT`) and no `SIGBUS`.

use super::{BoundMethod, Copying, Counts, Entry, MethodOptions, SendMethod, chunk_of};
use crate::Source;
use crate::error::{Error, failed};
use haul_sys::region::{Region, SendMode, page_bytes};
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "mmap+send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadSend),
    open: |_, options| {
        Ok(Box::new(MmapSend { options: options.clone(), counts: Counts::default() }))
    },
};

struct MmapSend {
    options: MethodOptions,
    counts: Counts,
}

impl BoundMethod for MmapSend {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if source.as_memory().is_some() {
            return Err(Error::Unsuited("memory is mapped already: read+send sends it as it is"));
        }
        let (offset, len) = chunk_of(&range, self.options.chunk_bytes);
        let window = Window::of(source, offset, len)?;
        // Map, send, unmap.
        self.counts.calls += 3;
        let sent = window
            .region
            .send(socket, window.range.clone(), SendMode::Copy)
            .map_err(|error| window.failed("send", offset, error))?;
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// A stretch of a file, mapped from the page boundary before it.
pub(super) struct Window {
    pub region: Region,
    /// The stretch inside the mapping.
    pub range: Range<usize>,
}

impl Window {
    pub fn of(source: Source<'_>, offset: u64, len: usize) -> Result<Self, Error> {
        let before = (offset % page_bytes() as u64) as usize;
        let region = Region::of_file(source.descriptor(), offset - before as u64, before + len)
            .map_err(failed("mmap"))?;
        Ok(Self { region, range: before..before + len })
    }

    /// What an error of `call` on this window means: pages that are not there are a file that was truncated.
    #[expect(clippy::unused_self, reason = "only meaningful for a window")]
    pub fn failed(&self, call: &'static str, offset: u64, error: std::io::Error) -> Error {
        match rustix::io::Errno::from_io_error(&error) {
            Some(rustix::io::Errno::FAULT) => Error::Ended { at: offset },
            _ => failed(call)(error),
        }
    }
}
