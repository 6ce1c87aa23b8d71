//! Serves files over HTTP/1.1 by the cheapest way the kernel offers.
//!
//! ```no_run
//! # fn main() -> Result<(), haul_serve::Error> {
//! let mut config = haul_serve::Config::new("/srv/www");
//! config.listen = vec!["8080".parse().expect("a port")];
//! let server = haul_serve::Server::new(&config)?;
//! let handle = server.handle(); // handle.drain() from another thread ends it
//! server.run()
//! # }
//! ```
//!
//! One event loop on each CPU, none of which waits for another or for the disk. A small file goes with its head in one call from
//! memory; a large one goes by [`haul::Sender::send_file`], and not through the program's memory.
//!
//! TLS is rustls', and the kernel's once both sides have agreed on keys, where it has kTLS.
//!
//! What it cannot do: HTTP/2, anything but files.

#![forbid(unsafe_code)]

mod body_receiver;
mod clock;
mod config;
mod connection;
mod counters;
mod error;
mod files;
mod handler;
mod jobs;
mod log;
mod metrics;
mod passwords;
mod response;
mod secrets;
mod server;

pub use config::{AccessLog, BasicAuth, Config, Content, ExtraFields, Limits, LogFormat, Tls};
pub use counters::{Counters, LATENCY_BOUNDS_US, TransportCounters};
pub use error::Error;
pub use haul_fs::Symlinks;
pub use haul_server::listener::ListenAddress;
pub use haul_server::{Address, Counter, Transport};
pub use server::{Handle, Server};
