//! [`Claim`]: one sender of a process lends on a socket, because a completion can be read once.

use haul_sys::fork;
use rustix::net::sockopt;
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// The identifiers of the sockets on which senders of this process lend. A forked child has a copy,
/// so its senders copy on the sockets on which its parent lends.
static CLAIMED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
/// The process that made the first claim ([`fork::generation`]); 0 before that.
static FIRST_PROCESS: AtomicU64 = AtomicU64::new(0);
/// How often a forked child tries to lock the set.
const CHILD_ATTEMPTS: u32 = 1000;

/// While a claim exists, no other sender of the process lends on the socket.
#[derive(Debug)]
pub(crate) struct Claim {
    /// `None` if the kernel does not offer an identifier.
    socket_id: Option<u64>,
    /// The process that made the claim.
    process: u64,
}

impl Claim {
    /// Claims a socket; `None` if another sender lends on the socket. `SO_COOKIE` (Linux 4.12)
    /// identifies a socket. Without `SO_COOKIE`, every claim succeeds.
    pub fn of(socket: BorrowedFd<'_>) -> Option<Self> {
        let socket_id = sockopt::socket_cookie(socket).ok();
        let is_free = match socket_id {
            Some(socket_id) => claimed()?.insert(socket_id),
            None => true,
        };
        is_free.then(|| Self { socket_id, process: fork::generation() })
    }

    /// Keeps the claim until the process ends, because completions are still to come. The kernel
    /// does not use the identifier of a socket again.
    pub fn keep(self) {
        std::mem::forget(self);
    }

    /// A claim on a socket that no other sender has.
    #[cfg(test)]
    pub fn of_simulation() -> Self {
        Self { socket_id: None, process: fork::generation() }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked child, the parent still has the claim.
        if self.process != fork::generation() {
            return;
        }
        if let (Some(socket_id), Some(mut claimed)) = (self.socket_id, claimed()) {
            claimed.remove(&socket_id);
        }
    }
}

/// Locks the set. `None` in a forked child if another thread of its parent held the lock during the
/// fork, because nothing releases the child's copy of the lock.
fn claimed() -> Option<MutexGuard<'static, BTreeSet<u64>>> {
    let process = fork::generation();
    let first = FIRST_PROCESS.compare_exchange(0, process, Relaxed, Relaxed);
    if first.is_ok() || first == Err(process) {
        return Some(CLAIMED.lock().unwrap_or_else(PoisonError::into_inner));
    }
    for _ in 0..CHILD_ATTEMPTS {
        match CLAIMED.try_lock() {
            Ok(claimed) => return Some(claimed),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}
