//! Reload: other groups, routes and rules of access, while connections continue.
//!
//! What has become of each reload is recorded: an operator who has sent a signal gets no answer.

use crate::checks::{Checks, OnChange};
use crate::closing::ClosingReason;
use crate::config::{Config, Limits, ListenerConfig};
use crate::error::Error;
use crate::own_address;
use crate::resolver::{self, Resolver};
use crate::route_order;
use crate::routing::{CurrentTable, RoutingTable};
use crate::upstream::Administration;
use haul_server::Address;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};
use tracing::{error, info, warn};

/// The time for which a reload waits for the end of a handover: another process may only check its
/// configuration, or fail to start.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the configuration again: it, and what the operator should know, or the problem with it.
pub type ReadConfig = dyn Fn() -> Result<(Config, Vec<String>), String> + Send + Sync;

/// What has become of the reloads of a process.
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
    /// Why it has changed nothing; `None` if it has succeeded.
    pub error: Option<String>,
    /// What is not as it was asked for.
    pub caveats: Vec<String>,
}

/// Puts another configuration in force.
pub struct Reloader {
    /// The configuration in force.
    config: Mutex<Config>,
    /// One reload comes after another, from reading to the record of its result.
    turn: Mutex<()>,
    /// Where the configuration is read again, if it is.
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
    /// The reloader of a proxy that has started with this configuration.
    pub fn new(
        config: Config,
        table: Arc<CurrentTable>,
        resolver: Resolver,
        on_change: OnChange,
        checks: Checks,
        permitted_ports: Option<Vec<u16>>,
    ) -> Self {
        let (turn, source, history) = Default::default();
        let config = Mutex::new(config);
        Self { config, turn, source, history, table, resolver, on_change, checks, permitted_ports }
    }

    /// Sets where the configuration is read again. Only the first one counts.
    pub fn set_source(&self, read: Box<ReadConfig>) {
        let _ = self.source.set(read);
    }

    /// What has become of the reloads.
    pub fn history(&self) -> ReloadHistory {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The listeners of the configuration in force.
    pub fn listeners(&self) -> Vec<ListenerConfig> {
        self.config().listeners
    }

    /// Reads the configuration again and puts it in force, whole or not at all. Returns what is not
    /// as it was asked for.
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

    /// Reads the configuration again. Returns what a reload would but for names that cannot be
    /// resolved, and changes nothing.
    pub fn check_source(&self) -> Result<Vec<String>, Error> {
        let (next, more) = self.source()?().map_err(Error::ConfigFile)?;
        let config = self.config();
        self.check(&config, &next)?;
        let reloaded = config.reloaded(&next);
        let table = RoutingTable::new(&reloaded, Some(&self.table.get()))?;
        let mut caveats = reloaded.caveats();
        caveats.extend(table_caveats(&table, &reloaded.listeners));
        caveats.extend(other_remedies(&reloaded, &next));
        caveats.extend(more);
        Ok(caveats)
    }

    /// Puts a configuration in force, whole or not at all. Returns what is not as it was asked for.
    ///
    /// Blocks until names are resolved. New connections take the new routes; those that have an
    /// upstream keep it, also if the upstream is gone from the configuration.
    pub fn reload(&self, next: &Config) -> Result<Vec<String>, Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.record(self.apply(next))
    }

    /// Checks no upstream any more.
    pub fn stop_checks(&self) {
        self.checks.stop();
    }

    fn source(&self) -> Result<&ReadConfig, Error> {
        self.source.get().map(AsRef::as_ref).ok_or(Error::NoConfigFile)
    }

    fn config(&self) -> Config {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records and tells what has become of a reload.
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
        let config = self.config();
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
            // One that is back may have been drained while it was removed.
            if !upstream.is_down() {
                closings.cancel(upstream, ClosingReason::Down);
            }
            // One that has stayed may be drained at this moment, by another thread.
            let is_back = !before.has(upstream);
            if is_back && upstream.administration() == Administration::Enabled {
                closings.cancel(upstream, ClosingReason::Operator);
            }
        }
        caveats.extend(other_remedies(&reloaded, next));
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = reloaded;
        Ok(caveats)
    }
}

impl fmt::Debug for Reloader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reloader").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What an operator should know of a routing table that comes into force.
pub fn table_caveats(table: &RoutingTable, listeners: &[ListenerConfig]) -> Vec<String> {
    let mut caveats = own_address::caveats(table, listeners);
    caveats.extend(route_order::caveats(listeners));
    caveats.extend(table.weight_caveats());
    caveats
}

/// What a reload does not change of what is asked for, with what does.
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

/// An address to listen on that is new, or gone, or else the last one if their order or number has
/// changed.
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
        upgrades: _,
        // These are the program's.
        checks_only: _,
        version: _,
        send_fields,
        trusted_proxies,
        method,
        source,
        congestion,
        socket_mode,
        window_clamp,
        limits,
        down_policy,
        resolve_interval,
        access_log,
        metrics,
        control,
        user,
        confine,
        config_file,
        workers,
    } = before;
    let settings = [
        ("send-proxy-fields", *send_fields != next.send_fields),
        ("trusted-proxies", *trusted_proxies != next.trusted_proxies),
        ("path", *method != next.method),
        ("source", *source != next.source),
        ("congestion", *congestion != next.congestion),
        ("socket-mode", *socket_mode != next.socket_mode),
        ("window-clamp", *window_clamp != next.window_clamp),
        ("on-upstream-down", *down_policy != next.down_policy),
        ("resolve-interval", *resolve_interval != next.resolve_interval),
        ("access-log", *access_log != next.access_log),
        ("metrics-listen", *metrics != next.metrics),
        ("control", *control != next.control),
        ("user", *user != next.user),
        ("confine", *confine != next.confine),
        ("config", *config_file != next.config_file),
        ("workers", *workers != next.workers),
    ];
    let settings = settings.into_iter().chain(changed_limits(limits, &next.limits));
    settings.filter(|setting| setting.1).map(|setting| setting.0).collect()
}

/// Each limit, and whether it differs.
fn changed_limits(before: &Limits, next: &Limits) -> [(&'static str, bool); 16] {
    let Limits {
        connections_max,
        connections_per_address_max,
        greeting_timeout,
        connect_timeout,
        connect_attempts_max,
        queue_length_max,
        queue_timeout,
        aborts_on_close,
        idle_timeout,
        half_closed_timeout,
        keepalive_time,
        unacknowledged_timeout,
        lifetime,
        drain_timeout,
        rate_bytes_per_second,
        total_rate_bytes_per_second,
    } = *before;
    [
        ("max-connections", connections_max != next.connections_max),
        (
            "max-connections-per-address",
            connections_per_address_max != next.connections_per_address_max,
        ),
        ("greeting-timeout", greeting_timeout != next.greeting_timeout),
        ("connect-timeout", connect_timeout != next.connect_timeout),
        ("connect-attempts", connect_attempts_max != next.connect_attempts_max),
        ("queue-length", queue_length_max != next.queue_length_max),
        ("queue-timeout", queue_timeout != next.queue_timeout),
        ("abort-on-close", aborts_on_close != next.aborts_on_close),
        ("idle-timeout", idle_timeout != next.idle_timeout),
        ("half-closed-timeout", half_closed_timeout != next.half_closed_timeout),
        ("keepalive", keepalive_time != next.keepalive_time),
        ("unacknowledged-timeout", unacknowledged_timeout != next.unacknowledged_timeout),
        ("lifetime", lifetime != next.lifetime),
        ("drain-timeout", drain_timeout != next.drain_timeout),
        ("rate-limit", rate_bytes_per_second != next.rate_bytes_per_second),
        ("total-rate-limit", total_rate_bytes_per_second != next.total_rate_bytes_per_second),
    ]
}
