//! Wakes an event loop from another thread (`eventfd`).

use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor that an event loop polls and that any thread can make readable.
#[derive(Debug)]
pub struct Waker {
    eventfd: OwnedFd,
}

impl Waker {
    /// Creates the descriptor.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self { eventfd: rustix::event::eventfd(0, flags)? })
    }

    /// Wakes the event loop, now or when it next polls.
    pub fn wake(&self) {
        // A full counter is readable already, so the loop wakes all the same.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    /// Clears the descriptor, so that the next [`Waker::wake`] is a new event.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
    }

    /// Whether it was woken since [`Waker::clear`].
    #[cfg(test)]
    pub(crate) fn is_set(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.eventfd, PollFlags::IN)], Some(&now)) == Ok(1)
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
