//! Eviction: chooses the connection that is closed to make room for another.
//!
//! A network is *dominant* if it has a quarter of all connections. The classes, in the order in
//! which they are evicted:
//!
//! | class | network | connection |
//! |---|---|---|
//! | 1 | dominant | waits for a message for two seconds or longer |
//! | 2 | dominant | its message did not move 64 KiB in a second |
//! | 3 | dominant | waits for a message for less time |
//! | 4 | other | waits for the rest of a message for two seconds, or for its beginning for five |
//! | 5 | other | waits for a message for less time |
//! | 6 | other | its message did not move 64 KiB in five seconds |
//!
//! A connection waits until the whole next message of the connection arrived, so a client that
//! sends half a request waits like a client that sends nothing. Within a class, a connection of a
//! [`Network`] with many connections is evicted before a connection of a network with few, and
//! then the connection that has waited or stalled for the longest time. So a client that opens
//! thousands of connections evicts its own connections.
//!
//! An example: a client opens 6,000 connections and sends half a request on each. The client's
//! network is dominant. After two seconds its connections are in class 1, and the connections of
//! other clients stay.
//!
//! Exceptions:
//!
//! * The sixteen connections that began a message last keep their two seconds. Otherwise handshakes
//!   would not complete while all other connections make progress.
//! * A connection of a dominant network does not evict a connection of another network.
//! * A connection that waited for a place does not evict a connection that waits for a message for
//!   less than two seconds. Otherwise thousands of waiting connections would evict each new
//!   connection before its request arrives.
//! * A connection that waited for a place and whose network is dominant leaves an eighth of all
//!   connections to newcomers. Otherwise the usual clients of this network would only find each
//!   other's idle connections.

use crate::admission::network::{Network, NetworkCounts};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time after which an idle connection of a network that is not dominant is in class 4, in
/// seconds.
const IDLE_SECONDS: u32 = 5;
/// The time in which an honest client sends its request, in seconds. It is a round trip, or a few
/// with TLS.
const REQUEST_SECONDS: u32 = 2;
/// The number of connections that keep this time in any case, because they began a message last.
const FRESH_MAX: usize = 16;
/// The time without progress after which a message counts as stalled, in seconds.
const STALLED_SECONDS: u32 = 5;
/// The time for a dominant network. Otherwise a client that stalls transfers faster than they are
/// evicted would keep other clients waiting for [`STALLED_SECONDS`].
const DOMINANT_STALLED_SECONDS: u32 = 1;
/// A network is dominant if it has this part of all connections, and more than a few.
const DOMINANT_PART: usize = 4;
/// A network with at most this number of connections is never dominant.
const FEW_CONNECTIONS: usize = 16;
/// The progress of a message, in bytes: 13 KB/s over [`STALLED_SECONDS`].
const PROGRESS_BYTES: u64 = 64 << 10;
/// The most connections that are chosen at a time. Choosing looks at all connections.
const VICTIMS_MAX: usize = 64;
/// The pause after a choice that found nothing.
const CHOICE_PAUSE: Duration = Duration::from_millis(100);
/// The part of all connections that waiting connections leave to newcomers of their dominant
/// network. Times are in seconds, so many transfers become due at the same tick of the clock, and
/// the waiting connections would take all of their places before the next newcomer comes.
const LEFT_TO_NEWCOMERS_PART: usize = 8;
/// The part of all places that networks with many connections do not get.
const RESERVED_PART: usize = 16;

/// Whether a network that has `connections` of all connections is dominant.
pub(crate) fn is_dominant(connections: usize, all: usize) -> bool {
    connections > FEW_CONNECTIONS && connections * DOMINANT_PART >= all
}

/// The number of places that only networks with fewer connections than this number get. So a client
/// does not wait for a network that has all other places.
pub(crate) fn reserved_places(connections_max: usize) -> usize {
    connections_max / RESERVED_PART
}

/// The activity of a connection, as far as eviction is concerned. Times are in seconds of the
/// loop's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The connection waits for a message of which nothing arrived. Closing the connection loses
    /// nothing.
    Idle,
    /// The connection waits for the rest of a request or of a handshake that began at this time.
    Beginning(u32),
    /// A message is under way, and made progress ([`Progress`]) at this time.
    Transferring(u32),
    /// The service works for the connection, which is not evicted.
    Working,
}

/// The progress of a message. A byte now and then does not count as progress.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    bytes: u64,
    at_seconds: u32,
}

impl Progress {
    /// The message begins.
    pub fn new(now_seconds: u32) -> Self {
        Self { bytes: 0, at_seconds: now_seconds }
    }

    /// Records that so many more bytes moved.
    pub fn add(&mut self, bytes: u64, now_seconds: u32) {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= PROGRESS_BYTES {
            *self = Self::new(now_seconds);
        }
    }

    /// The second of the latest progress.
    pub fn at_seconds(&self) -> u32 {
        self.at_seconds
    }
}

/// A connection that may be evicted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub token: u64,
    /// `None` for a Unix socket: each counts as a separate network.
    pub network: Option<Network>,
    pub activity: Activity,
    /// The number of the connection's latest turn. The smallest number is idle the longest.
    pub latest_turn: u64,
    /// The time of the connection's latest turn, in seconds.
    pub latest_turn_at_seconds: u32,
}

impl Candidate {
    /// The place in the order of eviction, and the time since which the connection waits or stalls;
    /// `None` if it is not to be evicted now.
    fn class(&self, is_of_dominant_network: bool, now_seconds: u32) -> Option<(u8, u32)> {
        let has_lasted = |since: u32, seconds: u32| now_seconds.saturating_sub(since) >= seconds;
        let (idle_seconds, stalled_seconds, classes) = if is_of_dominant_network {
            (REQUEST_SECONDS, DOMINANT_STALLED_SECONDS, [1, 3, 2])
        } else {
            (IDLE_SECONDS, STALLED_SECONDS, [4, 5, 6])
        };
        let [long_wait, short_wait, stalled] = classes;
        let waits = |since: u32, seconds: u32| {
            Some((if has_lasted(since, seconds) { long_wait } else { short_wait }, since))
        };
        match self.activity {
            Activity::Idle => waits(self.latest_turn_at_seconds, idle_seconds),
            Activity::Beginning(since) => waits(since, REQUEST_SECONDS),
            Activity::Transferring(since) => {
                has_lasted(since, stalled_seconds).then_some((stalled, since))
            }
            Activity::Working => None,
        }
    }

    /// Whether a message began less than two seconds ago.
    fn is_fresh(&self, now_seconds: u32) -> bool {
        let Activity::Beginning(since) = self.activity else { return false };
        now_seconds.saturating_sub(since) < REQUEST_SECONDS
    }
}

/// The number of the latest turn of the oldest connection that is protected because it is among the
/// freshest.
fn oldest_protected_turn(candidates: &[Candidate], now_seconds: u32) -> u64 {
    let fresh = candidates.iter().filter(|candidate| candidate.is_fresh(now_seconds));
    let mut turns: Vec<_> = fresh.map(|candidate| candidate.latest_turn).collect();
    if turns.len() <= FRESH_MAX {
        return 0;
    }
    let at = turns.len() - FRESH_MAX;
    *turns.select_nth_unstable(at).1
}

/// The connection for which another is to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub is_of_dominant_network: bool,
    /// Whether the connection waited for a place.
    pub has_waited: bool,
}

impl Claim {
    /// Whether a connection may be evicted for the newcomer.
    fn allows(
        self,
        candidate: &Candidate,
        since: u32,
        is_dominant: bool,
        now_seconds: u32,
    ) -> bool {
        let is_transferring = matches!(candidate.activity, Activity::Transferring(_));
        let has_lasted = now_seconds.saturating_sub(since) >= REQUEST_SECONDS;
        (is_dominant || !self.is_of_dominant_network)
            && (is_transferring || has_lasted || !self.has_waited)
    }
}

/// Connections that were chosen to be evicted, by the claims they are chosen for.
#[derive(Debug, Default)]
pub(crate) struct VictimsByClaim([Victims; 4]);

impl VictimsByClaim {
    /// The connections that were chosen for a claim.
    pub fn of(&mut self, claim: Claim) -> &mut Victims {
        let index = usize::from(claim.is_of_dominant_network) << 1 | usize::from(claim.has_waited);
        &mut self.0[index]
    }
}

/// Connections that were chosen to be evicted, for a second at most.
#[derive(Debug, Default)]
pub(crate) struct Victims {
    chosen: VecDeque<Victim>,
    chosen_at_seconds: u32,
    /// The time at which a choice found nothing.
    found_none_at: Option<Instant>,
}

/// A connection that was chosen to be evicted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Victim {
    pub token: u64,
    class: u8,
    latest_turn: u64,
    is_of_dominant_network: bool,
}

impl Victim {
    /// Whether the connection is still in the state for which it was chosen.
    pub fn is_due(self, connection: &Candidate, now_seconds: u32) -> bool {
        let class = connection.class(self.is_of_dominant_network, now_seconds);
        let has_had_a_message =
            connection.activity == Activity::Idle && connection.latest_turn != self.latest_turn;
        class.is_some_and(|(class, _)| class <= self.class) && !has_had_a_message
    }
}

impl Victims {
    /// Takes the next connection to evict, if one was chosen in this second.
    pub fn next(&mut self, now_seconds: u32) -> Option<Victim> {
        if self.chosen_at_seconds != now_seconds {
            self.chosen.clear();
        }
        self.chosen.pop_front()
    }

    /// Whether to choose connections again: all chosen connections are evicted, and the last choice
    /// found some.
    pub fn may_choose(&self, now: Instant) -> bool {
        let pauses = |at| now.saturating_duration_since(at) < CHOICE_PAUSE;
        self.chosen.is_empty() && !self.found_none_at.is_some_and(pauses)
    }

    /// Chooses among all connections, at most one of sixteen, and only of one class.
    pub fn choose(
        &mut self,
        claim: Claim,
        candidates: &[Candidate],
        networks: &NetworkCounts,
        now_seconds: u32,
        now: Instant,
    ) {
        let protected = oldest_protected_turn(candidates, now_seconds);
        let is_protected = |candidate: &Candidate| {
            candidate.is_fresh(now_seconds) && candidate.latest_turn >= protected
        };
        let mut due: Vec<_> = candidates
            .iter()
            .filter(|candidate| !is_protected(candidate))
            .filter_map(|candidate| {
                let network_size = networks.get(candidate.network).max(1);
                let is_of_dominant_network = is_dominant(network_size, candidates.len());
                let (class, since) = candidate.class(is_of_dominant_network, now_seconds)?;
                if !claim.allows(candidate, since, is_of_dominant_network, now_seconds) {
                    return None;
                }
                // Networks of about the same size are equal.
                let order = (class, Reverse(network_size.ilog2()), since, candidate.latest_turn);
                let Candidate { token, latest_turn, .. } = *candidate;
                Some((order, Victim { token, class, latest_turn, is_of_dominant_network }))
            })
            .collect();
        let left_to_others = claim.is_of_dominant_network && claim.has_waited;
        let left = if left_to_others { candidates.len() / LEFT_TO_NEWCOMERS_PART } else { 0 };
        let count = (candidates.len() / 16).clamp(1, VICTIMS_MAX);
        let count = count.min(due.len().saturating_sub(left));
        if due.len() > count {
            due.select_nth_unstable_by_key(count, |(order, _)| *order);
            due.truncate(count);
        }
        due.sort_unstable_by_key(|(order, _)| *order);
        // Other connections of this class may become due before a connection of the next class.
        let first = due.first().map(|(_, victim)| victim.class);
        let of_first_class = due.into_iter().map(|(_, victim)| victim);
        self.chosen = of_first_class.take_while(|victim| Some(victim.class) == first).collect();
        self.chosen_at_seconds = now_seconds;
        self.found_none_at = self.chosen.is_empty().then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const NOW: u32 = 100;

    /// A connection that had its latest turn `token` seconds after the first.
    fn candidate(token: u64, host: u8, activity: Activity) -> Candidate {
        let network = Network::from(IpAddr::from(Ipv4Addr::new(192, 0, 2, host)));
        Candidate {
            token,
            network: Some(network),
            activity,
            latest_turn: token,
            latest_turn_at_seconds: token as u32,
        }
    }

    /// So many connections of a network. They differ in nothing but their turns.
    fn many(host: u8, count: u64, activity: Activity) -> impl Iterator<Item = Candidate> {
        (0..count).map(move |token| Candidate {
            latest_turn_at_seconds: NOW,
            ..candidate(1000 * u64::from(host) + token, host, activity)
        })
    }

    /// That of a new connection of a small network.
    const NEW: Claim = Claim { is_of_dominant_network: false, has_waited: false };

    fn choose(victims: &mut Victims, claim: Claim, candidates: &[Candidate]) {
        let mut networks = NetworkCounts::default();
        for candidate in candidates {
            networks.add(candidate.network);
        }
        victims.choose(claim, candidates, &networks, NOW, Instant::now());
    }

    fn chosen(candidates: &[Candidate]) -> Vec<u64> {
        chosen_for(NEW, candidates)
    }

    fn chosen_for(claim: Claim, candidates: &[Candidate]) -> Vec<u64> {
        let mut victims = Victims::default();
        choose(&mut victims, claim, candidates);
        std::iter::from_fn(|| victims.next(NOW)).map(|victim| victim.token).collect()
    }

    #[test]
    fn the_longest_wait_ends_first_then_stalled_messages_and_work_never() {
        let order = [
            candidate(5, 1, Activity::Idle),
            candidate(9, 3, Activity::Beginning(40)),
            candidate(60, 2, Activity::Idle),
            candidate(97, 7, Activity::Beginning(NOW - REQUEST_SECONDS)),
            candidate(96, 4, Activity::Idle),
            candidate(99, 8, Activity::Idle),
            candidate(2, 5, Activity::Transferring(10)),
            candidate(1, 6, Activity::Transferring(NOW - STALLED_SECONDS)),
        ];
        for first in 0..order.len() {
            assert_eq!(chosen(&order[first..]), [order[first].token], "{first}");
        }
        let working = [
            candidate(1, 1, Activity::Working),
            candidate(2, 2, Activity::Transferring(NOW)),
            candidate(3, 3, Activity::Transferring(NOW - STALLED_SECONDS + 1)),
        ];
        assert!(chosen(&working).is_empty());
    }

    #[test]
    fn the_freshest_requests_keep_their_time() {
        // Beside transfers that all make progress, a handshake is not evicted for the next one.
        let busy = many(1, 19, Activity::Transferring(NOW));
        let fresh = candidate(9, 2, Activity::Beginning(NOW));
        let all: Vec<_> = busy.chain([fresh]).collect();
        assert!(chosen(&all).is_empty());
        // Of many, the latest keep it.
        let many: Vec<_> = many(1, 200, Activity::Beginning(NOW)).collect();
        let mut victims = Victims::default();
        let mut left = many.clone();
        loop {
            choose(&mut victims, NEW, &left);
            let Some(victim) = victims.next(NOW) else { break };
            left.retain(|candidate| candidate.token != victim.token);
        }
        assert_eq!(left.len(), FRESH_MAX);
        assert!(left.iter().all(|candidate| candidate.token >= 1200 - FRESH_MAX as u64));
    }

    #[test]
    fn a_client_with_many_connections_evicts_its_own() {
        let mut all: Vec<_> = many(1, 199, Activity::Transferring(90)).collect();
        // This one is stalled for longer, but it is one.
        all.push(candidate(0, 2, Activity::Transferring(5)));
        let victims = chosen(&all);
        assert_eq!(victims, (1000..1012).collect::<Vec<_>>());
    }

    #[test]
    fn a_dominant_network_loses_short_waits_and_short_stalls_before_others() {
        for activity in [Activity::Beginning(NOW), Activity::Transferring(NOW - 1)] {
            let all: Vec<_> = many(1, 24, Activity::Idle)
                .chain(many(2, 24, activity))
                .chain(many(3, 52, activity))
                .collect();
            let victims = chosen(&all);
            assert_eq!(victims.len(), 6);
            assert!(victims.iter().all(|token| *token >= 3000), "{victims:?}");
        }
        // Also before the idle connections of others, as long as it has any that wait.
        let flood = many(3, 90, Activity::Beginning(NOW));
        let idle = (1..=10).map(|token| candidate(token, 10 + token as u8, Activity::Idle));
        let all: Vec<_> = flood.chain(idle).collect();
        let victims = chosen(&all);
        assert!(victims.iter().all(|token| *token >= 3000), "{victims:?}");
        let stalled = Activity::Transferring(NOW - 1);
        let few: Vec<_> = many(1, FEW_CONNECTIONS as u64, stalled).collect();
        assert!(chosen(&few).is_empty(), "a few are not dominant");
        let fresh: Vec<_> = many(1, 40, Activity::Transferring(NOW)).collect();
        assert!(chosen(&fresh).is_empty());
    }

    #[test]
    fn a_victim_that_has_had_a_message_is_spared() {
        let idle = candidate(7, 1, Activity::Idle);
        let mut victims = Victims::default();
        choose(&mut victims, NEW, &[idle]);
        let victim = victims.next(NOW).unwrap();
        assert!(victim.is_due(&idle, NOW));
        assert!(!victim.is_due(&Candidate { activity: Activity::Working, ..idle }, NOW));
        assert!(!victim.is_due(&Candidate { latest_turn: 8, ..idle }, NOW), "idle again");
    }

    #[test]
    fn victims_are_forgotten_after_their_second() {
        let mut victims = Victims::default();
        choose(&mut victims, NEW, &[candidate(7, 1, Activity::Idle)]);
        assert!(victims.next(NOW + 1).is_none());
        assert!(victims.next(NOW).is_none());
    }

    #[test]
    fn a_dominant_network_evicts_none_of_others() {
        let dominant = Claim { is_of_dominant_network: true, ..NEW };
        let others = (1..=5).map(|token| candidate(token, token as u8, Activity::Idle));
        let busy = many(20, 150, Activity::Transferring(NOW));
        let mut all: Vec<_> = others.chain(busy).collect();
        assert!(chosen_for(dominant, &all).is_empty());
        assert_eq!(chosen(&all), [1, 2, 3, 4, 5]);
        // If it has one that has stalled, that is evicted, although others have waited.
        all.push(candidate(7, 20, Activity::Transferring(NOW - 1)));
        assert_eq!(chosen_for(dominant, &all), [7]);
    }

    #[test]
    fn those_that_have_waited_for_a_place_spare_short_waits() {
        let waited = Claim { has_waited: true, ..NEW };
        let short = [Activity::Idle, Activity::Beginning(NOW - 1)].map(|one| many(1, 30, one));
        let all: Vec<_> = short.into_iter().flatten().collect();
        assert!(chosen_for(waited, &all).is_empty());
        assert!(!chosen(&all).is_empty());
        let long = candidate(7, 1, Activity::Beginning(NOW - REQUEST_SECONDS));
        let stalled = candidate(8, 1, Activity::Transferring(NOW - 1));
        let all: Vec<_> = all.into_iter().chain([stalled, long]).collect();
        assert_eq!(chosen_for(waited, &all), [7]);
        let all: Vec<_> = all.into_iter().filter(|one| one.token != 7).collect();
        assert_eq!(chosen_for(waited, &all), [8], "once there is none of the first class");
    }

    #[test]
    fn those_that_have_waited_leave_some_to_newcomers_of_their_dominant_network() {
        let newcomer = Claim { is_of_dominant_network: true, ..NEW };
        let waited = Claim { has_waited: true, ..newcomer };
        let of_small_network = Claim { is_of_dominant_network: false, ..waited };
        let chosen_of = |claim: Claim, stalled: u64| {
            let others = many(1, 80 - stalled, Activity::Working);
            let stalled = many(1, stalled, Activity::Transferring(NOW - 1));
            chosen_for(claim, &stalled.chain(others).collect::<Vec<_>>()).len()
        };
        assert_eq!(chosen_of(waited, 10), 0, "an eighth of all");
        assert_eq!(chosen_of(waited, 12), 2);
        assert_eq!(chosen_of(newcomer, 10), 5, "a sixteenth of all");
        assert_eq!(chosen_of(of_small_network, 10), 5);
    }

    #[test]
    fn a_choice_of_none_is_not_made_again_at_once() {
        let mut victims = Victims::default();
        let now = Instant::now();
        assert!(victims.may_choose(now));
        victims.choose(NEW, &[], &NetworkCounts::default(), NOW, now);
        assert!(!victims.may_choose(now + CHOICE_PAUSE / 2));
        assert!(victims.may_choose(now + CHOICE_PAUSE));
    }

    #[test]
    fn a_byte_now_and_then_is_no_progress() {
        let mut progress = Progress::new(3);
        for second in 4..1000 {
            progress.add(1, second);
        }
        assert_eq!(progress.at_seconds(), 3);
        progress.add(PROGRESS_BYTES, 1000);
        assert_eq!(progress.at_seconds(), 1000);
    }
}
