//! Whether a TCP socket is paced: whether timers, and not only the windows, decide when its packets leave.
//!
//! Pacing costs CPU where the network is not the limit: each timer is an interrupt, and packets leave in small groups
//! instead of large ones. The kernel paces a socket that has a congestion control such as BBR, or `SO_MAX_PACING_RATE`,
//! **and every socket that ever had one**: `TCP_CONGESTION` set after `connect` changes the algorithm and leaves the
//! pacing of the first one on (`sk_pacing_status` of include/net/sock.h is never reset). No socket option reads that
//! state, so [`Watch`] concludes it from what the socket does.
//!
//! What this cannot see: pacing by the queueing discipline `fq`, which holds packets behind the socket; and pacing of a
//! socket that never has more to send than its windows allow, which it does not slow down.

use haul_sys::tcp_info::{TcpInfo, device_queue_bytes, tcp_info};
use rustix::net::sockopt;
use std::io;
use std::os::fd::AsFd;

/// Congestion controls that pace by themselves (net/ipv4/tcp_bbr.c; `bbr2` and `bbr3` outside the kernel's tree).
const PACING_ALGORITHMS: [&str; 3] = ["bbr", "bbr2", "bbr3"];
/// Room in both windows beyond which unsent data is not held back by them. TCP may wait to fill a packet of up to 512 KiB
/// (`GSO_MAX_SIZE` of include/linux/netdevice.h), so less room proves nothing.
const ROOM_BYTES: u64 = 512 << 10;
/// Less unsent data than this may be a packet that waits to be filled (`TCP_CORK`, `MSG_MORE`, Nagle's algorithm).
const UNSENT_BYTES: u32 = 64 << 10;
/// The device holds so little that TCP's limit on data in device queues (`tcp_limit_output_bytes`) is not reached.
const DEVICE_BYTES: u32 = 64 << 10;
/// Readings without which nothing is concluded.
const READINGS_MIN: u32 = 8;
/// The share of the readings that shows pacing.
const HELD_SHARE: f64 = 0.2;

/// Why the packets of a socket are paced.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pacing {
    /// `SO_MAX_PACING_RATE` is set to this many bytes a second.
    MaxRate(u64),
    /// Its congestion control, of this name, paces.
    CongestionControl(String),
    /// Its congestion control, of this name, does not pace; an earlier one, or a rate that was set and lifted, left pacing
    /// on. The cure is to set `TCP_CONGESTION` before `connect` or `listen`.
    Leftover(String),
}

impl std::fmt::Display for Pacing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MaxRate(bytes) => write!(formatter, "paced to {bytes} bytes a second (SO_MAX_PACING_RATE)"),
            Self::CongestionControl(name) => write!(formatter, "paced by its congestion control, {name}"),
            Self::Leftover(name) => write!(
                formatter,
                "paced by an earlier congestion control than {name}: set TCP_CONGESTION before connect or listen"
            ),
        }
    }
}

/// Readings of one socket while it sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Watch {
    readings: u32,
    held: u32,
}

impl Watch {
    /// Takes a reading: two system calls, about half a microsecond. Worth taking while data waits in the send queue; a
    /// reading without any counts for nothing.
    pub fn look(&mut self, socket: impl AsFd) -> io::Result<()> {
        let info = tcp_info(&socket)?;
        if info.unsent_bytes >= UNSENT_BYTES && info.is_established {
            self.readings += 1;
            let is_held = has_room(&info) && device_queue_bytes(&socket)? < DEVICE_BYTES;
            self.held += u32::from(is_held);
        }
        Ok(())
    }

    /// Readings that found data in the send queue.
    pub fn readings(&self) -> u32 {
        self.readings
    }

    /// Whether the readings show that packets were held back although both windows were open.
    pub fn is_held(&self) -> bool {
        self.readings >= READINGS_MIN && f64::from(self.held) >= HELD_SHARE * f64::from(self.readings)
    }

    /// Why the socket is paced; `None` where nothing shows that it is.
    pub fn pacing(&self, socket: impl AsFd) -> io::Result<Option<Pacing>> {
        let limit = tcp_info(&socket)?.pacing_rate_bytes_per_second_max;
        if limit != u64::MAX {
            return Ok(Some(Pacing::MaxRate(limit)));
        }
        let name = sockopt::tcp_congestion(&socket)?;
        Ok(if PACING_ALGORITHMS.contains(&name.as_str()) {
            Some(Pacing::CongestionControl(name))
        } else {
            self.is_held().then_some(Pacing::Leftover(name))
        })
    }
}

/// Whether the congestion window and the peer's window both have room for more than the largest packet.
fn has_room(info: &TcpInfo) -> bool {
    let segment_bytes = u64::from(info.segment_bytes);
    let in_flight = u64::from(info.unacked_segments) * segment_bytes;
    let window =
        u64::from(info.peer_window_bytes).min(u64::from(info.congestion_window_segments) * segment_bytes);
    in_flight + ROOM_BYTES <= window
}
