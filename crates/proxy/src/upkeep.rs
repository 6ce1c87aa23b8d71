//! Upkeep of the upstreams on threads of its own: names are resolved again, and upstreams checked.

use crate::upstream::{Upstream, UpstreamGroup};
use haul_server::connect;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Checks in a row that have failed before an upstream is down.
const FAILURES_BEFORE_DOWN: u32 = 3;
/// Checks in a row that have succeeded before it is up again.
const SUCCESSES_BEFORE_UP: u32 = 2;
/// A check that takes longer has failed.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// The intervals of the upkeep.
#[derive(Debug, Clone, Copy)]
pub struct Intervals {
    /// Between two resolutions of names.
    pub resolve: Duration,
    /// Between two checks; `None` for no check.
    pub check: Option<Duration>,
}

/// The threads, which end when this is dropped: one resolves, one checks, so that a resolver that
/// does not answer delays no check.
#[derive(Debug)]
pub struct Upkeep {
    _stops: Vec<Sender<()>>,
}

impl Upkeep {
    /// Starts the threads.
    pub fn start(group: &Arc<UpstreamGroup>, intervals: Intervals) -> io::Result<Self> {
        let mut stops = Vec::new();
        let mut known_problems = Vec::new();
        let names = Arc::clone(group);
        stops.push(every(intervals.resolve, "haul-resolve", move || {
            let problems = resolve(&names);
            for problem in problems.iter().filter(|problem| !known_problems.contains(*problem)) {
                warn!("a name was not resolved again: {problem}");
            }
            known_problems = problems;
        })?);
        if let Some(interval) = intervals.check {
            let group = Arc::clone(group);
            let mut streaks = vec![Streak::default(); group.upstreams().len()];
            stops.push(every(interval, "haul-check", move || check(&group, &mut streaks))?);
        }
        Ok(Self { _stops: stops })
    }
}

/// Repeats `work` on a thread, until the result is dropped. The thread may be at work then.
fn every(
    interval: Duration,
    name: &str,
    mut work: impl FnMut() + Send + 'static,
) -> io::Result<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            work();
        }
    })?;
    Ok(stop)
}

/// Resolves the names of the upstreams; returns those that could not be resolved, with the reason.
/// They keep their addresses.
pub fn resolve(group: &UpstreamGroup) -> Vec<String> {
    let mut problems = Vec::new();
    for upstream in group.upstreams() {
        match upstream.to_resolve().map(|name| name.addresses()) {
            None => {}
            Some(Ok(addresses)) => upstream.set_addresses(addresses),
            Some(Err(error)) => problems.push(format!("{}: {error}", upstream.name())),
        }
    }
    problems
}

/// The results of an upstream's latest checks.
#[derive(Debug, Clone, Copy, Default)]
struct Streak {
    failures: u32,
    successes: u32,
}

/// Connects to all upstreams at the same time.
fn check(group: &UpstreamGroup, streaks: &mut [Streak]) {
    let sockets: Vec<_> = group.upstreams().iter().map(|upstream| start(upstream)).collect();
    let deadline = Instant::now() + CHECK_TIMEOUT;
    for ((upstream, socket), streak) in group.upstreams().iter().zip(sockets).zip(streaks) {
        let result = socket.and_then(|socket| finish(&socket, deadline));
        streak.record(upstream, result.err());
    }
}

impl Streak {
    fn record(&mut self, upstream: &Upstream, error: Option<io::Error>) {
        let name = upstream.name();
        if let Some(error) = error {
            *self = Self { failures: self.failures + 1, successes: 0 };
            if self.failures >= FAILURES_BEFORE_DOWN && !upstream.is_down() {
                upstream.set_down(true);
                warn!(upstream = name, %error, "upstream {name} is down: {error}");
            }
        } else {
            *self = Self { failures: 0, successes: self.successes + 1 };
            if self.successes >= SUCCESSES_BEFORE_UP && upstream.is_down() {
                upstream.set_down(false);
                info!(upstream = name, "upstream {name} is up");
            }
        }
    }
}

fn start(upstream: &Upstream) -> io::Result<OwnedFd> {
    let addresses = upstream.addresses();
    let address = addresses.first();
    let address = address.ok_or_else(|| io::Error::other("its name is not resolved"))?;
    connect::start(address, None)
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
    use crate::balance::Algorithm;
    use std::net::TcpListener;

    #[test]
    fn an_upstream_is_down_after_three_failed_checks_and_up_after_two_good_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let upstream = address.to_string().parse().unwrap();
        let group = UpstreamGroup::new([upstream], Algorithm::default());
        let mut streaks = [Streak::default()];
        let mut check = || {
            check(&group, &mut streaks);
            group.upstreams()[0].is_down()
        };
        assert_eq!([check(), check()], [false; 2]);
        drop(listener);
        assert_eq!([check(), check(), check()], [false, false, true]);
        let _listener = TcpListener::bind(address).unwrap();
        assert_eq!([check(), check()], [true, false]);
    }

    #[test]
    fn names_are_resolved_and_keep_their_addresses_when_they_cannot_be() {
        let names = ["localhost:80", "no-such-host.invalid:80"].map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(names, Algorithm::default());
        let problems = resolve(&group);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("no-such-host.invalid:80: "), "{problems:?}");
        assert!(!group.upstreams()[0].addresses().is_empty());
        assert!(group.upstreams()[1].addresses().is_empty());
    }
}
