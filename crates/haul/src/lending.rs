//! Loans: buffers that the kernel sends from while their owner keeps his hands off.
//!
//! A loan is a move: the buffer goes in and comes out when the kernel has said that it is done with the
//! pages. Everything here is arithmetic over what a [`ZeroCopySocket`] says, so that tests can put any kernel under it.

mod reaper;
#[cfg(test)]
mod simulation;
mod wire;

pub(crate) use wire::OsSocket;

use crate::buffer::Buffer;
use crate::completion::CompletionTracker;
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::loan::{LendError, Limits, LoanId, Outcome, Returned};
use crate::method::{Counts, SendMethod};
use haul_sys::error_queue::Completion;
use rustix::io::Errno;
use rustix::net::SocketType;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::AsFd;

/// Bytes that the kernel may copy although they were lent, with none sent as they are, before lending is given
/// up for plain sends.
const COPIED_BYTES_BEFORE_FALLBACK: u64 = 1 << 20;
/// Sends that may be out before the notices are looked at, so that they come pipelined and not one by one.
const OPEN_BEFORE_REAPING: usize = 16;
/// The most that one call is given: TCP counts in 32 bits.
const CALL_BYTES_MAX: usize = 1 << 30;

/// The kernel, as far as loans go.
pub(crate) trait ZeroCopySocket {
    /// Sends a beginning of `bytes`; with `zerocopy` from the caller's pages.
    fn send(
        &mut self,
        bytes: &[u8],
        segment_bytes: Option<u16>,
        zerocopy: bool,
    ) -> io::Result<usize>;
    /// Makes `zerocopy` possible.
    fn enable_zerocopy(&mut self) -> Result<(), Error>;
    /// The next notice, never blocking.
    fn next_completion(&mut self) -> io::Result<Option<Completion>>;
    /// Waits until there may be a notice; false where this wire does not wait, or not any longer.
    fn wait_for_completion(&mut self) -> io::Result<bool>;
    /// Whether a zero-copy send that fails may have got a number all the same.
    fn numbers_failed_sends(&self) -> bool;
}

/// A buffer inside.
#[derive(Debug)]
struct Loan {
    buffer: Buffer,
    segment_bytes: Option<u16>,
    sent_bytes: usize,
    /// Sends from it that have no notice yet.
    open_sends: usize,
    copied: bool,
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
pub(crate) struct Lending {
    limits: Limits,
    zerocopy_bytes_min: usize,
    mode: Mode,
    /// The kernel counts this socket's zero-copy sends, and the count is this book's for good.
    owns_completions: bool,
    book: CompletionTracker<LoanId>,
    inside: BTreeMap<LoanId, Loan>,
    next: u64,
    bytes_out: usize,
    /// The youngest loan, while it has bytes that the socket has not taken yet.
    pending: Option<LoanId>,
    /// An error that came after some bytes of a loan had gone: told at the next call.
    deferred: Option<Error>,
    /// A stream lacks the rest of a loan.
    is_torn: bool,
    returned: VecDeque<Returned>,
    counts: Counts,
    /// Lent bytes that the kernel's notices say it copied: what was copied here is not among them.
    told_copied_bytes: u64,
    /// Whether lending ends once the kernel has only ever copied.
    gives_up_copying: bool,
    /// How often the kernel had no room to keep account of a loan.
    no_room: u64,
    fallbacks: Vec<Fallback>,
    process: u32,
}

impl Lending {
    /// Lending for a socket of the process `process`: a child that has it too, after a fork, is refused.
    pub fn new(limits: Limits, zerocopy_bytes_min: usize, process: u32) -> Self {
        Self {
            limits,
            zerocopy_bytes_min,
            mode: Mode::Untried,
            owns_completions: false,
            book: CompletionTracker::default(),
            inside: BTreeMap::new(),
            next: 0,
            bytes_out: 0,
            pending: None,
            deferred: None,
            is_torn: false,
            returned: VecDeque::new(),
            counts: Counts::default(),
            told_copied_bytes: 0,
            gives_up_copying: true,
            no_room: 0,
            fallbacks: Vec::new(),
            process,
        }
    }

    /// Goes on lending though the kernel only ever copies.
    pub fn lends_on(mut self) -> Self {
        self.gives_up_copying = false;
        self
    }

    /// Takes a buffer in and sends as much of it as the wire takes.
    pub fn lend(
        &mut self,
        wire: &mut impl ZeroCopySocket,
        buffer: Buffer,
        segment_bytes: Option<u16>,
    ) -> Result<LoanId, LendError> {
        if let Err(error) = self.make_room(wire, &buffer) {
            return Err(LendError { error, buffer });
        }
        let id = LoanId(self.next);
        self.next += 1;
        self.bytes_out += buffer.len();
        self.inside.insert(
            id,
            Loan { buffer, segment_bytes, sent_bytes: 0, open_sends: 0, copied: false },
        );
        self.pending = Some(id);
        match self.push(wire) {
            Ok(()) => Ok(id),
            Err(error) => match self.inside.entry(id) {
                Entry::Occupied(loan) if loan.get().sent_bytes == 0 => {
                    let buffer = loan.remove().buffer;
                    self.pending = None;
                    self.bytes_out -= buffer.len();
                    Err(LendError { error, buffer })
                }
                _ => {
                    if !matches!(error, Error::WouldBlock) {
                        self.deferred = Some(error);
                        self.abandon_pending(wire);
                    }
                    Ok(id)
                }
            },
        }
    }

    /// Sends what is left of the youngest loan. Everything else that a sender sends must wait for that.
    pub fn flush(&mut self, wire: &mut impl ZeroCopySocket) -> Result<(), Error> {
        if let Some(error) = self.deferred.take() {
            return Err(error);
        }
        if self.is_torn {
            return Err(Error::StreamTorn);
        }
        if self.pending.is_none() {
            return Ok(());
        }
        self.check_process()?;
        let pushed = self.push(wire);
        if let Err(error) = &pushed
            && !matches!(error, Error::WouldBlock)
        {
            self.abandon_pending(wire);
        }
        pushed
    }

    /// Hears what the kernel has to say. Never blocks.
    pub fn hear(&mut self, wire: &mut impl ZeroCopySocket) -> Result<(), Error> {
        self.check_process()?;
        self.reap(wire).map(drop)
    }

    /// The next buffer that has come back.
    pub fn take_returned(&mut self) -> Option<Returned> {
        self.returned.pop_front()
    }

    /// Reads notices until there is none; returns whether there was any.
    fn reap(&mut self, wire: &mut impl ZeroCopySocket) -> Result<bool, Error> {
        let mut any = false;
        while self.book.open() > 0 {
            self.counts.calls += 1;
            let Some(notice) = wire.next_completion().map_err(failed("recvmsg MSG_ERRQUEUE"))?
            else {
                break;
            };
            any = true;
            self.settle(notice);
        }
        self.give_up_copying();
        Ok(any)
    }

    /// How many loans are out: inside, or back and not reclaimed.
    pub fn out(&self) -> usize {
        self.inside.len() + self.returned.len()
    }

    /// Whether something has come back that was not handed out.
    pub fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Bytes of the youngest loan that the socket has not taken yet.
    pub fn unsent_bytes(&self) -> usize {
        let pending = self.pending.and_then(|id| self.inside.get(&id));
        pending.map_or(0, |loan| loan.buffer.len() - loan.sent_bytes)
    }

    /// How many sends the kernel still holds pages of.
    pub fn open_sends(&self) -> usize {
        self.book.open()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn no_room(&self) -> u64 {
        self.no_room
    }

    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// Whether notices of this socket are this book's. Then nobody else may send with `MSG_ZEROCOPY`.
    pub fn owns_completions(&self) -> bool {
        self.owns_completions
    }

    /// Never lends again: plain sends from now on.
    pub fn give_up(&mut self, reason: String) {
        if self.mode != Mode::Copying {
            self.mode = Mode::Copying;
            self.fallbacks.push(Fallback { from: SendMethod::Zerocopy.name(), to: "send", reason });
        }
    }

    /// Leaves the loans that are out to the reaper, which keeps `socket` until the kernel has let go of them.
    pub fn leave(mut self, socket: impl AsFd + Send + 'static) {
        if self.process != std::process::id() {
            // A forked child's copy: the notices are the parent's to read, and so are the pages to free.
            std::mem::forget(self);
            return;
        }
        self.pending = None;
        let _ = self.reap(&mut OsSocket::of(socket.as_fd(), SocketType::STREAM));
        if self.book.open() > 0 {
            reaper::keep(socket, self);
        }
    }

    /// A forked child has the buffers and the socket, but the kernel's notices can be read only once.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Checks a loan against what may be out, waiting for others to come back where the wire waits.
    fn make_room(&mut self, wire: &mut impl ZeroCopySocket, buffer: &Buffer) -> Result<(), Error> {
        self.check_process()?;
        if buffer.is_empty() {
            return Err(Error::LoanEmpty);
        }
        let bytes_max = self.limits.bytes_max;
        if buffer.len() > bytes_max {
            return Err(Error::LoanTooLarge { bytes: buffer.len(), bytes_max });
        }
        self.flush(wire)?;
        if self.book.open() >= OPEN_BEFORE_REAPING {
            self.reap(wire)?;
        }
        if self.mode == Mode::Untried {
            match wire.enable_zerocopy() {
                Ok(()) => {
                    self.mode = Mode::Zerocopy;
                    self.owns_completions = true;
                }
                Err(reason) => self.give_up(reason.to_string()),
            }
        }
        loop {
            if self.inside.len() < self.limits.loans_max
                && self.bytes_out + buffer.len() <= bytes_max
            {
                return Ok(());
            }
            if !self.reap(wire)? && !wire.wait_for_completion().map_err(failed("poll"))? {
                return Err(Error::LoansOut);
            }
        }
    }

    /// Sends the pending loan until it is gone or the wire refuses.
    fn push(&mut self, wire: &mut impl ZeroCopySocket) -> Result<(), Error> {
        while let Some(zerocopy) = self.sends_next_from_its_pages() {
            let Err(error) = self.push_piece(wire, zerocopy) else { continue };
            let error = match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => return Err(Error::WouldBlock),
                // optmem_max or RLIMIT_MEMLOCK is used up. If nothing comes back, waiting could be for ever.
                Some(Errno::NOBUFS) if zerocopy && !wire.numbers_failed_sends() => {
                    self.no_room += 1;
                    if !self.reap(wire)? {
                        self.push_piece(wire, false).map_err(failed("send"))?;
                    }
                    continue;
                }
                _ => failed("send MSG_ZEROCOPY")(error),
            };
            if zerocopy && (error.is_refusal() || wire.numbers_failed_sends()) {
                // Whether the flag or the bytes were at fault, a plain send will tell. Where a send that failed may
                // have got a number, no later one could be told from it: those that are out are the last.
                self.give_up(error.to_string());
                continue;
            }
            return Err(error);
        }
        Ok(())
    }

    /// Whether the pending loan goes from its own pages; `None` where nothing is pending.
    fn sends_next_from_its_pages(&self) -> Option<bool> {
        let loan = self.inside.get(&self.pending?)?;
        Some(self.mode == Mode::Zerocopy && loan.buffer.len() >= self.zerocopy_bytes_min)
    }

    /// Sends the next piece of the pending loan in one call, and enters it.
    fn push_piece(&mut self, wire: &mut impl ZeroCopySocket, zerocopy: bool) -> io::Result<()> {
        let Some((id, loan)) = self.pending.and_then(|id| Some((id, self.inside.get_mut(&id)?)))
        else {
            return Ok(());
        };
        let left = &loan.buffer[loan.sent_bytes..];
        let piece = &left[..left.len().min(bytes_per_call(loan.segment_bytes))];
        self.counts.calls += 1;
        let bytes = wire.send(piece, loan.segment_bytes, zerocopy)?;
        loan.sent_bytes += bytes;
        self.counts.bytes += bytes as u64;
        if zerocopy && bytes > 0 {
            loan.open_sends += 1;
            self.book.sent(bytes, id);
        } else {
            loan.copied = true;
            self.counts.copied_bytes += bytes as u64;
        }
        if loan.sent_bytes == loan.buffer.len() {
            self.finish_pending();
        }
        Ok(())
    }

    /// Nothing more of the youngest loan will be sent.
    fn finish_pending(&mut self) {
        if let Some(id) = self.pending.take() {
            self.return_settled(id);
        }
    }

    /// The rest of the youngest loan cannot be sent. Datagrams do not miss it; a stream has a hole.
    fn abandon_pending(&mut self, wire: &impl ZeroCopySocket) {
        self.is_torn |= self.unsent_bytes() > 0 && !wire.numbers_failed_sends();
        self.finish_pending();
    }

    fn settle(&mut self, notice: Completion) {
        let mut settled = Vec::new();
        self.book.settle(notice, |sent| settled.push(sent));
        for sent in settled {
            if notice.copied {
                self.counts.copied_bytes += sent.bytes as u64;
                self.told_copied_bytes += sent.bytes as u64;
            } else {
                self.counts.zero_copied_bytes += sent.bytes as u64;
            }
            if let Some(loan) = self.inside.get_mut(&sent.mark) {
                loan.open_sends -= 1;
                loan.copied |= notice.copied;
            }
            self.return_settled(sent.mark);
        }
    }

    /// Hands a loan back that nobody needs any more.
    fn return_settled(&mut self, id: LoanId) {
        let Entry::Occupied(loan) = self.inside.entry(id) else { return };
        if self.pending == Some(id) || loan.get().open_sends > 0 {
            return;
        }
        let Loan { buffer, sent_bytes, copied, .. } = loan.remove();
        self.bytes_out -= buffer.len();
        let outcome = if copied { Outcome::Copied } else { Outcome::ZeroCopied };
        self.returned.push_back(Returned { id, buffer, outcome, sent_bytes });
    }

    /// Lending that only ever copies costs more than a plain send.
    fn give_up_copying(&mut self) {
        let all_copied = self.told_copied_bytes >= COPIED_BYTES_BEFORE_FALLBACK
            && self.counts.zero_copied_bytes == 0;
        if self.mode == Mode::Zerocopy && self.gives_up_copying && all_copied {
            self.give_up("the kernel copied all that was lent".into());
        }
    }
}

/// How much one call may take: datagrams go in whole segments, at most 64 of them and 64 KiB (the limits of
/// Linux 4.18's UDP segmentation offload).
fn bytes_per_call(segment_bytes: Option<u16>) -> usize {
    /// 65,535 less the headers of IPv4 and UDP.
    const DATAGRAM_BYTES_MAX: usize = 65_507;
    const SEGMENTS_MAX: usize = 64;
    match segment_bytes {
        None => CALL_BYTES_MAX,
        Some(segment) => {
            let segment = usize::from(segment.max(1));
            segment * (DATAGRAM_BYTES_MAX / segment).clamp(1, SEGMENTS_MAX)
        }
    }
}
