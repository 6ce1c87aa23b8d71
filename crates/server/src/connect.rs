//! Non-blocking TCP and Unix connections with a timeout.
//!
//! [`start`] returns at once; the socket becomes writable when the handshake ends, and [`finish`]
//! reports how. The timeout is a deadline of the caller's connection in its event loop.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, ipproto, sockopt};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// The address of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PeerAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// Starts to connect a non-blocking socket. An error is a refusal that is known at once.
///
/// `congestion` is set before the connection exists: a socket that has begun with BBR stays paced
/// when its congestion control is changed later.
pub fn start(address: &PeerAddress, congestion: Option<&str>) -> io::Result<OwnedFd> {
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
            if let Some(name) = congestion {
                sockopt::set_tcp_congestion(&socket, name)?;
            }
            rustix::net::connect(&socket, address)
        }
        PeerAddress::Unix(path) => rustix::net::connect(&socket, &SocketAddrUnix::new(path)?),
    };
    match connected {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether this process may use a congestion control.
pub fn check_congestion(name: &str) -> io::Result<()> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    Ok(sockopt::set_tcp_congestion(&socket, name)?)
}

/// The result of a connection whose socket became writable (`SO_ERROR`).
/// [`io::ErrorKind::WouldBlock`] if it is still under way.
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
        let socket = start(&PeerAddress::Tcp(address), Some("reno")).unwrap();
        wait_until_writable(&socket);
        finish(&socket).unwrap();
        assert_eq!(sockopt::tcp_congestion(&socket).unwrap(), "reno");
        drop(listener);
        let refused = start(&PeerAddress::Tcp(address), None).and_then(|socket| {
            wait_until_writable(&socket);
            finish(&socket)
        });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_full_accept_queue_leaves_a_connection_under_way() {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        rustix::net::bind(&socket, &any).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let bound = rustix::net::getsockname(&socket).unwrap();
        let address = PeerAddress::Tcp(SocketAddr::try_from(bound).unwrap());
        let sockets: Vec<_> = (0..8).map(|_| start(&address, None).unwrap()).collect();
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
        finish(start(&PeerAddress::Unix(path), None).unwrap()).unwrap();
        let none = PeerAddress::Unix(folder.path().join("none"));
        assert_eq!(start(&none, None).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
