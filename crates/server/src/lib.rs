//! The parts that every network service of haul stands on.
//!
//! | part | module |
//! |---|---|
//! | event loop: accept, deadlines, turns, eviction, drain | [`event_loop`], [`runtime`] |
//! | listening sockets, systemd activation | [`listener`] |
//! | byte streams: plain, TLS, kTLS, as server or client | [`stream`], [`tls`], [`ktls`] |
//! | outgoing connections and name resolution | [`connect`], [`resolve`] |
//! | blocking calls on other threads | [`offload`] |
//! | log files, metrics | [`log_writer`], [`metrics`] |
//! | least privilege | [`privileges`], [`sandbox`], [`secrets`] |
//!
//! A service implements [`Handler`](event_loop::Handler) and hands one handler to each
//! [`EventLoop`](event_loop::EventLoop). `examples/echo.rs` is a complete service.
//!
//! The crate knows no protocol above TLS, except for the HTTP of its metrics endpoint, and serves
//! no files. It needs epoll and eventfd; Landlock and kTLS are used if the kernel has them.

#![forbid(unsafe_code)]

mod address;
pub mod admission;
pub mod clock;
pub mod command_socket;
pub mod connect;
mod control;
mod counter;
mod error;
pub mod event_loop;
pub mod fd_channel;
mod ip_range;
pub mod join;
pub mod ktls;
pub mod listener;
mod log_limiter;
pub mod log_writer;
pub mod metrics;
pub mod offload;
pub mod privileges;
pub mod proxy_protocol;
pub mod resolve;
pub mod runtime;
pub mod sandbox;
pub mod secrets;
mod sent;
pub mod start_check;
pub mod stream;
pub mod tls;
mod transport;
pub mod unix_address;
pub mod waker;
pub mod window_clamp;

pub use address::Address;
pub use control::Control;
pub use counter::{ConnectionCounters, SingleWriterCounter};
pub use error::Error;
pub use ip_range::IpRange;
pub use log_limiter::LogLimiter;
pub use sent::Sent;
pub use transport::Transport;
