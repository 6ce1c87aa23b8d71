//! Checks of the kind of a socket.

use crate::call::Call;
use crate::error::{Error, failed};
use haul_sys::sockopt as options;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::os::fd::{AsFd, BorrowedFd};

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

/// Whether the program receives the bytes that TCP has received, and not those that an upper-layer
/// protocol (kTLS) makes of them.
pub(crate) fn receives_plain_tcp(socket: impl AsFd) -> bool {
    // A kernel without the option has no such protocol.
    is_tcp(&socket) && !options::has_upper_layer_protocol(&socket).unwrap_or(false)
}

/// Whether the kernel reports the completions of zero-copy sends on sockets of this family.
pub(crate) fn reports_completions(socket: impl AsFd) -> bool {
    matches!(
        sockopt::socket_domain(socket),
        Ok(AddressFamily::INET | AddressFamily::INET6 | AddressFamily::VSOCK)
    )
}

/// Enables zero-copy sends; false if that has to wait until bytes that other code sent before have
/// left the socket.
pub(crate) fn enable_zerocopy(socket: BorrowedFd<'_>) -> Result<bool, Error> {
    if !reports_completions(socket) {
        return Err(Error::Unsupported("only TCP, UDP and vsock sockets report completions"));
    }
    let is_enabled = || options::zerocopy(socket).map_err(failed(Call::GetZerocopy));
    if is_enabled()? {
        // Other code may have sent with it. Its completions must not be taken for those of the
        // loans. After the peer has acknowledged all bytes none is left to come, unless a device
        // keeps the clone of a packet.
        let is_empty = options::bytes_to_send(socket).is_ok_and(|left| left == 0);
        return Ok(is_empty);
    }
    options::set_zerocopy(socket, true).map_err(failed(Call::SetZerocopy))?;
    if is_enabled()? {
        Ok(true)
    } else {
        Err(Error::Unsupported("setting SO_ZEROCOPY had no effect"))
    }
}

/// Resets a TCP connection: the kernel drops what it has not sent. Does nothing if the connection
/// has ended.
pub(crate) fn reset(socket: impl AsFd) {
    let _ = rustix::net::connect_unspec(socket);
}
