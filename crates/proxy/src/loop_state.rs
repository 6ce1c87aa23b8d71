//! What the connections of one event loop share.

use crate::config::{Config, Limits};
use crate::header::HeaderVersion;
use crate::log::{Ending, Record};
use crate::metrics::LoopCounters;
use crate::routing::{CurrentTable, RoutingTable};
use haul::{ForwardPool, ForwardSettings};
use haul_server::LogLimiter;
use haul_server::connect::{self, PeerAddress};
use haul_server::event_loop::Context;
use haul_server::log_writer::LogBuffer;
use rustix::net::sockopt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// The interval of keep-alive probes that are not answered.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes after which a peer counts as gone.
const KEEPALIVE_PROBES: u32 = 6;

/// What the connections of one event loop share.
#[derive(Debug)]
pub struct LoopState {
    current: Arc<CurrentTable>,
    /// The table that was current in this generation.
    routes: Arc<RoutingTable>,
    generation: u64,
    pool: ForwardPool,
    limits: Limits,
    header_version: Option<HeaderVersion>,
    congestion: Option<String>,
    pub counters: Arc<LoopCounters>,
    pub log: LogBuffer,
    shortage: LogLimiter,
}

impl LoopState {
    /// Creates the state of an event loop.
    pub fn new(
        config: &Config,
        current: Arc<CurrentTable>,
        counters: Arc<LoopCounters>,
        log: LogBuffer,
    ) -> Result<Self, haul::Error> {
        /// A pipe is idle only between two steps, and a step uses at most two.
        const IDLE_PIPES_MAX: usize = 4;
        let limits = config.limits;
        let settings = ForwardSettings::default()
            .with_method(config.method)
            .with_idle_pipes_max(IDLE_PIPES_MAX)
            .with_idle_timeout(limits.idle_timeout)
            .with_half_closed_timeout(limits.half_closed_timeout);
        Ok(Self {
            generation: current.generation(),
            routes: current.get(),
            current,
            pool: ForwardPool::with_settings(settings)?,
            limits,
            header_version: config.send_header,
            congestion: config.congestion.clone(),
            counters,
            log,
            shortage: LogLimiter::default(),
        })
    }

    /// The routing table in force.
    pub fn routes(&mut self) -> &RoutingTable {
        let generation = self.current.generation();
        if generation != self.generation {
            self.routes = self.current.get();
            self.generation = generation;
        }
        &self.routes
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn pool(&self) -> ForwardPool {
        self.pool.clone()
    }

    pub fn header_version(&self) -> Option<HeaderVersion> {
        self.header_version
    }

    /// Starts a connection to an upstream.
    pub fn start_connection(&self, address: &PeerAddress) -> io::Result<OwnedFd> {
        let socket = connect::start(address, self.congestion.as_deref())?;
        if let Some(rate) = self.limits.rate_bytes_per_second {
            // A Unix socket has no rate.
            let _ = haul_sys::sockopt::set_max_pacing_rate(&socket, rate);
        }
        Ok(socket)
    }

    /// Sets the options of a connection's sockets. A Unix socket has none of them.
    pub fn set_options(&self, socket: &OwnedFd) {
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_keepidle(socket, self.limits.keepalive_time);
        let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES);
    }

    /// Reports that the host lacks something for a connection, at most once a minute.
    pub fn report_shortage(&mut self, error: &io::Error, context: &Context<'_>) {
        if self.shortage.allow(context.deadline(0)) {
            warn!(%error, "no connection to an upstream: {error}");
        }
    }

    /// Counts and logs the end of a connection.
    pub fn record_end(&mut self, record: &Record, ending: &Ending<'_>) {
        self.counters.record(ending.end, ending.report);
        if self.log.is_on() {
            record.write(&mut self.log, ending);
        }
    }
}
