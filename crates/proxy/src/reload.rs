//! Reload: other groups, routes and rules of access, while connections continue.

use crate::closing::ClosingReason;
use crate::config::Config;
use crate::error::Error;
use crate::routing::{CurrentTable, RoutingTable};
use crate::upkeep::{self, OnChange, Resolver};
use haul_server::Address;
use std::sync::{Arc, Mutex, PoisonError};

/// Puts another configuration in force.
#[derive(Debug)]
pub struct Reloader {
    config: Mutex<Config>,
    table: Arc<CurrentTable>,
    resolver: Resolver,
    on_change: OnChange,
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
        permitted_ports: Option<Vec<u16>>,
    ) -> Self {
        Self { config: Mutex::new(config), table, resolver, on_change, permitted_ports }
    }

    /// Puts a configuration in force, whole or not at all. Returns what is not as it was asked for.
    ///
    /// Blocks until names are resolved. New connections take the new routes; those that have an
    /// upstream keep it, also if the upstream is gone from the configuration.
    pub fn reload(&self, next: &Config) -> Result<Vec<String>, Error> {
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        if addresses(&config).ne(addresses(next)) {
            return Err(Error::ListenersChanged);
        }
        if let Some(permitted) = &self.permitted_ports {
            let is_given_up = |port: u16| !permitted.contains(&port);
            if let Some(upstream) = next.upstreams().find(|one| one.port().is_some_and(is_given_up))
            {
                return Err(Error::PortGivenUp { upstream: upstream.to_string() });
            }
        }
        let reloaded = config.reloaded(next);
        let before = self.table.get();
        let table = Arc::new(RoutingTable::new(&reloaded, Some(&before))?);
        let mut caveats = reloaded.caveats();
        caveats.extend(upkeep::unresolved_caveats(self.resolver.resolve(&table)));
        self.table.replace(&table);
        for removed in before.upstreams().filter(|upstream| !table.has(upstream)) {
            self.on_change.closings.apply(self.on_change.down_policy, removed);
        }
        for upstream in table.upstreams().filter(|upstream| !upstream.is_down()) {
            // It may have been removed before.
            self.on_change.closings.cancel(upstream, ClosingReason::Down);
        }
        if reloaded != *next {
            let names = changed_settings(&reloaded, next).join(", ");
            caveats.push(format!(
                "the changes of {names} need a restart: only groups, routes, allow and deny are \
                 reloaded"
            ));
        }
        *config = reloaded;
        Ok(caveats)
    }
}

fn addresses(config: &Config) -> impl Iterator<Item = &Address> {
    config.listeners.iter().map(|listener| &listener.address)
}

/// The names of the settings that differ.
fn changed_settings(before: &Config, next: &Config) -> Vec<&'static str> {
    let (old, new) = (&before.limits, &next.limits);
    let settings = [
        ("send-proxy", before.send_header != next.send_header),
        ("send-proxy-fields", before.send_fields != next.send_fields),
        ("trusted-proxies", before.trusted_proxies != next.trusted_proxies),
        ("path", before.method != next.method),
        ("source", before.source != next.source),
        ("congestion", before.congestion != next.congestion),
        ("window-clamp", before.window_clamp != next.window_clamp),
        ("check-interval", before.check_interval != next.check_interval),
        ("on-upstream-down", before.down_policy != next.down_policy),
        ("resolve-interval", before.resolve_interval != next.resolve_interval),
        ("access-log", before.access_log != next.access_log),
        ("metrics-listen", before.metrics != next.metrics),
        ("control", before.control != next.control),
        ("user", before.user != next.user),
        ("confine", before.confine != next.confine),
        ("workers", before.workers != next.workers),
        ("max-connections", old.connections_max != new.connections_max),
        (
            "max-connections-per-address",
            old.connections_per_address_max != new.connections_per_address_max,
        ),
        ("greeting-timeout", old.greeting_timeout != new.greeting_timeout),
        ("connect-timeout", old.connect_timeout != new.connect_timeout),
        ("connect-attempts", old.connect_attempts_max != new.connect_attempts_max),
        ("queue-length", old.queue_length_max != new.queue_length_max),
        ("queue-timeout", old.queue_timeout != new.queue_timeout),
        ("abort-on-close", old.aborts_on_close != new.aborts_on_close),
        ("idle-timeout", old.idle_timeout != new.idle_timeout),
        ("half-closed-timeout", old.half_closed_timeout != new.half_closed_timeout),
        ("keepalive", old.keepalive_time != new.keepalive_time),
        ("unacknowledged-timeout", old.unacknowledged_timeout != new.unacknowledged_timeout),
        ("lifetime", old.lifetime != new.lifetime),
        ("drain-timeout", old.drain_timeout != new.drain_timeout),
        ("rate-limit", old.rate_bytes_per_second != new.rate_bytes_per_second),
        ("total-rate-limit", old.total_rate_bytes_per_second != new.total_rate_bytes_per_second),
    ];
    settings.into_iter().filter(|setting| setting.1).map(|setting| setting.0).collect()
}
