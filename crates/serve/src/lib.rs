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

mod clock;
mod config;
mod confine;
mod counters;
mod error;
mod event_loop;
mod files;
mod join;
mod log;
mod metrics;
mod passwords;
mod response;
mod secrets;
mod server;

pub use config::{
    AccessLog, Address, BasicAuth, Config, Content, ExtraFields, Limits, LogFormat, Tls,
};
pub use counters::{Counter, Counters, LATENCY_CLASSES_US, Way, WayCounters};
pub use error::Error;
pub use haul_fs::Symlinks;
pub use server::{Handle, Server};
