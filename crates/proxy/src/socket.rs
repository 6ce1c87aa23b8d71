//! What a socket tells of its peer, and how its peer sees the close.

use haul_server::event_loop::Tail;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::sockopt::set_socket_linger;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// What a socket would report by an event: a failure that no call has returned yet, or else the end
/// of the stream.
pub fn pending_tail(socket: &OwnedFd) -> Tail {
    let mut sockets = [PollFd::new(socket, PollFlags::RDHUP)];
    let polled = retry_on_intr(|| poll(&mut sockets, Some(&Timespec::default())));
    match polled.map(|_| sockets[0].revents()) {
        Ok(events) if events.contains(PollFlags::ERR) => Tail::Failed,
        Ok(events) if events.contains(PollFlags::RDHUP) => Tail::End,
        _ => Tail::None,
    }
}

/// Whether a socket has lost its peer: by a reset or a timeout, and a Unix socket by a close.
pub fn is_gone(socket: &OwnedFd, is_tcp: bool) -> bool {
    if is_tcp {
        return rustix::net::getpeername(socket).is_err();
    }
    // It still has a name then. The kernel reports this without being asked.
    let mut sockets = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut sockets, Some(&Timespec::default())).is_ok()
        && sockets[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Makes the close of a socket reset the connection. A Unix socket has no reset.
pub fn reset_on_close(socket: &OwnedFd) {
    let _ = set_socket_linger(socket, Some(Duration::ZERO));
}

/// Undoes [`reset_on_close`].
pub fn close_as_usual(socket: &OwnedFd) {
    let _ = set_socket_linger(socket, None);
}
