//! Non-blocking TCP and Unix connections with a timeout.
//!
//! [`start`] returns at once; the socket becomes writable when the handshake ends, and [`finish`]
//! reports how. The timeout is a deadline of the caller's connection in its event loop.

use crate::unix_address::to_socket_address;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// The address of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PeerAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket: a path, or `@name` ([`crate::unix_address`]).
    Unix(PathBuf),
}

/// The local address of a connection. The kernel chooses the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The address, of the family of the peer's.
    pub address: IpAddr,
    /// Whether the address may belong to another host (`IP_TRANSPARENT`), which needs
    /// `CAP_NET_ADMIN`.
    pub is_foreign: bool,
}

/// The options of a connection. They do not apply to a Unix socket.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConnectOptions<'o> {
    /// The congestion control; `None` for the host's default. It is set before the connection
    /// exists, because a socket that began with BBR stays paced when it is changed later.
    pub congestion: Option<&'o str>,
    /// The local address; `None` if the host's routes choose.
    pub source: Option<Source>,
    /// Whether the end of the handshake waits for the first data, so that both share a packet. The
    /// kernel sends the end of the handshake after 200 ms at the latest. A caller without data
    /// sends it by [`acknowledge`] once the socket is writable.
    pub is_ack_delayed: bool,
}

/// Starts to connect a non-blocking socket. An error is a refusal that is known at once:
/// `AddrNotAvailable` if all ports of the local address are used, or if the host lacks the address.
pub fn start(address: &PeerAddress, options: ConnectOptions<'_>) -> io::Result<OwnedFd> {
    let (family, protocol) = match address {
        PeerAddress::Tcp(SocketAddr::V4(_)) => (AddressFamily::INET, Some(ipproto::TCP)),
        PeerAddress::Tcp(SocketAddr::V6(_)) => (AddressFamily::INET6, Some(ipproto::TCP)),
        PeerAddress::Unix(_) => (AddressFamily::UNIX, None),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, protocol)?;
    let connected = match address {
        PeerAddress::Tcp(address) => {
            sockopt::set_tcp_nodelay(&socket, true)?;
            // Urgent data is one byte of the stream, and is read in its place.
            sockopt::set_socket_oobinline(&socket, true)?;
            if let Some(name) = options.congestion {
                sockopt::set_tcp_congestion(&socket, name)?;
            }
            if let Some(source) = options.source {
                bind(&socket, source)?;
            }
            if options.is_ack_delayed {
                // Without this option the connection works as well.
                let _ = sockopt::set_tcp_quickack(&socket, false);
            }
            rustix::net::connect(&socket, address)
        }
        PeerAddress::Unix(path) => rustix::net::connect(&socket, &to_socket_address(path)?),
    };
    match connected {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno.into()),
    }
}

/// Sends the acknowledgement that waits for data ([`ConnectOptions::is_ack_delayed`]). No effect on
/// Unix sockets.
pub fn acknowledge(socket: impl AsFd) {
    let _ = sockopt::set_tcp_quickack(socket, true);
}

fn bind(socket: &OwnedFd, source: Source) -> io::Result<()> {
    let Source { address, is_foreign } = source;
    haul_sys::sockopt::set_bind_address_no_port(socket)?;
    if is_foreign {
        haul_sys::sockopt::set_transparent(socket, address.is_ipv6())?;
    }
    Ok(rustix::net::bind(socket, &SocketAddr::new(address, 0))?)
}

/// Whether a connection could not begin because all ports of its local address are used. The kernel
/// reports the same error if the host lacks an address of the peer's family.
pub fn lacks_port(address: &PeerAddress, error: &io::Error) -> bool {
    let PeerAddress::Tcp(address) = address else { return false };
    if error.kind() != io::ErrorKind::AddrNotAvailable {
        return false;
    }
    // A UDP socket does not use TCP's ports, and sends nothing to connect.
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket(family, SocketType::DGRAM, None);
    socket.is_ok_and(|socket| rustix::net::connect(&socket, address).is_ok())
}

/// Checks whether this process may use an address as a source. A foreign source may be any address.
pub fn check_source(source: Source) -> io::Result<()> {
    let is_ipv4 = source.address.is_ipv4();
    let family = if is_ipv4 { AddressFamily::INET } else { AddressFamily::INET6 };
    bind(&rustix::net::socket(family, SocketType::STREAM, None)?, source)
}

/// Checks whether this process may use a congestion control.
pub fn check_congestion(name: &str) -> io::Result<()> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    Ok(sockopt::set_tcp_congestion(&socket, name)?)
}

/// The result of a connection whose socket became writable (`SO_ERROR`).
/// [`io::ErrorKind::WouldBlock`] if the handshake still runs.
pub fn finish(socket: impl AsFd) -> io::Result<()> {
    sockopt::socket_error(&socket)??;
    match rustix::net::getpeername(&socket) {
        Ok(_) => Ok(()),
        Err(Errno::NOTCONN) => Err(io::ErrorKind::WouldBlock.into()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::TcpListener;

    fn wait_until_writable(socket: &OwnedFd) {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&limit)).unwrap();
    }

    #[test]
    fn a_connection_reports_success_and_refusal() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let options = ConnectOptions { congestion: Some("reno"), ..ConnectOptions::default() };
        let socket = start(&PeerAddress::Tcp(address), options).unwrap();
        wait_until_writable(&socket);
        finish(&socket).unwrap();
        assert_eq!(sockopt::tcp_congestion(&socket).unwrap(), "reno");
        drop(listener);
        let refused =
            start(&PeerAddress::Tcp(address), ConnectOptions::default()).and_then(|socket| {
                wait_until_writable(&socket);
                finish(&socket)
            });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_connection_has_the_source_that_was_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = PeerAddress::Tcp(listener.local_addr().unwrap());
        let source = |text: &str| Source { address: text.parse().unwrap(), is_foreign: false };
        let options = ConnectOptions { source: Some(source("127.0.0.9")), ..Default::default() };
        let _socket = start(&address, options).unwrap();
        assert_eq!(listener.accept().unwrap().1.ip().to_string(), "127.0.0.9");
        check_source(source("127.0.0.9")).unwrap();
        let error = check_source(source("192.0.2.1")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[test]
    fn a_full_accept_queue_leaves_a_connection_under_way() {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        rustix::net::bind(&socket, &any).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let bound = rustix::net::getsockname(&socket).unwrap();
        let address = PeerAddress::Tcp(SocketAddr::try_from(bound).unwrap());
        let options = ConnectOptions::default();
        let sockets: Vec<_> = (0..8).map(|_| start(&address, options).unwrap()).collect();
        let is_under_way = |socket: &OwnedFd| {
            finish(socket).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        };
        assert!(is_under_way(sockets.last().unwrap()));
    }

    #[test]
    fn a_unix_socket_is_connected_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let options = ConnectOptions::default();
        finish(start(&PeerAddress::Unix(path), options).unwrap()).unwrap();
        let none = PeerAddress::Unix(folder.path().join("none"));
        assert_eq!(start(&none, options).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
