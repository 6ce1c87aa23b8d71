//! Whether a peer is near: a round trip of microseconds, as to a server on the same machine.
//!
//! The kernel lets the receive buffer of a connection grow to megabytes, so that the window covers
//! a long path. On a short one a small buffer is enough. Its window is full, so that the upstream's
//! kernel sends several packets at each acknowledgement, for one interrupt
//! (docs/measurements/forward.md).

use haul_sys::tcp_info::TcpInfo;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// The longest of the shortest round trips to a near peer, in microseconds. The buffer of
/// [`RECEIVE_BUFFER_BYTES`] then lets one connection receive 5 to 10 Gbit/s, by how much of it the
/// packets' overhead takes.
const RTT_US_MAX: u32 = 200;
/// The longest smoothed round trip to a near peer, in microseconds. It is longer behind a
/// firewall that answers handshakes for servers far away. A connection of one request shows that
/// only from about 30 ms on: a new round trip counts for an eighth.
const SMOOTHED_RTT_US_MAX: u32 = 4000;
/// The number of open connections to an upstream from which on new ones have small receive buffers.
/// With 64 connections these save, with one they save or cost, by the run. What is in between was
/// not measured.
const CONNECTIONS_MIN: usize = 8;
/// The receive buffer, of which the kernel makes twice as much. With 64 connections 64 KiB cost
/// 1.26 (1.26–1.63) times as much; from 96 to 160 KiB no size differed with certainty.
const RECEIVE_BUFFER_BYTES: usize = 128 << 10;

/// Every so many connections of an upstream one is sampled when it ends.
const CONNECTIONS_PER_SAMPLE: u32 = 16;

/// Whether the peer of a connection is near. Without a measured round trip it is not: the kernel
/// reports the highest number then, before Linux 4.6 nothing.
pub fn is_near(info: &TcpInfo) -> bool {
    let is_short = (1..=RTT_US_MAX).contains(&info.rtt_us_min);
    is_short && info.rtt_us <= SMOOTHED_RTT_US_MAX
}

/// Whether an upstream is near, by the round trips of its connections.
#[derive(Debug, Default)]
pub struct Nearness {
    is_near: AtomicBool,
    /// Connections that have ended.
    ended: AtomicU32,
}

impl Nearness {
    /// Counts a connection that ends; true if it is a sample: the first one, and then every
    /// sixteenth.
    pub fn takes_sample(&self) -> bool {
        self.ended.fetch_add(1, Relaxed).is_multiple_of(CONNECTIONS_PER_SAMPLE)
    }

    /// Classifies the upstream by the round trips of a connection. The latest sample counts.
    pub fn record(&self, info: &TcpInfo) {
        let is_measured = info.rtt_us_min != 0 && info.rtt_us_min != u32::MAX;
        if is_measured {
            self.is_near.store(is_near(info), Relaxed);
        }
    }

    /// Forgets the round trips, which were those of other addresses.
    pub fn reset(&self) {
        self.is_near.store(false, Relaxed);
        self.ended.store(0, Relaxed);
    }

    /// The receive buffer of the next connection, if so many are open with it; `None` for the
    /// kernel's choice.
    pub fn receive_buffer_bytes(&self, open: usize) -> Option<usize> {
        let is_small = self.is_near.load(Relaxed) && open >= CONNECTIONS_MIN;
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
        assert_eq!(nearness.receive_buffer_bytes(100), None);
        (info.rtt_us_min, info.rtt_us) = (30, 900);
        nearness.record(&info);
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

    #[test]
    fn samples_are_regular_and_begin_again_with_new_addresses() {
        let nearness = Nearness::default();
        let samples = || (0..40).filter(|_| nearness.takes_sample()).count();
        assert_eq!(samples(), 3);
        nearness.record(&TcpInfo { rtt_us_min: 30, rtt_us: 30, ..TcpInfo::default() });
        nearness.reset();
        assert_eq!(nearness.receive_buffer_bytes(100), None);
        assert!(nearness.takes_sample());
    }
}
