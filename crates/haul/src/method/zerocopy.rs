//! `zerocopy`: `send` with `MSG_ZEROCOPY`.
//!
//! The kernel sends from the caller's pages and says later, through the socket's error queue, that it is done
//! with them. It copies after all, and then costs *more* than a plain send, where the device cannot gather
//! and checksum, on loopback, veth and tun, and wherever a packet socket listens; the notice says so
//! (`SO_EE_CODE_ZEROCOPY_COPIED`). Small sends never pay.
//!
//! Tried by setting `SO_ZEROCOPY` (Linux 4.14 for TCP). `ENOBUFS` means that `net.core.optmem_max` or
//! `RLIMIT_MEMLOCK` is used up: what has come back is reaped and the send tried again, and if nothing has,
//! that piece goes as a plain send. Waiting would hang where no notice is out.
//!
//! Of a file it sends mapped windows. Unmapping one early is safe: the kernel holds the pages by a reference
//! of its own.

use super::mmap_send::Window;
use super::{BoundMethod, Copying, Counts, Entry, MethodOptions, SendMethod, chunk_of};
use crate::Source;
use crate::completion::CompletionTracker;
use crate::error::{Error, failed};
use haul_sys::region::{Region, SendMode};
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Sends that may be out before the queue is looked at. Completions are pipelined: waiting for each would
/// stall the connection.
const OPEN_BEFORE_REAPING: usize = 32;

pub(super) const ENTRY: Entry = Entry {
    name: "zerocopy",
    copying: Copying::KernelTells,
    fallback: Some(SendMethod::ReadSend),
    open: |socket, options| {
        haul_sys::sockopt::set_zerocopy(socket, true).map_err(failed("setsockopt SO_ZEROCOPY"))?;
        Ok(Box::new(Zerocopy {
            book: CompletionTracker::default(),
            options: options.clone(),
            counts: Counts::default(),
        }))
    },
};

struct Zerocopy {
    book: CompletionTracker,
    options: MethodOptions,
    counts: Counts,
}

impl Zerocopy {
    fn send_pages(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Region,
        range: Range<usize>,
    ) -> Result<usize, std::io::Error> {
        let no_room = |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NOBUFS);
        self.counts.calls += 1;
        let mut sent = region.send(socket, range.clone(), SendMode::Zerocopy);
        if sent.as_ref().is_err_and(no_room) && self.reap(socket)? > 0 {
            self.counts.calls += 1;
            sent = region.send(socket, range.clone(), SendMode::Zerocopy);
        }
        if sent.as_ref().is_err_and(no_room) {
            self.counts.calls += 1;
            let sent = region.send(socket, range, SendMode::Copy)?;
            self.counts.copied_bytes += sent as u64;
            return Ok(sent);
        }
        let sent = sent?;
        self.book.sent(sent, ());
        Ok(sent)
    }

    /// Reads the error queue until it is empty; returns how many notices there were.
    fn reap(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let mut notices = 0;
        loop {
            self.counts.calls += 1;
            let Some(notice) = haul_sys::error_queue::next_completion(socket)? else {
                return Ok(notices);
            };
            let counts = &mut self.counts;
            let told = if notice.copied {
                &mut counts.copied_bytes
            } else {
                &mut counts.zero_copied_bytes
            };
            self.book.settle(notice, |sent| *told += sent.bytes as u64);
            notices += 1;
        }
    }
}

impl BoundMethod for Zerocopy {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if self.book.open() >= OPEN_BEFORE_REAPING {
            self.reap(socket).map_err(failed("recvmsg MSG_ERRQUEUE"))?;
        }
        let (offset, len) = chunk_of(&range, self.options.chunk_bytes);
        let sent = if let Some(memory) = source.as_memory() {
            self.send_pages(socket, memory, offset as usize..offset as usize + len)
                .map_err(failed("send MSG_ZEROCOPY"))?
        } else {
            let window = Window::of(source, offset, len)?;
            self.counts.calls += 2;
            self.send_pages(socket, &window.region, window.range.clone())
                .map_err(|error| window.failed("send MSG_ZEROCOPY", offset, error))?
        };
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }

    fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.reap(socket).map_err(failed("recvmsg MSG_ERRQUEUE"))?;
        Ok(self.book.open())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
