//! The groups of upstreams, routes and listeners in the configuration file of `haul proxy`.

use crate::daemon::options::deserialize_each_from_text;
use crate::output::Failure;
use clap::ValueEnum;
use haul_proxy::{
    Address, Algorithm, GroupConfig, ListenerConfig, Route, RouteCondition, ServerNamePattern,
    UpstreamConfig,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The name of the group that `to` stands for.
const DEFAULT_GROUP: &str = "default";

/// A load-balancing algorithm.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balance {
    RoundRobin,
    LeastConnections,
    SourceAddress,
}

/// `[group.NAME]`: upstreams among which clients are balanced.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GroupOptions {
    #[serde(deserialize_with = "deserialize_each_from_text")]
    to: Vec<UpstreamConfig>,
    balance: Option<Balance>,
}

/// `[[route]]`: the connections that take it, and their group.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RouteOptions {
    /// Server names of the TLS greeting (SNI).
    #[serde(deserialize_with = "deserialize_each_from_text")]
    server_name: Vec<ServerNamePattern>,
    /// Application protocols of the TLS greeting (ALPN).
    alpn: Vec<String>,
    /// Whether the TLS greeting has a server name.
    has_server_name: Option<bool>,
    /// Whether the client speaks TLS.
    tls: Option<bool>,
    group: String,
}

/// `[[listener]]`: addresses to listen on, and the routes of their clients.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenerOptions {
    #[serde(deserialize_with = "deserialize_each_from_text")]
    listen: Vec<Address>,
    /// The group of clients that no route fits.
    group: Option<String>,
    route: Vec<RouteOptions>,
}

/// A command line that has what is necessary.
pub fn example() -> &'static str {
    "haul proxy --listen 5432 --to 10.0.0.5:5432,10.0.0.6:5432"
}

/// All groups: that of `to`, and those with a name.
pub fn groups(
    to: Vec<UpstreamConfig>,
    balance: Option<Balance>,
    named: BTreeMap<String, GroupOptions>,
) -> Vec<GroupConfig> {
    let default = GroupOptions { to, balance };
    let has_default = !default.to.is_empty();
    let default = has_default.then(|| (DEFAULT_GROUP.to_owned(), default));
    let group = |(name, options): (String, GroupOptions)| {
        let mut group = GroupConfig::new(name, options.to);
        group.algorithm = match options.balance {
            None | Some(Balance::RoundRobin) => Algorithm::RoundRobin,
            Some(Balance::LeastConnections) => Algorithm::LeastConnections,
            Some(Balance::SourceAddress) => Algorithm::SourceAddress,
        };
        group
    };
    default.into_iter().chain(named).map(group).collect()
}

/// All listeners: those of `listen` and `route`, and those with routes of their own.
pub fn listeners(
    listen: Vec<Address>,
    has_default: bool,
    route: Vec<RouteOptions>,
    more: Vec<ListenerOptions>,
) -> Result<Vec<ListenerConfig>, Failure> {
    let group = has_default.then(|| DEFAULT_GROUP.to_owned());
    if listen.is_empty() && !route.is_empty() {
        let problem = "[[route]] has no listener: add listen, or write [[listener.route]]";
        return Err(Failure::bad_input(problem));
    }
    if more.iter().any(|one| one.listen.is_empty()) {
        return Err(Failure::bad_input("a [[listener]] has no address: add listen"));
    }
    let first = ListenerOptions { listen, group, route };
    let mut listeners = Vec::new();
    for ListenerOptions { listen, group, route } in std::iter::once(first).chain(more) {
        let routes = route.into_iter().map(Route::try_from).collect::<Result<Vec<_>, _>>()?;
        for address in listen {
            let mut listener = ListenerConfig::new(address, group.as_deref());
            listener.routes.clone_from(&routes);
            listeners.push(listener);
        }
    }
    Ok(listeners)
}

impl TryFrom<RouteOptions> for Route {
    type Error = Failure;

    fn try_from(options: RouteOptions) -> Result<Self, Failure> {
        if options.group.is_empty() {
            return Err(Failure::bad_input("a [[route]] has no group: add group"));
        }
        let needs_tls = !options.server_name.is_empty()
            || !options.alpn.is_empty()
            || options.has_server_name.is_some();
        let is_valid = if needs_tls { options.tls != Some(false) } else { options.tls.is_some() };
        let contradicts = !options.server_name.is_empty() && options.has_server_name == Some(false);
        if !is_valid || contradicts {
            return Err(Failure::bad_input(format!(
                "the route to {} has no condition that a connection can meet: write server-name, \
                 alpn or has-server-name, or tls = false alone",
                options.group
            )));
        }
        let mut condition = RouteCondition::default();
        condition.server_names = options.server_name;
        condition.protocols = options.alpn;
        condition.has_server_name = options.has_server_name;
        condition.is_tls = options.tls;
        Ok(Self::new(condition, options.group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(text: &str) -> Result<Route, String> {
        let options: RouteOptions = toml::from_str(text).map_err(|error| error.to_string())?;
        Route::try_from(options).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_route_has_a_condition_that_a_connection_can_meet() {
        for text in ["server-name = ['*.example.com']", "alpn = ['h2']", "has-server-name = false"]
        {
            assert!(route(&format!("{text}\ngroup = 'a'")).is_ok(), "{text}");
            assert!(route(&format!("{text}\ntls = true\ngroup = 'a'")).is_ok(), "{text}");
            assert!(route(&format!("{text}\ntls = false\ngroup = 'a'")).is_err(), "{text}");
            assert!(route(text).is_err(), "{text} has no group");
        }
        assert!(route("tls = false\ngroup = 'a'").is_ok());
        assert!(route("server-name = ['a']\nhas-server-name = false\ngroup = 'a'").is_err());
        assert!(route("group = 'a'").is_err());
        assert!(route("server-name = ['a b']\ngroup = 'a'").unwrap_err().contains("a b"));
    }
}
