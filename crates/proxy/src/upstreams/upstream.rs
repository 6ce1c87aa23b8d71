//! Upstreams: the servers that clients are connected to, with their state.

use crate::config::CheckConfig;
use crate::config::balance::name_hash;
use crate::config::upstream_address::UpstreamAddress;
use crate::upstreams::candidates::Candidates;
use haul_server::connect::PeerAddress;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst,
};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};
use tracing::{info, warn};

/// The number of failed connections in a row after which an upstream is ejected.
pub const FAILURES_BEFORE_EJECTION: u32 = 3;
/// The part of its weight that an upstream has right after its return, in percent.
const SLOW_START_PERCENT_MIN: u64 = 10;
/// How long an ejected upstream is left out while the group has another upstream.
const EJECTION_TIME: Duration = Duration::from_secs(10);

/// An upstream, shared by all event loops.
#[derive(Debug)]
pub struct Upstream {
    group: String,
    address: UpstreamAddress,
    name: String,
    name_hash: u64,
    /// The addresses that the name stands for.
    candidates: Mutex<Candidates>,
    health: Health,
    /// An [`AdminState`].
    administration: AtomicU8,
    /// The weight that the operator set in place of the configured weight; 0 if the operator did
    /// not set a weight.
    weight: AtomicU32,
    counters: UpstreamCounters,
}

/// Whether an upstream gets new connections, as the operator set it. A reload keeps this state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "Administration")]
#[non_exhaustive]
pub enum AdminState {
    /// The upstream gets new connections.
    Enabled,
    /// The upstream does not get new connections. Established connections continue.
    Draining,
    /// The upstream does not get new connections. Established connections were closed.
    Disabled,
    /// In lists only: the upstream left the configuration. Established connections continue.
    Removed,
}

impl AdminState {
    const ALL: [Self; 3] = [Self::Enabled, Self::Draining, Self::Disabled];

    /// The name in lists.
    pub fn name(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Draining => "draining",
            Self::Disabled => "disabled",
            Self::Removed => "removed",
        }
    }
}

/// The change after an active check.
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
    /// Whether the active check found the upstream down.
    is_down: AtomicBool,
    /// The number of failed checks in a row.
    failed_checks: AtomicU32,
    /// The number of successful checks in a row.
    good_checks: AtomicU32,
    /// Why the latest check failed, if it failed.
    check_error: Mutex<Option<String>>,
    /// The number of failed connections in a row.
    failures: AtomicU32,
    /// The end of the ejection, in milliseconds of the group's clock.
    ejected_until_ms: AtomicU64,
    /// When the upstream came back, in milliseconds of [`process_ms`]; 0 if it was never away.
    back_since_ms: AtomicU64,
}

impl Health {
    /// The upstream gets connections again.
    fn record_return(&self) {
        self.back_since_ms.store(process_ms().max(1), Relaxed);
    }

    /// The part of its weight that the upstream has now, in percent. After a return the part grows
    /// to 100 in `slow_start`.
    fn weight_percent(&self, slow_start: Option<Duration>) -> u32 {
        let back_since_ms = self.back_since_ms.load(Relaxed);
        let Some(slow_start) = slow_start.filter(|_| back_since_ms > 0) else { return 100 };
        let age_ms = process_ms().saturating_sub(back_since_ms);
        let percent = (100 * age_ms).checked_div(slow_start.as_millis() as u64).unwrap_or(100);
        percent.clamp(SLOW_START_PERCENT_MIN, 100) as u32
    }

    /// Admits a connection now, if it may be tried. After an ejection, one trial connection is
    /// admitted until its result is known, or for the time of another ejection.
    fn try_admit_trial(&self, now_ms: u64) -> bool {
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
    /// The connections that are open or being opened, plus [`FROZEN`] if the number is frozen.
    open: AtomicUsize,
    /// Connections that were established.
    pub connected: AtomicU64,
    /// Connections that could not be established.
    pub failed: AtomicU64,
    /// Active checks that failed.
    pub failed_checks: AtomicU64,
}

/// A number above every limit of connections, so that connections are not opened to a limited
/// upstream.
const FROZEN: usize = 1 << (usize::BITS - 2);

impl UpstreamCounters {
    /// The number of connections that are open or being opened.
    pub fn open(&self) -> usize {
        self.open.load(SeqCst) % FROZEN
    }

    /// Counts another connection, unless the number is `connections_max` or frozen. True if the
    /// connection was counted.
    pub fn try_add_open(&self, connections_max: Option<NonZeroUsize>) -> bool {
        let has_room = |open| connections_max.is_none_or(|maximum| open < maximum.get());
        let next = |open| has_room(open).then_some(open + 1);
        self.open.fetch_update(SeqCst, SeqCst, next).is_ok()
    }

    /// Counts the end of a connection.
    pub fn remove_open(&self) {
        self.open.fetch_sub(1, SeqCst);
    }

    /// Freezes the number of open connections, and returns the number. While the number is frozen,
    /// an upstream with a limit of connections does not get new connections.
    pub fn freeze_open(&self) -> usize {
        self.open.fetch_add(FROZEN, SeqCst)
    }

    /// The opposite of [`UpstreamCounters::freeze_open`].
    pub fn unfreeze_open(&self) {
        self.open.fetch_sub(FROZEN, SeqCst);
    }
}

impl Upstream {
    /// Creates an upstream of a group at an address, without connections.
    pub fn new(group: &str, address: UpstreamAddress) -> Self {
        let candidates = Candidates::new(match &address {
            UpstreamAddress::Tcp(address) => vec![PeerAddress::Tcp(*address)],
            UpstreamAddress::Unix(path) => vec![PeerAddress::Unix(path.clone())],
            UpstreamAddress::Name { .. } => Vec::new(),
        });
        let name = address.to_string();
        Self {
            group: group.to_owned(),
            name_hash: name_hash(&name),
            name,
            address,
            candidates: Mutex::new(candidates),
            health: Health::default(),
            administration: AtomicU8::new(AdminState::Enabled as u8),
            weight: AtomicU32::new(0),
            counters: UpstreamCounters::default(),
        }
    }

    /// Whether the upstream gets new connections, as the operator set it.
    pub fn administration(&self) -> AdminState {
        let number = self.administration.load(Relaxed);
        AdminState::ALL.get(usize::from(number)).copied().unwrap_or(AdminState::Enabled)
    }

    /// Sets whether the upstream gets new connections.
    pub fn set_administration(&self, administration: AdminState) {
        let before = self.administration();
        self.administration.store(administration as u8, Relaxed);
        if administration == AdminState::Enabled && before != administration {
            self.health.record_return();
        }
    }

    /// The weight that the operator set.
    pub fn weight(&self) -> Option<u32> {
        NonZeroU32::new(self.weight.load(Relaxed)).map(NonZeroU32::get)
    }

    /// Sets the weight in place of the configured weight; `None` restores the configured weight.
    pub fn set_weight(&self, weight: Option<u32>) {
        self.weight.store(weight.unwrap_or(0), Relaxed);
    }

    /// The name of the upstream's group.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// The name, as configured.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address, as configured.
    pub fn address(&self) -> &UpstreamAddress {
        &self.address
    }

    /// The hash of the name, for balancing.
    pub fn name_hash(&self) -> u64 {
        self.name_hash
    }

    /// The counters.
    pub fn counters(&self) -> &UpstreamCounters {
        &self.counters
    }

    /// All addresses; none if the upstream's name is not resolved yet.
    pub fn addresses(&self) -> Arc<[PeerAddress]> {
        Arc::clone(self.lock().all())
    }

    /// The addresses that a client tries, in this order, before the upstream counts as failed
    /// ([`Candidates`]).
    pub fn candidates(&self) -> Arc<[PeerAddress]> {
        Arc::clone(self.lock().tried())
    }

    /// All addresses, beginning with [`Upstream::candidates`].
    pub fn addresses_in_turn(&self) -> Vec<PeerAddress> {
        self.lock().in_turn()
    }

    /// Lets clients try this address, which accepted a check.
    pub fn prefer_address(&self, address: &PeerAddress) {
        self.lock().prefer(address);
    }

    /// Goes on to other addresses, because `failed`, which [`Upstream::candidates`] returned, do
    /// not accept connections.
    pub fn skip_candidates(&self, failed: &Arc<[PeerAddress]>) {
        self.lock().go_on(failed);
    }

    /// The host name, if it has one.
    pub fn host(&self) -> Option<&str> {
        match &self.address {
            UpstreamAddress::Name { host, .. } => Some(host),
            _ => None,
        }
    }

    /// Sets the addresses that the host name has now. The ports of the addresses do not count.
    /// Established connections stay.
    pub fn set_addresses(&self, addresses: &[SocketAddr]) {
        let Some(port) = self.address.port() else { return };
        let resolved = Candidates::of_name(addresses, port);
        let mut candidates = self.lock();
        if resolved.all() == candidates.all() {
            return;
        }
        *candidates = resolved;
    }

    /// Whether the active check found the upstream down.
    pub fn is_down(&self) -> bool {
        self.health.is_down.load(Relaxed)
    }

    /// Sets whether the active check found the upstream down.
    pub fn set_down(&self, is_down: bool) {
        self.health.is_down.store(is_down, Relaxed);
    }

    /// Whether the upstream is ejected at a time.
    pub fn is_ejected(&self, now_ms: u64) -> bool {
        self.health.ejected_until_ms.load(Relaxed) > now_ms
    }

    /// Whether a connection may be tried now ([`Health::try_admit_trial`]).
    pub fn try_admit_trial(&self, now_ms: u64) -> bool {
        self.health.try_admit_trial(now_ms)
    }

    /// The part of the weight that the upstream has now, in percent ([`Health::weight_percent`]).
    pub fn weight_percent(&self, slow_start: Option<Duration>) -> u32 {
        self.health.weight_percent(slow_start)
    }

    /// Records that a connection was established.
    pub fn record_success(&self) {
        let health = &self.health;
        self.counters.connected.fetch_add(1, Relaxed);
        if health.failures.swap(0, Relaxed) >= FAILURES_BEFORE_EJECTION {
            health.ejected_until_ms.store(0, Relaxed);
            health.record_return();
            let (group, name) = (self.group(), self.name());
            info!(group, upstream = name, "upstream {self} accepts connections again");
        }
    }

    /// Records that all addresses refused a connection. Enough failures eject the upstream (passive
    /// check).
    pub fn record_failure(&self, now_ms: u64, error: &io::Error) {
        let health = &self.health;
        self.counters.failed.fetch_add(1, Relaxed);
        let failures = health.failures.fetch_add(1, Relaxed).saturating_add(1);
        if failures >= FAILURES_BEFORE_EJECTION {
            let until_ms = now_ms + EJECTION_TIME.as_millis() as u64;
            health.ejected_until_ms.store(until_ms, Relaxed);
        }
        if failures == FAILURES_BEFORE_EJECTION {
            let (group, name) = (self.group(), self.name());
            warn!(
                group,
                upstream = name,
                %error,
                "upstream {self} accepts no connections: {error}"
            );
        }
    }

    /// Why the latest active check failed; `None` if it succeeded.
    pub fn check_error(&self) -> Option<String> {
        self.health.check_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets the results of the active check, because the upstream is not checked any more.
    pub fn forget_checks(&self) {
        let health = &self.health;
        if health.is_down.swap(false, Relaxed) {
            health.record_return();
            let (group, name) = (self.group(), self.name());
            warn!(
                group,
                upstream = name,
                "upstream {self}, which was down, is not checked any more"
            );
        }
        health.failed_checks.store(0, Relaxed);
        health.good_checks.store(0, Relaxed);
        *health.check_error.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Records the result of an active check.
    pub fn record_check(&self, result: io::Result<()>, config: CheckConfig) -> CheckOutcome {
        let (group, name, health) = (self.group(), self.name(), &self.health);
        let problem = result.as_ref().err().map(ToString::to_string);
        *health.check_error.lock().unwrap_or_else(PoisonError::into_inner) = problem;
        match result {
            Ok(()) => {
                health.failed_checks.store(0, Relaxed);
                let successes = health.good_checks.fetch_add(1, Relaxed).saturating_add(1);
                if successes >= config.rise.get() && health.is_down.swap(false, Relaxed) {
                    // The ejection ends, because the connections failed while the upstream was
                    // down.
                    health.failures.store(0, Relaxed);
                    health.ejected_until_ms.store(0, Relaxed);
                    health.record_return();
                    info!(group, upstream = name, "upstream {self} is up");
                    return CheckOutcome::Up;
                }
            }
            Err(error) => {
                health.good_checks.store(0, Relaxed);
                self.counters.failed_checks.fetch_add(1, Relaxed);
                let failures = health.failed_checks.fetch_add(1, Relaxed).saturating_add(1);
                if failures >= config.fall.get() && !health.is_down.swap(true, Relaxed) {
                    warn!(group, upstream = name, %error, "upstream {self} is down: {error}");
                    return CheckOutcome::Down;
                }
            }
        }
        CheckOutcome::Same
    }

    fn lock(&self) -> MutexGuard<'_, Candidates> {
        self.candidates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} of group {}", self.name, self.group)
    }
}

/// Milliseconds since the first call.
fn process_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_an_ejection_one_connection_at_a_time_tries_the_upstream() {
        const EJECTION_MS: u64 = EJECTION_TIME.as_millis() as u64;
        let upstream = Upstream::new("web", "10.0.0.1:80".parse().unwrap());
        let refused = io::ErrorKind::ConnectionRefused.into();
        for _ in 0..FAILURES_BEFORE_EJECTION {
            assert!(upstream.try_admit_trial(1), "it is not ejected yet");
            upstream.record_failure(1, &refused);
        }
        let mut over_ms = 1 + EJECTION_MS;
        for _ in 0..2 {
            assert!(!upstream.try_admit_trial(over_ms - 1), "it is ejected");
            assert!(upstream.try_admit_trial(over_ms), "the first connection tries it");
            assert!(!upstream.try_admit_trial(over_ms), "the result is not known yet");
            let failed_ms = over_ms + 5;
            upstream.record_failure(failed_ms, &refused);
            over_ms = failed_ms + EJECTION_MS;
        }
        // If a trial ends without a result because its client left, another trial follows.
        assert!(upstream.try_admit_trial(over_ms));
        over_ms += EJECTION_MS;
        assert!(!upstream.try_admit_trial(over_ms - 1));
        assert!(upstream.try_admit_trial(over_ms));
        upstream.record_success();
        assert!((0..3).all(|_| upstream.try_admit_trial(over_ms)), "it is back");
    }
}
