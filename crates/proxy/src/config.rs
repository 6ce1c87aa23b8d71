//! The configuration of a proxy.

pub mod balance;
pub mod source;
pub mod upstream_address;

use crate::config::balance::Algorithm;
use crate::config::source::SourceChoice;
use crate::config::upstream_address::{UpstreamAddress, UpstreamConfig};
use crate::header::{HeaderField, HeaderVersion};
use haul::ForwardMethod;
use haul_server::Address;
use haul_server::IpRange;
use haul_server::proxy_protocol::TrustedProxies;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The configuration of a proxy. [`Config::new`] has the defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The addresses to listen on, and the routes of their clients.
    pub listeners: Vec<ListenerConfig>,
    /// The groups of upstreams.
    pub groups: Vec<GroupConfig>,
    /// Fields of a header of version 2 that this proxy adds, unless a trusted proxy sent the same
    /// field. Some fields need the client's greeting, for which the proxy then waits.
    pub send_fields: Vec<HeaderField>,
    /// The proxies that name the client of each connection by the PROXY protocol.
    pub trusted_proxies: TrustedProxies,
    /// The clients that may connect.
    pub access: AccessRules,
    /// How bytes are forwarded.
    pub method: ForwardMethod,
    /// The sockets of clients and upstreams.
    pub sockets: SocketConfig,
    /// The limits.
    pub limits: Limits,
    /// How the established connections of an upstream end that is down or removed.
    pub down_policy: DownPolicy,
    /// The longest time until names are resolved again. A shorter TTL counts instead, but at least
    /// a second.
    pub resolve_interval: Duration,
    /// The log, the metrics and the control socket.
    pub reporting: ReportingConfig,
    /// The process that runs the proxy.
    pub process: ProcessConfig,
}

/// The sockets of clients and upstreams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketConfig {
    /// The local address of connections to upstreams. The active check uses the host's choice.
    pub source: SourceChoice,
    /// The congestion control of both connections; `None` for the host's default.
    pub congestion: Option<String>,
    /// The mode of the files of listening Unix sockets; `None` for 0666.
    pub socket_mode: Option<u32>,
    /// Whether the congestion window of near peers is clamped, which saves interrupts on some
    /// machines ([`haul_server::window_clamp`]).
    pub window_clamp: bool,
}

/// The log, the metrics and the control socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReportingConfig {
    /// The log, a line of JSON for each connection ([`crate::LogLine`]): a file, or an empty path
    /// for standard output; `None` for no log.
    pub access_log: Option<PathBuf>,
    /// The address of the metrics endpoint for Prometheus (`/metrics`). Port 0 is any free port.
    pub metrics: Option<SocketAddr>,
    /// The path of the control socket ([`crate::control`]); `None` for none. Only the user that
    /// starts the proxy may connect to the socket, and owns its file.
    pub control: Option<PathBuf>,
}

/// The process that runs a proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessConfig {
    /// Whether to take over the listening sockets and the connections of the proxy that runs with
    /// this control socket.
    pub upgrades: bool,
    /// Whether the proxy is only checked, and does not run. If another process listens at an
    /// address, that is a caveat then, and not an error.
    pub checks_only: bool,
    /// The user to switch to.
    pub user: Option<String>,
    /// Whether the process gives up the files and ports that it does not need.
    pub confine: bool,
    /// A file that the caller reads again before a reload. The process keeps the right to read it.
    pub config_file: Option<PathBuf>,
    /// The number of event loops; `None` for one for each CPU that the process may use.
    pub workers: Option<usize>,
    /// The version of the program, for operators and metrics.
    pub version: String,
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            upgrades: false,
            checks_only: false,
            user: None,
            confine: true,
            config_file: None,
            workers: None,
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }
}

/// An address to listen on, and the routes of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerConfig {
    /// The address.
    pub address: Address,
    /// The routes by the client's greeting; the first that fits is taken.
    pub routes: Vec<Route>,
    /// The name of the group of clients that no route fits; `None`: their connections are reset.
    pub group: Option<String>,
}

impl ListenerConfig {
    /// A listener without routes.
    pub fn new(address: Address, group: Option<&str>) -> Self {
        Self { address, routes: Vec::new(), group: group.map(Into::into) }
    }

    /// The groups of its routes, in their order, each once.
    pub fn routed_groups(&self) -> Vec<&str> {
        let mut groups: Vec<&str> = Vec::new();
        for route in &self.routes {
            if !groups.contains(&route.group.as_str()) {
                groups.push(&route.group);
            }
        }
        groups
    }
}

/// A route: the connections that it fits, and the name of their group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Route {
    /// The condition.
    pub condition: RouteCondition,
    /// The name of the group.
    pub group: String,
}

impl Route {
    /// A route to a group.
    pub fn new(condition: RouteCondition, group: impl Into<String>) -> Self {
        Self { condition, group: group.into() }
    }
}

/// The condition of a route. All parts that are set must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RouteCondition {
    /// The client speaks TLS and states one of these server names (SNI). Empty: any, or none.
    pub server_names: Vec<ServerNamePattern>,
    /// The client speaks TLS and offers one of these application protocols (ALPN). Empty: any.
    pub protocols: Vec<String>,
    /// The client speaks TLS, and states a server name or does not.
    pub has_server_name: Option<bool>,
    /// The client speaks TLS, or does not. `None` is TLS: other clients need a route of their own.
    pub is_tls: Option<bool>,
}

/// A pattern of server names: a name, or `*.` and a domain for all names below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerNamePattern {
    /// In lower case; with its first dot if it stands for all names below a domain.
    text: String,
}

impl ServerNamePattern {
    /// Whether a name in lower case fits.
    pub fn admits(&self, name: &str) -> bool {
        match self.text.strip_prefix('.') {
            None => name == self.text,
            Some(_) => name.len() > self.text.len() && name.ends_with(&self.text),
        }
    }

    /// Whether every name that fits `other` fits this pattern.
    pub fn includes(&self, other: &Self) -> bool {
        self.text == other.text || self.text.starts_with('.') && self.admits(&other.text)
    }
}

impl fmt::Display for ServerNamePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.text.starts_with('.') { "*" } else { "" };
        write!(formatter, "{star}{}", self.text)
    }
}

impl FromStr for ServerNamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.strip_prefix("*.").unwrap_or(text);
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_part) {
            return Err(format!(
                "{text:?} is no server name: write db.example.com or *.example.com"
            ));
        }
        let text = text.strip_prefix('*').unwrap_or(text).to_ascii_lowercase();
        Ok(Self { text })
    }
}

/// A group of upstreams among which clients are balanced.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupConfig {
    /// The name, by which routes refer to it.
    pub name: String,
    /// The upstreams.
    pub upstreams: Vec<UpstreamConfig>,
    /// How clients are balanced among them.
    pub algorithm: Algorithm,
    /// The time in which an upstream that was down, ejected or excluded gets its whole share again,
    /// unless clients are balanced by their address; `None`: at once.
    pub slow_start: Option<Duration>,
    /// The active check; `None` for no check.
    pub check: Option<CheckConfig>,
    /// The version of the header that tells the upstreams the client's address (PROXY protocol);
    /// `None` for no header.
    pub send_header: Option<HeaderVersion>,
}

/// The active check of a group, which connects to each upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckConfig {
    /// The time from one check to the next.
    pub interval: Duration,
    /// Checks in a row that have to fail until an upstream is down.
    pub fall: NonZeroU32,
    /// Checks in a row that have to succeed until it is up again.
    pub rise: NonZeroU32,
}

impl CheckConfig {
    /// A check by which an upstream is down after three that have failed, and up after two that
    /// have succeeded.
    pub fn new(interval: Duration) -> Self {
        const FALL: NonZeroU32 = NonZeroU32::new(3).unwrap();
        const RISE: NonZeroU32 = NonZeroU32::new(2).unwrap();
        Self { interval, fall: FALL, rise: RISE }
    }
}

impl GroupConfig {
    /// A group that is balanced round robin.
    pub fn new(name: impl Into<String>, upstreams: impl Into<Vec<UpstreamConfig>>) -> Self {
        Self {
            name: name.into(),
            upstreams: upstreams.into(),
            algorithm: Algorithm::default(),
            slow_start: None,
            send_header: None,
            check: None,
        }
    }
}

/// The clients that may connect, by their addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessRules {
    /// If there are any, only clients of these networks.
    pub allow: Vec<IpRange>,
    /// No client of these networks, also if it is allowed.
    pub deny: Vec<IpRange>,
}

impl AccessRules {
    /// Whether a client with this address may connect. One without an address (a Unix socket) may.
    pub fn admits(&self, client: Option<IpAddr>) -> bool {
        let Some(client) = client else { return true };
        let has = |ranges: &[IpRange]| ranges.iter().any(|range| range.contains(client));
        (self.allow.is_empty() || has(&self.allow)) && !has(&self.deny)
    }
}

/// What becomes of the established connections of an upstream that the active check has found down,
/// or that a reload has removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DownPolicy {
    /// They continue. A connection to a server that is overloaded may still be answered.
    #[default]
    Keep,
    /// They are closed by a reset after this time, unless the upstream is up again before.
    CloseAfter(Duration),
}

/// The limits of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The number of clients at a time, over all workers. Others wait in the kernel's queue.
    pub connections_max: usize,
    /// The number of open connections of one client: of an IPv4 address, or of an IPv6 network of
    /// 64 bits; `None` for no limit.
    pub connections_per_address_max: Option<NonZeroUsize>,
    /// The number of clients of a group that may wait for an upstream below its limit. The proxy
    /// resets other clients.
    pub queue_length_max: usize,
    /// Whether a client that ends its stream before it has an upstream is given up. Otherwise it
    /// may still wait for a response.
    pub aborts_on_close: bool,
    /// The number of addresses that are tried for a client, at least one.
    pub connect_attempts_max: u32,
    /// The rate at which each client is sent data, and each upstream for it, in bytes per second;
    /// `None` for no limit.
    pub rate_bytes_per_second: Option<u64>,
    /// The rate at which all clients together are sent data, and all upstreams, in bytes per
    /// second; `None` for no limit. The limit does not hold for Unix sockets, nor for connections
    /// that send less than 64 KiB in a second.
    pub total_rate_bytes_per_second: Option<u64>,
    /// The limits of time.
    pub timeouts: Timeouts,
}

/// The limits of time of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeouts {
    /// The time in which a client's greeting must arrive, if routes depend on the greeting. After
    /// this time the connection counts as a connection without TLS, whose server may speak first.
    pub greeting: Duration,
    /// The time in which a connection to an upstream must be established.
    pub connect: Duration,
    /// The longest time that a client waits in the queue while all usable upstreams are at their
    /// limits.
    pub queue: Duration,
    /// The time for which no byte may move in either direction; `None` for no limit.
    pub idle: Option<Duration>,
    /// Like `idle`, after one of the streams ended.
    pub half_closed: Option<Duration>,
    /// The time after which a silent connection is probed (TCP keep-alive), on both sides.
    pub keepalive: Duration,
    /// The time for which sent bytes may stay unacknowledged on either side, after which the side
    /// failed (`TCP_USER_TIMEOUT`); `None` for the host's limit.
    pub unacknowledged: Option<Duration>,
    /// The time after which a connection is reset in any case; `None` for no limit.
    pub lifetime: Option<Duration>,
    /// The time that open connections have when the proxy drains.
    pub drain: Duration,
}

impl Default for Limits {
    /// 65,536 connections, 3 attempts to connect, and 1,024 clients that wait.
    fn default() -> Self {
        Self {
            connections_max: 65_536,
            connections_per_address_max: None,
            queue_length_max: 1024,
            aborts_on_close: false,
            connect_attempts_max: 3,
            rate_bytes_per_second: None,
            total_rate_bytes_per_second: None,
            timeouts: Timeouts::default(),
        }
    }
}

impl Default for Timeouts {
    /// 5 s for a greeting and 5 s to connect; clients wait for 10 s; no idle limit, but 5 minutes
    /// half-closed; keep-alive after 60 s; 30 s to drain.
    fn default() -> Self {
        Self {
            greeting: Duration::from_secs(5),
            connect: Duration::from_secs(5),
            queue: Duration::from_secs(10),
            idle: None,
            half_closed: Some(Duration::from_secs(300)),
            keepalive: Duration::from_secs(60),
            unacknowledged: None,
            lifetime: None,
            drain: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// The default configuration, for these groups of upstreams.
    pub fn new(groups: impl Into<Vec<GroupConfig>>) -> Self {
        Self {
            listeners: Vec::new(),
            groups: groups.into(),
            send_fields: Vec::new(),
            trusted_proxies: TrustedProxies::default(),
            access: AccessRules::default(),
            method: ForwardMethod::Adaptive,
            sockets: SocketConfig::default(),
            limits: Limits::default(),
            down_policy: DownPolicy::default(),
            resolve_interval: Duration::from_secs(30),
            reporting: ReportingConfig::default(),
            process: ProcessConfig::default(),
        }
    }

    /// The addresses of all upstreams.
    pub fn upstreams(&self) -> impl Iterator<Item = &UpstreamAddress> {
        self.groups.iter().flat_map(|group| &group.upstreams).map(|upstream| &upstream.address)
    }

    /// The groups to which no listener and no route leads.
    pub fn unrouted_groups(&self) -> impl Iterator<Item = &GroupConfig> {
        let leads_to = |listener: &ListenerConfig, group: &GroupConfig| {
            let mut routed = listener.routes.iter().map(|route| &route.group);
            listener.group.as_ref() == Some(&group.name) || routed.any(|name| *name == group.name)
        };
        self.groups
            .iter()
            .filter(move |group| !self.listeners.iter().any(|listener| leads_to(listener, group)))
    }

    /// What the operator should know of this configuration, which is valid.
    pub fn caveats(&self) -> Vec<String> {
        let caveat = |group: &GroupConfig| {
            let name = &group.name;
            format!("no listener or route leads to the group {name}: it gets no connection")
        };
        let mut caveats: Vec<_> = self.unrouted_groups().map(caveat).collect();
        let is_by_source = |group: &&GroupConfig| {
            group.slow_start.is_some() && group.algorithm == Algorithm::SourceAddress
        };
        caveats.extend(self.groups.iter().filter(is_by_source).map(|group| {
            let name = &group.name;
            format!("slow-start changes nothing in the group {name}: addresses decide there")
        }));
        let mut upstreams = self.groups.iter().flat_map(|group| &group.upstreams);
        if upstreams.all(|upstream| upstream.connections_max.is_none()) {
            let (limits, default) = (&self.limits, Limits::default());
            let settings = [
                ("queue-timeout", limits.timeouts.queue != default.timeouts.queue),
                ("queue-length", limits.queue_length_max != default.queue_length_max),
            ];
            caveats.extend(settings.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| {
                format!("{name} changes nothing: no upstream has max-connections")
            }));
        }
        caveats
    }

    /// The TCP ports of all upstreams, each once.
    pub fn upstream_ports(&self) -> Vec<u16> {
        let mut ports: Vec<_> = self.upstreams().filter_map(UpstreamAddress::port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// This configuration, with those settings of `next` that a reload applies: groups, routes and
    /// rules of access.
    #[must_use]
    pub fn reloaded(&self, next: &Self) -> Self {
        let mut reloaded = self.clone();
        reloaded.listeners.clone_from(&next.listeners);
        reloaded.groups.clone_from(&next.groups);
        reloaded.access.clone_from(&next.access);
        // It is for the start alone.
        reloaded.process.upgrades = next.process.upgrades;
        reloaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denied_network_is_denied_also_if_it_is_allowed() {
        let ranges = |text: &str| vec![text.parse().unwrap()];
        let rules = AccessRules { allow: ranges("10.0.0.0/8"), deny: ranges("10.9.0.0/16") };
        let admits = |text: &str| rules.admits(Some(text.parse().unwrap()));
        assert!(admits("10.1.2.3") && admits("::ffff:10.1.2.3") && rules.admits(None));
        assert!(!admits("10.9.0.1") && !admits("192.0.2.1"));
        assert!(AccessRules::default().admits(Some("192.0.2.1".parse().unwrap())));
    }

    #[test]
    fn settings_without_effect_are_caveats() {
        let mut group = GroupConfig::new("one", ["10.0.0.1:80".parse().unwrap()]);
        group.slow_start = Some(Duration::from_secs(9));
        let mut config = Config::new([group]);
        config.listeners = vec![ListenerConfig::new("127.0.0.1:0".parse().unwrap(), Some("one"))];
        assert!(config.caveats().is_empty());
        config.groups[0].algorithm = Algorithm::SourceAddress;
        config.limits.timeouts.queue = Duration::from_secs(9);
        let caveats = config.caveats();
        let has = |at: usize, name: &str| caveats[at].starts_with(name);
        assert!(has(0, "slow-start ") && has(1, "queue-timeout ") && caveats.len() == 2);
        config.groups[0].algorithm = Algorithm::RoundRobin;
        config.groups[0].upstreams[0].connections_max = NonZeroUsize::new(1);
        assert!(config.caveats().is_empty());
    }

    #[test]
    fn groups_that_get_no_connection_are_caveats() {
        let groups = ["one", "two", "three"].map(|name| GroupConfig::new(name, []));
        let mut config = Config::new(groups);
        config.listeners = vec![ListenerConfig::new("127.0.0.1:0".parse().unwrap(), Some("one"))];
        config.listeners[0].routes = vec![Route::new(RouteCondition::default(), "two")];
        let caveats = config.caveats();
        assert!(caveats.len() == 1 && caveats[0].contains("the group three:"), "{caveats:?}");
    }
}
