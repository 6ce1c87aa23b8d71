//! The settings of an event loop.

use crate::admission::Admission;
use crate::admission::network::NetworkLimit;
use crate::proxy_protocol::TrustedProxies;
use std::sync::Arc;
use std::time::Duration;

/// The settings of one event loop.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoopSettings {
    /// How connections find places.
    pub admission: Admission,
    /// The limit on the connections of one client; `None` for none.
    pub network_limit: Option<Arc<NetworkLimit>>,
    /// The time that open messages have once the service drains.
    pub drain_timeout: Duration,
    /// The pacing rate of accepted connections; `None` for none.
    pub rate_bytes_per_second: Option<u64>,
    /// The proxies that name the client of each connection ([`crate::proxy_protocol`]).
    pub trusted_proxies: Arc<TrustedProxies>,
}

impl Default for LoopSettings {
    /// 65,536 connections, of one client or of many, 64 that wait, 30 s to drain, no pacing, no
    /// proxies.
    fn default() -> Self {
        Self {
            admission: Admission::default(),
            network_limit: None,
            drain_timeout: Duration::from_secs(30),
            rate_bytes_per_second: None,
            trusted_proxies: Arc::default(),
        }
    }
}

impl LoopSettings {
    /// Sets how connections find places.
    #[must_use]
    pub fn with_admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
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

    /// Sets the pacing rate of accepted connections.
    #[must_use]
    pub fn with_rate_bytes_per_second(mut self, rate_bytes_per_second: Option<u64>) -> Self {
        self.rate_bytes_per_second = rate_bytes_per_second;
        self
    }
}
