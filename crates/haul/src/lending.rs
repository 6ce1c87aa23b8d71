//! Loans: buffers that the kernel sends from while their owner keeps his hands off.
//!
//! A loan is a move: the buffer goes in and comes out when the kernel has said that it is done with the
//! pages. Everything here is arithmetic over what a [`Wire`] says, so that tests can put any kernel under it.

mod reaper;
#[cfg(test)]
mod simulation;
mod wire;

pub(crate) use wire::SocketWire;

use crate::book::Book;
use crate::buffer::Buffer;
use crate::demotion::Demotion;
use crate::error::{Error, failed};
use crate::loan::{LendError, Limits, LoanId, Outcome, Returned};
use crate::path::{Counts, Path};
use haul_sys::error_queue::Notice;
use rustix::io::Errno;
use std::collections::{VecDeque, vec_deque};
use std::io;
use std::os::fd::AsFd;

/// Bytes that the kernel may copy although they were lent, with none sent as they are, before lending is given
/// up for plain sends.
const COPIED_BYTES_BEFORE_DEMOTION: u64 = 1 << 20;
/// Sends that may be out before the notices are looked at, so that they come pipelined and not one by one.
const OPEN_BEFORE_REAPING: usize = 16;
/// The most that one call is given: TCP counts in 32 bits.
const CALL_BYTES_MAX: usize = 1 << 30;

/// The kernel, as far as loans go.
pub(crate) trait Wire {
    /// Sends a beginning of `bytes`; with `zerocopy` from the caller's pages.
    fn send(&mut self, bytes: &[u8], segment_bytes: Option<u16>, zerocopy: bool) -> io::Result<usize>;
    /// Makes `zerocopy` possible.
    fn enable_zerocopy(&mut self) -> Result<(), Error>;
    /// The next notice, never blocking.
    fn next_notice(&mut self) -> io::Result<Option<Notice>>;
    /// Waits until there may be a notice; returns whether this wire waits at all.
    fn wait_for_notice(&mut self) -> io::Result<bool>;
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
    book: Book<LoanId>,
    /// Loans by number, from the oldest that is inside.
    loans: VecDeque<Option<Loan>>,
    oldest: u64,
    bytes_out: usize,
    /// The youngest loan has bytes that the socket has not taken yet.
    has_pending: bool,
    /// An error that came after some bytes of a loan had gone: told at the next call.
    deferred: Option<Error>,
    returned: VecDeque<Returned>,
    counts: Counts,
    /// How often the kernel had no room to keep account of a loan.
    no_room: u64,
    demotions: Vec<Demotion>,
    process: u32,
}

impl Lending {
    pub fn new(limits: Limits, zerocopy_bytes_min: usize) -> Self {
        Self {
            limits,
            zerocopy_bytes_min,
            mode: Mode::Untried,
            book: Book::default(),
            loans: VecDeque::new(),
            oldest: 0,
            bytes_out: 0,
            has_pending: false,
            deferred: None,
            returned: VecDeque::new(),
            counts: Counts::default(),
            no_room: 0,
            demotions: Vec::new(),
            process: std::process::id(),
        }
    }

    /// Takes a buffer in and sends as much of it as the wire takes.
    pub fn lend(
        &mut self,
        wire: &mut impl Wire,
        buffer: Buffer,
        segment_bytes: Option<u16>,
    ) -> Result<LoanId, LendError> {
        if let Err(error) = self.make_room(wire, &buffer) {
            return Err(LendError { error, buffer });
        }
        let id = LoanId(self.oldest + self.loans.len() as u64);
        self.bytes_out += buffer.len();
        self.loans.push_back(Some(Loan {
            buffer,
            segment_bytes,
            sent_bytes: 0,
            open_sends: 0,
            copied: false,
        }));
        self.has_pending = true;
        match self.push(wire) {
            Ok(()) => Ok(id),
            Err(error) if self.pending_has_begun() => {
                if !matches!(error, Error::WouldBlock) {
                    self.deferred = Some(error);
                    self.finish_pending();
                }
                Ok(id)
            }
            Err(error) => Err(self.give_back_pending(error)),
        }
    }

    /// Sends what is left of the youngest loan. Everything else that a sender sends must wait for that.
    pub fn flush(&mut self, wire: &mut impl Wire) -> Result<(), Error> {
        if let Some(error) = self.deferred.take() {
            return Err(error);
        }
        if !self.has_pending {
            return Ok(());
        }
        self.check_process()?;
        let pushed = self.push(wire);
        if let Err(error) = &pushed
            && !matches!(error, Error::WouldBlock)
        {
            self.finish_pending();
        }
        pushed
    }

    /// Hears what the kernel has to say and hands out what has come back. Never blocks.
    pub fn reclaim(&mut self, wire: &mut impl Wire) -> Result<vec_deque::Drain<'_, Returned>, Error> {
        self.check_process()?;
        self.reap(wire)?;
        Ok(self.returned.drain(..))
    }

    /// Reads notices until there is none; returns whether there was any.
    pub fn reap(&mut self, wire: &mut impl Wire) -> Result<bool, Error> {
        let mut any = false;
        while self.book.open() > 0 {
            self.counts.calls += 1;
            let Some(notice) = wire.next_notice().map_err(failed("recvmsg MSG_ERRQUEUE"))? else { break };
            any = true;
            self.settle(notice);
        }
        self.give_up_copying();
        Ok(any)
    }

    /// How many loans are out: inside, or back and not reclaimed.
    pub fn out(&self) -> usize {
        self.loans.iter().flatten().count() + self.returned.len()
    }

    /// Whether something has come back that was not handed out.
    pub fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Bytes of the youngest loan that the socket has not taken yet.
    pub fn unsent_bytes(&self) -> usize {
        match self.loans.back() {
            Some(Some(loan)) if self.has_pending => loan.buffer.len() - loan.sent_bytes,
            _ => 0,
        }
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

    pub fn demotions(&self) -> &[Demotion] {
        &self.demotions
    }

    /// Whether notices of this socket are this book's. Then nobody else may send with `MSG_ZEROCOPY`.
    pub fn owns_notices(&self) -> bool {
        self.mode == Mode::Zerocopy || self.book.open() > 0
    }

    /// Never lends again: plain sends from now on.
    pub fn give_up(&mut self, reason: String) {
        if self.mode != Mode::Copying {
            self.mode = Mode::Copying;
            self.demotions.push(Demotion { from: Path::Zerocopy.name(), to: "send", reason });
        }
    }

    /// Leaves the loans that are out to the reaper, which keeps `socket` until the kernel has let go of them.
    pub fn leave(mut self, socket: impl AsFd + Send + 'static) {
        if self.process != std::process::id() {
            // A forked child's copy: the notices are the parent's to read, and so are the pages to free.
            std::mem::forget(self);
            return;
        }
        self.has_pending = false;
        let _ = self.reap(&mut SocketWire::of(socket.as_fd()));
        if self.book.open() > 0 {
            reaper::keep(socket, self);
        }
    }

    /// A forked child has the buffers and the socket, but the kernel's notices can be read only once.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Checks a loan against what may be out, waiting for others to come back where the wire waits.
    fn make_room(&mut self, wire: &mut impl Wire, buffer: &Buffer) -> Result<(), Error> {
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
                Ok(()) => self.mode = Mode::Zerocopy,
                Err(reason) => self.give_up(reason.to_string()),
            }
        }
        loop {
            let inside = self.loans.iter().flatten().count();
            if inside < self.limits.loans_max && self.bytes_out + buffer.len() <= bytes_max {
                return Ok(());
            }
            if !self.reap(wire)? && !wire.wait_for_notice().map_err(failed("poll"))? {
                return Err(Error::LoansOut);
            }
        }
    }

    /// Sends the pending loan until it is gone or the wire refuses.
    fn push(&mut self, wire: &mut impl Wire) -> Result<(), Error> {
        while let Some(Some(loan)) = self.loans.back_mut().filter(|_| self.has_pending) {
            let left = &loan.buffer[loan.sent_bytes..];
            let piece = &left[..left.len().min(bytes_per_call(loan.segment_bytes))];
            let zerocopy = self.mode == Mode::Zerocopy && loan.buffer.len() >= self.zerocopy_bytes_min;
            self.counts.calls += 1;
            match wire.send(piece, loan.segment_bytes, zerocopy) {
                Ok(sent) => self.sent(sent, zerocopy),
                // optmem_max or RLIMIT_MEMLOCK is used up. If nothing comes back, waiting could be for ever.
                Err(error) if zerocopy && is(&error, Errno::NOBUFS) => {
                    self.no_room += 1;
                    if !self.reap(wire)? {
                        self.push_plain(wire)?;
                    }
                }
                Err(error) => match failed("send MSG_ZEROCOPY")(error) {
                    refusal if zerocopy && refusal.is_refusal() => {
                        // Whether the flag or the bytes were refused, a plain send will tell.
                        self.push_plain(wire)?;
                        self.give_up(refusal.to_string());
                    }
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    fn push_plain(&mut self, wire: &mut impl Wire) -> Result<(), Error> {
        let Some(Some(loan)) = self.loans.back() else { return Ok(()) };
        let left = &loan.buffer[loan.sent_bytes..];
        let piece = &left[..left.len().min(bytes_per_call(loan.segment_bytes))];
        self.counts.calls += 1;
        let sent = wire.send(piece, loan.segment_bytes, false).map_err(failed("send"))?;
        self.sent(sent, false);
        Ok(())
    }

    fn sent(&mut self, bytes: usize, zerocopy: bool) {
        let id = LoanId(self.oldest + self.loans.len() as u64 - 1);
        let Some(Some(loan)) = self.loans.back_mut() else { return };
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
    }

    /// Nothing more of the youngest loan will be sent.
    fn finish_pending(&mut self) {
        self.has_pending = false;
        self.return_settled(LoanId(self.oldest + self.loans.len() as u64 - 1));
    }

    fn pending_has_begun(&self) -> bool {
        !matches!(self.loans.back(), Some(Some(loan)) if loan.sent_bytes == 0)
    }

    fn give_back_pending(&mut self, error: Error) -> LendError {
        self.has_pending = false;
        let loan = self.loans.pop_back().flatten();
        let buffer = loan.map_or(Buffer::Static(&[]), |loan| loan.buffer);
        self.bytes_out -= buffer.len();
        LendError { error, buffer }
    }

    fn settle(&mut self, notice: Notice) {
        let mut settled = Vec::new();
        self.book.settle(notice, |sent| settled.push(sent));
        for sent in settled {
            let told = if notice.copied {
                &mut self.counts.copied_bytes
            } else {
                &mut self.counts.zero_copied_bytes
            };
            *told += sent.bytes as u64;
            let index = (sent.mark.0 - self.oldest) as usize;
            if let Some(Some(loan)) = self.loans.get_mut(index) {
                loan.open_sends -= 1;
                loan.copied |= notice.copied;
            }
            self.return_settled(sent.mark);
        }
    }

    /// Hands a loan back that nobody needs any more.
    fn return_settled(&mut self, id: LoanId) {
        let index = (id.0 - self.oldest) as usize;
        let is_pending = self.has_pending && index + 1 == self.loans.len();
        let Some(slot) = self.loans.get_mut(index) else { return };
        if is_pending || slot.as_ref().is_none_or(|loan| loan.open_sends > 0) {
            return;
        }
        if let Some(loan) = slot.take() {
            self.bytes_out -= loan.buffer.len();
            self.returned.push_back(Returned {
                id,
                buffer: loan.buffer,
                outcome: if loan.copied { Outcome::Copied } else { Outcome::ZeroCopied },
                sent_bytes: loan.sent_bytes,
            });
        }
        while let Some(None) = self.loans.front() {
            self.loans.pop_front();
            self.oldest += 1;
        }
    }

    /// Lending that only ever copies costs more than a plain send.
    fn give_up_copying(&mut self) {
        let Counts { copied_bytes, zero_copied_bytes, .. } = self.counts;
        let all_copied = copied_bytes >= COPIED_BYTES_BEFORE_DEMOTION && zero_copied_bytes == 0;
        if self.mode == Mode::Zerocopy && all_copied {
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

fn is(error: &io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}
