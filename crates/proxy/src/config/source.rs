//! The local address of connections to upstreams.

use haul_server::connect::{PeerAddress, Source};
use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};

/// From which address upstreams are connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceChoice {
    /// The address that the host's routes choose.
    #[default]
    Host,
    /// These addresses of the host in turn, by the family of the upstream, so that more ports are
    /// available. If the addresses lack the family of the upstream, the host's routes choose.
    Addresses(Vec<IpAddr>),
    /// The client's own address (`IP_TRANSPARENT`), if it is of the upstream's family. Needs
    /// `CAP_NET_ADMIN`, and routes that lead the upstream's packets back to this host.
    Client,
}

/// The source addresses of an event loop, which are used in turn.
#[derive(Debug)]
pub struct Sources {
    choice: SourceChoice,
    /// The next IPv4 address, and the next IPv6 address.
    next: [Cell<usize>; 2],
}

impl Sources {
    /// Creates the sources of an event loop.
    pub fn new(choice: &SourceChoice) -> Self {
        Self { choice: choice.clone(), next: [Cell::new(0), Cell::new(0)] }
    }

    /// The sources to try for an upstream, one after the other. `None` is the host's choice.
    pub fn for_upstream(
        &self,
        upstream: &PeerAddress,
        client: Option<SocketAddr>,
    ) -> impl Iterator<Item = Option<Source>> {
        let PeerAddress::Tcp(upstream) = upstream else { return vec![None].into_iter() };
        let is_usable = |address: &IpAddr| address.is_ipv4() == upstream.is_ipv4();
        let mut sources: Vec<_> = match &self.choice {
            SourceChoice::Host => Vec::new(),
            SourceChoice::Addresses(addresses) => {
                let usable = addresses.iter().copied().filter(is_usable);
                usable.map(|address| Some(Source { address, is_foreign: false })).collect()
            }
            SourceChoice::Client => {
                let client = client.map(|client| client.ip().to_canonical()).filter(is_usable);
                client
                    .map(|address| Some(Source { address, is_foreign: true }))
                    .into_iter()
                    .collect()
            }
        };
        if sources.is_empty() {
            return vec![None].into_iter();
        }
        let next = &self.next[usize::from(upstream.is_ipv6())];
        let first = next.replace(next.get().wrapping_add(1));
        let len = sources.len();
        sources.rotate_left(first % len);
        sources.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(choice: &SourceChoice, upstream: &str, client: &str) -> Vec<Option<String>> {
        let upstream = PeerAddress::Tcp(upstream.parse().unwrap());
        let sources = Sources::new(choice);
        let sources = sources.for_upstream(&upstream, Some(client.parse().unwrap()));
        sources.map(|source| source.map(|source| source.address.to_string())).collect()
    }

    #[test]
    fn addresses_of_the_upstreams_family_take_turns() {
        let addresses = ["10.0.0.1", "2001:db8::1", "10.0.0.2"].map(|text| text.parse().unwrap());
        let sources = Sources::new(&SourceChoice::Addresses(addresses.to_vec()));
        let firsts = |upstream: &str| {
            let upstream = PeerAddress::Tcp(upstream.parse().unwrap());
            let source = sources.for_upstream(&upstream, None).next().unwrap().unwrap();
            source.address.to_string()
        };
        assert_eq!(firsts("192.0.2.1:80"), "10.0.0.1");
        assert_eq!(firsts("192.0.2.1:80"), "10.0.0.2");
        assert_eq!(firsts("[2001:db8::9]:80"), "2001:db8::1");
        assert_eq!(firsts("192.0.2.1:80"), "10.0.0.1");
    }

    #[test]
    fn a_client_of_the_other_family_is_connected_from_the_hosts_address() {
        let client = |upstream, client| of(&SourceChoice::Client, upstream, client);
        assert_eq!(client("192.0.2.1:80", "10.0.0.9:1"), [Some("10.0.0.9".into())]);
        assert_eq!(client("192.0.2.1:80", "[::ffff:10.0.0.9]:1"), [Some("10.0.0.9".into())]);
        assert_eq!(client("192.0.2.1:80", "[2001:db8::2]:1"), [None]);
        assert_eq!(of(&SourceChoice::Host, "192.0.2.1:80", "10.0.0.9:1"), [None]);
    }
}
