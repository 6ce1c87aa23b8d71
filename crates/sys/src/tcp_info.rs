//! The state of a TCP connection (`getsockopt(TCP_INFO)`, `struct tcp_info` of `<linux/tcp.h>`).
//!
//! The kernel locks the socket while it fills the structure, so one reading is consistent: every acknowledgement
//! that had arrived has been processed, and what it allowed to be sent has been sent.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// `struct tcp_info` up to `tcpi_snd_wnd`. Later kernels append fields, and copy no more than they are asked for.
#[repr(C)]
struct RawTcpInfo {
    state: u8,
    ca_state: u8,
    retransmits: u8,
    probes: u8,
    backoff: u8,
    options: u8,
    window_scales: u8,
    flags: u8,
    rto: u32,
    ato: u32,
    snd_mss: u32,
    rcv_mss: u32,
    unacked: u32,
    sacked: u32,
    lost: u32,
    retrans: u32,
    fackets: u32,
    last_data_sent: u32,
    last_ack_sent: u32,
    last_data_recv: u32,
    last_ack_recv: u32,
    pmtu: u32,
    rcv_ssthresh: u32,
    rtt: u32,
    rttvar: u32,
    snd_ssthresh: u32,
    snd_cwnd: u32,
    advmss: u32,
    reordering: u32,
    rcv_rtt: u32,
    rcv_space: u32,
    total_retrans: u32,
    pacing_rate: u64,
    max_pacing_rate: u64,
    bytes_acked: u64,
    bytes_received: u64,
    segs_out: u32,
    segs_in: u32,
    notsent_bytes: u32,
    min_rtt: u32,
    data_segs_in: u32,
    data_segs_out: u32,
    delivery_rate: u64,
    busy_time: u64,
    rwnd_limited: u64,
    sndbuf_limited: u64,
    delivered: u32,
    delivered_ce: u32,
    bytes_sent: u64,
    bytes_retrans: u64,
    dsack_dups: u32,
    reord_seen: u32,
    rcv_ooopack: u32,
    snd_wnd: u32,
}
const _: () = assert!(size_of::<RawTcpInfo>() == 232);
const _: () = assert!(std::mem::offset_of!(RawTcpInfo, pacing_rate) == 104);
const _: () = assert!(std::mem::offset_of!(RawTcpInfo, snd_wnd) == 228);

/// `TCP_ESTABLISHED` of `<net/tcp_states.h>`.
const TCP_ESTABLISHED: u8 = 1;

/// The fields that haul uses. Counters are the connection's since it was made; a field that the kernel does not
/// have yet reads 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Whether the connection is established: both directions are open.
    pub is_established: bool,
    /// Payload of a full segment, in bytes.
    pub segment_bytes: u32,
    /// Segments sent and not acknowledged.
    pub unacked_segments: u32,
    /// The congestion window, in segments.
    pub congestion_window_segments: u32,
    /// The receive window that the peer has announced, in bytes (Linux 5.4).
    pub peer_window_bytes: u32,
    /// Payload in the send queue that was never sent, in bytes (Linux 4.6).
    pub unsent_bytes: u32,
    /// Packets received, acknowledgements included (Linux 4.2).
    pub segments_in: u32,
    /// Packets sent (Linux 4.2).
    pub segments_out: u32,
    /// Segments sent again.
    pub retransmitted_segments: u32,
    /// Time during which only the peer's window held the sender back, in microseconds (Linux 4.10).
    pub window_limited_us: u64,
    /// The rate that the congestion control has set, in bytes a second. Whether packets are held to it, this field
    /// does not tell: every congestion control sets it.
    pub pacing_rate_bytes_per_second: u64,
    /// The limit that `SO_MAX_PACING_RATE` has set; `u64::MAX` for none.
    pub pacing_rate_bytes_per_second_max: u64,
}

/// Reads the state of a TCP connection. `EOPNOTSUPP` or `ENOPROTOOPT` for a socket of another kind.
pub fn tcp_info(socket: impl AsFd) -> io::Result<TcpInfo> {
    let mut raw = MaybeUninit::<RawTcpInfo>::zeroed();
    let mut len = size_of::<RawTcpInfo>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `raw`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_INFO,
            raw.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the structure holds integers only, so the zeros that it was made of are valid where an older kernel
    // wrote less than all of it.
    let raw = unsafe { raw.assume_init() };
    Ok(TcpInfo {
        is_established: raw.state == TCP_ESTABLISHED,
        segment_bytes: raw.snd_mss,
        unacked_segments: raw.unacked,
        congestion_window_segments: raw.snd_cwnd,
        peer_window_bytes: raw.snd_wnd,
        unsent_bytes: raw.notsent_bytes,
        segments_in: raw.segs_in,
        segments_out: raw.segs_out,
        retransmitted_segments: raw.total_retrans,
        window_limited_us: raw.rwnd_limited,
        pacing_rate_bytes_per_second: raw.pacing_rate,
        pacing_rate_bytes_per_second_max: raw.max_pacing_rate,
    })
}

/// Memory of packets that have left the socket and that the queueing discipline or the device still holds, in bytes
/// (`SO_MEMINFO`, Linux 4.12).
pub fn device_queue_bytes(socket: impl AsFd) -> io::Result<u32> {
    // SK_MEMINFO_WMEM_ALLOC of <linux/sock_diag.h>, of nine entries.
    const WMEM_ALLOC: usize = 2;
    let mut entries = [0u32; 9];
    let mut len = size_of_val(&entries) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `entries`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            entries.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(entries[WMEM_ALLOC]) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn a_connections_state_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let before = tcp_info(&sender).unwrap();
        assert!(before.is_established && before.segment_bytes > 500, "{before:?}");
        assert_eq!(before.pacing_rate_bytes_per_second_max, u64::MAX);
        sender.write_all(&[1; 10_000]).unwrap();
        receiver.read_exact(&mut [0; 10_000]).unwrap();
        let after = tcp_info(&sender).unwrap();
        assert!(after.segments_out > before.segments_out, "{after:?}");
        assert!(after.peer_window_bytes > 1000 && after.congestion_window_segments > 0, "{after:?}");
        crate::sockopt::set_max_pacing_rate(&sender, 1_000_000).unwrap();
        assert_eq!(tcp_info(&sender).unwrap().pacing_rate_bytes_per_second_max, 1_000_000);
        assert!(device_queue_bytes(&sender).is_ok());
    }

    #[test]
    fn another_kind_of_socket_is_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(tcp_info(&socket).is_err());
    }
}
