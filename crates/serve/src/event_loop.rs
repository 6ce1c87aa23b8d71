//! Connections: accepted, read and written by one event loop for each CPU, which never waits for anything but events.

pub mod connection;
pub mod context;
pub mod helper;
pub mod kernel_tls;
pub mod listen;
pub mod receiving;
pub mod sending;
pub mod sent;
pub mod stream;
pub mod tls;
pub mod transmit;
pub mod wake;
pub mod worker;
