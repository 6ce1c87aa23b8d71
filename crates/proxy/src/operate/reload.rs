//! Reload: other groups, routes and rules of access, while connections continue.
//!
//! The result of each reload is recorded, because an operator who sends a signal does not get an
//! answer.

use crate::config::{
    Config, Limits, ListenerConfig, ProcessConfig, ReportingConfig, SocketConfig, Timeouts,
};
use crate::error::Error;
use crate::upstreams::closing::ClosingReason;
use crate::upstreams::route_order;
use crate::upstreams::routing::{CurrentTable, RoutingTable};
use crate::upstreams::upstream::AdminState;
use crate::watch::checks::{Checks, OnChange};
use crate::watch::own_address;
use crate::watch::resolver::{self, Resolver};
use haul_server::Address;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};
use tracing::{error, info, warn};

/// How long a reload waits for the end of a handover, because the other process may only check its
/// configuration, or fail to start.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the configuration again. Returns the configuration with remarks for the operator, or the
/// problem.
pub type ReadConfig = dyn Fn() -> Result<(Config, Vec<String>), String> + Send + Sync;

/// The results of the reloads of a process.
#[derive(Debug, Clone, Default)]
pub struct ReloadHistory {
    pub succeeded: u64,
    pub failed: u64,
    pub last: Option<LastReload>,
}

/// The latest reload.
#[derive(Debug, Clone)]
pub struct LastReload {
    pub time: SystemTime,
    /// Why the reload changed nothing; `None` if it succeeded.
    pub error: Option<String>,
    /// Settings that are not as they were asked for.
    pub caveats: Vec<String>,
}

/// Puts another configuration in force.
pub struct Reloader {
    /// The configuration in force.
    current: Mutex<Config>,
    /// Held during a reload, from reading to the record of the result, so that reloads run one
    /// after another.
    turn: Mutex<()>,
    /// How the configuration is read again, if it can be.
    source: OnceLock<Box<ReadConfig>>,
    history: Mutex<ReloadHistory>,
    table: Arc<CurrentTable>,
    resolver: Resolver,
    on_change: OnChange,
    checks: Checks,
    /// The ports to which the process may still connect; `None` for all.
    permitted_ports: Option<Vec<u16>>,
}

impl Reloader {
    /// Creates the reloader of a proxy that started with this configuration.
    pub fn new(
        config: Config,
        table: Arc<CurrentTable>,
        resolver: Resolver,
        on_change: OnChange,
        checks: Checks,
        permitted_ports: Option<Vec<u16>>,
    ) -> Self {
        let (turn, source, history) = Default::default();
        let current = Mutex::new(config);
        Self { current, turn, source, history, table, resolver, on_change, checks, permitted_ports }
    }

    /// Sets how the configuration is read again. Only the first call counts.
    pub fn set_source(&self, read: Box<ReadConfig>) {
        let _ = self.source.set(read);
    }

    /// The results of the reloads.
    pub fn history(&self) -> ReloadHistory {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The listeners of the configuration in force.
    pub fn listeners(&self) -> Vec<ListenerConfig> {
        self.current().listeners
    }

    /// Reads the configuration again and puts it in force, whole or not at all. Returns the
    /// settings that are not as they were asked for.
    pub fn reload_from_source(&self) -> Result<Vec<String>, Error> {
        let read = self.source()?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let reloaded = read().map_err(Error::ConfigFile).and_then(|(config, more)| {
            let mut caveats = self.apply(&config)?;
            caveats.extend(more);
            Ok(caveats)
        });
        self.record(reloaded)
    }

    /// Reads the configuration again, and changes nothing. Returns the same as a reload, without
    /// names that cannot be resolved.
    pub fn check_source(&self) -> Result<Vec<String>, Error> {
        let (next, more) = self.source()?().map_err(Error::ConfigFile)?;
        let config = self.current();
        self.check(&config, &next)?;
        let reloaded = config.reloaded(&next);
        let table = RoutingTable::new(&reloaded, Some(&self.table.get()))?;
        let mut caveats = reloaded.caveats();
        caveats.extend(table_caveats(&table, &reloaded.listeners));
        caveats.extend(other_remedies(&reloaded, &next));
        caveats.extend(more);
        Ok(caveats)
    }

    /// Puts a configuration in force, whole or not at all. Returns the settings that are not as
    /// they were asked for.
    ///
    /// Blocks until names are resolved. New connections take the new routes. A connection that has
    /// an upstream keeps the upstream, even if the upstream left the configuration.
    pub fn reload(&self, next: &Config) -> Result<Vec<String>, Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.record(self.apply(next))
    }

    /// Stops the checks of upstreams.
    pub fn stop_checks(&self) {
        self.checks.stop();
    }

    fn source(&self) -> Result<&ReadConfig, Error> {
        self.source.get().map(AsRef::as_ref).ok_or(Error::NoConfigFile)
    }

    fn current(&self) -> Config {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records and reports the result of a reload.
    fn record(&self, reloaded: Result<Vec<String>, Error>) -> Result<Vec<String>, Error> {
        let problem = reloaded.as_ref().err().map(ToString::to_string);
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let count = if problem.is_none() { &mut history.succeeded } else { &mut history.failed };
        *count += 1;
        let caveats = reloaded.as_ref().map(Clone::clone).unwrap_or_default();
        history.last = Some(LastReload { time: SystemTime::now(), error: problem, caveats });
        drop(history);
        match &reloaded {
            Ok(caveats) => {
                info!("the configuration was reloaded");
                for caveat in caveats {
                    warn!("{caveat}");
                }
            }
            Err(error) => error!(
                %error,
                "the configuration was not reloaded, the old one is in force: {error}"
            ),
        }
        reloaded
    }

    /// Whether a configuration can come after another one in this process.
    fn check(&self, config: &Config, next: &Config) -> Result<(), Error> {
        if let Some(address) = changed_address(config, next) {
            return Err(Error::ListenersChanged(address.clone()));
        }
        let Some(permitted) = &self.permitted_ports else { return Ok(()) };
        let is_given_up = |port: u16| !permitted.contains(&port);
        match next.upstreams().find(|one| one.port().is_some_and(is_given_up)) {
            Some(upstream) => Err(Error::PortGivenUp { upstream: upstream.to_string() }),
            None => Ok(()),
        }
    }

    fn apply(&self, next: &Config) -> Result<Vec<String>, Error> {
        let config = self.current();
        self.check(&config, next)?;
        self.table.wait_until_decided(HANDOVER_TIMEOUT);
        let reloaded = config.reloaded(next);
        let (before, table, unresolved) = loop {
            let before = self.table.get();
            let table = Arc::new(RoutingTable::new(&reloaded, Some(&before))?);
            let unresolved = self.resolver.resolve(&table);
            if self.table.replace(&table)? {
                break (before, table, unresolved);
            }
        };
        self.resolver.table_changed();
        self.checks.table_changed();
        let mut caveats = reloaded.caveats();
        caveats.extend(resolver::unresolved_caveats(unresolved));
        caveats.extend(table_caveats(&table, &reloaded.listeners));
        for removed in before.upstreams().filter(|upstream| !table.has(upstream)) {
            self.on_change.closings.apply(self.on_change.down_policy, removed);
        }
        let closings = &self.on_change.closings;
        for upstream in table.upstreams() {
            // An earlier removal may still drain an upstream that came back.
            if !upstream.is_down() {
                closings.cancel(upstream, ClosingReason::Down);
            }
            // Another thread may be draining an upstream that stayed.
            let is_back = !before.has(upstream);
            if is_back && upstream.administration() == AdminState::Enabled {
                closings.cancel(upstream, ClosingReason::Operator);
            }
        }
        caveats.extend(other_remedies(&reloaded, next));
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = reloaded;
        Ok(caveats)
    }
}

impl fmt::Debug for Reloader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reloader").field("current", &self.current).finish_non_exhaustive()
    }
}

/// Remarks for the operator about a routing table that comes into force.
pub fn table_caveats(table: &RoutingTable, listeners: &[ListenerConfig]) -> Vec<String> {
    let mut caveats = own_address::caveats(table, listeners);
    caveats.extend(route_order::caveats(listeners));
    caveats.extend(table.weight_caveats());
    caveats
}

/// The settings that a reload does not change, with the command that changes them.
fn other_remedies(reloaded: &Config, next: &Config) -> Vec<String> {
    let (restart, upgrade): (Vec<_>, Vec<_>) =
        changed_settings(reloaded, next).into_iter().partition(|name| *name == "control");
    let remedies = [(upgrade, "--upgrade"), (restart, "a restart")].into_iter();
    let remedies = remedies.filter(|(names, _)| !names.is_empty());
    let caveat = |(names, remedy): (Vec<&str>, &str)| {
        let names = names.join(", ");
        format!(
            "the changes of {names} need {remedy}: only groups and what belongs to them, routes, \
             allow and deny are reloaded"
        )
    };
    remedies.map(caveat).collect()
}

/// An address to listen on that is new or gone. If only the order or the number of the addresses
/// changed, the last address.
fn changed_address<'c>(before: &'c Config, next: &'c Config) -> Option<&'c Address> {
    let addresses = |config: &'c Config| config.listeners.iter().map(|listener| &listener.address);
    if addresses(before).eq(addresses(next)) {
        return None;
    }
    let lacks = |config, address: &Address| addresses(config).all(|other| other != address);
    let new = addresses(next).find(|address| lacks(before, address));
    let gone = || addresses(before).find(|address| lacks(next, address));
    new.or_else(gone).or_else(|| addresses(before).next_back())
}

/// The names of the settings that differ.
fn changed_settings(before: &Config, next: &Config) -> Vec<&'static str> {
    // Without `..`, so that a new setting cannot be forgotten here.
    let Config {
        // A reload applies these.
        listeners: _,
        groups: _,
        access: _,
        send_fields,
        trusted_proxies,
        method,
        sockets: SocketConfig { source, congestion, socket_mode, window_clamp },
        limits,
        down_policy,
        resolve_interval,
        reporting: ReportingConfig { access_log, metrics, control },
        process,
    } = before;
    let ProcessConfig {
        // A reload applies it.
        upgrades: _,
        // The caller sets these.
        checks_only: _,
        version: _,
        user,
        confine,
        config_file,
        workers,
    } = process;
    let settings = [
        ("send-proxy-fields", *send_fields != next.send_fields),
        ("trusted-proxies", *trusted_proxies != next.trusted_proxies),
        ("path", *method != next.method),
        ("source", *source != next.sockets.source),
        ("congestion", *congestion != next.sockets.congestion),
        ("socket-mode", *socket_mode != next.sockets.socket_mode),
        ("window-clamp", *window_clamp != next.sockets.window_clamp),
        ("on-upstream-down", *down_policy != next.down_policy),
        ("resolve-interval", *resolve_interval != next.resolve_interval),
        ("access-log", *access_log != next.reporting.access_log),
        ("metrics-listen", *metrics != next.reporting.metrics),
        ("control", *control != next.reporting.control),
        ("user", *user != next.process.user),
        ("confine", *confine != next.process.confine),
        ("config", *config_file != next.process.config_file),
        ("workers", *workers != next.process.workers),
    ];
    let settings = settings
        .into_iter()
        .chain(compare_limits(limits, &next.limits))
        .chain(compare_timeouts(&limits.timeouts, &next.limits.timeouts));
    settings.filter(|setting| setting.1).map(|setting| setting.0).collect()
}

/// The name of each limit, and whether the limit differs.
fn compare_limits(before: &Limits, next: &Limits) -> [(&'static str, bool); 7] {
    let Limits {
        connections_max,
        connections_per_address_max,
        connect_attempts_max,
        queue_length_max,
        aborts_on_close,
        rate_bytes_per_second,
        total_rate_bytes_per_second,
        timeouts: _,
    } = *before;
    [
        ("max-connections", connections_max != next.connections_max),
        (
            "max-connections-per-address",
            connections_per_address_max != next.connections_per_address_max,
        ),
        ("connect-attempts", connect_attempts_max != next.connect_attempts_max),
        ("queue-length", queue_length_max != next.queue_length_max),
        ("abort-on-close", aborts_on_close != next.aborts_on_close),
        ("rate-limit", rate_bytes_per_second != next.rate_bytes_per_second),
        ("total-rate-limit", total_rate_bytes_per_second != next.total_rate_bytes_per_second),
    ]
}

/// The name of each limit of time, and whether the limit differs.
fn compare_timeouts(before: &Timeouts, next: &Timeouts) -> [(&'static str, bool); 9] {
    let Timeouts {
        greeting,
        connect,
        queue,
        idle,
        half_closed,
        keepalive,
        unacknowledged,
        lifetime,
        drain,
    } = *before;
    [
        ("greeting-timeout", greeting != next.greeting),
        ("connect-timeout", connect != next.connect),
        ("queue-timeout", queue != next.queue),
        ("idle-timeout", idle != next.idle),
        ("half-closed-timeout", half_closed != next.half_closed),
        ("keepalive", keepalive != next.keepalive),
        ("unacknowledged-timeout", unacknowledged != next.unacknowledged),
        ("lifetime", lifetime != next.lifetime),
        ("drain-timeout", drain != next.drain),
    ]
}
