//! Small send buffers for large streams to near peers.
//!
//! Without loss a connection has all of its send buffer in flight, megabytes of it, and each packet
//! interrupts the CPU of a peer on the same machine. A small buffer leaves less in flight, for which
//! there are fewer interrupts (docs/measurements/forward.md). It needs no capability, unlike the
//! clamp of the congestion window ([`haul_server::window_clamp`]), which saves more.

use crate::nearness;
use haul_sys::tcp_info::tcp_info;
use rustix::net::sockopt;
use std::os::fd::OwnedFd;

/// The bytes after which a stream is large. By then its round trips are known.
const LARGE_BYTES: u64 = 1 << 20;
/// The buffer, of which the kernel makes twice as much, unless `net.core.wmem_max` is less (208 KiB
/// by default). With a round trip of 200 µs it lets one connection send 15 Gbit/s. From 96 to 192
/// KiB no size differed with certainty; 64 and 512 KiB cost more.
const BUFFER_BYTES: usize = 192 << 10;

/// The send buffers of a connection's two sockets.
#[derive(Debug, Clone, Copy, Default)]
pub struct SendBuffers {
    are_done: [bool; 2],
}

impl SendBuffers {
    /// Limits the buffer of each socket that has been sent a large stream, if its peer is near.
    /// Each is looked at once.
    pub fn limit(&mut self, sockets: [&OwnedFd; 2], sent_bytes: [u64; 2]) {
        for ((socket, sent_bytes), is_done) in
            sockets.into_iter().zip(sent_bytes).zip(&mut self.are_done)
        {
            if sent_bytes >= LARGE_BYTES && !std::mem::replace(is_done, true) {
                // A Unix socket has no such information.
                if tcp_info(socket).is_ok_and(|info| nearness::is_near(&info)) {
                    // A larger buffer works as well.
                    let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER_BYTES);
                }
            }
        }
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
        let mut buffers = SendBuffers::default();
        buffers.limit([&socket, &other], [LARGE_BYTES - 1, 0]);
        assert_eq!([&socket, &other].map(size), usual);
        buffers.limit([&socket, &other], [LARGE_BYTES, LARGE_BYTES - 1]);
        assert_eq!(size(&socket), 2 * BUFFER_BYTES);
        assert_eq!(size(&other), usual[1]);
    }
}
