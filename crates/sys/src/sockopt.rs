//! Socket options that rustix lacks.

use crate::retry::{WaitsFor, retry_call};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Enables `MSG_ZEROCOPY` on the socket (`SO_ZEROCOPY`, Linux 4.14; UDP 5.0).
///
/// `EOPNOTSUPP` if the kernel or the protocol does not support it.
pub fn set_zerocopy(socket: impl AsFd, on: bool) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, &i32::from(on).to_ne_bytes())
}

/// Reads whether `MSG_ZEROCOPY` is enabled on the socket. `ENOPROTOOPT` on a kernel before 4.14.
pub fn zerocopy(socket: impl AsFd) -> io::Result<bool> {
    Ok(get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY)? != 0)
}

/// Sets how many queued bytes make a stream socket readable (`SO_RCVLOWAT`).
///
/// The end of the stream makes it readable too. TCP also grows the receive buffer to hold that many
/// bytes (Linux 4.18).
pub fn set_receive_low_water(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, &bytes.to_ne_bytes())
}

/// Reads how many queued bytes make a stream socket readable (`SO_RCVLOWAT`).
pub fn receive_low_water(socket: impl AsFd) -> io::Result<usize> {
    let bytes = get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT)?;
    Ok(usize::try_from(bytes).unwrap_or(1))
}

/// Discards up to `len` received bytes of a TCP socket without copying them (`MSG_TRUNC`).
///
/// Returns how many bytes were discarded, 0 at the end of the stream. On a datagram or Unix socket
/// the flag has another meaning. `EFAULT` if another protocol receives in TCP's place, such as a
/// sockmap: no byte was taken then. A socket with an upper-layer protocol
/// ([`has_upper_layer_protocol`]) may lose bytes instead.
pub fn discard(socket: impl AsFd, len: usize) -> io::Result<usize> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the buffer. Another kind of socket
    // fails with EFAULT at the null address rather than write anywhere.
    retry_call(&socket, WaitsFor::Receive, || unsafe {
        libc::recv(fd, std::ptr::null_mut(), len, libc::MSG_TRUNC)
    })
}

/// Whether TCP itself has bytes to receive, which stay where they are; false at the end of the
/// stream. Never blocks.
///
/// `EAGAIN` if nothing has arrived. `EFAULT` if another protocol receives in TCP's place, such as a
/// sockmap.
pub fn peek_tcp(socket: impl AsFd) -> io::Result<bool> {
    let fd = socket.as_fd().as_raw_fd();
    let flags = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: as for `discard`.
    let peeked = crate::syscall(|| unsafe {
        libc::recv(fd, std::ptr::null_mut(), 1, flags) as libc::ssize_t
    });
    peeked.map(|count| count > 0)
}

/// Limits the rate at which the socket sends (`SO_MAX_PACING_RATE`, Linux 3.13).
///
/// TCP paces without the `fq` qdisc since 4.13. The kernel counts payload and headers.
pub fn set_max_pacing_rate(socket: impl AsFd, bytes_per_second: u64) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &bytes_per_second.to_ne_bytes())
}

/// Fixes the sizes of the send and the receive buffer (`SO_SNDBUF`, `SO_RCVBUF`).
///
/// This disables the kernel's automatic sizing. The kernel doubles the value for its own
/// bookkeeping. With `CAP_NET_ADMIN` the size may exceed `net.core.wmem_max` and `rmem_max`;
/// without it those limits apply, without an error.
pub fn set_buffers(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    let value = i32::try_from(bytes).unwrap_or(i32::MAX).to_ne_bytes();
    for (force, plain) in
        [(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)]
    {
        match set(socket.as_fd(), libc::SOL_SOCKET, force, &value) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                set(socket.as_fd(), libc::SOL_SOCKET, plain, &value)?;
            }
            result => result?,
        }
    }
    Ok(())
}

/// Limits the segment size, in bytes, of later connections of this socket, in both directions
/// (`TCP_MAXSEG`).
///
/// The limit includes TCP options but not the TCP header. Sockets accepted from a listening socket
/// inherit it.
pub fn set_max_segment(socket: impl AsFd, bytes: u16) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_TCP, libc::TCP_MAXSEG, &i32::from(bytes).to_ne_bytes())
}

/// Reads the current maximum segment size of a connected socket, in bytes, without TCP's header and
/// options (`TCP_MAXSEG`).
pub fn max_segment(socket: impl AsFd) -> io::Result<u32> {
    Ok(get(socket.as_fd(), libc::SOL_TCP, libc::TCP_MAXSEG)?.try_into().unwrap_or(0))
}

/// Leaves the choice of the port to `connect`, which can use a port for several peers at a time,
/// where `bind` needs one that is free (`IP_BIND_ADDRESS_NO_PORT`, Linux 4.2).
pub fn set_bind_address_no_port(socket: impl AsFd) -> io::Result<()> {
    let on = 1i32.to_ne_bytes();
    set(socket.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &on)
}

/// Allows a socket to be bound to an address that this host does not have (`IP_TRANSPARENT`, Linux
/// 2.6.28; `IPV6_TRANSPARENT`, 2.6.37). `EPERM` without `CAP_NET_ADMIN`.
pub fn set_transparent(socket: impl AsFd, is_ipv6: bool) -> io::Result<()> {
    let (level, option) = if is_ipv6 {
        (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT)
    } else {
        (libc::IPPROTO_IP, libc::IP_TRANSPARENT)
    };
    set(socket.as_fd(), level, option, &1i32.to_ne_bytes())
}

/// Sets how long receiving calls poll the device before they wait for an interrupt (`SO_BUSY_POLL`,
/// Linux 3.11).
///
/// `EPERM` without `CAP_NET_ADMIN` for a time above `net.core.busy_read`.
pub fn set_busy_poll(socket: impl AsFd, microseconds: u32) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_BUSY_POLL, &microseconds.to_ne_bytes())
}

/// Installs the upper-layer protocol `name` on a connected TCP socket (`TCP_ULP`, Linux 4.13):
/// `"tls"` for kTLS.
///
/// `ENOENT` if the kernel lacks the protocol and cannot load it.
pub fn set_upper_layer_protocol(socket: impl AsFd, name: &str) -> io::Result<()> {
    set(socket.as_fd(), libc::SOL_TCP, libc::TCP_ULP, name.as_bytes())
}

/// Whether the socket has an upper-layer protocol (`TCP_ULP`, Linux 4.13), such as `tls`.
///
/// Its bytes are then not those that TCP has received.
pub fn has_upper_layer_protocol(socket: impl AsFd) -> io::Result<bool> {
    /// `TCP_ULP_NAME_MAX` of `<net/tcp.h>`.
    const NAME_BYTES_MAX: usize = 16;
    let mut name = [0u8; NAME_BYTES_MAX];
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `name`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // Without a protocol the kernel returns a length of 0.
    if result == 0 { Ok(len > 0 && name[0] != 0) } else { Err(io::Error::last_os_error()) }
}

/// The process that has connected a Unix socket (`SO_PEERCRED`); `None` if the namespace of this
/// process does not have it.
pub fn peer_process(socket: impl AsFd) -> io::Result<Option<NonZeroU32>> {
    // It is the first field of `struct ucred`, of which the kernel copies as much as is asked for.
    let pid = get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(u32::try_from(pid).ok().and_then(NonZeroU32::new))
}

/// The number of this thread's network namespace (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn network_namespace() -> io::Result<u64> {
    /// From `<asm-generic/socket.h>`.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM);
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    let mut cookie = 0u64;
    let mut len = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

fn get(socket: BorrowedFd<'_>, level: i32, option: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
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

/// Reads the number of bytes in a stream socket's receive queue (`FIONREAD`).
pub fn bytes_to_read(socket: impl AsFd) -> io::Result<u64> {
    rustix::io::ioctl_fionread(socket).map_err(io::Error::from)
}

/// Reads the MTU of the path to the peer of a connected IP socket, in bytes (`IP_MTU`, `IPV6_MTU`).
pub fn path_mtu(socket: impl AsFd) -> io::Result<u32> {
    let socket = socket.as_fd();
    let mtu = get(socket, libc::IPPROTO_IP, libc::IP_MTU)
        .or_else(|_| get(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU))?;
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Reads the number of bytes in a socket's send queue (`SIOCOUTQ`): for TCP, those that the peer
/// has not acknowledged.
pub fn bytes_to_send(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int to `bytes`. SIOCOUTQ is the same request as TIOCOUTQ.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 {
        Ok(u64::try_from(bytes).unwrap_or(0))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The send buffer of a stream socket, in bytes as the kernel counts them: its own data of each
/// packet is part of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendBuffer {
    /// The size. The kernel enlarges the buffer of a fast TCP connection by itself, and makes it
    /// smaller when TCP is short of memory (`tcp_mem`).
    pub bytes: usize,
    /// The part that is in use.
    pub used_bytes: usize,
}

impl SendBuffer {
    /// About as many bytes as the kernel accepts. In small packets the kernel accepts fewer bytes,
    /// and the last packet may exceed the buffer.
    pub fn room(self) -> usize {
        self.bytes.saturating_sub(self.used_bytes)
    }
}

/// Reads the send buffer of a stream socket (`SO_MEMINFO`, Linux 4.12).
pub fn send_buffer(socket: impl AsFd) -> io::Result<SendBuffer> {
    /// Places of `SK_MEMINFO_*` (uapi/linux/sock_diag.h) up to the one needed last.
    const WRITE_ALLOCATED: usize = 2;
    const SEND_BUFFER: usize = 3;
    const WRITE_QUEUED: usize = 5;
    let mut numbers = [0u32; WRITE_QUEUED + 1];
    let mut len = size_of_val(&numbers) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `numbers`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            numbers.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // TCP counts what it has queued, other protocols what they have allocated.
    let used = numbers[WRITE_ALLOCATED].max(numbers[WRITE_QUEUED]);
    Ok(SendBuffer { bytes: numbers[SEND_BUFFER] as usize, used_bytes: used as usize })
}

/// Probes whether the kernel can map a TCP socket's received pages (`TCP_ZEROCOPY_RECEIVE`, Linux
/// 4.18).
pub fn has_zerocopy_receive(socket: impl AsFd) -> io::Result<bool> {
    // The first fields of struct tcp_zerocopy_receive, all zero: address, length, recv_skip_hint.
    let mut request = [0u8; 16];
    let mut len = request.len() as libc::socklen_t;
    // SAFETY: the kernel reads and writes at most `len` bytes of `request`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            crate::receive_window::TCP_ZEROCOPY_RECEIVE,
            request.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    match result {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(false),
            // The kernel supports the option but rejects the request or the socket's state.
            _ => Ok(true),
        },
    }
}
