//! State of a TCP connection (`getsockopt(TCP_INFO)`, `struct tcp_info` of `<linux/tcp.h>`).
//!
//! The kernel locks the socket while it fills the structure, so one reading is consistent. Every
//! acknowledgement that had arrived has been processed, and the data that it allowed to send has
//! been sent.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Size of `struct tcp_info` up to `tcpi_snd_wnd`. Later kernels append fields, and copy no more
/// bytes than were requested.
const TCP_INFO_BYTES: usize = 232;
/// Offsets of the fields (uapi/linux/tcp.h; the layout is part of the kernel's ABI).
mod offset {
    pub const STATE: usize = 0;
    pub const SND_MSS: usize = 16;
    pub const RTT: usize = 68;
    pub const SND_SSTHRESH: usize = 76;
    pub const TOTAL_RETRANS: usize = 100;
    pub const MAX_PACING_RATE: usize = 112;
    pub const SEGS_IN: usize = 140;
    pub const MIN_RTT: usize = 148;
    pub const RWND_LIMITED: usize = 176;
    pub const BYTES_SENT: usize = 200;
    pub const SND_WND: usize = 228;
}

/// `TCP_ESTABLISHED` of `<net/tcp_states.h>`.
const TCP_ESTABLISHED: u8 = 1;

/// `TCP_INFINITE_SSTHRESH` of `<net/tcp.h>`.
pub const INFINITE_SSTHRESH: u32 = 0x7FFF_FFFF;

/// The fields of `struct tcp_info` that haul uses.
///
/// Counters cover the connection's whole life. A field that the kernel does not provide yet reads
/// 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Whether the connection is established, that is, open in both directions.
    pub is_established: bool,
    /// Payload of a full segment, in bytes.
    pub segment_bytes: u32,
    /// Smoothed round-trip time, in microseconds.
    pub rtt_us: u32,
    /// Shortest round-trip time, in microseconds; `u32::MAX` if none was measured (Linux 4.6).
    pub rtt_us_min: u32,
    /// Congestion window up to which it grows exponentially (slow start), in segments;
    /// [`INFINITE_SSTHRESH`] before the first loss.
    pub slow_start_threshold_segments: u32,
    /// Segments that were retransmitted (Linux 2.6).
    pub retransmitted_segments: u32,
    /// Receive window that the peer advertises, in bytes (Linux 5.4).
    pub peer_window_bytes: u32,
    /// Payload sent, including retransmissions, in bytes (Linux 4.19).
    pub sent_bytes: u64,
    /// Packets received, including acknowledgements (Linux 4.2).
    pub segments_in: u32,
    /// Time during which only the peer's window limited the sender, in microseconds (Linux 4.10).
    pub window_limited_us: u64,
    /// Limit set by `SO_MAX_PACING_RATE`, in bytes per second; `u64::MAX` for none.
    pub pacing_rate_bytes_per_second_max: u64,
}

impl TcpInfo {
    /// Parses the bytes of a `struct tcp_info` from `getsockopt` or from socket diagnostics.
    ///
    /// Fields that an older kernel has not written read 0.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let field = |offset: usize, len: usize| {
            let mut value = [0; 8];
            if let Some(source) = bytes.get(offset..offset + len) {
                let start = if cfg!(target_endian = "little") { 0 } else { 8 - len };
                value[start..start + len].copy_from_slice(source);
            }
            u64::from_ne_bytes(value)
        };
        let field_u32 = |offset| field(offset, 4) as u32;
        Self {
            is_established: field(offset::STATE, 1) == u64::from(TCP_ESTABLISHED),
            segment_bytes: field_u32(offset::SND_MSS),
            rtt_us: field_u32(offset::RTT),
            rtt_us_min: field_u32(offset::MIN_RTT),
            slow_start_threshold_segments: field_u32(offset::SND_SSTHRESH),
            retransmitted_segments: field_u32(offset::TOTAL_RETRANS),
            peer_window_bytes: field_u32(offset::SND_WND),
            sent_bytes: field(offset::BYTES_SENT, 8),
            segments_in: field_u32(offset::SEGS_IN),
            window_limited_us: field(offset::RWND_LIMITED, 8),
            pacing_rate_bytes_per_second_max: field(offset::MAX_PACING_RATE, 8),
        }
    }
}

/// Reads the state of a TCP connection. `EOPNOTSUPP` or `ENOPROTOOPT` for a socket of another kind.
pub fn tcp_info(socket: impl AsFd) -> io::Result<TcpInfo> {
    let mut bytes = [0u8; TCP_INFO_BYTES];
    let mut len = TCP_INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `bytes`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(TcpInfo::from_bytes(&bytes)) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn the_state_of_a_connection_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let before = tcp_info(&sender).unwrap();
        assert!(before.is_established && before.segment_bytes > 500, "{before:?}");
        assert_eq!(before.pacing_rate_bytes_per_second_max, u64::MAX);
        sender.write_all(&[1; 10_000]).unwrap();
        receiver.read_exact(&mut [0; 10_000]).unwrap();
        let after = tcp_info(&sender).unwrap();
        assert_eq!(after.sent_bytes - before.sent_bytes, 10_000);
        // The shortest round trip is at most the average one.
        assert!((1..=2 * after.rtt_us.max(1)).contains(&after.rtt_us_min), "{after:?}");
        assert!(after.peer_window_bytes > 1000 && after.segments_in > 0, "{after:?}");
        crate::sockopt::set_max_pacing_rate(&sender, 1_000_000).unwrap();
        assert_eq!(tcp_info(&sender).unwrap().pacing_rate_bytes_per_second_max, 1_000_000);
    }

    #[test]
    fn fields_missing_from_a_short_structure_read_zero() {
        let mut bytes = [0xff; TCP_INFO_BYTES];
        bytes[0] = TCP_ESTABLISHED;
        let whole = TcpInfo::from_bytes(&bytes);
        assert!(whole.is_established && whole.peer_window_bytes == u32::MAX, "{whole:?}");
        let short = TcpInfo::from_bytes(&bytes[..230]);
        assert_eq!((short.peer_window_bytes, short.window_limited_us), (0, u64::MAX));
        assert_eq!(TcpInfo::from_bytes(&[]), TcpInfo::default());
    }

    #[test]
    fn a_udp_socket_is_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(tcp_info(&socket).is_err());
    }
}
