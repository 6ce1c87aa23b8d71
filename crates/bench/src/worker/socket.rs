//! Connecting and listening with socket options that must be set before the connection exists.
//!
//! `TCP_CONGESTION` set on a connected socket leaves behind what the first algorithm set up: BBR turns on TCP's pacing
//! timers (`sk_pacing_status`) at the handshake, and no later call turns them off. `SO_RCVBUF` decides the window scale,
//! which only a SYN carries.

use super::{Message, failed};
use haul_sys::sockopt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, listen, socket_with,
};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long connecting two hosts may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Socket options of both ends of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SocketOptions {
    /// `TCP_CONGESTION`; the namespace's default where `None`.
    pub congestion: Option<String>,
    /// The send and the receive buffer, fixed; the kernel sizes both by itself where `None`.
    pub buffer_bytes: Option<usize>,
}

impl SocketOptions {
    /// This congestion control, and buffers that the kernel sizes.
    pub(crate) fn with_congestion(name: impl Into<String>) -> Self {
        Self { congestion: Some(name.into()), buffer_bytes: None }
    }

    /// A TCP socket that has these options.
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
    pub(super) fn connect(&self, peer: SocketAddr) -> Result<TcpStream, Message> {
        let at = |errno: Errno| failed(&format!("connecting to {peer}"), errno);
        let socket = self.socket(peer.ip())?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(at)?;
        match connect(&socket, &peer) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                let timeout = Timespec { tv_sec: CONNECT_MAX.as_secs() as i64, tv_nsec: 0 };
                let mut wanted = [PollFd::new(&socket, PollFlags::OUT)];
                if poll(&mut wanted, Some(&timeout)).map_err(at)? == 0 {
                    return Err(at(Errno::TIMEDOUT));
                }
                rustix::net::sockopt::socket_error(&socket)
                    .and_then(|result| result)
                    .map_err(at)?;
            }
            Err(errno) => return Err(at(errno)),
        }
        rustix::io::ioctl_fionbio(&socket, false).map_err(at)?;
        Ok(socket.into())
    }

    /// Listens; accepted sockets inherit the options.
    pub(super) fn listen(&self, address: SocketAddr) -> Result<TcpListener, Message> {
        let at = |errno: Errno| failed(&format!("listening on {address}"), errno);
        let socket = self.socket(address.ip())?;
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true).map_err(at)?;
        bind(&socket, &address).map_err(at)?;
        listen(&socket, 16).map_err(at)?;
        Ok(socket.into())
    }
}
