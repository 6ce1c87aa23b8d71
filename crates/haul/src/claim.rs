//! [`Claim`]: one sender of a process lends on a socket, because a completion can be read once.

use rustix::net::sockopt;
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

/// The identifiers of the sockets on which senders of this process lend.
static CLAIMED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// While a claim exists, no other sender of the process lends on the socket.
#[derive(Debug)]
pub(crate) struct Claim {
    /// `None` if the kernel does not offer an identifier.
    socket_id: Option<u64>,
}

impl Claim {
    /// Claims a socket; `None` if another sender lends on the socket. Sockets are told apart by
    /// `SO_COOKIE` (Linux 4.12). Without `SO_COOKIE`, every claim succeeds.
    pub fn of(socket: BorrowedFd<'_>) -> Option<Self> {
        let socket_id = sockopt::socket_cookie(socket).ok();
        let is_free = socket_id.is_none_or(|socket_id| claimed().insert(socket_id));
        is_free.then(|| Self { socket_id })
    }

    /// A claim on a socket that no other sender has.
    #[cfg(test)]
    pub fn of_simulation() -> Self {
        Self { socket_id: None }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(socket_id) = self.socket_id {
            claimed().remove(&socket_id);
        }
    }
}

fn claimed() -> std::sync::MutexGuard<'static, BTreeSet<u64>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}
