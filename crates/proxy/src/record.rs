//! What is recorded of connections: the log, the counters, and the list of open connections.

pub mod connection;
pub mod counters;
pub mod log;
pub mod status;
