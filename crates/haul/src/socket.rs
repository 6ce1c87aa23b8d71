//! Checks of the kind of a socket.

use crate::call::Call;
use crate::error::{Error, failed};
use haul_sys::ktls;
use haul_sys::sockopt as options;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType, sockopt};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// The kind of the socket: stream or datagram. Any other kind, and a listening socket, is an error.
pub(crate) fn kind(socket: impl AsFd) -> Result<SocketType, Error> {
    let kind =
        sockopt::socket_type(&socket).map_err(|errno| failed(Call::GetType)(errno.into()))?;
    let listens = sockopt::socket_acceptconn(&socket)
        .map_err(|errno| failed(Call::GetAcceptconn)(errno.into()))?;
    match kind {
        _ if listens => {
            Err(Error::WrongSocket { needed: "a connected socket", found: "a listening one" })
        }
        SocketType::STREAM | SocketType::DGRAM => Ok(kind),
        _ => Err(Error::WrongSocket {
            needed: "a stream or a datagram socket",
            found: "of another kind",
        }),
    }
}

/// Fails if the socket is not a stream socket.
pub(crate) fn must_be_stream(kind: SocketType) -> Result<(), Error> {
    if kind == SocketType::STREAM {
        Ok(())
    } else {
        Err(Error::WrongSocket { needed: "a stream socket", found: "a datagram socket" })
    }
}

/// Whether the socket is of an IP family (IPv4 or IPv6).
pub(crate) fn is_inet(socket: impl AsFd) -> bool {
    matches!(sockopt::socket_domain(socket), Ok(AddressFamily::INET | AddressFamily::INET6))
}

/// Whether the protocol is TCP itself, and not another one with the same interface (MPTCP, SCTP).
pub(crate) fn is_tcp(socket: impl AsFd) -> bool {
    is_inet(&socket)
        && matches!(
            sockopt::socket_protocol(&socket),
            Ok(Some(protocol)) if protocol == rustix::net::ipproto::TCP
        )
}

/// Whether the peer is on this machine by its address: an address of the loopback device, or the
/// address of the socket.
pub(crate) fn is_loopback(socket: impl AsFd) -> bool {
    let ip = |address: rustix::net::SocketAddrAny| {
        std::net::SocketAddr::try_from(address).ok().map(|address| address.ip().to_canonical())
    };
    let peer = rustix::net::getpeername(&socket).ok().flatten().and_then(ip);
    let own = rustix::net::getsockname(&socket).ok().and_then(ip);
    peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == own)
}

/// Whether the program receives the bytes that TCP has received, and not those that an upper-layer
/// protocol (kTLS) makes of them.
pub(crate) fn receives_plain_tcp(socket: impl AsFd) -> bool {
    // A kernel without the option has no such protocol.
    is_tcp(&socket) && !options::has_upper_layer_protocol(&socket).unwrap_or(false)
}

/// Receives; 0 at the end of the stream. The end of a TLS stream is an alert, which `recv` refuses
/// with `EIO`, like every record that is not application data.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> rustix::io::Result<usize> {
    match rustix::net::recv(&socket, &mut *buffer, flags) {
        Ok((count, _)) => Ok(count),
        Err(Errno::IO) if ktls::is_close_notify_next(&socket) => Ok(0),
        Err(errno) => Err(errno),
    }
}

/// Enables zero-copy sends; false if that has to wait until bytes that other code sent before have
/// left the socket. The first `own_bytes` of what is in the socket are not theirs.
///
/// Other code may have sent with `MSG_ZEROCOPY`, also if the option is off now: clearing it cancels
/// no completion. The first completion that arrives after this call must not be theirs. On TCP none
/// of theirs is left to come after the peer has acknowledged all their bytes, unless a device keeps
/// the clone of a packet. On UDP it follows within microseconds after the packet has left.
pub(crate) fn enable_zerocopy(socket: BorrowedFd<'_>, own_bytes: u64) -> Result<bool, Error> {
    // A send on a vsock may use several numbers, so its completion does not show which.
    if !is_inet(socket) {
        return Err(Error::Unsupported(
            "only TCP and UDP sockets report the completion of each send",
        ));
    }
    let queued = options::bytes_to_send(socket).map_err(failed(Call::BytesToSend))?;
    if queued > own_bytes {
        return Ok(false);
    }
    if is_tcp(socket) {
        // The queue is counted down before the packets are freed, and their completions queued.
        // This call waits for the lock under which that happens.
        haul_sys::tcp_info::tcp_info(socket).map_err(failed(Call::Getsockopt))?;
    }
    let is_enabled = || options::zerocopy(socket).map_err(failed(Call::GetZerocopy));
    if !is_enabled()? {
        options::set_zerocopy(socket, true).map_err(failed(Call::SetZerocopy))?;
        if !is_enabled()? {
            return Err(Error::Unsupported("setting SO_ZEROCOPY had no effect"));
        }
    }
    Ok(true)
}

/// The events that the kernel reports without being asked: an error, and the end of both streams.
///
/// `ERR` means that [`take_error`] returns a failure, or that the error queue is not empty. Without
/// it, `SO_ERROR` may still be what the connection survives: a route that is gone for a moment.
pub(crate) fn pending_events(socket: impl AsFd) -> Result<PollFlags, Error> {
    let mut sockets = [PollFd::new(&socket, PollFlags::empty())];
    let poll = || rustix::event::poll(&mut sockets, Some(&Timespec::default()));
    rustix::io::retry_on_intr(poll).map_err(|errno| failed(Call::Poll)(errno.into()))?;
    Ok(sockets[0].revents())
}

/// Returns the socket's error, and clears it (`SO_ERROR`).
pub(crate) fn take_error(socket: impl AsFd) -> Result<(), Error> {
    let pending = sockopt::socket_error(socket).and_then(|pending| pending);
    pending.map_err(|errno| failed(Call::GetError)(errno.into()))
}

/// Resets a TCP connection: the kernel drops what it has not sent. Does nothing if the connection
/// has ended.
pub(crate) fn reset(socket: impl AsFd) {
    if rustix::net::connect_unspec(&socket).is_err() {
        // The kernel refuses this for kTLS, and while another thread waits for the socket. Without
        // a time to linger, closing resets the connection.
        let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    }
}
