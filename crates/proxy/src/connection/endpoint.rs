//! One side of a connection: what events and calls have shown about the client's socket, or about
//! the upstream's.

use super::registration::{Found, Registration};
use crate::socket::is_gone;
use haul_server::event_loop::{Context, Interest, Readiness, Side, Tail};
use std::os::fd::OwnedFd;

/// Bytes from one side, since the last bytes from the other side, from which on a socket may be
/// paused. A pause costs two calls: for responses of 1 MiB in large packets the pause did not pay
/// (docs/measurements/forward.md).
const BULK_BYTES: u64 = 4 << 20;

/// One side of a connection. The socket belongs to the state of the connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Endpoint {
    /// Whether the socket is a TCP socket, and not a Unix socket.
    pub is_tcp: bool,
    pub events: Events,
    pub registration: Registration,
    /// The bytes from this side that were sent to the other side.
    forwarded_bytes: u64,
    /// The part of these bytes that was sent since the last bytes from the other side.
    bulk_bytes: u64,
}

impl Endpoint {
    /// A side whose socket is registered for `interest`.
    pub fn new(side: Side, is_tcp: bool, events: Events, interest: Interest) -> Self {
        let registration = Registration::new(side, interest);
        Self { is_tcp, events, registration, forwarded_bytes: 0, bulk_bytes: 0 }
    }

    /// Whether the connection of this side may have failed: an event reported the failure, or the
    /// socket is not registered for events.
    pub fn may_have_failed(&self) -> bool {
        self.events.tail == Tail::Failed || self.registration.is_paused()
    }

    /// Whether the connection of this side failed, as far as events tell.
    pub fn has_failed(&self, socket: &OwnedFd) -> bool {
        self.events.tail == Tail::Failed && is_gone(socket, self.is_tcp)
    }

    /// Records how many bytes from this side were forwarded so far, and whether bytes from the
    /// other side were forwarded since the last call.
    pub fn record_forwarded(&mut self, forwarded_bytes: u64, has_other_sent: bool) {
        let moved = self.forwarded_since(forwarded_bytes);
        self.bulk_bytes = moved + if has_other_sent { 0 } else { self.bulk_bytes };
        self.forwarded_bytes = forwarded_bytes;
    }

    /// The bytes that were forwarded since the last [`Endpoint::record_forwarded`].
    pub fn forwarded_since(&self, forwarded_bytes: u64) -> u64 {
        forwarded_bytes.saturating_sub(self.forwarded_bytes)
    }

    /// Takes over what a step waits for on this socket, and on the other one. True if the step has
    /// to be repeated because the socket may hold more.
    pub fn update(
        &mut self,
        waits_for: [haul::Readiness; 2],
        has_moved: bool,
        socket: &OwnedFd,
        context: &Context<'_>,
    ) -> bool {
        let may_pause = self.is_tcp && self.bulk_bytes >= BULK_BYTES;
        self.registration.update(Found::new(waits_for, may_pause, has_moved), socket, context);
        self.events.update(waits_for[0], has_moved)
    }
}

/// What the events of a socket reported, unless a later call found otherwise.
///
/// Events are edge-triggered: each is reported once, so that a flag stays until the socket is empty
/// or full.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Events {
    pub is_readable: bool,
    pub is_writable: bool,
    /// If this is not [`Tail::None`], a short read does not mean that the socket is empty.
    pub tail: Tail,
    /// Whether the end of the stream arrived, behind what is to be received. A failure does not
    /// change that.
    pub has_ended: bool,
}

impl Events {
    /// Whatever can be found out by a call.
    pub const ALL: Self =
        Self { is_readable: true, is_writable: true, tail: Tail::Other, has_ended: false };

    /// A socket without data.
    pub const CONNECTED: Self =
        Self { is_readable: false, is_writable: true, tail: Tail::None, has_ended: false };

    /// Records an event.
    pub fn record(&mut self, event: Readiness) {
        self.is_readable |= event.is_readable;
        self.is_writable |= event.is_writable;
        if event.tail != Tail::None {
            self.tail = event.tail;
            self.has_ended |= event.tail == Tail::End;
        }
    }

    pub fn readiness(self) -> haul::Readiness {
        haul::Readiness { read: self.is_readable, write: self.is_writable }
    }

    /// Takes over what a step found. True if the step has to be repeated because the socket may
    /// hold more.
    fn update(&mut self, waits_for: haul::Readiness, has_moved: bool) -> bool {
        self.is_writable &= !waits_for.write;
        if !waits_for.read || !self.is_readable {
            return false;
        }
        let repeats = self.tail != Tail::None && has_moved;
        self.is_readable = repeats;
        // A read that found nothing came before any end. Urgent data is a separate event.
        if !repeats {
            self.tail = Tail::None;
        }
        repeats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_bulk_until_the_other_side_sends() {
        let mut endpoint = Endpoint::new(Side::Client, true, Events::CONNECTED, Interest::BOTH);
        let mut bulk_bytes = |forwarded_bytes, has_other_sent| {
            endpoint.record_forwarded(forwarded_bytes, has_other_sent);
            endpoint.bulk_bytes
        };
        assert_eq!(bulk_bytes(100, true), 100);
        assert_eq!(bulk_bytes(BULK_BYTES, false), BULK_BYTES);
        assert_eq!(bulk_bytes(BULK_BYTES, true), 0);
        assert_eq!(bulk_bytes(BULK_BYTES + 7, true), 7);
    }
}
