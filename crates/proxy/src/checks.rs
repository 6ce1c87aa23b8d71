//! Active checks: a thread connects to each upstream again and again.

use crate::closing::{ClosingReason, Closings};
use crate::config::DownPolicy;
use crate::routing::{CurrentTable, RoutingTable};
use crate::upstream::{CheckOutcome, Upstream};
use haul_server::connect::{self, ConnectOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// A check that takes longer has failed.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// What follows a change of an upstream's state.
#[derive(Debug, Clone)]
pub struct OnChange {
    pub closings: Arc<Closings>,
    pub down_policy: DownPolicy,
}

/// The thread that checks, which ends when this is dropped.
#[derive(Debug)]
pub struct Checks {
    _stop: Sender<()>,
}

impl Checks {
    /// Checks all upstreams of the table in force in an interval.
    pub fn start(
        table: Arc<CurrentTable>,
        interval: Duration,
        on_change: OnChange,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        std::thread::Builder::new().name("haul-check".into()).spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                check(&table.get(), &on_change);
            }
        })?;
        Ok(Self { _stop: stop })
    }
}

/// Connects to all upstreams at the same time.
fn check(table: &RoutingTable, on_change: &OnChange) {
    let sockets: Vec<_> = table.upstreams().map(|upstream| start(upstream)).collect();
    let deadline = Instant::now() + CHECK_TIMEOUT;
    for (upstream, socket) in table.upstreams().zip(sockets) {
        match upstream.record_check(socket.and_then(|socket| finish(&socket, deadline))) {
            CheckOutcome::Same => {}
            CheckOutcome::Up => on_change.closings.cancel(upstream, ClosingReason::Down),
            CheckOutcome::Down => on_change.closings.apply(on_change.down_policy, upstream),
        }
    }
}

fn start(upstream: &Upstream) -> io::Result<OwnedFd> {
    let addresses = upstream.addresses();
    let address = addresses.first();
    let address = address.ok_or_else(|| io::Error::other("its name is not resolved"))?;
    connect::start(address, ConnectOptions::default())
}

/// Waits until a connection is established or has failed.
fn finish(socket: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        match connect::finish(socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            finished => return finished,
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        rustix::io::retry_on_intr(|| {
            poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&left))
        })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, GroupConfig};
    use std::net::TcpListener;

    fn table(upstreams: &[&str]) -> RoutingTable {
        let upstreams: Vec<_> = upstreams.iter().map(|text| text.parse().unwrap()).collect();
        RoutingTable::new(&Config::new([GroupConfig::new("a", upstreams)]), None).unwrap()
    }

    #[test]
    fn an_upstream_is_down_after_three_failed_checks_and_up_after_two_good_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let table = table(&[&address.to_string()]);
        let on_change = OnChange {
            closings: Arc::default(),
            down_policy: DownPolicy::CloseAfter(Duration::ZERO),
        };
        let check = || {
            check(&table, &on_change);
            table.upstreams().all(|upstream| upstream.is_down())
        };
        assert_eq!([check(), check()], [false; 2]);
        drop(listener);
        assert_eq!([check(), check(), check()], [false, false, true]);
        let upstream = table.upstreams().next().unwrap();
        (0..3).for_each(|_| upstream.record_failure(0, &io::ErrorKind::ConnectionRefused.into()));
        assert!(upstream.is_ejected(0));
        let _listener = TcpListener::bind(address).unwrap();
        assert_eq!([check(), check()], [true, false]);
        assert!(!upstream.is_ejected(0), "its connections failed while it was down");
    }
}
