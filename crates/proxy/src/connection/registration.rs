//! The events that a connection's socket is registered for.

use haul_server::event_loop::{Context, Interest, NEVER, Readiness, Side, Tail};
use std::os::fd::OwnedFd;

/// The number of events of bytes, in a row and not waited for by a step, after which such events
/// are left out. An event costs a wait of the loop. To leave the events out and to add them again
/// costs two calls.
const VAIN_EVENTS_MAX: u32 = 4;

/// What a step found out about a socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    waits_for: haul::Readiness,
    /// Whether the bytes of the socket wait for the other side, and the step waits for nothing
    /// else.
    is_blocked: bool,
    /// Whether the registration may be paused.
    may_pause: bool,
    /// Whether the step has moved bytes.
    has_moved: bool,
}

impl Found {
    /// About the first of two sockets, by what the step waits for on each.
    pub fn new([this, other]: [haul::Readiness; 2], may_pause: bool, has_moved: bool) -> Self {
        let is_blocked = other.write && this == haul::Readiness::default();
        Self { waits_for: this, is_blocked, may_pause, has_moved }
    }
}

/// The registration of a socket for events.
///
/// The registration of a TCP socket with a bulk transfer is paused while the other side does not
/// take what the socket received, because otherwise the kernel calls epoll for each packet
/// (docs/measurements/forward.md). A paused socket reports neither its end nor its failure. In the
/// next second the socket is registered for its end and its failure, until it moves bytes again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registration {
    side: Side,
    interest: Interest,
    /// The second of the loop's clock in which a pause ends at the latest, unless the registration
    /// fails.
    paused_until: Option<u32>,
    /// Whether the latest step waits for bytes of the socket.
    waits_for_bytes: bool,
    /// Whether the next step sends to the socket what is left.
    pub sends_next: bool,
    vain_events: u32,
}

impl Registration {
    /// A socket that is registered for `interest`.
    pub fn new(side: Side, interest: Interest) -> Self {
        Self {
            side,
            interest,
            paused_until: None,
            waits_for_bytes: true,
            sends_next: false,
            vain_events: 0,
        }
    }

    /// Counts an event of the socket. The end of a stream is part of every later event.
    pub fn count(&mut self, event: Readiness) {
        let has_bytes = event.is_readable && event.tail == Tail::None;
        self.vain_events += u32::from(has_bytes && !self.waits_for_bytes);
    }

    /// Changes the events to what a step waits for. Other events stay until a few came without use.
    pub fn update(&mut self, found: Found, socket: &OwnedFd, context: &Context<'_>) {
        self.waits_for_bytes = found.waits_for.read;
        self.sends_next = found.waits_for.write;
        if self.is_paused() && found.is_blocked {
            if self.resume_at() <= context.now_seconds() {
                self.set(Interest::END, socket, context);
            }
        } else if found.is_blocked && found.may_pause && (found.has_moved || self.interest.read) {
            self.pause(socket, context);
        } else {
            let interest = self.next_interest(found.waits_for);
            self.set(interest, socket, context);
        }
    }

    fn pause(&mut self, socket: &OwnedFd, context: &Context<'_>) {
        context.unregister(socket);
        self.interest = Interest::END;
        self.paused_until = Some(context.deadline(0));
    }

    pub fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// The second of the loop's clock in which [`Registration::update`] is due again.
    pub fn resume_at(&self) -> u32 {
        self.paused_until.unwrap_or(NEVER)
    }

    /// Changes the events of a socket that is sent to only.
    pub fn only_write(&mut self, socket: &OwnedFd, context: &Context<'_>) {
        self.set(Interest { read: false, write: true }, socket, context);
    }

    fn set(&mut self, interest: Interest, socket: &OwnedFd, context: &Context<'_>) {
        if self.paused_until.is_some() {
            // At the user's limit of registrations the next second may have room.
            let registered = context.register(socket, self.side, interest);
            self.paused_until = registered.err().map(|_| context.deadline(0));
        } else if interest != self.interest {
            context.set_interest(socket, self.side, interest);
        }
        self.interest = interest;
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
            // An event after the end of the stream does not count as an event of bytes.
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
