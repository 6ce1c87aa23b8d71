//! The addresses of one upstream, and which of these addresses are tried.
//!
//! A client tries two addresses. If both fail, the next client tries the next two. An active check
//! tries all addresses, and clients then try the address that accepted the check. So a check does
//! not report an upstream as down that clients can reach.

use haul_server::connect::PeerAddress;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

/// The most addresses of one upstream that a client tries before another upstream: an IPv6 address
/// and an IPv4 address.
const CANDIDATES_MAX: usize = 2;

/// The addresses of one upstream.
#[derive(Debug)]
pub struct Candidates {
    /// All addresses, in the order in which they are tried.
    all: Arc<[PeerAddress]>,
    /// The index in `all` of the first address that is tried.
    first: usize,
    /// The addresses that are tried now.
    tried: Arc<[PeerAddress]>,
}

impl Candidates {
    /// Addresses that are tried in this order.
    pub fn new(all: impl Into<Arc<[PeerAddress]>>) -> Self {
        let all = all.into();
        let tried = all.iter().take(CANDIDATES_MAX).cloned().collect();
        Self { all, first: 0, tried }
    }

    /// The addresses of a host name. IPv6 addresses and IPv4 addresses alternate, so that the first
    /// two are one of each (RFC 8305 section 4).
    pub fn of_name(addresses: &[SocketAddr], port: u16) -> Self {
        let with_port = |mut address: SocketAddr| {
            address.set_port(port);
            PeerAddress::Tcp(address)
        };
        Self::new(alternating(addresses).into_iter().map(with_port).collect::<Vec<_>>())
    }

    /// All addresses.
    pub fn all(&self) -> &Arc<[PeerAddress]> {
        &self.all
    }

    /// The addresses that are tried now, at most two.
    pub fn tried(&self) -> &Arc<[PeerAddress]> {
        &self.tried
    }

    /// Goes on to the next addresses, because `failed`, which [`Candidates::tried`] returned, do
    /// not accept connections. Does nothing if another caller already went on.
    pub fn go_on(&mut self, failed: &Arc<[PeerAddress]>) {
        if self.all.len() <= CANDIDATES_MAX || !Arc::ptr_eq(&self.tried, failed) {
            return;
        }
        self.start_at((self.first + CANDIDATES_MAX) % self.all.len());
    }

    /// All addresses, beginning with the addresses that are tried now.
    pub fn in_turn(&self) -> Vec<PeerAddress> {
        let (before, from_first) = self.all.split_at(self.first);
        from_first.iter().chain(before).cloned().collect()
    }

    /// Lets clients try this address, which accepts connections, unless they try it anyway.
    pub fn prefer(&mut self, address: &PeerAddress) {
        let place = self.all.iter().position(|one| one == address);
        if let Some(place) = place.filter(|_| !self.tried.contains(address)) {
            self.start_at(place);
        }
    }

    fn start_at(&mut self, first: usize) {
        self.first = first;
        self.tried = self.in_turn().into_iter().take(CANDIDATES_MAX).collect();
    }
}

/// The same addresses, of which the two families alternate.
fn alternating(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_is_ipv6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (mut ones, mut others): (VecDeque<_>, VecDeque<_>) =
        addresses.iter().copied().partition(|address| address.is_ipv6() == first_is_ipv6);
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

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_families_of_addresses_take_turns() {
        let resolved = addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"]);
        let expected = addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"]);
        assert_eq!(alternating(&resolved), expected);
        assert_eq!(alternating(&[]), Vec::new());
    }

    #[test]
    fn every_address_of_a_name_is_tried_in_turn() {
        let resolved = addresses(&["1.1.1.1:0", "2.2.2.2:0", "3.3.3.3:0"]);
        let mut candidates = Candidates::of_name(&resolved, 80);
        let mut rounds = Vec::new();
        for _ in 0..3 {
            let tried = Arc::clone(candidates.tried());
            rounds.push(tried.iter().map(address_text).collect::<Vec<_>>());
            candidates.go_on(&tried);
            // Another client had the same addresses.
            candidates.go_on(&tried);
        }
        assert_eq!(
            rounds,
            [
                ["1.1.1.1:80", "2.2.2.2:80"],
                ["3.3.3.3:80", "1.1.1.1:80"],
                ["2.2.2.2:80", "3.3.3.3:80"]
            ]
        );
    }

    fn address_text(address: &PeerAddress) -> String {
        match address {
            PeerAddress::Tcp(address) => address.to_string(),
            PeerAddress::Unix(path) => panic!("{path:?}"),
        }
    }
}
