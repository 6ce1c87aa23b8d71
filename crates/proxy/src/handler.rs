//! The proxy's part of an event loop.

use crate::config::Config;
use crate::connection::Connection;
use crate::loop_state::LoopState;
use haul_server::clock::Clock;
use haul_server::event_loop::{Action, Context, Handler, LoopSettings, Readiness, Side};
use haul_server::eviction::Activity;
use haul_server::listener::Accepted;
use haul_server::network::NetworkLimit;
use haul_server::offload::NoJob;
use haul_server::{ConnectionCounters, LogLimiter};
use std::io;
use std::sync::Arc;
use tracing::warn;

/// The handler of one event loop.
#[derive(Debug)]
pub struct ProxyHandler {
    state: LoopState,
    clock: Clock,
    dropped_lines: LogLimiter,
}

impl ProxyHandler {
    /// Creates the handler of an event loop.
    pub fn new(state: LoopState) -> Self {
        Self { state, clock: Clock::new(), dropped_lines: LogLimiter::default() }
    }
}

impl Handler for ProxyHandler {
    type Connection = Connection;
    type Job = NoJob;

    fn begin_turn(&mut self, clock: &Clock) {
        self.clock = *clock;
    }

    fn counters(&self) -> &ConnectionCounters {
        &self.state.counters.connections
    }

    fn accept(&mut self, accepted: Accepted, context: &Context<'_>) -> io::Result<Connection> {
        if !self.state.routes().access().admits(accepted.peer.map(|peer| peer.ip())) {
            self.state.counters.connections.refused.add(1);
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        context.register(&accepted.socket, Side::Client)?;
        let (now, started) = (self.clock.now(), self.clock.turn_started());
        Ok(Connection::new(accepted, now, started, &mut self.state, context))
    }

    fn receive(&mut self, connection: &mut Connection, event: Readiness) {
        connection.on_event(event);
    }

    fn drive(&mut self, connection: &mut Connection, context: &Context<'_>) -> Action<NoJob> {
        connection.drive(&mut self.state, context)
    }

    /// Established connections are not closed to make room.
    fn can_evict(&self) -> bool {
        false
    }

    fn activity(&self, _: &Connection) -> Activity {
        Activity::Working
    }

    fn expire(&mut self, connection: &mut Connection, context: &Context<'_>) -> Action<NoJob> {
        connection.expire(&mut self.state, context)
    }

    fn close(&mut self, connection: Connection) {
        connection.close(&mut self.state);
    }

    fn every_second(&mut self, now_seconds: u32) {
        let dropped = self.state.log.flush();
        if dropped > 0 && self.dropped_lines.allow(now_seconds) {
            warn!(dropped, "lines of the log that were dropped: it is not written fast enough");
        }
    }

    fn on_end(&mut self) {
        self.state.log.flush();
    }
}

/// The settings of the event loops.
pub fn loop_settings(config: &Config) -> LoopSettings {
    let limits = &config.limits;
    LoopSettings::default()
        .with_network_limit(limits.connections_per_address_max.map(NetworkLimit::new))
        .with_drain_timeout(limits.drain_timeout)
        .with_rate_bytes_per_second(limits.rate_bytes_per_second)
        .with_trusted_proxies(Arc::new(config.trusted_proxies.clone()))
}
