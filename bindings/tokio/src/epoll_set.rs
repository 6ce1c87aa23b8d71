//! An epoll set that tokio watches.

use rustix::event::epoll::{self, CreateFlags};
use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Creates an epoll set. The descriptor of the set is readable while the set has events. Must be
/// called in a tokio runtime.
#[expect(unsafe_code, reason = "tokio cannot check that a descriptor stays open")]
pub fn create() -> io::Result<AsyncFd<OwnedFd>> {
    let set = epoll::create(CreateFlags::CLOEXEC)?;
    // SAFETY: an `OwnedFd` returns the same descriptor as long as it exists, and the `AsyncFd` owns
    // it until it removed the descriptor from tokio's reactor.
    Ok(unsafe { AsyncFd::register_with_interest(set, Interest::READABLE) }?)
}
