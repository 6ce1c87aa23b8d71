//! The rate of all connections together, divided by pacing.
//!
//! The kernel limits the rate of one socket (`SO_MAX_PACING_RATE`), but not of several together. So
//! each connection that sends gets a share. Once a second the unused part of the shares is divided
//! among the other connections (max-min fairness). The bytes are not copied for the limit.

use haul_sys::sockopt::set_max_pacing_rate;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// A connection that sends less in a second does not get a share.
const ACTIVE_BYTES: u64 = 64 << 10;

/// The directions, to upstreams and to clients. Each direction has the whole rate.
const DIRECTIONS: usize = 2;

/// A rate, shared by all event loops.
#[derive(Debug)]
pub struct TotalRate {
    bytes_per_second: u64,
    directions: [Share; DIRECTIONS],
}

#[derive(Debug)]
struct Share {
    /// Connections that send.
    active: AtomicUsize,
    /// The bytes that each of these connections may send in a second.
    bytes: AtomicU64,
    /// The bytes that satisfied connections leave of the rate.
    left: AtomicU64,
    /// The connections among which these bytes are divided.
    hungry: AtomicU64,
    /// The demands of the connections of each event loop.
    demands: Mutex<Vec<Demand>>,
}

/// The bytes that connections used in a second.
#[derive(Debug, Default, Clone, Copy)]
pub struct Demand {
    /// The bytes of the connections that left some of their share.
    satisfied_bytes: u64,
    /// The number of connections that used their whole share.
    hungry: u64,
}

/// The share of one connection.
#[derive(Debug)]
pub struct PacedConnection {
    total: Arc<TotalRate>,
    directions: [PacedDirection; DIRECTIONS],
}

#[derive(Debug, Default, Clone, Copy)]
struct PacedDirection {
    is_active: bool,
    /// The rate of the socket.
    rate: u64,
    /// The limit of a connection that left some of its share. Such a connection may become hungry
    /// at any time, and all of them together must not send many times the whole rate.
    rate_max: Option<u64>,
    /// The bytes that entered the socket until the latest second.
    counted_bytes: u64,
    /// The bytes that left the socket until the latest second.
    departed_bytes: u64,
}

impl TotalRate {
    /// A rate for the connections of so many event loops.
    pub fn new(bytes_per_second: u64, loops: usize) -> Arc<Self> {
        let share = || Share {
            active: AtomicUsize::new(0),
            bytes: AtomicU64::new(bytes_per_second),
            left: AtomicU64::new(bytes_per_second),
            hungry: AtomicU64::new(0),
            demands: Mutex::new(vec![Demand::default(); loops]),
        };
        Arc::new(Self { bytes_per_second, directions: [share(), share()] })
    }

    /// Counts another connection that sends.
    fn activate(&self, direction: usize) {
        let share = &self.directions[direction];
        let active = share.active.fetch_add(1, Relaxed) as u64 + 1;
        let hungry = share.hungry.fetch_add(1, Relaxed) + 1;
        let of_left = share.left.load(Relaxed) / hungry;
        share.bytes.fetch_min(of_left.max(self.equal_share(active)), Relaxed);
    }

    fn equal_share(&self, active: u64) -> u64 {
        (self.bytes_per_second / active.max(1)).max(1)
    }

    /// Divides the rate anew, with the demand of an event loop's connections in a second.
    pub fn divide(&self, loop_index: usize, demands: [Demand; DIRECTIONS]) {
        for (share, demand) in self.directions.iter().zip(demands) {
            let mut all = share.demands.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(own) = all.get_mut(loop_index) {
                *own = demand;
            }
            let satisfied_bytes: u64 = all.iter().map(|one| one.satisfied_bytes).sum();
            let hungry: u64 = all.iter().map(|one| one.hungry).sum();
            let left = self.bytes_per_second.saturating_sub(satisfied_bytes);
            let equal = self.equal_share(share.active.load(Relaxed) as u64);
            let bytes = left.checked_div(hungry).unwrap_or(equal);
            share.left.store(left, Relaxed);
            share.hungry.store(hungry, Relaxed);
            share.bytes.store(bytes.max(equal), Relaxed);
        }
    }
}

impl PacedConnection {
    /// The share of a new connection.
    pub fn new(total: Arc<TotalRate>) -> Self {
        Self { total, directions: Default::default() }
    }

    /// Sets the rates of both sockets, first of the upstream's, to the present share. `rate_max` is
    /// the limit of each connection.
    pub fn pace(&mut self, sockets: [&OwnedFd; DIRECTIONS], rate_max: Option<u64>) {
        for (at, socket) in sockets.into_iter().enumerate() {
            let share = &self.total.directions[at];
            let equal = self.total.equal_share(share.active.load(Relaxed) as u64);
            let direction = &mut self.directions[at];
            let own_max = direction.rate_max.map_or(u64::MAX, |most| most.max(equal));
            let rate = share.bytes.load(Relaxed).min(own_max).min(rate_max.unwrap_or(u64::MAX));
            if direction.rate != rate {
                direction.rate = rate;
                // A Unix socket does not have a rate.
                let _ = set_max_pacing_rate(socket, rate);
            }
        }
    }

    /// Records the bytes that were sent so far.
    pub fn record(&mut self, sent_bytes: [u64; DIRECTIONS]) {
        for (at, direction) in self.directions.iter_mut().enumerate() {
            let used_bytes = sent_bytes[at].saturating_sub(direction.counted_bytes);
            if !direction.is_active && used_bytes >= ACTIVE_BYTES {
                direction.is_active = true;
                self.total.activate(at);
            }
        }
    }

    /// Begins another second, and adds the bytes of the second before to `demands`.
    /// `departed_bytes` are the bytes that left each socket so far, because bytes enter a large
    /// socket in bursts that may be seconds apart.
    pub fn begin_second(
        &mut self,
        sent_bytes: [u64; DIRECTIONS],
        departed_bytes: [u64; DIRECTIONS],
        demands: &mut [Demand; DIRECTIONS],
    ) {
        for (at, direction) in self.directions.iter_mut().enumerate() {
            let used_bytes = departed_bytes[at].saturating_sub(direction.departed_bytes);
            direction.departed_bytes = departed_bytes[at];
            direction.counted_bytes = sent_bytes[at];
            if !direction.is_active {
                continue;
            }
            if used_bytes < ACTIVE_BYTES.min(direction.rate / 2) {
                direction.is_active = false;
                direction.rate_max = None;
                self.total.directions[at].active.fetch_sub(1, Relaxed);
            } else if used_bytes < direction.rate / 4 * 3 {
                direction.rate_max = Some(2 * used_bytes);
                // The demand may grow a little.
                demands[at].satisfied_bytes += used_bytes + used_bytes / 8;
            } else {
                direction.rate_max = None;
                demands[at].hungry += 1;
            }
        }
    }
}

impl Drop for PacedConnection {
    fn drop(&mut self) {
        for (share, direction) in self.total.directions.iter().zip(&self.directions) {
            if direction.is_active {
                share.active.fetch_sub(1, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn share(total: &TotalRate) -> u64 {
        total.directions[0].bytes.load(Relaxed)
    }

    #[test]
    fn what_a_connection_leaves_is_divided_among_the_others() {
        let total = TotalRate::new(12 * MIB, 2);
        let mut connections: Vec<_> =
            (0..3).map(|_| PacedConnection::new(Arc::clone(&total))).collect();
        assert_eq!(share(&total), 12 * MIB);
        for connection in &mut connections {
            connection.record([ACTIVE_BYTES, 0]);
            let pair = rustix::net::socketpair(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            connection.pace([&pair.0, &pair.1], None);
        }
        assert_eq!(share(&total), 4 * MIB);
        for connection in &mut connections {
            connection.directions[0].rate = 4 * MIB;
        }
        // Two use their shares, and one uses an eighth of a MiB.
        let mut demands = <[Demand; 2]>::default();
        for (connection, used) in connections.iter_mut().zip([4 * MIB, 4 * MIB, MIB / 8]) {
            connection.begin_second([used, 0], [used, 0], &mut demands);
        }
        total.divide(0, demands);
        let expected = (12 * MIB - MIB / 8 - MIB / 64) / 2;
        assert_eq!(share(&total), expected);
        // A new one gets a part of what is left, and takes nothing from the one that needs little.
        let mut newcomer = PacedConnection::new(Arc::clone(&total));
        newcomer.record([ACTIVE_BYTES, 0]);
        assert_eq!(share(&total), (12 * MIB - MIB / 8 - MIB / 64) / 3);
        drop(newcomer);
        // One ends, and those that are left do nothing any more.
        connections.pop();
        let mut demands = <[Demand; 2]>::default();
        for connection in &mut connections {
            connection.begin_second([4 * MIB, 0], [4 * MIB, 0], &mut demands);
        }
        total.divide(0, demands);
        assert_eq!(total.directions[0].active.load(Relaxed), 0);
        assert_eq!(share(&total), 12 * MIB);
    }
}
