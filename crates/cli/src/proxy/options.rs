//! The options of `haul proxy`: the same on the command line and in the configuration file.

use crate::daemon::config_file::ConfigFile;
use crate::daemon::messages::MessageFormat;
use crate::daemon::options::{
    ByteRate, Count, MetricsAddress, SocketMode, Timeout, deserialize_each_from_text,
    deserialize_from_text,
};
use crate::output::Failure;
use crate::proxy::routes::{
    Balance, CheckOptions, GroupOptions, ListenerOptions, Places, RouteOptions, example, groups,
};
use clap::{Args, ValueEnum};
use haul_proxy::{
    Address, Config, DownPolicy, ForwardMethod, GroupConfig, HeaderField, HeaderVersion, IpRange,
    SourceChoice, TrustedProxies, TrustedProxy, UpstreamConfig,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use toml::Spanned;

/// The options of `haul proxy`. The configuration file has the flags' names as TOML keys, and flags
/// take precedence.
#[derive(Debug, Default, Clone, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Address to listen on: a port, an address and port, unix:PATH, or systemd for the sockets
    /// that systemd passes; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub listen: Vec<Address>,
    /// Mode of the files of Unix sockets to listen on, in octal: who may connect, such as 660
    /// [default: 666]
    #[arg(long, value_name = "MODE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub socket_mode: Option<SocketMode>,
    /// Upstreams to connect clients to, separated by commas: an address and port, a host name and
    /// port, or unix:PATH; behind it, after spaces, weight=N, max-connections=N and backup
    #[arg(long, value_name = "ADDRESS,…", value_delimiter = ',')]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub to: Vec<UpstreamConfig>,
    /// How clients are spread over the upstreams: round-robin, least-connections, or source-address
    /// for the same upstream for each client [default: round-robin]
    #[arg(long, value_name = "HOW", value_enum, hide_possible_values = true)]
    pub balance: Option<Balance>,
    /// The file that has some of the options, to tell where they are wrong.
    #[arg(skip)]
    #[serde(skip)]
    pub file: Option<ConfigFile>,
    /// Groups of upstreams, in the file only.
    #[arg(skip)]
    pub group: BTreeMap<String, GroupOptions>,
    /// Routes to groups by the client's TLS greeting, in the file only.
    #[arg(skip)]
    pub route: Vec<Spanned<RouteOptions>>,
    /// More addresses to listen on, with separate routes, in the file only.
    #[arg(skip)]
    pub listener: Vec<Spanned<ListenerOptions>>,
    /// Interval of a check that connects to each upstream. An upstream gets no clients after
    /// several checks in a row failed, until several in a row succeed [default: no check]
    #[arg(long, help_heading = "Upstreams", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub check_interval: Option<Timeout>,
    /// Number of failed checks in a row after which an upstream is down [default: 3]
    #[arg(long, help_heading = "Upstreams", value_name = "N")]
    pub check_fall: Option<Count>,
    /// Number of successful checks in a row after which an upstream is up again [default: 2]
    #[arg(long, help_heading = "Upstreams", value_name = "N")]
    pub check_rise: Option<Count>,
    /// Time in which an upstream that was down, ejected, drained or disabled gets its whole share
    /// of new connections again, from a tenth on; not with source-address [default: at once]
    #[arg(long, help_heading = "Upstreams", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub slow_start: Option<Timeout>,
    /// What happens to the established connections of an upstream that is down by the check, or
    /// that a reload removed: keep, close, or a time after which the connections are closed
    /// [default: keep]
    #[arg(long, help_heading = "Upstreams", value_name = "keep|close|TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub on_upstream_down: Option<OnUpstreamDown>,
    /// Longest time until the names of upstreams are resolved again: the time to live of their
    /// addresses counts if it is shorter [default: 30s]
    #[arg(long, help_heading = "Upstreams", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub resolve_interval: Option<Timeout>,
    /// Maximum time for a client's TLS greeting to arrive, where routes or --send-proxy-fields
    /// depend on it; after it the client counts as one without TLS [default: 5s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub greeting_timeout: Option<Timeout>,
    /// Maximum time for a connection to an upstream to be established [default: 5s]
    #[arg(long, help_heading = "Upstreams", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub connect_timeout: Option<Timeout>,
    /// Number of addresses that are tried for a client, one upstream after the other [default: 3]
    #[arg(long, help_heading = "Upstreams", value_name = "N")]
    pub connect_attempts: Option<Count>,
    /// Number of clients that may wait while all upstreams have their max-connections; others are
    /// reset [default: 1024]
    #[arg(long, help_heading = "Upstreams", value_name = "N")]
    pub queue_length: Option<usize>,
    /// Maximum time for which a client waits while all upstreams have their max-connections
    /// [default: 10s]
    #[arg(long, help_heading = "Upstreams", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub queue_timeout: Option<Timeout>,
    /// Give up a client that ends its stream while it waits for an upstream: it expects no response
    #[arg(long, help_heading = "Upstreams")]
    pub abort_on_close: Option<bool>,
    /// Addresses of this machine to connect to upstreams from, in turn, separated by commas; or
    /// client for each client's own address, which needs CAP_NET_ADMIN and routes that lead back
    /// here [default: the one that the routes choose]
    #[arg(long, help_heading = "Upstreams", value_name = "ADDRESS,…|client")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub source: Option<SourceOption>,
    /// Tell upstreams the client's address by the PROXY protocol, in this version: v1 or v2. A
    /// group of the file may have another, or off
    #[arg(
        long,
        help_heading = "Client addresses",
        value_name = "VERSION",
        value_enum,
        hide_possible_values = true
    )]
    pub send_proxy: Option<ProxyVersion>,
    /// Fields to add to the header of version 2, separated by commas: authority, alpn, unique-id,
    /// crc32c; the first two wait for the client's TLS greeting
    #[arg(
        long,
        help_heading = "Client addresses",
        value_name = "FIELD,…",
        value_delimiter = ',',
        value_enum,
        hide_possible_values = true
    )]
    pub send_proxy_fields: Vec<ProxyField>,
    /// Networks of proxies that name the client at the start of each connection (PROXY protocol),
    /// separated by commas, such as 10.0.0.0/8,192.0.2.1; unix for all clients of Unix sockets
    #[arg(
        long,
        help_heading = "Client addresses",
        value_name = "NETWORK,…",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub trusted_proxies: Vec<TrustedProxy>,
    /// Networks whose clients may connect, separated by commas [default: all]
    #[arg(
        long,
        help_heading = "Client addresses",
        value_name = "NETWORK,…",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub allow: Vec<IpRange>,
    /// Networks whose clients may not connect, also if --allow has them
    #[arg(
        long,
        help_heading = "Client addresses",
        value_name = "NETWORK,…",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub deny: Vec<IpRange>,
    /// Maximum number of clients; others wait [default: 65536, or what the limit on open files
    /// allows]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub max_connections: Option<Count>,
    /// Maximum number of clients of one IPv4 address, or of one IPv6 network of 64 bits [default:
    /// no limit]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub max_connections_per_address: Option<Count>,
    /// Maximum time for which no byte moves in either direction [default: no limit]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub idle_timeout: Option<Timeout>,
    /// Maximum time for which no byte moves once one side has ended its stream [default: 5min]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub half_closed_timeout: Option<Timeout>,
    /// Time after which a silent connection is probed (TCP keep-alive) [default: 60s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub keepalive: Option<Timeout>,
    /// Maximum time for which sent bytes may stay unacknowledged by a peer (TCP_USER_TIMEOUT)
    /// [default: the machine's, about 15min]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub unacknowledged_timeout: Option<Timeout>,
    /// Maximum time for a connection, after which it is reset in any case [default: no limit]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub lifetime: Option<Timeout>,
    /// Maximum time for open connections to end after SIGTERM [default: 30s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub drain_timeout: Option<Timeout>,
    /// Maximum rate at which each client and each upstream is sent data, in bytes per second
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub rate_limit: Option<ByteRate>,
    /// Maximum rate at which all clients together, and all upstreams together, are sent data, in
    /// bytes per second
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub total_rate_limit: Option<ByteRate>,
    /// Log connections to this file, a line of JSON for each; - is standard output
    #[arg(long, help_heading = "Logs and metrics", value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// Format of the service's own messages on standard error: text or json [default: text]
    #[arg(
        long,
        help_heading = "Logs and metrics",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub message_format: Option<MessageFormat>,
    /// Address and port on which to serve metrics for Prometheus (/metrics)
    #[arg(long, help_heading = "Logs and metrics", value_name = "ADDRESS")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub metrics_listen: Option<MetricsAddress>,
    /// Unix socket at which haul proxy control commands this proxy, for this user and root alone
    #[arg(long, help_heading = "Logs and metrics", value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// User to switch to once all sockets are open, for a service that root starts
    #[arg(long, help_heading = "Privileges", value_name = "NAME")]
    pub user: Option<String>,
    /// Give up all files, and all ports except the ports of the upstreams, where the kernel has
    /// Landlock [default: true]
    #[arg(long, help_heading = "Privileges")]
    pub confine: Option<bool>,
    /// Number of event loops [default: one for each CPU]
    #[arg(long, help_heading = "Forwarding", value_name = "N")]
    pub workers: Option<Count>,
    /// Path for bytes: copy, splice, or adaptive for copies of small pieces and splices of large
    /// ones [default: adaptive]
    #[arg(
        long,
        help_heading = "Forwarding",
        value_name = "PATH",
        value_enum,
        hide_possible_values = true
    )]
    pub path: Option<ForwardPath>,
    /// Congestion control of the sockets [default: the machine's]
    #[arg(long, help_heading = "Forwarding", value_name = "NAME")]
    pub congestion: Option<String>,
    /// Clamp the congestion window of peers within a millisecond, which saves interrupts on some
    /// machines: compare with your own load; needs CAP_BPF and CAP_NET_ADMIN [default: false]
    #[arg(long, help_heading = "Forwarding")]
    pub window_clamp: Option<bool>,
}

/// A version of the PROXY protocol.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyVersion {
    V1,
    V2,
}

impl From<ProxyVersion> for HeaderVersion {
    fn from(version: ProxyVersion) -> Self {
        match version {
            ProxyVersion::V1 => Self::V1,
            ProxyVersion::V2 => Self::V2,
        }
    }
}

/// Fails if there are fields, and no group has a header of the version that has fields.
fn check_fields(config: &Config) -> Result<(), Failure> {
    let is_version_2 = |group: &GroupConfig| group.send_header == Some(HeaderVersion::V2);
    if config.send_fields.is_empty() || config.groups.iter().any(is_version_2) {
        return Ok(());
    }
    Err(Failure::bad_input("send-proxy-fields are of version 2: add send-proxy v2"))
}

/// A field of a header of the PROXY protocol, version 2.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyField {
    Authority,
    Alpn,
    UniqueId,
    Crc32c,
}

impl From<ProxyField> for HeaderField {
    fn from(field: ProxyField) -> Self {
        match field {
            ProxyField::Authority => Self::Authority,
            ProxyField::Alpn => Self::Alpn,
            ProxyField::UniqueId => Self::UniqueId,
            ProxyField::Crc32c => Self::Crc32c,
        }
    }
}

/// The source of connections to upstreams: addresses of this machine, or the client's address.
#[derive(Debug, Clone)]
pub struct SourceOption(SourceChoice);

impl FromStr for SourceOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "client" {
            return Ok(Self(SourceChoice::Client));
        }
        let address = |text: &str| {
            text.trim().parse().map_err(|_| {
                format!("{text:?} is no address of this machine: write 10.0.0.7, or client")
            })
        };
        text.split(',')
            .map(address)
            .collect::<Result<_, _>>()
            .map(SourceChoice::Addresses)
            .map(Self)
    }
}

/// What becomes of the established connections of an upstream that is down.
#[derive(Debug, Clone, Copy)]
pub struct OnUpstreamDown(DownPolicy);

impl FromStr for OnUpstreamDown {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match text {
            "keep" => DownPolicy::Keep,
            "close" => DownPolicy::CloseAfter(Duration::ZERO),
            time => DownPolicy::CloseAfter(
                time.parse::<Timeout>()
                    .map_err(|error| {
                        format!("{time:?} is neither keep nor close, nor a time: {error}")
                    })?
                    .0,
            ),
        }))
    }
}

/// How bytes are forwarded.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardPath {
    Adaptive,
    Copy,
    Splice,
}

impl Options {
    /// Refuses options that contradict each other, or that are missing.
    fn check(&self) -> Result<(), Failure> {
        if self.listen.is_empty() && self.listener.is_empty() {
            return Err(Failure::bad_input(format!("listen is missing: write {}", example())));
        }
        if self.to.is_empty() && self.group.is_empty() {
            return Err(Failure::bad_input(format!("to is missing: write {}", example())));
        }
        let has_interval = self.check_interval.is_some();
        let problem = "check-fall and check-rise are of the check: add check-interval";
        if let Some((name, _)) =
            self.group.iter().find(|(_, group)| group.lacks_check_interval() && !has_interval)
        {
            return Err(Failure::bad_input(format!("the group {name}: {problem}")));
        }
        let has_any = has_interval || self.group.values().any(GroupOptions::has_check_interval);
        if (self.check_fall.is_some() || self.check_rise.is_some()) && !has_any {
            return Err(Failure::bad_input(problem));
        }
        if self.balance.is_some() && self.to.is_empty() {
            let problem = "balance is for the upstreams of to: write it into each [group.NAME]";
            return Err(Failure::bad_input(problem));
        }
        Ok(())
    }

    /// The active check of groups that do not state otherwise.
    fn check_options(&self) -> CheckOptions {
        let (interval, fall, rise) = (self.check_interval, self.check_fall, self.check_rise);
        CheckOptions { interval, fall, rise }
    }

    /// Converts the options to the configuration of a proxy.
    pub fn into_config(self) -> Result<Config, Failure> {
        self.check()?;
        let has_default = !self.to.is_empty();
        let check = self.check_options();
        let header = self.send_proxy.map(HeaderVersion::from);
        let mut config = Config::new(groups(self.to, self.balance, check, header, self.group));
        config.send_fields = self.send_proxy_fields.into_iter().map(Into::into).collect();
        check_fields(&config)?;
        for group in &mut config.groups {
            group.slow_start = self.slow_start.map(|time| time.0);
        }
        let names: Vec<&str> = config.groups.iter().map(|group| group.name.as_str()).collect();
        let places = Places { file: self.file.as_ref(), groups: &names };
        config.listeners = places.listeners(self.listen, has_default, self.route, self.listener)?;
        config.sockets.source = self.source.map(|source| source.0).unwrap_or_default();
        config.method = match self.path {
            None | Some(ForwardPath::Adaptive) => ForwardMethod::Adaptive,
            Some(ForwardPath::Copy) => ForwardMethod::Copy,
            Some(ForwardPath::Splice) => ForwardMethod::Splice,
        };
        config.trusted_proxies = TrustedProxies::new(self.trusted_proxies);
        config.access.allow = self.allow;
        config.access.deny = self.deny;
        config.down_policy = self.on_upstream_down.map_or(DownPolicy::Keep, |policy| policy.0);
        if let Some(interval) = self.resolve_interval {
            config.resolve_interval = interval.0;
        }
        let limits = &mut config.limits;
        limits.connections_max = self.max_connections.map_or(limits.connections_max, Count::get);
        limits.connections_per_address_max = self.max_connections_per_address.map(|count| count.0);
        limits.connect_attempts_max =
            self.connect_attempts.map_or(limits.connect_attempts_max, |count| {
                u32::try_from(count.get()).unwrap_or(u32::MAX)
            });
        limits.aborts_on_close = self.abort_on_close.unwrap_or_default();
        limits.queue_length_max = self.queue_length.unwrap_or(limits.queue_length_max);
        for (limit, option) in [
            (&mut limits.timeouts.queue, self.queue_timeout),
            (&mut limits.timeouts.greeting, self.greeting_timeout),
            (&mut limits.timeouts.connect, self.connect_timeout),
            (&mut limits.timeouts.keepalive, self.keepalive),
            (&mut limits.timeouts.drain, self.drain_timeout),
        ] {
            *limit = option.map_or(*limit, |time| time.0);
        }
        limits.timeouts.idle = self.idle_timeout.map(|time| time.0);
        limits.timeouts.unacknowledged = self.unacknowledged_timeout.map(|time| time.0);
        limits.timeouts.lifetime = self.lifetime.map(|time| time.0);
        if let Some(time) = self.half_closed_timeout {
            limits.timeouts.half_closed = Some(time.0);
        }
        limits.rate_bytes_per_second = self.rate_limit.map(|size| size.0);
        limits.total_rate_bytes_per_second = self.total_rate_limit.map(|size| size.0);
        // The library's name of standard output is an empty path.
        config.reporting.access_log =
            self.access_log.map(|path| if path.as_os_str() == "-" { PathBuf::new() } else { path });
        config.reporting.metrics = self.metrics_listen.map(|address| address.0);
        config.reporting.control = self.control;
        config.process.user = self.user;
        config.process.confine = self.confine.unwrap_or(true);
        config.process.workers = self.workers.map(Count::get);
        config.sockets.congestion = self.congestion;
        config.sockets.socket_mode = self.socket_mode.map(|mode| mode.0);
        config.sockets.window_clamp = self.window_clamp == Some(true);
        Ok(config)
    }
}
