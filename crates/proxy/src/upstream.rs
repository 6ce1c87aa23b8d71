//! Upstreams: the servers that clients are connected to, and what is known of each of them.

use crate::balance::{Algorithm, Balancer, Candidate, name_hash};
use haul_server::connect::PeerAddress;
use haul_server::resolve::Resolve;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Connections in a row that have failed before an upstream is ejected.
const FAILURES_BEFORE_EJECTION: u32 = 3;
/// How long an ejected upstream gets no connection while there is another.
const EJECTION_TIME: Duration = Duration::from_secs(10);

/// The address of an upstream as it is configured.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpstreamAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A host name and a port.
    Name {
        /// The host name.
        host: String,
        /// The port.
        port: u16,
    },
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl UpstreamAddress {
    /// The TCP port; `None` for a Unix socket.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(address) => Some(address.port()),
            Self::Name { port, .. } => Some(*port),
            Self::Unix(_) => None,
        }
    }
}

impl FromStr for UpstreamAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is no upstream: write 10.0.0.5:80, [2001:db8::5]:80, \
                 db.example.com:5432 or unix:/run/app.sock"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(invalid()) } else { Ok(Self::Unix(path.into())) };
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return if address.port() == 0 { Err(invalid()) } else { Ok(Self::Tcp(address)) };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        match port.parse() {
            Ok(port) if port > 0 && !host.is_empty() && host.bytes().all(is_name) => {
                Ok(Self::Name { host: host.into(), port })
            }
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Name { host, port } => write!(formatter, "{host}:{port}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// An upstream, shared by all event loops.
#[derive(Debug)]
pub struct Upstream {
    address: UpstreamAddress,
    name: String,
    name_hash: u64,
    /// The addresses that its name stands for, in the order in which they are tried.
    resolved: Mutex<Arc<[PeerAddress]>>,
    health: Health,
    counters: UpstreamCounters,
}

/// Whether an upstream gets connections.
#[derive(Debug, Default)]
struct Health {
    /// Whether the active check has found it down.
    is_down: AtomicBool,
    /// Connections in a row that have failed.
    failures: AtomicU32,
    /// The end of its ejection, in milliseconds of the group's clock.
    ejected_until_ms: AtomicU64,
}

impl Health {
    /// Whether a connection may be tried now. After an ejection only one is until its result is
    /// known, or for the time of another ejection.
    fn begin_trial(&self, now_ms: u64) -> bool {
        match self.ejected_until_ms.load(Relaxed) {
            0 => true,
            until_ms if until_ms > now_ms => false,
            until_ms => {
                let next_ms = now_ms + EJECTION_TIME.as_millis() as u64;
                let exchanged =
                    self.ejected_until_ms.compare_exchange(until_ms, next_ms, Relaxed, Relaxed);
                exchanged.is_ok()
            }
        }
    }
}

/// Counters of an upstream. All event loops add to them, once or twice a connection.
#[derive(Debug, Default)]
pub struct UpstreamCounters {
    /// Connections open, and those that are being opened.
    pub open: AtomicUsize,
    /// Connections that were established.
    pub connected: AtomicU64,
    /// Connections that could not be established.
    pub failed: AtomicU64,
}

impl Upstream {
    fn new(address: UpstreamAddress) -> Self {
        let resolved: Arc<[PeerAddress]> = match &address {
            UpstreamAddress::Tcp(address) => [PeerAddress::Tcp(*address)].into(),
            UpstreamAddress::Unix(path) => [PeerAddress::Unix(path.clone())].into(),
            UpstreamAddress::Name { .. } => [].into(),
        };
        let name = address.to_string();
        Self {
            name_hash: name_hash(&name),
            name,
            address,
            resolved: Mutex::new(resolved),
            health: Health::default(),
            counters: UpstreamCounters::default(),
        }
    }

    /// The name, as configured.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The counters.
    pub fn counters(&self) -> &UpstreamCounters {
        &self.counters
    }

    /// The addresses to try, in order; none if its name is not resolved yet.
    pub fn addresses(&self) -> Arc<[PeerAddress]> {
        Arc::clone(&self.lock())
    }

    /// The name to resolve, if it has one.
    pub fn to_resolve(&self) -> Option<Resolve> {
        match &self.address {
            UpstreamAddress::Name { host, port } => {
                Some(Resolve { host: host.clone(), port: *port })
            }
            _ => None,
        }
    }

    /// Takes the addresses that its name stands for now. Established connections stay.
    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        *self.lock() = addresses.into_iter().map(PeerAddress::Tcp).collect();
    }

    /// Whether the active check has found it down.
    pub fn is_down(&self) -> bool {
        self.health.is_down.load(Relaxed)
    }

    /// Records the verdict of the active check.
    pub fn set_down(&self, is_down: bool) {
        self.health.is_down.store(is_down, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[PeerAddress]>> {
        self.resolved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A group of upstreams among which clients are balanced, shared by all event loops.
#[derive(Debug)]
pub struct UpstreamGroup {
    upstreams: Vec<Arc<Upstream>>,
    balancer: Balancer,
    started: Instant,
}

impl UpstreamGroup {
    /// Creates a group.
    pub fn new(addresses: impl IntoIterator<Item = UpstreamAddress>, algorithm: Algorithm) -> Self {
        Self {
            upstreams: addresses.into_iter().map(|one| Arc::new(Upstream::new(one))).collect(),
            balancer: Balancer::new(algorithm),
            started: Instant::now(),
        }
    }

    /// The upstreams, as configured.
    pub fn upstreams(&self) -> &[Arc<Upstream>] {
        &self.upstreams
    }

    /// Chooses the upstream of a client, without those that were tried already. One that is down or
    /// ejected is chosen only if there is no other: a connection may still succeed where a check
    /// has failed. When an ejection is over, one connection at a time tries the upstream.
    pub fn choose(&self, client: Option<IpAddr>, tried: &[usize]) -> Option<usize> {
        let now_ms = self.now_ms();
        let mut skipped = tried.to_vec();
        let is_usable = |upstream: &Upstream| {
            !upstream.is_down() && upstream.health.ejected_until_ms.load(Relaxed) <= now_ms
        };
        while let Some(index) = self.balance(client, &skipped, skipped.is_empty(), &is_usable) {
            if self.upstreams[index].health.begin_trial(now_ms) {
                return Some(index);
            }
            skipped.push(index);
        }
        self.balance(client, tried, tried.is_empty(), &|_| true)
    }

    fn balance(
        &self,
        client: Option<IpAddr>,
        skipped: &[usize],
        is_first: bool,
        is_usable: &dyn Fn(&Upstream) -> bool,
    ) -> Option<usize> {
        let candidates: Vec<_> = self
            .upstreams
            .iter()
            .enumerate()
            .filter(|(index, upstream)| !skipped.contains(index) && is_usable(upstream))
            .map(|(index, upstream)| Candidate {
                index,
                name_hash: upstream.name_hash,
                open: upstream.counters.open.load(Relaxed),
            })
            .collect();
        self.balancer.choose(&candidates, client, is_first)
    }

    /// Records that a connection to an upstream was established.
    pub fn record_success(upstream: &Upstream) {
        let health = &upstream.health;
        upstream.counters.connected.fetch_add(1, Relaxed);
        if health.failures.swap(0, Relaxed) >= FAILURES_BEFORE_EJECTION {
            health.ejected_until_ms.store(0, Relaxed);
            info!(
                upstream = upstream.name(),
                "upstream {} accepts connections again", upstream.name
            );
        }
    }

    /// Records that no address of an upstream accepted a connection, by which it is ejected
    /// (passive check).
    pub fn record_failure(&self, upstream: &Upstream, error: &io::Error) {
        let health = &upstream.health;
        upstream.counters.failed.fetch_add(1, Relaxed);
        let failures = health.failures.fetch_add(1, Relaxed).saturating_add(1);
        if failures >= FAILURES_BEFORE_EJECTION {
            let until_ms = self.now_ms() + EJECTION_TIME.as_millis() as u64;
            health.ejected_until_ms.store(until_ms, Relaxed);
        }
        if failures == FAILURES_BEFORE_EJECTION {
            let name = upstream.name();
            warn!(upstream = name, %error, "upstream {name} accepts no connections: {error}");
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_back_and_others_are_refused() {
        for text in ["10.0.0.5:80", "[2001:db8::5]:80", "db-1.example.com:5432", "unix:/run/a b"] {
            assert_eq!(text.parse::<UpstreamAddress>().unwrap().to_string(), text);
        }
        for text in
            ["", "80", "host", "host:", "host:0", ":80", "10.0.0.5:0", "a b:80", "unix:", "h:65536"]
        {
            let error = text.parse::<UpstreamAddress>().unwrap_err();
            assert!(error.contains(text) && error.contains("write"), "{error}");
        }
    }

    #[test]
    fn an_upstream_that_refuses_connections_is_chosen_only_if_there_is_no_other() {
        let addresses = ["10.0.0.1:80", "10.0.0.2:80"].map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(addresses, Algorithm::RoundRobin);
        let first = &group.upstreams()[0];
        for _ in 0..FAILURES_BEFORE_EJECTION {
            assert!((0..2).any(|_| group.choose(None, &[]) == Some(0)), "it is not ejected yet");
            group.record_failure(first, &io::ErrorKind::ConnectionRefused.into());
        }
        assert!((0..9).all(|_| group.choose(None, &[]) == Some(1)));
        assert_eq!(group.choose(None, &[1]), Some(0), "there is no other");
        assert_eq!(group.choose(None, &[0, 1]), None);
        UpstreamGroup::record_success(first);
        assert!((0..2).any(|_| group.choose(None, &[]) == Some(0)), "it is back");
        first.set_down(true);
        assert!((0..9).all(|_| group.choose(None, &[]) == Some(1)));
    }
}
