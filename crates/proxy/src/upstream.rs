//! Upstreams: the servers that clients are connected to, and what is known of each of them.

use crate::balance::{Algorithm, Balancer, Candidate, name_hash};
use crate::config::GroupConfig;
use crate::queue::{Queue, Slot};
use crate::upstream_address::{UpstreamAddress, UpstreamConfig};
use haul_server::connect::PeerAddress;
use haul_server::resolve::Resolve;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed,
};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Checks in a row that have failed before an upstream is down.
const CHECKS_BEFORE_DOWN: u32 = 3;
/// Checks in a row that have succeeded before it is up again.
const CHECKS_BEFORE_UP: u32 = 2;
/// Connections in a row that have failed before an upstream is ejected.
const FAILURES_BEFORE_EJECTION: u32 = 3;
/// The share of an upstream that has just come back, of its weight, in percent.
const SLOW_START_PERCENT_MIN: u64 = 10;
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
    /// An [`Administration`].
    administration: AtomicU8,
    /// The weight that the operator has set, in place of the configured one; 0 for none.
    weight: AtomicU32,
    counters: UpstreamCounters,
}

/// Whether an upstream gets new connections, as the operator has set it. It outlasts a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Administration {
    /// It gets new connections.
    Enabled,
    /// It gets none, and established ones continue.
    Draining,
    /// It gets none, and established ones were closed.
    Disabled,
}

impl Administration {
    const ALL: [Self; 3] = [Self::Enabled, Self::Draining, Self::Disabled];

    /// The name in lists.
    pub fn name(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Draining => "draining",
            Self::Disabled => "disabled",
        }
    }
}

/// What an active check has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckOutcome {
    /// Nothing.
    Same,
    /// The upstream is up now.
    Up,
    /// The upstream is down now.
    Down,
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
    /// When it has come back, in milliseconds of [`process_ms`]; 0 if it has never been away.
    back_since_ms: AtomicU64,
}

impl Health {
    /// The upstream gets connections again.
    fn record_return(&self) {
        self.back_since_ms.store(process_ms().max(1), Relaxed);
    }

    /// The share of its weight that the upstream has now, in percent: it grows to 100 in
    /// `slow_start` after a return.
    fn weight_percent(&self, slow_start: Option<Duration>) -> u32 {
        let back_since_ms = self.back_since_ms.load(Relaxed);
        let Some(slow_start) = slow_start.filter(|_| back_since_ms > 0) else { return 100 };
        let age_ms = process_ms().saturating_sub(back_since_ms);
        let percent = (100 * age_ms).checked_div(slow_start.as_millis() as u64).unwrap_or(100);
        percent.clamp(SLOW_START_PERCENT_MIN, 100) as u32
    }

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
    /// An upstream at an address, of which nothing is known yet.
    pub fn new(address: UpstreamAddress) -> Self {
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
            administration: AtomicU8::new(Administration::Enabled as u8),
            weight: AtomicU32::new(0),
            counters: UpstreamCounters::default(),
        }
    }

    /// Whether it gets new connections, as the operator has set it.
    pub fn administration(&self) -> Administration {
        let number = self.administration.load(Relaxed);
        Administration::ALL.get(usize::from(number)).copied().unwrap_or(Administration::Enabled)
    }

    /// Sets whether it gets new connections.
    pub fn set_administration(&self, administration: Administration) {
        let before = self.administration();
        self.administration.store(administration as u8, Relaxed);
        if administration == Administration::Enabled && before != administration {
            self.health.record_return();
        }
    }

    /// The weight that the operator has set.
    pub fn weight(&self) -> Option<u32> {
        NonZeroU32::new(self.weight.load(Relaxed)).map(NonZeroU32::get)
    }

    /// Sets its weight in place of the configured one; `None` for that.
    pub fn set_weight(&self, weight: Option<u32>) {
        self.weight.store(weight.unwrap_or(0), Relaxed);
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
        *self.lock() = alternating(addresses).into_iter().map(PeerAddress::Tcp).collect();
    }

    /// Whether the active check has found it down.
    pub fn is_down(&self) -> bool {
        self.health.is_down.load(Relaxed)
    }

    /// Sets whether the active check has found it down.
    pub fn set_down(&self, is_down: bool) {
        self.health.is_down.store(is_down, Relaxed);
    }

    /// Records the result of an active check.
    pub fn record_check(&self, result: io::Result<()>) -> CheckOutcome {
        let (name, health) = (self.name(), &self.health);
        match result {
            Ok(()) => {
                health.failed_checks.store(0, Relaxed);
                let successes = health.good_checks.fetch_add(1, Relaxed).saturating_add(1);
                if successes >= CHECKS_BEFORE_UP && health.is_down.swap(false, Relaxed) {
                    health.record_return();
                    info!(upstream = name, "upstream {name} is up");
                    return CheckOutcome::Up;
                }
            }
            Err(error) => {
                health.good_checks.store(0, Relaxed);
                let failures = health.failed_checks.fetch_add(1, Relaxed).saturating_add(1);
                if failures >= CHECKS_BEFORE_DOWN && !health.is_down.swap(true, Relaxed) {
                    warn!(upstream = name, %error, "upstream {name} is down: {error}");
                    return CheckOutcome::Down;
                }
            }
        }
        CheckOutcome::Same
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
    /// What the configuration says of each upstream.
    shares: Vec<Share>,
    /// The time in which the share of an upstream grows that has come back.
    slow_start: Option<Duration>,
    balancer: Balancer,
    queue: Arc<Queue>,
    started: Instant,
}

/// What an upstream gets of the connections of its group.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub weight: u32,
    pub is_backup: bool,
    pub connections_max: Option<NonZeroUsize>,
}

/// What came of the choice of an upstream.
#[derive(Debug)]
pub enum Choice {
    /// A slot of an upstream.
    Slot(Slot),
    /// An upstream is usable, and has as many connections as its limit allows.
    Full,
    /// There is none.
    None,
}

impl Choice {
    /// The slot, if there is one.
    pub fn slot(self) -> Option<Slot> {
        match self {
            Self::Slot(slot) => Some(slot),
            Self::Full | Self::None => None,
        }
    }
}

impl UpstreamGroup {
    /// Creates a group. Upstreams that `previous` has keep their state, and so do `retired` ones.
    pub fn new(config: &GroupConfig, previous: Option<&Self>, retired: &[Arc<Upstream>]) -> Self {
        let upstreams = &config.upstreams;
        let kept = previous.map_or(&[][..], Self::upstreams);
        let create = |address: &UpstreamAddress| {
            let mut kept = kept.iter().chain(retired);
            let kept = kept.find(|upstream| upstream.address == *address);
            kept.map_or_else(|| Arc::new(Upstream::new(address.clone())), Arc::clone)
        };
        let share = |one: &UpstreamConfig| Share {
            weight: one.weight,
            is_backup: one.is_backup,
            connections_max: one.connections_max,
        };
        Self {
            name: config.name.clone(),
            upstreams: upstreams.iter().map(|one| create(&one.address)).collect(),
            shares: upstreams.iter().map(share).collect(),
            slow_start: config.slow_start,
            balancer: Balancer::new(config.algorithm, upstreams.len()),
            queue: previous.map_or_else(Arc::default, |previous| Arc::clone(&previous.queue)),
            // The ends of ejections are times of this clock.
            started: previous.map_or_else(Instant::now, |previous| previous.started),
        }
    }

    /// The queue of clients for which no upstream has a slot.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Whether the client's address determines the upstream.
    pub fn is_by_client(&self) -> bool {
        self.balancer.algorithm() == Algorithm::SourceAddress
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The upstreams, as configured.
    pub fn upstreams(&self) -> &[Arc<Upstream>] {
        &self.upstreams
    }

    /// What the upstream at a place gets, with the weight that the operator has set.
    pub fn share(&self, index: usize) -> Share {
        let mut share = self.shares[index];
        share.weight = self.upstreams[index].weight().unwrap_or(share.weight);
        share
    }

    /// Whether an upstream of the group is ejected.
    pub fn is_ejected(&self, upstream: &Upstream) -> bool {
        upstream.health.ejected_until_ms.load(Relaxed) > self.now_ms()
    }

    /// Chooses the upstream of a client, without those that were tried already, and those that the
    /// operator has excluded. Backups come after all others. One that is down or ejected is chosen
    /// only if there is no other: a connection may still succeed where a check has failed. When an
    /// ejection is over, one connection at a time tries the upstream.
    ///
    /// An upstream without a free slot is waited for, and no backup takes its place. By source
    /// address each client waits for its own upstream.
    pub fn choose(&self, client: Option<IpAddr>, tried: &[usize]) -> Choice {
        let now_ms = self.now_ms();
        let mut skipped = tried.to_vec();
        let is_usable = |index: usize| {
            let upstream = &self.upstreams[index];
            !upstream.is_down() && upstream.health.ejected_until_ms.load(Relaxed) <= now_ms
        };
        for is_backup in [false, true] {
            let is_candidate =
                |index: usize| self.shares[index].is_backup == is_backup && is_usable(index);
            loop {
                match self.take_slot(client, &skipped, &is_candidate) {
                    Choice::Slot(slot) => {
                        if self.upstreams[slot.index()].health.begin_trial(now_ms) {
                            return Choice::Slot(slot);
                        }
                        skipped.push(slot.index());
                        slot.give_back();
                    }
                    Choice::Full => return Choice::Full,
                    Choice::None => break,
                }
            }
        }
        self.take_slot(client, tried, &|_| true)
    }

    /// Takes a slot of one of the candidates.
    fn take_slot(
        &self,
        client: Option<IpAddr>,
        skipped: &[usize],
        is_candidate: &dyn Fn(usize) -> bool,
    ) -> Choice {
        let candidate = |index: usize| Candidate {
            index,
            name_hash: self.upstreams[index].name_hash,
            weight: self.share(index).weight * self.weight_percent(index),
            open: self.upstreams[index].counters.open.load(Relaxed),
        };
        let mut candidates: Vec<_> = (0..self.upstreams.len())
            .filter(|index| !skipped.contains(index) && is_candidate(*index))
            .filter(|&index| self.upstreams[index].administration() == Administration::Enabled)
            .map(candidate)
            .collect();
        let none = if candidates.is_empty() { Choice::None } else { Choice::Full };
        if !self.is_by_client() {
            candidates.retain(|one| {
                self.shares[one.index].connections_max.is_none_or(|most| one.open < most.get())
            });
        }
        let Some(index) = self.balancer.choose(&candidates, client, skipped.is_empty()) else {
            return none;
        };
        let connections_max = self.shares[index].connections_max;
        let slot = Slot::take(&self.upstreams[index], index, connections_max, Some(&self.queue));
        slot.map_or(Choice::Full, Choice::Slot)
    }

    /// What an upstream has of its weight, in percent. By source address it always has all of it:
    /// otherwise clients would change their upstream while it grows.
    fn weight_percent(&self, index: usize) -> u32 {
        match self.balancer.algorithm() {
            Algorithm::SourceAddress => 100,
            _ => self.upstreams[index].health.weight_percent(self.slow_start),
        }
    }

    /// Records that a connection to an upstream was established.
    pub fn record_success(upstream: &Upstream) {
        let health = &upstream.health;
        upstream.counters.connected.fetch_add(1, Relaxed);
        if health.failures.swap(0, Relaxed) >= FAILURES_BEFORE_EJECTION {
            health.ejected_until_ms.store(0, Relaxed);
            health.record_return();
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

/// Milliseconds since this was called first.
fn process_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// Addresses in the same order, but with the families in turn, so that the first two are one of
/// each (RFC 8305 section 4).
fn alternating(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_ipv6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (mut ones, mut others): (VecDeque<_>, VecDeque<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first_is_ipv6);
    let mut ordered = Vec::new();
    while !(ones.is_empty() && others.is_empty()) {
        ordered.extend(ones.pop_front());
        ordered.extend(others.pop_front());
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(group: &UpstreamGroup, tried: &[usize]) -> Option<usize> {
        group.choose(None, tried).slot().map(|slot| slot.index())
    }

    #[test]
    fn the_share_of_an_upstream_that_is_back_grows() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80"].map(|text| text.parse().unwrap());
        let shares = |slow_start: Option<Duration>| {
            let mut config = GroupConfig::new("a", upstreams.clone());
            config.slow_start = slow_start;
            let group = UpstreamGroup::new(&config, None, &[]);
            group.upstreams()[0].set_administration(Administration::Draining);
            group.upstreams()[0].set_administration(Administration::Enabled);
            (0..110).filter(|_| chosen(&group, &[]) == Some(0)).count()
        };
        assert_eq!(shares(None), 55);
        // Of an hour nothing has passed: ten to a hundred.
        assert_eq!(shares(Some(Duration::from_secs(3600))), 10);
        assert_eq!(shares(Some(Duration::ZERO)), 55);
    }

    #[test]
    fn the_families_of_addresses_take_turns() {
        let addresses = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let resolved = addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"]);
        let expected = addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"]);
        assert_eq!(alternating(resolved), expected);
        assert_eq!(alternating(Vec::new()), Vec::new());
    }

    #[test]
    fn an_upstream_that_refuses_connections_is_chosen_only_if_there_is_no_other() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80 backup"];
        let upstreams = upstreams.map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(&GroupConfig::new("a", upstreams), None, &[]);
        let first = &group.upstreams()[0];
        for _ in 0..FAILURES_BEFORE_EJECTION {
            assert!((0..2).any(|_| chosen(&group, &[]) == Some(0)), "it is not ejected yet");
            group.record_failure(first, &io::ErrorKind::ConnectionRefused.into());
        }
        assert!((0..9).all(|_| chosen(&group, &[]) == Some(1)));
        assert_eq!(chosen(&group, &[1]), Some(2), "the backup");
        assert_eq!(chosen(&group, &[1, 2]), Some(0), "there is no other");
        assert_eq!(chosen(&group, &[0, 1, 2]), None);
        UpstreamGroup::record_success(first);
        assert!((0..2).any(|_| chosen(&group, &[]) == Some(0)), "it is back");
        for _ in 0..CHECKS_BEFORE_DOWN {
            first.record_check(Err(io::ErrorKind::ConnectionRefused.into()));
        }
        assert!((0..9).all(|_| chosen(&group, &[]) == Some(1)));
    }

    #[test]
    fn an_upstream_that_the_operator_excludes_is_chosen_in_no_case() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80"].map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(&GroupConfig::new("a", upstreams), None, &[]);
        group.upstreams()[0].set_administration(Administration::Draining);
        assert!((0..9).all(|_| chosen(&group, &[]) == Some(1)));
        assert_eq!(chosen(&group, &[1]), None, "also if there is no other");
        group.upstreams()[0].set_administration(Administration::Enabled);
        group.upstreams()[0].set_weight(Some(4));
        let count = (0..10).filter(|_| chosen(&group, &[]) == Some(0)).count();
        assert_eq!(count, 8);
        group.upstreams()[0].set_weight(None);
        assert_eq!(group.share(0).weight, 1);
    }

    #[test]
    fn an_upstream_without_a_slot_is_waited_for() {
        let texts = ["10.0.0.1:80 max-connections=1", "10.0.0.2:80 max-connections=2"];
        let backup = "10.0.0.3:80 backup";
        let upstreams: Vec<UpstreamConfig> =
            texts.iter().chain([&backup]).map(|text| text.parse().unwrap()).collect();
        let group = UpstreamGroup::new(&GroupConfig::new("a", upstreams.clone()), None, &[]);
        let slots: Vec<_> = (0..3).filter_map(|_| group.choose(None, &[]).slot()).collect();
        assert_eq!(slots.iter().map(Slot::index).collect::<Vec<_>>(), [0, 1, 1]);
        assert!(matches!(group.choose(None, &[]), Choice::Full), "no backup takes their place");
        assert!(matches!(group.choose(None, &[0]), Choice::Full));
        assert_eq!(chosen(&group, &[0, 1]), Some(2));
        for upstream in &group.upstreams()[..2] {
            upstream.set_down(true);
        }
        assert_eq!(chosen(&group, &[]), Some(2), "they are down");
        assert!(matches!(group.choose(None, &[2]), Choice::Full));
        drop(slots);
        assert!(chosen(&group, &[2]).is_some());
        // By its address a client waits for its own upstream.
        let mut config = GroupConfig::new("a", upstreams);
        config.algorithm = Algorithm::SourceAddress;
        let group = UpstreamGroup::new(&config, None, &[]);
        let client = Some(IpAddr::from([10, 0, 0, 9]));
        let first = group.choose(client, &[]).slot().unwrap();
        let slots: Vec<_> = (0..3).filter_map(|_| group.choose(client, &[]).slot()).collect();
        assert!(slots.iter().all(|slot| slot.index() == first.index()));
        assert_eq!(slots.len(), first.index());
    }
}
