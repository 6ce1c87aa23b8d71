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
mod http;
mod join;
mod log;
mod metrics;
mod passwords;
mod response;
mod secrets;
mod server;

pub use config::{
    AccessLog, Address, BasicAuth, Config, Content, ExtraFields, Limits, LogFormat, Symlinks, Tls,
};
pub use counters::{Counter, Counters, LATENCY_CLASSES_US, Way, WayCounters};
pub use error::Error;
pub use server::{Handle, Server};

/// What hostile bytes meet first, for the fuzz targets.
#[doc(hidden)]
pub mod wire {
    pub use crate::http::chunked::{Chunked, Piece};
    pub use crate::http::conditional::{Validators, judge, range_applies};
    pub use crate::http::credentials::Credentials;
    pub use crate::http::encoding::{Coding, choose};
    pub use crate::http::range::{Wanted, parse as parse_range};
    pub use crate::http::request::{BodyLength, Fields, Method, Parsed, Request, parse};
    pub use crate::http::target::{Target, encode_path};
}
