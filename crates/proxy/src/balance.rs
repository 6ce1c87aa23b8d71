//! Load balancing: the order in which the upstreams of a group are tried.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
    /// socket have no address and are spread round robin.
    SourceAddress,
}

/// What an algorithm knows of an upstream.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The place in the group.
    pub index: usize,
    /// The hash of the upstream's name ([`name_hash`]).
    pub name_hash: u64,
    /// Open connections.
    pub open: usize,
}

/// The balancer of a group: an algorithm, and whose turn it is.
#[derive(Debug, Default)]
pub struct Balancer {
    algorithm: Algorithm,
    turn: AtomicUsize,
}

impl Balancer {
    /// Creates a balancer.
    pub fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, turn: AtomicUsize::new(0) }
    }

    /// Chooses one of the candidates; `None` if there are none. `is_first`: it is the first choice
    /// for this client. Another one does not count as a turn.
    pub fn choose(
        &self,
        candidates: &[Candidate],
        client: Option<IpAddr>,
        is_first: bool,
    ) -> Option<usize> {
        let chosen = match (self.algorithm, client) {
            (Algorithm::LeastConnections, _) => {
                let fewest = candidates.iter().map(|candidate| candidate.open).min()?;
                self.next(candidates.iter().filter(|candidate| candidate.open == fewest), is_first)
            }
            (Algorithm::SourceAddress, Some(client)) => {
                let client = address_hash(client);
                candidates.iter().max_by_key(|candidate| mix(candidate.name_hash ^ client))
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
        mut candidates: impl Iterator<Item = &'a Candidate> + Clone,
        is_first: bool,
    ) -> Option<&'a Candidate> {
        let count = candidates.clone().count();
        let turn = self.turn.fetch_add(usize::from(is_first), Relaxed);
        candidates.nth(turn.checked_rem(count)?)
    }
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
            open,
        };
        open.iter().enumerate().map(candidate).collect()
    }

    fn clients() -> impl Iterator<Item = IpAddr> {
        (0..3000u32).map(|number| IpAddr::from([10, 1, (number >> 8) as u8, number as u8]))
    }

    #[test]
    fn round_robin_takes_one_after_the_other() {
        let balancer = Balancer::new(Algorithm::RoundRobin);
        let chosen: Vec<_> =
            (0..6).map(|_| balancer.choose(&candidates(&[9, 0, 5]), None, true).unwrap()).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
        assert_eq!(balancer.choose(&[], None, true), None);
    }

    #[test]
    fn least_connections_takes_the_emptiest_and_equal_ones_in_turn() {
        let balancer = Balancer::new(Algorithm::LeastConnections);
        let mut counts = [0; 3];
        for _ in 0..10 {
            counts[balancer.choose(&candidates(&[1, 7, 1]), None, true).unwrap()] += 1;
        }
        assert_eq!(counts, [5, 0, 5]);
    }

    #[test]
    fn a_client_keeps_its_upstream_and_the_others_share_those_of_one_that_goes() {
        let balancer = Balancer::new(Algorithm::SourceAddress);
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
}
