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
        let mut caveats = upkeep::unresolved_caveats(self.resolver.resolve(&table));
        self.table.replace(&table);
        for removed in before.upstreams().filter(|upstream| !table.has(upstream)) {
            self.on_change.closings.apply(self.on_change.down_policy, removed);
        }
        for upstream in table.upstreams().filter(|upstream| !upstream.is_down()) {
            // It may have been removed before.
            self.on_change.closings.cancel(upstream, ClosingReason::Down);
        }
        if reloaded != *next {
            let problem = "only groups, routes, allow and deny are reloaded: other settings that \
                           have changed need a restart";
            caveats.push(problem.into());
        }
        *config = reloaded;
        Ok(caveats)
    }
}

fn addresses(config: &Config) -> impl Iterator<Item = &Address> {
    config.listeners.iter().map(|listener| &listener.address)
}
