//! The proxy as a whole: listening sockets, event loops, upkeep, metrics, and how to stop it.

use crate::config::{Config, ListenerConfig};
use crate::error::Error;
use crate::handler::{ProxyHandler, loop_settings};
use crate::loop_state::LoopState;
use crate::metrics::{LoopCounters, ProxyMetrics};
use crate::reload::Reloader;
use crate::routing::{CurrentTable, RoutingTable};
use crate::upkeep::{self, Intervals, Upkeep};
use haul_server::connect;
use haul_server::event_loop::LoopSettings;
use haul_server::listener::{ListenAddress, ListenSettings};
use haul_server::log_writer::{LogBuffer, LogFile, LogWriter};
use haul_server::metrics::Registry;
use haul_server::placement::Placement;
use haul_server::runtime::{self, Service};
use haul_server::sandbox::{self, AccessRights};
use haul_server::window_clamp::{ClampedPorts, WindowClamp};
use haul_server::{Address, Control, privileges};
use rustix::thread::CapabilitySet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Descriptors of a connection: two sockets, and a pipe for a direction whose sink is full. If both
/// sinks of many connections are full, the rest is copied.
const DESCRIPTORS_PER_CONNECTION: usize = 4;

/// A proxy that listens, and forwards once it runs.
#[derive(Debug)]
pub struct Server {
    service: Service,
    settings: LoopSettings,
    handlers: Vec<ProxyHandler>,
    counters: Vec<Arc<LoopCounters>>,
    table: Arc<CurrentTable>,
    upkeep: Upkeep,
    reloader: Arc<Reloader>,
    log: Option<Arc<LogWriter>>,
    caveats: Vec<String>,
    window_clamp: Option<WindowClamp>,
}

/// Control over a running proxy, from any thread.
#[derive(Debug, Clone)]
pub struct Handle {
    control: Arc<Control>,
    log: Option<Arc<LogWriter>>,
    reloader: Arc<Reloader>,
}

impl Server {
    /// Resolves names, opens the log, listens, drops privileges and starts threads. Connections
    /// wait until [`Server::run`].
    ///
    /// A name that cannot be resolved is a caveat, and is resolved again later: a proxy may start
    /// before the network is complete.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let table = Arc::new(CurrentTable::new(RoutingTable::new(config, None)?));
        let loops = runtime::loop_count(config.workers)?;
        let as_given = config.clone();
        let mut config = config.clone();
        let connections_max = runtime::descriptors_available() / DESCRIPTORS_PER_CONNECTION;
        config.limits.connections_max = config.limits.connections_max.min(connections_max).max(1);
        let path = |log: &PathBuf| (log.as_os_str() != "").then(|| log.clone());
        let log_path = config.access_log.as_ref().map(path);
        let log_file = log_path.as_ref().map(|path| LogFile::open(path.as_deref())).transpose()?;
        let listen: Vec<_> = config.listeners.iter().map(without_tls).collect();
        let congestion = config.congestion.as_deref();
        let listen = ListenSettings::new(listen).with_congestion(congestion).with_shared(true);
        let service = Service::open("haul-proxy", &listen, config.metrics, loops)?;
        let upstream_ports = config.upstream_ports();
        let ports = ClampedPorts {
            accepted: service.own_ports().to_vec(),
            connected: upstream_ports.clone(),
        };
        let (window_clamp, refusal) = WindowClamp::attach_if(config.window_clamp, &ports);
        if let Some(user) = &config.user {
            privileges::switch_user(user, CapabilitySet::empty())?;
        }
        if let Some(name) = congestion {
            // Upstream sockets are made by this user, who may be forbidden what root may do.
            connect::check_congestion(name)
                .map_err(|error| haul_server::Error::Congestion { name: name.into(), error })?;
        }
        let mut caveats = upkeep::unresolved_caveats(upkeep::resolve(&table.get()));
        caveats.extend(refusal);
        // The resolver reads files that depend on the host, so its thread starts before the
        // sandbox, which holds for the threads that start later.
        let intervals =
            Intervals { resolve: config.resolve_interval, check: config.check_interval };
        let upkeep = Upkeep::start(&table, intervals)
            .map_err(haul_server::Error::at("starting the upkeep thread"))?;
        if config.confine {
            let paths = sandbox_paths(&config, log_path.as_ref());
            caveats.extend(sandbox::restrict(&paths, &upstream_ports)?);
        }
        let permitted_ports = config.confine.then_some(upstream_ports);
        let reloader =
            Reloader::new(as_given, Arc::clone(&table), upkeep.resolver(), permitted_ports);
        let log = log_file.map(LogWriter::start).transpose()?.map(Arc::new);
        let counters: Vec<Arc<LoopCounters>> = (0..loops).map(|_| Arc::default()).collect();
        let handler = |counters: &Arc<LoopCounters>| {
            let buffer = log.as_ref().map_or_else(LogBuffer::default, |log| log.buffer());
            LoopState::new(&config, Arc::clone(&table), Arc::clone(counters), buffer)
                .map(ProxyHandler::new)
        };
        let handlers = counters.iter().map(handler).collect::<Result<_, _>>();
        let handlers = handlers.map_err(Error::Pool)?;
        let wakers = service.control();
        let placement = Placement::new(wakers.wakers(), config.limits.connections_max);
        let settings = loop_settings(&config).with_placement(Some(placement));
        Ok(Self {
            service,
            settings,
            handlers,
            counters,
            table,
            upkeep,
            reloader: Arc::new(reloader),
            log,
            caveats,
            window_clamp,
        })
    }

    /// The addresses that it listens on. A port that was 0 is the one that the kernel chose.
    pub fn addresses(&self) -> &[ListenAddress] {
        self.service.addresses()
    }

    /// The address of the metrics endpoint.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.service.metrics_address()
    }

    /// What is not as it was asked for, each with its consequence.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Whether the congestion window of near peers is clamped.
    pub fn clamps_window(&self) -> bool {
        self.window_clamp.is_some()
    }

    /// The number of event loops.
    pub fn workers(&self) -> usize {
        self.handlers.len()
    }

    /// Control over the proxy while it runs.
    pub fn handle(&self) -> Handle {
        let (log, reloader) = (self.log.clone(), Arc::clone(&self.reloader));
        Handle { control: self.service.control(), log, reloader }
    }

    /// Forwards until [`Handle::drain`], and then until open connections have ended or the drain
    /// timeout is over.
    pub fn run(self) -> Result<(), Error> {
        let Self {
            service, settings, handlers, counters, table, upkeep, log, window_clamp, ..
        } = self;
        let mut registry = Registry::default();
        registry.register(ProxyMetrics { loops: counters, table });
        let result = service.run(&[], &settings, registry, handlers);
        drop((upkeep, window_clamp));
        if let Some(log) = &log {
            log.end();
        }
        Ok(result?)
    }
}

impl Handle {
    /// Stops accepting; the proxy ends once its connections have ended.
    pub fn drain(&self) {
        self.control.drain();
    }

    /// Opens the log again by its name, after a rotation.
    pub fn reopen_log(&self) -> Result<(), Error> {
        match &self.log {
            Some(log) => Ok(log.reopen()?),
            None => Ok(()),
        }
    }

    /// Puts the groups, routes and rules of access of another configuration in force, whole or not
    /// at all. Returns what is not as it was asked for, each with its consequence.
    ///
    /// Blocks until names are resolved. Connections continue, also those to upstreams that are gone
    /// from the configuration; new connections take the new routes. Upstreams that stay in their
    /// group keep their state. The addresses to listen on cannot be changed, nor, if the process is
    /// confined, can the ports of upstreams.
    pub fn reload(&self, config: &Config) -> Result<Vec<String>, Error> {
        self.reloader.reload(config)
    }
}

fn without_tls(listener: &ListenerConfig) -> ListenAddress {
    ListenAddress { address: listener.address.clone(), is_tls: false }
}

/// The paths that the proxy needs after its start.
fn sandbox_paths(config: &Config, log: Option<&Option<PathBuf>>) -> Vec<(PathBuf, AccessRights)> {
    let log = log.and_then(Option::as_ref).map(|path| (path.clone(), AccessRights::Append));
    let sockets = config.listeners.iter().filter_map(|listener| match &listener.address {
        Address::Unix(path) => Some((path.clone(), AccessRights::Remove)),
        _ => None,
    });
    let file = config.config_file.clone().map(|path| (path, AccessRights::ReadAgain));
    log.into_iter().chain(sockets).chain(file).collect()
}
