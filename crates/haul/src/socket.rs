//! Checks of the kind of a socket.

use crate::call::Call;
use crate::error::{Error, failed};
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::os::fd::AsFd;

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
