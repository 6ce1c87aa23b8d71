//! Load balancing: the order in which the upstreams of a group are tried.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

/// The precision of loads, which are compared as integers.
const WEIGHT_SCALE: u64 = 1 << 30;

/// A load-balancing algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// One upstream after the other.
    #[default]
    RoundRobin,
    /// The upstream with the fewest open connections.
    LeastConnections,
    /// Consistent hashing of the client's address (rendezvous hashing): a client keeps its
    /// upstream, and when an upstream comes or goes, only its own clients move. Clients of a Unix
    /// socket do not have address and are spread round robin.
    SourceAddress,
}

/// The facts about an upstream that an algorithm uses.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The place in the group.
    pub index: usize,
    /// The hash of the upstream's name ([`name_hash`]).
    pub name_hash: u64,
    /// The upstream's share of the connections, in relation to the other shares; at least 1.
    pub weight: u32,
    /// Open connections.
    pub open: usize,
}

/// The balancer of a group: an algorithm, and whose turn it is.
#[derive(Debug)]
pub struct Balancer {
    algorithm: Algorithm,
    /// What each upstream is owed, by its place in the group (smooth weighted round robin): each
    /// turn adds every weight, and subtracts their sum from the upstream whose turn it is.
    credits: Mutex<Vec<i64>>,
}

impl Balancer {
    /// Creates the balancer of so many upstreams.
    pub fn new(algorithm: Algorithm, upstreams: usize) -> Self {
        Self { algorithm, credits: Mutex::new(vec![0; upstreams]) }
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Chooses a candidate; `None` without candidates. `is_first`: the choice is the first for this
    /// client. A further choice does not count as a turn.
    pub fn choose(
        &self,
        candidates: &[Candidate],
        client: Option<IpAddr>,
        is_first: bool,
    ) -> Option<usize> {
        let chosen = match (self.algorithm, client) {
            (Algorithm::LeastConnections, _) => {
                let load = |candidate: &Candidate| {
                    (candidate.open as u64 + 1) * WEIGHT_SCALE / u64::from(candidate.weight)
                };
                let least = candidates.iter().map(load).min()?;
                self.next(candidates.iter().filter(|one| load(one) == least), is_first)
            }
            (Algorithm::SourceAddress, Some(client)) => {
                let client = address_hash(client);
                let score = |candidate: &Candidate| score(candidate, client);
                candidates.iter().max_by(|one, other| score(one).total_cmp(&score(other)))
            }
            (Algorithm::RoundRobin | Algorithm::SourceAddress, _) => {
                self.next(candidates.iter(), is_first)
            }
        };
        chosen.map(|candidate| candidate.index)
    }

    /// The candidate whose turn it is.
    fn next<'a>(
        &self,
        candidates: impl Iterator<Item = &'a Candidate> + Clone,
        is_first: bool,
    ) -> Option<&'a Candidate> {
        let mut credits = self.credits.lock().unwrap_or_else(PoisonError::into_inner);
        let owed = |one: &Candidate| credits[one.index] + i64::from(one.weight);
        // Of equal candidates, the first is chosen.
        let chosen = candidates.clone().min_by_key(|one| -owed(one))?;
        if is_first {
            let mut total = 0;
            for one in candidates {
                credits[one.index] += i64::from(one.weight);
                total += i64::from(one.weight);
            }
            credits[chosen.index] -= total;
        }
        Some(chosen)
    }
}

/// The score of a candidate for a client (weighted rendezvous hashing): the highest is chosen.
fn score(candidate: &Candidate, client: u64) -> f64 {
    /// 2^-53: the upper 53 bits of a hash make a number between 0 and 1.
    const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
    let hash = mix(candidate.name_hash ^ client);
    let uniform = ((hash >> 11) as f64 + 0.5) * UNIT;
    -f64::from(candidate.weight) / uniform.ln()
}

/// The hash of an upstream's name, the same in every process and version (FNV-1a).
pub fn name_hash(name: &str) -> u64 {
    let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    mix(hash)
}

fn address_hash(address: IpAddr) -> u64 {
    match address.to_canonical() {
        IpAddr::V4(address) => mix(u64::from(address.to_bits())),
        IpAddr::V6(address) => {
            let bits = address.to_bits();
            mix(mix((bits >> 64) as u64) ^ bits as u64)
        }
    }
}

/// Spreads the bits of a number over all of them (the finalizer of `SplitMix64`).
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(open: &[usize]) -> Vec<Candidate> {
        let candidate = |(index, &open): (usize, &usize)| Candidate {
            index,
            name_hash: name_hash(&format!("10.0.0.{index}:80")),
            weight: 1,
            open,
        };
        open.iter().enumerate().map(candidate).collect()
    }

    fn clients() -> impl Iterator<Item = IpAddr> {
        (0..3000u32).map(|number| IpAddr::from([10, 1, (number >> 8) as u8, number as u8]))
    }

    #[test]
    fn round_robin_takes_one_after_the_other() {
        let balancer = Balancer::new(Algorithm::RoundRobin, 3);
        let chosen: Vec<_> =
            (0..6).map(|_| balancer.choose(&candidates(&[9, 0, 5]), None, true).unwrap()).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
        assert_eq!(balancer.choose(&[], None, true), None);
    }

    #[test]
    fn least_connections_takes_the_emptiest_and_equal_ones_in_turn() {
        let balancer = Balancer::new(Algorithm::LeastConnections, 3);
        let mut counts = [0; 3];
        for _ in 0..10 {
            counts[balancer.choose(&candidates(&[1, 7, 1]), None, true).unwrap()] += 1;
        }
        assert_eq!(counts, [5, 0, 5]);
    }

    #[test]
    fn a_client_keeps_its_upstream_and_the_others_share_those_of_one_that_goes() {
        let balancer = Balancer::new(Algorithm::SourceAddress, 5);
        let all = candidates(&[0; 5]);
        let without_last = &all[..4];
        let mut counts = [0; 5];
        for client in clients() {
            let chosen = balancer.choose(&all, Some(client), true).unwrap();
            assert_eq!(balancer.choose(&all, Some(client), true), Some(chosen));
            counts[chosen] += 1;
            let later = balancer.choose(without_last, Some(client), true).unwrap();
            assert!(chosen == 4 || later == chosen, "{client} has moved");
        }
        // 600 each; the standard deviation is 22.
        assert!(counts.iter().all(|count| (500..700).contains(count)), "{counts:?}");
    }

    #[test]
    fn weights_are_shares_of_the_connections() {
        let mut weighted = candidates(&[0; 3]);
        for (candidate, weight) in weighted.iter_mut().zip([5, 1, 2]) {
            candidate.weight = weight;
        }
        let balancer = Balancer::new(Algorithm::RoundRobin, 3);
        let turns: Vec<_> =
            (0..8).map(|_| balancer.choose(&weighted, None, true).unwrap()).collect();
        assert_eq!(turns, [0, 2, 0, 0, 1, 0, 2, 0], "smooth: none has its turns in a row");
        let balancer = Balancer::new(Algorithm::LeastConnections, 3);
        let mut open = weighted.clone();
        for _ in 0..80 {
            let chosen = balancer.choose(&open, None, true).unwrap();
            open[chosen].open += 1;
        }
        assert_eq!([0, 1, 2].map(|index| open[index].open), [50, 10, 20]);
        let balancer = Balancer::new(Algorithm::SourceAddress, 3);
        let mut counts = [0; 3];
        for client in clients() {
            counts[balancer.choose(&weighted, Some(client), true).unwrap()] += 1;
        }
        // 1875, 375 and 750 of 3000; the standard deviation is at most 27.
        for (count, expected) in counts.iter().zip([1875i32, 375, 750]) {
            assert!((count - expected).abs() < 110, "{counts:?}");
        }
    }
}
