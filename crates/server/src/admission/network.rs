//! The limits that the connections of one client share.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, OccupiedEntry};
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The addresses that one client can usually choose from: an IPv4 address, or the upper 64 bits of
/// an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network(u64);

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Self {
        /// The upper bits of a multicast address (RFC 4291), which IPv6 clients do not have.
        const IPV4: u64 = 0xFFFF_FFFF << 32;
        Self(match address.to_canonical() {
            IpAddr::V4(address) => IPV4 | u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        })
    }
}

/// The number of connections of each network, on one event loop.
#[derive(Debug, Default)]
pub(crate) struct NetworkCounts(HashMap<Network, usize>);

impl NetworkCounts {
    /// The number of connections; 0 for Unix sockets, each of which counts as a network.
    pub fn get(&self, network: Option<Network>) -> usize {
        network.and_then(|network| self.0.get(&network)).copied().unwrap_or(0)
    }

    /// Counts a connection.
    pub fn add(&mut self, network: Option<Network>) {
        if let Some(network) = network {
            *self.0.entry(network).or_default() += 1;
        }
    }

    /// Ends the count of a connection.
    pub fn remove(&mut self, network: Option<Network>) {
        if let Some(network) = network
            && let Entry::Occupied(count) = self.0.entry(network)
        {
            release(count);
        }
    }
}

/// Reduces a count by one, and removes a network without connections.
fn release(mut count: OccupiedEntry<'_, Network, usize>) {
    *count.get_mut() -= 1;
    if *count.get() == 0 {
        count.remove();
    }
}

/// A limit on the connections of each network, over all event loops.
#[derive(Debug)]
pub struct NetworkLimit {
    connections_max: NonZeroUsize,
    open: Mutex<HashMap<Network, usize>>,
}

/// A connection that is counted until this value is dropped.
#[derive(Debug)]
pub struct NetworkPermit {
    limit: Arc<NetworkLimit>,
    network: Network,
}

impl NetworkLimit {
    /// Creates a limit of so many connections of one network at a time.
    pub fn new(connections_max: NonZeroUsize) -> Arc<Self> {
        Arc::new(Self { connections_max, open: Mutex::default() })
    }

    /// Counts a connection; `None` if its network has as many as it may have.
    pub fn admit(self: &Arc<Self>, network: Network) -> Option<NetworkPermit> {
        let mut open = self.lock();
        let count = open.entry(network).or_default();
        if *count >= self.connections_max.get() {
            return None;
        }
        *count += 1;
        Some(NetworkPermit { limit: Arc::clone(self), network })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Network, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NetworkPermit {
    fn drop(&mut self) {
        let mut open = self.limit.lock();
        if let Entry::Occupied(count) = open.entry(self.network) {
            release(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(address: &str) -> Network {
        Network::from(address.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn a_network_is_an_ipv4_address_or_64_bits_of_ipv6() {
        assert_eq!(network("192.0.2.1"), network("::ffff:192.0.2.1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff::"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_ne!(network("0.0.0.0"), network("::"));
    }

    #[test]
    fn a_network_gets_as_many_connections_as_it_may_have() {
        let limit = NetworkLimit::new(NonZeroUsize::new(2).unwrap());
        let admit = |address| limit.admit(network(address));
        let (first, _second) = (admit("192.0.2.1").unwrap(), admit("192.0.2.1").unwrap());
        assert!(admit("192.0.2.1").is_none());
        let other = admit("192.0.2.2").unwrap();
        drop(first);
        assert!(admit("192.0.2.1").is_some(), "an ended connection makes room");
        drop(other);
        assert_eq!(limit.lock().len(), 1, "a network without connections takes no memory");
    }
}
