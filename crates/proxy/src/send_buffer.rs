//! Small send buffers for large streams to near peers.
//!
//! Without loss a connection has all of its send buffer in flight, megabytes of it, and each packet
//! interrupts the CPU of a peer on the same machine. A small buffer leaves less in flight, for
//! which there are fewer interrupts (docs/measurements/forward.md). It needs no capability, unlike
//! the clamp of the congestion window ([`haul_server::window_clamp`]), which saves more.
//!
//! Where each segment is a packet of its own, a small buffer causes more interrupts instead: the
//! interface has to take packets of many segments.

use crate::nearness;
use haul_sys::interface;
use haul_sys::tcp_info::tcp_info;
use rustix::net::{getsockname, sockopt};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The bytes after which a stream is large. By then its round trips are known.
const LARGE_BYTES: u64 = 1 << 20;
/// The buffer, of which the kernel makes twice as much, unless `net.core.wmem_max` is less (208 KiB
/// by default). With a round trip of 200 µs it lets one connection send 15 Gbit/s. From 96 to 192
/// KiB no size differed with certainty; 64 and 512 KiB cost more.
const BUFFER_BYTES: usize = 192 << 10;

/// How long an interface's state counts, which an operator may change.
const KNOWN_FOR: Duration = Duration::from_secs(60);
/// The most addresses that are known.
const KNOWN_MAX: usize = 256;

/// The send buffers of a connection's two sockets: to its upstream, and to its client.
#[derive(Debug, Clone, Copy)]
pub struct SendBuffers {
    are_done: [bool; 2],
}

impl SendBuffers {
    /// `has_foreign_source`: the upstream's socket has the client's address, which no interface of
    /// this host has.
    pub fn new(are_limited: bool, has_foreign_source: bool) -> Self {
        Self { are_done: [!are_limited || has_foreign_source, !are_limited] }
    }

    /// Whether neither is to be looked at any more.
    pub fn are_done(self) -> bool {
        self.are_done == [true; 2]
    }

    /// Limits the buffer of each socket that has been sent a large stream, if its peer is near and
    /// its interface takes large packets. Each is looked at once.
    pub fn limit(
        &mut self,
        sockets: [&OwnedFd; 2],
        sent_bytes: [u64; 2],
        interfaces: &mut Interfaces,
    ) {
        for ((socket, sent_bytes), is_done) in
            sockets.into_iter().zip(sent_bytes).zip(&mut self.are_done)
        {
            if sent_bytes >= LARGE_BYTES && !std::mem::replace(is_done, true) {
                // A Unix socket has no such information.
                if tcp_info(socket).is_ok_and(|info| nearness::is_near(&info))
                    && interfaces.take_large_packets(socket)
                {
                    // A larger buffer works as well.
                    let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER_BYTES);
                }
            }
        }
    }
}

/// What is known of this host's interfaces.
#[derive(Debug)]
pub struct Interfaces {
    /// Whether the interface of each local address takes packets of many segments.
    known: HashMap<IpAddr, bool>,
    since: Instant,
}

impl Default for Interfaces {
    /// Nothing is known.
    fn default() -> Self {
        Self { known: HashMap::new(), since: Instant::now() }
    }
}

impl Interfaces {
    /// Whether the interface of the socket's local address takes packets of many segments. False if
    /// that is not known.
    fn take_large_packets(&mut self, socket: &OwnedFd) -> bool {
        let local = getsockname(socket).ok().and_then(|local| SocketAddr::try_from(local).ok());
        let Some(address) = local.map(|local| local.ip()) else { return false };
        if self.since.elapsed() > KNOWN_FOR || self.known.len() >= KNOWN_MAX {
            *self = Self::default();
        }
        let take = || interface::has_segmentation_offload(address).unwrap_or(false);
        *self.known.entry(address).or_insert_with(take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_buffer_of_a_large_stream_to_a_near_peer_is_small() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"x").unwrap();
        peer.read_exact(&mut [0]).unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [socket, other] = [stream, other].map(OwnedFd::from);
        let size = |socket: &OwnedFd| sockopt::socket_send_buffer_size(socket).unwrap();
        let usual = [&socket, &other].map(size);
        let (mut buffers, mut interfaces) = (SendBuffers::new(true, false), Interfaces::default());
        buffers.limit([&socket, &other], [LARGE_BYTES - 1, 0], &mut interfaces);
        assert_eq!([&socket, &other].map(size), usual);
        interfaces.known.insert([127, 0, 0, 1].into(), false);
        SendBuffers::new(true, false).limit([&socket, &other], [LARGE_BYTES, 0], &mut interfaces);
        assert_eq!([&socket, &other].map(size), usual, "packets of one segment");
        interfaces.known.clear();
        buffers.limit([&socket, &other], [LARGE_BYTES, LARGE_BYTES - 1], &mut interfaces);
        assert_eq!(size(&socket), 2 * BUFFER_BYTES);
        assert_eq!(size(&other), usual[1]);
        assert!(!buffers.are_done() && SendBuffers::new(false, false).are_done());
        let mut foreign = SendBuffers::new(true, true);
        foreign.limit([&other, &socket], [LARGE_BYTES; 2], &mut interfaces);
        assert!(foreign.are_done());
        assert_eq!(size(&other), usual[1]);
    }
}
