//! Threads that watch the upstreams: active checks, and the addresses of names.

pub mod checks;
pub mod own_address;
pub mod resolver;
