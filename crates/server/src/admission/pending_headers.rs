//! Connections of proxies that did not name their client yet.

use crate::admission::placement::Placed;
use crate::listener::NamedBy;
use crate::log_limiter::LogLimiter;
use crate::proxy_protocol::{self, Header, Origin};
use rustix::event::epoll::{self, EventData, EventFlags};
use slab::Slab;
use std::io;
use std::os::fd::AsFd;
use tracing::warn;

/// The time in which a proxy has to name the client, in seconds.
const NAMING_SECONDS: u32 = 5;

/// The connections of an event loop that wait for the header with the client's address.
#[derive(Debug, Default)]
pub(crate) struct UnnamedConnections {
    waiting: Slab<Unnamed>,
    invalid: LogLimiter,
}

#[derive(Debug)]
struct Unnamed {
    placed: Placed,
    /// In seconds of the loop's clock.
    deadline: u32,
}

/// The progress of a connection.
#[derive(Debug)]
pub(crate) enum Naming {
    /// The connection still waits, or is unknown.
    Waiting,
    /// The connection has the address of its client.
    Named(Placed),
    /// The connection is closed, because it ended or its bytes are not a header.
    Refused,
}

impl UnnamedConnections {
    /// The number of connections.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Registers a connection. `token_of` makes an event's token from the connection's index.
    /// Usually the header has already arrived.
    pub fn add(
        &mut self,
        placed: Placed,
        epoll: impl AsFd,
        token_of: fn(usize) -> u64,
        now_seconds: u32,
    ) -> Naming {
        let entry = self.waiting.vacant_entry();
        let index = entry.key();
        // Edge-triggered: a part of a header stays in the socket.
        let events = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(token_of(index));
        if epoll::add(&epoll, &placed.accepted.socket, data, events).is_err() {
            return Naming::Refused;
        }
        let deadline = now_seconds.saturating_add(NAMING_SECONDS + 1);
        entry.insert(Unnamed { placed, deadline });
        self.receive(index, epoll, now_seconds)
    }

    /// Receives the header of a connection. The registration ends once the client is named.
    pub fn receive(&mut self, index: usize, epoll: impl AsFd, now_seconds: u32) -> Naming {
        let Some(unnamed) = self.waiting.get(index) else { return Naming::Waiting };
        let received = proxy_protocol::receive(&unnamed.placed.accepted.socket);
        let Some(header) = received.transpose() else { return Naming::Waiting };
        let Unnamed { mut placed, .. } = self.waiting.remove(index);
        // The call cannot fail, because the connection is registered.
        let _ = epoll::delete(epoll, &placed.accepted.socket);
        match header {
            Ok(header) => {
                if let Origin::Client(client) = header.origin {
                    placed.accepted.peer = Some(client);
                }
                let Header { destination, fields, .. } = header;
                placed.accepted.named = Some(Box::new(NamedBy { destination, fields }));
                Naming::Named(placed)
            }
            Err(error) => {
                let is_invalid = error.kind() == io::ErrorKind::InvalidData;
                if let Some(proxy) = placed.accepted.peer.filter(|_| is_invalid)
                    && self.invalid.allow(now_seconds)
                {
                    let proxy = proxy.ip();
                    warn!(%proxy, "the proxy {proxy} sends no valid PROXY header: closed");
                }
                Naming::Refused
            }
        }
    }

    /// Closes the connections whose time is over; returns their number.
    pub fn expire(&mut self, now_seconds: u32) -> usize {
        let before = self.waiting.len();
        self.waiting.retain(|_, unnamed| unnamed.deadline > now_seconds);
        before - self.waiting.len()
    }
}
