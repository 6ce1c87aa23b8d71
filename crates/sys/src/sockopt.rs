//! Socket options that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Lets the socket take `MSG_ZEROCOPY` (`SO_ZEROCOPY`, Linux 4.14; UDP 5.0).
///
/// `EOPNOTSUPP` on a kernel or a protocol without it.
pub fn set_zerocopy(socket: impl AsFd, on: bool) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, &i32::from(on).to_ne_bytes())
}

/// Limits the rate at which the socket sends (`SO_MAX_PACING_RATE`, Linux 3.13; TCP paces itself without the `fq`
/// qdisc since 4.13). The kernel counts payload and headers.
pub fn set_max_pacing_rate(socket: impl AsFd, bytes_per_second: u64) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &bytes_per_second.to_ne_bytes())
}

/// Puts the upper-layer protocol `name` on a connected TCP socket (`TCP_ULP`, Linux 4.13): `"tls"` for kTLS.
///
/// `ENOENT` when the kernel has no such protocol and cannot load it.
pub fn set_upper_layer_protocol(socket: impl AsFd, name: &str) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_TCP, libc::TCP_ULP, name.as_bytes())
}

fn set(socket: BorrowedFd<'_>, level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `value.len()` bytes from `value`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that wait in a stream socket's receive queue (`FIONREAD`).
pub fn bytes_to_read(socket: impl AsFd) -> io::Result<u64> {
    rustix::io::ioctl_fionread(socket).map_err(io::Error::from)
}

/// Bytes that a TCP socket has taken and its peer has not yet acknowledged (`SIOCOUTQ`).
pub fn bytes_unacknowledged(socket: impl AsFd) -> io::Result<u64> {
    let mut count: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (the same number as TIOCOUTQ) writes one int to `count`.
    if unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut count) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(count as u64)
}
