//! UDP sockets without checksums (`SO_NO_CHECK`).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Makes a UDP socket over IPv4 send datagrams without checksums (`SO_NO_CHECK`, any kernel).
///
/// The kernel then refuses UDP segmentation offload with `EINVAL` (`udp_send_skb` in
/// `net/ipv4/udp.c`).
pub fn disable_checksums(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads one `int` from the pointer and keeps no reference to it.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NO_CHECK,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
