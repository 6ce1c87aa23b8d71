//! Upstreams through which clients come back to the proxy.

use crate::config::ListenerConfig;
use crate::upstreams::routing::RoutingTable;
use crate::upstreams::upstream::Upstream;
use haul_server::Address;
use haul_server::connect::PeerAddress;
use std::sync::Arc;

/// A sentence about the upstreams that are addresses at which the proxy listens, unless the routes
/// lead on to another server.
pub fn caveats(table: &RoutingTable, listeners: &[ListenerConfig]) -> Vec<String> {
    let returns = table.upstreams().filter(|upstream| {
        let reached = reached_listeners(upstream, table, listeners);
        reached.iter().any(|&listener| serves(listener, upstream.group()))
    });
    let mut names: Vec<_> = returns.map(|upstream| upstream.name()).collect();
    names.sort_unstable();
    names.dedup();
    let caveat = |name: &str| {
        format!(
            "the proxy listens at its upstream {name}: clients may come back to it, again and again"
        )
    };
    names.into_iter().map(caveat).collect()
}

/// The listeners at which clients of an upstream may arrive, at once or through other upstreams.
fn reached_listeners<'l>(
    upstream: &Arc<Upstream>,
    table: &RoutingTable,
    listeners: &'l [ListenerConfig],
) -> Vec<&'l ListenerConfig> {
    let mut reached: Vec<&ListenerConfig> = Vec::new();
    let mut followed = vec![Arc::clone(upstream)];
    while let Some(upstream) = followed.pop() {
        let is_own = |listener: &&ListenerConfig| {
            upstream.addresses().iter().any(|address| leads_to(address, &listener.address))
        };
        for listener in listeners.iter().filter(is_own) {
            if reached.iter().all(|other| !std::ptr::eq(*other, listener)) {
                reached.push(listener);
                let groups = table.groups().iter().filter(|group| serves(listener, group.name()));
                followed.extend(groups.flat_map(|group| group.upstreams()).cloned());
            }
        }
    }
    reached
}

/// Whether clients of a listener may be connected to the upstreams of a group.
fn serves(listener: &ListenerConfig, group: &str) -> bool {
    let routed = listener.routes.iter().map(|route| &route.group);
    listener.group.iter().chain(routed).any(|name| name == group)
}

/// Whether connections to an address arrive at a listening socket, by their addresses.
fn leads_to(address: &PeerAddress, listener: &Address) -> bool {
    match (address, listener) {
        (PeerAddress::Tcp(address), Address::Tcp(listener)) => {
            // A socket for all IPv6 addresses also accepts all IPv4 addresses.
            let is_local = listener.ip().is_unspecified()
                && address.ip().is_loopback()
                && (listener.is_ipv6() || address.is_ipv4());
            address.port() == listener.port() && (address.ip() == listener.ip() || is_local)
        }
        (PeerAddress::Unix(path), Address::Unix(listener)) => path == listener,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, GroupConfig, Route, RouteCondition};

    fn count(config: &Config) -> usize {
        let table = RoutingTable::new(config, None).unwrap();
        for upstream in table.upstreams() {
            if let Some(host) = upstream.host() {
                upstream.set_addresses(&haul_server::resolve::addresses(host, 0).unwrap());
            }
        }
        caveats(&table, &config.listeners).len()
    }

    #[test]
    fn an_upstream_at_which_the_proxy_listens_is_a_caveat() {
        for (listener, upstream, is_own) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("0.0.0.0:80", "localhost:80", true),
            ("[::]:80", "127.0.0.2:80", true),
            ("[::]:80", "[::1]:80", true),
            ("unix:/run/a", "unix:/run/a", true),
            ("127.0.0.1:80", "localhost:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("0.0.0.0:80", "[::1]:80", false),
            ("0.0.0.0:80", "192.0.2.1:80", false),
            ("unix:/run/a", "unix:/run/b", false),
        ] {
            let mut config = Config::new([GroupConfig::new("one", [upstream.parse().unwrap()])]);
            config.listeners = vec![ListenerConfig::new(listener.parse().unwrap(), Some("one"))];
            assert_eq!(count(&config), usize::from(is_own), "{listener} {upstream}");
        }
    }

    /// The clients of a listener go through another listener.
    #[test]
    fn an_upstream_whose_clients_do_not_come_back_is_no_caveat() {
        for (last, count_expected) in [("192.0.2.1:80", 0), ("127.0.0.1:80", 2)] {
            let group = |name, upstream: &str| GroupConfig::new(name, [upstream.parse().unwrap()]);
            let mut config = Config::new([group("inner", "127.0.0.1:81"), group("last", last)]);
            let mut outer = ListenerConfig::new("0.0.0.0:80".parse().unwrap(), None);
            outer.routes = vec![Route::new(RouteCondition::default(), "inner")];
            let inner = ListenerConfig::new("127.0.0.1:81".parse().unwrap(), Some("last"));
            config.listeners = vec![outer, inner];
            assert_eq!(count(&config), count_expected, "{last}");
        }
    }
}
