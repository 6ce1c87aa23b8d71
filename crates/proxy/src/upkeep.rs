//! Upkeep of the upstreams on threads of its own: names are resolved again, and upstreams checked.

use crate::closing::{ClosingReason, Closings};
use crate::config::{DownPolicy, ListenerConfig};
use crate::routing::{CurrentTable, RoutingTable};
use crate::upstream::{CheckOutcome, Upstream};
use haul_server::Address;
use haul_server::connect::{self, ConnectOptions, PeerAddress};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};
use tracing::warn;

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

/// What follows a change of an upstream's state.
#[derive(Debug, Clone)]
pub struct OnChange {
    pub closings: Arc<Closings>,
    pub down_policy: DownPolicy,
}

/// The threads, which end when this is dropped: one resolves, one checks, so that a resolver that
/// does not answer delays no check.
#[derive(Debug)]
pub struct Upkeep {
    resolver: Resolver,
    _check: Option<Sender<()>>,
}

/// The thread that resolves names. It may read the resolver's files where the rest of the process
/// may not.
#[derive(Debug, Clone)]
pub struct Resolver(Sender<Request>);

#[derive(Debug)]
enum Request {
    /// To resolve the names of a table that is not in force yet, and answer.
    Resolve(Arc<RoutingTable>, SyncSender<Vec<String>>),
    End,
}

impl Upkeep {
    /// Starts the threads.
    pub fn start(
        table: &Arc<CurrentTable>,
        intervals: Intervals,
        on_change: OnChange,
    ) -> io::Result<Self> {
        let resolver = Resolver::start(Arc::clone(table), intervals.resolve)?;
        let start = |interval| start_checks(Arc::clone(table), interval, on_change);
        let check = intervals.check.map(start);
        Ok(Self { resolver, _check: check.transpose()? })
    }

    /// The thread that resolves names.
    pub fn resolver(&self) -> Resolver {
        self.resolver.clone()
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.resolver.0.send(Request::End);
    }
}

impl Resolver {
    fn start(table: Arc<CurrentTable>, interval: Duration) -> io::Result<Self> {
        let (tx, rx) = mpsc::channel();
        let mut known_problems = Vec::new();
        std::thread::Builder::new().name("haul-resolve".into()).spawn(move || {
            loop {
                match rx.recv_timeout(interval) {
                    Ok(Request::Resolve(table, answer)) => {
                        // The caller may have given up.
                        let _ = answer.send(resolve(&table));
                    }
                    Ok(Request::End) | Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        let problems = resolve(&table.get());
                        for problem in problems.iter().filter(|one| !known_problems.contains(*one))
                        {
                            warn!("a name was not resolved again: {problem}");
                        }
                        known_problems = problems;
                    }
                }
            }
        })?;
        Ok(Self(tx))
    }

    /// Resolves the names of a table like [`resolve`]; waits for it.
    pub fn resolve(&self, table: &Arc<RoutingTable>) -> Vec<String> {
        let (tx, rx) = mpsc::sync_channel(1);
        let request = Request::Resolve(Arc::clone(table), tx);
        let sent = self.0.send(request).ok();
        // The proxy has ended otherwise.
        sent.and_then(|()| rx.recv().ok()).unwrap_or_default()
    }
}

/// Checks all upstreams in an interval, until the result is dropped.
fn start_checks(
    table: Arc<CurrentTable>,
    interval: Duration,
    on_change: OnChange,
) -> io::Result<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    std::thread::Builder::new().name("haul-check".into()).spawn(move || {
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            check(&table.get(), &on_change);
        }
    })?;
    Ok(stop)
}

/// Resolves the names of the upstreams; returns those that could not be resolved, with the reason.
/// They keep their addresses.
pub fn resolve(table: &RoutingTable) -> Vec<String> {
    let mut problems = Vec::new();
    for upstream in table.upstreams() {
        match upstream.to_resolve().map(|name| name.addresses()) {
            None => {}
            Some(Ok(addresses)) => upstream.set_addresses(addresses),
            Some(Err(error)) => problems.push(format!("{}: {error}", upstream.name())),
        }
    }
    problems
}

/// What names that could not be resolved mean.
pub fn unresolved_caveats(problems: Vec<String>) -> Vec<String> {
    let caveat =
        |problem| format!("an upstream gets no connection until its name is resolved: {problem}");
    problems.into_iter().map(caveat).collect()
}

/// What upstreams mean that are addresses at which the proxy listens.
pub fn own_address_caveats(table: &RoutingTable, listeners: &[ListenerConfig]) -> Vec<String> {
    let is_own = |address: &PeerAddress| {
        listeners.iter().any(|listener| leads_to(address, &listener.address))
    };
    let own = table.upstreams().filter(|upstream| upstream.addresses().iter().any(is_own));
    let caveat = |upstream: &Arc<Upstream>| {
        let name = upstream.name();
        format!(
            "the proxy listens at its upstream {name}: clients come back to it, again and again"
        )
    };
    own.map(caveat).collect()
}

/// Whether connections to an address come to a listening socket, as far as the addresses tell.
fn leads_to(address: &PeerAddress, listener: &Address) -> bool {
    match (address, listener) {
        (PeerAddress::Tcp(address), Address::Tcp(listener)) => {
            let is_local = listener.ip().is_unspecified() && address.ip().is_loopback();
            address.port() == listener.port() && (address.ip() == listener.ip() || is_local)
        }
        (PeerAddress::Unix(path), Address::Unix(listener)) => path == listener,
        _ => false,
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
        let _listener = TcpListener::bind(address).unwrap();
        assert_eq!([check(), check()], [true, false]);
    }

    #[test]
    fn names_are_resolved_and_keep_their_addresses_when_they_cannot_be() {
        let table = table(&["localhost:80", "no-such-host.invalid:80"]);
        let problems = resolve(&table);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("no-such-host.invalid:80: "), "{problems:?}");
        let has_addresses: Vec<_> =
            table.upstreams().map(|upstream| !upstream.addresses().is_empty()).collect();
        assert_eq!(has_addresses, [true, false]);
    }

    #[test]
    fn an_upstream_at_which_the_proxy_listens_is_a_caveat() {
        for (listener, upstream, is_own) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("0.0.0.0:80", "localhost:80", true),
            ("[::]:80", "127.0.0.2:80", true),
            ("unix:/run/a", "unix:/run/a", true),
            ("127.0.0.1:80", "localhost:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("0.0.0.0:80", "192.0.2.1:80", false),
            ("unix:/run/a", "unix:/run/b", false),
        ] {
            let mut config = Config::new([GroupConfig::new("one", [upstream.parse().unwrap()])]);
            config.listeners = vec![ListenerConfig::new(listener.parse().unwrap(), Some("one"))];
            let table = RoutingTable::new(&config, None).unwrap();
            assert!(resolve(&table).is_empty());
            let caveats = own_address_caveats(&table, &config.listeners);
            assert_eq!(!caveats.is_empty(), is_own, "{listener} {upstream}");
        }
    }
}
