//! The states of a connection, and the transitions between them.
//!
//! ```text
//!   accepted          all upstreams full
//!      │        ┌──────────────────▶ Queued
//!      │        │  ◀──────────────────┘ a slot is free
//!      ▼        │
//!  Greeting ─▶ Searching ─▶ Connecting ─▶ Forwarding ─▶ Ended
//!        route      ▲  attempt │  connected    │ one side failed
//!                   └──────────┘               ▼
//!                    all attempts failed    Delivering
//! ```
//!
//! A connection whose route does not depend on the greeting begins as `Searching`. Every state but
//! `Forwarding` becomes `Closed` at its end. `Searching`, `Queued` and `Forwarding` become `Closed`
//! when the connection leaves for another process.

use super::delivery::Delivery;
use crate::greeting::GreetingReader;
use crate::host_instant::HostInstant;
use crate::record::status::Phase;
use crate::socket::reset_on_close;
use crate::unconnected::Unconnected;
use crate::upstreams::group::QueuePlace;
use haul::{ForwardParts, Forwarder};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

/// A forwarder between the client, which is its first side, and the upstream.
pub(super) type ConnectionForwarder = Forwarder<OwnedFd, OwnedFd>;

/// A connection that is being established.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) socket: OwnedFd,
    /// The upstream's address; `None` for a Unix socket.
    pub(super) address: Option<SocketAddr>,
    /// The second of the clock in which the attempt fails.
    pub(super) deadline: u32,
}

#[derive(Debug)]
pub(super) enum State {
    /// The route depends on the client's greeting, which has not arrived completely.
    Greeting {
        client: OwnedFd,
        reader: Box<GreetingReader>,
        /// The second of the clock in which the client counts as silent.
        deadline: u32,
        _count: Unconnected,
    },
    /// The next address is to be tried.
    Searching(OwnedFd),
    /// All usable upstreams are at their limits.
    Queued {
        client: OwnedFd,
        place: QueuePlace,
        since: HostInstant,
        /// The second of the clock in which the client has waited for too long.
        deadline: u32,
    },
    /// A connection to an upstream is being established, at one of its addresses or at two.
    Connecting {
        client: OwnedFd,
        attempts: Vec<Attempt>,
        /// The second of the event loop's clock in which the next address of the upstream is tried
        /// in parallel; `NEVER` without a next address.
        next_at: u32,
        _count: Unconnected,
    },
    Forwarding(Box<ConnectionForwarder>),
    /// One side failed, and the bytes that arrived from it are delivered to the other side.
    Delivering(Box<Delivery>),
    /// The streams are over. The sockets close when the event loop closes the connection.
    Ended {
        _sockets: Box<ConnectionForwarder>,
    },
    /// The sockets are closed, or belong to another process.
    Closed,
}

impl State {
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Closed)
    }

    /// `Greeting` becomes `Searching`. Returns the reader of the greeting; `None` in another state.
    pub fn route(&mut self) -> Option<Box<GreetingReader>> {
        match self.take() {
            Self::Greeting { client, reader, .. } => {
                *self = Self::Searching(client);
                Some(reader)
            }
            other => {
                *self = other;
                None
            }
        }
    }

    /// `Searching` becomes `Queued`.
    pub fn enqueue(&mut self, place: QueuePlace, since: HostInstant, deadline: u32) {
        *self = match self.take() {
            Self::Searching(client) => Self::Queued { client, place, since, deadline },
            other => other,
        };
    }

    /// `Searching` becomes `Connecting`.
    pub fn connect(&mut self, attempt: Attempt, next_at: u32, count: Unconnected) {
        *self = match self.take() {
            Self::Searching(client) => {
                Self::Connecting { client, attempts: vec![attempt], next_at, _count: count }
            }
            other => other,
        };
    }

    /// `Queued` or `Connecting` becomes `Searching`: the client has a slot, or the sockets of all
    /// attempts close.
    pub fn search(&mut self) {
        *self = match self.take() {
            Self::Queued { client, .. } | Self::Connecting { client, .. } => {
                Self::Searching(client)
            }
            other => other,
        };
    }

    /// `Connecting` becomes `Forwarding`, or `Closed` if `forward` fails. Other attempts end.
    pub fn forward(
        &mut self,
        forward: impl FnOnce(OwnedFd) -> Result<ConnectionForwarder, haul::Error>,
    ) -> Result<(), haul::Error> {
        match self.take() {
            Self::Connecting { client, .. } => {
                *self = Self::Forwarding(Box::new(forward(client)?));
            }
            other => *self = other,
        }
        Ok(())
    }

    /// `Forwarding` becomes `Closed`. Returns the sockets and the bytes that were received and not
    /// sent; `None` in another state, or if a pipe could not be read. The state stays then.
    pub fn split(&mut self) -> Option<ForwardParts<OwnedFd, OwnedFd>> {
        match self.take() {
            Self::Forwarding(forwarder) => match forwarder.into_parts() {
                Ok(parts) => Some(parts),
                Err(error) => {
                    *self = Self::Forwarding(error.forwarder);
                    None
                }
            },
            other => {
                *self = other;
                None
            }
        }
    }

    /// `Queued` or `Searching` becomes `Closed`. Returns the client's socket and, of `Queued`,
    /// since when the client waits; `None` in another state.
    pub fn stop_waiting(&mut self) -> Option<(OwnedFd, Option<HostInstant>)> {
        match self.take() {
            Self::Queued { client, since, .. } => Some((client, Some(since))),
            Self::Searching(client) => Some((client, None)),
            other => {
                *self = other;
                None
            }
        }
    }

    /// `Forwarding` becomes `Ended`, and another state `Closed`.
    pub fn end(&mut self) {
        if let Self::Forwarding(forwarder) = self.take() {
            *self = Self::Ended { _sockets: forwarder };
        }
    }

    /// Lets every socket be reset when it closes, because a stream that was cut off must not look
    /// like a stream that ended.
    pub fn reset_on_close(&self) {
        match self {
            Self::Greeting { client, .. }
            | Self::Searching(client)
            | Self::Queued { client, .. } => reset_on_close(client),
            Self::Connecting { client, attempts, .. } => {
                reset_on_close(client);
                for attempt in attempts {
                    reset_on_close(&attempt.socket);
                }
            }
            Self::Forwarding(forwarder) => {
                let (client, upstream) = forwarder.sockets();
                reset_on_close(client);
                reset_on_close(upstream);
            }
            Self::Delivering(delivery) => reset_on_close(&delivery.socket),
            Self::Ended { .. } | Self::Closed => {}
        }
    }

    /// The state as the control socket lists it.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Greeting { .. } => Phase::Greeting,
            Self::Queued { .. } => Phase::Queued,
            Self::Searching(_) | Self::Connecting { .. } => Phase::Connecting,
            Self::Forwarding(_) => Phase::Forwarding,
            Self::Delivering(_) | Self::Ended { .. } | Self::Closed => Phase::Delivering,
        }
    }
}
