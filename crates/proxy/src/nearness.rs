//! Whether an upstream is near: a round trip of microseconds, as to a server on the same machine.
//!
//! The kernel lets the receive buffer of a connection grow to megabytes, so that the window covers
//! a long path. On a short one a small buffer is enough. Its window is full, so that the upstream's
//! kernel sends several packets at each acknowledgement, for one interrupt
//! (docs/measurements/forward.md).

use haul_sys::tcp_info::TcpInfo;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// The longest of the shortest round trips to a near upstream, in microseconds. The buffer of
/// [`RECEIVE_BUFFER_BYTES`] then lets one connection receive 5 to 10 Gbit/s, by how much of it the
/// packets' overhead takes.
const RTT_US_MAX: u32 = 200;
/// The longest smoothed round trip to a near upstream, in microseconds. It is longer behind a
/// firewall that answers handshakes for its servers.
const SMOOTHED_RTT_US_MAX: u32 = 4000;
/// The connection to an upstream from which on they have small receive buffers. With 64 connections
/// these save, with one they save or cost, by the run; what is in between was not measured.
const CONNECTIONS_MIN: usize = 8;
/// The receive buffer, of which the kernel makes twice as much. With 64 connections 64 KiB cost
/// 1.26 (1.26–1.63) times as much; from 96 to 160 KiB no size differed with certainty.
const RECEIVE_BUFFER_BYTES: usize = 128 << 10;

const FAR: u8 = 1;
const NEAR: u8 = 2;

/// Whether an upstream is near, as far as its connections have told.
#[derive(Debug, Default)]
pub struct Nearness(AtomicU8);

impl Nearness {
    /// Whether no connection has told yet.
    pub fn is_unknown(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// Takes what the kernel has measured of a connection that ends. The latest one counts.
    pub fn record(&self, info: &TcpInfo) {
        // Without a measurement the kernel reports the highest number, before Linux 4.6 nothing.
        if info.rtt_us_min == 0 || info.rtt_us_min == u32::MAX {
            return;
        }
        let is_near = info.rtt_us_min <= RTT_US_MAX && info.rtt_us <= SMOOTHED_RTT_US_MAX;
        self.0.store(if is_near { NEAR } else { FAR }, Relaxed);
    }

    /// The receive buffer of the next connection, if so many are open with it; `None` for the
    /// kernel's choice.
    pub fn receive_buffer_bytes(&self, open: usize) -> Option<usize> {
        let is_small = self.0.load(Relaxed) == NEAR && open >= CONNECTIONS_MIN;
        is_small.then_some(RECEIVE_BUFFER_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_many_connections_to_a_near_upstream_have_small_buffers() {
        let nearness = Nearness::default();
        let mut info = TcpInfo { rtt_us_min: u32::MAX, ..TcpInfo::default() };
        nearness.record(&info);
        assert!(nearness.is_unknown() && nearness.receive_buffer_bytes(100).is_none());
        (info.rtt_us_min, info.rtt_us) = (30, 900);
        nearness.record(&info);
        assert!(!nearness.is_unknown());
        assert_eq!(nearness.receive_buffer_bytes(CONNECTIONS_MIN), Some(RECEIVE_BUFFER_BYTES));
        assert_eq!(nearness.receive_buffer_bytes(CONNECTIONS_MIN - 1), None);
        // A handshake that another host has answered.
        info.rtt_us = 20_000;
        nearness.record(&info);
        assert_eq!(nearness.receive_buffer_bytes(100), None);
        (info.rtt_us_min, info.rtt_us) = (300, 400);
        nearness.record(&info);
        assert_eq!(nearness.receive_buffer_bytes(100), None);
    }
}
