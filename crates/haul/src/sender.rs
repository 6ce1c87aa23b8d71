//! [`Sender`]: sends bytes, files and loans through a socket, each by the cheapest method that the
//! socket allows.

use crate::buffer::Buffer;
use crate::call::Call;
use crate::error::{Error, SendAllError, failed};
use crate::fallback::Fallback;
use crate::lending::{Lending, OsSocket};
use crate::loan::{LendError, LoanId, LoanLimits, Returned};
use crate::method::{Counts, SendMethod};
use crate::pacing::{Pacing, PacingMonitor};
use crate::selector::MethodSelector;
use crate::settings::{MethodChoice, SendSettings};
use crate::socket;
use crate::source::Source;
use haul_sys::fork;
use haul_sys::retry::{WaitsFor, retry};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};
use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most parts of one call (`UIO_MAXIOV` of `<linux/uio.h>`).
const PARTS_MAX: usize = 1024;
/// How often the error queue is read before an error event that persists is taken for an error of
/// the socket itself. A completion that arrives between two reads is also an error event.
const ERROR_QUEUE_READS: usize = 3;
/// The poll interval of a wait on a connection that has ended.
const HANG_UP_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Sends through a connected socket.
///
/// Data reaches the peer in the order of the calls. On a non-blocking socket each call sends as
/// much as the socket accepts. If a loan was sent only in part, its rest is sent before anything
/// else. Every call does that first; [`Sender::flush`] does only that.
///
/// The sender must be the only user of the socket's error queue and of `MSG_ZEROCOPY`. If other
/// code uses either, the kernel's completions cannot be attributed to their sends. To receive on
/// the same socket, share it as an `Arc`.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut sender = haul::Sender::new(std::net::TcpStream::connect("192.0.2.1:80")?)?;
/// sender.send_all(b"200 bytes follow\n")?;
/// let file = std::fs::File::open("video.mp4")?;
/// sender.send_file_all(&file, 0..200)?;
/// println!("{:?}", sender.report());
/// # Ok(())
/// # }
/// ```
///
/// A lent buffer cannot be accessed, because lending moves it:
///
/// ```compile_fail,E0382
/// # fn lend(mut sender: haul::Sender<std::net::TcpStream>, pool: haul::BufferPool) {
/// let mut buffer = pool.take().unwrap();
/// sender.lend(buffer).unwrap();
/// buffer[0] = 1; // borrow of moved value
/// # }
/// ```
pub struct Sender<S: AsFd> {
    /// `None` only during drop and [`Sender::into_inner`].
    socket: Option<S>,
    kind: SocketType,
    process: u64,
    settings: Arc<SendSettings>,
    /// Created by the first file. Boxed to keep senders small: a server has thousands of
    /// connections that have never sent a file, and often accesses the memory of each.
    selector: Option<Box<MethodSelector>>,
    /// Created by the first loan.
    lending: Option<Box<Lending>>,
    /// Hands the socket and its loans to the reaper. Set by the first loan, so that only a socket
    /// that lends must be `Send` and `'static`.
    hand_to_reaper: Option<fn(S, Box<Lending>)>,
    sent: Counts,
    /// Whether datagrams of other code were in the socket when the sender was created.
    has_foreign_datagrams: bool,
    /// Whether the latest call found the socket's buffer full.
    is_blocked: bool,
    /// Detects pacing from counters that are sampled while files are sent.
    pacing: PacingMonitor,
}

/// The activity of a sender so far.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SendReport {
    /// Sent by [`Sender::send`] and its variants: always copied.
    pub sent: Counts,
    /// Sent by [`Sender::send_file`], for each method that was used, in the order of first use.
    pub files: Vec<(SendMethod, Counts)>,
    /// Sent by [`Sender::lend`] and [`Sender::lend_segments`].
    pub loans: Counts,
    /// Loans that have not been reclaimed.
    pub outstanding_loans: usize,
    /// How often the kernel lacked memory to track a loan (`ENOBUFS`). If no completion freed some,
    /// part of the loan was copied. To avoid it, raise `net.core.optmem_max` or `RLIMIT_MEMLOCK`
    /// (`ulimit -l`).
    pub enobufs_count: u64,
    /// Every fallback: first of files, then of loans.
    pub fallbacks: Vec<Fallback>,
}

/// The events that a sender waits for ([`Sender::wants`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wants {
    /// `POLLOUT`: the latest call returned [`Error::WouldBlock`], or part of a loan is unsent. Then
    /// repeat the call; a caller with nothing to send calls [`Sender::flush`]. A call that sent a
    /// part is repeated at once, until it returns [`Error::WouldBlock`].
    pub write: bool,
    /// `POLLERR`, which is reported whatever was requested: sends are in flight. Then call
    /// [`Sender::on_error_event`] and [`Sender::reclaim`].
    pub completion: bool,
}

impl Wants {
    /// The events to request of `poll` for the sender's socket: `POLLOUT`, `POLLERR`, both or none.
    /// With none, the socket need not be polled. `epoll` has the same bits.
    pub fn poll_events(self) -> u16 {
        let mut events = PollFlags::empty();
        events.set(PollFlags::OUT, self.write);
        events.set(PollFlags::ERR, self.completion);
        events.bits()
    }
}

impl<S: AsFd> Sender<S> {
    /// Creates a sender with [`SendSettings::default`].
    pub fn new(socket: S) -> Result<Self, Error> {
        Self::with_settings(socket, SendSettings::default())
    }

    /// Creates a sender with the given settings.
    ///
    /// The socket may be a stream (TCP, Unix) or a connected datagram socket, which accepts loans
    /// and single messages but no files. Settings in an [`Arc`] are shared with other senders.
    pub fn with_settings(socket: S, settings: impl Into<Arc<SendSettings>>) -> Result<Self, Error> {
        let settings = settings.into();
        let kind = socket::kind(&socket)?;
        if settings.choice == MethodChoice::Method(SendMethod::Floor) {
            return Err(Error::InvalidInput(
                "floor sends other bytes than the file's: it is for measuring",
            ));
        }
        let LoanLimits { loans_max, bytes_max } = settings.limits;
        if loans_max == 0 || bytes_max == 0 {
            return Err(Error::InvalidInput("limits of 0 allow no loan at all"));
        }
        if settings.options.chunk_bytes == 0 {
            return Err(Error::InvalidInput(
                "chunk_bytes is 0: a send method needs at least one byte per call",
            ));
        }
        let has_foreign_datagrams = kind == SocketType::DGRAM
            && haul_sys::sockopt::bytes_to_send(&socket).is_ok_and(|bytes| bytes > 0);
        Ok(Self {
            socket: Some(socket),
            kind,
            process: fork::generation(),
            settings,
            selector: None,
            lending: None,
            hand_to_reaper: None,
            sent: Counts::default(),
            has_foreign_datagrams,
            is_blocked: false,
            pacing: PacingMonitor::default(),
        })
    }

    /// Sends a prefix of `bytes`, which is copied before the call returns; returns how many bytes
    /// the socket accepted.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.send_vectored(&[IoSlice::new(bytes)])
    }

    /// Like [`Sender::send`], from several slices in one call, at most the first 1024.
    pub fn send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, Error> {
        self.send_with(parts, SendFlags::empty())
    }

    /// Like [`Sender::send_vectored`], if more data follows at once (`MSG_MORE`).
    ///
    /// TCP holds a partial segment back and fills it with the next send, so that a header and the
    /// file after it share one packet. If nothing follows within 200 ms, it sends the segment. On a
    /// kTLS socket nothing limits the time: the kernel keeps the record open until the next send.
    ///
    /// A message to a datagram socket is sent at once, because more data would become part of it.
    pub fn send_more(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, Error> {
        let is_stream = self.kind == SocketType::STREAM;
        self.send_with(parts, if is_stream { SendFlags::MORE } else { SendFlags::empty() })
    }

    fn send_with(&mut self, parts: &[IoSlice<'_>], flags: SendFlags) -> Result<usize, Error> {
        self.flush()?;
        self.sent.calls += 1;
        let flags = SendFlags::NOSIGNAL | flags;
        let parts = &parts[..parts.len().min(PARTS_MAX)];
        let result = retry(self.as_fd(), WaitsFor::Send, || {
            // For a single part, `send` is cheaper than `sendmsg`: the kernel reads fewer
            // arguments.
            if let [part] = parts {
                return rustix::net::send(self.as_fd(), part, flags);
            }
            let no_control = &mut rustix::net::SendAncillaryBuffer::default();
            rustix::net::sendmsg(self.as_fd(), parts, no_control, flags)
        })
        .map_err(|errno| failed(Call::Send)(errno.into()));
        self.is_blocked = matches!(result, Err(Error::WouldBlock));
        let sent = result?;
        self.sent.bytes += sent as u64;
        Ok(sent)
    }

    /// Sends all of `bytes`. For blocking sockets; the error reports how many bytes were sent.
    ///
    /// Not for the header of a response: Nagle's algorithm would hold the end of the response back
    /// until the peer acknowledges the header, which takes 40 ms. Use
    /// [`Sender::send_more_all`].
    pub fn send_all(&mut self, bytes: &[u8]) -> Result<(), SendAllError> {
        self.send_all_by(bytes, Self::send)
    }

    /// Like [`Sender::send_all`], if more data follows at once, as [`Sender::send_more`] does: for
    /// a header before a file or a loan.
    pub fn send_more_all(&mut self, bytes: &[u8]) -> Result<(), SendAllError> {
        self.send_all_by(bytes, |sender, bytes| sender.send_more(&[IoSlice::new(bytes)]))
    }

    fn send_all_by(
        &mut self,
        bytes: &[u8],
        send: impl Fn(&mut Self, &[u8]) -> Result<usize, Error>,
    ) -> Result<(), SendAllError> {
        let mut sent = 0;
        while sent < bytes.len() {
            match send(self, &bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) => return Err(SendAllError { error, sent_bytes: sent as u64 }),
            }
        }
        Ok(())
    }

    /// Sends a prefix of a range of a file or of [`crate::Memory`]; returns the bytes that the
    /// socket accepted, 0 only for an empty range. Most methods do not pass the bytes through the
    /// program's memory.
    ///
    /// If the kernel refuses a method, the same bytes are sent by its fallback. A method that
    /// copies although it should not is not used again. To continue, call again with the rest of
    /// the range.
    pub fn send_file<'a>(
        &mut self,
        source: impl Into<Source<'a>>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        self.flush()?;
        self.must_be_stream()?;
        if range.start > range.end {
            return Err(Error::InvalidInput("the range ends before it begins"));
        }
        if range.is_empty() {
            return Ok(0);
        }
        let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
        let selector = self
            .selector
            .get_or_insert_with(|| Box::new(MethodSelector::new(Arc::clone(&self.settings))));
        let lending = self.lending.as_ref();
        let of_loans = lending.map_or(0, |lending| lending.counts().bytes);
        if lending.is_some_and(|lending| lending.owns_completions()) {
            selector.disable_zerocopy();
        }
        if selector.owns_completions() && self.process != fork::generation() {
            return Err(Error::Forked);
        }
        let result =
            selector.send(socket.as_fd(), source.into(), &range, self.sent.bytes + of_loans);
        self.is_blocked = matches!(result, Err(Error::WouldBlock));
        let sent = result?;
        // A socket that is not TCP has no such state, so errors are ignored.
        let _ = self.pacing.record_sent(socket, sent);
        Ok(sent)
    }

    pub(crate) fn must_be_stream(&self) -> Result<(), Error> {
        socket::must_be_stream(self.kind)
    }

    /// Sends the whole range. For blocking sockets; the error reports how many bytes were sent.
    pub fn send_file_all<'a>(
        &mut self,
        source: impl Into<Source<'a>>,
        range: Range<u64>,
    ) -> Result<(), SendAllError> {
        let source = source.into();
        let mut offset = range.start;
        // A reversed range is sent once, for its error.
        while offset != range.end {
            match self.send_file(source, offset..range.end) {
                Ok(count) => offset += count,
                Err(error) => {
                    return Err(SendAllError { error, sent_bytes: offset - range.start });
                }
            }
        }
        Ok(())
    }

    /// Returns the lent buffers that the kernel has released, without waiting, in the order of
    /// their release.
    ///
    /// A program that polls calls this after every loan and before every wait, because some buffers
    /// return without a further event: those whose bytes were copied, and those whose completions
    /// an earlier call has read already. A program that needs a buffer and gets none waits for
    /// `POLLERR` (`EPOLLERR`), which is always reported, whatever events were requested. While
    /// there are [`Sender::unsent_bytes`], it also waits for `POLLOUT`. See the example `serve`.
    pub fn reclaim(&mut self) -> Result<impl Iterator<Item = Returned> + '_, Error> {
        match (&self.socket, &mut self.lending) {
            // `process_completions` includes `check_process`. It is not called twice, because this
            // runs after every loan.
            (Some(socket), Some(lending)) => {
                lending.process_completions(&mut OsSocket::of(socket.as_fd(), self.kind))?;
            }
            _ => self.check_process()?,
        }
        Ok(std::iter::from_fn(|| self.lending.as_mut()?.take_returned()))
    }

    /// Whether [`Sender::reclaim`] would return a buffer without a system call.
    pub fn has_returned_buffers(&self) -> bool {
        self.lending.as_ref().is_some_and(|lending| lending.has_returned_buffers())
    }

    /// Bytes of the latest loan that the socket has not accepted yet. If there are any, wait for
    /// `POLLOUT`, then flush.
    pub fn unsent_bytes(&self) -> usize {
        self.lending.as_ref().map_or(0, |lending| lending.unsent_bytes())
    }

    /// The events to wait for, as the calls so far have left the socket.
    pub fn wants(&self) -> Wants {
        let lending = self.lending.as_deref();
        let of_loans = lending.map_or(0, Lending::sends_in_flight);
        let of_files = self.selector.as_ref().map_or(0, |selector| selector.sends_in_flight());
        let is_failed = lending.is_some_and(Lending::has_deferred_error);
        Wants {
            write: self.is_blocked || self.unsent_bytes() > 0 || is_failed,
            completion: of_loans + of_files > 0,
        }
    }

    /// Handles `POLLERR` (`EPOLLERR`): reads all completions that arrived, then the socket's error.
    /// On a stream socket an error means that the connection failed. On a datagram socket an error
    /// means that an earlier message failed.
    ///
    /// The call clears the event, so that a level-triggered wait does not return at once. A program
    /// that uses the error queue for other purposes must read its entries before this call.
    ///
    /// **The kernel reports the socket's error only once.** After this call returned the error, a
    /// [`crate::Receiver`] on the same socket returns the end of the stream. So the program must
    /// treat the received data as incomplete.
    pub fn on_error_event(&mut self) -> Result<(), Error> {
        self.check_process()?;
        let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
        let mut processed = Ok(());
        for _ in 0..ERROR_QUEUE_READS {
            let of_loans = self.lending.as_mut().map_or(Ok(()), |lending| {
                lending.on_error_event(&mut OsSocket::of(socket.as_fd(), self.kind))
            });
            let of_files = self
                .selector
                .as_mut()
                .map_or(Ok(0), |selector| selector.process_completions(socket.as_fd()));
            processed = processed.and(of_loans).and(of_files.map(drop));
            let events = socket::pending_events(socket)?;
            if !events.contains(PollFlags::ERR) {
                return processed;
            }
            if events.contains(PollFlags::HUP) {
                break;
            }
        }
        // Read in any case: that ends the event.
        let pending = socket::take_error(socket);
        processed.and(pending)
    }

    /// Sends the rest of a loan that was sent only in part. [`Error::WouldBlock`] while some is
    /// left.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.is_blocked = false;
        match (&self.socket, &mut self.lending) {
            (Some(socket), Some(lending)) => {
                lending.flush(&mut OsSocket::of(socket.as_fd(), self.kind))
            }
            _ => Ok(()),
        }
    }

    /// Sends the rest of a loan, then waits at most `timeout` until the kernel has released every
    /// lent page. Returns the number of sends still in flight; 0 means that every buffer can be
    /// reclaimed.
    #[must_use = "loans may still be in flight"]
    pub fn wait_for_completions(&mut self, timeout: Duration) -> Result<usize, Error> {
        self.check_process()?;
        // A timeout that `Instant` cannot represent means no deadline.
        let deadline = Instant::now().checked_add(timeout);
        let mut earlier = None;
        loop {
            let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
            let (mut in_flight, mut unsent_bytes) = (0, 0);
            if let Some(lending) = &mut self.lending {
                let wire = &mut OsSocket::of(socket.as_fd(), self.kind).nonblocking();
                match lending.flush(wire) {
                    // The buffers of a torn stream are still returned.
                    Ok(()) | Err(Error::WouldBlock | Error::StreamTorn) => {}
                    Err(error) => return Err(error),
                }
                lending.process_completions(wire)?;
                unsent_bytes = lending.unsent_bytes();
                in_flight += lending.sends_in_flight() + usize::from(unsent_bytes > 0);
            }
            if let Some(selector) = &mut self.selector {
                in_flight += selector.process_completions(socket.as_fd())?;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if in_flight == 0 || left.is_some_and(|left| left.is_zero()) {
                return Ok(in_flight);
            }
            if earlier == Some((in_flight, unsent_bytes)) {
                // The end of the connection wakes every poll at once; the completions follow.
                std::thread::sleep(HANG_UP_POLL_INTERVAL);
            }
            earlier = Some((in_flight, unsent_bytes));
            // `POLLERR`, which reports a non-empty error queue, is always reported.
            let events = if unsent_bytes > 0 { PollFlags::OUT } else { PollFlags::empty() };
            let mut descriptors = [PollFd::new(socket, events)];
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match rustix::event::poll(&mut descriptors, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(Call::Poll)(errno.into())),
            }
        }
    }

    /// Ends a TCP connection at once with a reset. The kernel drops what it has not sent, and so
    /// releases all loans; a dropped sender instead keeps them until the peer has acknowledged
    /// their bytes. A socket of another kind is only dropped.
    pub fn abort(self) {
        if self.process == fork::generation() && socket::is_tcp(self.socket()) {
            socket::reset(self.socket());
        }
    }

    /// Fails in a forked child. The child has the socket too, but each completion can be read only
    /// once, and it belongs to the parent.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == fork::generation() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Reports the sender's activity so far.
    pub fn report(&self) -> SendReport {
        let selector = self.selector.as_deref();
        let lending = self.lending.as_deref();
        let file_fallbacks = selector.map_or(&[][..], MethodSelector::fallbacks);
        let loan_fallbacks = lending.map_or(&[][..], Lending::fallbacks);
        SendReport {
            sent: self.sent,
            files: selector.map(MethodSelector::counts).unwrap_or_default(),
            loans: lending.map(Lending::counts).unwrap_or_default(),
            outstanding_loans: lending.map_or(0, Lending::outstanding),
            enobufs_count: lending.map_or(0, Lending::enobufs_count),
            fallbacks: file_fallbacks.iter().chain(loan_fallbacks).cloned().collect(),
        }
    }

    /// Why the socket's packets are paced, which costs CPU where the network is not the limit;
    /// `None` if nothing indicates that they are. Pacing that an earlier congestion control has
    /// left on is detected only after [`Sender::send_file`] has sent about 16 MiB.
    pub fn pacing(&self) -> Result<Option<Pacing>, Error> {
        let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
        if !socket::is_tcp(socket) {
            return Ok(None);
        }
        self.pacing.pacing(socket).map_err(failed(Call::Getsockopt))
    }

    /// The send method that would be chosen now for `bytes` bytes of a file or of memory.
    pub fn method_for<'a>(&self, source: impl Into<Source<'a>>, bytes: u64) -> SendMethod {
        let (source, range) = (source.into(), 0..bytes);
        match &self.selector {
            Some(selector) => selector.choose(source, &range),
            None => MethodSelector::new(Arc::clone(&self.settings)).choose(source, &range),
        }
    }

    /// The send method that [`Sender::send_file`] used last.
    pub fn latest_method(&self) -> Option<SendMethod> {
        self.selector.as_ref()?.latest()
    }

    /// The socket.
    pub fn socket(&self) -> &S {
        match &self.socket {
            Some(socket) => socket,
            None => unreachable!("the socket is only taken when the sender is consumed"),
        }
    }

    /// Returns the socket if no loan is outstanding and no send is in flight. Otherwise it returns
    /// the sender unchanged: flush and reclaim first. It does so for ever after
    /// [`Error::StreamTorn`]: the stream cannot be continued, and dropping the sender resets it.
    pub fn into_inner(mut self) -> Result<S, Box<Self>> {
        if let (Some(selector), Some(socket)) = (&mut self.selector, &self.socket) {
            // An error comes again when the socket is used.
            let _ = selector.process_completions(socket.as_fd());
        }
        let of_files = self.selector.as_ref().map_or(0, |selector| selector.sends_in_flight());
        let is_idle =
            self.lending.as_ref().is_none_or(|lending| lending.is_idle()) && of_files == 0;
        match self.socket.take_if(|_| is_idle) {
            Some(socket) => Ok(socket),
            None => Err(Box::new(self)),
        }
    }
}

/// Lending. A sender that is dropped with loans in flight hands its socket to a thread that waits
/// for them, hence the bounds.
impl<S: AsFd + Send + 'static> Sender<S> {
    /// Lends a buffer to the kernel, which sends from the buffer itself and not from a copy. On a
    /// datagram socket the buffer is one message.
    ///
    /// [`Sender::reclaim`] returns the buffer.
    ///
    /// * On a blocking socket, the socket has accepted all of it when the call returns. If the loan
    ///   limits are reached, the call waits until enough loans have completed.
    /// * On a non-blocking socket, later calls send the rest. A sender that is dropped before they
    ///   have resets a TCP connection: otherwise the peer would take a truncated stream for a whole
    ///   one. On another socket the peer sees the end of the stream.
    /// * If the socket, the kernel or a limit does not allow zero-copy, the bytes are copied. The
    ///   buffer is then returned with [`crate::LoanOutcome::Copied`].
    pub fn lend(&mut self, buffer: impl Into<Buffer>) -> Result<LoanId, LendError> {
        self.lend_with(buffer.into(), Vec::new(), None)
    }

    /// Like [`Sender::lend`], for buffers that follow one another, such as the head and the chunks
    /// of a message. They are sent by as few calls as possible, and they return together:
    /// [`Returned::buffer`] is the first one, [`Returned::more`] has the others. On a datagram
    /// socket they are one message.
    ///
    /// Buffers that are shorter on average than [`SendSettings::zerocopy_bytes_min`] are copied.
    pub fn lend_vectored(
        &mut self,
        buffers: impl IntoIterator<Item = impl Into<Buffer>>,
    ) -> Result<LoanId, LendError> {
        let mut buffers = buffers.into_iter().map(Into::into);
        let first = buffers.next().unwrap_or_else(|| Buffer::from(b""));
        self.lend_with(first, buffers.collect(), None)
    }

    /// Lends a buffer that is sent as datagrams of `segment_bytes` each, the last one shorter. The
    /// device or the kernel segments it (UDP segmentation offload, Linux 4.18).
    pub fn lend_segments(
        &mut self,
        buffer: impl Into<Buffer>,
        segment_bytes: u16,
    ) -> Result<LoanId, LendError> {
        let buffer = buffer.into();
        if self.kind != SocketType::DGRAM {
            let error =
                Error::WrongSocket { needed: "a datagram socket", found: "a stream socket" };
            return Err(LendError::new(error, buffer));
        }
        if !socket::is_inet(self.socket()) {
            let error = Error::WrongSocket { needed: "a UDP socket", found: "a Unix socket" };
            return Err(LendError::new(error, buffer));
        }
        if segment_bytes == 0 {
            let error =
                Error::InvalidInput("segment_bytes is 0: a datagram must hold at least a byte");
            return Err(LendError::new(error, buffer));
        }
        self.lend_with(buffer, Vec::new(), Some(segment_bytes))
    }

    fn lend_with(
        &mut self,
        buffer: Buffer,
        more: Vec<Buffer>,
        segment_bytes: Option<u16>,
    ) -> Result<LoanId, LendError> {
        let Some(socket) = &self.socket else {
            return Err(LendError { error: Error::NotASocket, buffer, more });
        };
        self.hand_to_reaper = Some(|socket, lending| lending.hand_to_reaper(socket));
        let lending = self.lending.get_or_insert_with(|| {
            let SendSettings { limits, zerocopy_bytes_min, lend_when_copied, .. } = *self.settings;
            let lending = Lending::new(limits, zerocopy_bytes_min, self.process);
            Box::new(if lend_when_copied { lending.keep_lending_when_copied() } else { lending })
        });
        if self.selector.as_ref().is_some_and(|selector| selector.owns_completions()) {
            let reason = "the socket's zero-copy completions belong to the method zerocopy";
            lending.disable_zerocopy(reason.into());
        }
        let mut wire = OsSocket::of(socket.as_fd(), self.kind);
        if lending.is_untried() {
            let of_files = self.selector.as_ref().map_or(0, |selector| selector.sent_bytes());
            let of_stream = self.sent.bytes + of_files + lending.counts().bytes;
            // The kernel counts the memory of datagrams, not their bytes.
            let of_datagrams = if self.has_foreign_datagrams { 0 } else { u64::MAX };
            let is_stream = self.kind == SocketType::STREAM;
            wire = wire.with_own_bytes(if is_stream { of_stream } else { of_datagrams });
        }
        let result = lending.lend(&mut wire, buffer, more, segment_bytes);
        self.is_blocked = matches!(result, Err(LendError { error: Error::WouldBlock, .. }));
        result
    }
}

impl<S: AsFd> AsFd for Sender<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

impl<S: AsFd> AsRawFd for Sender<S> {
    fn as_raw_fd(&self) -> RawFd {
        self.socket().as_fd().as_raw_fd()
    }
}

impl<S: AsFd> fmt::Debug for Sender<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sender").field("report", &self.report()).finish_non_exhaustive()
    }
}

impl<S: AsFd> Drop for Sender<S> {
    /// Hands loans in flight and their socket to the reaper until the kernel has released the
    /// loans. If part of a loan is unsent, a TCP connection is reset.
    fn drop(&mut self) {
        let (socket, lending) = (self.socket.take(), self.lending.take());
        if let (Some(hand), Some(socket), Some(lending)) = (self.hand_to_reaper, socket, lending) {
            hand(socket, lending);
        }
    }
}

impl<S: AsFd> io::Write for Sender<S> {
    /// Like [`Sender::send`].
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes).map_err(io::Error::from)
    }

    /// Like [`Sender::send_vectored`].
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_vectored(parts).map_err(io::Error::from)
    }

    /// Like [`Sender::flush`].
    fn flush(&mut self) -> io::Result<()> {
        Self::flush(self).map_err(io::Error::from)
    }
}
