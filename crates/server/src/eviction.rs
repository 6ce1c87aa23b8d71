//! Eviction: which connections are closed when there is no room for another.
//!
//! Closed first are connections that lose nothing, then those that only occupy their place:
//!
//! 1. idle ones, the longest idle first;
//! 2. those that have not sent a whole request within two seconds, the oldest first;
//! 3. those whose message has not moved 64 KiB in five seconds, the longest stalled first.
//!
//! Within each of the three, a connection of a [`Network`] with many connections is closed before
//! one of a network with few, so that a client that opens thousands of them evicts its own. A
//! network that has a quarter of all connections gets one second instead of two and five.

use crate::network::Network;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

/// The time in which an honest client sends its request, in seconds. It is a round trip, or a few
/// with TLS.
const REQUEST_SECONDS: u32 = 2;
/// The time without progress after which a message counts as stalled, in seconds.
const STALLED_SECONDS: u32 = 5;
/// The time that a dominant network gets instead of both, in seconds. One client that opens
/// connections faster than they are evicted would otherwise keep others waiting for so long.
const DOMINANT_SECONDS: u32 = 1;
/// A network is dominant if it has this part of all connections, and more than a few.
const DOMINANT_PART: usize = 4;
/// The most connections of a network that is not dominant in any case.
const FEW_CONNECTIONS: usize = 16;
/// The progress of a message, in bytes: 13 KB/s over [`STALLED_SECONDS`].
const PROGRESS_BYTES: u64 = 64 << 10;
/// The most connections that are chosen at a time. Choosing looks at all connections.
const VICTIMS_MAX: usize = 64;

/// The activity of a connection, as far as eviction is concerned. Times are in seconds of the
/// loop's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// It waits for a message of which nothing has arrived. Closing it loses nothing.
    Idle,
    /// It waits for the rest of a request or of a handshake that began at this time.
    Beginning(u32),
    /// A message is under way, and made progress ([`Progress`]) at this time.
    Transferring(u32),
    /// The service works for it: it is not evicted.
    Working,
}

impl Activity {
    /// The place in the order of eviction; `None` if the connection is not to be evicted now.
    fn class(self, is_of_dominant_network: bool, now_seconds: u32) -> Option<u8> {
        let has_lasted = |since: u32, seconds: u32| {
            let seconds = if is_of_dominant_network { DOMINANT_SECONDS } else { seconds };
            now_seconds.saturating_sub(since) >= seconds
        };
        match self {
            Self::Idle => Some(0),
            Self::Beginning(since) if has_lasted(since, REQUEST_SECONDS) => Some(1),
            Self::Transferring(since) if has_lasted(since, STALLED_SECONDS) => Some(2),
            Self::Beginning(_) | Self::Transferring(_) | Self::Working => None,
        }
    }

    fn since(self) -> u32 {
        match self {
            Self::Beginning(since) | Self::Transferring(since) => since,
            Self::Idle | Self::Working => 0,
        }
    }
}

/// The progress of a message. A peer that moves a byte now and then makes none.
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

    /// So many more bytes have moved.
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
    /// `None` for a Unix socket: each counts as a network of its own.
    pub network: Option<Network>,
    pub activity: Activity,
    /// The number of its latest turn: the smallest is idle the longest.
    pub latest_turn: u64,
}

/// Connections that were chosen to be evicted, for a second at most.
#[derive(Debug, Default)]
pub(crate) struct Victims {
    chosen: VecDeque<Victim>,
    chosen_at_seconds: u32,
}

/// A connection that was chosen to be evicted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Victim {
    pub token: u64,
    is_of_dominant_network: bool,
}

impl Victim {
    /// Whether it may still be evicted.
    pub fn is_due(self, activity: Activity, now_seconds: u32) -> bool {
        activity.class(self.is_of_dominant_network, now_seconds).is_some()
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

    /// Chooses among all connections, at most one of sixteen.
    pub fn choose(&mut self, candidates: &[Candidate], now_seconds: u32) {
        let mut connections: HashMap<Network, u32> = HashMap::new();
        for network in candidates.iter().filter_map(|candidate| candidate.network) {
            *connections.entry(network).or_default() += 1;
        }
        let mut due: Vec<_> = candidates
            .iter()
            .filter_map(|candidate| {
                let network = candidate.network.and_then(|network| connections.get(&network));
                let network_size = network.copied().unwrap_or(1);
                let is_of_dominant_network = network_size as usize > FEW_CONNECTIONS
                    && network_size as usize * DOMINANT_PART >= candidates.len();
                let class = candidate.activity.class(is_of_dominant_network, now_seconds)?;
                let since = candidate.activity.since();
                // Networks of about the same size are equal.
                let order = (class, Reverse(network_size.ilog2()), since, candidate.latest_turn);
                Some((order, Victim { token: candidate.token, is_of_dominant_network }))
            })
            .collect();
        let count = (candidates.len() / 16).clamp(1, VICTIMS_MAX);
        if due.len() > count {
            due.select_nth_unstable_by_key(count - 1, |(order, _)| *order);
            due.truncate(count);
        }
        due.sort_unstable_by_key(|(order, _)| *order);
        self.chosen = due.into_iter().map(|(_, victim)| victim).collect();
        self.chosen_at_seconds = now_seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const NOW: u32 = 100;

    fn candidate(token: u64, host: u8, activity: Activity) -> Candidate {
        let network = Network::from(IpAddr::from(Ipv4Addr::new(192, 0, 2, host)));
        Candidate { token, network: Some(network), activity, latest_turn: token }
    }

    fn chosen(candidates: &[Candidate]) -> Vec<u64> {
        let mut victims = Victims::default();
        victims.choose(candidates, NOW);
        std::iter::from_fn(|| victims.next(NOW)).map(|victim| victim.token).collect()
    }

    #[test]
    fn idle_connections_are_evicted_before_slow_ones_and_working_ones_never() {
        let order = [
            candidate(5, 1, Activity::Idle),
            candidate(9, 2, Activity::Idle),
            candidate(4, 3, Activity::Beginning(40)),
            candidate(3, 4, Activity::Beginning(NOW - REQUEST_SECONDS)),
            candidate(2, 5, Activity::Transferring(10)),
            candidate(1, 6, Activity::Transferring(NOW - STALLED_SECONDS)),
        ];
        for first in 0..order.len() {
            assert_eq!(chosen(&order[first..]), [order[first].token], "{first}");
        }
        let working = [
            candidate(1, 1, Activity::Working),
            candidate(2, 1, Activity::Beginning(NOW)),
            candidate(3, 1, Activity::Transferring(NOW - 1)),
        ];
        assert!(chosen(&working).is_empty());
    }

    #[test]
    fn a_client_with_many_connections_evicts_its_own() {
        let mut all: Vec<_> =
            (1..200).map(|token| candidate(token, 1, Activity::Transferring(90))).collect();
        // This one is stalled for longer, but it is one.
        all.push(candidate(0, 2, Activity::Transferring(5)));
        let victims = chosen(&all);
        assert_eq!(victims, (1..=12).collect::<Vec<_>>());
    }

    #[test]
    fn a_dominant_network_gets_one_second() {
        let activities = [Activity::Beginning(NOW - 1), Activity::Transferring(NOW - 1)];
        for activity in activities {
            let many = |host: u8, count: u64| {
                (0..count)
                    .map(move |token| candidate(1000 * u64::from(host) + token, host, activity))
            };
            let all: Vec<_> = many(1, 25).chain(many(2, 24)).chain(many(3, 51)).collect();
            let victims = chosen(&all);
            assert_eq!(victims.len(), 6);
            assert!(victims.iter().all(|token| *token >= 3000), "{victims:?}");
            assert!(chosen(&all[25..49]).iter().all(|token| *token >= 2000), "it is alone");
            assert!(chosen(&all[..FEW_CONNECTIONS]).is_empty(), "a few are not dominant");
            let fresh = Activity::Transferring(NOW);
            assert!(chosen(&[candidate(1, 1, fresh); 40]).is_empty());
        }
    }

    #[test]
    fn victims_are_forgotten_after_their_second() {
        let mut victims = Victims::default();
        victims.choose(&[candidate(7, 1, Activity::Idle)], NOW);
        assert!(victims.next(NOW + 1).is_none());
        assert!(victims.next(NOW).is_none());
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
