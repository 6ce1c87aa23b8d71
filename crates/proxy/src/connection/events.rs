//! What is known of a connection's socket by its events, and which of them it is registered for.

use haul_server::event_loop::{Context, Interest, NEVER, Readiness, Side, Tail};
use std::os::fd::OwnedFd;

/// Events of bytes, in a row, that no step waits for, after which such events are left out. Each
/// costs a wait of the loop, and to leave them out and to add them again costs two calls.
const VAIN_EVENTS_MAX: u32 = 4;
/// Bytes in one direction, since the last ones in the other, from which on a socket is paused. A
/// pause costs two calls: for responses of 1 MiB in large packets it did not pay
/// (docs/measurements/forward.md).
const LARGE_TRANSFER_BYTES: u64 = 4 << 20;

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

/// What was forwarded in each direction since the last bytes in the other.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Transfers {
    sent_bytes: [u64; 2],
    bytes: [u64; 2],
}

impl Transfers {
    /// Records how much was forwarded so far, to the upstream and to the client.
    pub fn record(&mut self, sent_bytes: [u64; 2]) {
        let before = std::mem::replace(&mut self.sent_bytes, sent_bytes);
        let moved = [0, 1].map(|index| sent_bytes[index].saturating_sub(before[index]));
        for (index, other) in [(0, 1), (1, 0)] {
            let bytes = if moved[other] > 0 { 0 } else { self.bytes[index] };
            self.bytes[index] = bytes + moved[index];
        }
    }

    /// Whether there is a large transfer from the client, and from the upstream.
    pub fn are_large(&self) -> [bool; 2] {
        self.bytes.map(|bytes| bytes >= LARGE_TRANSFER_BYTES)
    }
}

/// What a step has found out about a socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub waits_for: haul::Readiness,
    /// Whether its bytes wait for the other side, and nothing else is waited for.
    pub is_blocked: bool,
    /// Whether it may be paused: a TCP socket with a large transfer.
    pub may_pause: bool,
    /// Whether the step has moved bytes.
    pub has_moved: bool,
}

impl Found {
    /// About the first of two sockets, by what the step waits for on each.
    pub fn new([this, other]: [haul::Readiness; 2], may_pause: bool, has_moved: bool) -> Self {
        let is_blocked = other.write && this == haul::Readiness::default();
        Self { waits_for: this, is_blocked, may_pause, has_moved }
    }
}

/// The registration of a socket for its events.
///
/// That of a TCP socket with a large transfer is paused while the other side does not take what the
/// socket has received: for each packet the kernel otherwise calls epoll, in vain
/// (docs/measurements/forward.md). A paused socket reports neither its end nor its failure. In the
/// next second it is registered for these, until it has moved bytes again.
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

    /// Those of a new connection: the client's socket has this interest, and the upstream's all.
    pub fn both(of_client: Interest) -> [Self; 2] {
        [Self::new(Side::Client, of_client), Self::new(Side::Upstream, Interest::BOTH)]
    }

    /// Counts an event of the socket. The end of a stream is part of every later event.
    pub fn count(&mut self, event: Readiness) {
        let has_bytes = event.is_readable && event.tail == Tail::None;
        self.vain_events += u32::from(has_bytes && !self.waits_for_bytes);
    }

    /// Changes the events to what a step waits for. Others stay until a few were in vain.
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
    fn a_transfer_is_large_until_the_other_side_sends() {
        let mut transfers = Transfers::default();
        transfers.record([100, LARGE_TRANSFER_BYTES - 1]);
        assert_eq!(transfers.are_large(), [false, false]);
        transfers.record([100, LARGE_TRANSFER_BYTES]);
        assert_eq!(transfers.are_large(), [false, true]);
        transfers.record([200, LARGE_TRANSFER_BYTES]);
        assert_eq!(transfers.are_large(), [false, false]);
    }

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
