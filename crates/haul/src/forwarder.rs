//! [`Forwarder`]: forwards the data of two sockets to each other until both streams have ended.

use crate::call::Call;
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::method::Counts;
use crate::socket;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::net::AddressFamily;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

mod direction;
mod pool;

use direction::Direction;
pub use pool::{ForwardMethod, ForwardPool, ForwardSettings};

/// The poll interval of a socket whose error queue is not drained.
const ERROR_QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Joins two connected stream sockets.
///
/// Each direction begins by copying, and splices once the data arrives in large pieces: small
/// messages cost less to copy than to pass through a pipe. It returns to copying when they become
/// small again.
///
/// When one peer ends its stream, all data in transit is delivered, and then the stream to the
/// other peer ends. The opposite direction continues (half-close).
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = std::net::TcpListener::bind("0.0.0.0:8080")?.accept()?.0;
/// let server = std::net::TcpStream::connect("192.0.2.1:80")?;
/// let mut forwarder = haul::Forwarder::new(&client, &server)?;
/// match forwarder.forward() {
///     Ok(()) => println!("{:?}", forwarder.report()),
///     // Otherwise a peer would take a truncated stream for a whole one.
///     Err(_) => forwarder.abort(),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Forwarder<A: AsFd, B: AsFd> {
    a: A,
    b: B,
    a_to_b: Direction,
    b_to_a: Direction,
    pool: ForwardPool,
    /// Whether [`Forwarder::step`] has found both sockets non-blocking.
    is_nonblocking: bool,
    failed_side: Option<ForwardSide>,
    /// When a byte has moved, or a stream has ended, last; at first, when forwarding began. Kept
    /// only if there are limits.
    moved_at: Instant,
}

/// One of the two sockets of a forwarder, in the order in which they were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardSide {
    /// The first socket.
    A,
    /// The second socket.
    B,
}

/// The events that a forwarder waits for on one socket. A caller must act on each, so a new one
/// would be a new version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Readable, or the stream has ended.
    pub read: bool,
    /// Writable.
    pub write: bool,
}

impl Readiness {
    /// The events to request of `poll` for the socket: `POLLIN`, `POLLOUT`, both or none.
    /// `epoll` has the same bits.
    pub fn poll_events(self) -> u16 {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, self.read);
        events.set(PollFlags::OUT, self.write);
        events.bits()
    }

    /// The readiness that the events of `poll` or `epoll` report. An error and a hang-up make every
    /// call return at once, so both count as readable and writable.
    pub fn from_poll_events(events: u16) -> Self {
        let events = PollFlags::from_bits_retain(events);
        let is_over = events.intersects(PollFlags::ERR | PollFlags::HUP);
        Self {
            read: is_over || events.intersects(PollFlags::IN | PollFlags::RDHUP),
            write: is_over || events.contains(PollFlags::OUT),
        }
    }
}

/// The result of a step. A caller must act on each, so a new one would be a new version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing more can be moved until one of the sockets is ready.
    Wait {
        /// The events to wait for on the first socket.
        a: Readiness,
        /// The events to wait for on the second socket.
        b: Readiness,
    },
    /// As much was moved as one connection should in a turn: there may be more to do.
    Yield,
    /// Both streams have ended.
    Done,
}

/// The activity of a forwarder so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForwardReport {
    /// From the first socket to the second.
    pub a_to_b: DirectionReport,
    /// From the second socket to the first.
    pub b_to_a: DirectionReport,
}

/// The activity of one direction so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirectionReport {
    /// Spliced, through a pipe.
    pub spliced: Counts,
    /// Copied, through a buffer.
    pub copied: Counts,
    /// How often the direction switched between the two.
    pub changes: u64,
    /// Every fallback, in order.
    pub fallbacks: Vec<Fallback>,
}

/// What [`Forwarder::into_parts`] returns.
#[non_exhaustive]
pub struct ForwardParts<A, B> {
    /// The first socket.
    pub a: A,
    /// The second socket.
    pub b: B,
    /// Received from the first socket, and not yet accepted by the second.
    pub a_to_b: Vec<u8>,
    /// Received from the second socket, and not yet accepted by the first.
    pub b_to_a: Vec<u8>,
    /// Whether the stream from the first socket has ended.
    pub a_has_ended: bool,
    /// Whether the stream from the second socket has ended.
    pub b_has_ended: bool,
}

impl<A: fmt::Debug, B: fmt::Debug> fmt::Debug for ForwardParts<A, B> {
    /// Prints the lengths of the bytes, never their content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ForwardParts")
            .field("a", &self.a)
            .field("b", &self.b)
            .field("a_to_b_bytes", &self.a_to_b.len())
            .field("b_to_a_bytes", &self.b_to_a.len())
            .field("a_has_ended", &self.a_has_ended)
            .field("b_has_ended", &self.b_has_ended)
            .finish()
    }
}

/// Why [`Forwarder::into_parts`] has failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct ForwardPartsError<A: AsFd, B: AsFd> {
    /// The reason.
    pub error: Error,
    /// The forwarder, unchanged.
    pub forwarder: Box<Forwarder<A, B>>,
}

impl<A: AsFd, B: AsFd> fmt::Display for ForwardPartsError<A, B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(formatter)
    }
}

impl<A: AsFd + fmt::Debug, B: AsFd + fmt::Debug> std::error::Error for ForwardPartsError<A, B> {}

impl<A: AsFd, B: AsFd> Forwarder<A, B> {
    /// Creates a forwarder with a separate pool.
    pub fn new(a: A, b: B) -> Result<Self, Error> {
        Self::with_pool(a, b, ForwardPool::new(2)?)
    }

    /// Creates a forwarder that shares its pool with others.
    pub fn with_pool(a: A, b: B, pool: ForwardPool) -> Result<Self, Error> {
        for socket in [a.as_fd(), b.as_fd()] {
            socket::must_be_stream(socket::kind(socket)?)?;
        }
        // A read from a Unix socket ends where other descriptors or credentials were sent.
        let is_tcp = |socket: BorrowedFd<'_>| {
            let domain = rustix::net::sockopt::socket_domain(socket);
            domain.is_ok_and(|domain| domain != AddressFamily::UNIX)
        };
        let are_tcp = [is_tcp(a.as_fd()), is_tcp(b.as_fd())];
        Ok(Self { is_nonblocking: false, ..Self::with_connected(a, b, are_tcp, pool) })
    }

    /// Creates a forwarder of two connected, non-blocking stream sockets, of which the caller
    /// states whether each is a TCP socket: a socket that was just accepted or connected. It asks
    /// the kernel nothing, where [`Forwarder::with_pool`] makes eight system calls.
    ///
    /// Of other sockets, the first step fails, or blocks.
    pub fn with_connected(a: A, b: B, are_tcp: [bool; 2], pool: ForwardPool) -> Self {
        let method = pool.settings().method;
        let [a_is_tcp, b_is_tcp] = are_tcp;
        Self {
            a,
            b,
            a_to_b: Direction::new(method, a_is_tcp),
            b_to_a: Direction::new(method, b_is_tcp),
            pool,
            is_nonblocking: true,
            failed_side: None,
            moved_at: Instant::now(),
        }
    }

    /// Creates a forwarder of one direction, with a separate pool: what `from` receives is sent to
    /// `to`, whose stream it then ends. It neither sends to `from` nor receives from `to`.
    ///
    /// If the TCP connection `to` is reset while `from` is silent, [`Forwarder::forward`] fails at
    /// once, and so does [`Forwarder::step`] for a caller that polls as it states.
    pub fn one_way(from: A, to: B) -> Result<Self, Error> {
        Self::one_way_with_pool(from, to, ForwardPool::new(2)?)
    }

    /// Like [`Forwarder::one_way`], with a pool that is shared with others.
    pub fn one_way_with_pool(from: A, to: B, pool: ForwardPool) -> Result<Self, Error> {
        Ok(Self { b_to_a: Direction::unused(), ..Self::with_pool(from, to, pool)? })
    }

    /// Sends these bytes to the second socket before those that the first receives, such as the
    /// request that the program has read to find the other peer. Repeated calls append.
    ///
    /// [`Error::InvalidInput`] if the forwarder has moved bytes already.
    pub fn with_first_bytes_to_b(mut self, bytes: &[u8]) -> Result<Self, Error> {
        self.a_to_b.push_first(bytes)?;
        Ok(self)
    }

    /// Like [`Forwarder::with_first_bytes_to_b`], in the opposite direction. Also
    /// [`Error::InvalidInput`] if the forwarder is [`Forwarder::one_way`].
    pub fn with_first_bytes_to_a(mut self, bytes: &[u8]) -> Result<Self, Error> {
        self.b_to_a.push_first(bytes)?;
        Ok(self)
    }

    /// Forwards until both streams end. Both sockets are non-blocking during the call.
    ///
    /// Two silent peers keep it waiting, unless [`ForwardSettings::idle_timeout`] is set. After
    /// [`Error::TimedOut`] nothing is lost: call again, or [`Forwarder::into_parts`]. After another
    /// error a connection failed, and data in transit is lost with it, as in the network. Then call
    /// [`Forwarder::abort`], so that no peer takes a truncated stream for a whole one.
    pub fn forward(&mut self) -> Result<(), Error> {
        self.failed_side = None;
        self.moved_at = Instant::now();
        let a_flags = make_nonblocking(self.a.as_fd())?;
        let b_flags = make_nonblocking(self.b.as_fd());
        let result = b_flags.as_ref().map_or(Ok(()), |_| self.forward_nonblocking());
        // Restored in the opposite order, so that two descriptors of one socket end as they began.
        // A socket that is gone needs no flags, so errors are ignored.
        if let Ok(flags) = &b_flags {
            let _ = rustix::fs::fcntl_setfl(&self.b, *flags);
        }
        let _ = rustix::fs::fcntl_setfl(&self.a, a_flags);
        b_flags.and(result)
    }

    /// Moves the data that can be moved now. The sockets must be non-blocking.
    ///
    /// The caller polls them level-triggered for what [`Step::Wait`] names. With edge-triggered
    /// polling (`EPOLLET`, mio), it registers them again after each [`Step::Wait`]: a step ends
    /// before the kernel has reported that nothing more can be received.
    ///
    /// A socket for which no event is named is polled with no event requested, so that the caller
    /// still sees its failure (`POLLERR`, `POLLHUP`) and calls again. After its first hang-up it
    /// leaves the poll set: it would wake every poll at once. After an error the connection has
    /// failed: later calls do not return the error again.
    pub fn step(&mut self) -> Result<Step, Error> {
        let both = Readiness { read: true, write: true };
        self.step_ready(both, both)
    }

    /// Like [`Forwarder::step`], for a caller that knows what the sockets are ready for. A
    /// direction that could move nothing makes no system call, so a small message takes two.
    ///
    /// An error or a hang-up of a socket counts as readable and writable. The first step also needs
    /// the readiness of events that arrived before the forwarder was made.
    pub fn step_ready(&mut self, a: Readiness, b: Readiness) -> Result<Step, Error> {
        self.failed_side = None;
        self.check_nonblocking()?;
        self.step_nonblocking(a, b)
    }

    /// Checks at the beginning that the sockets do not block.
    fn check_nonblocking(&mut self) -> Result<(), Error> {
        if !self.is_nonblocking {
            for socket in [self.a.as_fd(), self.b.as_fd()] {
                let flags = rustix::fs::fcntl_getfl(socket)
                    .map_err(|errno| failed(Call::Fcntl)(errno.into()))?;
                if !flags.contains(OFlags::NONBLOCK) {
                    return Err(Error::InvalidInput(
                        "a step needs non-blocking sockets: a blocking one would stop both \
                         directions",
                    ));
                }
            }
            self.is_nonblocking = true;
            self.moved_at = Instant::now();
        }
        Ok(())
    }

    /// Receives small messages, up to 4 KiB each, which the next step sends; true if there is one.
    ///
    /// A caller with many forwarders that prepares those that are ready, and then steps them, sends
    /// their messages close together: peers take several in one interrupt. Larger messages are sent
    /// at once. The next step must follow soon, with the same readiness.
    pub fn prepare(&mut self, a: Readiness, b: Readiness) -> bool {
        if self.check_nonblocking().is_err() {
            // The step returns the error.
            return false;
        }
        let before = self.progress();
        let (socket_a, socket_b, pool) = (self.a.as_fd(), self.b.as_fd(), &self.pool);
        let has_a = self.a_to_b.prepare(socket_a, socket_b, pool, a);
        let has_b = self.b_to_a.prepare(socket_b, socket_a, pool, b);
        if self.progress() != before && self.has_limits() {
            self.moved_at = Instant::now();
        }
        has_a || has_b
    }

    /// Whether [`Forwarder::prepare`] has found a failure, which the next step returns. The socket
    /// reports only the end of its stream from then on.
    pub fn has_prepared_failure(&self) -> bool {
        self.a_to_b.has_prepared_failure() || self.b_to_a.has_prepared_failure()
    }

    /// The socket whose receive or send has failed, after a step or [`Forwarder::forward`] that has
    /// returned that error; `None` if the error is not a socket's. After a failed connection,
    /// [`Forwarder::into_parts`] returns what the other socket has not accepted yet.
    pub fn failed_side(&self) -> Option<ForwardSide> {
        self.failed_side
    }

    /// States of each socket whether its peer has ended its stream and not failed (`EPOLLRDHUP`
    /// without `EPOLLERR`). What is copied then leaves in one packet with the end, if it fits.
    pub fn set_peer_has_ended(&mut self, a: bool, b: bool) {
        self.a_to_b.set_end_has_arrived(a);
        self.b_to_a.set_end_has_arrived(b);
    }

    /// The instant at which the idle limit is reached if no byte moves until then; `None` without
    /// limits. A step
    /// after it that moves nothing fails with [`Error::TimedOut`], so a caller that polls takes it
    /// for its timer.
    pub fn deadline(&self) -> Option<Instant> {
        let settings = self.pool.settings();
        let is_half_closed = self.a_to_b.has_ended() || self.b_to_a.has_ended();
        let half_closed = settings.half_closed_timeout.filter(|_| is_half_closed);
        let timeout = settings.idle_timeout.into_iter().chain(half_closed).min()?;
        self.moved_at.checked_add(timeout)
    }

    /// Ends both TCP connections at once with a reset, after an error.
    ///
    /// A program that only closes its sockets ends both streams in order. A peer then takes a
    /// truncated stream for a whole one, although the connection on the other side failed. The
    /// kernel drops what it has not sent. Sockets of another kind are only dropped, because only
    /// TCP knows a reset.
    pub fn abort(self) {
        for socket in [self.a.as_fd(), self.b.as_fd()] {
            if socket::is_tcp(socket) {
                socket::reset(socket);
            }
        }
    }

    /// Takes the forwarder apart: the sockets, and the bytes that are in transit between them.
    /// Another forwarder continues with [`Forwarder::with_first_bytes_to_b`] and
    /// [`Forwarder::with_first_bytes_to_a`].
    ///
    /// In a forked child it may fail ([`Error::Forked`]): the parent has the bytes in a pipe. The
    /// error holds the forwarder, unchanged.
    pub fn into_parts(mut self) -> Result<ForwardParts<A, B>, ForwardPartsError<A, B>> {
        let collected = self.a_to_b.collect().and_then(|()| self.b_to_a.collect());
        if let Err(error) = collected {
            return Err(ForwardPartsError { error, forwarder: Box::new(self) });
        }
        Ok(ForwardParts {
            a: self.a,
            b: self.b,
            a_has_ended: self.a_to_b.has_ended(),
            b_has_ended: self.b_to_a.has_ended(),
            a_to_b: self.a_to_b.into_collected(),
            b_to_a: self.b_to_a.into_collected(),
        })
    }

    /// The sockets, in the order in which they were given.
    pub fn sockets(&self) -> (&A, &B) {
        (&self.a, &self.b)
    }

    /// Reports the activity so far.
    pub fn report(&self) -> ForwardReport {
        ForwardReport {
            a_to_b: self.a_to_b.direction_report().clone(),
            b_to_a: self.b_to_a.direction_report().clone(),
        }
    }

    fn step_nonblocking(&mut self, a: Readiness, b: Readiness) -> Result<Step, Error> {
        let (socket_a, socket_b, pool) = (self.a.as_fd(), self.b.as_fd(), &self.pool);
        let before = self.progress();
        // The kernel may have reported the failure of one direction's sockets to `prepare`.
        let has_failed = self.b_to_a.has_prepared_failure();
        let a_to_b = if has_failed || self.a_to_b.is_ready(a, b) {
            self.a_to_b.advance(socket_a, socket_b, pool, has_failed)
        } else {
            Ok(self.a_to_b.waits_for())
        };
        // Also after an error: a server that refuses an upload has answered before it closed the
        // connection.
        let b_to_a = if a_to_b.is_err() || self.b_to_a.is_ready(b, a) {
            self.b_to_a.advance(socket_b, socket_a, pool, a_to_b.is_err())
        } else {
            Ok(self.b_to_a.waits_for())
        };
        let a_to_b = a_to_b.inspect_err(|error| {
            self.failed_side = direction_side(error, ForwardSide::A, ForwardSide::B);
        })?;
        let b_to_a = b_to_a.inspect_err(|error| {
            self.failed_side = direction_side(error, ForwardSide::B, ForwardSide::A);
        })?;
        let has_moved = self.progress() != before;
        if has_moved && self.has_limits() {
            self.moved_at = Instant::now();
        }
        match (a_to_b.is_done(), b_to_a.is_done()) {
            (true, true) => return Ok(Step::Done),
            _ if a_to_b.has_more || b_to_a.has_more => return Ok(Step::Yield),
            _ => {}
        }
        if !has_moved {
            // A socket that is only sent to reports its failure only here.
            for (side, sink, ready, to_sink, from_sink) in [
                (ForwardSide::B, socket_b, b, a_to_b, b_to_a),
                (ForwardSide::A, socket_a, a, b_to_a, a_to_b),
            ] {
                let may_have_failed = ready.read && ready.write;
                if may_have_failed && !to_sink.is_done() && from_sink.is_done() {
                    check_failure(sink).inspect_err(|_| self.failed_side = Some(side))?;
                }
            }
            let now = Instant::now();
            if self.deadline().is_some_and(|deadline| now >= deadline) {
                // A caller that goes on has the whole time again.
                self.moved_at = now;
                return Err(Error::TimedOut(
                    "no byte was forwarded for the time of the idle limit",
                ));
            }
        }
        Ok(Step::Wait {
            a: Readiness { read: a_to_b.read, write: b_to_a.write },
            b: Readiness { read: b_to_a.read, write: a_to_b.write },
        })
    }

    fn has_limits(&self) -> bool {
        let settings = self.pool.settings();
        settings.idle_timeout.is_some() || settings.half_closed_timeout.is_some()
    }

    /// The bytes that have moved, and which streams have ended: what an idle connection does not
    /// change.
    fn progress(&self) -> (u64, bool, bool) {
        let moved = |direction: &Direction| {
            let report = direction.direction_report();
            report.copied.bytes + report.spliced.bytes
        };
        let bytes = moved(&self.a_to_b) + moved(&self.b_to_a);
        (bytes, self.a_to_b.has_ended(), self.b_to_a.has_ended())
    }

    fn forward_nonblocking(&mut self) -> Result<(), Error> {
        let mut ready = [Readiness { read: true, write: true }; 2];
        let mut has_hung_up = [false; 2];
        loop {
            match self.step_nonblocking(ready[0], ready[1])? {
                Step::Done => return Ok(()),
                Step::Yield => {}
                Step::Wait { a, b } => {
                    // A socket with no event to wait for is watched for its failure while it may
                    // still be sent to, but only once: a hang-up would wake every poll at once.
                    let is_idle = [a, b].map(|events| events == Readiness::default());
                    let is_sink = [&self.b_to_a, &self.a_to_b].map(|to| !to.waits_for().is_done());
                    let watched = |index: usize, events| {
                        let is_watched = !is_idle[index] || is_sink[index] && !has_hung_up[index];
                        is_watched.then_some(events)
                    };
                    let sockets =
                        [(self.a.as_fd(), watched(0, a)), (self.b.as_fd(), watched(1, b))];
                    ready = wait(sockets, self.deadline())?;
                    for index in 0..2 {
                        has_hung_up[index] |= is_idle[index] && ready[index].write;
                    }
                }
            }
        }
    }
}

/// The side whose receive or send has failed, by the error of a direction.
fn direction_side(error: &Error, source: ForwardSide, sink: ForwardSide) -> Option<ForwardSide> {
    let (Error::Failed { call, .. } | Error::Refused { call, .. }) = error else { return None };
    match call {
        Call::Recv | Call::SpliceFromSource => Some(source),
        Call::Send | Call::SpliceIntoSocket | Call::Shutdown => Some(sink),
        _ => None,
    }
}

/// Makes a socket non-blocking; returns the flags that it had.
fn make_nonblocking(socket: BorrowedFd<'_>) -> Result<OFlags, Error> {
    let failed = |errno: rustix::io::Errno| failed(Call::Fcntl)(errno.into());
    let flags = rustix::fs::fcntl_getfl(socket).map_err(failed)?;
    rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK).map_err(failed)?;
    Ok(flags)
}

/// Fails if the connection of a socket has failed.
fn check_failure(socket: BorrowedFd<'_>) -> Result<(), Error> {
    // `ERR` alone may come from the error queue, which belongs to the caller.
    if socket::pending_events(socket)?.contains(PollFlags::ERR | PollFlags::HUP) {
        socket::take_error(socket)?;
    }
    Ok(())
}

/// Waits until one of the sockets is ready or has failed, or the deadline; returns what they are
/// ready for.
fn wait(
    sockets: [(BorrowedFd<'_>, Option<Readiness>); 2],
    deadline: Option<Instant>,
) -> Result<[Readiness; 2], Error> {
    let mut descriptors: Vec<PollFd<'_>> = sockets
        .iter()
        .filter_map(|(socket, readiness)| Some((socket, (*readiness)?)))
        .map(|(socket, readiness)| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, readiness.read);
            events.set(PollFlags::OUT, readiness.write);
            PollFd::from_borrowed_fd(*socket, events)
        })
        .collect();
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    // A time beyond what the kernel can count means no timeout.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match rustix::event::poll(&mut descriptors, left.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok([Readiness::default(); 2]),
        Err(errno) => return Err(failed(Call::Poll)(errno.into())),
    }
    let events = descriptors.iter().fold(PollFlags::empty(), |all, one| all | one.revents());
    if events == PollFlags::ERR {
        // Entries for another reader are in an error queue, and would wake every poll at once.
        std::thread::sleep(ERROR_QUEUE_POLL_INTERVAL);
    }
    let mut found = descriptors.iter().map(PollFd::revents);
    Ok(sockets.map(|(_, watched)| {
        let events = watched.and_then(|_| found.next()).unwrap_or(PollFlags::empty());
        let ended = events.intersects(PollFlags::ERR | PollFlags::HUP);
        Readiness {
            read: ended || events.contains(PollFlags::IN),
            write: ended || events.contains(PollFlags::OUT),
        }
    }))
}
