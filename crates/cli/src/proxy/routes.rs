//! The groups of upstreams, routes and listeners in the configuration file of `haul proxy`.

use crate::daemon::config_file::{ConfigFile, unknown_name};
use crate::daemon::options::{Count, Timeout, deserialize_each_from_text, deserialize_from_text};
use crate::output::Failure;
use clap::ValueEnum;
use haul_proxy::{
    Address, Algorithm, CheckConfig, GroupConfig, HeaderVersion, ListenerConfig, Route,
    RouteCondition, ServerNamePattern, UpstreamConfig,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use toml::Spanned;

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
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GroupOptions {
    #[serde(deserialize_with = "deserialize_each_from_text")]
    to: Vec<UpstreamConfig>,
    balance: Option<Balance>,
    #[serde(default, deserialize_with = "deserialize_from_text")]
    check_interval: Option<Timeout>,
    check_fall: Option<Count>,
    check_rise: Option<Count>,
    send_proxy: Option<GroupHeader>,
}

/// Whether a group's upstreams receive a header of the PROXY protocol, and of which version.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum GroupHeader {
    V1,
    V2,
    Off,
}

impl GroupHeader {
    fn version(self) -> Option<HeaderVersion> {
        match self {
            Self::V1 => Some(HeaderVersion::V1),
            Self::V2 => Some(HeaderVersion::V2),
            Self::Off => None,
        }
    }
}

/// The active check of groups that do not state otherwise.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions {
    pub interval: Option<Timeout>,
    pub fall: Option<Count>,
    pub rise: Option<Count>,
}

impl GroupOptions {
    /// Whether the group states the interval of its check.
    pub fn has_check_interval(&self) -> bool {
        self.check_interval.is_some()
    }

    /// Whether it states something of a check without its interval.
    pub fn lacks_check_interval(&self) -> bool {
        (self.check_fall.is_some() || self.check_rise.is_some()) && self.check_interval.is_none()
    }
}

impl CheckOptions {
    fn config(self) -> Option<CheckConfig> {
        let mut config = CheckConfig::new(self.interval?.0);
        let number = |count: Count| NonZeroU32::try_from(count.0).unwrap_or(NonZeroU32::MAX);
        config.fall = self.fall.map_or(config.fall, number);
        config.rise = self.rise.map_or(config.rise, number);
        Some(config)
    }
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
    /// Fits clients whose greeting has (`true`) or lacks (`false`) a server name.
    has_server_name: Option<bool>,
    /// Fits clients that speak TLS (`true`), or do not speak TLS (`false`).
    tls: Option<bool>,
    group: Option<Spanned<String>>,
}

/// `[[listener]]`: addresses to listen on, and the routes of their clients.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenerOptions {
    #[serde(deserialize_with = "deserialize_each_from_text")]
    listen: Vec<Address>,
    /// The group of clients that no route fits.
    group: Option<Spanned<String>>,
    route: Vec<Spanned<RouteOptions>>,
}

/// A command line that has what is necessary.
pub fn example() -> &'static str {
    "haul proxy --listen 5432 --to 10.0.0.5:5432,10.0.0.6:5432"
}

/// All groups: the group of `to`, and the groups with a name.
pub fn groups(
    to: Vec<UpstreamConfig>,
    balance: Option<Balance>,
    check: CheckOptions,
    header: Option<HeaderVersion>,
    named: BTreeMap<String, GroupOptions>,
) -> Vec<GroupConfig> {
    let has_default = !to.is_empty();
    let default = GroupOptions { to, balance, ..GroupOptions::default() };
    let default = has_default.then(|| (DEFAULT_GROUP.to_owned(), default));
    let group = |(name, options): (String, GroupOptions)| {
        let mut group = GroupConfig::new(name, options.to);
        group.algorithm = match options.balance {
            None | Some(Balance::RoundRobin) => Algorithm::RoundRobin,
            Some(Balance::LeastConnections) => Algorithm::LeastConnections,
            Some(Balance::SourceAddress) => Algorithm::SourceAddress,
        };
        let check = CheckOptions {
            interval: options.check_interval.or(check.interval),
            fall: options.check_fall.or(check.fall),
            rise: options.check_rise.or(check.rise),
        };
        group.check = check.config();
        group.send_header = options.send_proxy.map_or(header, GroupHeader::version);
        group
    };
    default.into_iter().chain(named).map(group).collect()
}

/// Where the routes are, and the groups that they may name.
pub struct Places<'p> {
    /// The file that they are in.
    pub file: Option<&'p ConfigFile>,
    /// The names of all groups.
    pub groups: &'p [&'p str],
}

impl Places<'_> {
    /// All listeners: from `listen` and `route`, and from the tables of listeners.
    pub fn listeners(
        &self,
        listen: Vec<Address>,
        has_default: bool,
        route: Vec<Spanned<RouteOptions>>,
        more: Vec<Spanned<ListenerOptions>>,
    ) -> Result<Vec<ListenerConfig>, Failure> {
        if let (true, Some(route)) = (listen.is_empty(), route.first()) {
            let problem = "[[route]] has no listener: add listen, or write [[listener.route]]";
            return Err(self.failure(route.span(), problem));
        }
        let default_group = has_default.then_some(DEFAULT_GROUP);
        let mut listeners = self.listeners_at(listen, default_group, route)?;
        for listener in more {
            let span = listener.span();
            let ListenerOptions { listen, group, route } = listener.into_inner();
            if listen.is_empty() {
                return Err(self.failure(span, "the listener has no address: add listen"));
            }
            if group.is_none() && route.is_empty() {
                let problem = "the listener's clients go nowhere: add group, or [[listener.route]]";
                return Err(self.failure(span, problem));
            }
            let group = group.map(|group| self.known_group(group)).transpose()?;
            listeners.extend(self.listeners_at(listen, group.as_deref(), route)?);
        }
        Ok(listeners)
    }

    fn listeners_at(
        &self,
        listen: Vec<Address>,
        group: Option<&str>,
        routes: Vec<Spanned<RouteOptions>>,
    ) -> Result<Vec<ListenerConfig>, Failure> {
        let routes = routes.into_iter().map(|route| self.route(route));
        let routes = routes.collect::<Result<Vec<_>, _>>()?;
        let listener = |address| {
            let mut listener = ListenerConfig::new(address, group);
            listener.routes.clone_from(&routes);
            listener
        };
        Ok(listen.into_iter().map(listener).collect())
    }

    fn route(&self, route: Spanned<RouteOptions>) -> Result<Route, Failure> {
        let span = route.span();
        let options = route.into_inner();
        let Some(group) = options.group else {
            return Err(self.failure(span, "the route has no group: add group"));
        };
        let group = self.known_group(group)?;
        let needs_tls = !options.server_name.is_empty()
            || !options.alpn.is_empty()
            || options.has_server_name.is_some();
        let is_valid = if needs_tls { options.tls != Some(false) } else { options.tls.is_some() };
        let contradicts = !options.server_name.is_empty() && options.has_server_name == Some(false);
        if !is_valid || contradicts {
            let problem = format!(
                "the route to {group} has no condition that a connection can meet: write \
                 server-name, alpn or has-server-name, or tls = false alone"
            );
            return Err(self.failure(span, &problem));
        }
        let mut condition = RouteCondition::default();
        condition.server_names = options.server_name;
        condition.protocols = options.alpn;
        condition.has_server_name = options.has_server_name;
        condition.is_tls = options.tls;
        Ok(Route::new(condition, group))
    }

    /// A name of a group, if there is one.
    fn known_group(&self, name: Spanned<String>) -> Result<String, Failure> {
        if self.groups.contains(&name.get_ref().as_str()) {
            return Ok(name.into_inner());
        }
        let problem = unknown_name(name.get_ref(), self.groups);
        Err(self.failure(name.span(), &format!("group: {problem}")))
    }

    fn failure(&self, span: Range<usize>, problem: &str) -> Failure {
        match self.file {
            Some(file) => file.failure(span, problem),
            None => Failure::bad_input(problem),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(text: &str) -> Result<Route, String> {
        let options: RouteOptions = toml::from_str(text).map_err(|error| error.to_string())?;
        let places = Places { file: None, groups: &["a"] };
        places.route(Spanned::new(0..0, options)).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_group_has_the_check_of_all_unless_it_states_another() {
        let named =
            |text: &str| -> BTreeMap<String, GroupOptions> { toml::from_str(text).unwrap() };
        let checks = |text: &str, interval: Option<&str>| {
            let count = |text: &str| Some(text.parse().unwrap());
            let interval = interval.map(|text| text.parse().unwrap());
            let check = CheckOptions { interval, fall: count("5"), rise: None };
            let groups = groups(vec!["h:1".parse().unwrap()], None, check, None, named(text));
            let check = |group: &GroupConfig| {
                group.check.map(|one| (one.interval.as_secs(), one.fall.get(), one.rise.get()))
            };
            groups.iter().map(check).collect::<Vec<_>>()
        };
        let text = "[a]\nto = ['h:1']\ncheck-interval = '9s'\ncheck-rise = 1\n[b]\nto = ['h:2']";
        assert_eq!(checks(text, Some("2s")), [Some((2, 5, 2)), Some((9, 5, 1)), Some((2, 5, 2))]);
        assert_eq!(checks(text, None), [None, Some((9, 5, 1)), None]);
    }

    #[test]
    fn a_group_has_the_header_of_all_unless_it_states_another() {
        let text = "[a]\nto = ['h:1']\nsend-proxy = 'v1'\n[b]\nto = ['h:2']\n[c]\nto = ['h:3']\n\
                    send-proxy = 'off'";
        for header in [None, Some(HeaderVersion::V2)] {
            let check = CheckOptions { interval: None, fall: None, rise: None };
            let named = toml::from_str(text).unwrap();
            let groups = groups(vec!["h:1".parse().unwrap()], None, check, header, named);
            let headers: Vec<_> = groups.iter().map(|group| group.send_header).collect();
            assert_eq!(headers, [header, Some(HeaderVersion::V1), header, None]);
        }
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
        let unknown = route("tls = false\ngroup = 'b'").unwrap_err();
        assert_eq!(unknown, "group: b is unknown: known are a");
        assert!(route("server-name = ['a b']\ngroup = 'a'").unwrap_err().contains("a b"));
    }
}
