//! What is known of a connection's socket by its events, and which of them it is registered for.

use haul_server::event_loop::{Context, Interest, Readiness, Side, Tail};
use std::os::fd::OwnedFd;

/// Events of bytes, in a row, that could not be received because the other side takes no more. Then
/// they are left out: each costs a wait of the loop, and to leave them out and to add them again
/// costs two calls.
const VAIN_EVENTS_MAX: u32 = 4;

/// What the events of a socket have reported and no call has found otherwise since.
///
/// Events are edge-triggered: each is reported once, so that a flag stays until the socket is empty
/// or full.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Events {
    pub is_readable: bool,
    pub is_writable: bool,
    /// Not [`Tail::None`]: a short read does not mean that the socket is empty.
    pub tail: Tail,
    /// Whether the end of the stream has arrived, behind what is to be received. A failure does not
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

    /// Records what an event says.
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

    /// Takes over what a step has found; true if the step has to be repeated because the socket
    /// may hold more.
    pub fn update(&mut self, waits_for: haul::Readiness, has_moved: bool) -> bool {
        self.is_writable &= !waits_for.write;
        if !waits_for.read || !self.is_readable {
            return false;
        }
        let repeats = self.tail != Tail::None && has_moved;
        self.is_readable = repeats;
        // A read that has found nothing is before any end. Urgent data is an event of its own.
        if !repeats {
            self.tail = Tail::None;
        }
        repeats
    }
}

/// The registration of a socket for its events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registration {
    side: Side,
    interest: Interest,
    /// Whether the latest step waits for bytes of the socket.
    waits_for_bytes: bool,
    vain_events: u32,
}

impl Registration {
    /// A socket that is registered for `interest`.
    pub fn new(side: Side, interest: Interest) -> Self {
        Self { side, interest, waits_for_bytes: true, vain_events: 0 }
    }

    /// Those of a new connection: the client's socket has this interest, and the upstream's all.
    pub fn both(of_client: Interest) -> [Self; 2] {
        [Self::new(Side::Client, of_client), Self::new(Side::Upstream, Interest::BOTH)]
    }

    /// Counts an event of the socket. The end of a stream is part of every later event.
    pub fn count(&mut self, event: Readiness) {
        let has_bytes = event.is_readable && event.tail == Tail::None;
        self.vain_events += u32::from(has_bytes && !self.waits_for_bytes);
    }

    /// Changes the events to what a step waits for. Those that it does not wait for stay until a
    /// few were in vain.
    pub fn update(&mut self, waits_for: haul::Readiness, socket: &OwnedFd, context: &Context<'_>) {
        self.waits_for_bytes = waits_for.read;
        let interest = self.next_interest(waits_for);
        self.set(interest, socket, context);
    }

    /// Changes the events of a socket that is sent to only.
    pub fn only_write(&mut self, socket: &OwnedFd, context: &Context<'_>) {
        self.set(Interest { read: false, write: true }, socket, context);
    }

    fn set(&mut self, interest: Interest, socket: &OwnedFd, context: &Context<'_>) {
        if interest != self.interest {
            self.interest = interest;
            context.set_interest(socket, self.side, interest);
        }
    }

    fn next_interest(&mut self, waits_for: haul::Readiness) -> Interest {
        let haul::Readiness { read, write } = waits_for;
        let is_vain = !read && self.vain_events >= VAIN_EVENTS_MAX;
        if read || is_vain {
            self.vain_events = 0;
        }
        if is_vain {
            // A writable socket would report that at once.
            Interest { read: false, write }
        } else {
            Interest { read: self.interest.read || read, write: self.interest.write || write }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_cannot_be_forwarded_are_left_out_until_they_are_waited_for() {
        let mut client = Registration::new(Side::Client, Interest::BOTH);
        let readable = Readiness {
            side: Side::Client,
            is_readable: true,
            is_writable: false,
            tail: Tail::None,
        };
        let mut next = |read, write, events| {
            (0..events).for_each(|_| client.count(readable));
            // Another event after the end of the stream is none of bytes.
            client.count(Readiness { tail: Tail::End, ..readable });
            let waits_for = haul::Readiness { read, write };
            client.waits_for_bytes = read;
            client.interest = client.next_interest(waits_for);
            (client.interest.read, client.interest.write)
        };
        assert_eq!(next(true, false, 100), (true, true), "every event was waited for");
        assert_eq!(next(false, false, 0), (true, true));
        assert_eq!(next(false, false, VAIN_EVENTS_MAX - 1), (true, true));
        assert_eq!(next(true, false, 0), (true, true));
        assert_eq!(next(false, false, 0), (true, true));
        assert_eq!(next(false, false, VAIN_EVENTS_MAX - 1), (true, true), "others were before");
        assert_eq!(next(false, false, 1), (false, false));
        assert_eq!(next(false, true, 0), (false, true));
        assert_eq!(next(false, false, 0), (false, true));
        assert_eq!(next(true, false, 0), (true, true));
    }
}
