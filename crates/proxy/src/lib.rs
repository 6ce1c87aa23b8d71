//! A layer-4 proxy: connects each client to one of several upstream servers, and forwards bytes in
//! both directions by [`haul::Forwarder`], spliced or copied, whichever is cheaper.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use haul_proxy::{Config, GroupConfig, ListenerConfig};
//! let upstreams = ["10.0.0.5:5432".parse()?, "10.0.0.6:5432 backup".parse()?];
//! let mut config = Config::new([GroupConfig::new("db", upstreams)]);
//! config.listeners = vec![ListenerConfig::new("5432".parse()?, Some("db"))];
//! let server = haul_proxy::Server::new(&config)?;
//! let handle = server.handle(); // handle.drain() on another thread ends run()
//! Ok(server.run()?)
//! # }
//! ```
//!
//! The end of a stream is forwarded after all of its bytes, and the opposite direction continues
//! (half-close). A connection that fails on one side is reset on the other side, so that a stream
//! that was cut off never looks like a stream that ended.
//!
//! Limitations: TLS is forwarded unread but for its greeting, by which it can be routed; no UDP.

#![forbid(unsafe_code)]

pub mod greeting;

mod config;
mod connection;
mod error;
mod handler;
mod handover;
mod handover_message;
mod header;
mod host_instant;
mod keep_alive;
mod loop_state;
mod mailbox;
mod operate;
mod record;
mod server;
mod socket;
mod total_rate;
mod unconnected;
mod upstreams;
mod watch;

pub use config::balance::Algorithm;
pub use config::source::SourceChoice;
pub use config::upstream_address::{UpstreamAddress, UpstreamConfig};
pub use config::{
    AccessRules, CheckConfig, Config, DownPolicy, GroupConfig, Limits, ListenerConfig,
    ProcessConfig, ReportingConfig, Route, RouteCondition, ServerNamePattern, SocketConfig,
    Timeouts,
};
pub use error::Error;
pub use haul::ForwardMethod;
pub use haul_server::IpRange;
pub use haul_server::listener::ListenAddress;
pub use haul_server::proxy_protocol::{TrustedProxies, TrustedProxy};
pub use haul_server::{Address, Error as ServerError};
pub use header::{HeaderField, HeaderVersion};
pub use operate::control;
pub use operate::process::{ListenerStatus, ProcessStatus, ReloadStatus};
pub use operate::status::{
    CheckStatus, ConnectionCounts, ControlResponse, ShareStatus, UpstreamStatus,
};
pub use record::connection::{DirectionBytes, LoopTime, Parties, TcpStatistics, Traffic};
pub use record::log::{End, LogLine, LogTimes};
pub use record::status::{ConnectionStatus, Phase};
pub use server::{Handle, Server};
pub use upstreams::upstream::AdminState;
