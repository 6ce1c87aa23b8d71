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
//! (half-close). A connection that fails on one side is reset on the other: a stream that was cut
//! off never looks like one that has ended.
//!
//! Limitations: TLS is forwarded unread but for its greeting, by which it can be routed; no UDP.

#![forbid(unsafe_code)]

pub mod control;
pub mod greeting;

mod balance;
mod candidates;
mod checks;
mod closing;
mod config;
mod connection;
mod counters;
mod error;
mod handed;
mod handler;
mod handover;
mod handover_queue;
mod header;
mod host_instant;
mod keep_alive;
mod log;
mod loop_state;
mod mailbox;
mod metrics;
mod nearness;
mod own_address;
mod process;
mod reload;
mod reserved_slots;
mod resolver;
mod retired_upstreams;
mod route_order;
mod routing;
mod selection;
mod send_buffer;
mod server;
mod socket;
mod source;
mod status;
mod total_rate;
mod upstream;
mod upstream_address;
mod upstream_group;

pub use balance::Algorithm;
pub use config::{
    AccessRules, CheckConfig, Config, DownPolicy, GroupConfig, Limits, ListenerConfig, Route,
    RouteCondition, ServerNamePattern,
};
pub use error::Error;
pub use haul::ForwardMethod;
pub use haul_server::listener::ListenAddress;
pub use haul_server::network::IpRange;
pub use haul_server::proxy_protocol::{TrustedProxies, TrustedProxy};
pub use haul_server::{Address, Error as ServerError};
pub use header::{HeaderField, HeaderVersion};
pub use log::{DirectionBytes, End, LogLine, TcpStatistics};
pub use process::{ListenerStatus, ProcessStatus, ReloadStatus};
pub use server::{Handle, Server};
pub use source::SourceChoice;
pub use status::{CheckStatus, ConnectionStatus, ControlResponse, Phase, UpstreamStatus};
pub use upstream::Administration;
pub use upstream_address::{UpstreamAddress, UpstreamConfig};
