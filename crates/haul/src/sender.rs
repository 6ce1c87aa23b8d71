//! A socket to send through: bytes, files and loans, each by the cheapest way that this socket allows.

use crate::buffer::Buffer;
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::lending::{Lending, OsSocket};
use crate::loan::{LendError, Limits, LoanId, Returned};
use crate::method::{Counts, SendMethod};
use crate::pacing::{Pacing, Watch};
use crate::selector::MethodSelector;
use crate::settings::{MethodChoice, SendSettings};
use crate::socket;
use crate::source::Source;
use rustix::net::{SendFlags, SocketType};
use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A send of this much is worth a look whether the socket is paced.
const PACING_BYTES_MIN: u64 = 256 << 10;
/// How often a wait for the kernel's word looks again. A wait is the end of a transfer, not its rhythm.
const SETTLE_INTERVAL: Duration = Duration::from_millis(1);

/// Sends through a connected socket.
///
/// What it does, in the order of the calls, reaches the peer in that order. On a non-blocking socket each call
/// takes what the socket takes; [`Error::WouldBlock`] means that nothing was taken. Where a loan was taken in
/// part, the rest of it goes out before anything else: every call sees to that first, and
/// [`Sender::flush`] does nothing else.
///
/// The socket is the sender's own: if somebody else sends with `MSG_ZEROCOPY` on it, or reads its error queue,
/// the kernel's notices cannot be told apart. Share it as an `Arc` for receiving.
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
/// A lent buffer cannot be touched, because it is gone:
///
/// ```compile_fail,E0382
/// # fn lend(mut sender: haul::Sender<std::net::TcpStream>, pool: haul::Pool) {
/// let mut buffer = pool.take().unwrap();
/// sender.lend(buffer).unwrap();
/// buffer[0] = 1; // borrow of moved value
/// # }
/// ```
pub struct Sender<S: AsFd + Send + 'static> {
    /// `None` only while it is dropped.
    socket: Option<S>,
    kind: SocketType,
    process: u32,
    settings: Arc<SendSettings>,
    /// From the first file on. A server has thousands of connections that have never sent one, and touches each one's memory often.
    files: Option<Box<MethodSelector>>,
    /// From the first loan on.
    lending: Option<Box<Lending>>,
    sent: Counts,
    /// Readings of the socket while files went out.
    pacing: Watch,
}

/// What a sender has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendReport {
    /// By [`Sender::send`] and its kin: always copied.
    pub sent: Counts,
    /// By [`Sender::send_file`], for each path that was used, in the order of their use.
    pub files: Vec<(SendMethod, Counts)>,
    /// By [`Sender::lend`] and its kin.
    pub loans: Counts,
    /// Loans that have not been reclaimed.
    pub loans_out: usize,
    /// How often the kernel had no room to keep account of a loan, so that some of it was copied: raise
    /// `net.core.optmem_max` or `RLIMIT_MEMLOCK` (`ulimit -l`).
    pub no_room: u64,
    /// Every step down, those of files before those of loans.
    pub fallbacks: Vec<Fallback>,
}

impl<S: AsFd + Send + 'static> Sender<S> {
    /// A sender with [`SendSettings::default`].
    pub fn new(socket: S) -> Result<Self, Error> {
        Self::with(socket, SendSettings::default())
    }

    /// A sender that works as told. The socket may be a stream (TCP, Unix) or a connected datagram socket,
    /// which takes loans and single messages but no files. SendSettings in an [`Arc`] are shared with other senders.
    pub fn with(socket: S, settings: impl Into<Arc<SendSettings>>) -> Result<Self, Error> {
        let settings = settings.into();
        let kind = socket::kind(&socket)?;
        if settings.choice == MethodChoice::Method(SendMethod::Floor) {
            return Err(Error::Unsuited(
                "floor sends other bytes than the file's: it is for measuring",
            ));
        }
        let Limits { loans_max, bytes_max } = settings.limits;
        if loans_max == 0 || bytes_max == 0 {
            return Err(Error::Unsuited("limits of 0 allow no loan at all"));
        }
        if settings.options.chunk_bytes == 0 {
            return Err(Error::Unsuited(
                "chunk_bytes is 0: a path must take at least a byte at a time",
            ));
        }
        Ok(Self {
            socket: Some(socket),
            kind,
            process: std::process::id(),
            settings,
            files: None,
            lending: None,
            sent: Counts::default(),
            pacing: Watch::default(),
        })
    }

    /// Sends a beginning of `bytes`, copying it before it returns; returns how much the socket took.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.send_vectored(&[IoSlice::new(bytes)])
    }

    /// The same from several places in one call.
    pub fn send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, Error> {
        self.send_with(parts, SendFlags::empty())
    }

    /// The same, where more follows at once (`MSG_MORE`): the kernel holds a partial packet back and fills it with
    /// what is sent next, so that a head and the file behind it do not go as two. If nothing follows it goes after 200 ms.
    pub fn send_more(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, Error> {
        self.send_with(parts, SendFlags::MORE)
    }

    fn send_with(&mut self, parts: &[IoSlice<'_>], flags: SendFlags) -> Result<usize, Error> {
        self.flush()?;
        self.sent.calls += 1;
        let flags = SendFlags::NOSIGNAL | flags;
        let sent = rustix::io::retry_on_intr(|| {
            // Of one part alone the kernel has less to read.
            if let [part] = parts {
                return rustix::net::send(self.as_fd(), part, flags);
            }
            let nothing = &mut rustix::net::SendAncillaryBuffer::default();
            rustix::net::sendmsg(self.as_fd(), parts, nothing, flags)
        })
        .map_err(|errno| failed("send")(errno.into()))?;
        self.sent.bytes += sent as u64;
        Ok(sent)
    }

    /// Sends all of `bytes`. For blocking sockets: on another, [`Error::WouldBlock`] does not say how far it
    /// came.
    pub fn send_all(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            bytes = &bytes[self.send(bytes)?..];
        }
        Ok(())
    }

    /// Sends the beginning of a range of a file or of [`crate::Memory`], which does not pass through the
    /// program's memory; returns the bytes the socket took, 0 only for an empty range.
    ///
    /// A path that the kernel refuses, or that copies although it should not, is stepped down from, and the
    /// same bytes go through the next one. To go on, call again with what is left of the range.
    pub fn send_file<'a>(
        &mut self,
        source: impl Into<Source<'a>>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        self.flush()?;
        socket::must_be_stream(self.kind)?;
        if range.start > range.end {
            return Err(Error::Unsuited("the range ends before it begins"));
        }
        if range.is_empty() {
            return Ok(0);
        }
        let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
        let files = self
            .files
            .get_or_insert_with(|| Box::new(MethodSelector::new(Arc::clone(&self.settings))));
        if self.lending.as_ref().is_some_and(|lending| lending.owns_completions()) {
            files.leave_completions();
        }
        if files.owns_completions() && self.process != std::process::id() {
            return Err(Error::Forked);
        }
        let sent = files.send(socket.as_fd(), source.into(), &range)?;
        // A look now and then, until it is decided. A socket that is not TCP has no such state.
        if sent >= PACING_BYTES_MIN {
            let _ = self.pacing.look(socket);
        }
        Ok(sent)
    }

    /// Sends the whole range. For blocking sockets: on another, [`Error::WouldBlock`] does not say how far it
    /// came.
    pub fn send_file_all<'a>(
        &mut self,
        source: impl Into<Source<'a>>,
        mut range: Range<u64>,
    ) -> Result<(), Error> {
        let source = source.into();
        if range.start > range.end {
            self.send_file_from(source, range.clone())?;
        }
        while !range.is_empty() {
            range.start += self.send_file_from(source, range.clone())?;
        }
        Ok(())
    }

    fn send_file_from(&mut self, source: Source<'_>, range: Range<u64>) -> Result<u64, Error> {
        self.send_file(source, range)
    }

    /// Lends a buffer to the kernel, which sends it from where it is and not from a copy; on a datagram
    /// socket as one message.
    ///
    /// It comes back from [`Sender::reclaim`]. On a blocking socket all of it has been taken when this returns,
    /// and where too much is out already this waits until some has come back. On a non-blocking one the rest
    /// goes out with later calls. Where the socket, the kernel or a limit does not allow lending, the bytes are
    /// copied, and the buffer comes back with [`crate::Outcome::Copied`].
    pub fn lend(&mut self, buffer: impl Into<Buffer>) -> Result<LoanId, LendError> {
        self.lend_as(buffer.into(), None)
    }

    /// Lends a buffer to be sent as datagrams of `segment_bytes` each, the last one shorter: the device or
    /// the kernel cuts them (UDP segmentation offload, Linux 4.18).
    pub fn lend_segments(
        &mut self,
        buffer: impl Into<Buffer>,
        segment_bytes: u16,
    ) -> Result<LoanId, LendError> {
        let buffer = buffer.into();
        if self.kind != SocketType::DGRAM {
            let error =
                Error::WrongSocket { needed: "a datagram socket", found: "a stream socket" };
            return Err(LendError { error, buffer });
        }
        if !socket::is_inet(self.socket()) {
            let error = Error::WrongSocket { needed: "a UDP socket", found: "a Unix socket" };
            return Err(LendError { error, buffer });
        }
        if segment_bytes == 0 {
            let error = Error::Unsuited("segment_bytes is 0: a datagram must hold at least a byte");
            return Err(LendError { error, buffer });
        }
        self.lend_as(buffer, Some(segment_bytes))
    }

    fn lend_as(&mut self, buffer: Buffer, segment_bytes: Option<u16>) -> Result<LoanId, LendError> {
        let Some(socket) = &self.socket else {
            return Err(LendError { error: Error::NotASocket, buffer });
        };
        let lending = self.lending.get_or_insert_with(|| {
            let SendSettings { limits, zerocopy_bytes_min, lends_on_when_copied, .. } =
                *self.settings;
            let lending = Lending::new(limits, zerocopy_bytes_min, self.process);
            Box::new(if lends_on_when_copied { lending.lends_on() } else { lending })
        });
        if self.files.as_ref().is_some_and(|files| files.owns_completions()) {
            lending.give_up("the socket's zero-copy notices belong to the path zerocopy".into());
        }
        lending.lend(&mut OsSocket::of(socket.as_fd(), self.kind), buffer, segment_bytes)
    }

    /// Takes back the buffers that the kernel is done with, without waiting.
    ///
    /// A program that polls calls this after every lend and before every wait: buffers that were copied are back at
    /// once, and the notices of others may have been read by another call. Then it waits for `POLLERR` (`EPOLLERR`;
    /// always reported, whatever was asked for) if it needs a buffer, and for `POLLOUT` while there are
    /// [`Sender::unsent_bytes`]. See the example `serve`.
    pub fn reclaim(&mut self) -> Result<impl Iterator<Item = Returned> + '_, Error> {
        match (&self.socket, &mut self.lending) {
            // That looks whose process it is by itself, and this is called after every loan.
            (Some(socket), Some(lending)) => {
                lending.hear(&mut OsSocket::of(socket.as_fd(), self.kind))?;
            }
            _ => self.check_process()?,
        }
        Ok(std::iter::from_fn(|| self.lending.as_mut()?.take_returned()))
    }

    /// Whether [`Sender::reclaim`] would hand out a buffer without asking the kernel.
    pub fn has_returned(&self) -> bool {
        self.lending.as_ref().is_some_and(|lending| lending.has_returned())
    }

    /// Bytes of the youngest loan that the socket has not taken yet: wait for `POLLOUT`, then flush.
    pub fn unsent_bytes(&self) -> usize {
        self.lending.as_ref().map_or(0, |lending| lending.unsent_bytes())
    }

    /// Sends what is left of a loan that was taken in part. [`Error::WouldBlock`] while some is left.
    pub fn flush(&mut self) -> Result<(), Error> {
        match (&self.socket, &mut self.lending) {
            (Some(socket), Some(lending)) => {
                lending.flush(&mut OsSocket::of(socket.as_fd(), self.kind))
            }
            _ => Ok(()),
        }
    }

    /// Sends what is left of a loan and waits until the kernel holds none of the pages it was lent, at most
    /// `timeout`; returns how many sends are still out, 0 when every buffer is there to be reclaimed.
    #[must_use = "loans may still be out"]
    pub fn settle(&mut self, timeout: Duration) -> Result<usize, Error> {
        self.check_process()?;
        // A timeout beyond what the clock can say is none.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            match self.flush() {
                // Of a stream that is torn the buffers still come back.
                Ok(()) | Err(Error::WouldBlock | Error::StreamTorn) => {}
                Err(error) => return Err(error),
            }
            let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
            let mut held = 0;
            if let Some(lending) = &mut self.lending {
                lending.hear(&mut OsSocket::of(socket.as_fd(), self.kind))?;
                held += lending.open_sends() + usize::from(lending.unsent_bytes() > 0);
            }
            if let Some(files) = &mut self.files {
                held += files.settle(socket.as_fd())?;
            }
            if held == 0 || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(held);
            }
            std::thread::sleep(SETTLE_INTERVAL);
        }
    }

    /// A forked child has the socket, too, but the kernel's notices can be read only once: they are the parent's.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    /// What has been done so far.
    pub fn report(&self) -> SendReport {
        let files = self.files.as_deref();
        let lending = self.lending.as_deref();
        let of_files = files.map_or(&[][..], MethodSelector::fallbacks);
        let of_loans = lending.map_or(&[][..], Lending::fallbacks);
        SendReport {
            sent: self.sent,
            files: files.map(MethodSelector::counts).unwrap_or_default(),
            loans: lending.map(Lending::counts).unwrap_or_default(),
            loans_out: lending.map_or(0, Lending::out),
            no_room: lending.map_or(0, Lending::no_room),
            fallbacks: of_files.iter().chain(of_loans).cloned().collect(),
        }
    }

    /// Why the socket's packets are paced, which costs CPU where the network is not the limit; `None` where nothing shows
    /// that they are. What an earlier congestion control has left on shows once some large files were sent.
    pub fn pacing(&self) -> Result<Option<Pacing>, Error> {
        let Some(socket) = &self.socket else { return Err(Error::NotASocket) };
        if !socket::is_tcp(socket) {
            return Ok(None);
        }
        self.pacing.pacing(socket).map_err(failed("getsockopt"))
    }

    /// The path that so much of a file, or of memory, would take now.
    pub fn path_for<'a>(&self, source: impl Into<Source<'a>>, bytes: u64) -> SendMethod {
        let (source, range) = (source.into(), 0..bytes);
        match &self.files {
            Some(files) => files.pick(source, &range),
            None => MethodSelector::new(Arc::clone(&self.settings)).pick(source, &range),
        }
    }

    /// The path that [`Sender::send_file`] last took.
    pub fn latest_path(&self) -> Option<SendMethod> {
        self.files.as_ref()?.latest()
    }

    /// The socket.
    pub fn socket(&self) -> &S {
        match &self.socket {
            Some(socket) => socket,
            None => unreachable!("the socket leaves only with the sender"),
        }
    }

    /// The socket, when nothing is out any more; else the sender as it is: reclaim and flush first.
    pub fn into_inner(mut self) -> Result<S, Box<Self>> {
        let is_idle = self
            .lending
            .as_ref()
            .is_none_or(|lending| lending.out() == 0 && lending.open_sends() == 0);
        match self.socket.take_if(|_| is_idle) {
            Some(socket) => Ok(socket),
            None => Err(Box::new(self)),
        }
    }
}

impl<S: AsFd + Send + 'static> AsFd for Sender<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

impl<S: AsFd + Send + 'static> fmt::Debug for Sender<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sender").field("report", &self.report()).finish_non_exhaustive()
    }
}

impl<S: AsFd + Send + 'static> Drop for Sender<S> {
    /// Loans that are out stay with their socket until the kernel has let go of them. Bytes of a loan that
    /// the socket has not taken yet are not sent any more.
    fn drop(&mut self) {
        if let (Some(socket), Some(lending)) = (self.socket.take(), self.lending.take()) {
            lending.leave(socket);
        }
    }
}

impl<S: AsFd + Send + 'static> io::Write for Sender<S> {
    /// As [`Sender::send`].
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes).map_err(io::Error::from)
    }

    /// As [`Sender::flush`].
    fn flush(&mut self) -> io::Result<()> {
        Self::flush(self).map_err(io::Error::from)
    }
}
