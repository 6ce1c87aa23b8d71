//! Upstreams: the servers that clients are connected to, and what is known of each of them.

use crate::balance::{Balancer, Candidate, name_hash};
use crate::config::GroupConfig;
use crate::upstream_address::UpstreamAddress;
use haul_server::connect::PeerAddress;
use haul_server::resolve::Resolve;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Checks in a row that have failed before an upstream is down.
const CHECKS_BEFORE_DOWN: u32 = 3;
/// Checks in a row that have succeeded before it is up again.
const CHECKS_BEFORE_UP: u32 = 2;
/// Connections in a row that have failed before an upstream is ejected.
const FAILURES_BEFORE_EJECTION: u32 = 3;
/// How long an ejected upstream gets no connection while there is another.
const EJECTION_TIME: Duration = Duration::from_secs(10);

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
    /// Checks in a row that have failed.
    failed_checks: AtomicU32,
    /// Checks in a row that have succeeded.
    good_checks: AtomicU32,
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

    /// Records the result of an active check.
    pub fn record_check(&self, result: io::Result<()>) {
        let (name, health) = (self.name(), &self.health);
        match result {
            Ok(()) => {
                health.failed_checks.store(0, Relaxed);
                let successes = health.good_checks.fetch_add(1, Relaxed).saturating_add(1);
                if successes >= CHECKS_BEFORE_UP && health.is_down.swap(false, Relaxed) {
                    info!(upstream = name, "upstream {name} is up");
                }
            }
            Err(error) => {
                health.good_checks.store(0, Relaxed);
                let failures = health.failed_checks.fetch_add(1, Relaxed).saturating_add(1);
                if failures >= CHECKS_BEFORE_DOWN && !health.is_down.swap(true, Relaxed) {
                    warn!(upstream = name, %error, "upstream {name} is down: {error}");
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[PeerAddress]>> {
        self.resolved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A group of upstreams among which clients are balanced, shared by all event loops.
#[derive(Debug)]
pub struct UpstreamGroup {
    name: String,
    upstreams: Vec<Arc<Upstream>>,
    /// The weight of each upstream, and whether it is a backup.
    shares: Vec<(u32, bool)>,
    balancer: Balancer,
    started: Instant,
}

impl UpstreamGroup {
    /// Creates a group. Upstreams that `previous` has keep their state.
    pub fn new(config: &GroupConfig, previous: Option<&Self>) -> Self {
        let upstreams = &config.upstreams;
        let kept = previous.map_or(&[][..], Self::upstreams);
        let create = |address: &UpstreamAddress| {
            let kept = kept.iter().find(|upstream| upstream.address == *address);
            kept.map_or_else(|| Arc::new(Upstream::new(address.clone())), Arc::clone)
        };
        Self {
            name: config.name.clone(),
            upstreams: upstreams.iter().map(|one| create(&one.address)).collect(),
            shares: upstreams.iter().map(|one| (one.weight, one.is_backup)).collect(),
            balancer: Balancer::new(config.algorithm, upstreams.len()),
            // The ends of ejections are times of this clock.
            started: previous.map_or_else(Instant::now, |previous| previous.started),
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The upstreams, as configured.
    pub fn upstreams(&self) -> &[Arc<Upstream>] {
        &self.upstreams
    }

    /// Chooses the upstream of a client, without those that were tried already. Backups come after
    /// all others. One that is down or ejected is chosen only if there is no other: a connection
    /// may still succeed where a check has failed. When an ejection is over, one connection at a
    /// time tries the upstream.
    pub fn choose(&self, client: Option<IpAddr>, tried: &[usize]) -> Option<usize> {
        let now_ms = self.now_ms();
        let mut skipped = tried.to_vec();
        let is_usable = |upstream: &Upstream| {
            !upstream.is_down() && upstream.health.ejected_until_ms.load(Relaxed) <= now_ms
        };
        for is_backup in [false, true] {
            let is_candidate = |index: usize| {
                self.shares[index].1 == is_backup && is_usable(&self.upstreams[index])
            };
            while let Some(index) =
                self.balance(client, &skipped, skipped.is_empty(), &is_candidate)
            {
                if self.upstreams[index].health.begin_trial(now_ms) {
                    return Some(index);
                }
                skipped.push(index);
            }
        }
        self.balance(client, tried, tried.is_empty(), &|_| true)
    }

    fn balance(
        &self,
        client: Option<IpAddr>,
        skipped: &[usize],
        is_first: bool,
        is_candidate: &dyn Fn(usize) -> bool,
    ) -> Option<usize> {
        let candidate = |index: usize| Candidate {
            index,
            name_hash: self.upstreams[index].name_hash,
            weight: self.shares[index].0,
            open: self.upstreams[index].counters.open.load(Relaxed),
        };
        let candidates: Vec<_> = (0..self.upstreams.len())
            .filter(|index| !skipped.contains(index) && is_candidate(*index))
            .map(candidate)
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
    fn an_upstream_that_refuses_connections_is_chosen_only_if_there_is_no_other() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80 backup"];
        let upstreams = upstreams.map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(&GroupConfig::new("a", upstreams), None);
        let first = &group.upstreams()[0];
        for _ in 0..FAILURES_BEFORE_EJECTION {
            assert!((0..2).any(|_| group.choose(None, &[]) == Some(0)), "it is not ejected yet");
            group.record_failure(first, &io::ErrorKind::ConnectionRefused.into());
        }
        assert!((0..9).all(|_| group.choose(None, &[]) == Some(1)));
        assert_eq!(group.choose(None, &[1]), Some(2), "the backup");
        assert_eq!(group.choose(None, &[1, 2]), Some(0), "there is no other");
        assert_eq!(group.choose(None, &[0, 1, 2]), None);
        UpstreamGroup::record_success(first);
        assert!((0..2).any(|_| group.choose(None, &[]) == Some(0)), "it is back");
        for _ in 0..CHECKS_BEFORE_DOWN {
            first.record_check(Err(io::ErrorKind::ConnectionRefused.into()));
        }
        assert!((0..9).all(|_| group.choose(None, &[]) == Some(1)));
    }
}
