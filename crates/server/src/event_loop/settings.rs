//! The settings of an event loop.

use crate::network::NetworkLimit;
use crate::placement::Placement;
use crate::proxy_protocol::TrustedProxies;
use std::sync::Arc;
use std::time::Duration;

/// The settings of one event loop.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoopSettings {
    /// The number of connections at a time. Beyond it, one of them is closed
    /// ([`crate::eviction`]). The last sixteenth is for networks that have fewer connections than
    /// that.
    pub connections_max: usize,
    /// The number of accepted connections that may wait until one is closed. Networks take turns.
    /// Beyond it, clients wait in the kernel's queue.
    pub waiting_max: usize,
    /// The limit on the connections of one client; `None` for none.
    pub network_limit: Option<Arc<NetworkLimit>>,
    /// The time that open messages have once the service drains.
    pub drain_timeout: Duration,
    /// The pacing rate of accepted connections; `None` for none.
    pub rate_bytes_per_second: Option<u64>,
    /// The proxies that name the client of each connection ([`crate::proxy_protocol`]).
    pub trusted_proxies: Arc<TrustedProxies>,
    /// Spreads connections evenly over the loops, and limits their number in place of
    /// `connections_max`; `None`: each loop keeps those that it accepts. The loops share it and
    /// their listening sockets ([`crate::listener::ListenSettings::is_shared`]). Beyond the limit
    /// clients wait: no connection is closed to make room.
    pub placement: Option<Arc<Placement>>,
}

impl Default for LoopSettings {
    /// 65,536 connections, of one client or of many, 64 that wait, 30 s to drain, no pacing, no
    /// proxies.
    fn default() -> Self {
        Self {
            connections_max: 65_536,
            waiting_max: 64,
            network_limit: None,
            drain_timeout: Duration::from_secs(30),
            rate_bytes_per_second: None,
            trusted_proxies: Arc::default(),
            placement: None,
        }
    }
}

impl LoopSettings {
    /// Sets the number of connections at a time.
    #[must_use]
    pub fn with_connections_max(mut self, connections_max: usize) -> Self {
        self.connections_max = connections_max;
        self
    }

    /// Sets the number of accepted connections that may wait; at least one can.
    #[must_use]
    pub fn with_waiting_max(mut self, waiting_max: usize) -> Self {
        self.waiting_max = waiting_max.max(1);
        self
    }

    /// Sets the limit on the connections of one client. The loops of a service share it.
    #[must_use]
    pub fn with_network_limit(mut self, network_limit: Option<Arc<NetworkLimit>>) -> Self {
        self.network_limit = network_limit;
        self
    }

    /// Sets the time that open messages have once the service drains.
    #[must_use]
    pub fn with_drain_timeout(mut self, drain_timeout: Duration) -> Self {
        self.drain_timeout = drain_timeout;
        self
    }

    /// Sets the proxies that name the client of each connection.
    #[must_use]
    pub fn with_trusted_proxies(mut self, trusted_proxies: Arc<TrustedProxies>) -> Self {
        self.trusted_proxies = trusted_proxies;
        self
    }

    /// Spreads connections evenly over the loops.
    #[must_use]
    pub fn with_placement(mut self, placement: Option<Arc<Placement>>) -> Self {
        self.placement = placement;
        self
    }

    /// Sets the pacing rate of accepted connections.
    #[must_use]
    pub fn with_rate_bytes_per_second(mut self, rate_bytes_per_second: Option<u64>) -> Self {
        self.rate_bytes_per_second = rate_bytes_per_second;
        self
    }
}
