//! What a network service adds to the event loop: the handler of its connections.

use crate::admission::eviction::Activity;
use crate::clock::Clock;
use crate::counter::ConnectionCounters;
use crate::listener::Accepted;
use crate::offload::Job;
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The deadline of a connection without one.
pub const NEVER: u32 = u32::MAX;

/// A network service's part of an event loop.
pub trait Handler {
    /// The state of one connection.
    type Connection;
    /// A call for an offload thread.
    type Job: Job;

    /// A turn starts, at the time of the loop's clock. A handler that sets deadlines in
    /// [`Handler::prepare`], which has no [`Context`], keeps a copy of the clock.
    fn begin_turn(&mut self, clock: &Clock) {
        let _ = clock;
    }

    /// The counters of the loop's connections.
    fn counters(&self) -> &ConnectionCounters;

    /// Makes the state of an accepted connection and registers its socket. An error drops it.
    fn accept(&mut self, accepted: Accepted, context: &Context<'_>)
    -> io::Result<Self::Connection>;

    /// Phase 1: records an event of a socket, and may receive.
    fn receive(&mut self, connection: &mut Self::Connection, event: Readiness) {
        let _ = (connection, event);
    }

    /// Phase 2: prepares a response to what was received. Before [`Handler::drive`] follows, there
    /// may be other events of the connection.
    fn prepare(&mut self, connection: &mut Self::Connection) -> Prepared<Self::Job> {
        let _ = connection;
        Prepared::Large
    }

    /// Phase 3: goes as far as it can without blocking.
    fn drive(
        &mut self,
        connection: &mut Self::Connection,
        context: &Context<'_>,
    ) -> Action<Self::Job>;

    /// Phase 4: sends what [`Handler::drive`] held back since the last [`Handler::set_holding`].
    fn flush(&mut self, connection: &mut Self::Connection) {
        let _ = connection;
    }

    /// Whether [`Handler::drive`] should hold partial segments back until [`Handler::flush`].
    fn set_holding(&mut self, on: bool) {
        let _ = on;
    }

    /// Takes the reply to a job of this connection; [`Handler::drive`] follows.
    fn on_job_done(&mut self, connection: &mut Self::Connection, reply: <Self::Job as Job>::Reply) {
        let _ = (connection, reply);
    }

    /// Whether the connection waits for an offload thread and no socket event concerns it.
    fn is_offloaded(&self, connection: &Self::Connection) -> bool {
        let _ = connection;
        false
    }

    /// The activity of the connection, by which the loop chooses the connection that it closes to
    /// make room. At a drain, [`Handler::drive`] follows for each idle connection.
    fn activity(&self, connection: &Self::Connection) -> Activity;

    /// Whether connections are closed to make room for others, by their [`Handler::activity`].
    /// Otherwise new connections wait.
    fn can_evict(&self) -> bool {
        true
    }

    /// Called when the connection's deadline passed.
    fn expire(
        &mut self,
        connection: &mut Self::Connection,
        context: &Context<'_>,
    ) -> Action<Self::Job> {
        let _ = (connection, context);
        self.counters().timed_out.add(1);
        Action::Close
    }

    /// Phase 5, and the last call for a connection. Dropping its socket closes it.
    fn close(&mut self, connection: Self::Connection) {
        drop(connection);
    }

    /// The last call for a connection that makes room for another.
    fn evict(&mut self, connection: Self::Connection) {
        self.close(connection);
    }

    /// Another thread woke the loop: reads changed settings.
    fn on_wake(&mut self) {}

    /// The service drains: from now on [`Handler::drive`] has to close connections that are idle,
    /// at once or within seconds; see [`Context::is_draining`]. The loop cuts off those that are
    /// open at the end of the drain timeout.
    fn begin_drain(&mut self) {}

    /// Descriptors or memory ran out: drops caches.
    fn free_caches(&mut self) {}

    /// Housekeeping, about once a second.
    fn every_second(&mut self, now_seconds: u32) {
        let _ = now_seconds;
    }

    /// The loop ends: flushes what is buffered.
    fn on_end(&mut self) {}
}

/// The next need of a connection.
#[derive(Debug)]
pub enum Action<J> {
    /// An event before this second of the clock, or else [`Handler::expire`].
    WaitUntil(u32),
    /// The connection wants another turn, after the turns of the other connections.
    Yield,
    /// The reply to this job. Until then the connection does not get events or deadlines.
    Offload(J),
    /// The end.
    Close,
}

/// The result of preparing a response.
#[derive(Debug)]
pub enum Prepared<J> {
    /// Nothing is to be sent, and this action is needed instead.
    Act(Action<J>),
    /// A response that is small enough to share packets and interrupts with others.
    Small,
    /// Any other response, or nothing to send.
    Large,
}

/// The readiness that an event reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    /// The socket.
    pub side: Side,
    /// Whether there is something to receive, which may be the end or an error.
    pub is_readable: bool,
    /// Whether the socket accepts bytes.
    pub is_writable: bool,
    /// What follows the bytes that arrived.
    pub tail: Tail,
}

/// What follows the bytes that arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tail {
    /// Nothing, so a short read is the last.
    #[default]
    None,
    /// The end of the stream, because the peer closed its direction.
    End,
    /// The failure of the connection, because the peer reset it or does not answer.
    Failed,
    /// Urgent data, or a connection that is closed in both directions.
    Other,
}

/// A side of a connection with two sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Side {
    /// The accepted socket.
    #[default]
    Client,
    /// A second socket.
    Upstream,
}

/// The events that a socket is registered for. The end and the failure are always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Bytes or urgent data arrived.
    pub read: bool,
    /// The socket accepts bytes. A connected socket reports this at once.
    pub write: bool,
}

impl Interest {
    /// Only bytes that arrived.
    pub const READ: Self = Self { read: true, write: false };
    /// Only the end of the stream, and the failure.
    pub const END: Self = Self { read: false, write: false };
    /// All events.
    pub const BOTH: Self = Self { read: true, write: true };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::RDHUP | EventFlags::ET;
        // The kernel also announces all bytes as urgent data, which alone would wake the loop for
        // nothing.
        flags.set(EventFlags::IN | EventFlags::PRI, self.read);
        flags.set(EventFlags::OUT, self.write);
        flags
    }
}

/// The event loop as one of its connections sees it.
#[derive(Debug)]
pub struct Context<'l> {
    epoll: BorrowedFd<'l>,
    token: u64,
    now_seconds: u32,
    is_draining: bool,
}

impl<'l> Context<'l> {
    pub(super) fn new(
        epoll: BorrowedFd<'l>,
        token: u64,
        now_seconds: u32,
        is_draining: bool,
    ) -> Self {
        Self { epoll, token, now_seconds, is_draining }
    }

    /// Registers a socket for its events, edge-triggered. Closing the socket ends it.
    ///
    /// The errors come from `epoll_ctl`: `ENOSPC` at the user's limit of watches, or `ENOMEM`.
    pub fn register(&self, socket: impl AsFd, side: Side, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(self.epoll, socket, self.data(side), interest.flags())?)
    }

    /// Changes the events of a registered socket. Events whose cause is already there follow at
    /// once.
    pub fn set_interest(&self, socket: impl AsFd, side: Side, interest: Interest) {
        // The call cannot fail, because the socket is registered.
        let _ = epoll::modify(self.epoll, socket, self.data(side), interest.flags());
    }

    fn data(&self, side: Side) -> EventData {
        EventData::new_u64(self.token | u64::from(side == Side::Upstream))
    }

    /// Ends the events of a socket, until it is registered again.
    pub fn unregister(&self, socket: impl AsFd) {
        // The socket may already be unregistered. The call cannot fail otherwise.
        let _ = epoll::delete(self.epoll, socket);
    }

    /// The deadline in so many seconds, for [`Action::WaitUntil`]. The clock counts whole seconds,
    /// so one is added: the deadline is up to a second late and never early.
    pub fn deadline(&self, seconds: u32) -> u32 {
        self.now_seconds.saturating_add(seconds).saturating_add(1)
    }

    /// The second of the loop's clock, the unit of deadlines.
    pub fn now_seconds(&self) -> u32 {
        self.now_seconds
    }

    /// Whether the service drains: connections that are idle have to close.
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }
}
