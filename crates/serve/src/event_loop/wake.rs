//! Waking an event loop from another thread.

use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor that an event loop waits on and any thread can make readable.
#[derive(Debug)]
pub struct Wake {
    counter: OwnedFd,
}

impl Wake {
    /// A new one.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self { counter: rustix::event::eventfd(0, flags)? })
    }

    /// Wakes the loop, now or when it next waits.
    pub fn wake(&self) {
        // Full means that the loop has not looked for a very long time: it will wake all the same.
        let _ = rustix::io::write(&self.counter, &1u64.to_ne_bytes());
    }

    /// Takes note of having been woken.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.counter, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.counter.as_fd()
    }
}
