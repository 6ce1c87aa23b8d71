//! [`Receiver`]: receives from a stream socket by mapping its pages where that works and is
//! cheaper, and by reading otherwise.

use crate::call::Call;
use crate::error::{Error, Refusal, failed};
use crate::fallback::{self, Fallback};
use crate::method::Counts;
use crate::pool::{BufferPool, PooledBuffer};
use crate::socket;
use haul_sys::receive_window::{ReceiveOutcome, ReceiveWindow};
use haul_sys::region::page_bytes;
use haul_sys::retry::{WaitsFor, retry};
use haul_sys::sockopt;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::Timeout;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

mod into_file;
mod trial;

use into_file::IntoFile;
use trial::{MappingTrial, Verdict};

/// Receives from a connected stream socket.
///
/// On a non-blocking socket, [`Error::WouldBlock`] means that nothing has arrived. In any mixture
/// of calls, each byte is returned once and in order.
///
/// Pages can be mapped (`TCP_ZEROCOPY_RECEIVE`, Linux 4.18) if each holds payload from its first
/// byte to its last. That needs segments of a multiple of the page size, which the device or the
/// stack puts into separate pages. Everything else is read into a buffer. Mapping costs more than
/// it saves where few pages can be mapped, and on some machines always. So a receiver tries both
/// methods at the beginning and keeps the cheaper one.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut receiver = haul::Receiver::new(std::net::TcpStream::connect("192.0.2.1:80")?)?;
/// let mut sum = 0u64;
/// while let Some(chunk) = receiver.receive()? {
///     sum += chunk.bytes().iter().map(|&byte| u64::from(byte)).sum::<u64>();
/// }
/// # Ok(())
/// # }
/// ```
///
/// A chunk cannot outlive the next call, which releases its pages:
///
/// ```compile_fail,E0499
/// # fn keep(mut receiver: haul::Receiver<std::net::TcpStream>) -> Result<(), haul::Error> {
/// let one = receiver.receive()?;
/// let two = receiver.receive()?; // a second borrow while the first is in use
/// drop(one);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Receiver<S: AsFd> {
    guard: LowWaterGuard<S>,
    /// Whether TCP's own calls apply: no upper-layer protocol (kTLS) changes the bytes.
    is_plain_tcp: bool,
    /// Whether TCP itself was seen to receive, and not a BPF program in its place (sockmap).
    /// Mapping the pages of such a socket crashes the kernel (seen with Linux 6.18).
    has_tcp_received: bool,
    settings: ReceiveSettings,
    window: Option<ReceiveWindow>,
    trial: MappingTrial,
    /// Bytes that, as the kernel reported, must be read before the next page can be mapped.
    must_read: usize,
    pool: BufferPool,
    is_pool_shared: bool,
    /// Kept between calls only if the pool is not shared.
    buffer: Option<PooledBuffer>,
    into_file: IntoFile,
    /// Bytes that are still to come, as announced by [`Receiver::expect`].
    expected: u64,
    report: ReceiveReport,
}

/// A socket, and the low-water mark that this receiver has set on it.
#[derive(Debug)]
struct LowWaterGuard<S: AsFd> {
    /// `None` only during drop.
    socket: Option<S>,
    low_water: usize,
    /// The mark that the program had set; `None` before the first change.
    earlier_low_water: Option<usize>,
}

impl<S: AsFd> LowWaterGuard<S> {
    fn socket(&self) -> &S {
        match &self.socket {
            Some(socket) => socket,
            None => unreachable!("the socket is only taken when the guard is dropped"),
        }
    }

    /// Restores the low-water mark: the next reader of the socket has announced nothing.
    fn restore(&mut self) {
        let earlier = self.earlier_low_water.take().filter(|&earlier| earlier != self.low_water);
        if let (Some(earlier), Some(socket)) = (earlier, &self.socket) {
            let _ = sockopt::set_receive_low_water(socket, earlier);
        }
    }
}

impl<S: AsFd> Drop for LowWaterGuard<S> {
    fn drop(&mut self) {
        self.restore();
    }
}

/// Whether a receiver maps pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mapping {
    /// If it works and costs less than reading, which is measured over the first megabytes. Not on
    /// a connection over the loopback device, whose peer shares this machine's memory.
    Measured,
    /// Wherever it works, whatever it costs.
    Always,
    /// Never.
    Never,
}

/// Settings of a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReceiveSettings {
    /// Whether to map pages.
    pub mapping: Mapping,
    /// The most bytes that are mapped at a time.
    pub window_bytes: usize,
    /// The most bytes that are read at a time.
    pub buffer_bytes: usize,
}

impl Default for ReceiveSettings {
    /// A window of 512 KiB, the size from which a call's own cost is below a percent, and a buffer
    /// of 128 KiB, which stays in a second-level cache.
    fn default() -> Self {
        Self { mapping: Mapping::Measured, window_bytes: 512 << 10, buffer_bytes: 128 << 10 }
    }
}

impl ReceiveSettings {
    /// Sets whether to map pages.
    #[must_use]
    pub fn with_mapping(mut self, mapping: Mapping) -> Self {
        self.mapping = mapping;
        self
    }

    /// Sets the most bytes that are mapped at a time.
    #[must_use]
    pub fn with_window_bytes(mut self, window_bytes: usize) -> Self {
        self.window_bytes = window_bytes;
        self
    }

    /// Sets the most bytes that are read at a time.
    #[must_use]
    pub fn with_buffer_bytes(mut self, buffer_bytes: usize) -> Self {
        self.buffer_bytes = buffer_bytes;
        self
    }
}

/// Received bytes, at least one. Dereferences to them.
///
/// **Mapped bytes may change while they are read if the peer runs on this machine** and is hostile:
/// the pages are those that the peer sent, and it may still have them. So a program that checks
/// bytes before it uses them copies them first, or sets [`Mapping::Never`]. A peer on another
/// machine cannot do that.
///
/// A receiver that shares its pool returns the chunk's buffer to the pool when the chunk is
/// dropped.
#[derive(Debug)]
pub struct Chunk<'a>(Place<'a>);

/// Where the bytes of a chunk are.
#[derive(Debug)]
enum Place<'a> {
    Mapped(&'a [u8]),
    /// In the receiver's own buffer.
    Copied(&'a [u8]),
    /// In a buffer of a shared pool.
    Pooled(PooledBuffer),
}

impl std::ops::Deref for Chunk<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl Chunk<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Place::Mapped(bytes) | Place::Copied(bytes) => bytes,
            Place::Pooled(buffer) => buffer,
        }
    }

    /// Whether the bytes are in the pages into which the network stack put them. Otherwise they
    /// were copied into a buffer.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Place::Mapped(_))
    }

    /// Returns the pool's buffer that holds the bytes, to keep or to lend; the chunk unchanged if
    /// they are mapped, or if the receiver does not share a pool.
    pub fn into_buffer(self) -> Result<PooledBuffer, Self> {
        match self.0 {
            Place::Pooled(buffer) => Ok(buffer),
            place => Err(Self(place)),
        }
    }
}

/// The activity of a receiver so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReceiveReport {
    /// Received by mapping. Calls that found nothing to map are also counted.
    pub mapped: Counts,
    /// Received by reading.
    pub read: Counts,
    /// Received into files.
    pub into_file: Counts,
    /// Discarded.
    pub discarded: Counts,
    /// Every fallback, in order.
    pub fallbacks: Vec<Fallback>,
}

/// The result of [`Receiver::receive_next`]: the place of the received bytes.
enum Ready {
    Mapped,
    Copied(usize),
    Ended,
}

impl<S: AsFd> Receiver<S> {
    /// Creates a receiver with [`ReceiveSettings::default`].
    pub fn new(socket: S) -> Result<Self, Error> {
        Self::with_settings(socket, ReceiveSettings::default())
    }

    /// Creates a receiver with the given settings. The socket must be a stream (TCP, Unix).
    pub fn with_settings(socket: S, settings: ReceiveSettings) -> Result<Self, Error> {
        if settings.buffer_bytes == 0 {
            return Err(Error::InvalidInput("buffer_bytes must be at least 1"));
        }
        let own = BufferPool::new(settings.buffer_bytes, 1)?;
        Ok(Self { is_pool_shared: false, ..Self::with_pool(socket, settings, own)? })
    }

    /// Creates a receiver that takes its buffers from a pool, with other receivers. Only a
    /// [`Chunk`] holds one, and a call on a blocking socket that waits. So an idle non-blocking
    /// connection holds none. `settings.buffer_bytes` does not apply.
    ///
    /// If all buffers are in use, a call that reads fails with [`Error::PoolEmpty`] and takes
    /// nothing from the socket.
    pub fn with_pool(
        socket: S,
        mut settings: ReceiveSettings,
        pool: BufferPool,
    ) -> Result<Self, Error> {
        socket::must_be_stream(socket::kind(&socket)?)?;
        if settings.window_bytes < page_bytes() {
            return Err(Error::InvalidInput("window_bytes must be at least a page"));
        }
        settings.buffer_bytes = pool.buffer_bytes();
        let is_plain_tcp = socket::receives_plain_tcp(&socket);
        Ok(Self {
            guard: LowWaterGuard { socket: Some(socket), low_water: 1, earlier_low_water: None },
            is_plain_tcp,
            has_tcp_received: false,
            settings,
            window: None,
            trial: MappingTrial::new(settings.mapping),
            must_read: 0,
            pool,
            is_pool_shared: true,
            buffer: None,
            into_file: IntoFile::default(),
            expected: 0,
            report: ReceiveReport::default(),
        })
    }

    /// Announces that at least `bytes` more are certain to come, as a length in a header does.
    ///
    /// It does not limit what a call returns: see [`Receiver::receive_up_to`].
    ///
    /// The socket then becomes readable only for larger pieces (`SO_RCVLOWAT`), never larger than
    /// this. Without it, any byte makes the socket readable: a receiver cannot predict that more
    /// will follow, and might wait forever.
    pub fn expect(&mut self, bytes: u64) {
        self.expected = bytes;
        self.adjust_low_water();
    }

    /// Receives the next bytes, as many as have arrived and a call can take; `None` at the end of
    /// the stream.
    pub fn receive(&mut self) -> Result<Option<Chunk<'_>>, Error> {
        self.receive_up_to(usize::MAX)
    }

    /// Receives the next bytes, at most `limit` of them (and at least one, whatever the limit). For
    /// messages of known length, so that no byte of the next message is returned.
    pub fn receive_up_to(&mut self, limit: usize) -> Result<Option<Chunk<'_>>, Error> {
        let ready = self.receive_next(limit.max(1));
        let shared_buffer = if self.is_pool_shared { self.buffer.take() } else { None };
        let place = match (ready?, shared_buffer) {
            (Ready::Ended, _) => None,
            (Ready::Mapped, _) => self.window.as_ref().map(|window| Place::Mapped(window.bytes())),
            (Ready::Copied(count), Some(mut buffer)) => {
                buffer.keep_scratch(count);
                Some(Place::Pooled(buffer))
            }
            (Ready::Copied(count), None) => {
                self.buffer.as_ref().map(|buffer| Place::Copied(buffer.scratch_part(count)))
            }
        };
        Ok(place.map(Chunk))
    }

    /// Reads into the caller's buffer; returns the number of bytes, 0 at the end of the stream (and
    /// for an empty buffer).
    pub fn receive_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let count = match self.into_file.take_held(buffer)? {
            0 => {
                self.report.read.calls += 1;
                read(self.guard.socket(), buffer)?
            }
            held => held,
        };
        self.record_received(count, |report| &mut report.read);
        Ok(count)
    }

    /// Receives into a range of a file, through a pipe and not through the program's memory.
    /// Returns the number of bytes, 0 at the end of the stream and for an empty range.
    ///
    /// The file must be open for writing, have offsets, and not be open with `O_APPEND`, which
    /// ignores them. If it cannot be spliced into, the bytes are read and written. Bytes that
    /// arrived and could not be written (no space) are not lost: the call returns the error, or the
    /// number of bytes that were written, and the next call of any kind begins with the others
    /// ([`Receiver::held_bytes`]).
    ///
    /// The bytes pass through a pipe, two descriptors. On a non-blocking socket a receiver holds
    /// one only during the call; the process keeps at most 16 idle ones for all receivers.
    pub fn receive_into_file(&mut self, file: impl AsFd, range: Range<u64>) -> Result<u64, Error> {
        if range.start > range.end {
            return Err(Error::InvalidInput("the range ends before it begins"));
        }
        if range.is_empty() {
            return Ok(0);
        }
        let Self { into_file, guard, report, .. } = self;
        let moved =
            into_file.receive(guard.socket().as_fd(), file.as_fd(), &range, &mut report.into_file);
        let count = match moved {
            Err(reason) if reason.is_refusal() => {
                if reason.refusal() == Some(Refusal::Lasting) {
                    self.into_file.disable();
                }
                let reason = reason.to_string();
                let fallback = Fallback { from: "splice-to-file", to: "read", reason };
                fallback::record(&mut self.report.fallbacks, fallback);
                self.copy_into_file(file, &range)?
            }
            Ok(None) => self.copy_into_file(file, &range)?,
            Ok(Some(count)) => count,
            Err(error) => return Err(error),
        };
        self.record_consumed(count);
        Ok(count)
    }

    /// Bytes that have left the socket and that a file has not accepted. The next call of any kind
    /// begins with them. While there are any, call again without waiting for the socket: it may
    /// never become readable.
    pub fn held_bytes(&self) -> usize {
        self.into_file.held_bytes()
    }

    /// Discards up to `bytes` of the received data, untouched where the kernel can do that
    /// (`MSG_TRUNC` on TCP). Returns the number of bytes, 0 at the end of the stream and if `bytes`
    /// is 0.
    pub fn discard(&mut self, bytes: u64) -> Result<u64, Error> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        if len == 0 {
            return Ok(0);
        }
        let discarded = match self.discard_in_kernel(len)? {
            None => self.read_into_buffer(len, |report| &mut report.discarded),
            Some(count) => Ok(count),
        };
        self.return_buffer();
        let count = discarded?;
        self.record_received(count, |report| &mut report.discarded);
        Ok(count as u64)
    }

    /// Gives back the receiver's window, and its buffer if it does not share a pool. A later call
    /// takes them again. For connections that are idle for long.
    pub fn release(&mut self) {
        self.buffer = None;
        self.window = None;
        if !self.is_pool_shared {
            self.pool.shrink();
        }
    }

    /// The activity so far.
    pub fn report(&self) -> &ReceiveReport {
        &self.report
    }

    /// The socket.
    pub fn socket(&self) -> &S {
        self.guard.socket()
    }

    /// Returns the socket, with the low-water mark that it had. The receiver unchanged while it
    /// holds bytes ([`Receiver::held_bytes`]).
    pub fn into_inner(mut self) -> Result<S, Box<Self>> {
        if self.held_bytes() == 0 {
            self.guard.restore();
            if let Some(socket) = self.guard.socket.take() {
                return Ok(socket);
            }
        }
        Err(Box::new(self))
    }

    fn receive_next(&mut self, at_most: usize) -> Result<Ready, Error> {
        // An urgent byte stops the mapping, although the kernel reports that data can be received:
        // `recv` skips it.
        if self.trial.only_reads() {
            // No chunk borrows the window any more. It is unmapped, because the network stack lacks
            // its pages.
            self.window = None;
        }
        let (mut has_waited, mut must_recv) = (false, false);
        loop {
            let must_read = self.into_file.held_bytes() > 0
                || self.must_read > 0
                || at_most < page_bytes()
                || must_recv;
            if must_read || !self.trial.maps() {
                let limit = if self.must_read > 0 { self.must_read.min(at_most) } else { at_most };
                let started = self.trial.start_clock();
                let count = self.read_into_buffer(limit, |report| &mut report.read)?;
                self.record_received(count, |report| &mut report.read);
                self.record_trial(started, 0, count);
                return Ok(if count == 0 { Ready::Ended } else { Ready::Copied(count) });
            }
            if self.window.is_none() {
                self.open_window();
            }
            if !self.has_tcp_received {
                match self.find_tcp_bytes()? {
                    Some(is_open) => must_recv = !is_open,
                    None if has_waited || self.window.is_none() => must_recv = has_waited,
                    None if !wait(self.guard.socket(), self.guard.low_water)? => {
                        return Ok(Ready::Ended);
                    }
                    None => has_waited = true,
                }
                continue;
            }
            let Some(window) = &mut self.window else { continue };
            let started = self.trial.start_clock();
            self.report.mapped.calls += 1;
            match window.receive(self.guard.socket(), self.settings.window_bytes.min(at_most)) {
                Ok(ReceiveOutcome::Mapped(count)) => {
                    self.record_received(count, |report| &mut report.mapped);
                    self.record_trial(started, count, 0);
                    return Ok(Ready::Mapped);
                }
                Ok(ReceiveOutcome::MustRead(count)) => {
                    self.must_read = count;
                    self.record_trial(started, 0, 0);
                }
                // Possibly an urgent byte before the end, which the mapping cannot pass: `recv`
                // decides.
                Ok(ReceiveOutcome::Ended) => must_recv = true,
                Ok(ReceiveOutcome::Nothing) => {
                    if has_waited {
                        must_recv = true;
                    } else if !wait(self.guard.socket(), self.guard.low_water)? {
                        return Ok(Ready::Ended);
                    }
                    has_waited = true;
                }
                Err(error) => match failed(Call::GetTcpZerocopyReceive)(error) {
                    reason if reason.is_refusal() => self.stop_mapping(reason.to_string()),
                    error => return Err(error),
                },
            }
        }
    }

    /// Finds out whether TCP itself receives: true if it has received bytes, false at the end of
    /// the stream, `None` if nothing has arrived. Closes the window if it does not.
    fn find_tcp_bytes(&mut self) -> Result<Option<bool>, Error> {
        if self.window.is_none() {
            return Ok(None);
        }
        match sockopt::peek_tcp(self.guard.socket()) {
            Ok(has_bytes) => {
                self.has_tcp_received = has_bytes;
                Ok(Some(has_bytes))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                self.is_plain_tcp = false;
                self.window = None;
                self.stop_mapping("a BPF program receives in TCP's place (sockmap)".into());
                Ok(None)
            }
            Err(error) => Err(failed(Call::RecvPeek)(error)),
        }
    }

    /// Discards up to `len` bytes in the kernel; `None` if they must be read instead.
    fn discard_in_kernel(&mut self, len: usize) -> Result<Option<usize>, Error> {
        if !self.is_plain_tcp || self.into_file.held_bytes() > 0 {
            return Ok(None);
        }
        self.report.discarded.calls += 1;
        match sockopt::discard(self.guard.socket(), len.min(1 << 30)) {
            Ok(count) => Ok(Some(count)),
            // A sockmap receives in TCP's place and ignores the flag; it has taken nothing.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                self.is_plain_tcp = false;
                Ok(None)
            }
            Err(error) => Err(failed(Call::RecvTrunc)(error)),
        }
    }

    /// Reads at most `limit` bytes into the buffer; 0 at the end of the stream.
    fn read_into_buffer(
        &mut self,
        limit: usize,
        counts: fn(&mut ReceiveReport) -> &mut Counts,
    ) -> Result<usize, Error> {
        let buffer = match &mut self.buffer {
            Some(buffer) => buffer,
            none => none.insert(self.pool.take()?),
        };
        let len = buffer.capacity().min(limit);
        let room = &mut buffer.scratch()[..len];
        match self.into_file.take_held(room)? {
            0 => {
                counts(&mut self.report).calls += 1;
                read(self.guard.socket(), room)
            }
            held => Ok(held),
        }
    }

    fn copy_into_file(&mut self, file: impl AsFd, range: &Range<u64>) -> Result<u64, Error> {
        let limit = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let count = self.read_into_buffer(limit, |report| &mut report.into_file);
        let written = match (&self.buffer, count) {
            (Some(buffer), Ok(count)) => {
                let bytes = buffer.scratch_part(count);
                self.into_file.write(file.as_fd(), range.start, bytes, &mut self.report.into_file)
            }
            (_, Err(error)) => Err(error),
            (None, Ok(_)) => Ok(0),
        };
        self.return_buffer();
        written
    }

    /// Returns the buffer to a pool that others also use.
    fn return_buffer(&mut self) {
        if self.is_pool_shared {
            self.buffer = None;
        }
    }

    fn record_received(&mut self, count: usize, counts: fn(&mut ReceiveReport) -> &mut Counts) {
        counts(&mut self.report).bytes += count as u64;
        self.record_consumed(count as u64);
    }

    /// Records that bytes have left the socket.
    fn record_consumed(&mut self, count: u64) {
        self.must_read = self.must_read.saturating_sub(count as usize);
        if self.expected > 0 {
            self.expected = self.expected.saturating_sub(count);
            self.adjust_low_water();
        }
    }

    /// Sets the low-water mark to suit the size of a call, but never to more bytes than are certain
    /// to come. It only saves wake-ups, so a refusal changes nothing.
    fn adjust_low_water(&mut self) {
        let call_bytes_max =
            if self.trial.maps() { self.settings.window_bytes } else { self.settings.buffer_bytes };
        // An eighth of it: the peer should be sending while this side works. A sender that waits
        // for room also splits its pages where the room ends. Split pages cannot be mapped: at a
        // half, 93 to 100 % were mapped, at an eighth 100 %.
        let expected = usize::try_from(self.expected).unwrap_or(usize::MAX);
        // Of these, some may have left the socket.
        let expected = expected.saturating_sub(self.into_file.held_bytes());
        let wanted = expected.min(call_bytes_max / 8).max(1);
        if wanted == self.guard.low_water {
            return;
        }
        let socket = self.guard.socket();
        let earlier = || sockopt::receive_low_water(socket).unwrap_or(1);
        let earlier = self.guard.earlier_low_water.unwrap_or_else(earlier);
        if sockopt::set_receive_low_water(socket, wanted).is_ok() {
            self.guard.low_water = wanted;
            self.guard.earlier_low_water = Some(earlier);
        }
    }

    fn open_window(&mut self) {
        let socket = self.guard.socket();
        let window = if self.settings.mapping == Mapping::Measured && socket::is_loopback(socket) {
            Err(Error::Unsupported("the peer is on this machine, and could change mapped pages"))
        } else if self.is_plain_tcp {
            ReceiveWindow::new(self.guard.socket(), self.settings.window_bytes)
                .map_err(failed(Call::MapSocket))
        } else {
            Err(Error::Unsupported("only a plain TCP socket's pages can be mapped"))
        };
        match window {
            Ok(window) => self.window = Some(window),
            Err(reason) => self.stop_mapping(reason.to_string()),
        }
    }

    fn record_trial(&mut self, started: Option<std::time::Duration>, mapped: usize, read: usize) {
        if let Verdict::StopMapping(reason) = self.trial.record(started, mapped, read) {
            self.stop_mapping(reason);
        }
    }

    /// Reads from now on. The window stays until the next call, because its bytes may be about to
    /// be returned.
    fn stop_mapping(&mut self, reason: String) {
        self.trial.disable_mapping();
        let fallback = Fallback { from: "mapped", to: "read", reason };
        fallback::record(&mut self.report.fallbacks, fallback);
    }
}

/// Waits until something can be received, if the socket is blocking; false at the end of the
/// stream.
fn wait(socket: impl AsFd, low_water: usize) -> Result<bool, Error> {
    let flags =
        rustix::fs::fcntl_getfl(&socket).map_err(|errno| failed(Call::Fcntl)(errno.into()))?;
    if low_water > 1 && !flags.contains(OFlags::NONBLOCK) {
        // `recv` would wait for the whole low-water mark. `poll` also returns when the receive
        // buffer is full before the mark is reached, as with a peer that sends byte by byte.
        let timeout = rustix::net::sockopt::socket_timeout(&socket, Timeout::Recv)
            .map_err(|errno| failed(Call::GetRcvtimeo)(errno.into()))?;
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut descriptors = [PollFd::new(&socket, PollFlags::IN)];
        match rustix::event::poll(&mut descriptors, timeout.as_ref()) {
            Ok(0) => return Err(Error::WouldBlock),
            Ok(_) if descriptors[0].revents().contains(PollFlags::IN) => return Ok(true),
            // A signal, or completions of the sending half, which do not affect `recv`.
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(Call::Poll)(errno.into())),
        }
    }
    // One byte into memory, because not every protocol supports `MSG_TRUNC`.
    let peek = || socket::receive(&socket, &mut [0], RecvFlags::PEEK);
    let peeked = retry(&socket, WaitsFor::Receive, peek);
    peeked.map(|count| count > 0).map_err(|errno| failed(Call::RecvPeek)(errno.into()))
}

/// Calls `recv`; returns 0 at the end of the stream.
fn read(socket: impl AsFd, buffer: &mut [u8]) -> Result<usize, Error> {
    let receive = || socket::receive(&socket, buffer, RecvFlags::empty());
    retry(&socket, WaitsFor::Receive, receive).map_err(|errno| failed(Call::Recv)(errno.into()))
}

impl<S: AsFd> AsRawFd for Receiver<S> {
    fn as_raw_fd(&self) -> RawFd {
        self.guard.socket().as_fd().as_raw_fd()
    }
}

impl<S: AsFd> AsFd for Receiver<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.guard.socket().as_fd()
    }
}

impl<S: AsFd> io::Read for Receiver<S> {
    /// Like [`Receiver::receive_into`].
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive_into(buffer).map_err(io::Error::from)
    }
}
