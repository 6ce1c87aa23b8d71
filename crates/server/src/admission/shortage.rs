//! Messages that the host or this process lacks descriptors, ports or memory for a connection. The
//! event loop that finds a shortage first logs it, once a minute.

use crate::log_limiter::LogLimiter;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::fmt::Display;
use std::io;
use std::sync::{Mutex, PoisonError};
use tracing::warn;

/// The missing resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shortage {
    FilesOfProcess,
    FilesOfHost,
    Ports,
    Other,
}

/// The messages of this process, by [`Shortage`].
static LOGGED: Mutex<[LogLimiter; 4]> = Mutex::new([const { LogLimiter::new() }; 4]);

/// Whether the host or this process lacks something that every other connection would also need. A
/// lack of ports does not count, because an address of the other family may have a port.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        // `ENOSPC` is the limit of epoll registrations of a user.
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::NOSPC)
    )
}

/// Logs `problem`, the error that caused it and what to do about it, unless a shortage of this kind
/// was logged within a minute.
pub fn report(problem: impl Display, error: &io::Error) {
    let (shortage, advice) = match Errno::from_io_error(error) {
        Some(Errno::MFILE) => (
            Shortage::FilesOfProcess,
            ": the limit of open files is reached (ulimit -n, LimitNOFILE of systemd)",
        ),
        Some(Errno::NFILE) => {
            (Shortage::FilesOfHost, ": the host's limit of open files is reached (fs.file-max)")
        }
        Some(Errno::ADDRNOTAVAIL) => (
            Shortage::Ports,
            ": no port of the local address is left (net.ipv4.ip_local_port_range; --source adds \
             addresses)",
        ),
        _ => (Shortage::Other, ""),
    };
    let now_seconds = clock_gettime(ClockId::Monotonic).tv_sec;
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    // It wraps around after 136 years.
    if logged[shortage as usize].allow(now_seconds as u32) {
        warn!(%error, "{problem}: {error}{advice}");
    }
}
