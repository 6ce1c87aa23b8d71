//! Loans: buffers that the kernel sends from while the program cannot access them.
//!
//! A loan is a move: the buffer goes in, and comes out when the kernel has reported that it has
//! released the pages. This module makes system calls only through [`ZeroCopySocket`], so that
//! tests can simulate any kernel.

mod reaper;
/// Whether a datagram socket may have this error because of an ICMP message, although it would be
/// a refusal of another call: administratively prohibited, source route failed and protocol
/// unreachable (`icmp_err_convert` in net/ipv4/icmp.c, `tab_unreach` in net/ipv6/icmp.c).
fn is_icmp_error(errno: Errno) -> bool {
    matches!(errno, Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOPROTOOPT)
}

#[cfg(test)]
mod simulation;
mod wire;

pub use reaper::{abandoned_bytes, set_abandoned_bytes_max};
pub(crate) use wire::OsSocket;

use crate::buffer::Buffer;
use crate::call::Call;
use crate::claim::Claim;
use crate::completion::CompletionTracker;
use crate::error::{Error, failed};
use crate::fallback::{self, COPIED_BYTES_BEFORE_FALLBACK, Fallback};
use crate::loan::{LendError, LoanId, LoanLimits, LoanOutcome, Returned};
use crate::method::{Counts, SendMethod};
use crate::socket;
use haul_sys::error_queue::Completion;
use haul_sys::fork;
use rustix::io::Errno;
use rustix::net::SocketType;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;

/// Sends in flight at which completions are drained, so that they are pipelined and not read one by
/// one.
const IN_FLIGHT_BEFORE_DRAIN: usize = 16;
/// The most bytes of a copying call: TCP counts in 32 bits.
const COPY_BYTES_MAX: usize = 1 << 30;
/// The most bytes of a zero-copy call. The kernel charges `RLIMIT_MEMLOCK` for all bytes that are
/// offered, also for those that the socket does not accept, and shares the bookkeeping of two calls
/// only up to this size (`byte_limit` in `msg_zerocopy_realloc`).
const ZEROCOPY_BYTES_MAX: usize = 512 << 10;
/// The most buffers of one call (`UIO_MAXIOV` of `<linux/uio.h>`).
const PARTS_MAX: usize = 1024;
/// The size of a zero-copy call down to which it is halved when the kernel lacks memory to track
/// it.
const ZEROCOPY_BYTES_MIN: usize = 64 << 10;

/// The kernel's side of loans; tests simulate it.
pub(crate) trait ZeroCopySocket {
    /// Sends a prefix of the bytes of all parts; with `zerocopy`, from the caller's pages.
    fn send(
        &mut self,
        parts: &[IoSlice<'_>],
        segment_bytes: Option<u16>,
        zerocopy: bool,
    ) -> io::Result<usize>;
    /// Claims the socket for this sender; `None` if another sender lends on the socket.
    fn claim(&mut self) -> Option<Claim>;
    /// Enables zero-copy sends; false if that has to wait until bytes that other code sent before
    /// have left the socket.
    fn enable_zerocopy(&mut self) -> Result<bool, Error>;
    /// The next completion, if one has arrived. Never blocks.
    fn next_completion(&mut self) -> io::Result<Option<Completion>>;
    /// Waits until there may be a completion; false if the socket is non-blocking or its timeout
    /// expired.
    fn wait_for_completion(&mut self) -> io::Result<bool>;
    /// Whether a zero-copy send that fails may nevertheless have used a sequence number.
    fn numbers_failed_sends(&self) -> bool;
}

/// A loan that is not returned yet.
#[derive(Debug)]
struct Loan {
    buffer: Buffer,
    /// The buffers after it.
    more: Vec<Buffer>,
    /// The length of all buffers together.
    bytes: usize,
    segment_bytes: Option<u16>,
    sent_bytes: usize,
    /// Sends from it that are in flight.
    sends_in_flight: usize,
    copied: bool,
}

impl Loan {
    fn new(buffer: Buffer, more: Vec<Buffer>, segment_bytes: Option<u16>) -> Self {
        let bytes = more
            .iter()
            .fold(buffer.original_len(), |sum, buffer| sum.saturating_add(buffer.original_len()));
        let (sent_bytes, sends_in_flight, copied) = (0, 0, false);
        Self { buffer, more, bytes, segment_bytes, sent_bytes, sends_in_flight, copied }
    }

    fn into_error(self, error: Error) -> LendError {
        LendError { error, buffer: self.buffer, more: self.more }
    }

    /// At most `bytes_max` unsent bytes, of one buffer.
    fn unsent(&self, bytes_max: usize) -> io::Result<IoSlice<'_>> {
        unsent_part(&self.buffer, self.sent_bytes, bytes_max)
    }

    /// At most `bytes_max` unsent bytes, of as many buffers as one call takes.
    fn unsent_vectored(&self, bytes_max: usize) -> io::Result<Vec<IoSlice<'_>>> {
        let (mut sent, mut left) = (self.sent_bytes, bytes_max);
        let mut parts = Vec::new();
        for buffer in std::iter::once(&self.buffer).chain(&self.more) {
            if sent >= buffer.original_len() {
                sent -= buffer.original_len();
                continue;
            }
            let part = unsent_part(buffer, sent, left)?;
            (sent, left) = (0, left - part.len());
            parts.push(part);
            if left == 0 || parts.len() == PARTS_MAX {
                break;
            }
        }
        Ok(parts)
    }
}

/// At most `bytes_max` bytes of a buffer, from its byte `sent` on.
fn unsent_part(buffer: &Buffer, sent: usize, bytes_max: usize) -> io::Result<IoSlice<'_>> {
    let left = buffer.get(sent..).filter(|left| !left.is_empty());
    let left = left
        .ok_or_else(|| io::Error::other("the owner of the lent buffer has changed its length"))?;
    Ok(IoSlice::new(&left[..left.len().min(bytes_max)]))
}

/// Whether loans are sent from their own pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Untried,
    Zerocopy,
    Copying,
}

/// The loans of one socket.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub(crate) struct Lending {
    limits: LoanLimits,
    zerocopy_bytes_min: usize,
    mode: Mode,
    claim: Option<Claim>,
    /// Whether the completions of the socket belong to `tracker`. Once true, it stays true.
    owns_completions: bool,
    tracker: CompletionTracker<LoanId>,
    /// Whether completions may be queued that belong to no send in flight.
    has_stray_completions: bool,
    loans: BTreeMap<LoanId, Loan>,
    next_id: u64,
    lent_bytes: usize,
    /// The latest loan, while it has bytes that the socket has not accepted yet.
    pending: Option<LoanId>,
    /// An error that occurred after some bytes of a loan were sent; the next call returns it.
    deferred_error: Option<Error>,
    /// Whether the rest of a loan is missing from a stream.
    is_torn: bool,
    returned: VecDeque<Returned>,
    counts: Counts,
    /// Lent bytes that completions report as copied; not those that this library copied.
    kernel_copied_bytes: u64,
    /// Whether zero-copy is disabled once the kernel has only ever copied.
    disables_when_copied: bool,
    /// How often the kernel lacked memory to track a loan (`ENOBUFS`).
    enobufs_count: u64,
    fallbacks: Vec<Fallback>,
    process: u64,
}

impl Lending {
    /// Creates the state for a socket of the process `process` ([`fork::generation`]). A forked
    /// child, which has the socket too, is refused.
    pub fn new(limits: LoanLimits, zerocopy_bytes_min: usize, process: u64) -> Self {
        Self {
            limits,
            zerocopy_bytes_min,
            mode: Mode::Untried,
            claim: None,
            owns_completions: false,
            tracker: CompletionTracker::default(),
            has_stray_completions: true,
            loans: BTreeMap::new(),
            next_id: 0,
            lent_bytes: 0,
            pending: None,
            deferred_error: None,
            is_torn: false,
            returned: VecDeque::new(),
            counts: Counts::default(),
            kernel_copied_bytes: 0,
            disables_when_copied: true,
            enobufs_count: 0,
            fallbacks: Vec::new(),
            process,
        }
    }

    /// Keeps zero-copy enabled although the kernel only ever copies.
    pub fn keep_lending_when_copied(mut self) -> Self {
        self.disables_when_copied = false;
        self
    }

    /// Takes a loan of `buffer` and `more`, and sends as much of it as the socket accepts.
    pub fn lend(
        &mut self,
        socket: &mut impl ZeroCopySocket,
        buffer: Buffer,
        more: Vec<Buffer>,
        segment_bytes: Option<u16>,
    ) -> Result<LoanId, LendError> {
        let loan = Loan::new(buffer, more, segment_bytes);
        if let Err(error) = self.prepare(socket, &loan) {
            return Err(loan.into_error(error));
        }
        let id = LoanId(self.next_id);
        self.next_id += 1;
        self.lent_bytes += loan.bytes;
        self.loans.insert(id, loan);
        self.pending = Some(id);
        match self.send_pending(socket) {
            Ok(()) => Ok(id),
            Err(error) => match self.loans.entry(id) {
                Entry::Occupied(loan) if loan.get().sent_bytes == 0 => {
                    let loan = loan.remove();
                    self.pending = None;
                    self.lent_bytes -= loan.bytes;
                    Err(loan.into_error(error))
                }
                _ => {
                    if !matches!(error, Error::WouldBlock) {
                        self.deferred_error = Some(error);
                        self.abandon_pending(socket);
                    }
                    Ok(id)
                }
            },
        }
    }

    /// Sends the rest of the latest loan. Anything else that a sender sends must wait for that.
    pub fn flush(&mut self, socket: &mut impl ZeroCopySocket) -> Result<(), Error> {
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        if self.is_torn {
            return Err(Error::StreamTorn);
        }
        if self.pending.is_none() {
            return Ok(());
        }
        self.check_process()?;
        let result = self.send_pending(socket);
        if !matches!(result, Ok(()) | Err(Error::WouldBlock)) {
            self.abandon_pending(socket);
        }
        result
    }

    /// Processes the completions that have arrived. Never blocks.
    pub fn process_completions(&mut self, socket: &mut impl ZeroCopySocket) -> Result<(), Error> {
        self.check_process()?;
        self.drain_completions(socket).map(drop)
    }

    /// The next buffer to return to the caller.
    pub fn take_returned(&mut self) -> Option<Returned> {
        self.returned.pop_front()
    }

    /// Handles an error event of the socket: reads all completions, even without a send in flight,
    /// then returns the error of a loan that no call returned yet.
    pub fn on_error_event(&mut self, socket: &mut impl ZeroCopySocket) -> Result<(), Error> {
        self.check_process()?;
        self.has_stray_completions = true;
        self.drain_completions(socket)?;
        match self.deferred_error.take() {
            Some(error) => Err(error),
            None if self.is_torn => Err(Error::StreamTorn),
            None => Ok(()),
        }
    }

    /// Whether no loan is outstanding, and the stream has no gap.
    pub fn is_idle(&self) -> bool {
        self.outstanding() == 0 && self.sends_in_flight() == 0 && !self.is_torn
    }

    /// Whether the next call returns the error of an earlier loan.
    pub fn has_deferred_error(&self) -> bool {
        self.deferred_error.is_some()
    }

    /// Processes completions until there are none; returns whether a send in flight has completed.
    fn drain_completions(&mut self, socket: &mut impl ZeroCopySocket) -> Result<bool, Error> {
        let mut any = false;
        while self.tracker.in_flight() > 0 || (self.has_stray_completions && self.owns_completions)
        {
            self.counts.calls += 1;
            let Some(completion) = socket.next_completion().map_err(failed(Call::ErrorQueue))?
            else {
                self.has_stray_completions = false;
                break;
            };
            any |= self.complete(completion);
        }
        self.disable_if_only_copied();
        Ok(any)
    }

    /// Whether the next loan checks what other code has sent.
    pub fn is_untried(&self) -> bool {
        self.mode == Mode::Untried
    }

    /// The number of outstanding loans: in use, or returned but not reclaimed.
    pub fn outstanding(&self) -> usize {
        self.loans.len() + self.returned.len()
    }

    /// Whether a returned buffer is waiting to be reclaimed.
    pub fn has_returned_buffers(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Bytes of the latest loan that the socket has not accepted yet.
    pub fn unsent_bytes(&self) -> usize {
        let pending = self.pending.and_then(|id| self.loans.get(&id));
        pending.map_or(0, |loan| loan.bytes - loan.sent_bytes)
    }

    /// The bytes that are in flight.
    pub fn bytes_in_flight(&self) -> usize {
        self.tracker.bytes_in_flight()
    }

    /// The number of sends in flight, whose pages the kernel still holds.
    pub fn sends_in_flight(&self) -> usize {
        self.tracker.in_flight()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn enobufs_count(&self) -> u64 {
        self.enobufs_count
    }

    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// Whether the completions of the socket belong to these loans. If so, no other code may send
    /// with `MSG_ZEROCOPY`.
    pub fn owns_completions(&self) -> bool {
        self.owns_completions
    }

    /// Disables zero-copy: all later loans are plain sends.
    pub fn disable_zerocopy(&mut self, reason: String) {
        if self.mode != Mode::Copying {
            self.mode = Mode::Copying;
            self.record_fallback(reason);
        }
    }

    fn record_fallback(&mut self, reason: String) {
        let fallback = Fallback { from: SendMethod::Zerocopy.name(), to: "send", reason };
        fallback::record(&mut self.fallbacks, fallback);
    }

    /// Hands the outstanding loans to the reaper, which keeps `socket` until the kernel has
    /// released them.
    pub fn hand_to_reaper(mut self, socket: impl AsFd + Send + 'static) {
        if self.process != fork::generation() {
            // A forked child's copy: the parent reads the completions, and the parent frees the
            // pages.
            std::mem::forget(self);
            return;
        }
        if (self.pending.take().is_some() || self.is_torn) && socket::is_tcp(&socket) {
            // The end of the stream would hide that it is truncated.
            socket::reset(&socket);
        }
        let _ = self.drain_completions(&mut OsSocket::of(socket.as_fd(), SocketType::STREAM));
        if self.tracker.in_flight() > 0 {
            reaper::keep_until_complete(socket, self);
        }
    }

    /// Fails in a forked child. The child has the buffers and the socket, but each completion can
    /// be read only once.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == fork::generation() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Prepares the socket for a loan, and checks the loan against the limits. On a blocking
    /// socket, waits until other loans have completed.
    fn prepare(&mut self, socket: &mut impl ZeroCopySocket, loan: &Loan) -> Result<(), Error> {
        self.check_process()?;
        if loan.bytes == 0 {
            return Err(Error::LoanEmpty);
        }
        let bytes_max = self.limits.bytes_max;
        if loan.bytes > bytes_max {
            return Err(Error::LoanTooLarge { bytes: loan.bytes, bytes_max });
        }
        if loan.more.len() >= PARTS_MAX && socket.numbers_failed_sends() {
            return Err(Error::InvalidInput("a datagram is sent from at most 1024 buffers"));
        }
        self.flush(socket)?;
        if self.tracker.in_flight() >= IN_FLIGHT_BEFORE_DRAIN {
            self.drain_completions(socket)?;
        }
        if self.mode == Mode::Untried && self.claim.is_none() {
            self.claim = socket.claim();
            if self.claim.is_none() {
                let reason = "another sender lends on the socket";
                self.record_fallback(reason.into());
            }
        }
        if self.mode == Mode::Untried && self.claim.is_some() {
            match socket.enable_zerocopy() {
                Ok(true) => {
                    self.mode = Mode::Zerocopy;
                    self.owns_completions = true;
                }
                Ok(false) => {
                    let reason = "bytes that other code has sent are still in the socket";
                    self.record_fallback(reason.into());
                }
                Err(reason) => self.disable_zerocopy(reason.to_string()),
            }
        }
        loop {
            if self.loans.len() < self.limits.loans_max && self.lent_bytes + loan.bytes <= bytes_max
            {
                return Ok(());
            }
            if !self.drain_completions(socket)?
                && !socket.wait_for_completion().map_err(failed(Call::Poll))?
            {
                return Err(Error::LoanLimit);
            }
        }
    }

    /// Sends the pending loan until all of it is sent or the socket refuses.
    fn send_pending(&mut self, socket: &mut impl ZeroCopySocket) -> Result<(), Error> {
        let mut zerocopy_bytes_max = ZEROCOPY_BYTES_MAX;
        while self.pending.is_some() {
            let zerocopy = self.can_send_zerocopy(socket)?;
            let bytes_max = if zerocopy { zerocopy_bytes_max } else { self.copy_bytes_max() };
            let Err(error) = self.send_piece(socket, zerocopy, bytes_max) else { continue };
            if !zerocopy {
                return Err(failed(Call::Send)(error));
            }
            self.recover(socket, error, &mut zerocopy_bytes_max)?;
        }
        Ok(())
    }

    /// Whether the next piece of the pending loan can be sent from its own pages.
    fn can_send_zerocopy(&mut self, socket: &mut impl ZeroCopySocket) -> Result<bool, Error> {
        if !self.wants_zerocopy() {
            return Ok(false);
        }
        if !self.tracker.accepts_send() || self.tracker.is_next_send_first() {
            // A completion that is queued before the first send would be taken for its own.
            self.has_stray_completions = true;
            self.drain_completions(socket)?;
        }
        // The completions may have shown that the kernel only ever copies.
        Ok(self.wants_zerocopy() && self.tracker.accepts_send())
    }

    /// Whether the pending loan should be sent from its own pages: if its buffers are large enough
    /// on average.
    fn wants_zerocopy(&self) -> bool {
        let pending = self.pending.and_then(|id| self.loans.get(&id));
        self.mode == Mode::Zerocopy
            && pending
                .is_some_and(|loan| loan.bytes / (1 + loan.more.len()) >= self.zerocopy_bytes_min)
    }

    /// The most bytes to copy in the next call. While a completion is awaited that allows zero-copy
    /// sends, they are few.
    fn copy_bytes_max(&self) -> usize {
        if self.wants_zerocopy() { ZEROCOPY_BYTES_MAX } else { COPY_BYTES_MAX }
    }

    /// Goes on after a zero-copy send of the pending loan has failed: with a smaller piece, or with
    /// a copied one.
    fn recover(
        &mut self,
        socket: &mut impl ZeroCopySocket,
        error: io::Error,
        zerocopy_bytes_max: &mut usize,
    ) -> Result<(), Error> {
        let errno = Errno::from_io_error(&error);
        if errno == Some(Errno::AGAIN) {
            return Err(Error::WouldBlock);
        }
        let is_numbered = socket.numbers_failed_sends();
        if is_numbered {
            self.tracker.record_unknown_numbers();
            self.has_stray_completions = true;
        }
        // `optmem_max` or `RLIMIT_MEMLOCK` is used up. If no completion arrives, waiting could last
        // forever.
        let is_enobufs = errno == Some(Errno::NOBUFS);
        if is_enobufs {
            self.enobufs_count += 1;
            if self.drain_completions(socket)? {
                return Ok(());
            }
            if !is_numbered && *zerocopy_bytes_max > ZEROCOPY_BYTES_MIN {
                *zerocopy_bytes_max /= 2;
                return Ok(());
            }
        }
        // An ICMP error of an earlier datagram. The kernel reports it once, so a copied piece would
        // hide it.
        if is_numbered && errno.is_some_and(is_icmp_error) {
            return Err(Error::Failed { call: Call::SendZerocopy, error });
        }
        let error = failed(Call::SendZerocopy)(error);
        // The bytes of a datagram may be too many, or in memory that cannot be lent.
        let may_be_of_bytes = is_numbered && matches!(errno, Some(Errno::MSGSIZE | Errno::FAULT));
        if !is_enobufs && !may_be_of_bytes && !error.is_refusal() {
            return Err(error);
        }
        // A copied piece shows whether zero-copy or the bytes were at fault.
        let bytes_max = self.copy_bytes_max();
        self.send_piece(socket, false, bytes_max).map_err(failed(Call::Send))?;
        if !is_enobufs && error.is_refusal() {
            self.disable_zerocopy(error.to_string());
        }
        Ok(())
    }

    /// Sends the next piece of the pending loan in one call, and records it.
    fn send_piece(
        &mut self,
        socket: &mut impl ZeroCopySocket,
        zerocopy: bool,
        bytes_max: usize,
    ) -> io::Result<()> {
        let Some((id, loan)) = self.pending.and_then(|id| Some((id, self.loans.get_mut(&id)?)))
        else {
            return Ok(());
        };
        let bytes_max = bytes_per_call(loan.segment_bytes, bytes_max);
        let (one, many);
        let parts = if loan.more.is_empty() {
            one = [loan.unsent(bytes_max)?];
            &one[..]
        } else {
            many = loan.unsent_vectored(bytes_max)?;
            &many
        };
        self.counts.calls += 1;
        let bytes = socket.send(parts, loan.segment_bytes, zerocopy)?;
        loan.sent_bytes += bytes;
        self.counts.bytes += bytes as u64;
        if zerocopy && bytes > 0 {
            loan.sends_in_flight += 1;
            self.tracker.record_send(bytes, id);
        } else {
            loan.copied = true;
            self.counts.copied_bytes += bytes as u64;
        }
        if loan.sent_bytes == loan.bytes {
            self.finish_pending();
        }
        Ok(())
    }

    /// Ends the pending loan: nothing more of it is sent.
    fn finish_pending(&mut self) {
        if let Some(id) = self.pending.take() {
            self.return_if_complete(id);
        }
    }

    /// Abandons the rest of the pending loan, which cannot be sent. For datagrams that is harmless;
    /// a stream has a gap.
    fn abandon_pending(&mut self, socket: &impl ZeroCopySocket) {
        self.is_torn |= self.unsent_bytes() > 0 && !socket.numbers_failed_sends();
        self.finish_pending();
    }

    /// Applies a completion; returns whether it completed a send in flight.
    fn complete(&mut self, completion: Completion) -> bool {
        let mut completed = Vec::new();
        self.tracker.complete(completion, |sent| completed.push(sent));
        let is_own = !completed.is_empty();
        for sent in completed {
            if completion.copied {
                self.counts.copied_bytes += sent.bytes as u64;
                self.kernel_copied_bytes += sent.bytes as u64;
            } else {
                self.counts.zero_copied_bytes += sent.bytes as u64;
            }
            if let Some(loan) = self.loans.get_mut(&sent.token) {
                loan.sends_in_flight -= 1;
                loan.copied |= completion.copied;
            }
            self.return_if_complete(sent.token);
        }
        is_own
    }

    /// Returns a loan's buffer if the loan is neither pending nor in flight.
    fn return_if_complete(&mut self, id: LoanId) {
        let Entry::Occupied(loan) = self.loans.entry(id) else { return };
        if self.pending == Some(id) || loan.get().sends_in_flight > 0 {
            return;
        }
        let Loan { buffer, more, bytes, sent_bytes, copied, .. } = loan.remove();
        self.lent_bytes -= bytes;
        let outcome = if copied { LoanOutcome::Copied } else { LoanOutcome::ZeroCopied };
        self.returned.push_back(Returned { id, buffer, more, outcome, sent_bytes });
    }

    /// Disables zero-copy if the kernel only ever copies, which costs more than a plain send.
    fn disable_if_only_copied(&mut self) {
        let all_copied = self.kernel_copied_bytes >= COPIED_BYTES_BEFORE_FALLBACK
            && self.counts.zero_copied_bytes == 0;
        if self.mode == Mode::Zerocopy && self.disables_when_copied && all_copied {
            self.disable_zerocopy("the kernel copied all lent bytes".into());
        }
    }
}

/// The bytes of one call, at most `bytes_max`. Datagrams are sent in whole segments, at most 64 of
/// them and 64 KiB (the limits of Linux 4.18's UDP segmentation offload).
fn bytes_per_call(segment_bytes: Option<u16>, bytes_max: usize) -> usize {
    /// 65,535 less the headers of IPv4 and UDP.
    const DATAGRAM_BYTES_MAX: usize = 65_507;
    const SEGMENTS_MAX: usize = 64;
    match segment_bytes {
        None => bytes_max,
        Some(segment) => {
            let segment = usize::from(segment.max(1));
            segment * (DATAGRAM_BYTES_MAX / segment).clamp(1, SEGMENTS_MAX)
        }
    }
}
