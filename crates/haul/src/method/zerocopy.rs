//! `zerocopy`: `send` with `MSG_ZEROCOPY`.
//!
//! The kernel sends from the caller's pages, and later reports through the socket's error queue
//! that it has released them. In these cases it copies nevertheless, and then costs *more* than a
//! plain send:
//!
//! * the device cannot gather and compute checksums;
//! * the device is loopback, veth or tun;
//! * a packet socket listens.
//!
//! The completion reports the copy (`SO_EE_CODE_ZEROCOPY_COPIED`). Small sends never pay.
//!
//! Probed by setting `SO_ZEROCOPY` (Linux 4.14 for TCP). `ENOBUFS` means that `net.core.optmem_max`
//! or `RLIMIT_MEMLOCK` is used up. Then completions are drained and the send is tried again; if
//! there are none, that piece is sent by a plain send. Waiting would block forever if no completion
//! is outstanding.
//!
//! Of a file it sends mapped windows. Unmapping one early is safe: the kernel holds the pages by a
//! separate reference.

use super::mmap_send::FileWindow;
use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::claim::Claim;
use crate::completion::CompletionTracker;
use crate::error::{Error, failed};
use crate::socket::enable_zerocopy;
use crate::source::Source;
use haul_sys::region::{MappedRegion, SendMode};
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Sends in flight at which the error queue is drained. Completions are pipelined: waiting for each
/// would stall the connection.
const IN_FLIGHT_BEFORE_DRAIN: usize = 32;

pub(super) const ENTRY: Entry = Entry {
    name: "zerocopy",
    copying: Copying::ReportedByKernel,
    fallback: Some(SendMethod::ReadSend),
    attach: |socket, options| {
        let claim =
            Claim::of(socket).ok_or(Error::Unsupported("another sender lends on the socket"))?;
        if !enable_zerocopy(socket, options.own_bytes)? {
            return Err(Error::Unsupported(
                "bytes that other code has sent are still in the socket",
            ));
        }
        Ok(Box::new(Zerocopy {
            claim: Some(claim),
            tracker: CompletionTracker::default(),
            options: options.clone(),
            counts: Counts::default(),
            own_copied_bytes: 0,
        }))
    },
};

struct Zerocopy {
    /// Until the method is dropped.
    claim: Option<Claim>,
    tracker: CompletionTracker,
    options: MethodOptions,
    counts: Counts,
    /// Bytes that were sent by a plain send, because their number was unknown or the kernel lacked
    /// memory to track them.
    own_copied_bytes: u64,
}

impl Drop for Zerocopy {
    fn drop(&mut self) {
        // Another sender would take the completions that are still to come for its own.
        if self.tracker.in_flight() > 0 {
            if let Some(claim) = self.claim.take() {
                claim.keep();
            }
        }
    }
}

impl Zerocopy {
    fn send_pages(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &MappedRegion,
        range: Range<usize>,
    ) -> Result<usize, std::io::Error> {
        if !self.tracker.accepts_send() || self.tracker.is_next_send_first() {
            self.drain_completions(socket)?;
        }
        if !self.tracker.accepts_send() {
            return self.copy(socket, region, range);
        }
        let is_enobufs =
            |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NOBUFS);
        self.counts.calls += 1;
        let mut sent = region.send(socket, range.clone(), SendMode::Zerocopy);
        if sent.as_ref().is_err_and(is_enobufs) && self.drain_completions(socket)? > 0 {
            self.counts.calls += 1;
            sent = region.send(socket, range.clone(), SendMode::Zerocopy);
        }
        if sent.as_ref().is_err_and(is_enobufs) {
            return self.copy(socket, region, range);
        }
        let sent = sent?;
        self.tracker.record_send(sent, ());
        Ok(sent)
    }

    fn copy(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &MappedRegion,
        range: Range<usize>,
    ) -> Result<usize, std::io::Error> {
        self.counts.calls += 1;
        let sent = region.send(socket, range, SendMode::Copy)?;
        self.counts.copied_bytes += sent as u64;
        self.own_copied_bytes += sent as u64;
        Ok(sent)
    }

    /// Drains the error queue; returns the number of completions.
    fn drain_completions(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let mut completions = 0;
        loop {
            self.counts.calls += 1;
            let Some(completion) = haul_sys::error_queue::next_completion(socket)? else {
                return Ok(completions);
            };
            let counts = &mut self.counts;
            let counter = if completion.copied {
                &mut counts.copied_bytes
            } else {
                &mut counts.zero_copied_bytes
            };
            self.tracker.complete(completion, |sent| *counter += sent.bytes as u64);
            completions += 1;
        }
    }
}

impl super::Sealed for Zerocopy {}

impl AttachedMethod for Zerocopy {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if self.tracker.in_flight() >= IN_FLIGHT_BEFORE_DRAIN {
            self.drain_completions(socket).map_err(failed(Call::ErrorQueue))?;
        }
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let sent = if let Some(memory) = source.as_memory() {
            self.send_pages(socket, memory, offset as usize..offset as usize + len)
                .map_err(failed(Call::SendZerocopy))?
        } else {
            let window = FileWindow::map(source, offset, len)?;
            self.counts.calls += 3;
            self.send_pages(socket, &window.region, window.range.clone())
                .map_err(|error| window.failed(Call::SendZerocopy, offset, error))?
        };
        self.counts.bytes += sent as u64;
        Ok(sent as u64)
    }

    fn process_completions(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.drain_completions(socket).map_err(failed(Call::ErrorQueue))?;
        Ok(self.tracker.in_flight())
    }

    fn sends_in_flight(&self) -> usize {
        self.tracker.in_flight()
    }

    fn counts(&self) -> Counts {
        self.counts
    }

    fn kernel_copied_bytes(&self) -> u64 {
        self.counts.copied_bytes - self.own_copied_bytes
    }
}
