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
//! TLS is rustls', in the program.
//!
//! What it cannot do: HTTP/2, TLS in the kernel, anything but files.

#![forbid(unsafe_code)]

mod answer;
mod body;
mod cache;
mod chunked;
mod clock;
mod conditional;
mod config;
mod confine;
mod connection;
mod context;
mod counters;
mod encoding;
mod error;
mod head;
mod helper;
mod listen;
mod listing;
mod log;
mod metrics;
mod object;
mod range;
mod receiving;
mod request;
mod resource;
mod root;
mod server;
mod service;
mod status;
mod stream;
mod target;
mod tls;
mod transmit;
mod upload;
mod wake;
mod worker;

pub use config::{AccessLog, Address, Config, Content, ExtraFields, Limits, LogFormat, Symlinks, Tls};
pub use counters::{Counter, Counters, LATENCY_CLASSES_US, Way, WayCounters};
pub use error::Error;
pub use server::{Handle, Server};

/// What hostile bytes meet first, for the fuzz targets.
#[doc(hidden)]
pub mod wire {
    pub use crate::chunked::{Chunked, Piece};
    pub use crate::conditional::{judge, range_applies};
    pub use crate::encoding::{Coding, choose};
    pub use crate::object::Validators;
    pub use crate::range::{Wanted, parse as parse_range};
    pub use crate::request::{BodyLength, Fields, Method, Parsed, Request, parse};
    pub use crate::target::{Target, encode_path};
}
