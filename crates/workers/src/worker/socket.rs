//! Sockets with options that must be set before the connection is made.
//!
//! `TCP_CONGESTION` on a connected socket does not undo the setup of the first algorithm. BBR turns
//! on TCP's pacing timers (`sk_pacing_status`) at the handshake, and no later call turns them off.
//! `SO_RCVBUF` determines the window scale, which only a SYN carries.

use super::{Message, failed};
use haul_sys::sockopt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, listen, socket_with,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Timeout of connecting two hosts.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Socket options of both ends of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptions {
    /// `TCP_CONGESTION`; `None` for the namespace's default.
    pub congestion: Option<String>,
    /// Fixed size of the send and the receive buffer; `None` for the kernel's autotuning.
    pub buffer_bytes: Option<usize>,
}

impl SocketOptions {
    /// Options with this congestion control and autotuned buffers.
    pub fn with_congestion(name: impl Into<String>) -> Self {
        Self { congestion: Some(name.into()), buffer_bytes: None }
    }

    /// Creates a TCP socket with these options.
    fn socket(&self, peer: IpAddr) -> Result<OwnedFd, Message> {
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket =
            socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))
                .map_err(|errno| failed("making a socket", errno))?;
        if let Some(name) = &self.congestion {
            rustix::net::sockopt::set_tcp_congestion(&socket, name)
                .map_err(|errno| failed(&format!("setting congestion control {name}"), errno))?;
        }
        if let Some(bytes) = self.buffer_bytes {
            sockopt::set_buffers(&socket, bytes)
                .map_err(|error| failed("setting SO_SNDBUF and SO_RCVBUF", error))?;
        }
        Ok(socket)
    }

    /// Connects to `peer`.
    pub fn connect(&self, peer: SocketAddr) -> Result<TcpStream, Message> {
        let connect_error = |errno: Errno| failed(&format!("connecting to {peer}"), errno);
        let socket = self.socket(peer.ip())?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(connect_error)?;
        match connect(&socket, &peer) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                let timeout = Timespec { tv_sec: CONNECT_MAX.as_secs() as i64, tv_nsec: 0 };
                let mut poll_fds = [PollFd::new(&socket, PollFlags::OUT)];
                if poll(&mut poll_fds, Some(&timeout)).map_err(connect_error)? == 0 {
                    return Err(connect_error(Errno::TIMEDOUT));
                }
                rustix::net::sockopt::socket_error(&socket)
                    .and_then(|result| result)
                    .map_err(connect_error)?;
            }
            Err(errno) => return Err(connect_error(errno)),
        }
        rustix::io::ioctl_fionbio(&socket, false).map_err(connect_error)?;
        Ok(socket.into())
    }

    /// Listens; accepted sockets inherit the options.
    pub fn listen(&self, address: SocketAddr) -> Result<TcpListener, Message> {
        let listen_error = |errno: Errno| failed(&format!("listening on {address}"), errno);
        let socket = self.socket(address.ip())?;
        bind_and_listen(&socket, address).map_err(listen_error)?;
        Ok(socket.into())
    }
}

/// Listens at an address. `[::]` includes IPv4, also where `net.ipv6.bindv6only` is 1.
pub fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind_and_listen(&socket, address)?;
    Ok(socket.into())
}

fn bind_and_listen(socket: &OwnedFd, address: SocketAddr) -> rustix::io::Result<()> {
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(socket, !address.ip().is_unspecified())?;
    }
    rustix::net::sockopt::set_socket_reuseaddr(socket, true)?;
    bind(socket, &address)?;
    listen(socket, 16)
}
