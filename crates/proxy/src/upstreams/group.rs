//! Groups of upstreams, among which clients are balanced.

mod queue;

use crate::config::balance::{Algorithm, Balancer, Candidate};
use crate::config::upstream_address::{UpstreamAddress, UpstreamConfig};
use crate::config::{CheckConfig, GroupConfig};
use crate::header::HeaderVersion;
use crate::upstreams::upstream::{AdminState, Upstream};
use std::io;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use queue::{Queue, QueueError, QueuePlace, QueuedClient, Slot};

/// A group of upstreams among which clients are balanced, shared by all event loops.
#[derive(Debug)]
pub struct UpstreamGroup {
    name: String,
    upstreams: Vec<Arc<Upstream>>,
    /// The configuration of each upstream.
    shares: Vec<Share>,
    /// The time in which the share of an upstream grows after its return.
    slow_start: Option<Duration>,
    send_header: Option<HeaderVersion>,
    check: Option<CheckConfig>,
    balancer: Balancer,
    queue: Arc<Queue>,
    started: Instant,
}

/// The share that an upstream gets of the connections of its group.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub weight: u32,
    pub is_backup: bool,
    pub connections_max: Option<NonZeroUsize>,
}

/// The result of the choice of an upstream.
#[derive(Debug)]
pub enum Choice {
    /// A slot of an upstream.
    Slot(Slot),
    /// A usable upstream has as many connections as its limit allows.
    Full,
    /// Every upstream was tried or excluded.
    None,
}

impl UpstreamGroup {
    /// Creates a group. Upstreams of `previous` and `retired` upstreams keep their state.
    pub fn new(config: &GroupConfig, previous: Option<&Self>, retired: &[Arc<Upstream>]) -> Self {
        let upstreams = &config.upstreams;
        let kept = previous.map_or(&[][..], Self::upstreams);
        let create = |address: &UpstreamAddress| {
            let mut kept = kept.iter().chain(retired);
            let kept = kept.find(|upstream| upstream.address() == address);
            kept.map_or_else(|| Arc::new(Upstream::new(&config.name, address.clone())), Arc::clone)
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
            send_header: config.send_header,
            check: config.check,
            balancer: Balancer::new(config.algorithm, upstreams.len()),
            queue: previous.map_or_else(Arc::default, |previous| Arc::clone(&previous.queue)),
            // The clock of the ends of ejections.
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

    /// The active check; `None` for no check.
    pub fn check(&self) -> Option<CheckConfig> {
        self.check
    }

    /// The version of the header that the upstreams receive; `None` for no header.
    pub fn send_header(&self) -> Option<HeaderVersion> {
        self.send_header
    }

    /// The upstreams, as configured.
    pub fn upstreams(&self) -> &[Arc<Upstream>] {
        &self.upstreams
    }

    /// The place of the upstream with a name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.upstreams.iter().position(|upstream| upstream.name() == name)
    }

    /// A slot of the upstream at a place for a connection that is established, whatever the limit.
    pub fn slot_beyond_limit(&self, index: usize) -> Option<Slot> {
        Slot::take(&self.upstreams[index], index, None, Some(&self.queue))
    }

    /// The share of the upstream at a place, with the weight that the operator set.
    pub fn share(&self, index: usize) -> Share {
        let mut share = self.shares[index];
        share.weight = self.upstreams[index].weight().unwrap_or(share.weight);
        share
    }

    /// The configured weight of the upstream at a place, if the operator set another weight.
    pub fn configured_weight(&self, index: usize) -> Option<u32> {
        let configured = self.shares[index].weight;
        (self.share(index).weight != configured).then_some(configured)
    }

    /// The configured weights that are not in force, because the operator set other weights.
    pub fn weight_caveats(&self) -> impl Iterator<Item = String> {
        self.upstreams.iter().enumerate().filter_map(|(index, upstream)| {
            let configured = self.configured_weight(index)?;
            let weight = self.share(index).weight;
            let name = format!("{}/{}", self.name, upstream.name());
            Some(format!(
                "{name} keeps the weight {weight} of haul proxy control: the command \
                 \"weight {name} default\" puts the {configured} of the configuration in force"
            ))
        })
    }

    /// Whether an upstream of the group is ejected.
    pub fn is_ejected(&self, upstream: &Upstream) -> bool {
        upstream.is_ejected(self.now_ms())
    }

    /// Chooses the upstream of a client. Upstreams that were tried already and upstreams that the
    /// operator excluded are not chosen. Backups come last. An upstream that is down or ejected is
    /// chosen only if all usable upstreams were tried, because a connection may succeed after a
    /// check failed. When an ejection is over, one connection at a time tries the upstream.
    ///
    /// If the upstreams lack a free slot, the client waits, and a backup does not take their place.
    /// With balancing by source address, each client waits for the upstream of its address.
    pub fn choose(&self, client: Option<IpAddr>, tried: &[usize]) -> Choice {
        let now_ms = self.now_ms();
        let mut skipped = tried.to_vec();
        let is_usable = |index: usize| {
            let upstream = &self.upstreams[index];
            !upstream.is_down() && !upstream.is_ejected(now_ms)
        };
        for is_backup in [false, true] {
            let is_candidate =
                |index: usize| self.shares[index].is_backup == is_backup && is_usable(index);
            loop {
                match self.take_slot(client, &skipped, &is_candidate) {
                    Choice::Slot(slot) => {
                        if self.upstreams[slot.index()].try_admit_trial(now_ms) {
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

    /// Whether an upstream is left that was not tried and that the operator did not exclude.
    pub fn has_other(&self, tried: &[usize]) -> bool {
        self.enabled_beside(tried).next().is_some()
    }

    /// The places of the upstreams that the operator did not exclude, without the skipped
    /// upstreams.
    fn enabled_beside<'a>(&'a self, skipped: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        let is_enabled =
            |index: &usize| self.upstreams[*index].administration() == AdminState::Enabled;
        (0..self.upstreams.len()).filter(|index| !skipped.contains(index)).filter(is_enabled)
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
            name_hash: self.upstreams[index].name_hash(),
            weight: self.share(index).weight * self.weight_percent(index),
            open: self.upstreams[index].counters().open(),
        };
        let indices = self.enabled_beside(skipped).filter(|&index| is_candidate(index));
        let mut candidates: Vec<_> = indices.map(candidate).collect();
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

    /// The part of its weight that an upstream has, in percent. With balancing by source address
    /// the part is always 100, because clients would change their upstream while the weight grows.
    fn weight_percent(&self, index: usize) -> u32 {
        match self.balancer.algorithm() {
            Algorithm::SourceAddress => 100,
            _ => self.upstreams[index].weight_percent(self.slow_start),
        }
    }

    /// Records that no address of an upstream accepted a connection.
    pub fn record_failure(&self, upstream: &Upstream, error: &io::Error) {
        upstream.record_failure(self.now_ms(), error);
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstreams::upstream::FAILURES_BEFORE_EJECTION;

    fn slot(choice: Choice) -> Option<Slot> {
        match choice {
            Choice::Slot(slot) => Some(slot),
            Choice::Full | Choice::None => None,
        }
    }

    fn chosen(group: &UpstreamGroup, tried: &[usize]) -> Option<usize> {
        slot(group.choose(None, tried)).map(|slot| slot.index())
    }

    #[test]
    fn the_share_of_an_upstream_that_is_back_grows() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80"].map(|text| text.parse().unwrap());
        let shares = |slow_start: Option<Duration>, time: Duration| {
            let mut config = GroupConfig::new("a", upstreams.clone());
            config.slow_start = slow_start;
            let group = UpstreamGroup::new(&config, None, &[]);
            group.upstreams()[0].set_administration(AdminState::Draining);
            group.upstreams()[0].set_administration(AdminState::Enabled);
            std::thread::sleep(time);
            (0..110).filter(|_| chosen(&group, &[]) == Some(0)).count()
        };
        assert_eq!(shares(None, Duration::ZERO), 55);
        // The slow start takes an hour and just began, so the shares are ten to a hundred.
        assert_eq!(shares(Some(Duration::from_secs(3600)), Duration::ZERO), 10);
        // Half of the slow start is over, so the shares are 50 to 100, or more if the test is slow.
        let half = shares(Some(Duration::from_secs(1)), Duration::from_millis(500));
        assert!((36..=55).contains(&half), "{half}");
        for time in [Duration::ZERO, Duration::from_millis(200)] {
            assert_eq!(shares(Some(time), time), 55);
        }
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
        first.record_success();
        assert!((0..2).any(|_| chosen(&group, &[]) == Some(0)), "it is back");
        let check = CheckConfig::new(Duration::from_secs(1));
        for _ in 0..check.fall.get() {
            first.record_check(Err(io::ErrorKind::ConnectionRefused.into()), check);
        }
        assert!((0..9).all(|_| chosen(&group, &[]) == Some(1)));
    }

    #[test]
    fn an_upstream_that_the_operator_excludes_is_chosen_in_no_case() {
        let upstreams = ["10.0.0.1:80", "10.0.0.2:80"].map(|text| text.parse().unwrap());
        let group = UpstreamGroup::new(&GroupConfig::new("a", upstreams), None, &[]);
        group.upstreams()[0].set_administration(AdminState::Draining);
        assert!((0..9).all(|_| chosen(&group, &[]) == Some(1)));
        assert_eq!(chosen(&group, &[1]), None, "also if there is no other");
        group.upstreams()[0].set_administration(AdminState::Enabled);
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
        let slots: Vec<_> = (0..3).filter_map(|_| slot(group.choose(None, &[]))).collect();
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
        // With balancing by address a client waits for the upstream of its address.
        let mut config = GroupConfig::new("a", upstreams);
        config.algorithm = Algorithm::SourceAddress;
        let group = UpstreamGroup::new(&config, None, &[]);
        let client = Some(IpAddr::from([10, 0, 0, 9]));
        let first = slot(group.choose(client, &[])).unwrap();
        let slots: Vec<_> = (0..3).filter_map(|_| slot(group.choose(client, &[]))).collect();
        assert!(slots.iter().all(|slot| slot.index() == first.index()));
        assert_eq!(slots.len(), first.index());
    }
}
