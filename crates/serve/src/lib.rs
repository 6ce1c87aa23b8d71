//! A static file server: HTTP/1.1 over TCP, TLS and Unix sockets, by the cheapest send method that
//! the kernel offers.
//!
//! ```no_run
//! # fn main() -> Result<(), haul_serve::Error> {
//! let mut config = haul_serve::Config::new("/srv/www");
//! config.listen = vec!["8080".parse().expect("a port")];
//! let server = haul_serve::Server::new(&config)?;
//! let handle = server.handle(); // handle.drain() on another thread ends run()
//! server.run()
//! # }
//! ```
//!
//! There is one event loop on each CPU. No loop waits for another or for the disk. Small files are
//! sent from memory, with their head in one call. Large files are sent by
//! [`haul::Sender::send_file`], without passing through the program's memory.
//!
//! rustls negotiates TLS. If the kernel has kTLS, it encrypts once both sides have agreed on keys.
//!
//! Limitations: no HTTP/2, and nothing but files.

#![forbid(unsafe_code)]

mod body_receiver;
mod clock;
mod config;
mod connection;
mod control;
mod counters;
mod error;
mod events;
mod files;
mod handle;
mod handler;
mod jobs;
mod log;
mod metrics;
mod opened;
mod passwords;
mod pattern;
mod response;
mod secrets;
mod server;
mod status;
mod upload_file;

pub use config::{
    AccessLog, BasicAuth, Config, ContentRules, EntityTags, ExtraFields, FileUpdates, Limits,
    LogFormat, Tls,
};
pub use counters::{Counters, LATENCY_BOUNDS_US, TransportCounters};
pub use error::Error;
pub use files::listing::JsonEntry;
pub use handle::Handle;
pub use haul_fs::Symlinks;
pub use haul_server::IpRange;
pub use haul_server::listener::ListenAddress;
pub use haul_server::proxy_protocol::{TrustedProxies, TrustedProxy};
pub use haul_server::{Address, Error as ServerError, SingleWriterCounter, Transport};
pub use log::JsonLine;
pub use pattern::PatternError;
pub use server::Server;
pub use status::{ControlResponse, ServiceReload, ServiceStatus};
