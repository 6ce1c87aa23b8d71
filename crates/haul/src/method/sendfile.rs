//! `sendfile`: file to socket in one call.
//!
//! The kernel moves references to the page cache, in pieces of up to 64 KiB, through a separate
//! pipe.
//!
//! * It sends pages, not a snapshot: if the file is written meanwhile, the peer receives a mixture.
//! * It may wait for the disk even on a non-blocking socket.
//! * It copies if the device cannot gather (scatter-gather off), and for files without a page cache
//!   (direct access storage, some of /proc).
//!
//! Probed by calling it: `EINVAL` for a descriptor that cannot be spliced from.

use super::{
    AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk, page_aligned,
};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use haul_sys::retry::{WaitsFor, retry};
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "sendfile",
    copying: Copying::Pages,
    fallback: Some(SendMethod::ReadSend),
    attach: |_, options| {
        Ok(Box::new(Sendfile { options: options.clone(), counts: Counts::default() }))
    },
};

struct Sendfile {
    options: MethodOptions,
    counts: Counts,
}

impl super::Sealed for Sendfile {}

impl AttachedMethod for Sendfile {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let len = page_aligned(offset, len, &range);
        let mut position = offset;
        self.counts.calls += 1;
        let sent = retry(socket, WaitsFor::Send, || {
            rustix::fs::sendfile(socket, source.descriptor(), Some(&mut position), len)
        })
        .map_err(|errno| failed(Call::Sendfile)(errno.into()))?;
        if sent == 0 {
            return Err(Error::Ended { at: offset });
        }
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
